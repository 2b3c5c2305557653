"""The module against the reference, from positions on: every case, every dtype, every path; and what it must equal."""

import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.present import PRESENT, QUICK, candidate, examples, home
from meant import meant
from nn.module import by_module, module_for, with_heads_last
from ropewalk import RopeSpec, RotaryEmbedding
from ropewalk.kernels.rotate import torch as rotate_torch
from ropewalk.ops import dispatch
from ropewalk.reference import assert_within_budget, check_rotation, rotate
from ropewalk.spec import Explicit, Plain
from slow import slow_except
from strategies import pairings, seeds, theta, vector

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


# tests/kernels/test_triton_rotate.py has the same checks for Triton.
@pytest.mark.parametrize("backend", QUICK)
@pytest.mark.parametrize("dtype", slow_except([torch.float32, torch.bfloat16], DTYPES))
def test_the_kernels_are_within_budget(dtype, backend):
    assert check_rotation(candidate(by_module, backend), [dtype]) <= 1


@pytest.mark.parametrize("dtype", slow_except([torch.float32, torch.bfloat16], DTYPES))
def test_the_formula_is_within_budget(dtype, monkeypatch):
    monkeypatch.setattr(dispatch, "is_plain", lambda *tensors: False)
    assert check_rotation(by_module, [dtype]) <= 1


@pytest.mark.parametrize("dtype", slow_except([torch.float32, torch.bfloat16], DTYPES))
def test_the_torch_kernel_without_fused_sums_is_within_budget(dtype, monkeypatch):
    monkeypatch.setattr(rotate_torch, "_fuses_alike", lambda *what: False)
    assert check_rotation(functools.partial(by_module, backend="torch"), [dtype]) <= 1


@pytest.mark.parametrize("backend", QUICK)
@pytest.mark.parametrize("dtype", slow_except([torch.float32], DTYPES))
def test_heads_before_features_are_within_budget(dtype, backend):
    def where(case):
        return case.x.dim() >= 3 and case.name.count("[batch, seq") == 0

    assert check_rotation(candidate(with_heads_last, backend), [dtype], where=where) <= 1


@pytest.mark.parametrize("backend", slow_except(QUICK, PRESENT))
def test_prefill_and_decode_agree_bit_for_bit(backend):
    @settings(max_examples=examples(backend))
    @given(seeds, st.integers(1, 40), pairings, st.sampled_from(DTYPES), st.integers(0, 1 << 20))
    def agree(seed, pairs, pairing, dtype, start):
        rope = RotaryEmbedding(2 * pairs, pairing=pairing, backend=backend).to(home(backend))
        x = vector(seed, 2, 3, 19, 2 * pairs).to(dtype).to(home(backend))
        whole = rope(x, offset=start)
        for token in (0, 7, 18):
            one, ids = x[:, :, token : token + 1], torch.tensor([start + token], device=home(backend))
            assert torch.equal(rope(one, offset=start + token), whole[:, :, token : token + 1])
            assert torch.equal(rope(one, positions=ids), whole[:, :, token : token + 1])
        assert torch.equal(rope(x.transpose(1, 2).contiguous().transpose(1, 2), offset=start), whole)

    agree()


@given(seeds, pairings, st.integers(1, 40))
def test_rounding_does_not_depend_on_the_fusing_of_sums_by_the_compiler(seed, pairing, pairs):
    # Whichever way the probe answers, one token alone and the same token among others are rounded alike.
    for answer in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            if not answer:
                patch.setattr(rotate_torch, "_fuses_alike", lambda *what: False)
            rope = RotaryEmbedding(2 * pairs, pairing=pairing, backend="torch")
            x = vector(seed, 1, 2, 9, 2 * pairs).float()
            assert torch.equal(rope(x)[:, :, 4:5], rope(x[:, :, 4:5], offset=4))


def test_two_ways_that_the_notes_have():
    """A table gathered by ids with even and odd features stacked again; and a table cut to the sequence."""
    rope, x = RotaryEmbedding(16), vector(0, 2, 3, 10, 16).float()
    angles = torch.outer(torch.arange(50, dtype=torch.float64), theta(16))
    table = torch.stack((angles.cos(), angles.sin())).float()
    even, odd = x[..., 0::2], x[..., 1::2]

    def stacked(cos, sin):
        return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)

    ids = torch.randint(0, 50, (2, 10), generator=torch.Generator().manual_seed(0))
    gathered = stacked(*table[:, ids][:, :, None])
    assert torch.allclose(rope(x, positions=ids), gathered, atol=1e-6)
    assert torch.allclose(rope(x), stacked(*table[:, :10]), atol=1e-6)


