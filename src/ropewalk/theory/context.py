"""Which lengths a set of frequencies can serve: periods, the critical dimension, bounds on the base."""

import math
from collections.abc import Iterable

import numpy as np
from jaxtyping import Bool, Float64
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

# Distances are tried in blocks, and cosines are held for one block at a time.
_BLOCK = 1024
# How many cosines are held at once while bases are scanned: 2^22 float64 are 32 MiB.
_CELLS = 1 << 22


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
    for start in range(0, limit, _BLOCK):
        below = score_sum(np.arange(start, min(start + _BLOCK, limit)), frequencies) < 0
        if below.any():
            return start + int(below.argmax())
    return None


def admissible_bases(bases: Iterable[float], rotary_dim: int, length: int) -> list[tuple[float, float]]:
    """The islands of `bases` for which sum_i cos(m theta_i) >= 0 at every whole m <= length, as (first, last).

    Men et al. (2405.14591, eq. 11) ask for the smallest such base. Admissible bases are islands, not a ray: every
    base in `bases` is tried, in order, and neighbours that pass make an island. Bisection would jump over them.

    >>> admissible_bases(range(4280, 4341), rotary_dim=128, length=1024)
    [(4294.0, 4330.0)]
    """
    tried = np.fromiter((_base_above_one(base, "admissible_bases") for base in bases), dtype=np.float64)
    passes = _admissible(tried, rotary_dim, length)
    islands: list[tuple[float, float]] = []
    inside = False
    for base, passed in zip(tried.tolist(), passes.tolist(), strict=True):
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
    islands = admissible_bases(bases, rotary_dim, length)
    return min((min(island) for island in islands), default=None)


def _admissible(bases: NDArray[np.float64], rotary_dim: int, length: int) -> Bool[np.ndarray, "bases"]:
    dim = require_even(rotary_dim, asked="admissible_bases(rotary_dim)", do="pass the rotary_dim of a head")
    length = require_count(length, asked="admissible_bases(length)", do="pass the context length")
    inv_freq = np.array([Plain(base).evaluate(dim) for base in bases]).reshape(-1, dim // 2)
    alive = np.ones(len(bases), dtype=bool)
    # From the far end: a base that fails does so mostly near `length`, and is then out of the scan.
    step = max(1, _CELLS // (dim // 2 * max(1, len(bases))))
    for stop in range(length + 1, 0, -step):
        rows = np.flatnonzero(alive)
        if rows.size == 0:
            break
        distances = np.arange(max(0, stop - step), stop, dtype=np.float64)
        # One row of frequencies at a time would be slow, all of them at once would not fit: blocks of distances.
        sums = np.cos(distances[:, None, None] * inv_freq[rows]).sum(axis=-1)
        alive[rows] = (sums >= 0).all(axis=0)
    return alive


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
