"""Experiments that continue a trained model: rules that extend its context, and other bases."""

import dataclasses

from ropewalk.lab.experiment import SWEPT_RATES, Arm, Experiment, Statement, Value
from ropewalk.lab.experiments.text import FAR, SCALES, by_length, rise, text_run
from ropewalk.lab.run import Run

__all__ = ["EXPERIMENTS", "tuned"]

# A tuned model is trained for a twentieth of the steps, at a tenth of the rate.
TUNED_STEPS, TUNED_RATE = 0.05, 0.1
_RATES = f"{SWEPT_RATES}; for tuning {TUNED_RATE:g} times the rate before it"
RULES = {
    "plain": "rope",
    "pi": "rope rule=pi factor=4",
    "ntk": "rope rule=ntk factor=4",
    "by-parts": "rope rule=by-parts factor=4 trained={length}",
    "yarn": "rope rule=yarn factor=4 trained={length}",
}


def tuned(parent: Run, encoding: str, *, steps: int, length: int, batch: int) -> Run:
    """A run that continues another one with another encoding; 0 steps only evaluate it."""
    rate = parent.rate * TUNED_RATE
    return dataclasses.replace(
        parent, encoding=encoding, steps=steps, length=length, batch=batch, rate=rate, parent=parent
    )


def _extension_arms(size: str) -> list[Arm]:
    length, batch, steps = SCALES[size]
    parent = text_run("rope", size)
    encodings = {label: text.format(length=length) for label, text in RULES.items()}
    untuned = [Arm(label, tuned(parent, x, steps=0, length=length, batch=batch)) for label, x in encodings.items()]
    # As many tokens per step as before.
    sizes = {"length": FAR * length, "batch": batch // FAR}
    steps = round(TUNED_STEPS * steps)
    return untuned + [Arm(f"{label}, tuned", tuned(parent, x, steps=steps, **sizes)) for label, x in encodings.items()]


def _extension_arm(encoding: str, size: str) -> Arm:
    parent = text_run(encoding, size)
    return Arm(encoding, tuned(parent, encoding, steps=0, length=parent.length, batch=parent.batch))


def _at_far(label: str) -> Value:
    """The loss at 4 times the length that the parent was trained on. All arms are evaluated at the same lengths."""
    return by_length(label, FAR)


EXTENSION = Experiment(
    "extension",
    "Which rule extends the context of a trained RoPE to 4 times its length, without tuning and with it?",
    "loss of the same held-out bytes after a context of 4 times the trained length",
    "without tuning ntk and yarn help and pi does not; with tuning pi is better than no rule, and yarn is better still",
    (
        Statement("without tuning, ntk is lower than plain", "2309.00071", _at_far("ntk"), _at_far("plain")),
        Statement("without tuning, yarn is lower than plain", "2309.00071", _at_far("yarn"), _at_far("plain")),
        Statement("without tuning, yarn is lower than ntk", "2309.00071", _at_far("yarn"), _at_far("ntk")),
        Statement("without tuning, by-parts is lower than pi", "2309.00071", _at_far("by-parts"), _at_far("pi")),
        Statement("without tuning, pi is lower than plain", "2306.15595", _at_far("pi"), _at_far("plain")),
        Statement("tuned, pi is lower than plain", "2306.15595", _at_far("pi, tuned"), _at_far("plain, tuned")),
        Statement("tuned, yarn is lower than pi", "2309.00071", _at_far("yarn, tuned"), _at_far("pi, tuned")),
    ),
    _extension_arms,
    _extension_arm,
    ("loss by length",),
    _RATES,
)

BASES = {"base 50": 50, "base 500": 500, "base 10000": 10_000, "base 1000000": 1_000_000}


def _base_arms(size: str) -> list[Arm]:
    length, batch, steps = SCALES[size]
    parent = text_run("rope", size)
    return [
        Arm(label, tuned(parent, f"rope base={base}", steps=round(2 * TUNED_STEPS * steps), length=length, batch=batch))
        for label, base in BASES.items()
    ]


def _base_arm(encoding: str, size: str) -> Arm:
    length, batch, steps = SCALES[size]
    parent = text_run(encoding, size)
    return Arm(encoding, tuned(parent, encoding, steps=round(2 * TUNED_STEPS * steps), length=length, batch=batch))


BASE_TUNING = Experiment(
    "base-tuning",
    "Does tuning at the trained length with a smaller or a larger base extend the context?",
    "rise of the loss of the same held-out bytes from the trained length to 4 times of it",
    "both are better than 10000; a larger base up to its bound, a smaller one without a bound",
    (
        Statement("base 1000000 rises less than 10000", "2310.05209", rise("base 1000000"), rise("base 10000")),
        Statement("base 500 rises less than 10000", "2310.05209", rise("base 500"), rise("base 10000")),
        Statement("base 50 rises less than 10000", "2310.05209", rise("base 50"), rise("base 10000")),
    ),
    _base_arms,
    _base_arm,
    ("loss by length",),
    _RATES,
)

EXPERIMENTS = (EXTENSION, BASE_TUNING)
