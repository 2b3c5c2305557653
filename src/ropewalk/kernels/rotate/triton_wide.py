"""The rotation on a GPU by tables as other libraries compute them: of more columns than pairs, in any float dtype.

transformers computes cos and sin in the dtype of the model, with each number twice: [batch, seq, 2 * pairs]. The kernel
reads the first half. Nothing is converted, so a call is one launch.
"""

from torch import Tensor

from ropewalk.kernels.constructors import empty_like
from ropewalk.kernels.rotate.triton import TableShape, plan
from ropewalk.kernels.signature import python_signature
from ropewalk.kernels.triton_launch import LAUNCHES, table_strides
from ropewalk.kernels.types import Layout

__all__ = ["rotate_by_wide"]


def rotate_by_wide(
    q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, pairs: int, layout: Layout, conjugate: bool = False
) -> tuple[Tensor, ...]:
    """Return rotated q, and k unless it is None, as new tensors.

    Args:
        q: Queries, not in float64.
        k: Keys, or None.
        cos: [seq, width] or [batch, seq, width]; the first `pairs` columns are read.
        sin: Shaped as cos.
        pairs: Number of pairs.
        layout: Pairing, first rotated feature, and dimension of the sequence.
        conjugate: Whether to rotate by the opposite angles.

    >>> import torch
    >>> from ropewalk.kernels.triton_launch import INTERPRETED
    >>> x, cos = torch.tensor([[1.0, 2.0, 3.0, 4.0]]), torch.zeros(1, 4).bfloat16()
    >>> x, cos = (t if INTERPRETED else t.cuda() for t in (x, cos))
    >>> rotate_by_wide(x, None, cos, torch.ones_like(cos), 2, Layout(False, 0, -2))[0].tolist()  # by 90 degrees
    [[-3.0, -4.0, 1.0, 2.0]]
    """
    cos, sin = cos.contiguous(), sin.contiguous()
    out = tuple(empty_like(x) for x in ((q,) if k is None else (q, k)))
    described = python_signature(q, k, cos, sin)
    key = None if described is None else (rotate_by_wide, described[0], pairs, layout, conjugate)
    launch = LAUNCHES.get(key)
    if launch is None:
        if all(y.numel() == 0 for y in out):
            return out
        tables = TableShape(cos.dim(), pairs, *table_strides(cos), cos.shape[:-1].numel(), width=cos.shape[-1])
        planned = plan(q, k, out[0], None if k is None else out[1], tables, layout, conjugate, False)
        launch = LAUNCHES.keep(key, planned or "separately")
    if launch != "separately":
        both = q, q if k is None else k
        launch(q.device, *both, out[0], out[-1], cos, sin, cos, 0)
        return out
    if k is not None:
        return tuple(rotate_by_wide(x, None, cos, sin, pairs, layout, conjugate)[0] for x in (q, k))
    # Strides that do not form rows.
    return rotate_by_wide(q.contiguous(), None, cos, sin, pairs, layout, conjugate)
