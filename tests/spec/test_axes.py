"""Axes, xPos and query temperatures as values: what models have, and what is refused."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ropewalk import RopeSpec, RopewalkError
from ropewalk.spec import AcrossHeads, Axes, LogTemperature, Plain, StepTemperature, XPos, Yarn

sections = st.lists(st.integers(0, 12), min_size=2, max_size=4).filter(lambda sizes: sizes[0] > 0)


@pytest.mark.parametrize(
    ("axes", "names"),
    [
        (Axes.chunked([16, 24, 24]), "T" * 16 + "H" * 24 + "W" * 24),
        (Axes.interleaved([24, 20, 20]), "THW" * 20 + "TTTT"),
        (Axes.interleaved([11, 11, 10]), "THW" * 10 + "TH"),
        (Axes.ernie([22, 22, 20]), "HW" * 22 + "T" * 20),
        (Axes.rarest_first([24, 20, 20]), "THWTHWTHWTHWTHWTHWTHWTHTWTHWTHWTHWTHWTHWTHWTHTWTHWTHWTHWTHWTHWTT"),
        (Axes.chunked([16, 16, 16, 16]), "0" * 16 + "1" * 16 + "2" * 16 + "3" * 16),
        (Axes.repeated(2, 64), "0" * 16 + "1" * 16),
        (Axes.alternating(2, 8), "0101"),
        (Axes.strided(2, 8), "0011"),
    ],
)
def test_the_axis_of_each_pair(axes, names):
    assert axes.names == names


@given(sections, st.sampled_from([Axes.chunked, Axes.rarest_first]))
def test_every_axis_has_its_section(sizes, kind):
    axes = kind(sizes)
    assert axes.pairs == sum(sizes)
    assert [sum(row) for row in axes.weights] == sizes
    assert axes.index == tuple(range(sum(sizes)))


def test_vision_has_the_frequencies_of_a_narrower_head_on_each_axis():
    narrow = Plain().evaluate(32)
    np.testing.assert_array_equal(RopeSpec(64, axes=Axes.repeated(2, 64)).inv_freq(), np.tile(narrow, 2))
    np.testing.assert_array_equal(RopeSpec(64, axes=Axes.alternating(2, 64)).inv_freq(), np.repeat(narrow, 2))
    wide = Plain().evaluate(64)
    found = RopeSpec(64, axes=Axes.strided(2, 64)).inv_freq()
    np.testing.assert_array_equal(found, np.concatenate((wide[0::2], wide[1::2])))


def test_the_matrix_is_frequencies_on_their_axes():
    axes = Axes.interleaved([2, 1, 1])
    matrix = axes.matrix(RopeSpec(8, axes=axes).inv_freq())
    assert matrix.shape == (3, 4)
    np.testing.assert_allclose(matrix.sum(0), [1, 0.1, 0.01, 0.001])
    assert [int(column.argmax()) for column in matrix.T] == [0, 1, 2, 0]
    rows = axes.matrix(AcrossHeads(1e4, 2).evaluate(8))
    assert rows.shape == (2, 3, 4)


def test_a_mixture_of_axes_is_a_matrix_like_any_other():
    axes = Axes([[1, 0.5], [0, 0.5]], [0, 1], 4)
    assert axes.names == "0?"
    assert RopeSpec.from_json(RopeSpec(4, axes=axes).to_json()).axes == axes


@given(sections, st.sampled_from(["half", "interleaved"]), st.sampled_from([1, -1]))
def test_axes_go_through_json_with_any_rule(sizes, pairing, sign):
    dim = 2 * sum(sizes)
    spec = RopeSpec(dim + 2, Yarn(1e4, 4, 4096), rotary_dim=dim, axes=Axes.chunked(sizes), pairing=pairing, sign=sign)
    assert RopeSpec.from_json(spec.to_json()) == spec
    np.testing.assert_array_equal(spec.inv_freq(), sign * Yarn(1e4, 4, 4096).evaluate(dim))


def test_temperatures_of_llama_4_and_ministral_3():
    llama, ministral = StepTemperature(0.1, 8192, first=1), StepTemperature(0.1, 16384)
    found = llama.evaluate(np.array([8190.0, 8191.0, 131071.0]))
    np.testing.assert_allclose(found, [1, 1.0693147, 1.2833213], atol=5e-8)
    found = ministral.evaluate(np.array([16383.0, 16384.0, 262143.0]))
    np.testing.assert_allclose(found, [1, 1.0693147, 1.2772589], atol=5e-8)
    np.testing.assert_array_equal(llama.evaluate(np.array([-9000.0, -1.0, 0.0])), 1)


@given(st.integers(2, 10_000), st.integers(0, 1 << 20))
def test_log_n_is_one_within_the_trained_length_and_grows_past_it(length, position):
    factor = float(LogTemperature(length).evaluate(float(position)))
    assert factor == pytest.approx(max(1, math.log(position + 1) / math.log(length)))


@pytest.mark.parametrize("value", [StepTemperature(0.1, 8192, 1), LogTemperature(512)])
def test_temperatures_and_xpos_go_through_json(value):
    spec = RopeSpec(8, query_temperature=value, xpos=XPos(4096, 1024, 0.5))
    assert RopeSpec.from_json(spec.to_json()) == spec
    assert not spec.same_for_both


@given(st.integers(0, 4095), st.integers(0, 4095), st.integers(0, 31))
def test_xpos_multiplies_a_score_by_a_power_of_the_distance(m, n, i):
    xpos = XPos(4096)
    query, key = (xpos.log_scale(64, np.array([[float(p)]]))[0, i] for p in (m, n))
    zeta = (2 * i / 64 + 0.4) / 1.4
    assert query - key == pytest.approx((m - n) / 512 * math.log(zeta), abs=1e-9)


@pytest.mark.usefixtures("as_a_user")
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Axes.chunked([]), "the number of pairs per axis"),
        (lambda: Axes.chunked([4]), "two axes or more"),
        (lambda: Axes.chunked([4, -1]), "the number of pairs per axis"),
        (lambda: Axes.chunked([4, 2.5]), "the number of pairs per axis"),
        (lambda: Axes.chunked("44"), "the number of pairs per axis"),
        (lambda: Axes.ernie([4, 2, 2]), "with h equal to w"),
        (lambda: Axes.rarest_first([0, 2, 2]), "at least one pair for axis 0"),
        (lambda: Axes.repeated(3, 64), "a multiple of 6"),
        (lambda: Axes.repeated(0, 64), "at least 1"),
        (lambda: Axes([[1.0], [math.nan]], [0], 2), "finite numbers"),
        (lambda: Axes([[1.0], [0.0]], [1], 2), "below dim / 2"),
        (lambda: Axes([[1.0, 1.0], [0.0]], [0], 2), "finite numbers"),
        (lambda: RopeSpec(8, axes=Axes.chunked([1, 1])), "axes for 4 pairs"),
        (lambda: RopeSpec(4, axes=Axes.chunked([1, 1]), xpos=XPos(64)), "one position per token"),
        (lambda: RopeSpec(4, axes=Axes.chunked([1, 1]), query_temperature=LogTemperature(9)), "one position per token"),
        (lambda: XPos(0), "length=...\\)\nexpected: an integer"),
        (lambda: XPos(1 << 20), "raise scale_base to at least 15793"),
        (lambda: XPos(64, gamma=0), "gamma"),
        (lambda: StepTemperature(0, 8192), "scale"),
        (lambda: StepTemperature(0.1, 0), "step"),
        (lambda: LogTemperature(1), "at least 2"),
    ],
)
def test_what_cannot_be_is_refused(make, message):
    with pytest.raises(RopewalkError, match=message):
        make()
