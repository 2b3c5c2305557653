"""The module on a CUDA device: parity, no waiting for the device, and CUDA graphs."""

import pytest
import torch

from nn.module import by_module, module_for
from ropewalk import RopeSpec, RotaryEmbedding
from ropewalk.nn.positions import (
    centred_positions,
    grid_positions,
    mrope_positions,
    positions_of_lengths,
    text_positions,
)
from ropewalk.reference import assert_within_budget, check_rotation, rotate
from ropewalk.spec import Axes, DynamicNTK, LongRope, StepTemperature, XPos, Yarn
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


VARIANTS = [
    RopeSpec(64, DynamicNTK(1e4, 2, 64), pairing="half"),
    RopeSpec(64, LongRope(1e4, [1.0] * 32, [2.0] * 32, 64, short_amplitude=1.0, long_amplitude=1.5)),
    RopeSpec(64, Yarn(1e4, 4, 64), axes=Axes.interleaved([12, 10, 10]), pairing="half"),
    RopeSpec(64, xpos=XPos(4096)),
    RopeSpec(64, rotary_dim=32, query_temperature=StepTemperature(0.1, 64)),
    RopeSpec(64, DynamicNTK(1e4, 2, 64), angles="float32"),
]


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning")
@pytest.mark.parametrize("spec", VARIANTS, ids=lambda spec: type(spec.frequencies).__name__)
def test_no_kind_of_spec_waits_for_the_device_and_each_is_what_it_is_on_the_cpu(spec):
    here, there = RotaryEmbedding(spec), RotaryEmbedding(spec).to("cuda")
    # In float64, where both machines are exact but for a few last bits.
    q, k = vector(0, 2, 4, 16, 64), vector(1, 2, 2, 16, 64)
    near = {"rtol": 1e-11, "atol": 1e-11} if spec.angles == "exact" else {"rtol": 1e-5, "atol": 1e-5}
    ids = torch.arange(16) if spec.axes is None else torch.arange(48).view(3, 16)
    lengths = torch.tensor([16, 200])
    on_gpu = [x.to("cuda") for x in (q, k, ids, lengths)]
    torch.cuda.set_sync_debug_mode("error")
    try:
        rotated = there(*on_gpu[:2], positions=on_gpu[2], length=on_gpu[3])
        moved = there.retune(rotated[1], to=there, positions=on_gpu[2], length=on_gpu[3], to_length=99)
        text_positions(4, 3, on_gpu[3])
        grid_positions(4, 6, merge=2, device="cuda")
        centred_positions(4, 6, device="cuda")
        mrope_positions([3, (1, 4, 6), 2], device="cuda")
        positions_of_lengths(on_gpu[3], 216)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for mine, wanted in zip(rotated, here(q, k, positions=ids, length=lengths), strict=True):
        torch.testing.assert_close(mine.cpu(), wanted, **near)
    wanted = here(k, positions=ids, length=99, role="k")
    torch.testing.assert_close(moved.cpu(), wanted, **near)


def test_a_length_that_grows_in_a_cuda_graph():
    rope = RotaryEmbedding(VARIANTS[0]).to("cuda")
    q, ids, length = torch.randn(1, 4, 8, 64, device="cuda"), torch.arange(8, device="cuda"), torch.tensor([64]).cuda()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        rope(q, positions=ids, length=length)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = rope(q, positions=ids, length=length)
    length.fill_(1000)
    graph.replay()
    assert torch.equal(y, rope(q, positions=ids, length=1000))


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
