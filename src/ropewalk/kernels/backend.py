"""Backends as values, and their registry.

A backend has a name, the reason if it is not available, and one `Operation` per operation that it supports. Arguments
and results of `Operation.run`, for plain tensors in an eager call:

- cos_sin: (positions, inv_freq, radix_table, amplitude, dtype, axes) -> (cos, sin)
- rotate: (q, k or None, cos, sin, layout, row, conjugate) -> (q,) or (q, k)
- norm_rotate: (tensors, weights, cos, sin, layout, norm, row) -> a list of tensors
- linear_attention: (q_side, k_side, v, flat sums or None, layout, causal, cu_seqlens) -> (out, flat sums, *saved), with
  one more argument, a `Weighting`, if the operation has `weights`.

cos and sin are [rows, pairs], [batch, rows, pairs] or [1 or batch, heads, rows, pairs]. Row `row` belongs to the first
token. `types.line_up` shapes them to broadcast against q and k. `layout` specifies which features are rotated, and
which dimension is the sequence. Results are new tensors with the dtype of the inputs and the strides of
`torch.empty_like`, in a tuple or list even if there is only one.

`angles/`, `rotate/`, `qk_norm/` and `linear/` contain the functions of the built-in backends, `backends/` the values. A
new backend is one file like those in `backends/`, and one line in its `__init__.py`.
"""

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from torch import Tensor

from ropewalk.errors import RopewalkError, require_choice, shown
from ropewalk.kernels.types import Layout, LinearAgain, RopeNumbers, Shortcut, Side, Weighting

__all__ = [
    "OPERATIONS",
    "Backend",
    "Choice",
    "Operation",
    "OperationName",
    "Registry",
    "backends",
    "candidates",
    "current",
    "get",
    "linear_step_on",
    "register",
    "registered",
]

OperationName = Literal["cos_sin", "rotate", "norm_rotate", "linear_attention"]
OPERATIONS: tuple[OperationName, ...] = ("cos_sin", "rotate", "norm_rotate", "linear_attention")


@dataclass(frozen=True)
class Operation:
    """One operation of a backend: the function that computes it, and the calls that it supports.

    Below, `call` stands for (q, k, layout) of rotate and norm_rotate, (q_side, k_side, v, layout, weighting, causal) of
    linear_attention, and all arguments of cos_sin. Functions of `call` must be traceable by torch.compile: they contain
    no f-strings and do not read values of tensors.

    Args:
        run: Computes the operation. See the docstring of the module.
        supports: (*call) -> None, or a description of what the backend does not support. Default: all calls are
            supported.
        worthwhile: (*call, compiling) -> False if another path is faster. Ignored if the backend was forced.
        backward: Computes the gradients in one call. For norm_rotate: (cotangents, tensors, weights, whether weights
            need gradients, cos, sin, layout, norm, row) -> (gradients, weight gradients). For linear_attention:
            (cotangent of out, cotangent of the sums or None, q_side, k_side, v, results of `run`, layout, causal,
            cu_seqlens) -> gradients of q, k, v and of the initial sums. If the operation has `weights`, two more
            arguments, the `Weighting` and whether its tensors need gradients, and two more results: gradients of decay
            and band, each float32 or None. Default: gradients of the formula. rotate needs none: its backward is the
            rotation by the opposite angle.
        table_gradient: For rotate: (tensors, cotangents, cos, layout, row, conjugate) -> gradients of cos and sin.
        shortcut: For rotate and norm_rotate, for calls that are limited by host time: a function of `RopeNumbers` that
            returns a `Shortcut` for one rope.
        again: For linear_attention, for calls that are limited by host time: (q, k, v, layout, weighting, causal) ->
            the call for other numbers, or None.
        empty_saved: For linear_attention: (q, k, v, cu_seqlens, causal, weighting) -> tensors shaped as those that
            `run` saves, for fake tensors.
        weights: For linear_attention: whether `run` and `backward` accept a `Weighting`. Otherwise the backend does not
            support calls with a decay, a bias or normalize=False.
        joint: For norm_rotate: whether `backward` computes two tensors in one pass. Otherwise each tensor has its own
            autograd node.
        in_place: Whether the `run` of rotate accepts in_place=True.
        strides: Whether the `run` of rotate accepts strides=(...), the strides of its results.
        opaque: Whether torch.compile gets a library op that runs it. Otherwise compiled code does not use it.
        exported: Whether torch.export records the operations of `run`, if no backend was forced. Every call must then
            be supported.
        is_formula: Whether `run` is the formula itself, which needs no autograd.Function. Only for "torch".

    >>> Operation(run=print).opaque
    True
    """

    run: Callable[..., Any]
    supports: Callable[..., str | None] | None = None
    worthwhile: Callable[..., bool] | None = None
    backward: Callable[..., Any] | None = None
    table_gradient: Callable[..., Any] | None = None
    shortcut: Callable[[RopeNumbers], Shortcut] | None = None
    again: Callable[..., LinearAgain | None] | None = None
    empty_saved: Callable[..., Any] | None = None
    weights: bool = False
    joint: bool = False
    in_place: bool = False
    strides: bool = False
    opaque: bool = True
    exported: bool = False
    is_formula: bool = False


