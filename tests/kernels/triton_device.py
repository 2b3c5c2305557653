"""The device of the Triton kernels in tests: a GPU, or the CPU with Triton's interpreter."""

import dataclasses
import functools
from typing import Any

import torch
from triton.runtime import interpreter

from ropewalk.kernels.triton_launch import INTERPRETED

DEVICE = torch.device("cpu" if INTERPRETED else "cuda")


def _cast_and_round(self: Any, src: Any, dst_type: Any) -> Any:
    if src.dtype.scalar.is_fp32() and dst_type.scalar.is_bf16():
        bits = torch.from_numpy(src.data.copy()).to(torch.bfloat16).view(torch.uint16).numpy()
        return interpreter.TensorHandle(bits, dst_type.scalar)
    return _cast(self, src, dst_type)


# The interpreter truncates float32 to bfloat16. Hardware rounds to nearest. It rounds all other dtypes.
_cast = interpreter.InterpreterBuilder.cast_impl
interpreter.InterpreterBuilder.cast_impl = _cast_and_round


def _dot_of_numbers(self: Any, a: Any, b: Any, *rest: Any) -> Any:
    return _dot(self, *(_widened(x) if x.dtype.scalar.is_bf16() else x for x in (a, b)), *rest)


def _widened(x: Any) -> Any:
    numbers = torch.from_numpy(x.data.copy()).view(torch.bfloat16).float().numpy()
    return interpreter.TensorHandle(numbers, interpreter.tl.float32)


# The interpreter stores a bfloat16 as its bits, and would multiply the bits.
_dot = interpreter.InterpreterBuilder.create_dot
interpreter.InterpreterBuilder.create_dot = _dot_of_numbers  # pyright: ignore[reportAttributeAccessIssue]


# The interpreter computes whether each sum and product of integers overflows, and drops the result, because `debug` is
# off. That is half of the time of some tests.
_builder = interpreter.interpreter_builder
_builder.options = dataclasses.replace(_builder.options, sanitize_overflow=False)


class _Launch(interpreter._LangPatchScope):
    """What a launch and the device functions that it calls replace in triton.language, until `restore`."""

    active: "_Launch | None" = None

    def __init__(self) -> None:
        super().__init__()
        self.languages: set[frozenset[str]] = set()

    def restore(self) -> None:
        super().restore()
        _Launch.active = None


@functools.cache
def _language(fn: Any) -> frozenset[str]:
    """The names by which a function knows triton.language."""
    modules = (interpreter.tl, interpreter.tl.core)
    return frozenset(name for name, value in fn.__globals__.items() if any(value is module for module in modules))


def _patch_once(fn: Any) -> _Launch:
    launch = _Launch.active = _Launch.active or _Launch()
    language = _language(fn)
    if language not in launch.languages:
        launch.languages.add(language)
        launch._changes += _patch(fn)._changes
    return launch


# The interpreter replaces the functions of triton.language in each launch, and again in each call of a device function.
# The latter is a third of the time of these tests, and changes nothing after the first call.
_patch = interpreter._patch_lang
interpreter._patch_lang = _patch_once


def as_it_lies(x: torch.Tensor) -> Any:
    """x on the device, with its strides and its offset in memory, and its gradient back on the CPU."""
    return _MoveAsItLies.apply(x)


def on_device(candidate: Any) -> Any:
    """A candidate for the parity check whose tensors lie where the kernels run."""

    def moved(x: Any, positions: Any, inv_freq: Any, **options: Any) -> Any:
        there = x if DEVICE.type == "cpu" else as_it_lies(x)
        rotated = candidate(there, positions.to(DEVICE), inv_freq.to(DEVICE), backend="triton", **options)
        return rotated.to("cpu")

    return moved


class _MoveAsItLies(torch.autograd.Function):
    """A tensor on the device with its strides and its offset in memory: `to` would make many views contiguous."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        reach = sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True)) + 1 if x.numel() else 0
        start = x.storage_offset()
        memory = x.as_strided((start + reach,), (1,), 0).to(DEVICE)
        return memory.as_strided(x.shape, x.stride(), start)

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor) -> torch.Tensor:
        return cotangents[0].to("cpu")
