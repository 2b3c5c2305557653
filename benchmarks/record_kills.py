"""Kill `ropewalk lab run` with SIGKILL at random steps, resume it, and compare its weights, on one and two ranks.

    python benchmarks/record_kills.py [--times 20]

Writes benchmarks/lab_kills.json after every kill. What is recorded there is not repeated: it continues up to --times.
"""

import argparse
import json
import sys
import tempfile
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
            before = record.get(f"ranks {ranks}", {"identical": 0, "resumed from": []})
            resumed_from, same = before["resumed from"], before["identical"]
            if len(resumed_from) >= args.times:
                continue
            whole = weights_of(whole_run(Path(name) / f"whole-{ranks}", ranks))
            for seed in range(len(resumed_from), args.times):
                out = Path(name) / f"killed-{ranks}-{seed}"
                resumed_from.append(kill_and_resume(out, ranks, seed))
                same += weights_of(out) == whole
                times = seed + 1
                print(f"{ranks} ranks: resumed from step {resumed_from[-1]}, {same} of {times} identical", flush=True)
                record[f"ranks {ranks}"] = {"times": times, "identical": same, "resumed from": resumed_from}
                write_record(record, str(RECORD), missed(record))


if __name__ == "__main__":
    main()
