"""Options that several commands share, and how a length is typed."""

import re
from typing import Annotated, Any

import typer

__all__ = ["NewFamilyPairing", "json_option", "length_option"]

_TIMES = {"": 1, "k": 1024, "m": 1024**2}


def length_option(text: str) -> int:
    """A whole number of positions; k is 1024 and M is 1024 times 1024, as in the names of models.

    >>> length_option("131072"), length_option("128k"), length_option("1M")
    (131072, 131072, 1048576)
    """
    match = re.fullmatch(r"\s*(-?\d{1,30})\s*([kKmM]?)\s*", text)
    if match is None:
        raise typer.BadParameter(f"{text!r} is no whole number of positions; type one such as 131072, 128k or 1M")
    return int(match[1]) * _TIMES[match[2].lower()]


def json_option(content: str) -> Any:
    """--json FILE, where - is standard output. `content` completes "Write ..." in the help."""
    return typer.Option("--json", metavar="FILE", help=f"Write {content}; - for standard output.")


# For a config whose model_type is not in the table of families.
NewFamilyPairing = Annotated[
    str | None,
    typer.Option("--pairing", metavar="half|interleaved", help="Which features form a pair, in a new family."),
]
