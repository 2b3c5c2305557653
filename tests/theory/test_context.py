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
    context_after_tuning,
    critical_base,
    critical_dimension,
    extrapolation_limit,
    first_negative_distance,
    lowest_admissible_base,
    periods,
    rotations,
    small_base_thresholds,
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


def test_a_critical_base_that_exceeds_float64_is_infinite():
    # 10000^111: a model trained at 7 positions has completed one rotation with one pair.
    assert critical_base(7, 1 << 20) == math.inf
    assert context_after_tuning(7, 1 << 20, 1e6, rotary_dim=128).limit == 1 << 20


def test_thresholds_of_small_bases():
    assert [round(base, 1) for base in small_base_thresholds(4096)] == [2607.6, 1303.8, 651.9]


# LLaMA 2: tuned length, new base; case, limit, critical dimension, least rotation.
GOLDEN = [
    # Liu et al.: the collapse of base 10^6 past 129027, and no such limit for base 500, both tuned at 16384.
    (16_384, 1e6, "larger base", 129_027, 92, 0),
    (16_384, 500, "tuned length", 16_384, 128, 1),
    # No pair completes more of a rotation with a base that equals the one of training.
    (4096, 1e4, "tuned length", 4096, 92, 0),
    (4096, 2e4, "larger base", 7754, 92, 0),
    # Around the critical bases of 8192 and 16384.
    (8192, 26_784, "tuned length", 8192, 92, 0),
    (8192, 26_785, "larger base", 9566, 92, 0),
    (16_384, 71_738, "tuned length", 16_384, 92, 0),
    (16_384, 71_739, "larger base", 19_420, 92, 0),
    # Around the thresholds 2607.6, 1303.8 and 651.9.
    (4096, 2608, "tuned length", 4096, 106, 0),
    (4096, 2607, "tuned length", 4096, 106, 0.25),
    (4096, 1304, "tuned length", 4096, 116, 0.25),
    (4096, 1303, "tuned length", 4096, 116, 0.5),
    (4096, 652, "tuned length", 4096, 128, 0.5),
    (4096, 651, "tuned length", 4096, 128, 1),
]


def result_of(tuned_length, new_base):
    tuned = context_after_tuning(4096, tuned_length, new_base, rotary_dim=128)
    parts = zip((0.25, 0.5, 1), tuned.thresholds, strict=True)
    part = max((part for part, threshold in parts if new_base <= threshold), default=0)
    return tuned.case, round(tuned.limit), tuned.critical_dim, part


@pytest.mark.parametrize("row", GOLDEN, ids=str)
def test_both_halves_of_the_law(row):
    tuned_length, new_base, *expected = row
    assert result_of(tuned_length, new_base) == tuple(expected)
    tuned = context_after_tuning(4096, tuned_length, new_base, rotary_dim=128)
    assert tuned.trained_critical_dim == 92
    assert tuned.critical_base == critical_base(4096, tuned_length)
    assert tuned.thresholds == small_base_thresholds(tuned_length)


def test_a_model_whose_pairs_all_completed_a_rotation_has_no_limit():
    # Every feature of base 500 completes a rotation within 4096, so no angle of a larger base is new.
    assert critical_dimension(128, 500, 4096) == 128
    tuned = context_after_tuning(4096, 4096, 1e4, rotary_dim=128, base=500)
    assert (tuned.case, tuned.limit) == ("no limit", None)
    # At or below the critical base the law has the same limit for every model.
    assert context_after_tuning(4096, 4096, 500, rotary_dim=128, base=500).limit == 4096


lengths = st.tuples(st.integers(7, 1 << 20), st.integers(7, 1 << 20)).map(sorted)


@given(lengths, bases, bases, even_dims)
def test_the_limit_is_at_least_the_tuned_length(both, base, new_base, dim):
    trained_length, tuned_length = both
    tuned = context_after_tuning(trained_length, tuned_length, new_base, dim, base)
    above = new_base > critical_base(trained_length, tuned_length, base)
    assert (tuned.case == "tuned length") == (not above)
    assert tuned.limit is None or tuned.limit >= tuned_length * (1 - 1e-9)
    if not above:
        assert tuned.limit == tuned_length
        # Eq. 16c: tuning with a base at or below the critical one adds features that complete a rotation.
        assert tuned.critical_dim >= tuned.trained_critical_dim


@given(lengths, bases, even_dims, st.lists(bases, min_size=2, max_size=4).map(sorted))
def test_the_limit_does_not_decrease_with_the_base(both, base, dim, tried):
    limits = [context_after_tuning(*both, new_base, dim, base).limit for new_base in tried]
    assert limits == sorted(limits, key=lambda limit: math.inf if limit is None else limit)


