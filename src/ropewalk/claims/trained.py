"""Records of trained models, which `ropewalk lab` has written and the package ships: what claims on training cite."""

import json
from functools import cache
from importlib.resources import files
from typing import Any

from ropewalk.claims.claim import Finding

__all__ = ["lab_record", "trained"]


@cache
def lab_record(name: str) -> dict[str, Any]:
    """A record of an experiment, as `ropewalk lab run --json` writes it.

    Args:
        name: The name of its file, without the suffix.

    >>> lab_record("convergence_micro")["experiment"]
    'convergence'
    """
    return json.loads(files("ropewalk").joinpath(f"data/lab/{name}.json").read_text(encoding="utf-8"))


def trained(name: str, *beginnings: str) -> Finding:
    """Cite verdicts of a record.

    Args:
        name: The name of a record.
        beginnings: How the cited statements begin.

    Returns:
        The figures, with the size, the number of seeds and the date. It is stated if all statements hold, and amended
        if all of them fail: seeds that do not decide one contradict every claim.
    """
    record = lab_record(name)
    cited = [x for x in record["statements"] if x["text"].startswith(beginnings)]
    if len(cited) != len(beginnings):
        raise LookupError(f"{len(cited)} statements of {name} begin with {beginnings}")
    verdicts = {x["verdict"] for x in cited}
    figures = "; ".join(x["reason"] for x in cited)
    source = f"{record['size']}, {len(record['seeds'])} seeds, {record['date']}"
    return Finding(
        f"{figures} ({source})",
        stated=None if "undecided" in verdicts else verdicts == {"holds"},
        amended=verdicts == {"fails"},
    )
