"""A config, parsed once into one value: its language model, the family of that, a RopeSpec for each kind of layer."""

import difflib
import functools
from collections.abc import Container, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ropewalk.errors import require_choice, shown
from ropewalk.hub.configs.keys import Caller, ConfigSource, Keys, read_config
from ropewalk.hub.configs.language import LanguageModel, language_model, refuse_without_rope
from ropewalk.hub.configs.layers import parameters_by_layer
from ropewalk.hub.configs.limits import MOST_HEAD, MOST_SECTIONS
from ropewalk.hub.configs.pitfalls import emit
from ropewalk.hub.configs.rope_types import Around, rule_of, type_of
from ropewalk.hub.families.family import Family
from ropewalk.spec.axes import Axes
from ropewalk.spec.by_parts import POLICIES, Policy
from ropewalk.spec.rope import ANGLES, MOST_FEATURES, AnglePrecision, Pairing, RopeSpec
from ropewalk.spec.temperature import StepTemperature

__all__ = ["Config", "load_spec", "parse_config"]


@dataclass(frozen=True)
class Config:
    """A config, parsed.

    `data` is the whole of it and `language` the part that says how text is rotated. `layers` has a spec for each kind
    of layer, None where it does not rotate, under "" where all layers are alike. `pitfalls` are names and texts of what
    stacks read differently. `path` is where the config was read from, None if it was passed itself; `pairing` is what
    the caller specified, and errors are written in the words of `caller`.
    """

    data: dict[str, Any]
    language: LanguageModel
    layers: dict[str, RopeSpec | None]
    pitfalls: tuple[tuple[str, str], ...]
    path: Path | None
    pairing: str | None
    caller: Caller

    @property
    def model_type(self) -> str | None:
        """The model_type of the whole config, else that of its language model."""
        return Keys(self.data, caller=self.caller).text("model_type") or self.keys().text("model_type")

    def keys(self) -> Keys:
        """The keys of the language model, to read more of them."""
        return Keys(self.language.data, caller=self.caller)

    def with_language(self, keys: Mapping[str, object], drop: Container[str] = ()) -> dict[str, Any]:
        """The whole config, with these keys in the part of its language model and without those to drop."""

        def changed(part: dict[str, Any], place: tuple[str, ...]) -> dict[str, Any]:
            if place:
                return {key: changed(value, place[1:]) if key == place[0] else value for key, value in part.items()}
            return {key: value for key, value in part.items() if key not in drop} | dict(keys)

        return changed(self.data, self.language.place)


@dataclass(frozen=True)
class _Options:
    """What the caller specified, and whether the config is an object: transformers fills in what a file lacks."""

    pairing: str | None
    policy: Policy | None
    angles: AnglePrecision
    filled: bool


def load_spec(
    config: ConfigSource,
    *,
    pairing: Pairing | None = None,
    policy: Policy | None = None,
    angles: AnglePrecision = "float32",
) -> RopeSpec | dict[str, RopeSpec | None] | None:
    """The RopeSpec of a model, from its config.

    Keys may be those of transformers 4 (rope_scaling, rope_theta, rotary_pct, ..) or 5 (rope_parameters, flat or by
    layer type), with vLLM's extra ones. Of a composite model it is the language model.

    Args:
        config: The path of a config.json, of Mistral's or Meta's params.json or of a folder with one, a dict, or a
            config object of transformers.
        pairing: Which features form a pair. No config says it: it follows from model_type. A family that is not known
            needs it; beside a known one it must agree.
        policy: Whose reading of YaRN's amplitude holds; by default that of the family in transformers.
        angles: "float32" forms angles as transformers forms them, "exact" forms them exactly.

    Returns:
        The spec of all layers, None if they do not rotate; a dict with one per layer type where these differ.

    Raises:
        RopewalkError: A config that no model can have, or that does not say enough.

    Warns:
        RopeConfigWarning: What stacks read differently, by name.

    >>> spec = load_spec({"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "rope_theta": 500000.0})
    >>> spec.head_dim, spec.frequencies, spec.pairing
    (16, Plain(base=500000.0), 'half')
    """
    options = {"pairing": pairing, "policy": policy, "angles": angles}
    parsed = parse_config(config, Caller("load_spec"), **options, pairing_overrules=True)
    emit(parsed.pitfalls)
    return parsed.layers.get("", parsed.layers)


