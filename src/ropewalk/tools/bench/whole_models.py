"""`ropewalk bench accelerate --device cuda`: whole models as transformers has them, accelerated, and with Liger's rope.

`python -m ropewalk.tools.bench.whole_models` is the same command. Forward pass, training step and `generate`, eager and
compiled. All paths use the same kernel of
scaled_dot_product_attention. They are timed in interleaved rounds by wall clock. A profiler sums their kernels.
"""

import argparse
import copy
import importlib
import platform
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor, nn

from ropewalk.errors import RopewalkError, require_choice
from ropewalk.hub.accelerate.acceleration import accelerate
from ropewalk.tools.bench.accelerate import LIMITS, ROTATION, ModelCase, build_model
from ropewalk.tools.bench.floors import accelerate_floors, generate_floors
from ropewalk.tools.bench.peers import installed
from ropewalk.tools.bench.records import shown_missed, write_record
from ropewalk.tools.bench.timing import Candidate, wall_times
from ropewalk.tools.output import package_version, require_writable_file

__all__ = ["ModelLine", "Work", "bench_whole_models", "measure_model", "whole_models", "works"]

OWN, OURS, LIGER = "transformers", "ropewalk", "Liger's rope"
FORWARD, TRAINING, GENERATE = "forward", "training step", "generate"
# What --only accepts.
KINDS = {"generate": GENERATE, "forward": FORWARD, "training": TRAINING}


@dataclass(frozen=True)
class Work:
    """What a model is timed with.

    Attributes:
        kind: "forward", without gradients; "training step", forward and backward of the loss; "generate".
        compiled: Whether the model is compiled.
        batch: Sequences.
        tokens: Tokens per sequence. For "generate", those of the prompt and as many new ones.
    """

    kind: str
    compiled: bool
    batch: int
    tokens: int

    def title(self) -> str:
        """The work in a few words."""
        compiled = ", compiled" if self.compiled else ", eager"
        return f"{self.kind}{compiled}, {self.batch} x {self.tokens} tokens"


@dataclass(frozen=True)
class ModelLine:
    """A row of the table: the median of the wall clock, and the sum of the kernels (None without a GPU)."""

    path: str
    wall_ms: float
    device_ms: float | None


def whole_models(quick: bool) -> dict[str, ModelCase]:
    """The sizes of Llama 3.2 1B and of Qwen 3 1.7B, whose norms of q and k are fused. Two small layers if `quick`."""
    if quick:
        sizes: dict[str, int] = {"hidden": 128, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 32}
        return {family: ModelCase(family, "bfloat16", **sizes) for family in ("llama", "qwen3")}
    wide: dict[str, int] = {"hidden": 2048, "kv_heads": 8}
    llama: dict[str, int] = {"layers": 16, "heads": 32, "head_dim": 64, "intermediate": 8192, "vocabulary": 128_256}
    qwen: dict[str, int] = {"layers": 28, "heads": 16, "head_dim": 128, "intermediate": 6144, "vocabulary": 151_936}
    return {
        "Llama 1.2B": ModelCase("llama", "bfloat16", **wide, **llama),
        "Qwen3 1.7B": ModelCase("qwen3", "bfloat16", **wide, **qwen),
    }


def works(quick: bool) -> list[Work]:
    """Forward and training step, eager and compiled, and eager `generate`."""
    batch, tokens, new = (2, 16, 4) if quick else (4, 4096, 32)
    both = [Work(kind, compiled, batch, tokens) for compiled in (False, True) for kind in (FORWARD, TRAINING)]
    return [*both, Work(GENERATE, False, 4 * batch, new)]


