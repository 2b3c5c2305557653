"""Runs transformers' own model tests without and with rw.accelerate, and records which tests pass.

python benchmarks/transformers_tests.py CHECKOUT [--families llama qwen3 ...] [--out benchmarks/transformers_tests.json]

CHECKOUT is a folder with the `tests` and `src` of transformers; nothing of it is part of this project. Each test runs
twice in a row, with the same seed: as it is, and with every model that it constructs or loads accelerated. Models on
the meta device, and models in which nothing can be replaced, are left alone and counted. Tests that need files of the
Hub, and tests that start other processes, are deselected. A record of the same versions and day is continued. Exits
with 1 if a test passes without and not with; render.py does not show such a record.

The tests import pytest, parameterized, httpx, datasets and psutil.
"""

import argparse
import contextlib
import functools
import json
import os
import platform
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

FAMILIES = ["llama", "mistral", "qwen2", "qwen3", "gemma2", "phi3", "olmo2", "cohere", "glm4", "gpt_neox"]
# In other processes, no model would be accelerated.
DESELECTED = "not pipeline and not fsdp2 and not _tp_"


class Accelerated:
    """Accelerates every model when its construction or its loading ends, while `on` is set."""

    def __init__(self) -> None:
        self.on = False
        self.counts: Counter[str] = Counter()
        self.reasons: Counter[str] = Counter()
        self.depth = threading.local()

    @contextlib.contextmanager
    def outermost(self) -> Iterator[list[Any]]:
        """What is put into the list is accelerated at the end, unless another construction is under way."""
        depth = getattr(self.depth, "now", 0)
        models: list[Any] = []
        self.depth.now = depth + 1
        try:
            yield models
        finally:
            self.depth.now = depth
        if depth == 0 and self.on:
            for model in models:
                self.accelerate(model)

    def accelerate(self, model: Any) -> None:
        """Accelerate a model, or count why not."""
        from ropewalk import RopewalkError, accelerate

        name = type(model).__name__
        if any(parameter.is_meta for parameter in model.parameters()):
            self.counts["on the meta device"] += 1
            return
        try:
            handle = accelerate(model)
        except RopewalkError as error:
            self.counts["left alone"] += 1
            self.reasons[f"{name}: {' '.join(error.got.split())}"] += 1
        else:
            self.counts["accelerated"] += 1
            self.reasons.update(f"{name}: {part}" for part in handle.left)

    def install(self) -> None:
        """Wrap the constructors of the models of transformers, and their loading."""
        from transformers import PreTrainedModel

        base: Any = PreTrainedModel
        plain_subclass, plain_load = base.__init_subclass__.__func__, base.from_pretrained.__func__

        def constructor(plain: Any) -> Any:
            @functools.wraps(plain)
            def init(model: Any, *args: Any, **kwargs: Any) -> None:
                with self.outermost() as models:
                    plain(model, *args, **kwargs)
                    models.append(model)

            return init

        def subclass(cls: Any, **kwargs: Any) -> None:
            plain_subclass(cls, **kwargs)
            if "__init__" in vars(cls):
                cls.__init__ = constructor(vars(cls)["__init__"])

        @functools.wraps(plain_load)
        def load(cls: Any, *args: Any, **kwargs: Any) -> Any:
            with self.outermost() as models:
                loaded = plain_load(cls, *args, **kwargs)
                models.append(loaded[0] if isinstance(loaded, tuple) else loaded)
            return loaded

        base.__init_subclass__, base.from_pretrained = classmethod(subclass), classmethod(load)


