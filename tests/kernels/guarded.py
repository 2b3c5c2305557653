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

    def shortcut(self, *args: Any) -> Any:
        inside = [guarded(t) if isinstance(t, Tensor) else t for t in args]
        return GuardedShortcut(self, self.native.shortcut(*inside))

    def linear_step(self, *args: Any) -> tuple[Tensor, ...] | None:
        self.calls += 1
        return self.native.linear_step(*(guarded(item) if isinstance(item, Tensor) else item for item in args))

    def cos_sin(self, *args: Any) -> None:
        self.calls += 1
        *tensors, threads = args
        inside = [guarded(t) for t in tensors]
        self.native.cos_sin(*inside, threads)
        for target, t in zip(tensors[-2:], inside[-2:], strict=True):
            target.copy_(t)


class GuardedShortcut:
    """A shortcut of the C extension, called with copies of its arguments in guarded blocks."""

    def __init__(self, owner: Guarded, shortcut: Any) -> None:
        self.owner, self.right = owner, shortcut

    def remember(self, start: int, stop: int, cos: Tensor, sin: Tensor) -> None:
        self.right.remember(start, stop, guarded(cos), guarded(sin))

    def __call__(self, *args: Any, **options: Any) -> Any:
        # With a graph, the results belong to the arguments. Outputs are in memory of torch.
        if torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in args):
            return self.right(*args, **options)
        self.owner.calls += 1
        return self.right(*map(_guarded, args), **{name: _guarded(t) for name, t in options.items()})

    def rotate_(self, *args: Any, **options: Any) -> Any:
        return self.right.rotate_(*args, **options)


def _guarded(t: Any) -> Any:
    if isinstance(t, tuple):
        return tuple(_guarded(one) for one in t)
    return guarded(t) if type(t) is Tensor and t.is_cpu else t
