"""The Triton kernels for the norm and for angles: in Triton's interpreter, or on a GPU where there is one."""

import mpmath
import pytest
import torch

from formulas import rms_norm, rotate_by_tables
from kernels.triton_device import DEVICE
from ropewalk import RopeSpec, RotaryEmbedding, ops, qk_norm_rope
from ropewalk.kernels import triton_launch as launch_triton
from ropewalk.kernels.angles.triton import cos_sin
from ropewalk.kernels.backends.triton import TRITON
from ropewalk.kernels.qk_norm.triton_kernels import norm_rotate_kernel
from ropewalk.kernels.types import Layout, Norm
from ropewalk.reference import assert_within_budget
from ropewalk.reference.qk_norm import qk_norm_rotate
from slow import slow
from strategies import theta


@pytest.fixture(autouse=True)
def _fresh():
    launch_triton.LAUNCHES.clear()


def random(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype).to(DEVICE)


def formula(x, weight, cos, sin, layout, norm):
    """RMSNorm and rotation, in the dtype of x."""
    return rotate_by_tables(rms_norm(x, weight, norm.eps, plus_one=norm.plus_one), cos, sin, layout)


def formula_with_gradients(tensors, weights, tables, layout, norm, cotangents):
    """`formula` in float64, and the gradients of the tensors and of the distinct weights that need one."""
    wide = {id(x): x.detach().double().requires_grad_() for x in (*tensors, *weights) if x is not None}
    pairs = zip(tensors, weights, strict=True)
    outputs = [formula(wide[id(x)], None if w is None else wide[id(w)], *tables, layout, norm) for x, w in pairs]
    learned = [wide[id(x)] for x in dict.fromkeys((*tensors, *weights)) if x is not None and x.requires_grad]
    return [*outputs, *torch.autograd.grad(outputs, learned, [g.double() for g in cotangents])]


def plain_tables(ids, dim):
    """cos and sin of the plain frequencies in float64."""
    angles = ids.double()[..., None] * theta(dim).to(DEVICE)
    return angles.cos(), angles.sin()


def layout_of(spec):
    start = 0 if spec.rotary_slice == "leading" else spec.head_dim - spec.rotary_dim
    return Layout(spec.pairing == "interleaved", start, -2)