def _present() -> str | None:
    return None


class Choice(NamedTuple):
    """How a call is computed: the path, the name of the backend and its operation. `ops.dispatch` chooses it.

    >>> Choice("kernel", "mine", Operation(run=print)).backend
    'mine'
    """

    path: Literal["kernel", "op", "formula", "exported"]
    backend: str
    operation: Operation


@dataclass(frozen=True)
class Backend:
    """A backend: its name, its operations, and where it is available.

    Args:
        name: Name that users pass as backend=.
        operations: Operations by name.
        why_missing: Returns the reason if the backend is not available, or None. It is called when the backend is
            forced, and may inspect the machine.
        devices: Types of torch.device on which the backend is available for certain, and is chosen automatically. None
            means all devices.
        linear_step: One token of linear attention after a state, for calls that are limited by host time: (q, k, v,
            sums above, sums below, cos, sin, row, decay, layout, maps, normalize, scale) -> (out, new sums above, new
            sums below), or None if the call is unusual in any way. cos, sin and decay can be None.

    >>> Backend("mine", {"rotate": Operation(run=print)}).why_missing() is None
    True
    """

    name: str
    operations: Mapping[OperationName, Operation] = field(hash=False)
    why_missing: Callable[[], str | None] = _present
    devices: tuple[str, ...] | None = ()
    linear_step: Callable[..., tuple[Any, Any, Any] | None] | None = None


class Registry(NamedTuple):
    """The backends by name, preferred ones first, and the results of `candidates` for the most common devices.

    It is never modified. `register` replaces it, so a call in another thread sees either the old or the new registry.
    Caches that depend on it compare it by identity.

    >>> Registry({}, {}).backends
    {}
    """

    backends: dict[str, Backend]
    # Computed in advance: torch.compile would guard on a dict that grows with the calls.
    candidates: dict[str, tuple[Choice, ...]]


_DEVICES = ("cpu", "cuda")
_REGISTRY = Registry({}, {})

# Backends in the order of registration.
_REGISTERED: list[Backend] = []
_LOCK = threading.Lock()


def register(backend: Backend) -> Callable[[], None]:
    """Add a backend. It is preferred to all others, and hides a backend of the same name.

    Args:
        backend: The backend.

    Returns:
        A function that removes the backend again.

    Raises:
        RopewalkError: If it is not a Backend, or if its operations are not `Operation`s with names in `OPERATIONS`.

    >>> undo = register(Backend("mine", {"rotate": Operation(run=print)}))
    >>> backends()[0].name
    'mine'
    >>> undo()
    >>> "mine" in [backend.name for backend in backends()]
    False
    """
    if not isinstance(backend, Backend):
        raise RopewalkError(
            asked="register(backend)",
            expected="a Backend",
            got=shown(backend),
            do="pass Backend(name, operations)",
        )
    for name, operation in backend.operations.items():
        require_choice(name, OPERATIONS, asked=f"register(Backend({backend.name!r}, ...)): the name of an operation")
        if not isinstance(operation, Operation):
            raise RopewalkError(
                asked=f"register(Backend({backend.name!r}, ...)): the operation {name!r}",
                expected="an Operation",
                got=shown(operation),
                do=f"wrap the function: {{{name!r}: Operation(run=function)}}",
            )
    with _LOCK:
        _REGISTERED.append(backend)
        _replace()

    def undo() -> None:
        with _LOCK:
            indices = [i for i, other in enumerate(_REGISTERED) if other is backend]
            if indices:
                del _REGISTERED[indices[-1]]
                _replace()

    return undo


