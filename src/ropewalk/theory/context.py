"""Context lengths that a set of frequencies supports: periods, the critical dimension, bounds on the base."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ropewalk.errors import RopewalkError, as_int, require_count, require_even, require_positive, shown
from ropewalk.shapes import Float64
from ropewalk.spec.frequencies import Plain
from ropewalk.theory.arguments import InvFreq, frequencies_of
from ropewalk.theory.decay import score_sum

__all__ = [
    "TunedContext",
    "TuningCase",
    "admissible_bases",
    "context_after_tuning",
    "critical_base",
    "critical_dimension",
    "extrapolation_limit",
    "first_negative_distance",
    "lowest_admissible_base",
    "periods",
    "small_base_thresholds",
]

# The half of the scaling law that applies to a model tuned with a new base.
TuningCase: TypeAlias = Literal["larger base", "tuned length", "no limit"]

# Distances are evaluated in rows of this length. A row is computed by matrix products, without new cosines.
_ROW = 512
# Number of rows computed at once: 2^17 sums are 1 MiB.
_ROWS = 256
# Largest number of bases screened at once, and the number of distances in each screening pass.
_BASES, _SCREENING = 64, (32, 512)
# Sums closer to 0 than this are computed again from their cosines. It is far above the rounding of the products.
_NEAR_ZERO = 1e-6


def periods(inv_freq: InvFreq) -> Float64[np.ndarray, "pairs"]:
    """Period of each pair, in positions: T_i = 2 pi / |theta_i|. Infinite for a frequency of 0.

    Args:
        inv_freq: Frequencies [pairs].

    Returns:
        Number of positions per full rotation [pairs].

    Raises:
        RopewalkError: If a frequency is not finite.

    >>> (periods([1.0, 0.0]) / (2 * math.pi)).tolist()
    [1.0, inf]
    """
    with np.errstate(divide="ignore"):
        return 2 * math.pi / np.abs(frequencies_of(inv_freq, asked="periods"))


def critical_dimension(rotary_dim: int, base: float, trained_length: int) -> int:
    """Number of features that complete a full rotation in training: 2 ceil(d/2 log_base(T/2pi)).

    Liu et al., 2310.05209, eq. 13. Differs from the paper: the result is limited to 0 .. rotary_dim. The printed
    formula exceeds d if T > 2 pi base.

    Args:
        rotary_dim: Number of rotated features d.
        base: Base of the frequencies, above 1.
        trained_length: Number of positions T in training, at least 7.

    Returns:
        Number of features.

    Raises:
        RopewalkError: If an argument is out of its range.

    >>> critical_dimension(128, 10_000, 4096)  # LLaMA-2
    92
    """
    dim = _dim(rotary_dim, "critical_dimension")
    log_base = math.log(_base_above_one(base, "critical_dimension"))
    length = _length(trained_length, "critical_dimension", "trained_length")
    pairs = math.ceil(dim / 2 * math.log(length / (2 * math.pi)) / log_base)
    return 2 * min(max(pairs, 0), dim // 2)


def critical_base(trained_length: int, tuned_length: int, base: float = 10_000.0) -> float:
    """Critical base of fine-tuning: beta_0 = base^(log_{T_train/2pi} (T_tune/2pi)) (Liu et al., 2310.05209, eq. 16a).

    A model is trained at `trained_length` and fine-tuned at `tuned_length`. With a base above this, its limit is
    `extrapolation_limit`. With a base at or below it, its limit is the tuned length; `context_after_tuning` returns
    either.

    Args:
        trained_length: Number of positions in training, at least 7.
        tuned_length: Number of positions in fine-tuning, at least 7.
        base: Base in training, above 1.

    Returns:
        The critical base. Infinite if it exceeds float64, which occurs for trained lengths of a few positions.

    Raises:
        RopewalkError: If an argument is out of its range.

    >>> round(critical_base(4096, 16384))
    71738
    """
    base = _base_above_one(base, "critical_base")
    trained = _length(trained_length, "critical_base", "trained_length")
    tuned = _length(tuned_length, "critical_base", "tuned_length")
    exponent = math.log(tuned / (2 * math.pi)) / math.log(trained / (2 * math.pi))
    try:
        return base**exponent
    except OverflowError:
        return math.inf


def extrapolation_limit(base: float, rotary_dim: int, critical_dim: int) -> float:
    """Longest context that a larger base supports: T_extra = 2 pi base^(d_extra/d) (Liu et al., 2310.05209, eq. 16b).

    Args:
        base: Base in fine-tuning, above 1.
        rotary_dim: Number of rotated features d.
        critical_dim: Critical dimension d_extra of the trained model; see `critical_dimension`.

    Returns:
        Number of positions.

    Raises:
        RopewalkError: If an argument is out of its range.

    >>> round(extrapolation_limit(1_000_000, rotary_dim=128, critical_dim=92))
    129027
    """
    dim = _dim(rotary_dim, "extrapolation_limit")
    if as_int(critical_dim) is None or not 0 <= critical_dim <= dim:
        raise RopewalkError(
            asked="extrapolation_limit(critical_dim)",
            expected=f"a number of features from 0 to rotary_dim = {dim}",
            got=shown(critical_dim),
            do="critical_dimension(rotary_dim, base, trained_length) computes it",
        )
    return 2 * math.pi * _base_above_one(base, "extrapolation_limit") ** (critical_dim / dim)


def small_base_thresholds(tuned_length: int) -> tuple[float, float, float]:
    """Bases beta_1 = 2T/pi, beta_2 = T/pi, beta_3 = T/2pi, below which extrapolation improves (2310.05209, eq. 16d).

    Derivation: the slowest pair has the period 2 pi base^(1 - 2/d) < 2 pi base. If base <= beta_1, this is below 4T, so
    within T positions every pair completes more than a quarter of a rotation. If base <= beta_2, it is half a rotation,
    in which cos has all its values. If base <= beta_3, it is a full rotation, in which sin has all its values too.

    They are no bounds on the length. Liu et al. expect, and measure on tuned models, that the loss beyond the tuned
    length increases more slowly below each of them. The stated limit of a small base is the tuned length.

    Args:
        tuned_length: Number of positions T in fine-tuning, at least 7.

    Returns:
        The three bases, in decreasing order: a quarter, a half and a full rotation.

    Raises:
        RopewalkError: If `tuned_length` is not an integer of at least 7.

    >>> [round(base, 1) for base in small_base_thresholds(4096)]
    [2607.6, 1303.8, 651.9]
    """
    length = _length(tuned_length, "small_base_thresholds", "tuned_length")
    return 2 * length / math.pi, length / math.pi, length / (2 * math.pi)


@dataclass(frozen=True)
class TunedContext:
    """The context of a model that is fine-tuned with a new base, by the scaling law of Liu et al. (2310.05209).

    Attributes:
        case: The half of the law that applies. "larger base": the new base is above the critical base. "tuned length":
            it is at or below. "no limit": it is above, and every pair completed a rotation in training already.
        limit: Longest context: T_extra (eq. 16b) for "larger base", the tuned length for "tuned length", None for
            "no limit". Beyond T_extra the loss of tuned models increases steeply; beyond the tuned length with a small
            base it increases slowly.
        critical_base: The critical base beta_0 (eq. 16a).
        trained_critical_dim: Number of features that completed a rotation in training, d_extra (eq. 13).
        critical_dim: The same after tuning: d'_extra (eq. 16c) for "tuned length", otherwise d_extra.
        thresholds: The bases beta_1, beta_2, beta_3 of the tuned length; see `small_base_thresholds`.
        slowest_rotation: Number of rotations that the slowest pair completes within the tuned length. A head with a
            single pair has the frequency 1 for every base, so this is the tuned length divided by 2 pi.
        least_rotation: The part of a rotation that every pair completes: the largest of 0, 0.25, 0.5 and 1 that
            `slowest_rotation` reaches. Differs from the paper: the thresholds hold for any number of features, and a
            base slightly above one can suffice. It is an expectation on the result of tuning, not a bound on the
            length.

    >>> half_rotation = context_after_tuning(4096, 4096, new_base=1000, rotary_dim=128)
    >>> half_rotation.least_rotation, round(half_rotation.slowest_rotation, 3)  # 4096 / (2 pi 1000^(126/128))
    (0.5, 0.726)
    >>> single_pair = context_after_tuning(4096, 4096, new_base=1_000_000, rotary_dim=2)
    >>> single_pair.least_rotation, round(single_pair.slowest_rotation, 1)  # 4096 / (2 pi)
    (1.0, 651.9)
    """

    case: TuningCase
    limit: float | None
    critical_base: float
    trained_critical_dim: int
    critical_dim: int
    thresholds: tuple[float, float, float]
    slowest_rotation: float
    least_rotation: float


def context_after_tuning(
    trained_length: int, tuned_length: int, new_base: float, rotary_dim: int, base: float = 10_000.0
) -> TunedContext:
    """Longest context of a model that is fine-tuned with a new base, larger or smaller (2310.05209, theorem 3).

    Above the critical base beta_0 the limit is T_extra = 2 pi new_base^(d_extra/d): the period of the first pair that
    completed no rotation in training. At or below beta_0 the limit is the tuned length. The two differ at beta_0 by
    less than a factor of beta_0^(2/d), because d_extra is rounded up.

    Differs from the paper: if every pair completed a rotation in training (d_extra = d), no such pair exists, and the
    limit above beta_0 is None.

    Args:
        trained_length: Number of positions in training, at least 7.
        tuned_length: Number of positions in fine-tuning, at least `trained_length`.
        new_base: Base in fine-tuning, above 1.
        rotary_dim: Number of rotated features d.
        base: Base in training, above 1.

    Returns:
        The limit and what it follows from.

    Raises:
        RopewalkError: If an argument is out of its range.

    >>> larger = context_after_tuning(4096, 16384, new_base=1_000_000, rotary_dim=128)  # LLaMA-2, tuned at 16384
    >>> larger.case, round(larger.limit), round(larger.critical_base)
    ('larger base', 129027, 71738)
    >>> smaller = context_after_tuning(4096, 16384, new_base=500, rotary_dim=128)
    >>> smaller.case, smaller.limit, smaller.critical_dim, smaller.least_rotation
    ('tuned length', 16384.0, 128, 1.0)
    """
    asked = "context_after_tuning"
    new_base, base = _base_above_one(new_base, asked, "new_base"), _base_above_one(base, asked)
    rotary_dim = _dim(rotary_dim, asked)
    trained_length = _length(trained_length, asked, "trained_length")
    tuned_length = _length(tuned_length, asked, "tuned_length")
    trained_dim = critical_dimension(rotary_dim, base, trained_length)
    threshold = critical_base(trained_length, tuned_length, base)
    if tuned_length < trained_length:
        raise RopewalkError(
            asked=f"{asked}(tuned_length)",
            expected=f"at least trained_length = {trained_length}: the law is stated for tuning at no shorter length",
            got=f"{tuned_length}",
            do="pass trained_length as tuned_length if the model is tuned at shorter lengths",
        )
    case: TuningCase = "tuned length"
    limit, critical_dim = float(tuned_length), critical_dimension(rotary_dim, new_base, tuned_length)
    if new_base > threshold:
        case, critical_dim = "larger base" if trained_dim < rotary_dim else "no limit", trained_dim
        limit = extrapolation_limit(new_base, rotary_dim, trained_dim) if case == "larger base" else None
    slowest_rotation = tuned_length / (2 * math.pi * new_base ** (1 - 2 / rotary_dim))
    return TunedContext(
        case=case,
        limit=limit,
        critical_base=threshold,
        trained_critical_dim=trained_dim,
        critical_dim=critical_dim,
        thresholds=small_base_thresholds(tuned_length),
        slowest_rotation=slowest_rotation,
        least_rotation=max(part for part in (0.0, 0.25, 0.5, 1.0) if part <= slowest_rotation),
    )


def first_negative_distance(inv_freq: InvFreq, limit: int) -> int | None:
    """Smallest integer m < limit with sum_i cos(m theta_i) < 0, or None (Men et al., 2405.14591, eq. 10).

    At smaller distances a similar key has a higher mean score than a random key. The result is not monotone in the
    base.

    Args:
        inv_freq: Frequencies [pairs].
        limit: End of the search, exclusive.

    Returns:
        The distance, or None if no sum below `limit` is negative.

    Raises:
        RopewalkError: If a frequency is not finite or `limit` is not a positive integer.

    >>> from ropewalk.spec import Plain
    >>> first_negative_distance(Plain(10_000).evaluate(128), limit=4096)  # LLaMA-2 has trained_length 4096
    1707
    """
    frequencies = frequencies_of(inv_freq, asked="first_negative_distance")
    limit = require_count(limit, asked="first_negative_distance(limit)", do="pass the end of the search")
    starts, row, rows = range(0, limit, _ROW), _row(frequencies), 1
    while starts:
        distance = _first_negative(frequencies, np.array(starts[:rows]), row, limit)
        if distance is not None:
            return distance
        # Most negative sums are at small distances, so the number of rows per step starts small and doubles.
        starts, rows = starts[rows:], min(2 * rows, _ROWS)
    return None


def admissible_bases(bases: Iterable[float], rotary_dim: int, length: int) -> list[tuple[float, float]]:
    """Intervals of `bases` for which sum_i cos(m theta_i) >= 0 at every integer m <= length.

    Men et al. (2405.14591, eq. 11) define the smallest such base. A base above an admissible base need not be
    admissible, so bisection would miss intervals. This function tests every base, in the given order. Neighbours in
    `bases` that pass form one interval.

    Args:
        bases: Bases to test, above 1.
        rotary_dim: Number of rotated features.
        length: Context length.

    Returns:
        The intervals as (first, last).

    Raises:
        RopewalkError: If an argument is out of its range.

    >>> admissible_bases(range(4280, 4341), rotary_dim=128, length=1024)
    [(4294.0, 4330.0)]
    """
    islands: list[tuple[float, float]] = []
    inside = False
    for base, passed in _admissible(_bases(bases, "admissible_bases"), rotary_dim, length, "admissible_bases"):
        if passed:
            islands = [*islands[:-1], (islands[-1][0], base)] if inside else [*islands, (base, base)]
        inside = passed
    return islands


def lowest_admissible_base(bases: Iterable[float], rotary_dim: int, length: int) -> float | None:
    """Smallest admissible base in `bases`, or None; see `admissible_bases`.

    Only the given bases are tested. A narrower interval between two of them is missed.

    Args:
        bases: Bases to test, in any order, above 1.
        rotary_dim: Number of rotated features.
        length: Context length.

    Returns:
        The base, or None if none of them is admissible.

    Raises:
        RopewalkError: If an argument is out of its range.

    >>> lowest_admissible_base(range(4280, 4341), rotary_dim=128, length=1024)
    4294.0
    """
    asked = "lowest_admissible_base"
    rising = sorted(set(_bases(bases, asked)))
    return next((base for base, passed in _admissible(rising, rotary_dim, length, asked) if passed), None)


def _admissible(bases: Sequence[float], rotary_dim: int, length: int, asked: str) -> Iterator[tuple[float, bool]]:
    """Yield each base, and whether sum_i cos(m theta_i) >= 0 at every integer m <= length."""
    dim = _dim(rotary_dim, asked)
    length = require_count(length, asked=f"{asked}(length)", do="pass the context length")
    # Chunks are smaller for more than 128 features, so that they need no more memory.
    size = max(1, min(_BASES, 64 * _BASES // (dim // 2)))
    for chunk in (bases[start : start + size] for start in range(0, len(bases), size)):
        frequencies = np.array([Plain(base).evaluate(dim) for base in chunk])
        candidate = np.ones(len(chunk), dtype=bool)
        # Negative sums mostly cover a range of distances, so a few distances reject most bases.
        for count in _SCREENING:
            step = -(-length // count)
            sums = _phases(frequencies[candidate], step, length // step + 1).real.sum(axis=-1)
            candidate[candidate] = (sums >= -_NEAR_ZERO).all(axis=0)
        for base, theta, possible in zip(chunk, frequencies, candidate.tolist(), strict=True):
            yield base, possible and _never_negative(theta, length)


def _never_negative(frequencies: Float64[np.ndarray, "pairs"], length: int) -> bool:
    """Whether sum_i cos(m theta_i) >= 0 at every integer m <= length."""
    remaining, row = range(0, length + 1, _ROW), _row(frequencies)
    slow = frequencies[frequencies * 8 * _ROW < 1]
    while remaining:
        starts, remaining, rows = np.array(remaining[: 64 * _ROWS]), remaining[64 * _ROWS :], 4
        # The slow pairs are nearly constant within a row. Negative sums are in rows where their share is small, so
        # these rows are tested first.
        slow_sums = np.cos(starts[::8, None] * slow).sum(axis=-1).repeat(8)[: starts.size]
        starts = starts[slow_sums.argsort(kind="stable")]
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

    Let m = a + b, where a is the start of a row and b the offset in it. By
    cos(m theta) = cos(a theta) cos(b theta) - sin(a theta) sin(b theta) the sums of all rows are one matrix product
    with `row`, which contains the cosines and sines of b theta.
    """
    angles = starts[:, None] * frequencies
    # einsum does not call BLAS here: starting BLAS threads costs more than products of this size.
    sums = np.einsum("ap,bp->ab", np.hstack((np.cos(angles), -np.sin(angles))), row).ravel()
    distances = (starts[:, None] + np.arange(len(row))).ravel()
    if distances.max() >= limit:
        sums, distances = sums[distances < limit], distances[distances < limit]
    below = sums < -_NEAR_ZERO
    first = int(below.argmax()) if below.any() else len(sums)
    doubtful = np.flatnonzero(sums[:first] <= _NEAR_ZERO)
    doubtful = doubtful[score_sum(distances[doubtful], frequencies) < 0]
    first = int(doubtful[0]) if doubtful.size else first
    return None if first == len(sums) else int(distances[first])


