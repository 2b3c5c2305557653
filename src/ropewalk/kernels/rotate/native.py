"""The rotation by the C extension, for plain CPU tensors, in one pass over memory."""

import torch
from torch import Tensor

from ropewalk.kernels.native.extension import MOST_DIMS, NATIVE
from ropewalk.kernels.precision import FLOATS
from ropewalk.kernels.types import Layout, RopeNumbers, Shortcut

__all__ = ["rotate", "shortcut", "supports"]


def supports(q: Tensor, k: Tensor | None, layout: Layout) -> str | None:
    """Return the reason why the C kernel does not support these tensors, or None.

    >>> supports(torch.ones(3, 4), None, Layout(True, 0, -2)) is None
    True
    """
    if not q.is_cpu:
        return "tensors that are not on the CPU"
    if q.dtype not in FLOATS:
        return "a dtype that it does not support"
    if q.dim() > MOST_DIMS or (k is not None and k.dim() > MOST_DIMS):
        return "too many dimensions"
    return None


def rotate(
    q: Tensor,
    k: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    layout: Layout,
    row: int = 0,
    conjugate: bool = False,
    in_place: bool = False,
) -> tuple[Tensor, ...]:
    """Return rotated q, and k unless it is None, as new tensors with their strides, or in place.

    Arguments are those of `rotate.torch.rotate`.

    >>> from ropewalk.kernels.rotate.torch import rotate as fallback
    >>> run = fallback if NATIVE is None else rotate
    >>> x = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
    >>> run(x, None, torch.zeros(1, 2), torch.ones(1, 2), Layout(False, 0, -2))[0].tolist()  # by 90 degrees
    [[-3.0, -4.0, 1.0, 2.0]]
    """
    yq, yk = (q, k) if in_place else (None, None)
    options = row, layout.start, layout.seq_dim, layout.interleaved, conjugate, torch.get_num_threads()
    return NATIVE.rotate(q, k, yq, yk, cos, sin, *options)  # pyright: ignore[reportOptionalMemberAccess]


def shortcut(numbers: RopeNumbers) -> Shortcut:
    """Return the shortcut of a rope: its common calls, checked and run in C.

    >>> theta, one = torch.ones(1, dtype=torch.float64), torch.ones((), dtype=torch.float64)
    >>> rotated = None
    >>> if NATIVE is not None:
    ...     rotated = shortcut(RopeNumbers(2, Layout(True, 0, -2), theta, None, one, {}, None))(torch.ones(3, 2))
    >>> rotated is None  # without remembered cos and sin
    True
    """
    layout = numbers.layout
    return NATIVE.shortcut(  # pyright: ignore[reportOptionalMemberAccess]
        numbers.head_dim,
        numbers.inv_freq.shape[0],
        layout.start,
        layout.seq_dim,
        layout.interleaved,
        numbers.context_length,
        numbers.inv_freq,
        numbers.radix_table if numbers.from_positions else None,
        numbers.amplitude,
        numbers.makers,
        numbers.rope,
        numbers.with_graph,
    )
