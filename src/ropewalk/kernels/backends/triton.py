"""The Triton kernels: whether they can serve, and where to find them. Triton is loaded by the first that asks."""

import functools
import importlib.util
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["DTYPES", "INSTALLED", "INTERPRETED", "Kernels", "angles_serve", "kernels", "missing"]

DTYPES = frozenset((torch.float32, torch.bfloat16, torch.float16, torch.float64))


# Whether Triton is there. Read once and not asked in calls: a compiler would look into the question.
INSTALLED = importlib.util.find_spec("triton") is not None

# Whether kernels run as Python code on the CPU, as TRITON_INTERPRET=1 asks for: for tests without a GPU.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def missing() -> str | None:
    """Why the kernels cannot serve here, or None.

    >>> reason = missing()
    >>> reason is None or "Triton" in reason or "CUDA" in reason
    True
    """
    if not INSTALLED:
        return "Triton is not installed: it comes with the CUDA builds of PyTorch, or pip install triton"
    if not INTERPRETED and not torch.cuda.is_available():
        return (
            "PyTorch sees no CUDA device (for tests, TRITON_INTERPRET=1 at the start runs Triton's kernels on the CPU)"
        )
    return None


class Kernels(NamedTuple):
    """What the Triton kernels compute, by the functions that launch them.

    >>> Kernels._fields[0]
    'rotate'
    """

    rotate: Callable[..., tuple[Tensor, ...]]
    norm_rotate: Callable[..., list[Tensor]]
    norm_rotate_backward: Callable[..., tuple[list[Tensor], list[Tensor | None]]]
    table_gradient: Callable[..., tuple[Tensor, Tensor]]
    cos_sin: Callable[..., tuple[Tensor, Tensor]]
    linear_attention: Callable[..., Any]
    linear_attention_backward: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]]


@functools.cache
def kernels() -> Kernels:
    """The kernels. Triton is loaded by the first call.

    >>> missing() is not None or callable(kernels().rotate)
    True
    """
    from ropewalk.kernels.angles.triton import cos_sin
    from ropewalk.kernels.linear.triton import linear_attention, linear_attention_backward
    from ropewalk.kernels.qk_norm.triton import norm_rotate, norm_rotate_backward
    from ropewalk.kernels.rotate.triton import rotate
    from ropewalk.kernels.rotate.triton_tables import table_gradient

    linear = linear_attention, linear_attention_backward
    return Kernels(rotate, norm_rotate, norm_rotate_backward, table_gradient, cos_sin, *linear)


def angles_serve(positions: Tensor, inv_freq: Tensor, amplitude: Tensor) -> bool:
    """Whether the kernel for cos and sin knows such a call: exact frequencies, one amplitude, no gradient.

    >>> one = torch.ones(1, dtype=torch.float64)
    >>> angles_serve(torch.tensor([1]), one, one)  # an amplitude of its own for each pair
    False
    """
    plain = inv_freq.dtype == amplitude.dtype == torch.float64 and inv_freq.dim() <= 2 and amplitude.dim() == 0
    learns = torch.is_grad_enabled() and any(x.requires_grad for x in (positions, inv_freq, amplitude))
    counts = positions.dtype not in (torch.uint16, torch.uint32, torch.uint64)
    return plain and counts and not learns and positions.numel() > 0
