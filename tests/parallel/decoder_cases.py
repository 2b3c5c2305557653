"""A decoder of two layers on a mesh of two dimensions: tensor, context and data parallelism, two at a time."""

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.functional import cross_entropy, silu
from torch.utils.checkpoint import checkpoint

import ropewalk as rw
from parallel.cases import encoding_of
from ropewalk import parallel

__all__ = ["compiled", "decoders"]

WORDS, DIM, HEADS, SEQ, BATCH, STEPS = 11, 32, 4, 24, 4, 5


class Block(nn.Module):
    def __init__(self, kind, linear, recompute) -> None:
        super().__init__()
        layer = rw.LinearAttention if linear else rw.Attention
        self.attention = layer(DIM, HEADS, num_kv_heads=2, encoding=encoding_of(kind))
        self.norms = nn.ModuleList(nn.RMSNorm(DIM) for _ in range(2))
        self.up, self.down = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)
        self.kind, self.linear, self.recompute = kind, linear, recompute

    def forward(self, x, shards):
        if self.recompute:
            return checkpoint(self.compute, x, shards, use_reentrant=False)
        return self.compute(x, shards)

    def compute(self, x, shards):
        y = self.norms[0](x)
        x = x + (self.attention(y) if shards is None else self.over_ranks(y, shards))
        return x + self.down(silu(self.up(self.norms[1](x))))

    def over_ranks(self, x, shards):
        heads, encoding = self.attention.heads_of(x), self.attention.encoding
        if self.linear:
            options = {"bias" if self.kind in ("alibi", "t5") else "rope": encoding}
            return self.attention.joined(parallel.linear_attention(*heads, shards=shards, **options))
        return self.attention.joined(parallel.attention(*heads, shards=shards, encoding=encoding))


class Decoder(nn.Module):
    def __init__(self, kind, linear, recompute=False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(WORDS, DIM)
        self.blocks = nn.ModuleList(Block(kind, linear, recompute) for _ in range(2))
        self.head = nn.Linear(DIM, WORDS)
        self.double()

    def forward(self, tokens, shards=None):
        x = self.words(tokens)
        for block in self.blocks:
            x = block(x, shards)
        return self.head(x)


def full(x):
    return x.full_tensor() if isinstance(x, DTensor) else x


def trained(model, rows=slice(None), shards=None, ranks=None, share=1.0):
    """Losses and gradients of five steps. `ranks` are groups over which the loss and gradients are summed.

    Args:
        model: The model.
        rows: The sequences of this rank.
        shards: The tokens of this rank.
        ranks: The group that has the other tokens.
        share: Number of ranks over which FSDP averages.
    """
    optimizer, losses, gradients = torch.optim.SGD(model.parameters(), lr=0.1), [], []
    for step in range(STEPS):
        tokens = torch.randint(0, WORDS, (BATCH, SEQ + 1), generator=torch.Generator().manual_seed(step))[rows]
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        if shards is not None:
            inputs, targets = shards.cut(inputs, 1), shards.cut(targets, 1)
        logits = model(inputs, shards)
        loss = cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / (BATCH * SEQ)
        optimizer.zero_grad()
        (loss * share).backward()
        if ranks is not None:
            for parameter in model.parameters():
                own = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
                dist.all_reduce(own, group=ranks)
            loss = loss.detach().clone()
            dist.all_reduce(loss, group=ranks)
        gradients = [full(parameter.grad).clone() for parameter in model.parameters()]
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, gradients


def decoder(kind, linear, first, second, recompute, mesh):
    """Two kinds of parallelism on a mesh of 2 x 2 ranks."""
    expected = trained(Decoder(kind, linear))
    both = init_device_mesh("cpu", (2, 2), mesh_dim_names=(first, second))
    model, options = Decoder(kind, linear, recompute), {}
    if "tp" in (first, second):
        styles = parallel.plan(model)
        parallelize_module(model, both["tp"], styles)
    if "cp" in (first, second):
        options = {"shards": parallel.Shards(both["cp"], SEQ, "zigzag"), "ranks": both["cp"].get_group()}
    rows = 0
    if "fsdp" in (first, second):
        for block in model.blocks:
            fully_shard(block, mesh=both["fsdp"])
        fully_shard(model, mesh=both["fsdp"])
        rows, half = both["fsdp"].get_local_rank(), BATCH // 2
        # Ranks have other sequences, and FSDP averages their gradients.
        options |= {"rows": slice(rows * half, (rows + 1) * half), "share": 2.0}
    losses, gradients = trained(model, **options)
    if "fsdp" in (first, second):
        total = torch.tensor(losses, dtype=torch.float64)
        dist.all_reduce(total, group=both["fsdp"].get_group())
        losses = total.tolist()
    errors = [abs(a - b) for a, b in zip(losses, expected[0], strict=True)]
    errors += [(a - b).abs().max().item() for a, b in zip(gradients, expected[1], strict=True)]
    assert max(errors) <= 1e-11, errors


def decoders(world) -> dict[str, Any]:
    """Every pair of kinds, with encodings that depend on the head and that have parameters."""
    pairs = ("tp", "cp"), ("fsdp", "tp"), ("fsdp", "cp")
    kinds = ("rope", False, True), ("alibi", False, False), ("t5", True, False), ("learned", True, True)
    return {
        f"{first} and {second}, {'linear' if linear else 'softmax'}, {kind}, recompute {recompute}": functools.partial(
            decoder, kind, linear, first, second, recompute
        )
        for first, second in pairs
        for kind, linear, recompute in kinds
    }


def compiled(world) -> dict[str, Any]:
    """Compiled calls with DTensors are one graph, also for two lengths."""

    def one_graph(kind, linear, mesh):
        torch._dynamo.reset()
        counter, encoding = CompileCounterWithBackend("aot_eager"), encoding_of(kind)
        name = "rope" if linear else "encoding"
        function = functools.partial(rw.linear_attention if linear else rw.attention, **{name: encoding})

        def call(q, k, v):
            y: Any = function(*(DTensor.from_local(x, mesh, [Shard(1)], run_check=False) for x in (q, k, v)))
            return y.to_local()

        compiled_call = torch.compile(call, backend=counter, fullgraph=True, dynamic=True)
        counts: list[int] = []
        for length in (16, 24):
            random = torch.Generator().manual_seed(mesh.get_local_rank())
            shape = 2, HEADS // mesh.size(), length, 8
            heads = [torch.randn(shape, dtype=torch.float64, generator=random).requires_grad_() for _ in range(3)]
            y, expected = compiled_call(*heads), call(*heads)
            torch.testing.assert_close(y, expected, atol=1e-12, rtol=0)
            gradients = [torch.autograd.grad(out.square().sum(), heads) for out in (y, expected)]
            for a, b in zip(*gradients, strict=True):
                torch.testing.assert_close(a, b, atol=1e-12, rtol=0)
            counts.append(counter.frame_count)
        assert counts[0] == counts[1], counts

    kinds = ("rope", False), ("t5", False), ("learned", True)
    return {
        f"{'linear' if linear else 'softmax'}, {kind}": functools.partial(one_graph, kind, linear)
        for kind, linear in kinds
    }
