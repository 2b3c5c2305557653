"""The plain formula that the module is timed against: float32 angles, then x cos + rotated(x) sin.

The angles are those of the spec, so it proves nothing about them: for that, see `ropewalk.tools.demo.oracle`.
"""

import torch
from torch import Tensor

from ropewalk.kernels.angles.arithmetic import TorchArithmetic
from ropewalk.reference.pairs import join_slice, split_slice
from ropewalk.spec.rope import RopeSpec
from ropewalk.tools.bench.peers import Rotation, formula_with_angles

__all__ = ["angles_of", "formula_of", "position_weights"]


def position_weights(spec: RopeSpec) -> Tensor | float:
    """The factor of the position in the angle of each pair, for text: every axis has the same position.

    >>> position_weights(RopeSpec(8))
    1.0
    """
    return 1.0 if spec.axes is None else torch.tensor(spec.axes.weights, dtype=torch.float64).sum(0)


def angles_of(spec: RopeSpec, positions: Tensor, length: int | None = None) -> Tensor:
    """The angles [seq, pairs] by transformers' operations: frequencies in float32, times positions in float32.

    >>> angles_of(RopeSpec(4), torch.tensor([0, 2])).tolist()[1][0]
    2.0
    """
    theta = spec.evaluate(length, TorchArithmetic(torch.float32, torch.device("cpu")))
    return positions.float()[:, None] * (theta * position_weights(spec)).float()


def formula_of(
    spec: RopeSpec,
    positions: Tensor,
    dtype: torch.dtype,
    *,
    length: int | None = None,
    device: torch.device | str = "cpu",
) -> Rotation:
    """The rotation of q and k [batch, heads, seq, head_dim] by transformers' formula.

    Query temperatures are left out. Tables are computed here, once, and not at every call.

    Args:
        spec: The rotation.
        positions: The positions [seq].
        dtype: The dtype of q and k, to which transformers rounds the tables.
        length: The sequence length, for rules that depend on it.
        device: The device of q and k.

    Returns:
        A function from q and k to rotated q and k.

    >>> q = torch.tensor([1.0, 0.0]).expand(1, 1, 1, 2)
    >>> rotated, _ = formula_of(RopeSpec(2), torch.tensor([2]), torch.float32)(q, q)
    >>> [round(x, 4) for x in rotated.flatten().tolist()]  # cos 2, sin 2
    [-0.4161, 0.9093]
    """
    rotate = formula_with_angles(
        angles_of(spec, positions, length).to(device), dtype, spec.pairing, spec.amplitude(length)
    )
    if spec.rotated_dim == spec.head_dim:
        return rotate

    def rotate_part(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        (rotated_q, rest_q), (rotated_k, rest_k) = (split_slice(x, spec.rotated_dim, spec.rotary_slice) for x in (q, k))
        new_q, new_k = rotate(rotated_q, rotated_k)
        return join_slice(new_q, rest_q, spec.rotary_slice), join_slice(new_k, rest_k, spec.rotary_slice)

    return rotate_part
