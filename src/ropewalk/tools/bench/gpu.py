"""`ropewalk bench gpu`: a copy, our paths and other libraries on a GPU.

`python -m ropewalk.tools.bench.gpu` needs only torch. The candidates of a case are timed in interleaved rounds with an
empty cache. Results are first compared with the float64 reference.
"""

import argparse
import itertools
import platform
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

import torch
from torch import Tensor

from ropewalk.errors import RopewalkError
from ropewalk.nn.rotary.embedding import RotaryEmbedding
from ropewalk.nn.rotary.qk_norm import qk_norm_rope
from ropewalk.ops import backend_reasons
from ropewalk.spec.rope import PAIRINGS, Pairing, RopeSpec
from ropewalk.tools.bench import timing
from ropewalk.tools.bench.bare import bare_function, bare_launch, copied
from ropewalk.tools.bench.floors import gpu_floors
from ropewalk.tools.bench.peers import GPU_PEERS, Rotation, norm_before
from ropewalk.tools.bench.records import shown_missed, write_record
from ropewalk.tools.bench.timing import Candidate
from ropewalk.tools.bench.truth import true_norms, true_rotations
from ropewalk.tools.output import package_version, require_writable_file

__all__ = ["GpuCase", "GpuLine", "bench_gpu", "gpu_cases", "measure"]

OURS, COPY, BARE, COPY_FUNCTION = "ropewalk", "copy", "bare Triton launch", "copy, autograd.Function"
EPS = 1e-6
TRAINING, LONG, SMALL, DECODE = (
    (4, 8192, 32, 8, 128),
    (1, 131_072, 32, 8, 128),
    (8, 2048, 16, 16, 64),
    (64, 1, 32, 8, 128),
)


@dataclass(frozen=True)
class GpuCase:
    """A case.

    Attributes:
        shape: (batch, seq, q heads, k heads, dim) of q and k.
        pairing: The pairing.
        memory: "transposed" for a [batch, heads, seq, dim] view of [batch, seq, heads, dim], as in most models;
            "contiguous" for contiguous [batch, heads, seq, dim].
        work: "forward", without gradients, or "forward+backward".
        rotary_dim: The number of rotated features. 0 for all.
        norm: Whether an RMSNorm precedes the rotation.
        dtype: The dtype of q and k.
    """

    shape: tuple[int, int, int, int, int]
    pairing: Pairing
    memory: str = "transposed"
    work: str = "forward"
    rotary_dim: int = 0
    norm: bool = False
    dtype: str = "bfloat16"

    def rotated_features(self) -> int:
        """The number of rotated features."""
        return self.rotary_dim or self.shape[-1]

    def positions(self) -> range:
        """The positions: from 0 for prefill, 1000 for decoding."""
        seq = self.shape[1]
        return range(seq) if seq > 1 else range(1000, 1001)

    def against_all(self) -> bool:
        """Whether all other libraries are timed: for the usual memory layout, head_dim and dtype."""
        usual = self.memory == "transposed" or self.shape[1] == 1
        return usual and not self.rotary_dim and self.shape[-1] in (64, 128) and self.dtype == "bfloat16"

    def compiles(self) -> bool:
        """Whether compiled forms are timed. Not in every case, because compilation is slow."""
        simple = self.work == "forward" and not self.norm and self.shape == TRAINING
        return self.against_all() and self.shape in (TRAINING, DECODE) and (self.pairing == "half" or simple)

    def title(self) -> str:
        """The case in one line."""
        norm = "QK-norm + RoPE, " if self.norm else ""
        rotated = f", {self.rotary_dim} rotated" if self.rotary_dim else ""
        return f"{self.shape}{rotated}, {self.dtype}, {self.pairing}, {self.memory}: {norm}{self.work}"


@dataclass(frozen=True)
class GpuLine:
    """A row of the table. A path with a wrong result has no time.

    Attributes:
        path: The name of the path.
        us: The time on the device, from an empty cache.
        gb_per_s: What a copy moves, over `us`.
        share_of_copy: The device time of a copy over `us`.
        ratio_to_ropewalk: `us` over the device time of ropewalk.
        error_over_budget: The largest error, in error budgets.
        host_us: The host time per call.
        wall_us: The wall-clock time per call, if calls follow each other.
        note: Why the path failed.
    """

    path: str
    us: float | None
    gb_per_s: float | None
    share_of_copy: float | None
    ratio_to_ropewalk: float | None
    error_over_budget: float | None
    host_us: float | None = None
    wall_us: float | None = None
    note: str | None = None


