"""Linear attention: the kernels of a GPU where they serve, and chunks of matrix products everywhere else."""

import itertools
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ropewalk.kernels.backends import triton as gpu
from ropewalk.kernels.linear import segments as linear_segments
from ropewalk.kernels.linear.feature_maps import map_features, row_shift
from ropewalk.kernels.linear.packed import attend_packed
from ropewalk.kernels.linear.segments import OPERANDS, count_segments
from ropewalk.kernels.linear.torch import Features, Side, Sums, attend
from ropewalk.kernels.torch_internals import is_exporting, is_plain, why_not_plain
from ropewalk.kernels.types import Layout
from ropewalk.ops.registry import cannot_serve
from ropewalk.ops.rotation import rotate

__all__ = ["linear_attention"]

# What the kernels' tiles hold.
WIDEST = 256


def linear_attention(
    q: Side,
    k: Side,
    v: Tensor,
    before: Sums | None,
    layout: Layout,
    *,
    causal: bool,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Sums]:
    """What queries read of keys and values, [batch, heads, seq, v_dim] in the dtype of v, and the sums at the end.

    Everything is worked in float32, in float64 for float64, and rounded once. Sums have a row for each sequence of
    `cu_seqlens`, where it is given.

    >>> x, v = torch.zeros(1, 1, 2, 2), torch.tensor([[[[1.0], [3.0]]]])
    >>> out, _ = linear_attention(Side(x, "elu"), Side(x, "elu"), v, None, Layout(True, 0, -2), causal=True)
    >>> out.flatten().tolist()
    [1.0, 2.0]
    """
    given = _tensors(q, k, v, before, cu_seqlens)
    why = _why_not(q, k, v, layout, given)
    if why is None:
        return _by_kernel(q, k, v, before, layout, causal, cu_seqlens)
    if layout.backend not in (None, "torch"):
        raise cannot_serve(layout.backend, why)
    return by_formula(q, k, v, before, layout, causal, cu_seqlens)


def _tensors(q: Side, k: Side, v: Tensor, before: Sums | None, cu_seqlens: Tensor | None) -> list[Tensor]:
    tables = [table for side in (q, k) for table in (side.tables or ())[:2]]
    return [q.x, k.x, v, *tables, *(before or ()), *([] if cu_seqlens is None else [cu_seqlens])]


def _why_not(q: Side, k: Side, v: Tensor, layout: Layout, given: list[Tensor]) -> str | None:
    """Why the kernels of a GPU cannot serve, or None."""
    if layout.backend not in (None, "triton"):
        return f"linear attention, which backend={layout.backend!r} does not have"
    if not (v.is_cuda or (layout.backend == "triton" and gpu.INTERPRETED)):
        return f"tensors on {v.device}"
    if not gpu.INSTALLED or is_exporting():
        return "an export" if gpu.INSTALLED else "no Triton"
    if layout.backend is None and k.x.shape[2] == 1:
        return "one token, for which a few operations take less of the host than three launches"
    tables = [table for side in (q, k) for table in (side.tables or ())[:2]]
    if torch.is_grad_enabled() and any(table.requires_grad for table in tables):
        return "gradients of cos and sin"
    width, v_dim = q.x.shape[-1], v.shape[-1]
    if v.dtype == torch.float64 or max(width, v_dim) > WIDEST or (layout.interleaved and layout.start % 2):
        return f"{width} features and {v_dim} values of {v.dtype}"
    if any(x.numel() == 0 for x in (q.x, k.x, v)):
        return "a tensor without elements"
    return None if torch.compiler.is_compiling() else why_not_plain(*given)


def by_formula(
    q: Side, k: Side, v: Tensor, before: Sums | None, layout: Layout, causal: bool, cu_seqlens: Tensor | None
) -> tuple[Tensor, Sums]:
    """In chunks of matrix products; packed sequences one after the other, where the host may look at their ends.

    >>> x, v = torch.zeros(1, 1, 2, 2), torch.tensor([[[[1.0], [3.0]]]])
    >>> by_formula(Side(x, "elu"), Side(x, "elu"), v, None, Layout(True, 0, -2), False, None)[0].flatten().tolist()
    [2.0, 2.0]
    """
    # A meta tensor has no autocast of its own.
    with torch.autocast("cpu" if v.is_meta else v.device.type, enabled=False):
        return _by_formula(q, k, v, before, layout, causal, cu_seqlens)


