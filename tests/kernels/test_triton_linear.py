"""The Triton kernels for linear attention: in Triton's interpreter, or on a GPU where there is one."""

import importlib.util
import itertools
import pathlib
import sys

import pytest
import torch

import ropewalk as rw
from kernels.triton_device import DEVICE
from meant import meant
from nn.linear_cases import NAMES, direct_sums, drawn, error, exact, formula, with_gradients
from ropewalk.kernels.linear import segments as linear_segments
from ropewalk.kernels.linear import triton as linear_triton
from ropewalk.kernels.linear import triton_call, triton_prepare
from ropewalk.kernels.linear.stored import triton as linear_launch
from ropewalk.kernels.types import NO_WEIGHTING, Layout, Side
from ropewalk.nn.rotary.call import Placement
from slow import slow

# Of torch, on a CPU that has no bfloat16.
pytestmark = pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")


@pytest.fixture(params=["stored features", slow("features in registers")])
def kernels(request, monkeypatch):
    """Both kinds of kernels. float32 uses those that store rotated features, unless there are weights."""
    if request.param != "stored features":
        monkeypatch.setattr(linear_triton, "stores", lambda *call: False)
    return request.param


@pytest.fixture(autouse=True)
def _short_segments(monkeypatch):
    # Few tokens then make several segments, and the last one is not full.
    if DEVICE.type == "cpu":
        monkeypatch.setattr(linear_segments, "segment_length", lambda *sizes: 64)
        monkeypatch.setattr(linear_segments, "stored_length", lambda *sizes: 64)
        # Launches of other tests have other segments.
        monkeypatch.setattr(triton_prepare, "LAUNCHES", type(triton_prepare.LAUNCHES)())
    # So that heads are rotated together, also of few tokens.
    monkeypatch.setattr(linear_launch, "_ENOUGH_PROGRAMS", 1)


def both(inputs, **options):
    """Outputs and gradients of the kernels, and of the direct sums in float64."""
    if "rope" not in options:
        options["rope"] = rw.RotaryEmbedding(inputs[0].shape[-1])
    kernel_options = options | {"rope": options["rope"] and options["rope"].to(DEVICE), "backend": "triton"}
    cotangent = torch.randn(inputs[0].shape[:3] + inputs[2].shape[-1:], generator=torch.Generator().manual_seed(3))
    on_device = [x.to(DEVICE) for x in inputs]
    ours = with_gradients(lambda *x: rw.linear_attention(*x, **kernel_options), on_device, cotangent)
    truth = with_gradients(lambda *x: exact(*x, **options), [x.double() for x in inputs], cotangent)
    return ours, truth


def assert_close(ours, truth, limit):
    for name, a, b in zip(("o", "dq", "dk", "dv"), ours, truth, strict=True):
        # One token reads itself alone, and has gradients that are 0.
        off = (a.double().cpu() - b).norm() / (b.norm() + 1)
        assert off < limit, (name, off.item())


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("seq", [1, slow(2), slow(63), slow(64), 65, slow(150)])
@pytest.mark.usefixtures("kernels")
def test_every_length(seq, causal):
    inputs = drawn(1, 2, 1, seq, 16, 16, torch.float32)
    ours, truth = both(inputs, causal=causal)
    assert_close(ours, truth, 2e-6)


