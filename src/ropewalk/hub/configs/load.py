"""load_spec: the config of a model, read into the RopeSpec that its attention computes."""

import difflib
from pathlib import Path
from typing import Any

from ropewalk.errors import require_choice, shown
from ropewalk.hub.configs.language import language_model
from ropewalk.hub.configs.layers import parameters_by_layer
from ropewalk.hub.configs.pitfalls import warn
from ropewalk.hub.configs.read import Keys, config_error, read_config
from ropewalk.hub.configs.rules import Around, rule_of, type_of
from ropewalk.hub.families.no_rope import refuse_without_rope
from ropewalk.hub.families.table import FAMILIES, Family
from ropewalk.spec.axes import Axes
from ropewalk.spec.by_parts import POLICIES
from ropewalk.spec.rope import MOST_FEATURES, RopeSpec
from ropewalk.spec.temperature import StepTemperature

__all__ = ["load_spec"]


def load_spec(
    config: str | Path | dict[str, Any] | Any,
    *,
    pairing: str | None = None,
    policy: str | None = None,
    angles: str = "float32",
) -> Any:
    """The RopeSpec of a model, from its config; a dict with one a layer type where they differ, None for no rotation.

    `config` is the path of a config.json, of Mistral's params.json or of a folder with one, a dict, or a config object
    of transformers. Keys may be those of transformers 4 (rope_scaling, rope_theta, rotary_pct, ..) or 5
    (rope_parameters, flat or by layer type), with vLLM's extra ones. Of a composite model it is the language model.

    No config says which features form a pair: that follows from model_type. For a family that is not known `pairing`
    must say it; beside a known one it must agree. `policy` is whose reading of YaRN's amplitude holds: "transformers",
    "deepseek" or "vllm"; by default that of the family in transformers. Angles are formed in float32 as transformers
    forms them; angles="exact" forms them exactly.

    What cannot be is an error. What stacks read differently is a RopeConfigWarning with a name.

    >>> spec = load_spec({"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "rope_theta": 500000.0})
    >>> spec.head_dim, spec.frequencies, spec.pairing
    (16, Plain(base=500000.0), 'half')
    """
    data = read_config(config)
    if pairing is None:
        refuse_without_rope(data)
    data, family = language_model(data, pairing)
    if policy is not None:
        require_choice(policy, POLICIES, asked="load_spec(policy=...)")
    # A config object has gone through transformers, which fills in what a file lacks.
    whole, filled = Keys(data), not isinstance(config, str | Path | dict)
    layers = parameters_by_layer(whole, family)
    options = {"filled": filled, "policy": policy, "angles": angles, "pairing": pairing}
    specs = {
        name: None if parameters is None else _spec(whole, family, name, parameters, nested=nested, **options)
        for name, (parameters, nested) in layers.items()
    }
    _warn_of_near_misses(whole, known=any(family is one for one in FAMILIES.values()))
    tempered = family.temperature == "without rotation" and whole.flag("attn_temperature_tuning", True)
    if tempered and None in specs.values():
        scale, step = whole.number("attn_scale", 0.1), whole.whole("floor_scale", 8192)
        warn(
            "temperature-without-rotation",
            f"layers without rotation multiply their queries by StepTemperature({scale:g}, {step}, first=1): do that in"
            " the model, for a spec of None cannot say it",
        )
    return specs.get("", specs)


def _warn_of_near_misses(whole: Keys, *, known: bool) -> None:
    """Keys that nobody reads, and that look like ones that matter: misspelt, or of a family that is not known."""
    read = ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor", "rotary_pct", "rotary_dim")
    for key in whole.unread():
        near = difflib.get_close_matches(key, read, n=1, cutoff=0.85)
        strange = not known and ("rope" in key or "rotary" in key)
        if near or strange or key in ("rope_ratio", "use_dynamic_ntk", "use_logn_attn", "original_rope"):
            meant = f"; {near[0]!r} is" if near else ", nor is anything like it"
            warn("key-ignored", f"{key!r} is not read{meant}")


