"""Kill `ropewalk lab run` with SIGKILL at random steps, resume it, and compare its weights, on one and two ranks.

    python benchmarks/record_kills.py [--times 20]

Writes benchmarks/lab_kills.json.
"""

import argparse
import json
import sys
import tempfile
import time
from datetime import date
from pathlib import Path
from typing import Any

import torch

from ropewalk.tools.bench.records import write_record
from ropewalk.tools.output import processor

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "tests"))

from lab.kills import COMMAND, STEPS, kill_and_resume, weights_of, whole_run  # noqa: E402  # pyright: ignore[reportMissingImports]

RECORD = HERE / "lab_kills.json"


def missed(record: dict[str, Any]) -> list[str]:
    """Numbers of ranks with a resumed run that has other weights than one that is not killed."""
    figures = {name: x for name, x in record.items() if name.startswith("ranks ")}
    return [f"{name}: {x['identical']} of {x['times']}" for name, x in figures.items() if x["identical"] != x["times"]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--ranks", type=int, nargs="+", default=(1, 2))
    args = parser.parse_args()
    record: dict[str, Any] = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    record |= {
        "date": date.today().isoformat(),
        "hardware": f"{processor()}, one thread per rank",
        "torch": str(torch.__version__),
        "command": f"python benchmarks/record_kills.py --times {args.times}",
        "run": " ".join(["ropewalk lab", *COMMAND]),
        "steps": STEPS,
    }
    with tempfile.TemporaryDirectory() as name:
        for ranks in args.ranks:
            start = time.perf_counter()
            whole = weights_of(whole_run(Path(name) / f"whole-{ranks}", ranks))
            resumed_from: list[int] = []
            same = 0
            for seed in range(args.times):
                out = Path(name) / f"killed-{ranks}-{seed}"
                resumed_from.append(kill_and_resume(out, ranks, seed))
                same += weights_of(out) == whole
                print(
                    f"{ranks} ranks: resumed from step {resumed_from[-1]}, {same} of {seed + 1} identical", flush=True
                )
            seconds = round(time.perf_counter() - start)
            figures = {"times": args.times, "identical": same, "resumed from": resumed_from, "seconds": seconds}
            record[f"ranks {ranks}"] = figures
            write_record(record, str(RECORD), missed(record))


if __name__ == "__main__":
    main()
