"""Convert the arguments of the theory functions to checked float64 arrays."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ropewalk.errors import RopewalkError, shown
from ropewalk.shapes import Float64

# One frequency per pair, as `RopeSpec.inv_freq()` returns them or as a list.
InvFreq = NDArray[np.float64] | Sequence[float]
# One distance m - n, or an array of distances.
Distances = NDArray[np.generic] | Sequence[float] | float


def frequencies_of(inv_freq: InvFreq, *, asked: str) -> Float64[np.ndarray, "pairs"]:
    """Return `inv_freq` as a finite float64 array [pairs]."""
    array = _array(inv_freq, asked)
    if array.ndim != 1 or array.size == 0 or not np.isfinite(array).all():
        raise RopewalkError(
            asked=asked,
            expected="inv_freq: one finite number per pair, in one dimension",
            got=f"shape {array.shape}{'' if np.isfinite(array).all() else ' with NaN or infinity'}",
            do="pass RopeSpec(...).inv_freq(), or one row of it if the heads have different frequencies",
        )
    return array


def distances_of(distance: Distances, *, asked: str) -> Float64[np.ndarray, "*any"]:
    """Return `distance` as a finite float64 array."""
    array = _array(distance, asked)
    if not np.isfinite(array).all():
        raise RopewalkError(
            asked=asked,
            expected="finite distances",
            got="NaN or infinity",
            do="pass the number of positions between query and key",
        )
    return array


def _array(values: object, asked: str) -> Float64[np.ndarray, "*any"]:
    try:
        return np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError):
        raise RopewalkError(
            asked=asked, expected="numbers, in rows of equal length", got=shown(values), do="pass a list of numbers"
        ) from None
