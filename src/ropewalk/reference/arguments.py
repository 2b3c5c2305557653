"""Check the arguments of the reference functions, and shape positions and frequencies to broadcast against x."""

import numpy as np
import torch
from torch import Tensor

from ropewalk.errors import RopewalkError, shown
from ropewalk.shapes import Float, Shaped

# Dtypes too coarse for positions and frequencies: bfloat16 cannot represent 257, float16 cannot represent 2049.
COARSE = (torch.float16, torch.bfloat16)


def require_tensor(value: object, *, asked: str) -> None:
    """Raise if `value` is not a tensor."""
    if not isinstance(value, Tensor):
        raise RopewalkError(
            asked=asked, expected="a torch.Tensor", got=shown(value), do="wrap it: torch.as_tensor(value)"
        )


def require_finite(positions: Tensor, *, asked: str) -> None:
    """Raise if a position is NaN or infinite."""
    require_tensor(positions, asked=asked)
    if not torch.isfinite(positions).all():
        raise RopewalkError(
            asked=asked,
            expected="finite positions",
            got="NaN or infinity",
            do="check how they were computed; a mean over an empty mask is NaN, for example",
        )


def require_float(x: Tensor, *, asked: str, at_least_dims: int) -> None:
    """Raise if `x` is not a real floating-point tensor or has too few dimensions."""
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
) -> Float[Tensor, "*aligned"]:
    """Return `positions` in float64, shaped for an x of `shape` = [..., seq, dim]: [seq], or [batch, 1.., seq].

    In positions [batch, seq], batch is the first dimension of x. Torch's own broadcasting starts from the right. It
    would align batch with heads if their numbers are equal.
    """
    require_tensor(positions, asked=f"{asked}(positions)")
    seq = shape[-2]
    batches = [1, shape[0]] if len(shape) >= 3 else []
    fits = positions.dim() == 1 or (positions.dim() == 2 and positions.shape[0] in batches)
    countable = positions.dtype not in (torch.bool, *COARSE) and not positions.is_complex()
    if not countable or not fits or positions.shape[-1] != seq:
        raise RopewalkError(
            asked=asked,
            expected=f"positions: integers, float32 or float64, of shape [{seq}]"
            + (f" or [{batches[-1]}, {seq}]" if batches else "")
            + f", for x of shape {list(shape)}",
            got=f"{positions.dtype} of shape {list(positions.shape)}",
            do="pass one position per token, such as torch.arange(seq)",
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
) -> Float[Tensor, "*aligned pairs"]:
    """Return the angles m * theta_i in float64, shaped to broadcast against the pairs of `x`."""
    frequencies = _frequencies(inv_freq, asked)
    shape = tuple(x.shape)
    aligned = checked_positions(positions, shape, asked=asked)
    # With one row of frequencies per head, heads is the dimension before the sequence: [.., heads, seq, dim].
    per_head = frequencies.dim() == 2
    needed = 4 if per_head and positions.dim() == 2 else 3 if per_head else 2
    if frequencies.dim() not in (1, 2) or len(shape) < needed or (per_head and len(frequencies) != shape[-3]):
        raise RopewalkError(
            asked=asked,
            expected="inv_freq of shape [pairs], or [heads, pairs] for x of shape [batch, heads, seq, dim]",
            got=f"inv_freq {list(frequencies.shape)}, positions {list(positions.shape)}, x {list(shape)}",
            do="check the number of heads, and that heads come before seq in x",
        )
    if not 1 <= frequencies.shape[-1] <= shape[-1] // 2:
        raise RopewalkError(
            asked=asked,
            expected=f"between 1 and {shape[-1] // 2} frequencies, for {shape[-1]} features",
            got=f"{frequencies.shape[-1]}",
            do="check head_dim; rotary_dim must not exceed the last dimension of x",
        )
    frequencies = frequencies.unsqueeze(-2) if per_head else frequencies
    return aligned.to(x.device).unsqueeze(-1) * frequencies.to(x.device)


def _frequencies(inv_freq: object, asked: str) -> Tensor:
    """Return `inv_freq` in float64. A NumPy array stays on the CPU, whatever the default device is."""
    tensor = torch.as_tensor(inv_freq, device="cpu") if isinstance(inv_freq, np.ndarray) else inv_freq
    if not isinstance(tensor, Tensor) or tensor.dtype not in (torch.float32, torch.float64):
        raise RopewalkError(
            asked=asked,
            expected="inv_freq in float64 or float32, as an array or a tensor",
            got=f"{tensor.dtype}" if isinstance(tensor, Tensor) else shown(tensor),
            do="pass RopeSpec(...).inv_freq(); frequencies rounded to half precision cannot be recovered",
        )
    if not torch.isfinite(tensor).all():
        raise RopewalkError(
            asked=asked, expected="finite inv_freq", got="NaN or infinity", do="pass RopeSpec(...).inv_freq()"
        )
    return tensor.to(torch.float64)
