"""The rotation by the C extension, for plain CPU tensors, in one pass over memory."""

import torch
from torch import Tensor

from ropewalk.kernels.native.extension import MOST_DIMS, NATIVE
from ropewalk.kernels.precision import FLOATS
from ropewalk.kernels.types import Layout

__all__ = ["rotate", "rotate_if_ready", "supports"]


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


def rotate_if_ready(
    q: Tensor,
    k: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    layout: Layout,
    row: int,
    rows: int,
    head_dim: int,
    check_only: bool = False,
) -> tuple[Tensor, ...] | bool | None:
    """Rotate if q and k are plain CPU tensors of the same dtype and length, and fit; otherwise return None.

    All checks of the caller are done here in C, because they add to the latency of decoding.

    Args:
        q: Queries.
        k: Keys, or None.
        cos: As `cos_sin` returns it.
        sin: As `cos_sin` returns it.
        layout: Pairing, first rotated feature, and dimension of the sequence.
        row: Row of cos and sin that belongs to the first token.
        rows: Most tokens that q and k may have.
        head_dim: Number of features that q and k must have.
        check_only: Whether to return True instead of rotating.

    >>> table = torch.ones(3, 2)
    >>> NATIVE and rotate_if_ready(torch.ones(3, 4), None, table, table, Layout(True, 0, -2), 0, 3, 5)
    """
    return NATIVE.direct(  # pyright: ignore[reportOptionalMemberAccess]
        q,
        k,
        cos,
        sin,
        row,
        rows,
        head_dim,
        layout.start,
        layout.seq_dim,
        layout.interleaved,
        0 if check_only else torch.get_num_threads(),
    )
