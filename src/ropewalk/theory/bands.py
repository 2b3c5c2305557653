"""How a frequency rule changes each pair, and the number of full rotations of each pair within a length."""

import dataclasses
import itertools
import math
from typing import Literal

import numpy as np

from ropewalk.errors import RopewalkError, require_positive, shown
from ropewalk.shapes import Float64
from ropewalk.spec.frequencies import Plain
from ropewalk.spec.rope import RopeSpec
from ropewalk.theory.arguments import InvFreq, frequencies_of

__all__ = ["KINDS", "Band", "Kind", "bands", "classify", "plain_inv_freq", "rotations"]

Kind = Literal["unchanged", "interpolated", "between", "still", "faster"]
# How a rule can change a pair, from a higher frequency to a frequency of 0.
KINDS: tuple[Kind, ...] = ("faster", "unchanged", "between", "interpolated", "still")
# Ratios that differ by less than this are equal: rules round in the last places of float64.
_EQUAL = 1e-9


@dataclasses.dataclass(frozen=True)
class Band:
    """A run of neighbouring pairs that a rule changes in the same way.

    Attributes:
        kind: How the rule changes these pairs.
        first: Index of the first pair.
        last: Index of the last pair, inclusive.

    >>> Band("unchanged", first=0, last=28)
    Band(kind='unchanged', first=0, last=28)
    """

    kind: Kind
    first: int
    last: int


def rotations(inv_freq: InvFreq, length: float) -> Float64[np.ndarray, "pairs"]:
    """Number of full rotations of each pair within `length` positions: length |theta_i| / 2 pi.

    This is r(d) of YaRN (2309.00071, eq. 13).

    Args:
        inv_freq: Frequencies [pairs].
        length: Number of positions.

    Returns:
        Number of rotations per pair [pairs].

    Raises:
        RopewalkError: If a frequency is not finite or `length` is not positive.

    >>> rotations([2 * math.pi, 0.0], 3).tolist()
    [3.0, 0.0]
    """
    length = require_positive(length, asked="rotations(length)", do="pass the number of positions")
    return np.abs(frequencies_of(inv_freq, asked="rotations")) * length / (2 * math.pi)


def plain_inv_freq(spec: RopeSpec) -> Float64[np.ndarray, "pairs"]:
    """Frequencies of `spec` without its rule: base^(-2i/d) for each pair.

    Args:
        spec: A spec whose rule has a base, with the same frequencies in all heads.

    Returns:
        Frequencies [pairs].

    Raises:
        RopewalkError: If the rule has no base, or if heads have different frequencies.

    >>> from ropewalk.spec import PositionInterpolation
    >>> plain_inv_freq(RopeSpec(4, PositionInterpolation(10_000, factor=8))).tolist()
    [1.0, 0.01]
    """
    base = getattr(spec.frequencies, "base", None)
    if base is None or spec.inv_freq().ndim != 1:
        raise RopewalkError(
            asked="plain_inv_freq(spec)",
            expected="a rule with a base, and one set of frequencies for all heads",
            got=shown(spec.frequencies),
            do="compare the frequencies directly: classify(inv_freq, plain)",
        )
    return dataclasses.replace(spec, frequencies=Plain(base)).inv_freq()


def classify(inv_freq: InvFreq, plain: InvFreq) -> list[Kind]:
    """Classify each pair by the ratio inv_freq / plain.

    - "unchanged": the ratio is 1.
    - "interpolated": the ratio is the smallest of all, and below 1. The pair rotates as if positions were divided by
      the scaling factor.
    - "between": the ratio is between these two.
    - "faster": the ratio is above 1.
    - "still": the frequency is 0, so the pair does not rotate.

    Differs from YaRN (2309.00071, section 3.2), which classifies pairs by their number of rotations. The ratio works
    for any rule.

    Args:
        inv_freq: Frequencies under the rule [pairs].
        plain: Frequencies without the rule [pairs], none of them 0.

    Returns:
        One kind per pair.

    Raises:
        RopewalkError: If the lengths differ, or if a frequency in `plain` is 0.

    >>> classify([1.0, 0.05, 0.0025, 0.0], [1.0, 0.1, 0.01, 0.001])
    ['unchanged', 'between', 'interpolated', 'still']
    """
    return _kinds(inv_freq, plain, "classify")


def _kinds(inv_freq: InvFreq, plain: InvFreq, asked: str) -> list[Kind]:
    scaled, unscaled = (frequencies_of(values, asked=asked) for values in (inv_freq, plain))
    if scaled.shape != unscaled.shape or not unscaled.all():
        raise RopewalkError(
            asked=f"{asked}(inv_freq, plain)",
            expected="the same number of frequencies in both, and no 0 in `plain`",
            got=f"{scaled.size} and {unscaled.size} frequencies{'' if unscaled.all() else ', with a 0 in `plain`'}",
            do="pass spec.inv_freq() and plain_inv_freq(spec)",
        )
    ratios = np.abs(scaled / unscaled)
    smallest = ratios[ratios > 0].min(initial=math.inf)
    return [_kind(ratio, smallest) for ratio in ratios.tolist()]


def bands(inv_freq: InvFreq, plain: InvFreq) -> list[Band]:
    """Group neighbouring pairs of the same kind into bands; see `classify` for the kinds.

    Args:
        inv_freq: Frequencies under the rule [pairs].
        plain: Frequencies without the rule [pairs], none of them 0.

    Returns:
        The bands, from pair 0 to the last pair.

    >>> bands([1.0, 0.1, 0.0025], [1.0, 0.1, 0.01])
    [Band(kind='unchanged', first=0, last=1), Band(kind='interpolated', first=2, last=2)]
    """
    kinds = _kinds(inv_freq, plain, "bands")
    runs = (list(run) for _, run in itertools.groupby(range(len(kinds)), key=lambda i: kinds[i]))
    return [Band(kinds[run[0]], run[0], run[-1]) for run in runs]


def _kind(ratio: float, smallest: float) -> Kind:
    if ratio == 0:
        return "still"
    if abs(ratio - 1) <= _EQUAL:
        return "unchanged"
    if ratio > 1:
        return "faster"
    return "interpolated" if ratio <= smallest * (1 + _EQUAL) else "between"
