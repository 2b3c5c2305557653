"""Records of measurements that take long or need hardware. `python benchmarks/record_claims.py` measures them again."""

import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

__all__ = ["Record", "records"]


@dataclass(frozen=True)
class Record:
    """The stored result of a measurement.

    Attributes:
        measured: The figures, as text.
        stated: Whether the statement was true as made; None if the measurement cannot decide it.
        amended: Whether the amendment of the claim was true.
        method: The method of the claim when it was measured.
        date: The day of the measurement.
        hardware: The processor, and the number of threads.
        seconds: How long it took.

    >>> records()["men.islands"].amended
    True
    """

    measured: str
    stated: bool | None
    amended: bool
    method: str
    date: str
    hardware: str
    seconds: float


@cache
def records() -> dict[str, Record]:
    """The record of every long claim, by id."""
    text = files("ropewalk").joinpath("data/claims/records.json").read_text(encoding="utf-8")
    return {id: Record(**fields) for id, fields in json.loads(text).items()}