def gpu_cases(quick: bool) -> list[GpuCase]:
    """All cases. One per kind if `quick`."""
    pairings = PAIRINGS[::-1]
    forward = itertools.product((TRAINING, LONG, SMALL), pairings, ("transposed", "contiguous"))
    every = [GpuCase(shape, pairing, memory) for shape, pairing, memory in forward]
    every += [GpuCase(TRAINING, pairing, rotary_dim=64) for pairing in pairings]
    every += [GpuCase((*TRAINING[:4], dim), pairing) for dim in (96, 80) for pairing in pairings]
    every += [GpuCase(TRAINING, "half", dtype="float32")]
    backward = itertools.product((TRAINING, SMALL), pairings, ("transposed", "contiguous"))
    every += [GpuCase(shape, pairing, memory, "forward+backward") for shape, pairing, memory in backward]
    every += [GpuCase(DECODE, pairing, "contiguous") for pairing in pairings]
    norm = itertools.product(("forward", "forward+backward"), pairings, ("transposed", "contiguous"))
    every += [GpuCase(TRAINING, pairing, memory, work, norm=True) for work, pairing, memory in norm]
    if quick:
        first = {(case.work, case.norm, case.shape[1] == 1): case for case in reversed(every)}
        every = [case for case in every if case in first.values()]
    return every


def _tensors(case: GpuCase) -> list[Tensor]:
    batch, seq, q_heads, k_heads, dim = case.shape
    drawn = [
        torch.randn(batch, seq, heads, dim, device=timing.DEVICE).to(getattr(torch, case.dtype))
        for heads in (q_heads, k_heads)
    ]
    return [x.transpose(1, 2) if case.memory == "transposed" else x.transpose(1, 2).contiguous() for x in drawn]


def _rotations(case: GpuCase, weights: tuple[Tensor, Tensor], compiled: bool) -> Iterator[tuple[str, Rotation, bool]]:
    """The name and rotation of each path, and whether it works in place."""
    dim, positions, dtype = case.shape[-1], case.positions(), getattr(torch, case.dtype)
    compiled = compiled and case.compiles()
    spec = RopeSpec(dim, rotary_dim=case.rotated_features(), pairing=case.pairing)
    rope, formula = (RotaryEmbedding(spec, backend=backend).to(timing.DEVICE) for backend in (None, "torch"))
    ids = torch.arange(positions.start, positions.stop, device=timing.DEVICE)
    angles = rope.at(ids)

    def ours(module: RotaryEmbedding, **position: Any) -> Rotation:
        if case.norm:
            return lambda q, k: qk_norm_rope(
                q, k, module, q_weight=weights[0], k_weight=weights[1], eps=EPS, **position
            )
        return lambda q, k: module(q, k, **position)

    # A model computes its angles once per forward pass, like the tables of other libraries. A decoder has an offset.
    if len(positions) == 1:
        yield OURS, ours(rope, offset=positions.start), False
        yield f"{OURS}, angles given", ours(rope, angles=angles), False
    else:
        yield OURS, ours(rope, angles=angles), False
    yield f"{OURS}, from positions", ours(rope, positions=ids), False
    if case.shape == LONG and not case.norm:
        yield f"{OURS}, rope(q, k)", ours(rope), False
    if compiled:
        yield f"{OURS}, compiled", torch.compile(ours(rope, angles=angles), dynamic=False), False
        yield f"{OURS}, formula compiled", torch.compile(ours(formula, angles=angles), dynamic=False), False
    for name, peer in GPU_PEERS.items():
        # The other libraries have no fused norm, so with a norm only transformers is timed.
        tuning_case = (case.shape, case.pairing, case.work) == (TRAINING, "half", "forward")
        timed = not case.norm and case.against_all() and (tuning_case or not peer.tunes)
        if name != "transformers" and not timed:
            continue
        rotation = peer.maker(positions, dim, case.rotated_features(), dtype, case.pairing)
        if rotation is None:
            continue
        rotation = norm_before(rotation, weights, EPS) if case.norm else rotation
        yield name, rotation, peer.in_place
        if compiled and peer.compiles:
            yield f"{name}, compiled", torch.compile(rotation, dynamic=False), False


def _candidate(
    case: GpuCase,
    name: str,
    rotation: Rotation,
    in_place: bool,
    tensors: list[Tensor],
    cotangents: list[Tensor],
    weights: tuple[Tensor, Tensor],
) -> Candidate:
    fresh = [x.clone() for x in tensors] if in_place else tensors
    if case.work == "forward":
        return Candidate(name, lambda: rotation(*fresh), lambda: rotation(*(x.clone() for x in tensors)))
    leaves = [x.detach().requires_grad_() for x in fresh]
    learned = list(weights) if case.norm else []

    # An in-place rotation requires an argument that is not a leaf. A view costs nothing on the device.
    def inputs() -> list[Tensor]:
        return [x.view_as(x) for x in leaves] if in_place else leaves

    def forward_backward() -> object:
        return torch.autograd.grad(rotation(*inputs()), [*leaves, *learned], cotangents)

    def outputs_and_gradients() -> list[Tensor]:
        copies = [x.detach().clone().requires_grad_() for x in tensors]
        outputs = [y.clone() for y in rotation(*([x.clone() for x in copies] if in_place else copies))]
        return [*outputs, *torch.autograd.grad(outputs, [*copies, *learned], [g.clone() for g in cotangents])]

    return Candidate(name, forward_backward, outputs_and_gradients)


