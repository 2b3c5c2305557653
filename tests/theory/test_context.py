"""Periods, the critical dimension and bounds on the base: figures of the papers, and a complete scan of bases."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from formulas import plain_frequencies, score_sums
from ropewalk import RopewalkError
from ropewalk.spec import Plain
from ropewalk.theory import (
    admissible_bases,
    critical_base,
    critical_dimension,
    extrapolation_limit,
    first_negative_distance,
    lowest_admissible_base,
    periods,
)
from strategies import bases, even_dims

TRIED = (10, 50, 100, 500, 1e3, 2e3, 5e3, 1e4, 5e4, 1e5, 5e5, 1e6)


@pytest.mark.parametrize(
    ("dim", "base", "length", "expected"),
    [
        *((128, 1e4, t, d) for t, d in ((2048, 82), (4096, 92), (8192, 100), (65_536, 128))),
        *((64, 1e4, t, d) for t, d in ((32, 12), (64, 18), (128, 22), (256, 26), (512, 32))),
        *((64, 100, t, d) for t, d in ((32, 24), (64, 34), (128, 42), (256, 52), (512, 62))),
        *((32, 1e4, t, d) for t, d in ((32, 6), (64, 10), (128, 12), (256, 14), (512, 16))),
        (128, 5e5, 8192, 70),
    ],
)
def test_critical_dimension(dim, base, length, expected):
    assert critical_dimension(dim, base, length) == expected


@given(even_dims, bases, st.integers(7, 1 << 20))
def test_critical_dimension_counts_the_features_that_complete_a_rotation(dim, base, length):
    complete = periods(Plain(base).evaluate(dim)) <= length
    # The formula rounds up: it counts the pairs before the first that does not complete a rotation.
    assert abs(critical_dimension(dim, base, length) - 2 * int(complete.sum())) in (0, 2)


def test_liu_bounds():
    assert [round(critical_base(4096, t)) for t in (8192, 16_384, 32_768, 102_400, 131_072)] == [
        *(26_784, 71_738, 192_144, 970_497, 1_378_414)
    ]
    assert [round(extrapolation_limit(b, 128, 92)) for b in (2e4, 4e4, 8e4, 5e5, 1e6, 2e6)] == [
        *(7754, 12_762, 21_003, 78_400, 129_027, 212_347)
    ]


@pytest.mark.parametrize(
    ("dim", "expected"),
    [
        (32, [5, 22, 28, 103, 122, 236, 228, 474, 883, 1283, 2089, 3478]),
        (128, [5, 29, 59, 171, 361, 506, 864, 1707, 5306, 7757, 18_438, 27_115]),
    ],
)
def test_first_negative_distance(dim, expected):
    assert [first_negative_distance(Plain(base).evaluate(dim), 30_000) for base in TRIED] == expected


def test_first_negative_distance_stops_at_its_limit():
    theta = Plain(1e4).evaluate(128)
    assert first_negative_distance(theta, 1707) is None
    assert first_negative_distance(theta, 1708) == 1707


@given(st.integers(1, 40), st.floats(-6, 0), st.integers(1, 5000), st.integers(0, 2**32 - 1))
def test_first_negative_distance_equals_its_definition(pairs, lowest, limit, seed):
    theta = 10 ** np.random.default_rng(seed).uniform(lowest, 0, pairs)
    below = np.flatnonzero(score_sums(theta, limit) < 0)
    assert first_negative_distance(theta, limit) == (below[0] if below.size else None)


def test_a_sum_near_0_is_computed_from_its_cosines():
    # cos(m pi / 2) is 0 at every odd m, up to the rounding of pi / 2. At even m it is 1 or -1.
    theta = [np.pi / 2]
    expected = int(np.flatnonzero(score_sums(np.array(theta), 64) < 0)[0])
    assert first_negative_distance(theta, 64) == expected
    # A search with a large limit does not store all distances.
    assert first_negative_distance(theta, 1 << 50) == expected


@pytest.mark.parametrize(
    ("length", "tried", "intervals"),
    [
        (1024, range(4200, 4400), [(4294, 4330)]),
        (2048, range(11_500, 11_700), [(11_588, 11_649)]),
        (4096, range(26_940, 26_990), [(26_953, 26_973)]),
        (8192, range(83_740, 84_500, 4), [(83_764, 84_468)]),
        (1024, [4000, 4001], []),
        (1024, [], []),
    ],
)
def test_intervals(length, tried, intervals):
    assert admissible_bases(tried, 128, length) == intervals
    assert lowest_admissible_base(tried, 128, length) == (intervals[0][0] if intervals else None)


def test_long_lengths_are_scanned_completely():
    # For head_dim 128 the lowest base with sums >= 0 up to 2^20 is near 6.5e7 (Su, kexue.fm 10122).
    assert lowest_admissible_base([6.4e7, 6.545e7, 6.6e7], 128, 1 << 20) == 6.545e7
    assert first_negative_distance(Plain(6.545e7).evaluate(128), (1 << 20) + 1) is None
    assert first_negative_distance(Plain(6.4e7).evaluate(128), (1 << 20) + 1) is not None


def test_the_smallest_base_is_returned_for_any_order():
    assert lowest_admissible_base([29_000, 26_960], 128, 4096) == 26_960


@given(st.integers(1, 8).map(lambda p: 2 * p), st.integers(1, 200), st.lists(st.floats(2, 1e5), max_size=12))
def test_the_scan_equals_the_definition(dim, length, tried):
    expected = [b for b in tried if (score_sums(plain_frequencies(dim, b), length + 1) >= 0).all()]
    intervals = admissible_bases(tried, dim, length)
    covered = [b for b in tried if any(first <= b <= last for first, last in intervals)]
    # With unsorted bases an interval covers neighbours in the list, so only its first base is compared.
    if tried == sorted(tried):
        assert covered == expected
    assert [first for first, _ in intervals[:1]] == expected[:1]


@pytest.mark.usefixtures("as_a_user")
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: critical_dimension(7, 1e4, 4096), "an even integer"),
        (lambda: critical_dimension(8, 1.0, 4096), "a base above 1"),
        (lambda: critical_dimension(8, math.nan, 4096), "a finite number above 0"),
        (lambda: critical_dimension(8, 1e4, 6), "at least 7"),
        (lambda: critical_base(4096, 0), "at least 7"),
        (lambda: extrapolation_limit(-1, 8, 4), "above 0"),
        (lambda: extrapolation_limit(1e6, 128, 200), "from 0 to rotary_dim = 128"),
        (lambda: first_negative_distance([1.0], 0), "at least 1"),
        (lambda: admissible_bases([0.5], 8, 10), "a base above 1"),
        (lambda: admissible_bases([10], 8, 0), "at least 1"),
        (lambda: periods([math.inf]), "one finite number per pair"),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(RopewalkError, match=message):
        call()
