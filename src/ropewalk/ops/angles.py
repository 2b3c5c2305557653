"""cos and sin from positions, with an op boundary where a compiler would look inside."""

from typing import Any

import torch
from torch import Tensor

from ropewalk.kernels.angles import torch as angle_kernels
from ropewalk.kernels.backends import triton as gpu
from ropewalk.kernels.torch_internals import is_exporting, is_plain, is_transformed

__all__ = ["cos_sin"]


def cos_sin(
    positions: Tensor,
    inv_freq: Tensor,
    table: Tensor | None,
    amplitude: Tensor,
    dtype: torch.dtype,
    axes: Tensor | None = None,
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
    if torch.compiler.is_compiling() and not is_exporting() and not is_transformed():
        return torch.ops.ropewalk.cos_sin(positions, inv_freq, table, amplitude, dtype, axes)
    if (
        positions.is_cuda
        and is_plain(positions, inv_freq, amplitude, axes)
        and _fits_gpu(positions, inv_freq, amplitude)
    ):
        return gpu.kernels().cos_sin(positions, inv_freq, amplitude, dtype, axes)
    # The table is looked up by values, which only plain positions have.
    return angle_kernels.cos_sin(positions, inv_freq, table if is_plain(positions) else None, amplitude, dtype, axes)


def _fits_gpu(positions: Tensor, inv_freq: Tensor, amplitude: Tensor) -> bool:
    return gpu.INSTALLED and gpu.angles_serve(positions, inv_freq, amplitude)


@torch.library.custom_op("ropewalk::cos_sin", mutates_args=())
def _cos_sin_op(
    positions: Tensor,
    inv_freq: Tensor,
    table: Tensor | None,
    amplitude: Tensor,
    dtype: torch.dtype,
    axes: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    if positions.is_cuda and _fits_gpu(positions, inv_freq, amplitude):
        return gpu.kernels().cos_sin(positions, inv_freq, amplitude, dtype, axes)
    return angle_kernels.cos_sin(positions, inv_freq, table, amplitude, dtype, axes)


@_cos_sin_op.register_fake
def _(
    positions: Tensor,
    inv_freq: Tensor,
    table: Tensor | None,
    amplitude: Tensor,
    dtype: torch.dtype,
    axes: Tensor | None = None,
):
    shape = (angle_kernels.angles_at(positions, inv_freq, axes) * amplitude).shape
    return tuple(torch.empty(shape, dtype=dtype, device=positions.device) for _ in range(2))


def _save_angles(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    positions, inv_freq, _, amplitude, _, axes = inputs
    ctx.save_for_backward(positions, inv_freq, amplitude, axes, *output)


def _angles_backward(ctx: Any, cos_grad: Tensor, sin_grad: Tensor) -> tuple[Tensor | None, ...]:
    # d(a cos φ) = -a sin φ dφ + cos φ da and d(a sin φ) = a cos φ dφ + sin φ da; a cos φ and a sin φ were returned.
    positions, inv_freq, amplitude, axes, cos, sin = ctx.saved_tensors
    turned = (sin_grad * cos - cos_grad * sin).to(torch.float64)
    needs_positions, needs_frequencies, _, needs_amplitude, *_ = ctx.needs_input_grad

    position_grad = theta_grad = amplitude_grad = None
    if needs_positions or needs_frequencies:
        where, theta = angle_kernels.pair_positions(positions, inv_freq.to(torch.float64), axes)
        if needs_frequencies:
            theta_grad = (turned * where).sum_to_size(theta.shape).reshape(inv_freq.shape).to(inv_freq.dtype)
        if needs_positions:
            by_pair = (turned * theta).sum_to_size(where.shape)
            by_pair = by_pair if axes is None else torch.stack([(by_pair * axis).sum(-1) for axis in axes.unbind(0)])
            position_grad = by_pair.reshape(positions.shape).to(positions.dtype)
    if needs_amplitude:
        grown = (cos_grad * cos + sin_grad * sin).to(torch.float64) / amplitude
        amplitude_grad = grown.sum_to_size(amplitude.shape)
    return position_grad, theta_grad, None, amplitude_grad, None, None


_cos_sin_op.register_autograd(_angles_backward, setup_context=_save_angles)
