"""What an in-place rotation may write: tensors that own every element, share none, and may be written by autograd."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ropewalk.errors import RopewalkError
from ropewalk.kernels.torch_internals import is_plain, view_base, why_view_is_fixed

__all__ = ["check_in_place"]

# Whether two views meet is a bounded Diophantine equation, hard for some strides. NumPy gives up after this many steps,
# some milliseconds; strides of views that people make take a few.
_MOST_WORK = 100_000


def check_in_place(q: Tensor, k: Tensor | None, angles_need_gradient: bool = False) -> None:
    """Raise if an in-place rotation would write an element twice, or one that it may not write. Nothing is written.

    Args:
        q: Queries, or whatever a single tensor holds.
        k: Keys, if there are any.
        angles_need_gradient: Whether cos and sin require a gradient, which what they rotate then has too.

    Raises:
        RopewalkError: An element belongs to two places, or autograd or inference mode would not let it be written.

    >>> check_in_place(torch.ones(3, 4), None)
    """
    if not is_plain(q, k):
        return
    for name, x in (("q", q), ("k", k)):
        if x is None:
            continue
        reason = _why_not_writable(x, angles_need_gradient)
        if reason is not None:
            raise RopewalkError(
                asked=f"rope.rotate_({name})",
                expected="a tensor that may be written: no leaf of autograd, no view of one, no inference tensor; "
                "where a gradient is needed, no view but one by an index",
                got=reason,
                do="use rope(...), which leaves it as it is, or take the view by an index: qkv[:, :, 0]",
            )
        if x.device.type != "meta" and x.numel() and _overlaps_itself(x):
            raise RopewalkError(
                asked=f"rope.rotate_({name})",
                expected="memory of its own for every element",
                got=f"shape {list(x.shape)} with strides {list(x.stride())}",
                do="use rope(...), or clone an expanded tensor first",
            )
    if k is not None and q.device.type != "meta" and q.numel() and k.numel() and _share_elements(q, k):
        raise RopewalkError(
            asked="rope.rotate_(q, k)",
            expected="q and k in memory of their own",
            got="elements that belong to both, or strides for which that cannot be decided",
            do="rotate what they share once, or clone one of them",
        )


def _why_not_writable(x: Tensor, angles_need_gradient: bool) -> str | None:
    """Why torch would not let x be written, in words; torch itself would say so after it had written q."""
    if x.is_inference() and not torch.is_inference_mode_enabled():
        return "an inference tensor"
    if not torch.is_grad_enabled():
        return None
    base = view_base(x)
    if base.is_leaf and base.requires_grad:
        return "a leaf that requires a gradient, or a view of one"
    return why_view_is_fixed(x) if angles_need_gradient or x.requires_grad else None


def _overlaps_itself(x: Tensor) -> bool:
    """Whether two indices of x lead to one address, or might where that cannot be decided."""
    dims = sorted((stride, size) for stride, size in zip(x.stride(), x.shape, strict=True) if size > 1)
    reach = 0
    for stride, size in dims:
        if stride <= reach:
            break
        reach += stride * (size - 1)
    else:
        # Sorted by stride, each dimension steps over all that is below it.
        return False
    strides, sizes = [stride for stride, _ in dims], [size for _, size in dims]
    # Two indices meet if their difference d, not 0 and |d_i| < size_i, has sum(d_i * stride_i) = 0. Its first entry
    # that is not 0 may be taken as positive: e_i = d_i + size_i - 1 counts from 0, and so does d_j - 1.
    for j in range(len(dims)):
        steps = [sizes[j] - 1, *(2 * size - 1 for size in sizes[j + 1 :])]
        target = sum(stride * (size - 1) for stride, size in dims[j + 1 :]) - strides[j]
        if target >= 0 and _meet(0, steps, strides[j:], target, (), (), 1):
            return True
    return False


def _share_elements(q: Tensor, k: Tensor) -> bool:
    """Whether q and k have a byte in common, or might where that cannot be decided.

    Slices of packed projections have none, though their extents overlap.
    """
    # By address: two storages may be one piece of memory that came from outside.
    size, q_start, k_start = q.element_size(), q.data_ptr(), k.data_ptr()
    q_reach, k_reach = (sum(step * (n - 1) for step, n in zip(x.stride(), x.shape, strict=True)) for x in (q, k))
    if k_start >= q_start + size * (q_reach + 1) or q_start >= k_start + size * (k_reach + 1):
        return False
    q_strides, k_strides = ([size * step for step in x.stride()] for x in (q, k))
    return _meet(q_start, q.shape, q_strides, k_start, k.shape, k_strides, size)


def _meet(
    start: int,
    shape: Sequence[int],
    strides: Sequence[int],
    other_start: int,
    other_shape: Sequence[int],
    other_strides: Sequence[int],
    size: int,
) -> bool:
    """Whether two sets of addresses, start + sum(i * stride) and `size` bytes from there on, meet.

    NumPy solves it for arrays; these have addresses and no memory that anybody reads.
    """
    # Relative to the lower one, and well away from address 0, which NumPy takes for no memory.
    low = min(start, other_start) - (1 << 20)
    first, second = (
        np.asarray(_Addresses(here - low, tuple(sizes), tuple(steps), size))
        for here, sizes, steps in ((start, shape, strides), (other_start, other_shape, other_strides))
    )
    try:
        # NumPy's stubs know two of the values of max_work.
        return bool(np.shares_memory(first, second, max_work=_MOST_WORK))  # pyright: ignore[reportArgumentType]
    except np.exceptions.TooHardError:
        return True


class _Addresses:
    """Addresses by NumPy's array interface, for `np.shares_memory`, which reads nothing of what is there."""

    def __init__(self, start: int, shape: tuple[int, ...], strides: tuple[int, ...], size: int) -> None:
        self.__array_interface__: dict[str, object] = {
            "version": 3,
            "typestr": f"|V{size}",
            "data": (start, True),
            "shape": shape,
            "strides": strides,
        }
