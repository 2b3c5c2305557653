"""Experiments from beginning to end, with runs of a few steps."""

import dataclasses
import importlib
import json
import math
import multiprocessing
import os
import re
import signal
import sys
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch

import ropewalk as rw
from lab.small_runs import CPU, shortened, shortened_arms
from ropewalk.lab.conduct import conduct, runs_of
from ropewalk.lab.experiment import Arm, Verdict
from ropewalk.lab.experiments import EXPERIMENTS
from ropewalk.lab.record import as_json, from_json
from ropewalk.lab.run import Run
from ropewalk.lab.training import Interrupted, train
from ropewalk.tools.lab.plot import plot_findings
from slow import slow_except


class Own(rw.Encoding):
    """An encoding of a user, without any hook."""


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """One folder for all experiments: many have runs in common."""
    return tmp_path_factory.mktemp("runs")


# These have all kinds of curves.
PLOTTED = ("extrapolation", "base", "length-generalisation")


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_runs(name, shared, tmp_path):
    experiment = EXPERIMENTS[name]
    arms = shortened_arms([*experiment.arms("micro"), experiment.arm_for(f"{__name__}:Own", "micro")])
    findings = conduct(experiment, arms, "micro", (0,), CPU, shared)
    assert len(findings.outcomes) == len(experiment.statements)
    # One seed decides nothing.
    assert {outcome.verdict for outcome in findings.outcomes} == {Verdict.UNDECIDED}
    assert all(experiment.curves[0] in findings.results[0][arm.label].curves for arm in arms[:1])
    record = as_json(findings, CPU, hardware="test", command="test")
    assert from_json(json.loads(json.dumps(record, allow_nan=False))) == findings
    if name in PLOTTED:
        plot_findings(findings, str(tmp_path / "picture.png"))
        assert (tmp_path / "picture.png").stat().st_size > 10_000


def test_results_are_read_and_not_computed_again(tmp_path):
    experiment = EXPERIMENTS["whole-model"]
    arms = shortened_arms(experiment.arms("micro"))
    steps: list[tuple[str, int]] = []
    first = conduct(
        experiment, arms, "micro", (0,), CPU, tmp_path, progress=lambda run, step, _: steps.append((run.encoding, step))
    )
    assert steps == [("rope", 0), ("rope", 1), ("rope-across-heads", 0), ("rope-across-heads", 1)]
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


@pytest.mark.parametrize("jobs", slow_except([1], [1, 2]))
def test_errors_of_a_run_reach_the_caller(tmp_path, jobs):
    experiment = EXPERIMENTS["whole-model"]
    good = shortened(experiment.arms("micro")[0].run)
    arms = [Arm("bad", dataclasses.replace(good, encoding="rope nonsense=1")), Arm("good", good)]
    with pytest.raises(rw.RopewalkError, match="nonsense"):
        conduct(experiment, arms, "micro", (0, 1), CPU, tmp_path, jobs=jobs)


def test_a_result_of_other_options_is_refused(tmp_path):
    experiment = EXPERIMENTS["whole-model"]
    arms = shortened_arms(experiment.arms("micro"))[:1]
    quiet = dataclasses.replace(experiment, statements=())
    conduct(quiet, arms, "micro", (0,), CPU, tmp_path)
    for changed, message in (({"dtype": "bfloat16"}, "dtype float32\n.*dtype bfloat16"), ({"every": 1}, "every 4\n")):
        with pytest.raises(rw.RopewalkError, match=f"expected: {message}"):
            conduct(quiet, arms, "micro", (0,), dataclasses.replace(CPU, **changed), tmp_path)


class Killed(rw.Encoding):
    """Kills the process that trains, as a system without free memory does."""

    def embed(self, x, positions=None, *, cache=None):
        assert multiprocessing.parent_process() is not None
        os.kill(os.getpid(), signal.SIGKILL)
        return x


def test_a_process_that_is_killed_is_no_bug(tmp_path):
    experiment = dataclasses.replace(EXPERIMENTS["whole-model"], statements=())
    arms = shortened_arms(experiment.arms("micro"))
    arms[1] = Arm("killed", dataclasses.replace(arms[1].run, encoding=f"{__name__}:Killed"))
    with pytest.raises(rw.RopewalkError, match=r"one that ended abruptly(.*\n)*do this: +continue with --resume"):
        conduct(experiment, arms, "micro", (0,), CPU, tmp_path, jobs=2)


