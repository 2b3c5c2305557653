"""The curves of the lab for the page: means over seeds, from records that are installed with ropewalk."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["curves_of", "installed_curves"]

_FOLDER = Path(__file__).parents[2] / "data" / "lab"
# The axes of each curve: x, y, and whether x is logarithmic.
_AXES = {
    "loss by step": ("step", "validation loss [nats per token]", False),
    "loss by length": ("length", "loss of the same tokens [nats]", True),
    "accuracy by length": ("length", "share of right tokens", True),
    "exact by length": ("length", "share of exact answers", True),
    "accuracy by distance": ("distance", "share of right values", True),
}
# Losses of the first steps would hide all differences.
_SHOWN_FROM = 0.1


def installed_curves(folder: Path = _FOLDER) -> list[dict[str, Any]]:
    """The curves of all records of experiments in a folder; [] if it has none."""
    records = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))]
    return [curve for record in records if "experiment" in record and "arms" in record for curve in curves_of(record)]


def curves_of(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The curves of one record: a line per arm, with the mean over its seeds.

    >>> run = {"curves": {"loss by length": [[64, 3.0], [128, None]]}}
    >>> arms = [{"label": "rope", "results": [run, run]}]
    >>> (curve,) = curves_of({"experiment": "e", "size": "tiny", "seeds": [0, 1], "hardware": "CPU", "arms": arms})
    >>> curve["title"], curve["lines"]
    ('e (tiny, seeds 0, 1): loss by length', [{'name': 'rope', 'xs': [64], 'ys': [3.0]}])
    """
    curves: list[dict[str, Any]] = []
    for name, (x, y, log) in _AXES.items():
        lines = [line for arm in record["arms"] if (line := _line(arm, name))["xs"]]
        # Runs that are evaluated at a step or two have no curve.
        if not lines or (name == "loss by step" and max(len(line["xs"]) for line in lines) < 3):
            continue
        seeds = f"seed{'s'[: len(record['seeds']) > 1]} {', '.join(map(str, record['seeds']))}"
        measured = [record["size"], seeds, record["hardware"], record.get("date", "no date")]
        note = f"Measured: {', '.join(measured)}."
        # An experiment may have several records.
        title = f"{record['experiment']} ({record['size']}, {seeds}): {name}"
        verdicts = [f"“{x['text']}”: {x['verdict']}." for x in record.get("statements", [])]
        shown = {"title": title, "verdicts": " ".join(verdicts), "note": note}
        curves.append({**shown, "x": x, "y": y, "log": log, "lines": lines})
    return curves


def _line(arm: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The mean over seeds. A value that is missing in one of them is left out."""
    by_seed = [dict(map(tuple, result["curves"].get(name, []))) for result in arm["results"]]
    shared = [x for x in by_seed[0] if all(seed.get(x) is not None for seed in by_seed)] if by_seed else []
    if name == "loss by step" and shared:
        shared = [x for x in shared if x >= _SHOWN_FROM * shared[-1]]
    return {"name": arm["label"], "xs": shared, "ys": [sum(s[x] for s in by_seed) / len(by_seed) for x in shared]}