class Twice:
    """A plugin of pytest that runs each test without and with acceleration, and writes the record."""

    def __init__(self, record: dict[str, Any], out: Path | None, deselected: str) -> None:
        self.record, self.out, self.deselected = record, out, deselected
        self.earlier: list[dict[str, Any]] = record["families"]
        self.accelerated = Accelerated()
        self.lines: dict[str, dict[str, Any]] = {}
        self.seconds: list[tuple[float, str]] = []
        self.failed_subtests: list[Any] = []

    def pytest_configure(self) -> None:
        """Before a modeling file is imported."""
        self.accelerated.install()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: Any, nextitem: Any) -> bool:
        """Run the test twice."""
        from _pytest.runner import runtestprotocol

        line = self.line_of(item.nodeid.split("/")[2])
        outcomes: list[str] = []
        started = time.monotonic()
        # Between the two runs, only the test itself is torn down.
        for on, following in ((False, item.parent), (True, nextitem)):
            self.accelerated.on = on
            self.failed_subtests = []
            seeded()
            item._initrequest()
            reports = runtestprotocol(item, log=False, nextitem=following) + self.failed_subtests
            outcomes.append(outcome(reports))
            if outcomes[-1] == "failed" and outcomes[0] != "failed":
                sys.stdout.write("\n".join(str(report.longrepr) for report in reports if report.failed)[-6000:] + "\n")
        self.accelerated.on = False
        name = item.nodeid.partition("::")[2]
        self.seconds.append((time.monotonic() - started, name))
        for side, one in zip(("without", "with"), outcomes, strict=True):
            line[side][one] += 1
        if outcomes[0] != outcomes[1]:
            line["differ"][name] = outcomes
            sys.stdout.write(f"{name}: {outcomes}\n")
        if outcomes[0] == "failed":
            line["failed without"].append(name)
        return True

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Keep a failed subtest: `log=False` leaves only the reports of subtests, and those of tests lack them."""
        if report.failed:
            self.failed_subtests.append(report)

    def line_of(self, family: str) -> dict[str, Any]:
        """The line of the record for a family. A new one ends the one before."""
        if family not in self.lines:
            self.close()
            self.accelerated.counts, self.accelerated.reasons = Counter(), Counter()
            self.started = time.monotonic()
            self.lines[family] = {
                "family": family,
                "deselected": self.deselected,
                "without": Counter(),
                "with": Counter(),
                "differ": {},
                "failed without": [],
                "models": self.accelerated.counts,
                "left": self.accelerated.reasons,
            }
        return self.lines[family]

    def close(self) -> None:
        """Write what is known, and show the last family."""
        others = [line for line in self.earlier if line["family"] not in self.lines]
        self.record["families"] = others + list(self.lines.values())
        if self.lines:
            line = self.record["families"][-1]
            line["seconds"] = round(time.monotonic() - self.started)
            text = ", ".join(f"{side} {dict(line[side])}" for side in ("without", "with", "models"))
            sys.stdout.write(f"\n{line['family']}: {text}, {len(line['differ'])} differ, {line['seconds']} s\n")
            slowest = sorted(self.seconds, reverse=True)[:8]
            sys.stdout.write("slowest: " + ", ".join(f"{name} {seconds:.0f} s" for seconds, name in slowest) + "\n")
            sys.stdout.flush()
        if self.out:
            from ropewalk.tools.bench.records import write_record

            write_record(self.record, str(self.out), regressions(self.record))

    def pytest_sessionfinish(self) -> None:
        """The last family ends."""
        self.close()


def seeded() -> None:
    """The same random numbers for both runs."""
    import numpy as np
    import torch

    random.seed(0)
    np.random.seed(0)  # noqa: NPY002, the generator that the tests use
    torch.manual_seed(0)


def regressions(record: dict[str, Any]) -> list[str]:
    """A sentence per test that passes without acceleration and not with it."""
    return [
        f"{line['family']}: {name} {second} with acceleration, and {first} without"
        for line in record["families"]
        for name, (first, second) in line["differ"].items()
        if first == "passed"
    ]


def outcome(reports: list[Any]) -> str:
    """What the reports of setup, call and teardown amount to."""
    found = {report.outcome for report in reports}
    return next((one for one in ("failed", "skipped") if one in found), "passed")


def main() -> int:
    """Run the families and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, help="a folder with transformers' tests/ and src/")
    parser.add_argument("--families", nargs="+", default=FAMILIES)
    parser.add_argument("--only", default=DESELECTED, help="pytest's -k")
    parser.add_argument("--tests-of", default="", help="where the tests come from, for the record")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch
    import transformers

    from ropewalk.tools.output import processor

    record: dict[str, Any] = {
        "command": "python benchmarks/transformers_tests.py CHECKOUT",
        "date": datetime.now(UTC).date().isoformat(),
        "hardware": {
            "machine": platform.machine(),
            "processor": processor(),
            "threads": torch.get_num_threads(),
        },
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "tests of": given.tests_of,
        "families": [],
    }
    if given.out and given.out.exists():
        earlier = json.loads(given.out.read_text(encoding="utf-8"))
        written = ("missed", "digest")
        if {name: content for name, content in earlier.items() if name not in written} | {"families": []} == record:
            record |= {"families": earlier["families"]}
    deselected = f"-k {given.only!r}, and the tests that transformers marks as slow"
    plugin = Twice(record, given.out and given.out.resolve(), deselected)
    os.chdir(given.checkout)
    sys.path.insert(0, os.getcwd())
    tests = [f"tests/models/{family}/test_modeling_{family}.py" for family in given.families]
    options = ["-q", "-p", "no:cacheprovider", "-o", "log_cli=0", "--tb=short", "-W", "ignore", "-k", given.only]
    code = pytest.main([*options, *tests], plugins=[plugin])
    if len(plugin.lines) < len(given.families):
        sys.stderr.write(f"pytest ended with {code!r} before every family ran\n")
        return 2
    return int(bool(regressions(record)))


if __name__ == "__main__":
    sys.exit(main())
