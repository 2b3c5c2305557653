"""The rotation by the backend that `dispatch` chooses. Its backward is the rotation by the opposite angles."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ropewalk.kernels.backend import Choice, candidates, registered
from ropewalk.kernels.constructors import empty_like
from ropewalk.kernels.rotate.torch import rotate_traceable
from ropewalk.kernels.signature import are_plain
from ropewalk.kernels.torch_internals import is_plain, plain_apply
from ropewalk.kernels.types import Layout, RopeNumbers, Shortcut
from ropewalk.ops.dispatch import choose, with_shortcut

__all__ = ["by_formula", "rotate", "rotation_in_place", "rows_for", "shortcut_of"]


def rotate(
    q: Tensor,
    k: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    layout: Layout,
    *,
    row: int = 0,
    conjugate: bool = False,
    owned: bool = False,
    backend: str | None = None,
) -> tuple[Tensor, ...]:
    """Return rotated q, and k unless it is None. All derivatives of torch are supported, in all tensors.

    Args:
        q: Queries, or any tensor.
        k: Keys, or None.
        cos: As `cos_sin` returns it.
        sin: As `cos_sin` returns it.
        layout: Pairing, first rotated feature, and dimension of the sequence.
        row: Row of cos and sin that belongs to the first token.
        conjugate: Whether to rotate by the opposite angles.
        owned: Whether nobody else can write to cos and sin. A graph then keeps them without saving them.
        backend: Name of the forced backend, or None.

    Raises:
        RopewalkError: If the forced backend does not support the call.

    >>> quarter = torch.zeros(1, 1), torch.ones(1, 1)
    >>> rotate(torch.tensor([[1.0, 0.0]]), None, *quarter, Layout(True, 0, -2))[0].tolist()
    [[0.0, 1.0]]
    """
    grad = torch.is_grad_enabled()
    learned = grad and (cos.requires_grad or sin.requires_grad)
    choice = choose("rotate", backend, (q, k, layout), (q, k, cos, sin), table_gradient=learned)
    if choice.path == "exported" or (choice.path == "kernel" and not grad):
        return choice.operation.run(q, k, cos, sin, layout, row, conjugate)
    if choice.path == "formula":
        both = (q,) if k is None else (q, k)
        return tuple(rotate_traceable(x, cos, sin, layout, row, conjugate) for x in both)
    if choice.path == "op":
        tables = rows_for(cos, row, q, layout), rows_for(sin, row, q, layout)
        return _by_op(q, k, *tables, layout, conjugate, choice.backend)
    if learned:
        return _RotateLearned.apply(q, k, cos, sin, layout, choice, row, conjugate)  # pyright: ignore[reportReturnType]
    return _by_kernel(choice, q, k, cos, sin, layout, row, conjugate, owned)


def _by_kernel(
    choice: Choice,
    q: Tensor,
    k: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    layout: Layout,
    row: int,
    conjugate: bool = False,
    owned: bool = False,
) -> tuple[Tensor, ...]:
    """Rotate plain tensors in an eager call by the kernel of a backend. cos and sin get no gradient."""
    if torch.is_grad_enabled() and (q.requires_grad or (k is not None and k.requires_grad)):
        if k is not None and q.requires_grad != k.requires_grad:
            # One Function for both would add the tensor that needs no gradient to the graph.
            return tuple(_by_kernel(choice, x, None, cos, sin, layout, row, conjugate, owned)[0] for x in (q, k))
        return _apply_rotation(q, k, None, (cos, sin, owned, layout, choice, row, conjugate))
    return choice.operation.run(q, k, cos, sin, layout, row, conjugate)


# cos and sin of a rotation of plain tensors, whether nobody else can write to them, the layout, the choice, the row,
# and whether the angles are negated.
_How = tuple[Tensor, Tensor, bool, Layout, Choice, int, bool]


def _by_op(
    q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, layout: Layout, conjugate: bool, backend: str
) -> tuple[Tensor, ...]:
    """Rotate by a library op, for torch.compile."""
    both = [q] if k is None else [q, k]
    options = cos, sin, layout.interleaved, layout.start, layout.seq_dim, backend, conjugate
    if torch.is_grad_enabled() and k is not None and q.requires_grad != k.requires_grad:
        # One op for both would add the tensor that needs no gradient to the graph.
        return tuple(torch.ops.ropewalk.rotate([x], *options)[0] for x in both)
    return tuple(torch.ops.ropewalk.rotate(both, *options))


def rows_for(table: Tensor, row: int, x: Tensor, layout: Layout) -> Tensor:
    """Return the rows of cos or sin for the tokens of x, from `row` on. Library ops receive only these rows.

    >>> rows_for(torch.arange(4.0).view(4, 1), 1, torch.ones(2, 6), Layout(True, 0, -2)).flatten().tolist()
    [1.0, 2.0]
    """
    seq = x.shape[layout.seq_dim]
    return table.narrow(-2, row, seq) if row or table.shape[-2] != seq else table


def shortcut_of(numbers: RopeNumbers, device: torch.device, backend: str | None) -> Shortcut | None:
    """Return the shortcut for the calls of a rope on a device; None if its backend has none there.

    Args:
        numbers: The rope. `with_graph` and `from_positions` are set here.
        device: Device of the calls.
        backend: Name of the forced backend, or None.

    >>> theta, one = torch.ones(1, dtype=torch.float64), torch.ones((), dtype=torch.float64)
    >>> numbers = RopeNumbers(2, Layout(True, 0, -2), theta, None, one, {}, None)
    >>> shortcut_of(numbers, torch.device("cpu"), "torch") is None
    True
    """
    choice = with_shortcut("rotate", device, backend)
    if choice is None or choice.operation.shortcut is None:
        return None
    layout = numbers.layout

    def with_graph(
        q: Tensor, k: Tensor | None, rotated: tuple[Tensor, ...], cos: Tensor, sin: Tensor, row: int, owned: bool
    ) -> tuple[Tensor, ...]:
        return _apply_rotation(q, k, rotated, (cos, sin, owned, layout, choice, row, False))

    first = next(iter(candidates("cos_sin", backend, device.type)), None)
    exact = numbers.inv_freq.dtype == numbers.amplitude.dtype == torch.float64
    from_positions = exact and first is not None and first.backend == choice.backend
    return choice.operation.shortcut(numbers._replace(with_graph=with_graph, from_positions=from_positions))


def rotation_in_place(
    q: Tensor,
    k: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    layout: Layout,
    *,
    row: int = 0,
    backend: str | None = None,
) -> Callable[[], None]:
    """Return a function that rotates q and k in place. All errors are raised before the function is returned.

    Arguments are those of `rotate`.

    >>> x = torch.tensor([[1.0, 0.0]])
    >>> write = rotation_in_place(x, None, torch.zeros(1, 1), torch.ones(1, 1), Layout(True, 0, -2))
    >>> before = x.tolist()
    >>> write()
    >>> before, x.tolist()
    ([[1.0, 0.0]], [[0.0, 1.0]])
    """
    both = (q,) if k is None else (q, k)
    needs_graph = torch.is_grad_enabled() and any(x.requires_grad for x in (*both, cos, sin))
    choice = None if needs_graph else choose("rotate", backend, (q, k, layout), (q, k, cos, sin))
    if choice is not None and choice.path == "kernel" and choice.operation.in_place:
        run = choice.operation.run

        def write() -> None:
            run(q, k, cos, sin, layout, row, in_place=True)
            for x in both:
                # Autograd must detect that x has changed since it was saved for a backward.
                if not x.is_inference():
                    torch.autograd.graph.increment_version(x)

    else:
        rotated = rotate(q, k, cos, sin, layout, row=row, backend=backend)

        def write() -> None:
            for target, source in zip(both, rotated, strict=True):
                target.copy_(source)

    return write


class _Rotate(torch.autograd.Function):
    """Rotation by the kernel of a backend, without gradients of cos and sin.

    `rotated` are the results if they were already computed. A shortcut computes them, and they only get their graph.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor | None, rotated: tuple[Tensor, ...] | None, how: _How
    ) -> tuple[Tensor, ...]:
        cos, sin, owned, layout, choice, row, conjugate = how
        ctx.set_materialize_grads(False)
        if not owned:
            # Autograd must detect if they are written before the backward.
            ctx.save_for_backward(cos, sin)
        results = rotated or choice.operation.run(q, k, cos, sin, layout, row, conjugate)
        strides = tuple([y.stride() for y in results]) if choice.operation.strides else None
        ctx.how = (cos, sin) if owned else None, layout, choice, row, conjugate, strides
        return results

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
        tables, layout, choice, row, conjugate, strides = ctx.how
        cos, sin = tables or ctx.saved_tensors
        if strides is not None and len(cotangents) == 2 and not torch.is_grad_enabled():
            # The common case first: this adds to the host time of every training step.
            q, k = cotangents
            if q is not None and k is not None and are_plain(q, k):
                q, k = choice.operation.run(q, k, cos, sin, layout, row, not conjugate, strides=strides)
                return q, k, None, None
        grads = _rotated_back(cotangents, cos, sin, layout, choice, row, conjugate, strides)
        return (*grads, *[None] * (4 - len(grads)))


