"""`ropewalk bench cpu`: a copy, our backends and other libraries, timed in interleaved rounds, with their errors."""

import itertools
import platform
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor

from ropewalk.kernels.native.extension import instructions
from ropewalk.kernels.triton_launch import INTERPRETED, launcher_note
from ropewalk.nn.rotary.embedding import RotaryEmbedding
from ropewalk.ops import backend_reasons
from ropewalk.spec.rope import PAIRINGS, Pairing
from ropewalk.tools.bench.floors import cpu_floors
from ropewalk.tools.bench.peers import PEERS, Rotation, installed
from ropewalk.tools.bench.records import shown_missed, write_record
from ropewalk.tools.bench.timing import Candidate, wall_times
from ropewalk.tools.bench.truth import Truth
from ropewalk.tools.output import processor, require_writable_file

__all__ = ["Case", "Line", "bench_cpu", "cases", "measure", "show_backends"]

PREFILL, Q_HEADS, K_HEADS, DIM = 2048, 32, 8, 128
OURS, COPY = "ropewalk", "copy"


@dataclass(frozen=True)
class Case:
    """A case.

    Attributes:
        seq: The sequence length. 1 for decoding.
        dtype: The dtype of q and k.
        pairing: The pairing.
        memory: "transposed" for a [batch, heads, seq, dim] view of [batch, seq, heads, dim], as in most models;
            "contiguous" for contiguous [batch, heads, seq, dim].
        work: "forward" without gradients, "forward, grad" with an autograd graph but no backward, or
            "forward+backward".
    """

    seq: int
    dtype: str
    pairing: Pairing
    memory: str
    work: str

    def positions(self) -> range:
        """The positions: from 0 for prefill, 1000 for decoding."""
        return range(self.seq) if self.seq > 1 else range(1000, 1001)

    def title(self) -> str:
        """The case in one line."""
        phase = "decode" if self.seq == 1 else f"prefill {self.seq}"
        return f"{phase}, {self.dtype}, {self.pairing}, {self.memory}, {self.work}"


@dataclass(frozen=True)
class Line:
    """A row of the table. A path with a wrong result has no time."""

    path: str
    ms: float | None
    gb_per_s: float | None
    share_of_copy: float | None
    ratio_to_ropewalk: float | None
    error_over_budget: float | None


def cases(quick: bool) -> list[Case]:
    """All cases. Only forward if `quick`."""
    dtypes, pairings = ("float32", "bfloat16"), PAIRINGS[::-1]
    prefill = itertools.product(("forward", "forward+backward"), dtypes, pairings, ("transposed", "contiguous"))
    decode = itertools.product(("forward", "forward, grad"), dtypes, pairings)
    all_cases = [Case(PREFILL, dtype, pairing, memory, work) for work, dtype, pairing, memory in prefill]
    all_cases += [Case(1, dtype, pairing, "contiguous", work) for work, dtype, pairing in decode]
    return [case for case in all_cases if case.work == "forward"] if quick else all_cases


def _tensors(case: Case) -> list[Tensor]:
    dtype = getattr(torch, case.dtype)
    drawn = [torch.randn(1, case.seq, heads, DIM).to(dtype) for heads in (Q_HEADS, K_HEADS)]
    return [x.transpose(1, 2) if case.memory == "transposed" else x.transpose(1, 2).contiguous() for x in drawn]


def _ours(case: Case, backend: str | None) -> Rotation:
    rope, start = RotaryEmbedding(DIM, pairing=case.pairing, backend=backend), case.positions().start
    return lambda q, k: rope(q, k, offset=start)