SPECS = {
    "half": RopeSpec(16, pairing="half"),
    "interleaved": RopeSpec(16),
    "leading 8 of 20": RopeSpec(20, rotary_dim=8, pairing="half"),
    "trailing 12 of 22": RopeSpec(22, rotary_dim=12, rotary_slice="trailing"),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("plus_one", [False, True])
@pytest.mark.parametrize("name", SPECS)
def test_within_budget(name, plus_one, dtype):
    spec = SPECS[name]
    rope = RotaryEmbedding(spec, backend="triton").to(DEVICE)
    q, k = (random(2, heads, 5, spec.head_dim, dtype=dtype, seed=heads) for heads in (4, 2))
    k = k.transpose(1, 2).contiguous().transpose(1, 2)
    weights = [random(spec.head_dim, seed=7), random(spec.head_dim, dtype=torch.bfloat16, seed=8)]
    ids = torch.tensor([[0, 5, 7, 1 << 20, 3], [1, 2, 3, 4, 9]], device=DEVICE)
    rotated = qk_norm_rope(q, k, rope, q_weight=weights[0], k_weight=weights[1], plus_one=plus_one, positions=ids)
    assert len([key for key in launch_triton.LAUNCHES if key[0] is norm_rotate_kernel]) == 1
    for x, weight, y in zip((q, k), weights, rotated, strict=True):
        layout = {"pairing": spec.pairing, "rotary_slice": spec.rotary_slice}
        inputs = x.cpu().double(), weight.cpu().double(), ids.cpu(), theta(spec.rotary_dim)
        expected = qk_norm_rotate(*inputs, plus_one=plus_one, **layout)
        assert y.stride() == x.stride()
        budget = {"rotary_dim": spec.rotary_dim, "copied": False, "farthest": float(1 << 20)}
        assert assert_within_budget(y.cpu(), expected, **budget, **layout) <= 1


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("name", SPECS)
def test_gradients_are_those_of_the_formula(name, weighted):
    spec = SPECS[name]
    rope = RotaryEmbedding(spec, backend="triton").to(DEVICE)
    cos, sin = rope.at(torch.arange(5, device=DEVICE), dtype=torch.float64)
    q, k = (random(3, heads, 5, spec.head_dim, dtype=torch.float64, seed=heads).requires_grad_() for heads in (4, 2))
    dims = [spec.head_dim] * 2 if weighted else []
    weights = [random(dim, dtype=torch.float64, seed=i).requires_grad_() for i, dim in enumerate(dims)] or [None, None]
    norm = Norm(1e-6, plus_one=weighted)
    outputs = ops.norm_rotate(q, k, *weights, cos, sin, rope.layout, norm, backend="triton")
    inputs = [q, k, *(w for w in weights if w is not None)]
    cotangents = [random(*x.shape, dtype=torch.float64, seed=9) for x in (q, k)]
    results = [*outputs, *torch.autograd.grad(outputs, inputs, cotangents)]
    expected = formula_with_gradients((q, k), weights, (cos, sin), layout_of(spec), norm, cotangents)
    for result, truth in zip(results, expected, strict=True):
        torch.testing.assert_close(result, truth, rtol=1e-10, atol=1e-10)


@pytest.mark.slow
def test_many_blocks_of_rows_are_summed():
    # Each program of the backward handles several blocks of rows.
    q, k = random(2, 4, 300, 8).requires_grad_(), random(2, 1, 300, 8).requires_grad_()
    weight = torch.ones(8, device=DEVICE, requires_grad=True)
    rope = RotaryEmbedding(8, backend="triton").to(DEVICE)
    rotated = qk_norm_rope(q, k, rope, q_weight=weight, k_weight=weight)
    cotangents = [random(*y.shape, seed=3) for y in rotated]
    results = [*rotated, *torch.autograd.grad(rotated, [q, k, weight], cotangents)]
    tables = plain_tables(torch.arange(300, device=DEVICE), 8)
    expected = formula_with_gradients((q, k), (weight, weight), tables, Layout(True, 0, -2), Norm(1e-6), cotangents)
    for result, truth in zip(results, expected, strict=True):
        torch.testing.assert_close(result.double(), truth, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("plus_one", [False, True])
def test_rounds_where_transformers_does(plus_one):
    q = random(2, 3, 5, 16, dtype=torch.bfloat16)
    weight, norm = random(16, dtype=torch.bfloat16, seed=1), Norm.as_transformers(1e-6, plus_one)
    rope = RotaryEmbedding(16, backend="triton").to(DEVICE)
    cos, sin = rope.at(torch.arange(5, device=DEVICE))
    y, _ = ops.norm_rotate(q, q, weight, weight, cos, sin, rope.layout, norm, backend="triton")
    # The norms of Gemma and of Llama in transformers, written from their description.
    scaled = q.float() * torch.rsqrt(q.float().square().mean(-1, keepdim=True) + 1e-6)
    wide = scaled * (weight.float() + (1.0 if plus_one else 0.0))
    rounded = wide.bfloat16() if plus_one else weight * scaled.bfloat16()
    expected, once = (rotate_by_tables(x.float(), cos, sin, Layout(True, 0, -2)).bfloat16() for x in (rounded, wide))
    assert (y == expected).float().mean() > 0.99
    assert (once == expected).float().mean() < 0.95


STRANGE = {
    "other batches": lambda: (random(2, 4, 5, 8), random(1, 2, 5, 8)),
    "leading dimensions that are not one": lambda: (random(2, 5, 3, 4, 8).permute(0, 2, 3, 1, 4), random(2, 3, 5, 8)),
    "slices of one projection": lambda: random(2, 5, 6, 8).transpose(1, 2).split([4, 2], dim=1),
    "every other feature": lambda: (random(2, 4, 5, 16)[..., ::2], random(2, 4, 5, 16)[..., 1::2]),
    "no token": lambda: (random(2, 4, 0, 8), random(2, 2, 0, 8)),
    "no queries": lambda: (random(2, 0, 5, 8), random(2, 2, 5, 8)),
    "no keys": lambda: (random(2, 4, 5, 8), random(2, 0, 5, 8)),
}


@pytest.mark.parametrize("name", STRANGE)
def test_tensors_that_lie_strangely(name):
    q, k = (x.detach().requires_grad_() for x in STRANGE[name]())
    weight = random(8, seed=4).requires_grad_()
    ids, rope = torch.arange(q.shape[-2], device=DEVICE), RotaryEmbedding(8, backend="triton").to(DEVICE)
    rotated = qk_norm_rope(q, k, rope, q_weight=weight, k_weight=weight, positions=ids)
    cotangents = [random(*y.shape, seed=5) for y in rotated]
    results = [*rotated, *torch.autograd.grad(rotated, [q, k, weight], cotangents)]
    tables, layout = plain_tables(ids, 8), Layout(True, 0, -2)
    expected = formula_with_gradients((q, k), (weight, weight), tables, layout, Norm(1e-6), cotangents)
    for result, truth in zip(results, expected, strict=True):
        torch.testing.assert_close(result.double(), truth, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("fast_mode", [True, slow(False)])
def test_second_derivatives(fast_mode):
    q = random(1, 1, 2, 4, dtype=torch.float64).requires_grad_()
    weight = random(4, dtype=torch.float64, seed=2).requires_grad_()
    rope = RotaryEmbedding(4, backend="triton").to(DEVICE)
    cos, sin = rope.at(torch.arange(2, device=DEVICE), dtype=torch.float64)

    def norm(x, w):
        return ops.norm_rotate(x, x, w, None, cos, sin, rope.layout, Norm(1e-6), backend="triton")[0]

    assert torch.autograd.gradcheck(norm, (q, weight), fast_mode=fast_mode)
    assert torch.autograd.gradgradcheck(norm, (q, weight), fast_mode=fast_mode)


FAR = [0, 1, -1, 5, 4095, 131_071, -131_072, (1 << 20) - 1, (1 << 24) - 1, 1 - (1 << 24)]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.float64])
def test_angles_are_exact(dtype):
    inv_freq = theta(16).to(DEVICE)
    ids = torch.tensor(FAR, dtype=dtype, device=DEVICE)
    scale = torch.tensor(1.25, dtype=torch.float64, device=DEVICE)
    with mpmath.workdps(40):
        angles = [[mpmath.mpf(m) * mpmath.mpf(t) for t in inv_freq.tolist()] for m in FAR]
        rows = [[[float(f(a)) for a in row] for row in angles] for f in (mpmath.cos, mpmath.sin)]
    truth = torch.tensor(rows, dtype=torch.float64)
    for table, expected in zip(cos_sin(ids, inv_freq, None, scale, torch.float32), truth, strict=True):
        assert table.dtype == torch.float32
        assert float((table.cpu().double() / 1.25 - expected).abs().max()) <= 2**-24
    one = torch.ones((), dtype=torch.float64, device=DEVICE)
    for table, expected in zip(cos_sin(ids, inv_freq, None, one, torch.float64), truth, strict=True):
        assert float((table.cpu() - expected).abs().max()) <= 2**-28


def test_angles_past_the_reduction_are_those_of_float64():
    inv_freq = torch.tensor([1.0, 0.1], dtype=torch.float64, device=DEVICE)
    one = torch.ones((), dtype=torch.float64, device=DEVICE)
    ids = torch.tensor([1 << 27, -(1 << 40), 1 << 52], device=DEVICE)
    angles = ids.cpu().double()[:, None] * inv_freq.cpu()
    cos, sin = cos_sin(ids, inv_freq, None, one, torch.float32)
    assert float((cos.cpu().double() - angles.cos()).abs().max()) <= 2**-24
    assert float((sin.cpu().double() - angles.sin()).abs().max()) <= 2**-24


@pytest.mark.parametrize("shape", [(7,), (3, 7)])
@pytest.mark.parametrize("kind", ["plain", "per head", "axes"])
def test_angles_have_the_shape_and_value_of_the_formula(kind, shape):
    inv_freq = random(3, 4, dtype=torch.float64) if kind == "per head" else random(4, dtype=torch.float64)
    axes = torch.tensor([[1.0, 0, 0, 1], [0, 1, 1, 0.5]], device=DEVICE).double() if kind == "axes" else None
    ids = torch.arange(torch.Size(shape).numel() * (1 if axes is None else 2), device=DEVICE)
    ids = ids.view(shape if axes is None else (2, *shape)) * 3 - 7
    one = torch.ones((), dtype=torch.float64, device=DEVICE)
    # A launch that is cached for fewer tokens must not be used for more.
    cos_sin(ids[..., :3], inv_freq, None, one, torch.float32, axes)
    if len(shape) == 2:
        cos_sin(ids[..., :1, :], inv_freq, None, one, torch.float32, axes)
    tables = cos_sin(
        ids.transpose(-1, -2).contiguous().transpose(-1, -2) if len(shape) == 2 else ids,
        inv_freq,
        None,
        one,
        torch.float32,
        axes,
    )
    if kind == "per head":
        angles = ids.double().view(-1, 1, 7, 1) * inv_freq[:, None]
    elif axes is None:
        angles = ids.double()[..., None] * inv_freq
    else:
        angles = torch.einsum("a...,ap->...p", ids.double(), axes) * inv_freq
    for table, expected in zip(tables, (angles.cos(), angles.sin()), strict=True):
        assert table.shape == expected.shape
        torch.testing.assert_close(table.double(), expected, rtol=0, atol=2**-24)


def test_angles_that_need_more_than_the_kernel_has():
    one, inv_freq, ids = torch.ones((), dtype=torch.float64), torch.ones(2, dtype=torch.float64), torch.tensor([1])
    one, inv_freq, ids = one.to(DEVICE), inv_freq.to(DEVICE), ids.to(DEVICE)

    supports = TRITON.operations["cos_sin"].supports
    assert supports is not None

    def why_not(ids, inv_freq, one):
        return supports(ids, inv_freq, None, one, torch.float32, None)

    assert why_not(ids, inv_freq, one) is None
    assert why_not(ids, inv_freq.float(), one) == "frequencies in float32, or several amplitudes"
    assert why_not(ids.to(torch.uint32), inv_freq, one) == "unsigned positions"
    assert why_not(ids, inv_freq, one.float()) == "frequencies in float32, or several amplitudes"
    assert why_not(ids, inv_freq, torch.ones(2).double().to(DEVICE)) == "frequencies in float32, or several amplitudes"
    assert why_not(ids, inv_freq.requires_grad_(), one) == "gradients of positions, frequencies or amplitudes"


@pytest.mark.slow
def test_launches_are_kept_by_all_that_they_depend_on():
    # Nothing is cleared between calls that differ in one thing.
    q, k = random(1, 2, 3, 8).requires_grad_(), random(1, 1, 3, 8, seed=1).requires_grad_()
    weight, other = random(8, seed=2).requires_grad_(), random(8, seed=3)
    cos, sin = RotaryEmbedding(8).to(DEVICE).at(torch.arange(3, device=DEVICE))
    for norm in (Norm(1e-6), Norm(1.0), Norm(1e-6, plus_one=True), Norm.as_transformers(1e-6, False)):
        # At first no weight learns.
        for weights in ((other, other), (weight, other), (other, weight), (weight, None), (None, weight), (None, None)):
            if norm.plus_one and None in weights:
                continue
            layout = Layout(True, 0, -2)
            rotated = ops.norm_rotate(q, k, *weights, cos, sin, layout, norm, backend="triton")
            inputs, ones = [q, k, *(w for w in weights if w is weight)], [torch.ones_like(x) for x in (q, k)]
            results = [*rotated, *torch.autograd.grad(rotated, inputs, ones)]
            tables = cos.double(), sin.double()
            for result, truth in zip(
                results, formula_with_gradients((q, k), weights, tables, layout, norm, ones), strict=True
            ):
                torch.testing.assert_close(result.double(), truth, rtol=1e-4, atol=1e-5)


def test_leading_dimensions_with_positions_per_batch():
    q, ids = random(2, 3, 5, 4, 8).requires_grad_(), torch.arange(10, device=DEVICE).view(2, 5)
    k, weight = (2 * q.detach()).requires_grad_(), random(8, seed=1).requires_grad_()
    rope = RotaryEmbedding(8, seq_dim=-3, backend="triton").to(DEVICE)
    rotated = qk_norm_rope(q, k, rope, q_weight=weight, k_weight=weight, positions=ids)
    cotangents = [2 * y.detach() for y in rotated]
    results = [*rotated, *torch.autograd.grad(rotated, [q, k, weight], cotangents)]
    tables, layout = plain_tables(ids, 8), Layout(True, 0, -3)
    expected = formula_with_gradients((q, k), (weight, weight), tables, layout, Norm(1e-6), cotangents)
    for result, truth in zip(results, expected, strict=True):
        torch.testing.assert_close(result.double(), truth, rtol=1e-4, atol=1e-4)


def test_first_derivatives_are_the_same_with_and_without_a_graph_and_in_batches():
    x = random(1, 2, 3, 4, dtype=torch.float64).requires_grad_()
    weight = random(4, dtype=torch.float64, seed=2).requires_grad_()
    rope = RotaryEmbedding(4, backend="triton").to(DEVICE)
    cos, sin = rope.at(torch.arange(3, device=DEVICE), dtype=torch.float64)

    def both():
        return ops.norm_rotate(x, x * x, weight, weight, cos, sin, rope.layout, Norm(1e-6), backend="triton")

    cotangents = [random(1, 2, 3, 4, dtype=torch.float64, seed=i) for i in (3, 4)]
    plain = torch.autograd.grad(both(), [x, weight], cotangents)
    graphed = torch.autograd.grad(both(), [x, weight], cotangents, create_graph=True)
    batched = torch.autograd.grad(both(), [x, weight], [g[None] for g in cotangents], is_grads_batched=True)
    for mine, other, wanted in zip(graphed, batched, plain, strict=True):
        torch.testing.assert_close(mine, wanted, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(other[0], wanted, rtol=1e-10, atol=1e-10)


def test_only_what_needs_a_gradient_gets_a_graph():
    q, k = random(1, 2, 3, 8).requires_grad_(), random(1, 2, 3, 8)
    rotated_q, rotated_k = qk_norm_rope(q, k, RotaryEmbedding(8, backend="triton").to(DEVICE))
    assert rotated_q.requires_grad
    assert not rotated_k.requires_grad


@pytest.mark.filterwarnings("ignore:divide by zero encountered:RuntimeWarning")  # NumPy's, of the interpreter
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_an_eps_that_float32_does_not_have():
    q = random(2, 3, 5, 8).requires_grad_()
    weight = random(8, seed=1).requires_grad_()
    rotated = qk_norm_rope(
        q, q, RotaryEmbedding(8, backend="triton").to(DEVICE), q_weight=weight, k_weight=weight, eps=1e-50
    )
    for gradient in torch.autograd.grad([y.sum() for y in rotated], [q, weight]):
        assert gradient.isfinite().all()


@pytest.mark.slow
def test_compiled_in_one_graph():
    torch._dynamo.reset()
    rope = RotaryEmbedding(8, pairing="half", backend="triton").to(DEVICE)
    q, k = random(2, 4, 5, 8).requires_grad_(), random(2, 2, 5, 8, seed=1).requires_grad_()
    weight = random(8, seed=2).requires_grad_()

    def both(q, k, weight):
        return *rope(q, k, offset=3), *qk_norm_rope(q, k, rope, q_weight=weight, k_weight=weight)

    compiled = torch.compile(both, fullgraph=True, backend="aot_eager")
    results = [function(q, k, weight) for function in (both, compiled)]
    cotangents = [random(*y.shape, seed=3) for y in results[0]]
    grads = [torch.autograd.grad(rotated, [q, k, weight], cotangents) for rotated in results]
    for mine, wanted in zip((*results[1], *grads[1]), (*results[0], *grads[0]), strict=True):
        torch.testing.assert_close(mine, wanted, rtol=1e-5, atol=1e-5)


def test_a_side_without_a_weight_writes_no_sums():
    # Keys with another stride of features need a launch of their own, which has no sums.
    rope = RotaryEmbedding(16, backend="triton").to(DEVICE)
    q = torch.ones(2, 3, 3, 16, device=DEVICE, requires_grad=True)
    k = torch.ones(2, 2, 3, 32, device=DEVICE)[..., ::2].requires_grad_()
    weight = torch.ones(16, device=DEVICE, requires_grad=True)
    angles = rope.at(torch.arange(3, device=DEVICE))
    before = [table.clone() for table in angles]
    results = qk_norm_rope(q, k, rope, q_weight=weight, angles=angles)
    torch.autograd.grad([y.sum() for y in results], [q, k, weight])
    assert all(torch.equal(table, old) for table, old in zip(angles, before, strict=True))
