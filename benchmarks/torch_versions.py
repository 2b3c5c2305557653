"""Runs the tests of `make test` with the torch of this environment, and adds the result to a record.

python benchmarks/torch_versions.py PROGRESS [--out benchmarks/torch_versions.json] [--note TEXT] [options of pytest]

Run it with an environment that has another torch and the extras cli, plots and dev, in a clone of its own that is
installed there. PROGRESS is a file with a line of JSON per test that has ended; a run that was stopped continues it, so
remove it after the code has changed. The record has one case per version of torch, and tests/support.py shows it.
With --stopped nothing more runs, and the record says how many tests have not run.
"""

import argparse
import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
MARKS = "not slow and not gpu"


class Progress:
    """A plugin of pytest that leaves out what has run, and writes a line for each test that ends."""

    def __init__(self, path: Path, *, stopped: bool) -> None:
        self.path, self.stopped = path, stopped
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        self.ended: dict[str, dict[str, Any]] = {line["id"]: line for line in map(json.loads, lines)}
        self.running: dict[str, dict[str, Any]] = {}
        self.selected: list[str] = []

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: Any, items: list[Any]) -> None:
        """After the selection by marks."""
        self.selected = [item.nodeid for item in items]
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in self.ended])
        items[:] = [] if self.stopped else [item for item in items if item.nodeid not in self.ended]

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Setup, call and teardown of a test are one line."""
        line = self.running.setdefault(report.nodeid, {"id": report.nodeid, "outcome": "passed"})
        if report.failed:
            line |= {"outcome": "failed", "text": report.longreprtext[-6000:]}
        elif report.skipped and line["outcome"] == "passed":
            line["outcome"] = "expected to fail" if hasattr(report, "wasxfail") else "skipped"
        if report.when == "teardown":
            self.ended[report.nodeid] = self.running.pop(report.nodeid)
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(self.ended[report.nodeid]) + "\n")

    def case(self) -> dict[str, Any]:
        """What the record contains."""
        lines = [self.ended[name] for name in self.selected if name in self.ended]
        return {
            "selected": len(self.selected),
            "not run": len(self.selected) - len(lines),
            "outcomes": dict(Counter(line["outcome"] for line in lines)),
            "failures": {line["id"]: error(line["text"]) for line in lines if line["outcome"] == "failed"},
        }


def error(text: str) -> str:
    """The line of pytest's report that states the error: the last one, because an error of a rank is within another."""
    lines = [line.removeprefix("E ").strip() for line in text.splitlines() if line.startswith("E ")]
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Warning|Exception|Unsupported)\b", line)]
    return next(iter(errors[-1:] or lines or text.strip().splitlines()[-1:]), "")[:160]


def versions() -> dict[str, str]:
    """The packages that matter, without importing them: conftest.py sets what Triton reads when it is loaded."""
    names = ("torch", "triton", "numpy", "transformers")
    return {"python": platform.python_version()} | {name: importlib.metadata.version(name) for name in names}


def main() -> int:
    """Run the tests that are left, and write the record when none is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("progress", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--note", action="append", default=[], help="what was different from `make test`, and why")
    parser.add_argument("--stopped", action="store_true", help="record what has run until now")
    given, options = parser.parse_known_args()
    progress = Progress(given.progress.resolve(), stopped=given.stopped)
    out = given.out and given.out.resolve()
    os.chdir(ROOT)
    usual = ["-q", "-p", "no:cacheprovider", "--tb=short", "--hypothesis-profile=quick", "-m", MARKS]
    code = pytest.main([*usual, *options], plugins=[progress])
    left = len(progress.selected) - len(progress.ended.keys() & set(progress.selected))
    if left and not given.stopped:
        sys.stderr.write(f"pytest ended with {code!r} before every test ran: run this again to continue\n")
        return 2
    import torch

    from ropewalk.kernels.native.extension import MISSING
    from ropewalk.tools.bench.records import write_record
    from ropewalk.tools.output import processor

    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True).stdout
    case = {
        "date": datetime.now(UTC).date().isoformat(),
        "commit": commit.strip(),
        "hardware": {"machine": platform.machine(), "processor": processor(), "threads": torch.get_num_threads()},
        "versions": versions(),
        "C kernel": MISSING or "built",
        "marks": MARKS,
        "options": options,
        "notes": given.note,
        **progress.case(),
    }
    sys.stdout.write(json.dumps(case, indent=2) + "\n")
    if out:
        cases = json.loads(out.read_text(encoding="utf-8"))["cases"] if out.exists() else []
        cases = [one for one in cases if one["versions"]["torch"] != case["versions"]["torch"]] + [case]
        cases.sort(key=lambda one: [int(part) for part in one["versions"]["torch"].partition("+")[0].split(".")])
        write_record({"command": "python benchmarks/torch_versions.py PROGRESS", "cases": cases}, str(out), missed=[])
    return int(bool(case["failures"]))


if __name__ == "__main__":
    sys.exit(main())
