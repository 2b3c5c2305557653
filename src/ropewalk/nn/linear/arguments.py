"""What callers of linear attention may give, checked before any work is done."""

from typing import Any, NoReturn

import torch
from torch import Tensor

from ropewalk.errors import RopewalkError, require_flag, shown
from ropewalk.nn.encodings.base import Encoding, check_as, may_look
from ropewalk.nn.rotary.checks import check_ends, check_ids
from ropewalk.nn.rotary.embedding import RotaryEmbedding
from ropewalk.reference.attention import require_qkv

__all__ = ["check_mask", "check_packed", "check_tensors", "rope_for_linear"]

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def rope_for_linear(encoding: Any, asked: str) -> RotaryEmbedding | None:
    """The rotation of an encoding, or None where it has none; an encoding with a bias is refused, with the reason.

    >>> rope_for_linear(None, "a doctest") is None
    True
    """
    if encoding is None or isinstance(encoding, RotaryEmbedding):
        rope = encoding
    elif isinstance(encoding, Encoding):
        kind, rope = type(encoding), getattr(encoding, "rope", None)
        if not encoding.linear or (kind.bias is not Encoding.bias):
            _refuse_bias(encoding, asked)
        if rope is None and kind.rotate is not Encoding.rotate:
            raise RopewalkError(
                asked=asked,
                expected="an encoding that turns features by a RotaryEmbedding, its `rope`",
                got=f"{kind.__name__}, with a rotate of its own",
                do="give it a `rope`, or turn the features in a feature map",
            )
    else:
        raise RopewalkError(
            asked=asked,
            expected="a RotaryEmbedding, an Encoding, or None",
            got=shown(encoding),
            do='make one: RotaryEmbedding(head_dim), or encoding("rope", dim=..., num_heads=...)',
        )
    if rope is not None and rope.seq_dim != -2:
        raise RopewalkError(
            asked=asked,
            expected="a RotaryEmbedding with seq_dim=-2, for [batch, heads, seq, dim]",
            got=f"seq_dim={rope.seq_dim}",
            do="make it with seq_dim=-2; features are turned in that layout",
        )
    if rope is not None:
        _check_factors(rope, asked)
    return rope


def _check_factors(rope: RotaryEmbedding, asked: str) -> None:
    """Refuses factors on cos and sin: softmax takes them into its scores, here they would multiply the output."""
    spec = rope.spec
    lengths = (None, 1 << 30) if spec.varies else (None,)
    if spec.query_temperature is None and all(spec.amplitude(length) == 1 for length in lengths):
        return
    raise RopewalkError(
        asked=asked,
        expected="a rotation alone: an amplitude of 1 and no query_temperature",
        got=f"{spec}",
        do="a factor above the line alone would scale the outputs: make the spec without it, with attention_factor=1.0 "
        "for Yarn and LongRope",
    )


def _refuse_bias(encoding: Encoding, asked: str) -> NoReturn:
    raise RopewalkError(
        asked=f"{asked} with {encoding.name}",
        expected="an encoding that acts on each token alone: none, an embedding, or a rotation",
        got=f"{encoding.name}, which adds a number to the score of each query and key. Its exponential P[i, j] stands "
        "inside the sum over keys, sum_j (phi(q_i) . phi(k_j)) P[i, j] v_j, and differs from query to query: no sum "
        "over keys can be taken once for all of them, which is what makes linear attention linear",
        do="use rope, xpos or an embedding, or softmax Attention. (Where P is a product of a part for i and one for j "
        "it can be taken: causal ALiBi, exp(-m (i - j)), would be a decay of the sums; no kernel here has one)",
    )


def check_tensors(q: Any, k: Any, v: Any, causal: Any) -> None:
    """Refuses q, k, v that do not belong together.

    >>> check_tensors(*[torch.zeros(1, 2, 3, 4)] * 3, True)
    """
    asked = "linear_attention"
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not (isinstance(x, Tensor) and x.dtype in _DTYPES):
            raise RopewalkError(
                asked=f"{asked}({name})",
                expected="a tensor of float32, float64, bfloat16 or float16",
                got=f"{x.dtype}" if isinstance(x, Tensor) else shown(x),
                do=f"cast {name}, [batch, heads, seq, dim]" if isinstance(x, Tensor) else f"pass {name} as a tensor",
            )
    require_flag(causal, asked=f"{asked}(causal=...)")
    if q.dim() == k.dim() == v.dim() == 4:
        _name_mismatch(q, k, v, causal, asked)
    require_qkv(q, k, v, causal=causal, asked=asked)
    if not q.dtype == k.dtype == v.dtype or not q.device == k.device == v.device:
        raise RopewalkError(
            asked=f"{asked}(q, k, v)",
            expected="one dtype, on one device",
            got=", ".join(f"{x.dtype} on {x.device}" for x in (q, k, v)),
            do="cast or move them; sums are float32 whatever the dtype is",
        )


def _name_mismatch(q: Tensor, k: Tensor, v: Tensor, causal: bool, asked: str) -> None:
    """Says which dimension does not fit, where the number of dimensions does."""
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


def check_mask(key_mask: Any, k: Tensor) -> None:
    """Refuses what does not say of each key whether it may be seen.

    >>> check_mask(torch.ones(1, 3, dtype=torch.bool), torch.zeros(1, 2, 3, 4))
    """
    shape = (k.shape[0], k.shape[2])
    fits = isinstance(key_mask, Tensor) and key_mask.dtype == torch.bool and tuple(key_mask.shape) == shape
    if not fits or key_mask.device != k.device:
        got = f"{key_mask.dtype} {list(key_mask.shape)} on {key_mask.device}" if isinstance(key_mask, Tensor) else None
        raise RopewalkError(
            asked="linear_attention(key_mask=...)",
            expected=f"a bool tensor {list(shape)} on {k.device}, True where a key may be seen",
            got=got or shown(key_mask),
            do="True is for tokens and False for padding",
        )


def check_packed(cu_seqlens: Any, q: Tensor, k: Tensor) -> None:
    """Refuses ends of sequences that q and k do not have.

    >>> check_packed(torch.tensor([0, 2, 3]), torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3, 4))
    """
    asked = "linear_attention(cu_seqlens=...)"
    check_as(asked, check_ids, cu_seqlens, name="cu_seqlens", shape="[sequences + 1]", dims=(1,), whole=True)
    if q.shape[0] != 1 or q.shape[2] != k.shape[2] or len(cu_seqlens) < 2 or cu_seqlens.device != q.device:
        raise RopewalkError(
            asked=asked,
            expected=f"a batch of 1 with as many queries as keys, and at least two ends, on {q.device}",
            got=f"q {list(q.shape)}, k {list(k.shape)}, {len(cu_seqlens)} ends on {cu_seqlens.device}",
            do="lay the sequences end to end along seq",
        )
    if may_look(cu_seqlens):
        check_as(asked, check_ends, cu_seqlens, q.shape[2])
