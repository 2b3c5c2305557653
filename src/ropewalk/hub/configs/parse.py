"""Parses a config once: its language model, the family of the language model, and one RopeSpec per layer type."""

import difflib
import functools
from collections.abc import Container, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ropewalk.errors import require_choice, shown
from ropewalk.hub.configs.keys import Caller, ConfigSource, Keys, read_config
from ropewalk.hub.configs.language import LanguageModel, language_model, require_rope
from ropewalk.hub.configs.layers import parameters_by_layer
from ropewalk.hub.configs.limits import MOST_HEAD, MOST_SECTIONS
from ropewalk.hub.configs.pitfalls import emit
from ropewalk.hub.configs.rope_types import RuleContext, rule_of, type_of
from ropewalk.hub.families.family import Family
from ropewalk.signatures import checks_names
from ropewalk.spec.axes import Axes
from ropewalk.spec.by_parts import POLICIES, Policy
from ropewalk.spec.rope import ANGLES, MOST_FEATURES, AnglePrecision, Pairing, RopeSpec
from ropewalk.spec.temperature import StepTemperature

__all__ = ["Config", "load_spec", "parse_config"]

_WHOLE_HEADS = "all features of a head are rotated"


@dataclass(frozen=True)
class Config:
    """A parsed config.

    Attributes:
        data: The whole config.
        language: Its language model.
        layers: One spec per layer type, or None for layers that do not rotate. The key is "" if all layers have the
            same rotation.
        pitfalls: One (name, text) per pitfall.
        path: The path that the config was read from. None if it was passed as data.
        pairing: The pairing passed by the caller.
        caller: The function that errors name.
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
        """The model_type of the whole config, or of its language model if the config has none."""
        return Keys(self.data, caller=self.caller).text("model_type") or self.keys().text("model_type")

    def keys(self) -> Keys:
        """Return the keys of the language model."""
        return Keys(self.language.data, caller=self.caller)

    def with_language(self, keys: Mapping[str, object], drop: Container[str] = ()) -> dict[str, Any]:
        """Return the whole config with `keys` set in its language model and the keys of `drop` removed there."""

        def changed(part: dict[str, Any], place: tuple[str, ...]) -> dict[str, Any]:
            if place:
                return {key: changed(value, place[1:]) if key == place[0] else value for key, value in part.items()}
            return {key: value for key, value in part.items() if key not in drop} | dict(keys)

        return changed(self.data, self.language.place)


@dataclass(frozen=True)
class _Options:
    """The options of the caller. `filled`: the config is an object in which transformers filled in missing keys."""

    pairing: str | None
    policy: Policy | None
    angles: AnglePrecision
    filled: bool


@checks_names
def load_spec(
    config: ConfigSource,
    *,
    pairing: Pairing | None = None,
    policy: Policy | None = None,
    angles: AnglePrecision = "float32",
) -> RopeSpec | dict[str, RopeSpec | None] | None:
    """Return the RopeSpec of a model from its config.

    The keys of transformers 4 (rope_scaling, rope_theta, rotary_pct, ...), those of transformers 5 (rope_parameters,
    flat or per layer type) and the additional keys of vLLM are supported. For a composite model, such as one with a
    vision tower, the spec of the language model is returned.

    Args:
        config: The path of a config.json, of a params.json by Mistral or Meta, or of a folder that contains one of
            them; a dict; or a config object of transformers.
        pairing: Which features form a pair: "interleaved" or "half". Configs do not specify it, so it follows from
            model_type. Required for an unknown model_type. For a known one it must agree with it.
        policy: Which implementation of YaRN's amplitude to follow: "transformers", "deepseek" or "vllm". Defaults to
            that of the model's code in transformers.
        angles: "float32" computes angles in the same order of operations as transformers: in float32, or exactly
            in a family where transformers does (RoFormer). "exact" computes them exactly.

    Returns:
        The spec of all layers, or None if no layer rotates. If layer types differ, a dict with one spec (or None) per
        layer type.

    Raises:
        RopewalkError: If the config is invalid, or does not contain enough information.

    Warns:
        RopeConfigWarning: If different stacks read the config differently. Its `name` identifies the pitfall.

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
    """Parse a config. All functions of `ropewalk.hub` start from the result.

    Args:
        config: A path, a dict or a config object, as in `load_spec`.
        caller: The function that errors name.
        pairing: As in `load_spec`.
        policy: As in `load_spec`.
        angles: As in `load_spec`.
        pairing_overrules: Whether a family that is known to have no RoPE is accepted if `pairing` is passed.

    Returns:
        The parsed config. Its pitfalls are not emitted as warnings.

    Raises:
        RopewalkError: If the config is invalid, does not contain enough information, or belongs to a family without
            RoPE.

    >>> parsed = parse_config({"model_type": "llama", "head_dim": 64}, Caller("load_spec"))
    >>> parsed.layers[""].frequencies, parsed.language.place
    (Plain(base=10000.0), ())
    """
    data = read_config(config, caller)
    if pairing is None or not pairing_overrules:
        require_rope(data, caller)
    pitfalls: list[tuple[str, str]] = []
    language = language_model(Keys(data, caller=caller, pitfalls=pitfalls), pairing)
    if policy is not None:
        require_choice(policy, POLICIES, asked=caller.asked_with("policy", policy))
    require_choice(angles, ANGLES, asked=caller.asked_with("angles", angles))
    options = _Options(pairing, policy, angles, filled=not isinstance(config, str | Path | Mapping))
    model_keys = Keys(language.data, caller=caller, pitfalls=pitfalls)
    model_keys.check_limits()
    layers = {
        name: None
        if parameters is None
        else _spec(model_keys, language, name, parameters, nested=nested, options=options)
        for name, (parameters, nested) in parameters_by_layer(model_keys, language.family).items()
    }
    _warn_of_unread_keys(model_keys, known=language.known)
    if None in layers.values():
        _warn_of_temperature(model_keys, language.family)
    path = Path(config) if isinstance(config, str | Path) else None
    return Config(data, language, layers, tuple(pitfalls), path, pairing, caller)


