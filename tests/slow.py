"""Parameters of tests that `make test` leaves out and `make test-all` runs."""

from collections.abc import Iterable
from typing import Any

import pytest

__all__ = ["slow", "slow_except"]


def slow(*values: Any) -> Any:
    """One set of parameters, marked slow."""
    return pytest.param(*values, marks=pytest.mark.slow)


def slow_except(quick: Iterable[Any], values: Iterable[Any]) -> list[Any]:
    """All values of one parameter, marked slow except those in `quick`."""
    chosen, everything = list(quick), list(values)
    assert all(value in everything for value in chosen)
    return [value if value in chosen else slow(value) for value in everything]
