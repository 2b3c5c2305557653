"""Launches the norm-and-rotation kernels: where rows lie, how many programs take them, and the sums for the weights."""

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ropewalk.kernels.constructors import empty, empty_like, zeros
from ropewalk.kernels.qk_norm.triton_kernels import norm_rotate_backward_kernel, norm_rotate_kernel
from ropewalk.kernels.triton_launch import (
    LAUNCHES,
    Launch,
    Rows,
    alignment,
    far_tokens,
    is_wide,
    lie_together,
    rows_of,
    table_strides,
)
from ropewalk.kernels.types import Layout, Norm

__all__ = ["norm_rotate", "norm_rotate_backward"]

# Programs of the backward for each multiprocessor. More smooth the end of the launch, and leave more sums to add.
PROGRAMS = 16


def norm_rotate(
    both: Sequence[Tensor],
    weights: Sequence[Tensor | None],
    cos: Tensor,
    sin: Tensor,
    layout: Layout,
    norm: Norm,
    row: int = 0,
) -> list[Tensor]:
    """Each tensor over the root of its mean square, times its weight, turned; both in one launch where they lie alike.

    >>> from ropewalk.kernels.triton_launch import INTERPRETED
    >>> device = "cpu" if INTERPRETED else "cuda"
    >>> x, tables = torch.tensor([[3.0, 4.0]], device=device), torch.tensor([[[0.0]], [[1.0]]], device=device)
    >>> (y,) = norm_rotate([x], [None], *tables, Layout(True, 0, -2), Norm(1e-9))  # a quarter turn
    >>> [round(v, 4) for v in y[0].tolist()]
    [-1.1314, 0.8485]
    """
    out = [empty_like(x) for x in both]
    _run(norm_rotate_kernel, [both, out], weights, None, cos, sin, layout, norm, row)
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
    """The gradients of the tensors, and of their weights where `learns`. A rounding of the norm is passed over.

    >>> from ropewalk.kernels.triton_launch import INTERPRETED
    >>> device = "cpu" if INTERPRETED else "cuda"
    >>> x, g = torch.tensor([[[3.0, 4.0]], [[1.0, 0.0]]], device=device)
    >>> still = torch.tensor([[1.0]], device=device), torch.tensor([[0.0]], device=device)
    >>> (dx,), _ = norm_rotate_backward([g], [x], [None], False, *still, Layout(True, 0, -2), Norm(1e-9))
    >>> [round(v, 4) for v in dx[0].tolist()]  # x dx = 0: the norm does not see a longer x
    [0.181, -0.1358]
    """
    out = [empty_like(x) for x in both]
    sums = _run(norm_rotate_backward_kernel, [both, cotangents, out], weights, learns, cos, sin, layout, norm, row)
    both_sums = zip(weights, sums, strict=True)
    return out, [None if w is None or part is None else part.to(w.dtype) for w, part in both_sums]


def _run(
    kernel: Any,
    groups: Sequence[Sequence[Tensor]],
    weights: Sequence[Tensor | None],
    learns: bool | None,
    cos: Tensor,
    sin: Tensor,
    layout: Layout,
    norm: Norm,
    row: int,
) -> list[Tensor | None]:
    """Launches the kernel on one or two tensors of each group; the sums for the weights, where they learn."""
    if any(x.numel() == 0 for x in groups[0]):
        how = learns, cos, sin, layout, norm, row
        return _apart(kernel, groups, weights, *how) if len(weights) == 2 else _nothing(weights, learns, cos)
    if not (cos.is_contiguous() and sin.is_contiguous()):
        cos, sin = cos.contiguous(), sin.contiguous()
    weights = [w if w is None or w.is_contiguous() else w.contiguous() for w in weights]
    factors = [x if w is None else w for w, x in zip(weights, groups[0], strict=True)]
    tensors = [x for group in (*groups, factors) for x in _two(group)]
    key = (
        kernel,
        tuple((x.shape, x.stride(), x.dtype, x.data_ptr() & 15) for x in tensors),
        (cos.shape, cos.dtype, cos.data_ptr() & 15, sin.data_ptr() & 15),
        (cos.device, tuple(w is None for w in weights), layout, norm, learns),
    )
    plan = LAUNCHES.get(key)
    if plan is None:
        plan = LAUNCHES.keep(key, _plan(kernel, groups, weights, learns, cos, layout, norm) or "apart")
    if plan == "apart":
        return _apart(kernel, groups, weights, learns, cos, sin, layout, norm, row)
    launch, programs = plan
    if learns is None:
        launch(cos.device, *tensors, cos, sin, row)
        return [None for _ in weights]
    sums = empty((sum(programs), groups[0][0].shape[-1]), dtype=cos.dtype, device=cos.device) if learns else cos
    launch(cos.device, *tensors, sums, cos, sin, row)
    return [part.sum(0) for part in sums.split(programs)] if learns else [None for _ in weights]


