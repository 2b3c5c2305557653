"""The backend "torch": torch operations, for every device and every call."""

from torch import Tensor

from ropewalk.kernels.angles.torch import cos_sin
from ropewalk.kernels.backend import Backend, Operation
from ropewalk.kernels.linear.torch import linear_attention
from ropewalk.kernels.qk_norm.torch import norm_rotate
from ropewalk.kernels.rotate.torch import rotate
from ropewalk.kernels.types import Layout, Side, Sums

__all__ = ["TORCH"]


def _linear_attention(
    q: Side, k: Side, v: Tensor, before: Tensor | None, layout: Layout, causal: bool, cu_seqlens: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Call `linear.torch.linear_attention` with flat sums."""
    sums = None if before is None else Sums.from_flat(before, k.x.shape[1], q.x.shape[-1], v.shape[-1])
    out, after = linear_attention(q, k, v, sums, layout, causal, cu_seqlens)
    return out, after.flat()


TORCH = Backend(
    name="torch",
    operations={
        # As a library op, because Inductor would recompute the float64 cosines for every head.
        "cos_sin": Operation(run=cos_sin),
        "rotate": Operation(run=rotate, opaque=False),
        "norm_rotate": Operation(run=norm_rotate, is_formula=True),
        "linear_attention": Operation(run=_linear_attention, is_formula=True),
    },
    devices=None,
)
