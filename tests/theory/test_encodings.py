"""The encodings in NumPy equal those of the reference, element by element."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ropewalk import reference
from ropewalk.errors import RopewalkError
from ropewalk.theory.encodings import alibi_slopes, sinusoidal_table, t5_buckets


@pytest.mark.parametrize("heads", range(1, 130))
def test_slopes_equal_the_reference(heads):
    assert alibi_slopes(heads).tolist() == reference.alibi_slopes(heads).tolist()


@given(st.integers(4, 80), st.integers(41, 5000), st.booleans())
def test_buckets_equal_the_reference(buckets, far, causal):
    relative = np.concatenate((np.arange(-far - 3, far + 4), [-(2**40), 2**40]))
    ours = t5_buckets(relative, causal=causal, num_buckets=buckets, max_distance=far)
    options = {"causal": causal, "num_buckets": buckets, "max_distance": far}
    assert ours.tolist() == reference.t5_bucket(torch.from_numpy(relative), **options).tolist()


def test_edges_that_are_exact_powers_are_in_the_upper_bucket():
    # log(n/8) / log(128/8) * 8 is exactly 2, 4 and 6 at 16, 32 and 64. A rounded logarithm may be below.
    assert t5_buckets([-15, -16, -31, -32, -63, -64], causal=False).tolist() == [9, 10, 11, 12, 13, 14]


@given(st.integers(1, 40).map(lambda n: 2 * n), st.floats(2, 1e7), st.lists(st.integers(-(2**20), 2**20), min_size=1))
def test_the_table_equals_the_reference(dim, base, positions):
    expected = reference.sinusoidal_table(torch.tensor(positions), dim, base).numpy()
    # The sines of NumPy and torch differ in the last place.
    np.testing.assert_allclose(sinusoidal_table(positions, dim, base), expected, rtol=0, atol=2.0**-52)


def test_each_row_of_the_table_has_squared_norm_dim_over_2():
    assert (sinusoidal_table(np.arange(100), 64) ** 2).sum(axis=-1) == pytest.approx(np.full(100, 32.0))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: alibi_slopes(0), "at least 1"),
        (lambda: sinusoidal_table([0], 3), "an even width"),
        (lambda: sinusoidal_table([float("nan")], 4), "NaN or infinity"),
        (lambda: t5_buckets([1.5], causal=True), "integer distances"),
        (lambda: t5_buckets([1], causal=True, num_buckets=3), "at least 4"),
        (lambda: t5_buckets([1], causal=True, max_distance=16), "at least 17"),
        (lambda: t5_buckets([1], causal=1), "True or False"),
    ],
)
@pytest.mark.usefixtures("as_a_user")
def test_bad_input(call, message):
    with pytest.raises(RopewalkError, match=message):
        call()
