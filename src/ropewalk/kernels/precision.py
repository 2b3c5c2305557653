"""Dtypes: which ones kernels support, and in which one they compute."""

import torch
from torch import Tensor

from ropewalk.kernels.torch_internals import constant_to_compiler

__all__ = ["FLOATS", "has_autocast", "working_dtype"]

# Dtypes of q, k and v that every operation supports.
FLOATS: frozenset[torch.dtype] = frozenset((torch.float32, torch.float64, torch.bfloat16, torch.float16))


def working_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype in which x is computed before it is rounded once: float64 for float64, else float32.

    >>> working_dtype(torch.ones(1, dtype=torch.float16))
    torch.float32
    """
    return torch.float64 if x.dtype == torch.float64 else torch.float32


@constant_to_compiler
def has_autocast(device: str) -> bool:
    """Return whether a type of devices has autocast. Dynamo of torch 2.11 cannot trace torch's own function.

    >>> has_autocast("cpu"), has_autocast("meta")
    (True, False)
    """
    return torch.amp.is_autocast_available(device)
