"""The derivation of RoPE in the second Chinese note, step by step, in the plane."""

import cmath
import functools
from collections.abc import Callable

import torch

from ropewalk.claims.claim import Chapter, Finding
from ropewalk.claims.samples import EXACT, normal
from ropewalk.claims.sources import NOTE_000, NOTE_002, NOTE_004
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
    NOTE_004.at(44, "假定下面的初值条件 $f(q,0)=q$，即位置 0 的绝对位置信息就是原始的 $q$"),
    method="the rotation of six vectors to position 0",
    expected="unchanged, bit by bit",
)
def _() -> Finding:
    error = max(abs(_f(q, 0) - q) for q in QUERIES)
    return Finding(f"error {error:g}", stated=error == 0)


@chapter.claim(
    "derivation.inner-product",
    "⟨q, k⟩ = Re[q k*], and q and k must be real for that.",
    NOTE_004.at(
        46, r"对于一个复数，有 $\langle{q},{k}\rangle=\mathrm{Re}[{q}{k}^*]$（注意：这里的 $q,k$ 都必须为实数才成立）"
    ),
    method="q·k of 2-vectors against Re[q k*] of the same vectors as complex numbers",
    expected="equal for every complex q and k",
    misprint="the components of q and k are real; as complex numbers q and k are arbitrary",
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
    "If there is a complex g with f(q,m) f*(k,n) = g(q,k,m−n), its real part solves Re[f(q,m) f*(k,n)] = g.",
    NOTE_004.at(48, "假设存在复数 $g(q,k,m-n)$ 使得 $[f(q,m)f^*(k,n)]=g(q,k,m-n)$"),
    method="drift of the complex product and of its real part for f(q,m) = q exp(imθ), which the note finds; "
    "the same for f(q,m) = q for even m and q* for odd m",
    expected="no drift: the assumption has a solution; the mirror solves only the real equation, so there are others",
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
        f"rotation: drift {rotated[1]:.1e} complex, {rotated[0]:.1e} real; mirror: {mirrored[1]:.2g} and "
        f"{mirrored[0]:.1e}",
        stated=max(rotated) < EXACT and mirrored[0] < EXACT < mirrored[1],
    )


@chapter.claim(
    "derivation.radius",
    "R_f(q,m) R_f(k,n) = R_g(q,k,m−n), and at m = n this is |q| |k|.",
    NOTE_004.at(59, r"R_f(q,m)R_f(k,m)=R_g(q,k,0)=R_f(q,0)R_f(k,0)=\|q\|\|k\|"),
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
    NOTE_004.at(63, r"\Theta_f(q,m)-\Theta_f(k,m)=\Theta_g(q,k,0)=\Theta_f(q,0)-\Theta_f(k,0)=\Theta(q)-\Theta(k)"),
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
    NOTE_004.at(64, r"即 $\Theta_f(q,m)-\Theta(q)$ 是一个只和 $m$ 相关而和 $q$ 无关的函数"),
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
    NOTE_004.at(65, r"\varphi(m)-\varphi(m-1)=\Theta_g(q,k,1)+\Theta(k)-\Theta(q)"),
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
    NOTE_004.at(66, r"这说明 $\varphi(m)$ 为等差数列，设右端为 $\theta$，得到 $\varphi(m)=m\theta$。"),
    method="φ(m) against mθ at 12 positions, modulo 2π",
    expected="equal; φ(0) = 0 by the initial condition",
)
def _() -> Finding:
    line = max(_angle_difference(cmath.phase(_f(1 + 0j, m)), m * THETA) for m in range(-3, 9))
    return Finding(f"off by {line:.1e}", stated=line < EXACT)


@chapter.claim(
    "derivation.solution",
    "f(q, m) = |q| exp(i(Θ(q) + mθ)) = q exp(imθ), a rotation of the plane.",
    NOTE_002.at(208, r"f_q(x_m, m) &= (W_q x_m) e^{im\theta}"),
    NOTE_004.at(
        69,
        r"f(q,m)=R_f(q,m)e^{\mathrm{i}\Theta_f({q},m)}=\|q\|e^{\mathrm"
        r"{i}(\Theta({q})+m\theta)}=\boldsymbol{q}e^{\mathrm{i}m\theta}",
    ),
    method="the rotation matrix times (q₀, q₁) against q exp(imθ), and against the polar form",
    expected="equal",
)
def _() -> Finding:
    product = max(abs(_f(q, m) - q * cmath.exp(1j * m * THETA)) for q in QUERIES for m in range(-3, 9))
    polar = max(abs(_f(q, m) - cmath.rect(abs(q), cmath.phase(q) + m * THETA)) for q in QUERIES for m in range(-3, 9))
    return Finding(f"errors {product:.1e} and {polar:.1e}", stated=max(product, polar) < EXACT)