@given(lengths, st.floats(1.5, 1e6), even_dims)
def test_the_halves_meet_at_the_critical_base(both, base, dim):
    trained_length, tuned_length = both
    critical = critical_base(trained_length, tuned_length, base)
    if not critical < 1e100:
        return
    below, above = (context_after_tuning(*both, x, dim, base) for x in (critical * (1 - 1e-9), critical * (1 + 1e-9)))
    assert below.limit == tuned_length
    if above.limit is not None:
        # d_extra is rounded up to an even number of features, so T_extra is up to a factor of base^(2/d) too large.
        assert 1 - 1e-6 <= above.limit / tuned_length <= critical ** (2 / dim) * (1 + 1e-6)


@given(st.integers(7, 1 << 20), bases, even_dims)
def test_below_a_threshold_every_pair_completes_its_part_of_a_rotation(tuned_length, new_base, dim):
    tuned = context_after_tuning(7, tuned_length, new_base, dim)
    slowest = rotations(Plain(new_base).evaluate(dim), tuned_length).min()
    assert tuned.slowest_rotation == pytest.approx(slowest, rel=1e-9)
    for part, threshold in zip((0.25, 0.5, 1), tuned.thresholds, strict=True):
        assert (tuned.slowest_rotation >= part) == (tuned.least_rotation >= part)
        if new_base <= threshold:
            assert tuned.least_rotation >= part
    # With many features the exponent of the slowest pair is almost 1, and the thresholds are sharp.
    wide = context_after_tuning(7, tuned_length, new_base, 1 << 20)
    assert wide.slowest_rotation == pytest.approx(tuned_length / (2 * math.pi * new_base), rel=1e-4)


@pytest.mark.parametrize(
    ("new_base", "dim", "expected"),
    [
        # A single pair has the frequency 1, two pairs 1 and base^-0.5.
        *((1e4, 2, 1), (1e9, 2, 1), (1e4, 4, 1), (1e6, 4, 0.5), (5e6, 4, 0.25), (1e7, 4, 0)),
        # 64 pairs: the slowest completes a quarter up to base 2607.6^(128/126) = 2954, above the threshold.
        *((2607, 128, 0.25), (2954, 128, 0.25), (2956, 128, 0), (1303, 128, 0.5), (651, 128, 1)),
    ],
)
def test_the_least_rotation_is_that_of_the_slowest_pair(new_base, dim, expected):
    tuned = context_after_tuning(4096, 4096, new_base, dim)
    assert tuned.least_rotation == expected
    completed = 4096 / periods(Plain(new_base).evaluate(dim)).max()
    assert max(part for part in (0, 0.25, 0.5, 1) if part <= completed) == expected


@pytest.mark.parametrize(
    ("name", "mutant"),
    [
        ("small_base_thresholds", lambda length: (length / math.pi, length / math.pi, length / math.tau)),
        ("small_base_thresholds", lambda length: (2 * length, length, length / 2)),
        ("critical_base", lambda trained, tuned, base: base),
        ("critical_dimension", lambda dim, base, length: 92),
        ("extrapolation_limit", lambda base, dim, critical_dim: math.tau * base ** ((critical_dim - 2) / dim)),
    ],
)
def test_mutants_of_the_law_are_noticed(name, mutant, monkeypatch):
    assert [result_of(*row[:2]) for row in GOLDEN] == [row[2:] for row in GOLDEN]
    monkeypatch.setattr(f"ropewalk.theory.context.{name}", mutant)
    assert [result_of(*row[:2]) for row in GOLDEN] != [row[2:] for row in GOLDEN]


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
        (lambda: small_base_thresholds(6), "at least 7"),
        (lambda: small_base_thresholds(1e4), "an integer"),
        (lambda: context_after_tuning(4096, 2048, 1e4, 128), "at least trained_length = 4096"),
        (lambda: context_after_tuning(4096, 8192, 1.0, 128), r"context_after_tuning\(new_base\)"),
        (lambda: context_after_tuning(4096, 8192, 1e4, 127), "an even integer"),
        (lambda: context_after_tuning(4096, 8192, 1e4, 128, math.inf), "a finite number above 0"),
        (lambda: context_after_tuning(6, 8192, 1e4, 128), "at least 7"),
        (lambda: first_negative_distance([1.0], 0), "at least 1"),
        (lambda: admissible_bases([0.5], 8, 10), "a base above 1"),
        (lambda: admissible_bases([10], 8, 0), "at least 1"),
        (lambda: periods([math.inf]), "one finite number per pair"),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(RopewalkError, match=message):
        call()
