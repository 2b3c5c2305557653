"""Types as users see them, by pyright: results, rejected arguments, and that no public type is unknown."""

import json
import os
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

CASES = Path(__file__).with_name("cases.py")
ROOT = CASES.parents[2]
EXPECTED = re.compile(r"# error: (\w+)$")


def pyright(*arguments: str, cwd: Path) -> dict[str, Any]:
    # It exits with 1 where it reports an error, which is what some cases ask for.
    command = [sys.executable, "-m", "pyright", "--outputjson", *arguments]
    # --verifytypes looks for packages in the first Python of PATH, whatever --pythonpath says.
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)))
    result = subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, check=False, env=os.environ | {"PATH": path}
    )
    return json.loads(result.stdout)


def expected_errors(text: str) -> dict[int, str]:
    """Line number, from 1 -> the rule that must report it."""
    marked = ((number, EXPECTED.search(line)) for number, line in enumerate(text.splitlines(), start=1))
    return {number: mark[1] for number, mark in marked if mark is not None}


def reported_errors(folder: Path, text: str) -> dict[int, set[str]]:
    """What pyright reports of `text` in a project of a user: this repository's own settings do not reach it."""
    folder.joinpath("pyrightconfig.json").write_text(json.dumps({"pythonVersion": "3.11"}))
    folder.joinpath("user.py").write_text(text, encoding="utf-8")
    report = pyright("--pythonpath", sys.executable, "user.py", cwd=folder)
    assert report["summary"]["filesAnalyzed"] == 1
    errors: dict[int, set[str]] = defaultdict(set)
    for entry in report["generalDiagnostics"]:
        if entry["severity"] == "error":
            errors[entry["range"]["start"]["line"] + 1].add(entry.get("rule", entry["message"]))
    return errors


@pytest.mark.slow
def test_results_have_their_types_and_mistakes_are_errors(tmp_path):
    text = CASES.read_text(encoding="utf-8").replace("# type: ignore", "", 1)
    expected, reported = expected_errors(text), reported_errors(tmp_path, text)
    assert len(expected) > 20
    # A mistake may be reported by another rule too: that no overload fits, beside the argument that does not.
    wrong = [number for number in {*expected, *reported} if expected.get(number) not in reported.get(number, ())]
    lines = text.splitlines()
    assert not wrong, "\n".join(f"{number}: {lines[number - 1].strip()} {reported[number]}" for number in sorted(wrong))


@pytest.mark.slow
def test_every_public_type_is_known():
    report = pyright("--verifytypes", "ropewalk", "--ignoreexternal", cwd=ROOT)["typeCompleteness"]
    unknown = [symbol["name"] for symbol in report["symbols"] if symbol["isExported"] and not symbol["isTypeKnown"]]
    # torchtitan is installed without its requirements, where --verifytypes does not look.
    apart = [name for name in unknown if name.startswith("ropewalk.hub.adapters.torchtitan.")]
    assert len(unknown) == len(apart), "\n".join(sorted({*unknown} - {*apart}))
    counts = report["exportedSymbolCounts"]
    assert counts["withUnknownType"] + counts["withAmbiguousType"] == len(apart)
