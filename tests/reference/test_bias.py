"""T5's buckets and ALiBi: figures of the papers, the definition in exact arithmetic, and errors."""

import math

import mpmath
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ropewalk import RopewalkError
from ropewalk.reference import alibi_bias, alibi_slopes, t5_bias, t5_bucket


def test_figures_of_the_paper():
    distance = torch.tensor([16, 17, 18, 19, 20, 21, 24, 27, 31, 32, 40, 48, 64, 80, 96, 112, 113, 127, 128, 10**6])
    expected = [16, 16, 16, 17, 17, 18, 19, 20, 21, 21, 23, 24, 26, 28, 29, 30, 31, 31, 31, 31]
    assert t5_bucket(-distance, causal=True).tolist() == expected
    assert t5_bucket(-torch.arange(16), causal=True).tolist() == list(range(16))
    assert t5_bucket(torch.tensor([1, 5, 500]), causal=True).tolist() == [0, 0, 0]
    assert t5_bucket(torch.tensor([-3, 0, 3]), causal=False).tolist() == [3, 0, 19]


@given(st.integers(0, 5000), st.integers(2, 40), st.integers(0, 1000), st.booleans())
def test_buckets_equal_the_definition_in_exact_arithmetic(n, half, further, causal):
    total = 2 * half if causal else 4 * half
    count, exact, far = 2 * half, half, half + 1 + further
    bucket = int(t5_bucket(torch.tensor([-n]), causal=causal, num_buckets=total, max_distance=far))
    if n < exact:
        assert bucket == n
        return
    with mpmath.workdps(60):
        step = mpmath.log(mpmath.mpf(n) / exact) / mpmath.log(mpmath.mpf(far) / exact) * (count - exact)
        # If the logarithm is an integer, its 60-digit value can be one ulp below it.
        assert bucket == min(exact + int(mpmath.floor(step + mpmath.mpf(10) ** -50)), count - 1)


@given(st.booleans(), st.integers(-300, 300))
def test_bias_is_relative(causal, shift):
    weight = torch.arange(64.0).view(32, 2)
    q, k = torch.arange(5) + 40, torch.arange(0, 50, 3)
    bias = t5_bias(q, k, weight, causal=causal)
    assert bias.shape == (2, 5, 17)
    assert torch.equal(t5_bias(q + shift, k + shift, weight, causal=causal), bias)


@pytest.mark.parametrize(
    ("heads", "slopes"),
    [
        (1, [2**-8]),
        (4, [0.25, 0.0625, 0.015625, 0.00390625]),
        (8, [2.0**-k for k in range(1, 9)]),
        (12, [2.0**-k for k in range(1, 9)] + [2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5]),
        (16, [2 ** (-k / 2) for k in range(1, 17)]),
    ],
)
def test_slopes(heads, slopes):
    assert alibi_slopes(heads).tolist() == pytest.approx(slopes, rel=1e-15)


def test_alibi():
    bias = alibi_bias(torch.tensor([3, 4]), torch.arange(5), 8)
    for h in range(8):
        for i, m in enumerate((3, 4)):
            assert bias[h, i].tolist() == pytest.approx([-(2.0 ** -(h + 1)) * abs(m - n) for n in range(5)])


@pytest.mark.usefixtures("as_a_user")
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: t5_bucket(torch.tensor([1]), causal=True, num_buckets=3), "at least 4"),
        (lambda: t5_bucket(torch.tensor([1]), causal=True, max_distance=16), "at least 17"),
        (lambda: t5_bucket(torch.tensor([1.5]), causal=True), "integer distances"),
        (lambda: t5_bucket(torch.tensor([1]), causal="no"), "True or False"),
        (lambda: t5_bias(torch.arange(2), torch.arange(2), torch.ones(32), causal=True), "2 or more dimensions"),
        (lambda: alibi_bias(8, 8, 4), "a torch.Tensor"),
        (lambda: alibi_slopes(0), "at least 1"),
        (lambda: alibi_slopes(math.nan), "at least 1"),
        (lambda: alibi_bias(torch.ones(2, 2), torch.ones(2), 4), "two one-dimensional tensors of positions"),
        (
            lambda: t5_bias(torch.arange(2), torch.tensor(1), torch.ones(32, 1), causal=True),
            "two one-dimensional tensors of positions",
        ),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(RopewalkError, match=message):
        call()
