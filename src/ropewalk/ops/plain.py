"""What a kernel may be given: plain tensors, in an eager call that nothing looks into."""

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ropewalk.kernels.rotate_native import MASKS

__all__ = ["is_eager", "is_plain", "is_transformed"]


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
