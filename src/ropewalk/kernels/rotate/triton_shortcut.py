"""The shortcut of the rotation on a GPU: all checks, the outputs and one launch, in a few microseconds of the host."""

from typing import Any

import torch
from torch import Tensor

from ropewalk.kernels.constructors import empty_like
from ropewalk.kernels.rotate.triton import TableShape, plan, table_shape
from ropewalk.kernels.signature import signature
from ropewalk.kernels.triton_shortcut import Plan, Source, TableShortcut, tokens_of
from ropewalk.kernels.types import RopeNumbers, Shortcut

__all__ = ["RotationShortcut", "shortcut"]

# Most tokens in all sequences for which the rotation computes cos and sin itself. Each head computes them again, so for
# more tokens a separate launch is faster.
MOST_POSITIONS = 256


class RotationShortcut(TableShortcut):
    """The common calls of a rope on a GPU. See `ropewalk.kernels.types.Shortcut`.

    >>> from ropewalk.kernels.triton_launch import INTERPRETED
    >>> from ropewalk.kernels.types import Layout
    >>> device = "cpu" if INTERPRETED else "cuda"
    >>> theta, one = torch.ones(1, device=device).double(), torch.ones((), device=device).double()
    >>> call = RotationShortcut(RopeNumbers(2, Layout(True, 0, -2), theta, None, one, {}, None, from_positions=True))
    >>> y = call(torch.tensor([[1.0, 0.0]], device=device), positions=torch.tensor([1], device=device))
    >>> [round(x, 4) for x in y[0].tolist()]  # cos 1, sin 1
    [0.5403, 0.8415]
    """

    def __init__(self, numbers: RopeNumbers) -> None:
        super().__init__(numbers)
        self._amplitude_at: int = numbers.amplitude.data_ptr()

    def __call__(
        self, *tensors: Any, positions: Any = None, offset: Any = None, angles: Any = None, **others: Any
    ) -> Tensor | tuple[Tensor, ...] | None:
        """Rotate q, or q and k; None for the general path."""
        if others or not 1 <= len(tensors) <= 2:
            return None
        if offset is not None and (positions is not None or angles is not None):
            return None
        q, k = tensors if len(tensors) == 2 else (tensors[0], None)
        stream = self.stream()
        source = None if stream is None else self.source(positions, angles, stream)
        described = None if source is None else signature(q, k, source.first, source.second)
        if stream is None or source is None or described is None:
            return None
        key, (q_at, k_at, first_at, second_at) = described
        kind, first, second, _, _ = source
        plan = self._plans.get((kind, key))
        if plan is None:
            if (kind, key) in self._plans or not q_at:
                return None
            plan = self.plan((kind, key), lambda: self._plan(q, k, source))
            if plan is None:
                return None
        launch, tokens, needs_graph = plan
        row = source.row(offset, tokens)
        if row is None:
            return None
        yq, amplitude = empty_like(q), self.numbers.amplitude
        if k is None:
            yk, rotated, k_at = yq, (yq,), q_at
        else:
            yk = empty_like(k)
            rotated = yq, yk
        addresses = q_at, k_at, yq.data_ptr(), yk.data_ptr(), first_at, second_at, self._amplitude_at, row
        if not launch.by_address(stream, addresses):
            launch(self.device, q, q if k is None else k, yq, yk, first, second, amplitude, row)
        if needs_graph:
            rotated = self.numbers.with_graph(q, k, rotated, first, second, row, kind == "range")  # pyright: ignore[reportOptionalCall]
        return rotated[0] if k is None else rotated

    def _plan(self, q: Tensor, k: Tensor | None, source: Source) -> Plan | None:
        layout, kind, first = self.numbers.layout, source.kind, source.first
        needs_graph = torch.is_grad_enabled() and q.requires_grad
        if torch.is_grad_enabled() and k is not None and k.requires_grad != needs_graph:
            # A graph of both would include a tensor that needs no gradient.
            return None
        tokens = tokens_of(q, k, layout, self.numbers.head_dim, self.device)
        dims = None if tokens is None else self.table_dims(source, q, k, tokens)
        if tokens is None or dims is None:
            return None
        if kind == "positions":
            if needs_graph or first.numel() > MOST_POSITIONS:
                return None
            rows = tokens if dims == 3 and first.shape[0] > 1 else 0
            tables = TableShape(dims, self.numbers.inv_freq.shape[0], rows, 0, first.numel(), from_positions=True)
        else:
            tables = table_shape(first)
        launch = plan(q, k, empty_like(q), None if k is None else empty_like(k), tables, layout, False, False)
        return None if launch is None else Plan(launch, tokens, needs_graph)


def shortcut(numbers: RopeNumbers) -> Shortcut:
    """Return the shortcut of a rope.

    >>> from ropewalk.kernels.types import Layout
    >>> one = torch.ones((), dtype=torch.float64)
    >>> shortcut(RopeNumbers(2, Layout(True, 0, -2), one[None], None, one, {}, None))(torch.ones(1, 2)) is None
    True
    """
    return RotationShortcut(numbers)