def parse_config(
    config: ConfigSource,
    caller: Caller,
    *,
    pairing: str | None = None,
    policy: Policy | None = None,
    angles: AnglePrecision = "float32",
    pairing_overrules: bool = False,
) -> Config:
    """Reads a config, once: everything else that hub does with a model starts from the result.

    Options are those of `load_spec`. A family that is known to have no RoPE is an error, unless a `pairing` is passed
    and `pairing_overrules` the list of such families.

    >>> parsed = parse_config({"model_type": "llama", "head_dim": 64}, Caller("load_spec"))
    >>> parsed.layers[""].frequencies, parsed.language.place
    (Plain(base=10000.0), ())
    """
    data = read_config(config, caller)
    if pairing is None or not pairing_overrules:
        refuse_without_rope(data, caller)
    pitfalls: list[tuple[str, str]] = []
    language = language_model(Keys(data, caller=caller, pitfalls=pitfalls), pairing)
    if policy is not None:
        require_choice(policy, POLICIES, asked=caller.asked_with("policy", policy))
    require_choice(angles, ANGLES, asked=caller.asked_with("angles", angles))
    options = _Options(pairing, policy, angles, filled=not isinstance(config, str | Path | Mapping))
    whole = Keys(language.data, caller=caller, pitfalls=pitfalls)
    whole.check_limits()
    layers = {
        name: None if parameters is None else _spec(whole, language, name, parameters, nested=nested, options=options)
        for name, (parameters, nested) in parameters_by_layer(whole, language.family).items()
    }
    _warn_of_unread_keys(whole, known=language.known)
    if None in layers.values():
        _warn_of_temperature(whole, language.family)
    path = Path(config) if isinstance(config, str | Path) else None
    return Config(data, language, layers, tuple(pitfalls), path, pairing, caller)


def _warn_of_temperature(whole: Keys, family: Family) -> None:
    """Llama 4's layers without rotation, of which a spec of None cannot say that they have a temperature."""
    if family.temperature != "without rotation" or not whole.flag("attn_temperature_tuning", True):
        return
    scale, step = whole.number("attn_scale", 0.1), whole.whole("floor_scale", 8192)
    whole.warn(
        "temperature-without-rotation",
        f"layers without rotation multiply their queries by StepTemperature({scale:g}, {step}, first=1): do that in"
        " the model, for a spec of None cannot say it",
    )


def _warn_of_unread_keys(whole: Keys, *, known: bool) -> None:
    """Keys that nobody reads, and that look like ones that matter: misspelt, or of a family that is not known."""
    for key in whole.unread():
        near = _nearest(key)
        strange = not known and ("rope" in key or "rotary" in key)
        if near or strange or key in ("rope_ratio", "use_dynamic_ntk", "use_logn_attn", "original_rope"):
            meant = f"; {near!r} is" if near else ", nor is anything like it"
            whole.warn("key-ignored", f"{key!r} is not read{meant}")


@functools.lru_cache(maxsize=1024)
def _nearest(key: str) -> str | None:
    """The key that this one may be a misspelling of. Configs have the same keys, over and over."""
    read = ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor", "rotary_pct", "rotary_dim")
    return next(iter(difflib.get_close_matches(key, read, n=1, cutoff=0.85)), None)


def _spec(
    whole: Keys, language: LanguageModel, layer: str, parameters: Keys, *, nested: bool, options: _Options
) -> RopeSpec:
    family = language.family
    head_dim, rotary_dim = _dims(whole, family, layer, parameters)
    longest = next((whole.whole(key) for key in family.longest if whole.has(key)), None)
    original = "original_max_position_embeddings"
    axes = _axes(whole, family, parameters, rotary_dim)
    around = Around(
        base=family.bases.get(layer, family.base),
        longest=parameters.whole("max_position_embeddings") if parameters.has("max_position_embeddings") else longest,
        original=whole.whole(original, at_least=2) if whole.has(original) else None,
        nested=nested,
        filled=options.filled,
        # vLLM computes latent attention as DeepSeek's code does, whatever its config calls the type.
        policy="deepseek" if family.latent else options.policy or family.policy,
        alpha=family.reads_alpha,
        rotary_dim=rotary_dim if axes is None else axes.dim,
    )
    rule = rule_of(parameters, around)
    temperature = None
    if family.temperature == "everywhere" and parameters.has("llama_4_scaling_beta"):
        step = parameters.whole(original, at_least=1)
        beta = parameters.number("llama_4_scaling_beta", at_least=0)
        temperature = StepTemperature(beta, step) if beta else None
    if axes is not None and type_of(parameters) == "yarn":
        text = "vLLM computes YaRN's ramp from four times the original length where there are axes"
        whole.warn("vllm-mrope-yarn", text)
    return RopeSpec(
        head_dim,
        rule,
        rotary_dim=rotary_dim,
        pairing=_pairing(whole, language, options.pairing),
        rotary_slice=family.rotary_slice,
        axes=axes,
        sign=family.sign,
        query_temperature=temperature,
        angles=options.angles,
    )