@pytest.mark.slow
@pytest.mark.usefixtures("kernels")
def test_more_segments_than_are_added_up_at_once():
    assert_close(*both(drawn(1, 1, 1, 600 if DEVICE.type == "cpu" else 2500, 16, 8, torch.float32)), 2e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dim", "v_dim"), [(16, 16), (40, 24), (64, 64), (80, 16), (112, 33), (128, 64), (256, 32), (6, 3)]
)
@pytest.mark.usefixtures("kernels")
def test_every_width(dim, v_dim):
    assert_close(*both(drawn(1, 1, 1, 70, dim, v_dim, torch.float32)), 2e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.usefixtures("kernels")
def test_every_feature_map(name, causal):
    assert_close(*both(drawn(2, 2, 2, 70, 16, 16, torch.float32), feature_map=name, causal=causal), 2e-5)


@pytest.mark.parametrize(
    "spec",
    [
        rw.RopeSpec(16, pairing="half"),
        slow(rw.RopeSpec(24, rotary_dim=8, pairing="half")),
        rw.RopeSpec(24, rotary_dim=8, pairing="half", rotary_slice="trailing"),
        slow(rw.RopeSpec(24, rotary_dim=10)),
        rw.RopeSpec(24, rotary_dim=10, rotary_slice="trailing"),
        rw.RopeSpec(16, xpos=rw.XPos(512)),
        rw.RopeSpec(16, rw.AcrossHeads(num_heads=2)),
        None,
    ],
    ids=lambda spec: "none" if spec is None else f"{spec.pairing} {spec.rotary_dim} {spec.rotary_slice} {spec.xpos}",
)
@pytest.mark.usefixtures("kernels")
def test_every_rotation(spec):
    rope, dim = (None, 15) if spec is None else (rw.RotaryEmbedding(spec), spec.head_dim)
    heads = 2 if spec is not None and isinstance(spec.frequencies, rw.AcrossHeads) else 1
    assert_close(*both(drawn(1, heads, heads, 70, dim, 8, torch.float32), rope=rope), 2e-6)


@pytest.mark.slow
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.usefixtures("kernels")
def test_grouped_heads_share_sums(causal):
    assert_close(*both(drawn(1, 4, 2, 66, 16, 8, torch.float32), causal=causal), 2e-6)


@pytest.mark.parametrize(
    ("dtype", "enough"),
    [
        (torch.bfloat16, 10**6),
        (torch.bfloat16, 1),
        slow(torch.float16, 10**6),
        slow(torch.float32, 10**6),
    ],
)
def test_errors_are_at_most_twice_those_of_the_formula(dtype, enough, monkeypatch):
    # By segments, and by programs that scan, which bfloat16 has.
    monkeypatch.setattr(linear_launch, "_ENOUGH_SCANS", enough)
    seq = 130 if DEVICE.type == "cpu" else 1000
    inputs, rope = drawn(1, 2, 1, seq, 64, 64, dtype), rw.RotaryEmbedding(64)
    cotangent = drawn(1, 2, 2, seq, 64, 64, seed=7)[2]
    truth = with_gradients(lambda *x: exact(*x, rope), [x.double() for x in inputs], cotangent)
    theirs = with_gradients(lambda *x: formula(*x, rope), inputs, cotangent)
    there = rope.to(DEVICE)
    ours = with_gradients(
        lambda *x: rw.linear_attention(*x, rope=there, backend="triton"), [x.to(DEVICE) for x in inputs], cotangent
    )
    for name, a, b, c in zip(("o", "dq", "dk", "dv"), ours, theirs, truth, strict=True):
        assert a.dtype == dtype
        assert error(a, c) <= 2 * error(b, c), (name, error(a, c), error(b, c))


@pytest.mark.slow
@pytest.mark.parametrize(("pairing", "given", "reverse"), [("half", True, False), ("interleaved", False, True)])
def test_sums_are_the_same_by_segments_and_by_a_scan(pairing, given, reverse, monkeypatch):
    q, _, v = (x.to(DEVICE) for x in drawn(2, 3, 1, 700 if DEVICE.type == "cuda" else 150, 70, 66, torch.bfloat16))
    wide, rope = v.repeat_interleave(3, dim=1), rw.RotaryEmbedding(70, pairing=pairing).to(DEVICE)
    side, before = (
        Side(q, "elu", None, rope.shared_tables(q, None, Placement())),
        torch.rand(2, 70 * 67, device=DEVICE) if given else None,
    )
    totals = []
    for enough in (1, 10**6):
        monkeypatch.setattr(linear_launch, "_ENOUGH_SCANS", enough)
        layout = Layout(pairing == "interleaved", 0, -2)
        call = linear_launch._Call(side, Side(v, "elu"), v, layout, True, None, NO_WEIGHTING)
        assert (call.scan_block(call.key_plan) is None) == (enough > 1)
        rotated = call.rotated(side, call.key_plan, None)
        totals.append(call.sums(rotated, call.key_plan, wide, before, reverse=reverse))
    for name, a, b in zip(linear_launch.Totals._fields, *totals, strict=True):
        # Running sums are bfloat16.
        torch.testing.assert_close(a, b, rtol=2**-7 if name == "running" else 1e-5, atol=1e-3)


@pytest.mark.slow
@meant("cu_seqlens")
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.usefixtures("kernels")
def test_packed_sequences_are_separate_ones(causal):
    inputs = drawn(1, 2, 1, 200, 16, 8, torch.float32)
    ends = torch.tensor([0, 1, 1, 90, 154, 190])
    rope = rw.RotaryEmbedding(16)
    cotangent = torch.randn(1, 2, 200, 8, generator=torch.Generator().manual_seed(3))
    on_device = rope.to(DEVICE)
    ours = with_gradients(
        lambda *x: rw.linear_attention(*x, rope=on_device, cu_seqlens=ends.to(DEVICE), causal=causal, backend="triton"),
        [x.to(DEVICE) for x in inputs],
        cotangent,
    )

    def one_by_one(q, k, v):
        outputs = [
            exact(*(x[:, :, start:stop] for x in (q, k, v)), rope, causal=causal)
            for start, stop in itertools.pairwise(ends.tolist())
        ]
        return torch.cat([*outputs, torch.zeros(1, 2, 10, 8, dtype=torch.float64)], dim=2)

    truth = with_gradients(one_by_one, [x.double() for x in inputs], cotangent)
    assert_close(ours, truth, 2e-6)
    assert all(not x[:, :, 190:].any() for x in ours)


@pytest.mark.parametrize("which", [slow(0), 1, slow(2)])
@pytest.mark.parametrize("name", ["elu", slow("relu"), slow("squared_relu")])
@pytest.mark.usefixtures("kernels")
def test_what_is_not_finite_is_seen_in_its_sequence_and_in_no_other(name, which):
    inputs = [x.to(DEVICE) for x in drawn(1, 1, 1, 100, 16, 8, torch.float32)]
    options = {"cu_seqlens": torch.tensor([0, 30, 70, 100], device=DEVICE), "backend": "triton", "feature_map": name}
    clean = rw.linear_attention(*inputs, **options)
    inputs[which][:, :, 50] = float("nan")
    out = rw.linear_attention(*inputs, **options)
    assert torch.equal(out[:, :, :30], clean[:, :, :30])
    assert torch.equal(out[:, :, 70:], clean[:, :, 70:])
    assert out[:, :, 50].isnan().all()
    assert which == 0 or out[:, :, 69].isnan().all()


@pytest.mark.usefixtures("kernels")
def test_rows_without_a_feature_are_zero_and_small_denominators_are_divided_by():
    q, k, v = drawn(1, 1, 1, 40, 16, 8, torch.float32)
    k[:, :, :3], q[:, :, 7] = -1.0, -1.0
    ours, truth = both((q, k, v), rope=None, feature_map="relu")
    assert_close(ours, truth, 2e-6)
    assert not ours[0][:, :, :3].any()
    assert not ours[0][:, :, 7].any()
    assert all(x.isfinite().all() for x in ours)
    # On a GPU scores are TF32 where they meet values, which has no digits left for those of 1e-40.
    for size in (1e-7, 1e-9, 1e-10)[: 3 if DEVICE.type == "cpu" else 2]:
        small = [x * size for x in (q.abs(), k.abs())]
        out = rw.linear_attention(*(x.to(DEVICE) for x in (*small, v)), feature_map="squared_relu", backend="triton")
        assert error(out, exact(*small, v, feature_map="squared_relu")) < 1e-3


@pytest.mark.usefixtures("kernels")
def test_rows_of_a_batch_stand_where_they_are_told():
    q, k, v = drawn(2, 2, 1, 40, 16, 8, torch.float32)
    ids, rope = torch.stack([torch.arange(40), 3 * torch.arange(40) + 7]), rw.RotaryEmbedding(16)
    out = rw.linear_attention(
        *(x.to(DEVICE) for x in (q, k, v)), rope=rope.to(DEVICE), positions=ids.to(DEVICE), backend="triton"
    )
    for i in range(2):
        rows = slice(i, i + 1)
        assert error(out[rows], exact(q[rows], k[rows], v[rows], rope.to("cpu"), positions=ids[i])) < 2e-6


@pytest.mark.parametrize("heads", [1, slow(2)])
@pytest.mark.usefixtures("kernels")
def test_a_state_goes_in_and_comes_out_with_gradients(heads):
    rope = rw.RotaryEmbedding(16)

    def by_kernels(q, k, v, above, below):
        state = rw.LinearState(above, below, 5, rope.spec, "elu")
        out, after = rw.linear_attention(
            q, k, v, rope=rope.to(DEVICE), state=state, return_state=True, backend="triton"
        )
        return torch.cat([x.flatten() for x in (out, after.above, after.below)])

    def by_sums(q, k, v, above, below):
        results = direct_sums(q, k, v, rope, positions=torch.arange(5, 75), sums=(above, below))
        return torch.cat([x.flatten() for x in results])

    inputs = *drawn(2, heads, 1, 70, 16, 8, torch.float32), torch.rand(2, 1, 16, 8), torch.rand(2, 1, 16)
    cotangent = torch.randn(2 * heads * 70 * 8 + 2 * 16 * 9, generator=torch.Generator().manual_seed(3))
    ours = with_gradients(by_kernels, [x.to(DEVICE) for x in inputs], cotangent)
    truth = with_gradients(by_sums, [x.double() for x in inputs], cotangent)
    for a, b in zip(ours, truth, strict=True):
        assert error(a, b) < 2e-6


@pytest.mark.slow
@pytest.mark.usefixtures("kernels")
def test_strange_memory_is_read_as_it_lies():
    q, k, v = drawn(2, 2, 2, 40, 16, 8, torch.float32)
    strange = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k)]
    strange.append(torch.stack([v, v], dim=-1)[..., 0])
    rope = rw.RotaryEmbedding(16).to(DEVICE)
    plain, odd = (
        rw.linear_attention(*(x.to(DEVICE) for x in inputs), rope=rope, backend="triton")
        for inputs in ((q, k, v), strange)
    )
    assert torch.equal(plain, odd)
    kept = [x.clone() for x in strange]
    rw.linear_attention(*(x.to(DEVICE) for x in strange), rope=rope, backend="triton")
    assert all(torch.equal(a, b) for a, b in zip(kept, strange, strict=True))


