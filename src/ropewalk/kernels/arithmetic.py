"""The arithmetic of torch for the rules of a spec."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["TorchArithmetic"]


@dataclass(frozen=True)
class TorchArithmetic:
    """What `ropewalk.spec.arithmetic.Arithmetic` asks for, in a dtype of torch, on a device.

    In float32 the operations are those of transformers in their order: float32 exponents, a float32 power. torch and
    NumPy differ in the last bit of such a power.

    >>> TorchArithmetic(torch.float32, torch.device("cpu")).powers(10_000.0, 4).tolist()
    [1.0, 100.0]
    """

    dtype: torch.dtype
    device: torch.device

    def powers(self, base: Any, dim: int, count: int | None = None) -> Tensor:
        # No more than are asked for: the last bit of a power differs with where in memory it stands.
        stop = dim if count is None else 2 * count
        exponents = torch.arange(0, stop, 2, dtype=torch.int64, device=self.device).to(self.dtype) / dim
        return base**exponents

    def array(self, values: Sequence[Any]) -> Tensor:
        return torch.tensor(values, dtype=self.dtype, device=self.device)

    def join(self, first: Tensor, second: Tensor) -> Tensor:
        return torch.cat((first, second), dim=-1)

    def where(self, condition: Tensor, this: Any, other: Any) -> Tensor:
        return torch.where(condition, this, other)

    def clip(self, x: Tensor, low: float | None = None, high: float | None = None) -> Tensor:
        return torch.clamp(x, low, high)

    def log(self, x: Tensor) -> Tensor:
        return torch.log(x)

    def floor(self, x: Tensor) -> Tensor:
        return torch.floor(x)
