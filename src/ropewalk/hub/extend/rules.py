"""Rules that extend the context of a model: which of them apply, and the rotation that results from each."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Literal, TypeAlias, get_args

import numpy as np

from ropewalk.errors import RopewalkError, require_choice
from ropewalk.hub.configs.keys import Caller
from ropewalk.hub.configs.layers import has_window
from ropewalk.hub.configs.model import Model
from ropewalk.spec.by_parts import Llama3, Ramp, Yarn
from ropewalk.spec.frequencies import Frequencies, Plain, Proportional
from ropewalk.spec.rope import RopeSpec
from ropewalk.spec.stretched import DynamicNTK, LongRope, PositionInterpolation
from ropewalk.theory.context import (
    critical_base,
    critical_dimension,
    extrapolation_limit,
    first_negative_distance,
    lowest_admissible_base,
)

__all__ = ["RULES", "RULE_NAMES", "Extension", "RuleName", "Start", "extensions", "require_rule", "start_of"]

RuleName: TypeAlias = Literal[
    "pi", "ntk", "dynamic", "yarn", "yarn-paper", "llama3", "base-bound", "base-law", "longrope"
]
# Every rule, in display order.
RULE_NAMES: tuple[RuleName, ...] = get_args(RuleName)

# `base-bound` tries bases from FIRST * length to HIGHEST, each STEP times the previous one.
FIRST, STEP, HIGHEST = 1.5, 1.004, 1e15
# The largest number of features per head for which bases are tried. The time is proportional to it; no model has more.
WIDEST = 512
_CALLER = Caller("extensions")
# Trained lengths that makers state for configs with another max_position_embeddings: the config of Qwen3 has room for
# 8,192 tokens of output (QwenLM/Qwen3, docs/source/inference/transformers.md).
_STATED_LENGTHS = {("qwen3", 40_960): 32_768, ("qwen3_moe", 40_960): 32_768}
# Rules with a factor; and those without a trained length, which the caller specifies for them.
_RELATIVE = (PositionInterpolation, Proportional)
_OWN_FACTOR = (Yarn, Llama3, *_RELATIVE)


@dataclasses.dataclass(frozen=True)
class Start:
    """The starting point of an extension: the one type of layer that attends to the whole context, as it was trained.

    Attributes:
        layer: The layer type. "" if all layers are of the same type.
        spec: The rotation of these layers according to the config.
        base: The base before any scaling.
        trained: The trained length before any scaling.
        configured: The length that the config allows, if it contains one.
        left: Every other layer type, with the reason why it is not changed.
        trained_by_caller: Whether the caller specified a trained length that the config lacks or contradicts.
    """

    layer: str
    spec: RopeSpec
    base: float
    trained: int
    configured: int | None
    left: tuple[tuple[str, str], ...] = ()
    trained_by_caller: bool = False

    @property
    def rule(self) -> Frequencies:
        """The frequency rule of the config."""
        return self.spec.frequencies

    @property
    def dim(self) -> int:
        """The number of features in the denominator of the frequency exponents."""
        return self.spec.rotated_dim if self.spec.axes is None else self.spec.axes.dim

    @property
    def reach(self) -> int:
        """The number of positions that the config supports: its maximum, or the trained length times the factor.

        Some configs store the length before scaling as max_position_embeddings, for example Qwen 2.5 with YaRN.

        >>> Start("", RopeSpec(8, Yarn(1e4, 4, 64)), 1e4, 64, 64).reach, Start("", RopeSpec(8), 1e4, 64, 64).reach
        (256, 64)
        """
        rule = self.rule
        if self.configured is not None and self.configured > self.trained:
            return self.configured
        if getattr(rule, "trained_length", self.trained) != self.trained:
            # The factor refers to another trained length than the one that the caller specified.
            return self.trained
        factor = None if rule.varies and not isinstance(rule, LongRope) else getattr(rule, "factor", None)
        return int(self.trained * (factor or 1))

    def factor_of(self, rule: type[Frequencies], length: int) -> float:
        """The factor of `rule` for `length`.

        It is relative to the trained length. If `rule` is the model's own rule, its factor is multiplied by
        length / reach: Llama 3.2 has a factor of 32 for 16 times its trained length, Gemma 3 a factor of 8 for 4 times.

        >>> Start("", RopeSpec(8, Llama3(5e5, 32, 64)), 5e5, 64, 1024).factor_of(Llama3, 2048)
        64.0
        """
        current = self.rule
        if type(current) is rule and isinstance(current, _RELATIVE if self.trained_by_caller else _OWN_FACTOR):
            return current.factor * length / self.reach
        return length / self.trained

    @property
    def scaled(self) -> bool:
        """Whether the config already scales the frequencies. Every extension replaces that rule."""
        rule = self.rule
        return rule.factor != 1 if isinstance(rule, Proportional) else not isinstance(rule, Plain)


@dataclasses.dataclass(frozen=True)
class Extension:
    """The result of one rule for one model.

    Attributes:
        rule: The name of the rule.
        does: What the rule does, in one phrase.
        spec: The new rotation. None if the rule does not apply.
        why_not: Why the rule does not apply.
        base: The new base, for rules that change only the base.
        notes: What the user should know about the rule.

    >>> Extension("pi", "positions are divided by 4", None, "why not").applies
    False
    """

    rule: RuleName
    does: str
    spec: RopeSpec | None
    why_not: str | None = None
    base: float | None = None
    notes: tuple[str, ...] = ()

    @property
    def applies(self) -> bool:
        """Whether the rule applies to the model."""
        return self.spec is not None


def start_of(model: Model, trained: int | None = None) -> Start:
    """The layers of `model` that are extended, with the base and the length that they were trained with.

    Layers with a sliding window attend to no more than the window and keep their rotation.

    Args:
        model: The model.
        trained: The trained length, if the config lacks it or is wrong.

    Returns:
        The starting point of every extension.

    Raises:
        RopewalkError: If not exactly one type of layer can be extended, if its frequencies do not come from a base, or
            if the trained length is unknown.

    >>> from ropewalk.hub.configs.model import read_model
    >>> config = {"model_type": "llama", "head_dim": 128, "max_position_embeddings": 4096}
    >>> start_of(read_model(config)).trained
    4096
    """
    caller = model.config.caller
    asked = caller.asked(f"an extension of {model.name}")
    left: dict[str, str] = {}
    extended: dict[str, RopeSpec] = {}
    for name, spec in model.layers:
        if spec is None:
            left[name] = "does not rotate"
        elif has_window(name, model.config.language.data):
            left[name] = "attends to a window only"
        else:
            extended[name] = spec
    if len(extended) != 1:
        raise RopewalkError(
            asked=asked,
            expected="one type of layer that rotates and attends to the whole context",
            got=", ".join(f"{name or 'its layers'}: {why}" for name, why in left.items())
            if not extended
            else f"{len(extended)}: {', '.join(extended)}",
            do="its rotation does not need a change; increase max_position_embeddings, and measure"
            if not extended
            else "extend each by hand: RopeSpec(..., frequencies=Yarn(...))",
        )
    ((layer, spec),) = extended.items()
    base = getattr(spec.frequencies, "base", None)
    if base is None or not base > 1:
        raise RopewalkError(
            asked=asked,
            expected="frequencies that come from a base above 1",
            got=repr(spec.frequencies)[:60],
            do="scale its frequencies by hand: Explicit([...])",
        )
    in_config = model.lengths.trained
    length = trained or _STATED_LENGTHS.get((model.model_type or "", in_config or 0), in_config)
    if length is None:
        raise RopewalkError(
            asked=asked,
            expected="the length at which the model was trained before its context was extended",
            got=f"a config that does not contain it; max_position_embeddings is {model.lengths.configured}",
            do=f"pass {caller.option('trained', 'LENGTH')}; technical reports and model cards state it",
        )
    by_caller = trained is not None and trained != in_config
    return Start(layer, spec, float(base), length, model.lengths.configured, tuple(left.items()), by_caller)


def extensions(start: Start, length: int, rule: RuleName | None = None, caller: Caller = _CALLER) -> list[Extension]:
    """Apply every rule, or only `rule`.

    Args:
        start: The starting point, from `start_of`.
        length: The number of positions to extend to.
        rule: The only rule to apply. Default: all rules.
        caller: How error messages refer to the call.

    Returns:
        One extension per rule, with its spec or the reason why it does not apply.

    Raises:
        RopewalkError: If the model already supports `length`, or `rule` is unknown.

    >>> start = Start("", RopeSpec(128, pairing="half"), 10_000.0, 4096, 4096)
    >>> pi = extensions(start, 16384)[0]
    >>> pi.rule, pi.spec.frequencies
    ('pi', PositionInterpolation(base=10000.0, factor=4.0))
    """
    if length <= start.reach:
        by_caller = start.trained_by_caller and start.reach == start.trained
        source = "the specified trained length" if by_caller else "its config"
        raise RopewalkError(
            asked=caller.asked(f"an extension to {length} positions"),
            expected=f"more than the {start.reach} positions that the model supports according to {source}",
            got=f"{length}",
            do="use the model without an extension, or specify a larger length",
        )
    makers = RULES.values() if rule is None else [RULES[require_rule(rule, caller)]]
    results = [make(start, length, length / start.trained) for make in makers]
    return [dataclasses.replace(result, notes=(*result.notes, *_notes(start, result))) for result in results]


def require_rule(rule: str, caller: Caller) -> RuleName:
    """Return the name of a rule. It may be its rope type in configs. Raise `RopewalkError` if there is no such rule.

    >>> require_rule("linear", Caller("extend_model"))
    'pi'
    """
    return require_choice(Frequencies.option_for(rule), RULE_NAMES, asked=caller.asked_with("rule", rule))


def _notes(start: Start, extension: Extension) -> list[str]:
    if extension.spec is None or not start.scaled:
        return []
    before, after = start.spec.softmax_scale, extension.spec.softmax_scale
    scores = [f"the softmax scale is multiplied by {after:.6g} instead of {before:.6g}"]
    return [*_replaced_rule(start.rule, extension), *(scores if before != after else [])]


def _replaced_rule(current: Frequencies, extension: Extension) -> list[str]:
    """Return a note on how the extension changes the model's own rule."""
    if extension.spec is None:
        return []
    if isinstance(current, DynamicNTK) and extension.rule == "dynamic":
        return ["the model's own rule: nothing changes"]
    if type(current) is type(extension.spec.frequencies):
        return ["the model's own rule with another factor: the smallest change"]
    return [f"replaces the model's own {type(current).__name__}, with which its weights were tuned"]


