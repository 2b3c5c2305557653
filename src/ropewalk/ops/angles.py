"""cos and sin of positions by the backend that `dispatch` chooses, with gradients."""

from typing import Any

import torch
from torch import Tensor

from ropewalk.kernels.angles.torch import angles_at, pair_positions
from ropewalk.kernels.angles.torch import cos_sin as cos_sin_formula
from ropewalk.kernels.backend import registered
from ropewalk.kernels.constructors import empty
from ropewalk.ops.dispatch import choose

__all__ = ["cos_sin"]


def cos_sin(
    positions: Tensor,
    inv_freq: Tensor,
    radix_table: Tensor | None,
    amplitude: Tensor,
    dtype: torch.dtype,
    axes: Tensor | None = None,
    *,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Return amplitude * cos and amplitude * sin of the angles.

    torch.export gets the formula, so that exported programs do not need ropewalk. functorch gets it too, because the
    library op has no rules for it.

    Args:
        positions: As in `kernels.angles.torch.cos_sin`; the following arguments too.
        inv_freq: Frequencies.
        radix_table: Radix table, or None.
        amplitude: Factor on cos and sin, a float64 tensor.
        dtype: Dtype of the results.
        axes: Weights of the position axes, or None.
        backend: Preferred backend. If it does not support these angles, another one computes them.

    >>> one = torch.ones(1, dtype=torch.float64)
    >>> cos, _ = cos_sin(torch.tensor([2]), one, None, one[0], torch.float32)
    >>> round(cos.item(), 4)
    -0.4161
    """
    call = positions, inv_freq, radix_table, amplitude, dtype, axes
    choice = choose("cos_sin", backend, call, (positions, inv_freq, amplitude, axes))
    if choice.path == "op":
        return torch.ops.ropewalk.cos_sin(*call, choice.backend)
    if choice.path == "formula":
        # The radix table is indexed by the values of positions, which only plain tensors have.
        return cos_sin_formula(positions, inv_freq, None, amplitude, dtype, axes)
    return choice.operation.run(*call)


@torch.library.custom_op("ropewalk::cos_sin", mutates_args=())
def _cos_sin_op(
    positions: Tensor,
    inv_freq: Tensor,
    radix_table: Tensor | None,
    amplitude: Tensor,
    dtype: torch.dtype,
    axes: Tensor | None = None,
    backend: str = "torch",
) -> tuple[Tensor, Tensor]:
    return registered(backend).operations["cos_sin"].run(positions, inv_freq, radix_table, amplitude, dtype, axes)


@_cos_sin_op.register_fake
def _(positions: Tensor, inv_freq: Tensor, _: Tensor | None, amplitude: Tensor, dtype: torch.dtype, *rest: Any):
    axes = rest[0] if rest else None
    shape = (angles_at(positions, inv_freq, axes) * amplitude).shape
    return tuple(empty(shape, dtype=dtype, device=positions.device) for _ in range(2))


def _save_angles(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    positions, inv_freq, _, amplitude, _, axes, _ = inputs
    ctx.save_for_backward(positions, inv_freq, amplitude, axes, *output)


def _angles_backward(ctx: Any, cos_grad: Tensor, sin_grad: Tensor) -> tuple[Tensor | None, ...]:
    # d(a cos φ) = -a sin φ dφ + cos φ da and d(a sin φ) = a cos φ dφ + sin φ da. The outputs are a cos φ and a sin φ.
    positions, inv_freq, amplitude, axes, cos, sin = ctx.saved_tensors
    angle_grad = (sin_grad * cos - cos_grad * sin).to(torch.float64)
    needs_positions, needs_frequencies, _, needs_amplitude, *_ = ctx.needs_input_grad

    position_grad = theta_grad = amplitude_grad = None
    if needs_positions or needs_frequencies:
        by_pair, theta = pair_positions(positions, inv_freq.to(torch.float64), axes)
        if needs_frequencies:
            theta_grad = (angle_grad * by_pair).sum_to_size(theta.shape).reshape(inv_freq.shape).to(inv_freq.dtype)
        if needs_positions:
            pair_grad = (angle_grad * theta).sum_to_size(by_pair.shape)
            if axes is not None:
                pair_grad = torch.stack([(pair_grad * axis).sum(-1) for axis in axes.unbind(0)])
            position_grad = pair_grad.reshape(positions.shape).to(positions.dtype)
    if needs_amplitude:
        amplitude_grad = (cos_grad * cos + sin_grad * sin).to(torch.float64) / amplitude
        amplitude_grad = amplitude_grad.sum_to_size(amplitude.shape)
    return position_grad, theta_grad, None, amplitude_grad, None, None, None


_cos_sin_op.register_autograd(_angles_backward, setup_context=_save_angles)
