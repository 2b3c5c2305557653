"""`ropewalk bench attention`, and `python -m ropewalk.tools.bench.attention` with torch alone: attention against N.

Softmax, our linear attention without and with RoPE, and fla's where it is installed. All of one length take turns in
one process, after their results were held against the float64 reference.
"""

import argparse
import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

import torch

from ropewalk.errors import RopewalkError, require_choice
from ropewalk.ops import backend_reasons
from ropewalk.tools.bench.attention_measure import OURS, AttentionCase, attention_cases, measure
from ropewalk.tools.bench.attention_record import growth, read_record, shown_case, shown_growth
from ropewalk.tools.output import package_version, processor, require_writable_file, write_json

__all__ = ["bench_attention"]

SOFTMAX = "softmax (SDPA)"

# Seconds: a call that is expected to take longer is left out.
LONGEST_CALL = 20.0


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
    """The device that was asked for; without one CUDA where PyTorch sees it."""
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
    show.write(
        f"{', '.join(f'{name} {value}' for name, value in record['hardware'].items())}; medians of rounds in turns.\n"
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
    """What draws a record into `target`. Asked for before anything is timed: matplotlib may be missing."""
    from ropewalk.tools.bench.attention_plot import draw
    from ropewalk.tools.plot.style import require_picture

    require_picture(target, asked=asked)
    return lambda record: draw(record, target)


def bench_attention(
    json_file: str | None = None,
    quick: bool = False,
    plot: str | None = None,
    device: str | None = None,
    from_file: str | None = None,
) -> int:
    """Times attention against N and prints a table a case; 0, or 1 if one of our own paths is wrong."""
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
    given = parser.parse_args()
    try:
        raise SystemExit(bench_attention(given.json, given.quick, given.plot, given.device, given.from_file))
    except RopewalkError as error:
        sys.stderr.write(f"{error}\n")
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
