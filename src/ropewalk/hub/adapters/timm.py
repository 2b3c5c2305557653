"""The rotation functions of timm on ropewalk's kernels: the same names, arguments and results.

`timm.layers.apply_rot_embed_cat` rotates by a table [sin, cos] in which the features of a pair share their angle. timm
itself is not imported.

>>> import torch
>>> from ropewalk.hub.adapters.timm import apply_rot_embed_cat
>>> apply_rot_embed_cat(torch.tensor([[1.0, 0.0]]), torch.tensor([[1.0, 1.0, 0.0, 0.0]])).tolist()  # sin 1, cos 0
[[0.0, 1.0]]
"""

from torch import Tensor

from ropewalk.errors import RopewalkError, shown
from ropewalk.kernels.precision import FLOATS, working_dtype
from ropewalk.kernels.rotate.torch import rotate_traceable
from ropewalk.kernels.types import Layout
from ropewalk.ops import rotate

__all__ = ["apply_rot_embed", "apply_rot_embed_cat", "apply_rot_embed_list"]


def apply_rot_embed(x: Tensor, sin_emb: Tensor, cos_emb: Tensor, half: bool = False) -> Tensor:
    """Rotate x by sin and cos, as `timm.layers.apply_rot_embed` does, in one pass over memory.

    The rotation is computed in float32 (float64 for float64) and rounded once, also if sin and cos are bfloat16. One
    angle per pair is read: sin[..., 0::2] for half=False, the first half of sin for half=True. timm's tables repeat it.

    Args:
        x: [..., seq, dim].
        sin_emb: sin of both features of each pair, broadcastable to x: [seq, dim], [heads, seq, dim] or
            [batch, 1 or heads, seq, dim].
        cos_emb: cos, shaped as sin_emb.
        half: Whether pairs are (i, i + dim/2); otherwise (0, 1), (2, 3), ...

    Returns:
        x rotated, in its dtype. Differentiable in x, sin_emb and cos_emb.

    Raises:
        RopewalkError: If a tensor has another shape or dtype.

    >>> import torch
    >>> one, zero = torch.ones(1, 4), torch.zeros(1, 4)
    >>> apply_rot_embed(torch.tensor([[1.0, 2.0, 3.0, 4.0]]), one, zero, half=True).tolist()  # by 90 degrees
    [[-3.0, -4.0, 1.0, 2.0]]
    """
    _check(x, sin_emb, cos_emb)
    pairs = x.shape[-1] // 2
    narrow = slice(0, pairs) if half else slice(0, None, 2)
    working = working_dtype(x)
    cos, sin = (table[..., narrow].to(working) for table in (cos_emb, sin_emb))
    layout = Layout(not half, 0, -2)
    tables = [_as_kernels_accept(table, x) for table in (cos, sin)]
    cos_table, sin_table = tables
    if cos_table is None or sin_table is None:
        # Other ways to broadcast: the formula, with tables that have the shape of x.
        shape = *x.shape[:-1], pairs
        flat = x.reshape(-1, x.shape[-1])
        cos, sin = (table.expand(shape).reshape(-1, pairs) for table in (cos, sin))
        return rotate_traceable(flat, cos, sin, layout).view(x.shape)
    return rotate(x, None, cos_table, sin_table, layout)[0]


def apply_rot_embed_list(
    x: list[Tensor] | Tensor, sin_emb: Tensor, cos_emb: Tensor, half: bool = False
) -> list[Tensor]:
    """Rotate each tensor of a list, as `timm.layers.apply_rot_embed_list` does.

    Args:
        x: Tensors [..., seq, dim], or one of them.
        sin_emb, cos_emb, half: As in `apply_rot_embed`.

    Returns:
        The rotated tensors.

    >>> import torch
    >>> table = torch.ones(1, 2), torch.zeros(1, 2)
    >>> [y.tolist() for y in apply_rot_embed_list([torch.tensor([[1.0, 0.0]])], *table)]
    [[[0.0, 1.0]]]
    """
    tensors = [x] if isinstance(x, Tensor) else x
    return [apply_rot_embed(t, sin_emb, cos_emb, half) for t in tensors]


def apply_rot_embed_cat(x: Tensor, emb: Tensor, half: bool = False) -> Tensor:
    """Rotate x by a table [sin, cos], as `timm.layers.apply_rot_embed_cat` does.

    To use it in every model of timm, replace the name where timm's modules look it up:
    `timm.layers.attention.apply_rot_embed_cat = apply_rot_embed_cat`, and the same in `timm.models.eva`.

    Args:
        x: [..., seq, dim].
        emb: sin, then cos, in the last dimension: [seq, 2 * dim], or shaped as in `apply_rot_embed`.
        half: As in `apply_rot_embed`.

    Returns:
        x rotated, in its dtype.

    >>> import torch
    >>> table = torch.tensor([[1.0, 1.0, 0.0, 0.0]])  # sin 1, cos 0: by 90 degrees
    >>> apply_rot_embed_cat(torch.tensor([[1.0, 0.0]]), table).tolist()
    [[0.0, 1.0]]
    """
    sin, cos = emb.chunk(2, -1)
    return apply_rot_embed(x, sin, cos, half)


def _check(x: Tensor, sin: Tensor, cos: Tensor) -> None:
    fits = (
        isinstance(x, Tensor)
        and x.dtype in FLOATS
        and x.dim() >= 2
        and x.shape[-1] % 2 == 0
        and all(
            isinstance(t, Tensor) and t.is_floating_point() and t.shape[-1] == x.shape[-1] and t.dim() <= x.dim()
            for t in (sin, cos)
        )
        and sin.shape == cos.shape
        and all(n in (1, m) for n, m in zip(reversed(sin.shape), reversed(x.shape), strict=False))
    )
    if not fits:
        got = ", ".join(f"{t.dtype} {list(t.shape)}" if isinstance(t, Tensor) else shown(t) for t in (x, sin, cos))
        raise RopewalkError(
            asked="apply_rot_embed(x, sin_emb, cos_emb)",
            expected="x [..., seq, dim] with an even dim, and sin and cos [..., seq, dim] that broadcast to it",
            got=got,
            do="pass the table of rope.get_embed() for these tokens, without the prefix tokens that are not rotated",
        )


def _as_kernels_accept(table: Tensor, x: Tensor) -> Tensor | None:
    """Return a table [seq, pairs], [batch, seq, pairs] or [1 or batch, heads, seq, pairs]; None if it is none."""
    if table.dim() < 2 or table.shape[-2] != x.shape[-2]:
        return None
    if table.dim() == 2:
        return table
    if x.dim() == 3:
        return table if table.shape[0] == x.shape[0] else table[0]
    if x.dim() != 4:
        return None
    table = table if table.dim() == 4 else table.unsqueeze(0)
    if table.shape[1] == 1:
        return table[:, 0]
    return table if table.shape[1] == x.shape[1] else None
