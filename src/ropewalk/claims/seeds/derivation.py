"""The derivation of RoPE in the second Chinese note, step by step, in the plane."""

import cmath
import functools
import math
from collections.abc import Callable

import torch

from ropewalk.claims.claim import Chapter, Finding
from ropewalk.claims.samples import EXACT, normal
from ropewalk.claims.sources import CHINESE_1, CHINESE_2, RUSSIAN_1
from ropewalk.reference import rotate

__all__ = ["chapter"]

chapter: Chapter = Chapter("Derivation: from ⟨f(q,m), f(k,n)⟩ = g(q,k,m−n) to f(q,m) = q·exp(imθ)")

THETA = 0.3
QUERIES = [complex(a, b) for a, b in normal(6, 2).tolist()]
KEYS = [complex(a, b) for a, b in normal(6, 2, seed=1).tolist()]
PAIRS = list(zip(QUERIES, KEYS, strict=True))
GRID = [(m, n) for m in range(-3, 9) for n in range(-3, 9)]


def _f(q: complex, m: int) -> complex:
    """f(q, m) by the reference rotation of a 2-vector."""
    x = torch.tensor([[q.real, q.imag]], dtype=torch.float64)
    a, b = rotate(x, torch.tensor([m]), torch.tensor([THETA], dtype=torch.float64))[0].tolist()
    return complex(a, b)


def _cached_f() -> Callable[[complex, int], complex]:
    """f with a cache, for one measurement that uses the same vectors many times. Each measurement has its own cache."""
    return functools.cache(_f)


def _angle_difference(a: float, b: float) -> float:
    """|a − b| for two angles, modulo 2π."""
    return abs(cmath.phase(cmath.exp(1j * (a - b))))


def _worst(error: Callable[[complex, complex, int, int], float]) -> float:
    return max(error(q, k, m, n) for q, k in PAIRS for m, n in GRID)


@chapter.claim(
    "derivation.initial",
    "f(q, 0) = q: a vector at position 0 is unchanged.",
    CHINESE_2,
    method="the rotation of six vectors to position 0",
    expected="unchanged, bit by bit",
)
def _() -> Finding:
    error = max(abs(_f(q, 0) - q) for q in QUERIES)
    return Finding(f"error {error:g}", stated=error == 0)


@chapter.claim(
    "derivation.inner-product",
    "⟨q, k⟩ = Re[q k*], and q and k must be real for that.",
    CHINESE_2,
    method="q·k of 2-vectors against Re[q k*] of the same vectors as complex numbers",
    expected="equal for every complex q and k",
    fails="the identity holds for any two plane vectors as complex numbers; only their components are real",
)
def _() -> Finding:
    error = max(abs((q.real * k.real + q.imag * k.imag) - (q * k.conjugate()).real) for q, k in PAIRS)
    imaginary = min(abs(q.imag) for q in QUERIES)
    return Finding(
        f"error {error:.1e}, with imaginary parts of at least {imaginary:.2g}",
        stated=error > EXACT,
        amended=error < EXACT and imaginary > 0,
    )


@chapter.claim(
    "derivation.one-g",
    "Re[f(q,m) f*(k,n)] = g(q,k,m−n) can be solved as f(q,m) f*(k,n) = g(q,k,m−n), with the same g.",
    CHINESE_2,
    method="f(q,m) = q for even m and q* for odd m, so that f(q,0) = q: drift of the real and of the complex product",
    expected="only the complex product drifts, so this solution is lost; the rotation solves both equations",
    fails="the two g differ: the first is the real part of the second, and the second equation is stricter",
)
def _() -> Finding:
    def mirror(q: complex, m: int) -> complex:
        return q if m % 2 == 0 else q.conjugate()

    def drifts(f: Callable[[complex, int], complex]) -> tuple[float, float]:
        def moved(q: complex, k: complex, m: int, n: int) -> complex:
            return f(q, m) * f(k, n).conjugate() - f(q, m + 5) * f(k, n + 5).conjugate()

        return _worst(lambda *at: abs(moved(*at).real)), _worst(lambda *at: abs(moved(*at)))

    mirrored, rotated = drifts(mirror), drifts(_cached_f())
    return Finding(
        f"mirror: drift {mirrored[0]:.1e} real, {mirrored[1]:.2g} complex; rotation: {rotated[1]:.1e}",
        stated=mirrored[1] < EXACT,
        amended=mirrored[0] < EXACT and max(rotated) < EXACT,
    )


