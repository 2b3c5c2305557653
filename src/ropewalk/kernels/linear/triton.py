"""Linear attention on a GPU by Triton kernels: its interface, and which kernels compute a call."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ropewalk.kernels.constructors import new_empty, zeros
from ropewalk.kernels.linear.feature_maps import row_shift
from ropewalk.kernels.linear.stored import triton as stored
from ropewalk.kernels.linear.triton_call import Call, Sizes, Tensors
from ropewalk.kernels.signature import signature
from ropewalk.kernels.torch_internals import current_device
from ropewalk.kernels.triton_launch import LAUNCHES
from ropewalk.kernels.types import NO_WEIGHTING, Layout, Side, Weighting

__all__ = ["empty_saved", "linear_attention", "linear_attention_backward"]

# Largest stride of tokens with which offsets within a segment and its band have 32 bits.
_WIDEST_STRIDE = 1 << 19


def linear_attention(
    q: Side,
    k: Side,
    v: Tensor,
    before: Tensor | None,
    layout: Layout,
    causal: bool,
    cu_seqlens: Tensor | None = None,
    weighting: Weighting = NO_WEIGHTING,
) -> tuple[Tensor, ...]:
    """Return the outputs, the sums after the last key, and tensors for the backward.

    Sums are float32 [sequences * state_heads, width * (v_dim + 1)], as in `Sums.flat`. The tensor for the backward
    contains the inverse denominators and the running sums. Arguments are those of `linear.torch.linear_attention`,
    except that `before`, the sums over earlier keys, is flat.

    >>> from ropewalk.kernels.triton_launch import INTERPRETED
    >>> device = "cpu" if INTERPRETED else "cuda"
    >>> x, v = torch.zeros(1, 1, 2, 2, device=device), torch.tensor([[[[1.0], [3.0]]]], device=device)
    >>> side, layout = Side(x, "elu"), Layout(False, 0, -2)
    >>> linear_attention(side, side, v, None, layout, causal=True)[0].flatten().tolist()
    [1.0, 2.0]
    """
    if _stores(q.x, v, weighting):
        return stored.linear_attention(q, k, v, before, layout, causal, cu_seqlens)
    if v.device.type == "cuda" and current_device() != v.device.index:
        with torch.cuda.device(v.device):
            return linear_attention(q, k, v, before, layout, causal, cu_seqlens, weighting)
    x, call, addresses = _prepare(q, k, v, before, layout, causal, cu_seqlens, weighting, None)
    return call.forward(x, addresses, cu_seqlens)


def empty_saved(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, causal: bool, weighting: Weighting
) -> tuple[Tensor, ...]:
    """Return tensors shaped as those that `linear_attention` returns for its backward, for fake tensors.

    >>> x = torch.ones(1, 2, 300, 4, device="meta", dtype=torch.bfloat16)
    >>> [list(tensor.shape) for tensor in empty_saved(x, x, x, None, True, NO_WEIGHTING)]
    [[1024]]
    """
    if _stores(q, v, weighting):
        return stored.empty_saved(q, k, v, cu_seqlens)
    sequences = None if cu_seqlens is None else len(cu_seqlens) - 1
    length = Sizes(q, k, v, causal, weighting, sequences).saved().length
    return (new_empty(v, (length,), dtype=torch.float32),)


def _stores(q: Tensor, v: Tensor, weighting: Weighting) -> bool:
    """Whether the kernels are used that store rotated features: tiles of wide heads, and of 32 bits, are too large."""
    wide = max(q.shape[-1], v.shape[-1]) > 64 or v.dtype != torch.bfloat16
    return wide and weighting.plain


class Gradients(NamedTuple):
    """Gradients of linear attention. That of the band is None unless it was asked for.

    >>> Gradients(*torch.zeros(4, 1)).band is None
    True
    """

    q: Tensor
    k: Tensor
    v: Tensor
    before: Tensor
    band: Tensor | None = None


def linear_attention_backward(
    cotangent: Tensor,
    total_cotangent: Tensor | None,
    q: Side,
    k: Side,
    v: Tensor,
    results: Sequence[Tensor],
    layout: Layout,
    causal: bool,
    cu_seqlens: Tensor | None = None,
    weighting: Weighting = NO_WEIGHTING,
    learned: bool = False,
) -> Gradients:
    """Return the gradients of q, k, v and of the initial sums, and if `learned` that of the band.

    There is no gradient of a decay: from rows it would be a difference of large sums, in which few digits are left.

    With dn = do / den and dden = -(do . o) / den: dq_i is computed from S_i dn_i and dden_i z_i; dk_j from T_j v_j and
    the sum of dden_i q_i; dv_j = T_j^T R k_j, where T_j is the sum of (R q_i) dn_i^T over i >= j.

    Args:
        cotangent: Cotangent of the outputs.
        total_cotangent: Cotangent of the sums after the last key, or None.
        q: Queries, as in `linear_attention`; the other arguments too.
        k: Keys.
        v: Values.
        results: Results of `linear_attention`.
        layout: Layout of the rotation.
        causal: Whether attention was causal.
        cu_seqlens: Ends of packed sequences.
        weighting: Factors on the terms.
        learned: Whether the gradient of the band is needed.

    >>> from ropewalk.kernels.triton_launch import INTERPRETED
    >>> device = "cpu" if INTERPRETED else "cuda"
    >>> x, v = torch.zeros(1, 1, 2, 2, device=device), torch.tensor([[[[1.0], [3.0]]]], device=device)
    >>> side, layout = Side(x, "elu"), Layout(False, 0, -2)
    >>> results = linear_attention(side, side, v, None, layout, causal=True)
    >>> dv = linear_attention_backward(torch.ones_like(v), None, side, side, v, results, layout, causal=True).v
    >>> dv.flatten().tolist()  # the first value has weight 1 in the first output and 1/2 in the second
    [1.5, 0.5]
    """
    if _stores(q.x, v, weighting):
        arguments = cotangent, total_cotangent, q, k, v, results, layout, causal, cu_seqlens
        return Gradients(*stored.linear_attention_backward(*arguments))
    if v.device.type == "cuda" and current_device() != v.device.index:
        with torch.cuda.device(v.device):
            arguments = cotangent, total_cotangent, q, k, v, results, layout, causal, cu_seqlens, weighting, learned
            return linear_attention_backward(*arguments)
    # These are not part of the signature. Hooks of saved tensors may return them with other strides.
    out, saved = _aligned(results[0]), _aligned(results[2])
    last = None if total_cotangent is None else _aligned(total_cotangent)
    cotangent = _readable(cotangent)
    x, call, addresses = _prepare(q, k, v, None, layout, causal, cu_seqlens, weighting, cotangent)
    return Gradients(*call.backward(x, addresses, cu_seqlens, cotangent, out, saved, last, learned=learned))


def _prepare(
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
    """Return the tensors as the kernels need them, what is decided for their signature, and their addresses."""
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
        _readable(q.x), _readable(k.x), _readable(v), *shifts, q_cos, q_sin, k_cos, k_sin, decay, band, before, q_row,
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


def _aligned(x: Tensor) -> Tensor:
    """Return x contiguous, at a multiple of 16 bytes."""
    x = x.contiguous()
    return x.clone() if x.data_ptr() % 16 else x


def _readable(x: Tensor) -> Tensor:
    """Return x with adjacent features, and with rows that are near enough for offsets of 32 bits."""
    return x if x.stride(3) == 1 and x.stride(2) < _WIDEST_STRIDE else x.contiguous()
