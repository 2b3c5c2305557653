"""Errors of cos that the code of a page asserts."""

import re

from figures.pages import block, own_lines, table


@block("precision")
def precision(page: str) -> str:
    """A table of what the code on the page asserts. The code is run with the page."""
    names = [
        "ropewalk",
        "float32 angles, as in transformers",
        "exact angles, cos and sin rounded to bfloat16",
        "frequencies cast to bfloat16 with the model",
        "position ids in bfloat16",
    ]
    asserted = re.findall(r'^assert errors\(.*\) == "(.*)"$', page, re.MULTILINE)
    rows = ([name, *errors.split(" | ")] for name, errors in zip(names, asserted, strict=True))
    return own_lines(table(["how cos is computed", "4k", "32k", "128k", "1M"], *rows))
