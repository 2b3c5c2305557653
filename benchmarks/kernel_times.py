"""Prints which kernels linear attention on a GPU spends its time in: plain, and with a decay or a bias.

python benchmarks/kernel_times.py [--rounds 10] [--json benchmarks/kernel_times.json]

Forward and backward of the paths that `python -m ropewalk.tools.bench.attention --only weights` times, in bfloat16 with
RoPE, by torch's profiler: microseconds per call that each kernel is on the device, summed over its launches. Calls
follow each other, so that a part of their inputs is in the cache, other than in that benchmark. The record is written
anew after every case, so that a run that is stopped early leaves one.
"""

import argparse
import platform
from datetime import UTC, datetime
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from ropewalk.tools.bench.attention_paths import GROUPS
from ropewalk.tools.bench.records import write_record
from ropewalk.tools.output import package_version

SHAPES = (1, 16, 65_536, 64), (4, 16, 8192, 128)
# Shorter ones are torch's own kernels on T5's numbers.
LEAST = 15.0


def kernels(path: str, shape: tuple[int, int, int, int], rounds: int) -> dict[str, list[float]]:
    """Name of a kernel -> microseconds and launches per call."""
    random = torch.Generator("cuda").manual_seed(0)
    q, k, v, cotangent = (torch.randn(shape, generator=random, device="cuda").bfloat16() for _ in range(4))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    attend = GROUPS["weights"][path].maker(shape[2], shape[3], torch.bfloat16, "cuda")
    if attend is None:
        raise RuntimeError(f"{path} is not available")

    def run() -> tuple[Tensor, ...]:
        return torch.autograd.grad(attend(*leaves), leaves, cotangent)

    for _ in range(5):
        run()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiled:
        for _ in range(rounds):
            run()
        torch.cuda.synchronize()
    events = ((x.key, x.device_time_total / rounds, x.count / rounds) for x in profiled.key_averages())
    return {name: [round(us, 1), launches] for name, us, launches in events if us > LEAST}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--json", metavar="FILE", help="write the record")
    options = parser.parse_args()
    cases: list[dict[str, Any]] = []
    record = {
        "command": "python benchmarks/kernel_times.py",
        "date": datetime.now(UTC).date().isoformat(),
        "hardware": {"machine": platform.machine(), "gpu": torch.cuda.get_device_name()},
        "versions": {"python": platform.python_version()} | {x: package_version(x) for x in ("torch", "triton")},
        "rounds": options.rounds,
        "cases": cases,
    }
    for shape in SHAPES:
        for path in GROUPS["weights"]:
            times = kernels(path, shape, options.rounds)
            total = sum(us for us, _ in times.values())
            cases.append({"shape": list(shape), "path": path, "us": round(total, 1), "kernels": times})
            print(f"{shape} {path}: {total:.0f} us")
            for name, (us, launches) in sorted(times.items(), key=lambda item: -item[1][0]):
                print(f"{us:10.1f} us in {launches:g} launches: {name}", flush=True)
            if options.json:
                write_record(record, options.json, [])


if __name__ == "__main__":
    main()
