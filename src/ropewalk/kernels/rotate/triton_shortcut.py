"""The shortcut of the rotation on a GPU: all checks, the outputs and one launch, in a few microseconds of the host."""

from typing import Any

import torch
from torch import Tensor

from ropewalk.kernels.constructors import empty_like
from ropewalk.kernels.rotate.triton import TableShape, plan, table_shape
from ropewalk.kernels.triton_shortcut import Plan, Source, TableShortcut, shape_of
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

    def __call__(
        self,
        q: Any,
        k: Any = None,
        *unnamed: Any,
        positions: Any = None,
        offset: Any = None,
        angles: Any = None,
        **others: Any,
    ) -> Tensor | tuple[Tensor, ...] | None:
        """Rotate q, or q and k; None for the general path."""
        if unnamed or others or type(q) is not Tensor or (k is not None and type(k) is not Tensor):
            return None
        stream = self.stream()
        if stream is None or (offset is not None and (positions is not None or angles is not None)):
            return None
        source = self.source(positions, angles, stream)
        if source is None or q.is_neg() or (k is not None and k.is_neg()):
            return None
        key = q.shape, q.stride(), q.dtype, q.get_device(), source.key
        if k is not None:
            key += (k.shape, k.stride(), k.dtype, k.get_device())
        known = self.plan(key, lambda: self._plan(q, k, source))
        if known is None:
            return None
        launch, tokens = known
        row = self.row(offset, tokens) if source.is_cached else 0
        if row is None:
            return None
        first, second, amplitude = source.first, source.second, self.numbers.amplitude
        needed = False
        if torch.is_grad_enabled():
            needed = q.requires_grad
            if (k is not None and k.requires_grad != needed) or first.requires_grad or second.requires_grad:
                return None
            if needed and positions is not None:
                return None
        try:
            aligned = q.data_ptr() | second.data_ptr() | (0 if k is None else k.data_ptr())
            aligned |= 0 if positions is not None else first.data_ptr()
        except RuntimeError:
            # Tensors without memory, such as those of nested transforms.
            return None
        if aligned & 15 or not q.data_ptr():
            return None
        yq = empty_like(q)
        tensors = q, q, yq, yq, first, second, amplitude
        rotated = (yq,)
        if k is not None:
            yk = empty_like(k)
            tensors, rotated = (q, k, yq, yk, first, second, amplitude), (yq, yk)
        if not launch.by_address(stream, *[x.data_ptr() for x in tensors], row):
            launch(self.device, *tensors, row)
        if needed:
            rotated = self.numbers.with_graph(q, k, rotated, first, second, row, source.is_cached)  # pyright: ignore[reportOptionalCall]
        return rotated[0] if k is None else rotated

    def _plan(self, q: Tensor, k: Tensor | None, source: Source) -> Plan | None:
        layout = self.numbers.layout
        shape = shape_of(q, k, layout, self.numbers.head_dim, self.device)
        dims = None if shape is None else self.fits(source, shape, q.dtype)
        if shape is None or dims is None:
            return None
        if source.key[0] == "positions":
            positions, batches = source.first, source.first.shape[0] if dims == 3 else 1
            if positions.numel() > MOST_POSITIONS:
                return None
            rows = positions.shape[-1] if batches > 1 else 0
            tables = TableShape(dims, self.numbers.inv_freq.shape[0], rows, 0, positions.numel(), from_positions=True)
        else:
            tables = table_shape(source.first)
        launch = plan(q, k, empty_like(q), None if k is None else empty_like(k), tables, layout, False, False)
        return None if launch is None else Plan(launch, shape.tokens)


def shortcut(numbers: RopeNumbers) -> Shortcut:
    """Return the shortcut of a rope.

    >>> from ropewalk.kernels.types import Layout
    >>> one = torch.ones((), dtype=torch.float64)
    >>> shortcut(RopeNumbers(2, Layout(True, 0, -2), one[None], None, one, {}, None))(torch.ones(1, 2)) is None
    True
    """
    return RotationShortcut(numbers)
