"""Options that several commands share."""

import re
from typing import Annotated, Any

import typer

__all__ = ["NewFamilyPairing", "json_option", "length_option"]

_MULTIPLIERS = {"": 1, "k": 1024, "m": 1024**2}


def length_option(text: str) -> int:
    """Parse a number of positions. The suffix k means 1024 and M means 1024 * 1024, as in model names.

    Args:
        text: What the user typed, such as "131072", "128k" or "1M".

    Returns:
        The number of positions.

    Raises:
        typer.BadParameter: If `text` is not an integer with an optional suffix.

    >>> length_option("131072"), length_option("128k"), length_option("1M")
    (131072, 131072, 1048576)
    """
    match = re.fullmatch(r"\s*(-?\d{1,30})\s*([kKmM]?)\s*", text)
    if match is None:
        raise typer.BadParameter(f"{text!r} is not an integer number of positions; use for example 131072, 128k or 1M")
    return int(match[1]) * _MULTIPLIERS[match[2].lower()]


def json_option(content: str) -> Any:
    """The option --json FILE, where - is standard output. `content` completes the help text "Write ..."."""
    return typer.Option("--json", metavar="FILE", help=f"Write {content}; - for standard output.")


# For a config whose model_type is not in the table of model families.
NewFamilyPairing = Annotated[
    str | None,
    typer.Option("--pairing", metavar="half|interleaved", help="The pairing, if the model family is unknown."),
]
