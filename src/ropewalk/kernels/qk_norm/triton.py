"""Launches of the norm-and-rotation kernels: strides, number of programs, and sums for the weight gradients."""

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ropewalk.kernels.constructors import empty, empty_like, zeros
from ropewalk.kernels.qk_norm.triton_kernels import (
    norm_rotate_backward_kernel,
    norm_rotate_kernel,
    weight_sums_kernel,
)
from ropewalk.kernels.signature import signature
from ropewalk.kernels.triton_launch import (
    LAUNCHES,
    Launch,
    Rows,
    alignment,
    heads_are_adjacent,
    is_wide,
    rows_of,
    table_strides,
    tokens_before_next_head,
)
from ropewalk.kernels.types import Layout, Norm

__all__ = ["norm_rotate", "norm_rotate_backward", "plan_norm"]

# Warps of the backward per multiprocessor. More programs balance the load, but leave more sums to add.
WARPS = 16
# Pairs per thread of the backward, which keeps several tensors and sums of each: more would not fit into registers.
PAIRS_PER_THREAD = 8


def norm_rotate(
    both: Sequence[Tensor],
    weights: Sequence[Tensor | None],
    cos: Tensor,
    sin: Tensor,
    layout: Layout,
    norm: Norm,
    row: int = 0,
) -> list[Tensor]:
    """Return the rotation of x / rms(x) * weight for one or two tensors, in one launch if their strides allow it.

    >>> from ropewalk.kernels.triton_launch import INTERPRETED
    >>> device = "cpu" if INTERPRETED else "cuda"
    >>> x, tables = torch.tensor([[3.0, 4.0]], device=device), torch.tensor([[[0.0]], [[1.0]]], device=device)
    >>> (y,) = norm_rotate([x], [None], *tables, Layout(True, 0, -2), Norm(1e-9))  # by 90 degrees
    >>> [round(v, 4) for v in y[0].tolist()]
    [-1.1314, 0.8485]
    """
    out = [empty_like(x) for x in both]
    _run(norm_rotate_kernel, [both, out], weights, [None for _ in both], None, cos, sin, layout, norm, row)
    return out


def norm_rotate_backward(
    cotangents: Sequence[Tensor],
    both: Sequence[Tensor],
    weights: Sequence[Tensor | None],
    learns: bool,
    cos: Tensor,
    sin: Tensor,
    layout: Layout,
    norm: Norm,
    row: int = 0,
) -> tuple[list[Tensor], list[Tensor | None]]:
    """Return the gradients of the tensors, and of their weights if `learns`. Rounding of the norm is ignored.

    >>> from ropewalk.kernels.triton_launch import INTERPRETED
    >>> device = "cpu" if INTERPRETED else "cuda"
    >>> x, g = torch.tensor([[[3.0, 4.0]], [[1.0, 0.0]]], device=device)
    >>> identity = torch.tensor([[1.0]], device=device), torch.tensor([[0.0]], device=device)
    >>> (dx,), _ = norm_rotate_backward([g], [x], [None], False, *identity, Layout(True, 0, -2), Norm(1e-9))
    >>> [round(v, 4) for v in dx[0].tolist()]  # x dx = 0: the result does not depend on the scale of x
    [0.181, -0.1358]
    """
    out = [empty_like(x) for x in both]
    dtypes = [None if w is None or not learns else w.dtype for w in weights]
    options = learns, cos, sin, layout, norm, row
    return out, _run(norm_rotate_backward_kernel, [both, cotangents, out], weights, dtypes, *options)


