"""What the shortcuts of the Triton kernels share: which cos and sin a call uses, and what was decided per signature.

Everything that does not change between calls of one signature is checked once, when its plan is made. A call checks
the rest: the offset, the stream, and which rope computed the angles.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ropewalk.kernels.precision import FLOATS
from ropewalk.kernels.signature import is_eager
from ropewalk.kernels.torch_internals import current_device, current_stream, is_capturing
from ropewalk.kernels.triton_launch import Launch
from ropewalk.kernels.types import Layout, RopeNumbers

__all__ = ["Plan", "Source", "TableShortcut", "tokens_of"]

# Most plans per rope. They are dropped together, for calls whose lengths never repeat.
MOST_PLANS = 256


class Plan(NamedTuple):
    """What was decided for a signature.

    Args:
        launch: The launch.
        tokens: Number of tokens.
        needs_graph: Whether the results need a graph.

    >>> Plan(Launch(None, 1, (), {}, 4), 5, False).tokens
    5
    """

    launch: Launch
    tokens: int
    needs_graph: bool


class Source(NamedTuple):
    """Where a call finds its cos and sin.

    Args:
        kind: "range" for remembered ones, which nothing writes to; "angles" for those of the caller; "positions".
        first: cos, or positions.
        second: sin, or frequencies.
        start: First position of a range.
        stop: Last position of a range that is allowed + 1.

    >>> Source("angles", torch.ones(1, 1), torch.zeros(1, 1)).kind
    'angles'
    """

    kind: str
    first: Tensor
    second: Tensor
    start: int = 0
    stop: int = 0

    def row(self, offset: Any, tokens: int) -> int | None:
        """The row of the first token, or None if a token is not in a range. Rows of the caller start at 0.

        >>> source = Source("range", torch.ones(8, 2), torch.ones(8, 2), 0, 8)
        >>> source.row(3, 5), source.row(3, 6), source.row(None, 8), source.row(True, 1)
        (3, None, 0, None)
        """
        if self.kind != "range":
            return 0
        first = 0 if offset is None else offset
        return first - self.start if type(first) is int and self.start <= first <= self.stop - tokens else None


def tokens_of(q: Tensor, k: Tensor | None, layout: Layout, head_dim: int, device: torch.device) -> int | None:
    """Return the number of tokens of q and k if a kernel on the device can rotate them together; else None.

    >>> x = torch.ones(2, 3, 5, 8)
    >>> [tokens_of(x, x, Layout(True, 0, -2), head_dim, x.device) for head_dim in (8, 4)]
    [5, None]
    """
    seq_dim = layout.seq_dim
    for x in (q,) if k is None else (q, k):
        if x.device != device or x.dtype != q.dtype or x.dtype not in FLOATS or x.numel() == 0:
            return None
        if x.dim() < -seq_dim or x.shape[-1] != head_dim or x.shape[seq_dim] != q.shape[seq_dim]:
            return None
    return None if layout.interleaved and layout.start % 2 else q.shape[seq_dim]


class TableShortcut:
    """The part of a shortcut that finds cos and sin. Subclasses add the call.

    Args:
        numbers: The rope.

    >>> one = torch.ones((), dtype=torch.float64)
    >>> shortcut = TableShortcut(RopeNumbers(4, Layout(True, 0, -2), torch.ones(2).double(), None, one, {}, None))
    >>> shortcut.remember(0, 8, torch.ones(8, 2), torch.ones(8, 2))
    >>> shortcut.source(None, None, 0).stop
    8
    """

    def __init__(self, numbers: RopeNumbers) -> None:
        self.numbers = numbers
        self.device: torch.device = numbers.inv_freq.device
        self._other_devices: bool = self.device.type == "cuda" and torch.cuda.device_count() > 1
        self._plans: dict[Any, Plan | None] = {}
        # The remembered range, and the stream that computed it: one value, because other threads may replace it.
        self._range: tuple[Source | None, int] = None, 0

    def remember(self, start: int, stop: int, cos: Tensor, sin: Tensor) -> None:
        """Use cos and sin [stop - start, pairs] for calls at positions start .. stop-1."""
        limit = self.numbers.context_length
        last = stop if limit is None else min(stop, limit)
        self._range = Source("range", cos, sin, start, last), current_stream(self.device)

    def rotate_(self, *arguments: Any, **options: Any) -> None:
        """Return None: the checks of memory before a call in place take longer than the call."""

    def stream(self) -> int | None:
        """The current stream; None if a call must use the general path: it is traced, or on another device."""
        if not is_eager() or (self._other_devices and current_device() != self.device.index):
            return None
        return current_stream(self.device)

    def source(self, positions: Any, angles: Any, stream: int) -> Source | None:
        """Where a call finds cos and sin, with one of the arguments or none; None for the general path."""
        if positions is not None:
            known = angles is None and self.numbers.from_positions
            return Source("positions", positions, self.numbers.inv_freq) if known else None
        if angles is not None:
            if type(angles) is not tuple or len(angles) != 2 or self._is_foreign(angles[0]):
                return None
            return Source("angles", *angles)
        # Tensors that a CUDA graph reads must outlive it, but cached cos and sin may be freed.
        source, computed_on = self._range
        return source if computed_on == stream and not is_capturing(stream) else None

    def plan(self, key: Any, make: Callable[[], Plan | None]) -> Plan | None:
        """Make the plan for a key, and keep it."""
        if len(self._plans) >= MOST_PLANS:
            self._plans.clear()
        plan = self._plans[key] = make()
        return plan

    def table_dims(self, source: Source, q: Tensor, k: Tensor | None, tokens: int) -> int | None:
        """The number of dimensions of tables for q and k, 2 or 3, if cos and sin match them; else None."""
        kind, first, second, _, _ = source
        if torch.is_grad_enabled() and (first.requires_grad or second.requires_grad):
            return None
        working = torch.float64 if q.dtype == torch.float64 else torch.float32
        if first.device != self.device or second.device != self.device:
            return None
        if not (first.is_contiguous() and second.is_contiguous()):
            return None
        if kind == "range":
            return 2 if first.dtype == working else None
        if kind == "positions":
            if first.dtype not in (torch.int32, torch.int64) or working == torch.float64:
                return None
            sizes, dims = first.shape, first.dim() + 1
        else:
            pairs = self.numbers.inv_freq.shape[0]
            if first.shape != second.shape or not first.dtype == second.dtype == working:
                return None
            if first.dim() < 2 or first.shape[-1] != pairs:
                return None
            sizes, dims = first.shape[:-1], first.dim()
        if dims not in (2, 3) or sizes[-1] != tokens:
            return None
        both, seq_dim = (q,) if k is None else (q, k), self.numbers.layout.seq_dim
        # Tables per sequence need a batch, the first dimension of q and k.
        if dims == 3 and not all(x.dim() > -seq_dim and sizes[0] in (1, x.shape[0]) for x in both):
            return None
        return dims

    def _is_foreign(self, cos: object) -> bool:
        """Whether another rope computed this tensor of cos, or may have."""
        maker = self.numbers.makers.get(id(cos))
        if maker is None or (maker[1] is self.numbers.rope and maker[2] is None):
            return False
        # The id may belong to another tensor by now.
        return maker[0]() is cos
