"""Launches of Triton kernels: tensors as rows of features, and launch arguments that are computed once per shape."""

import importlib
import importlib.util
import inspect
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ropewalk.kernels.torch_internals import current_device, current_stream

__all__ = [
    "INSTALLED",
    "INTERPRETED",
    "LAUNCHES",
    "Launch",
    "Rows",
    "alignment",
    "heads_are_adjacent",
    "is_wide",
    "launcher_note",
    "rows_of",
    "table_strides",
    "tokens_before_next_head",
    "why_launcher_unknown",
]

# Whether Triton is installed. Checked at import and not in calls, because torch.compile would trace the check.
INSTALLED = importlib.util.find_spec("triton") is not None

# Whether Triton's interpreter runs the kernels on the CPU (TRITON_INTERPRET=1), for tests without a GPU.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

# The range of an int32 index.
REACH = 1 << 31


class Rows(NamedTuple):
    """Sizes and strides of a tensor viewed as [batch, seq, heads, dim].

    >>> Rows(2, 3, 4, 8, (96, 32, 8, 1)).heads
    4
    """

    batch: int
    seq: int
    heads: int
    dim: int
    strides: tuple[int, int, int, int]

    def reach(self) -> int:
        """Return the distance of the last element from the first, in elements.

        >>> Rows(2, 3, 4, 8, (96, 32, 8, 1)).reach()
        191
        """
        sizes = self.batch, self.seq, self.heads, self.dim
        return sum((size - 1) * stride for size, stride in zip(sizes, self.strides, strict=True))