def _run(
    kernel: Any,
    groups: Sequence[Sequence[Tensor]],
    weights: Sequence[Tensor | None],
    dtypes: Sequence[torch.dtype | None],
    learns: bool | None,
    cos: Tensor,
    sin: Tensor,
    layout: Layout,
    norm: Norm,
    row: int,
) -> list[Tensor | None]:
    """Launch the kernel on one or two tensors of each group: inputs, cotangents in the backward, and outputs.

    Returns:
        The weight gradients in the dtypes `dtypes`, and None for those that are None.
    """
    both = groups[0]
    if learns is not None:
        # A side without a weight has no sums, even if the other side has.
        learns = any(dtype is not None for dtype in dtypes)
    options = learns, cos, sin, layout, norm, row
    if any(x.numel() == 0 for x in both):
        if len(weights) == 2:
            return _run_separately(kernel, groups, weights, dtypes, *options)
        dim = both[0].shape[-1:]
        return [None if dtype is None else zeros(dim, dtype=dtype, device=cos.device) for dtype in dtypes]
    if not (cos.is_contiguous() and sin.is_contiguous()):
        cos, sin = cos.contiguous(), sin.contiguous()
    weights = [w if w is None or w.is_contiguous() else w.contiguous() for w in weights]
    factors = [x if w is None else w for w, x in zip(weights, both, strict=True)]
    tensors = [x for group in (*groups, factors) for x in _as_pair(group)]
    # Also the alignment, on which Triton specializes kernels. Outputs have the strides of `empty_like`.
    described = signature(*(x for group in groups[:-1] for x in group), *weights, cos, sin)
    key = None if described is None else (kernel, described[0], len(both), layout, norm, learns)
    plan = LAUNCHES.get(key)
    if plan is None:
        plan = LAUNCHES.keep(key, plan_norm(kernel, groups, weights, learns, cos, layout, norm) or "separately")
    if plan == "separately":
        return _run_separately(kernel, groups, weights, dtypes, *options)
    launch, programs = plan
    if learns is None:
        launch(cos.device, *tensors, cos, sin, row)
        return [None for _ in weights]
    if not learns:
        # Without sums, the kernel does not write to their place.
        launch(cos.device, *tensors, cos, cos, sin, row)
        return [None for _ in weights]
    sums = empty((sum(programs), both[0].shape[-1]), dtype=cos.dtype, device=cos.device)
    launch(cos.device, *tensors, sums, cos, sin, row)
    return _added(sums, programs, dtypes)


