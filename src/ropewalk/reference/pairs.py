"""Which features are rotated, and which two features form a pair.

features      0   1   2   3   4   5          rotary_dim = 4, leading: features 4 and 5 are not rotated
interleaved  (a0  b0)(a1  b1) .   .
half         (a0  a1  b0  b1) .   .
"""

import torch
from torch import Tensor

from ropewalk.errors import require_choice
from ropewalk.shapes import Float
from ropewalk.spec.rope import PAIRINGS, ROTARY_SLICES, Pairing, RotarySlice

__all__ = ["join_pairs", "join_slice", "pair_indices", "split_pairs", "split_slice"]


def pair_indices(rotary_dim: int, pairing: Pairing) -> tuple[list[int], list[int]]:
    """Feature indices of the first and of the second member of each pair.

    Args:
        rotary_dim: Number of rotated features.
        pairing: "interleaved" or "half".

    Returns:
        Two lists of rotary_dim / 2 indices.

    >>> pair_indices(6, "interleaved"), pair_indices(6, "half")
    (([0, 2, 4], [1, 3, 5]), ([0, 1, 2], [3, 4, 5]))
    """
    require_choice(pairing, PAIRINGS, asked="pairing=...")
    if pairing == "interleaved":
        return list(range(0, rotary_dim, 2)), list(range(1, rotary_dim, 2))
    return list(range(rotary_dim // 2)), list(range(rotary_dim // 2, rotary_dim))


def split_pairs(
    x: Float[Tensor, "*any dim"], pairing: Pairing
) -> tuple[Float[Tensor, "*any pairs"], Float[Tensor, "*any pairs"]]:
    """Split `x` into the first and the second members of its pairs.

    Args:
        x: Features [..., dim], with an even dim.
        pairing: "interleaved" or "half".

    Returns:
        Two tensors [..., dim / 2].

    >>> a, b = split_pairs(torch.tensor([0.0, 1.0, 2.0, 3.0]), "half")
    >>> a.tolist(), b.tolist()
    ([0.0, 1.0], [2.0, 3.0])
    """
    require_choice(pairing, PAIRINGS, asked="pairing=...")
    if pairing == "interleaved":
        return x[..., 0::2], x[..., 1::2]
    return x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]


def join_pairs(
    first: Float[Tensor, "*any pairs"], second: Float[Tensor, "*any pairs"], pairing: Pairing
) -> Float[Tensor, "*any dim"]:
    """Inverse of `split_pairs`.

    Args:
        first: First members [..., pairs].
        second: Second members [..., pairs].
        pairing: "interleaved" or "half".

    Returns:
        Features [..., 2 * pairs].

    >>> join_pairs(torch.tensor([0.0, 2.0]), torch.tensor([1.0, 3.0]), "interleaved").tolist()
    [0.0, 1.0, 2.0, 3.0]
    """
    if pairing == "interleaved":
        return torch.stack((first, second), dim=-1).flatten(-2)
    return torch.cat((first, second), dim=-1)


def split_slice(
    x: Float[Tensor, "*any dim"], rotary_dim: int, rotary_slice: RotarySlice
) -> tuple[Float[Tensor, "*any rotary"], Float[Tensor, "*any rest"]]:
    """Split `x` into the rotated features and the rest.

    Args:
        x: Features [..., dim].
        rotary_dim: Number of rotated features.
        rotary_slice: "leading" or "trailing".

    Returns:
        Two tensors, [..., rotary_dim] and [..., dim - rotary_dim].

    >>> rotated, rest = split_slice(torch.arange(4.0), 2, "trailing")
    >>> rotated.tolist(), rest.tolist()
    ([2.0, 3.0], [0.0, 1.0])
    """
    require_choice(rotary_slice, ROTARY_SLICES, asked="rotary_slice=...")
    if rotary_slice == "leading":
        return x[..., :rotary_dim], x[..., rotary_dim:]
    cut = x.shape[-1] - rotary_dim
    return x[..., cut:], x[..., :cut]


def join_slice(
    rotated: Float[Tensor, "*any rotary"], rest: Float[Tensor, "*any rest"], rotary_slice: RotarySlice
) -> Float[Tensor, "*any dim"]:
    """Inverse of `split_slice`.

    Args:
        rotated: Rotated features [..., rotary_dim].
        rest: The other features [..., dim - rotary_dim].
        rotary_slice: "leading" or "trailing".

    Returns:
        Features [..., dim].

    >>> join_slice(torch.tensor([2.0, 3.0]), torch.tensor([0.0, 1.0]), "trailing").tolist()
    [0.0, 1.0, 2.0, 3.0]
    """
    return torch.cat((rotated, rest) if rotary_slice == "leading" else (rest, rotated), dim=-1)
