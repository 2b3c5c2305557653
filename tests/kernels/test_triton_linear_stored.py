"""The Triton kernels that store features, with a decay per head and without a denominator: values and gradients."""

import contextlib
import pathlib

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import ropewalk as rw
from kernels.test_triton_linear_launches import loaded
from kernels.triton_device import DEVICE
from kernels.weighted_kernels import check, check_states, inputs_of, kernels_only, ours, short_segments
from meant import meant
from nn.linear_cases import NAMES, drawn, error, with_gradients
from nn.weighted_cases import rule_of
from ropewalk.kernels.linear import segments as linear_segments
from ropewalk.kernels.linear import triton as linear_triton
from ropewalk.kernels.linear.stored import tiles
from ropewalk.kernels.linear.stored import triton as stored
from ropewalk.kernels.types import Layout, Side, Tables, Weighting
from ropewalk.nn.rotary.call import Placement
from slow import slow

__all__ = ["kernels_only", "short_segments"]

# Of torch, on a CPU that has no bfloat16.
pytestmark = pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")

# What decays, query and key heads, tokens, and how running sums are computed.
CASES = [
    ("per key head", 2, 1, 70, "one program per segment"),
    ("per query head", 2, 1, 70, "one program per segment"),
    slow("alibi", 2, 2, 70, "one program per segment"),
    slow("per key head", 4, 2, 100, "one program per segment"),
    slow("per key head", 2, 1, 150, "one program per sequence"),
    slow("per query head", 4, 2, 100, "one program per sequence"),
]


@pytest.fixture
def all_stored(monkeypatch):
    """Makes heads of all widths in float32, whose results have digits to compare, use these kernels too."""
    real = linear_triton.stores

    def wide(q, v, weighting, causal):
        bf16 = torch.bfloat16
        return real(q.new_empty(1, 1, 1, 72, dtype=bf16), v.new_empty(1, 1, 1, 72, dtype=bf16), weighting, causal)

    monkeypatch.setattr(linear_triton, "stores", wide)
    # Few tokens then make several segments, and the last one is not full.
    if DEVICE.type == "cpu":
        monkeypatch.setattr(linear_segments, "stored_length", lambda *sizes: 64)


@pytest.fixture
def scans(scan, monkeypatch):
    """One of two ways to compute running sums."""
    if scan == "one program per sequence":
        real, block = stored.tile_of, tiles.Block(16, 16, 0, 32, 2, 1)
        monkeypatch.setattr(stored, "tile_of", lambda *sizes, **options: real(*sizes, **options)._replace(scan=block))
        monkeypatch.setattr(stored, "_ENOUGH_SCANS", 1)


@pytest.mark.usefixtures("all_stored", "kernels_only", "scans")
@pytest.mark.parametrize(("kind", "heads", "kv_heads", "seq", "scan"), CASES)
def test_decays_per_head(kind, heads, kv_heads, seq):
    check(kind, heads, kv_heads, seq, batch=heads // 2)


@pytest.mark.usefixtures("all_stored", "kernels_only", "scans")
@pytest.mark.parametrize(
    ("kind", "causal", "scan"),
    [
        ("per key head", True, "one program per segment"),
        ("plain", True, "one program per segment"),
        slow("plain", False, "one program per segment"),
        slow("per query head", True, "one program per sequence"),
    ],
)
@meant("scale")
def test_without_a_denominator(kind, causal):
    check(kind, 2, 1, 70, causal=causal, normalize=False, scale=0.3)


@pytest.mark.usefixtures("all_stored", "kernels_only")
@pytest.mark.parametrize(
    ("kind", "normalize"), [("per key head", True), slow("per query head", True), slow("plain", False)]
)
@meant("cu_seqlens")
def test_packed_sequences(kind, normalize):
    ends = torch.tensor([0, 1, 1, 68, 72])
    results = check(kind, 2, 1, 75, cu_seqlens=ends, normalize=normalize)
    assert all(not x[:, :, 72:].any() for x in results[:4])


@pytest.mark.usefixtures("all_stored")
@pytest.mark.parametrize(("kind", "normalize"), [("per key head", True), slow("per query head", False)])
def test_states_go_in_and_come_out_with_gradients(kind, normalize):
    check_states(kind, normalize)


@pytest.mark.slow
@pytest.mark.usefixtures("all_stored", "scans")
@pytest.mark.parametrize("scan", ["one program per sequence"])
def test_a_state_after_one_program_per_sequence():
    check_states("per key head", normalize=True)


# Width and values of heads: more lanes than one tile of a program has, padding, and fewer or more values than features.
@pytest.mark.usefixtures("all_stored", "kernels_only")
@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        ("per key head", (65, 65)),
        slow("per key head", (127, 33)),
        slow("per query head", (80, 24)),
        slow("per query head", (96, 128)),
    ],
)
def test_wide_heads(kind, sizes):
    check(kind, 2, 1, 70, sizes=sizes, rotated=sizes[0] % 2 == 0)


