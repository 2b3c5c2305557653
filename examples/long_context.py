"""Train a small decoder on sequences that are cut over ranks.

    torchrun --nproc-per-node 2 examples/long_context.py

One rank per GPU (nccl) if there are as many, and CPUs (gloo) otherwise. Without
torchrun it is one rank. The text is the source of Python's standard library,
one token per byte. Before training, loss and gradients of the ranks are
compared with those of one rank.
"""

import argparse
import contextlib
import copy
import hashlib
import io
import json
import math
import os
import resource
import signal
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import Progress
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import ropewalk as rw
from ropewalk.lab.checkpoints import last_checkpoint, read_checkpoint, write_checkpoint
from ropewalk.lab.draws import draws
from ropewalk.lab.ranks import end_rank, on_rank_0

# What may differ between a run and the one that continues it: all other options change the losses.
FREE_OPTIONS = {"steps", "seconds", "every", "out", "resume", "json"}
TOLERANCE = 1e-10


class RunError(Exception):
    """An error that every rank raises, and that is shown without a traceback."""


class Block(nn.Module):
    """Attention and SwiGLU, each after an RMSNorm."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        options = {"causal": True} if args.encoding == "t5" else {}
        encoding = rw.encoding(args.encoding, dim=args.dim, num_heads=args.heads, **options)
        layer = rw.Attention if args.attention == "softmax" else rw.LinearAttention
        self.attention = layer(args.dim, args.heads, encoding=encoding)
        self.rotates, self.method = args.encoding == "rope", args.method
        hidden = 8 * args.dim // 3
        self.gate, self.up = (nn.Linear(args.dim, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, args.dim, bias=False)
        self.norms = nn.ModuleList(nn.RMSNorm(args.dim) for _ in range(2))

    def attend(self, x: Tensor, shards: rw.parallel.Shards | None) -> Tensor:
        """Attention to the tokens of all ranks; without shards, the layer as it is on one rank."""
        layer = self.attention
        if shards is None:
            return layer(x)
        q, k, v = layer.heads_of(x)
        encoding = layer.encoding
        if isinstance(layer, rw.Attention):
            y = rw.parallel.attention(q, k, v, shards=shards, encoding=encoding, method=self.method)
        elif self.rotates:
            y = rw.parallel.linear_attention(q, k, v, shards=shards, rope=encoding)
        else:
            y = rw.parallel.linear_attention(q, k, v, shards=shards, bias=encoding)
        return layer.joined(y)

    def forward(self, x: Tensor, shards: rw.parallel.Shards | None) -> Tensor:
        """Tokens of this rank [batch, tokens, dim] to tokens. Only attention reads those of other ranks."""
        x = x + self.attend(self.norms[0](x), shards)
        y = self.norms[1](x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))


class Decoder(nn.Module):
    """Bytes to logits of the next byte."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, args.dim)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.blocks = nn.ModuleList(Block(args) for _ in range(args.layers))
        self.norm = nn.RMSNorm(args.dim)

    def forward(self, tokens: Tensor, shards: rw.parallel.Shards | None = None) -> Tensor:
        """Tokens of this rank, or all tokens without shards [batch, tokens], to logits [batch, tokens, 256]."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, shards)
        return functional.linear(self.norm(x), self.embedding.weight)


def read_text() -> bytes:
    """The modules at the top of the standard library, in the order of their names."""
    return b"\n".join(path.read_bytes() for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")))


def read_batch(text: Tensor, seed: int, step: int, batch: int, length: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets [batch, length] of all ranks: a function of seed and step, so that a resumed run continues."""
    starts = draws(seed, [step], range(batch), 1)[0] % (len(text) - length)
    tokens = text[torch.from_numpy(starts.astype("int64")) + torch.arange(length + 1)].long()
    # Shifted before they are cut: the target of the last token of a rank is the first token of another.
    return tokens[:, :-1], tokens[:, 1:]


