"""The paths of `ropewalk bench attention`: softmax, our linear attention, and that of fla.

A maker returns the function that is timed, from q, k and v to the output of attention. It returns None if a package is
not installed.
"""

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ropewalk.nn.encodings.bias import AlibiBias, T5Bias
from ropewalk.nn.linear.function import linear_attention
from ropewalk.nn.rotary.embedding import RotaryEmbedding
from ropewalk.tools.bench.attention_truth import (
    KINDS,
    LIGHTNING_LAYER,
    LIGHTNING_LAYERS,
    decays_per_head,
    decays_per_token,
    t5_numbers,
)
from ropewalk.tools.bench.peers import GPU_PEERS, installed

__all__ = ["GROUPS", "PATHS", "PEERS", "PLAIN", "WEIGHTS", "Attend", "AttentionPath"]

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
Maker = Callable[[int, int, torch.dtype, str], Attend | None]

# Our causal linear attention with RoPE and nothing else, with which others are compared.
PLAIN = "ropewalk linear + RoPE"


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


def ours(kind: str) -> Maker:
    """The maker of our linear attention of this kind."""
    wanted = KINDS[kind]

    def maker(seq: int, dim: int, dtype: torch.dtype, device: str) -> Attend:
        options: dict[str, Any] = {"causal": wanted.causal, "normalize": wanted.normalize}
        if wanted.rope:
            options["rope"] = RotaryEmbedding(dim).to(device)
        if wanted.plain:
            options |= {"feature_map": "identity", "scale": dim**-0.5}

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            heads = q.shape[1]
            if wanted.bias == "alibi":
                return linear_attention(q, k, v, **options, bias=_alibi(heads, q.device))
            if wanted.bias == "t5":
                return linear_attention(q, k, v, **options, bias=_t5(heads, q.device, wanted.causal))
            if wanted.decay == "token":
                return linear_attention(q, k, v, **options, decay=decays_per_token(*q.shape[:3], q.device))
            if wanted.decay is not None:
                return linear_attention(q, k, v, **options, decay=_decays(wanted.decay, heads, q.device))
            return linear_attention(q, k, v, **options)

        return attend

    return maker


@functools.cache
def _alibi(heads: int, device: torch.device) -> AlibiBias:
    return AlibiBias(heads).to(device)


@functools.cache
def _t5(heads: int, device: torch.device, causal: bool) -> T5Bias:
    module = T5Bias(heads, causal=causal, num_buckets=32, max_distance=128).requires_grad_(False)
    module.weight.copy_(t5_numbers(heads))
    return module.to(device)


@functools.cache
def _decays(name: str, heads: int, device: torch.device) -> Tensor:
    return decays_per_head(name, heads).float().to(device)


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


def _fla_function(module: str, name: str, device: str) -> Callable[..., tuple[Tensor, object]] | None:
    if device != "cuda" or not installed("fla"):
        return None
    return getattr(importlib.import_module(module), name)


def fla_retention(seq: int, dim: int, dtype: torch.dtype, device: str) -> Attend | None:
    """RetNet's retention of fla: its decay per head is part of the function."""
    retention = _fla_function("fla.ops.retention", "chunk_retention", device)
    return retention and (lambda q, k, v: retention(q, k, v, scale=dim**-0.5)[0])


def fla_lightning(seq: int, dim: int, dtype: torch.dtype, device: str) -> Attend | None:
    """Lightning attention of fla: the function computes the decay per head from the layer."""
    lightning = _fla_function("fla.ops.lightning_attn", "chunk_lightning_attn", device)
    layer = {"layer_idx": LIGHTNING_LAYER, "num_layers": LIGHTNING_LAYERS}
    return lightning and (lambda q, k, v: lightning(q, k, v, scale=dim**-0.5, **layer)[0])


def fla_gated(seq: int, dim: int, dtype: torch.dtype, device: str) -> Attend | None:
    """Simple gated linear attention of fla, with one decay per token and head."""
    gated = _fla_function("fla.ops.simple_gla", "chunk_simple_gla", device)
    if gated is None:
        return None

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        batch, tokens, heads, _ = q.shape
        return gated(q, k, v, _tokens_first(batch, heads, tokens, q.device), scale=dim**-0.5)[0]

    return attend


@functools.lru_cache(maxsize=2)
def _tokens_first(batch: int, heads: int, seq: int, device: torch.device) -> Tensor:
    return decays_per_token(batch, heads, seq, device).transpose(1, 2).contiguous()


@dataclass(frozen=True)
class AttentionPath:
    """A path.

    Attributes:
        maker: Its maker.
        kind: The kind of attention, a key of `KINDS`.
        tokens_first: Whether its tensors are [batch, seq, heads, dim].
        beside: The path of ours, earlier in the table, that computes the same.
    """

    maker: Maker
    kind: str
    tokens_first: bool = False
    beside: str | None = None


# Causal attention against the length.
PATHS: dict[str, AttentionPath] = {
    "softmax (SDPA)": AttentionPath(softmax, "softmax"),
    "ropewalk linear": AttentionPath(linear, "linear"),
    PLAIN: AttentionPath(linear_rope, "rope"),
    "ropewalk linear + ALiBi": AttentionPath(ours("alibi"), "alibi"),
    "ropewalk linear + T5": AttentionPath(ours("t5"), "t5"),
    "fla linear": AttentionPath(fla_linear, "linear", tokens_first=True),
    "fla linear + RoPE": AttentionPath(fla_rope, "rope", tokens_first=True),
    "fla, no denominator": AttentionPath(fla_numerator, "numerator", tokens_first=True),
}

# What a decay or a bias costs. RoPE is part of every path.
WEIGHTS: dict[str, AttentionPath] = {
    PLAIN: AttentionPath(linear_rope, "rope"),
    "ropewalk decay": AttentionPath(ours("decay"), "decay"),
    "ropewalk ALiBi": AttentionPath(ours("alibi"), "alibi"),
    "ropewalk T5": AttentionPath(ours("t5 and rope"), "t5 and rope"),
    "ropewalk ALiBi, two-way": AttentionPath(ours("two-way alibi"), "two-way alibi"),
    "ropewalk T5, two-way": AttentionPath(ours("two-way t5"), "two-way t5"),
}

# Decay without feature map, denominator and RoPE, each next to the function of fla that computes the same.
PEERS: dict[str, AttentionPath] = {
    "ropewalk retention": AttentionPath(ours("retention"), "retention"),
    "fla retention": AttentionPath(fla_retention, "retention", tokens_first=True, beside="ropewalk retention"),
    "ropewalk lightning": AttentionPath(ours("lightning"), "lightning"),
    "fla lightning": AttentionPath(fla_lightning, "lightning", tokens_first=True, beside="ropewalk lightning"),
    "ropewalk token decay": AttentionPath(ours("gated"), "gated"),
    "fla simple GLA": AttentionPath(fla_gated, "gated", tokens_first=True, beside="ropewalk token decay"),
}

GROUPS: dict[str, dict[str, AttentionPath]] = {"lengths": PATHS, "weights": WEIGHTS, "peers": PEERS}