def _rotations(case: Case, compiled: bool) -> Iterator[tuple[str, Rotation, float | None]]:
    """The name, rotation and allowed error of each path with this pairing.

    The allowed error is in norms of a pair, or None for our own paths, which have a budget. Other libraries round
    tables and products to the dtype and compute angles in float32, whose error grows with the length.
    """
    dtype = getattr(torch, case.dtype)
    tolerance = 2 * torch.finfo(dtype).eps + case.positions().stop * 2.0**-22
    yield OURS, _ours(case, None), None
    if backend_reasons()["native"] is None:
        yield "ropewalk, torch", _ours(case, "torch"), None
    if compiled:
        # Compiled code caches nothing between calls. A model computes its angles once per forward pass, like the tables
        # of other libraries.
        rope, positions = RotaryEmbedding(DIM, pairing=case.pairing), case.positions()
        angles = rope.at(torch.arange(positions.start, positions.stop))
        yield "ropewalk, compiled", torch.compile(lambda q, k: rope(q, k, angles=angles), dynamic=False), None
    for name, (maker, compiles) in PEERS.items():
        rotation = maker(case.positions(), DIM, dtype, case.pairing)
        if rotation is None:
            continue
        yield name, rotation, tolerance
        if compiled and compiles:
            yield f"{name}, compiled", torch.compile(rotation, dynamic=False), tolerance


def _candidate(case: Case, name: str, rotation: Rotation, limit: float | None, tensors: list[Tensor]) -> Candidate:
    q, k = tensors
    if case.work == "forward":
        return Candidate(name, lambda: rotation(q, k), lambda: rotation(q, k), limit)
    leaves = [x.detach().requires_grad_() for x in tensors]
    cotangents = [torch.ones_like(x) for x in tensors]
    if case.work == "forward, grad":
        return Candidate(name, lambda: rotation(*leaves), lambda: rotation(*leaves), limit)

    def forward_backward() -> object:
        return torch.autograd.grad(rotation(*leaves), leaves, cotangents)

    def outputs_and_gradients() -> list[Tensor]:
        outputs = rotation(*leaves)
        return [*outputs, *torch.autograd.grad(outputs, leaves, cotangents)]

    return Candidate(name, forward_backward, outputs_and_gradients, limit)


def _copy(case: Case, tensors: list[Tensor]) -> Candidate:
    times = 2 if case.work == "forward+backward" else 1
    return Candidate(COPY, lambda: [torch.empty_like(x).copy_(x) for x in tensors * times])


def measure(case: Case, rounds: int, compiled: bool, progress: Progress | None = None) -> list[Line]:
    """Time one case.

    Args:
        case: The case.
        rounds: The number of rounds.
        compiled: Whether compiled forms are timed too.
        progress: The progress bar to advance.

    Returns:
        The rows: copy, then the paths, fastest first, then those with a wrong result, without a time.
    """
    torch.compiler.reset()
    with torch.set_grad_enabled(case.work != "forward"):
        return _measure(case, rounds, compiled, progress)


def _measure(case: Case, rounds: int, compiled: bool, progress: Progress | None) -> list[Line]:
    tensors = _tensors(case)
    positions = torch.arange(case.positions().start, case.positions().stop)
    inv_freq = RotaryEmbedding(DIM).inv_freq
    truths = [Truth.of_rotation(x, positions, inv_freq, case.pairing, False) for x in tensors]
    if case.work == "forward+backward":
        truths += [Truth.of_rotation(torch.ones_like(x), positions, inv_freq, case.pairing, True) for x in tensors]
    candidates, errors = [_copy(case, tensors)], {}
    for name, rotation, limit in _rotations(case, compiled):
        candidate = _candidate(case, name, rotation, limit, tensors)
        outputs = candidate.outputs() if candidate.outputs else []
        pairs = [truth.errors(y) for truth, y in zip(truths, outputs, strict=True)]
        errors[name], relative = (max(error) for error in zip(*pairs, strict=True))
        if errors[name] <= 1 if limit is None else relative <= limit:
            candidates.append(candidate)
    task = None if progress is None else progress.task_ids[0]
    advance = (lambda: None) if progress is None or task is None else lambda: progress.advance(task)
    times = wall_times(candidates, rounds, 1 if case.seq > 1 else 20, advance)
    moved = 2 * sum(x.numel() * x.element_size() for x in tensors) * (2 if case.work == "forward+backward" else 1)
    lines = [
        Line(
            name, ms, moved / ms * 1e-6, times[COPY] / ms, ms / times[OURS] if OURS in times else None, errors.get(name)
        )
        for name, ms in sorted(times.items(), key=lambda item: (item[0] != COPY, item[1]))
    ]
    return lines + [Line(name, None, None, None, None, error) for name, error in errors.items() if name not in times]


