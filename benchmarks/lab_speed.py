"""Tokens per second of the lab beside a plain loop, eager and compiled, in interleaved rounds of one run.

    python benchmarks/lab_speed.py [--size small] [--device cuda] [--out benchmarks/lab_speed.json]

The plain loop is what people write without a library: learned positions, LayerNorm, GELU, scaled_dot_product_attention,
AdamW (fused), bfloat16 by autocast, batches cut from one tensor of bytes. The lab trains its own decoder, with RoPE,
with a step as one CUDA graph, and compiled. The share of time outside the model is 1 - (forward and backward of the
same decoder on one batch, nothing else) / (step of the lab), both as CUDA graphs on a GPU.
"""

import argparse
import itertools
import statistics
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ropewalk.lab.decoder import SIZES, Size
from ropewalk.lab.experiments.text import text_run
from ropewalk.lab.run import make_task
from ropewalk.lab.text import Text
from ropewalk.lab.training import Settings, make_model, training
from ropewalk.tools.bench.records import write_record
from ropewalk.tools.output import processor


class PlainBlock(nn.Module):
    """A block of GPT-2."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.norms = nn.ModuleList(nn.LayerNorm(size.dim, bias=False) for _ in range(2))
        self.qkv = nn.Linear(size.dim, 3 * size.dim, bias=False)
        self.out = nn.Linear(size.dim, size.dim, bias=False)
        self.up = nn.Linear(size.dim, 4 * size.dim, bias=False)
        self.down = nn.Linear(4 * size.dim, size.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.norms[1](x))))


class PlainModel(nn.Module):
    """A small GPT-2 with learned positions."""

    def __init__(self, size: Size, vocabulary: int, length: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, size.dim)
        self.positions = nn.Embedding(length, size.dim)
        self.blocks = nn.ModuleList(PlainBlock(size) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.dim, bias=False)
        self.head = nn.Linear(size.dim, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def plain_loop(args: argparse.Namespace, device: torch.device, *, compiled: bool) -> Callable[[], None]:
    """A step of the plain loop."""
    run = text_run("rope", args.size)
    task = make_task(run)
    assert isinstance(task, Text)  # noqa: S101 - for pyright
    model: Any = PlainModel(SIZES[args.size], task.vocabulary, run.length).to(device)
    step_of: Any = torch.compile(model) if compiled else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    generator = torch.Generator().manual_seed(0)

    def step() -> None:
        starts = torch.randint(len(task.trained) - run.length - 1, (run.batch, 1), generator=generator)
        tokens = task.trained[starts + torch.arange(run.length + 1)].long()
        tokens = tokens.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tokens
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            logits = step_of(tokens[:, :-1])
            loss = functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step


def lab_loop(args: argparse.Namespace, device: torch.device, *, compiled: bool) -> Callable[[], None]:
    """A step of the lab: with its samples, its learning rate and its optimizer, without validations."""
    # More steps than are timed: a run that ends would validate.
    dtype = "bfloat16" if device.type == "cuda" else "float32"
    steps = training(text_run("rope", args.size), Settings(device, dtype, compiled=compiled, every=10**9))
    return lambda: next(steps)


def model_alone(args: argparse.Namespace, device: torch.device) -> Callable[[], None]:
    """Forward and backward of the lab's decoder on one batch."""
    run = text_run("rope", args.size)
    task = make_task(run)
    model = make_model(run, task).to(device)
    batch = task.batches(0, [1], range(run.batch), run.length)
    inputs, targets = (x[0].to(device) for x in batch)

    def compute() -> None:
        model.zero_grad(set_to_none=True)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            logits = model(inputs)
        functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten()).backward()

    if device.type == "cpu":
        return compute
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            compute()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        compute()

    def replay(_reads: Callable[[], None] = compute) -> None:
        # The graph reads the memory of the model and of the batch, which `compute` keeps.
        graph.replay()

    return replay


def seconds_of(step: Callable[[], None], count: int, device: torch.device) -> float:
    """Wall-clock time of one step, of `count` in a row."""
    start = time.perf_counter()
    for _ in range(count):
        step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="small")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=50, help="steps per round")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "lab_speed.json")
    args = parser.parse_args()
    device = torch.device(args.device)
    loops = {
        "plain, eager": plain_loop(args, device, compiled=False),
        "plain, compiled": plain_loop(args, device, compiled=True),
        "lab": lab_loop(args, device, compiled=False),
        "lab, compiled": lab_loop(args, device, compiled=True),
        "forward and backward": model_alone(args, device),
    }
    for step in loops.values():
        # Compiles and captures.
        seconds_of(step, min(args.steps, 8), device)
    times: dict[str, list[float]] = {name: [] for name in loops}
    for _, (name, step) in itertools.product(range(args.rounds), loops.items()):
        times[name].append(seconds_of(step, args.steps, device))
    run = text_run("rope", args.size)
    medians = {name: statistics.median(x) for name, x in times.items()}
    record = {
        "date": date.today().isoformat(),
        "hardware": torch.cuda.get_device_name() if device.type == "cuda" else f"{processor()}, CPU",
        "torch": str(torch.__version__),
        "command": f"python benchmarks/lab_speed.py --size {args.size} --device {args.device}",
        "tokens per step": run.batch * run.length,
        "tokens per second": {name: round(run.batch * run.length / x) for name, x in medians.items()},
        "seconds per step": times,
        "share outside the model": round(1 - medians["forward and backward"] / medians["lab"], 3),
    }
    write_record(record, str(args.out), [])
    for name, value in record["tokens per second"].items():
        print(f"{name:22} {value:>12,} tokens per second")
    print(f"share of a step of the lab outside the model: {record['share outside the model']:.1%}")


if __name__ == "__main__":
    main()
