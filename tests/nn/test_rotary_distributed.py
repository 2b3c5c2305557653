"""Under torch.distributed: DDP, FSDP2 and DTensor leave the rotation as it is. Two gloo ranks on the CPU."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.spawn import spawn

from ropewalk import RotaryEmbedding
from strategies import vector


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8, bias=False)
        self.rope = RotaryEmbedding(8, pairing="half")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.rope(self.linear(x), offset=70_000)


def _expected(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    layer = Layer()
    y = layer(x)
    y.square().sum().backward()
    assert layer.linear.weight.grad is not None
    return y.detach(), layer.linear.weight.grad


def _ddp(rank: int, x: torch.Tensor) -> None:
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(Layer())
    y = model(x)
    y.square().sum().backward()
    value, gradient = _expected(x)
    assert torch.equal(y.detach(), value)
    assert torch.equal(model.module.linear.weight.grad, gradient)


def _fsdp(rank: int, x: torch.Tensor) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    torch.manual_seed(0)
    model = Layer()
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    y = model(x)
    y.square().sum().backward()
    value, gradient = _expected(x)
    assert torch.equal(y.detach(), value)
    grad = model.linear.weight.grad
    assert isinstance(grad, DTensor)
    assert torch.allclose(grad.full_tensor(), gradient, rtol=1e-5)


def _dtensor(rank: int, x: torch.Tensor) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    rope = RotaryEmbedding(8)
    expected = rope(x)
    for placement in (Shard(0), Shard(1), Shard(2), Replicate()):
        q = distribute_tensor(x, mesh, [placement]).requires_grad_()
        y = rope(q)
        assert isinstance(y, DTensor)
        assert torch.allclose(y.full_tensor(), expected, atol=1e-6), placement
        y.square().sum().backward()
        assert isinstance(q.grad, DTensor)
        assert torch.allclose(q.grad.full_tensor(), 2 * x, atol=1e-5), placement


WORK = {"ddp": _ddp, "fsdp": _fsdp, "dtensor": _dtensor}


def _run(rank: int, name: str, meeting: Path) -> None:
    # By a file: a port that was free a moment ago may be taken by now.
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    torch.set_num_threads(1)
    WORK[name](rank, vector(0, 2, 4, 6, 8).float())
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("name", WORK)
def test_two_ranks(name, tmp_path):
    spawn(_run, args=(name, tmp_path / "meeting"), nprocs=2)