def _applied(start: Start, rule: RuleName, does: str, frequencies: Frequencies, **fields: Any) -> Extension:
    return Extension(rule, does, dataclasses.replace(start.spec, frequencies=frequencies), **fields)


def _rebased(start: Start, base: float) -> Frequencies:
    current = start.rule
    return dataclasses.replace(current, base=base) if isinstance(current, Proportional) else Plain(base)


def _not_for_p_rope(start: Start, rule: RuleName, does: str) -> Extension | None:
    """Return the result for p-RoPE, where some pairs are not rotated, or None for other models."""
    if isinstance(start.rule, Proportional):
        return Extension(rule, does, None, "no engine implements it for p-RoPE, where some pairs are not rotated")
    return None


def _pi(start: Start, length: int, factor: float) -> Extension:
    current = start.rule
    factor = start.factor_of(Proportional if isinstance(current, Proportional) else PositionInterpolation, length)
    does = f"divides all positions by {factor:g}: the largest angle of every pair stays that of training"
    if isinstance(current, Proportional):
        return _applied(start, "pi", does, dataclasses.replace(current, factor=factor))
    return _applied(start, "pi", does, PositionInterpolation(start.base, factor))


def _ntk(start: Start, length: int, factor: float) -> Extension:
    if start.dim < 4:
        return Extension(
            "ntk", "a new base", None, "two features are a single pair, which is both the fastest and the slowest"
        )
    base = start.base * factor ** (start.dim / (start.dim - 2))
    does = f"base {base:.9g}: keeps the fastest frequency, divides the slowest by {factor:g}"
    return _applied(start, "ntk", does, _rebased(start, base), base=base)


