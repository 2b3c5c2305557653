"""Experiments on text: convergence, extrapolation, and small changes of RoPE."""

import dataclasses
from collections.abc import Mapping, Sequence

from ropewalk.lab.decoder import AttentionName
from ropewalk.lab.experiment import SWEPT_RATES, Arm, Experiment, Statement, Value, final_loss
from ropewalk.lab.rates import rate_of
from ropewalk.lab.run import Run
from ropewalk.lab.training import RunResult

__all__ = ["ALL_ENCODINGS", "EXPERIMENTS", "share_of_steps", "text_run"]

# Size -> trained length, batch, steps.
SCALES = {"micro": (64, 16, 600), "tiny": (256, 32, 2000), "small": (256, 64, 4000)}
# The trained length times these is evaluated.
MULTIPLES = (1, 2, 4, 8)
FAR = 4

ALL_ENCODINGS = (
    "rope",
    "alibi",
    "t5",
    "sinusoidal",
    "none",
    "learned",
    "recurrent",
    "multiplicative",
    "concatenated",
    "rope-across-heads",
    "xpos",
)


def text_run(
    encoding: str, size: str, *, attention: AttentionName = "softmax", task: str = "text", offset: int = 0
) -> Run:
    """A run on text at the scale of a size."""
    length, batch, steps = SCALES[size]
    return Run(
        encoding,
        size=size,
        length=length,
        batch=batch,
        steps=steps,
        rate=rate_of(encoding, size, attention),
        task=task,
        attention=attention,
        lengths=tuple(length * x for x in MULTIPLES),
        offset=offset,
    )


def share_of_steps(label: str, baseline: str) -> Value:
    """The share of the steps after which an arm has the last validation loss of another; 1 if it never has it.

    It is a multiple of the steps between validations. It is None if a loss of either arm is not finite.
    """

    def value(results: Mapping[str, RunResult]) -> float | None:
        points, others = (_finite(results[x].curves["loss by step"]) for x in (label, baseline))
        if points is None or others is None:
            return None
        target, steps = others[-1][1], points[-1][0]
        return next((step for step, loss in points if loss <= target), steps) / steps

    return value


def _finite(points: Sequence[tuple[float, float | None]]) -> list[tuple[float, float]] | None:
    """The points of a curve, or None if a value is missing."""
    present = [(x, y) for x, y in points if y is not None]
    return present if len(present) == len(points) else None


def by_length(label: str, multiple: int) -> Value:
    """The loss of an arm at a multiple of the trained length, which is its first point."""

    def value(results: Mapping[str, RunResult]) -> float | None:
        points = results[label].curves["loss by length"]
        return dict(points)[points[0][0] * multiple]

    return value


def rise(label: str) -> Value:
    """How much the loss of an arm rises from the trained length to 4 times of it."""

    def value(results: Mapping[str, RunResult]) -> float | None:
        near, far = by_length(label, 1)(results), by_length(label, FAR)(results)
        return None if near is None or far is None else far - near

    return value


def _compare(
    name: str,
    question: str,
    encodings: Mapping[str, str],
    statements: tuple[Statement, ...],
    direction: str,
    *,
    metric: str = "validation loss at the trained length, in nats per byte",
    curves: tuple[str, ...] = ("loss by step",),
    attention: AttentionName = "softmax",
    task: str = "text",
    offset: int = 0,
    rate_like: Mapping[str, str] | None = None,
) -> Experiment:
    """An experiment whose arms differ in their encodings alone: label -> encoding.

    Labels in `rate_like` have the rate of another encoding; "*" is for all others.
    """

    def arm(label: str, encoding: str, size: str) -> Arm:
        run = text_run(encoding, size, attention=attention, task=task, offset=offset)
        likes = rate_like or {}
        like = likes.get(label, likes.get("*", encoding))
        return Arm(label, dataclasses.replace(run, rate=rate_of(like, size, attention)))

    def arms(size: str) -> list[Arm]:
        return [arm(label, encoding, size) for label, encoding in encodings.items()]

    def arm_for(encoding: str, size: str) -> Arm:
        return arm(encoding, encoding, size)

    rates = SWEPT_RATES
    for label, like in (rate_like or {}).items():
        rates += f"; here {'all encodings have' if label == '*' else f'{label!r} has'} that of {like}"
    return Experiment(name, question, metric, direction, statements, arms, arm_for, curves, rates)


