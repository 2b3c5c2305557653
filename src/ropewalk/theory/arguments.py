"""Turns what a caller of the theory gives into checked float64 arrays."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float64
from numpy.typing import NDArray

from ropewalk.errors import RopewalkError, shown

# One frequency a pair, as a spec's `inv_freq()` gives them or written out as a list.
InvFreq = NDArray[np.float64] | Sequence[float]
# One distance m - n, or many.
Distances = NDArray[np.generic] | Sequence[float] | float


def frequencies_of(inv_freq: InvFreq, *, asked: str) -> Float64[np.ndarray, "pairs"]:
    """`inv_freq` as one finite float64 a pair."""
    array = _array(inv_freq, asked)
    if array.ndim != 1 or array.size == 0 or not np.isfinite(array).all():
        raise RopewalkError(
            asked=asked,
            expected="inv_freq: one finite number a pair, in one dimension",
            got=f"shape {array.shape}{'' if np.isfinite(array).all() else ' with NaN or infinity'}",
            do="pass RopeSpec(...).inv_freq(), or one row of it where heads differ",
        )
    return array


def distances_of(distance: Distances, *, asked: str) -> Float64[np.ndarray, "*any"]:
    """`distance` as finite float64."""
    array = _array(distance, asked)
    if not np.isfinite(array).all():
        raise RopewalkError(
            asked=asked,
            expected="finite distances",
            got="NaN or infinity",
            do="pass how many positions lie between query and key",
        )
    return array


def _array(values: object, asked: str) -> Float64[np.ndarray, "*any"]:
    try:
        return np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError):
        raise RopewalkError(
            asked=asked, expected="numbers, in rows of equal length", got=shown(values), do="pass a list of numbers"
        ) from None
