"""Linear attention with positions: bias, decay, rotation, and RoFormer's eq. 19, by formula and in layers."""

import math

import torch
from torch import Tensor

from ropewalk.claims.claim import Chapter, Finding
from ropewalk.claims.layers import one_head, token_by_token
from ropewalk.claims.samples import EXACT, largest, normal, rank, theta
from ropewalk.claims.sources import CHINESE_1, ROFORMER
from ropewalk.nn.attention.scores import ScoreBias, attend
from ropewalk.nn.attention.visibility import Visibility
from ropewalk.nn.encodings.bias import AlibiBias, T5Bias
from ropewalk.nn.linear.function import linear_attention
from ropewalk.nn.rotary.embedding import RotaryEmbedding
from ropewalk.reference import (
    elu_plus_one,
    linear_attention_by_recurrence,
    linear_attention_by_sum,
    rotate,
    t5_bias,
)
from ropewalk.spec import Explicit, RopeSpec

__all__ = ["chapter"]

chapter: Chapter = Chapter("Linear attention with positions")

DIM, LENGTH = 16, 256
IDS = torch.arange(LENGTH)
Q, K, V = normal(3, LENGTH, DIM)
PHI_Q, PHI_K = elu_plus_one(Q), elu_plus_one(K)
EYE = torch.eye(LENGTH, dtype=torch.float64)
# Queries and keys before the feature map, with the head_dim of models.
RAW_Q, RAW_K = normal(2, LENGTH, 64, seed=7)


def _t5(seed: int = 3) -> T5Bias:
    """T5's bias for one head, with random numbers in its 32 buckets."""
    module = T5Bias(1).double().requires_grad_(False)
    module.weight.copy_(normal(32, 1, seed=seed))
    return module


def _state_rank(factors: Tensor) -> int:
    """Rank between later queries and earlier keys: the state size that a recurrence needs for these factors."""
    half = LENGTH // 2
    return rank(factors[half:, :half])


