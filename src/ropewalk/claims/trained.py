"""Records of trained models, which `ropewalk lab` has written and the package ships: what claims on training cite."""

import json
from functools import cache
from importlib.resources import files
from typing import Any

from ropewalk.claims.claim import Finding

__all__ = ["MICRO", "SMALL", "TINY", "lab_record", "trained"]

# What follows the name of an experiment in the names of its records: 0.13 million parameters with seeds 0 to 2, and
# with seeds 3 to 5; 1.1 million with seeds 0 to 2; and 10.8 million, which few experiments have, of few encodings.
MICRO = "micro", "micro_other_seeds"
TINY = ("tiny",)
SMALL = ("small",)


@cache
def lab_record(name: str) -> dict[str, Any]:
    """A record of an experiment, as `ropewalk lab run --json` writes it.

    Args:
        name: The name of its file, without the suffix.

    >>> lab_record("convergence_micro")["experiment"]
    'convergence'
    """
    return json.loads(files("ropewalk").joinpath(f"data/lab/{name}.json").read_text(encoding="utf-8"))


def trained(experiment: str, *beginnings: str, records: tuple[str, ...] = MICRO + TINY) -> Finding:
    """Cite verdicts on an experiment, of each of its records.

    Args:
        experiment: The name of an experiment.
        beginnings: How the cited statements begin.
        records: Which records: what follows the name of the experiment in their names.

    Returns:
        The figures per record, with the size, the seeds and the date. A record counts if it decides all statements, or
        if one of them fails. It is stated if all hold in every record that counts, amended if in every one none
        holds, and neither if no record counts.
    """
    figures: list[str] = []
    decided: list[set[str]] = []
    for name in records:
        record = lab_record(f"{experiment}_{name}")
        cited = [x for x in record["statements"] if x["text"].startswith(beginnings)]
        if len(cited) != len(beginnings):
            raise LookupError(f"{len(cited)} statements of {experiment}_{name} begin with {beginnings}")
        verdicts = {x["verdict"] for x in cited}
        undecided = "undecided: " if "undecided" in verdicts else ""
        reasons = "; ".join(x["reason"] for x in cited)
        seeds = f"{record['seeds'][0]} to {record['seeds'][-1]}"
        figures.append(f"{undecided}{reasons} ({record['size']}, seeds {seeds}, {record['date']})")
        decided.append(verdicts - {"undecided"} if "fails" in verdicts or not undecided else set())
    verdicts = set().union(*decided)
    return Finding(
        "; ".join(figures),
        stated=verdicts == {"holds"} if verdicts else None,
        amended=verdicts == {"fails"},
    )
