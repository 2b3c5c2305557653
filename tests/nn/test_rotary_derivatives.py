"""Derivatives of every kind: their values against the reference, for the module and for its ops."""

import pytest
import torch
from torch.autograd import forward_ad, gradcheck, gradgradcheck

from nn.module import module_for
from ropewalk import RopeSpec, RotaryEmbedding
from ropewalk.kernels.angles.torch import radix_table
from ropewalk.reference import rotate
from ropewalk.spec import AcrossHeads, Plain
from slow import slow
from strategies import theta, vector

CASES = [
    ("interleaved", "leading", theta(8)),
    ("half", "leading", theta(8)),
    ("half", "trailing", theta(4)),
    ("interleaved", "trailing", theta(4)),
]


def module(pairing, rotary_slice, inv_freq, amplitude=1.5):
    return module_for(torch.empty(1, 8), inv_freq, amplitude, pairing=pairing, rotary_slice=rotary_slice)


def truth(x, pairing, rotary_slice, inv_freq, amplitude=1.5, **options):
    return rotate(
        x, torch.arange(5), inv_freq, pairing=pairing, rotary_slice=rotary_slice, amplitude=amplitude, **options
    )


@pytest.mark.parametrize("case", [slow(CASES[0]), CASES[1], slow(CASES[2]), CASES[3]])
def test_gradcheck_backward_forward_and_twice(case):
    rope = module(*case)
    q, k = vector(0, 1, 2, 2, 8).requires_grad_(), vector(1, 1, 1, 2, 8).requires_grad_()
    assert gradcheck(lambda q, k: rope(q, k), (q, k), check_forward_ad=True, check_batched_grad=True)
    assert gradgradcheck(lambda q, k: rope(q, k), (q, k), check_fwd_over_rev=True)
    assert gradcheck(lambda q: rope.unrotate(rope.shift(q, 3)), (q,), check_forward_ad=True)


