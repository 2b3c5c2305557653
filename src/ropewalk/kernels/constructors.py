"""Tensor constructors whose dtype, device and values no wrapper, default or mode can change.

Libraries replace torch's constructors while a model is built. DeepSpeed's `zero.Init` casts the results of
`torch.tensor`, `torch.arange` and others to the dtype of the model. accelerate's
`init_empty_weights(include_buffers=True)` moves the results of `torch.zeros` and others to meta. Frequencies in
bfloat16 are wrong. Therefore the package constructs tensors by the functions below, with explicit dtype and device, and
the constants of a module by `constant`. Parameters are the exception: they follow the user's settings.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ropewalk.kernels.torch_internals import TENSOR_METHODS, TORCH_FUNCTIONS, fake_mode, outside_modes

__all__ = [
    "arange",
    "constant",
    "default_device",
    "empty",
    "empty_like",
    "full",
    "full_like",
    "home",
    "new_empty",
    "new_empty_strided",
    "new_full",
    "new_zeros",
    "ones",
    "ones_like",
    "placed",
    "randn",
    "real_tensors",
    "tensor",
    "zeros",
    "zeros_like",
]

if TYPE_CHECKING:
    from torch import arange, empty, empty_like, full, full_like, ones, ones_like, randn, tensor, zeros, zeros_like
else:
    arange = TORCH_FUNCTIONS.arange
    empty = TORCH_FUNCTIONS.empty
    empty_like = TORCH_FUNCTIONS.empty_like
    full = TORCH_FUNCTIONS.full
    full_like = TORCH_FUNCTIONS.full_like
    ones = TORCH_FUNCTIONS.ones
    ones_like = TORCH_FUNCTIONS.ones_like
    randn = TORCH_FUNCTIONS.randn
    tensor = TORCH_FUNCTIONS.tensor
    zeros = TORCH_FUNCTIONS.zeros
    zeros_like = TORCH_FUNCTIONS.zeros_like

# Constructors of tensors with the dtype, device and type of another one, which may be batched or distributed.
new_empty: Callable[..., Tensor] = TENSOR_METHODS.new_empty
new_empty_strided: Callable[..., Tensor] = TENSOR_METHODS.new_empty_strided
new_full: Callable[..., Tensor] = TENSOR_METHODS.new_full
new_zeros: Callable[..., Tensor] = TENSOR_METHODS.new_zeros


def default_device() -> torch.device:
    """Return the device on which torch currently creates tensors, and therefore parameters.

    >>> with torch.device("meta"):
    ...     default_device()
    device(type='meta')
    """
    # The public function, which a wrapper may have replaced. torch.compile cannot trace torch.get_default_device.
    return torch.empty(0).device


def home() -> torch.device:
    """Return the device for constants: the default device if it is a real one with float64, else the CPU.

    >>> with torch.device("meta"):
    ...     home()
    device(type='cpu')
    """
    device = default_device()
    return torch.device("cpu") if device.type in ("meta", "mps") or fake_mode() is not None else device


@contextmanager
def real_tensors() -> Iterator[None]:
    """Context in which new tensors are ordinary: not fake, not inference tensors, and not intercepted by a mode.

    >>> with torch.inference_mode(), real_tensors():
    ...     tensor([1.0]).is_inference()
    False
    """
    with torch.inference_mode(False), outside_modes():
        yield


def constant(
    values: Tensor | NDArray[np.generic] | Sequence[float] | Sequence[Sequence[float]] | float,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
) -> Tensor:
    """Return numbers as a real tensor that a module can store.

    Args:
        values: Numbers, an array or a tensor.
        dtype: Dtype of the result. Default: the dtype of the array or tensor; float64 for Python floats.
        device: Device of the result. Default: `home()`.

    >>> torch.set_default_dtype(torch.float16)
    >>> with torch.device("meta"):
    ...     kept = constant([0.1, 0.2], torch.float64)
    >>> torch.set_default_dtype(torch.float32)
    >>> kept.tolist()
    [0.1, 0.2]
    """
    device = home() if device is None else device
    if torch.compiler.is_compiling() and not isinstance(values, Tensor):
        return tensor(values, dtype=dtype, device=device)
    with real_tensors():
        if isinstance(values, Tensor):
            return values.to(device, dtype)
        return tensor(values if dtype is not None else np.asarray(values), dtype=dtype, device=device)


def placed(x: Tensor, device: torch.device) -> Tensor:
    """Return a constant on `device`, as a fake tensor if a fake tensor mode is active.

    >>> placed(torch.ones(1), torch.device("meta")).device
    device(type='meta')
    """
    mode = fake_mode()
    if mode is not None and not mode.is_our_fake(x):
        x = mode.from_tensor(x)
    return x if x.device == device else x.to(device)
