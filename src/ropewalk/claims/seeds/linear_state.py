"""Linear attention: the state S and z, its use, and its size."""

import torch
from torch import Tensor

from ropewalk.claims.claim import Chapter, Finding
from ropewalk.claims.layers import HEADS, WIDTH, layer, operations, token_by_token
from ropewalk.claims.samples import EXACT, largest, normal
from ropewalk.claims.sources import NOTE_002
from ropewalk.nn.attention.cache import KVCache
from ropewalk.nn.attention.layer import Attention
from ropewalk.nn.linear.feature_maps import FeatureMap
from ropewalk.nn.linear.function import linear_attention
from ropewalk.nn.linear.layer import LinearAttention
from ropewalk.reference import elu_plus_one, linear_attention_by_recurrence, linear_attention_by_sum

__all__ = ["chapter"]

chapter: Chapter = Chapter("Linear attention: the state")

DIM = 16


def _both_signs(x: Tensor) -> Tensor:
    """A feature map to twice the number of features."""
    return torch.cat((x.relu(), (-x).relu()), dim=-1)


@chapter.claim(
    "linear.state",
    "o_i = φ(q_i) S / φ(q_i) z with S = Σ φ(k_j)ᵀv_j and z = Σ φ(k_j)ᵀ equals the double sum.",
    NOTE_002.at(127, r"\mathbf{o}_i = \frac{\phi(\mathbf{q}_i) \mathbf{S}_{KV}}{\phi(\mathbf{q}_i) \mathbf{z}_K}"),
    method="the double sum against the recurrence for 3 heads, 40 tokens, causal and not; linear_attention with all "
    "tokens at once and, with its state, one token per call; that state against S and z",
    expected="equal",
)
def _() -> Finding:
    q, k, v = normal(3, 1, 3, 40, DIM)
    truth = [linear_attention_by_sum(q, k, v, causal=causal) for causal in (False, True)]
    error, ours = (
        max(largest(form(q, k, v, causal=causal) - truth[causal]) for causal in (False, True))
        for form in (linear_attention_by_recurrence, linear_attention)
    )
    stepped, state = token_by_token(q, k, v)
    by_token, phi = largest(stepped - truth[True]), elu_plus_one(k)
    sums = max(largest(state.above - phi.mT @ v), largest(state.below - phi.sum(2)))
    return Finding(
        f"largest difference {error:.1e}; linear_attention {ours:.1e}, token by token {by_token:.1e}, state {sums:.1e}",
        stated=max(error, ours, by_token, sums) < EXACT,
    )


@chapter.claim(
    "linear.lookup",
    "No query needs the L keys again: each uses the same S and z, summed once from K and V.",
    NOTE_002.at(
        125,
        r"对于任意的 Query \mathbf{q}_i , 我们不需要再去找 L 个 Key 了, "
        r"直接查上面算好的全局矩阵 \mathbf{S}_{KV} 和向量 \mathbf{z}_K 。",
    ),
    method="outputs from the final state of linear_attention after 256 tokens, against its outputs, full and causal; "
    "operations and stored numbers for one more token after 100 and 1000, against Attention with a KVCache, d = 16",
    expected="equal for sums over all L keys, as in the note, not if causal; constant operations and numbers, which "
    "grow with L for softmax",
)
def _() -> Finding:
    q, k, v = normal(3, 1, 1, 256, DIM)
    (_, state), (_, other) = (linear_attention(x, k, v, return_state=True) for x in (q, -q))
    without_queries = torch.equal(state.above, other.above) and torch.equal(state.below, other.below)
    phi = elu_plus_one(q)
    read = (phi @ state.above) / (phi @ state.below[..., None])
    full, causal = (largest(read - linear_attention(q, k, v, causal=masked)) for masked in (False, True))
    linear, softmax, token = layer(LinearAttention, "rope"), layer(Attention, "rope"), normal(1, 1, WIDTH)

    def next_token(length: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """Operations and stored numbers for one token after `length` tokens: linear attention, then softmax."""
        tokens, cache = normal(1, length, WIDTH), KVCache(1, HEADS, 1001, WIDTH // HEADS, dtype=torch.float64)
        with torch.inference_mode():
            softmax(tokens, cache=cache)
            (_, state), cached = linear.step(tokens), 2 * WIDTH * cache.filled_at_most
            costs = operations(lambda: linear.step(token, state)), operations(lambda: softmax(token, cache=cache))
        return (costs[0], state.above.numel() + state.below.numel()), (costs[1], cached)

    (near, near_softmax), (far, far_softmax) = next_token(100), next_token(1000)
    return Finding(
        f"difference {full:.1e} full, {causal:.2g} causal; a token after 100 and 1000: {near[0]} and {far[0]} "
        f"operations on {near[1]} and {far[1]} numbers, softmax {near_softmax[0]} and {far_softmax[0]} on "
        f"{near_softmax[1]} and {far_softmax[1]}",
        stated=full < EXACT < causal
        and without_queries
        and near == far
        and far_softmax[0] - near_softmax[0] == 4 * 900 * WIDTH,
    )


@chapter.claim(
    "linear.state-size",
    "The state S is a d×d matrix.",
    NOTE_002.at(
        115,
        r"\mathbf{S}_{KV} = \sum_{j=1}^L \underbrace{\phi(\mathbf{k}_j)^T}_{d \times "
        r"1} \underbrace{\mathbf{v}_j}_{1 \times d} \in \mathbb{R}^{d \times d}",
    ),
    method="shape of S in linear_attention for φ(x) = (relu(x), relu(−x)), which maps d = 16 features to D = 32, and "
    "for elu + 1; operations counted by torch",
    expected="32×16 with twice the operations; 16×16 for elu + 1",
    misprint="D×d, because φ maps to ℝ^D in line 87; d×d if D = d, as for elu + 1",
)
def _() -> Finding:
    q, k, v = normal(3, 1, 1, 256, DIM)

    def counted(phi: FeatureMap) -> tuple[tuple[int, ...], int]:
        _, state = linear_attention(q, k, v, feature_map=phi, causal=False, return_state=True)
        cost = operations(lambda: linear_attention(q, k, v, feature_map=phi, causal=False))
        return tuple(state.above.shape[2:]), cost

    (wide, wide_cost), (same, same_cost) = counted(_both_signs), counted("elu")
    return Finding(
        f"{wide[0]}×{wide[1]} with {wide_cost / same_cost:g}× the operations; {same[0]}×{same[1]} for elu + 1",
        stated=wide == (DIM, DIM),
        amended=wide == (2 * DIM, DIM) and same == (DIM, DIM) and wide_cost == 2 * same_cost,
    )
