"""The library's own layers with seeded weights, on which statements about attention are measured; what they cost."""

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
    "outputs",
    "token_by_token",
    "told",
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


def _encoded(name: str) -> Encoding:
    """The encoding of that name in float64, with parameters drawn at size 1: T5's start at 0, and would add nothing."""
    # The names come from a table, so that no overload of `encoding` is the one.
    build = cast("Callable[..., Encoding]", encoding)
    made = build(name, dim=WIDTH, num_heads=HEADS, **OPTIONS.get(name, {})).double().requires_grad_(False)
    for number, parameter in enumerate(made.parameters()):
        parameter.copy_(normal(*parameter.shape, seed=20 + number))
    return made


def layer(kind: type[Layer], name: str | None, *, causal: bool = True) -> Layer:
    """An `Attention` or a `LinearAttention` in float64 with WEIGHTS, and with the encoding of that name."""
    made = kind(WIDTH, HEADS, encoding=None if name is None else _encoded(name), causal=causal).double()
    for projection, weight in zip((made.q_proj, made.k_proj, made.v_proj, made.o_proj), WEIGHTS, strict=True):
        projection.requires_grad_(False).weight.copy_(weight)
    return made


def outputs(of: Attention | LinearAttention, tokens: Tensor, start: int = 0) -> Tensor:
    """What the layer makes of tokens [1, seq, WIDTH] that stand at start, start + 1, ..., embedded where it embeds."""
    ids = torch.arange(tokens.shape[1]) + start
    return of(tokens if of.encoding is None else of.encoding.embed(tokens, ids), ids)


def told(of: Attention | LinearAttention, tokens: Tensor, order: list[int]) -> float:
    """How far what a layer makes of tokens in another order is from what it makes of them, put into that order."""
    return float((outputs(of, tokens[:, order]) - outputs(of, tokens)[:, order]).abs().max())


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
    """`linear_attention` of one head, [seq, dim]. With v = 1, the identity, what comes out are the weights."""
    heads = (x[None, None] for x in (q, k, v))
    return linear_attention(*heads, rope=rope, positions=positions, feature_map=feature_map, causal=causal)[0, 0]


def token_by_token(
    q: Tensor, k: Tensor, v: Tensor, *, rope: RotaryEmbedding | None = None
) -> tuple[Tensor, LinearState]:
    """`linear_attention` with one token per call, each behind the state that the last one left."""
    step, state = linear_attention(*(x[:, :, :1] for x in (q, k, v)), rope=rope, return_state=True)
    steps = [step]
    for n in range(1, q.shape[2]):
        token = (x[:, :, n : n + 1] for x in (q, k, v))
        step, state = linear_attention(*token, rope=rope, state=state, return_state=True)
        steps.append(step)
    return torch.cat(steps, dim=2), state


def operations(work: Callable[[], object]) -> int:
    """The products and sums inside the matrix products of `work`, counted by torch.

    Softmax attention goes by its formula: torch counts no operations of the fused kernels of a CPU.
    """
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        work()
    return counter.get_total_flops()
