"""The tensors of a call of linear attention as the kernels need them, and what is decided for their signature."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ropewalk.kernels.constructors import zeros
from ropewalk.kernels.linear.feature_maps import row_shift
from ropewalk.kernels.linear.triton_call import Call, Tensors
from ropewalk.kernels.signature import signature
from ropewalk.kernels.triton_launch import LAUNCHES
from ropewalk.kernels.types import Layout, Side, Weighting

__all__ = ["aligned", "is_aligned", "is_readable", "prepare", "readable", "stores"]

# Largest stride of tokens with which offsets within a segment and its band have 32 bits.
_WIDEST_STRIDE = 1 << 19


def stores(q: Tensor, v: Tensor, weighting: Weighting, causal: bool) -> bool:
    """Whether the kernels are used that store rotated features: tiles of wide heads, and of 32 bits, are too large.

    They support a causal decay per head, but no other factor on the terms.

    >>> x, decay = torch.ones(1, 1, 2, 128, dtype=torch.bfloat16), torch.zeros(1, 1, 1)
    >>> stores(x, x, Weighting(), causal=True), stores(x[..., :64], x[..., :64], Weighting(), causal=True)
    (True, False)
    >>> stores(x, x, Weighting(decay), causal=True), stores(x, x, Weighting(decay), causal=False)
    (True, False)
    """
    if v.dtype != torch.bfloat16:
        return weighting.is_plain()
    decay, band = weighting.decay, weighting.band
    wide = max(q.shape[-1], v.shape[-1]) > 64
    return wide and band is None and (decay is None or (causal and decay.shape[2] == 1))


def prepare(
    q: Side,
    k: Side,
    v: Tensor,
    before: Tensor | None,
    layout: Layout,
    causal: bool,
    cu_seqlens: Tensor | None,
    weighting: Weighting,
    cotangent: Tensor | None,
) -> tuple[Tensors, Call, Sequence[int]]:
    """Return the tensors as the kernels need them, what is decided for their signature, and their addresses.

    Args:
        q: Queries.
        k: Keys.
        v: Values.
        before: Sums over earlier keys in flat form, or None.
        layout: Layout of the rotation.
        causal: Whether attention is causal.
        cu_seqlens: Ends of packed sequences, or None.
        weighting: Factors on the terms.
        cotangent: Cotangent of the outputs for a backward, or None.

    >>> x = torch.ones(1, 1, 2, 4, dtype=torch.bfloat16)
    >>> side, layout = Side(x, "elu"), Layout(True, 0, -2)
    >>> tensors, call, at = prepare(side, side, x, None, layout, True, None, Weighting(), None)
    >>> tensors.q is x, call.direct, at[0] == x.data_ptr()
    (True, True, True)
    """
    q_cos, q_sin, q_row = q.tables or _NO_TABLES
    k_cos, k_sin, k_row = k.tables or _NO_TABLES
    decay, band, _, normalize, scale = weighting
    signed = signature(q.x, k.x, v, q_cos, q_sin, k_cos, k_sin, decay, band, before, cotangent)
    same = q_cos is k_cos and q_sin is k_sin and q_row == k_row
    sequences = None if cu_seqlens is None else len(cu_seqlens) - 1
    key = None
    if signed is not None:
        key = "linear_attention", signed[0], layout, q.map, k.map, causal, sequences, normalize, scale, same
        call = LAUNCHES.get(key)
        if call is not None and call.direct:
            q_at, k_at, v_at, *others, _ = signed[1]
            x = Tensors(q.x, k.x, v, None, None, q_cos, q_sin, k_cos, k_sin, decay, band, before, q_row, k_row)
            return x, call, (q_at, k_at, v_at, 0, 0, *others)
    if q_cos is not None and q_sin is not None and k_cos is not None and k_sin is not None:
        q_cos, q_sin, k_cos, k_sin = (table.contiguous() for table in (q_cos, q_sin, k_cos, k_sin))
    if band is not None:
        band = band.detach().contiguous()
    shifts = _shift(q, "q" if normalize else "k"), _shift(k, "k")
    x = Tensors(
        readable(q.x), readable(k.x), readable(v), *shifts, q_cos, q_sin, k_cos, k_sin, decay, band, before, q_row,
        k_row,
    )  # fmt: skip
    call = None if key is None else LAUNCHES.get(key)
    if call is None:
        call = Call(x, layout, (q.map, k.map), causal, weighting, sequences, same)
        unchanged = x.q is q.x and x.k is k.x and x.v is v and x.q_shift is None and x.k_shift is None
        unchanged = unchanged and (band is None or weighting.band.is_contiguous())  # pyright: ignore[reportOptionalMemberAccess]
        tables = *(q.tables or _NO_TABLES)[:2], *(k.tables or _NO_TABLES)[:2]
        unchanged = unchanged and all(a is b for a, b in zip((q_cos, q_sin, k_cos, k_sin), tables, strict=True))
        call.direct = unchanged
        LAUNCHES.keep(key, call)
    return x, call, [0 if tensor is None else tensor.data_ptr() for tensor in x[:12]]


_NO_TABLES = None, None, 0


def _shift(side: Side, role: str) -> Tensor | None:
    """Return what is subtracted from each row before an exponential, or None for other maps."""
    if side.map != "exp":
        return None
    largest = row_shift(side.x, side.map) if role == "q" else None
    if largest is None:
        return zeros(side.x.shape[:3], dtype=torch.float32, device=side.x.device)
    return largest.squeeze(-1).float().contiguous()


def aligned(x: Tensor) -> Tensor:
    """Return x contiguous, at a multiple of 16 bytes.

    >>> x = torch.zeros(2, 8)
    >>> aligned(x) is x, aligned(x.T).stride()
    (True, (2, 1))
    """
    return x if is_aligned(x) else x.clone(memory_format=torch.contiguous_format)


def is_aligned(x: Tensor) -> bool:
    """Whether x is contiguous, at a multiple of 16 bytes.

    >>> x = torch.zeros(2, 8)
    >>> is_aligned(x), is_aligned(x.T), is_aligned(x.view(-1)[1:])
    (True, False, False)
    """
    return x.is_contiguous() and x.data_ptr() % 16 == 0


def readable(x: Tensor) -> Tensor:
    """Return x with adjacent features, and with rows that are near enough for offsets of 32 bits.

    >>> x = torch.ones(1, 1, 2, 4)
    >>> readable(x) is x, readable(x.transpose(2, 3)).stride()
    (True, (8, 8, 2, 1))
    """
    return x if is_readable(x) else x.contiguous()


def is_readable(x: Tensor) -> bool:
    """Whether x has adjacent features, and rows that are near enough for offsets of 32 bits.

    >>> x = torch.ones(1, 1, 2, 4)
    >>> is_readable(x), is_readable(x.transpose(2, 3))
    (True, False)
    """
    return x.stride(3) == 1 and x.stride(2) < _WIDEST_STRIDE