def share_of_loss(model: nn.Module, inputs: Tensor, targets: Tensor, shards: rw.parallel.Shards | None) -> Tensor:
    """The share of this rank in the mean loss: the sum over its tokens, divided by the number of all tokens."""
    count, device = inputs.numel(), next(model.parameters()).device
    if shards is not None:
        inputs, targets = shards.cut(inputs, dim=1), shards.cut(targets, dim=1)
    logits = model(inputs.to(device), shards)
    return functional.cross_entropy(logits.flatten(0, 1), targets.to(device).flatten(), reduction="sum") / count


def sum_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Replace the gradients of each rank, which are its share, by their sum over ranks.

    DDP averages: with it, multiply the loss by the number of ranks. One all-reduce is all that a small model needs.
    """
    gradients = [x.grad for x in parameters if x.grad is not None]
    flat = parameters_to_vector(gradients)
    dist.all_reduce(flat)
    vector_to_parameters(flat, gradients)


def compare_with_one_rank(model: nn.Module, text: Tensor, args: argparse.Namespace, mesh: DeviceMesh) -> float:
    """The largest relative difference in loss and gradients between the ranks and one rank, in float64."""
    model = copy.deepcopy(model).double()
    shards = rw.parallel.Shards(mesh, 32 * mesh.size(), args.layout)
    inputs, targets = read_batch(text, args.seed, 0, args.batch, shards.length)

    def loss_and_gradients(shards: rw.parallel.Shards | None) -> list[Tensor]:
        model.zero_grad()
        loss = share_of_loss(model, inputs, targets, shards)
        loss.backward()
        loss = loss.detach()
        if shards is not None:
            dist.all_reduce(loss)
            sum_gradients(model.parameters())
        return [loss, *(x.grad.clone() for x in model.parameters() if x.grad is not None)]

    pairs = zip(loss_and_gradients(shards), loss_and_gradients(None), strict=True)
    largest = torch.stack([(ours - whole).abs().max() / whole.abs().max() for ours, whole in pairs]).max()
    # All ranks get the same number, and fail together. NaN is not compared by every backend.
    largest = largest.nan_to_num(nan=math.inf)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return largest.item()


def choose_folder(args: argparse.Namespace) -> tuple[Path, int]:
    """The folder of checkpoints and the step of the last one, 0 to start anew. Rank 0 chooses, for all."""
    runs = sorted(Path("runs").glob("long-context-*"))
    newest = runs[-1] if args.resume and runs else Path("runs", time.strftime("long-context-%Y%m%d-%H%M%S"))
    out = args.out or newest
    if not args.resume:
        # From the start, so that --resume after an early kill does not continue an older run.
        out.mkdir(parents=True, exist_ok=True)
    return out, last_checkpoint(out)


def peak_memory(device: torch.device) -> int:
    """Bytes: of tensors on a GPU, and of the whole process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def update(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    """Change the parameters, which are the same on all ranks before and after."""
    optimizer.zero_grad()
    loss.backward()
    sum_gradients(model.parameters())
    # After the sum: the norm is that of the whole gradient.
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


class Report:
    """What rank 0 shows: lines, a bar on a terminal, and losses as JSON Lines. Other ranks show nothing."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.is_first = args, dist.get_rank() == 0
        self.console = Console(stderr=args.json == "-", quiet=not self.is_first, highlight=False, soft_wrap=True)
        self.bar = Progress(
            console=self.console, transient=True, disable=not (self.is_first and self.console.is_terminal)
        )
        self.task = self.bar.add_task("training", total=1.0)

    def start(self, step: int) -> None:
        """Begin after a step. What a killed run has written after its last checkpoint is dropped."""
        self.losses: list[float] = []
        self.since = time.perf_counter()

        def shorten(path: Path) -> None:
            lines = path.read_text(encoding="utf-8").splitlines() if step and path.exists() else []
            kept = [line for line in lines if line.endswith("}") and json.loads(line)["step"] <= step]
            path.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")

        if self.args.json not in (None, "-"):
            on_rank_0(lambda: shorten(Path(self.args.json)))

    def add(self, step: int, loss: float, part: float, *, last: bool) -> None:
        """Show a step, after which `part` of the run is completed. A line every five seconds has means."""
        if self.args.json and self.is_first:
            with contextlib.nullcontext(sys.stdout) if self.args.json == "-" else open(self.args.json, "a") as file:
                print(json.dumps({"step": step, "loss": loss}), file=file, flush=True)
        self.bar.update(self.task, completed=part)
        self.losses.append(loss)
        now, count = time.perf_counter(), len(self.losses)
        if last or now - self.since >= 5:
            speed = count * self.args.batch * self.args.length / (now - self.since)
            mean = sum(self.losses) / count
            self.console.print(f"step {step:5}   mean loss {mean:.4f}   {speed:,.0f} tokens per second")
            self.losses, self.since = [], now


def train(args: argparse.Namespace, mesh: DeviceMesh, device: torch.device, stop: threading.Event) -> None:
    """Resume, compare with one rank, train, and write checkpoints."""
    rank, ranks = mesh.get_rank(), mesh.size()
    report = Report(args)
    show = report.console.print
    source = on_rank_0(read_text)
    text = torch.frombuffer(bytearray(source), dtype=torch.uint8)
    if args.length >= len(text):
        raise RunError(f"--length: expected less than {len(text)}, the bytes of the text; got {args.length}")
    shards = rw.parallel.Shards(mesh, args.length, args.layout)
    # The same seed on all ranks: all start from the same parameters.
    torch.manual_seed(args.seed)
    model = Decoder(args).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95))
    parts = [f"{args.attention} attention", args.encoding, args.method, args.layout, args.dtype]
    show(f"{', '.join(x for x in parts if x)}, on {device.type}")
    show(f"{args.batch} x {args.length:,} tokens per step on {ranks} rank{'s' if ranks > 1 else ''}")
    show(f"{sum(x.numel() for x in model.parameters()):,} parameters; {len(text):,} bytes of text")

    config = {"ranks": ranks, **{name: x for name, x in vars(args).items() if name not in FREE_OPTIONS}}
    config["text"] = hashlib.sha256(source).hexdigest()[:16]
    out, first = on_rank_0(lambda: choose_folder(args))
    if args.resume and not first:
        raise RunError(f"--resume: {out} has no checkpoint; pass the --out of a run that has one, or omit --resume")
    if first and not args.resume:
        raise RunError(f"--out: {out} has a checkpoint of step {first}; pass --resume, or another folder")
    if first:
        read_checkpoint(out, first, model, optimizer, config)
        show(f"resumed from {out}/step-{first}")

    difference = compare_with_one_rank(model, text, args, mesh)
    if not difference <= TOLERANCE:
        raise RunError(f"loss or gradients differ from one rank by {difference:.1e}; allowed are {TOLERANCE:.0e}")
    show(f"loss and gradients are those of one rank: relative difference {difference:.1e}")

    report.start(first)
    began = time.perf_counter()
    steps, seconds = args.steps or math.inf, args.seconds or (math.inf if args.steps else 50)
    with report.bar:
        step, ends = first, first >= steps
        while not ends:
            step += 1
            inputs, targets = read_batch(text, args.seed, step, args.batch, args.length)
            optimizer.param_groups[0]["lr"] = args.lr * min(1, step / 20)
            with torch.autocast(device.type, torch.bfloat16, enabled=args.dtype == "bfloat16"):
                loss = share_of_loss(model, inputs, targets, shards)
            update(model, optimizer, loss)

            # All ranks stop after the same step: if rank 0 has no time left, or if some rank was interrupted.
            elapsed = time.perf_counter() - began
            wish = stop.is_set() or (rank == 0 and elapsed >= seconds)
            totals = torch.stack([loss.detach().double(), loss.new_tensor(wish, dtype=torch.float64)])
            dist.all_reduce(totals)
            mean, wishes = totals.tolist()
            ends = wishes > 0 or step == steps
            part = max((step - first) / (steps - first), elapsed / seconds)
            report.add(step, mean, part, last=ends)
            if ends or step % args.every == 0:
                write_checkpoint(out, step, model, optimizer, config)
    peaks: list[Any] = [None] * ranks
    dist.all_gather_object(peaks, peak_memory(device) / 2**20)
    what = "of tensors" if device.type == "cuda" else "of the whole process"
    show(f"peak memory {what}, per rank: {', '.join(f'{x:,.0f}' for x in peaks)} MiB")
    show(f"{'interrupted' if stop.is_set() else 'ended'}; to continue: --resume --out {out}")


def parse_options() -> argparse.Namespace:
    """The options of the command line. Their errors, and the help, are shown by rank 0."""

    def above_zero(kind: Callable[[str], float]) -> Callable[[str], float]:
        def parse(text: str) -> float:
            with contextlib.suppress(ValueError):
                if 0 < kind(text) < math.inf:
                    return kind(text)
            what = "whole number" if kind is int else "number"
            raise argparse.ArgumentTypeError(f"expected a {what} above 0, got {text!r}")

        return parse

    count, positive = above_zero(int), above_zero(float)

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )

    def add(group: Any, name: str, default: object, text: str, **options: Any) -> None:
        metavar = None if "choices" in options else "X" if options["type"] is positive else "N"
        group.add_argument(name, default=default, help=f"{text} (default: {default})", metavar=metavar, **options)

    model = parser.add_argument_group("model")
    add(model, "--attention", "softmax", "kind of attention", choices=("softmax", "linear"))
    add(model, "--encoding", "rope", "encoding of positions", choices=("rope", "alibi", "t5"))
    add(model, "--dim", 128, "width of the model", type=count)
    add(model, "--layers", 2, "number of blocks", type=count)
    add(model, "--heads", 4, "number of heads", type=count)
    ranks = parser.add_argument_group("ranks")
    methods, text = ("gather", "ulysses", "ring"), "how softmax attention reads other ranks (default: gather)"
    ranks.add_argument("--method", choices=methods, help=text)
    add(ranks, "--layout", "contiguous", "which tokens a rank has", choices=("contiguous", "zigzag"))
    training = parser.add_argument_group("training")
    add(training, "--length", 2048, "tokens per sequence, of all ranks together", type=count)
    add(training, "--batch", 1, "sequences per step", type=count)
    add(training, "--lr", 2e-3, "learning rate", type=positive)
    add(training, "--seed", 0, "seed of parameters and batches", type=int)
    add(training, "--dtype", "float32", "bfloat16 by autocast", choices=("float32", "bfloat16"))
    training.add_argument("--steps", type=count, metavar="N", help="number of the last step (default: no limit)")
    text = "time to train (default: 50, or no limit with --steps)"
    training.add_argument("--seconds", type=positive, metavar="X", help=text)
    files = parser.add_argument_group("files")
    files.add_argument("--out", type=Path, metavar="DIR", help="folder of checkpoints (default: a new one in runs/)")
    add(files, "--every", 50, "steps between checkpoints", type=count)
    files.add_argument("--resume", action="store_true", help="continue from the checkpoint in --out, or the newest run")
    files.add_argument("--json", metavar="FILE", help="losses as JSON Lines; - for standard output")
    with contextlib.ExitStack() as stack:
        if os.environ.get("RANK", "0") != "0":
            stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
            stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
        args = parser.parse_args()
        if args.method and args.attention == "linear":
            parser.error("--method: linear attention has one method, the exchange of states; omit it")
    if args.attention == "softmax":
        args.method = args.method or "gather"
    return args


def main() -> int:
    """Start this rank, train, and return the exit status."""
    args, stop = parse_options(), threading.Event()

    def request_stop(number: int, _: object) -> None:
        stop.set()
        # A second signal ends the process at once.
        signal.signal(number, signal.SIG_DFL)

    # Ctrl-C and torchrun end a run after its current step, with a checkpoint.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, request_stop)
    local_rank, local_ranks = (int(os.environ.get(name, n)) for name, n in (("LOCAL_RANK", 0), ("LOCAL_WORLD_SIZE", 1)))
    device = torch.device("cpu")
    if torch.cuda.device_count() >= local_ranks:
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    # gloo on GPUs too: it exchanges what is on the CPU.
    backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        train(args, init_device_mesh(device.type, (dist.get_world_size(),)), device, stop)
    except (RunError, rw.RopewalkError, OSError) as error:
        lines = str(error).replace("\n", "\n  ")
        print(f"rank {dist.get_rank()}: error: {lines}", file=sys.stderr, flush=True)
        return 1
    finally:
        dist.destroy_process_group()
    return 130 if stop.is_set() else 0


if __name__ == "__main__":
    end_rank(main())
