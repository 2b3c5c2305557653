"""Check that tensors can be rotated in place: no overlapping elements, and nothing that autograd protects."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ropewalk.errors import RopewalkError
from ropewalk.kernels.torch_internals import is_plain, view_base, why_view_is_fixed

__all__ = ["check_in_place"]

# Whether two views overlap is a bounded Diophantine equation, which is hard for some strides. NumPy stops after this
# many steps, some milliseconds. The strides of usual views need only a few.
_MOST_WORK = 100_000


def check_in_place(q: Tensor, k: Tensor | None, angles_need_gradient: bool = False) -> None:
    """Raise if an in-place rotation would write an element twice, or one that must not be written. Nothing is written.

    Args:
        q: Queries, or any single tensor.
        k: Keys, or None.
        angles_need_gradient: Whether cos and sin require a gradient. The rotated tensors then require one too.

    Raises:
        RopewalkError: If elements share memory, or if autograd or inference mode does not allow the write.

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
                expected="a tensor that can be written: no leaf of autograd, no view of a leaf, no inference tensor; "
                "if a gradient is required, no view except one by an index",
                got=reason,
                do="use rope(...), which does not write to it, or create the view by an index: qkv[:, :, 0]",
            )
        if x.device.type != "meta" and x.numel() and _overlaps_itself(x):
            raise RopewalkError(
                asked=f"rope.rotate_({name})",
                expected="separate memory for every element",
                got=f"shape {list(x.shape)} with strides {list(x.stride())}",
                do="use rope(...), or clone an expanded tensor first",
            )
    if k is not None and q.device.type != "meta" and q.numel() and k.numel() and _share_elements(q, k):
        raise RopewalkError(
            asked="rope.rotate_(q, k)",
            expected="q and k in separate memory",
            got="elements that belong to both, or strides for which this cannot be decided",
            do="clone one of them, or rotate the shared elements only once",
        )


def _why_not_writable(x: Tensor, angles_need_gradient: bool) -> str | None:
    """Return why x cannot be written, or None. torch would raise its own error only after it has written q."""
    if x.is_inference() and not torch.is_inference_mode_enabled():
        return "an inference tensor"
    if not torch.is_grad_enabled():
        return None
    base = view_base(x)
    if base.is_leaf and base.requires_grad:
        return "a leaf that requires a gradient, or a view of one"
    return why_view_is_fixed(x) if angles_need_gradient or x.requires_grad else None


def _overlaps_itself(x: Tensor) -> bool:
    """Whether two indices of x have the same address. True if this cannot be decided."""
    dims = sorted((stride, size) for stride, size in zip(x.stride(), x.shape, strict=True) if size > 1)
    reach = 0
    for stride, size in dims:
        if stride <= reach:
            break
        reach += stride * (size - 1)
    else:
        # Sorted by stride, each stride is larger than the extent of all smaller ones.
        return False
    strides, sizes = [stride for stride, _ in dims], [size for _, size in dims]
    # Two indices have the same address if their difference d, not 0 and |d_i| < size_i, has sum(d_i * stride_i) = 0.
    # Without loss of generality its first nonzero entry d_j is positive. Then e_i = d_i + size_i - 1 and d_j - 1 are
    # indices that start at 0.
    for j in range(len(dims)):
        steps = [sizes[j] - 1, *(2 * size - 1 for size in sizes[j + 1 :])]
        target = sum(stride * (size - 1) for stride, size in dims[j + 1 :]) - strides[j]
        if target >= 0 and _meet(0, steps, strides[j:], target, (), (), 1):
            return True
    return False


def _share_elements(q: Tensor, k: Tensor) -> bool:
    """Whether q and k have a byte in common. True if this cannot be decided.

    Slices of packed projections have none, although their extents overlap.
    """
    # Compare addresses, not storages: two storages can wrap the same external memory.
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
    """Whether two views overlap. An element of a view is `size` bytes at start + sum(i * stride).

    NumPy decides this for arrays. The arrays here only have addresses, and their memory is never read.
    """
    # Relative to the lower address, and far from address 0, which NumPy treats as no memory.
    low = min(start, other_start) - (1 << 20)
    first, second = (
        np.asarray(_Addresses(address - low, tuple(sizes), tuple(steps), size))
        for address, sizes, steps in ((start, shape, strides), (other_start, other_shape, other_strides))
    )
    try:
        # NumPy's stubs allow only two values of max_work.
        return bool(np.shares_memory(first, second, max_work=_MOST_WORK))  # pyright: ignore[reportArgumentType]
    except np.exceptions.TooHardError:
        return True


class _Addresses:
    """Addresses in NumPy's array interface, for `np.shares_memory`, which does not read the memory."""

    def __init__(self, start: int, shape: tuple[int, ...], strides: tuple[int, ...], size: int) -> None:
        self.__array_interface__: dict[str, object] = {
            "version": 3,
            "typestr": f"|V{size}",
            "data": (start, True),
            "shape": shape,
            "strides": strides,
        }