def test_second_derivatives_are_the_formulas():
    q, k, v = (x.to(DEVICE).requires_grad_() for x in drawn(1, 1, 1, 9, 16, 8, torch.float32))
    sums = torch.rand(1, 1, 16, 8), torch.rand(1, 1, 16)

    def by_kernels(q, k, v, above, below):
        state = rw.LinearState(above, below, 3)
        out, after = rw.linear_attention(q, k, v, state=state, return_state=True, backend="triton")
        return out, after.above

    def by_sums(q, k, v, above, below):
        return direct_sums(q, k, v, sums=(above, below))[:2]

    def second(function, q, k, v, above, below):
        out, after = function(q, k, v, above.requires_grad_(), below.requires_grad_())
        grads = torch.autograd.grad(out.square().sum() + after.square().sum(), (q, above), create_graph=True)
        return torch.autograd.grad(sum(grad.square().sum() for grad in grads), (k, v))

    ours = second(by_kernels, q, k, v, *(x.to(DEVICE) for x in sums))
    wide = [x.detach().double().cpu() for x in (q, k, v)]
    truth = second(by_sums, *(x.requires_grad_() for x in wide), *(x.double() for x in sums))
    for a, b in zip(ours, truth, strict=True):
        assert error(a, b) < 1e-5


def test_the_op_keeps_what_it_says_to_a_compiler():
    inputs = [x.to(DEVICE).requires_grad_() for x in drawn(1, 2, 1, 70, 16, 8, torch.float32)]
    cos, sin, row = rw.RotaryEmbedding(16).to(DEVICE).shared_tables(inputs[0], None, Placement())
    scalars = row, row, "elu", "elu", True, 0, True, "triton"
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    arguments = (*inputs, cos, sin, cos, sin, None, None, *scalars, *NO_WEIGHTING)
    torch.library.opcheck(torch.ops.ropewalk.linear_attention, arguments, test_utils=checks)