@pytest.mark.slow
@pytest.mark.usefixtures("all_stored", "kernels_only")
@pytest.mark.parametrize(("name", "normalize"), [*((name, True) for name in NAMES[1:]), ("exp", False)])
def test_every_feature_map(name, normalize):
    check("per query head", 2, 1, 70, feature_map=name, normalize=normalize)


@pytest.mark.usefixtures("all_stored")
@pytest.mark.parametrize("normalize", [True, slow(False)])
def test_tokens_without_features_decay(normalize):
    (q, k, v, g), rule = inputs_of("per key head", 2, 1, 70)
    k[:, :, 3:9], k[:, :, 40:] = -torch.inf, -torch.inf
    cotangent = torch.randn(1, 2, 70, 5, generator=torch.Generator().manual_seed(3))

    def run(backend, tensor):
        return lambda *x: ours(*x, rule, tensor=tensor, backend=backend, feature_map="relu", normalize=normalize)

    results = with_gradients(run("triton", g.to(DEVICE)), [x.to(DEVICE) for x in (q, k, v)], cotangent)
    truth = with_gradients(run("torch", g.double()), [x.double() for x in (q, k, v)], cotangent)
    for a, b in zip(results, truth, strict=True):
        assert error(a, b) < 2e-5


@pytest.mark.usefixtures("all_stored")
def test_each_sequence_has_its_own_decay():
    # One number per token is one per head if there is one token, which reads the state.
    q, k, v = drawn(2, 4, 2, 1, 8, 5, torch.float32)
    state, decay = (torch.rand(2, 4, 8, 5), torch.rand(2, 4, 8)), -torch.rand(2, 4, 1)

    def run(backend, device, dtype):
        x, sums = ([y.to(device, dtype) for y in z] for z in ((q, k, v), state))
        before = rw.LinearState(*sums, 7, None, "elu", weighting="decay")
        options = {"decay": decay.to(device, dtype), "state": before, "backend": backend}
        out, after = rw.linear_attention(*x, return_state=True, **options)
        return out, after.above, after.below

    with torch.no_grad():
        results, truth = run("triton", DEVICE, torch.float32), run("torch", "cpu", torch.float64)
    for a, b in zip(results, truth, strict=True):
        assert error(a, b) < 2e-5


@pytest.mark.usefixtures("all_stored", "kernels_only")
def test_without_rotation():
    check("per query head", 2, 1, 70, rotated=False)


def test_tables_per_head_and_decays_per_query_head(monkeypatch):
    # Two query heads read each key head, whose frequencies are its own.
    if DEVICE.type == "cpu":
        monkeypatch.setattr(linear_segments, "stored_length", lambda *sizes: 64)
    q, k, v = (x.to(DEVICE) for x in drawn(1, 4, 2, 40, 16, 8, torch.float32))
    random = torch.Generator().manual_seed(1)
    cos, sin, of_out = (torch.randn(1, n, 40, 8, generator=random).to(DEVICE) for n in (2, 2, 4))
    decay = -torch.rand(4, generator=random)[None, :, None].to(DEVICE)
    of_queries = Tables(cos.repeat_interleave(2, 1), sin.repeat_interleave(2, 1))
    sides = Side(q, "elu", None, of_queries), Side(k, "elu", None, Tables(cos, sin))
    options = Layout(True, 0, -2), True, None, Weighting(decay=decay)

    def run(store):
        monkeypatch.setattr(linear_triton, "stores", lambda *call: store)
        results = linear_triton.linear_attention(*sides, v, None, *options)
        of_total = torch.ones_like(results[1])
        gradients = linear_triton.linear_attention_backward(of_out, of_total, *sides, v, results, *options)
        return [*results[:2], *gradients[:4]]

    for a, b in zip(run(True), run(False), strict=True):
        assert error(a, b.double().cpu()) < 2e-5


