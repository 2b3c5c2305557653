"""`ropewalk bench attention`, and `python -m ropewalk.tools.bench.attention` with torch alone: attention against N.

Softmax, our linear attention without and with RoPE, and fla's where it is installed. All of one length take turns in
one process, after their results were held against the float64 reference.
"""

import argparse
import itertools
import os
import platform
import sys
import textwrap
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

import torch
from torch import Tensor

from ropewalk.errors import RopewalkError, require_choice
from ropewalk.ops import backend_reasons
from ropewalk.tools.bench import timing
from ropewalk.tools.bench.attention_paths import PATHS, Attend, AttentionPath, Truth, checked_tokens
from ropewalk.tools.bench.attention_record import growth, read_record, shown_case, shown_growth
from ropewalk.tools.bench.timing import Contestant, take_turns
from ropewalk.tools.output import package_version, processor, require_writable_file, write_json

__all__ = ["AttentionCase", "AttentionLine", "attention_cases", "bench_attention", "measure"]

OURS, SOFTMAX = "ropewalk", "softmax (SDPA)"

# What a result may be off by, of its own norm: several times what the arithmetic of a path explains, and far less than
# a forgotten rotation, mask or denominator.
LIMITS = {"float32": 2.0**-15, "bfloat16": 2.0**-5}

# Seconds: a round that takes longer is repeated less often.
LONG_ROUND = 1.0

# Seconds: a call that is expected to take longer is left out.
LONGEST_CALL = 20.0


@dataclass(frozen=True)
class AttentionCase:
    """What is timed: q, k and v of (batch, heads, N, dim), causal. Work is "forward", without gradients, or
    "forward+backward". Those of the sweep differ in N alone, and growth is fitted to them."""

    shape: tuple[int, int, int, int]
    dtype: str
    work: str = "forward"
    sweep: bool = True

    def title(self) -> str:
        """The case in one line."""
        return f"{self.shape}, {self.dtype}, causal: {self.work}"

    def operations(self) -> int:
        """What softmax takes grows as this does."""
        batch, heads, seq, dim = self.shape
        return batch * heads * seq * seq * dim


@dataclass(frozen=True)
class AttentionLine:
    """A row of the table. The peak is of bytes above the inputs; temporaries are what of it is no result, as a multiple
    of q, k and v. A path that is wrong gets no time."""

    path: str
    ms: float | None
    peak_bytes: int | None
    temporaries_over_qkv: float | None
    error: float | None
    note: str | None = None


def attention_cases(device: str, quick: bool) -> list[AttentionCase]:
    """The sweep over N; on CUDA also the two shapes that have figures to reach, and a million tokens."""
    if device == "cpu":
        lengths = (256, 1024, 4096) if quick else tuple(2**n for n in range(8, 15))
        return [AttentionCase((1, 8, seq, 64), "float32") for seq in lengths]
    lengths = (1024, 16_384, 65_536) if quick else tuple(2**n for n in range(10, 19))
    # A long one first: fla's kernels are tuned on what they meet first.
    lengths = sorted(lengths, key=lambda seq: seq != 65_536)
    works = ("forward", "forward+backward")
    every = [AttentionCase((4, 16, 8192, 128), "bfloat16", work, sweep=False) for work in works]
    every += [AttentionCase((1, 16, seq, 64), "bfloat16", work) for work in works for seq in lengths]
    return every + ([] if quick else [AttentionCase((1, 4, 1_048_576, 64), "bfloat16", sweep=False)])


def _contestant(
    name: str, path: AttentionPath, attend: Attend, tensors: list[Tensor], cotangents: list[Tensor]
) -> Contestant:
    """The path on tensors as it takes them, so that none pays for another's layout."""

    def laid_out(x: Tensor) -> Tensor:
        return x.transpose(1, 2).contiguous() if path.tokens_first else x

    inputs = [laid_out(x) for x in tensors]
    if not cotangents:
        back = (lambda y: y.transpose(1, 2)) if path.tokens_first else (lambda y: y)
        return Contestant(name, lambda: attend(*inputs), lambda: [back(attend(*inputs))])
    leaves = [x.detach().requires_grad_() for x in inputs]
    timed, checked = map(laid_out, cotangents)

    def everything() -> list[Tensor]:
        out = attend(*leaves)
        results = [out.detach(), *torch.autograd.grad(out, leaves, checked)]
        return [x.transpose(1, 2) for x in results] if path.tokens_first else results

    def forward_backward() -> object:
        out = attend(*leaves)
        return out, torch.autograd.grad(out, leaves, timed)

    return Contestant(name, forward_backward, everything)


def measure(
    case: AttentionCase, rounds: int, device: str, left_out: Callable[[str], str | None] = lambda path: None
) -> tuple[list[AttentionLine], int]:
    """The lines of a case, from the fastest on, then those without a time; and how many rounds there were.

    `left_out` says of a path why it does not take part.
    """
    with torch.set_grad_enabled(case.work != "forward"):
        return _measure(case, rounds, device, left_out)


