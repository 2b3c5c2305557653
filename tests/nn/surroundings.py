"""Changes that libraries and users make to torch around a model: replaced constructors, defaults, modes."""

import contextlib
import functools
from collections.abc import Callable, Iterator

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

# What DeepSpeed's zero.Init replaces (deepspeed/runtime/zero/partition_parameters.py), beside torch.Tensor.__new__.
DEEPSPEED = ("tensor", "empty", "zeros", "ones", "full", "arange", "eye", "randn")
# What accelerate's init_empty_weights(include_buffers=True) replaces.
ACCELERATE = ("empty", "zeros", "ones", "full")
# Every constructor there is.
CONSTRUCTORS = (
    *DEEPSPEED,
    *("as_tensor", "asarray", "from_numpy", "frombuffer", "scalar_tensor", "range", "linspace", "logspace"),
    *("rand", "randint", "randperm", "normal", "empty_strided", "empty_permuted", "complex", "polar"),
    *("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like"),
)
METHODS = ("new_tensor", "new_empty", "new_empty_strided", "new_full", "new_ones", "new_zeros")


def casting(make: Callable[..., torch.Tensor], dtype: torch.dtype) -> Callable[..., torch.Tensor]:
    """A constructor whose floating results are cast, in place, as zero.Init does it."""

    @functools.wraps(make)
    def made(*args, **options):
        tensor = make(*args, **options)
        if tensor.is_floating_point():
            tensor.data = tensor.data.to(dtype)
        return tensor

    return made


def elsewhere(make: Callable[..., torch.Tensor], device: str, *, always: bool) -> Callable[..., torch.Tensor]:
    """A constructor that makes tensors on another device: where none is asked for, or always."""

    @functools.wraps(make)
    def made(*args, **options):
        if always or options.get("device") is None:
            options["device"] = device
        return make(*args, **options)

    return made


@contextlib.contextmanager
def zero_init(dtype: torch.dtype) -> Iterator[None]:
    """The constructors that DeepSpeed's zero.Init replaces, with equivalent replacements."""

    def new(cls, *args, **options):
        return torch.zeros(0).new_empty(*(args or (0,)), **options).to(dtype)

    with pytest.MonkeyPatch.context() as patch:
        for name in DEEPSPEED:
            patch.setattr(torch, name, casting(getattr(torch, name), dtype))
        patch.setattr(torch.Tensor, "__new__", new)
        yield


@contextlib.contextmanager
def every_constructor(dtype: torch.dtype) -> Iterator[None]:
    """All constructors of torch and of tensors cast what they make."""
    with pytest.MonkeyPatch.context() as patch:
        for name in CONSTRUCTORS:
            patch.setattr(torch, name, casting(getattr(torch, name), dtype))
        for name in METHODS:
            patch.setattr(torch.Tensor, name, casting(getattr(torch.Tensor, name), dtype))
        yield


@contextlib.contextmanager
def empty_weights(names: tuple[str, ...] = ACCELERATE, *, always: bool = True) -> Iterator[None]:
    """accelerate's init_empty_weights(include_buffers=True): some constructors make tensors on meta."""
    with pytest.MonkeyPatch.context() as patch:
        for name in names:
            patch.setattr(torch, name, elsewhere(getattr(torch, name), "meta", always=always))
        yield


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """torch.set_default_dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def default_device(device: str) -> Iterator[None]:
    """torch.set_default_device."""
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)


SURROUNDINGS: dict[str, Callable[[], contextlib.AbstractContextManager[object]]] = {
    "zero.Init in bfloat16": lambda: zero_init(torch.bfloat16),
    "zero.Init in float16": lambda: zero_init(torch.float16),
    "zero.Init for another device": lambda: empty_weights(DEEPSPEED, always=False),
    "every constructor casts to bfloat16": lambda: every_constructor(torch.bfloat16),
    "every constructor casts to float64": lambda: every_constructor(torch.float64),
    "init_empty_weights with buffers": empty_weights,
    "default dtype float16": lambda: default_dtype(torch.float16),
    "default dtype bfloat16": lambda: default_dtype(torch.bfloat16),
    "default dtype float64": lambda: default_dtype(torch.float64),
    "default device meta": lambda: default_device("meta"),
    "with torch.device meta": lambda: torch.device("meta"),
    "inference mode": torch.inference_mode,
    "fake tensors": FakeTensorMode,
}
