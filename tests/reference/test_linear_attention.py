"""Linear attention: its two forms agree, the feature map is positive, and the result is eq. 19 of RoFormer."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ropewalk import RopewalkError
from ropewalk.reference import elu_plus_one, linear_attention_by_recurrence, linear_attention_by_sum
from strategies import MAX_POSITION, pairings, seeds, theta, tolerance, vector


def square(x: torch.Tensor) -> torch.Tensor:
    return x * x + 0.1


@given(
    seeds,
    st.booleans(),
    st.booleans(),
    pairings,
    st.sampled_from([(2, 2), (4, 2), (3, 1)]),
    st.integers(0, 12),
    st.integers(0, MAX_POSITION),
)
def test_the_sum_equals_the_recurrence(seed, causal, rotated, pairing, heads, seq, far):
    q = vector(seed, 2, heads[0], seq, 8)
    k, v = vector(seed + 1, 2, 2, heads[1], seq, 8)
    options: dict = {"causal": causal, "q_map": square}
    ids = torch.randint(-far, far + 1, (2, seq), generator=torch.Generator().manual_seed(seed))
    if rotated:
        options |= {"inv_freq": theta(8), "positions": ids, "pairing": pairing}
    by_sum = linear_attention_by_sum(q, k, v, **options)
    by_state = linear_attention_by_recurrence(q, k, v, **options)
    # Both divide sums of the same terms. The scale is the sum of the norms of these terms, over the denominator.
    share = heads[0] // heads[1]
    phi_q, phi_k = square(q), elu_plus_one(k).repeat_interleave(share, 1)
    mask = torch.ones(seq, seq).tril() if causal else torch.ones(seq, seq)
    weight = (phi_q @ phi_k.transpose(-1, -2)) * mask
    sizes = phi_q.norm(dim=-1)[..., None] * phi_k.norm(dim=-1)[..., None, :] * mask
    scale = (sizes @ v.abs().repeat_interleave(share, 1)) / weight.sum(-1, keepdim=True)
    assert ((by_sum - by_state).abs() <= tolerance(far) * scale).all()


@given(seeds, st.booleans())
def test_eq_19_term_by_term(seed, causal):
    q, k, v = vector(seed, 3, 1, 1, 5, 4)
    ids = torch.tensor([7, 3, 9, 1, 2])
    y = linear_attention_by_sum(q, k, v, inv_freq=theta(4), positions=ids, causal=causal)
    for m in range(5):
        numerator, denominator = torch.zeros(4, dtype=torch.float64), torch.zeros((), dtype=torch.float64)
        for n in range(m + 1 if causal else 5):
            phi_q, phi_k = (torch.nn.functional.elu(x) + 1 for x in (q[0, 0, m], k[0, 0, n]))
            # The score of two rotated vectors is Re sum_i q_i conj(k_i) exp(i (m - n) theta_i) (eq. 12).
            products = torch.view_as_complex(phi_q.view(2, 2)) * torch.view_as_complex(phi_k.view(2, 2)).conj()
            score = (products * torch.exp(1j * (ids[m] - ids[n]) * theta(4))).sum().real
            numerator += score * v[0, 0, n]
            denominator += phi_q @ phi_k
        assert torch.allclose(y[0, 0, m], numerator / denominator, atol=1e-13)


@given(seeds, st.integers(1, 6))
def test_queries_are_the_last_tokens(seed, last):
    q, k, v = vector(seed, 3, 1, 2, 6, 4)
    for form in (linear_attention_by_sum, linear_attention_by_recurrence):
        whole = form(q, k, v, inv_freq=theta(4), causal=True)
        part = form(q[:, :, -last:], k, v, inv_freq=theta(4), causal=True)
        assert torch.allclose(part, whole[:, :, -last:], atol=1e-13)


def test_queries_can_have_any_positions():
    q, k, v = vector(0, 1, 1, 7, 4), *vector(1, 2, 1, 1, 3, 4)
    ids = torch.tensor([5, 0, 5, 9, 9, 2, 1])
    by_sum, by_state = (
        form(q, k, v, inv_freq=theta(4), q_positions=ids)
        for form in (linear_attention_by_sum, linear_attention_by_recurrence)
    )
    assert torch.allclose(by_sum, by_state, atol=1e-13)
    assert not torch.allclose(by_sum, linear_attention_by_sum(q, k, v, inv_freq=theta(4), q_positions=ids + 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", [linear_attention_by_sum, linear_attention_by_recurrence])
def test_the_result_is_the_float64_result_rounded_once(form, dtype):
    q, k, v = (x.to(dtype) for x in vector(5, 3, 1, 2, 6, 8))
    exact = form(q.double(), k.double(), v.double(), inv_freq=theta(8), causal=True)
    assert torch.equal(form(q, k, v, inv_freq=theta(8), causal=True), exact.to(dtype))


@pytest.mark.parametrize(
    ("dtype", "lowest"),
    [(torch.float64, -745.0), (torch.float32, -103.0), (torch.bfloat16, -92.0), (torch.float16, -17.0)],
)
def test_elu_plus_one_is_positive_on_the_documented_range(dtype, lowest):
    x = torch.linspace(lowest, 80, 4001, dtype=torch.float64)
    assert (elu_plus_one(x.to(dtype)) > 0).all()
    assert torch.allclose(elu_plus_one(x), torch.nn.functional.elu(x) + 1, atol=1e-15)


def test_default_query_positions_are_the_last_of_each_row():
    q, (k, v) = vector(0, 2, 1, 2, 4), vector(1, 2, 2, 1, 5, 4)
    ids = torch.randint(0, 1000, (2, 5), generator=torch.Generator().manual_seed(0))
    for form in (linear_attention_by_sum, linear_attention_by_recurrence):
        explicit = form(q, k, v, inv_freq=theta(4), positions=ids, q_positions=ids[:, 3:])
        assert torch.equal(form(q, k, v, inv_freq=theta(4), positions=ids), explicit)


def test_gradients():
    x = torch.tensor([-900.0, -1.0, 0.5, 900.0], dtype=torch.float64, requires_grad=True)
    elu_plus_one(x).sum().backward()
    assert x.grad is not None
    assert torch.allclose(x.grad, torch.tensor([0.0, 0.36787944117144233, 1.0, 1.0], dtype=torch.float64))
    q, k, v = (part.requires_grad_() for part in vector(0, 3, 1, 2, 4, 4).unbind())
    for form in (linear_attention_by_sum, linear_attention_by_recurrence):
        assert torch.autograd.gradcheck(
            lambda q, k, v, form=form: form(q, k, v, inv_freq=theta(4), causal=True), (q, k, v)
        )


@pytest.mark.usefixtures("as_a_user")
@pytest.mark.parametrize("form", [linear_attention_by_sum, linear_attention_by_recurrence])
def test_bad_input(form):
    q, k = torch.ones(1, 1, 4, 4), torch.ones(1, 1, 3, 4)
    with pytest.raises(RopewalkError, match="q_positions if there are more queries than keys"):
        form(q, k, k, inv_freq=theta(4))
    with pytest.raises(RopewalkError, match="positions only together with inv_freq"):
        form(k, k, k, positions=torch.arange(3))
    with pytest.raises(RopewalkError, match="'interleaved' or 'half'"):
        form(k, k, k, pairing="neox")
    with pytest.raises(RopewalkError, match="no more queries than keys"):
        form(q, k, k, causal=True)
    with pytest.raises(RopewalkError, match=r"of shape \[3\]"):
        form(k, k, k, inv_freq=theta(4), positions=torch.arange(4))
