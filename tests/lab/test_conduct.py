"""Experiments from beginning to end, with runs of a few steps."""

import dataclasses

import pytest

import ropewalk as rw
from lab.small_runs import CPU, shortened, shortened_arms
from ropewalk.lab.conduct import conduct, runs_of
from ropewalk.lab.experiment import Arm, Verdict
from ropewalk.lab.experiments import EXPERIMENTS
from ropewalk.lab.record import as_json, from_json
from ropewalk.tools.lab.plot import plot_findings


class Own(rw.Encoding):
    """An encoding of a user, without any hook."""


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_runs(name, tmp_path):
    experiment = EXPERIMENTS[name]
    arms = shortened_arms([*experiment.arms("micro"), experiment.arm_for(f"{__name__}:Own", "micro")])
    findings = conduct(experiment, arms, "micro", (0,), CPU, tmp_path)
    assert len(findings.outcomes) == len(experiment.statements)
    # One seed decides nothing.
    assert {outcome.verdict for outcome in findings.outcomes} == {Verdict.UNDECIDED}
    assert all(experiment.curves[0] in findings.results[0][arm.label].curves for arm in arms[:1])
    record = as_json(findings, CPU, hardware="test", command="test")
    assert from_json(record) == findings
    plot_findings(findings, str(tmp_path / "picture.png"))
    assert (tmp_path / "picture.png").stat().st_size > 10_000


def test_results_are_read_and_not_computed_again(tmp_path):
    experiment = EXPERIMENTS["whole-model"]
    arms = shortened_arms(experiment.arms("micro"))
    steps: list[tuple[str, int]] = []
    first = conduct(
        experiment, arms, "micro", (0,), CPU, tmp_path, progress=lambda run, step, _: steps.append((run.encoding, step))
    )
    assert steps == [("rope", 0), ("rope", 2), ("rope-across-heads", 0), ("rope-across-heads", 2)]
    again = conduct(experiment, arms, "micro", (0,), CPU, tmp_path, progress=lambda *_: steps.append(("", -1)))
    assert again == first
    assert len(steps) == 4
    broken = next(tmp_path.glob("*/result.json"))
    broken.write_text("{")
    with pytest.raises(rw.RopewalkError, match=f"delete {broken}"):
        conduct(experiment, arms, "micro", (0,), CPU, tmp_path)


@pytest.mark.slow
def test_processes_compute_the_same_as_one(tmp_path):
    experiment = EXPERIMENTS["extension"]
    arms = shortened_arms(experiment.arms("micro"))[:3]
    one, two = (
        conduct(
            dataclasses.replace(experiment, statements=()), arms, "micro", (0, 1), CPU, tmp_path / str(jobs), jobs=jobs
        )
        for jobs in (1, 2)
    )
    for a, b in zip(one.results, two.results, strict=True):
        assert {label: x.curves for label, x in a.items()} == {label: x.curves for label, x in b.items()}


def test_parents_are_trained_once_and_first():
    arms = EXPERIMENTS["extension"].arms("micro")
    runs = runs_of(arms, (0, 1))
    assert [run.parent is None for run in runs[:3]] == [True, True, False]
    assert len(runs) == 2 + 2 * len(arms)
    assert all(run.parent is None or run.parent in runs for run in runs)
    assert all(run.parent is None or run.parent.seed == run.seed for run in runs)


def test_errors_of_a_run_reach_the_caller(tmp_path):
    experiment = EXPERIMENTS["whole-model"]
    arm = Arm("bad", dataclasses.replace(shortened(experiment.arms("micro")[0].run), encoding="rope nonsense=1"))
    for jobs in (1, 2):
        with pytest.raises(rw.RopewalkError, match="nonsense"):
            conduct(experiment, [arm, arm._replace(label="x")], "micro", (0, 1), CPU, tmp_path, jobs=jobs)
