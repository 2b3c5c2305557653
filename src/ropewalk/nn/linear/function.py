"""Linear attention with RoPE, as a function of queries, keys and values."""

import itertools
from typing import Literal, Never, TypedDict, Unpack, overload

import torch
from torch import Tensor
from torch.nn import functional

from ropewalk.errors import RopewalkError, require_flag, shown
from ropewalk.kernels.constructors import arange, new_zeros
from ropewalk.kernels.linear.feature_maps import map_features, row_shift
from ropewalk.kernels.precision import working_dtype
from ropewalk.kernels.types import FeatureMap as NamedMap
from ropewalk.kernels.types import FeatureMapName, Layout, Side
from ropewalk.nn.encodings.base import Encoding, encodes_heads, identity_in_state
from ropewalk.nn.encodings.rotary import rope_axes, rope_for_linear, rope_in
from ropewalk.nn.encodings.some_heads import kind_of_bias
from ropewalk.nn.linear.arguments import check_packed_tensors, check_tensors
from ropewalk.nn.linear.feature_maps import FeatureMap, map_name, resolve_maps
from ropewalk.nn.linear.near_keys import EMPTY, readable, split_near, with_near
from ropewalk.nn.linear.repeated import call_again, call_first
from ropewalk.nn.linear.state import LinearState, check_length, checked_start, checked_state, join_states
from ropewalk.nn.linear.step import attach_step, find_step
from ropewalk.nn.linear.token_positions import (
    all_positions,
    first_position,
    next_position,
    placement_of,
    positions_of_keys,
)
from ropewalk.nn.linear.weighting import (
    Tokens,
    bias_for_linear,
    resolve_scale,
    resolve_weighting,
    slopes_on,
    total_decay,
)
from ropewalk.nn.local_heads import call_locally, dims_of_decay, dims_of_ids
from ropewalk.nn.position_checks import (
    can_read_values,
    check_key_mask,
    check_positions,
    warn_if_row_is_hidden,
)
from ropewalk.nn.positions import range_positions
from ropewalk.nn.rotary.call import Placement
from ropewalk.nn.rotary.embedding import RotaryEmbedding
from ropewalk.ops import require_backend
from ropewalk.ops.dtensors import is_dtensor
from ropewalk.ops.linear_attention import linear_attention as run
from ropewalk.signatures import checks_names, refuse_arguments

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
    decay: Tensor | None
    bias: Encoding | None
    normalize: bool
    scale: float | None
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
    *unnamed: Never,
    rope: RotaryEmbedding | Encoding | None = None,
    positions: Tensor | None = None,
    k_positions: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    key_mask: Tensor | None = None,
    feature_map: FeatureMap | tuple[FeatureMap, FeatureMap] = "elu",
    causal: bool = True,
    decay: Tensor | None = None,
    bias: Encoding | None = None,
    normalize: bool = True,
    scale: float | None = None,
    state: LinearState | None = None,
    return_state: bool = False,
    length: int | Tensor | None = None,
    backend: str | None = None,
    **unknown: Never,
) -> Tensor | tuple[Tensor, LinearState]:
    """Linear attention with RoPE, decay and bias, in time proportional to the number of tokens.

    out_m = sum_n w_mn [(R_m phi(q_m)) . (R_n phi(k_n))] v_n / sum_n w_mn phi(q_m) . phi(k_n) (RoFormer, 2104.09864,
    eq. 19, with weights w). The numerator is rotated and the denominator is not, so the denominator of positive
    features stays positive. The factors of the values can be negative, and need not sum to 1. Without `rope` this is
    the linear attention of Katharopoulos et al., 2006.16236. Everything is computed in float32 (float64 for float64)
    and rounded once.

    w_mn is 1, or exp(g_{n+1} + ... + g_m) with a decay g, or exp(bias_mn). A hidden key decays the sums like any other,
    except after the last visible key. If the visible keys of a query have no features, which is possible with relu, or
    if their weights underflow, the output and its gradient are 0.

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
        decay: Logarithm g <= 0 of the factor by which the sums decay per token: [kv_heads], [heads], which needs sums
            for each query head, or [batch, kv_heads or heads, keys]. Its first number decays the state. If attention is
            not causal, one number per head, and w_mn = exp(g |m - n|).
        bias: An encoding whose bias is linear in the distance, as ALiBi's, or constant beyond a window of distances, as
            T5's. It uses the positions: ALiBi requires that they do not decrease, T5 that they grow by at least 1 per
            token.
        normalize: Whether to divide by the denominator. RetNet (2307.08621) and lightning attention do not.
        scale: Factor on the output, only with normalize=False. Defaults to 1.
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
    >>> halved = torch.tensor([0.5]).log()  # weights 1/4, 1/2 and 1: (1/4 + 3/2 + 5) / (7/4)
    >>> round(linear_attention(q, k, v, decay=halved)[..., 2, 0].item(), 4)
    3.8571
    """
    if unnamed or unknown:
        refuse_arguments("linear_attention", linear_attention, unnamed, unknown)
    if is_dtensor(q) or is_dtensor(k) or is_dtensor(v):
        check_tensors(q, k, v, causal)
        axes = rope_axes(rope)
        return call_locally(
            linear_attention,
            q,
            k,
            v,
            asked="linear_attention",
            encodings={"rope": rope, "bias": bias},
            tensors={
                "positions": (positions, dims_of_ids(positions, axes)),
                "k_positions": (k_positions, dims_of_ids(k_positions, axes)),
                "key_mask": (key_mask, ("batch", "seq")),
                "cu_seqlens": (cu_seqlens, ("sequences",)),
                "decay": (decay, dims_of_decay(decay)),
                "length": (length, ("batch",) * (length.dim() if isinstance(length, Tensor) else 0)),
            },
            reads=feature_map if isinstance(feature_map, tuple) else (feature_map,),
            feature_map=feature_map,
            causal=causal,
            normalize=normalize,
            scale=scale,
            state=state,
            return_state=return_state,
            backend=backend,
        )
    per_token = decay is not None and isinstance(decay, Tensor) and decay.dim() == 3
    arguments = rope, bias, "per token" if per_token else decay, feature_map, normalize, scale
    usual = positions is None and k_positions is None and cu_seqlens is None and key_mask is None and length is None
    usual = usual and causal is True and backend is None and not torch.compiler.is_compiling()
    if state is not None and usual:
        step = find_step(state, arguments)
        if step is not None and not (decay is not None and decay.requires_grad and torch.is_grad_enabled()):
            result = step(q, k, v, state, decay if per_token else None)
            if result is not None:
                return result if require_flag(return_state, asked="linear_attention(return_state=...)") else result[0]
    repeats = usual and state is None and return_state is False and decay is None and bias is None
    if repeats:
        out = call_again(rope, q, k, v, (feature_map, normalize, scale))
        if out is not None:
            return out
    check_tensors(q, k, v, causal)
    require_flag(return_state, asked="linear_attention(return_state=...)")
    _check_hooks(rope, bias)
    rotation = rope_for_linear(rope, "linear_attention(rope=...)")
    added = rope if isinstance(rope, Encoding) and encodes_heads(rope) else None
    if rotation is None and added is None and isinstance(rope, Encoding) and rope.name != "none":
        raise RopewalkError(
            asked=f"linear_attention(rope=...) with {rope.name}",
            expected="an encoding that changes q and k, or None",
            got=f"{rope.name}, which changes tokens before they are projected",
            do="call its embed(x, positions) before the first layer of the model, and omit rope",
        )
    distances = bias_for_linear(bias, "linear_attention(bias=...)")
    factor = resolve_scale(normalize, scale, "linear_attention")
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
        check_packed_tensors(cu_seqlens, q, k)
        # Some of the accepted dtypes do not support comparison or subtraction.
        cu_seqlens = cu_seqlens.to(torch.int64)
    if key_mask is not None:
        check_key_mask(key_mask, (k.shape[0], k.shape[2]), k.device, asked="linear_attention(key_mask=...)")
        # Part of a stream may be padding only.
        if state is None and not return_state:
            warn_if_row_is_hidden(key_mask, asked="linear_attention(key_mask=...)")
    rows = k.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1
    start = checked_start(state, rows, asked="linear_attention(state=...)")
    if (decay is not None or distances is not None) and not causal and (state is not None or return_state):
        raise RopewalkError(
            asked="linear_attention(causal=False, state=...) with a decay or a bias",
            expected="no state: it has the weights of keys before a query",
            got="a state" if state is not None else "return_state=True",
            do="omit the state, or pass causal=True",
        )
    key_ids = positions_of_keys(positions, k_positions, q, k, rope_axes(rope), causal) if distances else None
    tokens = Tokens(
        k.shape[0],
        q.shape[1],
        k.shape[1],
        q.shape[2],
        k.shape[2],
        k.device,
        causal,
        start,
        key_ids,
        key_mask,
        cu_seqlens,
        state is not None,
    )
    weighting = resolve_weighting(decay, distances, tokens, normalize=normalize, scale=factor, asked="linear_attention")
    kind = "decay" if decay is not None else kind_of_bias(bias) if distances is not None else None
    near = None if weighting.band is None else max(0, weighting.band.shape[1] // 2 - 1)
    if near is not None and cu_seqlens is not None and (state is not None or return_state):
        options = LinearOptions(
            rope=rope,
            feature_map=feature_map,
            bias=bias,
            normalize=normalize,
            scale=scale,
            length=length,
            backend=backend,
        )
        per_token = positions, k_positions, key_mask
        return _each_sequence((q, k, v), cu_seqlens, state, per_token, options, return_state)
    rotates = rotation is not None or added is not None
    explicit = (positions, k_positions) if rotates or distances is None else (None, None)
    placement = placement_of(rotates, q, k, *explicit, cu_seqlens, start, length)
    if added is not None:
        q, k, v = _with_encoded_heads(added, q, k, v, placement)
    spec = None if rotation is None else rotation.spec
    learned = rotation is not None and rotation.log_scale is not None
    map_names = map_name(maps[0]), map_name(maps[1])
    if isinstance(maps[0], str) != isinstance(maps[1], str):
        # If one map is a function, the features of the other side are computed here too.
        maps = _as_function(maps[0], "q", normalize), _as_function(maps[1], "k", normalize)
    padding = None
    if cu_seqlens is not None and callable(maps[0]):
        padding = (arange(k.shape[2], device=k.device) >= cu_seqlens[-1])[:, None]
    hidden = None if key_mask is None else ~key_mask[:, None, :, None]
    keys, k_name = _mapped(k, maps[1], "k", padding, hidden)
    if q.shape[2] or not callable(maps[0]):
        queries, q_name = _mapped(q, maps[0], "q", padding)
    else:
        # A function may not support a tensor without tokens.
        queries, q_name = q[..., :1].to(keys.dtype).expand(*q.shape[:3], keys.shape[-1]), "identity"
    if queries.shape[-1] != keys.shape[-1]:
        raise RopewalkError(
            asked="linear_attention(feature_map=...)",
            expected="the same number of features for queries and keys",
            got=f"{queries.shape[-1]} and {keys.shape[-1]}",
            do="use two maps with the same number of features",
        )
    before = checked_state(
        state,
        (rows, weighting.state_heads(k.shape[1]), keys.shape[-1], v.shape[-1]),
        v,
        spec=spec,
        learned=learned,
        feature_map=map_names,
        encoding=identity_in_state(added),
        weighting=kind,
        near=near,
        asked="linear_attention(state=...)",
    )
    if state is not None and usual and q.shape[2] == k.shape[2] == 1:
        # A state without a `Step`, for example one that was loaded: the same numbers as with one.
        attach_step(state, arguments, rotation, map_names, weighting, v.device)
        step = find_step(state, arguments)
        needs_graph = decay is not None and decay.requires_grad and torch.is_grad_enabled()
        result = None if step is None or needs_graph else step(q, k, v, state, decay if per_token else None)
        if result is not None:
            return result if return_state else result[0]
    fill = NamedMap[k_name].zero
    if hidden is not None:
        # The input that each map sends to 0: a hidden key adds nothing to numerator and denominator.
        keys, v = keys.masked_fill(hidden, fill), v.masked_fill(hidden, 0.0)
    ids = None
    if near is not None and (state is not None or return_state):
        ids = all_positions(key_ids, start, k)
        if state is not None and state.near is not None:
            keys, v, ids = with_near(state.near, keys, v, ids)
            all_ids = readable(ids)
            weighting = weighting._replace(positions=all_ids)
            if rotates:
                q_ids = all_ids[..., -q.shape[2] :] if q.shape[2] else all_ids[..., :0]
                placement = Placement(q_ids, all_ids, length=length)
        if key_mask is not None:
            earlier_slots = ids.shape[-1] - k.shape[2]
            ids = ids.masked_fill(~functional.pad(key_mask, (earlier_slots, 0), value=True), EMPTY)
    sides, layout = _sides(rotation, queries, keys, (q_name, k_name), placement)
    if rotation is not None and rotation.spec.varies and length is None and k.shape[2]:
        length = k.shape[2]
    check_length(state, spec, length, "linear_attention(state=..., length=...)")
    values, first = v, before
    decay_per_token = weighting.decay
    earlier = keys.shape[2] - q.shape[2] if causal and near is None and q.shape[2] else 0
    if earlier:
        # Keys before the first query are summed first. The other keys and the queries are then one sequence.
        no_queries, head = sides[0]._replace(x=queries[:, :, :0]), sides[1].part(0, earlier)
        part = weighting.part(0, earlier)
        _, first = run(no_queries, head, v[:, :, :earlier], before, layout, causal=causal, weighting=part)
        sides, values = (sides[0], sides[1].part(earlier, keys.shape[2])), v[:, :, earlier:]
        weighting = weighting.part(earlier, keys.shape[2])
    if repeats and not earlier:
        out = call_first(rope, rotation, sides, v, (feature_map, normalize, scale), layout, weighting)
        if out is not None:
            return out
    options = {"causal": causal, "cu_seqlens": cu_seqlens, "weighting": weighting, "backend": backend}
    out, after = run(*sides, values, first, layout, **options)
    if not return_state:
        return out
    last = None
    if near is not None and ids is not None:
        ends = None
        if key_mask is not None and k.shape[2]:
            visible = torch.where(key_mask, arange(1, k.shape[2] + 1, device=k.device), 0)
            ends = keys.shape[2] - k.shape[2] + visible.amax(-1)
        far_keys, far_values, last = split_near(keys, v, ids, near, fill, ends)
        far = sides[1].part(0, far_keys.shape[2])._replace(x=far_keys)
        _, after = run(sides[0]._replace(x=queries[:, :, :0]), far, far_values, before, layout, causal=False)
    passed_ids = positions if k_positions is None else k_positions
    # A token has several positions where there are several axes. The state then counts tokens.
    passed_ids = passed_ids if spec is None or spec.axes is None else None
    following = next_position(start, passed_ids, cu_seqlens, key_mask, k)
    if k.shape[2] == 0:
        # No key was rotated: the length is that of the earlier keys, if there are any.
        length = None if state is None else state.length
    encoding = identity_in_state(added)
    # Contiguous: a view would keep the sums of all chunks alive.
    sums = after.above.contiguous(), after.below.contiguous()
    begin = first_position(state, start, passed_ids, cu_seqlens, key_mask, k)
    slopes = None if distances is None or distances.slopes is None else slopes_on(distances.slopes, k.device)
    total = None
    if kind == "decay" and decay_per_token is not None and (state is None or state.log_decay is not None):
        total = total_decay(decay_per_token, k.shape[2], rows, cu_seqlens, sums[0].dtype)
        total = total if state is None or state.log_decay is None else state.log_decay + total
    new_state = LinearState(
        *sums, following, spec, map_names, learned, length, encoding, kind, last, begin, total, slopes
    )
    if usual:
        attach_step(new_state, arguments, rotation, map_names, weighting, v.device)
    return out, new_state


def _check_hooks(rope: object, bias: object) -> None:
    """Raise if an encoding has a hook that would not be called, or if `bias` has none."""
    if isinstance(rope, Encoding) and type(rope).bias is not Encoding.bias and rope is not bias:
        raise RopewalkError(
            asked=f"linear_attention(rope=...) with {rope.name}",
            expected="an encoding that changes q and k",
            got=f"{rope.name}, which adds a bias to the score of each query and key",
            do="pass it as bias=" + ("" if rope_in(rope) is None else ", and as rope= for its rotation"),
        )
    if isinstance(bias, Encoding) and {type(bias).bias, type(bias).distance_bias} == {
        Encoding.bias,
        Encoding.distance_bias,
    }:
        raise RopewalkError(
            asked=f"linear_attention(bias=...) with {bias.name}",
            expected="an encoding with a bias, such as ALiBi or T5",
            got=f"{bias.name}, which has none",
            do="pass an encoding that changes q and k as rope=",
        )


def _each_sequence(
    tensors: tuple[Tensor, Tensor, Tensor],
    cu_seqlens: Tensor,
    state: LinearState | None,
    per_token: tuple[Tensor | None, Tensor | None, Tensor | None],
    options: LinearOptions,
    return_state: bool,
) -> Tensor | tuple[Tensor, LinearState]:
    """Compute packed sequences one after the other, each with its own near keys."""
    if not can_read_values(cu_seqlens):
        raise RopewalkError(
            asked="linear_attention(cu_seqlens=..., state=..., bias=...)",
            expected="ends of packed sequences on the CPU and outside a graph: each sequence has its own near keys",
            got=f"cu_seqlens on {cu_seqlens.device}",
            do="pass cu_seqlens.cpu() for tensors on the CPU, or pad the sequences and pass key_mask",
        )
    outputs: list[Tensor] = []
    states: list[LinearState] = []
    ends = cu_seqlens.tolist()
    for row, (start, stop) in enumerate(itertools.pairwise(ends)):
        q, k, v = (x[:, :, start:stop] for x in tensors)
        ids, k_ids, mask = (None if x is None else x[..., start:stop] for x in per_token)
        options |= LinearOptions(positions=ids, k_positions=k_ids, key_mask=mask)
        options["state"] = None if state is None else state.reorder(arange(row, row + 1, device=q.device))
        out, after = linear_attention(q, k, v, return_state=True, **options)
        outputs.append(out)
        states.append(after)
    q, _, v = tensors
    outputs.append(new_zeros(v, *q.shape[:2], max(0, q.shape[2] - ends[-1]), v.shape[-1]))
    whole = torch.cat(outputs, dim=2)
    return (whole, join_states(states)) if return_state else whole


def _as_function(feature_map: FeatureMap, role: str, normalize: bool) -> FeatureMap:
    if callable(feature_map):
        return feature_map

    def mapped(x: Tensor) -> Tensor:
        x = x.to(working_dtype(x))
        return map_features(x, feature_map, row_shift(x, feature_map) if role == "q" and normalize else None)

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
