"""Run the experiments of the lab on a GPU: all at `tiny`, convergence and extrapolation at `small`.

    python benchmarks/lab_gpu.py --minutes 9 [--out build/lab_gpu] [--jobs 3] [--seeds 3] [--compile small]
    python benchmarks/lab_gpu.py --plan

Call it until it prints "complete": each call trains as many whole runs as fit into its minutes. A process trains the
seeds of a run, or the rates of a sweep, side by side; --jobs processes do so at a time, because the host decides how
long small models take to start. A later call, on another machine too, reads results from --out and trains the rest, or
another seed. What a run does not need any more, its checkpoints and the weights that no other run continues, is
deleted, so that --out is small enough to carry. A result of other options is refused before anything is trained.

First come the sweeps of learning rates, which are written to `rates.json` in --out and used from there; what the
package's own rates.json has is not measured again. Then come the experiments. As soon as the runs of an experiment are
complete, its record is written: `extrapolation_tiny.json`.
"""

import argparse
import concurrent.futures
import copy
import dataclasses
import itertools
import json
import multiprocessing
import shlex
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from ropewalk.lab import rates
from ropewalk.lab.conduct import conduct, incomplete, performing, runs_of
from ropewalk.lab.decoder import AttentionName
from ropewalk.lab.experiment import Arm
from ropewalk.lab.experiments import EXPERIMENTS
from ropewalk.lab.experiments.text import ALL_ENCODINGS, text_run
from ropewalk.lab.record import as_json
from ropewalk.lab.run import Run
from ropewalk.lab.training import Settings, side_by_side

SMALL = ("rope", "sinusoidal", "alibi", "none")
LINEAR = ("rope", "sinusoidal", "none", "alibi", "t5")
SWEEP_SEED = 1000
FIRST_RATE = {"micro": 8e-3, "tiny": 4e-3, "small": 1e-3}
# Sweeps train for a part of the steps.
SWEEP_STEPS = {"tiny": 0.5, "small": 0.25}
EVERY = 50
# A group is started if it would end in time, with these seconds and this factor for what was not measured.
SHORT, CAUTION = 10.0, 1.3
# Runs of fewer steps say nothing about the time of a step.
LONG = 100
# `rates.sweeps` is replaced while runs are planned.
recorded_sweeps = rates.sweeps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--out", type=Path, default=Path("build/lab_gpu"))
    parser.add_argument("--jobs", type=int, default=3)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--sizes", nargs="+", default=("tiny", "small"))
    parser.add_argument("--only", nargs="+", default=tuple(EXPERIMENTS))
    parser.add_argument("--compile", nargs="*", default=(), help="sizes whose models are compiled")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--steps", type=int, help="train so many steps per run, to try this script")
    parser.add_argument("--plan", action="store_true", help="print how many runs there are, and train nothing")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    session = Session(args)
    if args.plan:
        session.print_plan()
        return
    for size in args.sizes:
        session.require_same_options(size)
    # Not fork: CUDA and threads of torch do not survive it.
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(args.jobs, context) as pool:
        # Not `all` of a generator: experiments of one size do not wait for the sweep of another.
        complete = [session.size(pool, size) for size in args.sizes]
    print("complete" if all(complete) else "incomplete; call it again")