_apply_rotation = plain_apply(_Rotate)


def _rotated_back(
    cotangents: Sequence[Tensor | None],
    cos: Tensor,
    sin: Tensor,
    layout: Layout,
    choice: Choice,
    row: int,
    conjugate: bool,
    strides: tuple[tuple[int, ...], ...] | None,
) -> list[Tensor | None]:
    """Return the cotangents of a rotation, rotated by the opposite angles, with the strides of the rotated tensors.

    These are the strides that autograd expects when it adds gradients, or multiplies them with a weight. They are None
    if the backend creates its results itself.
    """
    present = [g for g in cotangents if g is not None]
    if not present:
        return [None for _ in cotangents]
    q, k = present[0], present[1] if len(present) == 2 else None
    if not are_plain(q, k):
        # For example batched cotangents, which only the formula supports, whichever backend was forced.
        rotated = rotate(q, k, cos, sin, layout, row=row, conjugate=not conjugate)
    elif strides is not None and not torch.is_grad_enabled():
        if len(present) < len(cotangents):
            strides = tuple(stride for g, stride in zip(cotangents, strides, strict=True) if g is not None)
        rotated = choice.operation.run(q, k, cos, sin, layout, row, not conjugate, strides=strides)
    else:
        rotated = _by_kernel(choice, q, k, cos, sin, layout, row, not conjugate)
    if len(present) == len(cotangents):
        return list(rotated)
    back = iter(rotated)
    return [None if g is None else next(back) for g in cotangents]


