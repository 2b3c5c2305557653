"""The module on a CUDA device: parity, no waiting for the device, and CUDA graphs."""

import pytest
import torch

from nn.module import by_module, module_for
from ropewalk import RotaryEmbedding
from ropewalk.reference import assert_within_budget, check_rotation, rotate
from strategies import theta, vector

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def on_device(x, positions, inv_freq, **options):
    options.pop("conjugate")
    rope = module_for(x, inv_freq, options.pop("amplitude"), **options).to("cuda")
    return rope(x.to("cuda"), positions=positions.to("cuda")).to("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_within_budget(dtype):
    assert check_rotation(on_device, [dtype], where=lambda case: not case.conjugate) <= 1
    assert check_rotation(by_module, [dtype]) <= 1


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning")
def test_nothing_waits_for_the_device():
    rope = RotaryEmbedding(64, pairing="half", context_length=10_000).to("cuda")
    q, k = torch.randn(2, 4, 16, 64, device="cuda"), torch.randn(2, 2, 16, 64, device="cuda")
    ids, starts = torch.arange(16, device="cuda").expand(2, 16), torch.tensor([3, 9], device="cuda")
    ends = torch.tensor([0, 5, 16], device="cuda")
    rope(q, k)
    torch.cuda.set_sync_debug_mode("error")
    try:
        rope(q, k)
        rope(q, k, positions=ids)
        rope(q, k, offset=starts)
        rope(q, k, cu_seqlens=ends)
        rope(q, k, angles=rope.at(ids))
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_in_a_cuda_graph():
    rope = RotaryEmbedding(64).to("cuda")
    q, ids = torch.randn(1, 4, 8, 64, device="cuda"), torch.arange(8, device="cuda")
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        rope(q, positions=ids)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = rope(q, positions=ids)
    ids.add_(70_000)
    q.copy_(vector(1, 1, 4, 8, 64))
    graph.replay()
    assert_within_budget(y.cpu(), rotate(q.cpu().double(), ids.cpu(), theta(64)), rotary_dim=64)


def test_frequencies_follow_the_device_and_nothing_else():
    rope = RotaryEmbedding(64)
    x = vector(0, 1, 2, 8, 64).float()
    before = rope.to("cuda").to(torch.bfloat16)(x.to("cuda"), offset=100_000)
    with torch.device("meta"):
        fresh = RotaryEmbedding(64)
    after = fresh.to_empty(device="cuda")(x.to("cuda"), offset=100_000)
    assert torch.equal(before, after)
    # A module that stayed behind serves all the same.
    assert torch.equal(RotaryEmbedding(64)(x.to("cuda"), offset=100_000), before)