def _same(*encodings: str) -> dict[str, str]:
    return {encoding: encoding for encoding in encodings}


# A loss that rises by less than this is called kept, in nats per byte.
KEPT = 0.05


def _keeps(label: str, source: str) -> Statement:
    return Statement(f"the loss of {label} rises by less than {KEPT} at 4 times its length", source, rise(label), KEPT)


_FIG_3 = "2104.09864 fig. 3"
_PRESS = "2108.12409 tab. 2"

CONVERGENCE = _compare(
    "convergence",
    "Does a model with RoPE learn in fewer steps than one with positions that are added?",
    _same("rope", "sinusoidal", "learned", "none"),
    (
        Statement("rope ends with a lower loss than sinusoidal", _FIG_3, final_loss("rope"), final_loss("sinusoidal")),
        Statement(
            "rope has sinusoidal's last loss after a share of the steps below 0.85",
            _FIG_3,
            share_of_steps("rope", "sinusoidal"),
            0.85,
        ),
        Statement("rope ends with a lower loss than learned", _FIG_3, final_loss("rope"), final_loss("learned")),
        Statement("rope ends with a lower loss than none", _FIG_3, final_loss("rope"), final_loss("none")),
    ),
    "rope is lower; in the figure it has the baseline's last loss after 0.45 of the steps",
)

CONVERGENCE_LINEAR = _compare(
    "convergence-linear",
    "The same with linear attention (elu + 1): does RoPE make it learn faster?",
    _same("rope", "sinusoidal", "none"),
    (
        Statement("rope ends with a lower loss than none", f"{_FIG_3} right", final_loss("rope"), final_loss("none")),
        Statement(
            "rope ends with a lower loss than sinusoidal",
            f"{_FIG_3} right",
            final_loss("rope"),
            final_loss("sinusoidal"),
        ),
    ),
    "rope is lower (a Performer with and without RoPE)",
    attention="linear",
)

EXTRAPOLATION = _compare(
    "extrapolation",
    "What happens to the same tokens when the context is longer than the trained one?",
    _same(*ALL_ENCODINGS),
    (
        _keeps("rope", "001, 003, 004"),
        _keeps("sinusoidal", "004"),
        _keeps("recurrent", "004"),
        _keeps("alibi", _PRESS),
        Statement("alibi is lower than rope at 4 times", _PRESS, by_length("alibi", FAR), by_length("rope", FAR)),
        Statement("t5 is lower than rope at 4 times", _PRESS, by_length("t5", FAR), by_length("rope", FAR)),
        Statement(
            "rope is lower than sinusoidal at 4 times", _PRESS, by_length("rope", FAR), by_length("sinusoidal", FAR)
        ),
    ),
    "alibi and t5 stay, rope rises, sinusoidal rises more; learned and multiplicative are not defined",
    metric="loss of the same held-out bytes after contexts of 1, 2, 4 and 8 times the trained length",
    curves=("loss by length", "loss by step"),
)

WHOLE_MODEL = _compare(
    "whole-model",
    "One rotation of the whole model width, or one per head?",
    _same("rope", "rope-across-heads"),
    (
        Statement(
            "rope per head ends with a lower loss than one rotation of the width",
            "000",
            final_loss("rope"),
            final_loss("rope-across-heads"),
        ),
    ),
    "the note prefers neither; models rotate each head",
)

PLACEMENT = _compare(
    "placement",
    "Sinusoids before the projection, W(x + p), or after it, Wx + p?",
    {
        "W(x + p)": "sinusoidal",
        "Wx + p": "sinusoidal placement=projection",
        "Wx + p in scores": "sinusoidal placement=scores",
    },
    (Statement("Wx + p ends with a lower loss than W(x + p)", "002", final_loss("Wx + p"), final_loss("W(x + p)")),),
    "the notes write the second and mean the first; nobody states which learns faster",
)

