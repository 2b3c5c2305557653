"""Under torch.distributed: DDP, FSDP2 and DTensor leave the rotation as it is. Two gloo ranks on the CPU."""

import functools

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from parallel.ranks import failures_on_ranks
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


def _ddp(x, mesh):
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(Layer())
    y = model(x)
    y.square().sum().backward()
    value, gradient = _expected(x)
    assert torch.equal(y.detach(), value)
    assert torch.equal(model.module.linear.weight.grad, gradient)


def _fsdp(x, mesh):
    torch.manual_seed(0)
    model = Layer()
    fully_shard(model, mesh=mesh)
    y = model(x)
    y.square().sum().backward()
    value, gradient = _expected(x)
    assert torch.equal(y.detach(), value)
    grad = model.linear.weight.grad
    assert isinstance(grad, DTensor)
    assert torch.allclose(grad.full_tensor(), gradient, rtol=1e-5)


def _dtensor(x, mesh):
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


def cases(world):
    x = vector(0, 2, 4, 6, 8).float()
    return {work.__name__: functools.partial(work, x) for work in (_ddp, _fsdp, _dtensor)}


@pytest.mark.slow
@pytest.mark.xdist_group("ranks")
def test_two_ranks(tmp_path):
    failures = failures_on_ranks(2, "nn.test_rotary_distributed", "cases", tmp_path)
    assert failures.keys() == cases(2).keys()
    assert [name for name, failed in failures.items() if failed] == [], next(filter(None, failures.values()))[0]
