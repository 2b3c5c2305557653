"""Which lengths a set of frequencies can serve: periods, the critical dimension, bounds on the base."""

import math
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from jaxtyping import Float64
from numpy.typing import NDArray

from ropewalk.errors import RopewalkError, as_int, require_count, require_even, require_positive, shown
from ropewalk.spec.frequencies import Plain
from ropewalk.theory.arguments import InvFreq, frequencies_of
from ropewalk.theory.decay import score_sum

__all__ = [
    "admissible_bases",
    "critical_base",
    "critical_dimension",
    "extrapolation_limit",
    "first_negative_distance",
    "lowest_admissible_base",
    "periods",
]

# Distances are tried in rows of this length; a row costs a product of matrices, and no cosine of its own.
_ROW = 512
# How many rows are formed at once: 2^17 sums are 1 MiB.
_ROWS = 256
# How many bases are looked over at once, and at how many distances.
_BASES, _GLANCES = 64, (32, 512)
# Sums this near to 0 are formed once more, cosine by cosine: far above what products round.
_NEAR = 1e-6


def periods(inv_freq: InvFreq) -> Float64[np.ndarray, "pairs"]:
    """T_i = 2 pi / |theta_i|: after how many positions pair i has turned once. Infinite for a pair that never turns.

    >>> (periods([1.0, 0.0]) / (2 * math.pi)).tolist()
    [1.0, inf]
    """
    with np.errstate(divide="ignore"):
        return 2 * math.pi / np.abs(frequencies_of(inv_freq, asked="periods"))


