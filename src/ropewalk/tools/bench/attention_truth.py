"""What the paths of `ropewalk bench attention` compute, and the correct results in float64."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from ropewalk.reference import alibi_slopes, elu_plus_one, linear_attention_by_sum, softmax_attention, t5_bias
from ropewalk.spec.rope import RopeSpec

__all__ = ["KINDS", "LIMITS", "Kind", "Truth", "checked_tokens", "decays_per_head", "decays_per_token", "t5_numbers"]

# The number of tokens at the start, in the middle and at the end that are compared with the reference.
HEAD, MIDDLE, TAIL = 512, 64, 16

# The allowed relative error: several times the rounding error of a path, and much less than the error of a missing
# rotation, mask or denominator.
LIMITS = {"float32": 2.0**-15, "bfloat16": 2.0**-5}

# The layer of fla's lightning attention, and the number of layers: the decay depends on both.
LIGHTNING_LAYER, LIGHTNING_LAYERS = 12, 24


@dataclass(frozen=True)
class Kind:
    """A kind of attention.

    Attributes:
        softmax: Softmax attention; the other fields do not apply.
        rope: Whether the features are rotated in the numerator.
        decay: The decay: per head as in RetNet or as in fla's lightning attention, or per token.
        bias: The bias.
        plain: No feature map and no denominator; the result is divided by the square root of the width.
        normalize: Whether there is a denominator.
        causal: Whether later keys are hidden.
    """

    softmax: bool = False
    rope: bool = False
    decay: Literal["retention", "lightning", "token"] | None = None
    bias: Literal["alibi", "t5"] | None = None
    plain: bool = False
    normalize: bool = True
    causal: bool = True


KINDS: dict[str, Kind] = {
    "softmax": Kind(softmax=True),
    "linear": Kind(),
    "rope": Kind(rope=True),
    "numerator": Kind(normalize=False),
    "decay": Kind(rope=True, decay="retention"),
    "alibi": Kind(rope=True, bias="alibi"),
    "t5": Kind(bias="t5"),
    "t5 and rope": Kind(rope=True, bias="t5"),
    "two-way alibi": Kind(rope=True, bias="alibi", causal=False),
    "two-way t5": Kind(rope=True, bias="t5", causal=False),
    "retention": Kind(decay="retention", plain=True, normalize=False),
    "lightning": Kind(decay="lightning", plain=True, normalize=False),
    "gated": Kind(decay="token", plain=True, normalize=False),
}


def decays_per_head(name: str, heads: int) -> Tensor:
    """The logarithm of the decay per token of each head, float64 [heads].

    Args:
        name: "retention" for log(1 - 2^(-5-h)) (RetNet, 2307.08621), "lightning" for -8 h / heads (1 - layer / layers),
            as in fla.
        heads: The number of heads.

    >>> decays_per_head("lightning", 2).tolist()
    [-0.0, -2.0]
    >>> decays_per_head("retention", 1).exp().item()
    0.96875
    """
    head = torch.arange(heads, dtype=torch.float64)
    if name == "retention":
        return torch.log1p(-(2.0 ** (-5 - head)))
    return -8 / heads * (1 - LIGHTNING_LAYER / LIGHTNING_LAYERS) * head


@functools.lru_cache(maxsize=2)
def decays_per_token(batch: int, heads: int, seq: int, device: torch.device) -> Tensor:
    """The logarithm of a decay that differs per token, float32 [batch, heads, seq]."""
    random = torch.Generator(device).manual_seed(1)
    drawn = torch.randn(batch, heads, seq, generator=random, device=device)
    return torch.nn.functional.logsigmoid(drawn) / 16


def t5_numbers(heads: int) -> Tensor:
    """Numbers of T5's 32 buckets that differ per bucket and head, float64 [32, heads]."""
    return torch.outer(torch.arange(32.0).sin(), torch.arange(1.0, heads + 1)).double() / heads


