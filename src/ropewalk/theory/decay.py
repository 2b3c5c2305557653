"""Scores as a function of distance: the sum of cosines, the Abel bound, and RoFormer's long-term decay curve."""

import itertools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ropewalk.errors import RopewalkError
from ropewalk.shapes import Complex128, Float64
from ropewalk.theory.arguments import Distances, InvFreq, distances_of, frequencies_of

__all__ = ["BAND_EDGES", "abel_bound", "abel_transform", "band_means", "decay_curve", "partial_sums", "score_sum"]

# Edges of the bands in which decay is compared. The first band contains the steep start; the others are octaves.
BAND_EDGES = (1, 32, 64, 128, 256, 512, 1024, 2048)


def score_sum(distance: Distances, inv_freq: InvFreq) -> Float64[np.ndarray, "*any"]:
    """Sum of cosines S(D) = sum_j cos(D theta_j).

    It is the score of a query and a key whose pairs are all parallel and of norm 1. It is also B_m of Men et al.
    (2405.14591, theorem 1): the mean difference between the scores of a similar key and a random key.

    Args:
        distance: Distances D = m - n, of any shape.
        inv_freq: Frequencies [pairs].

    Returns:
        Sums, in the shape of `distance`.

    Raises:
        RopewalkError: If a distance or a frequency is not finite.

    >>> score_sum([0, 2, 20, 50], [1.0, 0.3, 0.05]).round(3).tolist()
    [3.0, 1.404, 1.909, -0.596]
    """
    gaps = distances_of(distance, asked="score_sum")
    return np.asarray(np.cos(gaps[..., None] * frequencies_of(inv_freq, asked="score_sum")).sum(axis=-1))


def partial_sums(distance: Distances, inv_freq: InvFreq) -> Complex128[np.ndarray, "*any pairs"]:
    """Partial sums S_1 .. S_{d/2}, S_j(D) = sum_{i<j} exp(i D theta_i) (RoFormer, 2104.09864, section 3.4.3).

    Args:
        distance: Distances D = m - n, of any shape.
        inv_freq: Frequencies [pairs].

    Returns:
        Partial sums [*distance.shape, pairs].

    Raises:
        RopewalkError: If a distance or a frequency is not finite.

    >>> partial_sums(0, [1.0, 0.3, 0.05]).real.tolist()
    [1.0, 2.0, 3.0]
    """
    return _partial_sums(distance, inv_freq, "partial_sums")


def _partial_sums(distance: Distances, inv_freq: InvFreq, asked: str) -> Complex128[np.ndarray, "*any pairs"]:
    gaps = distances_of(distance, asked=asked)
    return np.exp(1j * gaps[..., None] * frequencies_of(inv_freq, asked=asked)).cumsum(axis=-1)


def decay_curve(distance: Distances, inv_freq: InvFreq) -> Float64[np.ndarray, "*any"]:
    """Mean of |S_1| .. |S_{d/2}|, which RoFormer's figure 2 plots against the distance.

    The curve oscillates, so compare `band_means`, not neighbouring distances. The means fall up to a distance that
    depends on the base: for 128 features and base 10,000, they are lowest at distances of 8192 to 16384.

    Args:
        distance: Distances D = m - n, of any shape.
        inv_freq: Frequencies [pairs].

    Returns:
        Means, in the shape of `distance`.

    Raises:
        RopewalkError: If a distance or a frequency is not finite.

    >>> float(decay_curve(0, [1.0] * 64))  # (1 + 2 + ... + 64) / 64
    32.5
    """
    return np.asarray(np.abs(_partial_sums(distance, inv_freq, "decay_curve")).mean(axis=-1))


def band_means(curve: NDArray[np.float64] | Sequence[float], edges: Sequence[int]) -> Float64[np.ndarray, "bands"]:
    """Mean of curve[a:b] for each band [a, b) between neighbouring `edges`.

    Args:
        curve: Values at distances 0, 1, 2, ... [distances].
        edges: Two or more increasing indices from 0 to len(curve).

    Returns:
        One mean per band [len(edges) - 1].

    Raises:
        RopewalkError: If `curve` is not one-dimensional or `edges` do not fit it.

    >>> band_means(np.array([8.0, 4.0, 2.0, 0.0]), [0, 2, 4]).tolist()
    [6.0, 1.0]
    """
    curve = np.asarray(curve, dtype=np.float64)
    increasing = all(a < b for a, b in itertools.pairwise(edges))
    if curve.ndim != 1 or len(edges) < 2 or not increasing or edges[0] < 0 or edges[-1] > len(curve):
        raise RopewalkError(
            asked="band_means(curve, edges)",
            expected="a one-dimensional curve, and two or more increasing edges from 0 to its length",
            got=f"a curve of shape {curve.shape}, edges {list(edges)}",
            do="compute a longer curve, or lower the edges",
        )
    return np.array([curve[a:b].mean() for a, b in itertools.pairwise(edges)])


def abel_transform(products: NDArray[np.complex128], distance: float, inv_freq: InvFreq) -> complex:
    """Summation by parts of sum_i h_i exp(i D theta_i): -sum_i S_{i+1} (h_{i+1} - h_i) with h_{d/2} = 0.

    RoFormer, eq. 36. The real part of the sum is the attention score.

    Args:
        products: h_i = q_i conj(k_i), where the pairs are complex numbers [pairs].
        distance: One distance D = m - n.
        inv_freq: Frequencies [pairs].

    Returns:
        The sum.

    Raises:
        RopewalkError: If the shapes do not match, or if a number is not finite.

    >>> abel_transform(np.array([2.0 + 0j, 1.0]), 0.0, [1.0, 0.1]).real  # 2 + 1
    3.0
    """
    steps, sums = _steps_and_sums(products, distance, inv_freq, "abel_transform")
    return complex(-(sums * steps).sum())


def abel_bound(products: NDArray[np.complex128], distance: float, inv_freq: InvFreq) -> float:
    """Upper bound of the absolute score: max_i |h_{i+1} - h_i| * sum_i |S_{i+1}| (RoFormer, eq. 37).

    Args:
        products: h_i = q_i conj(k_i), where the pairs are complex numbers [pairs].
        distance: One distance D = m - n.
        inv_freq: Frequencies [pairs].

    Returns:
        The bound.

    Raises:
        RopewalkError: If the shapes do not match, or if a number is not finite.

    >>> abel_bound(np.array([2.0 + 0j, 1.0]), 0.0, [1.0, 0.1])  # 1 * (1 + 2)
    3.0
    """
    steps, sums = _steps_and_sums(products, distance, inv_freq, "abel_bound")
    return float(np.abs(steps).max() * np.abs(sums).sum())


def _steps_and_sums(
    products: NDArray[np.complex128], distance: float, inv_freq: InvFreq, asked: str
) -> tuple[Complex128[np.ndarray, "pairs"], Complex128[np.ndarray, "pairs"]]:
    """The steps h_{i+1} - h_i, and the partial sums S_{i+1}."""
    pairs = len(frequencies_of(inv_freq, asked=asked))
    if np.shape(products) != (pairs,) or np.shape(distance) != ():
        raise RopewalkError(
            asked=asked,
            expected=f"{pairs} products h_i, one per frequency, and one distance",
            got=f"products of shape {np.shape(products)}, distance of shape {np.shape(distance)}",
            do="pass q_i * conj(k_i) for each pair i",
        )
    steps = np.diff(np.asarray(products, dtype=np.complex128), append=0.0)
    return steps, _partial_sums(distance, inv_freq, asked)
