"""Long-term decay: scores as a function of distance, and three different meanings of the term."""

import itertools
import math

import numpy as np
import torch

from ropewalk.claims.claim import Chapter, Finding
from ropewalk.claims.samples import EXACT, largest, normal, rotate_to, theta
from ropewalk.claims.sources import BARBERO, CHINESE_1, ROFORMER, RUSSIAN_1
from ropewalk.theory import BAND_EDGES, abel_bound, abel_transform, band_means, decay_curve, score_sum

__all__ = ["chapter"]

chapter: Chapter = Chapter("Decay: scores and distance")

THREE = [1.0, 0.3, 0.05]


def _polar(radius: float, angle: float) -> torch.Tensor:
    return torch.tensor([radius * math.cos(angle), radius * math.sin(angle)], dtype=torch.float64)


def _sum_claim(distance: int, printed: float, right: float) -> Finding:
    value = float(score_sum(distance, THREE))
    return Finding(f"{value:.6f}", stated=abs(value - printed) < 0.05, amended=abs(value - right) < 5e-4)


@chapter.claim(
    "decay.polar",
    "In the plane the score is r_q r_k cos((α − β) + (m − n)θ).",
    CHINESE_1,
    method="scores of rotated vectors with random radii and angles, against the formula",
    expected="equal",
)
def _() -> Finding:
    f = torch.tensor([0.3], dtype=torch.float64)
    error = 0.0
    for r_q, r_k, alpha, beta in normal(20, 4, seed=1).tolist():
        score = float(rotate_to(_polar(r_q, alpha), 9, f) @ rotate_to(_polar(r_k, beta), 4, f))
        error = max(error, abs(score - r_q * r_k * math.cos(alpha - beta + 5 * 0.3)))
    return Finding(f"largest error {error:.1e}", stated=error < EXACT)


@chapter.claim(
    "decay.polar-proportional",
    "So it is proportional to cos((m − n)θ).",
    CHINESE_1,
    method="score / cos((m−n)θ) at distances 0 to 3, for α − β = 1 and for α = β",
    expected="constant only for α = β",
    only_if="q and k are parallel; otherwise α − β stays in the cosine",
)
def _() -> Finding:
    f = torch.tensor([0.3], dtype=torch.float64)

    def spread(gap: float) -> float:
        ratios = [float(rotate_to(_polar(1.0, gap), d, f) @ _polar(1.0, 0.0)) / math.cos(0.3 * d) for d in range(4)]
        return max(ratios) - min(ratios)

    oblique, parallel = spread(1.0), spread(0.0)
    return Finding(
        f"the ratio varies by {oblique:.3g} for α−β = 1, by {parallel:.1e} for α = β",
        stated=oblique < EXACT,
        amended=parallel < EXACT,
    )


@chapter.claim(
    "decay.periodic-2d",
    "In two dimensions the score is periodic and does not decay.",
    CHINESE_1,
    method="the score at distances D and D + 2π/θ, and its largest value beyond 10000",
    expected="equal; the same maximum as at 0",
)
def _() -> Finding:
    distances = np.arange(0, 100, 0.5)
    error = float(np.abs(score_sum(distances, [0.3]) - score_sum(distances + 2 * math.pi / 0.3, [0.3])).max())
    far = float(score_sum(np.arange(10_000, 20_000), [0.3]).max())
    return Finding(f"error {error:.1e}; {far:.6f} beyond 10000", stated=error < 1e-10 and far > 0.9999)


@chapter.claim(
    "decay.total-proportional",
    "In d dimensions the score is proportional to Σ_j cos((m − n)θ_j).",
    CHINESE_1,
    method="score / Σcos at distances 0 to 5: random q and k; k = q; every pair parallel and of equal norm",
    expected="constant only in the last case",
    only_if="every pair of q is parallel to that of k, and the product of their norms is the same for all pairs",
)
def _() -> Finding:
    def spread(q: torch.Tensor, k: torch.Tensor) -> float:
        scores = torch.stack([rotate_to(q, d) @ k for d in range(6)])
        ratios = scores / torch.as_tensor(score_sum(np.arange(6), theta(16).numpy()))
        return float(ratios.max() - ratios.min())

    q, k = normal(2, 16, seed=2)
    flat = torch.ones(16, dtype=torch.float64)
    independent, same, equal = spread(q, k), spread(q, q), spread(flat, flat)
    return Finding(
        f"the ratio varies by {independent:.2g} (random), {same:.2g} (k = q), {equal:.1e} (equal norms)",
        stated=max(independent, same) < EXACT,
        amended=equal < EXACT < same,
    )