PAIRING = _compare(
    "pairing",
    "How much do the pairing and the share of rotated features matter?",
    {
        "interleaved": "rope",
        "half": "rope pairing=half",
        "half of the features": "rope part=0.5",
        "a quarter": "rope part=0.25",
        "none": "none",
    },
    (
        Statement(
            "half ends with a lower loss than interleaved", "2104.09864", final_loss("half"), final_loss("interleaved")
        ),
        Statement(
            "all features end with a lower loss than a quarter",
            "2410.06205 tab. 2",
            final_loss("interleaved"),
            final_loss("a quarter"),
        ),
        Statement(
            "a quarter ends with a lower loss than none",
            "2410.06205 tab. 2",
            final_loss("a quarter"),
            final_loss("none"),
        ),
    ),
    "the pairings are the same up to a permutation; a quarter is slightly worse than all, none is much worse",
)

LEARNED_FREQUENCIES = _compare(
    "learned-frequencies",
    "Does it help to train the frequencies of RoPE?",
    {"fixed": "rope", "learned": "rope learned=True"},
    (Statement("learned ends with a lower loss than fixed", "2104.09864", final_loss("learned"), final_loss("fixed")),),
    "the paper fixes them without a comparison",
    curves=("loss by step", "loss by length"),
)

BFLOAT16_ANGLES = _compare(
    "bfloat16-angles",
    "What do positions in bfloat16 cost, if samples begin anywhere below 8192?",
    {"exact": "rope", "bfloat16": "ropewalk.lab.variants:Bfloat16Angles"},
    (
        Statement(
            "exact ends with a lower loss than bfloat16", "2411.13476", final_loss("exact"), final_loss("bfloat16")
        ),
    ),
    "bfloat16 has 897 distinct positions below 8192, so neighbours share theirs",
    metric="validation loss at positions from 8192 on, in nats per byte",
    offset=8192,
)

LINEAR_BIAS = _compare(
    "linear-bias",
    "Does linear attention learn from ALiBi and T5's bias?",
    _same("rope", "alibi", "t5", "none"),
    (
        Statement("alibi ends with a lower loss than none", "2108.12409", final_loss("alibi"), final_loss("none")),
        Statement("t5 ends with a lower loss than none", "1910.10683", final_loss("t5"), final_loss("none")),
        Statement("rope ends with a lower loss than alibi", "2104.09864", final_loss("rope"), final_loss("alibi")),
    ),
    "biases were proposed for softmax; nobody has compared them in linear attention",
    attention="linear",
    curves=("loss by step", "loss by length"),
)

SHUFFLED = _compare(
    "shuffled",
    "A control: in shuffled text no encoding can help.",
    _same("rope", "alibi", "none"),
    (
        Statement("rope ends with a lower loss than none", "control", final_loss("rope"), final_loss("none")),
        Statement("alibi ends with a lower loss than none", "control", final_loss("alibi"), final_loss("none")),
    ),
    "undecided: a difference here would be an error of the lab",
    task="shuffled-text",
    rate_like={"*": "none"},
)

_VARIANTS = "ropewalk.lab.variants:"

WRONG = _compare(
    "wrong-encodings",
    "Another control: does the lab notice encodings that are wrong?",
    {
        "rope": "rope",
        "rope at 0": f"{_VARIANTS}PositionsZero",
        "rope, wrong sign": f"{_VARIANTS}WrongSign",
        "alibi": "alibi",
        "alibi, wrong sign": f"{_VARIANTS}GrowingBias",
    },
    (
        Statement(
            "rope ends with a lower loss than at position 0 alone",
            "control",
            final_loss("rope"),
            final_loss("rope at 0"),
        ),
        Statement(
            "rope ends with a lower loss than with the wrong sign in k",
            "control",
            final_loss("rope"),
            final_loss("rope, wrong sign"),
        ),
        Statement(
            "alibi ends with a lower loss than with growing slopes",
            "control",
            final_loss("alibi"),
            final_loss("alibi, wrong sign"),
        ),
    ),
    "all hold: a wrong encoding that is not noticed would be an error of the lab",
    rate_like={"alibi, wrong sign": "alibi"},
)

EXPERIMENTS = (
    CONVERGENCE,
    CONVERGENCE_LINEAR,
    EXTRAPOLATION,
    WHOLE_MODEL,
    PLACEMENT,
    PAIRING,
    LEARNED_FREQUENCIES,
    BFLOAT16_ANGLES,
    LINEAR_BIAS,
    SHUFFLED,
    WRONG,
)
