"""cos and sin of position times frequency on a GPU: exact angles, one launch, no float64 temporaries."""

# pyright: reportGeneralTypeIssues=false
# Triton's ranges are not Python iterators.

import torch
import triton
import triton.language as tl
from torch import Tensor

from ropewalk.kernels.constructors import empty, empty_like
from ropewalk.kernels.triton_launch import LAUNCHES, Launch

__all__ = ["cos_sin", "cos_sin_of"]

# Up to this angle, the reduction with two terms of pi/2 is more precise than float32. Larger angles use the cosine of
# the library, which is slower.
FAR = tl.constexpr(float(1 << 26))


@triton.jit
def _near(angle):
    """Return cos and sin of float64 angles below FAR, for float32: Cody-Waite reduction, then Taylor series."""
    quarters = tl.floor(angle * 0.6366197723675814 + 0.5)
    # A literal alone would be float32.
    high = tl.full((), 1.5707963267948966, tl.float64)
    low = tl.full((), 6.123233995736766e-17, tl.float64)
    r = tl.fma(-quarters, low + tl.zeros_like(quarters), tl.fma(-quarters, high + tl.zeros_like(quarters), angle))
    z = r * r
    sine = z * -2.505210838544172e-08 + 2.7557319223985893e-06
    sine = z * sine + -0.0001984126984126984
    sine = z * sine + 0.008333333333333333
    sine = z * sine + -0.16666666666666666
    sine = r * z * sine + r
    cosine = z * 2.08767569878681e-09 + -2.755731922398589e-07
    cosine = z * cosine + 2.48015873015873e-05
    cosine = z * cosine + -0.001388888888888889
    cosine = z * cosine + 0.041666666666666664
    cosine = z * z * cosine + (z * -0.5 + 1.0)
    quarter = quarters.to(tl.int32) & 3
    swapped = (quarter & 1) == 1
    cos = tl.where(swapped, sine, cosine)
    sin = tl.where(swapped, cosine, sine)
    return tl.where(((quarter + 1) & 2) == 2, -cos, cos), tl.where((quarter & 2) == 2, -sin, sin)


@triton.jit
def cos_sin_of(angle, dtype: tl.constexpr):
    """Return float64 cos and sin of float64 angles, exact enough for results of `dtype`."""
    if dtype == tl.float64:
        c, s = tl.cos(angle), tl.sin(angle)
    elif tl.max(tl.abs(angle)) < FAR:
        c, s = _near(angle)
    else:
        c, s = tl.cos(angle), tl.sin(angle)
    return c, s


@triton.jit(do_not_specialize=["tokens", "seq"])
def _cos_sin(
    positions,
    inv_freq,
    amplitude,
    axes,
    cos,
    sin,
    tokens,
    seq,
    AXES: tl.constexpr,
    HEADS: tl.constexpr,
    PAIRS: tl.constexpr,
    LANES: tl.constexpr,
):
    """One lane computes one element of the contiguous result. `tokens` is the number of tokens in all batches."""
    at = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)
    pair = at % PAIRS
    token = at // PAIRS
    head = tl.zeros_like(pair)
    if HEADS > 1:
        row = token // seq
        head = row % HEADS
        token = row // HEADS * seq + token % seq
    valid = token < tokens
    if AXES == 0:
        position = tl.load(positions + token, mask=valid, other=0).to(tl.float64)
    else:
        position = tl.zeros((LANES,), tl.float64)
        for axis in tl.static_range(AXES):
            on_axis = tl.load(positions + axis * tokens + token, mask=valid, other=0).to(tl.float64)
            position += on_axis * tl.load(axes + axis * PAIRS + pair)
    angle = position * tl.load(inv_freq + head * PAIRS + pair)
    scale = tl.load(amplitude)
    c, s = cos_sin_of(angle, cos.dtype.element_ty)
    tl.store(cos + at, (scale * c).to(cos.dtype.element_ty), mask=valid)
    tl.store(sin + at, (scale * s).to(sin.dtype.element_ty), mask=valid)


def cos_sin(
    positions: Tensor,
    inv_freq: Tensor,
    radix_table: Tensor | None,
    amplitude: Tensor,
    dtype: torch.dtype,
    axes: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return `angles.torch.cos_sin` by one launch, for float64 frequencies and one amplitude. radix_table is ignored.

    >>> from ropewalk.kernels.triton_launch import INTERPRETED
    >>> device = "cpu" if INTERPRETED else "cuda"
    >>> one, theta = torch.tensor(1.0).double().to(device), torch.tensor([1.0, 0.5]).double().to(device)
    >>> cos, sin = cos_sin(torch.tensor([0, 2], device=device), theta, None, one, torch.float32)
    >>> [round(c, 4) for c in cos[1].tolist()]  # cos 2, cos 1
    [-0.4161, 0.5403]
    """
    device, pairs = positions.device, inv_freq.shape[-1]
    heads = inv_freq.shape[0] if inv_freq.dim() == 2 else 1
    shape = positions.shape if axes is None else positions.shape[1:]
    seq, tokens = shape[-1], shape.numel()
    if inv_freq.dim() == 2:
        shape = (shape[0] if len(shape) == 2 else 1, heads, seq)
    cos = empty((*shape, pairs), dtype=dtype, device=device)
    sin = empty_like(cos)
    if tokens == 0:
        return cos, sin
    positions, inv_freq = positions.contiguous(), inv_freq.contiguous()
    tensors = positions, inv_freq, amplitude, inv_freq if axes is None else axes.contiguous(), cos, sin
    addresses = tuple(x.data_ptr() & 15 for x in tensors)
    count = 0 if axes is None else axes.shape[0]
    key = (_cos_sin, positions.dtype, dtype, device, tokens, seq, count, heads, pairs, addresses)
    launch = LAUNCHES.get(key)
    if launch is None:
        lanes = 256
        constants = {"AXES": count, "HEADS": heads, "PAIRS": pairs, "LANES": lanes}
        programs = -(-tokens * heads * pairs // lanes)
        launch = LAUNCHES.keep(key, Launch(_cos_sin, programs, (tokens, seq), constants, 4))
    launch(device, *tensors)
    return cos, sin
