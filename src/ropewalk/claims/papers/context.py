"""Papers on the base and the context length: Men et al. and Liu et al."""

import math

import numpy as np

from ropewalk.claims.claim import Chapter, Finding
from ropewalk.claims.sources import KEXUE, LIU, MEN
from ropewalk.spec import Plain
from ropewalk.theory import (
    admissible_bases,
    context_after_tuning,
    critical_base,
    critical_dimension,
    extrapolation_limit,
    first_negative_distance,
    lowest_admissible_base,
    periods,
    score_sum,
    small_base_thresholds,
)

__all__ = ["chapter"]

chapter: Chapter = Chapter("Papers: base and context length")


def _first_negative(dim: int, base: float) -> int | None:
    return first_negative_distance(Plain(base).evaluate(dim), limit=40_000)


@chapter.claim(
    "men.theorem",
    "On average the score of a similar key exceeds that of a random key by 2σ² Σ cos(mθ_i).",
    MEN,
    method="100000 draws, d = 128, mean 0.7, σ = 1.3, at m = 0, 100, 1707; the difference divided by 2σ²",
    expected="64, 30.54, −0.50, within 4 standard errors",
    long=True,
)
def _() -> Finding:
    rng, f, sigma = np.random.default_rng(0), Plain().evaluate(128), 1.3
    within, figures = True, []
    for m in (0, 100, 1707):
        z = [rng.normal(0.7, sigma, (100_000, 64)) + 1j * rng.normal(0.7, sigma, (100_000, 64)) for _ in range(2)]
        rotated = z[0] * np.exp(1j * m * f)
        # The paper's similar key is q plus noise of mean 0. The noise does not change the mean, so q itself is used.
        lead = ((rotated * z[0].conj()).real - (rotated * z[1].conj()).real).sum(-1) / (2 * sigma**2)
        truth, error = float(score_sum(m, f)), float(lead.std() / math.sqrt(len(lead)))
        within &= abs(float(lead.mean()) - truth) < 4 * error
        figures.append(f"{lead.mean():.2f} ({truth:.2f})")
    return Finding(", ".join(figures), stated=within)


@chapter.claim(
    "men.llama2",
    "By the criterion Σ cos(mθ_i) ≥ 0, the base of Llama 2, 10000, does not suffice for its length of 4096.",
    MEN,
    method="the first m with Σ cos(mθ_i) < 0, d = 128",
    expected="1707: the last admissible distance is 1706, that is a length of 1707",
)
def _() -> Finding:
    first = _first_negative(128, 10_000)
    return Finding(f"{first}", stated=first == 1707)


@chapter.claim(
    "men.larger-base",
    "A larger base supports a longer context.",
    MEN,
    method="the first negative m for bases 10 to 10^6, d = 32 and d = 128",
    expected="increases from decade to decade, but not from base to base: 236 at 2000 and 228 at 5000 for d = 32",
    only_if="the bases are a decade apart; the length is not monotone in the base",
)
def _() -> Finding:
    bases = (10, 50, 100, 500, 1e3, 2e3, 5e3, 1e4, 5e4, 1e5, 5e5, 1e6)
    small, large = ([_first_negative(dim, base) or 0 for base in bases] for dim in (32, 128))
    golden = small == [5, 22, 28, 103, 122, 236, 228, 474, 883, 1283, 2089, 3478] and large == [
        *(5, 29, 59, 171, 361, 506, 864, 1707, 5306, 7757, 18438, 27115)
    ]
    decades = [small[i] for i in (0, 2, 4, 7, 9, 11)]
    return Finding(
        f"d = 32: {small[5]} at 2000, {small[6]} at 5000; d = 128: {large[7]} at 10⁴, {large[-1]} at 10⁶",
        stated=small == sorted(small),
        amended=golden and decades == sorted(decades),
    )


@chapter.claim(
    "men.islands",
    "Every base above the smallest admissible one is admissible.",
    MEN,
    method="test every integer base from 26900 to 29100 for a context of 4096, d = 128",
    expected="[26953, 26973] and [28629, 29079], with a gap between them",
    fails="separate intervals; test every base",
    long=True,
)
def _() -> Finding:
    intervals = admissible_bases(range(26_900, 29_101), rotary_dim=128, length=4096)
    shown = ", ".join(f"[{a:.0f}, {b:.0f}]" for a, b in intervals)
    return Finding(shown, stated=len(intervals) == 1, amended=intervals == [(26_953, 26_973), (28_629, 29_079)])


