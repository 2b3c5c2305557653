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
from ropewalk.nn.encodings.base import Encoding, encodes_heads, identity_in_state
from ropewalk.nn.encodings.rotary import rope_axes, rope_for_linear
from ropewalk.nn.linear.feature_maps import FeatureMap, map_name, resolve_maps
from ropewalk.nn.linear.state import LinearState, check_length, checked_start, checked_state
from ropewalk.nn.memory_layout import check_strided
from ropewalk.nn.position_checks import check_key_mask, check_packed, check_positions, warn_if_row_is_hidden
from ropewalk.nn.positions import packed_positions, range_positions
from ropewalk.nn.rotary.call import Placement
from ropewalk.nn.rotary.embedding import RotaryEmbedding
from ropewalk.ops import require_backend
from ropewalk.ops.linear_attention import linear_attention as run
from ropewalk.signatures import checks_names

__all__ = ["LinearOptions", "linear_attention"]


class LinearOptions(TypedDict, total=False):
    """Keyword arguments of `linear_attention` except return_state, for type checkers.

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
@checks_names
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
    """Linear attention with RoPE, in time proportional to the number of tokens.

    out_m = sum_n [(R_m phi(q_m)) . (R_n phi(k_n))] v_n / sum_n phi(q_m) . phi(k_n) (RoFormer, 2104.09864, eq. 19).
    The numerator is rotated and the denominator is not, so the denominator of positive features stays positive. The
    weights of the values can be negative, and need not sum to 1. Without `rope` this is the linear attention of
    Katharopoulos et al., 2006.16236. If the visible keys of a query have no features, which is possible with relu, the
    output and its gradient are 0. Computed in float32 (float64 for float64) and rounded once.

    Args:
        q: Queries [batch, heads, seq, dim]. Causal queries are the last tokens of the sequence.
        k: Keys [batch, kv_heads, keys, dim]. heads is a multiple of kv_heads.
        v: Values [batch, kv_heads, keys, v_dim].
        rope: Rotates the features; its head_dim is the number of features. An encoding with the hook `encode_heads`
            changes q, k and v before the feature map. None for no position.
        positions: Positions of q [seq] or [batch, seq], and also of k unless `k_positions` is passed. Defaults to
            0 .. keys-1, or continues from the state.
        k_positions: Positions of k [keys] or [batch, keys].
        cu_seqlens: Cumulated lengths [sequences + 1] of sequences packed in a batch of 1.
        key_mask: bool [batch, keys]. False hides a key from all queries.
        feature_map: "elu" (elu(x) + 1), "relu", "squared_relu", "identity", "exp", a function such as `FavorFeatures`
            that can change the number of features, or a tuple for queries and keys. "exp" subtracts the largest feature
            of a query, which cancels; exp(k) must be finite, which requires keys below 88.
        causal: Hide the keys after a query.
        state: State after the previous tokens, from an earlier call; None at the first token.
        return_state: Also return the state after these tokens. Packed sequences have one row of the state each.
        length: As in `RotaryEmbedding.forward`, for rules that depend on the length.
        backend: Force a backend; None chooses one.

    Returns:
        Tensor [batch, heads, seq, v_dim], or a tuple of it and a `LinearState`.

    Raises:
        RopewalkError: If a shape, dtype or device does not match, if the state does not match the call, or if the
            encoding is not supported.

    >>> q = k = torch.zeros(1, 1, 3, 2)  # equal features: the mean of the visible values
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
    added = rope if isinstance(rope, Encoding) and encodes_heads(rope) else None
    if rotation is None and added is None and isinstance(rope, Encoding) and rope.name != "none":
        raise RopewalkError(
            asked=f"linear_attention(rope=...) with {rope.name}",
            expected="an encoding that changes q and k, or None",
            got=f"{rope.name}, which changes tokens before they are projected",
            do="call its embed(x, positions) before the first layer of the model, and omit rope",
        )
    length = getattr(rope, "at_length", None) if length is None else length
    if length is not None and rotation is None:
        raise RopewalkError(
            asked="linear_attention(length=...)",
            expected="a length only together with a rope",
            got="a length and no rope",
            do="omit length, which is for rules such as DynamicNTK",
        )
    backend = require_backend(backend)
    maps = resolve_maps(feature_map, "linear_attention")
    if cu_seqlens is not None:
        _check_packed(cu_seqlens, q, k)
        # Some of the accepted dtypes do not support comparison or subtraction.
        cu_seqlens = cu_seqlens.to(torch.int64)
    if key_mask is not None:
        check_key_mask(key_mask, (k.shape[0], k.shape[2]), k.device, asked="linear_attention(key_mask=...)")
        # Part of a stream may be padding only.
        if state is None and not return_state:
            warn_if_row_is_hidden(key_mask, asked="linear_attention(key_mask=...)")
    rows = k.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1
    start = checked_start(state, rows, asked="linear_attention")
    uses_positions = rotation is not None or added is not None
    placement = _placement(uses_positions, q, k, positions, k_positions, cu_seqlens, start, length)
    if added is not None:
        q, k, v = _with_encoded_heads(added, q, k, v, placement)
    spec = None if rotation is None else rotation.spec
    learned = rotation is not None and rotation.log_scale is not None
    map_names = map_name(maps[0]), map_name(maps[1])
    if isinstance(maps[0], str) != isinstance(maps[1], str):
        # If one map is a function, the features of the other side are computed here too.
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
            expected="the same number of features for queries and keys",
            got=f"{queries.shape[-1]} and {keys.shape[-1]}",
            do="use two maps with the same number of features",
        )
    before = checked_state(
        state,
        (rows, k.shape[1], keys.shape[-1], v.shape[-1]),
        v,
        spec=spec,
        learned=learned,
        feature_map=map_names,
        encoding=identity_in_state(added),
        asked="linear_attention",
    )
    if hidden is not None:
        # The input that each map sends to 0: a hidden key adds nothing to numerator and denominator.
        keys, v = keys.masked_fill(hidden, NamedMap[k_name].zero), v.masked_fill(hidden, 0.0)
    sides, layout = _sides(rotation, queries, keys, (q_name, k_name), placement)
    if rotation is not None and rotation.spec.varies and length is None and k.shape[2]:
        length = k.shape[2]
    check_length(state, spec, length, "linear_attention")
    earlier = k.shape[2] - q.shape[2] if causal else 0
    if earlier:
        # Keys before the first query are summed first. The other keys and the queries are then one sequence.
        no_queries = sides[0]._replace(x=queries[:, :, :0])
        head = sides[1]._replace(x=keys[:, :, :earlier])
        _, before = run(no_queries, head, v[:, :, :earlier], before, layout, causal=False)
        tail = sides[1]._replace(x=keys[:, :, earlier:])
        if tail.tables is not None:
            tail = tail._replace(tables=tail.tables._replace(row=tail.tables.row + earlier))
        sides, v = (sides[0], tail), v[:, :, earlier:]
    out, after = run(*sides, v, before, layout, causal=causal, cu_seqlens=cu_seqlens, backend=backend)
    if not return_state:
        return out
    key_ids = positions if k_positions is None else k_positions
    # A token has several positions where there are several axes. The state then counts tokens.
    key_ids = key_ids if spec is None or spec.axes is None else None
    following = _next(start, key_ids, cu_seqlens, key_mask, k)
    if k.shape[2] == 0:
        # No key was rotated: the length is that of the earlier keys, if there are any.
        length = None if state is None else state.length
    return out, LinearState(*after, following, spec, map_names, learned, length, identity_in_state(added))


