"""Layers that replace the function `rotary_pos_emb` of transformers' models.

All have forward(q, k, cos, sin, unsqueeze_dim=1), and gradients of all orders. q and k are rotated in float32 (float64
for float64) and rounded once to their dtype. cos and sin may have fewer columns than a head: the leading features are
rotated, the others are copied. k may be None. On a GPU an eager call is one Triton kernel. Compilers, transforms of
torch.func, cos and sin that need a gradient, and other devices use the formula.
"""

import functools
from typing import Any

import torch
from torch import Tensor, nn

from ropewalk.kernels.precision import FLOATS
from ropewalk.kernels.rotate.torch import rotate_traceable
from ropewalk.kernels.torch_internals import is_plain
from ropewalk.kernels.triton_launch import INSTALLED, INTERPRETED
from ropewalk.kernels.types import Layout

__all__ = ["Rotary", "RotaryInterleaved", "RotaryOfPairs", "RotaryReversed"]

Rotated = tuple[Tensor, Tensor | None]


class Rotary(nn.Module):
    """Pairs (i, i + d/2), with cos and sin that contain each number twice: nearly every model of transformers.

    The second half of cos and sin is not read.

    >>> x, one = torch.tensor([[[[1.0, 0.0]]]]), torch.ones(1, 1, 2)
    >>> Rotary()(x, x, 0 * one, one)[0].tolist()  # by 90 degrees
    [[[[0.0, 1.0]]]]
    """

    can_torch_compile = True
    has_backward = True

    def forward(self, q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Rotated:
        """Rotate q [batch, heads, seq, dim] and k, by cos and sin [batch or 1, seq, dim], for unsqueeze_dim 1."""
        return _rotated(q, k, cos, sin, unsqueeze_dim, cos.shape[-1] // 2, False, False)


class RotaryReversed(nn.Module):
    """`Rotary` by the opposite angles: nanochat.

    >>> x, one = torch.tensor([[[[1.0, 0.0]]]]), torch.ones(1, 1, 2)
    >>> RotaryReversed()(x, None, 0 * one, one)[0].tolist()
    [[[[0.0, -1.0]]]]
    """

    can_torch_compile = True
    has_backward = True

    def forward(self, q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Rotated:
        """Rotate q and k, as `Rotary.forward`."""
        return _rotated(q, k, cos, sin, unsqueeze_dim, cos.shape[-1] // 2, False, True)


class RotaryOfPairs(nn.Module):
    """Pairs (i, i + d/2), with one column of cos and sin per pair: gpt_oss.

    >>> x, one = torch.tensor([[[[1.0, 0.0]]]]), torch.ones(1, 1, 1)
    >>> RotaryOfPairs()(x, None, 0 * one, one)[0].tolist()
    [[[[0.0, 1.0]]]]
    """

    can_torch_compile = True
    has_backward = True

    def forward(self, q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Rotated:
        """Rotate q and k, as `Rotary.forward`."""
        return _rotated(q, k, cos, sin, unsqueeze_dim, cos.shape[-1], False, False)


class RotaryInterleaved(nn.Module):
    """Pairs (0, 1), (2, 3), ..., with one column of cos and sin per pair: openai_privacy_filter.

    >>> x, one = torch.tensor([[[[1.0, 0.0]]]]), torch.ones(1, 1, 1)
    >>> RotaryInterleaved()(x, None, 0 * one, one)[0].tolist()
    [[[[0.0, 1.0]]]]
    """

    can_torch_compile = True
    has_backward = True

    def forward(self, q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Rotated:
        """Rotate q and k, as `Rotary.forward`."""
        return _rotated(q, k, cos, sin, unsqueeze_dim, cos.shape[-1], True, False)


def _rotated(
    q: Tensor,
    k: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    unsqueeze_dim: int,
    pairs: int,
    interleaved: bool,
    conjugate: bool,
) -> Rotated:
    dims = cos.dim()
    # How many dimensions of cos follow the one that transformers would insert for the heads.
    after = dims - unsqueeze_dim % (dims + 1)
    fits = dims in (2, 3) and cos.shape == sin.shape and all(x.dim() == dims + 1 for x in (q, k) if x is not None)
    if not fits or after not in (1, 2) or 2 * pairs > q.shape[-1]:
        raise ValueError(
            f"rotary_pos_emb: q {list(q.shape)}, cos {list(cos.shape)}, sin {list(sin.shape)}, unsqueeze_dim"
            f" {unsqueeze_dim}: expected q of one more dimension than cos, unsqueeze_dim for the heads of q, and at"
            f" most as many features in cos as in q"
        )
    layout = Layout(interleaved, 0, -2 if after == 2 else -3)
    if _is_fused(q, k, cos, sin, layout.seq_dim):
        rotated = _fused(q, k, cos, sin, pairs, layout, conjugate)
    else:
        tables = cos[..., :pairs], sin[..., :pairs]
        rotated = tuple(_by_formula(x, *tables, layout, conjugate) for x in (q, k) if x is not None)
    return rotated[0], None if k is None else rotated[1]


def _by_formula(x: Tensor, cos: Tensor, sin: Tensor, layout: Layout, conjugate: bool) -> Tensor:
    working = torch.float64 if x.dtype == torch.float64 else torch.float32
    return rotate_traceable(x, cos.to(working), sin.to(working), layout, 0, conjugate)


def _is_fused(q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, seq_dim: int) -> bool:
    """Whether the Triton kernel supports the call."""
    if torch.compiler.is_compiling() or not INSTALLED or not (q.is_cuda or INTERPRETED) or not is_plain(q, k, cos, sin):
        return False
    if torch.is_grad_enabled() and (cos.requires_grad or sin.requires_grad):
        return False
    others = [cos, sin] if k is None else [k, cos, sin]
    alike = all(x.device == q.device for x in others) and (k is None or k.dtype == q.dtype) and cos.dtype == sin.dtype
    low = FLOATS - {torch.float64}
    # The formula broadcasts tables of one token.
    rows = all(cos.shape[-2] == x.shape[seq_dim] for x in (q, k) if x is not None)
    batches = cos.dim() == 2 or all(cos.shape[0] in (1, x.shape[0]) for x in (q, k) if x is not None)
    return alike and q.dtype in low and cos.dtype in low and rows and batches


def _fused(
    q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, pairs: int, layout: Layout, conjugate: bool
) -> tuple[Tensor, ...]:
    if torch.is_grad_enabled() and (q.requires_grad or (k is not None and k.requires_grad)):
        if k is not None and q.requires_grad != k.requires_grad:
            # One graph for both would contain the tensor that needs no gradient.
            return tuple(_fused(x, None, cos, sin, pairs, layout, conjugate)[0] for x in (q, k))
        return _Rotation.apply(q, k, cos, sin, (pairs, layout, conjugate))  # pyright: ignore[reportReturnType]
    return _kernel()(q, k, cos, sin, pairs, layout, conjugate)


@functools.cache
def _kernel() -> Any:
    from ropewalk.kernels.rotate.triton_wide import rotate_by_wide

    return rotate_by_wide


class _Rotation(torch.autograd.Function):
    """The kernel with its backward: the rotation by the opposite angles."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, options: Any) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(cos, sin)
        ctx.options = options
        return _kernel()(q, k, cos, sin, *options)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        pairs, layout, conjugate = ctx.options
        options = pairs, layout, not conjugate
        if len(cotangents) == 2 and all(g is not None for g in cotangents):
            grads = _back(*cotangents, cos, sin, *options)  # pyright: ignore[reportArgumentType]
        else:
            grads = [None if g is None else _back(g, None, cos, sin, *options)[0] for g in cotangents]
        return (*grads, *[None] * (5 - len(grads)))


def _back(
    q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, pairs: int, layout: Layout, conjugate: bool
) -> tuple[Tensor, ...]:
    """Rotate one or two cotangents. Batched ones, for example, have no memory that a kernel can read."""
    if is_plain(q, k, cos, sin):
        return _fused(q, k, cos, sin, pairs, layout, conjugate)
    tables = cos[..., :pairs], sin[..., :pairs]
    return tuple(_by_formula(x, *tables, layout, conjugate) for x in (q, k) if x is not None)
