"""The one place that decides which backend computes a call, and by which path.

What a call costs, apart from the work itself, on two Neoverse-N1 cores with torch 2.13 (2026-11): a direct call 2 us,
an autograd.Function 15 to 22 us, a library op 21 to 58 us. So there are three paths:

- "kernel": plain tensors in an eager call go straight to the function of a backend, through the cheapest
  autograd.Function where a gradient is needed;
- "op": a compiler gets a library op, which runs the backend, where the backend is `opaque` and worth the call;
- "formula": everything else that looks inside (export, functorch, forward-mode AD, tensor subclasses, gradients that no
  backend has) gets torch operations, which all of them understand.

Only plain tensors reach a kernel, so that none reads a pointer that is not there.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ropewalk.errors import RopewalkError
from ropewalk.kernels.backend import Choice, OperationName, backends, candidates, get, registered
from ropewalk.kernels.backends import TORCH
from ropewalk.kernels.torch_internals import is_exporting, is_one, is_plain, is_transformed, why_not_plain

__all__ = ["backend_reasons", "choose", "direct_rotation", "find", "require_backend"]

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
    """How a call of an operation is to be computed: the path, the backend and its function.

    Args:
        name: The operation.
        requested: The backend that was forced, or None. A forced backend computes the call or there is an error. For
            cos and sin it is a preference: they are the same everywhere within their budget.
        call: What `Operation.supports` receives: for rotate and norm_rotate (q, k, layout), for linear_attention
            (q_side, k_side, v, layout), for cos_sin all of its arguments.
        tensors: Every tensor whose memory a kernel would read; the first is on the device of the call.
        table_gradient: Whether gradients of cos and sin are needed.

    Returns:
        The choice. The path is "formula" where no backend can be used.

    Raises:
        RopewalkError: The backend that was forced cannot compute the call; the error says why.

    >>> from ropewalk.kernels.types import Layout
    >>> x = torch.ones(3, 4)
    >>> choose("rotate", "torch", (x, None, Layout(True, 0, -2)), (x,)).path
    'kernel'
    """
    compiling = torch.compiler.is_compiling()
    if compiling:
        if requested is None and name in ("rotate", "norm_rotate") and is_one(call[0].shape[call[2].seq_dim]):
            # For one token a library op takes longer to call than Inductor's code to run.
            return _FORMULA[name]
        reachable = not (is_exporting() or is_transformed()) and _have_plain_types(tensors)
    else:
        reachable = is_plain(*tensors)
    reason = None
    if reachable:
        found = find(name, requested, call, compiling=compiling, table_gradient=table_gradient)
        if isinstance(found, Choice):
            return found
        reason = found
    if requested is None or requested == "torch" or name == "cos_sin":
        return _FORMULA[name]
    got = reason or why_not_plain(*tensors) or ""
    if not compiling:
        # A compiler would have to fix every length to print it.
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
    """The first backend that supports a call on plain tensors, or in words why there is none.

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
    # Without a reason, a backend that was forced has no such operation, or was taken out of the registry.
    return reason or f"{name}, which it does not have"


def _have_plain_types(tensors: Sequence[Tensor | None]) -> bool:
    return all(x is None or type(x) in _PLAIN_TYPES for x in tensors)


def direct_rotation(device: torch.device, requested: str | None) -> Choice | None:
    """The backend that rotates plain tensors on that device, if it has a `run_if_ready`.

    >>> direct_rotation(torch.device("cpu"), "torch") is None
    True
    """
    first = next(iter(candidates("rotate", requested, device.type)), None)
    if first is None or first.operation.run_if_ready is None:
        return None
    # A forced backend may run on a device for which it is not chosen by itself: whether it can is for `choose` to say.
    devices = registered(first.backend).devices
    return first if devices is None or device.type in devices else None


def require_backend(name: str | None) -> str | None:
    """`name`, if that backend can run here; None, which leaves the choice to each call, for None.

    >>> require_backend("torch")
    'torch'
    """
    backend = get(name)
    return None if backend is None else backend.name


def backend_reasons() -> dict[str, str | None]:
    """Each backend, with the reason why it cannot run here, or None.

    >>> backend_reasons()["torch"] is None
    True
    """
    return {backend.name: backend.why_missing() for backend in backends()}
