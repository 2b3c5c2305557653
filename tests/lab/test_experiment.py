"""Experiments: verdicts, and that each is registered completely."""

import json
from importlib.resources import files

import pytest

from ropewalk.lab.decoder import SIZES
from ropewalk.lab.experiment import Statement, Verdict, final_loss, judge
from ropewalk.lab.experiments import EXPERIMENTS
from ropewalk.lab.experiments.text import by_length, share_of_steps
from ropewalk.lab.rates import RATES, rate_of, sweeps
from ropewalk.lab.record import from_json
from ropewalk.lab.training import RunResult


def verdict(lower, higher, **options):
    statement = Statement("a < b", "", lambda x: x["a"], lambda x: x["b"], **options)
    return judge(statement, [{"a": a, "b": b} for a, b in zip(lower, higher, strict=True)])


@pytest.mark.parametrize(
    ("lower", "higher", "expected"),
    [
        ([1.0, 1.1, 1.0], [2.0, 2.1, 2.0], Verdict.HOLDS),
        ([2.0, 2.1, 2.0], [1.0, 1.1, 1.0], Verdict.FAILS),
        ([1.0, 1.5, 1.0], [1.4, 1.9, 1.4], Verdict.UNDECIDED),  # the difference 0.4 is smaller than the range 0.5
        ([1.0, 1.0, 1.0], [1.0, 1.0, 1.0], Verdict.UNDECIDED),
    ],
)
def test_verdicts(lower, higher, expected):
    assert verdict(lower, higher).verdict is expected


@pytest.mark.parametrize("seeds", [1, 2])
def test_fewer_than_three_seeds_decide_nothing(seeds):
    outcome = verdict([1.0, 1.1][:seeds], [2.0, 2.1][:seeds])
    assert outcome.verdict is Verdict.UNDECIDED
    assert outcome.reason.endswith("fewer than three seeds")


def result(losses, **curves):
    """A result with losses per step, and points of other curves."""
    by_step = [(25.0 * i, loss) for i, loss in enumerate(losses)]
    return RunResult({"loss by step": by_step, **{name.replace("_", " "): x for name, x in curves.items()}}, 0, 0, None)


def test_a_loss_that_is_not_finite_decides_nothing_and_is_named():
    good, diverged = result([3.0, 2.0]), result([3.0, None])
    ends = Statement("a < b", "", final_loss("a"), final_loss("b"))
    outcome = judge(ends, [{"a": good, "b": good}, {"a": diverged, "b": good}, {"a": good, "b": good}])
    assert outcome.verdict is Verdict.UNDECIDED
    assert outcome.reason == "a number is missing: the loss of a is not finite at step 25"
    # Not 1, as if it had learned slowly, for either arm and wherever it is.
    share = Statement("share", "", share_of_steps("a", "b"), 0.85)
    for other in (diverged, result([None, 2.0])):
        for results in ({"a": other, "b": good}, {"a": good, "b": other}):
            assert share.lower(results) is None
            outcome = judge(share, [results] * 3)
            assert outcome.verdict is Verdict.UNDECIDED
            assert "is not finite at step" in outcome.reason
    assert share.lower({"a": result([3.0, 2.0, 1.0]), "b": result([3.0, 3.0, 2.0])}) == 0.5
    # Nor is what a statement needs reported as a model that has not learned.
    needs = (("accuracy of a", lambda x: x["a"].curves["accuracy by length"][0][1], 0.99),)
    solving = result([3.0, None], accuracy_by_length=[(8, None)])
    outcome = judge(Statement("b", "", final_loss("b"), 9.0, needs), [{"a": solving, "b": good}] * 3)
    assert outcome.reason == "a number is missing: the loss of a is not finite at step 25"
    # An encoding that is not defined at a length has no loss there.
    table = result([3.0, 2.0], loss_by_length=[(8, 2.0), (32, None)])
    far = Statement("far", "", by_length("a", 4), 9.0)
    assert "a is not defined at length 32" in judge(far, [{"a": table}] * 3).reason


def test_a_constant_and_what_a_statement_needs():
    constant = Statement("a < 0.5", "", lambda x: x["a"], 0.5)
    assert judge(constant, [{"a": x} for x in (0.1, 0.2, 0.1)]).verdict is Verdict.HOLDS
    assert judge(constant, [{"a": x} for x in (0.1, 0.8, 0.1)]).verdict is Verdict.UNDECIDED
    needs = (("accuracy", lambda x: x["a"], 0.99),)
    outcome = verdict([0.5, 0.995, 0.99], [2.0, 2.1, 2.0], needs=needs)
    assert outcome.verdict is Verdict.UNDECIDED
    assert outcome.reason == "accuracy: 0.5, 0.995, 0.99; at least 0.99 is needed"
    assert verdict([0.99, 0.995, 0.99], [2.0, 2.1, 2.0], needs=needs).verdict is Verdict.HOLDS


@pytest.mark.parametrize("experiment", EXPERIMENTS.values(), ids=lambda x: x.name)
def test_every_experiment_is_registered(experiment):
    assert experiment.question.endswith(("?", "."))
    assert experiment.statements
    assert all(x.source and x.text for x in experiment.statements)
    for size in SIZES:
        arms = experiment.arms(size)
        labels = [arm.label for arm in arms]
        assert len(set(labels)) == len(labels) >= 2
        assert len({arm.run.key for arm in arms}) == len(arms)
        assert all(arm.run.size == size and arm.run.seed == 0 for arm in arms)
        assert experiment.arm_for("xpos", size).run.encoding == "xpos"


RECORDS = sorted(path.name for path in files("ropewalk").joinpath("data/lab").iterdir() if path.name != "rates.json")


@pytest.mark.parametrize("name", RECORDS)
def test_shipped_records_have_the_verdicts_of_their_figures(name):
    record = json.loads(files("ropewalk").joinpath(f"data/lab/{name}").read_text(encoding="utf-8"))
    findings = from_json(record)
    assert record["date"]
    assert record["hardware"]
    # One text for all arms; puzzles have none.
    digests = [(arm["run"]["task"], arm["results"][0]["digest"]) for arm in record["arms"]]
    assert len({digest for task, digest in digests if task.endswith("text")}) <= 1
    assert {digest for task, digest in digests if not task.endswith("text")} <= {None}
    statements = findings.experiment.statements
    assert [x.text for x in statements] == [x["text"] for x in record["statements"]]
    assert tuple(judge(x, findings.results) for x in statements) == findings.outcomes
    # What is registered now is what was trained.
    registered = {arm.label: arm.run for arm in EXPERIMENTS[record["experiment"]].arms(record["size"])}
    for arm in findings.arms:
        assert arm.run == registered[arm.label]


def test_rates_are_the_best_of_the_sweep():
    for size, kinds in sweeps().items():
        for attention, encodings in kinds.items():
            for encoding, losses in encodings.items():
                assert set(losses) <= {f"{rate:g}" for rate in RATES}
                best = rate_of(encoding, size, attention)
                assert losses[f"{best:g}"] == min(losses.values())
