"""The keys near the next tokens, which a bias within a window keeps out of the sums of a state."""

from typing import NamedTuple, cast

import torch
from torch import Tensor

from ropewalk.kernels.constructors import arange, full, new_full, new_zeros
from ropewalk.kernels.types import FeatureMap, FeatureMapName, Layout, Side, Sums
from ropewalk.nn.rotary.call import Placement
from ropewalk.nn.rotary.embedding import RotaryEmbedding
from ropewalk.ops.linear_attention import linear_attention

__all__ = [
    "EMPTY",
    "NearKeys",
    "add_far",
    "empty_near",
    "map_of_near",
    "merge_near",
    "readable",
    "split_near",
    "sum_far",
    "with_near",
]

# The position of a slot without a key. A key can have any value, also one that adds nothing.
EMPTY = -(1 << 62)


class NearKeys(NamedTuple):
    """The last keys and values, to which the next tokens are so near that each distance has its own bias.

    Args:
        keys: Keys before the feature map, or features of a map that is a function [batch, kv_heads, near, width].
        values: Values [batch, kv_heads, near, v_dim].
        positions: Positions of the keys, int64 [batch, near]; `EMPTY` where there is none, or a hidden one.

    >>> NearKeys(torch.ones(1, 2, 3, 4), torch.ones(1, 2, 3, 5), torch.arange(3)[None]).positions.shape
    torch.Size([1, 3])
    """

    keys: Tensor
    values: Tensor
    positions: Tensor


def empty_near(k: Tensor, v: Tensor, near: int, fill: float, *, rows: int | None = None) -> NearKeys:
    """Return slots without keys, which add nothing: `fill` is what the feature map maps to 0.

    >>> empty_near(torch.ones(1, 2, 3, 4), torch.ones(1, 2, 3, 5), 6, 0.0).values.shape
    torch.Size([1, 2, 6, 5])
    """
    batch, kv_heads = len(k) if rows is None else rows, k.shape[1]
    keys = new_full(k, (batch, kv_heads, near, k.shape[-1]), fill)
    values = new_zeros(v, batch, kv_heads, near, v.shape[-1])
    return NearKeys(keys, values, full((batch, near), EMPTY, dtype=torch.int64, device=k.device))


def readable(positions: Tensor) -> Tensor:
    """Return positions for a bias or a rotation, for which a slot without a key has one too.

    >>> readable(torch.tensor([EMPTY, 3])).tolist()
    [0, 3]
    """
    return positions.masked_fill(positions == EMPTY, 0)


