"""The laws of a rotation, in float64, at positions up to 2^20."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ropewalk.reference import rotate, rotate_complex, rotate_matrix
from strategies import at, bases, even_dims, pairings, positions, seeds, theta, tolerance, vector

FORMS = [rotate, rotate_complex, rotate_matrix]
forms = st.sampled_from(FORMS)


def pair_norms(x: torch.Tensor, pairing: str) -> torch.Tensor:
    a, b = (x[..., 0::2], x[..., 1::2]) if pairing == "interleaved" else x.chunk(2, dim=-1)
    return torch.hypot(a, b)


def assert_pairs_close(actual: torch.Tensor, expected: torch.Tensor, pairing: str, relative: float) -> None:
    """Each pair has its own bound, `relative` times its norm, so that large pairs do not hide errors of small ones."""
    error = pair_norms(actual - expected, pairing)
    assert (error <= relative * pair_norms(expected, pairing)).all(), float(error.max())


@given(forms, seeds, even_dims, bases, pairings)
def test_position_zero_is_the_identity(form, seed, dim, base, pairing):
    x = vector(seed, 1, dim)
    assert torch.equal(form(x, at(0), theta(dim, base), pairing=pairing), x)


@given(forms, seeds, even_dims, bases, pairings, positions, positions)
def test_rotations_compose_by_adding_positions(form, seed, dim, base, pairing, m, n):
    x, inv_freq = vector(seed, 1, dim), theta(dim, base)
    twice = form(form(x, at(m), inv_freq, pairing=pairing), at(n), inv_freq, pairing=pairing)
    assert_pairs_close(twice, form(x, at(m + n), inv_freq, pairing=pairing), pairing, tolerance(m, n))


@given(forms, seeds, even_dims, bases, pairings, positions)
def test_norms_are_preserved(form, seed, dim, base, pairing, m):
    x = vector(seed, 1, dim)
    before = pair_norms(x, pairing)
    after = pair_norms(form(x, at(m), theta(dim, base), pairing=pairing), pairing)
    assert ((after - before).abs() <= tolerance() * before).all()


@given(forms, seeds, even_dims, bases, pairings, positions, positions, positions)
def test_scores_depend_only_on_the_distance(form, seed, dim, base, pairing, m, n, shift):
    q, k = vector(seed, 2, 1, dim)
    inv_freq = theta(dim, base)

    def score(m: int, n: int) -> torch.Tensor:
        return (form(q, at(m), inv_freq, pairing=pairing) * form(k, at(n), inv_freq, pairing=pairing)).sum()

    allowed = tolerance(m, n, m + shift, n + shift) * q.norm() * k.norm()
    assert (score(m, n) - score(m + shift, n + shift)).abs() <= allowed


@given(forms, seeds, even_dims, bases, pairings, positions)
def test_the_conjugate_inverts_the_rotation(form, seed, dim, base, pairing, m):
    x, inv_freq = vector(seed, 1, dim), theta(dim, base)
    rotated = form(x, at(m), inv_freq, pairing=pairing)
    assert_pairs_close(form(rotated, at(m), inv_freq, pairing=pairing, conjugate=True), x, pairing, tolerance(m))


@given(forms, seeds, even_dims, bases, positions)
def test_half_is_interleaved_with_features_permuted(form, seed, dim, base, m):
    # Feature 2i of the interleaved order is feature i of the half order, 2i+1 is i + dim/2.
    permutation = [feature for i in range(dim // 2) for feature in (i, i + dim // 2)]
    x, inv_freq = vector(seed, 1, dim), theta(dim, base)
    interleaved = form(x[..., permutation], at(m), inv_freq, pairing="interleaved")
    # Permuting features changes the order in which the matrix form sums its products. The other forms are exact.
    allowed = tolerance() if form is rotate_matrix else 0.0
    half = form(x, at(m), inv_freq, pairing="half")[..., permutation]
    assert_pairs_close(half, interleaved, "interleaved", allowed)


@given(seeds, even_dims, bases, pairings, positions, st.booleans(), st.floats(0.5, 2.0))
def test_the_three_forms_agree(seed, dim, base, pairing, m, conjugate, amplitude):
    x = vector(seed, 2, 3, 2, dim)
    ids = torch.tensor([[m, m + 1], [0, -m]])
    options = {"pairing": pairing, "conjugate": conjugate, "amplitude": amplitude}
    expected = rotate(x, ids, theta(dim, base), **options)
    for form in (rotate_complex, rotate_matrix):
        assert_pairs_close(form(x, ids, theta(dim, base), **options), expected, pairing, tolerance())


@given(seeds, even_dims, pairings, positions, st.floats(0.1, 10.0))
def test_amplitude_multiplies(seed, dim, pairing, m, amplitude):
    x = vector(seed, 1, dim)
    scaled = rotate(x, at(m), theta(dim), pairing=pairing, amplitude=amplitude)
    assert torch.equal(scaled, amplitude * rotate(x, at(m), theta(dim), pairing=pairing))


@given(
    forms,
    seeds,
    st.integers(2, 32),
    st.integers(1, 31),
    positions,
    st.sampled_from(["leading", "trailing"]),
    st.booleans(),
    st.floats(0.5, 2.0),
)
def test_features_outside_the_slice_are_copied(form, seed, pairs, rotated_pairs, m, rotary_slice, conjugate, amplitude):
    dim, rotary_dim = 2 * pairs, 2 * min(rotated_pairs, pairs - 1)
    x = vector(seed, 1, dim)
    options = {"conjugate": conjugate, "amplitude": amplitude}
    y = form(x, at(m), theta(rotary_dim), rotary_slice=rotary_slice, **options)
    rotated = slice(0, rotary_dim) if rotary_slice == "leading" else slice(dim - rotary_dim, dim)
    alone = form(x[..., rotated], at(m), theta(rotary_dim), **options)
    expected = x.clone()
    expected[..., rotated] = alone
    assert torch.equal(y, expected)


@given(seeds, pairings)
def test_positions_per_sequence_with_as_many_heads_as_sequences(seed, pairing):
    x = vector(seed, 3, 3, 4, 8)
    ids = torch.randint(0, 1000, (3, 4), generator=torch.Generator().manual_seed(seed))
    together = rotate(x, ids, theta(8), pairing=pairing)
    one_by_one = torch.stack([rotate(x[b], ids[b], theta(8), pairing=pairing) for b in range(3)])
    assert torch.equal(together, one_by_one)


@given(forms, seeds, pairings)
def test_frequencies_per_head(form, seed, pairing):
    x, rows = vector(seed, 2, 3, 4, 8), vector(seed + 1, 3, 4)
    ids = torch.randint(0, 1000, (2, 4), generator=torch.Generator().manual_seed(seed))
    together = form(x, ids, rows, pairing=pairing)
    alone = torch.stack([form(x[:, h], ids, rows[h], pairing=pairing) for h in range(3)], dim=1)
    assert torch.equal(together, alone)


@pytest.mark.parametrize("form", FORMS)
def test_the_rotation_is_counter_clockwise(form):
    # The unit vector of the first feature is rotated towards that of the second.
    right_angle = torch.tensor([torch.pi / 2], dtype=torch.float64)
    x = torch.tensor([[1.0, 0.0]], dtype=torch.float64)
    assert torch.allclose(form(x, at(1), right_angle), torch.tensor([[0.0, 1.0]], dtype=torch.float64), atol=1e-15)


@pytest.mark.parametrize("form", FORMS)
def test_gradients(form):
    x = vector(0, 2, 3, 4, 6).requires_grad_()
    inv_freq = theta(4).requires_grad_()
    ids = vector(1, 2, 4).requires_grad_()
    assert torch.autograd.gradcheck(lambda *a: form(*a, pairing="half", amplitude=1.5), (x, ids, inv_freq))
    assert torch.autograd.gradgradcheck(lambda x: form(x, ids.detach(), inv_freq.detach()), (x,))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_result_is_the_float64_result_rounded_once(dtype):
    x = vector(3, 2, 5, 16).to(dtype)
    exact = rotate(x.double(), torch.arange(5), theta(16))
    assert torch.equal(rotate(x, torch.arange(5), theta(16)), exact.to(dtype))
