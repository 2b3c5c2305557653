"""RMSNorm of queries and keys before their rotation, as Qwen 3, Gemma 3 and others have it."""

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from ropewalk.errors import RopewalkError, require_positive
from ropewalk.reference.rotate import rotate
from ropewalk.spec.rope import Pairing, RotarySlice

__all__ = ["qk_norm_rotate", "rms_norm"]


def rms_norm(
    x: Float[Tensor, "*any dim"],
    weight: Float[Tensor, " dim"] | None = None,
    *,
    eps: float = 1e-6,
    plus_one: bool = False,
) -> Float[Tensor, "*any dim"]:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, in float64, rounded once to the dtype of x.

    Zhang & Sennrich, 1910.07467, eq. 4. `plus_one` multiplies by 1 + weight, as Gemma stores its weights. Without a
    weight it is 1.

    >>> [round(v, 4) for v in rms_norm(torch.tensor([3.0, 4.0])).tolist()]  # their mean square is 12.5
    [0.8485, 1.1314]
    """
    require_positive(eps, asked="rms_norm(eps=...)", do="pass the eps of the model, 1e-6 in most")
    if weight is None and plus_one:
        raise RopewalkError(
            asked="rms_norm(weight=None, plus_one=True)",
            expected="a weight to add one to",
            got="none",
            do="leave plus_one out, or give a weight",
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
    """The rotation of the norm, without a rounding between them. The norm is over all features, those that turn or not.

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
