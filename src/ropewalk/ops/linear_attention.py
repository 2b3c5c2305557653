"""Linear attention by the backend that `dispatch` chooses, with gradients."""

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from ropewalk.errors import RopewalkError
from ropewalk.kernels.backend import Choice, Operation, registered
from ropewalk.kernels.constructors import empty_like, new_empty, zeros_like
from ropewalk.kernels.linear.torch import linear_attention as linear_attention_formula
from ropewalk.kernels.precision import working_dtype
from ropewalk.kernels.signature import are_plain
from ropewalk.kernels.torch_internals import is_plain, is_traced, plain_apply
from ropewalk.kernels.types import (
    NO_WEIGHTING,
    FeatureMapName,
    Layout,
    LinearAgain,
    Side,
    Sums,
    Tables,
    Weighting,
)
from ropewalk.ops.dispatch import choose
from ropewalk.ops.rotation import rotate

__all__ = ["Repeated", "chosen", "linear_attention"]


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
        weighting: Factors on the terms of both sums.
        backend: Name of the forced backend, or None.

    Returns:
        The output [batch, heads, seq, v_dim] in the dtype of v, and the sums, with one row per packed sequence. With a
        band, the sums after a call with queries have no meaning.

    Raises:
        RopewalkError: If the forced backend does not support the call.

    >>> x, v = torch.zeros(1, 1, 2, 2), torch.tensor([[[[1.0], [3.0]]]])
    >>> out, _ = linear_attention(Side(x, "elu"), Side(x, "elu"), v, None, Layout(True, 0, -2), causal=True)
    >>> out.flatten().tolist()
    [1.0, 2.0]
    """
    decay, band, positions, _, _ = weighting
    q_cos, q_sin, q_row = q.tables or _NO_TABLES
    k_cos, k_sin, k_row = k.tables or _NO_TABLES
    # Everything here adds to the latency of a call: no tensor is inspected twice, and there are no generators.
    tensors = [q.x, k.x, v, q_cos, q_sin, cu_seqlens, decay, band, positions]
    if k_cos is not q_cos or k_sin is not q_sin:
        tensors += [k_cos, k_sin]
    if before is not None:
        tensors += [*before]  # a list: Dynamo of torch 2.11 does not add a NamedTuple to one
    grad = torch.is_grad_enabled()
    learned = grad and (
        (q_cos is not None and (q_cos.requires_grad or cast(Tensor, q_sin).requires_grad))
        or (k_cos is not None and (k_cos.requires_grad or cast(Tensor, k_sin).requires_grad))
    )
    call = q, k, v, layout, weighting, causal
    requested = backend
    if before is not None and (band is not None or (decay is not None and not causal)):
        requested = _without_kernels(backend, "a bias" if decay is None else "a decay in both directions")
    choice = choose("linear_attention", requested, call, tensors, table_gradient=learned)
    if choice.path == "formula":
        rotate_features = _rotate_by_formula if backend == "torch" else _rotate_features
        return linear_attention_formula(q, k, v, before, layout, causal, cu_seqlens, rotate_features, weighting)
    flat = None if before is None else before.flat()
    if choice.path == "op":
        inputs = q.x, k.x, v, q_cos, q_sin, k_cos, k_sin, flat, cu_seqlens
        options = q_row, k_row, q.map, k.map, layout.interleaved, layout.start, causal, choice.backend
        out, total, *_ = torch.ops.ropewalk.linear_attention(*inputs, *options, *weighting)
        return out, Sums.from_flat(total, weighting.state_heads(k.x.shape[1]), q.x.shape[-1], v.shape[-1])
    if grad and (
        q.x.requires_grad
        or k.x.requires_grad
        or v.requires_grad
        or (flat is not None and flat.requires_grad)
        or (decay is not None and decay.requires_grad)
        or (band is not None and band.requires_grad)
    ):
        others = q_cos, q_sin, k_cos, k_sin, cu_seqlens, positions
        out, total = _apply(q.x, k.x, v, flat, decay, band, others, call, (q_row, k_row), choice.operation)
        return out, Sums.from_flat(total, weighting.state_heads(k.x.shape[1]), q.x.shape[-1], v.shape[-1])
    out, total, *_ = _run(choice.operation, q, k, v, flat, layout, causal, cu_seqlens, weighting)
    return out, _sums_in(total, call)


def chosen(q: Side, k: Side, v: Tensor, layout: Layout, weighting: Weighting, *, causal: bool) -> Choice:
    """Return how a call without initial sums is computed, for calls that repeat it. Arguments as in `linear_attention`.

    >>> x = torch.zeros(1, 1, 2, 2)
    >>> chosen(Side(x, "elu"), Side(x, "elu"), x, Layout(True, 0, -2), NO_WEIGHTING, causal=True).path
    'formula'
    """
    tables = [table for side in (q, k) for table in (side.tables or _NO_TABLES)[:2]]
    learned = torch.is_grad_enabled() and any(table is not None and table.requires_grad for table in tables)
    tensors = [q.x, k.x, v, *tables, weighting.decay, weighting.band]
    return choose("linear_attention", None, (q, k, v, layout, weighting, causal), tensors, table_gradient=learned)


class Repeated(NamedTuple):
    """A causal call without initial sums, decay and bias, for other numbers.

    Args:
        choice: How it is computed, from `chosen`.
        maps: Feature maps of queries and keys.
        tables: Tables of both, or None.
        layout: Layout of the rotation.
        weighting: The weighting.
        again: What `Operation.again` returned, or None.

    >>> x, side = torch.zeros(1, 1, 2, 2), Side(torch.zeros(1, 1, 2, 2), "elu")
    >>> twice = Choice("kernel", "mine", Operation(run=lambda q, k, v, *rest: (2 * v, v)))
    >>> call = Repeated(twice, ("elu", "elu"), None, Layout(True, 0, -2), NO_WEIGHTING, again=None)
    >>> call(x, x, x + 1, (0, 0, 0)).flatten().tolist()
    [2.0, 2.0, 2.0, 2.0]
    """

    choice: Choice
    maps: tuple[FeatureMapName, FeatureMapName]
    tables: Tables | None
    layout: Layout
    weighting: Weighting
    again: LinearAgain | None

    @staticmethod
    def of(choice: Choice, q: Side, k: Side, v: Tensor, layout: Layout, weighting: Weighting) -> "Repeated":
        """Return a causal call whose queries and keys have the same tables, for other numbers."""
        again = choice.operation.again
        found = None if again is None else again(q, k, v, layout, weighting, causal=True)
        return Repeated(choice, (q.map, k.map), q.tables, layout, weighting, found)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, at: tuple[int, ...]) -> Tensor:
        """Return the output for tensors with the signature of the first ones, at these addresses."""
        graph = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
        again = self.again
        if again is not None:
            return _apply_again(q, k, v, (self, at)) if graph else again.forward(q, k, v, at)[0]
        q_side, k_side = Side(q, self.maps[0], None, self.tables), Side(k, self.maps[1], None, self.tables)
        if graph:
            cos, sin, row = self.tables or _NO_TABLES
            others, call = (cos, sin, cos, sin, None, None), (q_side, k_side, v, self.layout, self.weighting, True)
            return _apply(q, k, v, None, None, None, others, call, (row, row), self.choice.operation)[0]
        return _run(self.choice.operation, q_side, k_side, v, None, self.layout, True, None, self.weighting)[0]


def _without_kernels(backend: str | None, what: str) -> str:
    """Return "torch" if the backend was not forced: no kernel supports `what`, a band or two directions, after sums.

    Keys within the band are not part of the sums, and which ones they are depends on positions.
    """
    if backend in (None, "torch"):
        return "torch"
    raise RopewalkError(
        asked=f"backend={backend!r}",
        expected="a call that it supports",
        got=f"{what} with initial sums",
        do="leave backend out, and each call uses the fastest path that supports it",
    )


def _sums_in(total: Tensor, call: tuple[Side, Side, Tensor, Layout, Weighting, bool]) -> Sums:
    """Return what `Sums.from_flat` returns, in less time, for plain tensors without a graph."""
    q, k, v, _, weighting, _ = call
    heads, width, v_dim = weighting.state_heads(k.x.shape[1]), q.x.shape[-1], v.shape[-1]
    rows, size = total.shape[0] // heads, width * (v_dim + 1)
    above = total.as_strided((rows, heads, width, v_dim), (heads * size, size, v_dim, 1))
    return Sums(above, total.as_strided((rows, heads, width), (heads * size, size, 1), width * v_dim))


_NO_TABLES = None, None, 0


def _rotate_features(x: Tensor, tables: Tables, layout: Layout) -> Tensor:
    return rotate(x, None, tables.cos, tables.sin, layout, row=tables.row)[0]


def _rotate_by_formula(x: Tensor, tables: Tables, layout: Layout) -> Tensor:
    return rotate(x, None, tables.cos, tables.sin, layout, row=tables.row, backend="torch")[0]


def _run(operation: Operation, *arguments: Any) -> Sequence[Tensor]:
    """Call `run` of an operation. The last argument is the weighting, which not all operations accept."""
    return operation.run(*(arguments if operation.weights else arguments[:-1]))


def _gradients(operation: Operation, learned: bool, *arguments: Any) -> list[Tensor | None]:
    """Return the gradients of q, k, v, initial sums and band by `backward` of an operation.

    The last argument is the weighting. The gradient of the band is None unless it is `learned`.
    """
    weights = (learned,) if operation.weights else ()
    backward: Any = operation.backward
    gradients = [*backward(*(arguments if weights else arguments[:-1]), *weights)]
    return gradients if weights else [*gradients, None]


class _Call(NamedTuple):
    """The inputs of a call: six that can have gradients, and the rest."""

    q: Tensor
    k: Tensor
    v: Tensor
    before: Tensor | None
    decay: Tensor | None
    band: Tensor | None
    q_cos: Tensor | None
    q_sin: Tensor | None
    k_cos: Tensor | None
    k_sin: Tensor | None
    cu_seqlens: Tensor | None
    positions: Tensor | None
    rows: tuple[int, int]
    maps: tuple[FeatureMapName, FeatureMapName]
    layout: Layout
    causal: bool
    normalize: bool
    scale: float

    @property
    def weighting(self) -> Weighting:
        return Weighting(self.decay, self.band, self.positions, self.normalize, self.scale)

    @property
    def heads(self) -> int:
        return self.weighting.state_heads(self.k.shape[1])

    @property
    def sides(self) -> tuple[Side, Side]:
        q_tables = None if self.q_cos is None or self.q_sin is None else Tables(self.q_cos, self.q_sin, self.rows[0])
        k_tables = None if self.k_cos is None or self.k_sin is None else Tables(self.k_cos, self.k_sin, self.rows[1])
        return Side(self.q, self.maps[0], None, q_tables), Side(self.k, self.maps[1], None, k_tables)

    def gradients(
        self,
        operation: Operation,
        of_out: Tensor,
        of_total: Tensor | None,
        results: Sequence[Tensor | None],
        *,
        learned: bool,
    ) -> list[Tensor | None]:
        """Return the gradients of q, k, v, initial sums and band by the kernels of a backend."""
        options = self.layout, self.causal, self.cu_seqlens, self.weighting
        return _gradients(operation, learned, of_out, of_total, *self.sides, self.v, results, *options)

    def formula_gradients(self, of_out: Tensor, of_total: Tensor | None, needs: Sequence[bool]) -> list[Tensor | None]:
        """Return the gradients of the first six inputs by the formula, which is differentiable again."""
        again = torch.is_grad_enabled()
        with torch.enable_grad():
            # One alias per argument: tensors that are passed twice get separate gradients.
            aliases: list[Any] = [None if x is None else x.view_as(x) for x in self[:6]]
            call = self._replace(**dict(zip(self._fields[:6], aliases, strict=True)))
            before, width, v_dim = call.before, call.q.shape[-1], call.v.shape[-1]
            sums = None if before is None else Sums.from_flat(before, call.heads, width, v_dim)
            out, after = linear_attention_formula(
                *call.sides, call.v, sums, call.layout, call.causal, call.cu_seqlens, _rotate_features, call.weighting
            )
            outputs, cotangents = [out], [of_out]
            if of_total is not None:
                outputs.append(after.flat())
                cotangents.append(of_total)
            leaves = [x for x, need in zip(aliases, needs, strict=True) if need]
            gradients = iter(torch.autograd.grad(outputs, leaves, cotangents, create_graph=again, allow_unused=True))
        return [next(gradients) if need else None for need in needs]

    def decay_gradient(self, of_out: Tensor, of_total: Tensor | None) -> Tensor | None:
        """Return the gradient of the decay by the formula.

        From rows, as kernels would compute it, it is a difference of large sums, in which few digits are left.
        """
        return self.formula_gradients(of_out, of_total, (False, False, False, False, True, False))[4]


class _LinearAttention(torch.autograd.Function):
    """Linear attention by the kernels of a backend.

    Inputs: the first six of `_Call`, the six tensors after them, the arguments of `Operation.supports`, the rows of the
    first tokens in the tables, and the operation. Results: the outputs, and the sums after the last key in flat form.
    """

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
        *tensors, others, call, rows, operation = inputs
        q, k, v, layout, weighting, causal = call
        results = _run(operation, q, k, v, tensors[3], layout, causal, others[4], weighting)
        # Also what nobody else can write to: saved tensors are freed after the backward, attributes with the graph.
        ctx.save_for_backward(*tensors, *others, *results)
        ctx.options = rows, (q.map, k.map), layout, causal, weighting.normalize, weighting.scale
        ctx.operation = operation
        ctx.set_materialize_grads(False)
        return results[0], results[1]

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> tuple[Tensor | None, ...]:
        saved, needs, operation = ctx.saved_tensors, ctx.needs_input_grad[:6], ctx.operation
        call, (out, total, *more) = _Call(*saved[:12], *ctx.options), saved[12:]
        of_out, of_total = cotangents
        of_out = zeros_like(out) if of_out is None else of_out
        gradients = _gradients_of(call, operation, of_out, of_total, (out, total, *more), needs)
        return *gradients, *[None] * 4


class _Again(torch.autograd.Function):
    """A repeated call. Inputs: q, k, v, and a `Repeated` that has `again`, with the addresses of q, k and v."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, call: tuple[Repeated, tuple[int, ...]]) -> Tensor:
        ctx.repeated, at = call
        out, saved = ctx.repeated.again.forward(q, k, v, at)  # pyright: ignore[reportOptionalMemberAccess]
        ctx.save_for_backward(q, k, v, out, saved)
        return out

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> tuple[Tensor | None, ...]:
        (q, k, v, out, saved), repeated, (cotangent,) = ctx.saved_tensors, ctx.repeated, cotangents
        # Higher derivatives, transforms of functions and compilers need the formula.
        if not torch.is_grad_enabled() and are_plain():
            found = repeated.again.backward(cotangent, q, k, v, out, saved)
            if found is not None:
                return *found, None
        choice, maps, tables, layout, weighting, _ = repeated
        cos, sin, row = tables or _NO_TABLES
        call = _Call(
            q, k, v, None, None, None, cos, sin, cos, sin, None, None, (row, row), maps, layout, True,
            weighting.normalize, weighting.scale,
        )  # fmt: skip
        needs = *ctx.needs_input_grad[:3], False, False, False
        gradients = _gradients_of(call, choice.operation, cotangent, None, (out, None, saved), needs)
        return *gradients[:3], None