def _dynamic(start: Start, length: int, factor: float) -> Extension:
    does = "ntk for the current sequence length: no change up to the trained length"
    not_applicable = _not_for_p_rope(start, "dynamic", does)
    if not_applicable or start.dim < 4:
        return not_applicable or Extension("dynamic", does, None, "two features are a single pair")
    current = start.rule
    # With factor 1 the base equals that of ntk at every length. With a larger factor it is larger than needed.
    inner = current.factor if isinstance(current, DynamicNTK) else 1.0
    rule = DynamicNTK(start.base, inner, start.trained)
    base = start.base * (inner * factor - (inner - 1)) ** (start.dim / (start.dim - 2))
    notes = ("the base depends on the longest sequence in the batch; keys cached with another base are wrong",)
    return _applied(start, "dynamic", does, rule, base=base, notes=notes)


def _yarn(start: Start, length: int, factor: float, ramp: Ramp = "index") -> Extension:
    name: RuleName = "yarn" if ramp == "index" else "yarn-paper"
    current, factor = start.rule, start.factor_of(Yarn, length)
    rule = current if isinstance(current, Yarn) else Yarn(start.base, factor, start.trained)
    # An explicit attention_factor that equals the formula is recomputed for the new factor.
    default, explicit = Yarn(rule.base, rule.factor, rule.trained_length).amplitude(), rule.attention_factor
    kept = None if explicit is None or abs(explicit / default - 1) < 1e-6 else explicit
    rule = dataclasses.replace(rule, factor=factor, trained_length=start.trained, ramp=ramp, attention_factor=kept)
    variable = "the pair index" if ramp == "index" else "the number of rotations (2309.00071, eq. 18)"
    does = (
        f"keeps pairs with at least {rule.beta_fast:g} full rotations in training, divides those with fewer than"
        f" {rule.beta_slow:g} by {factor:g}, with a ramp over {variable} between; increases scores"
    )
    notes = (
        ()
        if ramp == "index"
        else ("engines use the ramp over the pair index; transformers loads this one after hub.register_rope_types()",)
    )
    return _not_for_p_rope(start, name, does) or _applied(start, name, does, rule, notes=notes)


