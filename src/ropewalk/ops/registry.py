"""The registry: each operation with its reference, the backends that compute it, and how far they may be from it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ropewalk.errors import RopewalkError, require_choice
from ropewalk.kernels.backends import triton as gpu
from ropewalk.kernels.native import extension as rotate_native
from ropewalk.kernels.qk_norm import torch as qk_norm_torch
from ropewalk.kernels.rotate import torch as rotate_torch
from ropewalk.reference.budget import rotation_budget
from ropewalk.reference.qk_norm import qk_norm_rotate
from ropewalk.reference.rotate import rotate

__all__ = ["OPS", "Kernel", "Op", "backend_reasons", "cannot_serve", "require_backend"]


@dataclass(frozen=True)
class Op:
    """An operation: its reference, the backends that compute it, and how far they may be from it.

    >>> "torch" in OPS["rotate"].backends
    True
    """

    name: str
    reference: Callable[..., Any]
    backends: dict[str, Callable[..., Any]]
    budget: Callable[..., Any]


# Takes q, k or None, cos, sin, the layout, the first row and whether to turn the other way.
Kernel = Callable[..., tuple[Tensor, ...]]

_BACKENDS: dict[str, Kernel] = {"torch": rotate_torch.rotate}
if rotate_native.MISSING is None:
    _BACKENDS["native"] = rotate_native.rotate
# Whether there is a GPU is asked when one is needed: to ask it at import would keep forked processes from using it.
if gpu.INSTALLED:
    _BACKENDS["triton"] = lambda *given, **how: gpu.kernels().rotate(*given, **how)

# RMSNorm and rotation in one: these kernels take the norm in the same pass.
_NORM_BACKENDS: dict[str, Callable[..., Any]] = {"torch": qk_norm_torch.norm_rotate}
if rotate_native.MISSING is None:
    _NORM_BACKENDS["native"] = rotate_native.norm_rotate
if gpu.INSTALLED:
    _NORM_BACKENDS["triton"] = lambda *given: gpu.kernels().norm_rotate(*given)

OPS = {
    op.name: op
    for op in (
        Op("rotate", rotate, _BACKENDS, rotation_budget),
        Op("qk_norm_rotate", qk_norm_rotate, _NORM_BACKENDS, rotation_budget),
    )
}


def backend_reasons() -> dict[str, str | None]:
    """Each backend of the rotation, with the reason why it cannot serve, or None.

    >>> backend_reasons()["torch"] is None
    True
    """
    return {"native": rotate_native.MISSING, "triton": gpu.missing(), "torch": None}


def require_backend(name: str | None) -> str | None:
    """`name`, if that backend is there; None, which leaves the choice to each call, for None.

    >>> require_backend("torch")
    'torch'
    """
    if name is None:
        return None
    reason = backend_reasons()[require_choice(name, backend_reasons(), asked="backend=...")]
    if reason is not None:
        raise RopewalkError(
            asked=f"backend={name!r}",
            expected="a backend that is there",
            got=reason,
            do="leave backend out, or use backend='torch'",
        )
    return name


def cannot_serve(backend: str, why: str) -> RopewalkError:
    """The error for a backend that was asked for and cannot serve this call.

    >>> "leave backend out" in str(cannot_serve("native", "a tensor on cuda"))
    True
    """
    return RopewalkError(
        asked=f"backend={backend!r}",
        expected="a call that it can serve",
        got=why,
        do="leave backend out, and each call takes the fastest path that can serve it",
    )