@chapter.claim(
    "derivation.radius",
    "R_f(q,m) R_f(k,n) = R_g(q,k,m−n), and at m = n this is |q| |k|.",
    CHINESE_2,
    method="|f(q,m)| |f(k,n)| over 144 pairs of positions, against |q| |k|",
    expected="equal",
)
def _() -> Finding:
    f = _cached_f()
    error = _worst(lambda q, k, m, n: abs(abs(f(q, m)) * abs(f(k, n)) - abs(q) * abs(k)))
    return Finding(f"largest error {error:.1e}", stated=error < EXACT)


@chapter.claim(
    "derivation.angle",
    "Θ_f(q,m) − Θ_f(k,n) = Θ_g(q,k,m−n), and at m = n this is Θ(q) − Θ(k).",
    CHINESE_2,
    method="the angles of f(q,m) and f(k,n) over 144 pairs of positions, modulo 2π",
    expected="Θ(q) − Θ(k) + (m−n)θ",
)
def _() -> Finding:
    f = _cached_f()

    def error(q: complex, k: complex, m: int, n: int) -> float:
        difference = cmath.phase(f(q, m)) - cmath.phase(f(k, n))
        return _angle_difference(difference, cmath.phase(q) - cmath.phase(k) + (m - n) * THETA)

    worst = _worst(error)
    return Finding(f"largest error {worst:.1e}", stated=worst < EXACT)


@chapter.claim(
    "derivation.phi",
    "Θ_f(q,m) − Θ(q) does not depend on q.",
    CHINESE_2,
    method="its spread over six vectors at each of 12 positions, modulo 2π",
    expected="0",
)
def _() -> Finding:
    def phi(q: complex, m: int) -> float:
        return cmath.phase(_f(q, m)) - cmath.phase(q)

    spread = max(_angle_difference(phi(q, m), phi(QUERIES[0], m)) for q in QUERIES for m in range(-3, 9))
    return Finding(f"spread {spread:.1e}", stated=spread < EXACT)


@chapter.claim(
    "derivation.step",
    "φ(m) − φ(m−1) = Θ_g(q,k,1) + Θ(k) − Θ(q), whose right side does not depend on m.",
    CHINESE_2,
    method="both sides for six pairs of vectors at 11 positions, Θ_g being the angle of f(q,m) f*(k,m−1), modulo 2π",
    expected="both sides are θ",
)
def _() -> Finding:
    def right(q: complex, k: complex, m: int) -> float:
        return cmath.phase(_f(q, m) * _f(k, m - 1).conjugate()) + cmath.phase(k) - cmath.phase(q)

    def left(m: int) -> float:
        return cmath.phase(_f(1 + 0j, m)) - cmath.phase(_f(1 + 0j, m - 1))

    ids = range(-2, 9)
    error = max(_angle_difference(left(m), right(q, k, m)) for q, k in PAIRS for m in ids)
    spread = max(_angle_difference(right(q, k, m), THETA) for q, k in PAIRS for m in ids)
    return Finding(f"difference {error:.1e}; from θ {spread:.1e}", stated=max(error, spread) < EXACT)


@chapter.claim(
    "derivation.arithmetic",
    "So φ is an arithmetic sequence, and φ(m) = mθ.",
    CHINESE_2,
    method="φ(m) against mθ at 12 positions, modulo 2π",
    expected="equal; φ(0) = 0 by the initial condition",
)
def _() -> Finding:
    line = max(_angle_difference(cmath.phase(_f(1 + 0j, m)), m * THETA) for m in range(-3, 9))
    return Finding(f"off by {line:.1e}", stated=line < EXACT)


@chapter.claim(
    "derivation.solution",
    "f(q, m) = |q| exp(i(Θ(q) + mθ)) = q exp(imθ), a rotation of the plane.",
    f"{CHINESE_1}, {CHINESE_2}",
    method="the rotation matrix times (q₀, q₁) against q exp(imθ), and against the polar form",
    expected="equal",
)
def _() -> Finding:
    product = max(abs(_f(q, m) - q * cmath.exp(1j * m * THETA)) for q in QUERIES for m in range(-3, 9))
    polar = max(abs(_f(q, m) - cmath.rect(abs(q), cmath.phase(q) + m * THETA)) for q in QUERIES for m in range(-3, 9))
    return Finding(f"errors {product:.1e} and {polar:.1e}", stated=max(product, polar) < EXACT)