def _row(frequencies: Float64[np.ndarray, "pairs"]) -> Float64[np.ndarray, "row twice"]:
    """cos(b theta) and sin(b theta) of every pair, for b = 0 .. _ROW-1."""
    phases = _phases(frequencies, 1, _ROW)
    return np.hstack((phases.real, phases.imag))


def _phases(frequencies: Float64[np.ndarray, "*any pairs"], step: int, count: int) -> NDArray[np.complex128]:
    """exp(i k step theta) for k = 0 .. count-1, [count, *any, pairs]. Each product doubles the number of k."""
    phases: NDArray[np.complex128] = np.ones((1, *frequencies.shape), dtype=np.complex128)
    while len(phases) < count:
        phases = np.concatenate((phases, phases * np.exp(1j * step * len(phases) * frequencies)))
    return phases[:count]


def _base_above_one(base: float, asked: str, argument: str = "base") -> float:
    asked = f"{asked}({argument})"
    value = require_positive(base, asked=asked, do="pass the base of the frequencies, for example 10_000")
    if value <= 1:
        raise RopewalkError(
            asked=asked,
            expected="a base above 1, so that frequencies decrease",
            got=repr(base),
            do="pass the base of the frequencies, for example 10_000",
        )
    return value


def _bases(bases: Iterable[float], asked: str) -> list[float]:
    return [_base_above_one(base, asked, "bases") for base in bases]


def _dim(rotary_dim: int, asked: str) -> int:
    return require_even(rotary_dim, asked=f"{asked}(rotary_dim)", do="pass the rotary_dim of a head")


def _length(length: int, asked: str, argument: str) -> int:
    return require_count(length, asked=f"{asked}({argument})", do="pass the number of positions", at_least=7)
