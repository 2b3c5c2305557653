"""qk_norm_rope against the reference, for every dtype, pairing, slice and backend; its gradients; what it refuses."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.present import PRESENT, SLOW, examples, home, with_dtypes
from ropewalk import RopeSpec, RopewalkError, RotaryEmbedding, qk_norm_rope
from ropewalk.kernels.backend import registered
from ropewalk.reference import assert_within_budget, qk_norm_rotate, rms_norm, rotate
from ropewalk.spec.rope import PAIRINGS
from slow import slow
from strategies import pairings, seeds, theta, vector

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
NORMING = [name for name in PRESENT if "norm_rotate" in registered(name).operations]


def test_the_norm_by_hand():
    assert torch.allclose(rms_norm(torch.tensor([3.0, 4.0]), eps=1e-12), torch.tensor([3.0, 4.0]) / 12.5**0.5)
    with_one = rms_norm(torch.tensor([1.0, -1.0]), torch.tensor([0.5, 0.0]), eps=1e-12, plus_one=True)
    assert torch.allclose(with_one, torch.tensor([1.5, -1.0]))
    assert torch.allclose(rms_norm(torch.full((4,), 1e-9)), torch.full((4,), 1e-6), rtol=1e-4)


@given(seeds, st.floats(0.01, 100.0))
def test_the_norm_does_not_see_a_longer_vector(seed, factor):
    x = vector(seed, 3, 8)
    assert torch.allclose(rms_norm(x * factor, eps=1e-30), rms_norm(x, eps=1e-30), atol=1e-12)
    assert torch.allclose(rms_norm(x, eps=1e-30).square().mean(-1), torch.ones(3, dtype=torch.float64))


@pytest.mark.parametrize(("backend", "dtype"), with_dtypes(NORMING, DTYPES))
def test_within_budget(backend, dtype):
    @settings(max_examples=examples(backend))
    @given(
        seed=seeds,
        pairing=pairings,
        pairs=st.integers(1, 40),
        rest=st.sampled_from([0, 2, 14, 600]),
        rotary_slice=st.sampled_from(["leading", "trailing"]),
        plus_one=st.booleans(),
        seq_dim=st.sampled_from([-2, -3]),
    )
    def check(**case):
        check_within_budget(backend, dtype, **case)

    check()


def check_within_budget(backend, dtype, seed, pairing, pairs, rest, rotary_slice, plus_one, seq_dim):
    dim = 2 * pairs + rest
    spec = RopeSpec(dim, rotary_dim=2 * pairs, pairing=pairing, rotary_slice=rotary_slice)
    rope = RotaryEmbedding(spec, seq_dim=seq_dim, backend=backend).to(home(backend))
    q, k = (vector(seed + n, 2, heads, 5, dim).to(dtype) for n, heads in ((0, 3), (1, 2)))
    weights = vector(seed + 2, dim), vector(seed + 3, dim).float()
    moved = [x.to(home(backend)) for x in (q, k, *weights)]
    both = moved[:2] if seq_dim == -2 else [x.transpose(1, 2) for x in moved[:2]]
    results = qk_norm_rope(*both, rope, q_weight=moved[2], k_weight=moved[3], eps=1e-5, plus_one=plus_one, offset=7)
    for x, weight, y in zip((q, k), weights, results, strict=True):
        y = y.cpu() if seq_dim == -2 else y.cpu().transpose(1, 2)
        # A float64 weight is worked in float32 for every other dtype of x.
        weight = weight.double() if dtype == torch.float64 else weight.float().double()
        truth = qk_norm_rotate(
            x.double(),
            weight,
            torch.arange(7, 12),
            theta(2 * pairs),
            eps=1e-5,
            plus_one=plus_one,
            pairing=pairing,
            rotary_slice=rotary_slice,
        )
        assert y.dtype == dtype
        assert_within_budget(
            y, truth, rotary_dim=2 * pairs, pairing=pairing, rotary_slice=rotary_slice, farthest=12.0, copied=False
        )


@pytest.mark.parametrize("plus_one", [False, True])
@pytest.mark.parametrize(("backend", "dtype"), with_dtypes(NORMING, [torch.bfloat16, torch.float16]))
def test_rounding_where_transformers_rounds(dtype, plus_one, backend):
    rope, x = RotaryEmbedding(64, pairing="half", backend=backend).to(home(backend)), vector(0, 2, 3, 50, 64).to(dtype)
    weight = vector(1, 64).to(dtype)
    there, factor = x.to(home(backend)), weight.to(home(backend))
    y, _ = qk_norm_rope(there, there, rope, q_weight=factor, k_weight=factor, plus_one=plus_one, round_norm=True)
    # The two norms of transformers' models, written from their description.
    scaled = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)
    normed = (scaled * (1.0 + weight.float())).to(dtype) if plus_one else weight * scaled.to(dtype)
    truth = rotate(normed.double(), torch.arange(50), theta(64), pairing="half")
    # The sums of squares are taken in another order: now and then the norm falls on the other side of a tie.
    apart = (y.cpu().double() - truth).abs() > torch.finfo(dtype).eps / 2 * truth.abs() + 1e-5
    assert apart.float().mean() < 0.01
    once, _ = qk_norm_rope(there, there, rope, q_weight=factor, k_weight=factor, plus_one=plus_one)
    assert not torch.equal(y, once)


@pytest.mark.parametrize(
    ("backend", "pairing", "plus_one"),
    [
        slow(backend, pairing, plus_one) if backend in SLOW or not plus_one else (backend, pairing, plus_one)
        for backend, pairing, plus_one in itertools.product(NORMING, PAIRINGS, (False, True))
        if backend not in SLOW or plus_one == (pairing == "half")
    ],
)
def test_gradients(backend, pairing, plus_one):
    rope = RotaryEmbedding(RopeSpec(10, rotary_dim=6, pairing=pairing), backend=backend).to(home(backend))
    shapes = (2, 2, 2, 10), (2, 1, 2, 10), (10,), (10,)
    q, k, *weights = (vector(i, *shape).to(home(backend)).requires_grad_() for i, shape in enumerate(shapes))

    def call(q, k, a, b):
        return qk_norm_rope(q, k, rope, q_weight=a, k_weight=b, eps=1e-3, plus_one=plus_one, offset=3)

    # Along one random direction where the derivatives by all numbers take too long.
    fast = backend in SLOW
    assert torch.autograd.gradcheck(call, (q, k, *weights), fast_mode=fast)
    assert torch.autograd.gradgradcheck(call, (q, k, *weights), fast_mode=fast)
    # One of them alone.
    still = q.detach(), k.detach(), weights[1].detach()
    assert torch.autograd.gradcheck(lambda w: call(*still[:2], w, still[2])[0], (weights[0],), fast_mode=fast)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_backends_have_the_same_gradients(dtype):
    q, k = vector(0, 2, 3, 40, 64).to(dtype), vector(1, 2, 1, 40, 64).to(dtype)
    weight, cotangents = vector(2, 64).float(), (vector(3, 2, 3, 40, 64).to(dtype), vector(4, 2, 1, 40, 64).to(dtype))
    gradients = {}
    for backend in NORMING:
        leaves = [t.clone().to(home(backend)).requires_grad_() for t in (q, k, weight)]
        rope = RotaryEmbedding(64, backend=backend).to(home(backend))
        outputs = qk_norm_rope(*leaves[:2], rope, q_weight=leaves[2], k_weight=leaves[2])
        there = [cotangent.to(home(backend)) for cotangent in cotangents]
        gradients[backend] = [x.cpu() for x in torch.autograd.grad(outputs, leaves, there)]
    for backend in NORMING:
        for a, b in zip(gradients[backend], gradients["torch"], strict=True):
            tolerance = 2 * torch.finfo(dtype).eps if a.dtype == dtype else 1e-4
            assert torch.allclose(a, b, rtol=tolerance, atol=tolerance * float(b.abs().max())), backend


def test_prefill_and_decode_agree_bit_for_bit():
    for dtype in DTYPES:
        rope, x, weight = RotaryEmbedding(40), vector(0, 1, 3, 12, 40).to(dtype), vector(1, 40).float()
        whole, _ = qk_norm_rope(x, x, rope, q_weight=weight, offset=100)
        for token in (0, 5, 11):
            part = x[:, :, token : token + 1].contiguous()
            assert torch.equal(
                qk_norm_rope(part, part, rope, q_weight=weight, offset=100 + token)[0], whole[:, :, token : token + 1]
            )


def test_compile_and_transforms():
    rope, x, weight = RotaryEmbedding(16), vector(0, 2, 3, 12, 16).float(), vector(1, 16).float()

    def call(x, weight):
        return qk_norm_rope(x, x, rope, q_weight=weight)[0]

    expected = call(x, weight)
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    assert torch.allclose(compiled(x, weight), expected, atol=1e-5)
    assert torch.allclose(torch.func.vmap(call, in_dims=(0, None))(x, weight), expected, atol=1e-5)
    tangent = torch.func.jvp(call, (x, weight), (x, torch.zeros_like(weight)))[1]
    assert tangent.abs().max() < 1e-3


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"q_weight": torch.ones(7)}, "a floating-point tensor [8] on cpu, or None"),
        ({"k_weight": torch.ones(3, 8)}, "normalise first"),
        ({"k_weight": torch.ones(8, dtype=torch.int64)}, "torch.int64 [8]"),
        ({"q_weight": torch.ones(8, device="meta")}, "on meta"),
        ({"q_weight": None, "plus_one": True}, "with plus_one"),
        ({"q_weight": 1.0}, "got:      1.0"),
        ({"eps": 0.0}, "eps"),
        ({"eps": "1e-6"}, "eps"),
        ({"plus_one": 1}, "plus_one"),
        ({"round_norm": None}, "round_norm"),
        ({"rope": "rope"}, "a RotaryEmbedding as the third argument"),
        ({"k": None}, "keys"),
        ({"k": torch.ones(1, 2, 6, 8)}, "as many keys as queries"),
        ({"q": torch.ones(1, 2, 5, 7)}, "whose last dimension is 8"),
        ({"positions": torch.arange(4)}, "positions [5]"),
        ({"offset": 1, "positions": torch.arange(5)}, "one of positions, offset"),
    ],
)
def test_bad_input(arguments, said):
    good = {"q": torch.ones(1, 2, 5, 8), "k": torch.ones(1, 2, 5, 8), "q_weight": torch.ones(8), "k_weight": None}
    with pytest.raises(RopewalkError) as error:
        qk_norm_rope(**{**good, "rope": RotaryEmbedding(8)} | arguments)
    assert said in str(error.value)


def test_queries_and_keys_have_backwards_of_their_own():
    q, k = (vector(i, 1, 2, 5, 8).float().requires_grad_() for i in range(2))
    a, b = qk_norm_rope(q, k, RotaryEmbedding(8))
    a.sum().backward()
    assert k.grad is None
    b.sum().backward()
    assert k.grad is not None


def test_batched_gradients_have_no_graph():
    x = vector(0, 1, 2, 5, 8).float().requires_grad_()
    y, _ = qk_norm_rope(x, x, RotaryEmbedding(8))
    (batched,) = torch.autograd.grad(y, x, torch.ones(3, *y.shape), is_grads_batched=True)
    assert not batched.requires_grad
