"""Encodings other than RoPE in NumPy, for plots and tables: sinusoids, ALiBi's slopes, T5's buckets.

`reference` has the same functions in torch. Tests compare the two.
"""

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ropewalk.errors import RopewalkError, require_count, require_even, require_flag
from ropewalk.shapes import Float64, Int64
from ropewalk.spec.frequencies import Plain
from ropewalk.theory.arguments import Distances, distances_of

__all__ = ["alibi_slopes", "sinusoidal_table", "t5_buckets"]


def sinusoidal_table(positions: Distances, dim: int, base: float = 10_000.0) -> Float64[np.ndarray, "*any dim"]:
    """p_{m,2i} = sin(m base^(-2i/d)), p_{m,2i+1} = cos(m base^(-2i/d)) (Vaswani et al., 1706.03762, section 3.5).

    Args:
        positions: Positions m, of any shape.
        dim: Number of features d, even.
        base: Base of the frequencies.

    Returns:
        Table [*positions.shape, dim].

    Raises:
        RopewalkError: If `dim` is odd or a position is not finite.

    >>> sinusoidal_table([0, 1], dim=2).round(4).tolist()
    [[0.0, 1.0], [0.8415, 0.5403]]
    """
    dim = require_even(dim, asked="sinusoidal_table(dim)", do="pass an even width; sines and cosines alternate")
    angles = distances_of(positions, asked="sinusoidal_table(positions)")[..., None] * Plain(base).evaluate(dim)
    return np.stack((np.sin(angles), np.cos(angles)), axis=-1).reshape(*angles.shape[:-1], dim)


def alibi_slopes(num_heads: int) -> Float64[np.ndarray, "heads"]:
    """Slopes 2^(-8h/n) for heads h = 1 .. n, if n is a power of 2 (ALiBi, 2108.12409, section 3).

    For any other n: the slopes of the next smaller power of 2, followed by every other slope of the next larger one.

    Args:
        num_heads: Number of heads n.

    Returns:
        One slope per head [heads].

    Raises:
        RopewalkError: If `num_heads` is not a positive integer.

    >>> alibi_slopes(3).tolist()
    [0.0625, 0.00390625, 0.25]
    """
    heads = require_count(num_heads, asked="alibi_slopes(num_heads)", do="pass the number of heads")
    power = 1 << (heads - 1).bit_length()
    slopes = 2.0 ** (-8 * np.arange(1, power + 1) / power)
    # Every second slope of a power of 2 is a slope of the next smaller power of 2.
    return slopes if power == heads else np.concatenate((slopes[1::2], slopes[0::2]))[:heads]


def t5_buckets(
    relative: NDArray[np.generic] | Sequence[int], *, causal: bool, num_buckets: int = 32, max_distance: int = 128
) -> Int64[np.ndarray, "*any"]:
    """Bucket of each `relative` = key position - query position (T5, 1910.10683, section 2.1).

    There are E buckets per direction. Distances n < E/2 have one bucket each. A distance n >= E/2 is in bucket
    E/2 + floor(log(n / (E/2)) / log(max_distance / (E/2)) * E/2), at most E-1. Causal attention has E = num_buckets,
    and every future key is in bucket 0. Otherwise E = num_buckets/2, and future keys use the upper half.

    Differs from T5's code, which computes the logarithm in float32. This function compares powers of integers.

    Args:
        relative: Integers of any shape.
        causal: Whether attention is causal.
        num_buckets: Number of buckets, at least 4.
        max_distance: Distance from which all keys share the last bucket.

    Returns:
        Buckets, in the shape of `relative`.

    Raises:
        RopewalkError: If `relative` is not an integer array or another argument is out of its range.

    >>> t5_buckets([0, -1, -16, -32, -500, 3], causal=True).tolist()
    [0, 1, 16, 21, 31, 0]
    """
    offsets = np.asarray(relative)
    if not np.issubdtype(offsets.dtype, np.integer):
        raise RopewalkError(
            asked="t5_buckets(relative)", expected="integer distances", got=f"{offsets.dtype}", do="round them first"
        )
    require_flag(causal, asked="t5_buckets(causal=...)")
    total = require_count(num_buckets, asked="t5_buckets(num_buckets=...)", do="T5 uses 32", at_least=4)
    count = total if causal else total // 2
    exact, do = count // 2, "T5 uses 128; it must exceed the distances that have their own bucket"
    far = require_count(max_distance, asked="t5_buckets(max_distance=...)", do=do, at_least=exact + 1)
    wide = count - exact
    # First distance of each bucket with several distances: the least n with n^wide >= far^step exact^(wide - step).
    targets = [far**step * exact ** (wide - step) for step in range(1, wide)]
    edges = [*range(1, exact + 1), *(bisect_left(range(far + 1), target, key=lambda n: n**wide) for target in targets)]
    distance = np.maximum(-offsets, 0) if causal else np.abs(offsets)
    bucket = np.searchsorted(edges, distance, side="right")
    return bucket if causal else bucket + count * (offsets > 0)
