"""Lengths as people type them: 131072, 128k, 1M."""

import re

import typer

__all__ = ["length_option"]

_TIMES = {"": 1, "k": 1024, "m": 1024**2}


def length_option(text: str) -> int:
    """A whole number of positions; k is 1024 and M is 1024 times 1024, as names of models have it.

    >>> length_option("131072"), length_option("128k"), length_option("1M")
    (131072, 131072, 1048576)
    """
    found = re.fullmatch(r"\s*(-?\d{1,30})\s*([kKmM]?)\s*", text)
    if found is None:
        raise typer.BadParameter(f"{text!r} is no whole number of positions; type one such as 131072, 128k or 1M")
    return int(found[1]) * _TIMES[found[2].lower()]
