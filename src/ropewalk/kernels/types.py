"""Arguments of all backends: layouts of features, tables of cos and sin, norms, sides and sums of linear attention."""

from collections.abc import Callable
from enum import IntEnum
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

__all__ = [
    "NO_WEIGHTING",
    "FeatureMap",
    "FeatureMapName",
    "Features",
    "Layout",
    "LinearAgain",
    "Norm",
    "RopeNumbers",
    "Shortcut",
    "Side",
    "Sums",
    "Tables",
    "Weighting",
    "line_up",
]


class Layout(NamedTuple):
    """Memory layout of a rotation.

    Args:
        interleaved: Whether pairs are (0, 1), (2, 3), ...; otherwise (i, i + pairs).
        start: Index of the first rotated feature.
        seq_dim: Dimension of the sequence: -2 for [..., seq, dim], -3 for [..., seq, heads, dim].

    >>> Layout(interleaved=True, start=0, seq_dim=-2).start
    0
    """

    interleaved: bool
    start: int
    seq_dim: int


class Tables(NamedTuple):
    """cos and sin, and the row of the first token.

    Args:
        cos: [seq, pairs], [batch, seq, pairs] or [batch, heads, seq, pairs].
        sin: Shaped as cos.
        row: Row of cos and sin that belongs to the first token.

    >>> Tables(torch.ones(3, 2), torch.zeros(3, 2)).row
    0
    """

    cos: Tensor
    sin: Tensor
    row: int = 0


class RopeNumbers(NamedTuple):
    """What a `Shortcut` must know of a rope: what it rotates, its frequencies, and what else its calls need.

    Args:
        head_dim: Number of features that q and k must have.
        layout: Pairing, first rotated feature, and dimension of the sequence.
        inv_freq: Frequencies [pairs], on the device of the calls.
        radix_table: Radix table, or None.
        amplitude: Factor on cos and sin, a float64 tensor [].
        makers: Which rope computed a tensor of cos, by its id: (weak reference, rope, parameter).
        rope: The object by which `makers` identifies this rope.
        context_length: Number of positions that are allowed, or None.
        with_graph: (q, k or None, rotated tensors, cos, sin, row, whether nobody else can write to cos and sin) -> the
            rotated tensors with a graph, for calls that need gradients of q and k. For norm_rotate: (q, k, q_weight,
            k_weight, rotated tensors, cos, sin, whether nobody ..., row, norm). None before `ops` has chosen.
        from_positions: Whether calls with positions are supported: no other backend computes cos and sin.

    >>> RopeNumbers(4, Layout(True, 0, -2), torch.ones(2), None, torch.ones(()), {}, "this rope").head_dim
    4
    """

    head_dim: int
    layout: Layout
    inv_freq: Tensor
    radix_table: Tensor | None
    amplitude: Tensor
    makers: dict[int, Any]
    rope: object
    context_length: int | None = None
    with_graph: Callable[..., tuple[Tensor, ...]] | None = None
    from_positions: bool = False


class Shortcut(Protocol):
    """The common calls of one rope, for a backend whose host time matters: all checks and the rotation in one step.

    A call that is unusual in any way returns None and does nothing. The caller then uses the general path, which raises
    all errors. The caller detects compilers; the shortcut detects everything else that traces or intercepts calls.

    >>> Shortcut.__name__
    'Shortcut'
    """

    def __call__(self, *arguments: Any, **options: Any) -> Tensor | tuple[Tensor, ...] | None:
        """Rotate q, or q and k, as the module does, with one of the options offset, angles and positions, or none.

        For norm_rotate: (q, k, q_weight, k_weight, norm), with offset or angles.
        """
        ...

    def rotate_(self, *arguments: Any, **options: Any) -> Tensor | tuple[Tensor, ...] | None:
        """The same in place."""
        ...

    def remember(self, start: int, stop: int, cos: Tensor, sin: Tensor) -> object:
        """Use cos and sin [stop - start, pairs] for calls at positions start .. stop-1, until the next call of this."""
        ...


def line_up(table: Tensor, x: Tensor, seq_dim: int, row: int = 0) -> Tensor:
    """Return cos or sin from `row` on, shaped to broadcast against x.

    Args:
        table: [seq, pairs], shared by all batches and heads; [batch, seq, pairs], shared by all heads; or
            [batch, heads, seq, pairs].
        x: [..., seq, dim] for seq_dim -2, [..., seq, heads, dim] for seq_dim -3. The batch is its first dimension.
        seq_dim: Dimension of the sequence in x.
        row: Row of the table that belongs to the first token.

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
    """RMSNorm of q and k before the rotation.

    Args:
        eps: Added to the mean square.
        plus_one: Whether to multiply by 1 + weight instead of weight.
        rounding: Bits as in `Norm.rounding` of native/rotation.h. 1 rounds to the dtype of x after the scaling, 2 after
            the multiplication with the weight.

    >>> Norm(1e-6).rounding
    0
    """

    eps: float
    plus_one: bool = False
    rounding: int = 0

    @classmethod
    def as_transformers(cls, eps: float, plus_one: bool) -> "Norm":
        """Return the norm with the roundings of transformers: after the weight, and without plus_one after the scaling.

        >>> Norm.as_transformers(1e-6, plus_one=False).rounding, Norm.as_transformers(1e-6, plus_one=True).rounding
        (3, 2)
        """
        return cls(eps, plus_one, 2 if plus_one else 3)


FeatureMapName = Literal["elu", "relu", "squared_relu", "identity", "exp"]


class FeatureMap(IntEnum):
    """Feature maps of linear attention that kernels compute: elu(x) + 1, max(x, 0), max(x, 0)^2, x and exp(x).

    The number of a map is a compile-time constant of the Triton kernels. The formulas are in linear/feature_maps.py
    (torch) and in linear/triton_features.py.

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
        """The input that the map maps to 0. Masked keys and padding features are filled with it, and so add nothing.

        >>> FeatureMap.exp.zero, FeatureMap.relu.zero
        (-inf, 0.0)
        """
        return float("-inf") if self in (FeatureMap.elu, FeatureMap.exp) else 0.0


