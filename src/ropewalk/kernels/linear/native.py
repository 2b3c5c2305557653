"""One token of linear attention after a state, by the C extension."""

from torch import Tensor

from ropewalk.kernels.native.extension import NATIVE
from ropewalk.kernels.types import Layout

__all__ = ["linear_step"]


def linear_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    above: Tensor,
    below: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    row: int,
    decay: Tensor | None,
    layout: Layout,
    maps: tuple[int, int],
    normalize: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Return the output for one token, and the sums after it; None if the call is unusual in any way.

    Args:
        q: Queries [batch, heads, 1, width].
        k: Keys [batch, kv_heads, 1, width].
        v: Values [batch, kv_heads, 1, v_dim].
        above: Sums of (R k) v^T, float32 [batch, kv_heads or heads, width, v_dim].
        below: Sums of k, float32 [batch, kv_heads or heads, width].
        cos: [rows, pairs] of a rope, which is not negated and needs no gradient; None for no rotation.
        sin: [rows, pairs] of the same rope, or None.
        row: Row of cos and sin for this token.
        decay: Logarithm of the decay [heads of the sums] or [batch, heads of the sums, 1], or None.
        layout: Layout of the rotation.
        maps: Numbers of the feature maps of queries and keys, as in `FeatureMap`.
        normalize: Whether to divide by the denominator.
        scale: Factor on a result that is not divided.

    Returns:
        The output [batch, heads, 1, v_dim], and the new sums.

    >>> import torch
    >>> one, sums = torch.ones(1, 1, 1, 1), (torch.tensor([[[[3.0]]]]), torch.tensor([[[1.0]]]))
    >>> step = linear_step(one, one, one, *sums, None, None, 0, None, Layout(True, 0, -2), (3, 3), True, 1.0)
    >>> NATIVE is None or step[0].item()  # (3 + 1) / (1 + 1)
    2.0
    """
    if NATIVE is None:
        return None
    return NATIVE.linear_step(q, k, v, above, below, cos, sin, row, decay, layout, maps, normalize, scale)
