"""The rope types of configs, as in transformers, vLLM and Mistral's files: one function per type returns its rule."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ropewalk.errors import RopewalkError, require_choice, shown
from ropewalk.hub.configs.keys import ConfigError, Keys
from ropewalk.spec.by_parts import Llama3, Policy, Yarn
from ropewalk.spec.frequencies import STATED, STATED_DYNAMIC, Frequencies, Plain, Proportional
from ropewalk.spec.rope import RopeSpec
from ropewalk.spec.stretched import NTK, DynamicNTK, LongRope, NTKFixed, NTKMixed, PositionInterpolation

__all__ = ["RuleContext", "rule_of", "type_of", "whole_rule"]

# Keys that belong to the model or the axes and not to a frequency rule.
_FOR_OTHERS = {"mrope_section", "mrope_interleaved", "xdrope_section", "llama_4_scaling_beta", "type", "rope_dim"}
# Other names of rope types, and the type that transformers uses for each.
_ALIASES = {
    "su": "longrope",
    "mrope": "default",
    "deepseek_yarn": "yarn",
    "openpangu": "default",
    "axial": "default",
    "xdrope": "dynamic",
}


@dataclass(frozen=True)
class RuleContext:
    """What a rule needs beyond its rope parameters.

    Attributes:
        base: The base if the parameters contain none.
        longest: The longest sequence according to the config.
        original: The original length, if it is stored outside of the parameters, as in Phi-3's configs.
        nested: Whether the config has rope parameters per layer type.
        filled: Whether transformers filled in keys that the file omits.
        policy: Which implementation of YaRN's amplitude to follow.
        alpha: Whether the dynamic type reads alpha.
        rotary_dim: The number of rotated features.
    """

    base: float
    longest: int | None
    original: int | None
    nested: bool
    filled: bool
    policy: Policy
    alpha: bool
    rotary_dim: int


def type_of(parameters: Keys) -> str:
    """Return the rope type by its current name, or "default" if there is none."""
    new, old = parameters.text("rope_type"), parameters.text("type")
    if new is not None and old is not None and _ALIASES.get(new, new) != _ALIASES.get(old, old):
        raise parameters.error(
            parameters.name("rope_type"), "one rope type", f"rope_type {new!r} and type {old!r}", "remove the wrong one"
        )
    name = new or old or "default"
    return _ALIASES.get(name, name)


def _type_key(parameters: Keys) -> str:
    """Return the full name of the key that contains the rope type: rope_type, or type in older configs."""
    return parameters.name("type" if parameters.raw("rope_type") is None and parameters.has("type") else "rope_type")


def rule_of(parameters: Keys, context: RuleContext) -> Frequencies:
    """Return the frequency rule of rope parameters. Add a pitfall for keys that are not read.

    Args:
        parameters: The rope parameters.
        context: What the rule needs beyond them.

    Returns:
        The rule.

    Raises:
        RopewalkError: If the rope type is unknown or its keys are invalid.

    >>> context = RuleContext(10_000.0, 8192, None, False, False, "transformers", False, 128)
    >>> rule_of(Keys({"rope_type": "linear", "factor": 2.0}), context)
    PositionInterpolation(base=10000.0, factor=2.0)
    """
    rope_type = type_of(parameters)
    if "su" in (parameters.raw("rope_type"), parameters.raw("type")):
        parameters.warn(
            "legacy-type", "rope type 'su' is the old name of 'longrope'; transformers replaces it for Phi-3 only"
        )
    read = _READERS.get(rope_type)
    if read is None:
        rules = Frequencies.rope_types()
        known = {**_READERS, **rules}
        require_choice(rope_type, known, asked=parameters.caller.asked(f"the key {_type_key(parameters)!r}"))
        read = functools.partial(_stated, rules[rope_type])
    base = parameters.number("rope_theta", context.base)
    if base <= 0:
        do = "set rope_theta as the model was trained; 10000 is the most common base"
        raise parameters.error(parameters.name("rope_theta"), "a number above 0", f"{base:g}", do)
    parameters.raw("partial_rotary_factor")
    try:
        rule = read(parameters, base, context)
        # This raises for lists of the wrong length, while the key is known.
        RopeSpec(context.rotary_dim, rule)
    except ConfigError:
        raise
    except RopewalkError as error:
        # The error of a rule names its Python field. The user needs the key of the config.
        raise parameters.error(
            f"{_type_key(parameters)} {rope_type!r}", f"{error.asked}: {error.expected}", error.got, error.do
        ) from None
    ignored = [key for key in parameters.unread() if key not in _FOR_OTHERS]
    if ignored:
        names = ", ".join(parameters.name(key) for key in ignored)
        parameters.warn("key-ignored", f"rope type {rope_type!r} does not read {names}")
    return rule


def _stated(rule: type[Frequencies], parameters: Keys, base: float, context: RuleContext) -> Frequencies:
    """Return a rule that needs no more than the config keys that its class lists."""
    values = {key: parameters.raw(key) for key in rule.config_keys.values()}
    return rule.from_parameters(values | {"rope_theta": base})


def _default(parameters: Keys, base: float, context: RuleContext) -> Frequencies:
    return Plain(base)


def _linear(parameters: Keys, base: float, context: RuleContext) -> Frequencies:
    if type(parameters.raw("factor")) is int:
        parameters.warn(
            "int-for-float",
            f"{parameters.name('factor')!r} is an integer, which vLLM tries to iterate over. Write a decimal point",
        )
    return PositionInterpolation(base, parameters.number("factor", at_least=1))


def _dynamic(parameters: Keys, base: float, context: RuleContext) -> Frequencies:
    if parameters.has("alpha") and context.alpha:
        # HunYuan's type is static in spite of its name.
        alpha = parameters.number("alpha", at_least=1)
        parameters.raw("factor")
        return NTK(base, alpha)
    trained = parameters.raw("max_trained_positions")
    longest = parameters.integer("max_trained_positions") if trained is not None else context.longest
    if parameters.has("original_max_position_embeddings") and trained is None:
        parameters.warn(
            "key-ignored",
            f"{parameters.name('original_max_position_embeddings')!r} is not read for rope type 'dynamic': transformers"
            " uses max_position_embeddings as the trained length",
        )
    if longest is None:
        do = "set max_position_embeddings to the trained length"
        raise parameters.error("max_position_embeddings", "the trained length", "no such key", do)
    parameters.warn(
        "dynamic-batch",
        "transformers increases a dynamic base with the longest sequence of the batch and keeps it for later keys."
        " Here the length is an argument, one per sequence",
    )
    return DynamicNTK(base, parameters.number("factor", at_least=1), longest)


def _original(parameters: Keys, context: RuleContext, factor: float | None) -> int:
    """Return the trained length. It is required: without it, transformers silently uses the extended length.

    `factor` is None for rules whose factor no stack computes from the lengths.
    """
    key = "original_max_position_embeddings"
    if context.original is None and not parameters.has(key):
        raise parameters.error(
            parameters.name(key),
            "the trained length, before the context was extended",
            "no such key; transformers would silently use max_position_embeddings and compute wrong frequencies",
            f"set {key} to the trained length",
        )
    # In transformers the key outside of the parameters takes precedence, as in Phi-3's configs.
    original = parameters.integer(key, at_least=2) if context.original is None else context.original
    parameters.raw(key)
    if context.longest is not None and factor is not None and factor != 1:
        ratio = context.longest / original
        if ratio == 1 and context.filled:
            parameters.warn(
                "original-is-extended",
                f"{parameters.name(key)!r} and max_position_embeddings are both {original}, but factor is {factor:g}."
                " If the file omits the key, transformers fills it in, and then the frequencies are wrong",
            )
        elif abs(ratio - factor) > 1e-6 * factor:
            parameters.warn(
                "factor-differs",
                f"factor is {factor:g}, but max_position_embeddings / original_max_position_embeddings is {ratio:g}."
                " The factor is used. Older versions of transformers use the ratio (huggingface/transformers#38224)",
            )
    return original


def _yarn(parameters: Keys, base: float, context: RuleContext) -> Frequencies:
    factor = parameters.number("factor", at_least=1) if parameters.has("factor") else None
    original = _original(parameters, context, factor)
    if factor is None:
        if context.longest is None:
            do = "set factor, or max_position_embeddings"
            raise parameters.error(parameters.name("factor"), "a number of at least 1", "no such key", do)
        factor = context.longest / original
        if factor == 1:
            parameters.warn(
                "original-is-extended",
                f"there is no {parameters.name('factor')!r}, and both lengths are {original}: the factor is 1, which is"
                " plain RoPE",
            )
    fields: dict[str, Any] = {}
    for key, default in (("beta_fast", 32.0), ("beta_slow", 1.0)):
        if parameters.raw(key) == 0:
            parameters.warn(
                "zero-is-unset", f"{parameters.name(key)!r} is 0. {default:g} is used instead, as in transformers"
            )
        fields[key] = parameters.number(key, default) or default
    for key in ("mscale", "mscale_all_dim"):
        if parameters.raw(key) == 0:
            parameters.warn("zero-is-unset", f"{parameters.name(key)!r} is 0. transformers ignores it then")
        fields[key] = parameters.number(key, at_least=0) if parameters.has(key) else None
    fields["truncate"] = parameters.flag("truncate", True)
    if context.nested and not fields["truncate"]:
        parameters.warn(
            "nested-truncate",
            f"{parameters.name('truncate')!r} is false. transformers ignores it in the parameters of a layer type and"
            " truncates",
        )
    fields["attention_factor"] = _yarn_attention(parameters, context, Yarn(base, factor, original))
    pair = bool(fields["mscale"]), bool(fields["mscale_all_dim"])
    if pair[0] != pair[1] and fields["attention_factor"] is None:
        parameters.warn(
            "amplitude-differs",
            "only one of mscale and mscale_all_dim is set. DeepSeek's code uses it for the amplitude; transformers does"
            " not",
        )
        if context.policy != "vllm":
            # The amplitude of transformers, independent of the policy for the softmax scale.
            fields["attention_factor"] = Yarn(base, factor, original).amplitude()
    return Yarn(base, factor, original, **fields, policy=context.policy)


def _yarn_attention(parameters: Keys, context: RuleContext, plain: Yarn) -> float | None:
    key, other = (
        ("attn_factor", "attention_factor") if context.policy == "vllm" else ("attention_factor", "attn_factor")
    )
    if parameters.has(other):
        stack = "vLLM" if context.policy == "vllm" else "transformers"
        parameters.warn(
            "amplitude-differs", f"{parameters.name(other)!r} is not read by {stack}, which reads {key!r} instead"
        )
    if parameters.number("extrapolation_factor", 1.0) != 1:
        raise parameters.error(
            parameters.name("extrapolation_factor"),
            "1, as in every released model",
            shown(parameters.raw("extrapolation_factor")),
            "remove the key; other values are not supported",
        )
    if not parameters.flag("apply_yarn_scaling", True):
        if context.policy == "vllm":
            # vLLM then uses attn_factor unchanged. Its policy would multiply it by g.
            return parameters.number("attn_factor", 1.0) / plain.amplitude()
        parameters.warn(
            "key-ignored", f"{parameters.name('apply_yarn_scaling')!r} is read by vLLM only; transformers ignores it"
        )
    if not parameters.has(key):
        return None
    if type(parameters.raw(key)) is int:
        parameters.warn("int-for-float", f"{parameters.name(key)!r} is an integer, about which transformers warns")
    return parameters.number(key)


def _longrope(parameters: Keys, base: float, context: RuleContext) -> Frequencies:
    factor = parameters.number("factor", at_least=1) if parameters.has("factor") else None
    original = _original(parameters, context, factor)
    if factor is None and context.longest is not None:
        factor = max(1.0, context.longest / original)
    scales = {}
    if parameters.has("short_mscale") or parameters.has("long_mscale"):
        scales = {
            "short_amplitude": parameters.number("short_mscale"),
            "long_amplitude": parameters.number("long_mscale"),
        }
    attention = parameters.number("attention_factor") if parameters.has("attention_factor") else None
    short, long = (parameters.numbers(key) for key in ("short_factor", "long_factor"))
    return LongRope(base, short, long, original, factor, attention, **scales)


def _llama3(parameters: Keys, base: float, context: RuleContext) -> Frequencies:
    factor = parameters.number("factor", at_least=1)
    bounds = [parameters.number(key) for key in ("low_freq_factor", "high_freq_factor")]
    if bounds[0] == bounds[1]:
        text = f"low_freq_factor and high_freq_factor are both {bounds[0]:g}: a step instead of a ramp"
        parameters.warn("no-ramp", text)
    # Every stack uses the factor as it is. In Llama 3.1 and 3.2 it differs from the ratio of the lengths.
    return Llama3(base, factor, _original(parameters, context, None), *bounds)


def _proportional(parameters: Keys, base: float, context: RuleContext) -> Frequencies:
    fraction = parameters.number("partial_rotary_factor", 1.0, at_least=0)
    return Proportional(base, fraction, parameters.number("factor", 1.0, at_least=1))


def _ntk(parameters: Keys, base: float, context: RuleContext) -> Frequencies:
    factor = parameters.number("factor", at_least=1)
    if parameters.has("mixed_b"):
        return NTKMixed(base, factor, parameters.number("mixed_b"))
    return NTKFixed(base, factor)


def whole_rule(parameters: Keys) -> Frequencies:
    """Return the rule that rope parameters contain as a whole, as `RopeSpec.to_config("ropewalk")` writes them.

    >>> whole_rule(Keys({"rope_type": "ropewalk", "rope_theta": 100.0, "rule": {"rule": "Plain", "base": 100.0}}))
    Plain(base=100.0)
    """
    rule = Frequencies.from_dict(parameters.raw("rule"))
    own, base = getattr(rule, "base", None), parameters.raw("rope_theta")
    if own is not None and base is not None and own != base:
        raise parameters.error(
            parameters.name("rope_theta"),
            f"the base of the rule, {own:g}",
            shown(base),
            "set both to the same number, or write the config again by RopeSpec.to_config",
        )
    return rule


def _whole(parameters: Keys, base: float, context: RuleContext) -> Frequencies:
    return whole_rule(parameters)


# Rope types that need more than the config keys that the class of the rule lists.
_READERS: dict[str, Callable[[Keys, float, RuleContext], Frequencies]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "longrope": _longrope,
    "llama3": _llama3,
    "proportional": _proportional,
    "ntk": _ntk,
    STATED: _whole,
    STATED_DYNAMIC: _whole,
}
