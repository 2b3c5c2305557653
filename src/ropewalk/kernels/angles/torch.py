"""cos and sin of position times frequency, half width, within 2^-24 of the truth at positions up to 2^24.

Three ways, chosen by the arguments:

- Whole positions on the CPU, for float32: radix tables. exp(i m theta) is a product over the base-256 digits of m, and
  the tables of all digits are fixed when the module is made: they never grow, and no largest position is asked of a
  device. Two complex products cost less than a cosine.
- Everything else: float64 angles, float64 cos and sin, one rounding. That is positions that are not whole or pass
  2^24, more than one position a token, learned frequencies, float64 results, and other devices.
- float32 frequencies: float32 angles and cosines, as transformers forms them, for models trained that way.
"""

import torch
from torch import Tensor

from ropewalk.kernels.constructors import arange, ones_like

__all__ = ["angles_at", "cos_sin", "cos_sin_between", "pair_positions", "radix_table", "reads_table"]

RADIX, DIGITS = 256, 3
# What the digits reach: |m| < 2^24.
REACH = RADIX**DIGITS


def radix_table(inv_freq: Tensor) -> Tensor:
    """exp(i c 256^d theta) for each digit d = 0, 1, 2 and value c = 0 .. 255: complex128 [3, 256, *heads, pairs].

    >>> radix_table(torch.tensor([1.0, 0.01], dtype=torch.float64)).shape
    torch.Size([3, 256, 2])
    """
    values, digits = (arange(n, dtype=torch.float64, device=inv_freq.device) for n in (RADIX, DIGITS))
    values = values * RADIX ** digits[:, None]
    angles = values.view(DIGITS, RADIX, *[1] * inv_freq.dim()) * inv_freq
    return torch.polar(ones_like(angles), angles)


def angles_at(positions: Tensor, inv_freq: Tensor, axes: Tensor | None = None) -> Tensor:
    """position * theta_i, [seq, pairs] or [batch, seq, pairs], in the precision of the frequencies.

    inv_freq [heads, pairs] gives [1 or batch, heads, seq, pairs]; one row a sequence, [batch, 1, pairs], gives
    [batch, seq, pairs]. With `axes` [A, pairs] positions are [A, seq] or [A, batch, seq], and the position of a pair is
    the sum over a of p_a * axes[a, i].

    >>> angles_at(torch.tensor([0, 2]), torch.tensor([1.0, 0.5])).tolist()
    [[0.0, 0.0], [2.0, 1.0]]
    >>> angles_at(torch.tensor([[3], [5]]), torch.tensor([1.0, 0.5]), torch.eye(2)).tolist()  # two axes, one token
    [[3.0, 2.5]]
    """
    where, theta = pair_positions(positions, inv_freq, axes)
    return where * theta


def pair_positions(positions: Tensor, inv_freq: Tensor, axes: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The position of each pair and its frequency, as `angles_at` multiplies them.

    >>> where, theta = pair_positions(torch.tensor([0, 2]), torch.tensor([1.0, 0.5]))
    >>> where.shape, theta.shape
    (torch.Size([2, 1]), torch.Size([2]))
    """
    where = positions.to(inv_freq.dtype)
    if axes is None:
        where = where.unsqueeze(-1)
    else:
        # Axis by axis and not by a matrix product, which a GPU may round to fewer bits: p * 1 + q * 0 is p.
        rows = [where[a].unsqueeze(-1) * axes[a].to(inv_freq.dtype) for a in range(axes.shape[0])]
        where = torch.stack(rows).sum(0)
    if inv_freq.dim() == 2:
        return where.unsqueeze(-3) if where.dim() == 3 else where[None, None], inv_freq.unsqueeze(-2)
    return where, inv_freq


def reads_table(
    positions: Tensor, inv_freq: Tensor, amplitude: Tensor, dtype: torch.dtype, axes: Tensor | None
) -> bool:
    """Whether the radix table has these angles: whole positions on the CPU, one exact frequency per pair, in float32.

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
    """amplitude * cos(m theta_i) and amplitude * sin(m theta_i), as fresh contiguous tensors of `dtype`.

    Shapes are those of `angles_at`. `amplitude` is a float64 tensor: one number, so that a compiled graph serves every
    amplitude, or what broadcasts against the angles, where it depends on sequence, position or pair.

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
            # transformers takes cosines of angles that stand there twice, and torch's cosine of a number differs in the
            # last bit with where in memory it stands.
            angles = torch.cat((angles, angles), dim=-1)
        cos, sin = torch.cos(angles)[..., :pairs], torch.sin(angles)[..., :pairs]
    # As many bits as the angles have: float32 tables are scaled in float32, as transformers scales them.
    scale = amplitude.to(cos.dtype)
    return (scale * cos).to(dtype).contiguous(), (scale * sin).to(dtype).contiguous()


def cos_sin_between(
    positions: Tensor, old: Tensor, new: Tensor, amplitude: Tensor, dtype: torch.dtype, axes: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """cos and sin of the angle by which `new` frequencies turn a token farther than `old` ones: from one to the other.

    Each angle has the precision of its own frequencies; their difference is taken in float64.

    >>> theta = torch.tensor([1.0, 0.5]).double()
    >>> cos, _ = cos_sin_between(torch.tensor([2]), theta, theta * 2, torch.ones(()).double(), torch.float32)
    >>> [round(c, 4) for c in cos[0].tolist()]  # cos 2, cos 1
    [-0.4161, 0.5403]
    """
    angles = angles_at(positions, new, axes).to(torch.float64) - angles_at(positions, old, axes).to(torch.float64)
    cos, sin = amplitude * torch.cos(angles), amplitude * torch.sin(angles)
    return cos.to(dtype).contiguous(), sin.to(dtype).contiguous()


def _by_digits(positions: Tensor, inv_freq: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    given = positions
    if inv_freq.dim() == 2:
        positions = positions.unsqueeze(-2) if positions.dim() == 2 else positions[None, None]
        table = table.unsqueeze(-2)
    within = (positions > -REACH) & (positions < REACH)
    size = torch.where(within, positions, 0).abs()
    rows = [_row(table[digit], (size >> (8 * digit)) & (RADIX - 1)) for digit in range(DIGITS)]
    z = rows[0] * rows[1] * rows[2]
    # A negative position turns the other way: the conjugate.
    cos, sin = z.real, torch.sgn(positions).to(torch.float64).unsqueeze(-1) * z.imag
    if bool(within.all()):
        return cos, sin
    # Each position by itself: what stands beside it must not change how it is computed.
    far = angles_at(given, inv_freq)
    within = within.unsqueeze(-1)
    return torch.where(within, cos, torch.cos(far)), torch.where(within, sin, torch.sin(far))


def _row(table: Tensor, digit: Tensor) -> Tensor:
    if table.dim() == 2:
        return table[digit]
    # One table a head, [256, heads, 1, pairs], with positions [batch, 1, seq]: heads come before the sequence.
    return table.squeeze(-2)[digit.squeeze(1)].transpose(1, 2)
