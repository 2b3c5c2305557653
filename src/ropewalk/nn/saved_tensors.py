"""Checks of a dict of tensors that was read from a file, before a cache or a state is made of it."""

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from ropewalk.errors import RopewalkError, shown
from ropewalk.nn.position_checks import described

__all__ = ["check_tensor", "checked_tensors"]


def checked_tensors(
    state: Mapping[str, Tensor], required: Collection[str], optional: Collection[str], *, asked: str
) -> dict[str, Tensor]:
    """Return the tensors of a saved dict. Raise unless it has the required names, and no others than the optional ones.

    Args:
        state: A dict from a file.
        required: Names that it must have.
        optional: Names that it can have.
        asked: The first line of the error.

    Returns:
        A dict with plain tensors in memory.

    Raises:
        RopewalkError: If it is no dict, or if a name or a value is not accepted.

    >>> list(checked_tensors({"keys": torch.zeros(2)}, ["keys"], [], asked="a doctest"))
    ['keys']
    """
    do = "pass what state_dict() returned; torch.load(file, weights_only=True) and safetensors read it"
    names = list(state) if isinstance(state, Mapping) else None
    if names is None or not set(required) <= set(names) <= {*required, *optional}:
        raise RopewalkError(
            asked=asked,
            expected=f"a dict with {', '.join(required)}" + (f", optionally {', '.join(optional)}" if optional else ""),
            got=shown(state) if names is None else shown(names),
            do=do,
        )
    for name, x in state.items():
        in_memory = isinstance(x, Tensor) and x.layout == torch.strided and not x.is_quantized and not x.is_meta
        # A small file can contain an expanded tensor, whose copy takes any amount of memory.
        if not in_memory or x.numel() * x.element_size() > x.untyped_storage().nbytes():
            raise RopewalkError(asked=asked, expected=f"{name} as a dense tensor", got=described(x), do=do)
    return dict(state)


def check_tensor(
    x: Tensor, name: str, shape: tuple[int | None, ...], dtype: torch.dtype, *, asked: str, do: str
) -> None:
    """Raise unless a saved tensor has a shape and a dtype. None in the shape is any size.

    >>> check_tensor(torch.zeros(2, 3), "keys", (2, None), torch.float32, asked="a doctest", do="")
    """
    sizes_match = x.dim() == len(shape) and all(n in (None, m) for n, m in zip(shape, x.shape, strict=True))
    if not sizes_match or x.dtype != dtype:
        sizes = ", ".join("slots" if n is None else str(n) for n in shape)
        expected = f"{name} [{sizes}] of {dtype}"
        raise RopewalkError(asked=asked, expected=expected, got=described(x), do=do)
