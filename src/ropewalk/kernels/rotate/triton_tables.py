"""Gradients of cos and sin on a GPU, in one pass over x and its cotangent."""

# pyright: reportAssignmentType=false, reportGeneralTypeIssues=false, reportArgumentType=false
# pyright: reportPossiblyUnboundVariable=false
# In Triton's language a tl.constexpr is its value, which type checkers do not know.

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ropewalk.kernels.constructors import empty, zeros, zeros_like
from ropewalk.kernels.qk_norm.triton_kernels import load_rows
from ropewalk.kernels.triton_launch import LAUNCHES, Launch, Rows, alignment, is_wide, rows_of
from ropewalk.kernels.types import Layout

__all__ = ["table_gradient"]


@triton.jit(do_not_specialize=["seq", "blocks_per_batch", "x_b", "x_s", "x_h", "g_b", "g_s", "g_h"])
def _table_gradient(
    x,
    g,
    of_cos,
    of_sin,
    seq,
    blocks_per_batch,
    x_b,
    x_s,
    x_h,
    g_b,
    g_s,
    g_h,
    HEADS: tl.constexpr,
    TABLES: tl.constexpr,
    X_STEP: tl.constexpr,
    G_STEP: tl.constexpr,
    PAIRS: tl.constexpr,
    START: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    PADDED_PAIRS: tl.constexpr,
    TOKENS: tl.constexpr,
    ALIGN: tl.constexpr,
    CONJUGATE: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Sum the gradients of c and s over heads: a p + b r and a r - b p.

    (a, b) is rotated to (a c - b s, a s + b c), and (p, r) is the cotangent. TABLES is 1 if the heads share cos and
    sin, and else the number of heads. A program computes TOKENS tokens of one table.
    """
    FEATURES: tl.constexpr = (PAIRS, 0, START, INTERLEAVED, PADDED_PAIRS, 1)
    counting = tl.int64 if WIDE else tl.int32
    block = tl.program_id(0) % blocks_per_batch
    table = tl.program_id(0) // blocks_per_batch
    batch = (table // TABLES).to(counting)
    s = block * TOKENS + tl.arange(0, TOKENS)
    valid = s < seq
    s = s.to(counting)
    source = x + (batch * x_b + s * x_s) * ALIGN
    g_rows = g + (batch * g_b + s * g_s) * ALIGN
    dtype = of_cos.dtype.element_ty
    c = tl.zeros((TOKENS, PADDED_PAIRS), dtype)
    d = tl.zeros((TOKENS, PADDED_PAIRS), dtype)
    first = table % TABLES * (HEADS // TABLES)
    head = first
    while head < first + HEADS // TABLES:
        a, b, _x_rest = load_rows(source + head.to(counting) * x_h * ALIGN, valid, X_STEP, TOKENS, FEATURES)
        p, r, _g_rest = load_rows(g_rows + head.to(counting) * g_h * ALIGN, valid, G_STEP, TOKENS, FEATURES)
        a, b, p, r = a.to(dtype), b.to(dtype), p.to(dtype), r.to(dtype)
        c += a * p + b * r
        d += a * r - b * p
        head += 1
    if CONJUGATE:
        d = -d
    pair = tl.arange(0, PADDED_PAIRS)[None, :]
    at = ((table.to(tl.int64) * seq + s) * PAIRS)[:, None] + pair
    mask = valid[:, None] & (pair < PAIRS)
    tl.store(of_cos + at, c, mask=mask)
    tl.store(of_sin + at, d, mask=mask)


def table_gradient(
    tensors: Sequence[Tensor],
    cotangents: Sequence[Tensor | None],
    cos: Tensor,
    layout: Layout,
    row: int,
    conjugate: bool,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of cos and sin in the rotation of one or two tensors.

    Args:
        tensors: Tensors that were rotated.
        cotangents: One cotangent per tensor, or None.
        cos: cos, whose shape the gradients have.
        layout: Layout of the rotation.
        row: Row of cos that belongs to the first token.
        conjugate: Whether the rotation was by the opposite angles.

    >>> from ropewalk.kernels.triton_launch import INTERPRETED
    >>> device = "cpu" if INTERPRETED else "cuda"
    >>> x, g = torch.tensor([[[3.0, 4.0]], [[1.0, 0.0]]], device=device)
    >>> cos = torch.ones(1, 1, device=device)
    >>> [part.item() for part in table_gradient([x], [g], cos, Layout(True, 0, -2), 0, False)]  # 3 c - 4 s
    [3.0, -4.0]
    """
    gradients = [
        _gradients_of_one(x, g, cos, layout, conjugate)
        for x, g in zip(tensors, cotangents, strict=True)
        if g is not None
    ]
    of_cos, of_sin = gradients[0]
    for next_cos, next_sin in gradients[1:]:
        of_cos, of_sin = of_cos + next_cos, of_sin + next_sin
    return _placed(of_cos, cos, row), _placed(of_sin, cos, row)


def _gradients_of_one(x: Tensor, g: Tensor, cos: Tensor, layout: Layout, conjugate: bool) -> list[Tensor]:
    """Return the part of one tensor in both gradients, from the row of the first token on."""
    rows, g_rows = (rows_of(tensor, layout.seq_dim, cos.dim()) for tensor in (x, g))
    if rows is None or g_rows is None:
        slices = [
            _gradients_of_one(*each, cos, layout, conjugate) for each in zip(x.unbind(1), g.unbind(1), strict=True)
        ]
        return [torch.stack(parts).sum(0) for parts in zip(*slices, strict=True)]
    tables = cos.shape[1] if cos.dim() == 4 else 1
    shape = (rows.batch, tables, rows.seq, cos.shape[-1])
    make = empty if x.numel() else zeros
    out = [make(shape, dtype=cos.dtype, device=cos.device) for _ in range(2)]
    if x.numel():
        _launch(x, g, rows, g_rows, out, layout, tables, conjugate)
    if cos.dim() < 4:
        out = [total.squeeze(1) for total in out]
    return [total.sum(0, keepdim=cos.dim() > 2) if cos.dim() == 2 or cos.shape[0] == 1 else total for total in out]


def _placed(gradient: Tensor, cos: Tensor, row: int) -> Tensor:
    """Return the gradient padded with zeros to the rows of cos."""
    if gradient.shape == cos.shape:
        return gradient
    whole = zeros_like(cos)
    whole.narrow(-2, row, gradient.shape[-2]).copy_(gradient)
    return whole


def _launch(
    x: Tensor,
    g: Tensor,
    rows: Rows,
    g_rows: Rows,
    out: Sequence[Tensor],
    layout: Layout,
    tables: int,
    conjugate: bool,
) -> None:
    tensors = (x, g, *out)
    pairs = out[0].shape[-1]
    shapes = tuple((t.shape, t.stride(), t.dtype, t.data_ptr() & 15) for t in tensors)
    key = (_table_gradient, shapes, x.device, layout, conjugate)
    launch = LAUNCHES.get(key)
    if launch is None:
        padded_pairs = 1 << (pairs - 1).bit_length()
        tokens = max(1, 512 // padded_pairs)
        aligned = alignment(16 // x.element_size(), *rows.strides[:3], *g_rows.strides[:3])
        blocks_per_batch = -(-rows.seq // tokens)
        strides = [stride // aligned for r in (rows, g_rows) for stride in r.strides[:3]]
        constants = {
            "HEADS": rows.heads,
            "TABLES": tables,
            "X_STEP": rows.strides[3],
            "G_STEP": g_rows.strides[3],
            "PAIRS": pairs,
            "START": layout.start,
            "INTERLEAVED": layout.interleaved,
            "PADDED_PAIRS": padded_pairs,
            "TOKENS": tokens,
            "ALIGN": aligned,
            "CONJUGATE": conjugate,
            "WIDE": is_wide(rows.reach(), g_rows.reach()),
        }
        programs = rows.batch * tables * blocks_per_batch
        launch = LAUNCHES.keep(
            key, Launch(_table_gradient, programs, (rows.seq, blocks_per_batch, *strides), constants, 4)
        )
    launch(x.device, *tensors)