@contextmanager
def _replaced(model: nn.Module, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """Another function under this name in the modeling file of `model`."""
    file = sys.modules[type(model).__module__]
    original = getattr(file, name)
    setattr(file, name, function)
    try:
        yield
    finally:
        setattr(file, name, original)


def _liger_in(model: nn.Module) -> AbstractContextManager[None]:
    """Liger's rope in the modeling file of `model`, as Liger installs it."""
    function = importlib.import_module("liger_kernel.transformers.rope").liger_rotary_pos_emb
    return _replaced(model, ROTATION, function)


def _call(model: nn.Module, work: Work, tokens: Tensor) -> Callable[[], Any]:
    """One call of the work, which returns its logits, its loss or its tokens."""
    generate: Any = getattr(model, "generate", None)
    called: Any = torch.compile(model) if work.compiled else model

    def forward() -> Any:
        with torch.no_grad():
            return called(tokens, use_cache=False).logits

    def training() -> Any:
        model.zero_grad(set_to_none=True)
        loss = called(tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        return loss.detach()

    def decode() -> Any:
        length: dict[str, int] = {"max_new_tokens": work.tokens, "min_new_tokens": work.tokens}
        return generate(tokens, attention_mask=torch.ones_like(tokens), pad_token_id=0, do_sample=False, **length)

    return {FORWARD: forward, TRAINING: training, GENERATE: decode}[work.kind]


def _kernel_ms(run: Callable[[], object]) -> float:
    """The sum of the durations of all kernels and copies of one call, in milliseconds."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as seen:
        run()
        torch.cuda.synchronize()
    return sum(event.self_device_time_total for event in seen.key_averages()) * 1e-3


def measure_model(
    plain: nn.Module, fast: nn.Module, work: Work, rounds: int, advance: Callable[[], None] = lambda: None
) -> tuple[list[ModelLine], float]:
    """Time one kind of work.

    Args:
        plain: A model of transformers.
        fast: An accelerated copy of it.
        work: What is timed.
        rounds: The number of rounds.
        advance: Called after every round.

    Returns:
        One row per path, and the rms of the difference of the results of `plain` and `fast` over the rms of the result
        (0 for `generate`, whose tokens are chosen by the largest logit).
    """
    device = next(plain.parameters()).device
    vocabulary: int = plain.get_input_embeddings().weight.shape[0]  # pyright: ignore[reportCallIssue]
    tokens = torch.randint(0, vocabulary, (work.batch, work.tokens), device=device)
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    paths: dict[str, tuple[nn.Module, Callable[[], Any]]] = {
        OWN: (plain, nullcontext),
        OURS: (fast, nullcontext),
    }
    if device.type == "cuda" and installed("liger_kernel"):
        paths[LIGER] = (plain, lambda: _liger_in(plain))
    # transformers makes a mask under torch.compile, which rules out the flash kernel. Without one SDPA is causal.
    makes_mask = work.kind == GENERATE
    mask = nullcontext if makes_mask else lambda: _replaced(plain, "create_causal_mask", lambda *_, **__: None)
    candidates: list[Candidate] = []
    calls: dict[str, Callable[[], Any]] = {}
    for name, (model, context) in paths.items():
        call = _call(model, work, tokens)

        def run(call: Callable[[], Any] = call, context: Callable[[], Any] = context) -> Any:
            with context(), mask():
                result = call()
            wait()
            return result

        calls[name] = run
        candidates.append(Candidate(name, run))
    times = wall_times(candidates, rounds, 1, advance)
    on_device = {name: _kernel_ms(run) if device.type == "cuda" else None for name, run in calls.items()}
    apart = 0.0
    if work.kind != GENERATE:
        own, ours = (calls[name]().double() for name in (OWN, OURS))
        apart = float((own - ours).square().mean().sqrt() / own.square().mean().sqrt())
    for model in (plain, fast):
        model.zero_grad(set_to_none=True)
    return [ModelLine(name, ms, on_device[name]) for name, ms in times.items()], apart


def _table(title: str, lines: list[ModelLine]) -> Table:
    table = Table(title=title, title_justify="left", box=None)
    table.title_style = "bold"
    table.add_column("path")
    for name in ("wall clock ms", "faster", "kernels ms", "fewer"):
        table.add_column(name, justify="right")
    own = lines[0]
    for line in lines:
        device = ("–", "–")
        if line.device_ms is not None and own.device_ms is not None:
            device = f"{line.device_ms:.1f}", f"{own.device_ms / line.device_ms:.2f} ×"
        table.add_row(line.path, f"{line.wall_ms:.1f}", f"{own.wall_ms / line.wall_ms:.2f} ×", *device)
    return table


def bench_whole_models(
    json_file: str | None = None, quick: bool = False, device: str = "cuda", only: str | None = None
) -> int:
    """Time whole models before and after accelerate. Exits with 1 if the results differ too much."""
    if only is not None:
        require_choice(only, tuple(KINDS), asked=f"ropewalk bench accelerate --only {only}")
    console = Console(stderr=json_file == "-", highlight=False, markup=False)
    if json_file is not None:
        require_writable_file(json_file, asked=f"ropewalk bench accelerate --json {json_file}")
    if device == "cuda" and not torch.cuda.is_available():
        raise RopewalkError(
            asked="ropewalk bench accelerate --device cuda",
            expected="a CUDA device",
            got="torch.cuda.is_available() is False",
            do="run it on a machine with a CUDA device, or use --device cpu",
        )
    models, rounds = whole_models(quick), 2 if quick else 10
    tasks = [work for work in works(quick) if only is None or work.kind == KINDS[only]]
    results: list[dict[str, Any]] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("measuring", total=len(models) * len(tasks) * (rounds + 2))
        for name, case in models.items():
            torch.manual_seed(0)
            plain = build_model(case).to(device)
            fast = copy.deepcopy(plain)
            with accelerate(fast):
                for work in tasks:
                    title = f"{name}: {work.title()}"
                    progress.update(task, description=title)
                    # Graphs of the last work, and their memory.
                    torch.compiler.reset()
                    lines, apart = measure_model(plain, fast, work, rounds, lambda: progress.advance(task))
                    console.print(_table(title, lines))
                    entry = {"model": name} | asdict(case) | asdict(work)
                    results.append(entry | {"results_apart": apart, "lines": [asdict(line) for line in lines]})
            del plain, fast
    missed = [*accelerate_floors(results), *generate_floors(results)]
    console.print(shown_missed(missed))
    if json_file is not None:
        packages = ("torch", "triton", "transformers", "liger-kernel")
        gpu = torch.cuda.get_device_name() if device == "cuda" else None
        record = {
            "command": f"ropewalk bench accelerate --device {device}"
            + (f" --only {only}" if only else "")
            + (" --quick" if quick else ""),
            "date": datetime.now(UTC).date().isoformat(),
            "hardware": {"gpu": gpu, "machine": platform.machine()},
            "versions": {"python": platform.python_version()}
            | {package: package_version(package) for package in packages},
            "rounds": rounds,
            "cases": results,
        }
        write_record(record, json_file, missed=missed)
    return int(any(result["results_apart"] > LIMITS[result["dtype"]] for result in results))


def main() -> None:
    """`python -m ropewalk.tools.bench.whole_models`."""
    prog, description = "python -m ropewalk.tools.bench.whole_models", bench_whole_models.__doc__
    parser = argparse.ArgumentParser(prog=prog, description=description)
    parser.add_argument("--json", metavar="FILE", help="write the results as JSON; - for standard output")
    parser.add_argument("--only", metavar="|".join(KINDS), help="time one kind of work")
    parser.add_argument("--quick", action="store_true", help="use tiny models and few rounds")
    options = parser.parse_args()
    try:
        raise SystemExit(bench_whole_models(options.json, options.quick, only=options.only))
    except RopewalkError as error:
        sys.stderr.write(f"{error}\n")
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
