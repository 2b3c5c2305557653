"""Rules that extend a model's context: which of them apply to it, and the rotation that each gives."""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, TypeAlias, get_args

import numpy as np

from ropewalk.errors import RopewalkError, require_choice
from ropewalk.hub.configs.keys import Caller
from ropewalk.hub.configs.model import Model
from ropewalk.spec.by_parts import Llama3, Ramp, Yarn
from ropewalk.spec.frequencies import Frequencies, Plain, Proportional
from ropewalk.spec.rope import RopeSpec
from ropewalk.spec.stretched import DynamicNTK, LongRope, PositionInterpolation
from ropewalk.theory.context import critical_base, critical_dimension, first_negative_distance, lowest_admissible_base

__all__ = ["RULES", "RULE_NAMES", "Extension", "RuleName", "Start", "extensions", "require_rule", "start_of"]

RuleName: TypeAlias = Literal[
    "pi", "ntk", "dynamic", "yarn", "yarn-paper", "llama3", "base-bound", "base-law", "longrope"
]
# Every rule, in the order in which they are shown.
RULE_NAMES: tuple[RuleName, ...] = get_args(RuleName)

# Bases are tried from FIRST times the length on, each a STEP larger than the last, up to HIGHEST.
FIRST, STEP, HIGHEST = 1.5, 1.004, 1e15
# Features of a head up to which bases are tried: twice as many take twice as long, and no model has more.
WIDEST = 512
_CALLER = Caller("extensions")


@dataclasses.dataclass(frozen=True)
class Start:
    """Where an extension begins: the one kind of layer that sees the whole context, as it was trained.

    `layer` is its name, "" where all are alike, and `spec` its rotation as the config has it; `base` and `trained` are
    those before any scaling. `left` says of every other kind of layer why it stays as it is. `trained_by_caller` says
    that the caller specified the trained length, against the config or where that has none.
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
        """The rule that the model has by its config."""
        return self.spec.frequencies

    @property
    def dim(self) -> int:
        """How many features the exponents of the frequencies are spread over."""
        return self.spec.turning if self.spec.axes is None else self.spec.axes.dim

    @property
    def reach(self) -> int:
        """How many positions the model reads by its config: what that allows, or the trained length times the factor.

        Some configs keep the length before scaling under max_position_embeddings, as Qwen 2.5's with YaRN do.

        >>> Start("", RopeSpec(8, Yarn(1e4, 4, 64)), 1e4, 64, 64).reach, Start("", RopeSpec(8), 1e4, 64, 64).reach
        (256, 64)
        """
        rule = self.rule
        if self.configured is not None and self.configured > self.trained:
            return self.configured
        if getattr(rule, "trained_length", self.trained) != self.trained:
            # The factor is of another length than the one that was given.
            return self.trained
        factor = None if rule.varies and not isinstance(rule, LongRope) else getattr(rule, "factor", None)
        return int(self.trained * (factor or 1))

    def factor_of(self, rule: type[Frequencies], length: int) -> float:
        """The factor of a rule for `length`: over the trained length, or, of the model's own rule, over what it reads.

        Llama 3.2 has a factor of 32 for 16 times its trained length: a little more than it reads is a little more than
        that factor.

        >>> Start("", RopeSpec(8, Llama3(5e5, 32, 64)), 5e5, 64, 1024).factor_of(Llama3, 2048)
        64.0
        """
        current = self.rule
        if type(current) is rule and not self.trained_by_caller and isinstance(current, Yarn | Llama3):
            return current.factor * length / self.reach
        return length / self.trained

    @property
    def scaled(self) -> bool:
        """Whether the config already has a rule, which every extension replaces."""
        rule = self.rule
        return rule.factor != 1 if isinstance(rule, Proportional) else not isinstance(rule, Plain)


@dataclasses.dataclass(frozen=True)
class Extension:
    """What a rule makes of a model: a spec, or why there is none. `base` is the new base of rules that change it alone.

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
        """Whether there is a spec."""
        return self.spec is not None


