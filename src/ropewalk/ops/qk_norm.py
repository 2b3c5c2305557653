"""RMSNorm and rotation of q and k by the backend that `dispatch` chooses, with gradients of all tensors."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ropewalk.kernels.backend import registered
from ropewalk.kernels.constructors import empty_like
from ropewalk.kernels.qk_norm.torch import factor, norm_backward
from ropewalk.kernels.qk_norm.torch import norm_rotate as norm_rotate_formula
from ropewalk.kernels.rotate.torch import rotate_traceable
from ropewalk.kernels.signature import are_plain
from ropewalk.kernels.torch_internals import plain_apply
from ropewalk.kernels.types import Layout, Norm, RopeNumbers, Shortcut
from ropewalk.ops.dispatch import choose, with_shortcut
from ropewalk.ops.rotation import by_formula, rows_for

__all__ = ["norm_rotate", "norm_shortcut_of"]


def norm_rotate(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    layout: Layout,
    norm: Norm,
    *,
    row: int = 0,
    owned: bool = False,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the rotation of q / rms(q) * q_weight and of k / rms(k) * k_weight, differentiable in all tensors.

    Args:
        q: Queries.
        k: Keys.
        q_weight: Weight [dim], or None.
        k_weight: Weight [dim], or None.
        cos: As `cos_sin` returns it.
        sin: As `cos_sin` returns it.
        layout: Pairing, first rotated feature, and dimension of the sequence.
        norm: eps, plus_one and rounding of the norm.
        row: Row of cos and sin that belongs to the first token.
        owned: Whether nobody else can write to cos and sin. A graph then keeps them without saving them.
        backend: Name of the forced backend, or None.

    Raises:
        RopewalkError: If the forced backend does not support the call.

    >>> x, quarter = torch.tensor([[3.0, 4.0]]), (torch.zeros(1, 1), torch.ones(1, 1))
    >>> y, _ = norm_rotate(x, x, None, None, *quarter, Layout(True, 0, -2), Norm(1e-9))
    >>> [round(v, 4) for v in y[0].tolist()]
    [-1.1314, 0.8485]
    """
    grad = torch.is_grad_enabled()
    learned = grad and (cos.requires_grad or sin.requires_grad)
    tensors = (q, k, q_weight, k_weight, cos, sin)
    choice = choose("norm_rotate", backend, (q, k, layout), tensors, table_gradient=learned)
    both, weights = (q, k), (q_weight, k_weight)
    if choice.path == "formula":
        results = norm_rotate_formula(both, weights, cos, sin, layout, norm, row)
    elif choice.path == "exported":
        results = choice.operation.run(both, weights, cos, sin, layout, norm, row)
    elif choice.path == "op":
        factors = factor(q_weight, q, norm), factor(k_weight, k, norm)
        tables = rows_for(cos, row, q, layout), rows_for(sin, row, q, layout)
        options = layout.interleaved, layout.start, layout.seq_dim, choice.backend, norm.eps, norm.rounding
        results = torch.ops.ropewalk.norm_rotate(both, factors, *tables, *options)
    else:
        sides = (q, q_weight), (k, k_weight)
        needs = [grad and any(x is not None and x.requires_grad for x in side) for side in sides]
        how = cos, sin, owned, layout, choice, norm, row
        if all(needs) and choice.operation.joint:
            results = _apply_norm(*both, *weights, None, how)
        elif any(needs):
            # One Function for both would put a tensor without gradient into the graph, and free what the other saved.
            results = [_apply_norm(*side, None, how)[0] for side in sides]
        else:
            results = choice.operation.run(both, weights, cos, sin, layout, norm, row)
    return tuple(results)  # pyright: ignore[reportReturnType, reportArgumentType]


def norm_shortcut_of(numbers: RopeNumbers, device: torch.device, backend: str | None) -> Shortcut | None:
    """Return the shortcut for `norm_rotate` with a rope on a device; None if its backend has none there.

    Arguments are those of `shortcut_of`.

    >>> theta, one = torch.ones(1, dtype=torch.float64), torch.ones((), dtype=torch.float64)
    >>> numbers = RopeNumbers(2, Layout(True, 0, -2), theta, None, one, {}, None)
    >>> norm_shortcut_of(numbers, torch.device("cpu"), None) is None
    True
    """
    choice = with_shortcut("norm_rotate", device, backend)
    if choice is None or choice.operation.shortcut is None:
        return None
    layout = numbers.layout

    def with_graph(
        q: Tensor,
        k: Tensor,
        q_weight: Tensor | None,
        k_weight: Tensor | None,
        rotated: tuple[Tensor, ...],
        cos: Tensor,
        sin: Tensor,
        owned: bool,
        row: int,
        norm: Norm,
    ) -> tuple[Tensor, ...]:
        return _apply_norm(q, k, q_weight, k_weight, rotated, (cos, sin, owned, layout, choice, norm, row))

    return choice.operation.shortcut(numbers._replace(with_graph=with_graph))


