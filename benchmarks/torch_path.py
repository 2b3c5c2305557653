"""Times RotaryEmbedding's torch path on this CPU against transformers' eager formula, in turns, as a ratio.

    .venv/bin/python benchmarks/torch_path.py [--rounds N] [--json FILE]

q and k of (1, 2048, 32 and 8 heads, 128), forward without gradients. "transposed" is [batch, seq, heads, dim] memory
seen as [batch, heads, seq, dim], which transformers' models make; "contiguous" is [batch, heads, seq, dim] memory. A
path is timed only after it has passed its error budget, and error / budget stands beside its time.
"""

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from datetime import UTC, datetime

import torch
from torch import Tensor

from ropewalk.nn import RotaryEmbedding
from ropewalk.reference import assert_within_budget, rotate

SEQ, Q_HEADS, K_HEADS, DIM = 2048, 32, 8, 128


def tensors(dtype: torch.dtype, layout: str) -> list[Tensor]:
    if layout == "contiguous":
        return [torch.randn(1, heads, SEQ, DIM).to(dtype) for heads in (Q_HEADS, K_HEADS)]
    return [torch.randn(1, SEQ, heads, DIM).to(dtype).transpose(1, 2) for heads in (Q_HEADS, K_HEADS)]


def transformers_formula(dtype: torch.dtype, pairing: str) -> Callable[[Tensor], Tensor]:
    """x * cos + rotated(x) * sin with tables as wide as x, in its dtype: Llama's form for half, GPT-J's for neighbours.

    Written from their description.
    """
    angles = torch.outer(torch.arange(SEQ).float(), 10_000.0 ** (-torch.arange(0, DIM, 2).float() / DIM))
    wide = torch.cat((angles, angles), dim=-1) if pairing == "half" else angles.repeat_interleave(2, dim=-1)
    cos, sin = wide.cos().to(dtype), wide.sin().to(dtype)

    def half(x: Tensor) -> Tensor:
        first, second = x[..., : DIM // 2], x[..., DIM // 2 :]
        return x * cos + torch.cat((-second, first), dim=-1) * sin

    def interleaved(x: Tensor) -> Tensor:
        even, odd = x[..., 0::2], x[..., 1::2]
        return x * cos + torch.stack((-odd, even), dim=-1).flatten(-2) * sin

    return half if pairing == "half" else interleaved


def medians(contestants: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Milliseconds of each, taken in turns so that a busy machine slows all of them."""
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for round_number in range(rounds + 2):
        for name, run in contestants.items():
            start = time.perf_counter()
            run()
            if round_number >= 2:
                times[name].append((time.perf_counter() - start) * 1e3)
    return {name: statistics.median(taken) for name, taken in times.items()}


def _faster(name: str, ms: float, taken: dict[str, float]) -> float | None:
    """How many times faster than transformers' formula in the same pairing."""
    pairing = name.rpartition(", ")[2]
    return round(taken[f"transformers, {pairing}"] / ms, 2) if name.startswith("ropewalk") else None


def measure(rounds: int) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for dtype in (torch.float32, torch.bfloat16):
        for layout in ("transposed", "contiguous"):
            both = tensors(dtype, layout)
            contestants: dict[str, Callable[[], object]] = {
                "copy": lambda both=both: [torch.empty_like(x).copy_(x) for x in both]
            }
            errors: dict[str, float] = {}
            for pairing in ("half", "interleaved"):
                eager = transformers_formula(dtype, pairing)
                rope = RotaryEmbedding(DIM, pairing=pairing, backend="torch")
                ours = f"ropewalk torch, {pairing}"
                errors[ours] = max(
                    assert_within_budget(
                        rope(x),
                        rotate(x.double(), torch.arange(SEQ), rope.inv_freq, pairing=pairing),
                        rotary_dim=DIM,
                        pairing=pairing,
                    )
                    for x in both
                )
                contestants[f"transformers, {pairing}"] = lambda both=both, eager=eager: [eager(x) for x in both]
                contestants[ours] = lambda both=both, rope=rope: rope(*both)
            taken = medians(contestants, rounds)
            for name, ms in taken.items():
                rows.append(
                    {
                        "dtype": str(dtype).removeprefix("torch."),
                        "layout": layout,
                        "path": name,
                        "ms": round(ms, 3),
                        "times_faster_than_transformers": _faster(name, ms, taken),
                        "error_over_budget": round(errors[name], 3) if name in errors else None,
                    }
                )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    with torch.no_grad():
        rows = measure(options.rounds)
    print(f"{'dtype':10} {'layout':11} {'path':28} {'ms':>8} {'× eager':>8} {'err/budget':>10}")
    for row in rows:
        figures = [row["times_faster_than_transformers"], row["error_over_budget"]]
        shown = " ".join(f"{'' if figure is None else f'{figure:.2f}':>9}" for figure in figures)
        print(f"{row['dtype']!s:10} {row['layout']!s:11} {row['path']!s:28} {row['ms']:8.2f}{shown}")
    if options.json:
        record = {
            "command": "benchmarks/torch_path.py",
            "date": datetime.now(UTC).date().isoformat(),
            "hardware": f"{platform.machine()}, {torch.get_num_threads()} threads",
            "torch": torch.__version__,
            "rounds": options.rounds,
            "results": rows,
        }
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(record, file, indent=2)
            file.write("\n")


if __name__ == "__main__":
    main()
