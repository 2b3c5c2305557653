"""What a kernel may be given: plain tensors, in an eager call that nothing looks into."""

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ropewalk.kernels.native.extension import MASKS

__all__ = ["is_eager", "is_exporting", "is_plain", "is_transformed", "why_not_plain"]


def is_plain(*tensors: Tensor | None) -> bool:
    """Whether these are ordinary tensors in an ordinary eager call, which nothing traces, transforms or intercepts.

    >>> is_plain(torch.ones(2)), torch.func.vmap(lambda x: torch.tensor(is_plain(x)))(torch.ones(1)).item()
    (True, False)
    """
    return is_eager() and all(tensor is None or _is_ordinary(tensor) for tensor in tensors)


def is_eager() -> bool:
    """Whether nothing traces, transforms or intercepts what is called now.

    >>> is_eager()
    True
    """
    return not (
        torch.compiler.is_compiling()
        or torch._C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._get_tracing_state() is not None
    )


def _is_ordinary(tensor: Tensor) -> bool:
    kind = type(tensor)
    return (kind is Tensor or kind is torch.nn.Parameter) and not any(masked(tensor) for masked in MASKS)


def is_transformed() -> bool:
    """Whether functorch or forward-mode differentiation is at work.

    >>> is_transformed()
    False
    """
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def is_exporting() -> bool:
    """Whether torch.export is at work.

    The flag and not `torch.compiler.is_exporting`, of which torch 2.11 says True whatever it compiles.

    >>> is_exporting()
    False
    """
    return torch.compiler._is_exporting_flag


def why_not_plain(*tensors: Tensor | None) -> str | None:
    """What keeps these from a kernel, in words; None if nothing does.

    >>> why_not_plain(torch.ones(1)) is None
    True
    """
    if torch.compiler.is_compiling():
        return "an export" if is_exporting() else "a compiler"
    if is_transformed():
        return "a transform of torch.func, or forward-mode differentiation"
    if torch._C._get_tracing_state() is not None:
        return "torch.jit.trace"
    if torch._C._len_torch_dispatch_stack() > 0:
        return "a dispatch mode, such as fake tensors"
    odd = [tensor for tensor in tensors if tensor is not None and not _is_ordinary(tensor)]
    if not odd:
        return None
    kind = type(odd[0])
    return (
        kind.__name__
        if kind not in (Tensor, torch.nn.Parameter)
        else "a batched, functional or zero tensor, or a negated view"
    )
