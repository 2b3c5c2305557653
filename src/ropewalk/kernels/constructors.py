"""New tensors that are what was asked for: no wrapper, default or mode changes their dtype, device or values.

While a model is made, libraries replace torch's constructors: DeepSpeed's `zero.Init` casts what `torch.tensor`,
`torch.arange` and others return to the dtype of the model; accelerate's `init_empty_weights(include_buffers=True)` puts
what `torch.zeros` and others return on meta. Frequencies in bfloat16 are wrong frequencies. So the package makes
tensors by the names below, with their dtype and device written out, and what a module keeps by `constant`. Parameters
are the exception: they are the user's, and follow whatever the user has set up.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ropewalk.kernels.torch_internals import OWN, OWN_METHODS, fake_mode, outside_modes

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
    arange = OWN.arange
    empty = OWN.empty
    empty_like = OWN.empty_like
    full = OWN.full
    full_like = OWN.full_like
    ones = OWN.ones
    ones_like = OWN.ones_like
    randn = OWN.randn
    tensor = OWN.tensor
    zeros = OWN.zeros
    zeros_like = OWN.zeros_like

# Like another tensor in dtype, device and kind, which may be batched or distributed.
new_empty: Callable[..., Tensor] = OWN_METHODS.new_empty
new_empty_strided: Callable[..., Tensor] = OWN_METHODS.new_empty_strided
new_full: Callable[..., Tensor] = OWN_METHODS.new_full
new_zeros: Callable[..., Tensor] = OWN_METHODS.new_zeros


def default_device() -> torch.device:
    """Where torch makes tensors now: where parameters go that are made now.

    >>> with torch.device("meta"):
    ...     default_device()
    device(type='meta')
    """
    # By the public name, which a wrapper may have changed. A compiler cannot trace torch.get_default_device.
    return torch.empty(0).device


def home() -> torch.device:
    """Where constants are made: where torch makes tensors now, if that is a real device that has float64; else the CPU.

    >>> with torch.device("meta"):
    ...     home()
    device(type='cpu')
    """
    device = default_device()
    return torch.device("cpu") if device.type in ("meta", "mps") or fake_mode() is not None else device


@contextmanager
def real_tensors() -> Iterator[None]:
    """A context in which tensors are ordinary ones: not fake, free to be saved for a backward, and seen by no mode.

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
    """Numbers for a module to keep: a real tensor, in the dtype asked for, or in that of the array; Python's floats are
    float64.

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
    """A constant where it is needed; a fake one of it where fake tensors are at work.

    >>> placed(torch.ones(1), torch.device("meta")).device
    device(type='meta')
    """
    mode = fake_mode()
    if mode is not None and not mode.is_our_fake(x):
        x = mode.from_tensor(x)
    return x if x.device == device else x.to(device)