class _NormRotate(torch.autograd.Function):
    """Norm and rotation by the kernel of a backend. Inputs: one or two tensors, their weights, results or None, how.

    `how` is cos and sin, whether nobody else can write to them, and the options of the kernel.
    A shortcut has computed the results already. They only get their graph here.
    """

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, ...]:
        *tensors, results, how = inputs
        cos, sin, owned, layout, choice, norm, row = how
        count = len(tensors) // 2
        if owned:
            ctx.save_for_backward(*tensors)
        else:
            ctx.save_for_backward(*tensors, cos, sin)
        ctx.options = count, (cos, sin) if owned else None, layout, choice, norm, row
        if results is None:
            results = choice.operation.run(tensors[:count], tensors[count:], cos, sin, layout, norm, row)
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        count, tables, layout, choice, norm, row = ctx.options
        saved = ctx.saved_tensors
        tensors, (cos, sin) = saved[: 2 * count], tables or saved[2 * count :]
        both, weights, options = tensors[:count], tensors[count:], [None] * 2
        backward = choice.operation.backward
        if backward is None or torch.is_grad_enabled() or not are_plain(*cotangents, *both):
            # For higher derivatives, and for backends without a backward: the formula supports all derivatives.

            def formula(*inputs: Any) -> list[Tensor]:
                return norm_rotate_formula(inputs[:count], inputs[count:], cos, sin, layout, norm, row)

            return *by_formula(formula, tensors, cotangents), *options
        learns = any(ctx.needs_input_grad[count : 2 * count])
        of_both, of_weights = backward(cotangents, both, weights, learns, cos, sin, layout, norm, row)
        return *of_both, *of_weights, *options


_apply_norm = plain_apply(_NormRotate)


@torch.library.custom_op("ropewalk::norm_rotate", mutates_args=())
def _norm_rotate_op(
    both: Sequence[Tensor],
    factors: Sequence[Tensor],
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
    start: int,
    seq_dim: int,
    backend: str,
    eps: float,
    rounding: int,
) -> list[Tensor]:
    layout, norm = Layout(interleaved, start, seq_dim), Norm(eps, False, rounding)
    return list(registered(backend).operations["norm_rotate"].run(both, factors, cos, sin, layout, norm, 0))


@_norm_rotate_op.register_fake
def _(both: Sequence[Tensor], *options: Any) -> list[Tensor]:
    return [empty_like(x) for x in both]


def _save(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    both, factors, cos, sin, *ctx.options = inputs
    ctx.save_for_backward(*both, *factors, cos, sin)


def _backward(ctx: Any, cotangents: list[Tensor]) -> tuple[Any, ...]:
    *saved, cos, sin = ctx.saved_tensors
    *options, _ = ctx.options
    grads = torch.ops.ropewalk.norm_rotate_backward(cotangents, saved[:2], saved[2:], cos, sin, *options)
    return grads[:2], grads[2:], *[None] * 8


_norm_rotate_op.register_autograd(_backward, setup_context=_save)


@torch.library.custom_op("ropewalk::norm_rotate_backward", mutates_args=())
def _norm_rotate_backward_op(
    cotangents: Sequence[Tensor],
    both: Sequence[Tensor],
    factors: Sequence[Tensor],
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
    start: int,
    seq_dim: int,
    backend: str,
    eps: float,
) -> list[Tensor]:
    layout, norm = Layout(interleaved, start, seq_dim), Norm(eps)
    backward = registered(backend).operations["norm_rotate"].backward
    if backward is not None:
        of_both, of_factors = backward(cotangents, both, factors, True, cos, sin, layout, norm, 0)
    else:
        back = [rotate_traceable(g.to(cos.dtype), cos, sin, layout, conjugate=True) for g in cotangents]
        pairs = [norm_backward(g, x, w, eps) for g, x, w in zip(back, both, factors, strict=True)]
        of_both, of_factors = zip(*pairs, strict=True)
    gradients = [_with_strides_like(x, gradient) for x, gradient in zip(both, of_both, strict=True)]
    return [*gradients, *of_factors]


def _with_strides_like(x: Tensor, gradient: Tensor) -> Tensor:
    """Return a gradient with the strides of `empty_like(x)`, which the fake kernel declares."""
    if gradient.stride() == empty_like(x, device="meta").stride():
        return gradient
    return empty_like(x).copy_(gradient)


@_norm_rotate_backward_op.register_fake
def _(cotangents: Sequence[Tensor], both: Sequence[Tensor], factors: Sequence[Tensor], *options: Any) -> list[Tensor]:
    return [empty_like(x) for x in (*both, *factors)]
