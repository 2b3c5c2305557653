"""The code of two notes, run as printed, in a namespace of its own.

`data/claims/note_002.txt` and `note_003.txt` are quotations: the lines of the notes, unchanged. What the print added is
removed before they run: line numbers, line breaks inside a line of code, and a page break, after which the note lost
four columns of indentation.
"""

import importlib
import re
import warnings
from collections.abc import Callable
from functools import cache
from importlib.resources import files
from typing import Any

import torch
from torch import Tensor, nn

from ropewalk.claims.claim import NotAvailable

__all__ = ["Functions", "code_of", "functions_of_note_003", "module_of_note_002"]

_NUMBER = re.compile(r"(\d+)( *)")
_FENCE = "```"


def quotation(note: str) -> str:
    """The code of note "002" or "003", as printed.

    >>> quotation("003").splitlines()[0]
    'import torch'
    """
    return files("ropewalk").joinpath(f"data/claims/note_{note}.txt").read_text(encoding="utf-8")


def code_of(note: str) -> str:
    """The code of note "002" or "003" as Python source.

    >>> code_of("002").splitlines()[0]
    'class RotaryEmbedding(nn.Module):'
    """
    printed = quotation(note)
    return _without_print(printed) if note == "002" else printed


def _without_print(printed: str) -> str:
    """Remove line numbers, join broken lines, and indent the lines after the page break as the lines before it."""
    first_page, _, second_page = printed.partition(f"\n{_FENCE}\n\n{_FENCE}\n")
    before, after = _numbered(first_page), _numbered(second_page)
    # Up to the next method, the second page continues the body of the method that the first page ends in.
    end = next(i for i, line in enumerate(after) if line.lstrip().startswith("def "))
    lost = _indentation(before[-1]) - _indentation(after[0])
    return "\n".join([*before, *(" " * lost + line if line else line for line in after[:end]), *after[end:], ""])


def _numbered(page: str) -> list[str]:
    """The lines of a page without their numbers. A line without a number continues the one before it."""
    lines: list[str] = []
    for line in filter(None, page.split("\n")):
        number = _NUMBER.match(line)
        if number is None:
            lines[-1] += f" {line}"
        else:
            # Numbers are in a column of three characters.
            lines.append(line[3:] if len(number[1]) < 3 else line[len(number[1]) :])
    return lines


def _indentation(line: str) -> int:
    return len(line) - len(line.lstrip())


def _run(note: str, names: dict[str, Any]) -> dict[str, Any]:
    namespace = {"__name__": f"note_{note}", **names}
    exec(compile(code_of(note), f"note {note}", "exec"), namespace)
    return namespace


@cache
def _class_of_note_002() -> type[nn.Module]:
    try:
        einops, einx = (importlib.import_module(name) for name in ("einops", "einx"))
    except ImportError as error:
        raise NotAvailable(f"{error.name} is missing; pip install einops einx") from None
    if not hasattr(einx, "rearrange"):
        raise NotAvailable("this einx has no rearrange, which the note calls; pip install 'einx<0.5'")
    jaxtyping = importlib.import_module("jaxtyping")
    names = {"torch": torch, "nn": nn, "Tensor": Tensor, "Float": jaxtyping.Float, "Int": jaxtyping.Int, "einx": einx}
    return _run("002", {**names, "einsum": einops.einsum, "rearrange": einops.rearrange})["RotaryEmbedding"]


def module_of_note_002(context_length: int, dim: int) -> nn.Module:
    """The module of note 002, whose imports the note does not print: torch, jaxtyping, einops and einx.

    Raises:
        NotAvailable: If einops or einx is not installed.

    >>> module_of_note_002(8, 4)(torch.tensor([[1.0, 0.0, 1.0, 0.0]]), torch.tensor([0])).tolist()
    [[1.0, 0.0, 1.0, 0.0]]
    """
    module = _class_of_note_002()(context_length, dim)
    forward = module.forward

    def without_deprecation(*arguments: Tensor) -> Tensor:
        with warnings.catch_warnings():
            # The note calls einx.rearrange, whose name is deprecated since einx 0.4.
            warnings.filterwarnings("ignore", message="einx.rearrange is deprecated", category=DeprecationWarning)
            return forward(*arguments)

    module.forward = without_deprecation
    return module


Functions = tuple[Callable[..., tuple[Tensor, Tensor]], Callable[[Tensor, Tensor, Tensor], Tensor]]


@cache
def functions_of_note_003() -> Functions:
    """`build_rotary_frequencies` and `apply_rope` of note 003.

    >>> build, apply = functions_of_note_003()
    >>> [list(table.shape) for table in build(4, 8)]
    [[1, 1, 8, 2], [1, 1, 8, 2]]
    """
    namespace = _run("003", {})
    return namespace["build_rotary_frequencies"], namespace["apply_rope"]