def _warn_of_temperature(model_keys: Keys, family: Family) -> None:
    """Warn if layers without rotation have a temperature, as in Llama 4. Their spec is None and cannot contain it."""
    if family.temperature != "without rotation" or not model_keys.flag("attn_temperature_tuning", True):
        return
    scale, step = model_keys.number("attn_scale", 0.1), model_keys.integer("floor_scale", 8192)
    model_keys.warn(
        "temperature-without-rotation",
        f"layers without rotation multiply their queries by StepTemperature({scale:g}, {step}, first=1). Their spec is"
        " None and does not contain it: apply it in the model code",
    )


def _warn_of_unread_keys(model_keys: Keys, *, known: bool) -> None:
    """Warn about unread keys that look relevant: misspelled ones, and those of an unknown family."""
    for key in model_keys.unread():
        near = _nearest(key)
        unfamiliar = not known and ("rope" in key or "rotary" in key)
        if near or unfamiliar or key in ("rope_ratio", "use_dynamic_ntk", "use_logn_attn", "original_rope"):
            hint = f"; did you mean {near!r}?" if near else ", and no similar key is"
            model_keys.warn("key-ignored", f"{key!r} is not read{hint}")


@functools.lru_cache(maxsize=1024)
def _nearest(key: str) -> str | None:
    """Return the key that this one may be a misspelling of. Cached: most configs contain the same keys."""
    read = ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor", "rotary_pct", "rotary_dim")
    return next(iter(difflib.get_close_matches(key, read, n=1, cutoff=0.85)), None)


def _spec(
    model_keys: Keys, language: LanguageModel, layer: str, parameters: Keys, *, nested: bool, options: _Options
) -> RopeSpec:
    family = language.family
    head_dim, rotary_dim = _dims(model_keys, family, layer, parameters)
    longest = next((model_keys.integer(key) for key in family.longest if model_keys.has(key)), None)
    original = "original_max_position_embeddings"
    axes = _axes(model_keys, family, parameters, rotary_dim)
    context = RuleContext(
        base=family.bases.get(layer, family.base),
        longest=parameters.integer("max_position_embeddings") if parameters.has("max_position_embeddings") else longest,
        original=model_keys.integer(original, at_least=2) if model_keys.has(original) else None,
        nested=nested,
        filled=options.filled,
        # vLLM uses DeepSeek's formula for latent attention, independent of the rope type in the config.
        policy="deepseek" if family.latent else options.policy or family.policy,
        alpha=family.reads_alpha,
        rotary_dim=rotary_dim if axes is None else axes.dim,
    )
    rule = rule_of(parameters, context)
    temperature = None
    if family.temperature == "everywhere" and parameters.has("llama_4_scaling_beta"):
        step = parameters.integer(original, at_least=1)
        beta = parameters.number("llama_4_scaling_beta", at_least=0)
        temperature = StepTemperature(beta, step) if beta else None
    if axes is not None and type_of(parameters) == "yarn":
        text = "vLLM computes YaRN's ramp from four times the original length if tokens have several positions"
        model_keys.warn("vllm-mrope-yarn", text)
    return RopeSpec(
        head_dim,
        rule,
        rotary_dim=rotary_dim,
        pairing=_pairing(model_keys, language, options.pairing),
        rotary_slice=family.rotary_slice,
        axes=axes,
        sign=family.sign,
        query_temperature=temperature,
        angles="exact" if family.exact_angles else options.angles,
    )


