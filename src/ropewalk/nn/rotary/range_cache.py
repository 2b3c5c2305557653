"""Keeps cos and sin of the last ranges of positions, so that decoding finds its row. Transparent: results are identical
without it."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ropewalk.kernels.backend import Choice, Registry, current
from ropewalk.ops.dispatch import direct_rotation

__all__ = ["Block", "RangeCache"]

# Ranges start at a multiple of this and reach at least this far past what was asked for: the next tokens of a decode.
STEP = 256
# A longer range is computed for the call alone: 8192 rows of 64 pairs are 4 MiB of float32.
LONGEST = 8192
# Sequences that are decoded in turn have a block each, as far as all of them together stay below this.
MOST_ROWS = LONGEST + 8 * STEP


class Block(NamedTuple):
    """cos and sin of positions start .. stop-1. The key has the device, the dtype, the stream, and all else that they
    depend on; `direct` is how a plain call on them may be rotated without further checks.

    What one stream computes another may read too early, and memory that one releases another may still be reading: each
    stream has blocks of its own.

    >>> Block((torch.device("cpu"), torch.float32, 0), 0, 2, torch.ones(2, 1), torch.zeros(2, 1)).stop
    2
    """

    key: tuple[Any, ...]
    start: int
    stop: int
    cos: Tensor
    sin: Tensor
    direct: Choice | None = None
    # What `direct` was chosen from: another registry may choose otherwise.
    registry: Registry | None = None


class RangeCache:
    """cos and sin of a few blocks of positions. The blocks are replaced together, so threads see the old or the new.

    They are left behind when its owner is copied or pickled.

    >>> made = []
    >>> def make(start, stop):
    ...     made.append((start, stop))
    ...     return torch.arange(start, stop), torch.arange(start, stop)
    >>> cache = RangeCache()
    >>> key = torch.device("cpu"), torch.float32, 0
    >>> found = [cache.find(key, start, start + 2, make) for start in (0, 2, 250)]
    >>> [cos[row : row + 2].tolist() for cos, sin, row in found]
    [[0, 1], [2, 3], [250, 251]]
    >>> made
    [(0, 512)]
    """

    def __init__(self, backend: str | None = None) -> None:
        self._backend: str | None = backend
        self._blocks: tuple[Block, ...] = ()
        # The block that was used last, if all heads share it and a plain call may be rotated directly: decoding looks
        # there first.
        self.recent: Block | None = None

    def find(
        self,
        key: tuple[Any, ...],
        start: int,
        stop: int,
        make: Callable[[int, int], tuple[Tensor, Tensor]],
    ) -> tuple[Tensor, Tensor, int]:
        """cos and sin of a block, old or made by `make`, and the row in it at which start .. stop-1 begin.

        No view is made of them: on the CPU a view costs as much as the rotation of a token.
        """
        if stop - start > LONGEST:
            return *make(start, stop), 0
        blocks = self._blocks
        for block in blocks:
            if block.start <= start and stop <= block.stop and block.key == key:
                self._put_forward(block)
                return block.cos, block.sin, start - block.start
        first = start - start % STEP
        last = stop + STEP + (-stop) % STEP
        # Tensors born in inference mode could not be saved for a later backward.
        with torch.inference_mode(False):
            block = Block(key, first, last, *make(first, last))
        kept, rows = [block], last - first
        for old in blocks:
            rows += old.stop - old.start
            if rows > MOST_ROWS:
                break
            kept.append(old)
        self._blocks = tuple(kept)
        self._put_forward(block)
        return block.cos, block.sin, start - first

    def _put_forward(self, block: Block) -> None:
        registry = current()
        if block.registry is not registry:
            block = block._replace(direct=direct_rotation(block.key[0], self._backend), registry=registry)
            self._blocks = tuple(block if old.cos is block.cos else old for old in self._blocks)
        self.recent = block if block.direct is not None and block.cos.dim() == 2 else None

    def __getstate__(self) -> dict[str, Any]:
        return {"_backend": self._backend, "_blocks": (), "recent": None}