def _pairing(whole: Keys, language: LanguageModel, pairing: str | None) -> Pairing:
    """The pairing of the weights: that of a conversion, of a flag of the config, or of the family."""
    if language.record is not None:
        return language.record.pairing
    family, caller = language.family, whole.caller
    stated = family.pairing
    if family.interleave_key is not None:
        stated = "interleaved" if whole.flag(family.interleave_key, stated == "interleaved") else "half"
    if pairing is not None and pairing != stated:
        raise whole.error(
            family.interleave_key or "model_type",
            f"{caller.option('pairing', stated)}, which the config says",
            caller.option("pairing", pairing),
            caller.leave_out("pairing"),
        )
    return stated


def _dims(whole: Keys, family: Family, layer: str, parameters: Keys) -> tuple[int, int]:
    """head_dim and rotary_dim."""
    if family.latent:
        # Multi-head latent attention: features that do not turn, then features that do.
        still, rotated_dim = whole.whole("qk_nope_head_dim", at_least=0), whole.whole("qk_rope_head_dim")
        return still + rotated_dim, rotated_dim
    head_dim = _head_dim_of_layer(whole, family, layer)
    if head_dim is None:
        head_dim = next((whole.whole(key) for key in family.head_dim if whole.has(key)), None)
    if head_dim is None:
        head_dim = _derived_head_dim(whole, family)
        if whole.stands("head_dim") and type_of(parameters) in ("dynamic", "yarn", "longrope"):
            whole.warn(
                "head-dim-null", f"head_dim is null, which some versions of transformers cannot read; here {head_dim}"
            )
    return head_dim, _rotary_dim(whole, family, parameters, head_dim)


def _derived_head_dim(whole: Keys, family: Family) -> int:
    """The head_dim of a config that names none: that of the class, or the width of the model over its heads."""
    if family.usual_head_dim is not None and not whole.stands("head_dim"):
        return family.usual_head_dim
    width, heads = (
        next((whole.whole(key) for key in keys if whole.has(key)), None) for keys in (family.width, family.heads)
    )
    if width is None or heads is None:
        missing = family.width[0] if width is None else family.heads[0]
        raise whole.error(
            missing,
            "a whole number",
            "nothing; files leave out what is the default of a class in transformers",
            f"set head_dim, or {missing}, or {whole.caller.pass_whole_config}",
        )
    if width // heads > MOST_HEAD:
        expected, do = f"a head_dim of at most {MOST_HEAD}", "set both as the model was trained"
        raise whole.error(family.width[0], expected, f"{width} features in {heads} heads", do)
    return width // heads


def _head_dim_of_layer(whole: Keys, family: Family, layer: str) -> int | None:
    """The head_dim that a layer type has for itself: under a key of its own, or in per_layer_config."""
    if layer not in family.head_dims:
        return None
    key, usual = family.head_dims[layer]
    if whole.has(key):
        return whole.whole(key)
    per_layer = whole.under("per_layer_config")
    types = whole.raw("layer_types") or []
    for name in (layer, *(str(i) for i, kind in enumerate(types) if kind == layer)):
        overrides = per_layer.under(name)
        if overrides.has("head_dim"):
            return overrides.whole("head_dim")
    return usual