def _pairing(model_keys: Keys, language: LanguageModel, pairing: str | None) -> Pairing:
    """Return the pairing of the weights: that of a conversion, of a flag in the config, or of the family."""
    if language.record is not None:
        return language.record.pairing
    family, caller = language.family, model_keys.caller
    configured = family.pairing
    if family.interleave_key is not None:
        configured = "interleaved" if model_keys.flag(family.interleave_key, configured == "interleaved") else "half"
    if pairing is not None and pairing != configured:
        raise model_keys.error(
            family.interleave_key or "model_type",
            f"{caller.option('pairing', configured)}, as in the config",
            caller.option("pairing", pairing),
            caller.leave_out("pairing"),
        )
    return configured


def _dims(model_keys: Keys, family: Family, layer: str, parameters: Keys) -> tuple[int, int]:
    """Return head_dim and rotary_dim."""
    if family.latent:
        # Multi-head latent attention: features that are not rotated, then features that are.
        plain_dim, rotated_dim = (
            model_keys.integer("qk_nope_head_dim", at_least=0),
            model_keys.integer("qk_rope_head_dim"),
        )
        return plain_dim + rotated_dim, rotated_dim
    head_dim = _head_dim_of_layer(model_keys, family, layer)
    if head_dim is None:
        head_dim = next((model_keys.integer(key) for key in family.head_dim if model_keys.has(key)), None)
    if head_dim is None:
        head_dim = _derived_head_dim(model_keys, family)
        if model_keys.contains("head_dim") and type_of(parameters) in ("dynamic", "yarn", "longrope"):
            model_keys.warn(
                "head-dim-null", f"head_dim is null, which some versions of transformers reject; {head_dim} is used"
            )
    return head_dim, _rotary_dim(model_keys, family, parameters, head_dim)


def _derived_head_dim(model_keys: Keys, family: Family) -> int:
    """Return the head_dim of a config without one: the default of the class, or hidden_size / num_attention_heads."""
    if family.usual_head_dim is not None and not model_keys.contains("head_dim"):
        return family.usual_head_dim
    width, heads = (
        next((model_keys.integer(key) for key in keys if model_keys.has(key)), None)
        for keys in (family.width, family.heads)
    )
    if width is None or heads is None:
        missing = family.width[0] if width is None else family.heads[0]
        raise model_keys.error(
            missing,
            "an integer; files may omit keys that have a default in transformers",
            "no such key",
            f"set head_dim, or {missing}, or {model_keys.caller.pass_whole_config}",
        )
    if width // heads > MOST_HEAD:
        expected = f"a head_dim of at most {MOST_HEAD}"
        do = f"set {family.width[0]} and {family.heads[0]} as the model was trained"
        raise model_keys.error(family.width[0], expected, f"{width} features in {heads} heads", do)
    return width // heads


def _head_dim_of_layer(model_keys: Keys, family: Family, layer: str) -> int | None:
    """Return the head_dim of one layer type, if it differs: from a separate key, or from per_layer_config."""
    if layer not in family.head_dims:
        return None
    key, usual = family.head_dims[layer]
    if model_keys.has(key):
        return model_keys.integer(key)
    per_layer = model_keys.under("per_layer_config")
    types = model_keys.raw("layer_types") or []
    for name in (layer, *(str(i) for i, kind in enumerate(types) if kind == layer)):
        overrides = per_layer.under(name)
        if overrides.has("head_dim"):
            return overrides.integer("head_dim")
    return usual