def _apart(
    kernel: Any, groups: Sequence[Sequence[Tensor]], weights: Sequence[Tensor | None], *how: Any
) -> list[Tensor | None]:
    """One after the other; a tensor that does not lie as rows slice by slice."""
    if len(weights) == 2:
        return [
            part
            for i, weight in enumerate(weights)
            for part in _run(kernel, [[group[i]] for group in groups], [weight], *how)
        ]
    slices = zip(*(group[0].unbind(1) for group in groups), strict=True)
    sums = [_run(kernel, [[x] for x in each], weights, *how)[0] for each in slices]
    there = [part for part in sums if part is not None]
    return [torch.stack(there).sum(0) if there else None]


def _nothing(weights: Sequence[Tensor | None], learns: bool | None, cos: Tensor) -> list[Tensor | None]:
    """The sums of a tensor without elements."""
    return [None if w is None or not learns else zeros(w.shape, dtype=cos.dtype, device=w.device) for w in weights]


def _two(items: Sequence[Any]) -> Sequence[Any]:
    """Both, or one twice: the kernel has a place for each, and looks at the second where there is one."""
    return items if len(items) == 2 else [items[0], items[0]]


def _programs(device: torch.device, heads: Sequence[int]) -> list[int]:
    """How many programs each tensor gets of the backward's persistent grid, by its share of the heads."""
    # On the CPU, in Triton's interpreter, a few will do.
    most = 8 if device.type == "cpu" else _multiprocessors(device) * PROGRAMS
    return [max(1, most * n // sum(heads)) for n in heads]


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _plan(
    kernel: Any,
    groups: Sequence[Sequence[Tensor]],
    weights: Sequence[Tensor | None],
    learns: bool | None,
    cos: Tensor,
    layout: Layout,
    norm: Norm,
) -> tuple[Launch, list[int]] | None:
    """The launch for tensors like these and its programs for each; None if they do not lie alike, or not as rows."""
    dims, pairs = cos.dim(), cos.shape[-1]
    eps, plus_one, rounding = norm
    found = [[rows_of(x, layout.seq_dim, dims) for x in _two(group)] for group in groups]
    rows = [[r for r in group if r is not None] for group in found]
    if any(len(group) < 2 or _looks(group[0]) != _looks(group[1]) for group in rows):
        return None
    (x, other), heads = rows[0], [r.heads for r in rows[0][: len(weights)]]
    still = x.dim - 2 * pairs
    table_b, table_h = table_strides(cos)
    room, still_room = (1 << max(0, n - 1).bit_length() for n in (pairs, still))
    backward = learns is not None
    tokens, tile_rows, warps = _tile(x, room + still_room // 2, bool(table_h), layout.interleaved, backward)
    aligned = alignment(16 // groups[0][0].element_size(), *(n for pair in rows for r in pair for n in r.strides[:3]))
    blocks_a_batch = -(-x.seq // tokens)
    blocks = x.batch * blocks_a_batch
    strides = [stride // aligned for pair in rows for r in pair for stride in r.strides[:3]]
    shares = [n // math.gcd(*heads) for n in heads]
    steps = [pair[0].strides[3] for pair in rows]
    programs = _programs(cos.device, heads) if backward else shares
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
        "STILL": still,
        "START": layout.start,
        "INTERLEAVED": layout.interleaved,
        "ROOM": room,
        "STILL_ROOM": still_room,
        "TOKENS": tokens,
        "ROWS": tile_rows,
        "ALIGN": aligned,
        "EPS": eps,
        "PLUS_ONE": plus_one,
        **({"LEARNS": learns} if backward else {"ROUNDING": rounding}),
        "WIDE": is_wide(*(r.reach() for pair in rows for r in pair), cos.numel()),
    }
    numbers = (table_b, table_h, x.seq, blocks_a_batch, blocks, *strides)
    units = 1 if backward else -(-blocks * tokens * math.gcd(*heads) // tile_rows)
    return Launch(kernel, units * sum(programs), numbers, constants, warps), programs


def _looks(rows: Rows) -> tuple[int, int, int]:
    """What two tensors must have in common for one launch: batch, length, and the step from feature to feature."""
    return rows.batch, rows.seq, rows.strides[3]


def _tile(rows: Rows, room: int, table_a_head: bool, interleaved: bool, backward: bool) -> tuple[int, int, int]:
    """Tokens of a head side by side, rows a program, warps: what was fastest on an H200."""
    together = lie_together(rows)
    if backward:
        features, warps = 512, 2
    else:
        features, warps = (2048, 4) if interleaved and together else (1024, 2)
    tile_rows = 1 << max(0, (features // room).bit_length() - 1)
    # In the backward three tensors and the tables share the cache.
    tokens = 1 if together or table_a_head else min(256 if backward else rows.seq, far_tokens(rows.seq))
    return tokens, tile_rows, warps
