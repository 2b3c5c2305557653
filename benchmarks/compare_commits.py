"""Compares the speed of two checkouts on one machine, in one run, in interleaved rounds.

python benchmarks/compare_commits.py OLD_SRC NEW_SRC --suite cpu|gpu [--rounds N] [--repeats N] [--only TEXT]
    [--json FILE]

OLD_SRC and NEW_SRC are the `src` folders of two checkouts (both with the C extension built, for the CPU). One worker
process per checkout is kept alive. Both build the same cases from public names only, so one script supports both.

In each round, each worker times a short burst of calls. The order of the two workers is swapped after every round. The
result is the median over the rounds of new / old, because a busy machine slows both halves of a round. A ratio above
1.03 is flagged. Two processes with the same code may differ by chance (memory placement), so flagged cases are timed
again in new workers, and the median over these repeats is the result.

On a GPU every case has two times: "device", by events, from an empty L2 cache; and "host", the wall-clock time per call
of asynchronous calls. Needs Python, torch (and Triton for CUDA) only.
"""

import argparse
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

FLAGGED = 1.03

# Seconds per burst, and the fewest and the most samples in it.
BURST, FEWEST, MOST = 0.04, 2, 41
# Microseconds per sample: a shorter call is repeated within one sample, so that the clock's own cost does not count.
SAMPLE = 200.0

# glibc keeps freed memory, so that page faults of large results, which differ between equal processes, are not timed.
KEEP_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40), "MALLOC_TOP_PAD_": str(1 << 28)}


class Checkout:
    """A worker process on one checkout."""

    def __init__(self, name: str, source: str, device: str) -> None:
        self.name, self.source = name, source
        environment = os.environ | KEEP_MEMORY | {"PYTHONPATH": str(Path(source).resolve())}
        command = [sys.executable, str(Path(__file__).resolve().with_name("compare_worker.py")), device, source]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def answer(self) -> Any:
        """The next line of the worker."""
        stdout = self.process.stdout
        line = stdout.readline() if stdout is not None else ""
        if not line:
            raise SystemExit(f"the worker of {self.name} ({self.source}) stopped with {self.process.wait()}")
        return json.loads(line)

    def ask(self, **request: object) -> Any:
        """Sends a request and waits for its answer."""
        stdin = self.process.stdin
        if stdin is None:
            raise SystemExit(f"the worker of {self.name} has no input")
        stdin.write(json.dumps(request) + "\n")
        stdin.flush()
        return self.answer()

    def stop(self) -> None:
        """Ends the worker."""
        if self.process.stdin is not None:
            with suppress(OSError):
                self.process.stdin.close()
        self.process.wait()


@dataclass
class Result:
    """The times of one case in us, per pair of workers and round, for the old and the new checkout."""

    name: str
    kind: str
    old: list[list[float]] = field(default_factory=list)
    new: list[list[float]] = field(default_factory=list)
    note: str | None = None

    def measured(self) -> bool:
        """Whether there are times."""
        return bool(self.old)

    def ratios(self) -> list[list[float]]:
        """new / old, per pair of workers and round."""
        return [[b / a for a, b in zip(old, new, strict=True)] for old, new in zip(self.old, self.new, strict=True)]

    def ratio(self) -> float:
        """The median over pairs of workers of the median over rounds."""
        return statistics.median(statistics.median(ratios) for ratios in self.ratios())

    def flagged(self) -> bool:
        """Whether the case is slower by more than 3 %, or was not measured."""
        return not self.measured() or self.ratio() > FLAGGED

    def as_dict(self) -> dict[str, Any]:
        """The result for JSON."""
        shown: dict[str, Any] = {"case": self.name, "kind": self.kind, "note": self.note, "flagged": self.flagged()}
        if self.measured():
            old, new = (list(itertools.chain(*times)) for times in (self.old, self.new))
            shown |= {
                "ratio": self.ratio(),
                "ratio_quartiles": quartiles(list(itertools.chain(*self.ratios()))),
                "ratio_of_best": min(new) / min(old),
                "old_us": statistics.median(old),
                "new_us": statistics.median(new),
                "pairs_of_workers": len(self.old),
            }
        return shown

    def line(self) -> str:
        """The result as a row of the table."""
        shown = self.as_dict()
        if not self.measured():
            return f"{self.name}  [{self.kind}]  {self.note}"
        low, high = shown["ratio_quartiles"]
        # If the fastest bursts are equally fast, the machine may have been busy.
        flag = "" if not self.flagged() else "  SLOWER" if shown["ratio_of_best"] > FLAGGED else "  slower?"
        return (
            f"{shown['old_us']:>11.1f}{shown['new_us']:>11.1f}{shown['ratio']:>8.3f}  {low:.3f}-{high:.3f}"
            f"{shown['ratio_of_best']:>8.3f}  {self.kind:<8}{self.name}{flag}"
            + (f"  ({self.note})" if self.note else "")
        )