def with_near(near: NearKeys, k: Tensor, v: Tensor, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return keys, values and positions [batch, keys], preceded by those of a state.

    >>> k, v, ids = torch.ones(1, 2, 3, 4), torch.ones(1, 2, 3, 5), torch.arange(3)[None]
    >>> with_near(NearKeys(k, v, ids), k, v, ids + 3)[2].tolist()
    [[0, 1, 2, 3, 4, 5]]
    """
    keys, values = torch.cat([near.keys.to(k.dtype), k], dim=2), torch.cat([near.values.to(v.dtype), v], dim=2)
    return keys, values, torch.cat([near.positions, ids.expand(len(k), -1)], dim=-1)


def split_near(
    k: Tensor, v: Tensor, ids: Tensor, near: int, fill: float, ends: Tensor | None
) -> tuple[Tensor, Tensor, NearKeys]:
    """Return the keys and values that belong to the sums of a state, and the near ones.

    Args:
        k: Keys [batch, kv_heads, keys, width].
        v: Values [batch, kv_heads, keys, v_dim].
        ids: Positions [batch or 1, keys], `EMPTY` for hidden keys.
        near: Number of keys that are near the next token.
        fill: What the feature map maps to 0.
        ends: Number of keys up to the last visible one [batch]; None if all are visible.

    Returns:
        Keys and values [batch, kv_heads, fewer or as many keys, ...], those that are not in the sums replaced by keys
        that add nothing; and the near keys.

    >>> k = torch.arange(4.0).view(1, 1, 4, 1)
    >>> far, _, last = split_near(k, k, torch.arange(4)[None], 3, 0.0, None)
    >>> far.flatten().tolist(), last.keys.flatten().tolist(), last.positions.tolist()
    ([0.0], [1.0, 2.0, 3.0], [[1, 2, 3]])
    """
    batch, _, keys, _ = k.shape
    ids = ids.expand(batch, -1)
    empty = empty_near(k, v, near, fill)
    if ends is None:
        far = max(0, keys - near)
        padded = with_near(empty, k[:, :, far:], v[:, :, far:], ids[:, far:])
        tokens = NearKeys(*(x[:, :, -near:] if x.dim() == 4 else x[:, -near:] for x in padded)) if near else empty
        return k[:, :, :far], v[:, :, :far], tokens
    # The empty keys come first, so that every index exists.
    all_k, all_v, all_ids = with_near(empty, k, v, ids)
    index = ends[:, None] + arange(near, device=k.device)
    k_index, v_index = (index[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[-1]) for x in (k, v))
    tokens = NearKeys(all_k.gather(2, k_index), all_v.gather(2, v_index), all_ids.gather(1, index))
    close = (arange(keys, device=k.device) >= (ends - near)[:, None])[:, None, :, None]
    return k.masked_fill(close, fill), v.masked_fill(close, 0.0), tokens


def merge_near(earlier: NearKeys, later: NearKeys) -> tuple[NearKeys, NearKeys]:
    """Return the keys that are no longer near after the later keys, and those that are.

    Args:
        earlier: Near keys of a state.
        later: Near keys of the state that follows it, as many as `earlier`.

    >>> a, b = (torch.tensor(keys).view(1, 1, 2, 1) for keys in ([1.0, 2.0], [0.0, 3.0]))
    >>> ids, only_one = torch.tensor([[1, 2]]), torch.tensor([[EMPTY, 3]])
    >>> far, near = merge_near(NearKeys(a, a, ids), NearKeys(b, b, only_one))
    >>> far.keys.flatten().tolist(), near.keys.flatten().tolist()
    ([0.0, 1.0], [2.0, 3.0])
    """
    keys, values, ids = with_near(earlier, *later)
    count = ids.shape[1] // 2
    # Empty slots come first. The keys stay in order.
    order = torch.argsort((ids != EMPTY).to(torch.int8), dim=-1, stable=True)
    k_index, v_index = (order[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[-1]) for x in (keys, values))
    keys, values, ids = keys.gather(2, k_index), values.gather(2, v_index), ids.gather(1, order)
    return (
        NearKeys(keys[:, :, :count], values[:, :, :count], ids[:, :count]),
        NearKeys(keys[:, :, count:], values[:, :, count:], ids[:, count:]),
    )


def add_far(
    earlier: NearKeys,
    later: NearKeys,
    sums: Sums,
    maps: str | tuple[str, str] | None,
    rotation: RotaryEmbedding | None,
    length: int | Tensor | None,
) -> tuple[Sums, NearKeys]:
    """Return the sums of two states with the keys that are no longer near, and the near keys of both.

    Args:
        earlier: Near keys of the first state.
        later: Near keys of the second.
        sums: The sums of both.
        maps: Names of the feature maps, as states store them.
        rotation: The rotation, or None.
        length: Length for rules that depend on it.

    >>> one = NearKeys(torch.zeros(1, 1, 1, 2), torch.ones(1, 1, 1, 1), torch.zeros(1, 1, dtype=torch.int64))
    >>> sums = Sums(torch.zeros(1, 1, 2, 1), torch.zeros(1, 1, 2))
    >>> add_far(one, one, sums, "elu", None, None)[0].below.tolist()  # the features of one key
    [[[1.0, 1.0]]]
    """
    far, near = merge_near(earlier, later)
    return sum_far(far, sums, maps, rotation, length), near


def sum_far(
    far: NearKeys,
    sums: Sums,
    maps: str | tuple[str, str] | None,
    rotation: RotaryEmbedding | None,
    length: int | Tensor | None,
) -> Sums:
    """Return sums with keys that are no longer near.

    Args:
        far: The keys.
        sums: The sums without them.
        maps: As in `add_far`.
        rotation: As in `add_far`.
        length: As in `add_far`.

    >>> one = NearKeys(torch.zeros(1, 1, 1, 2), torch.ones(1, 1, 1, 1), torch.zeros(1, 1, dtype=torch.int64))
    >>> sum_far(one, Sums(torch.zeros(1, 1, 2, 1), torch.zeros(1, 1, 2)), "elu", None, None).below.tolist()
    [[[1.0, 1.0]]]
    """
    (keys, values, positions), name = far, map_of_near(maps)
    none, ids = keys[:, :, :0], readable(positions)
    tables, layout = None, Layout(False, 0, -2)
    if rotation is not None:
        tables = rotation.parts(none, keys, Placement(ids[:, :0], ids, length=length))[-1].tables
        layout = rotation.layout
    sides = Side(none, name), Side(keys, name, None, tables)
    return linear_attention(*sides, values, sums, layout, causal=False)[1]


def map_of_near(maps: str | tuple[str, str] | None) -> FeatureMapName:
    """Return the map that near keys still need. Those of a map that is a function are stored as its features.

    >>> map_of_near(("elu", "relu")), map_of_near(("elu", "exp()"))
    ('relu', 'identity')
    """
    q_map, k_map = (maps, maps) if isinstance(maps, str) else maps or ("", "")
    named = q_map in FeatureMap.__members__ and k_map in FeatureMap.__members__
    return cast(FeatureMapName, k_map) if named else "identity"
