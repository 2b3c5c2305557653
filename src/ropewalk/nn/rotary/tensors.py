"""Checks of the tensors that a rotation receives: dtype, shape, and that q and k fit together."""

from typing import NoReturn

from torch import Tensor

from ropewalk.errors import RopewalkError, shown
from ropewalk.kernels.precision import FLOATS

__all__ = ["check_same_length", "check_tensors"]


def check_tensors(q: Tensor, k: Tensor | None, head_dim: int, seq_dim: int, heads: int | None) -> None:
    """Raise unless q and k can be rotated. One look where they are fine: decoding waits for this.

    >>> import torch
    >>> check_tensors(torch.ones(3, 4), None, 4, -2, None)
    """
    if not _fits(q, head_dim, seq_dim, heads):
        _raise_unfit("q", q, head_dim, seq_dim, heads)
    if k is None:
        return
    if not (isinstance(k, Tensor) and k.is_floating_point()):
        raise RopewalkError(
            asked="rope(q, k)",
            expected="keys, a floating-point tensor, as the second argument",
            got=f"{k.dtype} of shape {list(k.shape)}" if isinstance(k, Tensor) else shown(k),
            do="pass position ids by name, rope(q, positions=ids), and a start as rope(q, offset=n)"
            if isinstance(k, Tensor | int)
            else "pass a torch.Tensor of float32, float64, bfloat16 or float16",
        )
    if not _fits(k, head_dim, seq_dim, heads):
        _raise_unfit("k", k, head_dim, seq_dim, heads)
    if q.dtype != k.dtype or q.device != k.device:
        raise RopewalkError(
            asked="rope(q, k)",
            expected="q and k of one dtype, on one device",
            got=f"{q.dtype} on {q.device}, {k.dtype} on {k.device}",
            do="cast or move one of them, or rotate them in two calls",
        )


def check_same_length(q: Tensor, k: Tensor, seq_dim: int) -> None:
    """Raise unless there are as many keys as queries.

    >>> import torch
    >>> check_same_length(torch.ones(3, 4), torch.ones(3, 4), -2)
    """
    if q.shape[seq_dim] != k.shape[seq_dim]:
        raise RopewalkError(
            asked="rope(q, k)",
            expected="as many keys as queries, or k_positions",
            got=f"{q.shape[seq_dim]} queries and {k.shape[seq_dim]} keys",
            do="for [..., seq, heads, head_dim] make it with seq_dim=-3; else give k_positions",
        )


def _fits(x: Tensor, head_dim: int, seq_dim: int, heads: int | None) -> bool:
    if not isinstance(x, Tensor):
        return False
    shape = x.shape
    fits = x.dtype in FLOATS and len(shape) >= -seq_dim and shape[-1] == head_dim
    if heads is None or not fits:
        return fits
    return len(shape) in (3, 4) and shape[-3 if seq_dim == -2 else -2] == heads


def _raise_unfit(name: str, x: Tensor, head_dim: int, seq_dim: int, heads: int | None) -> NoReturn:
    if _fits(x, head_dim, seq_dim, None):
        raise RopewalkError(
            asked=f"rope({name}) with frequencies of its own for each of {heads} heads",
            expected=f"{heads} heads in a tensor of 3 or 4 dimensions, keys like queries",
            got=f"shape {list(x.shape)} with seq_dim={seq_dim}",
            do="frequencies per head cannot be shared by grouped keys: repeat the key heads first",
        )
    shape = "[..., seq, head_dim]" if seq_dim == -2 else "[..., seq, heads, head_dim]"
    raise RopewalkError(
        asked=f"rope({name}) with head_dim={head_dim}, seq_dim={seq_dim}",
        expected=f"a floating-point tensor {shape} whose last dimension is {head_dim}",
        got=f"{x.dtype} of shape {list(x.shape)}" if isinstance(x, Tensor) else shown(x),
        do="split the heads first, or make the module with the head_dim and the seq_dim of the tensor"
        if isinstance(x, Tensor) and x.dtype in FLOATS
        else "pass a torch.Tensor of float32, float64, bfloat16 or float16",
    )