@chapter.claim(
    "derivation.unique",
    "Assume that the radius does not depend on m: R_f(q,m) = |q|, R_f(k,m) = |k|.",
    NOTE_004.at(60, r"假设 $R_f(q,m)=\|q\|,R_f(k,m)=\|k\|$，即他们不依赖于 $m$。"),
    method="the radius of f(q,m) at 12 positions; drift of the product with radii |q|ζ^m and |k|ζ^n, ζ = 0.98, that is "
    "one f for q and k, and with |k|ζ^(−n), that is two functions, as in xPos",
    expected="|q|; drift with one function, so the assumption is necessary for one f; no drift with two",
)
def _() -> Finding:
    zeta, f = 0.98, _cached_f()

    def two(q: complex, k: complex, m: int, n: int) -> complex:
        return zeta**m * f(q, m) * (zeta**-n * f(k, n)).conjugate()

    def one(q: complex, k: complex, m: int, n: int) -> complex:
        return zeta**m * f(q, m) * (zeta**n * f(k, n)).conjugate()

    separate = _worst(lambda q, k, m, n: abs(two(q, k, m, n) - two(q, k, m + 4, n + 4)))
    shared = _worst(lambda q, k, m, n: abs(one(q, k, m, n) - one(q, k, m + 4, n + 4)))
    radius = max(abs(abs(f(q, m)) - abs(q)) for q in QUERIES for m in range(-3, 9))
    return Finding(
        f"radius off by {radius:.1e}; with ζ: drift {shared:.2g} with one function, {separate:.1e} with two",
        stated=radius < EXACT and separate < EXACT and shared > 0.01,
    )


@chapter.claim(
    "derivation.exponent",
    "With the query at n and the key at m, the score is Re[(W_q x_n)(W_k x_m)* exp(iθ(m−n))].",
    NOTE_000.at(29, r"Re[(W_qx_n)(W_kx_m)*e^{i\theta(m n n)}]"),
    method="the score of rotated vectors against both signs of the exponent",
    expected="n−m",
    misprint="n−m, where the note prints 'm n n'; the conjugate of the key has the minus sign",
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
    "The score is g(x_n, x_n, m−n): a function of the query's token and the distance.",
    NOTE_000.at(29, "g(x_n, x_n, m - n)"),
    method="the score for one query and six keys at one distance",
    expected="it changes with the token of the key",
    misprint="g(x_n, x_m, m−n), as in line 22 of the note",
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
    "The score is Re[(W_q x_q)(W_k x_k)* exp(i(m−n)θ)]; without the exponential it is the original score.",
    NOTE_002.at(
        212,
        r"\text{Re}[\underbrace{(W_q x_q)(W_k x_k)^*}_{\text{原本的Score}} "
        r"\cdot \underbrace{e^{i(m-n)\theta}}_{\text{相对位置}}]",
    ),
    method="scores of rotated vectors at 144 pairs of positions against the formula; at m = n against q·k; the "
    "imaginary part of (W_q x_q)(W_k x_k)*",
    expected="equal; the imaginary part is not 0, and enters the score if m ≠ n",
)
def _() -> Finding:
    f = _cached_f()

    def error(q: complex, k: complex, m: int, n: int) -> float:
        score = f(q, m).real * f(k, n).real + f(q, m).imag * f(k, n).imag
        return abs(score - (q * k.conjugate() * cmath.exp(1j * (m - n) * THETA)).real)

    worst = _worst(error)
    original = max(abs((q * k.conjugate()).real - (q.real * k.real + q.imag * k.imag)) for q, k in PAIRS)
    imaginary = max(abs((q * k.conjugate()).imag) for q, k in PAIRS)
    return Finding(
        f"error {worst:.1e}; at m = n {original:.1e}; imaginary part {imaginary:.3g}",
        stated=max(worst, original) < EXACT < imaginary,
    )


@chapter.claim(
    "derivation.real-part",
    "The product of two vectors of the plane is the real part of q times the conjugate of k.",
    NOTE_002.at(210, "在复数中，两个向量 q 和 k 的内积，等于 q 乘以 k 的共轭 (k^*) 的实部"),
    method="q·k of six pairs of vectors against Re[q k*]",
    expected="equal",
)
def _() -> Finding:
    error = max(abs((q.real * k.real + q.imag * k.imag) - (q * k.conjugate()).real) for q, k in PAIRS)
    return Finding(f"largest error {error:.1e}", stated=error < EXACT)
