"""How a rule changes each pair: bands of published models, computed by hand from the definitions of their rules."""

import dataclasses
import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import ropewalk as rw
from ropewalk import RopewalkError
from ropewalk.spec import NTK, Llama3, LongRope, Plain, PositionInterpolation, Proportional, RopeSpec, Yarn
from ropewalk.theory import KINDS, Band, bands, classify, periods, plain_inv_freq, rotations
from strategies import bases, even_dims


def bands_of(spec: RopeSpec, length: int | None = None) -> list[tuple[str, int, int]]:
    return [(band.kind, band.first, band.last) for band in bands(spec.inv_freq(length), plain_inv_freq(spec))]


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (Plain(1e4), [("unchanged", 0, 63)]),
        # Unchanged if the period is below 8192 / 4: 64 ln(2048/2pi) / ln 5e5 = 28.2; interpolated above 8192: 35.0.
        (Llama3(5e5, 8, 8192), [("unchanged", 0, 28), ("between", 29, 34), ("interpolated", 35, 63)]),
        # For Llama 2 the ramp of the published code is between the indices 20 and 46, both exclusive.
        (Yarn(1e4, 16, 4096), [("unchanged", 0, 20), ("between", 21, 45), ("interpolated", 46, 63)]),
        (PositionInterpolation(1e4, 4), [("interpolated", 0, 63)]),
        (PositionInterpolation(1e4, 1), [("unchanged", 0, 63)]),
        (NTK(1e4, 4), [("unchanged", 0, 0), ("between", 1, 62), ("interpolated", 63, 63)]),
        (Proportional(1e4, 0.25), [("unchanged", 0, 15), ("still", 16, 63)]),
        (Proportional(1e4, 0.25, factor=8), [("interpolated", 0, 15), ("still", 16, 63)]),
        (Proportional(1e4, 0.0), [("still", 0, 63)]),
    ],
)
def test_bands(rule, expected):
    assert bands_of(RopeSpec(128, rule)) == expected


def test_bands_depend_on_the_length_if_the_rule_does():
    spec = RopeSpec(8, LongRope(1e4, [1, 1, 1, 1], [1, 0.5, 2, 4], trained_length=64))
    assert bands_of(spec) == [("unchanged", 0, 3)]
    assert bands_of(spec, 65) == [("unchanged", 0, 0), ("faster", 1, 1), ("between", 2, 2), ("interpolated", 3, 3)]


def test_the_sign_does_not_change_the_kind():
    spec = RopeSpec(128, Llama3(5e5, 8, 8192))
    assert bands_of(dataclasses.replace(spec, sign=-1)) == bands_of(spec)


def test_bands_with_axes():
    spec = RopeSpec(128, Yarn(1e4, 16, 4096), axes=rw.Axes.interleaved([24, 20, 20]))
    assert bands_of(spec) == bands_of(RopeSpec(128, Yarn(1e4, 16, 4096)))
    vision = RopeSpec(64, PositionInterpolation(1e4, 2), axes=rw.Axes.repeated(2, 64))
    assert plain_inv_freq(vision).tolist() == [*Plain(1e4).evaluate(32)] * 2
    assert bands_of(vision) == [("interpolated", 0, 31)]


@given(even_dims, bases, st.lists(st.sampled_from([0.0, 0.125, 0.5, 1.0, 3.0]), min_size=1, max_size=64))
def test_bands_are_the_runs_of_kinds(dim, base, ratios):
    plain = Plain(base).evaluate(dim)
    scaled = plain * np.resize(ratios, plain.size)
    kinds = classify(scaled, plain)
    runs = bands(scaled, plain)
    assert [band.kind for band in runs for _ in range(band.first, band.last + 1)] == kinds
    assert all(a.kind != b.kind and a.last + 1 == b.first for a, b in itertools.pairwise(runs))
    assert (runs[0].first, runs[-1].last) == (0, plain.size - 1)
    assert set(kinds) <= set(KINDS)
    for ratio, kind in zip(np.resize(ratios, plain.size), kinds, strict=True):
        assert (kind == "unchanged") == (ratio == 1)
        assert (kind == "still") == (ratio == 0)
        assert (kind == "faster") == (ratio > 1)


@given(even_dims, bases, st.integers(1, 1 << 20))
def test_rotations_are_the_length_over_the_period(dim, base, length):
    theta = Plain(base).evaluate(dim)
    np.testing.assert_allclose(rotations(-theta, length) * periods(theta), length, rtol=1e-12)


def test_rotations_of_llama():
    # 8192 positions at 1 radian each are 1303.8 rotations; the slowest pair of LLaMA 3 has a period of 2.56 million.
    counts = rotations(Plain(5e5).evaluate(128), 8192)
    assert round(counts[0], 1) == 1303.8
    assert round(counts[-1], 4) == 0.0032
    assert rotations([0.0], 8).tolist() == [0.0]


def test_band_is_a_value():
    band = Band("still", 1, 2)
    assert band == Band("still", 1, 2)
    with pytest.raises(dataclasses.FrozenInstanceError):
        band.first = 3  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.usefixtures("as_a_user")
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: rotations([1.0], 0), "a finite number above 0"),
        (lambda: rotations([math.nan], 8), "one finite number per pair"),
        (lambda: classify([1.0], [1.0, 0.1]), "got:      1 and 2"),
        (lambda: classify([1.0], [0.0]), "with a 0 in `plain`"),
        (lambda: bands([], []), "one finite number per pair"),
        (lambda: plain_inv_freq(RopeSpec(4, rw.Explicit([1.0, 0.5]))), "a rule with a base"),
        (lambda: plain_inv_freq(RopeSpec(4, rw.AcrossHeads(1e4, 2))), "one set of frequencies for all heads"),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(RopewalkError, match=message):
        call()
