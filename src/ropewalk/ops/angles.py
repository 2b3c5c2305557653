"""cos and sin from positions, with an op boundary where a compiler would look inside."""

from typing import Any

import torch
from torch import Tensor

from ropewalk.kernels import angles as angle_kernels
from ropewalk.ops.plain import is_plain, is_transformed

__all__ = ["cos_sin"]


def cos_sin(
    positions: Tensor, inv_freq: Tensor, table: Tensor | None, amplitude: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """cos and sin of the angles: `kernels.angles.cos_sin`, behind an op boundary where a compiler would see it.

    Left to itself Inductor computes the float64 cosines again for every head: on two Neoverse-N1 cores 163 ms against
    7 ms (2026-11). An exporter gets the formula, so that what it writes needs no ropewalk; so does functorch, for which
    the op has no rules.

    >>> one = torch.ones(1, dtype=torch.float64)
    >>> cos, _ = cos_sin(torch.tensor([2]), one, None, one[0], torch.float32)
    >>> round(cos.item(), 4)
    -0.4161
    """
    if torch.compiler.is_compiling() and not torch.compiler.is_exporting() and not is_transformed():
        return torch.ops.ropewalk.cos_sin(positions, inv_freq, table, amplitude, dtype)
    # The table is looked up by values, which only plain positions have.
    return angle_kernels.cos_sin(positions, inv_freq, table if is_plain(positions) else None, amplitude, dtype)


@torch.library.custom_op("ropewalk::cos_sin", mutates_args=())
def _cos_sin_op(
    positions: Tensor, inv_freq: Tensor, table: Tensor | None, amplitude: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    return angle_kernels.cos_sin(positions, inv_freq, table, amplitude, dtype)


@_cos_sin_op.register_fake
def _(positions: Tensor, inv_freq: Tensor, table: Tensor | None, amplitude: Tensor, dtype: torch.dtype):
    pairs = inv_freq.shape[-1]
    if inv_freq.dim() == 2:
        batch = 1 if positions.dim() == 1 else positions.shape[0]
        shape = (batch, inv_freq.shape[0], positions.shape[-1], pairs)
    else:
        shape = (*positions.shape, pairs)
    return tuple(torch.empty(shape, dtype=dtype, device=positions.device) for _ in range(2))


def _save_angles(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    positions, inv_freq, *_ = inputs
    ctx.save_for_backward(positions, inv_freq, *output)


def _angles_backward(ctx: Any, cos_grad: Tensor, sin_grad: Tensor) -> tuple[Tensor | None, ...]:
    # d(a cos(m theta)) = -a sin(m theta) (m dtheta + theta dm), and a sin, a cos are what was returned.
    positions, inv_freq, cos, sin = ctx.saved_tensors
    turned = (sin_grad * cos - cos_grad * sin).to(torch.float64)
    per_head = inv_freq.dim() == 2
    where = positions
    if per_head:
        where = positions.unsqueeze(-2) if positions.dim() == 2 else positions[None, None]
    by_frequency = turned * where.to(torch.float64).unsqueeze(-1)
    by_position = turned * (inv_freq.unsqueeze(-2) if per_head else inv_freq)
    over_tokens = (0, 2) if per_head else tuple(range(positions.dim()))
    theta_grad = by_frequency.sum(over_tokens).to(inv_freq.dtype) if ctx.needs_input_grad[1] else None
    position_grad = None
    if ctx.needs_input_grad[0]:
        position_grad = by_position.sum((1, 3) if per_head else -1).reshape(positions.shape).to(positions.dtype)
    return position_grad, theta_grad, None, None, None


_cos_sin_op.register_autograd(_angles_backward, setup_context=_save_angles)
