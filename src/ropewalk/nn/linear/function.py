"""Linear attention with RoPE, as a function of queries, keys and values."""

from typing import Any

import torch
from torch import Tensor

from ropewalk.errors import RopewalkError, require_flag, shown
from ropewalk.kernels.linear.feature_maps import map_features, row_shift
from ropewalk.kernels.linear.torch import Side
from ropewalk.kernels.types import Layout
from ropewalk.nn.encodings.base import Encoding
from ropewalk.nn.linear.arguments import check_mask, check_packed, check_tensors, rope_for_linear
from ropewalk.nn.linear.feature_maps import FeatureMap, map_name, resolve_maps
from ropewalk.nn.linear.state import LinearState, check_length, checked_state
from ropewalk.nn.positions import packed_positions
from ropewalk.nn.rotary.embedding import RotaryEmbedding
from ropewalk.ops import require_backend
from ropewalk.ops.linear_attention import linear_attention as run

__all__ = ["linear_attention"]


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    rope: RotaryEmbedding | Encoding | None = None,
    positions: Tensor | None = None,
    k_positions: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    key_mask: Tensor | None = None,
    feature_map: FeatureMap | tuple[FeatureMap, FeatureMap] = "elu",
    causal: bool = True,
    state: LinearState | None = None,
    return_state: bool = False,
    length: int | Tensor | None = None,
    backend: str | None = None,
) -> Any:
    """sum_n [(R_m phi(q_m)) . (R_n phi(k_n))] v_n / sum_n phi(q_m) . phi(k_n), in time that grows as seq does.

    RoFormer, 2104.09864, eq. 19: what is above the line is turned, what is below is not, so that the denominator of
    positive features stays positive. The weights of values may be negative and need not sum to 1. Without `rope` it is
    the linear attention of Katharopoulos et al., 2006.16236. Where no key that is seen has a feature, which can be with
    relu, the output is 0 and so is its gradient.

    q is [batch, heads, seq, dim], k [batch, kv_heads, keys, dim], v [batch, kv_heads, keys, v_dim]; heads is a multiple
    of kv_heads. Causal queries are the last of the sequence. Worked in float32 (float64 for float64), rounded once.

    `feature_map` is "elu" (elu(x) + 1), "relu", "squared_relu", "identity", "exp", a function such as `FavorFeatures`
    that may change the width, or a pair, for queries and for keys. `rope` turns features: its head_dim is their width.
    Of "exp" the largest feature of a query is taken off, which cancels; exp(k) must be finite: keys below 88.

    `positions` are those of queries, and of keys unless `k_positions` says otherwise; 0 .. keys-1 unless given, or from
    where the state stands. `cu_seqlens` are the ends of sequences laid end to end in a batch of 1. `key_mask`
    [batch, keys] is False for keys that nobody may see. `length` is for rules that vary with it, as in rope(q, k).

    `return_state` also gives a `LinearState`; with it as `state` the next tokens go on where these stopped, one or many
    at a time. Packed sequences have one row of it each.

    >>> q = k = torch.zeros(1, 1, 3, 2)  # equal features: the mean of the values that a query may see
    >>> v = torch.tensor([[[[1.0], [3.0], [5.0]]]])
    >>> linear_attention(q, k, v).flatten().tolist()
    [1.0, 2.0, 3.0]
    >>> first, state = linear_attention(q[:, :, :2], k[:, :, :2], v[:, :, :2], return_state=True)
    >>> linear_attention(q[:, :, 2:], k[:, :, 2:], v[:, :, 2:], state=state).item()
    3.0
    """
    check_tensors(q, k, v, causal)
    require_flag(return_state, asked="linear_attention(return_state=...)")
    turning = rope_for_linear(rope, "linear_attention(rope=...)")
    if turning is None and isinstance(rope, Encoding) and rope.name != "none":
        raise RopewalkError(
            asked=f"linear_attention(rope=...) with {rope.name}",
            expected="an encoding that turns q and k, or None",
            got=f"{rope.name}, which changes tokens before they are projected",
            do="call its embed(x, positions) at the bottom of the model, and leave rope out",
        )
    length = getattr(rope, "at_length", None) if length is None else length
    if length is not None and turning is None:
        raise RopewalkError(
            asked="linear_attention(length=...)",
            expected="a length only where something turns by it",
            got="a length and no rope",
            do="leave length out; it is for rules such as DynamicNTK",
        )
    backend = require_backend(backend)
    maps = resolve_maps(feature_map, "linear_attention")
    if cu_seqlens is not None:
        check_packed(cu_seqlens, q, k)
    if key_mask is not None:
        check_mask(key_mask, k)
    made: dict[str, Any] = {
        "spec": None if turning is None else turning.spec,
        "feature_map": (map_name(maps[0]), map_name(maps[1])),
        "learned": turning is not None and turning.log_scale is not None,
    }
    if isinstance(maps[0], str) != isinstance(maps[1], str):
        # One function makes features here; those of the other side are made beside them.
        maps = tuple(_as_function(one, role) for one, role in zip(maps, "qk", strict=True))
    queries, q_name = _mapped(q, maps[0], "q")
    keys, k_name = _mapped(k, maps[1], "k")
    if queries.shape[-1] != keys.shape[-1]:
        raise RopewalkError(
            asked="linear_attention(feature_map=...)",
            expected="as many features of keys as of queries",
            got=f"{queries.shape[-1]} and {keys.shape[-1]}",
            do="the two maps of a pair must have one width",
        )
    rows = k.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1
    before = checked_state(state, rows, k.shape[1], keys.shape[-1], v, **made, asked="linear_attention")
    if key_mask is not None:
        # What each map makes 0 of, so that a hidden key adds nothing above or below the line.
        nothing = 0.0 if k_name == "identity" else float("-inf")
        hidden = ~key_mask[:, None, :, None]
        keys, v = keys.masked_fill(hidden, nothing), v.masked_fill(hidden, 0.0)
    start = 0 if state is None else state.start(rows)
    where = _where(turning, queries, keys, positions, k_positions, cu_seqlens, start)
    sides, layout = _sides(turning, queries, keys, (q_name, k_name), where, length, backend)
    if turning is not None and turning.spec.varies and length is None:
        length = k.shape[2]
    check_length(state, made["spec"], length, "linear_attention")
    earlier = k.shape[2] - q.shape[2] if causal else 0
    if earlier:
        # Keys before the first query: their sums, and then the rest as one sequence.
        none = sides[0]._replace(x=queries[:, :, :0])
        head = sides[1]._replace(x=keys[:, :, :earlier])
        plain = Layout(layout.interleaved, layout.start, -2, None)
        _, before = run(none, head, v[:, :, :earlier], before, plain, causal=False)
        tail = sides[1]._replace(x=keys[:, :, earlier:])
        if tail.tables is not None:
            tail = tail._replace(tables=(*tail.tables[:2], tail.tables[2] + earlier))
        sides, v = (sides[0], tail), v[:, :, earlier:]
    out, after = run(*sides, v, before, layout, causal=causal, cu_seqlens=cu_seqlens)
    if not return_state:
        return out
    given = positions if k_positions is None else k_positions
    # Over several axes a token has no one position: tokens are counted.
    given = given if turning is None or turning.spec.axes is None else None
    following = _next(start, given, cu_seqlens, key_mask, k)
    return out, LinearState(*after, following, **made, length=length)


