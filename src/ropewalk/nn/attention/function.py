"""attention: softmax attention with any encoding as a function of q, k and v, with the log-sum-exp of its scores."""

from typing import Literal, overload

from torch import Tensor

from ropewalk.errors import RopewalkError, require_count, require_flag, require_positive
from ropewalk.kernels.constructors import arange
from ropewalk.nn.attention.scores import ScoreBias, attend, attend_packed, attend_with_lse
from ropewalk.nn.attention.visibility import Visibility
from ropewalk.nn.encodings.base import Encoding
from ropewalk.nn.encodings.bias import check_causal
from ropewalk.nn.encodings.rotary import as_encoding, check_encoding, rope_axes
from ropewalk.nn.local_heads import call_locally, dims_of_ids
from ropewalk.nn.memory_layout import check_strided
from ropewalk.nn.position_checks import (
    check_key_mask,
    check_packed,
    check_positions,
    described,
    warn_if_row_is_hidden,
)
from ropewalk.nn.positions import packed_positions
from ropewalk.nn.rotary.embedding import RotaryEmbedding
from ropewalk.ops.dtensors import is_dtensor
from ropewalk.signatures import checks_names

__all__ = ["attention", "check_heads", "checked_encoding", "checked_scale", "checked_window", "encode"]


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    encoding: Encoding | RotaryEmbedding | None = None,
    q_positions: Tensor | None = None,
    k_positions: Tensor | None = None,
    causal: bool = True,
    window: int | None = None,
    key_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    scale: float | None = None,
    return_lse: Literal[False] = False,
) -> Tensor: ...
@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    encoding: Encoding | RotaryEmbedding | None = None,
    q_positions: Tensor | None = None,
    k_positions: Tensor | None = None,
    causal: bool = True,
    window: int | None = None,
    key_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    scale: float | None = None,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...
