"""Linear attention in chunks of tokens, as matrix products: any device, any derivative."""

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["CHUNK", "Features", "Side", "Sums", "attend", "divide"]

# Tokens whose scores are formed. More cost more there and save less in states; fewer leave a BLAS without a batched
# product with matrices too small for it.
CHUNK = 128


class Side(NamedTuple):
    """Queries or keys: [batch, heads, seq, width], the name of their feature map, and cos, sin and their first row.

    `shift`, [batch, heads, seq], is taken off before an exponential. Without tables nothing turns.

    >>> Side(torch.ones(1, 1, 2, 4), "elu").map
    'elu'
    """

    x: Tensor
    map: str
    shift: Tensor | None = None
    tables: tuple[Tensor, Tensor, int] | None = None


class Features(NamedTuple):
    """Features of one side, [batch, heads, seq, width]: as the denominator takes them, and turned.

    >>> Features(torch.ones(1, 1, 2, 4), torch.ones(1, 1, 2, 4)).plain.shape
    torch.Size([1, 1, 2, 4])
    """

    plain: Tensor
    turned: Tensor


class Sums(NamedTuple):
    """What earlier keys left: the sums of (R k) v^T, [batch, kv_heads, width, v_dim], and of k, without v_dim.

    >>> Sums(torch.zeros(1, 1, 4, 2), torch.zeros(1, 1, 4)).below.shape
    torch.Size([1, 1, 4])
    """

    above: Tensor
    below: Tensor


def attend(
    q: Features, k: Features, v: Tensor, before: Sums | None, *, causal: bool, chunk: int = CHUNK
) -> tuple[Tensor, Sums]:
    """o_i = sum_j (R q_i . R k_j) v_j / sum_j q_i . k_j over the keys that query i may see, and the sums over all.

    RoFormer, 2104.09864, eq. 19. q is [batch, heads, q_seq, width], k and v have kv_heads, of which heads is a
    multiple; all of one dtype, which is what is worked in. Causal queries are as many as the keys. The chunk changes
    the order of the sums and nothing else.

    >>> ones = Features(torch.ones(1, 1, 2, 2), torch.ones(1, 1, 2, 2))
    >>> out, after = attend(ones, ones, torch.tensor([[[[1.0], [3.0]]]]), None, causal=True)
    >>> out.flatten().tolist(), after.below.flatten().tolist()
    ([1.0, 2.0], [2.0, 2.0])
    """
    batch, kv_heads, keys, width = k.plain.shape
    before = before if before is not None else _nothing(k.plain, v)
    group, queries = q.plain.shape[1] // kv_heads, q.plain.shape[2]
    if not causal or keys <= 1:
        after = Sums(before.above + k.turned.transpose(-1, -2) @ v, before.below + k.plain.sum(dim=-2))
        grouped = Features(*(x.unflatten(1, (kv_heads, group)).flatten(2, 3) for x in q))
        numerator = grouped.turned @ after.above
        denominator = grouped.plain @ after.below.unsqueeze(-1)
        out = divide(numerator, denominator)
        return out.unflatten(2, (group, queries)).flatten(1, 2), after
    size = chunk if keys >= chunk else keys
    count = (keys + size - 1) // size
    missing = count * size - keys
    padded = [*q, *k, v]
    if torch.compiler.is_compiling() or missing:
        # Rows of zeros are keys that add nothing, and queries whose output is cut off again; a graph has every length.
        # Not by `pad`: of no rows it has other strides than a graph for every length was told.
        padded = [torch.cat([x, x.new_zeros(*x.shape[:2], missing, x.shape[-1])], dim=2) for x in padded]
    q_plain, q_turned = (
        x.view(batch, kv_heads, group, count, size, width).transpose(2, 3).flatten(3, 4) for x in padded[:2]
    )
    k_plain, k_turned, v = (x.unflatten(2, (count, size)) for x in padded[2:])
    # A copy: on ARM each product with a transposed view costs more than its arithmetic.
    k_columns = k_turned.transpose(-1, -2).contiguous()
    own = Sums(k_columns @ v, k_plain.sum(dim=-2))
    running = Sums(
        *(torch.cat([x.unsqueeze(2), each], dim=2).cumsum(dim=2) for x, each in zip(before, own, strict=True))
    )
    earlier, after = Sums(*(x[:, :, :-1] for x in running)), Sums(*(x[:, :, -1] for x in running))
    scores = _lower_triangle((q_turned @ k_columns).unflatten(-2, (group, size))).flatten(-3, -2)
    numerator = q_turned @ earlier.above + scores @ v
    seen = (k_plain.cumsum(dim=-2) + earlier.below.unsqueeze(-2)).unsqueeze(3)
    denominator = (q_plain.unflatten(3, (group, size)) * seen).sum(dim=-1).flatten(3, 4).unsqueeze(-1)
    out = divide(numerator, denominator).unflatten(3, (group, size)).transpose(2, 3)
    return out.reshape(batch, kv_heads * group, count * size, v.shape[-1])[:, :, :keys], after


def divide(numerator: Tensor, denominator: Tensor) -> Tensor:
    """The quotient; 0, with gradients that are 0, where the denominator is 0: no key that is seen has a feature.

    >>> divide(torch.tensor([6.0, 0.0]), torch.tensor([2.0, 0.0])).tolist()
    [3.0, 0.0]
    """
    return numerator / torch.where(denominator == 0, torch.inf, denominator)


def _lower_triangle(fresh: Tensor) -> Tensor:
    """In place, which is ten times as fast on a CPU; vmap has no rule for that."""
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return fresh.tril()
    return fresh.tril_()


def _nothing(k: Tensor, v: Tensor) -> Sums:
    batch, kv_heads, _, width = k.shape
    return Sums(v.new_zeros(batch, kv_heads, width, v.shape[-1]), v.new_zeros(batch, kv_heads, width))
