"""Linear attention with RoPE, as a function of queries, keys and values."""

from typing import Literal, TypedDict, Unpack, overload

import torch
from torch import Tensor

from ropewalk.errors import RopewalkError, require_flag, shown
from ropewalk.kernels.constructors import arange, new_full
from ropewalk.kernels.linear.feature_maps import map_features, row_shift
from ropewalk.kernels.precision import FLOATS, working_dtype
from ropewalk.kernels.types import FeatureMap as NamedMap
from ropewalk.kernels.types import FeatureMapName, Layout, Side
from ropewalk.nn.encodings.base import Encoding
from ropewalk.nn.encodings.rotary import rope_for_linear
from ropewalk.nn.linear.feature_maps import FeatureMap, map_name, resolve_maps
from ropewalk.nn.linear.state import LinearState, check_length, checked_state
from ropewalk.nn.memory_layout import check_strided
from ropewalk.nn.position_checks import check_ends, check_ids, described, may_look
from ropewalk.nn.positions import packed_positions
from ropewalk.nn.rotary.call import Placement
from ropewalk.nn.rotary.embedding import RotaryEmbedding
from ropewalk.ops import require_backend
from ropewalk.ops.linear_attention import linear_attention as run

__all__ = ["LinearOptions", "linear_attention"]


class LinearOptions(TypedDict, total=False):
    """The options of `linear_attention` but for return_state, for type checkers.

    >>> "feature_map" in LinearOptions.__annotations__
    True
    """

    rope: RotaryEmbedding | Encoding | None
    positions: Tensor | None
    k_positions: Tensor | None
    cu_seqlens: Tensor | None
    key_mask: Tensor | None
    feature_map: FeatureMap | tuple[FeatureMap, FeatureMap]
    causal: bool
    state: LinearState | None
    length: int | Tensor | None
    backend: str | None


