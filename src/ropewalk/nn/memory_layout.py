"""Tensors without strides, sparse, mkldnn or nested ones: nothing in nn accepts them, and errors say what to pass."""

import torch
from torch import Tensor

from ropewalk.errors import RopewalkError

__all__ = ["check_strided", "is_strided"]


def is_strided(x: Tensor) -> bool:
    """Whether the elements of x are at strides in memory, which holds of all but sparse, mkldnn and nested tensors.

    >>> is_strided(torch.ones(2)), is_strided(torch.ones(2).to_sparse())
    (True, False)
    """
    return x.layout is torch.strided and not x.is_nested


def check_strided(x: object, *, asked: str) -> None:
    """Raise if x is a tensor without strides; anything else is for the caller to check.

    >>> check_strided(torch.ones(2), asked="a doctest")
    >>> try:
    ...     check_strided(torch.ones(2).to_sparse(), asked="a doctest")
    ... except RopewalkError as error:
    ...     error.got
    'a tensor of layout torch.sparse_coo'
    """
    if not isinstance(x, Tensor) or is_strided(x):
        return
    raise RopewalkError(
        asked=asked,
        expected="a strided tensor",
        # The shape of a nested tensor may not be asked for.
        got="a nested tensor" if x.is_nested else f"a tensor of layout {x.layout}",
        do="lay the sequences end to end and pass cu_seqlens=, or pad them: torch.nested.to_padded_tensor(x, 0.0)"
        if x.is_nested
        else "pass x.to_dense()",
    )
