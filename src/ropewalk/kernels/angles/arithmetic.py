"""The arithmetic of torch for the rules of a spec."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ropewalk.kernels.constructors import arange, placed, tensor

__all__ = ["Constants", "TorchArithmetic"]

# Numbers that a rule brings along, and the tensor that holds them.
Constants = Sequence[tuple[tuple[Any, ...], Tensor]]


class TorchArithmetic:
    """What `ropewalk.spec.arithmetic.Arithmetic` asks for, in a dtype of torch, on a device.

    In float32 the operations are those of transformers in their order: float32 exponents, a float32 power. torch and
    NumPy differ in the last bit of such a power.

    Numbers that a rule brings along, such as LongRope's lists, would have to be copied to a device, which makes the
    host wait. `made` collects them as tensors; handed back as `constants` they serve later calls that ask for the same.

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
        # No more than are asked for: the last bit of a power differs with where in memory it stands.
        stop = dim if count is None else 2 * count
        exponents = arange(0, stop, 2, dtype=torch.int64, device=self.device).to(self.dtype) / dim
        return base**exponents

    def array(self, values: Sequence[Any]) -> Tensor:
        key = tuple(values)
        for known, held in self._constants:
            if known == key:
                return placed(held, self.device)
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
