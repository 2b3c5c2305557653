"""`ropewalk bench attention`: softmax and linear attention against the length N, and what a decay or a bias costs.

`python -m ropewalk.tools.bench.attention` needs only torch. Softmax, our linear attention with and without RoPE, and
that of fla, if installed, are timed per length in interleaved rounds. On a GPU, decays and biases are timed next to the
plain call, and functions of fla with a decay next to ours. Results are first compared with the float64 reference.
"""

import argparse
import itertools
import json
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
from ropewalk.tools.bench.attention_paths import GROUPS, Attend, AttentionPath
from ropewalk.tools.bench.attention_record import (
    growth,
    measured_cases,
    read_record,
    shown_case,
    shown_crossing,
    shown_growth,
    titled,
)
from ropewalk.tools.bench.attention_truth import LIMITS, Truth, checked_tokens
from ropewalk.tools.bench.floors import attention_floors
from ropewalk.tools.bench.records import shown_missed, write_record
from ropewalk.tools.bench.timing import Candidate, wall_times
from ropewalk.tools.output import package_version, processor, require_writable_file

__all__ = ["AttentionCase", "AttentionLine", "attention_cases", "bench_attention", "measure"]

OURS, SOFTMAX = "ropewalk", "softmax (SDPA)"

# Seconds: a longer round is repeated less often.
LONG_ROUND = {"cpu": 1.0, "cuda": 0.25}

# Seconds: a call with a longer expected time is skipped.
LONGEST_CALL = {("cuda", "forward+backward"): 1.0}
LONGEST_OTHER_CALL = 20.0

# The largest N that is timed by the clock on a GPU. From there on the host needs a small part of the time.
CLOCKED = 65_536


@dataclass(frozen=True)
class AttentionCase:
    """A case: attention of q, k and v.

    Attributes:
        shape: (batch, heads, N, dim) of q, k and v.
        dtype: Their dtype.
        work: "forward", without gradients, or "forward+backward".
        sweep: Whether the case belongs to the sweep over N, to which growth is fitted.
        group: The paths that are timed, a key of `GROUPS`.
    """

    shape: tuple[int, int, int, int]
    dtype: str
    work: str = "forward"
    sweep: bool = True
    group: str = "lengths"

    def title(self) -> str:
        """The case in one line."""
        return titled(asdict(self))

    def operations(self) -> int:
        """A number to which the cost of softmax attention is proportional."""
        batch, heads, seq, dim = self.shape
        return batch * heads * seq * seq * dim


@dataclass(frozen=True)
class AttentionLine:
    """A row of the table.

    Attributes:
        path: The name of the path.
        ms: The median time: on the device on a GPU, by the clock on a CPU. None if the result is wrong.
        peak_bytes: The peak memory above the inputs.
        temporaries_over_qkv: The part of the peak that is not results, divided by the size of q, k and v.
        error: The largest relative error.
        note: Why the path was not timed.
        wall_ms: The median time of one call that is waited for, by the clock, on a GPU.
        difference: |output - output of the path of ours that computes the same| / |the latter|, over all tokens.
    """

    path: str
    ms: float | None
    peak_bytes: int | None
    temporaries_over_qkv: float | None
    error: float | None
    note: str | None = None
    wall_ms: float | None = None
    difference: float | None = None


def attention_cases(device: str, quick: bool) -> list[AttentionCase]:
    """The sweep over N. On CUDA also two shapes with target figures, for every group, and a million tokens."""
    if device == "cpu":
        lengths = (256, 1024, 4096) if quick else tuple(2**n for n in range(8, 15))
        return [AttentionCase((1, 8, seq, 64), "float32") for seq in lengths]
    lengths = (1024, 16_384, 65_536) if quick else tuple(2**n for n in range(10, 19))
    # A long sequence comes first, because fla tunes its kernels at the first call.
    lengths = sorted(lengths, key=lambda seq: seq != 65_536)
    works = ("forward", "forward+backward")
    cases = [AttentionCase((4, 16, 8192, 128), "bfloat16", work, sweep=False) for work in works]
    cases += [AttentionCase((1, 16, seq, 64), "bfloat16", work) for work in works for seq in lengths]
    shapes = [(1, 16, 65_536, 64), *([] if quick else [(4, 16, 8192, 128)])]
    cases += [
        AttentionCase(shape, "bfloat16", work, sweep=False, group=group)
        for group in ("weights", "peers")
        for shape in shapes
        for work in works
    ]
    return cases + ([] if quick else [AttentionCase((1, 4, 1_048_576, 64), "bfloat16", sweep=False)])


