"""Papers on longer contexts: Position Interpolation, YaRN, xPos, and ALiBi."""

import math

import numpy as np

from ropewalk.claims.claim import Chapter, Finding
from ropewalk.claims.sources import NOPE, PI, PRACTICE, ROFORMER, XPOS, YARN
from ropewalk.reference import alibi_slopes
from ropewalk.spec import Plain, Yarn
from ropewalk.theory import score_sum

__all__ = ["chapter"]

chapter: Chapter = Chapter("Papers: longer contexts")

DIM, BASE = 128, 10_000.0
THETA = Plain(BASE).evaluate(DIM)


@chapter.claim(
    "pi.bound",
    "Between integer positions the score differs from linear interpolation by at most max|h| · d/(32 ln c).",
    PI,
    method="the worst h at the midpoint of (0, 1): Σ(1 − cos(θ_j/2)), d = 128, c = 10000",
    expected="0.493876, above the printed 0.434294",
    fails="d/256.1 (Σθ²/8), not d/294.7",
)
def _() -> Finding:
    worst = float((1 - np.cos(THETA / 2)).sum())
    # With h_j = 1 for all j the score is Σcos. Its distance from the chord between −1/2 and 1/2 is largest at 0.
    reached = float(score_sum(0.0, THETA) - (score_sum(-0.5, THETA) + score_sum(0.5, THETA)) / 2)
    printed, corrected = DIM / (32 * math.log(BASE)), float((THETA**2).sum() / 8)
    return Finding(
        f"worst case {worst:.6f}; printed {printed:.6f}; corrected {corrected:.6f} = d/{DIM / corrected:.1f}",
        stated=worst <= printed,
        amended=worst <= corrected and abs(worst - reached) < 1e-12,
    )


@chapter.claim(
    "pi.bound-random",
    "A test on random vectors shows whether a bound holds, such as the printed bound of Position Interpolation.",
    PRACTICE,
    method="200 draws of complex normal h, scaled to max|h| = 1: the largest error / printed bound",
    expected="below 1 in every draw",
    fails="no draw violates it; the worst case does",
)
def _() -> Finding:
    rng = np.random.default_rng(0)
    printed, largest = DIM / (32 * math.log(BASE)), 0.0
    for _ in range(200):
        h = rng.normal(size=64) + 1j * rng.normal(size=64)
        h /= np.abs(h).max()
        a, middle, b = ((h * np.exp(1j * s * THETA)).sum().real for s in (0.0, 0.5, 1.0))
        largest = max(largest, abs(middle - (a + b) / 2) / printed)
    return Finding(f"largest ratio {largest:.2f}", stated=largest > 1, amended=largest < 1)


@chapter.claim(
    "yarn.ramps",
    "YaRN's published code computes the frequencies that its paper defines.",
    YARN,
    method="both ramps for d = 128, base 10000, trained length 4096, factor 16: the largest relative difference",
    expected="67 % at pair 38; equal outside the ramp",
    fails="paper and code differ by up to 67 %",
)
def _() -> Finding:
    paper, code = (Yarn(BASE, 16, 4096, ramp=ramp).evaluate(DIM) for ramp in ("ratio", "index"))
    gap = np.abs(paper - code) / np.maximum(paper, code)
    pair = int(gap.argmax())
    same = bool((gap[:20] < 1e-12).all() and (gap[46:] < 1e-12).all())
    return Finding(
        f"{gap[pair]:.0%} at pair {pair}; pair 30: {paper[30]:.6f} and {code[30]:.6f}",
        stated=bool(gap.max() < 1e-12),
        amended=same and pair == 38 and abs(gap[pair] - 0.67) < 0.01,
    )


@chapter.claim(
    "yarn.temperature",
    "√(1/t) = 0.1 ln s + 1: 1.208 for a factor of 8.",
    YARN,
    method="the formula for s = 2, 4, 8, 16, 32",
    expected="1.0693, 1.1386, 1.2079, 1.2773, 1.3466",
)
def _() -> Finding:
    values = [Yarn(BASE, s, 4096).amplitude() for s in (2, 4, 8, 16, 32)]
    shown = ", ".join(f"{v:.4f}" for v in values)
    return Finding(shown, stated=shown == "1.0693, 1.1386, 1.2079, 1.2773, 1.3466")


@chapter.claim(
    "xpos.algorithm",
    "xPos scales the vector at position n by ζ^n (its algorithm 1).",
    XPOS,
    method="ζ_0 = γ/(1+γ) with γ = 0.4: the first n at which ζ_0^n is 0 in float64",
    expected="0.2857^n is 0 from about n = 595",
    only_if="exponents are bounded; the published code uses n/512, centred. ζ^n itself underflows",
)
def _() -> Finding:
    zeta = 0.4 / 1.4
    underflow = next(n for n in range(10_000) if zeta**n == 0)
    bounded = zeta ** (4096 / 512)
    return Finding(
        f"0 from n = {underflow}; ζ^(4096/512) = {bounded:.1e}", stated=underflow > 2048, amended=bounded > 0
    )


@chapter.claim(
    "alibi.slopes",
    "ALiBi's slopes are powers of 2^(−2^(−log2(heads + 3))).",
    NOPE,
    method="that number against the slopes of ALiBi for 8 heads",
    expected="0.939 against 0.5, 0.25, …",
    misprint="2^(−8k/n) for head k of n, as in ALiBi",
)
def _() -> Finding:
    printed, slopes = 2 ** -(2 ** -math.log2(8 + 3)), alibi_slopes(8).tolist()
    return Finding(
        f"{printed:.3f} against {slopes[0]:g}, {slopes[1]:g}",
        stated=abs(printed - slopes[0]) < 1e-6,
        amended=slopes == [2.0**-k for k in range(1, 9)],
    )


@chapter.claim(
    "roformer.wobert",
    "On CAIL2019-SCM RoFormer is 1.5 points better than WoBERT (69.79 and 68.10).",
    ROFORMER,
    method="difference of the printed accuracies",
    expected="1.69; 1.50 is RoFormer at length 1024 over RoFormer at 512 (68.29)",
    fails="69.79 − 68.10 is 1.69 points, not 1.5",
)
def _() -> Finding:
    over_wobert, over_itself = 69.79 - 68.10, 69.79 - 68.29
    return Finding(
        f"{over_wobert:.2f} over WoBERT, {over_itself:.2f} over RoFormer-512",
        stated=abs(over_wobert - 1.5) < 0.05,
        amended=abs(over_wobert - 1.69) < 0.005 and abs(over_itself - 1.5) < 0.005,
    )
