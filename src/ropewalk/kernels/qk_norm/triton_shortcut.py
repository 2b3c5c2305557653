"""The shortcut of QK-norm and rotation on a GPU: all checks, the outputs and one launch."""

from typing import Any

import torch
from torch import Tensor

from ropewalk.kernels.constructors import empty_like
from ropewalk.kernels.qk_norm.triton import plan_norm
from ropewalk.kernels.qk_norm.triton_kernels import norm_rotate_kernel
from ropewalk.kernels.triton_shortcut import Plan, Source, TableShortcut, shape_of
from ropewalk.kernels.types import Norm, RopeNumbers, Shortcut

__all__ = ["NormShortcut", "shortcut"]

_WEIGHTS = (Tensor, torch.nn.Parameter)


class NormShortcut(TableShortcut):
    """The common calls of `qk_norm_rope` with one rope on a GPU. See `ropewalk.kernels.types.Shortcut`.

    >>> from ropewalk.kernels.triton_launch import INTERPRETED
    >>> from ropewalk.kernels.types import Layout
    >>> device = "cpu" if INTERPRETED else "cuda"
    >>> theta, one = torch.ones(1, device=device).double(), torch.ones((), device=device).double()
    >>> call = NormShortcut(RopeNumbers(2, Layout(True, 0, -2), theta, None, one, {}, None))
    >>> x, cos, sin = (torch.tensor([row], device=device) for row in ([3.0, 4.0], [0.0], [1.0]))
    >>> y, _ = call(x, x, None, None, Norm(1e-9), angles=(cos, sin))
    >>> [round(v, 4) for v in y[0].tolist()]
    [-1.1314, 0.8485]
    """

    def __call__(
        self,
        q: Any,
        k: Any,
        q_weight: Any,
        k_weight: Any,
        norm: Norm,
        *,
        offset: Any = None,
        angles: Any = None,
    ) -> tuple[Tensor, ...] | None:
        """Normalise and rotate q and k; None for the general path. The caller has checked `norm`."""
        if type(q) is not Tensor or type(k) is not Tensor or (offset is not None and angles is not None):
            return None
        stream = self.stream()
        source = None if stream is None else self.source(None, angles, stream)
        if stream is None or source is None or q.is_neg() or k.is_neg():
            return None
        key: tuple[Any, ...] = (q.shape, q.stride(), q.dtype, q.get_device(), source.key, norm)
        key += (k.shape, k.stride(), k.dtype, k.get_device())
        first, second, weights = source.first, source.second, (q_weight, k_weight)
        try:
            addresses = q.data_ptr() | k.data_ptr() | first.data_ptr() | second.data_ptr()
            for weight in weights:
                if weight is None:
                    key += (None,)
                elif type(weight) in _WEIGHTS and not weight.is_neg():
                    key += (weight.shape, weight.stride(), weight.dtype, weight.get_device())
                    addresses |= weight.data_ptr()
                else:
                    return None
        except RuntimeError:
            # Tensors without memory, such as those of nested transforms.
            return None
        known = self.plan(key, lambda: self._plan(q, k, weights, norm, source))
        if known is None or addresses & 15 or not q.data_ptr():
            return None
        launch, tokens = known
        row = self.row(offset, tokens) if source.is_cached else 0
        if row is None:
            return None
        needed = False
        if torch.is_grad_enabled():
            needed = q.requires_grad or (q_weight is not None and q_weight.requires_grad)
            k_needed = k.requires_grad or (k_weight is not None and k_weight.requires_grad)
            if needed != k_needed or first.requires_grad or second.requires_grad:
                return None
        yq, yk = rotated = empty_like(q), empty_like(k)
        factors = q if q_weight is None else q_weight, k if k_weight is None else k_weight
        tensors = q, k, yq, yk, *factors, first, second
        if not launch.by_address(stream, *[x.data_ptr() for x in tensors], row):
            launch(self.device, *tensors, row)
        if needed:
            how = first, second, source.is_cached, row, norm
            rotated = self.numbers.with_graph(q, k, q_weight, k_weight, rotated, *how)  # pyright: ignore[reportOptionalCall]
        return rotated

    def _plan(
        self, q: Tensor, k: Tensor, weights: tuple[Tensor | None, Tensor | None], norm: Norm, source: Source
    ) -> Plan | None:
        layout = self.numbers.layout
        shape = shape_of(q, k, layout, self.numbers.head_dim, self.device)
        if shape is None or self.fits(source, shape, q.dtype) is None:
            return None
        for weight in weights:
            if weight is None:
                fits = not norm.plus_one
            else:
                fits = weight.is_floating_point() and weight.shape == q.shape[-1:]
                fits = fits and weight.device == self.device and weight.is_contiguous()
            if not fits:
                return None
        groups = [(q, k), (empty_like(q), empty_like(k))]
        planned = plan_norm(norm_rotate_kernel, groups, weights, None, source.first, layout, norm)
        return None if planned is None else Plan(planned[0], shape.tokens)


def shortcut(numbers: RopeNumbers) -> Shortcut:
    """Return the shortcut of a rope.

    >>> from ropewalk.kernels.types import Layout
    >>> one = torch.ones((), dtype=torch.float64)
    >>> call = shortcut(RopeNumbers(2, Layout(True, 0, -2), one[None], None, one, {}, None))
    >>> call(torch.ones(1, 2), torch.ones(1, 2), None, None, Norm(1e-6)) is None
    True
    """
    return NormShortcut(numbers)
