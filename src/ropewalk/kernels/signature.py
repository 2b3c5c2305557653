"""Signatures of plain tensors: everything about them except their numbers, as a key, and their addresses.

What was decided for a signature can be stored, and found again without a check. The C extension reads tensors in less
time than Python needs for one attribute. Without it, Python reads them.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ropewalk.kernels.native.extension import NATIVE
from ropewalk.kernels.torch_internals import is_eager as is_eager_in_python
from ropewalk.kernels.torch_internals import is_masked, is_plain

__all__ = ["Signature", "are_plain", "is_eager", "python_signature", "signature"]

# A hashable key, and one address per tensor.
Signature = tuple[Any, tuple[int, ...]]

_PLAIN_TYPES = (Tensor, torch.nn.Parameter)


def python_signature(*tensors: Any) -> Signature | None:
    """Return the signature of tensors by their attributes.

    Args:
        tensors: Tensors, or None for one that is absent, with address 0.

    Returns:
        The key and the addresses; None if an argument is not a plain tensor with memory. The key contains shapes,
        strides, dtypes, devices, the alignment of addresses to 16 bytes, and which tensors need gradients.

    >>> x = torch.ones(2, 3)
    >>> key, (address, absent) = python_signature(x, None)
    >>> address == x.data_ptr(), absent, key == python_signature(x.clone(), None)[0], key == python_signature(x.T, None)
    (True, 0, True, False)
    >>> python_signature("x") is None
    True
    """
    graphs, key, addresses = torch.is_grad_enabled(), [], []
    for x in tensors:
        if x is None:
            key.append(None)
            addresses.append(0)
            continue
        if type(x) not in _PLAIN_TYPES or x.layout != torch.strided or x.device.type == "meta" or is_masked(x):
            return None
        address = x.data_ptr()
        key.append((x.shape, x.stride(), x.dtype, x.device, address & 15, graphs and x.requires_grad))
        addresses.append(address)
    return tuple(key), tuple(addresses)


# The fastest `python_signature` and `torch_internals.is_eager`. Those in C do not detect compilers.
signature: Callable[..., Signature | None] = python_signature if NATIVE is None else NATIVE.signature
is_eager: Callable[[], bool] = is_eager_in_python if NATIVE is None else NATIVE.is_eager
_are_plain: Callable[..., bool] = is_plain if NATIVE is None else NATIVE.are_plain


def are_plain(*tensors: Tensor | None) -> bool:
    """Whether a call is eager and its tensors are plain ones with memory, or None.

    >>> are_plain(torch.ones(2), None), are_plain(torch.ones(2, device="meta"))
    (True, False)
    """
    return is_plain(*tensors) if torch.compiler.is_compiling() else _are_plain(*tensors)
