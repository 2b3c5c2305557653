"""The registered backends that can run on this machine, their devices, and how many cases tests run on each."""

import functools
import itertools
from collections.abc import Callable, Iterable
from typing import Any

import hypothesis
import torch
from torch import Tensor

from kernels.triton_device import DEVICE, as_it_lies, on_device
from ropewalk.kernels.backend import Backend, backends, registered
from ropewalk.kernels.backends import NATIVE, TORCH, TRITON
from slow import slow

# Importing a backend registers it.
BUILT_IN: tuple[Backend, ...] = (NATIVE, TORCH, TRITON)
PRESENT = [backend.name for backend in backends() if backend.why_missing() is None]

# Triton compiles a kernel per shape on a GPU, and is interpreted without a GPU. Tests run fewer examples on it.
SLOW = {"triton"}
QUICK = [name for name in PRESENT if name not in SLOW]


def home(name: str) -> torch.device:
    """The device on which the tests run a backend."""
    return DEVICE if name == "triton" else torch.device("cpu")


def automatic(name: str) -> bool:
    """Whether the backend is the default on that device. Only then are its shortcuts used."""
    devices = registered(name).devices
    return devices is None or home(name).type in devices


def mover(name: str) -> Callable[[Tensor], Tensor]:
    """A function that copies a CPU tensor to the backend's device, and keeps its strides and storage offset."""
    return (lambda x: x) if home(name).type == "cpu" else as_it_lies


def candidate(function: Callable[..., Tensor], name: str) -> Callable[..., Tensor]:
    """`function` of nn/module.py, with a `backend` option, as `check_rotation` calls it."""
    return on_device(function) if name == "triton" else functools.partial(function, backend=name)


def with_dtypes(names: Iterable[str], dtypes: Iterable[torch.dtype]) -> list[Any]:
    """Parameters (name, dtype). Of a slow backend only bfloat16 is quick."""
    pairs = itertools.product(names, dtypes)
    return [slow(*pair) if pair[0] in SLOW and pair[1] != torch.bfloat16 else pair for pair in pairs]


def examples(name: str) -> int:
    """How many examples Hypothesis draws for a backend."""
    return 2 if name in SLOW else hypothesis.settings().max_examples
