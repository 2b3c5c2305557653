"""cos and sin of position times frequency, one per pair, within 2^-24 of the exact values at positions up to 2^24.

There are three methods, which the arguments select:

- Integer positions on the CPU, in float32: radix tables. exp(i m theta) is a product over the base-256 digits of m. The
  tables of all digits are computed when the module is constructed. They never grow, and the largest position is never
  read from a device. Two complex products cost less than a cosine.
- Everything else: float64 angles, float64 cos and sin, one rounding. This includes positions that are not integers or
  exceed 2^24, more than one position per token, learned frequencies, float64 results, and other devices.
- float32 frequencies: float32 angles and cosines as in transformers, for models trained with them.
"""

import torch
from torch import Tensor

from ropewalk.kernels.constructors import arange, ones_like

__all__ = ["angles_at", "cos_sin", "cos_sin_between", "pair_positions", "radix_table", "reads_table"]

RADIX, DIGITS = 256, 3
# The digits represent |m| < 2^24.
REACH = RADIX**DIGITS


def radix_table(inv_freq: Tensor) -> Tensor:
    """Return exp(i c 256^d theta) for digits d = 0, 1, 2 of value c = 0 .. 255: complex128 [3, 256, *heads, pairs].

    >>> radix_table(torch.tensor([1.0, 0.01], dtype=torch.float64)).shape
    torch.Size([3, 256, 2])
    """
    values, digits = (arange(n, dtype=torch.float64, device=inv_freq.device) for n in (RADIX, DIGITS))
    values = values * RADIX ** digits[:, None]
    angles = values.view(DIGITS, RADIX, *[1] * inv_freq.dim()) * inv_freq
    return torch.polar(ones_like(angles), angles)


def angles_at(positions: Tensor, inv_freq: Tensor, axes: Tensor | None = None) -> Tensor:
    """Return position * theta_i in the precision of the frequencies.

    Args:
        positions: [seq] or [batch, seq]; with `axes` [A, seq] or [A, batch, seq].
        inv_freq: Frequencies [pairs]; [heads, pairs] per head; or [batch, 1, pairs] per sequence.
        axes: Weights [A, pairs]. The position of pair i is the sum over a of p_a * axes[a, i].

    Returns:
        Angles [seq, pairs] or [batch, seq, pairs]; [1 or batch, heads, seq, pairs] for frequencies per head.

    >>> angles_at(torch.tensor([0, 2]), torch.tensor([1.0, 0.5])).tolist()
    [[0.0, 0.0], [2.0, 1.0]]
    >>> angles_at(torch.tensor([[3], [5]]), torch.tensor([1.0, 0.5]), torch.eye(2)).tolist()  # two axes, one token
    [[3.0, 2.5]]
    """
    pair_position, theta = pair_positions(positions, inv_freq, axes)
    return pair_position * theta


