"""SomeHeads: an encoding for a part of its heads."""

from torch import Tensor

from ropewalk.nn.encodings.base import DistanceBias, Encoding, ScoreMod

__all__ = ["SomeHeads", "kind_of_bias"]


class SomeHeads(Encoding):
    """An encoding whose bias is that of the heads first .. first+count-1. The other hooks are those of the encoding.

    Gradients reach the parameters of the encoding.

    Args:
        encoding: An encoding with a bias for all heads, or with one bias for every head.
        first: Index of the first head.
        count: Number of heads.

    >>> import torch
    >>> from ropewalk.nn.encodings.bias import AlibiBias
    >>> SomeHeads(AlibiBias(2), 1, 1).bias(torch.tensor([2]), torch.arange(3)).tolist()  # slope 1/256
    [[[-0.0078125, -0.00390625, -0.0]]]
    """

    name = "some-heads"

    def __init__(self, encoding: Encoding, first: int, count: int) -> None:
        super().__init__()
        self.encoding: Encoding = encoding
        # An attribute of classes, which FlexAttention reads from its encoding.
        self.__dict__["flex_options"] = encoding.flex_options
        self.first: int = first
        self.num_heads: int = count

    @property
    def rope(self) -> object:
        """The rotation of the encoding, or None."""
        return getattr(self.encoding, "rope", None)

    @property
    def scale(self) -> float | None:
        return self.encoding.scale

    def encode_heads(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        positions: Tensor | None = None,
        *,
        k_positions: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        return self.encoding.encode_heads(q, k, v, positions, k_positions=k_positions)

    def rotate(
        self, q: Tensor, k: Tensor, positions: Tensor | None = None, *, k_positions: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        return self.encoding.rotate(q, k, positions, k_positions=k_positions)

    def bias(self, q_positions: Tensor | None, k_positions: Tensor | None) -> Tensor | None:
        return self._part(self.encoding.bias(q_positions, k_positions), -3)

    def distance_bias(self) -> DistanceBias | None:
        bias = self.encoding.distance_bias()
        if bias is None:
            return None
        return DistanceBias(self._part(bias.slopes, 0), self._part(bias.numbers, 0))

    def score_mod(self, q_positions: Tensor, k_positions: Tensor) -> ScoreMod | None:
        return self._shifted(self.encoding.score_mod(q_positions, k_positions))

    def score_mod_once(self, q_positions: Tensor, k_positions: Tensor) -> ScoreMod | None:
        return self._shifted(self.encoding.score_mod_once(q_positions, k_positions))

    def extra_repr(self) -> str:
        return f"{self.first}, {self.num_heads}"

    def _part(self, x: Tensor | None, dim: int) -> Tensor | None:
        return x if x is None or x.shape[dim] == 1 else x.narrow(dim, self.first, self.num_heads)

    def _shifted(self, score_mod: ScoreMod | None) -> ScoreMod | None:
        first = self.first
        if score_mod is None:
            return None
        return lambda score, b, h, q_idx, k_idx: score_mod(score, b, h + first, q_idx, k_idx)


def kind_of_bias(encoding: object) -> str:
    """Return the name of the class whose bias it is, of which a `LinearState` is.

    >>> from ropewalk.nn.encodings.bias import AlibiBias
    >>> kind_of_bias(AlibiBias(2)), kind_of_bias(SomeHeads(AlibiBias(2), 0, 1))
    ('AlibiBias', 'AlibiBias')
    """
    return type(encoding.encoding if isinstance(encoding, SomeHeads) else encoding).__name__
