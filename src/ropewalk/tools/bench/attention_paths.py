"""The paths of `ropewalk bench attention` and their correct results: softmax, our linear attention, and that of fla.

A maker returns the function that is timed, from q, k and v to the output of causal attention. It returns None if a
package is not installed.
"""

import functools
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from ropewalk.nn.encodings.bias import AlibiBias, T5Bias
from ropewalk.nn.linear.function import linear_attention
from ropewalk.nn.rotary.embedding import RotaryEmbedding
from ropewalk.reference import alibi_slopes, elu_plus_one, linear_attention_by_sum, softmax_attention, t5_bias
from ropewalk.spec.rope import RopeSpec
from ropewalk.tools.bench.peers import GPU_PEERS, installed

__all__ = ["PATHS", "Attend", "AttentionPath", "Truth", "checked_tokens"]

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
Maker = Callable[[int, int, torch.dtype, str], Attend | None]

# The number of tokens at the start, in the middle and at the end that are compared with the reference.
HEAD, MIDDLE, TAIL = 512, 64, 16


def softmax(seq: int, dim: int, dtype: torch.dtype, device: str) -> Attend:
    """Softmax attention of PyTorch, with the kernel that it chooses."""
    return lambda q, k, v: functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def linear(seq: int, dim: int, dtype: torch.dtype, device: str) -> Attend:
    """Our linear attention with the feature map elu(x) + 1."""
    return lambda q, k, v: linear_attention(q, k, v)


def linear_rope(seq: int, dim: int, dtype: torch.dtype, device: str) -> Attend:
    """Our linear attention with rotated features in the numerator: RoFormer, eq. 19."""
    rope = RotaryEmbedding(dim).to(device)
    return lambda q, k, v: linear_attention(q, k, v, rope=rope)


def linear_alibi(seq: int, dim: int, dtype: torch.dtype, device: str) -> Attend:
    """Our linear attention with RoPE, and with the bias of ALiBi as a decay."""
    rope = RotaryEmbedding(dim).to(device)
    return lambda q, k, v: linear_attention(q, k, v, rope=rope, bias=_alibi(q.shape[1]))


def linear_t5(seq: int, dim: int, dtype: torch.dtype, device: str) -> Attend:
    """Our linear attention with the bias of T5."""
    return lambda q, k, v: linear_attention(q, k, v, bias=_t5(q.shape[1], q.device))


@functools.cache
def _alibi(heads: int) -> AlibiBias:
    return AlibiBias(heads)


def _t5_numbers(heads: int) -> Tensor:
    """Numbers of T5's 32 buckets that differ per bucket and head, float64 [32, heads]."""
    return torch.outer(torch.arange(32.0).sin(), torch.arange(1.0, heads + 1)).double() / heads


@functools.cache
def _t5(heads: int, device: torch.device) -> T5Bias:
    module = T5Bias(heads, causal=True).requires_grad_(False)
    module.weight.copy_(_t5_numbers(heads))
    return module.to(device)


def _elu(x: Tensor) -> Tensor:
    return functional.elu(x) + 1


def _fla_chunks(device: str) -> Callable[..., tuple[Tensor, object]] | None:
    if device != "cuda" or not installed("fla"):
        return None
    return importlib.import_module("fla.ops.linear_attn").chunk_linear_attn


def fla_linear(seq: int, dim: int, dtype: torch.dtype, device: str) -> Attend | None:
    """The chunked kernel of flash-linear-attention with its denominator."""
    chunks = _fla_chunks(device)
    return chunks and (lambda q, k, v: chunks(_elu(q), _elu(k), v, scale=1.0, normalize=True)[0])


def fla_numerator(seq: int, dim: int, dtype: torch.dtype, device: str) -> Attend | None:
    """The same kernel without a denominator, which is less work than the others do."""
    chunks = _fla_chunks(device)
    return chunks and (lambda q, k, v: chunks(_elu(q), _elu(k), v, scale=1.0, normalize=False)[0])


def fla_rope(seq: int, dim: int, dtype: torch.dtype, device: str) -> Attend | None:
    """RoFormer, eq. 19, composed of functions of fla: rotation, kernel on rotated features, denominator."""
    chunks = _fla_chunks(device)
    rotation = GPU_PEERS["fla"].maker(range(seq), dim, dim, dtype, "interleaved") if chunks else None
    if chunks is None or rotation is None:
        return None
    divide = importlib.import_module("fla.ops.linear_attn.utils").normalize_with_z_state

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k = _elu(q), _elu(k)
        rotated = rotation(q.transpose(1, 2), k.transpose(1, 2))
        numerator = chunks(*(x.transpose(1, 2) for x in rotated), v, scale=1.0, normalize=False)[0]
        return divide(numerator, q, k, 1.0, None, False, None)[0]

    return attend


@dataclass(frozen=True)
class AttentionPath:
    """A path: its maker, the kind of attention, and whether its tensors are [batch, seq, heads, dim]."""

    maker: Maker
    kind: str
    tokens_first: bool = False