@dataclass(frozen=True)
class _Head:
    """One head of q, k and v: its indices, and (batch, heads, seq) of the whole."""

    batch: int
    head: int
    whole: tuple[int, int, int]

    def bias(self, kind: Kind, queries: Tensor, keys: Tensor) -> Tensor | None:
        heads = self.whole[1]
        if kind.bias == "alibi":
            return -alibi_slopes(heads)[self.head].item() * (queries[:, None] - keys).abs().double()
        if kind.bias == "t5":
            numbers = t5_numbers(heads)[:, self.head : self.head + 1].to(keys.device)
            return t5_bias(queries, keys, numbers, causal=kind.causal)
        return None

    def decay(self, kind: Kind, keys: Tensor) -> Tensor | None:
        if kind.decay is None:
            return None
        if kind.decay == "token":
            decays = decays_per_token(*self.whole, keys.device)
            return decays[self.batch, self.head, : len(keys)].double()[None, None]
        return decays_per_head(kind.decay, self.whole[1])[self.head : self.head + 1].to(keys.device)

    def result(self, kind: Kind, q: Tensor, k: Tensor, v: Tensor, queries: Tensor) -> Tensor:
        """The outputs of the queries with these indices. Causal queries are the last keys."""
        if kind.softmax:
            return softmax_attention(q, k, v, causal=True)
        keys = torch.arange(k.shape[2], device=q.device)
        rotation: dict[str, Any] = {}
        if kind.rope:
            theta = torch.as_tensor(RopeSpec(q.shape[-1]).inv_freq(), device=q.device)
            rotation = {"inv_freq": theta, "positions": keys, "q_positions": queries}
        features = _unchanged if kind.plain else elu_plus_one
        return linear_attention_by_sum(
            q,
            k,
            v,
            **rotation,
            causal=kind.causal,
            q_map=features,
            k_map=features,
            decay=self.decay(kind, keys),
            bias=self.bias(kind, queries, keys),
            normalize=kind.normalize,
            scale=q.shape[-1] ** -0.5 if kind.plain else 1.0,
        )


def _unchanged(x: Tensor) -> Tensor:
    return x


def checked_tokens(seq: int, middle: bool) -> Tensor:
    """The indices of the tokens that are compared with the reference: first, last, and for gradients some between."""
    parts = [range(min(HEAD, seq)), range(seq // 2, seq // 2 + MIDDLE) if middle else (), range(seq - TAIL, seq)]
    return torch.tensor(sorted({token for part in parts for token in part if 0 <= token < seq}))


class Truth:
    """The correct results in float64, computed head by head.

    These are the outputs of the first and the last tokens, and the gradients for a cotangent that is 0 at all other
    tokens. If attention is causal, the first tokens depend only on themselves. The last tokens attend to every key.
    """

    def __init__(self, kind: str, tensors: Sequence[Tensor], cotangent: Tensor | None) -> None:
        q = tensors[0]
        self.shape: torch.Size = q.shape
        self.dtype: torch.dtype = q.dtype
        batch, heads, seq, _ = q.shape
        self.tokens: Tensor = checked_tokens(seq, middle=False).to(q.device)
        self.sampled: Tensor = checked_tokens(seq, middle=True).to(q.device)
        per_head: list[list[Tensor]] = []
        for b in range(batch):
            for h in range(heads):
                one = slice(b, b + 1), slice(h, h + 1)
                of_head = None if cotangent is None else cotangent[one]
                place = _Head(b, h, (batch, heads, seq))
                per_head.append(self._head(KINDS[kind], [x[one] for x in tensors], of_head, place))
        self.parts: list[Tensor] = [
            torch.cat(part).unflatten(0, q.shape[:2]).squeeze(2) for part in zip(*per_head, strict=True)
        ]

    def _head(self, kind: Kind, tensors: list[Tensor], cotangent: Tensor | None, place: _Head) -> list[Tensor]:
        q, k, v = (x.detach().double().requires_grad_(cotangent is not None) for x in tensors)
        seq = q.shape[2]
        first = min(HEAD, seq)
        with torch.set_grad_enabled(cotangent is not None):
            if kind.causal:
                early = (x[:, :, :first] for x in (q, k, v))
                parts = [place.result(kind, *early, queries=self.tokens[:first])]
                last = self.tokens[first:]
                parts += [place.result(kind, q[:, :, last], k, v, last)] if len(last) else []
                out = torch.cat(parts, dim=2)
            else:
                out = place.result(kind, q[:, :, self.tokens], k, v, self.tokens)
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
