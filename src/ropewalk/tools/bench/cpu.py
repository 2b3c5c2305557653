"""`ropewalk bench cpu`: copy, our backends and the peers on this machine, in turns, each with its error."""

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
from ropewalk.kernels.triton_launch import INTERPRETED
from ropewalk.nn.rotary.embedding import RotaryEmbedding
from ropewalk.ops import backend_reasons
from ropewalk.spec.rope import PAIRINGS, Pairing
from ropewalk.tools.bench.peers import PEERS, Rotation, installed
from ropewalk.tools.bench.timing import Contestant, take_turns
from ropewalk.tools.bench.truth import Truth
from ropewalk.tools.output import processor, require_writable_file, write_json

__all__ = ["Case", "Line", "bench_cpu", "cases", "measure", "show_backends"]

PREFILL, Q_HEADS, K_HEADS, DIM = 2048, 32, 8, 128
OURS, COPY = "ropewalk", "copy"


@dataclass(frozen=True)
class Case:
    """What is timed. Memory is "transposed" for [batch, seq, heads, dim] seen as [batch, heads, seq, dim], which models
    make, and "contiguous" for [batch, heads, seq, dim]. Work is "forward" without gradients, "forward, grad" with a
    graph that nobody uses, or "forward+backward"."""

    seq: int
    dtype: str
    pairing: Pairing
    memory: str
    work: str

    def positions(self) -> range:
        """The positions: a prefill starts at 0, and a token is decoded after a thousand."""
        return range(self.seq) if self.seq > 1 else range(1000, 1001)

    def title(self) -> str:
        """The case in one line."""
        what = "decode" if self.seq == 1 else f"prefill {self.seq}"
        return f"{what}, {self.dtype}, {self.pairing}, {self.memory}, {self.work}"


@dataclass(frozen=True)
class Line:
    """A row of the table. No time is given for a path that is wrong."""

    path: str
    ms: float | None
    gb_per_s: float | None
    share_of_copy: float | None
    ratio_to_ropewalk: float | None
    error_over_budget: float | None


def cases(quick: bool) -> list[Case]:
    """All of them, or forward alone."""
    dtypes, pairings = ("float32", "bfloat16"), PAIRINGS[::-1]
    prefill = itertools.product(("forward", "forward+backward"), dtypes, pairings, ("transposed", "contiguous"))
    decode = itertools.product(("forward", "forward, grad"), dtypes, pairings)
    every = [Case(PREFILL, dtype, pairing, memory, work) for work, dtype, pairing, memory in prefill]
    every += [Case(1, dtype, pairing, "contiguous", work) for work, dtype, pairing in decode]
    return [case for case in every if case.work == "forward"] if quick else every


def _tensors(case: Case) -> list[Tensor]:
    dtype = getattr(torch, case.dtype)
    drawn = [torch.randn(1, case.seq, heads, DIM).to(dtype) for heads in (Q_HEADS, K_HEADS)]
    return [x.transpose(1, 2) if case.memory == "transposed" else x.transpose(1, 2).contiguous() for x in drawn]


def _ours(case: Case, backend: str | None) -> Rotation:
    rope, start = RotaryEmbedding(DIM, pairing=case.pairing, backend=backend), case.positions().start
    return lambda q, k: rope(q, k, offset=start)


def _rotations(case: Case, compiled: bool) -> Iterator[tuple[str, Rotation, float | None]]:
    """Each path with this pairing, and how many norms of a pair it may be off; None for ours, which have a budget.

    A peer rounds its tables and products to the dtype, and forms angles in float32, whose error grows with the length.
    """
    dtype = getattr(torch, case.dtype)
    lenient = 2 * torch.finfo(dtype).eps + case.positions().stop * 2.0**-22
    yield OURS, _ours(case, None), None
    if backend_reasons()["native"] is None:
        yield "ropewalk, torch", _ours(case, "torch"), None
    if compiled:
        # Compiled, nothing is kept between calls: a model computes its angles once per forward pass, as it computes the
        # peers' tables.
        rope, positions = RotaryEmbedding(DIM, pairing=case.pairing), case.positions()
        angles = rope.at(torch.arange(positions.start, positions.stop))
        yield "ropewalk, compiled", torch.compile(lambda q, k: rope(q, k, angles=angles), dynamic=False), None
    for name, (maker, compiles) in PEERS.items():
        rotation = maker(case.positions(), DIM, dtype, case.pairing)
        if rotation is None:
            continue
        yield name, rotation, lenient
        if compiled and compiles:
            yield f"{name}, compiled", torch.compile(rotation, dynamic=False), lenient


