"""Reads the records of this folder, or of another one that `read_from` names."""

from functools import cache
from pathlib import Path
from typing import Any

from ropewalk.tools.bench.records import read_sealed

Case = dict[str, Any]

# Names of processors for which `processor` returns only a part number.
PROCESSORS = {"0xd0c": "Neoverse-N1"}
FORMULA = "transformers' formula"

_folder = Path(__file__).parent.parent


def read_from(folder: Path) -> None:
    """Read the records of another folder from now on."""
    global _folder
    _folder = folder


def record(name: str) -> dict[str, Any]:
    """The record NAME.json."""
    return _read(_folder / f"{name}.json")


@cache
def _read(path: Path) -> dict[str, Any]:
    return read_sealed(path)


def case_of(name: str, **fields: object) -> Case:
    """The only case of a record with these fields. Without a group, a case of attention is one over N."""
    usual = {"group": "lengths"}
    (case,) = (case for case in record(name)["cases"] if (usual | fields).items() <= (usual | case).items())
    return case


def times_of(case: Case, unit: str) -> dict[str, float]:
    """The time of each path that has one."""
    return {line["path"]: line[unit] for line in case["lines"] if line[unit] is not None}


def cores(name: str) -> str:
    hardware = record(name)["hardware"]
    count = {1: "one", 2: "two", 4: "four", 8: "eight"}.get(hardware["threads"], str(hardware["threads"]))
    return f"{count} {PROCESSORS.get(hardware['processor'], hardware['processor'])} cores"


def short_version(version: str) -> str:
    return ".".join(version.split("+")[0].split(".")[:2])
