"""The built-in backends, registered: one file per backend, the slowest and most general first."""

from ropewalk.kernels.backend import register
from ropewalk.kernels.backends.native import NATIVE
from ropewalk.kernels.backends.torch import TORCH
from ropewalk.kernels.backends.triton import TRITON

__all__ = ["NATIVE", "TORCH", "TRITON"]

# Backends that are registered later are preferred.
for _backend in (TORCH, TRITON, NATIVE):
    register(_backend)