@chapter.claim(
    "decay.pair-index",
    "q has pairs q_1 … q_{d/2}, and the total score is the sum over j = 0 … d/2−1.",
    CHINESE_1,
    method="the score for d = 16 as a sum over pairs 0 … 7, and over the pairs 1 … 7 that are in both ranges",
    expected="equal for 0 … 7; one pair is missing in 1 … 7",
    fails="the note numbers the same pairs from 1 in one line and from 0 in the next",
)
def _() -> Finding:
    q, k = normal(2, 16, seed=6)
    total = float(rotate_to(q, 5) @ k)
    pairs = (rotate_to(q, 5) * k).view(8, 2).sum(-1)
    shared, whole = abs(float(pairs[1:].sum()) - total), abs(float(pairs.sum()) - total)
    return Finding(
        f"off by {shared:.2g} over 1 … 7, {whole:.1e} over 0 … 7", stated=shared < EXACT, amended=whole < EXACT
    )


@chapter.claim(
    "decay.s0",
    "S(0) = 3.0 for θ = 1.0, 0.3, 0.05.",
    CHINESE_1,
    method="Σ cos(Δθ_j)",
    expected="3.000000",
)
def _() -> Finding:
    return _sum_claim(0, 3.0, 3.0)


@chapter.claim(
    "decay.s2", "S(2) = 1.4.", CHINESE_1, method="Σ cos(Δθ_j)", expected="−0.416147 + 0.825336 + 0.995004 = 1.404193"
)
def _() -> Finding:
    return _sum_claim(2, 1.4, 1.404)


@chapter.claim("decay.s50", "S(50) = −0.6.", CHINESE_1, method="Σ cos(Δθ_j)", expected="−0.595865")
def _() -> Finding:
    return _sum_claim(50, -0.6, -0.596)


@chapter.claim(
    "decay.s20",
    "The sum S(Δ) = Σ cos(Δθ_j) is 1.4 at Δ = 20, as at Δ = 2.",
    CHINESE_1,
    method="Σ cos(Δθ_j)",
    expected="0.408082 + 0.960170 + 0.540302 = 1.908555",
    fails="S(20) = 1.909, above S(2); it supports the note's own point that decay oscillates",
)
def _() -> Finding:
    return _sum_claim(20, 1.4, 1.909)


@chapter.claim(
    "decay.farther-lower",
    "The larger the distance of two tokens, the lower the score (S(0) > S(2) > S(50)).",
    CHINESE_1,
    method="S at 0, 2, 10, 20, 50, 100",
    expected="increases from 10 to 20 and from 50 to 100",
    fails="these three numbers decrease, others do not; no sum of cosines decreases at every distance",
)
def _() -> Finding:
    values = score_sum([0, 2, 10, 20, 50, 100], THREE)
    shown = ", ".join(f"{v:.2f}" for v in values)
    return Finding(shown, stated=bool((np.diff(values) < 0).all()), amended=values[3] > values[1] > values[2])


@chapter.claim(
    "decay.score",
    "RoPE decays: the larger the distance of two tokens, the smaller the product of their vectors.",
    RUSSIAN_1,
    method="Σ cos(Dθ) for d = 128: the number of increases in 256 steps, and band means up to 2048",
    expected="many steps increase; band means decrease",
    only_if="q = k with pairs of equal norm, and means over bands of distances are compared",
)
def _() -> Finding:
    curve = score_sum(np.arange(2048), theta(128).numpy())
    rises = int((np.diff(curve[:257]) > 0).sum())
    bands = band_means(curve, BAND_EDGES)
    return Finding(
        f"{rises} of 256 steps increase; bands {bands[0]:.1f} … {bands[-1]:.1f}",
        stated=rises == 0,
        amended=bool((np.diff(bands) < 0).all()),
    )