@chapter.claim(
    "derivation.unique",
    "The radius does not depend on m: R_f(q,m) = |q|, R_f(k,m) = |k|.",
    CHINESE_2,
    method="radii |q|ζ^m and |k|ζ^(−n), ζ = 0.98: drift of the product; the same with one f for q and k",
    expected="no drift with two functions, so they are another solution; drift with one, where R_f(q,m)² = |q|²",
    only_if="q and k use the same f; with different f_q and f_k there are other solutions, such as xPos",
)
def _() -> Finding:
    zeta, f = 0.98, _cached_f()

    def two(q: complex, k: complex, m: int, n: int) -> complex:
        return zeta**m * f(q, m) * (zeta**-n * f(k, n)).conjugate()

    def one(q: complex, k: complex, m: int, n: int) -> complex:
        return zeta**m * f(q, m) * (zeta**n * f(k, n)).conjugate()

    separate = _worst(lambda q, k, m, n: abs(two(q, k, m, n) - two(q, k, m + 4, n + 4)))
    shared = _worst(lambda q, k, m, n: abs(one(q, k, m, n) - one(q, k, m + 4, n + 4)))
    differs = max(abs(abs(zeta**5 * f(q, 5)) - abs(q)) for q in QUERIES)
    return Finding(
        f"drift {separate:.1e} with two functions, {shared:.2g} with one; radius changed by {differs:.2g}",
        stated=separate > EXACT,
        amended=separate < EXACT and shared > 0.01 and differs > 0.01,
    )


@chapter.claim(
    "derivation.exponent",
    "With the query at n and the key at m, the score is Re[(W_q x_n)(W_k x_m)* exp(iθ(m−n))].",
    RUSSIAN_1,
    method="the score of rotated vectors against both signs of the exponent",
    expected="n−m",
    fails="the exponent is n−m (the note prints 'm n n'): the conjugate of the key has the minus sign",
)
def _() -> Finding:
    f = _cached_f()

    def score(q: complex, k: complex, m: int, n: int) -> float:
        return (f(q, n) * f(k, m).conjugate()).real

    def formula(q: complex, k: complex, gap: int) -> float:
        return (q * k.conjugate() * cmath.exp(1j * THETA * gap)).real

    printed = _worst(lambda q, k, m, n: abs(score(q, k, m, n) - formula(q, k, m - n)))
    right = _worst(lambda q, k, m, n: abs(score(q, k, m, n) - formula(q, k, n - m)))
    return Finding(f"error {printed:.2g} with m−n, {right:.1e} with n−m", stated=printed < EXACT, amended=right < EXACT)


@chapter.claim(
    "derivation.g-arguments",
    "That score is g(x_n, x_n, m−n): a function of the query's token and the distance.",
    RUSSIAN_1,
    method="the score for one query and six keys at one distance",
    expected="it changes with the token of the key",
    fails="g(x_n, x_m, m−n): it depends on both tokens",
)
def _() -> Finding:
    scores = [(_f(QUERIES[0], 2) * _f(k, 5).conjugate()).real for k in KEYS]
    shifted = [(_f(QUERIES[0], 9) * _f(k, 12).conjugate()).real for k in KEYS]
    spread = max(scores) - min(scores)
    moved = max(abs(a - b) for a, b in zip(scores, shifted, strict=True))
    return Finding(
        f"spread {spread:.3g} over keys; drift {moved:.1e}", stated=spread < EXACT, amended=moved < EXACT < spread
    )


@chapter.claim(
    "derivation.original-score",
    "In the complex form, (W_q x_q)(W_k x_k)* is the score without positions.",
    CHINESE_1,
    method="its imaginary part; its real part against q·k",
    expected="its real part is the score; its imaginary part is not 0, and contributes to the score at other distances",
    fails="its real part is the score; the imaginary part contributes if m ≠ n",
)
def _() -> Finding:
    products = [(q * k.conjugate(), q.real * k.real + q.imag * k.imag) for q, k in PAIRS]
    imaginary = max(abs(z.imag) for z, _ in products)
    real = max(abs(z.real - dot) for z, dot in products)
    right_angle = cmath.exp(1j * math.pi / 2)
    swapped = max(abs((z * right_angle).real + z.imag) for z, _ in products)
    return Finding(
        f"imaginary part {imaginary:.3g}; real part off by {real:.1e}; rotation by π/2: minus the imaginary part",
        stated=imaginary < EXACT,
        amended=real < EXACT and swapped < EXACT,
    )
