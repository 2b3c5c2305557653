"""The rotation as the node RotaryEmbedding of ONNX, opset 23. torch.export records the node instead of the formula.

The node rotates the leading features of a tensor [batch, heads, seq, head_dim], by cos and sin [batch, seq, pairs] of
the dtype of the tensor. Everything else is done around it: other slices, other shapes, and the rounding of bfloat16 and
float16, which are rotated in float32 like everywhere else.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ropewalk.kernels.precision import working_dtype
from ropewalk.kernels.qk_norm.torch import norm_rotate_traceable
from ropewalk.kernels.rotate.torch import rotate_traceable
from ropewalk.kernels.types import Layout, Norm

__all__ = ["norm_rotate", "rotate"]


def rotate(
    q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, layout: Layout, row: int = 0, conjugate: bool = False
) -> tuple[Tensor, ...]:
    """Return rotated q, and k unless it is None, by one node each. Arguments are those of `rotate.torch.rotate`.

    >>> x = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
    >>> rotate(x, None, torch.zeros(1, 2), torch.ones(1, 2), Layout(False, 0, -2))[0].tolist()  # by 90 degrees
    [[-3.0, -4.0, 1.0, 2.0]]
    """
    return tuple(_rotate_one(x, cos, sin, layout, row, conjugate) for x in (q, k) if x is not None)


def norm_rotate(
    tensors: Sequence[Tensor],
    weights: Sequence[Tensor | None],
    cos: Tensor,
    sin: Tensor,
    layout: Layout,
    norm: Norm,
    row: int = 0,
) -> list[Tensor]:
    """Return the rotation of each tensor after its norm: the formula of the norm, then one node.

    >>> x, quarter = torch.tensor([[3.0, 4.0]]), (torch.zeros(1, 1), torch.ones(1, 1))
    >>> y, _ = norm_rotate([x, x], [None, None], *quarter, Layout(True, 0, -2), Norm(1e-9))
    >>> [round(v, 4) for v in y[0].tolist()]
    [-1.1314, 0.8485]
    """
    pairs = zip(tensors, weights, strict=True)
    return [norm_rotate_traceable(x, weight, cos, sin, layout, norm, row, _rotate_one) for x, weight in pairs]


def _rotate_one(x: Tensor, cos: Tensor, sin: Tensor, layout: Layout, row: int = 0, conjugate: bool = False) -> Tensor:
    per_batch = cos.dim() == 3
    if cos.dim() == 4 or (per_batch and x.dim() > 4):
        # The node has one table per sequence, for all heads.
        return rotate_traceable(x, cos, sin, layout, row, conjugate)
    seq = x.shape[layout.seq_dim]
    if row or cos.shape[-2] != seq:
        cos, sin = cos.narrow(-2, row, seq), sin.narrow(-2, row, seq)
    working, start = working_dtype(x), layout.start
    rotated = (x[..., start:] if start else x).to(working)
    # [batch, heads, seq, dim], or [batch, seq, heads, dim].
    if x.dim() > 4:
        rotated = rotated.flatten(0, -4)
    for _ in range(4 - x.dim()):
        rotated = rotated.unsqueeze(1 if per_batch and layout.seq_dim == -2 else 0)
    sin = -sin if conjugate else sin
    tables = [(t if per_batch else t.unsqueeze(0)).to(working).expand(rotated.shape[0], -1, -1) for t in (cos, sin)]
    options = {"interleaved": layout.interleaved, "rotary_embedding_dim": 2 * cos.shape[-1]}
    if layout.seq_dim == -2:
        rotated = torch.onnx.ops.rotary_embedding(rotated, *tables, **options)
    else:
        # [batch, seq, heads * dim] is the other shape that the node accepts.
        rotated = torch.onnx.ops.rotary_embedding(rotated.flatten(-2), *tables, num_heads=x.shape[-2], **options)
    rotated = rotated.reshape(*x.shape[:-1], x.shape[-1] - start).to(x.dtype)
    return torch.cat((x[..., :start], rotated), dim=-1) if start else rotated