def start_of(model: Model, trained: int | None = None) -> Start:
    """The layers of `model` that an extension is for, and the base and length that they were trained with.

    Layers with a window see no more than it, whatever the context, and keep their rotation. `trained` is for configs
    that do not say it, or say it wrong.

    >>> from ropewalk.hub.configs.model import read_model
    >>> config = {"model_type": "llama", "head_dim": 128, "max_position_embeddings": 4096}
    >>> start_of(read_model(config)).trained
    4096
    """
    caller = model.config.caller
    asked = caller.asked(f"an extension of {model.name}")
    left: dict[str, str] = {}
    turning: dict[str, RopeSpec] = {}
    for name, spec in model.layers:
        if spec is None:
            left[name] = "does not rotate"
        elif _has_window(name, model):
            left[name] = "sees a window of the context only"
        else:
            turning[name] = spec
    if len(turning) != 1:
        raise RopewalkError(
            asked=asked,
            expected="one kind of layer that rotates and sees the whole context",
            got=", ".join(f"{name or 'its layers'}: {why}" for name, why in left.items())
            if not turning
            else f"{len(turning)}: {', '.join(turning)}",
            do="its rotation need not change; raise max_position_embeddings, and measure"
            if not turning
            else "extend each by hand: RopeSpec(..., frequencies=Yarn(...))",
        )
    ((layer, spec),) = turning.items()
    base = getattr(spec.frequencies, "base", None)
    if base is None or not base > 1:
        raise RopewalkError(
            asked=asked,
            expected="frequencies that come from a base above 1",
            got=repr(spec.frequencies)[:60],
            do="scale its frequencies by hand: Explicit([...])",
        )
    length = trained or model.lengths.trained
    if length is None:
        raise RopewalkError(
            asked=asked,
            expected="the length that it was trained at before its context was extended",
            got=f"a config that does not say it; max_position_embeddings is {model.lengths.configured}",
            do=f"pass {caller.option('trained', 'LENGTH')}",
        )
    by_caller = trained is not None and trained != model.lengths.trained
    return Start(layer, spec, float(base), length, model.lengths.configured, tuple(left.items()), by_caller)


def _has_window(name: str, model: Model) -> bool:
    part = model.config.language.data
    # Llama 4 rotates in layers that see a chunk, whether or not its config says how long that is.
    chunked = "attention_chunk_size" in part or str(part.get("model_type")).startswith("llama4")
    return "sliding" in name or "chunked" in name or (name == "rope" and chunked)


def extensions(start: Start, length: int, rule: RuleName | None = None, caller: Caller = _CALLER) -> list[Extension]:
    """Every rule, or the one named, with the spec that it gives for `length` positions or why it gives none.

    Errors are written in the words of `caller`.

    >>> start = Start("", RopeSpec(128, pairing="half"), 10_000.0, 4096, 4096)
    >>> pi = extensions(start, 16384)[0]
    >>> pi.rule, pi.spec.frequencies
    ('pi', PositionInterpolation(base=10000.0, factor=4.0))
    """
    if length <= start.reach:
        by = (
            "the trained length that was given"
            if start.trained_by_caller and start.reach == start.trained
            else "its config"
        )
        raise RopewalkError(
            asked=caller.asked(f"an extension to {length} positions"),
            expected=f"more than the {start.reach} that the model reads by {by}",
            got=f"{length}",
            do="nothing need be extended for that; name a larger length",
        )
    makers = RULES.values() if rule is None else [RULES[require_rule(rule, caller)]]
    made = [make(start, length, length / start.trained) for make in makers]
    return [dataclasses.replace(one, notes=(*one.notes, *_notes(start, one))) for one in made]


def require_rule(rule: str, caller: Caller) -> RuleName:
    """`rule`, if it is the name of one.

    >>> require_rule("yarn", Caller("extend_model"))
    'yarn'
    """
    require_choice(rule, RULE_NAMES, asked=caller.asked_with("rule", rule))
    return next(name for name in RULE_NAMES if name == rule)


def _notes(start: Start, made: Extension) -> list[str]:
    if made.spec is None or not start.scaled:
        return []
    before, after = start.spec.softmax_scale, made.spec.softmax_scale
    scores = [f"the softmax scale is multiplied by {after:.6g}, where the model has {before:.6g}"]
    return [*_kept(start.rule, made), *(scores if before != after else [])]


def _kept(current: Frequencies, made: Extension) -> list[str]:
    """What becomes of the model's own rule."""
    if made.spec is None:
        return []
    if isinstance(current, DynamicNTK) and made.rule == "dynamic":
        return ["the model's own rule: nothing changes"]
    if type(current) is type(made.spec.frequencies):
        return ["the model's own rule, with another factor: the smallest change"]
    return [f"replaces the model's own {type(current).__name__}, with which its weights were tuned"]


def _made(start: Start, rule: RuleName, does: str, frequencies: Frequencies, **more: Any) -> Extension:
    return Extension(rule, does, dataclasses.replace(start.spec, frequencies=frequencies), **more)


def _rebased(start: Start, base: float) -> Frequencies:
    current = start.rule
    return dataclasses.replace(current, base=base) if isinstance(current, Proportional) else Plain(base)


def _only_plain(start: Start, rule: RuleName, does: str) -> Extension | None:
    """The refusal of rules that no stack has for heads of which a part stands still (p-RoPE)."""
    if isinstance(start.rule, Proportional):
        return Extension(rule, does, None, "no stack has it for p-RoPE, of which some pairs stand still")
    return None


def _pi(start: Start, length: int, factor: float) -> Extension:
    does = f"divides all positions by {factor:g}: every pair turns as far as in training"
    current = start.rule
    if isinstance(current, Proportional):
        return _made(start, "pi", does, dataclasses.replace(current, factor=factor))
    return _made(start, "pi", does, PositionInterpolation(start.base, factor))


def _ntk(start: Start, length: int, factor: float) -> Extension:
    if start.dim < 4:
        return Extension("ntk", "a new base", None, "two features have no slowest pair apart from the fastest")
    base = start.base * factor ** (start.dim / (start.dim - 2))
    does = f"base {base:.9g}: the fastest pair stays, the slowest is divided by {factor:g}"
    return _made(start, "ntk", does, _rebased(start, base), base=base)