@pytest.mark.parametrize("case", CASES)
def test_values_of_jvp_vjp_vmap_grad_and_hessian(case):
    rope = module(*case)
    x, tangent = vector(0, 2, 3, 5, 8), vector(1, 2, 3, 5, 8)
    # The map is linear: its derivative along a tangent is the rotation of the tangent.
    along = torch.func.jvp(rope, (x,), (tangent,))[1]
    assert torch.allclose(along, truth(tangent, *case), atol=1e-14)
    with forward_ad.dual_level():
        dual = rope(forward_ad.make_dual(x, tangent))
        assert torch.allclose(forward_ad.unpack_dual(dual).tangent, truth(tangent, *case), atol=1e-14)
    pull = torch.func.vjp(rope, x)[1]
    assert torch.allclose(pull(tangent)[0], truth(tangent, *case, conjugate=True), atol=1e-14)
    gradient = torch.func.grad(lambda x: (rope(x) * tangent).sum())(x)
    assert torch.allclose(gradient, truth(tangent, *case, conjugate=True), atol=1e-14)
    assert torch.allclose(torch.func.vmap(rope)(x), truth(x, *case), atol=1e-14)
    each = torch.func.vmap(torch.func.grad(lambda x: (rope(x) ** 3).sum()))(x)
    value = truth(x, *case)
    assert torch.allclose(each, truth(3 * value**2, *case, conjugate=True), atol=1e-12)
    hessian = torch.func.hessian(lambda x: (rope(x) ** 2).sum() / 2)(x[0, 0])
    # For rotated features it is R^T R = amplitude^2, for others 1.
    expected = torch.ones(5, 8)
    rotated = 2 * case[2].shape[-1]
    expected[:, slice(0, rotated) if case[1] == "leading" else slice(8 - rotated, 8)] = 1.5**2
    assert torch.allclose(hessian.reshape(40, 40), torch.diag(expected.flatten()).double(), atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_only_what_needs_a_gradient_gets_one(dtype):
    rope = RotaryEmbedding(8)
    q, k = vector(0, 1, 2, 5, 8).to(dtype).requires_grad_(), vector(1, 1, 2, 5, 8).to(dtype)
    rotated_q, _ = rope(q, k)
    rotated_q.sum().backward()
    assert q.grad is not None
    assert q.grad.dtype == dtype
    assert torch.equal(q.grad, rope.unrotate(torch.ones_like(q)))
    assert k.grad is None
    assert not rope(k).requires_grad
    assert [x.requires_grad for x in rope(q, k)] == [True, False]
    assert [x.requires_grad for x in rope(k, q)] == [False, True]
    # One of two outputs may go unused.
    q2, k2 = q.detach().requires_grad_(), k.detach().requires_grad_()
    rope(q2, k2)[1].sum().backward()
    assert q2.grad is None
    assert k2.grad is not None


def test_in_place_rotation_has_its_gradient():
    rope = RotaryEmbedding(8)
    x, cotangent = vector(0, 2, 5, 8).requires_grad_(), vector(1, 2, 5, 8)
    y = x * 1
    rope.rotate_(y)
    y.backward(cotangent)
    assert x.grad is not None
    assert torch.allclose(x.grad, rotate(cotangent, torch.arange(5), theta(8), conjugate=True), atol=1e-14)


@pytest.mark.parametrize("frequencies", [Plain(50.0), AcrossHeads(50.0, num_heads=3)])
@pytest.mark.parametrize("positions", [None, "rows"])
def test_learned_frequencies_have_the_gradient_of_the_reference(frequencies, positions):
    rope = RotaryEmbedding(RopeSpec(8, frequencies), learned=True)
    assert rope.log_scale is not None
    with torch.no_grad():
        rope.log_scale.copy_(vector(2, *rope.log_scale.shape) / 10)
    q, k, g = (vector(i, 2, 3, 5, 8) for i in range(3))
    ids = (
        torch.arange(5)
        if positions is None
        else torch.randint(0, 50, (2, 5), generator=torch.Generator().manual_seed(0))
    )
    rotated = rope(q, k, positions=ids)
    (rotated[0] * g + rotated[1] * g * 2).sum().backward()
    start = theta(8, 50.0) if isinstance(frequencies, Plain) else theta(24, 50.0).view(3, 4)
    inv_freq = (start * rope.log_scale.detach().double().exp()).requires_grad_()
    expected = (rotate(q, ids, inv_freq) * g + rotate(k, ids, inv_freq) * g * 2).sum()
    (by_frequency,) = torch.autograd.grad(expected, inv_freq)
    assert rope.log_scale.grad is not None
    assert torch.allclose(rope.log_scale.grad.double(), by_frequency * inv_freq.detach(), rtol=1e-6)


def test_learned_frequencies_start_where_the_spec_says_and_survive_a_cast():
    plain, learned = RotaryEmbedding(8), RotaryEmbedding(8, learned=True)
    assert list(learned.state_dict()) == ["log_scale"]
    assert [name for name, _ in learned.named_parameters()] == ["log_scale"]
    x = vector(0, 2, 5, 8).float()
    before = learned(x, offset=100_000)
    assert torch.allclose(plain(x, offset=100_000), before, atol=1e-6)
    assert torch.equal(learned.to(torch.bfloat16)(x, offset=100_000), before)
    loss = learned.float()(x.requires_grad_()).square().sum() + learned(x)[..., 0].sum()
    loss.backward()
    torch.optim.SGD(learned.parameters(), lr=0.1).step()
    assert not torch.equal(plain(x), learned(x))


def test_float_positions_get_a_gradient():
    rope = RotaryEmbedding(8)
    x, ids = vector(0, 5, 8), vector(1, 5).requires_grad_()
    assert gradcheck(lambda ids: rope(x, positions=ids), (ids,), check_forward_ad=True)


def test_gradients_of_cos_and_sin():
    rope, x = RotaryEmbedding(8), vector(0, 1, 2, 5, 8).requires_grad_()
    cos, sin = (table.double().requires_grad_() for table in rope.at(torch.arange(5)))
    assert gradcheck(lambda x, cos, sin: rope(x, angles=(cos, sin)), (x, cos, sin), check_forward_ad=True)


@pytest.mark.parametrize("which", [0, 1])
def test_the_gradient_of_one_table_alone(which):
    rope, x, g = RotaryEmbedding(8), vector(0, 1, 2, 5, 8), vector(1, 1, 2, 5, 8)
    tables = list(rope.at(torch.arange(5), dtype=torch.float64))
    tables[which] = tables[which].clone().requires_grad_()
    (rope(x, angles=tuple(tables)) * g).sum().backward()
    a, b, ga, gb = x[..., 0::2], x[..., 1::2], g[..., 0::2], g[..., 1::2]
    expected = (a * ga + b * gb, a * gb - b * ga)[which].sum((0, 1))
    assert tables[which].grad is not None
    assert torch.allclose(tables[which].grad, expected, atol=1e-13)


# opcheck of torch 2.15 reads the gradients of views.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("batched", [False, True])
def test_the_angles_op(per_head, batched):
    inv_freq = (theta(8).expand(3, 4) if per_head else theta(8)).clone()
    scale = torch.tensor(1.5, dtype=torch.float64)
    positions = vector(0, 2, 5) if batched else vector(0, 5)
    op = torch.ops.ropewalk.cos_sin.default
    whole = torch.arange(10).view(5, 2).t() if batched else torch.arange(5)
    for ids, table, dtype in (
        (positions, None, torch.float64),
        (whole, None, torch.float64),
        (whole, radix_table(inv_freq), torch.float32),
        (whole.contiguous(), radix_table(inv_freq), torch.float32),
    ):
        torch.library.opcheck(op, (ids, inv_freq, table, scale, dtype))
    positions, inv_freq = positions.requires_grad_(), inv_freq.requires_grad_()
    torch.library.opcheck(op, (positions, inv_freq, None, scale, torch.float64))
    assert gradcheck(lambda p, f: op(p, f, None, scale, torch.float64), (positions, inv_freq))
    # Its backward equals the gradient of the formula.
    tables = op(positions, inv_freq, None, scale, torch.float64)
    angles = positions.view(-1, 1, 5, 1) * inv_freq[:, None] if per_head else positions[..., None] * inv_freq
    expected = 1.5 * angles.cos(), 1.5 * angles.sin()
    weights = [torch.randn_like(table) for table in tables]
    losses = [sum((x * w).sum() for x, w in zip(both, weights, strict=True)) for both in (tables, expected)]
    for a, b in zip(*(torch.autograd.grad(loss, (positions, inv_freq)) for loss in losses), strict=True):
        assert torch.allclose(a, b, atol=1e-12)
