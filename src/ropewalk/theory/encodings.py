"""The encodings beside RoPE as plain numbers, for whoever draws or tabulates them: sinusoids, ALiBi's slopes, T5's
buckets. What a model computes is in `reference`, in torch; the two are held together by tests."""

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float64, Int64
from numpy.typing import NDArray

from ropewalk.errors import RopewalkError, require_count, require_even, require_flag
from ropewalk.spec.frequencies import Plain
from ropewalk.theory.arguments import Distances, distances_of

__all__ = ["alibi_slopes", "sinusoidal_table", "t5_buckets"]


def sinusoidal_table(positions: Distances, dim: int, base: float = 10_000.0) -> Float64[np.ndarray, "*any dim"]:
    """p_{m,2i} = sin(m base^(-2i/d)), p_{m,2i+1} = cos(m base^(-2i/d)) (Vaswani et al., 1706.03762, section 3.5).

    >>> sinusoidal_table([0, 1], dim=2).round(4).tolist()
    [[0.0, 1.0], [0.8415, 0.5403]]
    """
    dim = require_even(dim, asked="sinusoidal_table(dim)", do="pass an even width; sines and cosines alternate")
    angles = distances_of(positions, asked="sinusoidal_table(positions)")[..., None] * Plain(base).evaluate(dim)
    return np.stack((np.sin(angles), np.cos(angles)), axis=-1).reshape(*angles.shape[:-1], dim)


def alibi_slopes(num_heads: int) -> Float64[np.ndarray, "heads"]:
    """2^(-8h/n) for heads h = 1 .. n, where n is a power of 2 (ALiBi, 2108.12409, section 3).

    For any other n: the slopes of the power of 2 below it, then every other slope of the one above.

    >>> alibi_slopes(3).tolist()
    [0.0625, 0.00390625, 0.25]
    """
    heads = require_count(num_heads, asked="alibi_slopes(num_heads)", do="pass the number of heads")
    above = 1 << (heads - 1).bit_length()
    slopes = 2.0 ** (-8 * np.arange(1, above + 1) / above)
    # Every second of the power of 2 above is the whole of the one below.
    return slopes if above == heads else np.concatenate((slopes[1::2], slopes[0::2]))[:heads]


def t5_buckets(
    relative: NDArray[np.generic] | Sequence[int], *, causal: bool, num_buckets: int = 32, max_distance: int = 128
) -> Int64[np.ndarray, "*any"]:
    """The bucket of each `relative` = key position - query position (T5, 1910.10683, section 2.1).

    With E buckets a direction, half of them hold one distance n each, and n >= E/2 goes to
    E/2 + floor(log(n / (E/2)) / log(max_distance / (E/2)) * E/2), at most E-1. Causal attention has E = num_buckets
    and puts every future key into bucket 0; otherwise E = num_buckets/2 and future keys take the upper half.

    Differs from T5's code: that takes a float32 logarithm; here powers of whole numbers are compared.

    >>> t5_buckets([0, -1, -16, -32, -500, 3], causal=True).tolist()
    [0, 1, 16, 21, 31, 0]
    """
    found = np.asarray(relative)
    if not np.issubdtype(found.dtype, np.integer):
        raise RopewalkError(
            asked="t5_buckets(relative)", expected="whole distances", got=f"{found.dtype}", do="round them first"
        )
    require_flag(causal, asked="t5_buckets(causal=...)")
    total = require_count(num_buckets, asked="t5_buckets(num_buckets=...)", do="T5 has 32", at_least=4)
    count = total if causal else total // 2
    exact, do = count // 2, "T5 has 128; it must pass the one-distance buckets"
    far = require_count(max_distance, asked="t5_buckets(max_distance=...)", do=do, at_least=exact + 1)
    wide = count - exact
    # The first distance of each bucket after the single ones: the least n with n^wide >= far^step exact^(wide - step).
    targets = [far**step * exact ** (wide - step) for step in range(1, wide)]
    edges = [*range(1, exact + 1), *(bisect_left(range(far + 1), target, key=lambda n: n**wide) for target in targets)]
    distance = np.maximum(-found, 0) if causal else np.abs(found)
    bucket = np.searchsorted(edges, distance, side="right")
    return bucket if causal else bucket + count * (found > 0)