def _by_fft(weights: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Σ_j t(i−j) (q_i·k_j) v_j as a convolution of k_j v_jᵀ with t. `weights` are t(−(N−1)) … t(N−1)."""
    length = len(q)
    moments = (k[:, :, None] * v[:, None, :]).flatten(1)
    size = 3 * length
    spectrum = torch.fft.rfft(moments, n=size, dim=0) * torch.fft.rfft(weights, n=size)[:, None]
    summed = torch.fft.irfft(spectrum, n=size, dim=0)[length - 1 : 2 * length - 1]
    return torch.einsum("id,ide->ie", q, summed.view(length, q.shape[1], v.shape[1]))


@chapter.claim(
    "linear.bias-factor",
    "With an added bias the weight is exp(q·k) exp(B): exp(B_ij) multiplies each φ(q_i)·φ(k_j).",
    CHINESE_1,
    method="exp(q·k + B) against exp(q·k) exp(B), with B of T5 and random weights; the weights of softmax "
    "attention with T5Bias against exp(q·k) exp(B) divided by its sum",
    expected="equal",
)
def _() -> Finding:
    bias = t5_bias(IDS, IDS, normal(32, 1), causal=False)[0]
    scores = Q @ K.T / DIM**0.5
    product = torch.exp(scores) * torch.exp(bias)
    error = largest(torch.exp(scores + bias) / product - 1)
    q, k, v = (x[None, None] for x in (Q, K, EYE))
    weights = attend(q, k, v, Visibility(), scale=DIM**-0.5, score_bias=ScoreBias(_t5(seed=0), IDS, IDS))[0, 0]
    ours = largest(weights / (product / product.sum(-1, keepdim=True)) - 1)
    return Finding(f"relative errors {error:.1e} and {ours:.1e}", stated=max(error, ours) < EXACT)


@chapter.claim(
    "linear.bias-denominator",
    "With a bias, o_i = Σ_j φ(q_i)·φ(k_j) P_ij v_j.",
    CHINESE_1,
    method="row sums of these weights, as printed, and divided by Σ_j φ(q_i)·φ(k_j) P_ij",
    expected="not 1 as printed; 1 with the division",
    fails="the denominator Σ_j φ(q_i)·φ(k_j) P_ij is missing",
)
def _() -> Finding:
    factors = torch.exp(_t5().bias(IDS, IDS)[0])
    weights = (PHI_Q @ PHI_K.T) * factors
    printed = largest(weights.sum(-1) - 1)
    divided = largest((weights / weights.sum(-1, keepdim=True)).sum(-1) - 1)
    return Finding(
        f"row sums differ from 1 by {printed:.0f} as printed, by {divided:.1e} with the division",
        stated=printed < EXACT,
        amended=divided < EXACT,
    )


@chapter.claim(
    "linear.bias-score",
    "Score is softmax(QKᵀ + B), and Score_ij is q_i·k_j + B_ij.",
    CHINESE_1,
    method="the difference of the two; exp of the second, divided by its sum over j, against the first",
    expected="the two differ; after exp and division they are equal",
    fails="the second is the score; the first is the weight, the softmax of the score",
)
def _() -> Finding:
    scores = Q @ K.T + t5_bias(IDS, IDS, normal(32, 1, seed=3), causal=False)[0]
    weights = torch.softmax(scores, dim=-1)
    difference = largest(weights - scores)
    error = largest(weights - scores.exp() / scores.exp().sum(-1, keepdim=True))
    return Finding(
        f"difference {difference:.3g}; after exp / sum {error:.1e}", stated=difference < EXACT, amended=error < EXACT
    )


@chapter.claim(
    "linear.bias-quadratic",
    "With an added relative bias (T5) the cost of linear attention is O(L²) again.",
    CHINESE_1,
    method="rank of exp(B) for a random B and for T5Bias, of the whole matrix and between later queries and earlier "
    "keys; the sum with T5's B by FFT against the double sum, and the steps of both",
    expected="ranks far above d = 16, so B does not factor; but T5's B depends on i−j, and an FFT costs O(L log L)",
    only_if="B is arbitrary; if B depends only on i−j the sum is a convolution, for causal ALiBi a recurrence",
)
def _() -> Finding:
    random_rank = rank(torch.exp(normal(LENGTH, LENGTH, seed=4)))
    table = normal(32, 1, seed=3)
    factors = torch.exp(_t5().bias(IDS, IDS)[0])
    direct = ((PHI_Q @ PHI_K.T) * factors) @ V
    # t(i−j) for i−j = −(N−1) … N−1: the bias of one query and keys on both sides of it.
    gaps = torch.arange(-(LENGTH - 1), LENGTH)
    weights = torch.exp(t5_bias(torch.tensor([0]), -gaps, table, causal=False))[0, 0]
    error = largest(_by_fft(weights, PHI_Q, PHI_K, V) - direct) / largest(direct)
    length = 65_536
    quadratic, by_fft = length**2, 2 * DIM * 3 * length * math.log2(3 * length)
    return Finding(
        f"rank {random_rank} (random B), {rank(factors)} (T5), {_state_rank(factors)} of {LENGTH // 2} between halves; "
        f"error of the FFT {error:.1e}; {quadratic / by_fft:.0f}× fewer steps at L = 65536",
        stated=error > 1e-9,
        amended=error < 1e-9 and random_rank == LENGTH and min(rank(factors), _state_rank(factors)) > DIM,
    )


@chapter.claim(
    "linear.bias-alibi",
    "A relative bias is not possible in O(N).",
    CHINESE_1,
    method="rank of exp(B) between later queries and earlier keys, with AlibiBias for 8 heads; the causal sum with "
    "these factors against the recurrence S_i = e^(−s) S_{i−1} + φ(k_i)v_iᵀ",
    expected="rank 1 in each head, 91 for T5; the sums are equal, with a state of constant size",
    fails="causal ALiBi is a recurrence with decay, in O(N)",
)
def _() -> Finding:
    factors = torch.exp(AlibiBias(8).double().bias(IDS, IDS))
    ranks, t5 = [_state_rank(head) for head in factors], _state_rank(torch.exp(_t5().bias(IDS, IDS)[0]))
    direct = ((PHI_Q @ PHI_K.T) * factors).tril() @ V
    decay = factors[:, 1, 0, None, None]
    state, rows = torch.zeros(8, DIM, DIM, dtype=torch.float64), []
    for q, k, v in zip(PHI_Q, PHI_K, V, strict=True):
        state = decay * state + torch.outer(k, v)
        rows.append(q @ state)
    error = largest(torch.stack(rows, dim=1) - direct) / largest(direct)
    return Finding(
        f"largest difference {error:.1e}; rank {max(ranks)} in {len(ranks)} heads, {t5} for T5",
        stated=error > EXACT,
        amended=error < EXACT and set(ranks) == {1} and t5 > DIM,
    )


@chapter.claim(
    "linear.rotation-factors",
    "With RoPE linear attention stays linear: the rotation is applied to φ(q) and φ(k) separately.",
    CHINESE_1,
    method="rank of the rotated weights; the double sum against the recurrence, positions up to 2^20; the same for "
    "linear_attention with a RotaryEmbedding, all tokens at once and one token per call",
    expected="rank at most d = 16; equal",
)
def _() -> Finding:
    ids = IDS * 4096
    weight_rank = rank(rotate(PHI_Q, ids, theta(DIM)) @ rotate(PHI_K, ids, theta(DIM)).T)
    q, k, v = (x[None, None] for x in (Q, K, V))
    by_sum = linear_attention_by_sum(q, k, v, inv_freq=theta(DIM), positions=ids, causal=True)
    by_state = linear_attention_by_recurrence(q, k, v, inv_freq=theta(DIM), positions=ids, causal=True)
    error = largest(by_sum - by_state)
    rope = RotaryEmbedding(DIM)
    ours = largest(linear_attention(q, k, v, rope=rope, positions=ids) - by_sum)
    from_zero = linear_attention_by_sum(q, k, v, inv_freq=theta(DIM), causal=True)
    stepped = largest(token_by_token(q, k, v, rope=rope)[0] - from_zero)
    weights = one_head(Q, K, EYE, rope=rope, positions=ids, causal=False)
    return Finding(
        f"rank {weight_rank}; difference {error:.1e}; linear_attention: rank {rank(weights)}, difference {ours:.1e}, "
        f"token by token {stepped:.1e}",
        stated=max(weight_rank, rank(weights)) <= DIM and max(error, ours, stepped) < EXACT,
    )


@chapter.claim(
    "linear.denominator",
    "The denominator is not rotated, because a rotated denominator can be 0 or negative.",
    f"{CHINESE_1}, {ROFORMER}",
    method="φ = elu + 1 of (3, −40), θ = π/2: rotated and plain sums over keys at distances {2}, then {0, 2}; "
    "linear_attention with values 1 and 3 there, and the same with both sums rotated",
    expected="rotated: negative, then 0; plain: 16 and 32; (16·3 − 16·1)/32 = 1, far from 1 if both are rotated",
)
def _() -> Finding:
    f = torch.tensor([math.pi / 2], dtype=torch.float64)
    one = elu_plus_one(torch.tensor([[3.0, -40.0]], dtype=torch.float64))

    def sums(*distances: int) -> tuple[float, float]:
        keys = one.expand(len(distances), 2)
        query = rotate(one, torch.tensor([2]), f)
        rotated = rotate(keys, 2 - torch.tensor(distances), f)
        return float((query @ rotated.T).sum()), float((one @ keys.T).sum())

    (below, plain), (zero, plain_two) = sums(2), sums(0, 2)
    ids, values = torch.tensor([0, 2]), torch.tensor([[1.0], [3.0]], dtype=torch.float64)
    raw = torch.tensor([[3.0, -40.0]] * 2, dtype=torch.float64)
    rope = RotaryEmbedding(RopeSpec(2, Explicit([math.pi / 2])))
    ours = float(one_head(raw, raw, values, rope=rope, positions=ids)[1])
    rotated = rotate(elu_plus_one(raw), ids, f)
    both = float(one_head(rotated, rotated, values, feature_map="identity")[1])
    return Finding(
        f"rotated {below:.3g} and {zero:.1e}; plain {plain:.3g} and {plain_two:.3g}; linear_attention: "
        f"{ours:.3g}, and {both:.1e} with a rotated denominator",
        stated=below < -1
        and abs(zero) < 1e-12
        and plain > 0
        and plain_two > 0
        and abs(ours - 1) < EXACT
        and not abs(both - 1) < 0.5,
    )


@chapter.claim(
    "linear.denominator-random",
    "With a rotated denominator the computation is extremely unstable, or impossible.",
    CHINESE_1,
    method="smallest rotated / plain denominator for random q and k, elu + 1, d = 64, 256 causal tokens; the same "
    "ratio is the output of linear_attention for values of 1",
    expected="about 0.3, so random data cause no problem; equal",
    only_if="features are sparse or constructed; for these random ones a rotated denominator is well above 0",
)
def _() -> Finding:
    q, k = elu_plus_one(RAW_Q), elu_plus_one(RAW_K)
    rotated = (rotate(q, IDS, theta(64)) @ rotate(k, IDS, theta(64)).T).tril().sum(-1)
    ratio = rotated / (q @ k.T).tril().sum(-1)
    ours = one_head(RAW_Q, RAW_K, torch.ones_like(q[:, :1]), rope=RotaryEmbedding(64))[:, 0]
    smallest, error = float(ours.min()), largest(ours - ratio)
    return Finding(
        f"smallest ratio {smallest:.2f}; difference {error:.1e}",
        stated=smallest < 0.01,
        amended=smallest > 0.2 and error < EXACT,
    )


@chapter.claim(
    "linear.weights",
    "In eq. 19 the weights of the values can be negative and do not sum to 1.",
    ROFORMER,
    method="weights for random q and k, elu + 1, d = 64, 256 causal tokens, by the formula and of linear_attention, "
    "as its outputs for the identity matrix as values",
    expected="some negative; row sums decrease from 1 to about 0.4; equal",
)
def _() -> Finding:
    q, k = elu_plus_one(RAW_Q), elu_plus_one(RAW_K)
    rotated = (rotate(q, IDS, theta(64)) @ rotate(k, IDS, theta(64)).T).tril()
    weights = one_head(RAW_Q, RAW_K, EYE, rope=RotaryEmbedding(64))
    error = largest(weights - rotated / (q @ k.T).tril().sum(-1, keepdim=True))
    negative = float((weights < 0).double().sum() / (LENGTH * (LENGTH + 1) / 2))
    first, last = float(weights[0].sum()), float(weights[-1].sum())
    return Finding(
        f"{negative:.1%} negative; row sums from {first:.3f} to {last:.3f}; difference {error:.1e}",
        stated=negative > 0 and abs(first - 1) < EXACT and last < 0.6 and error < EXACT,
    )