def _rotary_dim(whole: Keys, family: Family, parameters: Keys, head_dim: int) -> int:
    said: dict[str, int] = {}
    if family.rotary_dim is not None:
        return family.rotary_dim(head_dim)
    for keys in (parameters, whole):
        for key in ("rotary_dim", "rope_dim"):
            if keys.has(key) and key in family.unread:
                whole.warn(
                    "key-ignored", f"{keys.name(key)!r} is not read by this family, which reads partial_rotary_factor"
                )
            elif keys.has(key) and (family.reads_share or family.usual_rotary_dim or type_of(parameters) != "default"):
                said[keys.name(key)] = keys.whole(key)
            elif keys.has(key) and keys.whole(key) != head_dim:
                whole.warn("key-ignored", f"{keys.name(key)!r} is not read by this family, which turns whole heads")
        for key in ("partial_rotary_factor", "rotary_pct", "rotary_emb_fraction", "rope_pct"):
            if not keys.has(key) or (key == "partial_rotary_factor" and type_of(parameters) == "proportional"):
                continue
            if not family.reads_share and type_of(parameters) == "default":
                if keys.number(key) != 1:
                    whole.warn("key-ignored", f"{keys.name(key)!r} is not read by this family, which turns whole heads")
            else:
                share = keys.number(key, at_least=0)
                if share > 1:
                    raise whole.error(keys.name(key), "a share from 0 to 1", f"{share:g}", "rotary_dim is a number")
                said[keys.name(key)] = int(head_dim * share)
                if abs(head_dim * share - round(head_dim * share)) > 1e-6:
                    whole.warn(
                        "partial-truncated",
                        f"{keys.name(key)!r} = {share:g} of head_dim {head_dim} is {head_dim * share:g}, which"
                        f" transformers cuts off to {int(head_dim * share)}",
                    )
    if len(set(said.values())) > 1:
        got = ", ".join(f"{key} ({value} features)" for key, value in said.items())
        raise whole.error(next(iter(said)), "one number of features that turn", got, "remove all but one")
    usual = min(head_dim, family.usual_rotary_dim or int(head_dim * family.share))
    rotary_dim = next(iter(said.values()), usual)
    if not 2 <= rotary_dim <= min(head_dim, MOST_FEATURES) or rotary_dim % 2:
        key = next(iter(said), "partial_rotary_factor")
        expected = f"an even number of features that turn, from 2 to head_dim = {head_dim}"
        raise whole.error(key, expected, f"{rotary_dim}", "set it as the model was trained")
    return rotary_dim


def _axes(whole: Keys, family: Family, parameters: Keys, rotary_dim: int) -> Axes | None:
    """Which position turns which pair, where tokens have several."""
    key = "xdrope_section" if parameters.has("xdrope_section") else "mrope_section"
    if parameters.text("rope_type") == "openpangu":
        return Axes.rarest_first(_sections(parameters, key, rotary_dim))
    if family.axes is None:
        if parameters.has(key):
            raise whole.error(
                parameters.name(key),
                "a family that is known to have several positions per token",
                f"{shown(parameters.raw(key))} for model_type {whole.raw('model_type')!r}",
                "make the spec yourself: RopeSpec(..., axes=Axes.chunked(sections))",
            )
        return None
    if not isinstance(family.axes, str):
        return family.axes(rotary_dim)
    if not parameters.has(key) and family.sections is None:
        return None
    dealt = family.axes == "interleaved" or parameters.flag("mrope_interleaved", False)
    sections = _sections(parameters, key, rotary_dim, family.sections, fill=not dealt)
    if dealt:
        return Axes.interleaved(sections, rotary_dim // 2)
    return Axes.ernie(sections) if family.axes == "ernie" else Axes.chunked(sections)


def _sections(
    parameters: Keys, key: str, rotary_dim: int, usual: tuple[int, ...] | None = None, *, fill: bool = True
) -> list[int]:
    """How many pairs each axis has; `usual` where the config has no sections. Those that are dealt out need not `fill`
    the pairs: the first axis has the rest."""
    pairs = rotary_dim // 2
    numbers = list(usual) if usual is not None and not parameters.has(key) else parameters.numbers(key)
    sections = [int(size) for size in numbers]
    whole = sections == numbers and all(0 <= size <= MOST_HEAD for size in sections) and any(sections)
    if not whole or len(sections) > MOST_SECTIONS or (fill and sum(sections) != pairs):
        raise parameters.error(
            parameters.name(key),
            f"at most {MOST_SECTIONS} whole numbers that sum to {pairs}, half of the features that turn",
            shown(numbers),
            "copy the sections from the model",
        )
    return sections
