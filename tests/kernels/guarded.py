"""Tensors in blocks of malloc of exactly their size, so that a sanitizer detects accesses outside of them.

A sanitizer may not know torch's CPU allocator. It would then not check accesses to memory of torch.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor


def guarded(t: Tensor) -> Tensor:
    """A copy with the same strides, in a block that ends with the last element."""
    if t.numel() == 0:
        return t
    reach = sum(stride * (size - 1) for stride, size in zip(t.stride(), t.shape, strict=True)) + 1
    block = torch.from_numpy(np.empty(reach * t.element_size(), dtype=np.uint8)).view(t.dtype)
    copy = block.as_strided(t.shape, t.stride())
    # Copies the gaps between elements too, because elements can share memory.
    block.copy_(t.as_strided((reach,), (1,), t.storage_offset()))
    return copy


class Guarded:
    """The C extension, called with copies of its arguments in guarded blocks."""

    def __init__(self, native: Any) -> None:
        self.native, self.calls = native, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.native, name)

    def rotate(self, *args: Any) -> tuple[Tensor, ...]:
        self.calls += 1
        q, k, yq, _, *rest = args
        in_place = yq is not None
        both = [guarded(x) for x in (q, k) if x is not None]
        out = both if in_place else [guarded(torch.empty_like(x)) for x in (q, k) if x is not None]
        rest = [guarded(item) if isinstance(item, Tensor) else item for item in rest]
        pad = [None] * (2 - len(both))
        self.native.rotate(*both, *pad, *out, *pad, *rest)
        results = [torch.empty_like(x).copy_(y) for x, y in zip((q, k), out, strict=False)]
        if in_place:
            for target, y in zip((q, k), results, strict=False):
                target.copy_(y)
            return tuple(x for x in (q, k) if x is not None)
        return tuple(results)

    def direct(self, *args: Any) -> Any:
        self.calls += 1
        # Inputs are guarded; outputs are in memory of torch.
        return self.native.direct(*[guarded(t) if type(t) is Tensor and t.is_cpu else t for t in args])

    def cos_sin(self, *args: Any) -> None:
        self.calls += 1
        *tensors, threads = args
        inside = [guarded(t) for t in tensors]
        self.native.cos_sin(*inside, threads)
        for target, t in zip(tensors[-2:], inside[-2:], strict=True):
            target.copy_(t)