class Side(NamedTuple):
    """Queries or keys of linear attention.

    Args:
        x: Queries or keys [batch, heads, seq, width].
        map: Name of the feature map.
        shift: Subtracted from x before an exponential [batch, heads, seq].
        tables: cos and sin. None for no rotation.

    >>> Side(torch.ones(1, 1, 2, 4), "elu").map
    'elu'
    """

    x: Tensor
    map: FeatureMapName
    shift: Tensor | None = None
    tables: Tables | None = None

    def part(self, start: int, stop: int) -> "Side":
        """Return the tokens start .. stop-1.

        >>> Side(torch.ones(1, 1, 5, 4), "elu").part(1, 3).x.shape
        torch.Size([1, 1, 2, 4])
        """
        tables, shift = self.tables, self.shift
        tables = None if tables is None else tables._replace(row=tables.row + start)
        return Side(self.x[:, :, start:stop], self.map, None if shift is None else shift[:, :, start:stop], tables)


class Weighting(NamedTuple):
    """Factors on the terms of both sums of linear attention, which depend on the distance between query and key.

    The factor of query m and key n is exp(decay_{n+1} + ... + decay_m) exp(band[position_n - position_m]). The default
    is no factor, and a result that is divided by its denominator.

    Args:
        decay: Logarithm of the decay per token, at most 0 [batch or 1, kv_heads or heads, keys or 1]. Its first number
            decays the initial sums.
        band: Bias by the difference of positions, key - query = -window .. window [heads, 2 * window + 1]. Farther keys
            have the first or the last number.
        positions: Positions of the keys [batch or 1, keys], for `band`; None if they are consecutive. The positions of
            causal queries are the last ones.
        normalize: Whether the result is divided by the denominator.
        scale: Factor on a result that is not divided.

    >>> Weighting().is_plain(), Weighting(decay=torch.zeros(1, 2, 1)).is_plain()
    (True, False)
    """

    decay: Tensor | None = None
    band: Tensor | None = None
    positions: Tensor | None = None
    normalize: bool = True
    scale: float = 1.0

    def is_plain(self) -> bool:
        """Whether there are no factors and the result is divided."""
        return self.decay is None and self.band is None and self.normalize

    def state_heads(self, kv_heads: int) -> int:
        """Return the number of heads of the sums.

        >>> Weighting().state_heads(2), Weighting(decay=torch.zeros(1, 8, 1)).state_heads(2)
        (2, 8)
        """
        return kv_heads if self.decay is None else self.decay.shape[1]

    def part(self, start: int, stop: int) -> "Weighting":
        """Return the factors of the keys start .. stop-1.

        >>> Weighting(decay=torch.zeros(1, 2, 5)).part(1, 3).decay.shape
        torch.Size([1, 2, 2])
        """
        decay, ids = self.decay, self.positions
        decay = decay if decay is None or decay.shape[-1] == 1 else decay[..., start:stop]
        return self._replace(decay=decay, positions=None if ids is None else ids[..., start:stop])


NO_WEIGHTING = Weighting()


class LinearAgain(Protocol):
    """A call of linear attention for other numbers: tensors with the signature of those of the first call.

    >>> LinearAgain.__name__
    'LinearAgain'
    """

    def forward(self, q: Tensor, k: Tensor, v: Tensor, at: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """Return the outputs, and what the backward needs. `at` are the addresses of q, k and v."""
        ...

    def backward(
        self, cotangent: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, saved: Tensor
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        """Return the gradients of q, k and v from the cotangent of the outputs and the results of `forward`, or None.

        None if one of the tensors is not plain, or has strides that the kernels cannot read.
        """
        ...


class Features(NamedTuple):
    """Features of queries or keys [batch, heads, seq, width]: unrotated, for the denominator, and rotated.

    >>> Features(torch.ones(1, 1, 2, 4), torch.ones(1, 1, 2, 4)).plain.shape
    torch.Size([1, 1, 2, 4])
    """

    plain: Tensor
    rotated: Tensor


class Sums(NamedTuple):
    """Sums over earlier keys, from which the numerator and the denominator of linear attention are computed.

    Args:
        above: Sum of (R k) v^T, for the numerator [batch, kv_heads, width, v_dim].
        below: Sum of k, for the denominator [batch, kv_heads, width].

    >>> Sums(torch.zeros(1, 1, 4, 2), torch.zeros(1, 1, 4)).below.shape
    torch.Size([1, 1, 4])
    """

    above: Tensor
    below: Tensor

    def flat(self) -> Tensor:
        """Return both sums in one tensor [batch * kv_heads, width * (v_dim + 1)], as kernels and library ops use them.

        >>> Sums(torch.zeros(1, 2, 4, 3), torch.zeros(1, 2, 4)).flat().shape
        torch.Size([2, 16])
        """
        return torch.cat([self.above.flatten(2), self.below], dim=-1).flatten(0, 1)

    @classmethod
    def from_flat(cls, total: Tensor, kv_heads: int, width: int, v_dim: int) -> "Sums":
        """Return the sums in the result of `flat`, as views.

        >>> Sums.from_flat(torch.zeros(2, 16), 2, 4, 3).above.shape
        torch.Size([1, 2, 4, 3])
        """
        rows = total.unflatten(0, (-1, kv_heads))
        return cls(rows[..., : width * v_dim].unflatten(-1, (width, v_dim)), rows[..., width * v_dim :])