PATHS: dict[str, AttentionPath] = {
    "softmax (SDPA)": AttentionPath(softmax, "softmax"),
    "ropewalk linear": AttentionPath(linear, "linear"),
    "ropewalk linear + RoPE": AttentionPath(linear_rope, "rope"),
    "ropewalk linear + ALiBi": AttentionPath(linear_alibi, "alibi"),
    "ropewalk linear + T5": AttentionPath(linear_t5, "t5"),
    "fla linear": AttentionPath(fla_linear, "linear", tokens_first=True),
    "fla linear + RoPE": AttentionPath(fla_rope, "rope", tokens_first=True),
    "fla, no denominator": AttentionPath(fla_numerator, "numerator", tokens_first=True),
}


def _reference(kind: str, q: Tensor, k: Tensor, v: Tensor, head: int, heads: int) -> Tensor:
    """The result of one head of `heads`. Queries are the last keys."""
    if kind == "softmax":
        return softmax_attention(q, k, v, causal=True)
    ids = torch.arange(k.shape[2], device=q.device)
    places = ids[len(ids) - q.shape[2] :], ids
    if kind == "t5":
        bias = t5_bias(*places, _t5_numbers(heads).to(q.device)[:, head : head + 1], causal=True)
        return linear_attention_by_sum(q, k, v, causal=True, bias=bias)
    if kind in ("rope", "alibi"):
        theta = torch.as_tensor(RopeSpec(q.shape[-1]).inv_freq(), device=q.device)
        bias = None
        if kind == "alibi":
            bias = -alibi_slopes(heads)[head].item() * (places[0][:, None] - ids).abs().double()
        return linear_attention_by_sum(q, k, v, inv_freq=theta, causal=True, bias=bias)
    out = linear_attention_by_sum(q, k, v, causal=True)
    if kind == "linear":
        return out
    seen = elu_plus_one(k).cumsum(dim=-2)[..., k.shape[-2] - q.shape[-2] :, :]
    return out * (elu_plus_one(q) * seen).sum(dim=-1, keepdim=True)


def checked_tokens(seq: int, middle: bool) -> Tensor:
    """The indices of the tokens that are compared with the reference: first, last, and for gradients some between."""
    parts = [range(min(HEAD, seq)), range(seq // 2, seq // 2 + MIDDLE) if middle else (), range(seq - TAIL, seq)]
    return torch.tensor(sorted({token for part in parts for token in part if 0 <= token < seq}))


class Truth:
    """The correct results in float64, computed head by head.

    These are the outputs of the first and the last tokens, and the gradients for a cotangent that is 0 at all other
    tokens. The first tokens depend only on themselves; the last tokens attend to every key.
    """

    def __init__(self, kind: str, tensors: Sequence[Tensor], cotangent: Tensor | None) -> None:
        q = tensors[0]
        self.shape: torch.Size = q.shape
        self.dtype: torch.dtype = q.dtype
        seq = q.shape[2]
        self.tokens: Tensor = checked_tokens(seq, middle=False).to(q.device)
        self.sampled: Tensor = checked_tokens(seq, middle=True).to(q.device)
        heads = [(slice(b, b + 1), slice(h, h + 1)) for b in range(len(q)) for h in range(q.shape[1])]
        per_head = [
            self._head(
                kind,
                [x[head] for x in tensors],
                None if cotangent is None else cotangent[head],
                head[1].start,
                q.shape[1],
            )
            for head in heads
        ]
        self.parts: list[Tensor] = [
            torch.cat(part).unflatten(0, q.shape[:2]).squeeze(2) for part in zip(*per_head, strict=True)
        ]

    def _head(self, kind: str, tensors: list[Tensor], cotangent: Tensor | None, head: int, heads: int) -> list[Tensor]:
        q, k, v = (x.detach().double().requires_grad_(cotangent is not None) for x in tensors)
        seq = q.shape[2]
        first = min(HEAD, seq)
        last = min(TAIL, seq - first)
        with torch.set_grad_enabled(cotangent is not None):
            parts = [_reference(kind, q[:, :, :first], k[:, :, :first], v[:, :, :first], head, heads)]
            parts += [_reference(kind, q[:, :, seq - last :], k, v, head, heads)] if last else []
            out = torch.cat(parts, dim=2)
        if cotangent is None:
            return [out]
        grads = torch.autograd.grad(out, (q, k, v), cotangent[:, :, self.tokens].double())
        return [out.detach(), *(grad[:, :, self.sampled] for grad in grads)]

    def error(self, outputs: Sequence[Tensor]) -> float:
        """The largest |output - truth| / |truth|, per token for outputs and per head for gradients."""
        if any(x.shape != self.shape or x.dtype != self.dtype for x in outputs) or len(outputs) != len(self.parts):
            return torch.inf
        worst = 0.0
        for number, (x, true) in enumerate(zip(outputs, self.parts, strict=True)):
            difference = x.detach()[:, :, self.sampled if number else self.tokens].double() - true
            # The gradient of one token may be 0: the first token attends to one key only, so q and k have no effect.
            axes = (-2, -1) if number else (-1,)
            ratio = difference.norm(dim=axes) / true.norm(dim=axes)
            worst = max(worst, float(torch.nan_to_num(ratio, nan=torch.inf).max()))
        return worst
