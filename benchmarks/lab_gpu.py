"""Run the experiments of the lab on a GPU: all at `tiny`, convergence and extrapolation at `small`. Not run yet.

    python benchmarks/lab_gpu.py --minutes 9 [--out build/lab_gpu] [--abreast 4] [--seeds 3]
    python benchmarks/lab_gpu.py --plan

Call it until it prints "complete": each call trains as many whole runs as fit into its minutes, several side by side.
A later call, on another machine too, reads results from --out and trains the rest. What a run does not need any more,
its checkpoints and the weights that no other run continues, is deleted, so that --out is small enough to carry.

First come the sweeps of learning rates, which are written to `rates.json` in --out and used from there; then the
experiments, and when all their runs are complete, one record per experiment and size: `extrapolation_tiny.json`.
"""

import argparse
import dataclasses
import json
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from ropewalk.lab import rates
from ropewalk.lab.conduct import conduct, performing, runs_of
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
# Sweeps of `small` train for a part of the steps.
SWEEP_STEPS = {"small": 0.25}
EVERY = 50


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--out", type=Path, default=Path("build/lab_gpu"))
    parser.add_argument("--abreast", type=int, default=4)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--sizes", nargs="+", default=("tiny", "small"))
    parser.add_argument("--only", nargs="+", default=tuple(EXPERIMENTS))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--steps", type=int, help="train so many steps per run, to try this script")
    parser.add_argument("--plan", action="store_true", help="print how many runs there are, and train nothing")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    dtype = "bfloat16" if args.device == "cuda" else "float32"
    session = Session(args, Settings(torch.device(args.device), dtype, every=EVERY))
    for size in args.sizes:
        if not session.sweep(size):
            raise SystemExit(f"{size}: the sweep is incomplete; call it again")
    with mock.patch.object(rates, "sweeps", session.rates):
        if not session.experiments():
            raise SystemExit("experiments are incomplete; call it again")
    print("complete")


class Session:
    """The runs that fit into one call."""

    def __init__(self, args: argparse.Namespace, settings: Settings) -> None:
        self.args, self.settings, self.out = args, settings, args.out
        self.ends = time.monotonic() + 60 * args.minutes
        # Seconds per run that were measured in this call, by what determines them.
        self.measured: dict[tuple[Any, ...], float] = {}

    def rates(self) -> dict[str, Any]:
        """The sweeps so far, as `ropewalk.lab.rates.sweeps` returns them."""
        path = self.out / "rates.json"
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}

    def sweep(self, size: str) -> bool:
        """Measure rates until the best one of each encoding has two neighbours. Return whether they all have."""
        while cases := list(self.missing(size)):
            runs = {self.sweep_run(size, *case): case for case in cases}
            if self.args.plan:
                print(f"{size}: at least {len(runs)} runs of a sweep")
                return True
            self.train(list(runs), keep=set())
            record = self.rates()
            for run, (attention, encoding, rate) in runs.items():
                path = self.out / run.key / "result.json"
                if path.exists():
                    loss = json.loads(path.read_text())["curves"]["loss by step"][-1][1]
                    losses = record.setdefault(size, {}).setdefault(attention, {}).setdefault(encoding, {})
                    losses[f"{rate:g}"] = 99.0 if loss is None else round(loss, 5)
            (self.out / "rates.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
            if not self.has_time(next(iter(runs))):
                return not list(self.missing(size))
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

    def experiments(self) -> bool:
        """Train the runs of all experiments and write their records. Return whether all are complete."""
        planned: list[tuple[str, str, list[Arm]]] = []
        for size in self.args.sizes:
            for name in self.args.only:
                arms = EXPERIMENTS[name].arms(size)
                if size == "small":
                    if name not in ("convergence", "extrapolation"):
                        continue
                    arms = [arm for arm in arms if arm.label in SMALL]
                arms = [arm._replace(run=self.shortened(arm.run)) for arm in arms]
                planned.append((name, size, arms))
        seeds = tuple(range(self.args.seeds))
        runs = {run.key: run for _, _, arms in planned for run in runs_of(arms, seeds)}
        keep = {run.parent.key for run in runs.values() if run.parent is not None}
        if self.args.plan:
            for name, size, arms in planned:
                print(f"{name} {size}: {len(runs_of(arms, seeds))} runs")
            print(f"{len(runs)} different runs, {sum(x.steps for x in runs.values()):,} steps")
            return True
        # Seeds of one run beside each other: they take the same time. Parents come before their children.
        ordered = sorted(runs.values(), key=lambda run: (run.parent is not None, run.size, run.task, run.encoding))
        complete = True
        for generation in (False, True):
            complete &= self.train([run for run in ordered if (run.parent is not None) == generation], keep)
            if not complete:
                return False
        for name, size, arms in planned:
            findings = conduct(EXPERIMENTS[name], arms, size, seeds, self.settings, self.out)
            hardware = torch.cuda.get_device_name() if self.args.device == "cuda" else "CPU"
            record = as_json(findings, self.settings, hardware=hardware, command="python benchmarks/lab_gpu.py")
            (self.out / f"{name}_{size}.json").write_text(json.dumps(record) + "\n", encoding="utf-8")
            print(f"{name} {size}:", *(f"{x.verdict.value}: {s.text};" for s, x in self.judged(findings)))
        return True

    @staticmethod
    def judged(findings: Any) -> list[tuple[Any, Any]]:
        return list(zip(findings.experiment.statements, findings.outcomes, strict=True))

    def shortened(self, run: Run) -> Run:
        if self.args.steps is None:
            return run
        parent = None if run.parent is None else self.shortened(run.parent)
        return dataclasses.replace(run, steps=min(run.steps, self.args.steps), parent=parent)

    def train(self, runs: list[Run], keep: set[str]) -> bool:
        """Train runs that have no result, some at a time, while there is time. Return whether all have results."""
        waiting = [run for run in runs if not (self.out / run.key / "result.json").exists()]
        while waiting:
            group = waiting[: self.args.abreast]
            if not self.has_time(group[0]):
                print(f"{len(waiting)} runs remain", flush=True)
                return False
            start = time.monotonic()
            steps = [performing(run, self.settings, self.out) for run in group]
            side_by_side(steps, self.settings.device, count=len(group))
            seconds = time.monotonic() - start
            self.measured[kind(group[0])] = seconds
            for run in group:
                for path in (self.out / run.key).glob("step-*"):
                    shutil.rmtree(path)
                if run.key not in keep:
                    shutil.rmtree(self.out / run.key / "model")
                shutil.rmtree(self.out / run.key / "tensorboard", ignore_errors=True)
            print(f"{seconds:6.1f} s: {', '.join(run.label for run in group)} ({group[0].size})", flush=True)
            waiting = waiting[len(group) :]
        return True

    def has_time(self, run: Run) -> bool:
        """Whether a group like the last of its kind would end in time."""
        expected = self.measured.get(kind(run), max(self.measured.values(), default=0.0))
        return time.monotonic() + 1.2 * expected < self.ends


def kind(run: Run) -> tuple[Any, ...]:
    """What determines how long a run takes."""
    return run.size, run.task, run.attention, run.encoding.split()[0], run.steps, run.length, run.batch


if __name__ == "__main__":
    main()
