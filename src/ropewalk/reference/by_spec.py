"""The rotation of a RopeSpec, token by token and pair by pair, including axes, xPos and temperatures."""

import math
from typing import Literal

from torch import Tensor

from ropewalk.errors import RopewalkError, require_choice
from ropewalk.reference.pairs import pair_indices, split_slice
from ropewalk.shapes import Float
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
    """Rotate queries or keys as `spec` describes, in float64.

    Pair i of a token at positions p is rotated by sign * sum_a p_a F[a, i] and multiplied by the amplitude. With xPos
    it is multiplied by zeta_i^(+-(m - length/2)/scale_base). A query is multiplied by its temperature, in all
    features. All heads have the same frequencies.

    Args:
        x: Queries or keys [..., seq, dim].
        spec: The encoding. Rules with frequencies per head are not supported.
        positions: Positions [seq], or [axes, seq] for a spec with axes.
        length: Number of positions, for rules that depend on it.
        role: "q" for queries, "k" for keys.

    Returns:
        float64 tensor of the shape of x.

    Raises:
        RopewalkError: If `role` is unknown, shapes do not match, or frequencies differ per head.

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
            expected=f"the same frequencies in all heads, and positions [{len(weights)}, {x.shape[-2]}] (axes, seq)",
            got=f"frequencies {list(theta.shape)}, positions {list(positions.shape)}",
            do="pass one position per token, [axes, seq] for a spec with axes",
        )
    y = x.double().clone()
    rotated, _ = split_slice(y, spec.rotated_dim, spec.rotary_slice)
    firsts, seconds = pair_indices(spec.rotated_dim, spec.pairing)
    for token in range(x.shape[-2]):
        token_positions = [float(row[token]) for row in rows]
        for i, (first, second) in enumerate(zip(firsts, seconds, strict=True)):
            angle = sum(p * axis[i] for p, axis in zip(token_positions, weights, strict=True)) * float(theta[i])
            scale = spec.amplitude(length)
            if spec.xpos is not None:
                zeta = (2 * i / spec.rotated_dim + spec.xpos.gamma) / (1 + spec.xpos.gamma)
                power = (token_positions[0] - spec.xpos.length / 2) / spec.xpos.scale_base
                scale *= zeta ** (power if role == "q" else -power)
            a, b = rotated[..., token, first].clone(), rotated[..., token, second].clone()
            rotated[..., token, first] = scale * (a * math.cos(angle) - b * math.sin(angle))
            rotated[..., token, second] = scale * (a * math.sin(angle) + b * math.cos(angle))
        if spec.query_temperature is not None and role == "q":
            y[..., token, :] *= float(spec.query_temperature.evaluate(token_positions[0]))
    return y