class _Unlaunched:
    def __getitem__(self, grid):
        return lambda *arguments, **options: None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", ["elu", "relu", "identity"])
def test_nothing_runs_beside_the_kernels(name, dtype, monkeypatch):
    stored = "rotate_rows", "sum_segments", "run_totals", "scan_segments", "read_below", "read_values", "divide_rows"
    for kernel in (*stored, "read_features"):
        monkeypatch.setattr(linear_launch, kernel, _Unlaunched())
    for kernel in ("sum_segments", "run_totals", "read_values", "read_queries", "read_keys"):
        monkeypatch.setattr(triton_call, kernel, _Unlaunched())
    monkeypatch.setattr(triton_prepare, "LAUNCHES", type(triton_prepare.LAUNCHES)())
    inputs = [x.to(DEVICE).requires_grad_() for x in drawn(2, 4, 2, 70, 16, 16, dtype)]
    rope = rw.RotaryEmbedding(16).to(DEVICE)

    def call():
        out = rw.linear_attention(*inputs, rope=rope, feature_map=name, backend="triton")
        return torch.autograd.grad(out, inputs, cotangent)

    cotangent = inputs[0].detach()
    call()  # makes cos and sin, which are kept
    # acc_events: torch warns without it, though there is one cycle only.
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as seen:
        call()
    # Views, and memory that is asked for, which tests have filled: numbers are touched by the kernels alone.
    views = {"view", "slice", "unflatten", "as_strided", "detach", "unsqueeze"}
    memory = {"empty", "empty_like", "empty_strided", "new_empty", "fill_"}
    done = {event.name.removeprefix("aten::") for event in seen.events() or () if event.name.startswith("aten::")}
    assert "empty" in done
    assert done <= views | memory