def _replace() -> None:
    """Rebuild the registry. Of several backends with the same name, the last one is used."""
    global _REGISTRY
    by_name: dict[str, Backend] = {}
    for backend in reversed(_REGISTERED):
        by_name.setdefault(backend.name, backend)
    choices = {
        f"{operation} {requested} {device}": _candidates(by_name, operation, requested, device)
        for operation in OPERATIONS
        for device in _DEVICES
        for requested in (None, *by_name)
    }
    _REGISTRY = Registry(by_name, choices)


def current() -> Registry:
    """Return the current registry. Each registration replaces it by a new object.

    >>> current() is current()
    True
    """
    return _REGISTRY


def backends() -> tuple[Backend, ...]:
    """Return all backends, preferred ones first.

    >>> all(isinstance(backend, Backend) for backend in backends())
    True
    """
    return tuple(_REGISTRY.backends.values())


def candidates(operation: OperationName, requested: str | None, device: str) -> tuple[Choice, ...]:
    """Return the kernels to try for an operation, in order.

    A requested backend is the only candidate. For cos_sin it is the first candidate, followed by the others.

    Args:
        operation: Name of the operation.
        requested: Name of the requested backend, or None.
        device: Type of device of the tensors.

    >>> [choice.backend for choice in candidates("rotate", None, "meta")]
    ['torch']
    """
    known = _REGISTRY.candidates.get(f"{operation} {requested} {device}")
    return _candidates(_REGISTRY.backends, operation, requested, device) if known is None else known


def _candidates(
    registry: dict[str, Backend], operation: OperationName, requested: str | None, device: str
) -> tuple[Choice, ...]:
    named = [backend for backend in registry.values() if backend.name == requested]
    others = [backend for backend in registry.values() if backend.devices is None or device in backend.devices]
    order = named if requested is not None and operation != "cos_sin" else [*named, *others]
    chosen = [(b.name, b.operations[operation]) for b in order if operation in b.operations]
    if operation == "linear_attention":
        chosen = [(name, o if o.weights else _without_weights(o)) for name, o in chosen]
    return tuple(Choice("kernel", name, o) for name, o in chosen)


def _without_weights(operation: Operation) -> Operation:
    """Return an operation that supports only linear attention without weights."""
    supported = operation.supports

    def supports(q: Side, k: Side, v: Tensor, layout: Layout, weighting: Weighting, causal: bool) -> str | None:
        if not weighting.is_plain():
            return "a decay, a bias, or normalize=False"
        return None if supported is None else supported(q, k, v, layout, weighting, causal)

    return replace(operation, supports=supports)


def linear_step_on(device: str) -> Callable[..., tuple[Any, Any, Any] | None] | None:
    """Return the `linear_step` of the preferred backend for linear attention on a type of device, or None.

    >>> linear_step_on("meta") is None
    True
    """
    for backend in _REGISTRY.backends.values():
        has_any = backend.linear_step is not None or "linear_attention" in backend.operations
        if has_any and (backend.devices is None or device in backend.devices):
            return backend.linear_step
    return None


def registered(name: str) -> Backend:
    """Return the backend with that name, which must be registered.

    >>> registered("torch").name
    'torch'
    """
    return _REGISTRY.backends[name]


def get(name: str | None) -> Backend | None:
    """Return the backend with that name, and None for None.

    Raises:
        RopewalkError: If there is no such backend, or if it is not available. The error contains the reason.

    >>> get("torch").name
    'torch'
    """
    if name is None:
        return None
    backend = _REGISTRY.backends[require_choice(name, _REGISTRY.backends, asked="backend=...")]
    reason = backend.why_missing()
    if reason is not None:
        raise RopewalkError(
            asked=f"backend={name!r}",
            expected="a backend that is available on this machine",
            got=reason,
            do="leave backend out, or use backend='torch'",
        )
    return backend