def _contestant(case: Case, name: str, rotation: Rotation, limit: float | None, tensors: list[Tensor]) -> Contestant:
    q, k = tensors
    if case.work == "forward":
        return Contestant(name, lambda: rotation(q, k), lambda: rotation(q, k), limit)
    leaves = [x.detach().requires_grad_() for x in tensors]
    cotangents = [torch.ones_like(x) for x in tensors]
    if case.work == "forward, grad":
        return Contestant(name, lambda: rotation(*leaves), lambda: rotation(*leaves), limit)

    def forward_backward() -> object:
        return torch.autograd.grad(rotation(*leaves), leaves, cotangents)

    def everything() -> list[Tensor]:
        outputs = rotation(*leaves)
        return [*outputs, *torch.autograd.grad(outputs, leaves, cotangents)]

    return Contestant(name, forward_backward, everything, limit)


def _copy(case: Case, tensors: list[Tensor]) -> Contestant:
    times = 2 if case.work == "forward+backward" else 1
    return Contestant(COPY, lambda: [torch.empty_like(x).copy_(x) for x in tensors * times])


def measure(case: Case, rounds: int, compiled: bool, progress: Progress | None = None) -> list[Line]:
    """The lines of one case: copy, then the paths from the fastest on, then those that are wrong, without a time."""
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
    contestants, errors = [_copy(case, tensors)], {}
    for name, rotation, limit in _rotations(case, compiled):
        contestant = _contestant(case, name, rotation, limit, tensors)
        outputs = contestant.outputs() if contestant.outputs else []
        pairs = [truth.errors(y) for truth, y in zip(truths, outputs, strict=True)]
        errors[name], relative = (max(error) for error in zip(*pairs, strict=True))
        if errors[name] <= 1 if limit is None else relative <= limit:
            contestants.append(contestant)
    task = None if progress is None else progress.task_ids[0]
    advance = (lambda: None) if progress is None or task is None else lambda: progress.advance(task)
    taken = take_turns(contestants, rounds, 1 if case.seq > 1 else 20, advance)
    moved = 2 * sum(x.numel() * x.element_size() for x in tensors) * (2 if case.work == "forward+backward" else 1)
    lines = [
        Line(
            name, ms, moved / ms * 1e-6, taken[COPY] / ms, ms / taken[OURS] if OURS in taken else None, errors.get(name)
        )
        for name, ms in sorted(taken.items(), key=lambda item: (item[0] != COPY, item[1]))
    ]
    return lines + [Line(name, None, None, None, None, error) for name, error in errors.items() if name not in taken]


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
    """Each backend, and why it is missing, if it is."""
    for name, reason in backend_reasons().items():
        details = {
            "native": f" ({instructions()})",
            "triton": " (in Triton's interpreter, slow)" if INTERPRETED else "",
        }
        ready = f"ready{details.get(name, '')}"
        console.print(f"{name}: {ready if reason is None else reason}", soft_wrap=True, markup=False)


def bench_cpu(json_file: str | None = None, quick: bool = False, backends: bool = False) -> int:
    """Times this machine and prints one table per case; 0, or 1 if one of our own paths is past its budget."""
    console = Console(stderr=json_file == "-", highlight=False, markup=False)
    if json_file is not None:
        require_writable_file(json_file, asked=f"ropewalk bench cpu --json {json_file}")
    show_backends(console)
    if backends:
        return 0
    rounds, compiled = (7, False) if quick else (31, True)
    for package in ("rotary_embedding_torch",):
        if not installed(package):
            console.print(
                f"{package} is not installed and does not take part: pip install 'ropewalk[bench]'", markup=False
            )
    console.print(
        f"q and k of (1, seq, {Q_HEADS} and {K_HEADS} heads, {DIM}); medians of {rounds} rounds in turns, "
        f"{torch.get_num_threads()} threads. Of copy: its time over this; × ours: this over ropewalk's; "
        "error: in budgets, of which our paths may use one"
    )
    chosen = cases(quick)
    results: list[tuple[Case, list[Line]]] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("measuring", total=len(chosen) * (rounds + 2))
        for case in chosen:
            progress.update(task, description=case.title())
            results.append((case, measure(case, rounds, compiled, progress)))
            console.print(_table(*results[-1]))
            console.print()
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
            "cases": [asdict(case) | {"lines": [asdict(line) for line in lines]} for case, lines in results],
        }
        write_json(record, json_file)
    return int(any(line.ms is None and line.path.startswith(OURS) for _, lines in results for line in lines))
