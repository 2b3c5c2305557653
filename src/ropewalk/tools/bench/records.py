"""Records of benchmarks: written with the floors that they miss and a digest, and read back with both checked."""

import hashlib
import json
import textwrap
from pathlib import Path
from typing import Any

from ropewalk.errors import RopewalkError
from ropewalk.hub.files import read_text
from ropewalk.tools.output import write_json

__all__ = ["digest", "read_sealed", "shown_missed", "write_record"]

# The maximum size of a record. The commands write some tens of kilobytes.
MOST_BYTES = 16 << 20


def digest(record: dict[str, Any]) -> str:
    """SHA-256 of a record without its own digest.

    >>> digest({"ms": 1.5})[:8] == digest({"ms": 1.5, "digest": "anything"})[:8]
    True
    >>> digest({"ms": 1.5}) == digest({"ms": 1.6})
    False
    """
    content = {key: value for key, value in record.items() if key != "digest"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def write_record(record: dict[str, Any], target: str, missed: list[str]) -> None:
    """Write a record as JSON, with the floors that it misses and its digest.

    Args:
        record: Command, date, hardware, versions and cases.
        target: The file name; "-" for standard output.
        missed: One sentence per missed floor, from `ropewalk.tools.bench.floors`.
    """
    whole = record | {"missed": missed}
    write_json(whole | {"digest": digest(whole)}, target)


def shown_missed(missed: list[str]) -> str:
    """The missed floors as text, at most 80 columns wide."""
    if not missed:
        return "Floors of the committed records (benchmarks/): none missed."
    lines = (textwrap.fill(floor, 78, initial_indent="  ", subsequent_indent="    ") for floor in missed)
    return "\n".join(["Floors of the committed records (benchmarks/) that this run misses:", *lines])


def read_sealed(path: Path) -> dict[str, Any]:
    """Read a published record: not edited since it was written, and without missed floors.

    Args:
        path: The file that a benchmark wrote with `--json`.

    Returns:
        The record.

    Raises:
        RopewalkError: If the digest does not match the content, if a floor is missed, or if cases are missing due to
            `--quick` or `--only`.
    """
    asked = f"the record {path.name}"
    do = "measure again with the command in the record"
    record = json.loads(read_text(path, most=MOST_BYTES, asked=asked, expected="a record", do=do))
    if record.get("digest") != digest(record):
        expected = "an unchanged record of a benchmark"
        raise RopewalkError(asked=asked, expected=expected, got="a digest that does not match the content", do=do)
    for option in ("--quick", "--only"):
        if option in record["command"]:
            raise RopewalkError(
                asked=asked, expected="all cases", got=record["command"], do=f"measure without {option}"
            )
    if record["missed"]:
        got = "; ".join(record["missed"])
        raise RopewalkError(asked=asked, expected="no missed floor", got=got, do="fix the regression, then " + do)
    return record
