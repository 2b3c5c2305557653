"""The Triton kernels for linear attention with a decay or a bias, and without a denominator: values and gradients."""

from typing import Any

import pytest
import torch

import ropewalk as rw
from kernels.triton_device import DEVICE
from kernels.weighted_kernels import (
    FAR,
    LIMIT,
    NEAR,
    check,
    check_states,
    inputs_of,
    kernels_only,
    ours,
    short_segments,
    two_steps_per_chunk,
)
from meant import meant
from nn.linear_cases import drawn, error, with_gradients
from nn.weighted_cases import DECAYS
from ropewalk.kernels.linear import triton as linear_triton
from ropewalk.kernels.types import Layout, Side, Sums, Weighting
from ropewalk.nn.rotary.call import Placement
from ropewalk.ops.linear_attention import linear_attention
from slow import slow

__all__ = ["kernels_only", "short_segments", "two_steps_per_chunk"]

# Of torch, on a CPU that has no bfloat16.
pytestmark = pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")

CAUSAL = [
    ("per key head", 2, 1, 70),
    slow("per key head", 4, 2, 150),
    ("per query head", 2, 1, 70),
    slow("per query head", 4, 2, 150),
    ("per token", 2, 1, 70),
    slow("per token", 2, 2, 150),
    slow("per token and query head", 2, 1, 70),
    slow("per token and query head", 4, 2, 150),
    slow("alibi", 2, 1, 70),
    slow("alibi", 4, 2, 150),
]


@pytest.mark.usefixtures("kernels_only")
@pytest.mark.parametrize(("kind", "heads", "kv_heads", "seq"), CAUSAL)
def test_causal_decays(kind, heads, kv_heads, seq):
    check(kind, heads, kv_heads, seq, batch=heads // 2)


@pytest.mark.usefixtures("kernels_only")
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["per token", "per token and query head"])
def test_a_decay_per_sequence(kind):
    check(kind, 2, 1, 70, batch=2)


@pytest.mark.usefixtures("kernels_only")
@pytest.mark.parametrize(("kind", "seq"), [("alibi", 70), slow("alibi", 150), slow("per key head", 150)])
def test_decays_in_both_directions(kind, seq):
    check(kind, 2, 1, seq, causal=False)


@pytest.mark.usefixtures("kernels_only")
@pytest.mark.parametrize(
    ("buckets", "heads", "seq", "causal"),
    [
        (NEAR, 1, 70, True),
        (NEAR, 1, 70, False),
        slow(FAR, 1, 130, True),
        (FAR, 1, 130, False),
        *(slow(*size, causal) for size in ((NEAR, 4, 150), (FAR, 2, 300), (FAR, 2, 20)) for causal in (True, False)),
    ],
)
def test_t5(buckets, heads, seq, causal):
    check("t5", heads, 1, seq, buckets=buckets, causal=causal)


@pytest.mark.usefixtures("kernels_only", "two_steps_per_chunk")
@pytest.mark.parametrize(
    ("kind", "kv_heads", "options"),
    [
        ("t5", 1, {"buckets": FAR, "causal": False}),
        slow("t5", 1, {"buckets": FAR, "causal": True}),
        slow("t5", 2, {"buckets": NEAR, "causal": False, "normalize": False}),
        slow("t5", 1, {"buckets": NEAR, "causal": False, "cu_seqlens": torch.tensor([0, 1, 1, 68, 75])}),
        slow("alibi", 1, {"causal": False}),
        # Keys without a rotation are stored once.
        ("t5", 1, {"buckets": NEAR, "causal": False, "rotated": False}),
        slow("t5", 2, {"buckets": FAR, "causal": True, "rotated": False}),
        slow("alibi", 1, {"causal": False, "rotated": False}),
        slow("t5", 1, {"buckets": NEAR, "causal": False, "rotated": False, "normalize": False}),
        slow("alibi", 2, {"causal": False, "cu_seqlens": torch.tensor([0, 1, 1, 68, 75])}),
        # Two blocks of columns.
        slow("t5", 1, {"buckets": NEAR, "causal": False, "sizes": (8, 70)}),
        slow("alibi", 1, {"causal": False, "sizes": (70, 66)}),
    ],
)
def test_chunks_of_several_steps(kind, kv_heads, options):
    check(kind, 2, kv_heads, 75, **options)


