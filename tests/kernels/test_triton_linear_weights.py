"""The Triton kernels for linear attention with a decay or a bias, and without a denominator: values and gradients."""

import importlib.util
import pathlib
import sys
from typing import Any

import pytest
import torch

import ropewalk as rw
from kernels.triton_device import DEVICE
from meant import meant
from nn.linear_cases import drawn, error, with_gradients
from nn.weighted_cases import DECAYS, expected, rule_of
from ropewalk.kernels.linear import segments as linear_segments
from ropewalk.kernels.linear import triton as linear_triton
from ropewalk.kernels.linear import triton_apart, triton_call, triton_kernels
from ropewalk.kernels.triton_launch import Launch
from ropewalk.kernels.types import Layout, Side, Sums, Weighting
from ropewalk.nn.rotary.call import Placement
from ropewalk.ops.linear_attention import linear_attention
from slow import slow

# Of torch, on a CPU that has no bfloat16.
pytestmark = pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")

# Relative error of float32 results. Matrix products have the precision of float32.
LIMIT = 2e-5
NEAR, FAR = (4, 20), (8, 80)  # T5's num_buckets and max_distance: a window within a segment, and beyond one


@pytest.fixture(autouse=True)
def _short_segments(monkeypatch):
    # Few tokens then make several segments, and the last one is not full.
    if DEVICE.type == "cpu":
        monkeypatch.setattr(linear_segments, "segment_length", lambda *_: 64)
        # Launches of other tests have other segments.
        monkeypatch.setattr(linear_triton, "LAUNCHES", type(linear_triton.LAUNCHES)())


@pytest.fixture
def kernels_only(monkeypatch):
    """Makes the formula an error, in the forward and in the backward, except for the gradient of a decay."""
    module = sys.modules[linear_attention.__module__]
    real = module.linear_attention_formula

    def formula(*arguments):
        in_backward = torch._C._current_graph_task_id() != -1
        if in_backward and arguments[-1].decay is not None and arguments[-1].decay.requires_grad:
            return real(*arguments)
        raise AssertionError("the formula was called")

    monkeypatch.setattr(module, "linear_attention_formula", formula)


def ours(q, k, v, rule, rope=None, *, causal=True, tensor=None, backend="triton", **options):
    weights = rule.options(q.shape[1], causal=causal, tensor=tensor)
    rope = rope and rope.to(q.device)
    return rw.linear_attention(q, k, v, rope=rope, causal=causal, backend=backend, **weights, **options)


def inputs_of(kind, heads, kv_heads, seq, *, batch=1, buckets=NEAR, dim=8, v_dim=5):
    """float32 inputs, with the decay or T5's numbers as the last one, and the rule."""
    rule = rule_of(kind, batch, heads, kv_heads, seq, torch.float32, buckets=buckets)
    tensors = [*drawn(batch, heads, kv_heads, seq, dim, v_dim, torch.float32)]
    return tensors + ([] if rule.tensor is None else [rule.tensor]), rule


def assert_close(results, truth):
    for name, a, b in zip(("o", "dq", "dk", "dv", "dw"), results, truth, strict=False):
        assert a.shape == b.shape
        assert error(a, b) < LIMIT, (name, error(a, b))


def check(kind, heads, kv_heads, seq, *, batch=1, buckets=NEAR, sizes=(8, 5), rotated=True, fixed=False, **options):
    """Compare outputs and all gradients with sums over all pairs of tokens in float64. `sizes` is width and v_dim."""
    inputs, rule = inputs_of(kind, heads, kv_heads, seq, batch=batch, buckets=buckets, dim=sizes[0], v_dim=sizes[1])
    rope = rw.RotaryEmbedding(sizes[0]) if rotated else None
    cotangent = torch.randn(batch, heads, seq, sizes[1], generator=torch.Generator().manual_seed(3))
    # A tensor that is not an input needs no gradient.
    given = [inputs.pop()] if fixed else []

    def by_kernels(q, k, v, *tensor):
        moved = {name: x.to(DEVICE) if isinstance(x, torch.Tensor) else x for name, x in options.items()}
        weights = [*tensor, *(x.to(DEVICE) for x in given), None]
        return ours(q, k, v, rule, rope, tensor=weights[0], **moved)

    def by_sums(q, k, v, *tensor):
        weights = [*tensor, *(x.double() for x in given), None]
        return expected(q, k, v, rule._replace(tensor=weights[0]), rope and rope.to("cpu"), **options)

    results = with_gradients(by_kernels, [x.to(DEVICE) for x in inputs], cotangent)
    assert_close(results, with_gradients(by_sums, [x.double() for x in inputs], cotangent))
    return results


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


