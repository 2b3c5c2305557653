"""What an in-place rotation may write: tensors that own every element, and share none."""

import torch
from torch import Tensor

from ropewalk.errors import RopewalkError
from ropewalk.kernels.torch_internals import is_plain, view_base

__all__ = ["check_in_place"]


def check_in_place(q: Tensor, k: Tensor | None) -> None:
    """Raise if an in-place rotation would write an element twice, or one that it may not write. Nothing is written.

    >>> check_in_place(torch.ones(3, 4), None)
    """
    if not is_plain(q, k):
        return
    for name, x in (("q", q), ("k", k)):
        if x is None:
            continue
        base = view_base(x)
        held = torch.is_grad_enabled() and base.is_leaf and base.requires_grad
        if held or (x.is_inference() and not torch.is_inference_mode_enabled()):
            raise RopewalkError(
                asked=f"rope.rotate_({name})",
                expected="a tensor that may be written: no leaf of autograd, no view of one, no inference tensor",
                got="a leaf that requires a gradient, or a view of one" if held else "an inference tensor",
                do="use rope(...), which leaves it as it is",
            )
        if x.numel() and _overlaps_itself(x):
            raise RopewalkError(
                asked=f"rope.rotate_({name})",
                expected="memory of its own for every element",
                got=f"shape {list(x.shape)} with strides {list(x.stride())}",
                do="use rope(...), or clone an expanded tensor first",
            )
    if k is not None and q.numel() and k.numel() and _share_elements(q, k):
        raise RopewalkError(
            asked="rope.rotate_(q, k)",
            expected="q and k in memory of their own",
            got="elements that belong to both",
            do="rotate what they share once, or clone one of them",
        )


def _overlaps_itself(x: Tensor) -> bool:
    """Whether two indices of x may lead to one address. Sorted by stride, each dimension must step over the last."""
    reach = 0
    for stride, size in sorted((stride, size) for stride, size in zip(x.stride(), x.shape, strict=True) if size > 1):
        if stride <= reach:
            return True
        reach += stride * (size - 1)
    return False


def _share_elements(q: Tensor, k: Tensor) -> bool:
    """Whether q and k have an element in common. Slices of packed projections do not, though their extents overlap."""
    # By address: two storages may be one piece of memory that came from outside.
    gap, off = divmod(k.data_ptr() - q.data_ptr(), q.element_size())
    q_reach, k_reach = (sum(step * (n - 1) for step, n in zip(x.stride(), x.shape, strict=True)) for x in (q, k))
    if gap > q_reach or -gap > k_reach + bool(off):
        return False
    if off or q.stride() != k.stride():
        return True
    # They meet where sum(i * stride) - sum(j * stride) = gap for some indices i of q and j of k.
    dims = sorted(zip(q.stride(), q.shape, k.shape, strict=True), reverse=True)
    return _steps_make(int(gap), dims)


def _steps_make(gap: int, dims: list[tuple[int, int, int]]) -> bool:
    if not dims:
        return gap == 0
    (stride, q_size, k_size), rest = dims[0], dims[1:]
    # Smaller strides together reach less than one larger step, so only the two nearest numbers of steps can do.
    return any(
        -(k_size - 1) <= steps <= q_size - 1 and _steps_make(gap - steps * stride, rest)
        for steps in {gap // stride, gap // stride + 1}
    )