def _by_formula(
    q: Side, k: Side, v: Tensor, before: Sums | None, layout: Layout, causal: bool, cu_seqlens: Tensor | None
) -> tuple[Tensor, Sums]:
    working = torch.float64 if v.dtype == torch.float64 else torch.float32
    both = _features(q, layout, working, "q"), _features(k, layout, working, "k")
    values = v.to(working)
    if cu_seqlens is None:
        out, after = attend(both[0], both[1], values, before, causal=causal)
        return out.to(v.dtype), after
    if not (is_plain(cu_seqlens) and cu_seqlens.device.type == "cpu"):
        out, after = attend_packed(both[0], both[1], values, before, cu_seqlens, causal=causal)
        return out.to(v.dtype), after
    ends = cu_seqlens.tolist()
    outputs, left = [], []
    for number, (start, stop) in enumerate(itertools.pairwise(ends)):
        mine, theirs = (Features(*(x[:, :, start:stop] for x in side)) for side in both)
        earlier = None if before is None else Sums(*(x[number : number + 1] for x in before))
        out, after = attend(mine, theirs, values[:, :, start:stop], earlier, causal=causal)
        outputs.append(out)
        left.append(after)
    rest = q.x.shape[-2] - ends[-1]
    outputs.append(values.new_zeros(*q.x.shape[:2], rest, v.shape[-1]))
    return torch.cat(outputs, dim=2).to(v.dtype), Sums(*(torch.cat(parts) for parts in zip(*left, strict=True)))


def _features(side: Side, layout: Layout, working: torch.dtype, role: str) -> Features:
    x = side.x.to(working)
    plain = map_features(x, side.map, row_shift(x, side.map) if role == "q" else None)
    if side.tables is None:
        return Features(plain, plain)
    cos, sin, row = side.tables
    backend = None if layout.backend == "triton" else layout.backend
    return Features(plain, rotate(plain, None, cos, sin, replace(layout, backend=backend), row=row)[0])


def _by_kernel(
    q: Side, k: Side, v: Tensor, before: Sums | None, layout: Layout, causal: bool, cu_seqlens: Tensor | None
) -> tuple[Tensor, Sums]:
    batch, kv_heads, width, v_dim = len(v), k.x.shape[1], q.x.shape[-1], v.shape[-1]
    rows = batch if cu_seqlens is None else len(cu_seqlens) - 1
    flat = None if before is None else torch.cat([before.above.flatten(2), before.below], dim=-1).flatten(0, 1)
    (q_cos, q_sin, q_row), (k_cos, k_sin, k_row) = (side.tables or (None, None, 0) for side in (q, k))
    tensors = q.x, k.x, v, q_cos, q_sin, k_cos, k_sin, flat, cu_seqlens
    how = q_row, k_row, q.map, k.map, layout.interleaved, layout.start, causal
    out, _, total, *_ = torch.ops.ropewalk.linear_attention(*tensors, *how)
    total = total.unflatten(0, (rows, kv_heads))
    return out, Sums(total[..., : width * v_dim].unflatten(-1, (width, v_dim)), total[..., width * v_dim :])


def _sides(tensors: Any, how: Any) -> tuple[Side, Side]:
    q, k, _, q_cos, q_sin, k_cos, k_sin = tensors[:7]
    q_row, k_row, q_map, k_map = how[:4]
    shift = row_shift(q, q_map)
    q_shift = None if shift is None else shift.squeeze(-1).float().contiguous()
    k_shift = torch.zeros(k.shape[:3], dtype=torch.float32, device=k.device) if k_map == "exp" else None
    return (
        Side(q, q_map, q_shift, None if q_cos is None else (q_cos.contiguous(), q_sin.contiguous(), q_row)),
        Side(k, k_map, k_shift, None if k_cos is None else (k_cos.contiguous(), k_sin.contiguous(), k_row)),
    )


@torch.library.custom_op("ropewalk::linear_attention", mutates_args=())
def _linear_attention_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_cos: Tensor | None,
    q_sin: Tensor | None,
    k_cos: Tensor | None,
    k_sin: Tensor | None,
    before: Tensor | None,
    cu_seqlens: Tensor | None,
    q_row: int,
    k_row: int,
    q_map: str,
    k_map: str,
    interleaved: bool,
    start: int,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    tensors = q, k, v, q_cos, q_sin, k_cos, k_sin
    sides = _sides(tensors, (q_row, k_row, q_map, k_map))
    layout = Layout(interleaved, start, -2)
    out, below, sums = gpu.kernels().linear_attention(*sides, v, before, layout, causal=causal, cu_seqlens=cu_seqlens)
    return out, below, sums.total, sums.running, sums.plain