@pytest.mark.parametrize("seqs", [(20,), slow((20, 70))])
def test_a_compiled_call_is_the_kernel(seqs, monkeypatch):
    torch.compiler.reset()
    rope = rw.RotaryEmbedding(16).to(DEVICE)

    def formula(*_, **__):
        raise AssertionError("the formula was called")

    monkeypatch.setattr(sys.modules["ropewalk.ops.linear_attention"], "linear_attention_formula", formula)

    def f(*x):
        return rw.linear_attention(*x, rope=rope, backend="triton")

    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    for seq in seqs:
        there = [x.to(DEVICE) for x in drawn(1, 2, 1, seq, 16, 8, torch.float32)]
        cotangent = torch.ones(1, 2, seq, 8)
        for a, b in zip(with_gradients(compiled, there, cotangent), with_gradients(f, there, cotangent), strict=True):
            # A compiled call makes its own cos and sin, an eager one has them kept: they may differ in a last bit.
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_what_the_kernels_cannot_do_is_said():
    inputs = [x.to(DEVICE) for x in drawn(1, 1, 1, 4, 16, 8)]
    with pytest.raises(rw.RopewalkError, match=r"a dtype that it does not support, for torch.float64 \[1, 1, 4, 16\]"):
        rw.linear_attention(*inputs, backend="triton")
    learned = rw.RotaryEmbedding(16, learned=True).to(DEVICE)
    with pytest.raises(rw.RopewalkError, match="gradients of cos and sin"):
        rw.linear_attention(*(x.float() for x in inputs), rope=learned, backend="triton")


