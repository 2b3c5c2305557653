"""A backend is a value: its name, why it is missing, per operation a function and what it supports. And the registry.

What the `run` of each operation receives and returns, for plain tensors in an eager call:

- cos_sin: (positions, inv_freq, radix_table, amplitude, dtype, axes) -> (cos, sin)
- rotate: (q, k or None, cos, sin, layout, row, conjugate) -> (q,) or (q, k)
- norm_rotate: (tensors, weights, cos, sin, layout, norm, row) -> a list of tensors
- linear_attention: (q_side, k_side, v, flat sums or None, layout, causal, cu_seqlens) -> (out, flat sums, *saved)

cos and sin are [rows, pairs], [batch, rows, pairs] or [1 or batch, heads, rows, pairs], and row `row` is the first
token's; `types.line_up` shapes them to broadcast against q and k. `layout` says which features are rotated, and where
the sequence is. Results are new tensors with the dtype of the inputs and the strides of `torch.empty_like`, in a tuple
or list even if there is one.

`angles/`, `rotate/`, `qk_norm/` and `linear/` have the functions of the built-in backends, `backends/` the values. A
new backend is one file like those in `backends/`, and a line in its `__init__.py`.
"""

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from ropewalk.errors import RopewalkError, require_choice, shown

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
    "register",
    "registered",
]

OperationName = Literal["cos_sin", "rotate", "norm_rotate", "linear_attention"]
OPERATIONS: tuple[OperationName, ...] = ("cos_sin", "rotate", "norm_rotate", "linear_attention")


@dataclass(frozen=True)
class Operation:
    """One operation of a backend: the function that computes it, and the calls that it supports.

    `call` is what identifies a call: (q, k, layout) for rotate and norm_rotate, (q_side, k_side, v, layout) for
    linear_attention, all arguments for cos_sin. What receives `call` must be traceable by torch.compile: no f-strings,
    no look at values.

    Args:
        run: Computes the operation. See the module's docstring.
        supports: (*call) -> None, or in words what the backend cannot do. Without it, every call is supported.
        worthwhile: (*call, compiling) -> False where another path is faster. Not asked where the backend was forced.
        backward: The gradients in one call. For norm_rotate: (cotangents, tensors, weights, whether weights need
            gradients, cos, sin, layout, norm, row) -> (gradients, weight gradients). For linear_attention: (cotangent
            of out, of sums or None, q_side, k_side, v, what `run` returned, layout, causal, cu_seqlens) -> gradients of
            q, k, v and of the sums before. Without it, gradients are those of the formula. A rotation needs none: its
            backward is the rotation by the opposite angle.
        table_gradient: For rotate: (tensors, cotangents, cos, layout, row, conjugate) -> gradients of cos and sin.
        run_if_ready: For rotate, where the host's time decides: (q, k, cos, sin, layout, row, rows, head_dim, only_ask)
            -> checks q and k and rotates them, or returns None; with only_ask it returns True and does nothing.
        empty_saved: For linear_attention: (q, k, v, cu_seqlens) -> tensors shaped as those that `run` saves, for fake
            tensors.
        joint: For norm_rotate: whether `backward` computes two tensors in one pass. Else each has a node of its own.
        in_place: Whether the `run` of rotate accepts in_place=True.
        into: Whether the `run` of rotate accepts out=[...], tensors to write into.
        opaque: Whether a compiler gets a library op that runs it. Otherwise a compiler does not use it.
        is_formula: Whether `run` is the formula itself, which needs no autograd.Function: for "torch" alone.

    >>> Operation(run=print).opaque
    True
    """

    run: Callable[..., Any]
    supports: Callable[..., str | None] | None = None
    worthwhile: Callable[..., bool] | None = None
    backward: Callable[..., Any] | None = None
    table_gradient: Callable[..., Any] | None = None
    run_if_ready: Callable[..., Any] | None = None
    empty_saved: Callable[..., Any] | None = None
    joint: bool = False
    in_place: bool = False
    into: bool = False
    opaque: bool = True
    is_formula: bool = False


