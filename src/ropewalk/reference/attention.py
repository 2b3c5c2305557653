"""Softmax attention, with four hooks for encodings: embed, encode_heads, rotate, bias."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ropewalk.errors import RopewalkError, require_count, require_flag, shown
from ropewalk.reference.arguments import checked_positions, require_float
from ropewalk.shapes import Float, Shaped

__all__ = ["Projections", "group_heads", "multi_head_attention", "require_bias", "require_qkv", "softmax_attention"]

Embed = Callable[[Tensor, Tensor], Tensor]
EncodeHeads = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
Rotate = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
Bias = Callable[[Tensor, Tensor], Tensor]


def softmax_attention(
    q: Float[Tensor, "batch heads q_seq dim"],
    k: Float[Tensor, "batch kv_heads k_seq dim"],
    v: Float[Tensor, "batch kv_heads k_seq v_dim"],
    *,
    causal: bool = False,
    bias: Float[Tensor, "*#any q_seq k_seq"] | None = None,
    scale: float | None = None,
) -> Float[Tensor, "batch heads q_seq v_dim"]:
    """Attention softmax(q k^T scale + bias) v (Vaswani et al., 1706.03762, eq. 1).

    Computed in float64 and rounded once to the dtype of q. Several query heads can share a key head. With `causal`,
    queries are the last tokens of the sequence: query i of Q attends to the keys up to K - Q + i.

    Args:
        q: Queries [batch, heads, q_seq, dim].
        k: Keys [batch, kv_heads, k_seq, dim]; heads is a multiple of kv_heads.
        v: Values [batch, kv_heads, k_seq, v_dim].
        causal: Whether later keys are masked.
        bias: Added to the scores: [q_seq, k_seq], [heads, q_seq, k_seq] or [batch, heads, q_seq, k_seq].
        scale: Factor on the scores. Default: 1/sqrt(dim).

    Returns:
        Tensor [batch, heads, q_seq, v_dim] in the dtype of q.

    Raises:
        RopewalkError: If shapes or dtypes do not match.

    >>> q = k = torch.zeros(1, 1, 2, 4)  # equal scores: the mean of the visible values
    >>> softmax_attention(q, k, torch.tensor([[[[1.0], [3.0]]]]), causal=True).flatten().tolist()
    [1.0, 2.0]
    """
    require_qkv(q, k, v, causal=causal, asked="softmax_attention")
    require_bias(bias, q, k, asked="softmax_attention")
    dtype, heads = q.dtype, q.shape[1]
    q, k, v = q.double(), group_heads(k, heads).double(), group_heads(v, heads).double()
    scores = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    scores = scores if bias is None else scores + bias
    if causal:
        scores = scores.masked_fill(~causal_mask(q.shape[-2], k.shape[-2], q.device), float("-inf"))
    return (torch.softmax(scores, dim=-1) @ v).to(dtype)


class Projections(NamedTuple):
    """The four matrices of an attention layer.

    Attributes:
        query: [heads * head_dim, dim].
        key: [kv_heads * head_dim, dim].
        value: [kv_heads * v_dim, dim].
        output: [dim, heads * v_dim].

    >>> Projections(*[torch.eye(4)] * 4).query.shape
    torch.Size([4, 4])
    """

    query: Float[Tensor, "heads_dim dim"]
    key: Float[Tensor, "kv_dim dim"]
    value: Float[Tensor, "kv_dim dim"]
    output: Float[Tensor, "dim heads_dim"]


def multi_head_attention(
    x: Float[Tensor, "batch seq dim"],
    weights: Projections,
    *,
    num_heads: int,
    num_kv_heads: int | None = None,
    positions: Shaped[Tensor, "*ids seq"] | None = None,
    causal: bool = False,
    embed: Embed | None = None,
    encode_heads: EncodeHeads | None = None,
    rotate: Rotate | None = None,
    bias: Bias | None = None,
) -> Float[Tensor, "batch seq dim"]:
    """Self-attention layer with any encoding. Values are never rotated. Hooks run in the order of the arguments.

    Args:
        x: Tokens [batch, seq, dim].
        weights: The four projections.
        num_heads: Number of query heads.
        num_kv_heads: Number of key heads. Default: num_heads.
        positions: Positions [seq] or [batch, seq]. Default: 0 .. seq-1.
        causal: Whether later tokens are masked.
        embed: embed(x, positions) returns changed tokens. It runs before the projections.
        encode_heads: encode_heads(q, k, v, positions) returns changed queries, keys and values
            [batch, heads, seq, head_dim].
        rotate: rotate(q, k, positions) returns changed queries and keys [batch, heads, seq, head_dim].
        bias: bias(positions, positions) is added to the scores.

    Returns:
        Tensor [batch, seq, dim] in the dtype of x.

    Raises:
        RopewalkError: If shapes or dtypes do not match.

    >>> x = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]])
    >>> eye = Projections(*[torch.eye(2)] * 4)
    >>> y = multi_head_attention(x, eye, num_heads=1, bias=lambda q, k: torch.full((2, 2), -9e9).tril(-1))
    >>> y[0, 1].tolist()  # the first token is masked for the second
    [0.0, 1.0]
    """
    asked = "multi_head_attention"
    heads = require_count(num_heads, asked=f"{asked}(num_heads=...)", do="pass the number of query heads")
    kv_heads = require_count(
        heads if num_kv_heads is None else num_kv_heads,
        asked=f"{asked}(num_kv_heads=...)",
        do="pass the number of key heads, or omit it",
    )
    if not isinstance(weights, Projections):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise RopewalkError(
            asked=f"{asked}(weights)",
            expected="Projections(query, key, value, output)",
            got=shown(weights),
            do="pass a ropewalk.reference.Projections",
        )
    require_float(x, asked=f"{asked}(x)", at_least_dims=3)
    rows = [weight.shape[0] for weight in weights[:3]]
    width = rows[0] // heads
    if rows != [heads * width, kv_heads * width, kv_heads * (rows[2] // kv_heads)] or x.dim() != 3:
        raise RopewalkError(
            asked=f"{asked}(num_heads={heads}, num_kv_heads={kv_heads})",
            expected="x [batch, seq, dim], and projections whose number of rows is a multiple of the heads",
            got=f"x {list(x.shape)}; {rows[0]} rows for queries, {rows[1]} for keys, {rows[2]} for values",
            do="pass projections with heads * head_dim rows",
        )
    positions = torch.arange(x.shape[1], device=x.device) if positions is None else positions
    checked_positions(positions, tuple(x.shape), asked=asked)
    dtype, x = x.dtype, x.double()
    x = x if embed is None else embed(x, positions)
    q, k, v = (x @ weight.double().T for weight in weights[:3])
    q, k, v = _split_heads(q, heads), _split_heads(k, kv_heads), _split_heads(v, kv_heads)
    if encode_heads is not None:
        q, k, v = encode_heads(q, k, v, positions)
    if rotate is not None:
        q, k = rotate(q, k, positions)
    added = None if bias is None else bias(positions, positions)
    y = softmax_attention(q, k, v, causal=causal, bias=added)
    return (y.transpose(1, 2).flatten(2) @ weights.output.double().T).to(dtype)


def _split_heads(x: Tensor, heads: int) -> Tensor:
    batch, seq, width = x.shape
    return x.view(batch, seq, heads, width // heads).transpose(1, 2)


def group_heads(x: Float[Tensor, "batch kv_heads seq dim"], heads: int) -> Float[Tensor, "batch heads seq dim"]:
    """Repeat each key head for the query heads that share it: heads 0,0,1,1 for four query heads and two key heads.

    Args:
        x: Keys or values [batch, kv_heads, seq, dim].
        heads: Number of query heads, a multiple of kv_heads.

    Returns:
        Tensor [batch, heads, seq, dim].

    >>> group_heads(torch.tensor([7.0, 8.0]).view(1, 2, 1, 1), 4).flatten().tolist()
    [7.0, 7.0, 8.0, 8.0]
    """
    return x.repeat_interleave(heads // x.shape[1], dim=1)


def causal_mask(queries: int, keys: int, device: torch.device) -> Tensor:
    """Mask [queries, keys], True where a query attends to a key. The queries are the last tokens of the sequence."""
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)


def require_bias(bias: Tensor | None, q: Tensor, k: Tensor, *, asked: str) -> None:
    """Raise if `bias` does not broadcast to the scores [batch, heads, q_seq, k_seq].

    >>> require_bias(None, torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3, 4), asked="a doctest")
    """
    if bias is None:
        return
    scores = (*q.shape[:3], k.shape[2])
    if not 2 <= bias.dim() <= 4 or any(b not in (1, s) for b, s in zip(bias.shape[::-1], scores[::-1], strict=False)):
        raise RopewalkError(
            asked=f"{asked}(bias=...)",
            expected=f"a bias that broadcasts to {list(scores)}: [q, k], [heads, q, k] or [batch, heads, q, k]",
            got=f"{list(bias.shape)}",
            do="check the number of heads",
        )


def require_qkv(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, asked: str) -> None:
    """Raise if the shapes of q, k and v do not match.

    >>> require_qkv(*[torch.zeros(1, 2, 3, 4)] * 3, causal=True, asked="a doctest")
    """
    require_flag(causal, asked=f"{asked}(causal=...)")
    for name, x in (("q", q), ("k", k), ("v", v)):
        require_float(x, asked=f"{asked}({name})", at_least_dims=4)
    fits = q.dim() == k.dim() == v.dim() == 4
    fits = fits and q.shape[0] == k.shape[0] and q.shape[3] == k.shape[3] and k.shape[:3] == v.shape[:3]
    if not fits or k.shape[1] == 0 or q.shape[1] % k.shape[1] or (causal and q.shape[2] > k.shape[2]):
        raise RopewalkError(
            asked=f"{asked}(q, k, v)",
            expected="q [batch, heads, q_seq, dim], k [batch, kv_heads, k_seq, dim], v [batch, kv_heads, k_seq, any]; "
            "heads a multiple of kv_heads; if causal, no more queries than keys",
            got=f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}",
            do="transpose to [batch, heads, seq, dim] and check the number of heads",
        )