@checks_names
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    encoding: Encoding | RotaryEmbedding | None = None,
    q_positions: Tensor | None = None,
    k_positions: Tensor | None = None,
    causal: bool = True,
    window: int | None = None,
    key_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    scale: float | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Softmax attention: softmax(q k^T scale + bias) v over the visible keys (Vaswani et al., 1706.03762, eq. 1).

    Encodings depend on positions. Causality and windows depend on the index of tokens: the queries are the last tokens
    of the sequence, so the index of query i is i + keys - queries.

    Args:
        q: Queries [batch, heads, queries, head_dim].
        k: Keys [batch, kv_heads, keys, head_dim]. heads is a multiple of kv_heads.
        v: Values [batch, kv_heads, keys, v_dim].
        encoding: Changes q, k and v, rotates q and k, or adds a bias to the scores, and can set another scale. None
            adds no position.
        q_positions: Positions of q [queries] or [batch, queries]. Defaults to those of the last keys. Required with an
            encoding if not causal and if there are more or fewer queries than keys.
        k_positions: Positions of k [keys] or [batch, keys]; [axes, keys] or [axes, batch, keys] if tokens have several
            axes. Defaults to 0 .. keys-1, in each packed sequence.
        causal: Hide the keys after a query.
        window: Number of keys that a query sees, itself included: 0 <= m - n < window; if not causal,
            |m - n| < window. None for all keys.
        key_mask: bool [batch, keys]. False hides a key from all queries.
        cu_seqlens: Cumulated lengths [sequences + 1] of sequences packed in a batch of 1. Each sequence only sees
            itself. Tokens past the last sequence are padding, and see no key.
        scale: Factor on the scores before a bias is added; None for that of the encoding, or 1/sqrt(head_dim).
        return_lse: Also return the log-sum-exp of the scores, with which outputs over parts of the keys are merged.

    Returns:
        Tensor [batch, heads, queries, v_dim]. With `return_lse` also float32 or float64 [batch, heads, queries]. A
        query without a visible key has 0 and -inf, without a gradient.

    Raises:
        RopewalkError: If a shape, dtype or device does not match, or if the encoding does not match the heads.

    >>> import torch
    >>> q = k = torch.zeros(1, 1, 3, 2)  # equal scores: the mean of the visible values
    >>> v = torch.tensor([[[[1.0], [3.0], [5.0]]]])
    >>> attention(q, k, v).flatten().tolist(), attention(q, k, v, window=2).flatten().tolist()
    ([1.0, 2.0, 3.0], [1.0, 2.0, 4.0])
    >>> attention(q, k, v, return_lse=True)[1].exp().round().flatten().tolist()
    [1.0, 2.0, 3.0]
    """
    check_heads(q, k, v, asked="attention")
    if is_dtensor(q) or is_dtensor(k) or is_dtensor(v):
        axes = rope_axes(encoding)
        return call_locally(
            attention,
            q,
            k,
            v,
            asked="attention",
            encodings={"encoding": encoding},
            tensors={
                "q_positions": (q_positions, dims_of_ids(q_positions, axes)),
                "k_positions": (k_positions, dims_of_ids(k_positions, axes)),
                "key_mask": (key_mask, ("batch", "seq")),
                "cu_seqlens": (cu_seqlens, ("sequences",)),
            },
            causal=causal,
            window=window,
            scale=scale,
            return_lse=return_lse,
        )
    causal = require_flag(causal, asked="attention(causal=...)")
    require_flag(return_lse, asked="attention(return_lse=...)")
    window = checked_window(window, asked="attention(window=...)")
    queries, width = q.shape[2:]
    keys = k.shape[2]
    added = checked_encoding(encoding, q, k, causal, asked="attention")
    if queries > keys and (causal or window is not None):
        raise RopewalkError(
            asked="attention(q, k, v, causal=True)" if causal else "attention(q, k, v, window=...)",
            expected="at most as many queries as keys: the queries are the last tokens of the sequence",
            got=f"{queries} queries and {keys} keys",
            do="pass the keys of all tokens up to the last query, or causal=False for the tokens of another sequence",
        )
    if cu_seqlens is not None:
        _check_packed(cu_seqlens, q, k)
    start = keys - queries if causal or window is not None else 0
    score_bias = None
    if added is not None:
        positions = _positions(q, k, q_positions, k_positions, start, cu_seqlens, rope_axes(added))
        q, k, v = encode(added, q, k, v, *positions)
        if type(added).bias is not Encoding.bias:
            score_bias = ScoreBias(added, *positions)
    else:
        for name, ids, x in (("q_positions", q_positions, q), ("k_positions", k_positions, k)):
            if ids is not None:
                check_positions(ids, x, asked=f"attention({name}=...)")
    if key_mask is not None:
        check_key_mask(key_mask, (k.shape[0], keys), k.device, asked="attention(key_mask=...)")
        # A part of the keys of a longer sequence can be padding only.
        if not return_lse:
            warn_if_row_is_hidden(key_mask, asked="attention(key_mask=...)")
        # Hidden values are still multiplied by 0, which is NaN if padding contains NaN or infinity.
        k, v = (x.masked_fill(~key_mask[:, None, :, None], 0) for x in (k, v))
    visibility = Visibility(causal, start or None, key_mask, window=window)
    factor = checked_scale(scale, added, width, asked="attention")
    if cu_seqlens is not None:
        packed = attend_packed(
            q, k, v, visibility, cu_seqlens, scale=factor, score_bias=score_bias, with_lse=return_lse
        )
        return packed if return_lse else packed[0]
    attends = attend_with_lse if return_lse else attend
    return attends(q, k, v, visibility, scale=factor, score_bias=score_bias)


def checked_window(window: int | None, *, asked: str) -> int | None:
    """Return `window`. Raise unless it is None or an integer of at least 1.

    >>> checked_window(4096, asked="a doctest")
    4096
    """
    if window is None:
        return None
    return require_count(window, asked=asked, do="pass the number of keys that a query sees, itself included, or None")


def check_heads(q: Tensor, k: Tensor, v: Tensor, *, asked: str) -> None:
    """Raise unless q, k and v are heads of one batch, dtype and device.

    >>> import torch
    >>> check_heads(*[torch.zeros(1, 2, 3, 4)] * 3, asked="a doctest")
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_strided(x, asked=f"{asked}({name})")
        if not isinstance(x, Tensor) or x.dim() != 4 or not x.is_floating_point():
            raise RopewalkError(
                asked=f"{asked}({name})",
                expected="floating-point heads [batch, heads, seq, head_dim]",
                got=described(x),
                do="split the heads, and put them before the sequence: x.unflatten(-1, (heads, -1)).transpose(1, 2)",
            )
    fits = q.shape[0] == k.shape[0] == v.shape[0] and k.shape[1:3] == v.shape[1:3] and q.shape[3] == k.shape[3]
    fits = fits and k.shape[1] > 0 and q.shape[1] % k.shape[1] == 0
    if not fits or not q.dtype == k.dtype == v.dtype or not q.device == k.device == v.device:
        raise RopewalkError(
            asked=f"{asked}(q, k, v)",
            expected="q [batch, heads, queries, dim], k [batch, kv_heads, keys, dim] and v [batch, kv_heads, keys, "
            "v_dim] of one dtype and device, heads a multiple of kv_heads",
            got="; ".join(described(x) for x in (q, k, v)),
            do="compare the shapes; transpose(1, 2) puts heads before the sequence",
        )


