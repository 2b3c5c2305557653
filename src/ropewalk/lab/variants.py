"""Encodings that only the lab uses: rounded angles, and three that are wrong, for controls."""

import torch
from torch import Tensor

from ropewalk.nn.encodings.bias import AlibiBias
from ropewalk.nn.encodings.rotary import RotaryEncoding
from ropewalk.nn.positions import range_positions
from ropewalk.nn.rotary.embedding import RotaryEmbedding

__all__ = ["Bfloat16Angles", "GrowingBias", "PositionsZero", "WrongSign"]


class _Rope(RotaryEncoding):
    """RoPE of a model, to derive from."""

    def __init__(self, dim: int, num_heads: int, *, base: float = 10_000.0) -> None:
        super().__init__(RotaryEmbedding(dim // num_heads, base=base))


def _positions(x: Tensor, positions: Tensor | None) -> Tensor:
    return range_positions(x.shape[-2], 0, device=x.device) if positions is None else positions


class Bfloat16Angles(_Rope):
    """RoPE whose positions are rounded to bfloat16, as a model has that was cast with its position ids (2411.13476).

    >>> encoding = Bfloat16Angles(4, 1)
    >>> q = torch.ones(1, 1, 1, 4)
    >>> a, b = (encoding.rotate(q, q, torch.tensor([m]))[0] for m in (256, 257))
    >>> torch.equal(a, b)  # bfloat16 has eight bits: 257 is rounded to 256
    True
    """

    def rotate(
        self, q: Tensor, k: Tensor, positions: Tensor | None = None, *, k_positions: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        rounded = [None if x is None else x.bfloat16().long() for x in (_positions(q, positions), k_positions)]
        return super().rotate(q, k, rounded[0], k_positions=rounded[1])


class PositionsZero(_Rope):
    """A control: RoPE that rotates every token as position 0, and so is no encoding.

    >>> q = torch.ones(1, 1, 2, 4)
    >>> torch.equal(PositionsZero(4, 1).rotate(q, q)[0], q)
    True
    """

    def rotate(
        self, q: Tensor, k: Tensor, positions: Tensor | None = None, *, k_positions: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        return super().rotate(q, k, torch.zeros_like(_positions(q, positions)))


class WrongSign(_Rope):
    """A control: RoPE that rotates keys in the other direction. Scores depend on m + n, not on m - n.

    >>> q = torch.ones(1, 1, 2, 4)
    >>> rotated, other = WrongSign(4, 1).rotate(q, q)
    >>> torch.equal(rotated[..., 0, :], other[..., 0, :]), torch.equal(rotated[..., 1, :], other[..., 1, :])
    (True, False)
    """

    def rotate(
        self, q: Tensor, k: Tensor, positions: Tensor | None = None, *, k_positions: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        positions = _positions(q, positions)
        return super().rotate(q, k, positions, k_positions=-(positions if k_positions is None else k_positions))


class GrowingBias(AlibiBias):
    """A control: ALiBi whose slopes have the wrong sign, so that distant tokens have the largest weight.

    >>> GrowingBias(1).bias(torch.tensor([1]), torch.tensor([0, 1])).flatten().tolist()
    [0.00390625, 0.0]
    """

    def __init__(self, num_heads: int) -> None:
        super().__init__(num_heads)
        self._slopes = -self._slopes
