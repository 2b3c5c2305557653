"""What layers of attention share: their sizes, and the projections before and after the heads."""

import torch
from torch import Tensor, nn

from ropewalk.errors import require_flag
from ropewalk.nn.attention.arguments import checked_sizes

__all__ = ["ProjectedHeads"]


class ProjectedHeads(nn.Module):
    """q_proj, k_proj, v_proj and o_proj, named as checkpoints name them; what happens between is a layer's own.

    >>> layer = ProjectedHeads(8, num_heads=4, num_kv_heads=2)
    >>> q, k, v = layer.heads_of(torch.zeros(1, 5, 8))
    >>> q.shape, v.shape, layer.joined(q).shape
    (torch.Size([1, 4, 5, 2]), torch.Size([1, 2, 5, 2]), torch.Size([1, 5, 8]))
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        causal: bool = True,
        qkv_bias: bool = False,
        out_bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        name = type(self).__name__
        sizes = checked_sizes(dim, num_heads, num_kv_heads, head_dim, name)
        self.dim, self.num_heads, self.num_kv_heads, self.head_dim = sizes
        self.causal = require_flag(causal, asked=f"{name}(causal=...)")
        require_flag(qkv_bias, asked=f"{name}(qkv_bias=...)")
        require_flag(out_bias, asked=f"{name}(out_bias=...)")
        made = {"device": device, "dtype": dtype}
        wide, narrow = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        self.q_proj = nn.Linear(self.dim, wide, bias=qkv_bias, **made)
        self.k_proj = nn.Linear(self.dim, narrow, bias=qkv_bias, **made)
        self.v_proj = nn.Linear(self.dim, narrow, bias=qkv_bias, **made)
        self.o_proj = nn.Linear(wide, self.dim, bias=out_bias, **made)

    def heads_of(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens [batch, seq, dim] as q, k and v, [batch, heads, seq, head_dim].

        >>> [heads.shape[1] for heads in ProjectedHeads(4, num_heads=2).heads_of(torch.zeros(1, 3, 4))]
        [2, 2, 2]
        """
        q, k, v = (
            project(x).unflatten(-1, (heads, self.head_dim)).transpose(1, 2)
            for project, heads in (
                (self.q_proj, self.num_heads),
                (self.k_proj, self.num_kv_heads),
                (self.v_proj, self.num_kv_heads),
            )
        )
        return q, k, v

    def joined(self, y: Tensor) -> Tensor:
        """What heads gave, [batch, heads, seq, head_dim], as tokens again.

        >>> ProjectedHeads(4, num_heads=2).joined(torch.zeros(1, 2, 3, 2)).shape
        torch.Size([1, 3, 4])
        """
        return self.o_proj(y.transpose(1, 2).flatten(2))
