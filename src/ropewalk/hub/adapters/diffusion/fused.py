"""Norm and rotation of q and k in one pass, with the norms and the tables of a model of diffusers."""

import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ropewalk.kernels.precision import FLOATS
from ropewalk.kernels.torch_internals import has_hooks, is_plain, version_of
from ropewalk.kernels.types import Layout, Norm
from ropewalk.ops import norm_rotate, rotate

__all__ = ["LAYOUT", "Angles", "PairAngles", "norm_rotated"]

# Interleaved pairs of all features, in tensors [batch, seq, heads, head_dim].
LAYOUT = Layout(interleaved=True, start=0, seq_dim=-3)


class Angles(NamedTuple):
    """cos and sin with one number per pair, float32 [seq, pairs] or [batch, seq, pairs].

    >>> Angles(torch.ones(3, 2), torch.zeros(3, 2)).cos.shape
    torch.Size([3, 2])
    """

    cos: Tensor
    sin: Tensor


class PairAngles:
    """Converts the tables of a model to one angle per pair. The layers share tables, so the last ones are kept.

    Accepted are cos and sin with two equal numbers per pair; complex tables; and real tables with cos in the first half
    and sin in the second, which `real_tables` makes of complex ones.

    >>> tables = PairAngles()
    >>> cos, sin = torch.tensor([[1.0, 1.0, 0.0, 0.0]]), torch.tensor([[0.0, 0.0, 1.0, 1.0]])
    >>> tables((cos, sin)).sin.tolist(), tables(torch.complex(cos, sin)[:, ::2]).sin.tolist()
    ([[0.0, 1.0]], [[0.0, 1.0]])
    """

    def __init__(self) -> None:
        # The last two: text and image can have tables of their own.
        self._kept: list[tuple[tuple[Any, ...], tuple[Any, ...], Angles]] = []

    def __call__(self, table: Any, repeats: int = 1) -> Angles:
        """Convert the table of a model.

        Args:
            table: A pair of tensors [seq, dim], [batch, seq, dim] or [1, seq, 1, dim], or one tensor.
            repeats: How often the angles are repeated, for heads that are normalized together.
        """
        given: tuple[Tensor, ...] = tuple(table) if isinstance(table, tuple | list) else (table,)
        kept = not torch.compiler.is_compiling() and is_plain(*given) and not any(t.is_inference() for t in given)
        kept = kept and not torch.is_inference_mode_enabled() and not any(t.requires_grad for t in given)
        key = (repeats, *map(version_of, given)) if kept else ()
        for refs, known, angles in self._kept if kept else ():
            if known == key and len(refs) == len(given) and all(r() is t for r, t in zip(refs, given, strict=True)):
                return angles
        angles = Angles(*(_repeated(part, repeats).float().contiguous() for part in _pairs(given)))
        if kept:
            self._kept = [*self._kept[-1:], (tuple(map(weakref.ref, given)), key, angles)]
        return angles


def _pairs(given: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    if len(given) == 2:
        cos, sin = (t.squeeze(2) if t.dim() == 4 else t for t in given)
        return cos[..., 0::2], sin[..., 1::2]
    (table,) = given
    if table.is_complex():
        real = torch.view_as_real(table)
        return real[..., 0], real[..., 1]
    cos, sin = table.chunk(2, -1)
    return cos, sin


def _repeated(table: Tensor, repeats: int) -> Tensor:
    if table.dim() == 3 and table.shape[0] == 1:
        table = table[0]
    return table if repeats == 1 else table.repeat(*[1] * (table.dim() - 1), repeats)


def norm_rotated(
    q: Tensor, k: Tensor, q_norm: nn.Module | None, k_norm: nn.Module | None, angles: Angles, row: int = 0
) -> tuple[Tensor, Tensor]:
    """Return q and k [batch, seq, heads, head_dim], normalized and rotated, in one pass over memory.

    A norm other than a plain RMSNorm over head_dim runs by itself, before the rotation.

    Args:
        q: Queries.
        k: Keys.
        q_norm: The norm of the queries, or None.
        k_norm: The norm of the keys, or None.
        angles: cos and sin.
        row: Row of cos and sin that belongs to the first token.

    >>> x, norm = torch.tensor([3.0, 4.0]).view(1, 1, 1, 2), nn.RMSNorm(2, eps=1e-9)
    >>> q, k = norm_rotated(x, x, norm, norm, Angles(torch.zeros(1, 1), torch.ones(1, 1)))
    >>> [round(v, 4) for v in q.flatten().tolist()]
    [-1.1314, 0.8485]
    """
    if q.dtype == torch.float64:
        angles = Angles(*(table.double() for table in angles))
    eps = {_eps(norm, x) for norm, x in ((q_norm, q), (k_norm, k))}
    (shared,) = eps if len(eps) == 1 else (None,)
    if shared is None or q.dtype != k.dtype:
        q, k = (x if norm is None else norm(x) for norm, x in ((q_norm, q), (k_norm, k)))
        if q.dtype != k.dtype:
            return rotate(q, None, *angles, LAYOUT, row=row)[0], rotate(k, None, *angles, LAYOUT, row=row)[0]
        q, k = rotate(q, k, *angles, LAYOUT, row=row)
        return q, k
    q_weight, k_weight = (getattr(norm, "weight", None) for norm in (q_norm, k_norm))
    return norm_rotate(q, k, q_weight, k_weight, *angles, LAYOUT, Norm(shared), row=row)


def _eps(norm: nn.Module | None, x: Tensor) -> float | None:
    """Return the epsilon of a norm that only is an RMSNorm over the features of x, or None for any other."""
    if norm is None or not is_plain_rms_norm(norm) or "forward" in norm.__dict__ or has_hooks(norm):
        return None
    weight: Any = getattr(norm, "weight", None)
    if weight is not None:
        fits = type(weight) in (Tensor, nn.Parameter) and weight.shape == x.shape[-1:]
        if not fits or weight.dtype != x.dtype or weight.device != x.device:
            return None
    eps: Any = getattr(norm, "eps", None)
    return eps if isinstance(eps, float) and x.dtype in FLOATS else None


def is_plain_rms_norm(norm: nn.Module) -> bool:
    """Whether a module is an RMSNorm of torch or of diffusers, without a bias.

    >>> is_plain_rms_norm(nn.RMSNorm(2)), is_plain_rms_norm(nn.LayerNorm(2))
    (True, False)
    """
    kind = type(norm)
    of_diffusers = (kind.__module__, kind.__name__) == ("diffusers.models.normalization", "RMSNorm")
    return (kind is nn.RMSNorm or of_diffusers) and getattr(norm, "bias", None) is None
