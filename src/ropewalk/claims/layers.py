"""Layers of this library with seeded weights, for claims about attention, and a count of their operations."""

from collections.abc import Callable
from typing import TypeVar, cast

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from ropewalk.claims.samples import normal
from ropewalk.nn.attention.layer import Attention
from ropewalk.nn.encodings.base import Encoding
from ropewalk.nn.encodings.by_name import ENCODINGS, encoding
from ropewalk.nn.linear.feature_maps import FeatureMap
from ropewalk.nn.linear.function import linear_attention
from ropewalk.nn.linear.layer import LinearAttention
from ropewalk.nn.linear.state import LinearState
from ropewalk.nn.rotary.embedding import RotaryEmbedding
from ropewalk.reference import Projections
from ropewalk.spec import RopeSpec, XPos

__all__ = [
    "HEADS",
    "NAMES",
    "WEIGHTS",
    "WIDTH",
    "layer",
    "one_head",
    "operations",
    "order_effect",
    "outputs",
    "token_by_token",
]

Layer = TypeVar("Layer", bound=Attention | LinearAttention)

WIDTH, HEADS, LENGTH = 16, 2, 64
NAMES = tuple(ENCODINGS)
WEIGHTS = Projections(*(normal(WIDTH, WIDTH, seed=1 + i) / WIDTH**0.5 for i in range(4)))

OPTIONS: dict[str, dict[str, object]] = {
    "learned": {"length": LENGTH},
    "multiplicative": {"length": LENGTH},
    "concatenated": {"width": 8},
    "xpos": {"spec": RopeSpec(WIDTH // HEADS, xpos=XPos(LENGTH))},
}


def _encoding(name: str, causal: bool) -> Encoding:
    """The encoding called `name` in float64, with standard normal parameters. T5's initial parameters are all 0."""
    # `name` is not a literal, so no overload of `encoding` matches.
    build = cast("Callable[..., Encoding]", encoding)
    options = OPTIONS.get(name, {}) | ({"causal": causal} if name == "t5" else {})
    module = build(name, dim=WIDTH, num_heads=HEADS, **options).double().requires_grad_(False)
    for number, parameter in enumerate(module.parameters()):
        parameter.copy_(normal(*parameter.shape, seed=20 + number))
    return module


def layer(kind: type[Layer], name: str | None, *, causal: bool = True) -> Layer:
    """An `Attention` or a `LinearAttention` in float64 with WEIGHTS and the encoding called `name`."""
    module = kind(WIDTH, HEADS, encoding=None if name is None else _encoding(name, causal), causal=causal).double()
    for projection, weight in zip((module.q_proj, module.k_proj, module.v_proj, module.o_proj), WEIGHTS, strict=True):
        projection.requires_grad_(False).weight.copy_(weight)
    return module


def outputs(module: Attention | LinearAttention, tokens: Tensor, start: int = 0) -> Tensor:
    """Output of the layer, with its embedding, for tokens [1, seq, WIDTH] at positions start, start + 1, ..."""
    ids = torch.arange(tokens.shape[1]) + start
    return module(tokens if module.encoding is None else module.encoding.embed(tokens, ids), ids)


def order_effect(module: Attention | LinearAttention, tokens: Tensor, order: list[int]) -> float:
    """Largest difference between the output for reordered tokens and the reordered output. 0 if order has no effect."""
    return float((outputs(module, tokens[:, order]) - outputs(module, tokens)[:, order]).abs().max())


def one_head(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    rope: RotaryEmbedding | None = None,
    positions: Tensor | None = None,
    feature_map: FeatureMap = "elu",
    causal: bool = True,
) -> Tensor:
    """`linear_attention` of one head, [seq, dim]. If v is the identity matrix, the output is the attention weights."""
    heads = (x[None, None] for x in (q, k, v))
    return linear_attention(*heads, rope=rope, positions=positions, feature_map=feature_map, causal=causal)[0, 0]


def token_by_token(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    rope: RotaryEmbedding | None = None,
    bias: Encoding | None = None,
    first: int = 1,
) -> tuple[Tensor, LinearState]:
    """`linear_attention` of the `first` tokens, then one token per call. Each call continues from the last state."""
    step, state = linear_attention(*(x[:, :, :first] for x in (q, k, v)), rope=rope, bias=bias, return_state=True)
    steps = [step]
    for n in range(first, q.shape[2]):
        token = (x[:, :, n : n + 1] for x in (q, k, v))
        step, state = linear_attention(*token, rope=rope, bias=bias, state=state, return_state=True)
        steps.append(step)
    return torch.cat(steps, dim=2), state


def operations(work: Callable[[], object]) -> int:
    """Number of multiplications and additions in the matrix products of `work`, counted by torch.

    Softmax attention runs as matrix products, because torch does not count the operations of fused CPU kernels.
    """
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        work()
    return counter.get_total_flops()
