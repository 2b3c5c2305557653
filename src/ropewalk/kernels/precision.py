"""Dtypes: which ones kernels rotate, and in which one a tensor is computed."""

import torch
from torch import Tensor

__all__ = ["FLOATS", "HALVES", "wide_dtype", "working_dtype"]

# The dtypes of q, k and v that every operation accepts.
FLOATS: frozenset[torch.dtype] = frozenset((torch.float32, torch.float64, torch.bfloat16, torch.float16))

# Those of them that are computed in float32 and rounded once, at the end.
HALVES: frozenset[torch.dtype] = frozenset((torch.bfloat16, torch.float16))


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which tensors of `dtype` are computed: float64 for float64, float32 for everything else.

    >>> wide_dtype(torch.bfloat16), wide_dtype(torch.float64)
    (torch.float32, torch.float64)
    """
    return torch.float64 if dtype == torch.float64 else torch.float32


def working_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which x is computed.

    >>> working_dtype(torch.ones(1, dtype=torch.float16))
    torch.float32
    """
    return torch.float64 if x.dtype == torch.float64 else torch.float32
