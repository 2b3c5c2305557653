"""Cache of cos and sin for recent ranges of positions, for decoding. Transparent: results are identical without it."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ropewalk.kernels.backend import Choice, Registry, current
from ropewalk.ops.dispatch import direct_rotation

__all__ = ["Block", "RangeCache"]

# Ranges start at a multiple of this, and extend at least this far past the request, for the next decoded tokens.
STEP = 256
# A longer range is computed and not cached: 8192 rows of 64 pairs are 4 MiB of float32.
LONGEST = 8192
# Sequences that are decoded alternately have one block each, until all blocks together have this many rows.
MOST_ROWS = LONGEST + 8 * STEP


class Block(NamedTuple):
    """cos and sin of positions start .. stop-1.

    Each CUDA stream has separate blocks: another stream could read a block before it is computed, or still read it
    after its memory was released.

    Attributes:
        key: Device, dtype, stream, and everything else that cos and sin depend on.
        start: First position.
        stop: Last position + 1.
        cos: [stop - start, pairs], or [1, heads, stop - start, pairs] if frequencies are per head.
        sin: The same for sin.
        direct: The backend for plain calls, which need no further checks; None if there is none.
        registry: The registry that `direct` was chosen from. Another registry can choose another backend.

    >>> Block((torch.device("cpu"), torch.float32, 0), 0, 2, torch.ones(2, 1), torch.zeros(2, 1)).stop
    2
    """

    key: tuple[Any, ...]
    start: int
    stop: int
    cos: Tensor
    sin: Tensor
    direct: Choice | None = None
    registry: Registry | None = None


class RangeCache:
    """cos and sin of a few blocks of positions.

    All blocks are replaced in one assignment, so a thread sees either the old or the new ones. They are dropped when
    the owner is copied or pickled.

    >>> computed = []
    >>> def make(start, stop):
    ...     computed.append((start, stop))
    ...     return torch.arange(start, stop), torch.arange(start, stop)
    >>> cache = RangeCache()
    >>> key = torch.device("cpu"), torch.float32, 0
    >>> tables = [cache.find(key, start, start + 2, make) for start in (0, 2, 250)]
    >>> [cos[row : row + 2].tolist() for cos, sin, row in tables]
    [[0, 1], [2, 3], [250, 251]]
    >>> computed
    [(0, 512)]
    """

    def __init__(self, backend: str | None = None) -> None:
        self._backend: str | None = backend
        self._blocks: tuple[Block, ...] = ()
        # The last used block, if all heads share it and plain calls need no further checks. Decoding tries it first.
        self.recent: Block | None = None

    def find(
        self,
        key: tuple[Any, ...],
        start: int,
        stop: int,
        make: Callable[[int, int], tuple[Tensor, Tensor]],
    ) -> tuple[Tensor, Tensor, int]:
        """Return cos and sin of a block that contains start .. stop-1, and the row of `start` in it.

        No view is returned: on the CPU, creating a view costs as much as rotating one token.

        Args:
            key: Everything that cos and sin depend on except the positions. The first entry is the device.
            start: First position.
            stop: Last position + 1.
            make: Computes cos and sin for a range, if no block contains it.

        Returns:
            cos, sin, and the row of `start`.
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
        # Tensors created in inference mode cannot be saved for a later backward pass.
        with torch.inference_mode(False):
            block = Block(key, first, last, *make(first, last))
        new_blocks, rows = [block], last - first
        for old in blocks:
            rows += old.stop - old.start
            if rows > MOST_ROWS:
                break
            new_blocks.append(old)
        self._blocks = tuple(new_blocks)
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