@pytest.mark.parametrize(
    ("kind", "causal", "most"),
    [
        ("plain", True, (3, 4)),
        ("per key head", True, (3, 4)),
        ("alibi", False, (3, 4)),
        ("t5", True, (3, 5)),  # the gradient of its numbers is one more
    ],
)
def test_few_launches(kind, causal, most, monkeypatch):
    launched = []
    bare, by_address = Launch.bare, Launch.by_address
    monkeypatch.setattr(Launch, "bare", lambda self, *x: launched.append(self) or bare(self, *x))

    def counted(self, *x):
        if not by_address(self, *x):
            return False
        launched.append(self)
        return True

    monkeypatch.setattr(Launch, "by_address", counted)
    inputs, rule = inputs_of(kind, 1, 1, 20)
    # The gradient of a decay is the formula's.
    leaves = [x.to(DEVICE, torch.bfloat16).requires_grad_(i < 3 or kind == "t5") for i, x in enumerate(inputs)]
    rope = rw.RotaryEmbedding(8).to(DEVICE)
    # The first calls make cos and sin too.
    for _ in range(2):
        ours(*leaves[:3], rule, rope, tensor=[*leaves, None][3], causal=causal)
    launched.clear()
    out = ours(*leaves[:3], rule, rope, tensor=[*leaves, None][3], causal=causal)
    assert len(launched) == most[0]
    torch.autograd.grad(out.sum(), [x for x in leaves if x.requires_grad])
    assert len(launched) == sum(most)


@pytest.mark.parametrize(("kind", "packed"), [("plain", False), ("t5", False), ("alibi", True)])
def test_addresses_are_those_of_the_arrays(kind, packed, monkeypatch):
    seen, start = [], triton_call.Call.start

    def checked(self, kernel, variant, stream, names, addresses, tensors):
        arrays = tensors()
        assert len(names) == len(addresses) == len(arrays)
        for name, address, array in zip(names, addresses, arrays, strict=True):
            if isinstance(array, int):
                assert address == array, name
            elif address and array.numel():
                assert address == array.data_ptr(), name
        seen.append(kernel)
        start(self, kernel, variant, stream, names, addresses, tensors)

    monkeypatch.setattr(triton_call.Call, "start", checked)
    inputs, rule = inputs_of(kind, 2, 1, 20)
    leaves = [x.to(DEVICE, torch.bfloat16).requires_grad_() for x in inputs]
    ends = torch.tensor([0, 7, 20], device=DEVICE) if packed else None
    out = ours(*leaves[:3], rule, rw.RotaryEmbedding(8), tensor=[*leaves, None][3], cu_seqlens=ends)
    torch.autograd.grad(out.sum(), leaves)
    assert len(seen) == (8 if kind == "t5" else 7)


def test_saved_tensors_with_other_strides():
    (q, k, v, g), rule = inputs_of("per key head", 2, 1, 70)
    leaves = [x.to(DEVICE).requires_grad_() for x in (q, k, v)]

    def gradients():
        return torch.autograd.grad(ours(*leaves, rule, tensor=g.to(DEVICE)).square().sum(), leaves)

    def unpack(x):
        moved = x.transpose(1, 2).contiguous().transpose(1, 2) if x.dim() == 4 else x
        shifted = torch.empty(moved.numel() + 1, dtype=x.dtype, device=x.device)[1:] if x.dim() < 3 else moved
        return shifted.view_as(x).copy_(x) if x.dim() < 3 else moved

    truth = gradients()
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, unpack):
        results = gradients()
    for a, b in zip(results, truth, strict=True):
        torch.testing.assert_close(a, b)


# Heads so wide that several programs share a chunk: gradients of keys and of values are then separate programs.
@pytest.mark.usefixtures("kernels_only")
@pytest.mark.parametrize(("kind", "causal"), [("t5", True), slow("t5", False), slow("alibi", False)])
def test_wide_heads(kind, causal):
    check(kind, 2, 1, 100, batch=2, buckets=FAR, sizes=(72, 70), causal=causal)


