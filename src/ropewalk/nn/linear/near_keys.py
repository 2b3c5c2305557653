"""The keys near the next tokens, which a bias within a window keeps out of the sums of a state."""

import torch
from torch import Tensor

from ropewalk.kernels.constructors import arange, new_full, new_zeros, zeros
from ropewalk.nn.linear.state import NearKeys

__all__ = ["empty_near", "split_near", "with_near"]


def empty_near(k: Tensor, v: Tensor, near: int, fill: float, *, rows: int | None = None) -> NearKeys:
    """Return near keys that add nothing: `fill` is what the feature map maps to 0.

    >>> empty_near(torch.ones(1, 2, 3, 4), torch.ones(1, 2, 3, 5), 6, 0.0).values.shape
    torch.Size([1, 2, 6, 5])
    """
    batch, kv_heads = len(k) if rows is None else rows, k.shape[1]
    keys = new_full(k, (batch, kv_heads, near, k.shape[-1]), fill)
    values = new_zeros(v, batch, kv_heads, near, v.shape[-1])
    return NearKeys(keys, values, zeros(batch, near, dtype=torch.int64, device=k.device))


def with_near(near: NearKeys, k: Tensor, v: Tensor, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return keys, values and positions [batch, keys], preceded by those of a state.

    >>> k, v, ids = torch.ones(1, 2, 3, 4), torch.ones(1, 2, 3, 5), torch.arange(3)[None]
    >>> with_near(empty_near(k, v, 6, 0.0), k, v, ids)[2].tolist()
    [[0, 0, 0, 0, 0, 0, 0, 1, 2]]
    """
    keys, values = torch.cat([near.keys.to(k.dtype), k], dim=2), torch.cat([near.values.to(v.dtype), v], dim=2)
    return keys, values, torch.cat([near.positions, ids.expand(len(k), -1)], dim=-1)


def split_near(
    k: Tensor, v: Tensor, ids: Tensor, near: int, fill: float, ends: Tensor | None
) -> tuple[Tensor, Tensor, NearKeys]:
    """Return the keys and values that belong to the sums of a state, and the near ones.

    Args:
        k: Keys [batch, kv_heads, keys, width].
        v: Values [batch, kv_heads, keys, v_dim].
        ids: Positions [batch or 1, keys].
        near: Number of keys that are near the next token.
        fill: What the feature map maps to 0.
        ends: Number of keys up to the last visible one [batch]; None if all are visible.

    Returns:
        Keys and values [batch, kv_heads, fewer or as many keys, ...], those that are not in the sums replaced by keys
        that add nothing; and the near keys.

    >>> k = torch.arange(4.0).view(1, 1, 4, 1)
    >>> far, _, last = split_near(k, k, torch.arange(4)[None], 3, 0.0, None)
    >>> far.flatten().tolist(), last.keys.flatten().tolist(), last.positions.tolist()
    ([0.0], [1.0, 2.0, 3.0], [[1, 2, 3]])
    """
    batch, _, keys, _ = k.shape
    ids = ids.expand(batch, -1)
    empty = empty_near(k, v, near, fill)
    if ends is None:
        far = max(0, keys - near)
        padded = with_near(empty, k[:, :, far:], v[:, :, far:], ids[:, far:])
        tokens = NearKeys(*(x[:, :, -near:] if x.dim() == 4 else x[:, -near:] for x in padded)) if near else empty
        return k[:, :, :far], v[:, :, :far], tokens
    # The empty keys come first, so that every index exists.
    all_k, all_v, all_ids = with_near(empty, k, v, ids)
    index = ends[:, None] + arange(near, device=k.device)
    k_index, v_index = (index[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[-1]) for x in (k, v))
    tokens = NearKeys(all_k.gather(2, k_index), all_v.gather(2, v_index), all_ids.gather(1, index))
    close = (arange(keys, device=k.device) >= (ends - near)[:, None])[:, None, :, None]
    return k.masked_fill(close, fill), v.masked_fill(close, 0.0), tokens