def encode(
    encoding: Encoding, q: Tensor, k: Tensor, v: Tensor, q_positions: Tensor, k_positions: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k and v in their dtype after the hooks `encode_heads` and `rotate` of an encoding.

    Args:
        encoding: The encoding.
        q: Queries.
        k: Keys.
        v: Values.
        q_positions: Positions of the queries.
        k_positions: Positions of the keys.

    >>> import torch
    >>> x, ids = torch.ones(1, 1, 2, 4), torch.arange(2)
    >>> encode(Encoding(), x, x, x, ids, ids)[0] is x
    True
    """
    dtype = v.dtype
    q, k, v = encoding.encode_heads(q, k, v, q_positions, k_positions=k_positions)
    q, k = encoding.rotate(q, k, q_positions, k_positions=k_positions)
    return q.to(dtype), k.to(dtype), v.to(dtype)


def checked_scale(scale: float | None, encoding: Encoding | None, width: int, *, asked: str) -> float:
    """Return the factor on the scores: `scale`, or that of the encoding, or 1/sqrt(width).

    >>> checked_scale(None, None, 4, asked="a doctest")
    0.5
    """
    if scale is not None:
        return require_positive(scale, asked=f"{asked}(scale=...)", do="pass a number above 0, or omit it")
    factor = None if encoding is None else encoding.scale
    return width**-0.5 if factor is None else factor


def checked_encoding(
    encoding: Encoding | RotaryEmbedding | None, q: Tensor, k: Tensor, causal: bool, *, asked: str
) -> Encoding | None:
    """Return an encoding that changes heads or adds a bias, or None.

    Args:
        encoding: An encoding, a rotation, or None.
        q: Queries.
        k: Keys.
        causal: Whether attention is causal.
        asked: The function, for errors.

    Raises:
        RopewalkError: If it does not match the heads, or changes tokens only.

    >>> checked_encoding(None, None, None, True, asked="a doctest") is None
    True
    """
    if encoding is None:
        return None
    check_encoding(encoding, q.shape[3], q.shape[1], k.shape[1], layer=asked)
    check_causal(encoding, causal, layer=asked)
    if isinstance(encoding, Encoding) and encoding.only_embeds:
        raise RopewalkError(
            asked=f"{asked}(encoding=...) with {encoding.name}",
            expected="an encoding that changes q and k or adds a bias to the scores, or None",
            got=f"{encoding.name}, which changes tokens before they are projected",
            do="call its embed(x, positions) before the first layer of the model, and omit encoding",
        )
    return as_encoding(encoding)


def _positions(
    q: Tensor,
    k: Tensor,
    q_positions: Tensor | None,
    k_positions: Tensor | None,
    start: int,
    cu_seqlens: Tensor | None,
    axes: int,
) -> tuple[Tensor, Tensor]:
    """Return the positions of q and k. Those of q default to those of the last keys, if order relates both."""
    if q_positions is None and start + q.shape[2] != k.shape[2]:
        raise RopewalkError(
            asked="attention(q, k, v, causal=False, encoding=...)",
            expected="q_positions=: without causality nothing relates the queries to the keys",
            got=f"{q.shape[2]} queries, {k.shape[2]} keys, and no q_positions",
            do="pass q_positions= and k_positions=",
        )
    if k_positions is None and axes > 1:
        raise RopewalkError(
            asked="attention(encoding=...) with a rope over several axes",
            expected=f"k_positions [{axes}, keys] or [{axes}, batch, keys]",
            got="no positions",
            do="compute them with ropewalk.positions; for text, text_positions",
        )
    if k_positions is None:
        keys = k.shape[2]
        k_positions = arange(keys, device=k.device) if cu_seqlens is None else packed_positions(cu_seqlens, keys)
    else:
        check_positions(k_positions, k, asked="attention(k_positions=...)", axes=axes)
    if q_positions is None:
        q_positions = k_positions[..., start:]
    else:
        check_positions(q_positions, q, asked="attention(q_positions=...)", axes=axes)
    return q_positions, k_positions


def _check_packed(cu_seqlens: Tensor, q: Tensor, k: Tensor) -> None:
    asked = "attention(cu_seqlens=...)"
    check_packed(cu_seqlens, q.shape[0], k.shape[2], q.device, asked=asked)
    if q.shape[2] != k.shape[2]:
        raise RopewalkError(
            asked=asked,
            expected="as many queries as keys",
            got=f"{q.shape[2]} queries and {k.shape[2]} keys",
            do="pass the queries of all packed tokens",
        )