def _candidate(
    name: str, path: AttentionPath, attend: Attend, tensors: list[Tensor], cotangents: list[Tensor]
) -> Candidate:
    """The path on tensors in its own layout, so that a conversion is not timed."""

    def laid_out(x: Tensor) -> Tensor:
        return x.transpose(1, 2).contiguous() if path.tokens_first else x

    inputs = [laid_out(x) for x in tensors]
    if not cotangents:
        back = (lambda y: y.transpose(1, 2)) if path.tokens_first else (lambda y: y)
        return Candidate(name, lambda: attend(*inputs), lambda: [back(attend(*inputs))])
    leaves = [x.detach().requires_grad_() for x in inputs]
    timed, checked = map(laid_out, cotangents)

    def outputs_and_gradients() -> list[Tensor]:
        out = attend(*leaves)
        results = [out.detach(), *torch.autograd.grad(out, leaves, checked)]
        return [x.transpose(1, 2) for x in results] if path.tokens_first else results

    def forward_backward() -> object:
        out = attend(*leaves)
        return out, torch.autograd.grad(out, leaves, timed)

    return Candidate(name, forward_backward, outputs_and_gradients)


def measure(
    case: AttentionCase, rounds: int, device: str, left_out: Callable[[str], str | None] = lambda path: None
) -> tuple[list[AttentionLine], int]:
    """Time one case.

    Args:
        case: The case.
        rounds: The number of rounds. A long round is repeated less often.
        device: "cpu" or "cuda".
        left_out: Returns the reason why a path is not timed, or None.

    Returns:
        The rows, fastest first, then those without a time; and the number of rounds.
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
        sparse = torch.zeros_like(cotangent)
        tokens = checked_tokens(seq, middle=False).to(device)
        sparse[:, :, tokens] = cotangent[:, :, tokens]
        cotangents = [cotangent, sparse]
    truths: dict[str, Truth] = {}
    paths = GROUPS[case.group]
    candidates, errors, notes = [], {}, {}
    compared: dict[str, Tensor] = {}
    differences: dict[str, float] = {}
    for name, path in paths.items():
        reason = left_out(name)
        if reason is not None:
            notes[name] = reason
            continue
        try:
            attend = path.maker(seq, dim, dtype, device)
            if attend is None:
                continue
            candidate = _candidate(name, path, attend, tensors, cotangents)
            outputs = candidate.outputs() if candidate.outputs else []
        except Exception as error:
            # Another library that fails must not stop the benchmark.
            if name.startswith(OURS):
                raise
            notes[name] = f"{type(error).__name__}: {error}".splitlines()[0]
            continue
        if path.kind not in truths:
            truths[path.kind] = Truth(path.kind, tensors, cotangents[1] if cotangents else None)
        errors[name] = truths[path.kind].error(outputs)
        if path.beside in compared:
            differences[name] = _difference(outputs[0], compared[path.beside])
        elif any(other.beside == name for other in paths.values()):
            compared[name] = outputs[0]
        del outputs
        if errors[name] <= LIMITS[case.dtype]:
            candidates.append(candidate)
    del truths, compared
    result_bytes = (4 if cotangents else 1) * tensors[0].nbytes
    peaks = {candidate.name: _peak_bytes(candidate.run, device) for candidate in candidates}
    rounds = rounds if _seconds(candidates, device) <= LONG_ROUND[device] else max(rounds // 3, 1)
    times = _times(candidates, rounds, device)
    walls = _clock_times(candidates, rounds, device, seq)
    lines = [
        AttentionLine(
            name,
            ms,
            peaks[name],
            None if (peak := peaks[name]) is None else max(peak - result_bytes, 0) / sum(x.nbytes for x in tensors),
            errors[name],
            wall_ms=walls.get(name),
            difference=differences.get(name),
        )
        for name, ms in sorted(times.items(), key=lambda item: item[1])
    ]
    lines += [
        AttentionLine(name, None, None, None, error, difference=differences.get(name))
        for name, error in errors.items()
        if name not in times
    ]
    return lines + [AttentionLine(name, None, None, None, None, note) for name, note in notes.items()], rounds


def _seconds(candidates: Sequence[Candidate], device: str) -> float:
    """The approximate time of one call of each candidate together."""
    start = time.perf_counter()
    for candidate in candidates:
        candidate.run()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def _times(candidates: Sequence[Candidate], rounds: int, device: str) -> dict[str, float]:
    """The median time of each candidate, in milliseconds."""
    if device == "cuda":
        return {name: us * 1e-3 for name, us in timing.device_times(candidates, rounds).items()}
    return wall_times(candidates, rounds, 1)


def _clock_times(candidates: Sequence[Candidate], rounds: int, device: str, seq: int) -> dict[str, float]:
    """The times by the clock on a GPU, for lengths up to `CLOCKED`."""
    return _clock(candidates, rounds) if device == "cuda" and seq <= CLOCKED else {}


def _clock(
    candidates: Sequence[Candidate], rounds: int, wait: Callable[[], object] = torch.cuda.synchronize
) -> dict[str, float]:
    """The median time of one call by the clock, in milliseconds. Every call is waited for before the next one."""

    def waited(run: Callable[[], object]) -> Callable[[], object]:
        def call() -> None:
            run()
            wait()

        return call

    wait()
    return wall_times([Candidate(candidate.name, waited(candidate.run)) for candidate in candidates], rounds, 1)


def _difference(x: Tensor, other: Tensor) -> float:
    """|x - other| / |other| over all elements; infinite for a NaN or another shape."""
    if x.shape != other.shape:
        return torch.inf
    ratio = (x.detach().float() - other.detach().float()).norm() / other.detach().float().norm()
    return float(torch.nan_to_num(ratio, nan=torch.inf))


def _peak_bytes(run: Callable[[], object], device: str) -> int | None:
    """The peak memory of a call above the memory in use before. None if the profiler recorded no allocation."""
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    # Otherwise the profiler logs every start and stop on standard error.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True, acc_events=True) as profile:
        run()
    raw = getattr(profile.profiler, "kineto_results", None)
    events = [] if raw is None else [event for event in raw.events() if event.name() == "[memory]"]
    changes = (event.nbytes() for event in sorted(events, key=lambda event: event.start_ns()))
    return max(itertools.accumulate(changes), default=None)


def _why_left_out(
    path: str, case: AttentionCase, measured: Sequence[dict[str, Any]], device: str = "cpu"
) -> str | None:
    """The reason to skip softmax, if its expected time, extrapolated from the last measured one, exceeds the limit."""
    timed = [
        (AttentionCase(tuple(other["shape"]), other["dtype"]), line["ms"])
        for other in measured
        for line in other["lines"]
        if line["path"] == path == SOFTMAX and line["ms"] is not None and other["work"] == case.work
    ]
    if not timed:
        return None
    last, ms = timed[-1]
    seconds = ms * 1e-3 * case.operations() / last.operations()
    longest = LONGEST_CALL.get((device, case.work), LONGEST_OTHER_CALL)
    return f"skipped: one call would take about {seconds:.2g} s" if seconds > longest else None


def _device(device: str | None, asked: str) -> str:
    """The requested device. Default: CUDA if PyTorch supports it here."""
    if device is None:
        return "cuda" if torch.cuda.is_available() and backend_reasons()["triton"] is None else "cpu"
    require_choice(device, ("cpu", "cuda"), asked=f"{asked} --device {device}")
    reason = backend_reasons()["triton"]
    if device == "cuda" and (reason is not None or not torch.cuda.is_available()):
        raise RopewalkError(
            asked=f"{asked} --device cuda",
            expected="a CUDA device and Triton",
            got=reason or "no CUDA device",
            do="use a machine with a GPU, or --device cpu",
        )
    return device


def _hardware(device: str) -> dict[str, Any]:
    if device == "cuda":
        return {"gpu": torch.cuda.get_device_name(), "machine": platform.machine()}
    return {"machine": platform.machine(), "processor": processor(), "threads": torch.get_num_threads()}


def _run(json_file: str | None, quick: bool, device: str, only: str | None, resume: bool) -> dict[str, Any]:
    """Measure every case, print its table and record it. If `resume`, cases that the file has are not measured."""
    show = sys.stderr if json_file == "-" else sys.stdout
    rounds = 5 if quick else 21
    record: dict[str, Any] = {
        "command": f"ropewalk bench attention --device {device}"
        + (" --quick" if quick else "")
        + (f" --only {only}" if only else ""),
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
        textwrap.fill(f"{hardware}; medians over interleaved rounds.", 80) + "\n"
        "Shapes: batch, heads, N, dim. x RoPE: time / time of ropewalk linear + RoPE.\n"
        "ms: on a GPU, time on the device; clock: one call that is waited for, in ms.\n"
        "peak: memory above the inputs. of q,k,v: temporary memory / size of q, k, v.\n"
        "error: the largest |result - float64 reference| / |reference|.\n\n"
    )
    cases = [case for case in attention_cases(device, quick) if only in (None, case.group)]
    if resume and json_file is not None:
        record["cases"] = measured_cases(record, json_file, "ropewalk bench attention --resume")
    for number, case in enumerate(cases, 1):
        title = json.loads(json.dumps(asdict(case)))
        if any(title.items() <= earlier.items() for earlier in record["cases"]):
            sys.stderr.write(f"{number} of {len(cases)} is in {json_file}: {case.title()}\n")
            continue
        sys.stderr.write(f"measuring {number} of {len(cases)}: {case.title()}\n")
        sys.stderr.flush()
        lines, rounds_done = measure(
            case, rounds, device, lambda path, case=case: _why_left_out(path, case, record["cases"], device)
        )
        record["cases"].append(asdict(case) | {"rounds": rounds_done, "lines": [asdict(line) for line in lines]})
        record["growth"] = growth(device, record["cases"])
        show.write(shown_case(record["cases"][-1]) + "\n")
        show.flush()
        if device == "cuda":
            torch.cuda.empty_cache()
        if json_file not in (None, "-"):
            # Written after every case, so that results survive an interruption.
            write_record(record, json_file, attention_floors(device, record["cases"], record["growth"]))
    if json_file == "-":
        write_record(record, json_file, attention_floors(device, record["cases"], record["growth"]))
    return record


def _plotter(target: str, asked: str) -> Callable[[dict[str, Any]], None]:
    """The function that draws a record to `target`. Called before timing, because matplotlib may be missing."""
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
    only: str | None = None,
    resume: bool = False,
) -> int:
    """Time attention against N and print one table per case. Exits with 1 if ropewalk has a wrong result."""
    asked = "ropewalk bench attention"
    if only is not None:
        require_choice(only, tuple(GROUPS), asked=f"{asked} --only {only}")
        if only != "lengths" and plot is not None:
            raise RopewalkError(
                asked=f"{asked} --only {only} --plot {plot}",
                expected="--plot with the cases over N",
                got=f"--only {only}, which has one length per shape",
                do="leave --plot out, or use --only lengths",
            )
    if json_file is not None:
        require_writable_file(json_file, asked=f"{asked} --json {json_file}")
    draw = None if plot is None else _plotter(plot, f"{asked} --plot {plot}")
    if from_file is not None:
        if json_file is not None or quick or device is not None or only is not None or resume:
            raise RopewalkError(
                asked=f"{asked} --from {from_file}",
                expected="no other option than --plot: --from measures nothing",
                got="also --json, --quick, --device, --only or --resume",
                do="leave them out, or leave --from out to measure",
            )
        record = read_record(from_file, f"{asked} --from {from_file}")
    else:
        if resume and json_file in (None, "-"):
            raise RopewalkError(
                asked=f"{asked} --resume",
                expected="--json FILE, the file of the run that was interrupted",
                got="no file",
                do="specify the file, or leave --resume out",
            )
        chosen = _device(device, asked)
        if only not in (None, "lengths") and chosen == "cpu":
            raise RopewalkError(
                asked=f"{asked} --only {only}",
                expected="--only weights and --only peers with --device cuda",
                got="--device cpu, which has the cases over N alone",
                do="leave --only out, or use --device cuda",
            )
        record = _run(json_file, quick, chosen, only, resume)
    show = sys.stderr if json_file == "-" else sys.stdout
    if from_file is not None:
        for case in record["cases"]:
            show.write(shown_case(case) + "\n")
    if record["growth"]:
        show.write(shown_growth(record) + shown_crossing(record))
    show.write(shown_missed(attention_floors(record["device"], record["cases"], record["growth"])) + "\n")
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
    parser.add_argument("--json", metavar="FILE", help="write the results as JSON; - for standard output")
    parser.add_argument("--quick", action="store_true", help="use three lengths and few rounds")
    parser.add_argument("--plot", metavar="FILE.png", help="plot time and memory against N")
    parser.add_argument("--device", metavar="cpu|cuda", help="the device (default: CUDA if available)")
    parser.add_argument("--only", metavar="PART", help="lengths, weights or peers alone; on a GPU")
    parser.add_argument("--resume", action="store_true", help="measure only the cases that the file of --json lacks")
    parser.add_argument(
        "--from", dest="from_file", metavar="FILE", help="print or plot a file from --json; measure nothing"
    )
    options = parser.parse_args()
    try:
        raise SystemExit(
            bench_attention(
                options.json,
                options.quick,
                options.plot,
                options.device,
                options.from_file,
                options.only,
                options.resume,
            )
        )
    except RopewalkError as error:
        sys.stderr.write(f"{error}\n")
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
