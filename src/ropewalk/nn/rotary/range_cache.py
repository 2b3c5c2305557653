"""Cache of cos and sin for recent ranges of positions, shared by equal ropes. Results are identical without it."""

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ropewalk.kernels.backend import Registry, current
from ropewalk.spec.rope import RopeSpec

__all__ = ["Block", "RangeCache", "shared_ranges"]

# Ranges start at a multiple of this, and extend at least this far past the request, for the next decoded tokens.
STEP = 256
# Most numbers of cos in a cached range: 32 MiB of float32. Longer ranges are computed for each call.
MOST_NUMBERS = 1 << 23
MOST_BLOCKS = 16


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
        registry: The backends that computed them. Others can compute other numbers.

    >>> Block((torch.device("cpu"), torch.float32, 0), 0, 2, torch.ones(2, 1), torch.zeros(2, 1), current()).stop
    2
    """

    key: tuple[Any, ...]
    start: int
    stop: int
    cos: Tensor
    sin: Tensor
    registry: Registry


class RangeCache:
    """cos and sin of a few blocks of positions.

    All blocks are replaced in one assignment, so a thread sees either the old or the new ones.

    Args:
        width: Numbers of cos per position.

    >>> computed = []
    >>> def make(start, stop):
    ...     computed.append((start, stop))
    ...     return torch.arange(start, stop), torch.arange(start, stop)
    >>> cache = RangeCache(1)
    >>> key = torch.device("cpu"), torch.float32, 0
    >>> blocks = [cache.find(key, start, start + 2, make) for start in (0, 2, 250)]
    >>> [(block.start, block.stop) for block in blocks], computed
    ([(0, 512), (0, 512), (0, 512)], [(0, 512)])
    """

    def __init__(self, width: int) -> None:
        self._longest: int = MOST_NUMBERS // max(width, 1)
        self._blocks: tuple[Block, ...] = ()

    def find(
        self,
        key: tuple[Any, ...],
        start: int,
        stop: int,
        make: Callable[[int, int], tuple[Tensor, Tensor]],
    ) -> Block | None:
        """Return a block that contains start .. stop-1; None if the range is too long to be cached.

        Args:
            key: Everything that cos and sin depend on except the positions. The first entry is the device.
            start: First position.
            stop: Last position + 1.
            make: Computes cos and sin for a range, if no block contains it.
        """
        if stop - start > self._longest:
            return None
        registry = current()
        blocks = tuple(block for block in self._blocks if block.registry is registry)
        for block in blocks:
            if block.start <= start and stop <= block.stop and block.key == key:
                return block
        first = start - start % STEP
        last = stop + STEP + (-stop) % STEP
        # Tensors created in inference mode cannot be saved for a later backward pass.
        with torch.inference_mode(False):
            block = Block(key, first, last, *make(first, last), registry)
        # Sequences that are decoded alternately have one block each, until all blocks together have too many rows.
        new_blocks, rows = [block], last - first
        for old in blocks:
            rows += old.stop - old.start
            if rows > self._longest + 8 * STEP or len(new_blocks) == MOST_BLOCKS:
                break
            new_blocks.append(old)
        self._blocks = tuple(new_blocks)
        return block


_SHARED: weakref.WeakValueDictionary[tuple[RopeSpec, str | None], RangeCache] = weakref.WeakValueDictionary()


def shared_ranges(spec: RopeSpec, backend: str | None, width: int) -> RangeCache:
    """Return the cache of all ropes with this spec and backend, so that the layers of a model share one.

    Args:
        spec: The spec. Equal specs share a cache.
        backend: The forced backend, or None. Results of backends can differ in the last bit.
        width: Numbers of cos per position.

    >>> cache = shared_ranges(RopeSpec(4), None, 2)
    >>> shared_ranges(RopeSpec(4), None, 2) is cache
    True
    """
    if torch.compiler.is_compiling():
        return RangeCache(width)
    return _SHARED.setdefault((spec, backend), RangeCache(width))
