"""Experiments: verdicts, and that each is registered completely."""

import json
from importlib.resources import files

import pytest

from ropewalk.lab.decoder import SIZES
from ropewalk.lab.experiment import Statement, Verdict, judge
from ropewalk.lab.experiments import EXPERIMENTS
from ropewalk.lab.rates import RATES, rate_of, sweeps
from ropewalk.lab.record import from_json


def verdict(lower, higher, **options):
    statement = Statement("a < b", "", lambda x: x["a"], lambda x: x["b"], **options)
    return judge(statement, [{"a": a, "b": b} for a, b in zip(lower, higher, strict=True)])


@pytest.mark.parametrize(
    ("lower", "higher", "expected"),
    [
        ([1.0, 1.1], [2.0, 2.1], Verdict.HOLDS),
        ([2.0, 2.1], [1.0, 1.1], Verdict.FAILS),
        ([1.0, 1.5], [1.4, 1.9], Verdict.UNDECIDED),  # the difference 0.4 is smaller than the range 0.5
        ([1.0], [2.0], Verdict.UNDECIDED),  # one seed
        ([1.0, 1.0], [1.0, 1.0], Verdict.UNDECIDED),
        ([1.0, None], [2.0, 2.1], Verdict.UNDECIDED),
    ],
)
def test_verdicts(lower, higher, expected):
    assert verdict(lower, higher).verdict is expected


def test_a_constant_and_what_a_statement_needs():
    constant = Statement("a < 0.5", "", lambda x: x, 0.5)
    assert judge(constant, [0.1, 0.2]).verdict is Verdict.HOLDS
    assert judge(constant, [0.1, 0.8]).verdict is Verdict.UNDECIDED
    needs = (("accuracy", lambda x: x["a"], 0.99),)
    outcome = verdict([0.5, 0.995], [2.0, 2.1], needs=needs)
    assert outcome.verdict is Verdict.UNDECIDED
    assert outcome.reason == "accuracy: 0.5, 0.995; at least 0.99 is needed"
    assert verdict([0.99, 0.995], [2.0, 2.1], needs=needs).verdict is Verdict.HOLDS


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
