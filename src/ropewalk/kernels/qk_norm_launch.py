"""Launches the norm-and-rotation kernels: where rows lie, how many programs take them, and the sums for the weights."""

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ropewalk.kernels.launch_triton import INTERPRETED, LAUNCHES, Launch, Rows, alignment, is_wide, rows_of, table_strides
from ropewalk.kernels.layout import Layout
from ropewalk.kernels.qk_norm_triton import norm_rotate_backward_kernel, norm_rotate_kernel

__all__ = ["norm_rotate", "norm_rotate_backward"]

# eps, whether to add 1 to the weights, and the bits of `qk_norm_torch.Norm.rounding`.
Norms = tuple[float, bool, int]

# Programs of the backward on a multiprocessor: as many as have their registers at once on an H200.
PROGRAMS = 5


def norm_rotate(
    both: Sequence[Tensor],
    weights: Sequence[Tensor | None],
    cos: Tensor,
    sin: Tensor,
    layout: Layout,
    norm: Norms,
    row: int = 0,
) -> list[Tensor]:
    """Each tensor over the root of its mean square, times its weight, turned; both in one launch where they lie alike."""
    dims = cos.dim()
    given = [x if rows_of(x, layout.seq_dim, dims) else x.contiguous() for x in both]
    out = [torch.empty_like(x) for x in given]
    cos, sin = cos.contiguous(), sin.contiguous()
    for group in _alike(given, layout, dims):
        xs, ys, ws = ([items[i] for i in group] for items in (given, out, weights))
        factors = [x if w is None else w.contiguous() for w, x in zip(ws, xs, strict=True)]
        tensors = (*_two(xs), *_two(ys), *_two(factors), cos, sin)
        key = _key(norm_rotate_kernel, tensors, ws, layout, norm)
        launch = LAUNCHES.get(key)
        if launch is None:
            launch = LAUNCHES.keep(key, _plan(xs, [ys], ws, cos, layout, norm))
        launch(xs[0].device, *tensors, row)
    return out


def norm_rotate_backward(
    cotangents: Sequence[Tensor],
    both: Sequence[Tensor],
    weights: Sequence[Tensor | None],
    learns: bool,
    cos: Tensor,
    sin: Tensor,
    layout: Layout,
    norm: Norms,
    row: int = 0,
) -> tuple[list[Tensor], list[Tensor | None]]:
    """The gradients of the tensors, and of their weights where `learns`. Where the norm was rounded, that is passed over."""
    dims = cos.dim()
    given = [x if rows_of(x, layout.seq_dim, dims) else x.contiguous() for x in both]
    cotangents = [g if rows_of(g, layout.seq_dim, dims) else g.contiguous() for g in cotangents]
    out = [torch.empty_like(x) for x in given]
    cos, sin = cos.contiguous(), sin.contiguous()
    learned: list[Tensor | None] = [None] * len(given)
    for group in _alike(given, layout, dims, cotangents):
        xs, gs, ys, ws = ([items[i] for i in group] for items in (given, cotangents, out, weights))
        rows = [_rows(x, layout, dims) for x in xs]
        programs = _programs(xs[0].device, [r.heads for r in rows])
        sums = torch.empty((sum(programs), xs[0].shape[-1]), dtype=cos.dtype, device=cos.device) if learns else cos
        factors = [x if w is None else w.contiguous() for w, x in zip(ws, xs, strict=True)]
        tensors = (*_two(xs), *_two(gs), *_two(ys), *_two(factors), sums, cos, sin)
        key = _key(norm_rotate_backward_kernel, tensors, ws, layout, norm, learns)
        launch = LAUNCHES.get(key)
        if launch is None:
            launch = LAUNCHES.keep(key, _plan(xs, [gs, ys], ws, cos, layout, norm, learns))
        launch(xs[0].device, *tensors, row)
        if learns:
            for i, w, part in zip(group, ws, sums.split(programs), strict=True):
                learned[i] = None if w is None else part.sum(0).to(w.dtype)
    return out, learned


