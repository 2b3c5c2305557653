"""Checks of the fields that several rules share."""

from collections.abc import Sequence
from typing import Protocol, cast, runtime_checkable

from ropewalk.errors import RopewalkError, as_float, require_count, require_positive, shown
from ropewalk.spec.value import DataclassValue


class _Required(float):
    def __repr__(self) -> str:
        return "<required>"


# The default of a factor that has to be passed: without one, a rule for longer contexts would be plain RoPE. It follows
# the base, which has a default.
REQUIRED = _Required("nan")
# An upper bound for lengths that float64 represents exactly.
LONGEST = 1 << 53

__all__ = [
    "REQUIRED",
    "SupportsToList",
    "as_list",
    "as_row",
    "as_rows",
    "check_base",
    "check_factor",
    "check_trained_length",
]


@runtime_checkable
class SupportsToList(Protocol):
    """A NumPy array or a torch tensor, recognised without importing torch.

    >>> import numpy as np
    >>> isinstance(np.ones(2), SupportsToList)
    True
    """

    def tolist(self) -> object: ...


def check_base(rule: DataclassValue, above: float = 0.0) -> None:
    """Convert `base` of a rule to float. Raise if it is not a finite number above `above`.

    >>> from ropewalk.spec import Plain
    >>> Plain(base=500).base
    500.0
    """
    asked, value = _field(rule, "base")
    base = require_positive(value, asked=asked, do="pass the base of the geometric sequence, for example 10_000")
    if base <= above:
        raise RopewalkError(
            asked=asked,
            expected=f"a finite number above {above:g}",
            got=shown(value),
            do="the rule divides by the logarithm of the base; pass for example 10_000",
        )
    object.__setattr__(rule, "base", base)


def check_factor(rule: DataclassValue) -> None:
    """Convert `factor` of a rule to float. Raise if it is not a finite number of at least 1.

    >>> from ropewalk.spec import NTK
    >>> NTK(factor=4).factor
    4.0
    """
    asked, value = _field(rule, "factor")
    factor = as_float(value)
    if factor is None or not 1.0 <= factor <= 1e30:
        raise RopewalkError(
            asked=asked,
            expected="a finite number of at least 1, and below 1e30",
            got="no factor" if value is REQUIRED else shown(value),
            do="pass the ratio of the extended context length to the trained one",
        )
    object.__setattr__(rule, "factor", factor)


def check_trained_length(rule: DataclassValue) -> None:
    """Convert `trained_length` of a rule to int. Raise if it is below 2, because rules divide by its logarithm.

    >>> from ropewalk.spec import Yarn
    >>> Yarn(factor=4, trained_length=8192).trained_length
    8192
    """
    asked, value = _field(rule, "trained_length")
    do = "pass the context length that the model was trained on, before any extension"
    length = require_count(value, asked=asked, do=do, at_least=2)
    if length > LONGEST:
        raise RopewalkError(asked=asked, expected="at most 2^53 positions", got=shown(length), do=do)
    object.__setattr__(rule, "trained_length", length)


def _field(rule: DataclassValue, name: str) -> tuple[str, object]:
    """Return the name of a field for error messages, and its unchecked value."""
    return f"{type(rule).__name__}({name}=...)", getattr(rule, name)


def as_list(values: object) -> list[object]:
    """Return the entries of a sequence, an array or a tensor, and [] for anything else.

    >>> import numpy as np
    >>> as_list(np.ones(2)), as_list((1, 2)), as_list("12")
    ([1.0, 1.0], [1, 2], [])
    """
    entries = values.tolist() if isinstance(values, SupportsToList) else values
    if not isinstance(entries, Sequence) or isinstance(entries, str | bytes):
        return []
    return list(cast("Sequence[object]", entries))


def as_row(values: object) -> tuple[float, ...] | None:
    """Return one or more finite numbers as a tuple of floats, and None for anything else.

    >>> as_row([1, 0.5]), as_row([1, float("nan")]), as_row([])
    ((1.0, 0.5), None, None)
    """
    numbers = [as_float(value) for value in as_list(values)]
    row = tuple(number for number in numbers if number is not None)
    return row if row and len(row) == len(numbers) else None


def as_rows(values: object) -> tuple[tuple[float, ...], ...] | None:
    """Return rows of finite numbers of equal length as tuples of floats, and None for anything else.

    >>> as_rows([[1, 2], [3, 4]]), as_rows([[1, 2], [3]])
    (((1.0, 2.0), (3.0, 4.0)), None)
    """
    checked = [as_row(row) for row in as_list(values)]
    rows = tuple(row for row in checked if row is not None and len(row) == len(checked[0] or ()))
    return rows if rows and len(rows) == len(checked) else None