@pytest.mark.usefixtures("all_stored", "scans")
@pytest.mark.parametrize(
    ("strength", "normalize", "scan"),
    [
        (-50.0, True, "one program per segment"),
        (-50.0, False, "one program per segment"),
        slow(-torch.inf, True, "one program per sequence"),
        slow(-torch.inf, False, "one program per segment"),
    ],
)
def test_weights_that_underflow_are_zero_and_not_nan(strength, normalize):
    (q, k, v, _), rule = inputs_of("per key head", 2, 1, 70)
    k[:, :, 1:] = -1.0  # no features, except those of the first key
    q, k, v = (x.to(DEVICE).requires_grad_() for x in (q, k, v))
    decay = torch.full((1,), strength, device=DEVICE)
    out = ours(q, k, v, rule, tensor=decay, normalize=normalize, feature_map="relu")
    gradients = torch.autograd.grad(out.sum(), (q, k, v))
    assert all(x.isfinite().all() for x in (out, *gradients))
    assert out[:, :, 0].all()
    assert not out[:, :, 20:].any()
    assert not gradients[0][:, :, 20:].any()


@pytest.mark.usefixtures("all_stored")
@pytest.mark.parametrize("strength", [-50.0, -torch.inf])
def test_a_strong_decay_leaves_each_token_its_own_value(strength):
    q, k, v = (x.to(DEVICE) for x in drawn(1, 2, 1, 130, 8, 3, torch.float32))
    out = rw.linear_attention(q, k, v, decay=torch.full((1,), strength, device=DEVICE), backend="triton")
    torch.testing.assert_close(out, v.expand(-1, 2, -1, -1), rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("all_stored")
def test_nan_in_a_decay_is_not_hidden():
    q, k, v = (x.to(DEVICE) for x in drawn(1, 1, 1, 70, 8, 5, torch.float32))
    decay = torch.full((1, 1, 1), torch.nan, device=DEVICE)
    sides = Side(q, "elu"), Side(k, "elu")
    out, *_ = linear_triton.linear_attention(
        *sides, v, None, Layout(True, 0, -2), causal=True, weighting=Weighting(decay=decay)
    )
    assert out.isnan().all()


@pytest.mark.usefixtures("all_stored")
@pytest.mark.parametrize("kind", ["per key head", slow("per query head")])
def test_second_derivatives_are_the_formulas(kind):
    inputs, rule = inputs_of(kind, 2, 1, 9)

    def second(backend, dtype, device):
        tensors = [x.to(device, dtype).requires_grad_() for x in inputs]
        out = ours(*tensors[:3], rule, rw.RotaryEmbedding(8), tensor=tensors[3], backend=backend)
        gradients = torch.autograd.grad(out.square().sum(), tensors, create_graph=True)
        return torch.autograd.grad(sum(x.square().sum() for x in gradients), tensors)

    truth = second("torch", torch.float64, "cpu")
    for a, b in zip(second("triton", torch.float32, DEVICE), truth, strict=True):
        assert error(a, b) < 2e-5


@pytest.mark.usefixtures("all_stored")
@pytest.mark.parametrize(("kind", "normalize"), [("per key head", True), slow("per query head", False)])
def test_a_compiled_call_is_the_kernel(kind, normalize):
    torch.compiler.reset()
    inputs, _ = inputs_of(kind, 2, 1, 30)
    rope = rw.RotaryEmbedding(8).to(DEVICE)

    def f(q, k, v, decay):
        return rw.linear_attention(q, k, v, rope=rope, decay=decay, normalize=normalize, backend="triton")

    cotangent, on_device = torch.ones(1, 2, 30, 5), [x.to(DEVICE) for x in inputs]
    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    for a, b in zip(
        with_gradients(compiled, on_device, cotangent), with_gradients(f, on_device, cotangent), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("all_stored")
@pytest.mark.parametrize(("kind", "normalize"), [("per key head", True), ("per query head", False)])
def test_the_ops_keep_what_they_declare_to_a_compiler(kind, normalize):
    (q, k, v, decay), _ = inputs_of(kind, 2, 1, 9)
    q, k, v = (x.to(DEVICE).requires_grad_() for x in (q, k, v))
    decay = decay.to(DEVICE)[None, :, None].requires_grad_()
    cos, sin, row = rw.RotaryEmbedding(8).to(DEVICE).shared_tables(q, None, Placement())
    before = torch.rand(decay.shape[1], 8 * 6, device=DEVICE, requires_grad=True)
    options = row, row, "elu", "elu", True, 0, True, "triton", decay, None, None, normalize, 0.5
    arguments = q, k, v, cos, sin, cos, sin, before, None, *options
    checks = "test_schema", "test_autograd_registration", "test_faketensor"
    torch.library.opcheck(torch.ops.ropewalk.linear_attention, arguments, test_utils=checks)
    arguments = [x.detach() if isinstance(x, torch.Tensor) else x for x in arguments]
    results = torch.ops.ropewalk.linear_attention(*arguments)
    given = torch.ones_like(results[0]), torch.ones_like(results[1]), *arguments[:9], results, *arguments[9:], False
    op = torch.ops.ropewalk.linear_attention_backward
    torch.library.opcheck(op, given, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize(
    ("kind", "options", "width", "expected"),
    [
        ("per key head", {}, 72, True),
        slow("per query head", {"normalize": False}, 72, True),
        slow("plain", {"normalize": False}, 72, True),
        ("per key head", {}, 16, False),
        slow("per token", {}, 72, False),
        slow("alibi", {"causal": False}, 72, False),
        # Hidden keys after the last visible one do not decay.
        slow("per key head", {"key_mask": torch.arange(20)[None] < 15}, 72, False),
    ],
)
def test_which_calls_in_bfloat16_use_these_kernels(kind, options, width, expected, monkeypatch):
    calls, real = [], stored.linear_attention
    monkeypatch.setattr(stored, "linear_attention", lambda *call: calls.append(call) or real(*call))
    (q, k, v, *_), rule = inputs_of(kind, 2, 1, 20, dim=width, v_dim=16)
    inputs = [x.to(torch.bfloat16) for x in (q, k, v)]
    causal = options.get("causal", True)
    others = {name: x for name, x in options.items() if name != "causal"}

    def run(backend, device, dtype):
        moved = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in others.items()}
        tensor = None if rule.tensor is None else rule.tensor.to(device)
        x = (x.to(device, dtype) for x in inputs)
        return ours(*x, rule, tensor=tensor, causal=causal, backend=backend, **moved)

    out = run("triton", DEVICE, torch.bfloat16)
    assert len(calls) == int(expected)
    assert error(out, run("torch", "cpu", torch.float64)) < 0.012


@pytest.mark.usefixtures("all_stored")
def test_saved_tensors_with_other_strides():
    (q, k, v, g), rule = inputs_of("per key head", 2, 1, 70)
    leaves = [x.to(DEVICE).requires_grad_() for x in (q, k, v)]

    def gradients():
        return torch.autograd.grad(ours(*leaves, rule, tensor=g.to(DEVICE)).square().sum(), leaves)

    def unpack(x):
        first, last = (1, 2) if x.dim() == 4 else (x.dim() - 2, x.dim() - 1)
        return x if x.dim() < 2 else x.transpose(first, last).contiguous().transpose(first, last)

    truth = gradients()
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, unpack):
        results = gradients()
    for a, b in zip(results, truth, strict=True):
        torch.testing.assert_close(a, b)


def test_kernels_run_on_the_device_of_their_tensors(monkeypatch):
    # Tensors without numbers, on a device that is not the current one: Triton would launch on that one.
    devices = [0]

    @contextlib.contextmanager
    def entered(device):
        devices.append(device.index)
        yield
        devices.pop()

    def launched(*call):
        assert devices[-1] == 1
        raise LaunchedError

    monkeypatch.setattr(linear_triton, "current_device", lambda: devices[-1])
    monkeypatch.setattr(torch.cuda, "device", entered)
    monkeypatch.setattr(stored, "linear_attention", launched)
    monkeypatch.setattr(stored, "linear_attention_backward", launched)
    with FakeTensorMode():
        x = torch.empty(1, 1, 2, 72, dtype=torch.bfloat16, device="cuda:1")
    side, layout, weighting = Side(x, "elu"), Layout(True, 0, -2), Weighting(normalize=False)
    with pytest.raises(LaunchedError):
        linear_triton.linear_attention(side, side, x, None, layout, causal=True, weighting=weighting)
    with pytest.raises(LaunchedError):
        linear_triton.linear_attention_backward(x, None, side, side, x, [x], layout, causal=True, weighting=weighting)


class LaunchedError(Exception):
    """Kernels were launched on the right device."""


# The tiles of wide heads in bfloat16: blocks of rows that visit several chunks, and several blocks of sums.
@pytest.mark.parametrize("kind", ["per key head", slow("per query head")])
def test_tiles_of_wide_heads_in_bfloat16(kind, monkeypatch):
    if DEVICE.type == "cpu":
        monkeypatch.setattr(linear_segments, "stored_length", lambda *sizes: 128)
    (q, k, v, decay), rule = inputs_of(kind, 2, 1, 200, dim=66, v_dim=65)
    inputs = [x.to(torch.bfloat16) for x in (q, k, v)]
    cotangent = torch.randn(1, 2, 200, 65, generator=torch.Generator().manual_seed(3)).to(torch.bfloat16)

    def run(backend, tensor):
        return lambda *x: ours(*x, rule, tensor=tensor, backend=backend)

    results = with_gradients(run("triton", decay.to(DEVICE)), [x.to(DEVICE) for x in inputs], cotangent)
    truth = with_gradients(run("torch", decay), [x.double() for x in inputs], cotangent.double())
    for a, b in zip(results, truth, strict=True):
        assert error(a, b) < 0.02


# What is changed in one of the files, which must then give wrong results.
MUTANTS = {
    "rows that decay once too often": ("triton_sums", "inside, outside = row + 1,", "inside, outside = row + 2,"),
    "a segment that does not decay": ("triton_sums", "g * size)", "0 * g * size)"),
    "values that decay once too often": ("triton_sums", "size - 1 - index, 0)", "size - index, 0)"),
    "blocks that do not decay": ("triton_sums", "size - (block + 1) * LOW", "0 * block"),
    "pairs that do not decay": ("triton_read", "scores = scores * distance_weights", "scores + 0 * distance_weights"),
    "a denominator that does not decay": ("triton_read", "low_a * outside, low_b * outside", "low_a, low_b"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
def test_a_wrong_kernel_is_noticed(name, tmp_path, monkeypatch):
    wrong, old, new = MUTANTS[name]
    folder, number = pathlib.Path(stored.__file__).parent, list(MUTANTS).index(name)
    monkeypatch.setattr(linear_segments, "stored_length", lambda *sizes: 64)
    for stem, kernels in (
        ("triton_sums", ("rotate_rows", "run_totals", "sum_segments")),
        ("triton_read", ("read_below", "read_values")),
    ):
        text = (folder / f"{stem}.py").read_text(encoding="utf-8")
        if stem == wrong:
            assert text.count(old) == 1
            text = text.replace(old, new)
        text = text.replace("ropewalk.kernels.linear.stored.triton_sums", f"triton_sums_decay_{number}")
        module = loaded(tmp_path / f"{stem}_decay_{number}.py", text, monkeypatch)
        for kernel in kernels:
            monkeypatch.setattr(stored, kernel, getattr(module, kernel))
    q, k, v = (x.to(DEVICE) for x in drawn(1, 1, 1, 150, 8, 5, torch.float32))
    rule = rule_of("per key head", 1, 1, 1, 150)
    decay = rule.options(1)["decay"].float().to(DEVICE)
    out, *_ = stored.linear_attention(
        Side(q, "elu"), Side(k, "elu"), v, None, Layout(True, 0, -2), True, None, Weighting(decay[None, :, None])
    )
    truth = rw.linear_attention(*(x.double().cpu() for x in (q, k, v)), decay=decay.double().cpu())
    assert not error(out, truth) <= 1e-3