@meant("cu_seqlens")
def test_every_way_to_say_where_tokens_stand():
    rope, q, k = RotaryEmbedding(8), vector(0, 2, 4, 6, 8).float(), vector(1, 2, 2, 6, 8).float()

    def same(left, right):
        return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))

    ids = torch.arange(6)
    plain = rope(q, k)
    assert same(plain, rope(q, k, positions=ids))
    assert same(plain, rope(q, k, positions=ids.expand(2, 6)))
    assert same(plain, rope(q, k, offset=0))
    assert same(plain, rope(q, k, angles=rope.at(ids)))
    assert same(plain, rope(q, k, k_positions=ids))
    assert same(plain, (rope(q), rope(k)))
    assert same(rope(q, k, offset=9), rope(q, k, positions=ids + 9))
    ragged = rope(q, k, offset=torch.tensor([3, 11]))
    assert same(ragged, rope(q, k, positions=torch.stack((ids + 3, ids + 11))))
    assert same(ragged, rope(q, k, angles=rope.at(torch.stack((ids + 3, ids + 11)))))
    packed = rope(q, k, cu_seqlens=torch.tensor([0, 2, 5], dtype=torch.int32))
    assert same(packed, rope(q, k, positions=torch.tensor([0, 1, 0, 1, 2, 0])))
    crossed = rope(q, k[:, :, :4], positions=ids + 2, k_positions=ids[:4] * 7)
    assert same(crossed, (rope(q, positions=ids + 2), rope(k[:, :, :4], positions=ids[:4] * 7)))
    assert same(rope(q, k, offset=torch.tensor(5)), rope(q, k, offset=5))


@pytest.mark.parametrize("shape", [(5, 8), (3, 5, 8), (2, 3, 5, 8), (2, 2, 3, 5, 8)])
def test_any_number_of_leading_dimensions(shape):
    x, rope = vector(0, *shape).float(), RotaryEmbedding(8)
    truth = rotate(x.double(), torch.arange(5), theta(8))
    assert_within_budget(rope(x), truth, rotary_dim=8)


@pytest.mark.parametrize("shape", [(5, 3, 8), (2, 5, 3, 8), (2, 2, 5, 3, 8)])
def test_heads_before_features(shape):
    x, rope = vector(0, *shape).float(), RotaryEmbedding(8, seq_dim=-3)
    truth = rotate(x.double().transpose(-2, -3), torch.arange(5), theta(8)).transpose(-2, -3)
    assert_within_budget(rope(x), truth, rotary_dim=8)


@given(seeds, pairings, st.sampled_from(["leading", "trailing"]), st.floats(0.5, 2.0))
def test_unrotate_is_the_inverse(seed, pairing, rotary_slice, amplitude):
    x = vector(seed, 2, 3, 5, 12)
    rope = module_for(x, theta(8), amplitude, pairing=pairing, rotary_slice=rotary_slice)
    ids = torch.randint(-1000, 1000, (2, 5), generator=torch.Generator().manual_seed(seed))
    assert torch.allclose(rope.unrotate(rope(x, positions=ids), positions=ids), x, atol=1e-13)
    assert torch.allclose(rope.unrotate(rope(x, offset=7), offset=7), x, atol=1e-13)


@given(seeds, pairings, st.integers(-5000, 5000), st.floats(0.5, 2.0))
def test_shift_moves_what_is_rotated(seed, pairing, by, amplitude):
    x = vector(seed, 2, 3, 5, 8)
    rope = module_for(x, theta(8), amplitude, pairing=pairing)
    assert torch.allclose(rope.shift(rope(x, offset=100), by), rope(x, offset=100 + by), atol=1e-11)
    each = torch.tensor([by, -by])
    moved = rope.shift(rope(x), each)
    assert torch.allclose(moved, rope(x, offset=each), atol=1e-11)


def test_in_place_is_the_same():
    rope, q, k = RotaryEmbedding(8), vector(0, 1, 4, 6, 8).float(), vector(1, 1, 2, 6, 8).float()
    expected = rope(q, k, offset=3)
    out = rope.rotate_(q, k, offset=3)
    assert out[0] is q
    assert out[1] is k
    assert torch.equal(q, expected[0])
    assert torch.equal(k, expected[1])
    # A slice of packed projections is written where it lies.
    packed = vector(2, 1, 6, 3, 4, 8).float()
    before = packed.clone()
    rope.rotate_(packed[:, :, 0].transpose(1, 2), packed[:, :, 1].transpose(1, 2))
    assert torch.equal(packed[:, :, 2], before[:, :, 2])
    assert torch.equal(packed[:, :, 0].transpose(1, 2), rope(before[:, :, 0].transpose(1, 2)))