_apply, _apply_again = plain_apply(_LinearAttention), plain_apply(_Again)


def _gradients_of(
    call: _Call,
    operation: Operation,
    of_out: Tensor,
    of_total: Tensor | None,
    results: Sequence[Tensor | None],
    needs: Sequence[bool],
) -> list[Tensor | None]:
    """Return the gradients of the first six inputs, by the kernels of a backend if they can compute them."""
    plain = are_plain(of_out, of_total, *results, *cast(Sequence[Tensor | None], call[:12]))
    if operation.backward is None or torch.is_grad_enabled() or not plain:
        # For higher derivatives, and for backends without a backward: the formula supports all derivatives.
        return call.formula_gradients(of_out, of_total, needs)
    *four, of_band = call.gradients(operation, of_out, of_total, results, learned=needs[5])
    of_decay = call.decay_gradient(of_out, of_total) if needs[4] else None
    return _as_needed([*four, of_decay, of_band], call, needs)


def _as_needed(gradients: Sequence[Tensor | None], call: _Call, needs: Sequence[bool]) -> list[Tensor | None]:
    """Return None for gradients that are not needed, and those of decay and band in their dtypes."""
    *results, of_decay, of_band = [grad if need else None for grad, need in zip(gradients, needs, strict=True)]
    of_decay = None if of_decay is None or call.decay is None else of_decay.to(call.decay.dtype)
    of_band = None if of_band is None or call.band is None else of_band.to(call.band.dtype)
    return [*results, of_decay, of_band]


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
    decay: Tensor | None,
    band: Tensor | None,
    positions: Tensor | None,
    normalize: bool,
    scale: float,
) -> list[Tensor]:
    inputs = q, k, v, q_cos, q_sin, k_cos, k_sin, before, cu_seqlens
    options = q_row, k_row, q_map, k_map, interleaved, start, causal, backend
    call = _call_of(inputs, options, (decay, band, positions, normalize, scale))
    return [*_run(_operation(backend), *call.sides, v, before, call.layout, causal, cu_seqlens, call.weighting)]