def _measure(
    case: AttentionCase, rounds: int, device: str, left_out: Callable[[str], str | None]
) -> tuple[list[AttentionLine], int]:
    dtype, seq, dim = getattr(torch, case.dtype), *case.shape[2:]
    random = torch.Generator(device).manual_seed(0)
    *tensors, cotangent = (torch.randn(case.shape, generator=random, device=device).to(dtype) for _ in range(4))
    cotangents = []
    if case.work != "forward":
        seldom = torch.zeros_like(cotangent)
        tokens = checked_tokens(seq, middle=False).to(device)
        seldom[:, :, tokens] = cotangent[:, :, tokens]
        cotangents = [cotangent, seldom]
    truths: dict[str, Truth] = {}
    contestants, errors, notes = [], {}, {}
    for name, path in PATHS.items():
        reason = left_out(name)
        if reason is not None:
            notes[name] = reason
            continue
        try:
            attend = path.maker(seq, dim, dtype, device)
            if attend is None:
                continue
            contestant = _contestant(name, path, attend, tensors, cotangents)
            outputs = contestant.outputs() if contestant.outputs else []
        except Exception as error:
            # A peer that fails must not cost the other figures.
            if name.startswith(OURS):
                raise
            notes[name] = f"{type(error).__name__}: {error}".splitlines()[0]
            continue
        if path.kind not in truths:
            truths[path.kind] = Truth(path.kind, tensors, cotangents[1] if cotangents else None)
        errors[name] = truths[path.kind].error(outputs)
        del outputs
        if errors[name] <= LIMITS[case.dtype]:
            contestants.append(contestant)
    del truths
    results = (4 if cotangents else 1) * tensors[0].nbytes
    peaks = {contestant.name: _peak_bytes(contestant.run, device) for contestant in contestants}
    rounds = rounds if _seconds(contestants, device) <= LONG_ROUND else max(rounds // 3, 1)
    taken = _times(contestants, rounds, device)
    lines = [
        AttentionLine(
            name,
            ms,
            peaks[name],
            None if (peak := peaks[name]) is None else max(peak - results, 0) / sum(x.nbytes for x in tensors),
            errors[name],
        )
        for name, ms in sorted(taken.items(), key=lambda item: item[1])
    ]
    lines += [AttentionLine(name, None, None, None, error) for name, error in errors.items() if name not in taken]
    return lines + [AttentionLine(name, None, None, None, None, note) for name, note in notes.items()], rounds


def _seconds(contestants: Sequence[Contestant], device: str) -> float:
    """What one call of each takes together, roughly."""
    start = time.perf_counter()
    for contestant in contestants:
        contestant.run()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def _times(contestants: Sequence[Contestant], rounds: int, device: str) -> dict[str, float]:
    """Medians in milliseconds."""
    if device == "cuda":
        return {name: us * 1e-3 for name, us in timing.device_times(contestants, rounds).items()}
    return take_turns(contestants, rounds, 1)


def _peak_bytes(run: Callable[[], object], device: str) -> int | None:
    """The most that a call had in memory above what was there; of the CPU what torch's allocator gave, or None."""
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    # Else the profiler reports each start and stop on standard error.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True, acc_events=True) as profile:
        run()
    raw = getattr(profile.profiler, "kineto_results", None)
    events = [] if raw is None else [event for event in raw.events() if event.name() == "[memory]"]
    changes = (event.nbytes() for event in sorted(events, key=lambda event: event.start_ns()))
    return max(itertools.accumulate(changes), default=None)


def _why_left_out(path: str, case: AttentionCase, done: Sequence[dict[str, Any]]) -> str | None:
    """Softmax is left out where what it took last, times how much more it has to do, is past the limit."""
    known = [
        (AttentionCase(tuple(one["shape"]), one["dtype"]), line["ms"])
        for one in done
        for line in one["lines"]
        if line["path"] == path == SOFTMAX and line["ms"] is not None and one["work"] == case.work
    ]
    if not known:
        return None
    before, ms = known[-1]
    seconds = ms * 1e-3 * case.operations() / before.operations()
    return f"left out: one call would take some {seconds:.0f} s" if seconds > LONGEST_CALL else None


def _device(device: str | None, asked: str) -> str:
    """The requested device; by default CUDA where PyTorch sees it."""
    if device is None:
        return "cuda" if torch.cuda.is_available() and backend_reasons()["triton"] is None else "cpu"
    require_choice(device, ("cpu", "cuda"), asked=f"{asked} --device {device}")
    reason = backend_reasons()["triton"]
    if device == "cuda" and (reason is not None or not torch.cuda.is_available()):
        raise RopewalkError(
            asked=f"{asked} --device cuda",
            expected="a CUDA device and Triton",
            got=reason or "no CUDA device",
            do="run it on a machine with a GPU; --device cpu times this one",
        )
    return device


def _hardware(device: str) -> dict[str, Any]:
    if device == "cuda":
        return {"gpu": torch.cuda.get_device_name(), "machine": platform.machine()}
    return {"machine": platform.machine(), "processor": processor(), "threads": torch.get_num_threads()}


def _run(json_file: str | None, quick: bool, device: str) -> dict[str, Any]:
    """Measures, shows and records every case."""
    show = sys.stderr if json_file == "-" else sys.stdout
    rounds = 5 if quick else 21
    record: dict[str, Any] = {
        "command": f"ropewalk bench attention --device {device}" + (" --quick" if quick else ""),
        "date": datetime.now(UTC).date().isoformat(),
        "device": device,
        "hardware": _hardware(device),
        "versions": {"python": platform.python_version(), "cuda": torch.version.cuda}
        | {package: package_version(package) for package in ("torch", "triton", "flash-linear-attention")},
        "rounds": rounds,
        "cases": [],
        "growth": [],
    }
    hardware = ", ".join(f"{name} {value}" for name, value in record["hardware"].items())
    show.write(
        textwrap.fill(f"{hardware}; medians of rounds in turns.", 80) + "\n"
        "Shapes: batch, heads, N, dim. x RoPE: time over that of ropewalk linear + RoPE;\n"
        "peak: memory above the inputs; of q,k,v: what of it is no result, over them;\n"
        "error: |result - float64 reference| / |reference|, the largest.\n\n"
    )
    chosen = attention_cases(device, quick)
    for number, case in enumerate(chosen, 1):
        sys.stderr.write(f"measuring {number} of {len(chosen)}: {case.title()}\n")
        sys.stderr.flush()
        lines, taken = measure(case, rounds, device, lambda path, case=case: _why_left_out(path, case, record["cases"]))
        record["cases"].append(asdict(case) | {"rounds": taken, "lines": [asdict(line) for line in lines]})
        record["growth"] = growth(device, record["cases"])
        show.write(shown_case(record["cases"][-1]) + "\n")
        show.flush()
        if device == "cuda":
            torch.cuda.empty_cache()
        if json_file not in (None, "-"):
            # After every case: what was measured is kept, whatever stops the rest.
            write_json(record, json_file)
    if json_file == "-":
        write_json(record, json_file)
    return record


def _plotter(target: str, asked: str) -> Callable[[dict[str, Any]], None]:
    """The function that draws a record into `target`. Called before anything is timed: matplotlib may be missing."""
    from ropewalk.tools.bench.attention_plot import draw
    from ropewalk.tools.pictures import require_picture

    require_picture(target, asked=asked)
    return lambda record: draw(record, target)


def bench_attention(
    json_file: str | None = None,
    quick: bool = False,
    plot: str | None = None,
    device: str | None = None,
    from_file: str | None = None,
) -> int:
    """Times attention against N and prints one table per case; 0, or 1 if one of our own paths is wrong."""
    asked = "ropewalk bench attention"
    if json_file is not None:
        require_writable_file(json_file, asked=f"{asked} --json {json_file}")
    draw = None if plot is None else _plotter(plot, f"{asked} --plot {plot}")
    if from_file is not None:
        if json_file is not None or quick or device is not None:
            raise RopewalkError(
                asked=f"{asked} --from {from_file}",
                expected="--plot or nothing beside --from, which measures nothing",
                got="--json, --quick or --device too",
                do="leave them out, or leave --from out and measure",
            )
        record = read_record(from_file, f"{asked} --from {from_file}")
    else:
        record = _run(json_file, quick, _device(device, asked))
    show = sys.stderr if json_file == "-" else sys.stdout
    if from_file is not None:
        for case in record["cases"]:
            show.write(shown_case(case) + "\n")
    show.write(shown_growth(record))
    if draw is not None:
        draw(record)
        show.write(f"picture: {plot}\n")
    ours = (line for case in record["cases"] for line in case["lines"] if line["path"].startswith(OURS))
    return int(any(line["ms"] is None for line in ours))


def main() -> None:
    """`python -m ropewalk.tools.bench.attention`."""
    parser = argparse.ArgumentParser(
        prog="python -m ropewalk.tools.bench.attention", description=bench_attention.__doc__
    )
    parser.add_argument("--json", metavar="FILE", help="write the figures as JSON; - for standard output")
    parser.add_argument("--quick", action="store_true", help="three lengths, few rounds")
    parser.add_argument("--plot", metavar="FILE.png", help="draw time against N")
    parser.add_argument("--device", metavar="cpu|cuda", help="what to time; CUDA where there is one")
    parser.add_argument("--from", dest="from_file", metavar="FILE", help="measure nothing: show what --json wrote")
    options = parser.parse_args()
    try:
        raise SystemExit(bench_attention(options.json, options.quick, options.plot, options.device, options.from_file))
    except RopewalkError as error:
        sys.stderr.write(f"{error}\n")
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