@overload
def linear_attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_state: Literal[False] = False, **options: Unpack[LinearOptions]
) -> Tensor: ...
@overload
def linear_attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_state: Literal[True], **options: Unpack[LinearOptions]
) -> tuple[Tensor, LinearState]: ...
@overload
def linear_attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_state: bool, **options: Unpack[LinearOptions]
) -> Tensor | tuple[Tensor, LinearState]: ...
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
) -> Tensor | tuple[Tensor, LinearState]:
    """sum_n [(R_m phi(q_m)) . (R_n phi(k_n))] v_n / sum_n phi(q_m) . phi(k_n), in time that grows as seq does.

    RoFormer, 2104.09864, eq. 19: what is above the line is rotated, what is below is not, so that the denominator of
    positive features stays positive. The weights of values may be negative and need not sum to 1. Without `rope` it is
    the linear attention of Katharopoulos et al., 2006.16236. Where no key that is seen has a feature, which can be with
    relu, the output is 0 and so is its gradient.

    q is [batch, heads, seq, dim], k [batch, kv_heads, keys, dim], v [batch, kv_heads, keys, v_dim]; heads is a multiple
    of kv_heads. Causal queries are the last of the sequence. Worked in float32 (float64 for float64), rounded once.

    `feature_map` is "elu" (elu(x) + 1), "relu", "squared_relu", "identity", "exp", a function such as `FavorFeatures`
    that may change the width, or a pair, for queries and for keys. `rope` rotates features, and has their width. Of
    "exp" the largest feature of a query is taken off, which cancels; exp(k) must be finite: keys below 88.

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
    _check_tensors(q, k, v, causal)
    require_flag(return_state, asked="linear_attention(return_state=...)")
    rotation = rope_for_linear(rope, "linear_attention(rope=...)")
    if rotation is None and isinstance(rope, Encoding) and rope.name != "none":
        raise RopewalkError(
            asked=f"linear_attention(rope=...) with {rope.name}",
            expected="an encoding that rotates q and k, or None",
            got=f"{rope.name}, which changes tokens before they are projected",
            do="call its embed(x, positions) at the bottom of the model, and leave rope out",
        )
    length = getattr(rope, "at_length", None) if length is None else length
    if length is not None and rotation is None:
        raise RopewalkError(
            asked="linear_attention(length=...)",
            expected="a length only where something rotates by it",
            got="a length and no rope",
            do="leave length out; it is for rules such as DynamicNTK",
        )
    backend = require_backend(backend)
    maps = resolve_maps(feature_map, "linear_attention")
    if cu_seqlens is not None:
        _check_packed(cu_seqlens, q, k)
        # Not every dtype that can count can be compared or subtracted.
        cu_seqlens = cu_seqlens.to(torch.int64)
    if key_mask is not None:
        _check_mask(key_mask, k)
    spec = None if rotation is None else rotation.spec
    learned = rotation is not None and rotation.log_scale is not None
    map_names = map_name(maps[0]), map_name(maps[1])
    if isinstance(maps[0], str) != isinstance(maps[1], str):
        # One function makes features here; those of the other side are made beside them.
        maps = _as_function(maps[0], "q"), _as_function(maps[1], "k")
    padding = None
    if cu_seqlens is not None and callable(maps[0]):
        padding = (arange(k.shape[2], device=k.device) >= cu_seqlens[-1])[:, None]
    hidden = None if key_mask is None else ~key_mask[:, None, :, None]
    queries, q_name = _mapped(q, maps[0], "q", padding)
    keys, k_name = _mapped(k, maps[1], "k", padding, hidden)
    if queries.shape[-1] != keys.shape[-1]:
        raise RopewalkError(
            asked="linear_attention(feature_map=...)",
            expected="as many features of keys as of queries",
            got=f"{queries.shape[-1]} and {keys.shape[-1]}",
            do="the two maps of a pair must have one width",
        )
    rows = k.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1
    before = checked_state(
        state,
        (rows, k.shape[1], keys.shape[-1], v.shape[-1]),
        v,
        spec=spec,
        learned=learned,
        feature_map=map_names,
        asked="linear_attention",
    )
    if hidden is not None:
        # What each map makes 0 of, so that a hidden key adds nothing above or below the line.
        keys, v = keys.masked_fill(hidden, NamedMap[k_name].zero), v.masked_fill(hidden, 0.0)
    start = 0 if state is None else state.start(rows)
    places = _places(rotation, queries, keys, positions, k_positions, cu_seqlens, start, length)
    sides, layout = _sides(rotation, queries, keys, (q_name, k_name), places)
    if rotation is not None and rotation.spec.varies and length is None and k.shape[2]:
        length = k.shape[2]
    check_length(state, spec, length, "linear_attention")
    earlier = k.shape[2] - q.shape[2] if causal else 0
    if earlier:
        # Keys before the first query: their sums, and then the rest as one sequence.
        none = sides[0]._replace(x=queries[:, :, :0])
        head = sides[1]._replace(x=keys[:, :, :earlier])
        _, before = run(none, head, v[:, :, :earlier], before, layout, causal=False)
        tail = sides[1]._replace(x=keys[:, :, earlier:])
        if tail.tables is not None:
            tail = tail._replace(tables=tail.tables._replace(row=tail.tables.row + earlier))
        sides, v = (sides[0], tail), v[:, :, earlier:]
    out, after = run(*sides, v, before, layout, causal=causal, cu_seqlens=cu_seqlens, backend=backend)
    if not return_state:
        return out
    key_ids = positions if k_positions is None else k_positions
    # Over several axes a token has more than one position: tokens are counted.
    key_ids = key_ids if spec is None or spec.axes is None else None
    following = _next(start, key_ids, cu_seqlens, key_mask, k)
    if k.shape[2] == 0:
        # No key was rotated: the length is that of the keys before, if there are any.
        length = None if state is None else state.length
    return out, LinearState(*after, following, spec, map_names, learned, length)


def _as_function(feature_map: FeatureMap, role: str) -> FeatureMap:
    if callable(feature_map):
        return feature_map

    def mapped(x: Tensor) -> Tensor:
        x = x.to(working_dtype(x))
        return map_features(x, feature_map, row_shift(x, feature_map) if role == "q" else None)

    return mapped


def _mapped(x: Tensor, feature_map: FeatureMap, name: str, *unread: Tensor | None) -> tuple[Tensor, FeatureMapName]:
    """The tensor for the kernel, and the map it is to apply: a function is applied here.

    `unread` are masks of tokens that nothing reads, which a kernel leaves out by itself.
    """
    if not callable(feature_map):
        return x, feature_map
    for mask in unread:
        # A function of what such tokens hold may be infinite, and 0 times its derivative no number.
        x = x if mask is None else x.masked_fill(mask, 0.0)
    made = feature_map(x)
    if not isinstance(made, Tensor) or made.shape[:3] != x.shape[:3] or made.dim() != 4 or not made.is_floating_point():
        raise RopewalkError(
            asked="linear_attention(feature_map=...)",
            expected=f"features of {name}, floating-point [{', '.join(map(str, x.shape[:3]))}, any width]",
            got=f"{made.dtype} {list(made.shape)}" if isinstance(made, Tensor) else shown(made),
            do="a feature map works on the last dimension alone",
        )
    # What is worked in, whatever the function gives: features of both sides and their cos and sin have one dtype.
    return made.to(working_dtype(x)), "identity"


def _places(
    rope: RotaryEmbedding | None,
    q: Tensor,
    k: Tensor,
    positions: Tensor | None,
    k_positions: Tensor | None,
    cu_seqlens: Tensor | None,
    start: int | Tensor,
    length: int | Tensor | None,
) -> Placement:
    """Where the tokens are, as rope(q, k, ...) is told."""
    explicit = positions is not None or k_positions is not None
    queries, keys = q.shape[2], k.shape[2]
    if rope is None:
        if explicit:
            raise RopewalkError(
                asked="linear_attention(positions=...)",
                expected="positions only where something rotates by them",
                got="positions and no rope",
                do="pass rope=RotaryEmbedding(width of the features), or leave positions out",
            )
        return Placement()
    if explicit:
        if positions is None and k_positions is not None and k_positions.shape[-1:] == (keys,) and queries <= keys:
            # Queries are the last of the keys, wherever those are.
            positions = k_positions[..., keys - queries :]
        return Placement(positions, k_positions, length=length)
    if cu_seqlens is not None:
        return Placement(packed_positions(cu_seqlens, keys, start), length=length)
    if queries == keys and not (isinstance(start, Tensor) and start.is_floating_point()):
        # No offset from 0 on: a rule that varies with the length knows a whole sequence by that.
        return Placement(offset=None if isinstance(start, int) and start == 0 else start, length=length)
    if queries > keys:
        raise RopewalkError(
            asked="linear_attention(q, k, v, rope=...)",
            expected="positions where there are more queries than keys",
            got=f"{queries} queries, {keys} keys and no positions",
            do="pass positions= for the queries and k_positions= for the keys",
        )
    ids = arange(keys, device=q.device)
    ids = ids + start.unsqueeze(-1) if isinstance(start, Tensor) else ids + start
    return Placement(ids[..., keys - queries :], ids, length=length)


def _sides(
    rope: RotaryEmbedding | None,
    q: Tensor,
    k: Tensor,
    names: tuple[FeatureMapName, FeatureMapName],
    places: Placement,
) -> tuple[tuple[Side, Side], Layout]:
    """Queries and keys with their cos and sin, and the layout of their features."""
    if rope is None:
        return (Side(q, names[0]), Side(k, names[1])), Layout(False, 0, -2)
    if rope.spec.head_dim != q.shape[-1]:
        raise RopewalkError(
            asked="linear_attention(..., rope=...)",
            expected=f"a rope of {q.shape[-1]}, the width of the features",
            got=f"head_dim={rope.spec.head_dim}",
            do="the rotation comes after the feature map: make it with the width of the features",
        )
    parts = rope.parts(q, k, places)
    q_side, k_side = Side(q, names[0], None, parts[0].tables), Side(k, names[1], None, parts[-1].tables)
    return (q_side, k_side), rope.layout


def _next(
    start: int | Tensor, key_ids: Tensor | None, cu_seqlens: Tensor | None, key_mask: Tensor | None, k: Tensor
) -> int | Tensor:
    """The position of the token after these: after the last key that may be seen, or `start` if there is none.

    `key_ids` are the positions of the keys, if the caller passed them.
    """
    keys = k.shape[2]
    if key_ids is not None and not key_ids.is_floating_point():
        key_ids = key_ids.to(torch.int64)  # one more than the last must not wrap
    if keys == 0 or (key_ids is None and key_mask is None):
        return start + keys if cu_seqlens is None else cu_seqlens.diff() + start
    tokens = arange(keys, device=k.device)
    if cu_seqlens is None:
        seen = tokens.expand(len(k), -1) if key_mask is None else torch.where(key_mask, tokens, -1)
        begins, last = 0, seen.amax(-1)
        ids = tokens + (start.unsqueeze(-1) if isinstance(start, Tensor) else start) if key_ids is None else key_ids
        ids = ids.expand(len(k), keys)
    else:
        seen = tokens if key_mask is None else torch.where(key_mask[0], tokens, -1)
        # The last that is seen before each token, and before none of them: an empty sequence may be the first.
        before = torch.cat([new_full(seen, (1,), -1), seen]).cummax(0).values
        begins, last = cu_seqlens[:-1], before[cu_seqlens[1:]]
        ids = packed_positions(cu_seqlens, keys, start) if key_ids is None else key_ids
        ids = ids.reshape(1, -1).expand(len(last), -1)
    after = ids.gather(-1, last.clamp_min(0).unsqueeze(-1)).squeeze(-1) + 1
    return torch.where(last >= begins, after, start)


def _check_tensors(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> None:
    """Raise unless q, k and v belong together."""
    asked = "linear_attention"
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_strided(x, asked=f"{asked}({name})")
        if not (isinstance(x, Tensor) and x.dtype in FLOATS):
            raise RopewalkError(
                asked=f"{asked}({name})",
                expected="a tensor of float32, float64, bfloat16 or float16",
                got=f"{x.dtype}" if isinstance(x, Tensor) else shown(x),
                do=f"cast {name}, [batch, heads, seq, dim]" if isinstance(x, Tensor) else f"pass {name} as a tensor",
            )
    require_flag(causal, asked=f"{asked}(causal=...)")
    if not q.dim() == k.dim() == v.dim() == 4:
        raise RopewalkError(
            asked=f"{asked}(q, k, v)",
            expected="four dimensions: q [batch, heads, q_seq, dim], k and v [batch, kv_heads, k_seq, dim]",
            got=f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}",
            do="transpose to [batch, heads, seq, dim] and check the number of heads",
        )
    _name_mismatch(q, k, v, causal, asked)
    if not q.dtype == k.dtype == v.dtype or not q.device == k.device == v.device:
        raise RopewalkError(
            asked=f"{asked}(q, k, v)",
            expected="one dtype, on one device",
            got=", ".join(f"{x.dtype} on {x.device}" for x in (q, k, v)),
            do="cast or move them; sums are float32 whatever the dtype is",
        )


def _name_mismatch(q: Tensor, k: Tensor, v: Tensor, causal: bool, asked: str) -> None:
    """Raise with the dimension that does not fit, if the number of dimensions does."""
    heads = "[batch, heads, seq, dim] is the layout: transpose(1, 2) makes it of [batch, seq, heads, dim]"
    mismatches = [
        (len({len(q), len(k), len(v)}) > 1, "one batch", [len(q), len(k), len(v)], "give all three the same batch"),
        (q.shape[3] != k.shape[3], "as many features of k as of q", [q.shape[3], k.shape[3]], "project both alike"),
        (k.shape[2] != v.shape[2], "a value for each key", [k.shape[2], v.shape[2]], "k and v have one length"),
        (k.shape[1] != v.shape[1], "as many heads of v as of k", [k.shape[1], v.shape[1]], heads),
        (k.shape[1] == 0 or q.shape[1] % max(k.shape[1], 1) > 0, "a multiple of kv_heads, the heads of k, as "
         "heads of q", [q.shape[1], k.shape[1]], heads),
        (causal and q.shape[2] > k.shape[2], "no more queries than keys, where it is causal", [q.shape[2], k.shape[2]],
         "causal queries are the last of the keys; for attention to other keys pass causal=False"),
    ]  # fmt: skip
    for wrong, expected, sizes, do in mismatches:
        if wrong:
            shapes = f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}"
            raise RopewalkError(
                asked=f"{asked}(q, k, v)", expected=expected, got=f"{' and '.join(map(str, sizes))}: {shapes}", do=do
            )


def _check_mask(key_mask: Tensor, k: Tensor) -> None:
    """Raise unless `key_mask` is a bool per key."""
    shape = (k.shape[0], k.shape[2])
    fits = isinstance(key_mask, Tensor) and key_mask.dtype == torch.bool and tuple(key_mask.shape) == shape
    if not fits or key_mask.device != k.device:
        raise RopewalkError(
            asked="linear_attention(key_mask=...)",
            expected=f"a bool tensor {list(shape)} on {k.device}, True where a key may be seen",
            got=described(key_mask),
            do="True is for tokens and False for padding",
        )


def _check_packed(cu_seqlens: Tensor, q: Tensor, k: Tensor) -> None:
    """Raise unless `cu_seqlens` are ends of the sequences in q and k."""
    asked = "linear_attention(cu_seqlens=...)"
    check_ids(cu_seqlens, asked=asked, shape="[sequences + 1]", dims=(1,), whole=True)
    if q.shape[0] != 1 or q.shape[2] != k.shape[2] or len(cu_seqlens) < 2 or cu_seqlens.device != q.device:
        raise RopewalkError(
            asked=asked,
            expected=f"a batch of 1 with as many queries as keys, and at least two ends, on {q.device}",
            got=f"q {list(q.shape)}, k {list(k.shape)}, {len(cu_seqlens)} ends on {cu_seqlens.device}",
            do="lay the sequences end to end along seq",
        )
    if may_look(cu_seqlens):
        check_ends(cu_seqlens, q.shape[2], asked=asked)