@chapter.claim(
    "decay.figure",
    "Long-term decay oscillates downwards (RoFormer's figure 2: the mean of |S_j|, d = 128).",
    f"{CHINESE_1}, {ROFORMER}",
    method="the curve at 0, 1, 8, 100, 236; the number of increases in 256 steps; band means up to 2048",
    expected="32.5, 31.5382, 19.8174, 10.2273, 6.4150; 115 increases; decreasing means 17.468, 12.020, … 5.298",
)
def _() -> Finding:
    curve = decay_curve(np.arange(2048), theta(128).numpy())
    values = curve[[0, 1, 8, 100, 236]]
    bands = band_means(curve, BAND_EDGES)
    rises = int((np.diff(curve[:257]) > 0).sum())
    golden = np.allclose(values, [32.5, 31.5382, 19.8174, 10.2273, 6.41500], rtol=0, atol=5e-5)
    golden_bands = np.allclose(bands, [17.468, 12.020, 10.020, 8.268, 6.973, 5.960, 5.298], rtol=0, atol=5e-4)
    decreasing = bool((np.diff(bands) < 0).all()) and int(curve[:257].argmin()) == 236
    shown = ", ".join(f"{v:.4f}" for v in values)
    return Finding(
        f"{shown}; {rises} increases; {bands[0]:.3f} … {bands[-1]:.3f}",
        stated=golden and golden_bands and decreasing and rises == 115,
    )


@chapter.claim(
    "decay.abel",
    "The score is at most max|h_{i+1} − h_i| · Σ|S_{i+1}|, by summation by parts.",
    ROFORMER,
    method="eq. 36 against the direct sum, and score / bound, for 200 random h at four distances, d = 128",
    expected="equal; the bound is very loose: the largest ratio is a few hundredths",
)
def _() -> Finding:
    f, rng = theta(128).numpy(), np.random.default_rng(0)
    error, ratio = 0.0, 0.0
    for _, distance in itertools.product(range(50), (1, 16, 200, 3000)):
        h = rng.normal(size=64) + 1j * rng.normal(size=64)
        total = complex((h * np.exp(1j * distance * f)).sum())
        error = max(error, abs(total - abel_transform(h, distance, f)))
        ratio = max(ratio, abs(total) / abel_bound(h, distance, f))
    return Finding(f"error {error:.1e}; largest score / bound {ratio:.4f}", stated=error < 1e-10 and ratio < 0.05)


@chapter.claim(
    "decay.random",
    "If the bound decays, the scores decay.",
    f"{RUSSIAN_1}, {CHINESE_1}",
    method="mean and spread of (R_m q)·k over 4000 random q and k, d = 128, at distances 0, 10, 1000, 10000",
    expected="mean 0 and spread √128 = 11.3 at every distance",
    fails="for random q and k the scores do not decay, although the bound does",
)
def _() -> Finding:
    q, k = normal(2, 4000, 128, seed=3)
    scores = torch.stack([(rotate_to(q, d) * k).sum(-1) for d in (0, 10, 1000, 10_000)])
    means, spreads = scores.mean(-1), scores.std(-1)
    level = largest(spreads / math.sqrt(128) - 1)
    near_zero = largest(means) < 4 * math.sqrt(128 / 4000)
    shown = ", ".join(f"{s:.1f}" for s in spreads)
    return Finding(
        f"largest mean {largest(means):.2f}; spread {shown}",
        stated=bool(spreads[-1] < 0.8 * spreads[0]),
        amended=level < 0.05 and near_zero,
    )


@chapter.claim(
    "decay.made-for-distance",
    "The nearest key need not have the highest score: the score of k = R_r q is highest at distance r.",
    BARBERO,
    method="k = R_r q for r = 0 and 40 random r < 4096, d = 128: the distance of the highest of 4096 scores",
    expected="at r",
)
def _() -> Finding:
    f = theta(128)
    h = normal(128, seed=4)
    power = (h.view(64, 2) ** 2).sum(-1)
    distances = torch.arange(4096, dtype=torch.float64)
    chosen = [0, *(1 + torch.randperm(4095, generator=torch.Generator().manual_seed(5))[:40]).tolist()]
    peaks = [int((torch.cos((distances - r)[:, None] * f) @ power).argmax()) for r in chosen]
    # The closed form is compared with the rotation itself around one r.
    r, low = chosen[1], max(0, chosen[1] - 50)
    direct = low + int(torch.stack([rotate_to(h, d) @ rotate_to(h, r) for d in range(low, r + 50)]).argmax())
    hits = sum(peak == r for r, peak in zip(chosen, peaks, strict=True))
    return Finding(f"at r in {hits} of {len(chosen)}", stated=hits == len(chosen) and direct == r)
