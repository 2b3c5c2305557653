"""`python -m ropewalk.tools.bench.accelerate`: the rotation's share of a forward pass, before and after accelerate.

Two copies of one model with random weights, one of them accelerated, are timed in interleaved rounds. The same passes
measure the time inside the rotation and, if the model has them, the norms of q and k.
"""

import argparse
import copy
import importlib
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import nn

from ropewalk.errors import RopewalkError, require_choice
from ropewalk.hub.accelerate.acceleration import accelerate
from ropewalk.hub.accelerate.norm_fusion import FUSED
from ropewalk.kernels.native.extension import instructions
from ropewalk.tools.bench.records import write_record
from ropewalk.tools.bench.timing import Candidate, wall_times
from ropewalk.tools.output import package_version, processor, require_writable_file

__all__ = ["AcceleratedLine", "ModelCase", "bench_accelerate", "build_model", "measure", "model_cases"]

ROTATION = "apply_rotary_pos_emb"

# The allowed relative difference of the logits: both models round about a hundred times, in different orders.
LIMITS = {"float32": 300 * 2.0**-24, "bfloat16": 30 * 2.0**-9, "float16": 30 * 2.0**-12}


@dataclass(frozen=True)
class ModelCase:
    """A model family of transformers, the sizes of a model with random weights, and the tokens of a forward pass.

    Attributes:
        intermediate: The width of the MLP. 0 for 11/4 of `hidden`.
    """

    family: str
    dtype: str
    tokens: int = 512
    hidden: int = 1024
    layers: int = 8
    heads: int = 16
    kv_heads: int = 8
    head_dim: int = 64
    intermediate: int = 0
    vocabulary: int = 1024

    def title(self) -> str:
        """The case in one line."""
        return f"{self.family}, {self.dtype}, {self.tokens} tokens"


@dataclass(frozen=True)
class AcceleratedLine:
    """A row of the table: medians of the whole pass and of the rotation in it (with the norms of q and k)."""

    path: str
    forward_ms: float
    rotation_ms: float
    rotation_share: float


def model_cases(quick: bool, dtype: str = "float32") -> list[ModelCase]:
    """Llama, and Qwen 3, whose norms of q and k are fused with the rotation. Two small layers if `quick`."""
    sizes: dict[str, int] = {"tokens": 64, "hidden": 128, "layers": 2, "heads": 4, "kv_heads": 2} if quick else {}
    return [ModelCase(family, dtype, **sizes) for family in ("llama", "qwen3")]


def build_model(case: ModelCase) -> nn.Module:
    """A model of these sizes with random weights.

    Raises:
        RopewalkError: If transformers is not installed.
    """
    try:
        transformers = importlib.import_module("transformers")
    except ImportError:
        raise RopewalkError(
            asked="ropewalk bench accelerate",
            expected="transformers, whose models are timed",
            got="transformers is not installed",
            do="pip install 'ropewalk[hf]'",
        ) from None
    width = case.intermediate or 11 * case.hidden // 4
    sizes = {"hidden_size": case.hidden, "intermediate_size": width, "head_dim": case.head_dim}
    heads = {"num_attention_heads": case.heads, "num_key_value_heads": case.kv_heads}
    name = {"llama": "Llama", "qwen3": "Qwen3"}[case.family]
    config = getattr(transformers, f"{name}Config")(
        **sizes, **heads, num_hidden_layers=case.layers, vocab_size=case.vocabulary, use_cache=False
    )
    return getattr(transformers, f"{name}ForCausalLM")(config).eval().to(getattr(torch, case.dtype))


class _Clock:
    """Accumulates the time inside functions."""

    def __init__(self) -> None:
        self.elapsed = 0

    def timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function, and add the time of its calls to `elapsed`."""

        def run(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter_ns()
            result = function(*args, **kwargs)
            self.elapsed += time.perf_counter_ns() - start
            return result

        return run

    @contextmanager
    def inside(self, model: nn.Module) -> Iterator[None]:
        """Time the rotation of the model's attention, and norms of q and k that are called separately."""
        layers = [module for module in model.modules() if hasattr(module, "q_proj")]
        names = type(layers[0]).forward.__globals__
        originals = {name: names[name] for name in (ROTATION, FUSED) if name in names}
        norms = [norm for module in layers for key, norm in module.named_children() if key in ("q_norm", "k_norm")]
        # The accelerated class calls its norms through the fused function, which is timed as a whole.
        norms = [] if FUSED in names else norms
        try:
            names.update({name: self.timed(function) for name, function in originals.items()})
            for norm in norms:
                norm.forward = self.timed(norm.forward)
            yield
        finally:
            names.update(originals)
            for norm in norms:
                del norm.forward