# What is changed in triton_apart.py, and the kind of attention that must then be wrong.
MUTANTS = {
    "a state of the wrong chunk": ("other = chunk + NEAR if AFTER else chunk - NEAR", "other = chunk", "t5", False),
    "a state before the first token": ("other * CHUNK >= first", "other * CHUNK >= first - 64", "t5", True),
    "no sums within the segment": ("kept + tl.where(exists, more_a, 0.0)", "kept", "alibi", False),
    "a segment that does not decay": ("if AFTER else inside * CHUNK", "if AFTER else 0 * inside", "alibi", False),
    "a row that decays once too often": ("if AFTER else row + 1", "if AFTER else row + 2", "alibi", False),
    "one factor for both sides": (
        "far_weight(band, head, BAND, AFTER)",
        "far_weight(band, head, BAND, 0)",
        "t5",
        False,
    ),
    "a visit too few": ("1 + 2 * NEAR if SIDE == 0 else 1 + NEAR) * Y_GROUP", "1 + NEAR) * Y_GROUP", "t5", False),
    "tiles without their factors": ("gradient * weight)", "gradient)", "t5", True),
    "far keys that learn nothing": ("tl.store(of_far + 2 * place + AFTER, gradient)", "pass", "t5", True),
}


def loaded(path, text, monkeypatch):
    """The module that a new file with this text is."""
    path.write_text(text, "utf-8")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, path.stem, module)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
def test_a_wrong_kernel_is_noticed(name, tmp_path, monkeypatch):
    old, new, kind, causal = MUTANTS[name]
    text, stem = pathlib.Path(triton_apart.__file__).read_text(encoding="utf-8"), f"apart_{list(MUTANTS).index(name)}"
    assert old in text
    loaded(tmp_path / f"{stem}.py", text.replace(old, new), monkeypatch)
    # Kernels of their own: Triton keeps what it has compiled for a kernel.
    text = pathlib.Path(triton_kernels.__file__).read_text(encoding="utf-8")
    text = text.replace("from ropewalk.kernels.linear.triton_apart import", f"from {stem} import")
    wrong = loaded(tmp_path / f"kernels_of_{stem}.py", text, monkeypatch)
    for kernel in ("read_values", "read_queries", "read_keys", "read_factors"):
        monkeypatch.setattr(triton_call, kernel, getattr(wrong, kernel))
    with pytest.raises(AssertionError):
        check(kind, 2, 1, 150, buckets=FAR, causal=causal)


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


def in_two_parts(q, k, v, rule, tensor, rope, backend, first, normalize, sums):
    """Outputs of two calls, the second of which continues the first, and the state at the end."""
    state, results = sums, []
    for part in (slice(0, first), slice(first, None)):
        g = tensor[..., part] if tensor is not None and tensor.dim() == 3 else tensor
        one = [x[:, :, part] for x in (q, k, v)]
        options = {"state": state, "return_state": True, "normalize": normalize, "backend": backend}
        out, state = ours(*one, rule, rope, tensor=g, **options)
        results.append(out)
    assert state is not None
    return torch.cat([x.flatten() for x in (*results, state.above, state.below)])


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
    batch = 1 if kind == "per key head" else 2
    inputs, rule = inputs_of(kind, 2, 1, 100, batch=batch)
    heads = 2 if "query" in kind or kind == "alibi" else 1
    inputs = [*inputs, torch.rand(batch, heads, 8, 5), torch.rand(batch, heads, 8)]
    cotangent = torch.randn(batch * (2 * 100 * 5 + heads * 8 * 6), generator=torch.Generator().manual_seed(3))

    def run(backend):
        def f(q, k, v, *rest):
            *tensor, above, below = rest
            rope = rw.RotaryEmbedding(8)
            weighting = "decay" if kind in DECAYS else "AlibiBias"
            state = rw.LinearState(above, below, 7, rope.spec, "elu", weighting=weighting)
            arguments = rule, tensor[0] if tensor else None, rope, backend, 66, normalize, state
            return in_two_parts(q, k, v, *arguments)

        return f

    results = with_gradients(run("triton"), [x.to(DEVICE) for x in inputs], cotangent)
    truth = with_gradients(run("torch"), [x.double() for x in inputs], cotangent)
    for a, b in zip(results, truth, strict=True):
        assert error(a, b) < LIMIT


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
    heads = 1 if seq < 64 else 2
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


@pytest.mark.parametrize(("name", "seq"), [("decay", 9), ("band", 9), *(slow(name, 70) for name in CHECKED)])
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
