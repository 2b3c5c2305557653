"""Compares attention with ALiBi over two ranks with one rank: torch's context parallelism, and `ropewalk.parallel`.

python benchmarks/context_parallel.py [--json benchmarks/context_parallel.json]

torch's context parallelism for FlexAttention gathers the keys and values, and rewrites the mask for the queries of each
rank. It does not rewrite a `score_mod`, which then gets the index of a query on its rank. Uses the functions that torch
has for it, whose names are private. Two processes, gloo, float32 on a CPU, (1, 4, 512, 16), causal.
"""

import argparse
import platform
import sys
import tempfile
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.experimental import _context_parallel as torch_context_parallel
from torch.distributed.tensor.experimental._context_parallel._attention import _create_cp_block_mask
from torch.distributed.tensor.parallel import parallelize_module
from torch.multiprocessing.spawn import spawn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import ropewalk as rw
from ropewalk.tools.bench.records import write_record
from ropewalk.tools.output import processor

HEADS, LENGTH, DIM, RANKS = 4, 512, 16, 2
TIMEOUT = timedelta(seconds=120)
SLOPES = torch.tensor([2.0 ** (-8 * (h + 1) / HEADS) for h in range(HEADS)])
# What torch computes wrongly. With q - k and consecutive tokens, a wrong q changes all scores of a query by one number,
# which cancels.
WRONG = {
    ("score - slope * (q - k)", "head and tail"),
    ("score - slope * abs(q - k)", "contiguous"),
    ("score - slope * abs(q - k)", "head and tail"),
}


class Flex(nn.Module):
    """FlexAttention as a module, to which torch applies its context parallelism."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        return flex_attention(query, key, value, **options)  # pyright: ignore[reportReturnType]


def causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q >= k


# ALiBi in two forms that are the same for visible keys.
SCORES: dict[str, Any] = {
    "no score_mod": None,
    "score - slope * (q - k)": lambda score, b, h, q, k: score - SLOPES[h] * (q - k),
    "score - slope * abs(q - k)": lambda score, b, h, q, k: score - SLOPES[h] * (q - k).abs(),
}


def inputs() -> list[Tensor]:
    random = torch.Generator().manual_seed(0)
    return [torch.randn(1, HEADS, LENGTH, DIM, generator=random) for _ in range(3)]


def error_of_torch(mesh: DeviceMesh, balanced: bool, score_mod: Any, truth: Tensor) -> float:
    """The largest error of torch's context parallelism. If `balanced`, a rank has a head and a tail of the sequence."""
    balancer = torch_context_parallel._HeadTailLoadBalancer(LENGTH, RANKS, "cpu") if balanced else None
    style = torch_context_parallel._ContextParallel(2, torch_context_parallel._ContextParallel.AttentionType.FLEX)
    layer = parallelize_module(Flex(), mesh, style)
    # First, because it sets for the whole process whether the mask below is that of a balanced order.
    *parts, expected = torch_context_parallel._context_parallel_shard(mesh, [*inputs(), truth], [2] * 4, balancer)
    mask = _create_cp_block_mask(causal, 1, HEADS, LENGTH, LENGTH, mesh, balancer)
    return largest_error(layer(*parts, score_mod=score_mod, block_mask=mask), expected)


def largest_error(out: Tensor, truth: Any) -> float:
    """The largest error of all ranks."""
    error = (out - truth).abs().max().nan_to_num(nan=torch.inf)
    dist.all_reduce(error, dist.ReduceOp.MAX)
    return error.item()


def our_error(mesh: DeviceMesh, layout: Any, truth: Tensor) -> float:
    shards = rw.parallel.Shards(mesh, LENGTH, layout)
    encoding = rw.encoding("alibi", dim=HEADS * DIM, num_heads=HEADS)
    parts = [shards.cut(x, 2) for x in inputs()]
    return largest_error(rw.parallel.attention(*parts, shards=shards, encoding=encoding), shards.cut(truth, 2))


def _rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=Path(folder, "store").as_uri(), rank=rank, world_size=RANKS, timeout=TIMEOUT
    )
    mesh = init_device_mesh("cpu", (RANKS,))
    mask = create_block_mask(causal, None, None, LENGTH, LENGTH, device="cpu")
    cases: list[dict[str, Any]] = []
    for name, score_mod in SCORES.items():
        truth: Any = flex_attention(*inputs(), score_mod=score_mod, block_mask=mask)
        for layout in ("contiguous", "head and tail"):
            error = error_of_torch(mesh, layout != "contiguous", score_mod, truth)
            cases.append({"path": f"torch, {name}", "layout": layout, "error": error})
    for layout in ("contiguous", "zigzag"):
        cases.append({"path": "ropewalk, ALiBi", "layout": layout, "error": our_error(mesh, layout, truth)})
    if rank == 0:
        torch.save(cases, Path(folder, "cases"))
    dist.barrier()
    dist.destroy_process_group()


def measure() -> list[dict[str, Any]]:
    """The largest error of each path over two ranks, against FlexAttention on one rank."""
    with tempfile.TemporaryDirectory() as folder:
        spawn(_rank, (folder,), RANKS)
        return torch.load(Path(folder, "cases"))


def missed(cases: list[dict[str, Any]]) -> list[str]:
    """What docs/parallel.md says and these errors do not show."""
    wrong = {(f"torch, {name}", layout) for name, layout in WRONG}
    expected = {(f"torch, {name}", layout) for name in SCORES for layout in ("contiguous", "head and tail")}
    expected |= {("ropewalk, ALiBi", layout) for layout in ("contiguous", "zigzag")}
    found = {(x["path"], x["layout"]): x["error"] for x in cases}
    surprises = [place for place in expected & found.keys() if not _is_as_stated(found[place], place in wrong)]
    missing = [f"{path}, {layout}: has no error" for path, layout in sorted(expected - found.keys())]
    return missing + [f"{path}, {layout}: error {found[path, layout]:.2g}" for path, layout in sorted(surprises)]


def _is_as_stated(error: float, wrong: bool) -> bool:
    return error > 0.1 if wrong else error <= 1e-5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", help="write the record")
    options, cases = parser.parse_args(), measure()
    for case in cases:
        print(f"{case['path']:<36}{case['layout']:<16}{case['error']:.1e}")
    record = {
        "command": "python benchmarks/context_parallel.py",
        "date": datetime.now(UTC).date().isoformat(),
        "hardware": {"machine": platform.machine(), "processor": processor()},
        "ranks": RANKS,
        "shape": [1, HEADS, LENGTH, DIM],
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "cases": cases,
    }
    if options.json:
        write_record(record, options.json, missed(cases))
    sys.exit("\n".join(missed(cases)) or 0)


if __name__ == "__main__":
    main()