@chapter.claim(
    "men.table-2",
    "The smallest base for a context of 2048 is 1.6e4.",
    MEN,
    method="test every integer base from 11500 to 11700, d = 128",
    expected="11588 is admissible",
    fails="1.2e4 for 2048, not 1.6e4: [11588, 11649]",
)
def _() -> Finding:
    lowest = lowest_admissible_base(range(11_500, 11_701), rotary_dim=128, length=2048)
    return Finding(f"{lowest:.0f}", stated=lowest is None, amended=lowest == 11_588)


@chapter.claim(
    "men.table-4",
    "Table 4 counts the m with Σ cos(mθ_i) ≥ 0.",
    MEN,
    method="sums of the table's second method (base 10000, trained length 4k, factor 8) for m < 15·1024 and < 30·1024",
    expected="97 of the first 15360 are below 0, as printed in the table, and 2554 of 30720",
    misprint="it counts the m with Σ cos(mθ_i) < 0",
)
def _() -> Finding:
    i = np.arange(64)
    f = np.where(i >= 44, 10_000.0 ** (-2 * i / 128) / 8, (10_000.0 * 8 ** (128 / 88)) ** (-2 * i / 128))
    below = [int((score_sum(np.arange(k * 1024), f) < 0).sum()) for k in (15, 30)]
    plain = int((score_sum(np.arange(30 * 1024), Plain(5e6).evaluate(128)) < 0).sum())
    return Finding(
        f"below 0: {below[0]} and {below[1]}; base 5e6: {plain}",
        stated=15 * 1024 - below[0] == 97,
        amended=below == [97, 2554] and plain == 0,
    )


@chapter.claim(
    "men.partial",
    "Rotating half of the features satisfies the bound at any length.",
    KEXUE,
    method="Σ cos with 32 frequencies and 32 zeros, d = 128, m < 100000, bases 10 and 10000",
    expected="never below 0",
)
def _() -> Finding:
    lowest = min(
        float(score_sum(np.arange(100_000), [*Plain(base).evaluate(64).tolist(), *[0.0] * 32]).min())
        for base in (10.0, 10_000.0)
    )
    return Finding(f"lowest {lowest:.2f}", stated=lowest >= 0)


@chapter.claim(
    "liu.critical",
    "d_extra = 2⌈d/2 · log_base(T/2π)⌉: 82, 92, 100 for T = 2048, 4096, 8192; 70 for base 5e5 and 8192.",
    LIU,
    method="the formula for d = 128",
    expected="82, 92, 100, 70",
)
def _() -> Finding:
    dims = [critical_dimension(128, 10_000, t) for t in (2048, 4096, 8192)] + [critical_dimension(128, 5e5, 8192)]
    return Finding(", ".join(map(str, dims)), stated=dims == [82, 92, 100, 70])


@chapter.claim(
    "liu.critical-cap",
    "d_extra is a number of features, at most d.",
    LIU,
    method="T = 65536, base 10000, d = 128, as printed and as computed here",
    expected="130 of 128 as printed",
    only_if="T < 2π·base; for larger T the printed formula exceeds d and must be limited",
)
def _() -> Finding:
    printed = 2 * math.ceil(64 * math.log(65_536 / (2 * math.pi), 10_000))
    ours = critical_dimension(128, 10_000, 65_536)
    return Finding(f"{printed} as printed, {ours} limited", stated=printed <= 128, amended=ours == 128)


@chapter.claim(
    "liu.extrapolation",
    "β_0 for 4096 → 16384 is 71738, and T_extra for base 10^6 is 129027.",
    LIU,
    method="eq. 16a and 16b",
    expected="71738 and 129027",
)
def _() -> Finding:
    base, length = round(critical_base(4096, 16_384)), round(extrapolation_limit(1e6, 128, 92))
    return Finding(f"{base} and {length}", stated=(base, length) == (71_738, 129_027))