def _as_function(feature_map: FeatureMap, role: str) -> FeatureMap:
    if not isinstance(feature_map, str):
        return feature_map

    def mapped(x: Tensor) -> Tensor:
        x = x.to(torch.float64 if x.dtype == torch.float64 else torch.float32)
        return map_features(x, feature_map, row_shift(x, feature_map) if role == "q" else None)

    return mapped


def _mapped(x: Tensor, feature_map: FeatureMap, name: str) -> tuple[Tensor, str]:
    """The tensor for the kernel, and the map it is to apply: a function is applied here."""
    if isinstance(feature_map, str):
        return x, feature_map
    made = feature_map(x)
    if not isinstance(made, Tensor) or made.shape[:3] != x.shape[:3] or made.dim() != 4 or not made.is_floating_point():
        raise RopewalkError(
            asked="linear_attention(feature_map=...)",
            expected=f"features of {name}, floating-point [{', '.join(map(str, x.shape[:3]))}, any width]",
            got=f"{made.dtype} {list(made.shape)}" if isinstance(made, Tensor) else shown(made),
            do="a feature map works on the last dimension alone",
        )
    # What is worked in, whatever the function gives: features of both sides and their cos and sin have one dtype.
    return made.to(torch.float64 if x.dtype == torch.float64 else torch.float32), "identity"


