"""Score sums and bounds: figures of the papers, identities, and bounds on random input."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ropewalk import RopewalkError
from ropewalk.spec import Plain
from ropewalk.theory import BAND_EDGES, abel_bound, abel_transform, band_means, decay_curve, partial_sums, score_sum
from strategies import even_dims, seeds

THETA = Plain(10_000).evaluate(128)


@pytest.mark.parametrize(
    ("distance", "value"),
    [(0, 3.0), (1, 2.494389), (2, 1.404193), (5, 1.323312), (10, -0.951481), (20, 1.908555), (50, -0.595865)],
)
def test_sums_of_three_cosines(distance, value):
    assert abs(float(score_sum(distance, [1.0, 0.3, 0.05])) - value) < 5e-7


def test_the_curve_of_roformers_figure_2():
    curve = decay_curve(np.arange(2048), THETA)
    np.testing.assert_allclose(
        curve[[0, 1, 8, 100, 236]], [32.5, 31.5382, 19.8174, 10.2273, 6.41500], atol=5e-5, rtol=0
    )
    bands = band_means(curve, BAND_EDGES)
    np.testing.assert_allclose(bands, [17.468, 12.020, 10.020, 8.268, 6.973, 5.960, 5.298], atol=5e-4, rtol=0)
    assert (np.diff(bands) < 0).all()
    assert (np.diff(curve[:257]) > 0).sum() == 115


@given(seeds, even_dims, st.integers(-10_000, 10_000))
def test_summation_by_parts_changes_nothing_and_its_bound_holds(seed, dim, distance):
    rng = np.random.default_rng(seed)
    h = rng.normal(size=dim // 2) + 1j * rng.normal(size=dim // 2)
    theta = Plain().evaluate(dim)
    total = (h * np.exp(1j * distance * theta)).sum()
    assert abs(abel_transform(h, distance, theta) - total) < 1e-11
    assert abs(total) <= abel_bound(h, distance, theta) * (1 + 1e-12)


@given(even_dims, st.integers(0, 100_000))
def test_sums_are_consistent(dim, distance):
    theta = Plain().evaluate(dim)
    sums = partial_sums(distance, theta)
    assert abs(sums[-1].real - score_sum(distance, theta)) < 1e-9
    assert abs(np.abs(sums).mean() - decay_curve(distance, theta)) < 1e-12
    assert float(score_sum(-distance, theta)) == pytest.approx(float(score_sum(distance, theta)), abs=1e-9)


def test_many_distances_give_many_sums():
    assert score_sum(np.array([[0, 1, 2]]), THETA).shape == (1, 3)
    assert partial_sums([0, 1], THETA).shape == (2, 64)


@pytest.mark.usefixtures("as_a_user")
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: score_sum(1, [1.0, np.nan]), "one finite number per pair"),
        (lambda: score_sum(1, np.ones((2, 3))), r"got:      shape \(2, 3\)"),
        (lambda: score_sum(1, []), "one finite number per pair"),
        (lambda: score_sum(np.inf, [1.0]), "finite distances"),
        (lambda: decay_curve([np.nan], [1.0]), "finite distances"),
        (lambda: abel_bound(np.ones(3, complex), 1, [1.0]), "1 products h_i"),
        (lambda: abel_transform(np.ones((), complex), 1, [1.0]), "1 products h_i"),
        (
            lambda: band_means(np.ones(4), [0, 5]),
            r"increasing edges from 0 to its length\ngot:      a curve of shape \(4,\)",
        ),
        (lambda: band_means(np.ones(4), [2, 2]), "increasing edges"),
        (lambda: band_means(np.ones(4), [1]), "increasing edges"),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(RopewalkError, match=message):
        call()
