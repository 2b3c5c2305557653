"""The exception that ropewalk raises for invalid input, and the checks that raise it.

Every message has four parts: what was asked, what was expected, what was received, and what to do.
"""

import difflib
import math
import numbers
import sys
import warnings
from collections.abc import Iterable
from typing import TypeVar

from ropewalk.names import VALUES

__all__ = ["RopewalkError", "RopewalkWarning"]

Choice = TypeVar("Choice", bound=str)


class RopewalkError(ValueError):
    """Invalid or unsupported input.

    It is a subclass of `ValueError`, so `except ValueError` catches it.

    Attributes:
        asked: The call or argument that was rejected.
        expected: What it accepts.
        got: What it received.
        do: How to fix the call.

    >>> import ropewalk as rw
    >>> try:
    ...     rw.RopeSpec(head_dim=7)
    ... except rw.RopewalkError as error:
    ...     print(error)
    asked:    RopeSpec(head_dim=...)
    expected: an even integer of at least 2
    got:      7
    do this:  pass an even head_dim; features rotate in pairs
    """

    asked: str
    expected: str
    got: str
    do: str
    args: tuple[str, ...]

    def __init__(self, asked: str, expected: str, got: str, do: str) -> None:
        self.asked, self.expected, self.got, self.do = asked, expected, got, do
        # Pickle, copy and torch.compile create an exception anew from its class and args.
        # Not super().__init__(): torch.compile cannot trace it, and would raise its own error instead of this one.
        self.args = (asked, expected, got, do)

    def __str__(self) -> str:
        return _four_parts(self.asked, self.expected, self.got, self.do)


class RopewalkWarning(UserWarning):
    """Input that is valid but probably a mistake.

    `warnings.filterwarnings("error", category=rw.RopewalkWarning)` makes it an error.

    >>> issubclass(RopewalkWarning, UserWarning)
    True
    """


def warn(*, asked: str, expected: str, got: str, do: str) -> None:
    """Emit a `RopewalkWarning` with the four parts of an error, for input that is probably a mistake.

    It is attributed to the first line of code outside of ropewalk and torch, so Python shows it once per such line.

    >>> import warnings
    >>> with warnings.catch_warnings(record=True) as caught:
    ...     warnings.simplefilter("always")
    ...     warn(asked="a doctest", expected="one thing", got="another", do="look twice")
    >>> print(caught[0].message)
    asked:    a doctest
    expected: one thing
    got:      another
    do this:  look twice
    """
    warnings.warn(RopewalkWarning(_four_parts(asked, expected, got, do)), stacklevel=depth_of_caller())


def depth_of_caller() -> int:
    """Return the stacklevel of the first frame outside of ropewalk and torch."""
    depth, frame = 1, sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ("ropewalk", "torch"):
        depth, frame = depth + 1, frame.f_back
    return depth


def _four_parts(asked: str, expected: str, got: str, do: str) -> str:
    return f"asked:    {asked}\nexpected: {expected}\ngot:      {got}\ndo this:  {do}"


def shown(value: object) -> str:
    """Format `value` for an error: its repr, shortened, with its type if the repr does not show it.

    >>> shown(7), shown(7.0), shown("x" * 99)[-4:]
    ('7', '7.0 (float)', 'x...')
    """
    text = repr(value)
    text = text if len(text) <= 60 else text[:57] + "..."
    return text if type(value) in (int, str, bool, type(None)) else f"{text} ({type(value).__name__})"


def require_choice(value: object, choices: Iterable[Choice], *, asked: str) -> Choice:
    """Return the element of `choices` that equals `value`, or raise an error that suggests the closest one."""
    known = tuple(choices)
    if isinstance(value, str) and value in known:
        return known[known.index(value)]
    ours, do = VALUES.get(str(value), (None, ""))
    if ours not in known:
        near = difflib.get_close_matches(str(value), known, n=1)
        do = f"did you mean {near[0]!r}?" if near else f"use one of {', '.join(map(repr, known))}"
    raise RopewalkError(asked=asked, expected=" or ".join(map(repr, known)), got=shown(value), do=do)


def require_even(value: object, *, asked: str, do: str) -> int:
    """Return `value` as an int. Raise if it is not an even integer of at least 2."""
    number = as_int(value)
    if number is None or number < 2 or number % 2:
        raise RopewalkError(asked=asked, expected="an even integer of at least 2", got=shown(value), do=do)
    return number


def require_count(value: object, *, asked: str, do: str, at_least: int = 1) -> int:
    """Return `value` as an int. Raise if it is not an integer of at least `at_least`."""
    number = as_int(value)
    if number is None or number < at_least:
        expected = f"an integer of at least {at_least}"
        raise RopewalkError(asked=asked, expected=expected, got=shown(value), do=do)
    return number


def require_positive(value: object, *, asked: str, do: str) -> float:
    """Return `value` as a float. Raise if it is not a finite number above 0."""
    number = as_float(value)
    if number is None or number <= 0.0:
        raise RopewalkError(asked=asked, expected="a finite number above 0", got=shown(value), do=do)
    return number


def require_flag(value: object, *, asked: str) -> bool:
    """Return `value`. Raise if it is not a bool."""
    if not isinstance(value, bool):
        raise RopewalkError(asked=asked, expected="True or False", got=shown(value), do="pass a bool")
    return value


def as_int(value: object) -> int | None:
    """Return `value` as an int, or None if it is not an integer. A bool does not count as an integer."""
    return int(value) if isinstance(value, numbers.Integral) and not isinstance(value, bool) else None


def as_float(value: object) -> float | None:
    """Return `value` as a float, or None if it is not a finite number. A bool does not count as a number."""
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None
