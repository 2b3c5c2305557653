"""What every backend receives: layouts of features, tables of cos and sin, norms, sides and sums of linear attention.

Kernels import these, and nothing of each other's.
"""

from dataclasses import dataclass
from enum import IntEnum
from typing import Literal, NamedTuple

import torch
from torch import Tensor

__all__ = ["FeatureMap", "FeatureMapName", "Features", "Layout", "Norm", "Side", "Sums", "Tables", "line_up"]


@dataclass(frozen=True)
class Layout:
    """Where the features of a rotation are: their pairing, the first that is rotated, the dimension of the sequence.

    >>> Layout(interleaved=True, start=0, seq_dim=-2).start
    0
    """

    interleaved: bool
    start: int
    seq_dim: int


class Tables(NamedTuple):
    """cos and sin, [seq, pairs], [batch, seq, pairs] or [batch, heads, seq, pairs], and the row of the first token.

    >>> Tables(torch.ones(3, 2), torch.zeros(3, 2)).row
    0
    """

    cos: Tensor
    sin: Tensor
    row: int = 0


def line_up(table: Tensor, x: Tensor, seq_dim: int, row: int = 0) -> Tensor:
    """cos or sin as `cos_sin` returns it, from `row` on, shaped to broadcast against x.

    [seq, pairs] is shared by every batch and head, [batch, seq, pairs] by every head; [batch, heads, seq, pairs] has a
    table per head. x is [.., seq, dim] for seq_dim -2 and [.., seq, heads, dim] for seq_dim -3; its batch is its first
    dimension.

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


class Norm(NamedTuple):
    """How q and k are normalised before they are rotated.

    `plus_one` multiplies by 1 + weight. `rounding` has the bits of `Norm.rounding` in native/rotation.h: 1 rounds to
    the dtype of x after the scaling, 2 after the weight.

    >>> Norm(1e-6).rounding
    0
    """

    eps: float
    plus_one: bool = False
    rounding: int = 0

    @classmethod
    def as_transformers(cls, eps: float, plus_one: bool) -> "Norm":
        """The norm that rounds where transformers does: after the weight, and without plus_one after the scaling too.

        >>> Norm.as_transformers(1e-6, plus_one=False).rounding, Norm.as_transformers(1e-6, plus_one=True).rounding
        (3, 2)
        """
        return cls(eps, plus_one, 2 if plus_one else 3)


FeatureMapName = Literal["elu", "relu", "squared_relu", "identity", "exp"]


class FeatureMap(IntEnum):
    """The feature maps of linear attention that kernels compute, by name; Triton kernels are compiled for the number.

    elu(x) + 1, max(x, 0), max(x, 0)^2, x and exp(x). Their formulas are in linear/feature_maps.py (torch) and in
    linear/triton_features.py.

    >>> FeatureMap["elu"].value, [feature_map.name for feature_map in FeatureMap][-1]
    (0, 'exp')
    """

    elu = 0
    relu = 1
    squared_relu = 2
    identity = 3
    exp = 4

    @property
    def zero(self) -> float:
        """What the map makes 0 of: hidden keys and missing features are filled with it, and then add nothing.

        >>> FeatureMap.exp.zero, FeatureMap.relu.zero
        (-inf, 0.0)
        """
        return float("-inf") if self in (FeatureMap.elu, FeatureMap.exp) else 0.0


class Side(NamedTuple):
    """Queries or keys of linear attention: [batch, heads, seq, width], the name of their feature map, their tables.

    `shift`, [batch, heads, seq], is subtracted before an exponential. Without tables nothing is rotated.

    >>> Side(torch.ones(1, 1, 2, 4), "elu").map
    'elu'
    """

    x: Tensor
    map: FeatureMapName
    shift: Tensor | None = None
    tables: Tables | None = None


class Features(NamedTuple):
    """Features of one side, [batch, heads, seq, width]: as the denominator uses them, and rotated.

    >>> Features(torch.ones(1, 1, 2, 4), torch.ones(1, 1, 2, 4)).plain.shape
    torch.Size([1, 1, 2, 4])
    """

    plain: Tensor
    rotated: Tensor


class Sums(NamedTuple):
    """Sums over earlier keys: of (R k) v^T, [batch, kv_heads, width, v_dim], and of k, [batch, kv_heads, width].

    >>> Sums(torch.zeros(1, 1, 4, 2), torch.zeros(1, 1, 4)).below.shape
    torch.Size([1, 1, 4])
    """

    above: Tensor
    below: Tensor

    def flat(self) -> Tensor:
        """Both in one tensor, [batch * kv_heads, width * (v_dim + 1)], as kernels and library ops pass them on.

        >>> Sums(torch.zeros(1, 2, 4, 3), torch.zeros(1, 2, 4)).flat().shape
        torch.Size([2, 16])
        """
        return torch.cat([self.above.flatten(2), self.below], dim=-1).flatten(0, 1)

    @classmethod
    def from_flat(cls, total: Tensor, kv_heads: int, width: int, v_dim: int) -> "Sums":
        """The sums in what `flat` returns, as views.

        >>> Sums.from_flat(torch.zeros(2, 16), 2, 4, 3).above.shape
        torch.Size([1, 2, 4, 3])
        """
        rows = total.unflatten(0, (-1, kv_heads))
        return cls(rows[..., : width * v_dim].unflatten(-1, (width, v_dim)), rows[..., width * v_dim :])
