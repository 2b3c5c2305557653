"""Learning rates by encoding and size, from a recorded sweep."""

import json
from functools import cache
from importlib.resources import files
from typing import Any

from ropewalk.lab.decoder import AttentionName
from ropewalk.lab.encodings import parse_encoding

__all__ = ["RATES", "rate_of", "sweeps"]

# The rates that are compared. The best one of a sweep is not the first or last that was measured.
RATES = (2.5e-4, 5e-4, 1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2, 6.4e-2)
_DEFAULT = {"micro": 4e-3, "tiny": 2e-3, "small": 1e-3}


@cache
def sweeps() -> dict[str, Any]:
    """The recorded sweeps: size, attention and encoding -> the loss at each rate."""
    path = files("ropewalk").joinpath("data/lab/rates.json")
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def rate_of(encoding: str, size: str, attention: AttentionName) -> float:
    """The best rate of the sweep for an encoding, whatever its options; that of rope if it was not in the sweep.

    >>> rate_of("rope base=500", "micro", "softmax") == rate_of("rope", "micro", "softmax")
    True
    """
    recorded = sweeps().get(size, {}).get(attention, {})
    losses = recorded.get(parse_encoding(encoding)[0], recorded.get("rope"))
    return float(min(losses, key=losses.__getitem__)) if losses else _DEFAULT[size]