def pair_positions(positions: Tensor, inv_freq: Tensor, axes: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the position and the frequency of each pair, which `angles_at` multiplies. Arguments are as there.

    >>> position, theta = pair_positions(torch.tensor([0, 2]), torch.tensor([1.0, 0.5]))
    >>> position.shape, theta.shape
    (torch.Size([2, 1]), torch.Size([2]))
    """
    pair_position = positions.to(inv_freq.dtype)
    if axes is None:
        pair_position = pair_position.unsqueeze(-1)
    else:
        # Not by a matrix product, which a GPU may compute with fewer bits: p * 1 + q * 0 is exactly p.
        rows = [pair_position[a].unsqueeze(-1) * axes[a].to(inv_freq.dtype) for a in range(axes.shape[0])]
        pair_position = torch.stack(rows).sum(0)
    if inv_freq.dim() == 2:
        return pair_position.unsqueeze(-3) if pair_position.dim() == 3 else pair_position[
            None, None
        ], inv_freq.unsqueeze(-2)
    return pair_position, inv_freq


def reads_table(
    positions: Tensor, inv_freq: Tensor, amplitude: Tensor, dtype: torch.dtype, axes: Tensor | None
) -> bool:
    """Whether the radix table applies: integer positions on the CPU, float64 frequencies, float32 results.

    >>> one = torch.ones(1, dtype=torch.float64)
    >>> reads_table(torch.tensor([1]), one, one[0], torch.float32, None)
    True
    """
    return (
        dtype == torch.float32
        and inv_freq.dtype == torch.float64
        and inv_freq.dim() <= 2
        and positions.device.type == "cpu"
        and not positions.is_floating_point()
        and amplitude.dim() == 0
        and axes is None
    )


def cos_sin(
    positions: Tensor,
    inv_freq: Tensor,
    radix_table: Tensor | None,
    amplitude: Tensor,
    dtype: torch.dtype,
    axes: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return amplitude * cos(m theta_i) and amplitude * sin(m theta_i).

    Args:
        positions: As in `angles_at`.
        inv_freq: As in `angles_at`.
        radix_table: Result of `radix_table(inv_freq)`, or None.
        amplitude: float64 tensor: a scalar, or a tensor that broadcasts against the angles. It is a tensor so that one
            compiled graph supports every amplitude.
        dtype: Dtype of the results.
        axes: As in `angles_at`.

    Returns:
        cos and sin, new contiguous tensors in the shape of `angles_at`.

    >>> one, theta = torch.tensor(1.0).double(), torch.tensor([1.0, 0.5]).double()
    >>> cos, sin = cos_sin(torch.tensor([0, 2]), theta, None, one, torch.float32)
    >>> [round(c, 4) for c in cos[1].tolist()]  # cos 2, cos 1
    [-0.4161, 0.5403]
    """
    if radix_table is not None and reads_table(positions, inv_freq, amplitude, dtype, axes):
        cos, sin = _by_digits(positions.to(torch.int64), inv_freq, radix_table)
    else:
        angles = angles_at(positions, inv_freq, axes)
        pairs = angles.shape[-1]
        if angles.dtype == torch.float32:
            # Repeated as in transformers: the last bit of torch's float32 cosine depends on the position of an element
            # in the vector.
            angles = torch.cat((angles, angles), dim=-1)
        cos, sin = torch.cos(angles)[..., :pairs], torch.sin(angles)[..., :pairs]
    # In the dtype of the angles: float32 tables are scaled in float32, as in transformers.
    scale = amplitude.to(cos.dtype)
    return (scale * cos).to(dtype).contiguous(), (scale * sin).to(dtype).contiguous()


def cos_sin_between(
    positions: Tensor, old: Tensor, new: Tensor, amplitude: Tensor, dtype: torch.dtype, axes: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return cos and sin of the difference of two angles, which changes a rotation from `old` to `new` frequencies.

    Each angle is computed in the precision of its frequencies, and their difference in float64.

    Args:
        positions: As in `angles_at`.
        old: Frequencies of the current rotation, as `inv_freq` in `angles_at`.
        new: Frequencies of the wanted rotation.
        amplitude: Factor on cos and sin, a float64 tensor.
        dtype: Dtype of the results.
        axes: As in `angles_at`.

    >>> theta = torch.tensor([1.0, 0.5]).double()
    >>> cos, _ = cos_sin_between(torch.tensor([2]), theta, theta * 2, torch.ones(()).double(), torch.float32)
    >>> [round(c, 4) for c in cos[0].tolist()]  # cos 2, cos 1
    [-0.4161, 0.5403]
    """
    angles = angles_at(positions, new, axes).to(torch.float64) - angles_at(positions, old, axes).to(torch.float64)
    cos, sin = amplitude * torch.cos(angles), amplitude * torch.sin(angles)
    return cos.to(dtype).contiguous(), sin.to(dtype).contiguous()


def _by_digits(positions: Tensor, inv_freq: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    token_positions = positions
    if inv_freq.dim() == 2:
        positions = positions.unsqueeze(-2) if positions.dim() == 2 else positions[None, None]
        table = table.unsqueeze(-2)
    within = (positions > -REACH) & (positions < REACH)
    size = torch.where(within, positions, 0).abs()
    rows = [_row(table[digit], (size >> (8 * digit)) & (RADIX - 1)) for digit in range(DIGITS)]
    z = rows[0] * rows[1] * rows[2]
    # Negative positions have the conjugate.
    cos, sin = z.real, torch.sgn(positions).to(torch.float64).unsqueeze(-1) * z.imag
    if bool(within.all()):
        return cos, sin
    # Selected per position: its result must not depend on the other positions.
    far = angles_at(token_positions, inv_freq)
    within = within.unsqueeze(-1)
    return torch.where(within, cos, torch.cos(far)), torch.where(within, sin, torch.sin(far))


def _row(table: Tensor, digit: Tensor) -> Tensor:
    if table.dim() == 2:
        return table[digit]
    # One table per head [256, heads, 1, pairs], positions [batch, 1, seq]: heads come before the sequence.
    return table.squeeze(-2)[digit.squeeze(1)].transpose(1, 2)
