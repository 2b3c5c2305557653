"""Checks for strided tensors. `nn` rejects sparse, mkldnn and nested tensors with an error that names the fix."""

import torch
from torch import Tensor

from ropewalk.errors import RopewalkError

__all__ = ["check_strided", "is_strided"]


def is_strided(x: Tensor) -> bool:
    """Whether x is a strided tensor. Sparse, mkldnn and nested tensors are not.

    >>> is_strided(torch.ones(2)), is_strided(torch.ones(2).to_sparse())
    (True, False)
    """
    return x.layout is torch.strided and not x.is_nested


def check_strided(x: object, *, asked: str) -> None:
    """Raise if x is a tensor without strides. Objects that are not tensors pass: the caller checks them.

    Args:
        x: Any object.
        asked: The first line of the error: the call and the argument.

    Raises:
        RopewalkError: If x is a sparse, mkldnn or nested tensor.

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
        # Reading the shape of a nested tensor raises.
        got="a nested tensor" if x.is_nested else f"a tensor of layout {x.layout}",
        do="concatenate the sequences and pass cu_seqlens=, or pad them: torch.nested.to_padded_tensor(x, 0.0)"
        if x.is_nested
        else "pass x.to_dense()",
    )
