"""What a rule does to each pair: kept, interpolated, between the two; and how often a pair turns within a length."""

import dataclasses
import itertools
import math
from typing import Literal

import numpy as np
from jaxtyping import Float64

from ropewalk.errors import RopewalkError, require_positive, shown
from ropewalk.spec.frequencies import Plain
from ropewalk.spec.rope import RopeSpec
from ropewalk.theory.arguments import InvFreq, frequencies_of

__all__ = ["KINDS", "Band", "Kind", "bands", "classify", "plain_inv_freq", "turns"]

Kind = Literal["unchanged", "interpolated", "between", "still", "faster"]
# What may become of a pair, from the fastest to those that stand.
KINDS: tuple[Kind, ...] = ("faster", "unchanged", "between", "interpolated", "still")
# Ratios that differ by less are equal: rules round in the last places of float64.
_EQUAL = 1e-9


@dataclasses.dataclass(frozen=True)
class Band:
    """Neighbouring pairs, `first` to `last` and both of them, of which a rule makes the same `kind`.

    >>> Band("unchanged", first=0, last=28)
    Band(kind='unchanged', first=0, last=28)
    """

    kind: Kind
    first: int
    last: int


def turns(inv_freq: InvFreq, length: float) -> Float64[np.ndarray, "pairs"]:
    """length |theta_i| / 2 pi: how often each pair turns within `length` positions (r(d) of YaRN, 2309.00071, eq. 13).

    >>> turns([2 * math.pi, 0.0], 3).tolist()
    [3.0, 0.0]
    """
    length = require_positive(length, asked="turns(length)", do="pass how many positions there are")
    return np.abs(frequencies_of(inv_freq, asked="turns")) * length / (2 * math.pi)


def plain_inv_freq(spec: RopeSpec) -> Float64[np.ndarray, "pairs"]:
    """The frequencies that the spec would have without its rule: base^(-2i/d), pair by pair.

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
            do="compare its frequencies yourself: classify(inv_freq, plain)",
        )
    return dataclasses.replace(spec, frequencies=Plain(base)).inv_freq()


def classify(inv_freq: InvFreq, plain: InvFreq) -> list[Kind]:
    """What became of each pair whose frequency was `plain`, by the ratio of the two.

    "unchanged" is a ratio of 1, "interpolated" the smallest ratio of all if it is below 1 (the pair turns as if
    positions were divided by the factor), "between" what lies between these, "faster" a ratio above 1, and "still" a
    pair that does not turn.

    Differs from YaRN (2309.00071, section 3.2), which sorts pairs by their turns: this looks at what was done to them,
    so it holds for any rule.

    >>> classify([1.0, 0.05, 0.0025, 0.0], [1.0, 0.1, 0.01, 0.001])
    ['unchanged', 'between', 'interpolated', 'still']
    """
    now, before = (frequencies_of(values, asked="classify") for values in (inv_freq, plain))
    if now.shape != before.shape or not before.all():
        raise RopewalkError(
            asked="classify(inv_freq, plain)",
            expected="as many frequencies in both, and none of `plain` 0",
            got=f"{now.size} and {before.size}{'' if before.all() else ', of which one is 0'}",
            do="pass spec.inv_freq() and plain_inv_freq(spec)",
        )
    ratios = np.abs(now / before)
    smallest = ratios[ratios > 0].min(initial=math.inf)
    return [_kind(ratio, smallest) for ratio in ratios.tolist()]


def bands(inv_freq: InvFreq, plain: InvFreq) -> list[Band]:
    """The pairs in runs of one kind, as `classify` tells kinds apart.

    >>> bands([1.0, 0.1, 0.0025], [1.0, 0.1, 0.01])
    [Band(kind='unchanged', first=0, last=1), Band(kind='interpolated', first=2, last=2)]
    """
    kinds = classify(inv_freq, plain)
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
