"""Runs the tests marked gpu on a CUDA device, as `make test-gpu` does, and records how many passed per file.

python benchmarks/gpu_tests.py [--json benchmarks/gpu_tests.json] [PYTEST ARGUMENTS ...]

The record is written anew after every test, so that a run that is ended has one. Files that were not run keep what an
earlier run of the same versions recorded. Exits as pytest does.
"""

import argparse
import json
import platform
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import torch

from ropewalk.tools.bench.records import write_record
from ropewalk.tools.output import package_version


class Recorder:
    """A pytest plugin that counts outcomes per file."""

    def __init__(self, target: Path | None) -> None:
        self.target = target
        self.head = {
            "command": "python benchmarks/gpu_tests.py",
            "hardware": {"machine": platform.machine(), "gpu": torch.cuda.get_device_name()},
            "versions": {"python": platform.python_version()}
            | {name: package_version(name) for name in ("torch", "triton", "transformers", "diffusers")},
        }
        self.files: dict[str, dict[str, Any]] = {}
        if target is not None and target.exists():
            before = json.loads(target.read_text(encoding="utf-8"))
            if all(before[name] == value for name, value in self.head.items()):
                self.files = before["files"]
        self.started: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" and not report.failed:
            return
        name, _, test = report.nodeid.partition("::")
        if name not in self.started:
            self.started.add(name)
            self.files[name] = {"date": datetime.now(UTC).date().isoformat(), "passed": 0, "failed": []}
        if report.failed:
            self.files[name]["failed"].append(test)
        elif report.passed:
            self.files[name]["passed"] += 1
        if self.target is not None:
            write_record(self.head | {"files": dict(sorted(self.files.items()))}, str(self.target), self.missed())

    def missed(self) -> list[str]:
        return [f"{name}: {test} failed" for name, counts in self.files.items() for test in counts["failed"]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the record")
    options, arguments = parser.parse_known_args()
    sys.exit(pytest.main(["-m", "gpu", *arguments], plugins=[Recorder(options.json)]))


if __name__ == "__main__":
    main()
