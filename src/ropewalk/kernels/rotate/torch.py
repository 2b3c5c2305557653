"""The rotation in torch operations: for every device, for tracing, and if no other backend is available.

Both functions accept cos and sin as `cos_sin` returns them, and rotate the 2 * pairs features from `layout.start` on.
They compute in float32 (float64 for float64) and round once.
"""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from ropewalk.kernels.constructors import empty_like, randn, zeros_like
from ropewalk.kernels.precision import working_dtype
from ropewalk.kernels.types import Layout, line_up

__all__ = ["rotate", "rotate_traceable"]


def rotate(
    q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, layout: Layout, row: int = 0, conjugate: bool = False
) -> tuple[Tensor, ...]:
    """Return rotated q, and k unless it is None, with at most one float32 temporary of their size.

    y = swap(x) * sin + x * cos, where swap replaces each pair (a, b) by (-b, a).

    The rotation of a token must not depend on the number of other tokens. Therefore only operations are used that round
    in the same way in vector instructions and in the loop over the remaining elements. A complex product does not. A
    fused multiply-add does if both are fused, which is tested once (`_fuses_alike`).

    Args:
        q: Queries, or any tensor.
        k: Keys, or None.
        cos: As `cos_sin` returns it.
        sin: As `cos_sin` returns it.
        layout: Pairing, first rotated feature, and dimension of the sequence.
        row: Row of cos and sin that belongs to the first token.
        conjugate: Whether to rotate by the opposite angles.

    >>> x = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
    >>> rotate(x, None, torch.zeros(1, 2), torch.ones(1, 2), Layout(False, 0, -2))[0].tolist()  # by 90 degrees
    [[-3.0, -4.0, 1.0, 2.0]]
    """
    if k is not None and q.dim() != k.dim():
        return tuple(rotate(x, None, cos, sin, layout, row, conjugate)[0] for x in (q, k))
    cos, sin = (line_up(table, q, layout.seq_dim, row) for table in (cos, sin))
    sin = -sin if conjugate else sin
    if layout.interleaved:
        # (a + ib) * i sin = -b sin + i a sin: one pass over neighbours. Each part is one product, plus zero.
        wide_cos, i_sin = cos.repeat_interleave(2, dim=-1), torch.complex(zeros_like(sin), sin)
        swap = functools.partial(_swap_neighbours, sin=sin, i_sin=i_sin)
    else:
        wide_cos = torch.cat((cos, cos), dim=-1)
        swap = functools.partial(_swap_halves, sin=sin, minus_sin=-sin)
    return tuple(_rotate_one(x, wide_cos, swap, layout.start) for x in (q, k) if x is not None)


def _rotate_one(x: Tensor, wide_cos: Tensor, swap: Callable[[Tensor, Tensor], None], start: int) -> Tensor:
    stop = start + wide_cos.shape[-1]
    y = empty_like(x)
    source, target = x, y
    if stop - start < x.shape[-1]:
        y[..., :start].copy_(x[..., :start])
        y[..., stop:].copy_(x[..., stop:])
        source, target = x[..., start:stop], y[..., start:stop]
    low = x.dtype not in (torch.float32, torch.float64)
    if low:
        source = source.to(torch.float32)
    rotated = empty_like(source) if low else target
    swap(source, rotated)
    if _fuses_alike(x.device.type, source.dtype):
        rotated.addcmul_(source, wide_cos)
    else:
        rotated += source * wide_cos
    if low:
        target.copy_(rotated)
    return y


def _swap_halves(x: Tensor, out: Tensor, *, sin: Tensor, minus_sin: Tensor) -> None:
    """Write swap(x) * sin to `out`, for pairs (i, i + pairs)."""
    a, b = x.chunk(2, dim=-1)
    first, second = out.chunk(2, dim=-1)
    torch.mul(b, minus_sin, out=first)
    torch.mul(a, sin, out=second)


def _swap_neighbours(x: Tensor, out: Tensor, *, sin: Tensor, i_sin: Tensor) -> None:
    """Write swap(x) * sin to `out`, for pairs (2i, 2i + 1)."""
    if _is_complex(x) and _is_complex(out):
        torch.mul(_as_complex(x), i_sin, out=_as_complex(out))
    else:
        torch.mul(x[..., 1::2], -sin, out=out[..., 0::2])
        torch.mul(x[..., 0::2], sin, out=out[..., 1::2])


@functools.cache
def _fuses_alike(device: str, dtype: torch.dtype) -> bool:
    """Whether addcmul of this build of torch rounds an element in the same way alone and within a vector.

    torch compiles it for vectors and for the remaining elements. The compiler may fuse product and sum in only one of
    them.
    """
    if device != "cpu":
        # Other devices run the same code for every element.
        return True
    with torch.inference_mode(False), torch.no_grad():
        a, b, c = randn(3, 257, dtype=dtype, device="cpu", generator=torch.Generator().manual_seed(0))
        together = torch.addcmul(a, b, c)
        alone = [torch.addcmul(a[i : i + 1], b[i : i + 1], c[i : i + 1]) for i in range(len(a))]
        return torch.equal(together, torch.cat(alone))


def _is_complex(x: Tensor) -> bool:
    """Whether pairs of neighbouring features can be viewed as complex numbers."""
    return x.stride(-1) == 1 and x.storage_offset() % 2 == 0 and all(stride % 2 == 0 for stride in x.stride()[:-1])


def _as_complex(x: Tensor) -> Tensor:
    return torch.view_as_complex(x.unflatten(-1, (-1, 2)))


def rotate_traceable(
    x: Tensor, cos: Tensor, sin: Tensor, layout: Layout, row: int = 0, conjugate: bool = False
) -> Tensor:
    """Return the rotation of x by the formula, which is differentiable in all arguments and which compilers can fuse.

    Arguments are those of `rotate`.

    >>> x = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
    >>> rotate_traceable(x, torch.zeros(1, 2), torch.ones(1, 2), Layout(True, 0, -2)).tolist()  # by 90 degrees
    [[-2.0, 1.0, -4.0, 3.0]]
    """
    cos, sin = (_on_mesh_of(x, line_up(table, x, layout.seq_dim, row)) for table in (cos, sin))
    sin = -sin if conjugate else sin
    start, pairs = layout.start, cos.shape[-1]
    stop = start + 2 * pairs
    whole = stop - start == x.shape[-1]
    # No slice of the whole tensor: batched tensors of `is_grads_batched` do not support such an alias.
    rotated = (x if whole else x[..., start:stop]).to(working_dtype(x))
    if layout.interleaved:
        shape = rotated.shape
        a, b = rotated.reshape(*shape[:-1], pairs, 2).unbind(-1)
        rotated = torch.stack((a * cos - b * sin, a * sin + b * cos), dim=-1).reshape(shape)
    else:
        a, b = rotated[..., :pairs], rotated[..., pairs:]
        rotated = torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)
    rotated = rotated.to(x.dtype)
    if whole:
        return rotated
    return torch.cat((x[..., :start], rotated, x[..., stop:]), dim=-1)


def _on_mesh_of(x: Tensor, table: Tensor) -> Tensor:
    """Return `table`, replicated on the mesh of x if x is a DTensor: every rank computes the same table."""
    if type(x).__name__ != "DTensor" or type(table).__name__ == "DTensor":
        return table
    from torch.distributed.tensor import DTensor, Replicate

    mesh = x.device_mesh  # pyright: ignore[reportAttributeAccessIssue]
    return DTensor.from_local(table, mesh, [Replicate()] * mesh.ndim, run_check=False)
