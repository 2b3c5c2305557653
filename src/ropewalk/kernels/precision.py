"""Dtypes: which ones kernels rotate, and in which one a tensor is computed."""

import torch
from torch import Tensor

__all__ = ["FLOATS", "working_dtype"]

# The dtypes of q, k and v that every operation accepts.
FLOATS: frozenset[torch.dtype] = frozenset((torch.float32, torch.float64, torch.bfloat16, torch.float16))


def working_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which x is computed, before one rounding: float64 for float64, float32 for everything else.

    >>> working_dtype(torch.ones(1, dtype=torch.float16))
    torch.float32
    """
    return torch.float64 if x.dtype == torch.float64 else torch.float32
