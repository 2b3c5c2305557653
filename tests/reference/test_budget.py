"""The error budget: it accepts one rounding, and rejects the errors that its docstring names."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ropewalk import RopewalkError
from ropewalk.reference import BudgetError, assert_within_budget, check_rotation, rotate, rotation_budget
from strategies import pairings, seeds, theta, vector

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


@given(seeds, pairings, st.sampled_from(DTYPES), st.floats(1e-9, 1e3))
def test_the_reference_rounded_once_is_within_budget(seed, pairing, dtype, scale):
    reference = vector(seed, 5, 16) * scale
    assert assert_within_budget(reference.to(dtype), reference, rotary_dim=16, pairing=pairing) <= 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("angle", "passes"), [(1e-6, True), (1e-5, False)])
def test_a_constant_error_of_the_angle_is_detected(dtype, angle, passes):
    x = vector(0, 1000, 16)
    truth = rotate(x, torch.arange(1000), theta(16))
    off = rotate(truth, torch.full((1000,), angle, dtype=torch.float64), torch.ones(8, dtype=torch.float64)).to(dtype)
    if passes:
        assert_within_budget(off, truth, rotary_dim=16)
    else:
        with pytest.raises(BudgetError):
            assert_within_budget(off, truth, rotary_dim=16)


@pytest.mark.parametrize("bad", [math.nan, math.inf, 1.5])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_index_of_one_wrong_element_is_reported(bad, dtype):
    truth = torch.ones(100, 64, dtype=torch.float64)
    fast = truth.to(dtype, copy=True)
    fast[73, 5] = bad
    with pytest.raises(BudgetError, match=r"element \(73, 5\).*\(1 of 6400"):
        assert_within_budget(fast, truth, rotary_dim=64)


@pytest.mark.parametrize("rotary_slice", ["leading", "trailing"])
def test_features_that_are_not_rotated_have_no_budget(rotary_slice):
    truth = vector(0, 3, 8)
    allowed = rotation_budget(truth, torch.float32, rotary_dim=4, rotary_slice=rotary_slice)
    rest = slice(4, 8) if rotary_slice == "leading" else slice(0, 4)
    assert (allowed[:, rest] == 0).all()
    assert (allowed > 0).sum() == 12
    fast = truth.clone()
    fast[1, rest.start] += 1e-15
    with pytest.raises(BudgetError, match="element"):
        assert_within_budget(fast, truth, rotary_dim=4, rotary_slice=rotary_slice)


@pytest.mark.parametrize(
    ("dtype", "half_the_smallest"),
    [(torch.float32, 2.0**-150), (torch.bfloat16, 2.0**-134), (torch.float16, 2.0**-25), (torch.float64, 0.0)],
)
def test_at_zero_only_half_the_smallest_number_is_allowed(dtype, half_the_smallest):
    # In float64 half of the smallest number rounds to 0.
    allowed = rotation_budget(torch.zeros(1, 2, dtype=torch.float64), dtype, rotary_dim=2)
    assert allowed.tolist() == [[half_the_smallest] * 2]


def test_the_three_parts_of_the_budget():
    y = torch.tensor([[3.0, 4.0]], dtype=torch.float64)
    for dtype, u in ((torch.float32, 2.0**-24), (torch.bfloat16, 2.0**-8), (torch.float16, 2.0**-11)):
        allowed = rotation_budget(y, dtype, rotary_dim=2)
        smallest = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
        assert allowed.tolist()[0] == [size * u + 5 * 2.0**-18 + smallest / 2 for size in (3, 4)]
    near, far = (rotation_budget(y, torch.float64, rotary_dim=2, farthest=a) for a in (0.0, 2.0**20))
    assert near.tolist()[0] == pytest.approx([3 * 2.0**-53 + 5 * 2.0**-40, 4 * 2.0**-53 + 5 * 2.0**-40])
    assert (far - near).tolist()[0] == pytest.approx([5 * 2.0**-32] * 2, rel=1e-6)


def test_an_empty_tensor_is_within_budget():
    assert assert_within_budget(torch.ones(0, 8), torch.ones(0, 8, dtype=torch.float64), rotary_dim=8) == 0


@pytest.mark.usefixtures("as_a_user")
def test_bad_input():
    with pytest.raises(RopewalkError, match="the reference in float64"):
        assert_within_budget(torch.ones(2, 4), torch.ones(2, 4), rotary_dim=4)
    with pytest.raises(RopewalkError, match="two tensors of the same shape"):
        assert_within_budget(torch.ones(2, 4), torch.ones(3, 4, dtype=torch.float64), rotary_dim=4)


def test_check_rotation_with_selected_cases():
    def only_half(x, positions, inv_freq, *, pairing, **options):
        assert pairing == "half"
        return rotate(x, positions, inv_freq, pairing=pairing, **options)

    assert check_rotation(only_half, [torch.float32], where=lambda case: case.pairing == "half") <= 1
    with pytest.raises(RopewalkError, match="at least one dtype and one case"):
        check_rotation(rotate, [])