def quartiles(values: Sequence[float]) -> tuple[float, float]:
    """The first and the third quartile."""
    if len(values) < 2:
        return values[0], values[0]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high


def compare_case(number: int, name: str, old: Checkout, new: Checkout, rounds: int) -> list[Result]:
    """Time one case in both workers, in alternating order."""
    first = {worker.name: worker.ask(prepare=number) for worker in (old, new)}
    errors = [f"{worker}: {answer['error']}" for worker, answer in first.items() if "error" in answer]
    if errors:
        return [Result(name, "error", note="; ".join(errors))]
    us = max(answer["us"] for answer in first.values())
    inner = max(1, round(SAMPLE / us))
    samples = max(FEWEST, min(MOST, round(BURST * 1e6 / (inner * us))))
    results: dict[str, Result] = {}
    for index in range(rounds + 1):
        for worker in (old, new) if index % 2 else (new, old):
            answer = worker.ask(inner=inner, samples=samples)
            if "error" in answer:
                return [Result(name, "error", note=f"{worker.name}: {answer['error']}")]
            # The first round is a warm-up.
            for kind, time_us in answer.items() if index else ():
                result = results.setdefault(kind, Result(name, kind, [[]], [[]]))
                (result.old if worker is old else result.new)[0].append(time_us)
    sums = [answer["sum"] for answer in first.values()]
    if None not in sums and abs(sums[0] - sums[1]) > 1e-3 * max(map(abs, sums)):
        for result in results.values():
            result.note = f"RESULTS DIFFER: sums of magnitudes {sums[0]:.6g} and {sums[1]:.6g}"
    return list(results.values())


# Whole processes: the cost of an import and of a help text.
PROCESSES = {
    "python -c 'import ropewalk'": ["-c", "import ropewalk"],
    "python -c 'import ropewalk; ropewalk.RotaryEmbedding'": ["-c", "import ropewalk; ropewalk.RotaryEmbedding"],
    "python -m ropewalk --help": ["-m", "ropewalk", "--help"],
    "python -m ropewalk plot decay --help": ["-m", "ropewalk", "plot", "decay", "--help"],
}


def compare_process(name: str, sources: tuple[str, str], rounds: int) -> Result:
    """Time a whole process in both checkouts, in alternating order."""
    result = Result(name, "process", [[]], [[]])
    for index in range(rounds + 1):
        for number in (0, 1) if index % 2 else (1, 0):
            environment = os.environ | {"PYTHONPATH": str(Path(sources[number]).resolve())}
            start = time.perf_counter()
            finished = subprocess.run(
                [sys.executable, *PROCESSES[name]], env=environment, capture_output=True, check=False
            )
            if index:
                (result.new if number else result.old)[0].append((time.perf_counter() - start) * 1e6)
            if finished.returncode:
                return Result(name, "process", note=f"failed in {sources[number]}")
    return result