class Session:
    """The runs that fit into one call."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.out = args, args.out
        self.ends = time.monotonic() + 60 * args.minutes
        # The longest time per step of a run that was measured in this call, by size and task.
        self.measured: dict[tuple[str, str], float] = {}

    def settings(self, size: str) -> Settings:
        dtype = "bfloat16" if self.args.device == "cuda" else "float32"
        return Settings(torch.device(self.args.device), dtype, compiled=size in self.args.compile, every=EVERY)

    def rates(self) -> dict[str, Any]:
        """The sweeps so far, as `ropewalk.lab.rates.sweeps` returns them: at first those of the package."""
        path = self.out / "rates.json"
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else copy.deepcopy(recorded_sweeps())

    def size(self, pool: concurrent.futures.Executor, size: str) -> bool:
        """The sweep and the experiments of a size. Return whether they are complete."""
        if not self.sweep(pool, size):
            return False
        with mock.patch.object(rates, "sweeps", self.rates):
            return self.experiments(pool, size)

    def sweep(self, pool: concurrent.futures.Executor, size: str) -> bool:
        """Measure rates until the best one of each encoding has two neighbours. Return whether they all have."""
        while cases := list(self.missing(size)):
            runs = {self.sweep_run(size, *case): case for case in cases}
            complete = self.train(pool, size, list(runs), keep=set())
            record = self.rates()
            for run, (attention, encoding, rate) in runs.items():
                path = self.out / run.key / "result.json"
                if path.exists():
                    loss = json.loads(path.read_text())["curves"]["loss by step"][-1][1]
                    losses = record.setdefault(size, {}).setdefault(attention, {}).setdefault(encoding, {})
                    losses[f"{rate:g}"] = 99.0 if loss is None else round(loss, 5)
            (self.out / "rates.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
            if not complete:
                return False
        return True

    def missing(self, size: str) -> Iterator[tuple[AttentionName, str, float]]:
        """Attention, encoding and rate to measure next."""
        softmax = SMALL if size == "small" else ALL_ENCODINGS
        kinds: dict[AttentionName, Sequence[str]] = {"softmax": softmax, "linear": () if size == "small" else LINEAR}
        for attention, encodings in kinds.items():
            for encoding in encodings:
                losses = self.rates().get(size, {}).get(attention, {}).get(encoding, {})
                best = float(min(losses, key=losses.__getitem__)) if losses else FIRST_RATE[size]
                middle = rates.RATES.index(best)
                for rate in rates.RATES[max(0, middle - 1) : middle + 2]:
                    if f"{rate:g}" not in losses:
                        yield attention, encoding, rate

    def sweep_run(self, size: str, attention: AttentionName, encoding: str, rate: float) -> Run:
        run = self.shortened(text_run(encoding, size, attention=attention))
        steps = max(1, round(run.steps * SWEEP_STEPS.get(size, 1.0)))
        return dataclasses.replace(run, rate=rate, seed=SWEEP_SEED, lengths=(), steps=steps)

    def planned(self, size: str, names: Sequence[str]) -> Iterator[tuple[str, list[Arm]]]:
        """Names of experiments, and their arms."""
        for name in names:
            arms = EXPERIMENTS[name].arms(size)
            if size == "small":
                if name not in ("convergence", "extrapolation"):
                    continue
                arms = [arm for arm in arms if arm.label in SMALL]
            yield name, [arm._replace(run=self.shortened(arm.run)) for arm in arms]

    def print_plan(self) -> None:
        seeds, steps = tuple(range(self.args.seeds)), 0
        for size in self.args.sizes:
            different: dict[str, Run] = {}
            print(f"{size}: at least {len(list(self.missing(size)))} runs of a sweep")
            for name, arms in self.planned(size, self.args.only):
                runs = runs_of(arms, seeds)
                different |= {run.key: run for run in runs}
                print(f"{name} {size}: {len(runs)} runs")
            steps = sum(run.steps for run in different.values())
            print(f"{size}: {len(different)} different runs, {steps:,} steps")

    def experiments(self, pool: concurrent.futures.Executor, size: str) -> bool:
        """Train the runs of all experiments of a size and write their records. Return whether all are complete."""
        seeds = tuple(range(self.args.seeds))
        planned = list(self.planned(size, self.args.only))
        everything = {run.key: run for _, arms in planned for run in runs_of(arms, seeds)}
        keep = self.continued(size)
        # Runs that others continue come first: with the others they fill the processes.
        first = [run for run in everything.values() if run.parent is None]
        first.sort(key=lambda run: run.key not in keep)
        self.train(pool, size, first, keep)
        self.train(pool, size, [run for run in everything.values() if run.parent is not None], keep)
        complete = True
        for name, arms in planned:
            if not all((self.out / run.key / "result.json").exists() for run in runs_of(arms, seeds)):
                print(f"{name} {size}: incomplete")
                complete = False
                continue
            settings = self.settings(size)
            findings = conduct(EXPERIMENTS[name], arms, size, seeds, settings, self.out)
            hardware = torch.cuda.get_device_name() if self.args.device == "cuda" else "CPU"
            command = shlex.join(["python", "benchmarks/lab_gpu.py", *sys.argv[1:]])
            record = as_json(findings, settings, hardware=hardware, command=command)
            (self.out / f"{name}_{size}.json").write_text(json.dumps(record) + "\n", encoding="utf-8")
            judged = zip(findings.experiment.statements, findings.outcomes, strict=True)
            print(f"{name} {size}:", *(f"{outcome.verdict.value}: {x.text};" for x, outcome in judged))
        return complete

    def continued(self, size: str) -> set[str]:
        """Keys of runs that others continue, in any experiment: a later call may train what this one does not."""
        seeds = tuple(range(self.args.seeds))
        runs = [run for _, arms in self.planned(size, tuple(EXPERIMENTS)) for run in runs_of(arms, seeds)]
        return {run.parent.key for run in runs if run.parent is not None}

    def require_same_options(self, size: str) -> None:
        """Refuse results of a size that were computed with other options."""
        with mock.patch.object(rates, "sweeps", self.rates):
            for _, arms in self.planned(size, self.args.only):
                incomplete(runs_of(arms, tuple(range(self.args.seeds))), self.settings(size), self.out)

    def shortened(self, run: Run) -> Run:
        if self.args.steps is None:
            return run
        parent = None if run.parent is None else self.shortened(run.parent)
        return dataclasses.replace(run, steps=min(run.steps, self.args.steps), parent=parent)

    def train(self, pool: concurrent.futures.Executor, size: str, runs: list[Run], keep: set[str]) -> bool:
        """Train runs that have no result, while there is time. Return whether all have results."""
        waiting = [runs[i] for i in incomplete(runs, self.settings(size), self.out)]
        groups = [list(group) for _, group in itertools.groupby(sorted(waiting, key=kind), key=kind)]
        order = {run.key: index for index, run in enumerate(waiting)}
        groups.sort(key=lambda group: min(order[run.key] for run in group))
        active: dict[concurrent.futures.Future[float], list[Run]] = {}
        while active or any(map(self.has_time, groups)):
            while len(active) < self.args.jobs:
                group = next(filter(self.has_time, groups), None)
                if group is None:
                    break
                groups.remove(group)
                active[pool.submit(perform, group, self.settings(group[0].size), self.out, keep)] = group
            ended, _ = concurrent.futures.wait(active, return_when=concurrent.futures.FIRST_COMPLETED)
            for future in ended:
                group, seconds = active.pop(future), future.result()
                key, steps = (group[0].size, group[0].task), len(group) * group[0].steps
                if group[0].steps >= LONG:
                    self.measured[key] = max(self.measured.get(key, 0.0), seconds / steps)
                print(f"{seconds:6.1f} s: {', '.join(run.label for run in group)} ({key[0]}, {key[1]})", flush=True)
        return all((self.out / run.key / "result.json").exists() for run in runs)

    def has_time(self, group: list[Run]) -> bool:
        """Whether a group like the last of its kind would end in time."""
        per_step = self.measured.get((group[0].size, group[0].task), max(self.measured.values(), default=0.0))
        return time.monotonic() + SHORT + CAUTION * len(group) * group[0].steps * per_step < self.ends


def perform(group: list[Run], settings: Settings, out: Path, keep: set[str]) -> float:
    """Train runs side by side in this process, and delete what is not needed any more. Return the seconds."""
    torch.set_num_threads(2)
    start = time.monotonic()
    side_by_side([performing(run, settings, out) for run in group], settings.device, count=len(group))
    for run in group:
        for path in (out / run.key).glob("step-*"):
            shutil.rmtree(path)
        if run.key not in keep:
            shutil.rmtree(out / run.key / "model")
        shutil.rmtree(out / run.key / "tensorboard", ignore_errors=True)
    return time.monotonic() - start


def kind(run: Run) -> tuple[Any, ...]:
    """What runs have in common that are trained side by side: everything but the seed and the rate."""
    parent = None if run.parent is None else kind(run.parent)
    return run.size, run.task, run.attention, run.encoding, run.steps, run.length, run.batch, run.offset, repr(parent)


if __name__ == "__main__":
    main()