def by_formula(
    function: Callable[..., Sequence[Tensor]], inputs: Sequence[Tensor | None], cotangents: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """Return the gradients of a function by differentiable operations.

    Args:
        function: Function of `inputs` that returns a sequence of tensors.
        inputs: Arguments of the function. The gradient of each is separate, even if a tensor is passed twice.
        cotangents: One cotangent per result, or None.

    Returns:
        One gradient per input, or None if it needs none.

    >>> x = torch.tensor(3.0, requires_grad=True)
    >>> by_formula(lambda a, b: [a * b], [x, x], [torch.tensor(1.0)])[0].item()  # of a only, although b is x too
    3.0
    """
    differentiable = torch.is_grad_enabled()
    with torch.enable_grad():
        # One alias per argument: tensors that are passed twice, or depend on each other, get separate gradients.
        aliases = [None if x is None else x.view_as(x) for x in inputs]
        results = function(*aliases)
    present = [(y, g) for y, g in zip(results, cotangents, strict=True) if g is not None]
    wanted = [x for x in aliases if x is not None and x.requires_grad]
    outputs, seeds = zip(*present, strict=True)
    gradients = iter(torch.autograd.grad(outputs, wanted, seeds, create_graph=differentiable, allow_unused=True))
    return [next(gradients) if x is not None and x.requires_grad else None for x in aliases]


class _RotateLearned(torch.autograd.Function):
    """Rotation with gradients of cos and sin, by a backend that supports them."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, ...]:
        q, k, cos, sin, layout, choice, row, conjugate = inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, cos, sin)
        rotated = choice.operation.run(q, k, cos, sin, layout, row, conjugate)
        ctx.options = layout, choice, row, conjugate, tuple(y.stride() for y in rotated)
        return rotated

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, cos, sin = ctx.saved_tensors
        layout, choice, row, conjugate, strides = ctx.options
        both = [q] if k is None else [q, k]
        missing, options = [None] * (2 - len(both)), [None] * 4
        if all(g is None for g in cotangents):
            return (*[None] * 4, *options)
        if torch.is_grad_enabled() or not is_plain(*cotangents, cos, sin):
            # For higher derivatives, which the formula supports.

            def formula(*inputs: Tensor) -> list[Tensor]:
                *tensors, c, s = inputs
                return [rotate_traceable(x, c, s, layout, row, conjugate) for x in tensors]

            grads = by_formula(formula, [*both, cos, sin], cotangents)
            return (*grads[: len(both)], *missing, *grads[len(both) :], *options)
        wanted = [g if needed else None for g, needed in zip(cotangents, ctx.needs_input_grad, strict=False)]
        back = _rotated_back(wanted, cos, sin, layout, choice, row, conjugate, strides)
        tables = choice.operation.table_gradient(both, cotangents, cos, layout, row, conjugate)
        return (*back, *missing, *tables, *options)


@torch.library.custom_op("ropewalk::rotate", mutates_args=())
def _rotate_op(
    both: Sequence[Tensor],
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
    start: int,
    seq_dim: int,
    backend: str,
    conjugate: bool,
) -> list[Tensor]:
    layout = Layout(interleaved, start, seq_dim)
    q, k = (both[0], None) if len(both) == 1 else both
    return list(registered(backend).operations["rotate"].run(q, k, cos, sin, layout, 0, conjugate))


@_rotate_op.register_fake
def _(both: Sequence[Tensor], cos: Tensor, sin: Tensor, *options: Any) -> list[Tensor]:
    return [empty_like(x) for x in both]


def _save_rotation(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    _, cos, sin, *ctx.options = inputs
    ctx.save_for_backward(cos, sin)


def _rotation_backward(ctx: Any, cotangents: list[Tensor]) -> tuple[Any, ...]:
    *options, conjugate = ctx.options
    back = torch.ops.ropewalk.rotate(cotangents, *ctx.saved_tensors, *options, not conjugate)
    return back, *[None] * 7


_rotate_op.register_autograd(_rotation_backward, setup_context=_save_rotation)
