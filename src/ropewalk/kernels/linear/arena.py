"""Arrays that share one allocation. Allocations take a large part of the host time of a short call."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["Arena"]

# Arrays begin at multiples of this many bytes, as allocations of torch on a GPU do.
_ALIGNMENT = 512


class Arena:
    """Where each of several arrays begins in one allocation of float32.

    Args:
        arrays: Name, shape and dtype of each array.

    >>> arena = Arena([("a", (3,), torch.bfloat16), ("b", (2, 2), torch.float32)])
    >>> arena.offsets, arena.length, arena.view(torch.zeros(arena.length), "b").shape
    ({'a': 0, 'b': 512}, 256, torch.Size([2, 2]))
    """

    offsets: dict[str, int]
    length: int

    def __init__(self, arrays: Sequence[tuple[str, Sequence[int], torch.dtype]]) -> None:
        self.offsets = {}
        self._arrays = {name: (tuple(shape), dtype) for name, shape, dtype in arrays}
        end = 0
        for name, (shape, dtype) in self._arrays.items():
            self.offsets[name] = end
            end += -(-math.prod(shape) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
        self.length = end // 4
        self._starts = tuple(self.offsets.values())

    def addresses(self, memory: Tensor, last: Tensor | None = None) -> list[int]:
        """Return the address of each array in an allocation, with that of `last` in place of the last one."""
        start = memory.data_ptr()
        addresses = [start + offset for offset in self._starts]
        if last is not None:
            addresses[-1] = last.data_ptr()
        return addresses

    def views(self, memory: Tensor, last: Tensor | None = None) -> list[Tensor]:
        """Return each array in an allocation, and `last` in place of the last one."""
        views = [self.view(memory, name) for name in self.offsets]
        return views if last is None else [*views[:-1], last]

    def view(self, memory: Tensor, name: str) -> Tensor:
        """Return an array that is part of an allocation [length] of float32."""
        (shape, dtype), start = self._arrays[name], self.offsets[name]
        size = math.prod(shape) * dtype.itemsize
        # Up to a multiple of 4 bytes, because arrays of 16-bit numbers may have an odd length.
        words = memory[start // 4 : start // 4 + -(-size // 4)]
        return words.view(dtype)[: math.prod(shape)].view(shape)
