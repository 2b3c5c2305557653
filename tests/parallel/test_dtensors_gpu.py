"""DTensors on a GPU: values, and a profile that contains our kernels. One rank, so that no second GPU is needed."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.profiler import ProfilerActivity, profile

import ropewalk as rw

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.xdist_group("ranks"),
]

BATCH, HEADS, LENGTH, DIM = 2, 4, 512, 64


@pytest.fixture
def mesh(tmp_path):
    # Otherwise init_device_mesh guesses the device, and warns.
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", init_method=(tmp_path / "store").as_uri(), rank=0, world_size=1)
    yield init_device_mesh("cuda", (1,))
    dist.destroy_process_group()


def both_passes(run, tensors):
    leaves = [x.detach().requires_grad_() for x in tensors]
    out = run(*leaves)
    out.square().sum().backward()
    return [out, *(x.grad for x in leaves)]


ROPE = rw.RotaryEmbedding(DIM)
CALLS = {
    "rope": (lambda q, k, v: ROPE(q, k)[0] * ROPE(k) * v, Shard(2), ("rotate",)),
    "qk_norm_rope": (lambda q, k, v: rw.qk_norm_rope(q, k, ROPE)[0] * k * v, Shard(2), ("norm_rotate",)),
    "linear": (
        lambda q, k, v: rw.linear_attention(q, k, v, rope=ROPE),
        Shard(1),
        ("sum_segments", "run_totals", "read_values", "read_queries", "read_keys"),
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_kernels_run_on_local_tensors(name, mesh):
    run, placement, kernels = CALLS[name]
    ROPE.to("cuda")
    random = torch.Generator().manual_seed(0)
    tensors = [torch.randn(BATCH, HEADS, LENGTH, DIM, generator=random).to("cuda", torch.bfloat16) for _ in range(3)]
    expected = both_passes(run, tensors)
    shards = [distribute_tensor(x, mesh, [placement]) for x in tensors]
    both_passes(run, shards)
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiled:
        results = both_passes(run, shards)
        torch.cuda.synchronize()
    for y, other in zip(results, expected, strict=True):
        assert isinstance(y, DTensor)
        assert torch.equal(y.full_tensor(), other)
    names = [event.key for event in profiled.key_averages()]
    assert [kernel for kernel in kernels if not any(kernel in seen for seen in names)] == [], names
