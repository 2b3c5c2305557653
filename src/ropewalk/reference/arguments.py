"""Checks what a caller of the reference gives, and lines positions and frequencies up with x."""

import numpy as np
import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from ropewalk.errors import RopewalkError, shown

# Floats that cannot count: bfloat16 has no 257, float16 no 2049. As frequencies they are worse.
_COARSE = (torch.float16, torch.bfloat16)


def require_tensor(value: object, *, asked: str) -> None:
    """Refuses what is no tensor, by name rather than by a missing attribute."""
    if not isinstance(value, Tensor):
        raise RopewalkError(
            asked=asked, expected="a torch.Tensor", got=shown(value), do="wrap it: torch.as_tensor(value)"
        )


def require_finite(positions: Tensor, *, asked: str) -> None:
    """Refuses positions that are no numbers."""
    require_tensor(positions, asked=asked)
    if not torch.isfinite(positions).all():
        raise RopewalkError(
            asked=asked,
            expected="finite positions",
            got="NaN or infinity",
            do="look at what made them: a mean over an empty mask gives NaN",
        )


def require_float(x: Tensor, *, asked: str, at_least_dims: int) -> None:
    """Refuses an `x` that is not real floating point, or has too few dimensions."""
    require_tensor(x, asked=asked)
    if not x.is_floating_point() or x.dim() < at_least_dims:
        raise RopewalkError(
            asked=asked,
            expected=f"a floating-point tensor of {at_least_dims} or more dimensions",
            got=f"{x.dtype} of shape {list(x.shape)}",
            do="add the missing dimensions" if x.is_floating_point() else "cast it with .float()",
        )


def checked_positions(
    positions: Shaped[Tensor, "*ids"], shape: tuple[int, ...], *, asked: str
) -> Float[Tensor, "*lined_up"]:
    """`positions` as float64, lined up with an x of `shape` = [..., seq, dim]: [seq], or [batch, 1.., seq].

    Ids [batch, seq] belong to the first dimension of x. Broadcasting from the right, as torch does by itself, would
    take them for ids of each head wherever there are as many heads as batches.
    """
    require_tensor(positions, asked=f"{asked}(positions)")
    seq = shape[-2]
    batches = [1, shape[0]] if len(shape) >= 3 else []
    fits = positions.dim() == 1 or (positions.dim() == 2 and positions.shape[0] in batches)
    countable = positions.dtype not in (torch.bool, *_COARSE) and not positions.is_complex()
    if not countable or not fits or positions.shape[-1] != seq:
        raise RopewalkError(
            asked=asked,
            expected=f"positions: whole numbers, float32 or float64, of shape [{seq}]"
            + (f" or [{batches[-1]}, {seq}]" if batches else "")
            + f", for x of shape {list(shape)}",
            got=f"{positions.dtype} of shape {list(positions.shape)}",
            do="give one position a token, torch.arange(seq) for a plain sequence",
        )
    require_finite(positions, asked=asked)
    exact = positions.to(torch.float64)
    if exact.dim() == 2:
        exact = exact.view(exact.shape[0], *[1] * (len(shape) - 3), seq)
    return exact


def angles_for(
    x: Float[Tensor, "*any seq dim"],
    positions: Shaped[Tensor, "*ids"],
    inv_freq: Float[Tensor, "*heads pairs"] | Float[np.ndarray, "*heads pairs"],
    *,
    asked: str,
) -> Float[Tensor, "*lined_up pairs"]:
    """The angles m * theta_i in float64, shaped to broadcast against the pairs of `x`."""
    frequencies = _frequencies(inv_freq, asked)
    shape = tuple(x.shape)
    lined_up = checked_positions(positions, shape, asked=asked)
    # One row of frequencies a head lines up with the dimension before the sequence: [.., heads, seq, dim].
    per_head = frequencies.dim() == 2
    needed = 4 if per_head and positions.dim() == 2 else 3 if per_head else 2
    if frequencies.dim() not in (1, 2) or len(shape) < needed or (per_head and len(frequencies) != shape[-3]):
        raise RopewalkError(
            asked=asked,
            expected="inv_freq of shape [pairs], or [heads, pairs] for x of shape [batch, heads, seq, dim]",
            got=f"inv_freq {list(frequencies.shape)}, positions {list(positions.shape)}, x {list(shape)}",
            do="check the number of heads, and that x has its heads before its sequence",
        )
    if not 1 <= frequencies.shape[-1] <= shape[-1] // 2:
        raise RopewalkError(
            asked=asked,
            expected=f"between 1 and {shape[-1] // 2} frequencies, for {shape[-1]} features",
            got=f"{frequencies.shape[-1]}",
            do="rotary_dim may not pass the last dimension of x; check head_dim",
        )
    frequencies = frequencies.unsqueeze(-2) if per_head else frequencies
    return lined_up.to(x.device).unsqueeze(-1) * frequencies.to(x.device)


def _frequencies(inv_freq: object, asked: str) -> Tensor:
    """`inv_freq` as float64, on its own device: a default device must not swallow a NumPy array."""
    given = torch.as_tensor(inv_freq, device="cpu") if isinstance(inv_freq, np.ndarray) else inv_freq
    if not isinstance(given, Tensor) or given.dtype not in (torch.float32, torch.float64):
        raise RopewalkError(
            asked=asked,
            expected="inv_freq in float64 or float32, as an array or a tensor",
            got=f"{given.dtype}" if isinstance(given, Tensor) else shown(given),
            do="pass RopeSpec(...).inv_freq(); frequencies that were rounded to half precision cannot be mended",
        )
    if not torch.isfinite(given).all():
        raise RopewalkError(
            asked=asked, expected="finite inv_freq", got="NaN or infinity", do="pass RopeSpec(...).inv_freq()"
        )
    return given.to(torch.float64)