def test_results_of_another_source_or_torch_are_refused(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    file = tmp_path / "edited_for_lab.py"
    file.write_text("import ropewalk as rw\n\n\nclass Mine(rw.Encoding):\n    pass\n")
    experiment = dataclasses.replace(EXPERIMENTS["whole-model"], statements=())
    (arm, _) = shortened_arms(experiment.arms("micro"))
    own = Arm("own", dataclasses.replace(arm.run, encoding="edited_for_lab:Mine"))

    def run(*arms):
        return conduct(experiment, arms, "micro", (0,), CPU, tmp_path / "out")

    first = run(arm, own)
    # What this process has imported is what it trains.
    file.write_text(file.read_text() + "    scale = 2\n")
    assert run(arm, own) == first
    # Another process imports the edited file.
    sys.modules.pop("edited_for_lab")
    importlib.invalidate_caches()
    with pytest.raises(
        rw.RopewalkError,
        match=r"(?s)result in .*source of encoding \w+\ngot: +source of encoding \w+\n"
        r"do this: +choose another folder: since then the file of the encoding has changed",
    ):
        run(arm, own)
    (tmp_path / "out" / own.run.key / "result.json").unlink()
    with pytest.raises(rw.RopewalkError, match=r"(?s)resume from .*source of encoding"):
        run(arm, own)
    assert run(arm).results[0]["rope"] == first.results[0]["rope"]
    torch_now = str(torch.__version__)
    monkeypatch.setattr(torch, "__version__", "2.99")
    with pytest.raises(rw.RopewalkError, match=f"expected: torch {re.escape(torch_now)}\ngot: +torch 2.99"):
        run(arm)


class Diverging(rw.Encoding):
    """An encoding with which no loss is finite."""

    def embed(self, x, positions=None, *, cache=None):
        return x * math.nan


def test_a_loss_that_is_not_finite_is_none_and_decides_nothing(tmp_path):
    experiment = EXPERIMENTS["whole-model"]
    (other, arm) = shortened_arms(experiment.arms("micro"))
    arm = arm._replace(run=dataclasses.replace(arm.run, encoding=f"{__name__}:Diverging"))
    findings = conduct(experiment, [other, arm], "micro", (0, 1), CPU, tmp_path)
    assert [x[arm.label].final_loss for x in findings.results] == [None, None]
    assert {curve for x in findings.results for _, curve in x[arm.label].curves["loss by length"]} == {None}
    assert findings.outcomes[0].verdict is Verdict.UNDECIDED
    assert findings.outcomes[0].reason.endswith(f"the loss of {arm.label} is not finite at step 0")
    json.dumps(as_json(findings, CPU, hardware="", command=""), allow_nan=False)


def test_answers_of_a_model_whose_loss_is_not_finite_are_not_wrong():
    run = Run(f"{__name__}:Diverging", task="recall", length=4, batch=2, steps=1, lengths=(4,), evaluated=2)
    _, result = train(run, CPU)
    assert set(result.curves) > {"accuracy by length", "exact by length", "accuracy by distance"}
    assert {y for points in result.curves.values() for _, y in points} == {None}


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(signal, "pthread_sigmask"), reason="Ctrl-C is not blocked there")
def test_ctrl_c_while_processes_load_interrupts(tmp_path, monkeypatch):
    sent: list[None] = []

    class Pool(ProcessPoolExecutor):
        """Sends to all processes what a terminal sends for Ctrl-C, when the first ones have just started."""

        def submit(self, *args, **kwargs):
            future = super().submit(*args, **kwargs)
            processes = (*multiprocessing.active_children(), multiprocessing.current_process())
            # A second signal would end this process.
            while not sent:
                sent.extend(os.kill(process.pid or 0, signal.SIGINT) for process in processes)
            return future

    monkeypatch.setattr("ropewalk.lab.conduct.ProcessPoolExecutor", Pool)
    experiment = dataclasses.replace(EXPERIMENTS["whole-model"], statements=())
    with pytest.raises(Interrupted):
        conduct(experiment, shortened_arms(experiment.arms("micro")), "micro", (0, 1), CPU, tmp_path, jobs=2)
    assert len(list(tmp_path.glob("*/result.json"))) < 4