@dataclass
class Comparison:
    """Two checkouts and their results so far."""

    sources: tuple[str, str]
    suite: str
    rounds: int
    json_file: str | None = None
    results: dict[tuple[str, str], Result] = field(default_factory=dict)

    def run(self, wanted: Callable[[str], bool]) -> None:
        """Time the cases whose names are wanted in a new pair of workers, and add the times to the results."""
        device = "cuda" if self.suite == "gpu" else "cpu"
        old, new = (Checkout(name, self.sources[i], device) for i, name in enumerate(("old", "new")))
        try:
            cases, other = old.answer(), new.answer()
            if cases != other:
                raise SystemExit("the two checkouts build different cases")
            for number, (name, _) in enumerate(cases):
                if wanted(name):
                    for result in compare_case(number, name, old, new, self.rounds):
                        self._add(result)
        finally:
            old.stop()
            new.stop()
        for name in PROCESSES if self.suite == "cpu" else ():
            if wanted(name):
                self._add(compare_process(name, self.sources, self.rounds))

    def flagged(self) -> set[str]:
        """The names of the flagged cases."""
        return {result.name for result in self.results.values() if result.flagged()}

    def _add(self, result: Result) -> None:
        known = self.results.setdefault((result.name, result.kind), result)
        if known is not result:
            known.old += result.old
            known.new += result.new
            known.note = known.note or result.note
        print(known.line(), flush=True)
        if self.json_file is not None:
            Path(self.json_file).write_text(json.dumps(self.record(), indent=2) + "\n", encoding="utf-8")

    def record(self) -> dict[str, Any]:
        """The record for JSON."""
        return {
            "command": f"python benchmarks/compare_commits.py OLD_SRC NEW_SRC --suite {self.suite}"
            f" --rounds {self.rounds}",
            "date": datetime.now(UTC).date().isoformat(),
            "hardware": hardware(self.suite),
            "rounds": self.rounds,
            "cases": [result.as_dict() for result in self.results.values()],
        }

    def show(self) -> None:
        """Print a summary and the flagged cases."""
        ratios = [result.ratio() for result in self.results.values() if result.measured()]
        if ratios:
            print(f"{len(ratios)} figures: median ratio {statistics.median(ratios):.3f}, largest {max(ratios):.3f}.")
        flagged = [result for result in self.results.values() if result.flagged()]
        print(f"{len(flagged)} slower by more than 3 % or failed{':' if flagged else '.'}")
        for result in flagged:
            print(result.line())


def compare(sources: tuple[str, str], suite: str, rounds: int, repeats: int, only: str, json_file: str | None) -> int:
    """Compare all cases and print a table. Returns 0, or 1 if a case is flagged or failed."""
    comparison = Comparison(sources, suite, rounds, json_file)
    print(
        f"{suite}, {rounds} interleaved rounds. Times in microseconds per call; ratio: new / old, median over rounds."
    )
    print(f"{'old':>11}{'new':>11}{'ratio':>8}  {'quartiles':<11}{'of best':>8}  {'kind':<8}case")
    comparison.run(lambda name: only in name)
    for repeat in range(repeats):
        again = comparison.flagged()
        if repeat % 2:
            # A median of two is ambiguous: cases that were timed twice are timed a third time.
            again |= {result.name for result in comparison.results.values() if len(result.old) == 2}
        if again:
            print(f"repeated in new workers: {len(again)} cases")
            comparison.run(again.__contains__)
    comparison.show()
    return int(bool(comparison.flagged()))


def hardware(suite: str) -> dict[str, Any]:
    """The hardware of the comparison."""
    if suite == "gpu":
        query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        return {"gpu": subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()}
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith(("model name", "CPU part")):
                return {"processor": line.split(":", 1)[1].strip(), "cores": os.cpu_count()}
    return {"processor": platform.processor(), "cores": os.cpu_count()}


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", metavar="OLD_SRC", help="the src folder of the old checkout")
    parser.add_argument("new", metavar="NEW_SRC", help="the src folder of the new checkout")
    parser.add_argument("--suite", choices=("cpu", "gpu"), default="cpu")
    parser.add_argument("--rounds", type=int, default=15, help="rounds per case (default: 15)")
    parser.add_argument("--repeats", type=int, default=2, help="repeats of flagged cases in new workers (default: 2)")
    parser.add_argument("--only", default="", metavar="TEXT", help="only cases whose name contains TEXT")
    parser.add_argument("--json", metavar="FILE", help="write the results as JSON, after every case")
    options = parser.parse_args()
    sources = (options.old, options.new)
    raise SystemExit(compare(sources, options.suite, options.rounds, options.repeats, options.only, options.json))


if __name__ == "__main__":
    main()
