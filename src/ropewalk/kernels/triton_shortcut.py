"""What the shortcuts of the Triton kernels share: which cos and sin a call uses, and what was decided per shape.

Everything that does not change between calls of one shape is checked once, when a plan for the shape is made. A key
contains all of it: shapes, strides, dtypes and devices. A call checks the rest.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ropewalk.kernels.precision import FLOATS
from ropewalk.kernels.torch_internals import current_device, current_stream, is_capturing, is_eager
from ropewalk.kernels.triton_launch import Launch
from ropewalk.kernels.types import Layout, RopeNumbers

__all__ = ["Plan", "Source", "TableShortcut", "TokenShape", "shape_of"]

# Most plans per rope. They are dropped together, for calls whose lengths never repeat.
MOST_PLANS = 256


class TokenShape(NamedTuple):
    """Sizes of q and k that cos and sin must match.

    Args:
        tokens: Number of tokens.
        batches: Sequences of q and of k; None for a tensor without a batch.

    >>> TokenShape(5, (2, 2)).tokens
    5
    """

    tokens: int
    batches: tuple[int | None, ...]


def shape_of(q: Tensor, k: Tensor | None, layout: Layout, head_dim: int, device: torch.device) -> TokenShape | None:
    """Return the sizes of q and k if a kernel on the device can rotate them together; else None.

    >>> x = torch.ones(2, 3, 5, 8)
    >>> shape_of(x, x, Layout(True, 0, -2), 8, x.device), shape_of(x, None, Layout(True, 0, -2), 4, x.device)
    (TokenShape(tokens=5, batches=(2, 2)), None)
    """
    seq_dim, both = layout.seq_dim, (q,) if k is None else (q, k)
    for x in both:
        if x.device != device or x.dtype != q.dtype or x.dtype not in FLOATS or x.numel() == 0:
            return None
        if x.dim() < -seq_dim or x.shape[-1] != head_dim or x.shape[seq_dim] != q.shape[seq_dim]:
            return None
    if layout.interleaved and layout.start % 2:
        return None
    return TokenShape(q.shape[seq_dim], tuple(x.shape[0] if x.dim() > -seq_dim else None for x in both))


class Plan(NamedTuple):
    """The launch for one shape, and the number of tokens.

    >>> Plan(Launch(None, 1, (), {}, 4), 5).tokens
    5
    """

    launch: Launch
    tokens: int


class Source(NamedTuple):
    """Where a call finds its cos and sin.

    Args:
        first: cos, or positions.
        second: sin, or frequencies.
        key: What a plan depends on.
        is_cached: Whether they are remembered ones, which nothing writes to.

    >>> Source(torch.ones(1, 1), torch.zeros(1, 1), (), True).is_cached
    True
    """

    first: Tensor
    second: Tensor
    key: tuple[Any, ...]
    is_cached: bool


class TableShortcut:
    """The part of a shortcut that finds cos and sin. Subclasses add the call.

    Args:
        numbers: The rope.

    >>> one = torch.ones((), dtype=torch.float64)
    >>> shortcut = TableShortcut(RopeNumbers(4, Layout(True, 0, -2), torch.ones(2).double(), None, one, {}, None))
    >>> shortcut.remember(0, 8, torch.ones(8, 2), torch.ones(8, 2))
    >>> shortcut.row(3, 5), shortcut.row(3, 6)
    (3, None)
    """

    def __init__(self, numbers: RopeNumbers) -> None:
        self.numbers = numbers
        self.device: torch.device = numbers.inv_freq.device
        self._index: int = self.device.index or 0
        self._on_gpu: bool = self.device.type == "cuda"
        self._plans: dict[Any, Plan | None] = {}
        # First position, last position + 1, source, and the stream that computed it.
        self._range: tuple[int, int, Source, int] | None = None

    def remember(self, start: int, stop: int, cos: Tensor, sin: Tensor) -> None:
        """Use cos and sin [stop - start, pairs] for calls at positions start .. stop-1."""
        source = Source(cos, sin, ("range", cos.dtype), True)
        self._range = start, stop, source, current_stream(self.device)

    def rotate_(self, *arguments: Any, **options: Any) -> None:
        """Return None: the checks of memory before a call in place take longer than the call."""

    def stream(self) -> int | None:
        """The current stream, or None if a call must use the general path: traced, or on another device."""
        if not is_eager() or (self._on_gpu and current_device() != self._index):
            return None
        return current_stream(self.device)

    def source(self, positions: Tensor | None, angles: object, stream: int) -> Source | None:
        """Where a call finds cos and sin, with one of the arguments or none; None for the general path."""
        if positions is not None:
            if angles is not None or not self.numbers.from_positions or not _is_plain(positions):
                return None
            # Views of ids may start anywhere, and Triton compiles for the alignment.
            place = positions.get_device(), positions.data_ptr() & 15
            key = "positions", positions.shape, positions.stride(), positions.dtype, *place
            return Source(positions, self.numbers.inv_freq, key, False)
        if angles is not None:
            if type(angles) is not tuple or len(angles) != 2:
                return None
            cos, sin = angles
            if not (_is_plain(cos) and _is_plain(sin)) or self._is_foreign(cos):
                return None
            key = ("angles", *((x.shape, x.stride(), x.dtype, x.get_device()) for x in angles))
            return Source(cos, sin, key, False)
        # Tensors that a CUDA graph reads must outlive it, but cached cos and sin may be freed.
        if self._range is None or self._range[3] != stream or is_capturing(stream):
            return None
        return self._range[2]

    def row(self, offset: int | None, tokens: int) -> int | None:
        """The row of the first token in the remembered cos and sin, or None if a token is not in them."""
        start = 0 if offset is None else offset
        if type(start) is not int or self._range is None:
            return None
        first, stop, _, _ = self._range
        limit = self.numbers.context_length
        stop = stop if limit is None else min(stop, limit)
        return start - first if first <= start and start + tokens <= stop else None

    def plan(self, key: tuple[Any, ...], make: Callable[[], Plan | None]) -> Plan | None:
        """The plan for a key, made once."""
        try:
            return self._plans[key]
        except KeyError:
            if len(self._plans) >= MOST_PLANS:
                self._plans.clear()
            plan = self._plans[key] = make()
            return plan

    def fits(self, source: Source, shape: TokenShape, dtype: torch.dtype) -> int | None:
        """The number of dimensions of tables for q and k, 2 or 3, if cos and sin match them; else None."""
        kind, first, second = source.key[0], source.first, source.second
        pairs = self.numbers.inv_freq.shape[0]
        working = torch.float64 if dtype == torch.float64 else torch.float32
        if kind == "range":
            return 2 if first.dtype == working else None
        if kind == "positions":
            if first.dtype not in (torch.int32, torch.int64) or working == torch.float64:
                return None
            sizes, dims = first.shape, first.dim() + 1
        else:
            if first.shape != second.shape or first.dtype != working or second.dtype != working:
                return None
            if first.dim() < 2 or first.shape[-1] != pairs or second.device != self.device:
                return None
            sizes, dims = first.shape[:-1], first.dim()
        if first.device != self.device or not (first.is_contiguous() and second.is_contiguous()):
            return None
        if dims not in (2, 3) or sizes[-1] != shape.tokens:
            return None
        if dims == 3 and not all(batch is not None and sizes[0] in (1, batch) for batch in shape.batches):
            return None
        return dims

    def _is_foreign(self, cos: Tensor) -> bool:
        """Whether another rope computed this tensor of cos, or may have."""
        maker = self.numbers.makers.get(id(cos))
        return maker is not None and (maker[1] is not self.numbers.rope or maker[2] is not None)


def _is_plain(x: object) -> bool:
    """Whether x is a plain tensor with memory. Tensors without memory have no address, and raise an error."""
    return type(x) is Tensor and not x.is_neg()
