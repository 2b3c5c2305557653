"""Torch arithmetic for the rules of a spec."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ropewalk.kernels.constructors import arange, placed, tensor

__all__ = ["Constants", "TorchArithmetic"]

# Numbers of a rule, and the tensor that contains them.
Constants = Sequence[tuple[tuple[Any, ...], Tensor]]


class TorchArithmetic:
    """`ropewalk.spec.arithmetic.Arithmetic` in torch.

    In float32 the operations are those of transformers, in the same order: float32 exponents, a float32 power. torch
    and NumPy differ in the last bit of such a power.

    Copying the numbers of a rule, such as LongRope's lists, to a device would block the host in every call. `made`
    collects them as tensors. Pass it as `constants` to reuse these tensors in later calls.

    Args:
        dtype: Dtype to compute in.
        device: Device to compute on.
        constants: `made` of an earlier call.

    >>> first = TorchArithmetic(torch.float32, torch.device("cpu"))
    >>> first.powers(10_000.0, 4).tolist(), first.array([3, 4]).tolist()
    ([1.0, 100.0], [3.0, 4.0])
    >>> TorchArithmetic(torch.float32, torch.device("cpu"), first.made).array([3, 4]) is first.made[0][1]
    True
    """

    def __init__(self, dtype: torch.dtype, device: torch.device, constants: Constants | None = None) -> None:
        self.dtype: torch.dtype = dtype
        self.device: torch.device = device
        self.made: list[tuple[tuple[Any, ...], Tensor]] = []
        self._constants = constants or ()

    def powers(self, base: Any, dim: int, count: int | None = None) -> Tensor:
        # Exactly `count` powers: the last bit of a power depends on its position in the vector.
        stop = dim if count is None else 2 * count
        exponents = arange(0, stop, 2, dtype=torch.int64, device=self.device).to(self.dtype) / dim
        return base**exponents

    def array(self, values: Sequence[Any]) -> Tensor:
        key = tuple(values)
        for numbers, stored in self._constants:
            if numbers == key:
                return placed(stored, self.device)
        self.made.append((key, tensor(values, dtype=self.dtype, device=self.device)))
        return self.made[-1][1]

    def join(self, first: Tensor, second: Tensor) -> Tensor:
        return torch.cat((first, second), dim=-1)

    def where(self, condition: Tensor, this: Any, other: Any) -> Tensor:
        return torch.where(condition, this, other)

    def clip(self, x: Tensor, low: float | None = None, high: float | None = None) -> Tensor:
        return torch.clamp(x, low, high)

    def log(self, x: Tensor) -> Tensor:
        return torch.log(x)

    def exp(self, x: Tensor) -> Tensor:
        return torch.exp(x)

    def floor(self, x: Tensor) -> Tensor:
        return torch.floor(x)