def _as_function(feature_map: FeatureMap, role: str) -> FeatureMap:
    if callable(feature_map):
        return feature_map

    def mapped(x: Tensor) -> Tensor:
        x = x.to(working_dtype(x))
        return map_features(x, feature_map, row_shift(x, feature_map) if role == "q" else None)

    return mapped


def _mapped(x: Tensor, feature_map: FeatureMap, name: str, *ignored: Tensor | None) -> tuple[Tensor, FeatureMapName]:
    """Return the tensor for the kernel, and the map that the kernel applies. A function is applied here.

    `ignored` are masks of tokens that do not reach the output. Kernels skip these tokens themselves.
    """
    if not callable(feature_map):
        return x, feature_map
    for mask in ignored:
        # A function of such tokens can be infinite, and 0 times its derivative is then NaN.
        x = x if mask is None else x.masked_fill(mask, 0.0)
    features = feature_map(x)
    if (
        not isinstance(features, Tensor)
        or features.shape[:3] != x.shape[:3]
        or features.dim() != 4
        or not features.is_floating_point()
    ):
        raise RopewalkError(
            asked="linear_attention(feature_map=...)",
            expected=f"features of {name}, floating-point [{', '.join(map(str, x.shape[:3]))}, any width]",
            got=f"{features.dtype} {list(features.shape)}" if isinstance(features, Tensor) else shown(features),
            do="a feature map must change the last dimension only",
        )
    # The working dtype, whatever the function returns: features of q and k and their cos and sin have one dtype.
    return features.to(working_dtype(x)), "identity"


