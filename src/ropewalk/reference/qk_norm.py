"""RMSNorm of queries and keys before their rotation, as in Qwen 3, Gemma 3 and other models."""

import torch
from torch import Tensor

from ropewalk.errors import RopewalkError, require_positive
from ropewalk.reference.rotate import rotate
from ropewalk.shapes import Float, Shaped
from ropewalk.spec.rope import Pairing, RotarySlice

__all__ = ["qk_norm_rotate", "rms_norm"]


def rms_norm(
    x: Float[Tensor, "*any dim"],
    weight: Float[Tensor, " dim"] | None = None,
    *,
    eps: float = 1e-6,
    plus_one: bool = False,
) -> Float[Tensor, "*any dim"]:
    """RMSNorm over the last dimension: x / sqrt(mean(x^2) + eps) * weight (Zhang & Sennrich, 1910.07467, eq. 4).

    Computed in float64 and rounded once to the dtype of x.

    Args:
        x: Features [..., dim].
        weight: Factor per feature [dim]. Default: 1.
        eps: Added to the mean square.
        plus_one: Multiply by 1 + weight, as Gemma does.

    Returns:
        Tensor of the shape and dtype of x.

    Raises:
        RopewalkError: If `eps` is not positive, or if `plus_one` is set without a weight.

    >>> [round(v, 4) for v in rms_norm(torch.tensor([3.0, 4.0])).tolist()]  # the mean square is 12.5
    [0.8485, 1.1314]
    """
    require_positive(eps, asked="rms_norm(eps=...)", do="pass the eps of the model, often 1e-6")
    if weight is None and plus_one:
        raise RopewalkError(
            asked="rms_norm(weight=None, plus_one=True)",
            expected="a weight, to which 1 is added",
            got="None",
            do="omit plus_one, or pass a weight",
        )
    wide = x.double()
    scaled = wide / torch.sqrt(wide.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        scaled = scaled * (weight.double() + int(plus_one))
    return scaled.to(x.dtype)


def qk_norm_rotate(
    x: Float[Tensor, "*any seq dim"],
    weight: Float[Tensor, " dim"] | None,
    positions: Shaped[Tensor, "*ids"],
    inv_freq: Float[Tensor, "*heads pairs"],
    *,
    eps: float = 1e-6,
    plus_one: bool = False,
    pairing: Pairing = "interleaved",
    conjugate: bool = False,
    amplitude: float = 1.0,
    rotary_slice: RotarySlice = "leading",
) -> Float[Tensor, "*any seq dim"]:
    """RMSNorm followed by the rotation, with one rounding at the end.

    The norm includes all features, also those that are not rotated.

    Args:
        x: Queries or keys [..., seq, dim].
        weight: Factor per feature of the norm [dim], or None for 1.
        positions: Positions [seq] or [batch, seq].
        inv_freq: Frequencies [pairs] or [heads, pairs].
        eps: Added to the mean square.
        plus_one: Multiply by 1 + weight, as Gemma does.
        pairing: Pairing of the rotated features.
        conjugate: Rotate in the opposite direction.
        amplitude: Factor on the rotated features.
        rotary_slice: Which features are rotated, if not all.

    Returns:
        Tensor of the shape and dtype of x.

    Raises:
        RopewalkError: If an argument is invalid; see `rms_norm` and `rotate`.

    >>> x, theta = torch.tensor([[3.0, 4.0]]), torch.tensor([torch.pi / 2])
    >>> [round(v, 4) for v in qk_norm_rotate(x, None, torch.ones(1), theta)[0].tolist()]  # (a, b) to (-b, a)
    [-1.1314, 0.8485]
    """
    return rotate(
        rms_norm(x.double(), weight, eps=eps, plus_one=plus_one),
        positions,
        inv_freq,
        pairing=pairing,
        conjugate=conjugate,
        amplitude=amplitude,
        rotary_slice=rotary_slice,
    ).to(x.dtype)