def _two(items: Sequence[Any]) -> Sequence[Any]:
    """Both, or one twice: the kernel has a place for each, and looks at the second where there is one."""
    return items if len(items) == 2 else [items[0], items[0]]


def _key(kernel: Any, tensors: Sequence[Tensor], weights: Sequence[Any], layout: Layout, *how: Any) -> tuple[Any, ...]:
    shapes = tuple((x.shape, x.stride(), x.dtype, x.data_ptr() & 15) for x in tensors)
    return kernel, shapes, tensors[0].device, tuple(w is None for w in weights), len(weights), layout, how


def _rows(x: Tensor, layout: Layout, dims: int) -> Rows:
    rows = rows_of(x, layout.seq_dim, dims)
    if rows is None:
        raise AssertionError(f"shape {list(x.shape)} with strides {list(x.stride())} was to lie as rows")
    return rows


def _alike(
    xs: Sequence[Tensor], layout: Layout, dims: int, others: Sequence[Tensor] | None = None
) -> list[list[int]]:
    """Which of the tensors one launch can take: both if they have one batch, length and step of features."""
    if len(xs) == 1:
        return [[0]]
    found = [[_rows(x, layout, dims) for x in each] for each in (xs, others) if each is not None]
    same = all((a.batch, a.seq, a.strides[3]) == (b.batch, b.seq, b.strides[3]) for a, b in found)
    return [[0, 1]] if same else [[0], [1]]


def _programs(device: torch.device, heads: Sequence[int]) -> list[int]:
    """How many programs each tensor gets of the backward's persistent grid, by its share of the heads."""
    most = 8 if INTERPRETED else _multiprocessors(device) * PROGRAMS
    return [max(1, most * n // sum(heads)) for n in heads]


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _plan(
    xs: Sequence[Tensor],
    others: Sequence[Sequence[Tensor]],
    weights: Sequence[Tensor | None],
    cos: Tensor,
    layout: Layout,
    norm: Norms,
    learns: bool | None = None,
) -> Launch:
    """The launch for tensors like these; `others` are outputs, or cotangents and outputs of the backward."""
    dims, pairs = cos.dim(), cos.shape[-1]
    eps, plus_one, rounding = norm
    rows = [[_rows(x, layout, dims) for x in _two(each)] for each in (xs, *others)]
    (x, other), heads = rows[0], [r.heads for r in rows[0][: len(xs)]]
    still = x.dim - 2 * pairs
    table_b, table_h = table_strides(cos)
    room, still_room = (1 << max(0, n - 1).bit_length() for n in (pairs, still))
    tokens, tile_rows, warps = _tile(x, room, bool(table_h), layout.interleaved)
    aligned = alignment(16 // xs[0].element_size(), *(n for pair in rows for r in pair for n in r.strides[:3]))
    blocks_a_batch = -(-x.seq // tokens)
    blocks = x.batch * blocks_a_batch
    strides = [stride // aligned for pair in rows for r in pair for stride in r.strides[:3]]
    turns = [n // math.gcd(*heads) for n in heads]
    steps = [pair[0].strides[3] for pair in rows]
    backward = learns is not None
    programs = _programs(xs[0].device, heads) if backward else turns
    first, second = ("Q_PROGRAMS", "K_PROGRAMS") if backward else ("Q_TURNS", "K_TURNS")
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
    if backward:
        return Launch(norm_rotate_backward_kernel, sum(programs), numbers, constants, warps)
    units = -(-blocks * tokens * math.gcd(*heads) // tile_rows)
    return Launch(norm_rotate_kernel, units * sum(turns), numbers, constants, warps)


def _tile(rows: Rows, room: int, table_a_head: bool, interleaved: bool) -> tuple[int, int, int]:
    """Tokens of a head side by side, rows a program, warps: sixteen bytes of each member of a pair for a thread."""
    heads_lie_together = rows.heads == 1 or rows.seq == 1 or rows.strides[2] <= rows.strides[1]
    return 1 if heads_lie_together or table_a_head else 16, max(1, 1024 // room), 4
