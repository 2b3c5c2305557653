"""Arithmetic: the array operations that a rule uses, so that its formula is written once for NumPy and torch.

A spec computes with NumPy in float64. A module passes torch to the rules instead: in float32, to repeat the operations
with which a model was trained, or in float64 on a device, for a length that is a tensor on that device.
"""

from collections.abc import Sequence
from types import EllipsisType
from typing import Protocol, TypeVar, runtime_checkable

import numpy as np

from ropewalk.errors import require_even

__all__ = ["FLOAT64", "Arithmetic", "Array", "ArrayT", "as_array"]


_Same = TypeVar("_Same", bound="Array")


@runtime_checkable
class Array(Protocol):
    """The operators that a formula may use. NumPy arrays and torch tensors have all of them.

    >>> isinstance(np.ones(2), Array), isinstance(1.0, Array)
    (True, False)
    """

    def __add__(self: _Same, other: _Same | float, /) -> _Same: ...
    def __radd__(self: _Same, other: float, /) -> _Same: ...
    def __sub__(self: _Same, other: _Same | float, /) -> _Same: ...
    def __rsub__(self: _Same, other: float, /) -> _Same: ...
    def __mul__(self: _Same, other: _Same | float, /) -> _Same: ...
    def __rmul__(self: _Same, other: float, /) -> _Same: ...
    def __truediv__(self: _Same, other: _Same | float, /) -> _Same: ...
    def __rtruediv__(self: _Same, other: float, /) -> _Same: ...
    def __pow__(self: _Same, other: float, /) -> _Same: ...
    def __lt__(self: _Same, other: float, /) -> _Same: ...
    def __gt__(self: _Same, other: float, /) -> _Same: ...
    def __getitem__(self: _Same, index: int | tuple[EllipsisType, list[int]], /) -> _Same: ...
    def reshape(self: _Same, rows: int, columns: int, /) -> _Same: ...


# A formula uses one type of array throughout.
ArrayT = TypeVar("ArrayT", bound=Array)


@runtime_checkable
class Arithmetic(Protocol[ArrayT]):
    """The functions that a rule may call, in addition to the operators of `Array`.

    >>> FLOAT64.powers(10_000.0, 4).tolist()
    [1.0, 100.0]
    """

    def powers(self, base: ArrayT | float, dim: int, count: int | None = None) -> ArrayT:
        """Return base^(2i/dim) for i = 0 .. dim/2-1, or the first `count` of them. A base [batch, 1] is broadcast."""
        ...

    def array(self, values: Sequence[float] | Sequence[Sequence[float]]) -> ArrayT:
        """Return numbers as an array."""
        ...

    def join(self, first: ArrayT, second: ArrayT) -> ArrayT:
        """Concatenate two one-dimensional arrays."""
        ...

    def where(self, condition: ArrayT, this: ArrayT, other: ArrayT) -> ArrayT:
        """Return `this` where the condition is true and `other` elsewhere."""
        ...

    def clip(self, x: ArrayT, low: float | None = None, high: float | None = None) -> ArrayT:
        """Clamp x to at least `low` and at most `high`."""
        ...

    def log(self, x: ArrayT) -> ArrayT:
        """Return the natural logarithm."""
        ...

    def exp(self, x: ArrayT) -> ArrayT:
        """Return e^x."""
        ...

    def floor(self, x: ArrayT) -> ArrayT:
        """Round down to an integer."""
        ...


class _NumPyFloat64:
    """NumPy in float64. Python numbers are accepted as zero-dimensional arrays."""

    def powers(self, base: np.ndarray | float, dim: int, count: int | None = None) -> np.ndarray:
        dim = require_even(dim, asked="the frequencies of a rotary_dim", do="features rotate in pairs")
        exponents = np.arange(0, dim, 2, dtype=np.float64)[:count] / dim
        return np.asarray(base**exponents)

    def array(self, values: Sequence[float] | Sequence[Sequence[float]]) -> np.ndarray:
        return np.asarray(values, dtype=np.float64)

    def join(self, first: np.ndarray, second: np.ndarray) -> np.ndarray:
        return np.concatenate((first, second))

    def where(
        self, condition: np.ndarray | np.bool | bool, this: np.ndarray | float, other: np.ndarray | float
    ) -> np.ndarray:
        return np.where(condition, this, other)

    def clip(self, x: np.ndarray | float, low: float | None = None, high: float | None = None) -> np.ndarray:
        return np.asarray(np.clip(x, low, high))

    def log(self, x: np.ndarray | float) -> np.ndarray:
        return np.asarray(np.log(x))

    def exp(self, x: np.ndarray | float) -> np.ndarray:
        return np.asarray(np.exp(x))

    def floor(self, x: np.ndarray | float) -> np.ndarray:
        return np.asarray(np.floor(x))


FLOAT64: Arithmetic[np.ndarray] = _NumPyFloat64()


def as_array(number: ArrayT | float, arithmetic: Arithmetic[ArrayT]) -> ArrayT:
    """Return a Python number as a zero-dimensional array, and an array unchanged.

    Args:
        number: A number, or an array of `arithmetic`.
        arithmetic: Array library and dtype of the result.

    >>> as_array(4096, FLOAT64).shape
    ()
    """
    return arithmetic.array([number])[0] if isinstance(number, int | float) else number