MUTANTS = {
    "a rotated denominator": ("triton_read", "tl.sum(a * sum_a + b * sum_b", "tl.sum(u * sum_a + w * sum_b"),
    "a denominator of blocks alone": ("triton_read", "sum_a += tl.dot(seen, e", "sum_a += tl.dot(0 * seen, e"),
    "a head that is read twice": ("triton_sums", "group * HEADS_PER_PROGRAM + member", "group * HEADS_PER_PROGRAM"),
    "no mask": ("triton_read", "tl.where(seen, scores, 0.0)", "tl.where(seen, scores, scores)"),
    "a chunk too few": ("triton_read", "first = index * 0\n", "first = index * 0 + 1\n"),
    "sums that stand still": ("triton_sums", "    return total * kept + segment_sum\n", "    return segment_sum\n"),
    "a segment that is read twice": ("triton_sums", "source + 2 * step * SIZE", "source + step * SIZE"),
    "blocks that count themselves": ("triton_sums", "(block < last)", "(block <= last)"),
    "a scan that forgets": ("triton_scan", "total += part", "total = part"),
    "a scan without plain sums": ("triton_scan", "total += segment_sum", "total += 0 * segment_sum"),
    "a scan along another head": ("triton_scan", "member = head * GROUP", "member = 0 * head"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
def test_a_wrong_kernel_is_noticed(name, tmp_path, monkeypatch):
    wrong, old, new = MUTANTS[name]
    modules = {}
    for stem in ("triton_sums", "triton_read", "triton_scan"):
        text = (pathlib.Path(linear_launch.__file__).parent / f"{stem}.py").read_text(encoding="utf-8")
        assert stem != wrong or text.count(old) == 1
        path = tmp_path / f"{stem}_{abs(hash(name))}.py"
        text = text.replace(old, new) if stem == wrong else text
        path.write_text(
            text.replace("from ropewalk.kernels.linear.stored.triton_sums", f"from triton_sums_{abs(hash(name))}"),
            "utf-8",
        )
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None
        assert spec.loader is not None
        modules[stem] = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, path.stem, modules[stem])
        spec.loader.exec_module(modules[stem])
    for kernel in ("rotate_rows", "run_totals", "sum_segments"):
        monkeypatch.setattr(linear_launch, kernel, getattr(modules["triton_sums"], kernel))
    for kernel in ("read_below", "read_values"):
        monkeypatch.setattr(linear_launch, kernel, getattr(modules["triton_read"], kernel))
    monkeypatch.setattr(linear_launch, "scan_segments", modules["triton_scan"].scan_segments)
    monkeypatch.setattr(linear_launch, "_ENOUGH_SCANS", 1)
    scans = wrong == "triton_scan"
    dim, dtype, near = (64, torch.bfloat16, 0.02) if scans else (16, torch.float32, 1e-3)
    seq = 2500 if DEVICE.type == "cuda" else 200 if scans else 600
    q, k, v = (x.to(DEVICE) for x in drawn(1, 2, 2, seq, dim, dim, dtype))
    rope = rw.RotaryEmbedding(dim).to(DEVICE)
    side = [Side(x, "elu", None, rope.shared_tables(x, None, Placement())) for x in (q, k)]
    out, total, *_ = linear_launch.linear_attention(*side, v, None, Layout(True, 0, -2), causal=True)
    truth, above, _ = direct_sums(*(x.double().cpu() for x in (q, k, v)), rope)
    errors = [error(out, truth)]
    if scans:
        errors.append(error(total[:, : dim * dim], above.flatten(2).flatten(0, 1)))
    # An error of NaN, from memory that no kernel wrote, is noticed too.
    assert not all(value <= near for value in errors)
