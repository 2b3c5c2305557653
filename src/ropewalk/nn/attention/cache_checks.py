"""Checks of what is stored in a cache: dtype, new keys and values, and the number of tokens that are not padding."""

import torch
from torch import Tensor

from ropewalk.errors import RopewalkError, shown
from ropewalk.nn.position_checks import can_read_values, described

__all__ = ["check_counts", "check_new_tokens", "checked_dtype"]


def check_new_tokens(k: Tensor, v: Tensor, keys: Tensor, values: Tensor) -> None:
    """Raise unless new keys and values match those of a cache in batch, heads, width, dtype and device.

    Args:
        k: New keys [batch, num_kv_heads, seq, head_dim].
        v: New values [batch, num_kv_heads, seq, v_dim].
        keys: Keys of the cache.
        values: Values of the cache.

    Raises:
        RopewalkError: If they do not match, or if one requires a gradient.

    >>> new, stored = torch.zeros(1, 1, 2, 4), torch.zeros(1, 1, 8, 4)
    >>> check_new_tokens(new, new, stored, stored)
    """
    for name, x, buffer in (("k", k, keys), ("v", v, values)):
        fits = isinstance(x, Tensor) and x.dim() == 4 and x.dtype == buffer.dtype and x.device == buffer.device
        if not fits or x.shape[:2] != buffer.shape[:2] or x.shape[3] != buffer.shape[3]:
            batch, heads, _, width = buffer.shape
            raise RopewalkError(
                asked=f"KVCache.append({name})",
                expected=f"[{batch}, {heads}, seq, {width}] of {buffer.dtype} on {buffer.device}",
                got=described(x),
                do="pass keys and values of the batch, heads and dtype of the cache, or create another cache",
            )
    if k.shape[2] != v.shape[2]:
        raise RopewalkError(
            asked="KVCache.append(k, v)",
            expected="as many values as keys",
            got=f"{k.shape[2]} keys and {v.shape[2]} values",
            do="pass both for the same tokens",
        )
    if torch.is_grad_enabled() and (k.requires_grad or v.requires_grad):
        raise RopewalkError(
            asked="KVCache.append(k, v)",
            expected="keys and values without a gradient: the cache is overwritten at every step",
            got="a tensor that requires a gradient",
            do="decode under torch.inference_mode() or torch.no_grad()",
        )


def check_counts(counts: Tensor, lengths: Tensor, seq: int) -> None:
    """Raise unless `counts` has the number of tokens per sequence, from 0 to `seq`. The rest is padding.

    >>> check_counts(torch.tensor([3, 1]), torch.tensor([0, 0]), 3)
    """
    fits = isinstance(counts, Tensor) and counts.dtype in (torch.int32, torch.int64)
    fits = fits and counts.shape == lengths.shape and counts.device == lengths.device
    if fits and (not can_read_values(counts) or bool(((counts >= 0) & (counts <= seq)).all())):
        return
    raise RopewalkError(
        asked=f"counts= for {seq} tokens with padding",
        expected=f"whole numbers [{len(lengths)}] from 0 to {seq}, one per sequence, on {lengths.device}",
        got=f"{counts.tolist()}" if fits else described(counts),
        do="pass the number of tokens per sequence that are not padding; padding is at the end",
    )


def checked_dtype(dtype: torch.dtype, asked: str) -> torch.dtype:
    """Return `dtype`. Raise unless it is floating-point.

    >>> checked_dtype(torch.bfloat16, "a doctest")
    torch.bfloat16
    """
    if isinstance(dtype, torch.dtype) and dtype.is_floating_point:
        return dtype
    raise RopewalkError(
        asked=asked,
        expected="a floating-point dtype",
        got=shown(dtype),
        do="pass the dtype of the keys: torch.bfloat16",
    )