def _added(sums: Tensor, programs: Sequence[int], dtypes: Sequence[torch.dtype | None]) -> list[Tensor | None]:
    """Add the sums of all programs, in one launch."""
    dim, rows = sums.shape[-1], 256
    totals = [None if dtype is None else empty(dim, dtype=dtype, device=sums.device) for dtype in dtypes]
    key = (weight_sums_kernel, dim, tuple(programs), tuple(dtypes), sums.dtype, sums.device)
    launch = LAUNCHES.get(key)
    if launch is None:
        constants = {
            "DIM": dim,
            "Q_WEIGHTED": dtypes[0] is not None,
            "K_WEIGHTED": len(dtypes) == 2 and dtypes[1] is not None,
            "ROWS": rows,
            "COLUMNS": 16,
        }
        counts = programs[0], programs[1] if len(programs) == 2 else 0
        launch = Launch(weight_sums_kernel, -(-dim // 16) * len(programs), counts, constants, 8)
        launch = LAUNCHES.keep(key, launch)
    launch(sums.device, sums, *[sums if total is None else total for total in _as_pair(totals)])
    return totals


def _run_separately(
    kernel: Any,
    groups: Sequence[Sequence[Tensor]],
    weights: Sequence[Tensor | None],
    dtypes: Sequence[torch.dtype | None],
    *options: Any,
) -> list[Tensor | None]:
    """Launch once per tensor. A single tensor whose strides do not form rows is processed slice by slice."""
    if len(weights) == 2:
        return [
            total
            for i in range(2)
            for total in _run(kernel, [[group[i]] for group in groups], [weights[i]], [dtypes[i]], *options)
        ]
    cos, dtype = options[1], dtypes[0]
    slices = zip(*(group[0].unbind(1) for group in groups), strict=True)
    working = [None if dtype is None else cos.dtype]
    sums = [_run(kernel, [[x] for x in each], weights, working, *options)[0] for each in slices]
    present = [part for part in sums if part is not None]
    return [torch.stack(present).sum(0).to(dtype) if present and dtype is not None else None]


def _as_pair(items: Sequence[Any]) -> Sequence[Any]:
    """Return two items, a single one twice: the kernel has arguments for two, and ignores the second if unused."""
    return items if len(items) == 2 else [items[0], items[0]]


def _programs(device: torch.device, heads: Sequence[int], warps: int) -> list[int]:
    """Return the number of programs per tensor in the persistent grid of the backward, proportional to its heads."""
    # A few programs suffice on the CPU, in Triton's interpreter.
    most = 8 if device.type == "cpu" else _multiprocessors(device) * max(1, WARPS // warps)
    return [max(1, most * n // sum(heads)) for n in heads]


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def plan_norm(
    kernel: Any,
    groups: Sequence[Sequence[Tensor]],
    weights: Sequence[Tensor | None],
    learns: bool | None,
    cos: Tensor,
    layout: Layout,
    norm: Norm,
) -> tuple[Launch, list[int]] | None:
    """Return the launch and the programs per tensor, or None if strides differ too much or do not form rows.

    Args:
        kernel: The kernel of the forward or of the backward.
        groups: Inputs, cotangents in the backward, and outputs: one or two tensors each.
        weights: Their weights, or None.
        learns: Whether weights need gradients. None in the forward.
        cos: cos, which must be contiguous.
        layout: Pairing, first rotated feature, and dimension of the sequence.
        norm: eps, plus_one and rounding of the norm.

    >>> x = torch.ones(2, 3, 5, 8)
    >>> launch, _ = plan_norm(None, [[x], [x]], [None], None, torch.ones(5, 4), Layout(True, 0, -2), Norm(1e-6))
    >>> launch.programs
    1
    """
    dims, pairs = cos.dim(), cos.shape[-1]
    eps, plus_one, rounding = norm
    row_views = [[rows_of(x, layout.seq_dim, dims) for x in _as_pair(group)] for group in groups]
    rows = [[r for r in group if r is not None] for group in row_views]
    if any(len(group) < 2 or _shared_shape(group[0]) != _shared_shape(group[1]) for group in rows):
        return None
    (x, other), heads = rows[0], [r.heads for r in rows[0][: len(weights)]]
    rest = x.dim - 2 * pairs
    table_b, table_h = table_strides(cos)
    padded_pairs, padded_rest = (1 << max(0, n - 1).bit_length() for n in (pairs, rest))
    backward = learns is not None
    tokens, tile_rows, warps = _tile(x, padded_pairs + padded_rest // 2, bool(table_h), layout.interleaved, backward)
    ahead = heads_are_adjacent(x) and not layout.interleaved
    aligned = alignment(16 // groups[0][0].element_size(), *(n for pair in rows for r in pair for n in r.strides[:3]))
    blocks_per_batch = -(-x.seq // tokens)
    blocks = x.batch * blocks_per_batch
    strides = [stride // aligned for pair in rows for r in pair for stride in r.strides[:3]]
    shares = [n // math.gcd(*heads) for n in heads]
    steps = [pair[0].strides[3] for pair in rows]
    programs = _programs(cos.device, heads, warps) if backward else shares
    first, second = ("Q_PROGRAMS", "K_PROGRAMS") if backward else ("Q_SHARE", "K_SHARE")
    constants = {
        "Q_HEADS": x.heads,
        "K_HEADS": other.heads,
        first: programs[0],
        second: programs[1] if len(programs) == 2 else 0,
        "Q_WEIGHTED": weights[0] is not None,
        "K_WEIGHTED": weights[-1] is not None,
        "X_STEP": steps[0],
        **({"G_STEP": steps[1]} if backward else {}),
        "Y_STEP": steps[-1],
        "PAIRS": pairs,
        "REST": rest,
        "START": layout.start,
        "INTERLEAVED": layout.interleaved,
        "PADDED_PAIRS": padded_pairs,
        "PADDED_REST": padded_rest,
        "TOKENS": tokens,
        "ROWS": tile_rows,
        "ALIGN": aligned,
        "EPS": eps,
        "PLUS_ONE": plus_one,
        **({"LEARNS": learns, "AHEAD": ahead} if backward else {"ROUNDING": rounding}),
        "WIDE": is_wide(*(r.reach() for pair in rows for r in pair), cos.numel()),
    }
    numbers = (table_b, table_h, x.seq, blocks_per_batch, blocks, *strides)
    units = 1 if backward else -(-blocks * tokens * math.gcd(*heads) // tile_rows)
    return Launch(kernel, units * sum(programs), numbers, constants, warps), programs


def _shared_shape(rows: Rows) -> tuple[int, int, int]:
    """Return the properties that two tensors must share for one launch: batch, length, stride of the features."""
    return rows.batch, rows.seq, rows.strides[3]


def _tile(
    rows: Rows, padded_pairs: int, table_per_head: bool, interleaved: bool, backward: bool
) -> tuple[int, int, int]:
    """Return tokens of a head before the next head, rows per program, and warps. Fastest on an H200."""
    adjacent = heads_are_adjacent(rows)
    if backward:
        # Wide rows, of norms over all heads, have more pairs than a program of two warps can keep.
        pairs = max(512, padded_pairs)
        warps = min(32, 1 << (pairs // (32 * PAIRS_PER_THREAD) - 1).bit_length())
    else:
        pairs, warps = (2048, 4) if interleaved and adjacent else (1024, 2)
    tile_rows = 1 << max(0, (pairs // padded_pairs).bit_length() - 1)
    # Shorter in the backward, in which three tensors and the tables share the cache.
    tokens = 1 if adjacent or table_per_head else min(256 if backward else rows.seq, tokens_before_next_head(rows.seq))
    return tokens, tile_rows, warps
