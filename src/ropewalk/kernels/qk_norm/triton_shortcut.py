"""The shortcut of QK-norm and rotation on a GPU: all checks, the outputs and one launch."""

from typing import Any

import torch
from torch import Tensor

from ropewalk.kernels.constructors import empty_like
from ropewalk.kernels.qk_norm.triton import plan_norm
from ropewalk.kernels.qk_norm.triton_kernels import norm_rotate_kernel
from ropewalk.kernels.signature import signature
from ropewalk.kernels.triton_shortcut import Plan, Source, TableShortcut, tokens_of
from ropewalk.kernels.types import Norm, RopeNumbers, Shortcut

__all__ = ["NormShortcut", "shortcut"]


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
        if k is None or (offset is not None and angles is not None):
            return None
        stream = self.stream()
        source = None if stream is None else self.source(None, angles, stream)
        described = None if source is None else signature(q, k, q_weight, k_weight, source.first, source.second)
        if stream is None or source is None or described is None:
            return None
        (key, addresses), (kind, first, second, _, _) = described, source
        key = kind, key, norm
        plan = self._plans.get(key)
        if plan is None:
            if key in self._plans or not addresses[0]:
                return None
            plan = self.plan(key, lambda: self._plan(q, k, (q_weight, k_weight), norm, source))
            if plan is None:
                return None
        launch, tokens, needs_graph = plan
        row = source.row(offset, tokens)
        if row is None:
            return None
        yq, yk = rotated = empty_like(q), empty_like(k)
        q_at, k_at, q_weight_at, k_weight_at, first_at, second_at = addresses
        # Kernels do not read a weight that is None.
        weights = q_weight_at or q_at, k_weight_at or k_at
        outputs = yq.data_ptr(), yk.data_ptr()
        if not launch.by_address(stream, (q_at, k_at, *outputs, *weights, first_at, second_at, row)):
            factors = q if q_weight is None else q_weight, k if k_weight is None else k_weight
            launch(self.device, q, k, yq, yk, *factors, first, second, row)
        if needs_graph:
            how = first, second, kind == "range", row, norm
            rotated = self.numbers.with_graph(q, k, q_weight, k_weight, rotated, *how)  # pyright: ignore[reportOptionalCall]
        return rotated

    def _plan(
        self, q: Tensor, k: Tensor, weights: tuple[Tensor | None, Tensor | None], norm: Norm, source: Source
    ) -> Plan | None:
        layout, graphs = self.numbers.layout, torch.is_grad_enabled()
        sides = zip((q, k), weights, strict=True)
        needs = [graphs and any(x is not None and x.requires_grad for x in side) for side in sides]
        tokens = tokens_of(q, k, layout, self.numbers.head_dim, self.device)
        # A graph of both would include a tensor that needs no gradient.
        if tokens is None or needs[0] != needs[1] or self.table_dims(source, q, k, tokens) is None:
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
        return None if planned is None else Plan(planned[0], tokens, needs[0])


def shortcut(numbers: RopeNumbers) -> Shortcut:
    """Return the shortcut of a rope.

    >>> from ropewalk.kernels.types import Layout
    >>> one = torch.ones((), dtype=torch.float64)
    >>> call = shortcut(RopeNumbers(2, Layout(True, 0, -2), one[None], None, one, {}, None))
    >>> call(torch.ones(1, 2), torch.ones(1, 2), None, None, Norm(1e-6)) is None
    True
    """
    return NormShortcut(numbers)
