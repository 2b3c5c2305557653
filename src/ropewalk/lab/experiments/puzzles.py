"""Experiments on puzzles, whose answers are right or wrong: base and context, and generalisation to longer answers."""

from collections.abc import Mapping

from ropewalk.lab.experiment import Arm, Experiment, Statement, Value, final_loss
from ropewalk.lab.experiments.text import text_run
from ropewalk.lab.rates import rate_of
from ropewalk.lab.run import Run
from ropewalk.lab.training import RunResult

__all__ = ["EXPERIMENTS"]

# Size -> pairs, batch, steps of recall.
_RECALL = {"micro": (8, 32, 1500), "tiny": (32, 64, 4000), "small": (64, 64, 4000)}
# Size -> symbols, batch, steps of copy and reverse.
_COPY = {"micro": (8, 64, 1500), "tiny": (20, 128, 5000), "small": (20, 128, 5000)}
_BASES = (10, 100, 1000, 10_000, 100_000)
# An answer that is not found within the trained length says nothing about longer ones.
SOLVED = 0.99
# Samples per length: with 64, one error would be below SOLVED.
_EVALUATED = 512


def _recall_run(encoding: str, size: str) -> Run:
    length, batch, steps = _RECALL[size]
    rate = rate_of(encoding, size, "softmax")
    return Run(encoding, size, length, batch, steps, rate, task="recall", lengths=(length,), evaluated=_EVALUATED)


def _base_arms(size: str) -> list[Arm]:
    recall = [Arm(f"base {base}", _recall_run(f"rope base={base}", size)) for base in _BASES]
    return recall + [Arm(f"text, base {base}", text_run(f"rope base={base}", size)) for base in (10, 10_000)]


def _far_accuracy(label: str) -> Value:
    """Accuracy in the class of the largest distances."""
    return lambda results: results[label].curves["accuracy by distance"][-1][1]


def _accuracy(label: str) -> Value:
    return lambda results: results[label].curves["accuracy by length"][0][1]


def _lost_accuracy(label: str) -> Value:
    """1 minus the accuracy at the largest distances."""

    def value(results: Mapping[str, RunResult]) -> float | None:
        accuracy = _far_accuracy(label)(results)
        return None if accuracy is None else 1 - accuracy

    return value


_NEEDED = (("accuracy of recall with base 10000", _accuracy("base 10000"), SOLVED),)

BASE = Experiment(
    "base",
    "Does the base of RoPE bound the distance at which a model finds a value by its key?",
    "errors of recall at the largest distances; validation loss on text",
    "errors grow as the base falls, while the loss on text hardly changes",
    (
        Statement(
            "base 10000 makes fewer errors than base 10 at the largest distances",
            "2405.14591 sec. 5",
            _lost_accuracy("base 10000"),
            _lost_accuracy("base 10"),
            _NEEDED,
        ),
        Statement(
            "base 10000 makes fewer errors than base 100 at the largest distances",
            "2405.14591 sec. 5",
            _lost_accuracy("base 10000"),
            _lost_accuracy("base 100"),
            _NEEDED,
        ),
        Statement(
            "on text, base 10000 ends with a lower loss than base 10",
            "2405.14591 sec. 5",
            final_loss("text, base 10000"),
            final_loss("text, base 10"),
        ),
    ),
    _base_arms,
    lambda encoding, size: Arm(encoding, _recall_run(encoding, size)),
    ("accuracy by distance",),
)


def _copy_run(encoding: str, size: str, task: str) -> Run:
    length, batch, steps = _COPY[size]
    lengths = tuple(round(length * x) for x in (1, 1.25, 1.5, 2))
    rate = rate_of(encoding, size, "softmax")
    return Run(encoding, size, length, batch, steps, rate, task=task, lengths=lengths, evaluated=_EVALUATED)


_GENERALISING = ("none", "t5", "alibi", "rope", "sinusoidal")


def _errors(label: str, index: int) -> Value:
    """Share of answers with an error at a length, which is the index of a point."""

    def value(results: Mapping[str, RunResult]) -> float | None:
        exact = results[label].curves["exact by length"][index][1]
        return None if exact is None else 1 - exact

    return value


def _exact(label: str) -> Value:
    return lambda results: results[label].curves["exact by length"][0][1]


def _generalises(better: str, worse: str, task: str) -> Statement:
    labels = f"{task}, {better}", f"{task}, {worse}"
    return Statement(
        f"{task}: {better} makes fewer errors than {worse} at 1.25 times the trained length",
        "2305.19466 fig. 3",
        _errors(labels[0], 1),
        _errors(labels[1], 1),
        tuple((f"exact answers of {label} at the trained length", _exact(label), SOLVED) for label in labels),
    )


LENGTH_GENERALISATION = Experiment(
    "length-generalisation",
    "Which encoding finds answers that are longer than those it was trained on?",
    "share of exact answers at 1, 1.25, 1.5 and 2 times the trained length (greedy decoding)",
    "none, then t5 and alibi; rope and absolute positions fail at once",
    tuple(
        _generalises(better, worse, task)
        for task in ("copy", "reverse")
        for better, worse in (("none", "rope"), ("t5", "rope"), ("alibi", "rope"))
    ),
    lambda size: [
        Arm(f"{task}, {encoding}", _copy_run(encoding, size, task))
        for task in ("copy", "reverse")
        for encoding in _GENERALISING
    ],
    lambda encoding, size: Arm(f"copy, {encoding}", _copy_run(encoding, size, "copy")),
    ("exact by length",),
)

EXPERIMENTS = (BASE, LENGTH_GENERALISATION)