def measure(
    case: ModelCase, rounds: int, advance: Callable[[], None] = lambda: None
) -> tuple[list[AcceleratedLine], float]:
    """Time one case.

    Args:
        case: The model.
        rounds: The number of rounds.
        advance: Called after every round.

    Returns:
        The two rows, and the rms of the difference of the logits over the rms of the logits.
    """
    torch.manual_seed(0)
    plain = build_model(case)
    fast = copy.deepcopy(plain)
    tokens = torch.randint(0, case.vocabulary, (1, case.tokens))
    rotation_times: dict[str, list[int]] = {}
    candidates: list[Candidate] = []
    with torch.inference_mode(), accelerate(fast):
        for name, model in (("transformers", plain), ("ropewalk", fast)):

            def run(name: str = name, model: nn.Module = model) -> None:
                clock = _Clock()
                with clock.inside(model):
                    model(tokens)
                rotation_times.setdefault(name, []).append(clock.elapsed)

            candidates.append(Candidate(name, run))
        times = wall_times(candidates, rounds, 1, advance)
        logits = [model(tokens).logits.double() for model in (plain, fast)]
    lines = []
    for name, ms in times.items():
        rotation = statistics.median(rotation_times[name][-rounds:]) * 1e-6
        lines.append(AcceleratedLine(name, ms, rotation, rotation / ms))
    apart = (logits[0] - logits[1]).square().mean().sqrt() / logits[0].square().mean().sqrt()
    return lines, float(apart)


def _table(case: ModelCase, lines: list[AcceleratedLine], apart: float) -> Table:
    table = Table(
        title=case.title(), caption=f"relative difference of logits: {apart:.0e}", title_justify="left", box=None
    )
    table.title_style, table.caption_justify = "bold", "left"
    table.add_column("path")
    for name in ("forward ms", "rotation ms", "share"):
        table.add_column(name, justify="right")
    for line in lines:
        table.add_row(line.path, f"{line.forward_ms:.1f}", f"{line.rotation_ms:.2f}", f"{line.rotation_share:.1%}")
    return table


def bench_accelerate(json_file: str | None = None, quick: bool = False, dtype: str = "float32") -> int:
    """Time forward passes on the CPU before and after accelerate. Exits with 1 if the logits differ too much."""
    console = Console(stderr=json_file == "-", highlight=False, markup=False)
    if json_file is not None:
        require_writable_file(json_file, asked=f"ropewalk bench accelerate --json {json_file}")
    require_choice(dtype, LIMITS, asked=f"ropewalk bench accelerate --dtype {dtype}")
    cases, rounds = model_cases(quick, dtype), 3 if quick else 11
    first = cases[0]
    console.print(
        f"One forward pass: {first.layers} layers, hidden {first.hidden}, {first.heads} and {first.kv_heads} heads "
        f"of {first.head_dim}, random weights; medians of {rounds} interleaved rounds, "
        f"{torch.get_num_threads()} threads. Rotation: the time inside its calls, with the norms of q and k for qwen3"
    )
    results: list[dict[str, Any]] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("measuring", total=len(cases) * (rounds + 2))
        for case in cases:
            progress.update(task, description=case.title())
            lines, apart = measure(case, rounds, lambda: progress.advance(task))
            console.print(_table(case, lines, apart))
            results.append(asdict(case) | {"logits_apart": apart, "lines": [asdict(line) for line in lines]})
    if json_file is not None:
        record = {
            "command": f"python -m ropewalk.tools.bench.accelerate --dtype {dtype}" + (" --quick" if quick else ""),
            "date": datetime.now(UTC).date().isoformat(),
            "hardware": {
                "machine": platform.machine(),
                "processor": processor(),
                "threads": torch.get_num_threads(),
                "instructions": instructions(),
            },
            "versions": {"python": platform.python_version()}
            | {package: package_version(package) for package in ("torch", "transformers")},
            "rounds": rounds,
            "cases": results,
        }
        write_record(record, json_file, missed=[])
    return int(any(result["logits_apart"] > LIMITS[dtype] for result in results))


def main() -> None:
    """`python -m ropewalk.tools.bench.accelerate`."""
    parser = argparse.ArgumentParser(
        prog="python -m ropewalk.tools.bench.accelerate", description=bench_accelerate.__doc__
    )
    parser.add_argument("--json", metavar="FILE", help="write the results as JSON; - for standard output")
    parser.add_argument("--quick", action="store_true", help="use a tiny model and few rounds")
    parser.add_argument(
        "--dtype", default="float32", metavar="|".join(LIMITS), help="the dtype of the model (default: float32)"
    )
    options = parser.parse_args()
    try:
        raise SystemExit(bench_accelerate(options.json, options.quick, options.dtype))
    except RopewalkError as error:
        sys.stderr.write(f"{error}\n")
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
