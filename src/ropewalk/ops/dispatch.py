"""Choice of the backend that computes a call, and of the path by which it is called.

The overhead of a library op, and of Python's checks, exceeds the time of a kernel for one token. Therefore there are
four paths:

- "kernel": plain tensors in an eager call are passed directly to the function of a backend, through the cheapest
  autograd.Function if a gradient is needed.
- "op": torch.compile gets a library op that runs the backend, if the backend is `opaque` and worth the overhead.
- "formula": everything else (export, functorch, forward-mode AD, tensor subclasses, gradients that no backend supports)
  gets torch operations, which all of them support.

- "exported": torch.export records the operations of a backend that has them for it, if one is registered.

Only plain tensors reach a kernel, so that no kernel reads an invalid pointer. `with_shortcut` makes the same choice
once per rope, for the common calls. Registering a backend makes it anew.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ropewalk.errors import RopewalkError
from ropewalk.kernels.backend import Choice, OperationName, backends, candidates, get, registered
from ropewalk.kernels.backends import TORCH
from ropewalk.kernels.torch_internals import is_exporting, is_one, is_plain, is_transformed, why_not_plain

__all__ = ["backend_reasons", "choose", "find", "require_backend", "with_shortcut"]

_PLAIN_TYPES = (Tensor, torch.nn.Parameter)

_FORMULA: dict[OperationName, Choice] = {
    name: Choice("formula", "torch", operation) for name, operation in TORCH.operations.items()
}


def choose(
    name: OperationName,
    requested: str | None,
    call: tuple[Any, ...],
    tensors: Sequence[Tensor | None],
    *,
    table_gradient: bool = False,
) -> Choice:
    """Return how a call of an operation is computed: the path, the backend and its function.

    Args:
        name: Name of the operation.
        requested: Name of the forced backend, or None. For cos_sin it is only a preference, because all backends agree
            within the error budget.
        call: Arguments of `Operation.supports`: (q, k, layout) for rotate and norm_rotate, (q_side, k_side, v, layout,
            weighting, causal) for linear_attention, all arguments for cos_sin.
        tensors: All tensors whose memory a kernel would read. The first is on the device of the call.
        table_gradient: Whether gradients of cos and sin are needed.

    Returns:
        The choice. Its path is "formula" if no backend supports the call.

    Raises:
        RopewalkError: If the forced backend does not support the call. The error contains the reason.

    >>> from ropewalk.kernels.types import Layout
    >>> x = torch.ones(3, 4)
    >>> choose("rotate", "torch", (x, None, Layout(True, 0, -2)), (x,)).path
    'kernel'
    """
    compiling = torch.compiler.is_compiling()
    if compiling:
        exported = _exported(name) if requested is None and is_exporting() else None
        if exported is not None:
            return exported
        if requested is None and name in ("rotate", "norm_rotate") and is_one(call[0].shape[call[2].seq_dim]):
            # For one token, the overhead of a library op exceeds the time of Inductor's code.
            return _FORMULA[name]
        reachable = not (is_exporting() or is_transformed()) and _have_plain_types(tensors)
    else:
        reachable = is_plain(*tensors)
    reason = None
    if reachable:
        choice_or_reason = find(name, requested, call, compiling=compiling, table_gradient=table_gradient)
        if isinstance(choice_or_reason, Choice):
            return choice_or_reason
        reason = choice_or_reason
    if requested is None or requested == "torch" or name == "cos_sin":
        return _FORMULA[name]
    got = reason or why_not_plain(*tensors) or ""
    if not compiling:
        # Under torch.compile, printing the lengths would make them constants of the graph.
        shown = [f"{x.dtype} {list(x.shape)} on {x.device}" for x in tensors[:2] if x is not None]
        got = f"{got}, for {' and '.join(shown)}"
    raise RopewalkError(
        asked=f"backend={requested!r}",
        expected="a call that it supports",
        got=got,
        do="leave backend out, and each call uses the fastest path that supports it",
    )


def find(
    name: OperationName,
    requested: str | None,
    call: tuple[Any, ...],
    *,
    compiling: bool = False,
    table_gradient: bool = False,
) -> Choice | str:
    """Return the first backend that supports a call on plain tensors, or the reason why there is none.

    Arguments are those of `choose`; `compiling` is whether torch.compile traces the call.

    >>> from ropewalk.kernels.types import Layout
    >>> call = torch.ones(3, 4), None, Layout(True, 0, -2)
    >>> find("rotate", "torch", call).backend, find("rotate", "torch", call, table_gradient=True)
    ('torch', 'gradients of cos and sin')
    """
    first = call[0] if isinstance(call[0], Tensor) else call[0].x
    reason = None
    for choice in candidates(name, requested, first.device.type):
        operation = choice.operation
        if table_gradient and (compiling or operation.table_gradient is None):
            reason = "gradients of cos and sin"
            continue
        why_not = None if operation.supports is None else operation.supports(*call)
        if why_not is not None:
            reason = why_not
            continue
        declines = operation.worthwhile is not None and not operation.worthwhile(*call, compiling)
        if declines and choice.backend != requested:
            continue
        if choice.backend == "torch" and (operation.is_formula or (compiling and not operation.opaque)):
            return _FORMULA[name]
        if compiling and not operation.opaque:
            reason = "a compiler"
            continue
        return choice._replace(path="op") if compiling else choice
    # Without a reason, the forced backend does not have the operation, or is no longer registered.
    return reason or f"{name}, which it does not support"


def _exported(name: OperationName) -> Choice | None:
    """Return the backend whose operation torch.export records, or None if it records the formula."""
    for backend in backends():
        operation = backend.operations.get(name)
        if operation is not None and operation.exported:
            return Choice("exported", backend.name, operation)
    return None


def _have_plain_types(tensors: Sequence[Tensor | None]) -> bool:
    return all(x is None or type(x) in _PLAIN_TYPES for x in tensors)


def with_shortcut(name: OperationName, device: torch.device, requested: str | None) -> Choice | None:
    """Return the backend that computes an operation of plain tensors on a device, or None if it has no shortcuts.

    Args:
        name: Name of the operation.
        device: Device of the tensors.
        requested: Name of the forced backend, or None.

    >>> with_shortcut("rotate", torch.device("cpu"), "torch") is None
    True
    """
    first = next(iter(candidates(name, requested, device.type)), None)
    if first is None or first.operation.shortcut is None:
        return None
    # A forced backend may support devices on which it is not chosen automatically. `choose` decides these calls.
    devices = registered(first.backend).devices
    return first if devices is None or device.type in devices else None


def require_backend(name: str | None) -> str | None:
    """Return `name` if that backend is available, and None for None, with which each call chooses its backend.

    Raises:
        RopewalkError: If there is no such backend, or if it is not available.

    >>> require_backend("torch")
    'torch'
    """
    backend = get(name)
    return None if backend is None else backend.name


def backend_reasons() -> dict[str, str | None]:
    """Return the reason why each backend is not available, or None, by name.

    >>> backend_reasons()["torch"] is None
    True
    """
    return {backend.name: backend.why_missing() for backend in backends()}