def _spec(
    whole: Keys,
    family: Family,
    layer: str,
    parameters: Keys,
    *,
    nested: bool,
    filled: bool,
    policy: str | None,
    angles: str,
    pairing: str | None,
) -> RopeSpec:
    head_dim, rotary_dim = _dims(whole, family, layer, parameters)
    longest = next((whole.whole(key) for key in family.longest if whole.has(key)), None)
    original = "original_max_position_embeddings"
    axes = _axes(whole, family, parameters, rotary_dim)
    around = Around(
        base=family.base_of(layer),
        longest=parameters.whole("max_position_embeddings") if parameters.has("max_position_embeddings") else longest,
        original=whole.whole(original, at_least=2) if whole.has(original) else None,
        nested=nested,
        filled=filled,
        # vLLM computes latent attention as DeepSeek's code does, whatever its config calls the type.
        policy="deepseek" if family.latent else policy or family.policy,
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
        warn("vllm-mrope-yarn", "vLLM computes YaRN's ramp from four times the original length where there are axes")
    return RopeSpec(
        head_dim,
        rule,
        rotary_dim=rotary_dim,
        pairing=_agreed(family.pairing_of(whole), pairing, family),
        rotary_slice=family.rotary_slice,
        axes=axes,
        sign=family.sign,
        query_temperature=temperature,
        angles=angles,
    )


def _agreed(own: str, pairing: str | None, family: Family) -> str:
    """The pairing of the family, if the caller has said no other."""
    if pairing is not None and pairing != own:
        raise config_error(
            family.interleave_key or "model_type",
            f"pairing={own!r}, which the config says",
            f"pairing={pairing!r}",
            "leave pairing out",
        )
    return own


def _dims(whole: Keys, family: Family, layer: str, parameters: Keys) -> tuple[int, int]:
    """head_dim and rotary_dim."""
    if family.latent:
        # Multi-head latent attention: features that do not turn, then features that do.
        still, turning = whole.whole("qk_nope_head_dim", at_least=0), whole.whole("qk_rope_head_dim")
        return still + turning, turning
    head_dim = _head_dim_of_layer(whole, family, layer)
    if head_dim is None:
        head_dim = next((whole.whole(key) for key in family.head_dim if whole.has(key)), None)
    if head_dim is None:
        head_dim = _derived_head_dim(whole, family)
        if whole.stands("head_dim") and type_of(parameters) in ("dynamic", "yarn", "longrope"):
            warn("head-dim-null", f"head_dim is null, which some versions of transformers cannot read; here {head_dim}")
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
        raise config_error(
            missing,
            "a whole number",
            "nothing; files leave out what is the default of a class in transformers",
            f"set head_dim, or {missing}, or pass the config object: AutoConfig.from_pretrained(...)",
        )
    return width // heads


def _head_dim_of_layer(whole: Keys, family: Family, layer: str) -> int | None:
    """The head_dim that a layer type has for itself: under a key of its own, or in per_layer_config."""
    if layer not in family.head_dims:
        return None
    key, usual = family.head_dims[layer]
    if whole.has(key):
        return whole.whole(key)
    own = Keys(whole.part("per_layer_config"), "per_layer_config")
    types = whole.raw("layer_types") or []
    for name in (layer, *(str(i) for i, kind in enumerate(types) if kind == layer)):
        overrides = Keys(own.part(name), own.name(name))
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
                warn("key-ignored", f"{keys.name(key)!r} is not read by this family, which reads partial_rotary_factor")
            elif keys.has(key) and (family.reads_share or family.usual_rotary_dim or type_of(parameters) != "default"):
                said[keys.name(key)] = keys.whole(key)
            elif keys.has(key) and keys.whole(key) != head_dim:
                warn("key-ignored", f"{keys.name(key)!r} is not read by this family, which turns whole heads")
        for key in ("partial_rotary_factor", "rotary_pct", "rotary_emb_fraction", "rope_pct"):
            if not keys.has(key) or (key == "partial_rotary_factor" and type_of(parameters) == "proportional"):
                continue
            if not family.reads_share and type_of(parameters) == "default":
                if keys.number(key) != 1:
                    warn("key-ignored", f"{keys.name(key)!r} is not read by this family, which turns whole heads")
            else:
                share = keys.number(key, at_least=0)
                if share > 1:
                    raise config_error(keys.name(key), "a share from 0 to 1", f"{share:g}", "rotary_dim is a number")
                said[keys.name(key)] = int(head_dim * share)
                if abs(head_dim * share - round(head_dim * share)) > 1e-6:
                    warn(
                        "partial-truncated",
                        f"{keys.name(key)!r} = {share:g} of head_dim {head_dim} is {head_dim * share:g}, which"
                        f" transformers cuts off to {int(head_dim * share)}",
                    )
    if len(set(said.values())) > 1:
        got = ", ".join(f"{key} ({value} features)" for key, value in said.items())
        raise config_error(next(iter(said)), "one number of features that turn", got, "remove all but one")
    usual = min(head_dim, family.usual_rotary_dim or int(head_dim * family.share))
    rotary_dim = next(iter(said.values()), usual)
    if not 2 <= rotary_dim <= min(head_dim, MOST_FEATURES) or rotary_dim % 2:
        key = next(iter(said), "partial_rotary_factor")
        expected = f"an even number of features that turn, from 2 to head_dim = {head_dim}"
        raise config_error(key, expected, f"{rotary_dim}", "set it as the model was trained")
    return rotary_dim


def _axes(whole: Keys, family: Family, parameters: Keys, rotary_dim: int) -> Axes | None:
    """Which position turns which pair, where tokens have several."""
    key = "xdrope_section" if parameters.has("xdrope_section") else "mrope_section"
    if parameters.text("rope_type") == "openpangu":
        return Axes.rarest_first([int(size) for size in parameters.numbers(key)])
    if family.axes is None:
        if parameters.has(key):
            raise config_error(
                parameters.name(key),
                "a family that is known to have several positions a token",
                f"{shown(parameters.raw(key))} for model_type {whole.raw('model_type')!r}",
                "make the spec yourself: RopeSpec(..., axes=Axes.chunked(sections))",
            )
        return None
    if not isinstance(family.axes, str):
        return family.axes(rotary_dim)
    numbers = parameters.numbers(key) if parameters.has(key) else family.sections
    if numbers is None:
        return None
    sections, pairs = [int(size) for size in numbers], rotary_dim // 2
    dealt = family.axes == "interleaved" or parameters.flag("mrope_interleaved", False)
    # Sections that are dealt out need not fill the pairs: what is left belongs to the first axis.
    if sections != list(numbers) or min(sections) < 0 or (not dealt and sum(sections) != pairs) or not any(sections):
        raise config_error(
            parameters.name(key),
            f"whole numbers that sum to {pairs}, half of the features that turn",
            shown(list(numbers)),
            "copy the sections from the model",
        )
    if dealt:
        return Axes.interleaved(sections, pairs)
    return Axes.ernie(sections) if family.axes == "ernie" else Axes.chunked(sections)