def _yarn_paper(start: Start, length: int, factor: float) -> Extension:
    return _yarn(start, length, factor, ramp="ratio")


def _llama3(start: Start, length: int, factor: float) -> Extension:
    current, factor = start.rule, start.factor_of(Llama3, length)
    rule = current if isinstance(current, Llama3) else Llama3(start.base, factor, start.trained)
    rule = dataclasses.replace(rule, factor=factor, trained_length=start.trained)
    does = (
        f"keeps pairs with at least {rule.high_freq_factor:g} full rotations in training, divides those with fewer than"
        f" {rule.low_freq_factor:g} by {factor:g}, with a ramp between"
    )
    return _not_for_p_rope(start, "llama3", does) or _applied(start, "llama3", does, rule)


def _base_bound(start: Start, length: int, factor: float) -> Extension:
    does = "a base that keeps the score sum non-negative"
    rotated = 2 * int(np.count_nonzero(start.spec.inv_freq()))
    if start.spec.head_dim - rotated >= rotated:
        return Extension("base-bound", does, None, "with the features that are not rotated the sum is never negative")
    if start.dim > WIDEST:
        return Extension("base-bound", does, None, f"bases are tried for heads of at most {WIDEST} features")
    if first_negative_distance(Plain(start.base).evaluate(start.dim), length + 1) is None:
        return Extension("base-bound", does, None, f"the base {start.base:g} already keeps the sum non-negative")
    low = max(start.base, FIRST * length)
    tried = low * STEP ** np.arange(int(np.log(HIGHEST / low) / np.log(STEP)))
    base = lowest_admissible_base(tried.tolist(), start.dim, length)
    if base is None:
        return Extension("base-bound", does, None, f"no base tried up to {HIGHEST:g} keeps the sum non-negative")
    does = f"base {base:.9g}: the lowest of those tried that keeps the score sum non-negative up to {length}"
    count = int((tried <= base).sum())
    notes = (
        f"{count} bases were tried, from {low:.4g} in steps of {100 * (STEP - 1):.1f} %: a lower base between two steps"
        " is possible; meant for training, not for use without it",
    )
    return _applied(start, "base-bound", does, _rebased(start, base), base=base, notes=notes)


def _base_law(start: Start, length: int, factor: float) -> Extension:
    does = "the critical base of the scaling law"
    if start.trained < 7:
        return Extension("base-law", does, None, "the trained length is below 7: no pair completed a rotation")
    critical_dim = critical_dimension(start.dim, start.base, start.trained)
    if critical_dim == start.dim:
        return Extension("base-law", does, None, "every pair completed a rotation in training: the law sets no limit")
    base = critical_base(start.trained, length, start.base)
    if math.isinf(base):
        return Extension("base-law", does, None, f"the critical base for {length} positions exceeds float64")
    does = f"base {base:.9g}: the limit of a model tuned with it at {length} is {length}, with a larger base more"
    notes = [
        "meant for a model that is tuned with it, not for use without tuning",
        f"with any smaller base the limit of a model tuned at {length} is {length} too",
    ]
    limit = round(extrapolation_limit(base, start.dim, critical_dim))
    if limit != length:
        notes.append(f"tuned at {start.trained}, the limit is {limit}: d_extra is rounded up to a whole pair")
    return _applied(start, "base-law", does, _rebased(start, base), base=base, notes=tuple(notes))


def _longrope(start: Start, length: int, factor: float) -> Extension:
    does = "one divisor per pair"
    return Extension("longrope", does, None, "its divisors come from a search that runs the model (2402.13753)")


RULES: dict[RuleName, Callable[[Start, int, float], Extension]] = {
    "pi": _pi,
    "ntk": _ntk,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "yarn-paper": _yarn_paper,
    "llama3": _llama3,
    "base-bound": _base_bound,
    "base-law": _base_law,
    "longrope": _longrope,
}
