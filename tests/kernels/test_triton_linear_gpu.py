"""Linear attention on a GPU: what needs its memory, its streams and its speed."""

import pytest
import torch

import ropewalk as rw
from nn.linear_cases import direct_sums, drawn, error, with_gradients
from ropewalk.kernels.linear.stored import triton as linear_launch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@pytest.fixture(autouse=True)
def _own_memory():
    # Matrix products of the formula are not deterministic there, and NaN in fresh memory would count as use of it.
    torch.use_deterministic_algorithms(False)
    yield
    torch.use_deterministic_algorithms(True)


def on_gpu(*shape, dtype=torch.bfloat16):
    q, k, v = (torch.randn(shape, device="cuda", dtype=torch.float32).to(dtype) for _ in range(3))
    return q, k, v


def test_a_million_tokens_in_one_call():
    q, k, v = on_gpu(1, 2, 1 << 20, 64)
    rope = rw.RotaryEmbedding(64, pairing="half").cuda()
    out, state = rw.linear_attention(q, k, v, rope=rope, return_state=True)
    half = 1 << 19
    first, middle = rw.linear_attention(*(x[:, :, :half] for x in (q, k, v)), rope=rope, return_state=True)
    second, end = rw.linear_attention(*(x[:, :, half:] for x in (q, k, v)), rope=rope, state=middle, return_state=True)
    assert error(first, out[:, :, :half].double().cpu()) < 1e-2
    assert error(second, out[:, :, half:].double().cpu()) < 2e-2
    assert error(end.above, state.above.double().cpu()) < 1e-4


def test_a_long_scan_adds_as_exactly_as_segments_do(monkeypatch):
    inputs, states = on_gpu(1, 32, 1 << 16, 128), []
    for enough in (1, 10**6):
        monkeypatch.setattr(linear_launch, "_ENOUGH_SCANS", enough)
        states.append(rw.linear_attention(*inputs, return_state=True)[1])
    assert error(states[0].above, states[1].above.double().cpu()) < 3e-6
    assert error(states[0].below, states[1].below.double().cpu()) < 3e-6


@pytest.mark.parametrize("shape", [(1, 16, 65536, 64), (4, 16, 8192, 128), (1, 4, 4096, 256)])
def test_temporaries_are_no_larger_than_the_inputs(shape):
    inputs = [x.requires_grad_() for x in on_gpu(*shape)]
    rope = rw.RotaryEmbedding(shape[-1], pairing="half").cuda()
    rope(inputs[0].detach())
    size = sum(x.numel() * x.element_size() for x in inputs)
    cotangent = torch.randn_like(inputs[2])
    for backward in (False, True):
        torch.cuda.synchronize()
        start = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        out = rw.linear_attention(*inputs, rope=rope)
        grads = torch.autograd.grad(out, inputs, cotangent) if backward else ()
        kept = sum(x.numel() * x.element_size() for x in (out, *grads))
        assert torch.cuda.max_memory_allocated() - start - kept <= size
        del out, grads


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_the_host_waits_for_nothing():
    inputs = [x.requires_grad_() for x in on_gpu(1, 2, 600, 64)]
    rope, ends = rw.RotaryEmbedding(64).cuda(), torch.tensor([0, 100, 600], device="cuda")
    for _ in range(2):
        torch.cuda.set_sync_debug_mode("error" if _ else "default")
        try:
            for options in ({}, {"cu_seqlens": ends}, {"causal": False}):
                out, state = rw.linear_attention(*inputs, rope=rope, return_state=True, **options)
                torch.autograd.grad(out.sum() + state.above.sum(), inputs)
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(("dtype", "enough"), [(dtype, 10**6) for dtype in DTYPES] + [(torch.bfloat16, 1)])
@pytest.mark.parametrize("dim", [64, 128])
def test_long_sequences_are_the_formulas(dim, dtype, enough, monkeypatch):
    # By segments, and by programs that scan, which bfloat16 has.
    monkeypatch.setattr(linear_launch, "_ENOUGH_SCANS", enough)
    q, k, v = (x.to("cuda") for x in drawn(1, 2, 1, 5000, dim, dim, dtype))
    rope = rw.RotaryEmbedding(dim).cuda()
    inputs = [x.requires_grad_() for x in (q, k, v)]
    out = rw.linear_attention(*inputs, rope=rope)
    cotangent = torch.randn_like(out)
    ours = [out, *torch.autograd.grad(out, inputs, cotangent)]
    wide = [x.detach().double() for x in inputs]
    truth = with_gradients(lambda *x: direct_sums(*x, rope)[0], wide, cotangent)
    limit = {torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float32: 2e-5}[dtype]
    for name, a, b in zip(("o", "dq", "dk", "dv"), ours, truth, strict=True):
        assert error(a, b.detach().cpu()) < limit, name


def test_a_graph_is_captured_and_replayed():
    q, k, v = on_gpu(1, 2, 600, 64)
    rope = rw.RotaryEmbedding(64).cuda()
    ids = torch.arange(600, device="cuda")
    expected = rw.linear_attention(q, k, v, rope=rope, positions=ids)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = rw.linear_attention(q, k, v, rope=rope, positions=ids)
    out.fill_(float("nan"))
    graph.replay()
    assert torch.equal(out, expected)


def test_steps_are_the_prompt():
    q, k, v = on_gpu(2, 4, 300, 64)
    rope, state, steps = rw.RotaryEmbedding(64).cuda(), None, []
    with torch.inference_mode():
        for token in zip(*(x.split(1, dim=2) for x in (q, k, v)), strict=True):
            out, state = rw.linear_attention(*token, rope=rope, state=state, return_state=True)
            steps.append(out)
        whole = rw.linear_attention(q, k, v, rope=rope)
    assert error(torch.cat(steps, dim=2), whole.double().cpu()) < 1e-2