@_linear_attention_op.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    cu_seqlens = rest[5]
    sequences = None if cu_seqlens is None else len(cu_seqlens) - 1
    rows = (len(v) if sequences is None else sequences) * k.shape[1]
    size = q.shape[-1] * (v.shape[-1] + 1)
    count = count_segments(k.shape[2], sequences, linear_segments.segment_length(q.shape[-1], v.shape[-1]))
    return (
        v.new_empty((*q.shape[:3], v.shape[-1])),
        v.new_empty(q.shape[:3], dtype=torch.float32),
        v.new_empty((rows, size), dtype=torch.float32),
        v.new_empty((len(v) * k.shape[1], count, size - q.shape[-1]), dtype=OPERANDS[v.dtype]),
        v.new_empty((len(v) * k.shape[1], count, q.shape[-1]), dtype=torch.float32),
    )


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.how = inputs[9:]
    ctx.save_for_backward(*inputs[:9], *output)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Any, ...]:
    *inputs, out, below, total, running, plain = ctx.saved_tensors
    of_out, _, of_total, *_ = cotangents
    of_out = torch.zeros_like(out) if of_out is None else of_out
    needs = ctx.needs_input_grad
    if torch.is_grad_enabled() or (not is_plain(of_out) and not torch.compiler.is_compiling()):
        grads = _formula_gradients(inputs, ctx.how, of_out, of_total, needs)
    else:
        saved = (out, below, total, running, plain)
        grads = torch.ops.ropewalk.linear_attention_backward(of_out, of_total, *inputs, *saved, *ctx.how)
    chosen = [grad if need else None for grad, need in zip(grads, (*needs[:3], needs[7]), strict=True)]
    return *chosen[:3], *[None] * 4, chosen[3], *[None] * 8


_linear_attention_op.register_autograd(_backward, setup_context=_save)


def _formula_gradients(inputs: list[Any], how: Any, of_out: Tensor, of_total: Tensor | None, needs: Any) -> list[Any]:
    """The gradients by the formula, which has derivatives of its own."""
    q_row, k_row, q_map, k_map, interleaved, start, causal = how
    q, k, v, q_cos, q_sin, k_cos, k_sin, before, cu_seqlens = inputs
    with torch.enable_grad():
        fresh: list[Any] = [x.view_as(x) if x is not None else None for x in (q, k, v, before)]
        sums = None
        if fresh[3] is not None:
            flat = fresh[3].unflatten(0, (-1, k.shape[1]))
            above, below = flat.split([q.shape[-1] * v.shape[-1], q.shape[-1]], dim=-1)
            sums = Sums(above.unflatten(-1, (q.shape[-1], v.shape[-1])), below)
        sides = (
            Side(fresh[0], q_map, None, None if q_cos is None else (q_cos, q_sin, q_row)),
            Side(fresh[1], k_map, None, None if k_cos is None else (k_cos, k_sin, k_row)),
        )
        out, after = by_formula(*sides, fresh[2], sums, Layout(interleaved, start, -2), causal, cu_seqlens)
        outputs, given = [out], [of_out]
        if of_total is not None:
            outputs.append(torch.cat([after.above.flatten(2), after.below], dim=-1).flatten(0, 1))
            given.append(of_total)
        wanted = [x for x, need in zip(fresh, (*needs[:3], needs[7]), strict=True) if need]
        found = iter(torch.autograd.grad(outputs, wanted, given, create_graph=True, allow_unused=True))
    return [next(found) if need else None for need in (*needs[:3], needs[7])]


@torch.library.custom_op("ropewalk::linear_attention_backward", mutates_args=())
def _linear_attention_backward_op(
    of_out: Tensor,
    of_total: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_cos: Tensor | None,
    q_sin: Tensor | None,
    k_cos: Tensor | None,
    k_sin: Tensor | None,
    before: Tensor | None,
    cu_seqlens: Tensor | None,
    out: Tensor,
    below: Tensor,
    total: Tensor,
    running: Tensor,
    plain: Tensor,
    q_row: int,
    k_row: int,
    q_map: str,
    k_map: str,
    interleaved: bool,
    start: int,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    sides = _sides((q, k, v, q_cos, q_sin, k_cos, k_sin), (q_row, k_row, q_map, k_map))
    saved, layout = (out, below, (running, plain, total)), Layout(interleaved, start, -2)
    how = {"causal": causal, "cu_seqlens": cu_seqlens}
    return gpu.kernels().linear_attention_backward(of_out, of_total, *sides, v, saved, layout, **how)


@_linear_attention_backward_op.register_fake
def _(of_out: Tensor, of_total: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    dq, dk = (torch.empty_like(x if x.stride(-1) == 1 else x.contiguous()) for x in (q, k))
    return dq, dk, v.new_empty(v.shape), torch.empty_like(rest[8])