def _rotary_dim(model_keys: Keys, family: Family, parameters: Keys, head_dim: int) -> int:
    configured: dict[str, int] = {}
    if family.rotary_dim is not None:
        return family.rotary_dim(head_dim)
    for keys in (parameters, model_keys):
        for key in ("rotary_dim", "rope_dim"):
            if keys.has(key) and key in family.unread:
                model_keys.warn(
                    "key-ignored", f"{keys.name(key)!r} is not read for this family; partial_rotary_factor is"
                )
            elif keys.has(key) and (family.reads_share or family.usual_rotary_dim or type_of(parameters) != "default"):
                configured[keys.name(key)] = keys.integer(key)
            elif keys.has(key) and keys.integer(key) != head_dim:
                model_keys.warn("key-ignored", f"{keys.name(key)!r} is not read for this family: {_WHOLE_HEADS}")
        for key in ("partial_rotary_factor", "rotary_pct", "rotary_emb_fraction", "rope_pct"):
            if not keys.has(key) or (key == "partial_rotary_factor" and type_of(parameters) == "proportional"):
                continue
            if not family.reads_share and type_of(parameters) == "default":
                if keys.number(key) != 1:
                    model_keys.warn("key-ignored", f"{keys.name(key)!r} is not read for this family: {_WHOLE_HEADS}")
            else:
                share = keys.number(key, at_least=0)
                if share > 1:
                    do = "set the share of the features of a head that are rotated, or use rotary_dim for their number"
                    raise model_keys.error(keys.name(key), "a share from 0 to 1", f"{share:g}", do)
                configured[keys.name(key)] = int(head_dim * share)
                if abs(head_dim * share - round(head_dim * share)) > 1e-6:
                    model_keys.warn(
                        "partial-truncated",
                        f"{keys.name(key)!r} = {share:g} times head_dim = {head_dim} is {head_dim * share:g};"
                        f" transformers rounds it down to {int(head_dim * share)}",
                    )
    if len(set(configured.values())) > 1:
        got = ", ".join(f"{key} ({value} features)" for key, value in configured.items())
        expected = "one number of rotated features"
        raise model_keys.error(next(iter(configured)), expected, got, "remove all keys but one")
    usual = min(head_dim, family.usual_rotary_dim or int(head_dim * family.share))
    rotary_dim = next(iter(configured.values()), usual)
    if not 2 <= rotary_dim <= min(head_dim, MOST_FEATURES) or rotary_dim % 2:
        key = next(iter(configured), "partial_rotary_factor")
        expected = f"an even number of rotated features, from 2 to head_dim = {head_dim}"
        raise model_keys.error(key, expected, f"{rotary_dim}", f"set {key} to the value the model was trained with")
    return rotary_dim


def _axes(model_keys: Keys, family: Family, parameters: Keys, rotary_dim: int) -> Axes | None:
    """Return which position rotates which pair, or None if tokens have one position."""
    key = "xdrope_section" if parameters.has("xdrope_section") else "mrope_section"
    if parameters.text("rope_type") == "openpangu":
        return Axes.rarest_first(_sections(parameters, key, rotary_dim))
    if family.axes is None:
        if parameters.has(key):
            raise model_keys.error(
                parameters.name(key),
                "a model_type that ropewalk knows to have several positions per token",
                f"{shown(parameters.raw(key))} for model_type {model_keys.raw('model_type')!r}",
                "build the spec in Python: RopeSpec(..., axes=Axes.chunked(sections))",
            )
        return None
    if not isinstance(family.axes, str):
        return family.axes(rotary_dim)
    if not parameters.has(key) and family.sections is None:
        return None
    interleaved = family.axes == "interleaved" or parameters.flag("mrope_interleaved", False)
    sections = _sections(parameters, key, rotary_dim, family.sections, fill=not interleaved)
    if interleaved:
        return Axes.interleaved(sections, rotary_dim // 2)
    return Axes.ernie(sections) if family.axes == "ernie" else Axes.chunked(sections)


def _sections(
    parameters: Keys, key: str, rotary_dim: int, default: tuple[int, ...] | None = None, *, fill: bool = True
) -> list[int]:
    """Return the number of pairs per axis, or `default` if the config has no sections.

    With `fill` the sections must sum to the number of pairs. Otherwise the first axis has the remaining pairs.
    """
    pairs = rotary_dim // 2
    numbers = list(default) if default is not None and not parameters.has(key) else parameters.numbers(key)
    sections = [int(size) for size in numbers]
    valid = sections == numbers and all(0 <= size <= MOST_HEAD for size in sections) and any(sections)
    if not valid or len(sections) > MOST_SECTIONS or (fill and sum(sections) != pairs):
        raise parameters.error(
            parameters.name(key),
            f"at most {MOST_SECTIONS} integers that sum to {pairs}, the number of rotated pairs",
            shown(numbers),
            "copy the sections from the original config",
        )
    return sections
