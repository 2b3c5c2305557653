"""Keeps cos and sin of the last plain range, so that decoding pays a slice. Nobody can tell that it is there."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["RangeCache"]

# Ranges start at a multiple of this and reach at least this far past what was asked for: the next tokens of a decode.
STEP = 256
# A longer range is computed for the call alone: 8192 rows of 64 pairs are 4 MiB of float32.
LONGEST = 8192


class _Block(NamedTuple):
    key: tuple[torch.device, torch.dtype]
    start: int
    stop: int
    tables: tuple[Tensor, Tensor]


class RangeCache:
    """cos and sin of one block of positions. A block is replaced whole, so threads see the old one or the new.

    It is left behind when its owner is copied or pickled.

    >>> made = []
    >>> def make(start, stop):
    ...     made.append((start, stop))
    ...     return torch.arange(start, stop), torch.arange(start, stop)
    >>> cache = RangeCache()
    >>> key = torch.device("cpu"), torch.float32
    >>> [cache.rows(key, start, start + 2, make)[0].tolist() for start in (0, 2, 250)]
    [[0, 1], [2, 3], [250, 251]]
    >>> made
    [(0, 512)]
    """

    def __init__(self) -> None:
        self._block: _Block | None = None

    def rows(
        self,
        key: tuple[torch.device, torch.dtype],
        start: int,
        stop: int,
        make: Callable[[int, int], tuple[Tensor, Tensor]],
    ) -> tuple[Tensor, Tensor]:
        """Rows start .. stop-1, from the block if it has them, else from a new one that `make` computes."""
        if stop - start > LONGEST:
            return make(start, stop)
        block = self._block
        if block is None or block.key != key or start < block.start or stop > block.stop:
            first = start - start % STEP
            last = stop + STEP + (-stop) % STEP
            # Tensors born in inference mode could not be saved for a later backward.
            with torch.inference_mode(False):
                block = _Block(key, first, last, make(first, last))
            self._block = block
        cos, sin = block.tables
        # The sequence is the next to last dimension, or the only one.
        dim = max(cos.dim() - 2, 0)
        return tuple(t.narrow(dim, start - block.start, stop - start) for t in (cos, sin))  # pyright: ignore

    def __getstate__(self) -> dict[str, Any]:
        return {"_block": None}