def _copy(case: GpuCase, tensors: list[Tensor]) -> Candidate:
    """The lower bound of the time: q and k are copied once per pass."""
    targets = [torch.empty_like(x) for x in tensors]
    times = 2 if case.work == "forward+backward" else 1
    return Candidate(COPY, lambda: [y.copy_(x) for _ in range(times) for y, x in zip(targets, tensors, strict=True)])


def _copy_function(tensors: list[Tensor], cotangents: list[Tensor]) -> Candidate:
    """The lower bound by wall clock: an autograd.Function that copies q and k, and its backward pass, which copies."""
    leaves, function = [x.detach().requires_grad_() for x in tensors], bare_function(copied)
    return Candidate(COPY_FUNCTION, lambda: torch.autograd.grad(function(*leaves), leaves, cotangents))


def _bare_launch(tensors: list[Tensor]) -> Candidate:
    """Allocates two outputs and launches a compiled kernel by its own launcher: the lower bound of the host time."""
    (q, k), launch = tensors, bare_launch(*tensors)

    def run() -> object:
        outputs = torch.empty_like(q), torch.empty_like(k)
        launch()
        return outputs

    return Candidate(BARE, run)


def measure(case: GpuCase, rounds: int, compiled: bool) -> list[GpuLine]:
    """Time one case.

    Args:
        case: The case.
        rounds: The number of rounds.
        compiled: Whether compiled forms are timed too.

    Returns:
        The rows: copy, then the paths, fastest first, then those with a wrong result, without a time.
    """
    torch.compiler.reset()
    with torch.set_grad_enabled(case.work != "forward"):
        return _measure(case, rounds, compiled)


def _measure(case: GpuCase, rounds: int, compiled: bool) -> list[GpuLine]:
    dtype, dim = getattr(torch, case.dtype), case.shape[-1]
    tensors = _tensors(case)
    backward = case.work == "forward+backward"
    cotangents = [torch.randn_like(x) for x in tensors] if backward else []
    learns = backward and case.norm
    weights = tuple((torch.rand(dim, device=timing.DEVICE) + 0.5).to(dtype).requires_grad_(learns) for _ in range(2))
    positions = torch.arange(case.positions().start, case.positions().stop, device=timing.DEVICE)
    theta = torch.as_tensor(RopeSpec(dim, rotary_dim=case.rotated_features()).inv_freq(), device=timing.DEVICE)
    with torch.no_grad():
        if case.norm:
            truths = true_norms(tensors, cotangents, weights, positions, theta, case.pairing, EPS)
        else:
            truths = true_rotations(tensors, cotangents, positions, theta, case.pairing)
    # Other libraries round tables and products to the dtype and compute angles in float32, whose error grows with the
    # length.
    tolerance = (4 if case.norm else 2) * torch.finfo(dtype).eps + case.positions().stop * 2.0**-22
    candidates, errors, failed = [_copy(case, tensors)], {}, {}
    for name, rotation, in_place in _rotations(case, weights, compiled):  # pyright: ignore[reportArgumentType]
        candidate = _candidate(case, name, rotation, in_place, tensors, cotangents, weights)  # pyright: ignore[reportArgumentType]
        try:
            outputs = candidate.outputs() if candidate.outputs else []
        except Exception as error:
            # Another library that fails must not stop the benchmark.
            if name.startswith(OURS):
                raise
            failed[name] = f"{type(error).__name__}: {error}".splitlines()[0]
            continue
        pairs = [truth.errors(y) for truth, y in zip(truths, outputs, strict=True)]
        errors[name], relative = (max(error) for error in zip(*pairs, strict=True))
        if errors[name] <= 1 if name.startswith(OURS) else relative <= tolerance:
            candidates.append(candidate)
    del truths
    one_token = case.shape[1] == 1
    if one_token:
        candidates.append(_bare_launch(tensors))
    if backward:
        candidates.append(_copy_function(tensors, cotangents))
    times = timing.device_times(candidates, rounds)
    # A thousand launches wait in the queue of the device. Eager paths with a backward pass have up to fifty each.
    clock = timing.clock_times(candidates, 11, 200 if one_token else 20)
    moved = 2 * sum(x.numel() * x.element_size() for x in tensors) * (2 if backward else 1)
    lines = [
        GpuLine(
            name,
            us,
            moved / us * 1e-3,
            times[COPY] / us,
            us / times[OURS] if OURS in times else None,
            errors.get(name),
            *clock[name],
        )
        for name, us in sorted(times.items(), key=lambda item: (item[0] != COPY, item[1]))
    ]
    lines += [GpuLine(name, None, None, None, None, error) for name, error in errors.items() if name not in times]
    return lines + [GpuLine(name, None, None, None, None, None, note=note) for name, note in failed.items()]


