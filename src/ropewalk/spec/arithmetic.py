"""The arithmetic in which a rule computes, so that its formula is written once.

NumPy in float64 is what a spec answers in. A module hands rules torch instead: float32, for the very operations with
which a model was trained, or float64 on a device, for a length that is a tensor there.
"""

from collections.abc import Sequence
from typing import Any, Protocol, cast, runtime_checkable

import numpy as np

from ropewalk.errors import require_even

__all__ = ["FLOAT64", "Arithmetic"]


@runtime_checkable
class Arithmetic(Protocol):
    """What a rule may call; +, -, *, / and ** of what these give are its other means.

    >>> FLOAT64.powers(10_000.0, 4).tolist()
    [1.0, 100.0]
    """

    def powers(self, base: Any, dim: int, count: int | None = None) -> Any:
        """base^(2i/dim) for i = 0 .. dim/2-1, or the first `count` of them. A base [batch, 1] gives [batch, dim/2]."""

    def array(self, values: Sequence[Any]) -> Any:
        """Numbers as an array."""

    def join(self, first: Any, second: Any) -> Any:
        """Two rows of numbers, one after the other."""

    def where(self, condition: Any, this: Any, other: Any) -> Any:
        """`this` where the condition holds, `other` elsewhere."""

    def clip(self, x: Any, low: float | None = None, high: float | None = None) -> Any:
        """x, but at least `low` and at most `high`."""

    def log(self, x: Any) -> Any:
        """The natural logarithm."""

    def floor(self, x: Any) -> Any:
        """The next whole number below, or x itself."""


class _NumPyFloat64:
    """NumPy in float64."""

    def powers(self, base: Any, dim: int, count: int | None = None) -> Any:
        dim = require_even(dim, asked="the frequencies of a rotary_dim", do="features rotate in pairs")
        exponents: Any = np.arange(0, dim, 2, dtype=np.float64)[:count] / dim
        return base**exponents

    def array(self, values: Sequence[Any]) -> Any:
        return np.asarray(values, dtype=np.float64)

    def join(self, first: Any, second: Any) -> Any:
        return np.concatenate((first, second))

    def where(self, condition: Any, this: Any, other: Any) -> Any:
        return cast("Any", np.where(condition, this, other))

    def clip(self, x: Any, low: float | None = None, high: float | None = None) -> Any:
        return np.clip(x, low, high)

    def log(self, x: Any) -> Any:
        return np.log(x)

    def floor(self, x: Any) -> Any:
        return np.floor(x)


FLOAT64: Arithmetic = _NumPyFloat64()