def _call_of(inputs: Sequence[Any], options: Sequence[Any], weighting: Sequence[Any]) -> _Call:
    """Return the inputs of the library op."""
    q, k, v, q_cos, q_sin, k_cos, k_sin, before, cu_seqlens = inputs
    q_row, k_row, q_map, k_map, interleaved, start, causal, _ = options
    decay, band, positions, normalize, scale = weighting
    tensors = q, k, v, before, decay, band, q_cos, q_sin, k_cos, k_sin, cu_seqlens, positions
    return _Call(
        *tensors, (q_row, k_row), (q_map, k_map), Layout(interleaved, start, -2), causal, normalize, scale
    )  # fmt: skip


def _operation(backend: str) -> Operation:
    return registered(backend).operations["linear_attention"]


@_linear_attention_op.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> list[Tensor]:
    cu_seqlens, causal, backend, weighting = rest[5], rest[12], rest[13], Weighting(*rest[14:])
    rows = (len(v) if cu_seqlens is None else len(cu_seqlens) - 1) * weighting.state_heads(k.shape[1])
    saved = _operation(backend).empty_saved
    return [
        new_empty(v, (*q.shape[:3], v.shape[-1])),
        new_empty(v, (rows, q.shape[-1] * (v.shape[-1] + 1)), dtype=working_dtype(v)),
        *(() if saved is None else saved(q, k, v, cu_seqlens, causal, weighting)),
    ]


