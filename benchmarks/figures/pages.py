"""Blocks of pages: who writes each one, and how tables and paragraphs are written."""

import textwrap
from collections.abc import Callable

BLOCKS: dict[str, Callable[[str], str]] = {}


def block(name: str) -> Callable[[Callable[[str], str]], Callable[[str], str]]:
    """Register a function from the text of a page to the content of its block `name`."""

    def register(function: Callable[[str], str]) -> Callable[[str], str]:
        BLOCKS[name] = function
        return function

    return register


def table(*rows: list[str]) -> str:
    """A Markdown table. The first row is the header."""
    lines = [f"| {' | '.join(row)} |".replace("|  |", "| |") for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])


def paragraph(text: str) -> str:
    return textwrap.fill(text, 118, break_long_words=False, break_on_hyphens=False)


def own_lines(*parts: str) -> str:
    """The content of a block that is not inline: paragraphs and tables with an empty line between them."""
    return "\n" + "\n\n".join(parts) + "\n"


def milliseconds(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"
