"""The backend "triton": kernels for CUDA devices. Triton is imported by the first call that needs it."""

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ropewalk.kernels.backend import Backend, Operation
from ropewalk.kernels.precision import FLOATS
from ropewalk.kernels.triton_launch import INSTALLED, INTERPRETED
from ropewalk.kernels.types import Layout, Side, Weighting

__all__ = ["TRITON"]

# Most features, and most values, that the tiles of linear attention support.
WIDEST = 256

# Kernels load pairs of neighbouring features, which start at even indices.
_ODD_START = "interleaved pairs that start at an odd feature"


def _late(module: str, name: str) -> Callable[..., Any]:
    """Return a function of a module that imports Triton. The first call imports the module."""
    loaded: list[Callable[..., Any]] = []

    def call(*arguments: Any, **options: Any) -> Any:
        if not loaded:
            loaded.append(getattr(importlib.import_module(f"ropewalk.kernels.{module}"), name))
        return loaded[0](*arguments, **options)

    return call


def _why_missing() -> str | None:
    if not INSTALLED:
        return "Triton is not installed: it comes with the CUDA builds of PyTorch, or pip install triton"
    # Checked when the backend is forced, not at import: the check would keep forked processes from using a device.
    if not INTERPRETED and not torch.cuda.is_available():
        return (
            "PyTorch sees no CUDA device (for tests, TRITON_INTERPRET=1 at the start runs Triton's kernels on the CPU)"
        )
    return None


def _runs_on(x: Tensor) -> bool:
    return x.is_cuda or (INTERPRETED and x.is_cpu)


def _supports_rotation(q: Tensor, k: Tensor | None, layout: Layout) -> str | None:
    if not _runs_on(q):
        return "tensors that are not on a CUDA device"
    if layout.interleaved and layout.start % 2:
        return _ODD_START
    return None if q.dtype in FLOATS else "a dtype that it does not support"


def _supports_angles(
    positions: Tensor,
    inv_freq: Tensor,
    radix_table: Tensor | None,
    amplitude: Tensor,
    dtype: torch.dtype,
    axes: Tensor | None,
) -> str | None:
    """Support float64 frequencies and one amplitude, without gradients."""
    if not _runs_on(positions):
        return "positions that are not on a CUDA device"
    # Under torch.compile the library op computes the gradients.
    learns = positions.requires_grad or inv_freq.requires_grad or amplitude.requires_grad
    if learns and torch.is_grad_enabled() and not torch.compiler.is_compiling():
        return "gradients of positions, frequencies or amplitudes"
    exact = inv_freq.dtype == amplitude.dtype == torch.float64
    if not exact or inv_freq.dim() > 2 or amplitude.dim() != 0:
        return "frequencies in float32, or several amplitudes"
    if positions.dtype in (torch.uint16, torch.uint32, torch.uint64):
        return "unsigned positions"
    return None


def _supports_linear(q: Side, k: Side, v: Tensor, layout: Layout, weighting: Weighting, causal: bool) -> str | None:
    if not _runs_on(v):
        return "tensors that are not on a CUDA device"
    if v.dtype == torch.float64 or v.dtype not in FLOATS:
        return "a dtype that it does not support"
    if max(q.x.shape[-1], v.shape[-1]) > WIDEST:
        return "more than 256 features or values"
    if layout.interleaved and layout.start % 2:
        return _ODD_START
    if q.x.numel() == 0 or k.x.numel() == 0 or v.numel() == 0:
        return "a tensor without elements"
    return None if weighting.is_plain() else _supports_weighting(q, k, weighting, causal)


def _supports_weighting(q: Side, k: Side, weighting: Weighting, causal: bool) -> str | None:
    decay, band, positions, *_ = weighting
    if positions is not None:
        return "a bias with positions"
    if band is not None and band.shape[1] < 3:
        return "a bias with a window of 0"
    if (band is not None or decay is not None) and q.x.shape[2] != k.x.shape[2]:
        return "a decay or a bias with other queries than keys"
    if not causal and decay is not None and decay.shape[2] > 1:
        return "a decay per token if attention is not causal"
    return None


def _worthwhile_linear(
    q: Side, k: Side, v: Tensor, layout: Layout, weighting: Weighting, causal: bool, compiling: bool
) -> bool:
    """Return False for one token: a few torch operations need less host time than three launches."""
    return k.x.shape[2] != 1


TRITON = Backend(
    name="triton",
    operations={
        "cos_sin": Operation(run=_late("angles.triton", "cos_sin"), supports=_supports_angles),
        "rotate": Operation(
            run=_late("rotate.triton", "rotate"),
            supports=_supports_rotation,
            shortcut=_late("rotate.triton_shortcut", "shortcut"),
            table_gradient=_late("rotate.triton_tables", "table_gradient"),
            in_place=True,
            strides=True,
        ),
        "norm_rotate": Operation(
            run=_late("qk_norm.triton", "norm_rotate"),
            supports=_supports_rotation,
            backward=_late("qk_norm.triton", "norm_rotate_backward"),
            shortcut=_late("qk_norm.triton_shortcut", "shortcut"),
            joint=True,
        ),
        "linear_attention": Operation(
            run=_late("linear.triton", "linear_attention"),
            supports=_supports_linear,
            worthwhile=_worthwhile_linear,
            backward=_late("linear.triton", "linear_attention_backward"),
            again=_late("linear.triton_again", "again"),
            empty_saved=_late("linear.triton", "empty_saved"),
            weights=True,
        ),
    },
    why_missing=_why_missing,
    devices=("cuda",) if INSTALLED else (),
    linear_step=_late("linear.triton_step", "linear_step"),
)