def _where(
    rope: RotaryEmbedding | None,
    q: Tensor,
    k: Tensor,
    positions: Tensor | None,
    k_positions: Tensor | None,
    cu_seqlens: Tensor | None,
    start: int | Tensor,
) -> dict[str, Any]:
    """Where the tokens stand, as rope(q, k, ...) takes it."""
    given = positions is not None or k_positions is not None
    queries, keys = q.shape[2], k.shape[2]
    if rope is None:
        if given:
            raise RopewalkError(
                asked="linear_attention(positions=...)",
                expected="positions only where something turns by them",
                got="positions and no rope",
                do="pass rope=RotaryEmbedding(width of the features), or leave positions out",
            )
        return {}
    if given:
        if positions is None and k_positions is not None and k_positions.shape[-1:] == (keys,) and queries <= keys:
            # Queries are the last of the keys, wherever those stand.
            positions = k_positions[..., keys - queries :]
        return {"positions": positions, "k_positions": k_positions}
    if cu_seqlens is not None:
        return {"positions": _packed_ids(cu_seqlens, keys, start)}
    if queries == keys:
        # From 0 on without a word: a rule that varies with the length knows a whole sequence by that.
        return {} if isinstance(start, int) and start == 0 else {"offset": start}
    if queries > keys:
        raise RopewalkError(
            asked="linear_attention(q, k, v, rope=...)",
            expected="positions where there are more queries than keys",
            got=f"{queries} queries, {keys} keys and no positions",
            do="pass positions= for the queries and k_positions= for the keys",
        )
    ids = torch.arange(keys, device=q.device)
    ids = ids + start.unsqueeze(-1) if isinstance(start, Tensor) else ids + start
    return {"positions": ids[..., keys - queries :], "k_positions": ids}


def _packed_ids(cu_seqlens: Tensor, keys: int, start: int | Tensor) -> Tensor:
    """Where tokens stand that lie end to end, each sequence from its start on."""
    if isinstance(start, Tensor):
        owner = torch.searchsorted(cu_seqlens, torch.arange(keys, device=cu_seqlens.device), right=True) - 1
        start = start[owner.clamp_max(len(start) - 1)]
    return packed_positions(cu_seqlens, keys) + start


def _sides(
    rope: RotaryEmbedding | None,
    q: Tensor,
    k: Tensor,
    names: tuple[str, str],
    where: dict[str, Any],
    length: int | Tensor | None,
    backend: str | None,
) -> tuple[tuple[Side, Side], Layout]:
    """Queries and keys with their cos and sin, and how features lie."""
    if rope is None:
        return (Side(q, names[0]), Side(k, names[1])), Layout(False, 0, -2, backend)
    if rope.spec.head_dim != q.shape[-1]:
        raise RopewalkError(
            asked="linear_attention(..., rope=...)",
            expected=f"a rope of {q.shape[-1]}, the width of the features",
            got=f"head_dim={rope.spec.head_dim}",
            do="the rotation comes after the feature map: make it with the width of the features",
        )
    ids, k_ids, offset = where.get("positions"), where.get("k_positions"), where.get("offset")
    parts = rope._parts(q, k, ids, k_ids, offset, None, None, length, None)
    tables = [place for _, _, place, _ in parts]
    of_q, of_k = tables[0], tables[-1]
    layout = Layout(rope.layout.interleaved, rope.layout.start, -2, backend)
    return (Side(q, names[0], None, of_q), Side(k, names[1], None, of_k)), layout


def _next(
    start: int | Tensor, given: Tensor | None, cu_seqlens: Tensor | None, key_mask: Tensor | None, k: Tensor
) -> int | Tensor:
    """Where the token after these stands: after the last that may be seen, or at `start` where there is none.

    `given` is where keys stand, if anybody said so.
    """
    keys = k.shape[2]
    if given is not None and not given.is_floating_point():
        given = given.to(torch.int64)  # one more than the last must not wrap
    if keys == 0 or (given is None and key_mask is None):
        return start + keys if cu_seqlens is None else cu_seqlens.diff().to(torch.int64) + start
    tokens = torch.arange(keys, device=k.device)
    if cu_seqlens is None:
        seen = tokens.expand(len(k), -1) if key_mask is None else torch.where(key_mask, tokens, -1)
        begins, last = 0, seen.amax(-1)
        ids = tokens + (start.unsqueeze(-1) if isinstance(start, Tensor) else start) if given is None else given
        ids = ids.expand(len(k), keys)
    else:
        seen = tokens if key_mask is None else torch.where(key_mask[0], tokens, -1)
        begins, last = cu_seqlens[:-1], seen.cummax(0).values[(cu_seqlens[1:].to(torch.int64) - 1).clamp_min(0)]
        ids = _packed_ids(cu_seqlens, keys, start) if given is None else given
        ids = ids.reshape(1, -1).expand(len(last), -1)
    after = ids.gather(-1, last.clamp_min(0).unsqueeze(-1)).squeeze(-1) + 1
    return torch.where(last >= begins, after, start)