def _shown(lines: list[GpuLine]) -> str:
    """The table of one case, at most 80 columns wide."""

    def number(value: float | None, digits: int) -> str:
        return "" if value is None else f"{value:.{0 if abs(value) >= 1000 else digits}f}"

    header = "".join(f"{name:>8}" for name in ("device", "wall", "host"))
    text = [f"  {'path':<26}{header}{'GB/s':>6}{'of copy':>8}{'x ours':>7}{'error':>7}"]
    for line in lines:
        error = number(line.error_over_budget, 0 if (line.error_over_budget or 0) >= 100 else 3)
        us = number(line.us, 1) or ("failed" if line.note else "wrong")
        text.append(
            f"  {line.path:<26}{us:>8}{number(line.wall_us, 1):>8}{number(line.host_us, 1):>8}"
            f"{number(line.gb_per_s, 0):>6}{number(line.share_of_copy, 3):>8}"
            f"{number(line.ratio_to_ropewalk, 2):>7}{error:>7}" + (f"  {line.note}" if line.note else "")
        )
    return "\n".join(line.rstrip() for line in text) + "\n"


def bench_gpu(json_file: str | None = None, quick: bool = False) -> int:
    """Time the rotation on a GPU and print one table per case. Exits with 1 if ropewalk exceeds its error budget."""
    reason = backend_reasons()["triton"]
    if reason is not None or not torch.cuda.is_available():
        raise RopewalkError(
            asked="ropewalk bench gpu",
            expected="a CUDA device and Triton",
            got=reason or "no CUDA device",
            do="use a machine with a GPU, or `ropewalk bench cpu`",
        )
    if json_file is not None:
        require_writable_file(json_file, asked=f"ropewalk bench gpu --json {json_file}")
    show = sys.stderr if json_file == "-" else sys.stdout
    rounds, compiled = (9, False) if quick else (21, True)
    name = torch.cuda.get_device_name()
    show.write(
        f"{name}; medians of interleaved rounds, times in microseconds.\n"
        f"device: {rounds} rounds from an empty L2 cache. wall: by the clock, per call, if calls\n"
        "follow each other. host: until the call returns.\n"
        "Shapes: batch, seq, q heads, k heads, dim. of copy: device time of a copy / device.\n"
        "x ours: device / that of ropewalk. error: in error budgets, at most 1 for ropewalk.\n\n"
    )
    packages = ("torch", "triton", "transformers", "liger_kernel", "flash-linear-attention", "flash-attn")
    record: dict[str, Any] = {
        "command": "ropewalk bench gpu" + (" --quick" if quick else ""),
        "date": datetime.now(UTC).date().isoformat(),
        "hardware": {"gpu": name, "machine": platform.machine()},
        "versions": {"python": platform.python_version(), "cuda": torch.version.cuda}
        | {package: package_version(package) for package in packages},
        "rounds": rounds,
        "cases": [],
    }
    cases = gpu_cases(quick)
    for number, case in enumerate(cases, 1):
        lines = measure(case, rounds, compiled)
        record["cases"].append(asdict(case) | {"lines": [asdict(line) for line in lines]})
        show.write(f"{number}/{len(cases)}  {case.title()}\n{_shown(lines)}\n")
        show.flush()
        torch.cuda.empty_cache()
        if json_file not in (None, "-"):
            # Written after every case, so that results survive an interruption.
            write_record(record, json_file, gpu_floors(record["cases"]))
    results = record["cases"]
    missed = gpu_floors(results)
    if json_file == "-":
        write_record(record, json_file, missed)
    show.write(shown_missed(missed) + "\n")
    ours = (line for case in results for line in case["lines"] if line["path"].startswith(OURS))
    return int(any(line["us"] is None for line in ours))


def main() -> None:
    """`python -m ropewalk.tools.bench.gpu`."""
    parser = argparse.ArgumentParser(prog="python -m ropewalk.tools.bench.gpu", description=bench_gpu.__doc__)
    parser.add_argument("--json", metavar="FILE", help="write the results as JSON; - for standard output")
    parser.add_argument("--quick", action="store_true", help="use one case per kind, few rounds and no compiled forms")
    options = parser.parse_args()
    try:
        raise SystemExit(bench_gpu(options.json, options.quick))
    except RopewalkError as error:
        sys.stderr.write(f"{error}\n")
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
