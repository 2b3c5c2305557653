"""Linear attention by the backend that `dispatch` chooses, with gradients."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ropewalk.errors import RopewalkError
from ropewalk.kernels.backend import Operation, registered
from ropewalk.kernels.constructors import empty_like, new_empty, zeros_like
from ropewalk.kernels.linear.torch import linear_attention as linear_attention_formula
from ropewalk.kernels.precision import working_dtype
from ropewalk.kernels.torch_internals import is_plain
from ropewalk.kernels.types import NO_WEIGHTING, Layout, Side, Sums, Tables, Weighting
from ropewalk.ops.dispatch import choose
from ropewalk.ops.rotation import rotate

__all__ = ["linear_attention"]


def linear_attention(
    q: Side,
    k: Side,
    v: Tensor,
    before: Sums | None,
    layout: Layout,
    *,
    causal: bool,
    cu_seqlens: Tensor | None = None,
    weighting: Weighting = NO_WEIGHTING,
    backend: str | None = None,
) -> tuple[Tensor, Sums]:
    """Return the output of linear attention, and the sums after the last key.

    Everything is computed in float32 (float64 for float64) and rounded once.

    Args:
        q: Queries, their feature map and tables.
        k: Keys, their feature map and tables.
        v: Values [batch, kv_heads, seq, v_dim].
        before: Sums over earlier keys, or None.
        layout: Layout of the rotation.
        causal: Whether a query reads only keys up to its own index.
        cu_seqlens: Ends of packed sequences [sequences + 1], starting with 0.
        weighting: Factors on the terms of both sums. No backend except "torch" supports them.
        backend: Name of the forced backend, or None.

    Returns:
        The output [batch, heads, seq, v_dim] in the dtype of v, and the sums, with one row per packed sequence.

    Raises:
        RopewalkError: If the forced backend does not support the call.

    >>> x, v = torch.zeros(1, 1, 2, 2), torch.tensor([[[[1.0], [3.0]]]])
    >>> out, _ = linear_attention(Side(x, "elu"), Side(x, "elu"), v, None, Layout(True, 0, -2), causal=True)
    >>> out.flatten().tolist()
    [1.0, 2.0]
    """
    tables = [table for side in (q, k) if side.tables is not None for table in side.tables[:2]]
    learned = torch.is_grad_enabled() and any(table.requires_grad for table in tables)
    tensors = [q.x, k.x, v, *tables, *(before or ()), cu_seqlens]
    if not weighting.plain and backend not in (None, "torch"):
        raise RopewalkError(
            asked=f"backend={backend!r}",
            expected="a call that it supports",
            got="a decay, a bias, or normalize=False, which only torch supports",
            do="leave backend out, and each call uses the fastest path that supports it",
        )
    requested = backend if weighting.plain else "torch"
    choice = choose("linear_attention", requested, (q, k, v, layout), tensors, table_gradient=learned)
    if choice.path == "formula" or not weighting.plain:
        rotate_features = _rotate_by_formula if backend == "torch" else _rotate_features
        return linear_attention_formula(q, k, v, before, layout, causal, cu_seqlens, rotate_features, weighting)
    flat = None if before is None else before.flat()
    (q_cos, q_sin, q_row), (k_cos, k_sin, k_row) = (side.tables or (None, None, 0) for side in (q, k))
    inputs = q.x, k.x, v, q_cos, q_sin, k_cos, k_sin, flat, cu_seqlens
    options = q_row, k_row, q.map, k.map, layout.interleaved, layout.start, causal, choice.backend
    # The library op is used in eager mode too, because it contains the autograd formula.
    out, total, *_ = torch.ops.ropewalk.linear_attention(*inputs, *options)
    return out, Sums.from_flat(total, k.x.shape[1], q.x.shape[-1], v.shape[-1])


def _rotate_features(x: Tensor, tables: Tables, layout: Layout) -> Tensor:
    return rotate(x, None, tables.cos, tables.sin, layout, row=tables.row)[0]


def _rotate_by_formula(x: Tensor, tables: Tables, layout: Layout) -> Tensor:
    return rotate(x, None, tables.cos, tables.sin, layout, row=tables.row, backend="torch")[0]


def _sides(inputs: Sequence[Any], options: Sequence[Any]) -> tuple[Side, Side]:
    """Return the sides in the inputs of a library op."""
    q, k, _, q_cos, q_sin, k_cos, k_sin, *_ = inputs
    q_row, k_row, q_map, k_map, *_ = options
    return (
        Side(q, q_map, None, None if q_cos is None else Tables(q_cos, q_sin, q_row)),
        Side(k, k_map, None, None if k_cos is None else Tables(k_cos, k_sin, k_row)),
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
    backend: str,
) -> list[Tensor]:
    sides = _sides((q, k, v, q_cos, q_sin, k_cos, k_sin), (q_row, k_row, q_map, k_map))
    layout = Layout(interleaved, start, -2)
    return list(_operation(backend).run(*sides, v, before, layout, causal, cu_seqlens))


def _operation(backend: str) -> Operation:
    return registered(backend).operations["linear_attention"]


@_linear_attention_op.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> list[Tensor]:
    cu_seqlens, backend = rest[5], rest[-1]
    sequences = len(v) if cu_seqlens is None else len(cu_seqlens) - 1
    saved = _operation(backend).empty_saved
    return [
        new_empty(v, (*q.shape[:3], v.shape[-1])),
        new_empty(v, (sequences * k.shape[1], q.shape[-1] * (v.shape[-1] + 1)), dtype=working_dtype(v)),
        *(() if saved is None else saved(q, k, v, cu_seqlens)),
    ]


def _save(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    ctx.options = inputs[9:]
    ctx.save_for_backward(*inputs[:9], *output)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, cotangents: list[Tensor | None]) -> tuple[Any, ...]:
    inputs, results = ctx.saved_tensors[:9], ctx.saved_tensors[9:]
    of_out, of_total, *_ = cotangents
    of_out = zeros_like(results[0]) if of_out is None else of_out
    needs = ctx.needs_input_grad
    *options, backend = ctx.options
    again = torch.is_grad_enabled() or (not is_plain(of_out) and not torch.compiler.is_compiling())
    if again or _operation(backend).backward is None:
        grads = _formula_gradients(inputs, options, of_out, of_total, needs)
    else:
        grads = torch.ops.ropewalk.linear_attention_backward(of_out, of_total, *inputs, list(results), *ctx.options)
    chosen = [grad if need else None for grad, need in zip(grads, (*needs[:3], needs[7]), strict=True)]
    return *chosen[:3], *[None] * 4, chosen[3], *[None] * 9


_linear_attention_op.register_autograd(_backward, setup_context=_save)


def _formula_gradients(
    inputs: Sequence[Any], options: Sequence[Any], of_out: Tensor, of_total: Tensor | None, needs: Sequence[bool]
) -> list[Any]:
    """Return the gradients by the formula, which is differentiable again."""
    *_, interleaved, start, causal = options
    q, k, v, *_, before, cu_seqlens = inputs
    wanted, again = (*needs[:3], needs[7]), torch.is_grad_enabled()
    with torch.enable_grad():
        aliases: list[Any] = [None if x is None else x.view_as(x) for x in (q, k, v, before)]
        q, k, v, before = aliases
        sums = None if before is None else Sums.from_flat(before, k.shape[1], q.shape[-1], v.shape[-1])
        sides, layout = _sides((q, k, v, *inputs[3:]), options), Layout(interleaved, start, -2)
        out, after = linear_attention_formula(*sides, v, sums, layout, causal, cu_seqlens, _rotate_features)
        outputs, cotangents = [out], [of_out]
        if of_total is not None:
            outputs.append(after.flat())
            cotangents.append(of_total)
        leaves = [x for x, need in zip(aliases, wanted, strict=True) if need]
        gradients = iter(torch.autograd.grad(outputs, leaves, cotangents, create_graph=again, allow_unused=True))
    return [next(gradients) if need else None for need in wanted]


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
    results: Sequence[Tensor],
    q_row: int,
    k_row: int,
    q_map: str,
    k_map: str,
    interleaved: bool,
    start: int,
    causal: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    sides = _sides((q, k, v, q_cos, q_sin, k_cos, k_sin), (q_row, k_row, q_map, k_map))
    backward, layout = _operation(backend).backward, Layout(interleaved, start, -2)
    return backward(  # pyright: ignore[reportOptionalCall]
        of_out, of_total, *sides, v, results, layout, causal, cu_seqlens
    )


@_linear_attention_backward_op.register_fake
def _(of_out: Tensor, of_total: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    dq, dk = (empty_like(x if x.stride(-1) == 1 else x.contiguous()) for x in (q, k))
    (_, total, *_) = rest[6]
    return dq, dk, new_empty(v, v.shape), empty_like(total)
