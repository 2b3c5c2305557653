"""What only a GPU shows of the Triton kernels: large tensors, graphs, streams, compilers, and what calls allocate."""

import contextlib

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from ropewalk import RopewalkError, RotaryEmbedding, qk_norm_rope
from ropewalk.kernels.backend import Backend, Operation, register
from ropewalk.kernels.triton_launch import Launch
from ropewalk.reference import assert_within_budget, rotate
from ropewalk.reference.qk_norm import qk_norm_rotate
from strategies import theta

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

PAIRINGS = ["half", "interleaved"]


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    yield
    torch.cuda.empty_cache()


@pytest.fixture
def _unfilled():
    """Without the NaN that tests put into fresh memory: the large tensors here would be written twice."""
    torch.use_deterministic_algorithms(False)
    yield
    torch.use_deterministic_algorithms(True)


def check(y, x, positions, pairing, tokens):
    """Compare some tokens of y [batch, heads, seq, dim] with the reference."""
    chosen, ids = x[:, :, tokens].cpu(), positions[..., tokens].cpu()
    expected = rotate(chosen.double(), ids, theta(x.shape[-1]), pairing=pairing)
    assert_within_budget(y[:, :, tokens].cpu(), expected, rotary_dim=x.shape[-1], pairing=pairing)


@pytest.mark.usefixtures("_unfilled")
@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize("memory", ["transposed", "contiguous"])
def test_more_than_2_to_the_31_elements_and_600_000_tokens(memory, pairing):
    shape = (1, 600_000, 32, 128) if memory == "transposed" else (1, 32, 600_000, 128)
    q = torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_()
    q = q.transpose(1, 2) if memory == "transposed" else q
    assert q.numel() > 1 << 31
    k = torch.randn(1, 600_000, 1, 128, dtype=torch.bfloat16, device="cuda").transpose(1, 2)
    rope = RotaryEmbedding(128, pairing=pairing).to("cuda")
    ids = torch.arange(600_000, device="cuda")
    y, z = rope(q, k)
    last = [0, 1, 63, 64, 299_999, 524_287, 524_288, 599_998, 599_999]
    check(y, q, ids, pairing, last)
    check(z, k, ids, pairing, last)
    (back,) = torch.autograd.grad(rope(q.requires_grad_()), q, y)
    torch.testing.assert_close(back[:, :, last].float(), q.detach()[:, :, last].float(), rtol=0.02, atol=0.02)


@pytest.mark.usefixtures("_unfilled")
@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize("dim", [0, 1, 2, 3])
def test_strides_past_2_to_the_31(dim, pairing):
    shape, strides = (2, 3, 4, 64), [3 * 4 * 64, 4 * 64, 64, 1]
    strides[dim] = (1 << 31) // (shape[dim] - 1) + 64
    reach = 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
    memory = torch.empty(reach, dtype=torch.bfloat16, device="cuda")
    x = memory.as_strided(shape, strides).normal_()
    rope, ids = RotaryEmbedding(64, pairing=pairing).to("cuda"), torch.arange(4, device="cuda") + 7
    check(rope(x, positions=ids), x, ids, pairing, range(4))
    weight = torch.rand(64, device="cuda")
    normed, _ = qk_norm_rope(x, x, rope, q_weight=weight, k_weight=weight, positions=ids)
    expected = qk_norm_rotate(x.cpu().double(), weight.cpu().double(), ids.cpu(), theta(64), pairing=pairing)
    assert_within_budget(normed.cpu(), expected, rotary_dim=64, pairing=pairing, copied=False)
    before = x.clone()
    rope.rotate_(x, positions=ids)
    check(x, before, ids, pairing, range(4))


@pytest.mark.parametrize("pairing", PAIRINGS)
def test_a_batch_of_70_000(pairing):
    q = torch.randn(70_000, 4, 1, 64, dtype=torch.bfloat16, device="cuda")
    ids = torch.randint(0, 1 << 20, (70_000, 1), device="cuda")
    rope = RotaryEmbedding(64, pairing=pairing).to("cuda")
    y, _ = rope(q, q[:, :2], positions=ids)
    check(y, q, ids, pairing, range(1))


def test_two_thousand_packed_sequences_in_one_launch(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 40, (2000,), generator=generator)
    ends = torch.cat((torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)))
    total = int(ends[-1])
    q, k = (torch.randn(1, heads, total, 64, dtype=torch.bfloat16, device="cuda") for heads in (4, 2))
    rope = RotaryEmbedding(64, pairing="half").to("cuda")
    angles = rope.at(torch.cat([torch.arange(int(n)) for n in lengths]).cuda())
    launches = []
    launch = Launch.__call__

    def counted(self, *given, **options):
        launches.append(self)
        launch(self, *given, **options)

    monkeypatch.setattr(Launch, "__call__", counted)
    shared = rope(q, k, angles=angles)
    assert len(launches) == 1
    packed = rope(q, k, cu_seqlens=ends.cuda())
    ids = torch.cat([torch.arange(int(n)) for n in lengths])
    for x, y, z in zip((q, k), packed, shared, strict=True):
        assert torch.equal(y, z)
        check(y, x, ids, "half", range(total))


