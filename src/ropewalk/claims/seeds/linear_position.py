"""Linear attention with positions: a bias, a decay, a rotation, and RoFormer's eq. 19."""

import math

import torch
from torch import Tensor

from ropewalk.claims.ledger import Chapter, Finding
from ropewalk.claims.samples import EXACT, largest, normal, rank, theta
from ropewalk.claims.sources import CHINESE_1, ROFORMER
from ropewalk.reference import (
    alibi_bias,
    elu_plus_one,
    linear_attention_by_recurrence,
    linear_attention_by_sum,
    rotate,
    t5_bias,
)

__all__ = ["chapter"]

chapter = Chapter("Linear attention with positions")

DIM, LENGTH = 16, 256
IDS = torch.arange(LENGTH)
Q, K, V = normal(3, LENGTH, DIM)
PHI_Q, PHI_K = elu_plus_one(Q), elu_plus_one(K)


def _by_fft(weights: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Σ_j t(i−j) (q_i·k_j) v_j for t given at −(N−1) … N−1, by convolving k_j v_jᵀ with t."""
    length = len(q)
    moments = (k[:, :, None] * v[:, None, :]).flatten(1)
    size = 3 * length
    spectrum = torch.fft.rfft(moments, n=size, dim=0) * torch.fft.rfft(weights, n=size)[:, None]
    summed = torch.fft.irfft(spectrum, n=size, dim=0)[length - 1 : 2 * length - 1]
    return torch.einsum("id,ide->ie", q, summed.view(length, q.shape[1], v.shape[1]))


@chapter.claim(
    "linear.bias-factor",
    "With an added bias the weight is exp(q·k) exp(B): exp(B_ij) multiplies every φ(q_i)·φ(k_j).",
    CHINESE_1,
    method="exp(q·k + B) against exp(q·k) exp(B), B from T5 buckets with random weights",
    expected="equal",
)
def _() -> Finding:
    bias = t5_bias(IDS, IDS, normal(32, 1), causal=False)[0]
    scores = Q @ K.T / DIM**0.5
    error = largest(torch.exp(scores + bias) / (torch.exp(scores) * torch.exp(bias)) - 1)
    return Finding(f"relative error {error:.1e}", stated=error < EXACT)


@chapter.claim(
    "linear.bias-denominator",
    "With a bias, o_i = Σ_j φ(q_i)·φ(k_j) P_ij v_j.",
    CHINESE_1,
    method="the sum of a row of those weights, as printed and divided by Σ_j φ(q_i)·φ(k_j) P_ij",
    expected="anything, and 1",
    fails="the denominator is missing: it carries P_ij as well",
)
def _() -> Finding:
    factors = torch.exp(t5_bias(IDS, IDS, normal(32, 1, seed=3), causal=False)[0])
    weights = (PHI_Q @ PHI_K.T) * factors
    printed = largest(weights.sum(-1) - 1)
    divided = largest((weights / weights.sum(-1, keepdim=True)).sum(-1) - 1)
    return Finding(
        f"off 1 by {printed:.0f} as printed, by {divided:.1e} divided", stated=printed < EXACT, amended=divided < EXACT
    )


@chapter.claim(
    "linear.bias-score",
    "Score is softmax(QKᵀ + B), and Score_ij is q_i·k_j + B_ij.",
    CHINESE_1,
    method="the largest difference of the two; exp of the second, divided by its sum over j, against the first",
    expected="not equal; equal",
    fails="one word for two things: the second is the score, the first its softmax, the weight",
)
def _() -> Finding:
    scores = Q @ K.T + t5_bias(IDS, IDS, normal(32, 1, seed=3), causal=False)[0]
    weights = torch.softmax(scores, dim=-1)
    apart = largest(weights - scores)
    same = largest(weights - scores.exp() / scores.exp().sum(-1, keepdim=True))
    return Finding(f"apart by {apart:.3g}; exp / sum off by {same:.1e}", stated=apart < EXACT, amended=same < EXACT)


@chapter.claim(
    "linear.bias-quadratic",
    "An added relative bias (T5) brings linear attention back to O(L²).",
    CHINESE_1,
    method="rank of exp(B) for any B and for T5's; T5's sum by FFT against the double sum, and both counts",
    expected="rank far above d = 16, so no factoring; but T5's B depends on i−j, and an FFT takes O(L log L)",
    only_if="B is any matrix; one that depends on i−j alone is a convolution, and causal ALiBi a recurrence",
)
def _() -> Finding:
    any_rank = rank(torch.exp(normal(LENGTH, LENGTH, seed=4)))
    table = normal(32, 1, seed=3)
    factors = torch.exp(t5_bias(IDS, IDS, table, causal=False)[0])
    direct = ((PHI_Q @ PHI_K.T) * factors) @ V
    # t(i−j) for i−j = −(N−1) … N−1, read off one query among keys on both sides of it.
    gaps = torch.arange(-(LENGTH - 1), LENGTH)
    weights = torch.exp(t5_bias(torch.tensor([0]), -gaps, table, causal=False))[0, 0]
    error = largest(_by_fft(weights, PHI_Q, PHI_K, V) - direct) / largest(direct)
    at = 65_536
    quadratic, by_fft = at**2, 2 * DIM * 3 * at * math.log2(3 * at)
    return Finding(
        f"rank {any_rank} (any B), {rank(factors)} (T5); FFT off by {error:.1e}; "
        f"at L = 65536 {quadratic / by_fft:.0f}× fewer steps",
        stated=error > 1e-9,
        amended=error < 1e-9 and any_rank == LENGTH and rank(factors) > DIM,
    )


@chapter.claim(
    "linear.bias-alibi",
    "A relative bias and O(N) exclude each other.",
    CHINESE_1,
    method="causal sum with factors exp(−s(i−j)) (ALiBi) against S_i = e^(−s) S_{i−1} + φ(k_i)v_iᵀ",
    expected="equal: a recurrence with a state of constant size",
    fails="causal ALiBi is a decaying recurrence, O(N)",
)
def _() -> Finding:
    bias = alibi_bias(IDS, IDS, 4)[0]
    direct = ((PHI_Q @ PHI_K.T) * torch.exp(bias)).tril() @ V
    decay = float(torch.exp(bias[1, 0]))
    state, rows = torch.zeros(DIM, DIM, dtype=torch.float64), []
    for q, k, v in zip(PHI_Q, PHI_K, V, strict=True):
        state = decay * state + torch.outer(k, v)
        rows.append(q @ state)
    error = largest(torch.stack(rows) - direct) / largest(direct)
    return Finding(f"largest difference {error:.1e}", stated=error > EXACT, amended=error < EXACT)


@chapter.claim(
    "linear.rotation-factors",
    "RoPE keeps linear attention linear: the rotation acts on φ(q) and φ(k) apart.",
    CHINESE_1,
    method="rank of the rotated weights, and double sum against recurrence, positions up to 2^20",
    expected="rank at most d = 16; equal",
)
def _() -> Finding:
    ids = IDS * 4096
    found = rank(rotate(PHI_Q, ids, theta(DIM)) @ rotate(PHI_K, ids, theta(DIM)).T)
    q, k, v = (x[None, None] for x in (Q, K, V))
    by_sum = linear_attention_by_sum(q, k, v, inv_freq=theta(DIM), positions=ids, causal=True)
    by_state = linear_attention_by_recurrence(q, k, v, inv_freq=theta(DIM), positions=ids, causal=True)
    error = largest(by_sum - by_state)
    return Finding(f"rank {found}; difference {error:.1e}", stated=found <= DIM and error < EXACT)


@chapter.claim(
    "linear.denominator",
    "The denominator is not rotated, because a rotated one can reach 0 or below.",
    f"{CHINESE_1}, {ROFORMER}",
    method="φ = elu + 1 of (3, −40), θ = π/2: rotated and plain sums over keys at distances {2}, then {0, 2}",
    expected="negative, then 0; plain 16 and 32",
)
def _() -> Finding:
    f = torch.tensor([math.pi / 2], dtype=torch.float64)
    one = elu_plus_one(torch.tensor([[3.0, -40.0]], dtype=torch.float64))

    def sums(*distances: int) -> tuple[float, float]:
        keys = one.expand(len(distances), 2)
        query = rotate(one, torch.tensor([2]), f)
        turned = rotate(keys, 2 - torch.tensor(distances), f)
        return float((query @ turned.T).sum()), float((one @ keys.T).sum())

    (below, plain), (zero, plain_two) = sums(2), sums(0, 2)
    return Finding(
        f"rotated {below:.3g} and {zero:.1e}; plain {plain:.3g} and {plain_two:.3g}",
        stated=below < -1 and abs(zero) < 1e-12 and plain > 0 and plain_two > 0,
    )


@chapter.claim(
    "linear.denominator-random",
    "With a rotated denominator the computation is extremely unstable, or impossible.",
    CHINESE_1,
    method="rotated / plain denominator for random q and k, elu + 1, d = 64, 256 causal tokens: the smallest",
    expected="about 0.3: no trouble for random data",
    only_if="features are sparse or made for it; for random ones a rotated denominator stays well above 0",
)
def _() -> Finding:
    q, k = elu_plus_one(normal(2, LENGTH, 64, seed=7))
    turned = (rotate(q, IDS, theta(64)) @ rotate(k, IDS, theta(64)).T).tril().sum(-1)
    ratio = float((turned / (q @ k.T).tril().sum(-1)).min())
    return Finding(f"smallest ratio {ratio:.2f}", stated=ratio < 0.01, amended=ratio > 0.2)


@chapter.claim(
    "linear.weights",
    "In eq. 19 the weights of the values may be negative and do not sum to 1.",
    ROFORMER,
    method="weights for random q and k, elu + 1, d = 64, 256 causal tokens",
    expected="some negative; the sum of a row falls from 1 to about 0.4",
)
def _() -> Finding:
    q, k = elu_plus_one(normal(2, LENGTH, 64, seed=7))
    turned = (rotate(q, IDS, theta(64)) @ rotate(k, IDS, theta(64)).T).tril()
    weights = turned / (q @ k.T).tril().sum(-1, keepdim=True)
    negative = float((weights < 0).double().sum() / (LENGTH * (LENGTH + 1) / 2))
    first, last = float(weights[0].sum()), float(weights[-1].sum())
    return Finding(
        f"{negative:.1%} negative; row sums from {first:.3f} to {last:.3f}",
        stated=negative > 0 and abs(first - 1) < EXACT and last < 0.6,
    )