def _with_encoded_heads(
    encoding: Encoding, q: Tensor, k: Tensor, v: Tensor, placement: Placement
) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k and v after the hook `encode_heads`, in their dtype."""
    ids, k_ids = placement.positions, placement.k_positions
    for name, numbers, x in (("positions", ids, q), ("k_positions", k_ids, k)):
        if numbers is not None:
            check_positions(numbers, x, asked=f"linear_attention({name}=...)", axes=rope_axes(encoding))
    if placement.offset is not None:
        ids = range_positions(q.shape[2], placement.offset, q.device)
    encoded_q, encoded_k, encoded_v = (x.to(v.dtype) for x in encoding.encode_heads(q, k, v, ids, k_positions=k_ids))
    return encoded_q, encoded_k, encoded_v


def _placement(
    uses_positions: bool,
    q: Tensor,
    k: Tensor,
    positions: Tensor | None,
    k_positions: Tensor | None,
    cu_seqlens: Tensor | None,
    start: int | Tensor,
    length: int | Tensor | None,
) -> Placement:
    """Return the positions of q and k as arguments of rope(q, k, ...)."""
    explicit = positions is not None or k_positions is not None
    queries, keys = q.shape[2], k.shape[2]
    if not uses_positions:
        if explicit:
            raise RopewalkError(
                asked="linear_attention(positions=...)",
                expected="positions only together with a rope",
                got="positions and no rope",
                do="pass rope=RotaryEmbedding(number of features), or omit positions",
            )
        return Placement()
    if explicit:
        if positions is None and k_positions is not None and k_positions.shape[-1:] == (keys,) and queries <= keys:
            # Queries are the last tokens of the keys.
            positions = k_positions[..., keys - queries :]
        return Placement(positions, k_positions, length=length)
    if cu_seqlens is not None:
        return Placement(packed_positions(cu_seqlens, keys, start), length=length)
    if queries == keys and not (isinstance(start, Tensor) and start.is_floating_point()):
        # None for 0: a rule that depends on the length then uses the number of tokens as the length.
        return Placement(offset=None if isinstance(start, int) and start == 0 else start, length=length)
    if queries > keys:
        raise RopewalkError(
            asked="linear_attention(q, k, v, rope=...)",
            expected="positions, because there are more queries than keys",
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
    placement: Placement,
) -> tuple[tuple[Side, Side], Layout]:
    """Return queries and keys with their cos and sin, and the layout of their features."""
    if rope is None:
        return (Side(q, names[0]), Side(k, names[1])), Layout(False, 0, -2)
    if rope.spec.head_dim != q.shape[-1]:
        raise RopewalkError(
            asked="linear_attention(..., rope=...)",
            expected=f"a rope with head_dim={q.shape[-1]}, the number of features",
            got=f"head_dim={rope.spec.head_dim}",
            do="the rotation is applied after the feature map: create the rope with the number of features",
        )
    parts = rope.parts(q, k, placement)
    q_side, k_side = Side(q, names[0], None, parts[0].tables), Side(k, names[1], None, parts[-1].tables)
    return (q_side, k_side), rope.layout


def _next(
    start: int | Tensor, key_ids: Tensor | None, cu_seqlens: Tensor | None, key_mask: Tensor | None, k: Tensor
) -> int | Tensor:
    """Return the position after the last visible key, or `start` if there is none.

    `key_ids` are the positions of the keys if the caller passed them.
    """
    keys = k.shape[2]
    if key_ids is not None and not key_ids.is_floating_point():
        key_ids = key_ids.to(torch.int64)  # the last position + 1 must not overflow
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
        # Entry i is the last visible token before token i. Entry 0 is -1, because the first sequence can be empty.
        before = torch.cat([new_full(seen, (1,), -1), seen]).cummax(0).values
        begins, last = cu_seqlens[:-1], before[cu_seqlens[1:]]
        ids = packed_positions(cu_seqlens, keys, start) if key_ids is None else key_ids
        ids = ids.reshape(1, -1).expand(len(last), -1)
    after = ids.gather(-1, last.clamp_min(0).unsqueeze(-1)).squeeze(-1) + 1
    return torch.where(last >= begins, after, start)


def _check_tensors(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> None:
    """Raise unless q, k and v match each other."""
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
            do="cast or move them; sums are float32 for every dtype except float64",
        )


def _name_mismatch(q: Tensor, k: Tensor, v: Tensor, causal: bool, asked: str) -> None:
    """Raise an error that names the first dimension that does not match."""
    heads = "the layout is [batch, heads, seq, dim]; for [batch, seq, heads, dim] call transpose(1, 2)"
    mismatches = [
        (len({len(q), len(k), len(v)}) > 1, "one batch", [len(q), len(k), len(v)], "pass all with the same batch"),
        (q.shape[3] != k.shape[3], "the same width of q and k", [q.shape[3], k.shape[3]], "project to the same width"),
        (k.shape[2] != v.shape[2], "one value per key", [k.shape[2], v.shape[2]], "pass k and v of one length"),
        (k.shape[1] != v.shape[1], "the same number of heads of k and v", [k.shape[1], v.shape[1]], heads),
        (k.shape[1] == 0 or q.shape[1] % max(k.shape[1], 1) > 0, "a number of heads of q that is a "
         "multiple of kv_heads, the heads of k", [q.shape[1], k.shape[1]], heads),
        (causal and q.shape[2] > k.shape[2], "no more queries than keys if causal", [q.shape[2], k.shape[2]],
         "causal queries are the last tokens of the keys; for attention to other keys pass causal=False"),
    ]  # fmt: skip
    for wrong, expected, sizes, do in mismatches:
        if wrong:
            shapes = f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}"
            raise RopewalkError(
                asked=f"{asked}(q, k, v)", expected=expected, got=f"{' and '.join(map(str, sizes))}: {shapes}", do=do
            )


def _check_packed(cu_seqlens: Tensor, q: Tensor, k: Tensor) -> None:
    """Raise unless `cu_seqlens` are cumulated lengths of the sequences in q and k."""
    asked = "linear_attention(cu_seqlens=...)"
    check_packed(cu_seqlens, q.shape[0], k.shape[2], q.device, asked=asked, at_least=2)
    if q.shape[2] != k.shape[2]:
        raise RopewalkError(
            asked=asked,
            expected="as many queries as keys",
            got=f"{q.shape[2]} queries and {k.shape[2]} keys",
            do="pass the queries of all packed tokens",
        )
