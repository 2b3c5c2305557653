"""The rope types of configs, as transformers, vLLM and Mistral write them: a reader for each, which makes its rule."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ropewalk.errors import RopewalkError, require_choice
from ropewalk.hub.configs.keys import ConfigError, Keys
from ropewalk.spec.by_parts import Llama3, Policy, Yarn
from ropewalk.spec.frequencies import Frequencies, Plain, Proportional
from ropewalk.spec.rope import RopeSpec
from ropewalk.spec.stretched import NTK, DynamicNTK, LongRope, NTKFixed, NTKMixed, PositionInterpolation

__all__ = ["Around", "rule_of", "type_of"]

# Keys that say something about the model or the axes, and nothing to a rule.
_FOR_OTHERS = {"mrope_section", "mrope_interleaved", "xdrope_section", "llama_4_scaling_beta", "type", "rope_dim"}
# Other names of rope types, and what transformers makes of them.
_ALIASES = {
    "su": "longrope",
    "mrope": "default",
    "deepseek_yarn": "yarn",
    "openpangu": "default",
    "axial": "default",
    "xdrope": "dynamic",
}


@dataclass(frozen=True)
class Around:
    """What a rule reads from outside of its own keys: the base that is used where none is given, the longest sequence,
    the original length of Phi-3's configs, whether layer types each have keys of their own, whether transformers has
    filled in what a file lacked, the policy of amplitudes, whether the dynamic type reads alpha, and how many features
    turn."""

    base: float
    longest: int | None
    original: int | None
    nested: bool
    filled: bool
    policy: Policy
    alpha: bool
    rotary_dim: int


def type_of(parameters: Keys) -> str:
    """The rope type, by its new name; "default" where none is said."""
    new, old = parameters.text("rope_type"), parameters.text("type")
    if new is not None and old is not None and _ALIASES.get(new, new) != _ALIASES.get(old, old):
        raise parameters.error(
            parameters.name("rope_type"), "one rope type", f"rope_type {new!r} and type {old!r}", "remove one"
        )
    name = new or old or "default"
    return _ALIASES.get(name, name)


def rule_of(parameters: Keys, around: Around) -> Frequencies:
    """The rule that the parameters say. Keys that nobody reads are warned of.

    >>> around = Around(10_000.0, 8192, None, False, False, "transformers", False, 128)
    >>> rule_of(Keys({"rope_type": "linear", "factor": 2.0}), around)
    PositionInterpolation(base=10000.0, factor=2.0)
    """
    rope_type = type_of(parameters)
    if "su" in (parameters.raw("rope_type"), parameters.raw("type")):
        parameters.warn(
            "legacy-type", "rope type 'su' is the old name of 'longrope'; transformers rewrites it for Phi-3 alone"
        )
    read = _READERS.get(rope_type)
    if read is None:
        rules = Frequencies.rope_types()
        known = {**_READERS, **rules}
        require_choice(rope_type, known, asked=parameters.caller.asked(f"the key {parameters.name('rope_type')!r}"))
        read = functools.partial(_stated, rules[rope_type])
    base = parameters.number("rope_theta", around.base)
    if base <= 0:
        raise parameters.error(parameters.name("rope_theta"), "a number above 0", f"{base:g}", "10000 is usual")
    parameters.raw("partial_rotary_factor")
    try:
        rule = read(parameters, base, around)
        # Lists of the wrong length are found here, where the key is known.
        RopeSpec(around.rotary_dim, rule)
    except ConfigError:
        raise
    except RopewalkError as error:
        # A rule names its own field; whoever reads it wants to know that it came from a config.
        raise parameters.error(
            parameters.name(f"rope_type {rope_type!r}"), f"{error.asked}: {error.expected}", error.got, error.do
        ) from None
    ignored = [key for key in parameters.unread() if key not in _FOR_OTHERS]
    if ignored:
        names = ", ".join(parameters.name(key) for key in ignored)
        parameters.warn("key-ignored", f"rope type {rope_type!r} does not read {names}")
    return rule


def _stated(rule: type[Frequencies], parameters: Keys, base: float, around: Around) -> Frequencies:
    """A rule that reads nothing but its own keys, which its class names."""
    values = {key: parameters.raw(key) for key in rule.config_keys.values()}
    return rule.from_parameters(values | {"rope_theta": base})


def _default(parameters: Keys, base: float, around: Around) -> Frequencies:
    return Plain(base)


def _linear(parameters: Keys, base: float, around: Around) -> Frequencies:
    if type(parameters.raw("factor")) is int:
        parameters.warn(
            "int-for-float",
            f"{parameters.name('factor')!r} is a whole number, over which vLLM iterates: write it with a point",
        )
    return PositionInterpolation(base, parameters.number("factor", at_least=1))


def _dynamic(parameters: Keys, base: float, around: Around) -> Frequencies:
    if parameters.has("alpha") and around.alpha:
        # HunYuan's: static, whatever the name says.
        alpha = parameters.number("alpha", at_least=1)
        parameters.raw("factor")
        return NTK(base, alpha)
    trained = parameters.raw("max_trained_positions")
    longest = parameters.whole("max_trained_positions") if trained is not None else around.longest
    if parameters.has("original_max_position_embeddings") and trained is None:
        parameters.warn(
            "key-ignored",
            f"{parameters.name('original_max_position_embeddings')!r} is not read for rope type 'dynamic': transformers"
            " takes max_position_embeddings for the length that was trained",
        )
    if longest is None:
        raise parameters.error("max_position_embeddings", "the length that was trained", "nothing", "set it")
    parameters.warn(
        "dynamic-batch",
        "transformers grows a dynamic base with the longest sequence of the batch and keeps it for keys that come"
        " later; here the length is an argument, one per sequence",
    )
    return DynamicNTK(base, parameters.number("factor", at_least=1), longest)


def _original(parameters: Keys, around: Around, factor: float | None) -> int:
    """The trained length: required, since transformers silently takes the extended one for it."""
    key = "original_max_position_embeddings"
    if around.original is None and not parameters.has(key):
        raise parameters.error(
            parameters.name(key),
            "the length that was trained before the context was extended",
            "nothing; transformers would silently take max_position_embeddings, and compute other frequencies",
            f"set {key}",
        )
    # transformers lets the key beside the parameters win, as Phi-3 has it.
    original = parameters.whole(key, at_least=2) if around.original is None else around.original
    parameters.raw(key)
    if around.longest is not None and factor is not None and factor != 1:
        if around.longest == original and around.filled:
            parameters.warn(
                "original-is-extended",
                f"{parameters.name(key)!r} is {original}, as max_position_embeddings is, though factor is {factor:g}:"
                " transformers fills it in where a config has none, and then all frequencies are off",
            )
        elif around.longest != original and abs(around.longest / original - factor) > 1e-6 * factor:
            parameters.warn(
                "factor-differs",
                f"factor is {factor:g}, but max_position_embeddings / original_max_position_embeddings is"
                f" {around.longest / original:g}; the factor is what counts",
            )
    return original


def _yarn(parameters: Keys, base: float, around: Around) -> Frequencies:
    factor = parameters.number("factor", at_least=1) if parameters.has("factor") else None
    original = _original(parameters, around, factor)
    if factor is None:
        if around.longest is None:
            raise parameters.error(parameters.name("factor"), "a number of at least 1", "nothing", "set the factor")
        factor = around.longest / original
    fields: dict[str, Any] = {}
    for key, usual in (("beta_fast", 32.0), ("beta_slow", 1.0)):
        if parameters.raw(key) == 0:
            parameters.warn(
                "zero-is-unset", f"{parameters.name(key)!r} is 0, for which transformers takes {usual:g}, as here"
            )
        fields[key] = parameters.number(key, usual) or usual
    for key in ("mscale", "mscale_all_dim"):
        if parameters.raw(key) == 0:
            parameters.warn("zero-is-unset", f"{parameters.name(key)!r} is 0, for which transformers takes no {key}")
        fields[key] = parameters.number(key, at_least=0) if parameters.has(key) else None
    fields["truncate"] = parameters.flag("truncate", True)
    if around.nested and not fields["truncate"]:
        parameters.warn(
            "nested-truncate",
            f"{parameters.name('truncate')!r} is false, which transformers reads from a flat config only: it truncates",
        )
    fields["attention_factor"] = _yarn_attention(parameters, around, Yarn(base, factor, original))
    pair = bool(fields["mscale"]), bool(fields["mscale_all_dim"])
    if pair[0] != pair[1] and fields["attention_factor"] is None:
        parameters.warn(
            "amplitude-differs",
            "of mscale and mscale_all_dim one is set, which counts for DeepSeek's amplitude and not for transformers'",
        )
        if around.policy != "vllm":
            # What transformers computes, whatever the policy says about the softmax scale.
            fields["attention_factor"] = Yarn(base, factor, original).amplitude()
    return Yarn(base, factor, original, **fields, policy=around.policy)


def _yarn_attention(parameters: Keys, around: Around, plain: Yarn) -> float | None:
    key, other = ("attn_factor", "attention_factor") if around.policy == "vllm" else ("attention_factor", "attn_factor")
    if parameters.has(other):
        stack = "vLLM" if around.policy == "vllm" else "transformers"
        parameters.warn(
            "amplitude-differs", f"{parameters.name(other)!r} is not read by {stack}, which calls it {key!r}"
        )
    if parameters.number("extrapolation_factor", 1.0) != 1:
        raise parameters.error(
            parameters.name("extrapolation_factor"), "1, or nothing", "another number", "no released model has one"
        )
    if not parameters.flag("apply_yarn_scaling", True):
        if around.policy == "vllm":
            # vLLM then takes attn_factor as it is, where its policy multiplies it by g.
            return parameters.number("attn_factor", 1.0) / plain.amplitude()
        parameters.warn(
            "key-ignored", f"{parameters.name('apply_yarn_scaling')!r} is vLLM's; transformers does not read it"
        )
    if not parameters.has(key):
        return None
    if type(parameters.raw(key)) is int:
        parameters.warn("int-for-float", f"{parameters.name(key)!r} is a whole number, of which transformers warns")
    return parameters.number(key)


def _longrope(parameters: Keys, base: float, around: Around) -> Frequencies:
    factor = parameters.number("factor", at_least=1) if parameters.has("factor") else None
    original = _original(parameters, around, factor)
    if factor is None and around.longest is not None:
        factor = max(1.0, around.longest / original)
    scales = {}
    if parameters.has("short_mscale") or parameters.has("long_mscale"):
        scales = {
            "short_amplitude": parameters.number("short_mscale"),
            "long_amplitude": parameters.number("long_mscale"),
        }
    attention = parameters.number("attention_factor") if parameters.has("attention_factor") else None
    short, long = (parameters.numbers(key) for key in ("short_factor", "long_factor"))
    return LongRope(base, short, long, original, factor, attention, **scales)


def _llama3(parameters: Keys, base: float, around: Around) -> Frequencies:
    factor = parameters.number("factor", at_least=1)
    bounds = [parameters.number(key) for key in ("low_freq_factor", "high_freq_factor")]
    if bounds[0] == bounds[1]:
        parameters.warn("no-ramp", f"low_freq_factor and high_freq_factor are both {bounds[0]:g}: a step and no ramp")
    return Llama3(base, factor, _original(parameters, around, None), *bounds)


def _proportional(parameters: Keys, base: float, around: Around) -> Frequencies:
    fraction = parameters.number("partial_rotary_factor", 1.0, at_least=0)
    return Proportional(base, fraction, parameters.number("factor", 1.0, at_least=1))


def _ntk(parameters: Keys, base: float, around: Around) -> Frequencies:
    factor = parameters.number("factor", at_least=1)
    if parameters.has("mixed_b"):
        return NTKMixed(base, factor, parameters.number("mixed_b"))
    return NTKFixed(base, factor)


# Rope types whose reading is more than the keys that the class of the rule names.
_READERS: dict[str, Callable[[Keys, float, Around], Frequencies]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "longrope": _longrope,
    "llama3": _llama3,
    "proportional": _proportional,
    "ntk": _ntk,
}