def _table(case: Case, lines: list[Line]) -> Table:
    table = Table(title=case.title(), title_justify="left", title_style="bold", box=None)
    table.add_column("path")
    for name in ("ms", "GB/s", "of copy", "× ours", "error"):
        table.add_column(name, justify="right")

    def shown(number: float | None, digits: int) -> str:
        return "" if number is None else f"{number:.{digits}f}"

    for line in lines:
        style = "bold" if line.path == OURS else None
        error = "" if line.error_over_budget is None else f"{line.error_over_budget:.3g}"
        figures = (
            shown(line.ms, 4 if case.seq == 1 else 2) or "wrong",
            shown(line.gb_per_s, 1),
            shown(line.share_of_copy, 2),
            shown(line.ratio_to_ropewalk, 2),
            error,
        )
        table.add_row(line.path, *figures, style=style)
    return table


def show_backends(console: Console) -> None:
    """Print every backend, with the reason if it is missing."""
    note = launcher_note()
    for name, reason in backend_reasons().items():
        details = {
            "native": f" ({instructions()})",
            "triton": " (in Triton's interpreter, slow)" if INTERPRETED else f" ({note})" if note else "",
        }
        ready = f"ready{details.get(name, '')}"
        console.print(f"{name}: {ready if reason is None else reason}", soft_wrap=True, markup=False)


def bench_cpu(json_file: str | None = None, quick: bool = False, backends: bool = False) -> int:
    """Time the rotation on the CPU and print one table per case. Exits with 1 if ropewalk exceeds its error budget."""
    console = Console(stderr=json_file == "-", highlight=False, markup=False)
    if json_file is not None:
        require_writable_file(json_file, asked=f"ropewalk bench cpu --json {json_file}")
    show_backends(console)
    if backends:
        return 0
    rounds, compiled = (7, False) if quick else (31, True)
    for package in ("rotary_embedding_torch",):
        if not installed(package):
            console.print(f"{package} is not installed and is not timed: pip install 'ropewalk[bench]'", markup=False)
    console.print(
        f"q and k of (1, seq, {Q_HEADS} and {K_HEADS} heads, {DIM}); medians of {rounds} interleaved rounds, "
        f"{torch.get_num_threads()} threads. of copy: time of a copy / time; × ours: time / time of ropewalk; "
        "error: in error budgets, at most 1 for ropewalk"
    )
    selected = cases(quick)
    results: list[tuple[Case, list[Line]]] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("measuring", total=len(selected) * (rounds + 2))
        for case in selected:
            progress.update(task, description=case.title())
            results.append((case, measure(case, rounds, compiled, progress)))
            console.print(_table(*results[-1]))
            console.print()
    measured = [asdict(case) | {"lines": [asdict(line) for line in lines]} for case, lines in results]
    missed = cpu_floors(measured)
    console.print(shown_missed(missed))
    if json_file is not None:
        record = {
            "command": "ropewalk bench cpu" + (" --quick" if quick else ""),
            "date": datetime.now(UTC).date().isoformat(),
            "hardware": {
                "machine": platform.machine(),
                "processor": processor(),
                "threads": torch.get_num_threads(),
                "instructions": instructions(),
            },
            "versions": {"python": platform.python_version(), "torch": torch.__version__},
            "rounds": rounds,
            "shape": {"batch": 1, "q_heads": Q_HEADS, "k_heads": K_HEADS, "head_dim": DIM},
            "cases": measured,
        }
        write_record(record, json_file, missed)
    return int(any(line.ms is None and line.path.startswith(OURS) for _, lines in results for line in lines))
