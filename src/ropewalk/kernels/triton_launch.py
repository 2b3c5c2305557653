"""How tensors reach a Triton kernel: as rows of features, with everything about a launch worked out once a shape."""

import importlib.util
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = [
    "INSTALLED",
    "INTERPRETED",
    "LAUNCHES",
    "Launch",
    "Rows",
    "alignment",
    "far_tokens",
    "is_wide",
    "lie_together",
    "rows_of",
    "table_strides",
]

# Whether Triton can be imported. Read once and not asked in calls: a compiler would look into the question.
INSTALLED = importlib.util.find_spec("triton") is not None

# Whether kernels run as Python code on the CPU, as TRITON_INTERPRET=1 requests: for tests without a GPU.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

# An int32 index reaches this far.
REACH = 1 << 31


class Rows(NamedTuple):
    """A tensor as [batch, seq, heads, dim], by its sizes and its strides.

    >>> Rows(2, 3, 4, 8, (96, 32, 8, 1)).heads
    4
    """

    batch: int
    seq: int
    heads: int
    dim: int
    strides: tuple[int, int, int, int]

    def reach(self) -> int:
        """How far its last element lies from its first.

        >>> Rows(2, 3, 4, 8, (96, 32, 8, 1)).reach()
        191
        """
        sizes = self.batch, self.seq, self.heads, self.dim
        return sum((size - 1) * stride for size, stride in zip(sizes, self.strides, strict=True))


def rows_of(x: Tensor, seq_dim: int, table_dims: int) -> Rows | None:
    """x, [.., seq, dim] or [.., seq, heads, dim], as rows; None if its leading dimensions do not lie as one.

    Tables of three dimensions have a row a batch, which is the first dimension of x.

    >>> rows_of(torch.ones(2, 4, 3, 8), -2, 2)
    Rows(batch=2, seq=3, heads=4, dim=8, strides=(96, 8, 24, 1))
    >>> rows_of(torch.ones(2, 5, 4, 3, 8).transpose(1, 2), -2, 2) is None
    True
    """
    dims = [(size, stride if size > 1 else 0) for size, stride in zip(x.shape, x.stride(), strict=True)]
    leading, one = dims[:seq_dim], (1, 0)
    if seq_dim == -3:
        heads = dims[-2]
        batch = _merged(leading) if table_dims == 2 or len(leading) < 2 else None
    elif len(leading) == 1:
        batch, heads = (leading[0], one) if table_dims == 3 else (one, leading[0])
    else:
        batch, heads = leading[0] if leading else one, _merged(leading[1:])
    if batch is None or heads is None:
        return None
    sizes, strides = zip(batch, dims[seq_dim], heads, strict=True)
    # The stride of a single feature would say nothing, and 1 serves the common case.
    return Rows(*sizes, x.shape[-1], (*strides, x.stride(-1)))


def _merged(dims: Sequence[tuple[int, int]]) -> tuple[int, int] | None:
    """Neighbouring dimensions as one size and stride, where they lie so."""
    size, stride = 1, 0
    for n, step in reversed(dims):
        if n == 1:
            continue
        if size > 1 and step != size * stride:
            return None
        size, stride = size * n, stride if size > 1 else step
    return size, stride


def lie_together(rows: Rows) -> bool:
    """Whether the heads of a token lie side by side, and not the tokens of a head.

    >>> lie_together(Rows(1, 64, 8, 128, (65536, 1024, 128, 1)))
    True
    """
    return rows.heads == 1 or rows.seq == 1 or rows.strides[2] <= rows.strides[1]


def far_tokens(seq: int) -> int:
    """How many tokens of a head come before the next head, where they lie side by side: a power of two.

    As a copy goes, one head after the other, but no longer than cos and sin stay in the cache.

    >>> far_tokens(1000), far_tokens(1 << 20)
    (1024, 8192)
    """
    return min(8192, 1 << (seq - 1).bit_length())


def table_strides(table: Tensor) -> tuple[int, int]:
    """How many rows lie between batches and between heads of a contiguous cos or sin; 0 where they share theirs.

    >>> table_strides(torch.ones(2, 5, 4)), table_strides(torch.ones(1, 3, 5, 4)), table_strides(torch.ones(5, 4))
    ((5, 0), (0, 5), (0, 0))
    """
    rows, shape = table.shape[-2], table.shape
    if len(shape) == 2:
        return 0, 0
    heads = shape[1] if len(shape) == 4 else 1
    return 0 if shape[0] == 1 else heads * rows, 0 if heads == 1 else rows


def alignment(most: int, *numbers: int) -> int:
    """The largest power of two up to `most` that divides all of them.

    >>> alignment(8, 96, 12, 0)
    4
    """
    while any(number % most for number in numbers):
        most //= 2
    return most


def is_wide(*reaches: int) -> bool:
    """Whether an index must have 64 bits. Lanes that are masked out count a little further than the last element.

    >>> is_wide(1 << 20), is_wide(1 << 31)
    (False, True)
    """
    return any(reach >= REACH - (1 << 24) for reach in reaches)


class Launch:
    """A kernel with its grid, its numbers and its constants: what is left is where the tensors lie.

    Triton finds the binary for its arguments anew at every call, which takes several times as long as to launch it.
    Here it is asked once, and the binary is kept.

    >>> launch = Launch(kernel=None, programs=3, numbers=(7,), constants={"WIDTH": 4}, warps=4)
    >>> launch.programs
    3
    """

    def __init__(
        self, kernel: Any, programs: int, numbers: Sequence[int | float], constants: dict[str, Any], warps: int
    ) -> None:
        self.programs = programs
        self._kernel, self._grid, self._warps = kernel, (programs, 1, 1), warps
        self._numbers, self._constants = tuple(numbers), constants
        self._rest = (*numbers, *constants.values())
        self._run: Callable[..., Any] | None = None

    def __call__(self, device: torch.device, *given: Tensor | int | float) -> None:
        if device.type == "cuda" and torch.cuda.current_device() != device.index:
            with torch.cuda.device(device):
                return self(device, *given)
        if self._run is not None:
            self._run(*given, *self._rest)
            return None
        made = self.bare(*given)
        # Triton's interpreter makes none.
        if made is not None:
            self._run = made[self._grid]
        return None

    def bare(self, *given: Tensor | int | float) -> Any:
        """The launch by Triton's own interface."""
        return self._kernel[self._grid](*given, *self._numbers, **self._constants, num_warps=self._warps)


class _Launches(dict[Any, Any]):
    """Launches by all that they depend on. There are few in a model; where lengths never repeat, old ones go."""

    def keep(self, key: Any, value: Any) -> Any:
        if len(self) >= 1024:
            self.clear()
        self[key] = value
        return value


LAUNCHES = _Launches()