def test_float32_angles_are_those_of_models_trained_with_them():
    rope = RotaryEmbedding(RopeSpec(64, Plain(10_000), pairing="half", angles="float32"))
    ids = torch.arange(130_000, 130_010)
    inv_freq = 1.0 / (10_000.0 ** (torch.arange(0, 64, 2, dtype=torch.int64).float() / 64))
    cos, sin = rope.at(ids)
    assert torch.equal(cos, torch.outer(ids.float(), inv_freq).cos())
    assert torch.equal(sin, torch.outer(ids.float(), inv_freq).sin())
    exact = RotaryEmbedding(RopeSpec(64, pairing="half")).at(ids)[0]
    assert (cos - exact).abs().max() > 1e-3


def test_frequencies_a_head():
    rope = RotaryEmbedding(RopeSpec(4, Explicit([[1.0, 0.5], [0.1, 0.2], [0.0, 3.0]])))
    q = vector(0, 2, 3, 7, 4).float()
    for h in range(3):
        alone = RotaryEmbedding(RopeSpec(4, Explicit(rope.inv_freq[h])))
        assert torch.equal(rope(q)[:, h], alone(q[:, h]))
        assert torch.equal(rope(q[0])[h], alone(q[0, h]))
    last = RotaryEmbedding(rope.spec, seq_dim=-3)
    assert torch.equal(last(q.transpose(1, 2)).transpose(1, 2), rope(q))


def test_an_empty_sequence_is_legal():
    rope = RotaryEmbedding(8, context_length=4)
    q, k = rope(torch.ones(2, 3, 0, 8), torch.ones(2, 1, 0, 8))
    assert (q.shape, k.shape) == ((2, 3, 0, 8), (2, 1, 0, 8))
    assert rope(torch.ones(0, 3, 4, 8)).shape == (0, 3, 4, 8)
    assert rope(torch.ones(2, 3, 0, 8), offset=100).shape == (2, 3, 0, 8)
    assert rope(torch.ones(2, 3, 0, 8), positions=torch.arange(0)).shape == (2, 3, 0, 8)


def test_q_and_k_may_differ_in_rank():
    rope, q, k = RotaryEmbedding(8), vector(0, 2, 4, 5, 8).float(), vector(1, 5, 8).float()
    both = rope(q, k, offset=3)
    assert torch.equal(both[0], rope(q, offset=3))
    assert torch.equal(both[1], rope(k, offset=3))


def test_a_token_does_not_depend_on_its_neighbours_where_the_digits_end():
    rope, x, start = RotaryEmbedding(8), vector(0, 1, 1, 40, 8).float(), (1 << 24) - 20
    whole = rope(x, offset=start)
    for token in range(40):
        assert torch.equal(
            RotaryEmbedding(8)(x[:, :, token : token + 1], offset=start + token), whole[:, :, token : token + 1]
        )


def test_the_probe_of_fused_sums(monkeypatch):
    probe = rotate_torch._fuses_alike.__wrapped__
    assert probe("cpu", torch.float32) == probe("cpu", torch.float32)
    right = torch.addcmul

    def rounds_single_elements_otherwise(a, b, c):
        return right(a, b, c) if len(a) > 1 else torch.nextafter(right(a, b, c), torch.tensor(torch.inf, dtype=a.dtype))

    monkeypatch.setattr(torch, "addcmul", rounds_single_elements_otherwise)
    assert not probe("cpu", torch.float32)


def test_repr_shows_what_goes_wrong():
    assert repr(RotaryEmbedding(64)) == "RotaryEmbedding(64, Plain(base=10000.0), pairing='interleaved', seq_dim=-2)"
    spec = RopeSpec(64, rotary_dim=16, rotary_slice="trailing", pairing="half", sign=-1, angles="float32")
    shown = repr(RotaryEmbedding(spec, seq_dim=-3, context_length=9, backend="torch"))
    assert "learned=True" in repr(RotaryEmbedding(8, learned=True))
    for part in ("pairing='half'", "rotary_dim=16 (trailing)", "sign=-1", "angles='float32'", "context_length=9"):
        assert part in shown
