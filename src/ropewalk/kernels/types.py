"""Where the features of a rotation lie, and how cos and sin line up with them."""

from dataclasses import dataclass

from torch import Tensor

__all__ = ["Layout", "line_up"]


@dataclass(frozen=True)
class Layout:
    """Where the features of a rotation lie: their pairing, the first that turns, the dimension of the sequence.

    >>> Layout(interleaved=True, start=0, seq_dim=-2).backend is None
    True
    """

    interleaved: bool
    start: int
    seq_dim: int
    backend: str | None = None


def line_up(table: Tensor, x: Tensor, seq_dim: int, row: int = 0) -> Tensor:
    """cos or sin as `cos_sin` gives it, from `row` on, shaped to broadcast against x.

    [seq, pairs] serves every batch and head, [batch, seq, pairs] every head, [batch, heads, seq, pairs] is as it says.
    x is [.., seq, dim] for seq_dim -2 and [.., seq, heads, dim] for seq_dim -3; its batch is its first dimension.

    >>> import torch
    >>> table, x = torch.ones(2, 5, 4), torch.ones(2, 3, 5, 8)
    >>> line_up(table, x, seq_dim=-2).shape, line_up(table, x.transpose(1, 2), seq_dim=-3).shape
    (torch.Size([2, 1, 5, 4]), torch.Size([2, 5, 1, 4]))
    """
    seq, dims = x.shape[seq_dim], x.dim()
    if row or table.shape[-2] != seq:
        table = table.narrow(-2, row, seq)
    if table.dim() == 4:
        table = table if seq_dim == -2 else table.transpose(1, 2)
        return table if dims == 4 else table.squeeze(0)
    per_batch = table.dim() == 3
    table = table if seq_dim == -2 else table.unsqueeze(-2)
    if not per_batch:
        return table
    return table.view(table.shape[0], *[1] * (dims - table.dim()), *table.shape[1:])