@pytest.mark.usefixtures("kernels_only")
@pytest.mark.parametrize(
    ("kind", "causal"),
    [
        slow("plain", True),
        slow("plain", False),
        ("per token", True),
        slow("per key head", True),
        slow("per query head", True),
        slow("alibi", False),
        slow("t5", True),
        slow("t5", False),
    ],
)
@meant("scale")
def test_without_a_denominator(kind, causal):
    results = check(kind, 2, 1, 70, causal=causal, normalize=False, scale=0.3)
    inputs, rule = inputs_of(kind, 2, 1, 70)
    tensor = rule.tensor if rule.tensor is None else rule.tensor.to(DEVICE)
    moved = [x.to(DEVICE) for x in inputs[:3]]
    plain = ours(*moved, rule, rw.RotaryEmbedding(8), tensor=tensor, causal=causal, normalize=False)
    torch.testing.assert_close(0.3 * plain, results[0].detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("kernels_only")
@pytest.mark.parametrize(
    ("kind", "causal", "normalize"),
    [
        ("per token", True, True),
        slow("per token", True, False),
        slow("per key head", True, True),
        slow("per query head", True, False),
        slow("alibi", True, True),
        slow("alibi", False, True),
        slow("t5", True, True),
        slow("t5", False, False),
    ],
)
@meant("cu_seqlens")
def test_packed_sequences(kind, causal, normalize):
    ends = torch.tensor([0, 1, 1, 68, 72])
    results = check(kind, 2, 1, 75, causal=causal, cu_seqlens=ends, normalize=normalize)
    assert all(not x[:, :, 72:].any() for x in results[:4])


@pytest.mark.parametrize(
    ("kind", "normalize"),
    [
        ("per key head", True),
        slow("per query head", True),
        slow("per token and query head", False),
        slow("per token", True),
        slow("alibi", False),
    ],
)
def test_states_go_in_and_come_out_with_gradients(kind, normalize):
    check_states(kind, normalize)


def test_gradients_of_the_state_alone_and_of_one_input_alone():
    (q, k, v, g), rule = inputs_of("per token", 1, 1, 20)

    def gradient(backend, which, part, dtype, device):
        tensors = [x.to(device, dtype) for x in (q, k, v, g)]
        tensors[which].requires_grad_()
        out, state = ours(*tensors[:3], rule, tensor=tensors[3], return_state=True, backend=backend)
        results = {"out": out, "above": state.above, "below": state.below}
        return torch.autograd.grad((results[part] ** 2).sum(), tensors[which])[0]

    for which, part in ((1, "above"), (3, "below"), (2, "above"), (0, "out")):
        truth = gradient("torch", which, part, torch.float64, "cpu")
        assert error(gradient("triton", which, part, torch.float32, DEVICE), truth) < LIMIT


@pytest.mark.parametrize(
    ("kind", "causal"), [("per token", True), ("t5", True), slow("t5", False), slow("alibi", False)]
)
def test_second_derivatives_are_the_formulas(kind, causal):
    inputs, rule = inputs_of(kind, 2, 1, 9)

    def second(backend, dtype, device):
        tensors = [x.to(device, dtype).requires_grad_() for x in inputs]
        tensor = tensors[3] if len(tensors) > 3 else None
        out = ours(*tensors[:3], rule, rw.RotaryEmbedding(8), tensor=tensor, causal=causal, backend=backend)
        gradients = torch.autograd.grad(out.square().sum(), tensors, create_graph=True)
        return torch.autograd.grad(sum(x.square().sum() for x in gradients), tensors)

    truth = second("torch", torch.float64, "cpu")
    for a, b in zip(second("triton", torch.float32, DEVICE), truth, strict=True):
        assert error(a, b) < LIMIT


def test_batched_cotangents():
    (q, k, v, g), rule = inputs_of("per key head", 2, 1, 9)
    tensors = [x.to(DEVICE).requires_grad_() for x in (q, k, v, g)]
    out = ours(*tensors[:3], rule, tensor=tensors[3])
    cotangents = torch.randn(2, *out.shape, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    batched = torch.autograd.grad(out, tensors, cotangents, is_grads_batched=True, retain_graph=True)
    for i in range(2):
        for a, b in zip(batched, torch.autograd.grad(out, tensors, cotangents[i], retain_graph=True), strict=True):
            torch.testing.assert_close(a[i], b, rtol=1e-4, atol=1e-5)


def test_a_write_between_forward_and_backward_is_an_error():
    (q, k, v, g), rule = inputs_of("per key head", 2, 1, 9)
    q, k, v, g = (x.to(DEVICE) for x in (q, k, v, g))
    out = ours(q.requires_grad_(), k, v, rule, tensor=g)
    v.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


COMPILED = [("per token", True, False), slow("t5", True, True), slow("t5", False, False), slow("alibi", False, True)]


@pytest.mark.parametrize(("kind", "causal", "packed"), COMPILED)
def test_a_compiled_call_is_the_kernel(kind, causal, packed):
    torch.compiler.reset()
    inputs, rule = inputs_of(kind, 2, 1, 30)
    rope, ends = rw.RotaryEmbedding(8).to(DEVICE), torch.tensor([0, 10, 30], device=DEVICE) if packed else None
    bias = rule.options(2, causal=causal, tensor=inputs[3].to(DEVICE) if kind == "t5" else None).get("bias")

    def f(q, k, v, *rest):
        decay = rest[0] if kind in DECAYS else None
        if kind == "t5":
            bias.weight = rest[0]  # pyright: ignore[reportOptionalMemberAccess]
        options = {"rope": rope, "cu_seqlens": ends, "causal": causal, "backend": "triton"}
        return rw.linear_attention(q, k, v, decay=decay, bias=bias, **options)

    cotangent, there = torch.ones(1, 2, 30, 5), [x.to(DEVICE) for x in inputs]
    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    for a, b in zip(with_gradients(compiled, there, cotangent), with_gradients(f, there, cotangent), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


# Name: kind, causal, packed, normalize.
CHECKED = {
    "decay": ("per token", True, False, True),
    "decay per query head": ("per token and query head", True, True, True),
    "one decay": ("per query head", True, False, False),
    "both directions": ("alibi", False, False, True),
    "band": ("t5", True, False, True),
    "packed band": ("t5", False, True, False),
    "no denominator": ("plain", True, False, False),
}
CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor")


def op_arguments(name, seq):
    kind, causal, packed, normalize = CHECKED[name]
    heads = 1 if seq < 32 else 2
    (q, k, v, *tensor), _ = inputs_of(kind, heads, 1, seq)
    q, k, v = (x.to(DEVICE).requires_grad_() for x in (q, k, v))
    decay = band = None
    if kind == "t5":
        band = (
            torch.linspace(-1, 0, 2 * 17 + 1).expand(heads, -1).to(DEVICE, torch.float64).contiguous().requires_grad_()
        )
    elif kind == "alibi":
        decay = torch.tensor([-0.1, -0.2], dtype=torch.float64, device=DEVICE)[None, :, None]
    elif kind in DECAYS:
        decay = tensor[0].to(DEVICE)
        decay = (decay if decay.dim() == 3 else decay[None, :, None]).requires_grad_()
    cos, sin, row = rw.RotaryEmbedding(8).to(DEVICE).shared_tables(q, None, Placement())
    ends = torch.tensor([0, seq // 2, seq // 2, seq - 1], device=DEVICE) if packed else None
    before = None
    if name == "one decay":
        before = torch.rand(2, 8 * 6, device=DEVICE, requires_grad=True)
    plain = q, k, v, cos, sin, cos, sin, before, ends
    options = row, row, "elu", "elu", True, 0, causal, "triton"
    return plain, options, (decay, band, None, normalize, 1.0 if normalize else 0.5)


@pytest.mark.parametrize(("name", "seq"), [("decay", 9), ("band", 9), *(slow(name, 40) for name in CHECKED)])
def test_the_ops_keep_what_they_declare_to_a_compiler(name, seq):
    plain, options, weighting = op_arguments(name, seq)
    torch.library.opcheck(torch.ops.ropewalk.linear_attention, (*plain, *options, *weighting), test_utils=CHECKS)
    plain, weighting = ([x.detach() if isinstance(x, torch.Tensor) else x for x in xs] for xs in (plain, weighting))
    results = torch.ops.ropewalk.linear_attention(*plain, *options, *weighting)
    # Values whose features are not adjacent, and expanded cotangents.
    plain[2] = plain[2].mT.contiguous().mT  # pyright: ignore[reportAttributeAccessIssue, reportOptionalMemberAccess]
    of_out = torch.ones((), device=DEVICE).expand(results[0].shape)
    of_total = None if name == "band" or not options[6] else torch.ones_like(results[1])
    for learned in {False, name in ("band", "packed band")}:
        arguments = of_out, of_total, *plain, results, *options, *weighting, learned
        op = torch.ops.ropewalk.linear_attention_backward
        torch.library.opcheck(op, arguments, test_utils=("test_schema", "test_faketensor"))
        assert len(op(*arguments)) == (5 if learned else 4)


@pytest.mark.parametrize(
    ("kind", "seq", "causal"),
    [
        ("per key head", 10, False),
        ("per token", 10, True),
        ("t5", 10, True),
        slow("t5", 10, False),
        *(slow(kind, 70, causal) for kind in ("per key head", "per query head") for causal in (True, False)),
        slow("per token", 70, True),
        slow("t5", 70, True),
    ],
)
def test_weights_that_underflow_are_zero_and_not_nan(kind, seq, causal):
    inputs, rule = inputs_of(kind, 2, 1, seq)
    with torch.no_grad():
        inputs[1][:, :, 1:] = -1.0  # no features, except those of the first key
        inputs[3].fill_(-50.0)
        if kind == "t5":
            inputs[3][0] = 50.0
    q, k, v, tensor = (x.to(DEVICE).requires_grad_(causal or i < 3) for i, x in enumerate(inputs))
    for normalize in (True, False):
        out = ours(q, k, v, rule, tensor=tensor, causal=causal, normalize=normalize, feature_map="relu")
        gradients = torch.autograd.grad(out.sum(), [x for x in (q, k, v, tensor) if x.requires_grad])
        assert all(x.isfinite().all() for x in (out, *gradients))
        assert out[:, :, 0].all()
        if normalize or kind != "t5":
            assert not out[:, :, 4:].any()
            assert not gradients[0][:, :, 4:].any()


def test_weights_that_vanish_beside_large_ones_do_not_matter():
    q, k, v = (x.to(DEVICE) for x in drawn(1, 2, 1, 130, 8, 3, torch.float32))
    out = rw.linear_attention(q, k, v, decay=torch.full((1,), -50.0, device=DEVICE), backend="triton")
    torch.testing.assert_close(out, v.expand(-1, 2, -1, -1), rtol=1e-5, atol=1e-5)


T5 = rw.encoding("t5", dim=16, num_heads=2, num_buckets=4, max_distance=20)
DECLINED = {
    "positions": ({"bias": T5, "positions": torch.arange(6) * 2}, "a bias with positions"),
    "a state": ({"bias": T5, "return_state": True}, "a bias with initial sums"),
    "fewer queries": ({"bias": T5, "queries": 3}, "a decay or a bias with other queries than keys"),
    "ALiBi with positions in both directions": (
        {"bias": rw.encoding("alibi", dim=16, num_heads=2), "positions": torch.arange(6) * 2, "causal": False},
        "a decay per token if attention is not causal",
    ),
}


@pytest.mark.parametrize("name", DECLINED)
def test_what_is_not_supported_is_named(name):
    given, words = DECLINED[name]
    options: dict[str, Any] = {
        key: x.to(DEVICE) if isinstance(x, (torch.Tensor, rw.Encoding)) else x for key, x in given.items()
    }
    q, k, v = (x.to(DEVICE) for x in drawn(1, 2, 1, 6, 8, 5, torch.float32))
    q = q[:, :, -options.pop("queries", 6) :]
    if options.get("return_state"):
        options["state"] = rw.linear_attention(q, k, v, **options)[1]
    with pytest.raises(rw.RopewalkError, match=rf"{words}(?s:.*)leave backend out"):
        rw.linear_attention(q, k, v, backend="triton", **options)
    # Without a forced backend, the formula computes the call.
    assert rw.linear_attention(q, k, v, **options) is not None


def test_bands_that_are_not_supported_are_named():
    q, _, v = (x.to(DEVICE) for x in drawn(1, 1, 1, 6, 8, 5, torch.float32))
    call = Side(q, "elu"), Side(q, "elu"), v
    sums = Sums(torch.zeros(1, 1, 8, 5, device=DEVICE), torch.zeros(1, 1, 8, device=DEVICE))
    for window, before, words in ((0, None, "a bias with a window of 0"), (2, sums, "a bias with initial sums")):
        weighting = Weighting(band=torch.zeros(1, 2 * window + 1, device=DEVICE))
        options = {"causal": True, "weighting": weighting}
        with pytest.raises(rw.RopewalkError, match=words):
            linear_attention(*call, before, Layout(True, 0, -2), backend="triton", **options)
        plain = linear_attention(*call, before, Layout(True, 0, -2), causal=True)[0]
        torch.testing.assert_close(linear_attention(*call, before, Layout(True, 0, -2), **options)[0], plain)


def test_a_decay_in_both_directions_after_sums_is_the_formulas():
    q, _, v = (x.to(DEVICE) for x in drawn(1, 1, 1, 70, 8, 5, torch.float32))
    sums = Sums(torch.ones(1, 1, 8, 5, device=DEVICE), torch.ones(1, 1, 8, device=DEVICE))
    call = Side(q, "elu"), Side(q, "elu"), v, sums, Layout(True, 0, -2)
    options = {"causal": False, "weighting": Weighting(decay=torch.full((1, 1, 1), -0.1, device=DEVICE))}
    with pytest.raises(rw.RopewalkError, match="a decay in both directions with initial sums"):
        linear_attention(*call, backend="triton", **options)
    torch.testing.assert_close(
        linear_attention(*call, **options)[0], linear_attention(*call, backend="torch", **options)[0]
    )


@pytest.mark.parametrize("normalize", [True, False])
def test_the_gradient_of_a_strong_decay_has_digits(normalize):
    q, k, v = (x.to(DEVICE) for x in drawn(1, 1, 1, 100, 16, 8, torch.bfloat16))
    decay = torch.full((1,), -6.0, device=DEVICE)

    def gradient(q, k, v, decay, backend):
        decay = decay.clone().requires_grad_()
        out = rw.linear_attention(q, k, v, decay=decay, normalize=normalize, backend=backend)
        return torch.autograd.grad(out, decay, torch.ones_like(out))[0]

    truth = gradient(*(x.double() for x in (q, k, v, decay)), backend=None)
    assert error(gradient(q, k, v, decay, backend="triton"), truth.cpu()) < 1e-2


def test_nan_in_a_decay_is_not_hidden():
    q, k, v = (x.to(DEVICE) for x in drawn(1, 1, 1, 70, 8, 5, torch.float32))
    sides = Side(q, "elu"), Side(k, "elu")
    for shape, token in (((1, 1, 70), 5), ((1, 1, 1), 0)):
        decay = torch.full(shape, -0.1, device=DEVICE)
        decay[..., token] = torch.nan
        out, *_ = linear_triton.linear_attention(
            *sides, v, None, Layout(True, 0, -2), causal=True, weighting=Weighting(decay=decay)
        )
        assert out[:, :, 66:].isnan().all()


def test_gradients_of_rows_that_overlap():
    x = torch.randn(40, generator=torch.Generator().manual_seed(1)).unfold(0, 16, 1)[:8][None, None].to(DEVICE)
    assert torch.empty_like(x).stride(3) != 1
    decay = torch.full((1,), -0.1, device=DEVICE)

    def gradients(x, backend, **options):
        q, k, v = (x.detach().requires_grad_() for _ in range(3))
        return torch.autograd.grad(rw.linear_attention(q, k, v, backend=backend, **options).sum(), (q, k, v))

    for options in ({"decay": decay}, {}):
        for a, b in zip(gradients(x, "triton", **options), gradients(x.double(), None, **options), strict=True):
            assert error(a, b.cpu()) < LIMIT
