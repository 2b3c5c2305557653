"""cos and sin: every method is within 2^-24 of the exact values, and float32 angles equal those of transformers."""

import mpmath
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ropewalk.kernels.angles.arithmetic import TorchArithmetic
from ropewalk.kernels.angles.torch import REACH, cos_sin, radix_table
from strategies import theta


def scalar(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float64)


POSITIONS = [0, 1, 4095, 131_071, 1 << 20, (1 << 24) - 1, -7]


@pytest.mark.parametrize("base", [1e4, 5e5, 1e7])
@pytest.mark.parametrize("method", ["digits", "direct", "float positions"])
def test_within_2_to_the_minus_24_of_the_truth(base, method):
    positions = torch.tensor(POSITIONS, dtype=torch.float64 if method == "float positions" else torch.int64)
    table = radix_table(theta(32, base)) if method == "digits" else None
    cos, sin = cos_sin(positions, theta(32, base), table, scalar(1.0), torch.float32)
    with mpmath.workdps(50):
        for row, position in enumerate(POSITIONS):
            for i in range(16):
                angle = position * mpmath.power(mpmath.mpf(base), -mpmath.mpf(i) / 16)
                assert abs(mpmath.mpf(cos[row, i].item()) - mpmath.cos(angle)) <= mpmath.mpf(2) ** -24
                assert abs(mpmath.mpf(sin[row, i].item()) - mpmath.sin(angle)) <= mpmath.mpf(2) ** -24


@given(st.lists(st.integers(-REACH + 1, REACH - 1), max_size=20), st.floats(0.5, 2.0), st.booleans())
def test_digits_and_cosines_agree(ids, amplitude, per_head):
    inv_freq = torch.stack((theta(8), -theta(8, 50.0))) if per_head else theta(8)
    positions = torch.tensor(ids, dtype=torch.int64)
    by_digits = cos_sin(positions, inv_freq, radix_table(inv_freq), scalar(amplitude), torch.float32)
    angles = positions.double()[:, None] * (inv_freq[None, :, None] if per_head else inv_freq)
    for a, b in zip(by_digits, (amplitude * angles.cos(), amplitude * angles.sin()), strict=True):
        assert a.shape == ((1, 2, len(ids), 4) if per_head else (len(ids), 4))
        assert a.dtype == torch.float32
        assert (a - b).abs().max() <= 2**-24 * amplitude if ids else True


@pytest.mark.parametrize("position", [REACH, -REACH, 1 << 40, (1 << 53) - 1, -(1 << 63)])
def test_past_the_reach_of_the_digits(position):
    positions = torch.tensor([position, 3])
    cos, sin = cos_sin(positions, theta(8), radix_table(theta(8)), scalar(1.0), torch.float32)
    angles = positions.double()[:, None] * theta(8)
    assert torch.equal(cos[0], angles.cos().float()[0])
    assert torch.equal(sin[0], angles.sin().float()[0])


@given(st.lists(st.integers(-(2**40), 2**40), min_size=1, max_size=9))
def test_a_position_is_computed_as_if_it_stood_alone(ids):
    table = radix_table(theta(8))
    together = cos_sin(torch.tensor(ids), theta(8), table, scalar(1.0), torch.float32)
    for row, position in enumerate(ids):
        alone = cos_sin(torch.tensor([position]), theta(8), table, scalar(1.0), torch.float32)
        assert torch.equal(together[0][row], alone[0][0])
        assert torch.equal(together[1][row], alone[1][0])


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16])
def test_the_ends_of_every_integer_type(dtype):
    positions = torch.tensor([torch.iinfo(dtype).min, torch.iinfo(dtype).max], dtype=dtype)
    tables = cos_sin(positions, theta(8), radix_table(theta(8)), scalar(1.0), torch.float32)
    angles = positions.double()[:, None] * theta(8)
    for a, b in zip(tables, (angles.cos(), angles.sin()), strict=True):
        assert (a - b).abs().max() <= 2**-24


def test_rows_of_a_batch_and_of_heads():
    ids = torch.tensor([[1, 2, 3], [40, 50, 60]])
    rows = torch.stack((theta(8), theta(8, 50.0)))
    cos, _ = cos_sin(ids, rows, radix_table(rows), scalar(1.0), torch.float32)
    assert cos.shape == (2, 2, 3, 4)
    for b in range(2):
        for h in range(2):
            assert torch.equal(cos[b, h], cos_sin(ids[b], rows[h], radix_table(rows[h]), scalar(1.0), torch.float32)[0])


@pytest.mark.parametrize("base", [1e4, 5e5, 1e6])
@pytest.mark.parametrize("dim", [64, 80, 96, 128])
def test_float32_angles_are_formed_as_transformers_forms_them(base, dim):
    exponents = torch.arange(0, dim, 2, dtype=torch.int64).to(dtype=torch.float) / dim
    inv_freq = 1.0 / (base**exponents)
    assert torch.equal(1.0 / TorchArithmetic(torch.float32, torch.device("cpu")).powers(base, dim), inv_freq)
    ids = torch.arange(100_000, 100_300)
    # As in transformers: a matrix product whose sums have one term each, transposed, and repeated to twice the width.
    angles = (inv_freq[None, :, None].float() @ ids[None, None, :].float()).transpose(1, 2)
    wide = torch.cat((angles, angles), dim=-1)
    cos, sin = cos_sin(ids, inv_freq, None, scalar(1.25), torch.float32)
    assert torch.equal(cos, (wide.cos() * 1.25)[0, :, : dim // 2])
    assert torch.equal(sin, (wide.sin() * 1.25)[0, :, dim // 2 :])


def test_results_are_fresh_and_inputs_untouched():
    ids, table = torch.arange(5), radix_table(theta(8))
    before = table.clone()
    first = cos_sin(ids, theta(8), table, scalar(1.0), torch.float32)
    first[0].fill_(7)
    assert torch.equal(cos_sin(ids, theta(8), table, scalar(1.0), torch.float32)[0][0], torch.ones(4))
    assert torch.equal(table, before)
    assert torch.equal(ids, torch.arange(5))