@chapter.claim(
    "liu.small-base",
    "Tuned with a base at or below β_0, a model is limited by the tuned length.",
    LIU,
    method="eq. 16a to 16c for LLaMA 2 (d = 128, trained at 4096), tuned at 4096, 8192, 16384, 131072: T_extra / "
    "T_tune at β_0 and at 0.8 β_0, with the unrounded and the rounded d_extra; d'_extra for bases 100 to β_0",
    expected="unrounded, T_extra = T_tune at β_0, and less below it: there the tuned length is the larger of the two. "
    "Rounded, up to a factor β_0^(2/d) more. d'_extra ≥ d_extra = 92",
    needs="tuned models; measured here: T_extra falls to T_tune at β_0, up to the rounding of d_extra",
)
def _() -> Finding:
    exponent, right, rounded, smallest = math.log(4096 / math.tau, 10_000), True, [], 128
    for length in (4096, 8192, 16_384, 131_072):
        critical = critical_base(4096, length)
        at, below = (math.tau * base**exponent / length for base in (critical, 0.8 * critical))
        rounded.append(math.tau * critical ** (92 / 128) / length)
        right &= abs(at - 1) < 1e-9 and below < 0.9 and 1 <= rounded[-1] < critical ** (2 / 128)
        for base in (100.0, 500.0, 652.0, 2608.0, 10_000.0, critical):
            tuned = context_after_tuning(4096, length, base, rotary_dim=128)
            right &= tuned.limit == length
            smallest = min(smallest, tuned.critical_dim)
            right &= tuned.critical_dim == critical_dimension(128, base, length)
        right &= context_after_tuning(4096, length, 1.001 * critical, rotary_dim=128).case == "larger base"
    return Finding(
        f"unrounded 1 at β_0, {below:.2f} at 0.8 β_0; rounded {', '.join(f'{ratio:.2f}' for ratio in rounded)} at β_0; "
        f"smallest d'_extra {smallest}",
        stated=None,
        amended=right and smallest == 92,
    )


@chapter.claim(
    "liu.thresholds",
    "Below β_1, β_2, β_3 = 2T/π, T/π, T/2π (2608, 1304, 652 for 4096) every pair completes 1/4, 1/2, 1 rotation.",
    LIU,
    method="eq. 16d; the rotations of the slowest of 64 pairs, T/(2π β^(1−2/d)), at the three bases",
    expected="2607.6, 1303.8, 651.9; at least 0.25, 0.5 and 1: the exponent 1 − 2/d is below the 1 of the thresholds",
)
def _() -> Finding:
    bases = small_base_thresholds(4096)
    completed = [4096 / periods(Plain(base).evaluate(128)).max() for base in bases]
    golden = [round(base, 1) for base in bases] == [2607.6, 1303.8, 651.9]
    return Finding(
        f"{', '.join(f'{base:.1f}' for base in bases)}; {', '.join(f'{part:.3f}' for part in completed)} rotations",
        stated=golden and all(a >= b for a, b in zip(completed, (0.25, 0.5, 1), strict=True)),
    )


@chapter.claim(
    "liu.thresholds-help",
    "Tuning with a base below β_1, β_2 or β_3 improves extrapolation significantly, beyond the tuned length too.",
    LIU,
    method="the part of a rotation that the slowest pair completes within T = 4096, bases 10000, 2608, 1304, 652, 500",
    expected="0.075, 0.283, 0.559, 1.106, 1.437: increases; the loss of a tuned model is not measured here",
    needs="tuned models; the three bases are expectations on tuning, not bounds: the limit stays the tuned length",
)
def _() -> Finding:
    tuned = [context_after_tuning(4096, 4096, base, 128) for base in (1e4, 2608.0, 1304.0, 652.0, 500.0)]
    completed = [one.slowest_rotation for one in tuned]
    golden = [round(part, 3) for part in completed] == [0.075, 0.283, 0.559, 1.106, 1.437]
    return Finding(
        f"{', '.join(f'{part:.3f}' for part in completed)} rotations; limits "
        f"{', '.join(str(one.limit) for one in tuned)}",
        stated=None,
        amended=golden and all(one.limit == 4096 for one in tuned),
    )
