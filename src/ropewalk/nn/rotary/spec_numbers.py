"""The numbers of a spec as tensors. torch.compile treats them as constants, even if the spec is created under it."""

from typing import NamedTuple

import torch
from torch import Tensor

from ropewalk.kernels.angles.arithmetic import Constants, TorchArithmetic
from ropewalk.kernels.angles.torch import radix_table
from ropewalk.kernels.constructors import constant, ones, real_tensors, zeros
from ropewalk.kernels.torch_internals import constant_to_compiler
from ropewalk.spec.frequencies import Plain
from ropewalk.spec.rope import RopeSpec
from ropewalk.spec.value import Parts, from_parts, to_parts

__all__ = ["SpecNumbers", "amplitude_at", "dtype_of", "numbers_of", "plain_frequencies", "table_of"]


class SpecNumbers(NamedTuple):
    """The numbers of a spec as tensors.

    Attributes:
        inv_freq: Frequencies [pairs] or [heads, pairs].
        amplitude: Amplitude [], float64.
        axes: Weights of the axes, or None.
        constants: Constants of the rule, of xPos and of the query temperature.

    >>> numbers_of(RopeSpec(4), torch.device("cpu")).amplitude.item()
    1.0
    """

    inv_freq: Tensor
    amplitude: Tensor
    axes: Tensor | None
    constants: tuple[Constants, Constants, Constants]


def dtype_of(spec: RopeSpec) -> torch.dtype:
    """Return the dtype in which frequencies are computed.

    >>> dtype_of(RopeSpec(4, angles="float32"))
    torch.float32
    """
    return torch.float64 if spec.angles == "exact" else torch.float32


def numbers_of(spec: RopeSpec, device: torch.device) -> SpecNumbers:
    """Return the numbers of a spec, on a device.

    >>> numbers_of(RopeSpec(4), torch.device("cpu")).inv_freq.tolist()
    [1.0, 0.01]
    """
    if torch.compiler.is_compiling():
        parts = to_parts(spec)
        axes = None if spec.axes is None else constant(spec.axes.weights, torch.float64, device)
        # The graph contains the other constants at their uses.
        return SpecNumbers(
            constant(_traced_inv_freq(parts), dtype_of(spec), device),
            constant(_traced_amplitude(parts, None), torch.float64, device),
            axes,
            ((), (), ()),
        )
    return SpecNumbers(
        _inv_freq(spec, device),
        _amplitude(spec, device),
        None if spec.axes is None else constant(spec.axes.weights, torch.float64, device),
        _constants(spec, device),
    )


def amplitude_at(spec: RopeSpec, length: int | None = None) -> float:
    """Return `spec.amplitude(length)`, in a form that torch.compile can trace.

    >>> amplitude_at(RopeSpec(4))
    1.0
    """
    return _traced_amplitude(to_parts(spec), length) if torch.compiler.is_compiling() else spec.amplitude(length)


def plain_frequencies(base: float, dim: int) -> Tensor:
    """Return theta_i = base^(-2i/dim) for i = 0 .. dim/2-1 as a float64 constant [dim/2].

    >>> plain_frequencies(10_000, 4).tolist()
    [1.0, 0.01]
    """
    compiling = torch.compiler.is_compiling()
    return constant(_traced_plain(base, dim) if compiling else Plain(base).evaluate(dim), torch.float64)


def table_of(spec: RopeSpec) -> Tensor:
    """Return the radix table of the frequencies, on the CPU.

    >>> table_of(RopeSpec(4)).shape
    torch.Size([3, 256, 2])
    """
    with real_tensors():
        return radix_table(constant(spec.inv_freq(), torch.float64, torch.device("cpu")))


def _inv_freq(spec: RopeSpec, device: torch.device) -> Tensor:
    if spec.angles == "exact":
        return constant(spec.inv_freq(), torch.float64, device)
    # transformers computes them with these operations on the CPU.
    with real_tensors():
        return spec.evaluate(None, TorchArithmetic(torch.float32, torch.device("cpu"))).to(device)


def _amplitude(spec: RopeSpec, device: torch.device) -> Tensor:
    return constant(spec.amplitude(), torch.float64, device)


def _constants(spec: RopeSpec, device: torch.device) -> tuple[Constants, Constants, Constants]:
    """Return the constants of the rule, of xPos and of the temperature on `device`, so that forward copies nothing."""
    if not spec.varies and spec.same_for_both:
        return (), (), ()
    dtype = dtype_of(spec)
    rule, xpos, temperature = (TorchArithmetic(kind, device) for kind in (dtype, torch.float64, torch.float64))
    with real_tensors():
        zero = zeros(1, dtype=torch.float64, device=device)
        if spec.varies:
            length = ones((), dtype=dtype, device=device)
            spec.evaluate(length, rule)
            spec.frequencies.amplitude(length, rule)
        if spec.xpos is not None:
            spec.xpos.log_scale(spec.rotated_dim, zero, xpos)
        if spec.query_temperature is not None:
            spec.query_temperature.evaluate(zero, temperature)
    return rule.made, xpos.made, temperature.made


# torch.compile would trace NumPy and compute other numbers. It treats the results of the functions below as constants.
# Their argument is the parts of a spec: under torch.compile the spec object does not exist yet.


@constant_to_compiler
def _traced_inv_freq(parts: Parts) -> tuple[float, ...] | tuple[tuple[float, ...], ...]:
    numbers = _inv_freq(from_parts(parts, RopeSpec), torch.device("cpu"))
    return tuple(numbers.tolist() if numbers.dim() == 1 else map(tuple, numbers.tolist()))


@constant_to_compiler
def _traced_amplitude(parts: Parts, length: int | None) -> float:
    return from_parts(parts, RopeSpec).amplitude(length)


@constant_to_compiler
def _traced_plain(base: float, dim: int) -> tuple[float, ...]:
    return tuple(Plain(base).evaluate(dim).tolist())
