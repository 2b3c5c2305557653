"""Relative encodings that add a bias to each attention score: T5 and ALiBi."""

import torch
from torch import Tensor

from ropewalk.errors import RopewalkError, require_count, require_flag
from ropewalk.reference.arguments import require_finite, require_float, require_tensor
from ropewalk.shapes import Float, Float64, Int, Shaped

__all__ = ["alibi_bias", "alibi_slopes", "t5_bias", "t5_bucket"]


def t5_bucket(
    relative: Int[Tensor, "*any"], *, causal: bool, num_buckets: int = 32, max_distance: int = 128
) -> Int[Tensor, "*any"]:
    """Bucket of each `relative` = key position - query position (T5, 1910.10683, section 2.1).

    There are E buckets per direction. Distances n < E/2 have one bucket each. A distance n >= E/2 is in bucket
    E/2 + floor(log(n / (E/2)) / log(max_distance / (E/2)) * E/2), at most E-1. Causal attention has E = num_buckets,
    and every future key is in bucket 0. Otherwise E = num_buckets/2, and future keys use the upper half.

    Differs from T5's code, which computes the logarithm in float32. This function computes the edges in integers.

    Args:
        relative: Integers of any shape.
        causal: Whether attention is causal.
        num_buckets: Number of buckets, at least 4.
        max_distance: Distance from which all keys share the last bucket.

    Returns:
        Buckets, in the shape of `relative`.

    Raises:
        RopewalkError: If `relative` is not an integer tensor or another argument is out of its range.

    >>> t5_bucket(-torch.tensor([0, 1, 15, 16, 32, 64, 500]), causal=True).tolist()
    [0, 1, 15, 16, 21, 26, 31]
    """
    asked = "t5_bucket"
    require_tensor(relative, asked=f"{asked}(relative)")
    require_flag(causal, asked=f"{asked}(causal=...)")
    if relative.is_floating_point():
        raise RopewalkError(
            asked=f"{asked}(relative)", expected="integer distances", got=f"{relative.dtype}", do="round them first"
        )
    total = require_count(num_buckets, asked=f"{asked}(num_buckets=...)", do="T5 uses 32", at_least=4)
    count = total if causal else total // 2
    exact = count // 2
    far = require_count(
        max_distance,
        asked=f"{asked}(max_distance=...)",
        do="T5 uses 128; it must exceed the distances that have their own bucket",
        at_least=exact + 1,
    )
    distance = (-relative).clamp_min(0) if causal else relative.abs()
    edges = [_edge(step, exact, count - exact, far) for step in range(1, count - exact)]
    coarse = torch.bucketize(distance, torch.tensor(edges, device=relative.device, dtype=distance.dtype), right=True)
    bucket = torch.where(distance < exact, distance, exact + coarse)
    return bucket if causal else bucket + count * (relative > 0).to(bucket.dtype)


def _edge(step: int, exact: int, count: int, far: int) -> int:
    # The smallest n with log(n/exact) / log(far/exact) * count >= step, that is n^count >= far^step exact^(count-step).
    target = far**step * exact ** (count - step)
    low, high = 0, far
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if middle**count < target else (low, middle)
    return high


def t5_bias(
    q_positions: Int[Tensor, "q"],
    k_positions: Int[Tensor, "k"],
    weight: Float[Tensor, "buckets heads"],
    *,
    causal: bool,
    max_distance: int = 128,
) -> Float[Tensor, "heads q k"]:
    """T5's bias: one learned number per bucket and head, added to the score of each query and key (1910.10683).

    Args:
        q_positions: Integer positions [q].
        k_positions: Integer positions [k].
        weight: Learned numbers [buckets, heads].
        causal: Whether attention is causal.
        max_distance: Distance from which all keys share the last bucket.

    Returns:
        Bias [heads, q, k] in the dtype of `weight`.

    Raises:
        RopewalkError: If a shape, a dtype or `max_distance` is invalid.

    >>> weight = torch.arange(32.0)[:, None]  # the weight of bucket b is b
    >>> t5_bias(torch.tensor([2]), torch.arange(3), weight, causal=True).tolist()
    [[[2.0, 1.0, 0.0]]]
    """
    require_float(weight, asked="t5_bias(weight)", at_least_dims=2)
    bucket = t5_bucket(
        _relative(q_positions, k_positions, "t5_bias"),
        causal=causal,
        num_buckets=weight.shape[0],
        max_distance=max_distance,
    )
    return weight[bucket].movedim(-1, 0)


def alibi_slopes(num_heads: int) -> Float64[Tensor, "heads"]:
    """Slopes 2^(-8h/n) for heads h = 1 .. n, if n is a power of 2 (ALiBi, 2108.12409, section 3).

    For any other n: the slopes of the next smaller power of 2, followed by every other slope of the next larger one.

    Args:
        num_heads: Number of heads n.

    Returns:
        One float64 slope per head [heads].

    Raises:
        RopewalkError: If `num_heads` is not a positive integer.

    >>> alibi_slopes(4).tolist()
    [0.25, 0.0625, 0.015625, 0.00390625]
    """
    heads = require_count(num_heads, asked="alibi_slopes(num_heads)", do="pass the number of heads")
    below = 1 << (heads.bit_length() - 1)
    slopes = [2.0 ** (-8 * h / below) for h in range(1, below + 1)]
    between = [2.0 ** (-4 * h / below) for h in range(1, 2 * below, 2)]
    return torch.tensor([*slopes, *between[: heads - below]], dtype=torch.float64)


def alibi_bias(
    q_positions: Shaped[Tensor, "q"], k_positions: Shaped[Tensor, "k"], num_heads: int
) -> Float64[Tensor, "heads q k"]:
    """ALiBi's bias -slope_h |m - n|, added to the score of query m and key n (2108.12409, section 3).

    Differs from the paper: |m - n| is also defined for future keys, so that attention need not be causal.

    Args:
        q_positions: Positions m [q].
        k_positions: Positions n [k].
        num_heads: Number of heads.

    Returns:
        float64 bias [heads, q, k].

    Raises:
        RopewalkError: If positions are not finite or not one-dimensional.

    >>> alibi_bias(torch.tensor([2]), torch.arange(3), num_heads=1).tolist()
    [[[-0.0078125, -0.00390625, -0.0]]]
    """
    distance = _relative(q_positions, k_positions, "alibi_bias").abs().to(torch.float64)
    return -alibi_slopes(num_heads)[:, None, None].to(distance.device) * distance


def _relative(q_positions: Tensor, k_positions: Tensor, asked: str) -> Tensor:
    """k - q for every query and key: [q, k]."""
    require_finite(q_positions, asked=f"{asked}(q_positions)")
    require_finite(k_positions, asked=f"{asked}(k_positions)")
    if q_positions.dim() != 1 or k_positions.dim() != 1:
        raise RopewalkError(
            asked=f"{asked}(q_positions, k_positions)",
            expected="two one-dimensional tensors of positions, [q] and [k]",
            got=f"{list(q_positions.shape)} and {list(k_positions.shape)}",
            do="call it once per sequence if positions differ between sequences",
        )
    # In int64: unsigned positions would overflow if a key is before its query.
    q, k = (ids if ids.is_floating_point() else ids.to(torch.int64) for ids in (q_positions, k_positions))
    return k[None, :] - q[:, None]
