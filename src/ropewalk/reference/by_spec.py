"""A whole RopeSpec, token by token and pair by pair: axes, xPos and temperatures included."""

import math
from typing import Literal

from jaxtyping import Float
from torch import Tensor

from ropewalk.errors import RopewalkError, require_choice
from ropewalk.reference.pairs import pair_indices, split_slice
from ropewalk.spec.rope import RopeSpec

__all__ = ["rotate_by_spec"]


def rotate_by_spec(
    x: Float[Tensor, "*any seq dim"],
    spec: RopeSpec,
    positions: Tensor,
    *,
    length: int | None = None,
    role: Literal["q", "k"] = "k",
) -> Float[Tensor, "*any seq dim"]:
    """x, queries ("q") or keys ("k"), as a model with this spec rotates it, in float64.

    Pair i of a token at positions p rotates by sign * sum_a p_a F[a, i] and is multiplied by the amplitude, by
    zeta_i^(+-(m - length/2)/scale_base) for xPos, and a whole query by its temperature. One token, one head's width at
    a time: every head of x is treated alike, so rules with frequencies per head are refused.

    Shapes: x [..., seq, dim]; positions [seq], or [axes, seq] for a spec with axes.

    >>> import torch
    >>> x, m = torch.tensor([[1.0, 0.0]], dtype=torch.float64), torch.tensor([2])
    >>> [round(v, 4) for v in rotate_by_spec(x, RopeSpec(2), m)[0].tolist()]  # cos 2, sin 2
    [-0.4161, 0.9093]
    """
    require_choice(role, ("q", "k"), asked="rotate_by_spec(role=...)")
    theta = spec.inv_freq(length)
    rows = positions.double() if spec.axes is not None else positions.double()[None]
    weights = spec.axes.weights if spec.axes is not None else ((1.0,) * theta.shape[-1],)
    if theta.ndim != 1 or rows.shape != (len(weights), x.shape[-2]):
        raise RopewalkError(
            asked=f"rotate_by_spec(x, spec, positions) for x of shape {list(x.shape)}",
            expected=f"one row of frequencies, and positions of {len(weights)} axes and {x.shape[-2]} tokens",
            got=f"{theta.shape} frequencies, positions {list(positions.shape)}",
            do="give each token its positions",
        )
    y = x.double().clone()
    rotated, _ = split_slice(y, spec.turning, spec.rotary_slice)
    firsts, seconds = pair_indices(spec.turning, spec.pairing)
    for token in range(x.shape[-2]):
        place = [float(row[token]) for row in rows]
        for i, (first, second) in enumerate(zip(firsts, seconds, strict=True)):
            angle = sum(p * axis[i] for p, axis in zip(place, weights, strict=True)) * float(theta[i])
            scale = spec.amplitude(length)
            if spec.xpos is not None:
                zeta = (2 * i / spec.turning + spec.xpos.gamma) / (1 + spec.xpos.gamma)
                power = (place[0] - spec.xpos.length / 2) / spec.xpos.scale_base
                scale *= zeta ** (power if role == "q" else -power)
            a, b = rotated[..., token, first].clone(), rotated[..., token, second].clone()
            rotated[..., token, first] = scale * (a * math.cos(angle) - b * math.sin(angle))
            rotated[..., token, second] = scale * (a * math.sin(angle) + b * math.cos(angle))
        if spec.query_temperature is not None and role == "q":
            y[..., token, :] *= float(spec.query_temperature.evaluate(place[0]))
    return y