def _present() -> str | None:
    return None


class Choice(NamedTuple):
    """How a call is computed: its path, the name of the backend and its operation. `ops.dispatch` chooses.

    >>> Choice("kernel", "mine", Operation(run=print)).backend
    'mine'
    """

    path: Literal["kernel", "op", "formula"]
    backend: str
    operation: Operation


@dataclass(frozen=True)
class Backend:
    """A backend: its name, its operations, why it is missing, and the devices on which it is chosen by itself.

    `why_missing` is called when a backend is forced, and may look at the machine. `devices` are the types of
    torch.device on which it is not missing, for sure; None stands for every device.

    >>> Backend("mine", {"rotate": Operation(run=print)}).why_missing() is None
    True
    """

    name: str
    operations: Mapping[OperationName, Operation] = field(hash=False)
    why_missing: Callable[[], str | None] = _present
    devices: tuple[str, ...] | None = ()


class Registry(NamedTuple):
    """The backends by name, those to be preferred first, and what `candidates` returns on the most common devices.

    Replaced whole when a backend is registered, so that a call in another thread sees the old or the new. What depends
    on it compares it by identity.

    >>> Registry({}, {}).backends
    {}
    """

    backends: dict[str, Backend]
    # Listed here and not by calls: a compiler would guard on a dict that grows.
    candidates: dict[str, tuple[Choice, ...]]


_DEVICES = ("cpu", "cuda")
_REGISTRY = Registry({}, {})

# Backends in the order in which they were registered.
_REGISTERED: list[Backend] = []
_LOCK = threading.Lock()


def register(backend: Backend) -> Callable[[], None]:
    """Adds a backend before those that are there, and hides one of the same name; returns what undoes it.

    Raises:
        RopewalkError: This is no Backend, or its operations are not `Operation`s under the names of `OPERATIONS`.

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
            do="make one: Backend(name, operations)",
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
            places = [i for i, other in enumerate(_REGISTERED) if other is backend]
            if places:
                del _REGISTERED[places[-1]]
                _replace()

    return undo


def _replace() -> None:
    """Makes the registry of what is registered: of several backends of one name the last counts."""
    global _REGISTRY
    by_name: dict[str, Backend] = {}
    for backend in reversed(_REGISTERED):
        by_name.setdefault(backend.name, backend)
    kept = {
        f"{operation} {requested} {device}": _candidates(by_name, operation, requested, device)
        for operation in OPERATIONS
        for device in _DEVICES
        for requested in (None, *by_name)
    }
    _REGISTRY = Registry(by_name, kept)


def current() -> Registry:
    """The registry as it is now; another object after every registration.

    >>> current() is current()
    True
    """
    return _REGISTRY


def backends() -> tuple[Backend, ...]:
    """All backends, those to be preferred first.

    >>> all(isinstance(backend, Backend) for backend in backends())
    True
    """
    return tuple(_REGISTRY.backends.values())


def candidates(operation: OperationName, requested: str | None, device: str) -> tuple[Choice, ...]:
    """The kernels to try for an operation on tensors of that type of device, in order.

    A backend that was requested is the only one; for cos_sin it comes before the others.

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
    return tuple(Choice("kernel", b.name, b.operations[operation]) for b in order if operation in b.operations)


def registered(name: str) -> Backend:
    """The backend of that name, which was chosen before.

    >>> registered("torch").name
    'torch'
    """
    return _REGISTRY.backends[name]


def get(name: str | None) -> Backend | None:
    """The backend of that name, if it can run here; None for None.

    Raises:
        RopewalkError: There is no such backend, or it is missing; the error says why.

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
            expected="a backend that can run here",
            got=reason,
            do="leave backend out, or use backend='torch'",
        )
    return backend