def _dynamic(start: Start, length: int, factor: float) -> Extension:
    does = "ntk for the length that a sequence has: none up to the trained one"
    refused = _only_plain(start, "dynamic", does)
    if refused or start.dim < 4:
        return refused or Extension("dynamic", does, None, "two features have no slowest pair")
    current = start.rule
    # With factor 1 the base is that of ntk at every length; transformers' larger factors overshoot it.
    inner = current.factor if isinstance(current, DynamicNTK) else 1.0
    rule = DynamicNTK(start.base, inner, start.trained)
    base = start.base * (inner * factor - (inner - 1)) ** (start.dim / (start.dim - 2))
    notes = ("the base follows the longest sequence of a batch, and keys cached under another are off",)
    return _made(start, "dynamic", does, rule, base=base, notes=notes)


def _yarn(start: Start, length: int, factor: float, ramp: Ramp = "index") -> Extension:
    name: RuleName = "yarn" if ramp == "index" else "yarn-paper"
    current, factor = start.rule, start.factor_of(Yarn, length)
    rule = current if isinstance(current, Yarn) else Yarn(start.base)
    # An amplitude that is written out for one factor is not that of another.
    usual = Yarn(rule.base, rule.factor, rule.trained_length).amplitude()
    written = rule.attention_factor
    kept = None if written is None or abs(written / usual - 1) < 1e-6 else written
    rule = dataclasses.replace(rule, factor=factor, trained_length=start.trained, ramp=ramp, attention_factor=kept)
    over = "the index" if ramp == "index" else "turns (2309.00071, eq. 18)"
    does = (
        f"keeps pairs of {rule.beta_fast:g} turns and more in training, divides those of less than"
        f" {rule.beta_slow:g} by {factor:g}, with a ramp over {over}; sharpens scores"
    )
    notes = () if ramp == "index" else ("no stack loads this ramp: models and code have the other",)
    return _only_plain(start, name, does) or _made(start, name, does, rule, notes=notes)


def _yarn_paper(start: Start, length: int, factor: float) -> Extension:
    return _yarn(start, length, factor, ramp="ratio")


def _llama3(start: Start, length: int, factor: float) -> Extension:
    current, factor = start.rule, start.factor_of(Llama3, length)
    rule = current if isinstance(current, Llama3) else Llama3(start.base)
    rule = dataclasses.replace(rule, factor=factor, trained_length=start.trained)
    does = (
        f"keeps pairs of {rule.high_freq_factor:g} turns and more in training, divides those of less than"
        f" {rule.low_freq_factor:g} by {factor:g}, with a ramp between"
    )
    return _only_plain(start, "llama3", does) or _made(start, "llama3", does, rule)


def _base_bound(start: Start, length: int, factor: float) -> Extension:
    does = "a base whose score sum stays non-negative"
    moving = 2 * int(np.count_nonzero(start.spec.inv_freq()))
    if start.spec.head_dim - moving >= moving:
        return Extension("base-bound", does, None, "with the features that stand still the sum is never negative")
    if start.dim > WIDEST:
        return Extension("base-bound", does, None, f"bases are tried for heads of at most {WIDEST} features")
    if first_negative_distance(Plain(start.base).evaluate(start.dim), length + 1) is None:
        return Extension("base-bound", does, None, f"the base {start.base:g} already keeps the sum non-negative")
    low = max(start.base, FIRST * length)
    tried = low * STEP ** np.arange(int(np.log(HIGHEST / low) / np.log(STEP)))
    base = lowest_admissible_base(tried.tolist(), start.dim, length)
    if base is None:
        return Extension("base-bound", does, None, f"no base tried from {low:.4g} to {HIGHEST:g} keeps the sum")
    does = f"base {base:.9g}: the lowest tried that keeps the score sum non-negative up to {length}"
    count = int((tried <= base).sum())
    notes = (
        f"the lowest of {count} bases tried, from {low:.4g} on in steps of {100 * (STEP - 1):.1f} %: lower ones may lie"
        " between; made for training, not for use without",
    )
    return _made(start, "base-bound", does, _rebased(start, base), base=base, notes=notes)


def _base_law(start: Start, length: int, factor: float) -> Extension:
    does = "the critical base of the scaling law"
    if start.trained < 7:
        return Extension("base-law", does, None, "the trained length is below 7: no pair finished a turn")
    if critical_dimension(start.dim, start.base, start.trained) == start.dim:
        return Extension("base-law", does, None, "every pair finished a turn in training: the law sets no limit")
    base = critical_base(start.trained, length, start.base)
    does = f"base {base:.9g}: above it a model tuned at {length} reads past that"
    notes = ("made for a model that is tuned with it, not for use without",)
    return _made(start, "base-law", does, _rebased(start, base), base=base, notes=notes)


def _longrope(start: Start, length: int, factor: float) -> Extension:
    does = "a divisor for each pair"
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
