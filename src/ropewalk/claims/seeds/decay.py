"""Long-term decay: scores as a function of distance, and three different meanings of the term."""

import itertools
import math
from collections.abc import Callable

import numpy as np
import torch

from ropewalk.claims.claim import Chapter, Finding
from ropewalk.claims.samples import EXACT, largest, normal, rotate_to, theta
from ropewalk.claims.sources import BARBERO, NOTE_000, NOTE_002, PRACTICE, ROFORMER
from ropewalk.theory import abel_bound, abel_transform, decay_curve, score_sum

__all__ = ["chapter"]

chapter: Chapter = Chapter("Decay: scores and distance")

THREE = [1.0, 0.3, 0.05]
OCTAVES = [1 << n for n in range(4, 18)]
BASES = (10_000.0, 500_000.0, 1_000_000.0)
# Up to which distance the means over octaves fall, per base.
REACH = [16_384, 131_072, 131_072]


def _polar(radius: float, angle: float) -> torch.Tensor:
    return torch.tensor([radius * math.cos(angle), radius * math.sin(angle)], dtype=torch.float64)


def _sum_claim(distance: int, printed: float, right: float) -> Finding:
    """The sum at a distance. A printed number holds if it is the right one, rounded."""
    value = float(score_sum(distance, THREE))
    computed = abs(value - right) < 5e-4
    return Finding(f"{value:.6f}", stated=computed and abs(value - printed) < 0.05, amended=computed)


@chapter.claim(
    "decay.polar",
    "In the plane the score is r_q r_k cos((α − β) + (m − n)θ).",
    NOTE_002.at(285, r"\text{AttentionScore} = r_q r_k \cos((\alpha - \beta) + (m - n)\theta)"),
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
    "In the plane the score is proportional to cos((m − n)θ).",
    NOTE_002.at(289, r"\text{RoPE}(m, n) \propto \cos((m - n)\theta)"),
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
    NOTE_002.at(291, "这玩意是个周期函数，也没远程衰减性啊。"),
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
    NOTE_002.at(
        313, r"\text{Total Score} = \sum_{j=0}^{d/2-1} \text{Score}_j \propto \sum_{j=0}^{d/2-1} \cos((m - n)\theta_j)"
    ),
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
    "decay.s0",
    "S(0) = 3.0 for θ = 1.0, 0.3, 0.05.",
    NOTE_002.at(319, r"当 $\Delta = 0$ 时 $S(0) = 3.0$"),
    method="Σ cos(Δθ_j)",
    expected="3.000000",
)
def _() -> Finding:
    return _sum_claim(0, 3.0, 3.0)


@chapter.claim(
    "decay.s2",
    "S(2) = 1.4.",
    NOTE_002.at(319, r"当 $\Delta = 2$ 时 $S(2) = 1.4$"),
    method="Σ cos(Δθ_j)",
    expected="−0.416147 + 0.825336 + 0.995004 = 1.404193",
)
def _() -> Finding:
    return _sum_claim(2, 1.4, 1.404)


@chapter.claim(
    "decay.s50",
    "S(50) = −0.6.",
    NOTE_002.at(319, r"当 $\Delta = 50$ 时 $S(50) = -0.6$"),
    method="Σ cos(Δθ_j)",
    expected="−0.595865",
)
def _() -> Finding:
    return _sum_claim(50, -0.6, -0.596)


@chapter.claim(
    "decay.s20",
    "The sum S(Δ) = Σ cos(Δθ_j) is 1.4 at Δ = 20, as at Δ = 2.",
    NOTE_002.at(321, r"当 $\Delta = 20$ 时 $S(20) = 1.4 = S(2)$ 呀。"),
    method="Σ cos(Δθ_j)",
    expected="0.408082 + 0.960170 + 0.540302 = 1.908555",
    fails="S(20) = 1.909, not 1.4",
)
def _() -> Finding:
    return _sum_claim(20, 1.4, 1.909)


@chapter.claim(
    "decay.farther-lower",
    "The larger the distance, the lower the score (S(0) > S(2) > S(50)), while it oscillates.",
    NOTE_002.at(319, "可以发现，相对举例越远，注意力分数越低。"),
    NOTE_002.at(321, "远程衰减本来就是振荡下降的。"),
    method="S at 0, 2, 50; means of S over distances 1–31, 32–63, 64–95, 96–126; S at 126",
    expected="3.00, 1.40, −0.60; 0.60, −0.61, −0.65, 0.73; 2.94",
    only_if="distances are at most 63, half the period of the slowest cosine; then S rises, to 2.94 at 126",
)
def _() -> Finding:
    curve = score_sum(np.arange(127), THREE)
    falls = bool(curve[0] > curve[2] > curve[50])
    bands = [float(curve[a:b].mean()) for a, b in ((1, 32), (32, 64), (64, 96), (96, 127))]
    return Finding(
        f"{curve[0]:.2f}, {curve[2]:.2f}, {curve[50]:.2f}; {', '.join(f'{band:.2f}' for band in bands)}; "
        f"{curve[126]:.2f}",
        stated=falls and bands == sorted(bands, reverse=True),
        amended=falls and bands[0] > bands[1] and bands[3] > bands[1] + 1 and round(float(curve[126]), 2) == 2.94,
    )


