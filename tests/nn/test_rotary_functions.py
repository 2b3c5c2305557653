"""build_rotary_frequencies and apply_rope: the functions of the notes, held to the rotation from positions."""

import dataclasses

import mpmath
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ropewalk as rw
from ropewalk import reference
from ropewalk.kernels.backend import register, registered
from ropewalk.reference import assert_within_budget, rotate
from strategies import pairings, seeds, theta, vector


@pytest.mark.parametrize("base", [10_000.0, 500_000.0])
@pytest.mark.parametrize("position", [0, 1, 4095, 131_071])
def test_tables_are_the_truth_rounded_once(base, position):
    cos, sin = rw.build_rotary_frequencies(16, position + 1, base)
    with mpmath.workdps(40):
        for i in range(8):
            angle = position * mpmath.power(base, -mpmath.mpf(2 * i) / 16)
            assert abs(cos[0, 0, position, i].item() - mpmath.cos(angle)) <= 2**-24
            assert abs(sin[0, 0, position, i].item() - mpmath.sin(angle)) <= 2**-24


@given(seeds, st.integers(1, 3), st.integers(1, 4), st.integers(0, 9), st.integers(1, 16), st.integers(0, 5), pairings)
def test_applying_them_is_the_rotation(seed, batch, heads, seq, pairs, spare, pairing):
    x = vector(seed, batch, heads, seq, 2 * pairs).float()
    y = rw.apply_rope(x, *rw.build_rotary_frequencies(2 * pairs, seq + spare), pairing)
    truth = rotate(x.double(), torch.arange(seq), theta(2 * pairs), pairing=pairing)
    assert_within_budget(y, truth, rotary_dim=2 * pairs, pairing=pairing)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_the_dtype_of_x_is_kept_and_x_is_not_touched(dtype):
    x = vector(0, 2, 3, 4, 8).to(dtype)
    before = x.clone()
    y = rw.apply_rope(x.transpose(1, 2), *rw.build_rotary_frequencies(8, 3))
    assert y.dtype == dtype
    assert torch.equal(x, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("pairing", ["interleaved", "half"])
@pytest.mark.parametrize("shape", [(1, 1), (2, 1), (1, 3), (2, 3)])
def test_values_and_gradients_are_the_references(dtype, pairing, shape):
    x = vector(2, 2, 3, 5, 16).to(dtype).requires_grad_()
    tables = [table.expand(*shape, -1, -1).clone().requires_grad_() for table in rw.build_rotary_frequencies(16, 7)]
    y, cotangent = rw.apply_rope(x, *tables, pairing), vector(3, 2, 3, 5, 16).to(dtype)
    wide, wide_tables = x.detach().double().requires_grad_(), [t.detach().double().requires_grad_() for t in tables]
    truth = reference.apply_rope(wide, *wide_tables, pairing)
    assert_within_budget(y.detach(), truth.detach(), rotary_dim=16, pairing=pairing)
    gradients = torch.autograd.grad(y, [x, *tables], cotangent)
    true_gradients = torch.autograd.grad(truth, [wide, *wide_tables], cotangent.double())
    assert_within_budget(gradients[0], true_gradients[0], rotary_dim=16, pairing=pairing)
    for gradient, true_gradient in zip(gradients[1:], true_gradients[1:], strict=True):
        assert (gradient - true_gradient).abs().max() <= 1e-5 * true_gradient.abs().max()


def test_they_run_on_the_kernels(monkeypatch):
    reached = []
    operation = registered("native").operations["rotate"]
    spied = dataclasses.replace(operation, run=lambda *a, **o: reached.append(1) or operation.run(*a, **o))
    undo = register(dataclasses.replace(registered("native"), operations={"rotate": spied}))
    try:
        rw.apply_rope(vector(0, 1, 2, 5, 8).float(), *rw.build_rotary_frequencies(8, 9))
    finally:
        undo()
    assert reached == [1]


def test_tables_are_made_where_they_are_asked_for():
    assert rw.build_rotary_frequencies(8, 4, device="meta")[0].device.type == "meta"
    with torch.device("meta"):
        assert rw.build_rotary_frequencies(8, 4)[1].device.type == "meta"


def test_tables_of_a_batch_or_a_head():
    x = vector(1, 2, 3, 4, 8)
    cos, sin = rw.build_rotary_frequencies(8, 9)
    rows = torch.tensor([[0, 5, 2, 8], [7, 7, 1, 3]])
    y = rw.apply_rope(x, cos[0, 0][rows][:, None], sin[0, 0][rows][:, None])
    assert torch.allclose(y, rotate(x, rows, theta(8)), atol=1e-6)


@pytest.mark.usefixtures("as_a_user")
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: rw.build_rotary_frequencies(7, 4), "an even integer of at least 2"),
        (lambda: rw.build_rotary_frequencies(8, -1), "an integer of at least 0"),
        (lambda: rw.build_rotary_frequencies(8, 4, base=0.0), "a finite number above 0"),
        (lambda: rw.apply_rope(torch.ones(1, 1, 4, 8), *rw.build_rotary_frequencies(8, 3)), "seq or more"),
        (lambda: rw.apply_rope(torch.ones(1, 1, 4, 8), *rw.build_rotary_frequencies(16, 4)), "seq or more"),
        (lambda: rw.apply_rope(torch.ones(1, 1, 4, 8), *[torch.ones(1, 1, 4, 4).bfloat16()] * 2), "float32 or float64"),
        (lambda: rw.apply_rope(torch.ones(1, 1, 4, 8), [1.0], [0.0]), "a floating-point torch.Tensor"),
        (lambda: rw.apply_rope(torch.ones(1, 4, 8), *rw.build_rotary_frequencies(8, 4)), "with 4 dimensions"),
        (lambda: rw.apply_rope(torch.ones(1, 1, 1, 4, 8), *rw.build_rotary_frequencies(8, 4)), "x .batch, heads"),
        (lambda: rw.apply_rope(torch.ones(1, 1, 4, 8).int(), *rw.build_rotary_frequencies(8, 4)), "floating-point"),
        (
            lambda: rw.apply_rope(torch.ones(2, 3, 4, 8), torch.ones(3, 1, 4, 4), torch.ones(3, 1, 4, 4)),
            r"got:      x \[2, 3, 4, 8\], cos \[3, 1, 4, 4\]",
        ),
        (lambda: rw.apply_rope(torch.ones(1, 1, 4, 8), torch.ones(1, 1, 4, 4), torch.ones(1, 1, 5, 4)), "sin both"),
        (lambda: rw.apply_rope(torch.ones(1, 1, 4, 8), *rw.build_rotary_frequencies(8, 4), "neox"), "'interleaved' or"),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(rw.RopewalkError, match=message):
        call()