# Number of tensors at the start of the library op's arguments, and of all arguments before the weighting.
_TENSORS, _PLAIN = 9, 17


def _save(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    *tensors, ctx.normalize, ctx.scale = inputs[_PLAIN:]
    ctx.options = inputs[_TENSORS:_PLAIN]
    ctx.save_for_backward(*inputs[:_TENSORS], *tensors, *output)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, cotangents: list[Tensor | None]) -> tuple[Any, ...]:
    saved, count = ctx.saved_tensors, _TENSORS + 3
    inputs, results = saved[:_TENSORS], saved[count:]
    weighting = *saved[_TENSORS:count], ctx.normalize, ctx.scale
    of_out, of_total, *_ = cotangents
    of_out = zeros_like(results[0]) if of_out is None else of_out
    of_q, of_k, of_v, *_, of_before, _ = ctx.needs_input_grad[:_TENSORS]
    needs = of_q, of_k, of_v, of_before, *ctx.needs_input_grad[_PLAIN : _PLAIN + 2]
    call = _call_of(inputs, ctx.options, weighting)
    # Compilers do not differentiate twice.
    again = not is_traced(of_out) and (torch.is_grad_enabled() or not is_plain(of_out, of_total))
    if again or _operation(ctx.options[-1]).backward is None:
        grads = call.formula_gradients(of_out, of_total, needs)
    else:
        arguments = of_out, of_total, *inputs, list(results), *ctx.options, *weighting, needs[5]
        *four, of_band = [*torch.ops.ropewalk.linear_attention_backward(*arguments), None][:5]
        of_decay = call.decay_gradient(of_out, of_total) if needs[4] else None
        grads = _as_needed([*four, of_decay, of_band], call, needs)
    return *grads[:3], *[None] * 4, grads[3], *[None] * 9, *grads[4:], *[None] * 3


