"""SomeHeads: the bias of an encoding for a part of its heads."""

from torch import Tensor

from ropewalk.nn.encodings.base import Encoding, ScoreMod

__all__ = ["SomeHeads"]


class SomeHeads(Encoding):
    """The bias of an encoding for the heads first .. first+count-1. Gradients reach the parameters of the encoding.

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
        # Not a submodule: its parameters belong to the encoding.
        self._encoding = [encoding]
        # An attribute of classes, which FlexAttention reads from its encoding.
        self.__dict__["flex_options"] = encoding.flex_options
        self.first: int = first
        self.count: int = count

    def bias(self, q_positions: Tensor | None, k_positions: Tensor | None) -> Tensor | None:
        bias = self._encoding[0].bias(q_positions, k_positions)
        return bias if bias is None or bias.shape[-3] == 1 else bias.narrow(-3, self.first, self.count)

    def score_mod(self, q_positions: Tensor, k_positions: Tensor) -> ScoreMod | None:
        return self._shifted(self._encoding[0].score_mod(q_positions, k_positions))

    def score_mod_once(self, q_positions: Tensor, k_positions: Tensor) -> ScoreMod | None:
        return self._shifted(self._encoding[0].score_mod_once(q_positions, k_positions))

    def _shifted(self, score_mod: ScoreMod | None) -> ScoreMod | None:
        first = self.first
        if score_mod is None:
            return None
        return lambda score, b, h, q_idx, k_idx: score_mod(score, b, h + first, q_idx, k_idx)