def critical_dimension(rotary_dim: int, base: float, trained_length: int) -> int:
    """How many features saw a whole turn in training: 2 ceil(d/2 log_base(T/2pi)) (Liu et al., 2310.05209, eq. 13).

    Differs from the paper: capped to 0 .. rotary_dim; the formula as printed passes d for T > 2 pi base.

    >>> critical_dimension(128, 10_000, 4096)  # LLaMA-2
    92
    """
    dim = require_even(rotary_dim, asked="critical_dimension(rotary_dim)", do="pass the rotary_dim of a head")
    log_base = math.log(_base_above_one(base, "critical_dimension"))
    pairs = math.ceil(dim / 2 * math.log(_length(trained_length) / (2 * math.pi)) / log_base)
    return 2 * min(max(pairs, 0), dim // 2)


def critical_base(trained_length: int, tuned_length: int, base: float = 10_000.0) -> float:
    """beta_0 = base^(log_{T_train/2pi} (T_tune/2pi)) (Liu et al., 2310.05209, eq. 16a).

    A model trained at `trained_length` and tuned at `tuned_length` extrapolates past the tuned length only with a
    base above this.

    >>> round(critical_base(4096, 16384))
    71738
    """
    base = _base_above_one(base, "critical_base")
    return base ** (math.log(_length(tuned_length) / (2 * math.pi)) / math.log(_length(trained_length) / (2 * math.pi)))


def extrapolation_limit(base: float, rotary_dim: int, critical_dim: int) -> float:
    """T_extra = 2 pi base^(d_extra/d) (Liu et al., 2310.05209, eq. 16b): where a larger base stops to help.

    >>> round(extrapolation_limit(1_000_000, rotary_dim=128, critical_dim=92))
    129027
    """
    dim = require_even(rotary_dim, asked="extrapolation_limit(rotary_dim)", do="pass the rotary_dim of a head")
    if as_int(critical_dim) is None or not 0 <= critical_dim <= dim:
        raise RopewalkError(
            asked="extrapolation_limit(critical_dim)",
            expected=f"a number of features from 0 to rotary_dim = {dim}",
            got=shown(critical_dim),
            do="critical_dimension(rotary_dim, base, trained_length) computes it",
        )
    return 2 * math.pi * _base_above_one(base, "extrapolation_limit") ** (critical_dim / dim)


def first_negative_distance(inv_freq: InvFreq, limit: int) -> int | None:
    """The smallest whole m < limit with sum_i cos(m theta_i) < 0, or None (Men et al., 2405.14591, eq. 10).

    Below it a similar key still leads a random one. It is not monotone in the base.

    >>> from ropewalk.spec import Plain
    >>> first_negative_distance(Plain(10_000).evaluate(128), limit=4096)  # LLaMA-2 has trained_length 4096
    1707
    """
    frequencies = frequencies_of(inv_freq, asked="first_negative_distance")
    limit = require_count(limit, asked="first_negative_distance(limit)", do="pass how far to look")
    starts, row, rows = range(0, limit, _ROW), _row(frequencies), 1
    while starts:
        found = _first_negative(frequencies, np.array(starts[:rows]), row, limit)
        if found is not None:
            return found
        # What fails mostly fails early; what does not is looked at in larger pieces.
        starts, rows = starts[rows:], min(2 * rows, _ROWS)
    return None


def admissible_bases(bases: Iterable[float], rotary_dim: int, length: int) -> list[tuple[float, float]]:
    """The islands of `bases` for which sum_i cos(m theta_i) >= 0 at every whole m <= length, as (first, last).

    Men et al. (2405.14591, eq. 11) ask for the smallest such base. Admissible bases are islands, not a ray: every
    base in `bases` is tried, in order, and neighbours that pass make an island. Bisection would jump over them.

    >>> admissible_bases(range(4280, 4341), rotary_dim=128, length=1024)
    [(4294.0, 4330.0)]
    """
    islands: list[tuple[float, float]] = []
    inside = False
    for base, passed in _admissible([_base_above_one(base, "admissible_bases") for base in bases], rotary_dim, length):
        if passed:
            islands = [*islands[:-1], (islands[-1][0], base)] if inside else [*islands, (base, base)]
        inside = passed
    return islands


def lowest_admissible_base(bases: Iterable[float], rotary_dim: int, length: int) -> float | None:
    """The smallest of `bases` that is admissible, or None.

    It is the smallest of those tried, and no more than that: an island narrower than the step is missed.

    >>> lowest_admissible_base(range(4280, 4341), rotary_dim=128, length=1024)
    4294.0
    """
    tried = sorted({_base_above_one(base, "lowest_admissible_base") for base in bases})
    return next((base for base, passed in _admissible(tried, rotary_dim, length) if passed), None)


def _admissible(bases: Sequence[float], rotary_dim: int, length: int) -> Iterator[tuple[float, bool]]:
    """Each base, and whether sum_i cos(m theta_i) >= 0 at every whole m <= length."""
    dim = require_even(rotary_dim, asked="admissible_bases(rotary_dim)", do="pass the rotary_dim of a head")
    length = require_count(length, asked="admissible_bases(length)", do="pass the context length")
    for some in (bases[start : start + _BASES] for start in range(0, len(bases), _BASES)):
        frequencies = np.array([Plain(base).evaluate(dim) for base in some])
        alive = np.ones(len(some), dtype=bool)
        # A base that fails does so mostly over a stretch of distances: few of them find it out.
        for count in _GLANCES:
            step = -(-length // count)
            sums = _turned(frequencies[alive], step, length // step + 1).real.sum(axis=-1)
            alive[alive] = (sums >= -_NEAR).all(axis=0)
        for base, theta, looks_right in zip(some, frequencies, alive.tolist(), strict=True):
            yield base, looks_right and _never_negative(theta, length)


def _never_negative(frequencies: Float64[np.ndarray, "pairs"], length: int) -> bool:
    """Whether sum_i cos(m theta_i) >= 0 at every whole m <= length."""
    every, row = range(0, length + 1, _ROW), _row(frequencies)
    slow = frequencies[frequencies * 8 * _ROW < 1]
    while every:
        starts, every, rows = np.array(every[: 64 * _ROWS]), every[64 * _ROWS :], 4
        # Rows in which the slow pairs leave little come first: what fails, fails there.
        left = np.cos(starts[::8, None] * slow).sum(axis=-1).repeat(8)[: starts.size]
        starts = starts[left.argsort(kind="stable")]
        while starts.size:
            if _first_negative(frequencies, starts[:rows], row, length + 1) is not None:
                return False
            starts, rows = starts[rows:], min(2 * rows, _ROWS)
    return True


def _first_negative(
    frequencies: Float64[np.ndarray, "pairs"],
    starts: NDArray[np.int64],
    row: Float64[np.ndarray, "row twice"],
    limit: int,
) -> int | None:
    """The first m < limit with sum_i cos(m theta_i) < 0 in the rows of distances that begin at `starts`, or None.

    With m = a + b, cos(m theta) = cos(a theta) cos(b theta) - sin(a theta) sin(b theta): for the begin a of a row and
    the b in it, whose cosines and sines are `row`, the sums are one product of matrices.
    """
    angles = starts[:, None] * frequencies
    # By einsum, whose loops are its own: threads of a BLAS cost more than products this small take.
    sums = np.einsum("ap,bp->ab", np.hstack((np.cos(angles), -np.sin(angles))), row).ravel()
    distances = (starts[:, None] + np.arange(len(row))).ravel()
    if distances.max() >= limit:
        sums, distances = sums[distances < limit], distances[distances < limit]
    below = sums < -_NEAR
    first = int(below.argmax()) if below.any() else len(sums)
    doubtful = np.flatnonzero(sums[:first] <= _NEAR)
    doubtful = doubtful[score_sum(distances[doubtful], frequencies) < 0]
    first = int(doubtful[0]) if doubtful.size else first
    return None if first == len(sums) else int(distances[first])


def _row(frequencies: Float64[np.ndarray, "pairs"]) -> Float64[np.ndarray, "row twice"]:
    """cos(b theta) and sin(b theta) of every pair, for b = 0 .. _ROW-1."""
    turned = _turned(frequencies, 1, _ROW)
    return np.hstack((turned.real, turned.imag))


def _turned(frequencies: Float64[np.ndarray, "*any pairs"], step: int, count: int) -> NDArray[np.complex128]:
    """exp(i k step theta) for k = 0 .. count-1, [count, *any, pairs]: each half from the one before, by one product."""
    turned: NDArray[np.complex128] = np.ones((1, *frequencies.shape), dtype=np.complex128)
    while len(turned) < count:
        turned = np.concatenate((turned, turned * np.exp(1j * step * len(turned) * frequencies)))
    return turned[:count]


def _base_above_one(base: float, asked: str) -> float:
    value = require_positive(base, asked=f"{asked}(base)", do="pass the base of the frequencies, for example 10_000")
    if value <= 1:
        raise RopewalkError(
            asked=f"{asked}(base)",
            expected="a base above 1, so that frequencies fall",
            got=repr(base),
            do="pass the base of the frequencies, for example 10_000",
        )
    return value


def _length(length: int) -> int:
    value = require_count(length, asked="a context length", do="pass how many positions there are", at_least=7)
    return value
