"""cos and sin of position times frequency, half width, within 2^-24 of the truth at positions up to 2^24.

Three ways, chosen by what is given:

- Whole positions on the CPU, for float32: radix tables, in C where the C kernel is there. exp(i m theta) is a product
  over the base-256 digits of m, and the tables of all digits are fixed when the module is made: they never grow, and
  no largest position is asked of a device. Two complex products cost less than a cosine.
- Everything else: float64 angles, float64 cos and sin, one rounding. That is positions that are not whole or pass
  2^24, learned frequencies, float64 results, and other devices.
- float32 frequencies: float32 angles and cosines, as transformers forms them, for models trained that way.
"""

import numpy as np
import torch
from torch import Tensor

from ropewalk.kernels import rotate_native

__all__ = ["cos_sin", "float32_powers", "radix_table"]

RADIX, DIGITS = 256, 3
# What the digits reach: |m| < 2^24.
REACH = RADIX**DIGITS


def radix_table(inv_freq: Tensor) -> Tensor:
    """exp(i c 256^d theta) for each digit d = 0, 1, 2 and value c = 0 .. 255: complex128 [3, 256, *heads, pairs].

    >>> radix_table(torch.tensor([1.0, 0.01], dtype=torch.float64)).shape
    torch.Size([3, 256, 2])
    """
    values, digits = (torch.arange(n, dtype=torch.float64, device=inv_freq.device) for n in (RADIX, DIGITS))
    values = values * RADIX ** digits[:, None]
    angles = values.view(DIGITS, RADIX, *[1] * inv_freq.dim()) * inv_freq
    return torch.polar(torch.ones_like(angles), angles)


def float32_powers(base: float, dim: int) -> np.ndarray:
    """base^(-2i/dim) by transformers' operations in their order: float32 exponents, a float32 power, its reciprocal.

    torch and NumPy differ in the last bit of a float32 power, so torch it is.

    >>> float32_powers(10_000.0, 4).dtype
    dtype('float32')
    """
    exponents = torch.arange(0, dim, 2, dtype=torch.int64, device="cpu").to(torch.float32) / dim
    return (1.0 / (base**exponents)).numpy()


def cos_sin(
    positions: Tensor, inv_freq: Tensor, table: Tensor | None, amplitude: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """amplitude * cos(m theta_i) and amplitude * sin(m theta_i), as fresh contiguous tensors of `dtype`.

    positions [seq] or [batch, seq] and inv_freq [pairs] give [seq, pairs] or [batch, seq, pairs]. One row of
    frequencies a head, inv_freq [heads, pairs], gives [1 or batch, heads, seq, pairs]. `amplitude` is one float64
    number, as a tensor, so that a compiled graph serves every amplitude.

    >>> one, theta = torch.tensor(1.0).double(), torch.tensor([1.0, 0.5]).double()
    >>> cos, sin = cos_sin(torch.tensor([0, 2]), theta, None, one, torch.float32)
    >>> [round(c, 4) for c in cos[1].tolist()]  # cos 2, cos 1
    [-0.4161, 0.5403]
    """
    if dtype != torch.float32 or inv_freq.dtype != torch.float64:
        table = None
    if positions.device.type != "cpu" or positions.is_floating_point():
        table = None
    if table is not None and rotate_native.MISSING is None:
        return rotate_native.cos_sin(positions, inv_freq, table, amplitude)
    if inv_freq.dim() == 2:
        positions = positions.unsqueeze(-2) if positions.dim() == 2 else positions[None, None]
        inv_freq = inv_freq.unsqueeze(-2)
        table = None if table is None else table.unsqueeze(-2)
    if inv_freq.dtype == torch.float32:
        angles = positions.to(torch.float32).unsqueeze(-1) * inv_freq
        scale = amplitude.to(torch.float32)
        return (torch.cos(angles) * scale).to(dtype).contiguous(), (torch.sin(angles) * scale).to(dtype).contiguous()
    if table is not None:
        cos, sin = _by_digits(positions.to(torch.int64), inv_freq, table)
    else:
        cos, sin = _by_cosines(positions, inv_freq)
    return (amplitude * cos).to(dtype).contiguous(), (amplitude * sin).to(dtype).contiguous()


def _by_cosines(positions: Tensor, inv_freq: Tensor) -> tuple[Tensor, Tensor]:
    angles = positions.to(torch.float64).unsqueeze(-1) * inv_freq
    return torch.cos(angles), torch.sin(angles)


def _by_digits(positions: Tensor, inv_freq: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    within = (positions > -REACH) & (positions < REACH)
    size = torch.where(within, positions, 0).abs()
    rows = [_row(table[digit], (size >> (8 * digit)) & (RADIX - 1)) for digit in range(DIGITS)]
    z = rows[0] * rows[1] * rows[2]
    # A negative position turns the other way: the conjugate.
    cos, sin = z.real, torch.sgn(positions).to(torch.float64).unsqueeze(-1) * z.imag
    if bool(within.all()):
        return cos, sin
    # Each position by itself: what stands beside it must not change how it is computed.
    far = _by_cosines(positions, inv_freq)
    within = within.unsqueeze(-1)
    return torch.where(within, cos, far[0]), torch.where(within, sin, far[1])


def _row(table: Tensor, digit: Tensor) -> Tensor:
    if table.dim() == 2:
        return table[digit]
    # One table a head, [256, heads, 1, pairs], with positions [batch, 1, seq]: heads come before the sequence.
    return table.squeeze(-2)[digit.squeeze(1)].transpose(1, 2)