_linear_attention_op.register_autograd(_backward, setup_context=_save)


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
    decay: Tensor | None,
    band: Tensor | None,
    positions: Tensor | None,
    normalize: bool,
    scale: float,
    learned: bool,
) -> list[Tensor]:
    inputs = q, k, v, q_cos, q_sin, k_cos, k_sin, before, cu_seqlens
    options = q_row, k_row, q_map, k_map, interleaved, start, causal, backend
    call = _call_of(inputs, options, (decay, band, positions, normalize, scale))
    gradients = call.gradients(_operation(backend), of_out, of_total, results, learned=learned)
    of_q, of_k, of_v, *others = (grad for grad in gradients if grad is not None)
    similar = (_with_strides_like(x, grad) for x, grad in ((q, of_q), (k, of_k), (v, of_v)))
    return [*similar, *(grad.contiguous() for grad in others)]


def _with_strides_like(x: Tensor, gradient: Tensor) -> Tensor:
    """Return a gradient with the strides of `empty_like(x)`, which the fake kernel declares."""
    if gradient.stride() == empty_like(x, device="meta").stride():
        return gradient
    return empty_like(x).copy_(gradient)


@_linear_attention_backward_op.register_fake
def _(of_out: Tensor, of_total: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> list[Tensor]:
    (_, total, *_), band, learned = rest[6], rest[16], rest[-1]
    of_band = [new_empty(band, band.shape, dtype=torch.float32)] if learned and band is not None else []
    return [*(empty_like(x) for x in (q, k, v)), empty_like(total), *of_band]