def rows_of(x: Tensor, seq_dim: int, table_dims: int) -> Rows | None:
    """Return the sizes and strides of x as rows, or None if its leading dimensions cannot be merged into one stride.

    Args:
        x: [..., seq, dim] or [..., seq, heads, dim].
        seq_dim: Dimension of the sequence, -2 or -3.
        table_dims: Number of dimensions of cos and sin. Tables of three dimensions differ between batches, which are
            the first dimension of x.

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
    # Not 0 for a single feature, unlike above: its stride is usually 1, the common case of the kernels.
    return Rows(*sizes, x.shape[-1], (*strides, x.stride(-1)))


def _merged(dims: Sequence[tuple[int, int]]) -> tuple[int, int] | None:
    """Merge neighbouring dimensions into one size and stride, or return None."""
    size, stride = 1, 0
    for dim_size, dim_stride in reversed(dims):
        if dim_size == 1:
            continue
        if size > 1 and dim_stride != size * stride:
            return None
        size, stride = size * dim_size, stride if size > 1 else dim_stride
    return size, stride


def heads_are_adjacent(rows: Rows) -> bool:
    """Whether the heads of a token are adjacent in memory, rather than the tokens of a head.

    >>> heads_are_adjacent(Rows(1, 64, 8, 128, (65536, 1024, 128, 1)))
    True
    """
    return rows.heads == 1 or rows.seq == 1 or rows.strides[2] <= rows.strides[1]


def tokens_before_next_head(seq: int) -> int:
    """Return how many tokens of a head are processed before the next head, if tokens are adjacent: a power of two.

    Long runs are as fast as a copy. The limit keeps cos and sin of a run in the cache.

    >>> tokens_before_next_head(1000), tokens_before_next_head(1 << 20)
    (1024, 8192)
    """
    return min(8192, 1 << (seq - 1).bit_length())


def table_strides(table: Tensor) -> tuple[int, int]:
    """Return the strides of batch and heads in a contiguous cos or sin, in rows, and 0 for shared dimensions.

    >>> table_strides(torch.ones(2, 5, 4)), table_strides(torch.ones(1, 3, 5, 4)), table_strides(torch.ones(5, 4))
    ((5, 0), (0, 5), (0, 0))
    """
    rows, shape = table.shape[-2], table.shape
    if len(shape) == 2:
        return 0, 0
    heads = shape[1] if len(shape) == 4 else 1
    return 0 if shape[0] == 1 else heads * rows, 0 if heads == 1 else rows


def alignment(most: int, *numbers: int) -> int:
    """Return the largest power of two up to `most` that divides all numbers.

    >>> alignment(8, 96, 12, 0)
    4
    """
    while any(number % most for number in numbers):
        most //= 2
    return most


def is_wide(*reaches: int) -> bool:
    """Whether indices need 64 bits. The margin is for masked lanes, whose indices exceed the last element.

    >>> is_wide(1 << 20), is_wide(1 << 31)
    (False, True)
    """
    return any(reach >= REACH - (1 << 24) for reach in reaches)


# The first parameters of the launcher of a compiled kernel, as Triton 3.5 to 3.9 have them.
_LAUNCHER = ("gridX", "gridY", "gridZ", "stream", "function")


def why_launcher_unknown(launcher: Any) -> str | None:
    """Return what is unknown about the launcher of compiled kernels, an object or its class, or None.

    >>> class Launcher:
    ...     def __call__(self, gridX, gridY, gridZ, stream, function, *arguments): ...
    >>> why_launcher_unknown(Launcher()) is None, why_launcher_unknown(print)
    (True, 'a launcher with other parameters')
    """
    kind = launcher if isinstance(launcher, type) else type(launcher)
    call = inspect.getattr_static(kind, "__call__", None)
    names = tuple(inspect.signature(call).parameters)[1:6] if inspect.isfunction(call) else ()
    return None if names == _LAUNCHER else "a launcher with other parameters"


def launcher_note() -> str | None:
    """Return how kernels are launched if it is not the fastest way, for `ropewalk bench --backends`; else None.

    >>> launcher_note() is None or "kernel[grid]" in launcher_note()
    True
    """
    if not INSTALLED or INTERPRETED:
        return None
    try:
        launcher = importlib.import_module("triton.backends.nvidia.driver").CudaLauncher
    except (ImportError, AttributeError):
        return "launches by kernel[grid], which takes longer: Triton has no CudaLauncher"
    reason = why_launcher_unknown(launcher)
    return None if reason is None else f"launches by kernel[grid], which takes longer: Triton has {reason}"


class Launch:
    """A kernel with its grid, numbers and constants. A call passes the tensors.

    Triton looks up the compiled binary for its arguments in every call, which takes several times as long as the
    launch. Here it is looked up once, and later calls use its launcher, with addresses instead of tensors. An unknown
    launcher, and hooks of a profiler, need Triton's own interface.

    Args:
        kernel: The kernel.
        programs: Number of programs, or the grid.
        numbers: Arguments after those of a call.
        constants: Constants of the kernel, in their order.
        warps: Warps per program.
        stages: Pipeline stages, or None for Triton's default.
        registers: Limit of registers per thread, or None.

    >>> launch = Launch(kernel=None, programs=3, numbers=(7,), constants={"WIDTH": 4}, warps=4)
    >>> launch.programs
    3
    """

    def __init__(
        self,
        kernel: Any,
        programs: int | tuple[int, int, int],
        numbers: Sequence[int | float],
        constants: dict[str, Any],
        warps: int,
        stages: int | None = None,
        registers: int | None = None,
    ) -> None:
        self.programs = programs
        self._kernel, self._grid = kernel, (programs, 1, 1) if isinstance(programs, int) else programs
        options = {"num_warps": warps, "num_stages": stages, "maxnreg": registers}
        self._options = {name: number for name, number in options.items() if number is not None}
        self._numbers, self._constants = tuple(numbers), constants
        self._rest = (*numbers, *constants.values())
        self._run: Callable[..., Any] | None = None
        # The binary and its description, and no metadata and no hooks of profilers.
        self._binary: tuple[Any, ...] = ()

    def __call__(
        self, device: torch.device, *arguments: Tensor | int | float, addresses: Sequence[int | float] | None = None
    ) -> None:
        """Launch the kernel on the current stream of a device.

        Args:
            device: Device of the tensors.
            arguments: Tensors and numbers.
            addresses: The same with the addresses of the tensors, if they are known.
        """
        if device.type == "cuda" and current_device() != device.index:
            with torch.cuda.device(device):
                return self(device, *arguments, addresses=addresses)
        if self._run is not None and addresses is not None:
            if self.by_address(current_stream(device), addresses):
                return None
        elif self._run is not None:
            addresses = [x if type(x) is int or type(x) is float else x.data_ptr() for x in arguments]  # pyright: ignore[reportAttributeAccessIssue]
            if self.by_address(current_stream(device), addresses):
                return None
        compiled = self.bare(*arguments)
        # Triton's interpreter returns None.
        if compiled is not None and self._run is None and why_launcher_unknown(compiled.run) is None:
            self._binary = compiled.function, compiled.packed_metadata, None, None, None
            self._run = compiled.run
        return None

    def by_address(self, stream: int, addresses: Sequence[int | float]) -> bool:
        """Launch the kernel on a stream of the current device.

        Args:
            stream: The stream.
            addresses: Arguments, with the addresses of tensors.

        Returns:
            Whether it was launched. The first launch, and those that profilers observe, need tensors.
        """
        if self._run is None or _are_observed():
            return False
        self._run(*self._grid, stream, *self._binary, *addresses, *self._rest)
        return True

    def bare(self, *arguments: Tensor | int | float) -> Any:
        """Launch the kernel by Triton's own interface."""
        return self._kernel[self._grid](*arguments, *self._numbers, **self._constants, **self._options)


# Triton's settings for launches, from the first launch on.
_SETTINGS: list[Any] = []


def _are_observed() -> bool:
    """Whether hooks of a profiler, such as Triton's Proton, observe launches."""
    if not _SETTINGS:
        _SETTINGS.append(importlib.import_module("triton.knobs").runtime)
    settings = _SETTINGS[0]
    try:
        return bool(settings.launch_enter_hook.calls or settings.launch_exit_hook.calls)
    except AttributeError:
        # A hook that is not a chain of hooks.
        return settings.launch_enter_hook is not None or settings.launch_exit_hook is not None


class _Launches(dict[Any, Any]):
    """Cache of launches. A model needs few; the cache is cleared at a limit, for calls whose lengths never repeat."""

    def keep(self, key: Any, value: Any) -> Any:
        """Store the value, unless the key is None, and return it."""
        if len(self) >= 1024:
            self.clear()
        if key is not None:
            self[key] = value
        return value


LAUNCHES = _Launches()
