"""Factors on the terms of linear attention, by the distance between query and key: decay, and a bias within a band.

The logarithms of products of decays are sums of numbers that can be large, of which differences are needed. Therefore
they are float64, on devices that have it.
"""

import torch
from torch import Tensor

from ropewalk.kernels.constructors import arange, new_zeros
from ropewalk.kernels.types import Weighting

__all__ = ["LEAST", "band_weights", "decay_weights", "grouped_decay", "lead_of", "reversed_weighting", "running"]

# exp of this is 0 in every dtype. A smaller logarithm would make sums of logarithms imprecise, or infinite.
LEAST = -1000.0


def grouped_decay(weighting: Weighting, kv_heads: int) -> Tensor:
    """Return the logarithms of the decay [batch or 1, kv_heads, group or 1, seq or 1], bounded and in float64.

    >>> grouped_decay(Weighting(decay=torch.full((1, 4, 1), -torch.inf)), 2).shape
    torch.Size([1, 2, 2, 1])
    """
    decay = weighting.decay
    if decay is None:
        raise TypeError("there is no decay")
    precise = decay.dtype if decay.device.type == "mps" else torch.float64
    return decay.to(precise).clamp_min(LEAST).unflatten(1, (kv_heads, -1))


def running(decay: Tensor, count: int, size: int) -> Tensor:
    """Return the logarithm of the decay from the start of each chunk to each of its tokens.

    Args:
        decay: Logarithms per token [batch or 1, kv_heads, group or 1, count * size or 1].
        count: Number of chunks.
        size: Tokens per chunk.

    Returns:
        Sums [batch or 1, kv_heads, count or 1, group or 1, size]: with one decay per head all chunks are the same.

    >>> running(torch.full((1, 1, 1, 1), -2.0), 3, 2).flatten().tolist()
    [-2.0, -4.0]
    """
    if decay.shape[-1] == 1:
        return (decay * arange(1, size + 1, device=decay.device)).unsqueeze(2)
    return decay.unflatten(-1, (count, size)).cumsum(dim=-1).transpose(2, 3)


def decay_weights(local: Tensor, dtype: torch.dtype, *, strict: bool) -> Tensor:
    """Return the factors between the tokens of a chunk, 0 for keys after the query, and for its own key if `strict`.

    Args:
        local: Result of `running` [..., size].
        dtype: Dtype of the factors.
        strict: Whether a query does not read its own key.

    Returns:
        Factors [..., size, size].

    >>> decay_weights(torch.tensor([-2.0, -2.0]).cumsum(0).double(), torch.float32, strict=False).log().tolist()
    [[0.0, -inf], [-2.0, 0.0]]
    """
    token = arange(local.shape[-1], device=local.device)
    hidden = token >= token[:, None] + (0 if strict else 1)
    between = (local.unsqueeze(-1) - local.unsqueeze(-2)).to(dtype)
    # Hidden before the exponential, which would be infinite there.
    return torch.exp(between.masked_fill(hidden, -torch.inf))


def lead_of(band: Tensor, chunk: int) -> int:
    """Return the number of keys before a chunk whose bias is not that of all farther keys, as whole chunks.

    >>> lead_of(torch.zeros(1, 2 * 113 + 1), 128), lead_of(torch.zeros(1, 3), 128)
    (128, 0)
    """
    window = band.shape[-1] // 2
    return -(-(window - 1) // chunk) * chunk


def band_weights(band: Tensor, q_ids: Tensor, k_ids: Tensor, first: int, kv_heads: int, *, strict: bool) -> Tensor:
    """Return the factors between the queries of chunks and the keys near them, 0 for keys after the query.

    Args:
        band: Bias by key - query = -window .. window [heads, 2 * window + 1].
        q_ids: Positions of the queries [batch or 1, chunks or 1, size].
        k_ids: Positions of the keys [batch or 1, chunks or 1, keys].
        first: Index of the first query among the keys.
        kv_heads: Number of key heads.
        strict: Whether a query does not read its own key.

    Returns:
        Factors [batch or 1, kv_heads, chunks or 1, group, size, keys].

    >>> ids = torch.arange(2)[None, None]
    >>> band_weights(torch.tensor([[-2.0, 0.0, 5.0]]), ids, ids, 0, 1, strict=False).log().flatten(0, 4).tolist()
    [[0.0, -inf], [-2.0, 0.0]]
    """
    window = band.shape[-1] // 2
    query, key = (arange(ids.shape[-1], device=band.device) for ids in (q_ids, k_ids))
    distance = (k_ids.unsqueeze(-2) - q_ids.unsqueeze(-1)).clamp(-window, window) + window
    hidden = key >= query[:, None] + first + (0 if strict else 1)
    # [heads, batch, chunks, size, keys]
    bias = band[:, distance].masked_fill(hidden, -torch.inf)
    return torch.exp(bias).unflatten(0, (kv_heads, -1)).permute(2, 0, 3, 1, 4, 5)


def reversed_weighting(weighting: Weighting) -> Weighting:
    """Return the factors of keys after a query, for tokens in reverse order.

    >>> reversed_weighting(Weighting(decay=torch.tensor([[[-1.0, -2.0, -3.0]]]))).decay.tolist()
    [[[0.0, -3.0, -2.0]]]
    """
    decay, band, ids = weighting.decay, weighting.band, weighting.positions
    if decay is not None and decay.shape[-1] > 1:
        # Between two tokens are the decays of all but the earlier one, whatever the order.
        decay = torch.cat([decay[..., 1:], new_zeros(decay, *decay.shape[:2], 1)], dim=-1).flip(-1)
    band = None if band is None else band.flip(-1)
    return weighting._replace(decay=decay, band=band, positions=None if ids is None else -ids.flip(-1))