def _octaves(curve: Callable[..., np.ndarray], base: float, dim: int = 128) -> np.ndarray:
    """Means of `curve` over the octaves of distances [16, 32), [32, 64), … [65536, 131072)."""
    distances = np.arange(OCTAVES[0], OCTAVES[-1])
    frequencies = theta(dim, base).numpy()
    values = np.concatenate([curve(part, frequencies) for part in np.array_split(distances, 16)])
    return np.array([values[a - OCTAVES[0] : b - OCTAVES[0]].mean() for a, b in itertools.pairwise(OCTAVES)])


def _falls_to(octaves: np.ndarray) -> int:
    """Distance up to which the mean of every octave is below that of the octave before it."""
    rising = np.flatnonzero(np.diff(octaves) >= 0)
    return OCTAVES[int(rising[0]) + 1 if rising.size else len(octaves)]


def _listed(reach: list[int]) -> str:
    """Up to which distance means fall, per base."""
    return ", ".join(f"{limit} (base {base:,.0f})" for base, limit in zip(BASES, reach, strict=True))


@chapter.claim(
    "decay.score",
    "RoPE decays: the larger the distance of two tokens, the smaller the product of their vectors.",
    NOTE_000.at(
        50,
        "чем дальше токены друг от друга (в смысле позиции в тексте), тем меньше будет их скалярное произведение.",
    ),
    method="Σ cos(Dθ), which is the product for q = k with pairs of equal norm, d = 128: increases in 256 steps; means "
    "over octaves of distances up to 131072 for bases 10⁴, 5·10⁵ and 10⁶",
    expected="many steps increase; means fall up to 16384 for base 10⁴, to −2.89, and to 131072 for the others",
    only_if="q = k with pairs of equal norm, means over octaves are compared, and, for base 10⁴, up to 16384",
)
def _() -> Finding:
    rises = int((np.diff(score_sum(np.arange(257), theta(128).numpy())) > 0).sum())
    octaves = {base: _octaves(score_sum, base) for base in BASES}
    reach = [_falls_to(means) for means in octaves.values()]
    small = octaves[BASES[0]]
    return Finding(
        f"{rises} of 256 steps increase; means fall up to {_listed(reach)}; base 10⁴: {small[0]:.1f} … "
        f"{small.min():.2f} … {small[-1]:.2f}",
        stated=rises == 0,
        amended=reach == REACH and round(float(small.min()), 2) == -2.89 and small[-1] > small.min() + 2,
    )


@chapter.claim(
    "decay.figure",
    "Long-term decay oscillates downwards: RoFormer's figure 2, the mean of |S_j|, d = 128, distances to 250.",
    NOTE_002.at(321, "我们可以看论文中远程衰减的原图就知道，远程衰减本来就是振荡下降的。"),
    ROFORMER,
    method="the curve at 0, 1, 8, 100, 236; increases in 256 steps; means over 0–31, 32–63, 64–127, 128–255",
    expected="32.5, 31.5382, 19.8174, 10.2273, 6.4150; 115 increases; decreasing means",
)
def _() -> Finding:
    curve = decay_curve(np.arange(257), theta(128).numpy())
    values, rises = curve[[0, 1, 8, 100, 236]], int((np.diff(curve) > 0).sum())
    golden = np.allclose(values, [32.5, 31.5382, 19.8174, 10.2273, 6.41500], rtol=0, atol=5e-5)
    means = [float(curve[a:b].mean()) for a, b in itertools.pairwise((0, 32, 64, 128, 256))]
    return Finding(
        f"{', '.join(f'{v:.4f}' for v in values)}; {rises} of 256 steps increase; means "
        f"{', '.join(f'{mean:.1f}' for mean in means)}",
        stated=bool(golden) and rises == 115 and means == sorted(means, reverse=True),
    )


@chapter.claim(
    "decay.bound",
    "The upper bound gradually decreases overall as the distance grows.",
    NOTE_002.at(271, "我们不会采用原文那种比较数学的方式去证明 upper bound 总体上会逐渐减小"),
    ROFORMER,
    method="the mean of |S_j|, d = 128: means over octaves of distances up to 131072 for bases 10⁴, 5·10⁵ and 10⁶",
    expected="means fall up to 16384 for base 10⁴ and then rise (4.66, 4.70, 4.72, 4.78), and fall to 131072 for the "
    "others",
    only_if="base 10⁴: distances up to 16384, after which the means of the bound rise slightly",
)
def _() -> Finding:
    octaves = {base: _octaves(decay_curve, base) for base in BASES}
    reach = [_falls_to(means) for means in octaves.values()]
    late = ", ".join(f"{mean:.2f}" for mean in octaves[BASES[0]][-4:])
    return Finding(
        f"means fall up to {_listed(reach)}; base 10⁴ from 8192 on: {late}",
        stated=min(reach) == OCTAVES[-1],
        amended=reach == REACH and late == "4.66, 4.70, 4.72, 4.78",
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
    PRACTICE,
    method="mean and spread of (R_m q)·k over 4000 random q and k, d = 128, at distances 0, 10, 1000, 10000",
    expected="mean 0 and spread √128 = 11.3 at every distance",
    fails="scores of random q and k do not decay",
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