def test_a_graph_of_forward_and_backward():
    rope = RotaryEmbedding(64, pairing="half").to("cuda")
    q = torch.randn(2, 4, 16, 64, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    k = torch.randn(2, 2, 16, 64, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    weight = torch.ones(64, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    ids = torch.arange(16, device="cuda")

    leaves = [q, k, weight]

    def step(q, k, weight):
        rotated = rope(*qk_norm_rope(q, k, rope, q_weight=weight, k_weight=weight, positions=ids), offset=3)
        return [*rotated, *torch.autograd.grad(rotated, [q, k, weight], [y.detach() for y in rotated])]

    def fresh():
        # Leaves of its own for every stream: autograd warns of one that was used on another.
        return [x.detach().clone().requires_grad_() for x in leaves]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step(*fresh())
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(*leaves)
    with torch.no_grad():
        q.copy_(torch.randn_like(q))
        ids.add_(5000)
    for _ in range(2):
        graph.replay()
        for mine, wanted in zip(captured, step(*fresh()), strict=True):
            assert torch.equal(mine, wanted)


@pytest.mark.parametrize("pairing", PAIRINGS)
def test_compiled_in_one_graph(pairing):
    rope = RotaryEmbedding(64, pairing=pairing).to("cuda")
    q = torch.randn(2, 4, 16, 64, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    k = torch.randn(2, 2, 16, 64, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    weight = torch.rand(64, device="cuda", requires_grad=True)

    def both(q, k, weight):
        return *rope(q, k, offset=3), *qk_norm_rope(q, k, rope, q_weight=weight, k_weight=weight)

    compiled = torch.compile(both, fullgraph=True)
    results = [function(q, k, weight) for function in (both, compiled)]
    cotangents = [torch.randn_like(y) for y in results[0]]
    grads = [torch.autograd.grad(rotated, [q, k, weight], cotangents) for rotated in results]
    for mine, wanted in zip((*results[1], *grads[1]), (*results[0], *grads[0]), strict=True):
        torch.testing.assert_close(mine, wanted, rtol=0.02, atol=0.02)
    tokens = rope(torch.randn(2, 4, 1, 64, device="cuda"), offset=9)
    assert tokens.isfinite().all()


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(reentrant):
    rope = RotaryEmbedding(64).to("cuda")
    q, k = (torch.randn(2, 4, 16, 64, device="cuda", requires_grad=True) for _ in range(2))
    wanted = torch.autograd.grad(sum(y.square().sum() * 3 for y in rope(q, k)), [q, k])
    rotated = checkpoint(rope, q, k, use_reentrant=reentrant)
    assert rotated is not None
    torch.autograd.backward([y.square().sum() * 3 for y in rotated])
    assert torch.equal(q.grad, wanted[0])
    assert torch.equal(k.grad, wanted[1])


def test_streams_have_ranges_of_their_own():
    rope = RotaryEmbedding(64).to("cuda")
    x = torch.randn(1, 4, 3000, 64, device="cuda")
    wanted = RotaryEmbedding(64).to("cuda")(x)
    streams = [torch.cuda.Stream() for _ in range(3)]
    found = []
    torch.cuda.synchronize()
    for stream in streams * 3:
        with torch.cuda.stream(stream):
            # Work that keeps the stream busy, so that what it computes comes late.
            torch.linalg.matmul(*torch.randn(2, 4096, 4096, device="cuda"))
            found.append(rope(x))
    torch.cuda.synchronize()
    assert all(torch.equal(y, wanted) for y in found)
    assert len({block.key[2] for block in rope._source.ranges._blocks}) > 1


@contextlib.contextmanager
def elsewhere():
    """A backend that supports nothing on a CUDA device: the C kernel may not be built here."""
    undo = register(Backend("elsewhere", {"rotate": Operation(run=print, supports=lambda *call: "a CUDA device")}))
    try:
        yield
    finally:
        undo()


def test_a_prompt_after_a_far_decode():
    rope = RotaryEmbedding(64).to("cuda")
    x = torch.randn(1, 4, 16, 64, device="cuda")
    wanted = rope(x)
    rope(x[:, :, :1], offset=100_000)
    assert torch.equal(rope(x), wanted)
    assert torch.equal(rope(x, offset=-5), RotaryEmbedding(64).to("cuda")(x, offset=-5))
    with elsewhere():
        forced = RotaryEmbedding(64, backend="elsewhere").to("cuda")
        for _ in range(2):
            with pytest.raises(RopewalkError, match="a call that it supports\ngot:      a CUDA device"):
                forced(x, offset=-5)


def test_prefill_is_decode_bit_for_bit():
    for pairing in PAIRINGS:
        rope = RotaryEmbedding(96, pairing=pairing).to("cuda")
        q, k = (torch.randn(2, heads, 40, 96, dtype=torch.bfloat16, device="cuda") for heads in (6, 2))
        whole = rope(q, k)
        heads_last = RotaryEmbedding(96, pairing=pairing, seq_dim=-3).to("cuda")(q.transpose(1, 2), k.transpose(1, 2))
        for m in range(40):
            one = rope(q[:, :, m : m + 1], k[:, :, m : m + 1], offset=m)
            assert all(torch.equal(y[:, :, m : m + 1], z) for y, z in zip(whole, one, strict=True))
        assert all(torch.equal(y.transpose(1, 2), z) for y, z in zip(whole, heads_last, strict=True))


@pytest.mark.usefixtures("_unfilled")
def test_calls_allocate_their_results_and_no_more():
    rope = RotaryEmbedding(128, pairing="half").to("cuda")
    q, k = (torch.randn(2, 1024, h, 128, dtype=torch.bfloat16, device="cuda").transpose(1, 2) for h in (8, 2))
    size = (q.numel() + k.numel()) * 2
    angles = rope.at(torch.arange(1024, device="cuda"))
    leaves = [x.detach().requires_grad_() for x in (q, k)]
    weight = torch.ones(128, dtype=torch.bfloat16, device="cuda")
    calls = {
        "forward": (lambda: rope(q, k, angles=angles), 1.0),
        "in place": (lambda: rope.rotate_(q, k, angles=angles), 0.0),
        "forward and backward": (lambda: torch.autograd.grad(rope(*leaves, angles=angles), leaves, [q, k]), 2.0),
        "norm": (lambda: qk_norm_rope(q, k, rope, q_weight=weight, k_weight=weight, angles=angles), 1.0),
    }
    for name, (call, most) in calls.items():
        call()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        kept = call()
        assert torch.cuda.max_memory_allocated() - before <= most * size + (64 << 10), name
        del kept


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning")
def test_nothing_waits_for_the_device():
    rope = RotaryEmbedding(64, pairing="half").to("cuda")
    q, k = (torch.randn(2, heads, 16, 64, device="cuda", requires_grad=True) for heads in (4, 2))
    weight, ids = torch.ones(64, device="cuda", requires_grad=True), torch.arange(16, device="cuda")
    learned = RotaryEmbedding(64, learned=True).to("cuda")

    def everything():
        rotated = [
            *rope(q, k, positions=ids),
            *qk_norm_rope(q, k, rope, q_weight=weight, k_weight=weight),
            *learned(q, k, offset=2),
        ]
        with torch.no_grad():
            rope.rotate_(q.clone(), k.clone(), offset=7)
        torch.autograd.grad(rotated, [q, k, weight, learned.log_scale], rotated)

    everything()
    torch.cuda.set_sync_debug_mode("error")
    try:
        everything()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_what_lies_elsewhere_is_named():
    rope = RotaryEmbedding(64).to("cuda")
    q = torch.randn(1, 2, 4, 64, device="cuda")
    with pytest.raises(RopewalkError, match="positions on cuda"):
        rope(q, positions=torch.arange(4))
    with pytest.raises(RopewalkError, match="on one device"):
        rope(q, q.cpu())
    with pytest.raises(RopewalkError, match="on the device of the input"):
        rope(q, angles=RotaryEmbedding(64).at(torch.arange(4)))
    with pytest.raises(RopewalkError, match="on the device of q"):
        qk_norm_rope(q, q, rope, q_weight=torch.ones(64), k_weight=torch.ones(64))
    with elsewhere(), pytest.raises(RopewalkError, match="a call that it supports"):
        RotaryEmbedding(64, backend="elsewhere").to("cuda")(q)


def test_ids_on_the_device_are_looked_at_where_that_is_asked_for():
    q = torch.randn(1, 2, 4, 64, device="cuda")
    past, bad = torch.tensor([0, 1, 2, 100], device="cuda"), torch.tensor([0, 1, 2, torch.nan], device="cuda")
    ends = torch.tensor([0, 3, 2], device="cuda")
    trusting = RotaryEmbedding(64, context_length=50).to("cuda")
    looking = RotaryEmbedding(64, context_length=50, check_ids=True).to("cuda")
    trusting(q, positions=past)
    trusting(q, cu_seqlens=ends)
    with pytest.raises(RopewalkError, match="position 100"):
        looking(q, positions=past)
    with pytest.raises(RopewalkError, match="NaN or infinity"):
        looking(q, positions=bad)
    with pytest.raises(RopewalkError, match="cumulated lengths that start at 0"):
        looking(q, cu_seqlens=ends)
    assert "check_ids=True" in repr(looking)
