"""`ropewalk bench gpu`, and `python -m ropewalk.tools.bench.gpu` with torch alone: copy, our paths, and the peers.

Every contestant of a case runs in turns with the others, from an empty cache, after its result was held against the
float64 reference.
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
from ropewalk.tools.bench.peers import GPU_PEERS, Rotation, norm_before
from ropewalk.tools.bench.timing import Contestant
from ropewalk.tools.bench.truth import true_norms, true_rotations
from ropewalk.tools.output import package_version, require_writable_file, write_json

__all__ = ["GpuCase", "GpuLine", "bench_gpu", "gpu_cases", "measure"]

OURS, COPY, BARE = "ropewalk", "copy", "bare Triton launch"
EPS = 1e-6
TRAINING, LONG, SMALL, DECODE = (
    (4, 8192, 32, 8, 128),
    (1, 131_072, 32, 8, 128),
    (8, 2048, 16, 16, 64),
    (64, 1, 32, 8, 128),
)


@dataclass(frozen=True)
class GpuCase:
    """What is timed: q and k of (batch, seq, q heads, k heads, dim), of which `rotary_dim` features are rotated.

    Memory is "transposed" for [batch, seq, heads, dim] seen as [batch, heads, seq, dim], which models make, and
    "contiguous" for [batch, heads, seq, dim]. Work is "forward", without gradients, or "forward+backward"; `norm` puts
    an RMSNorm before the rotation.
    """

    shape: tuple[int, int, int, int, int]
    pairing: Pairing
    memory: str = "transposed"
    work: str = "forward"
    rotary_dim: int = 0
    norm: bool = False
    dtype: str = "bfloat16"

    def rotated_features(self) -> int:
        """How many features are rotated."""
        return self.rotary_dim or self.shape[-1]

    def positions(self) -> range:
        """The positions: a prefill starts at 0, and a token is decoded after a thousand."""
        seq = self.shape[1]
        return range(seq) if seq > 1 else range(1000, 1001)

    def against_all(self) -> bool:
        """Whether every peer takes part: where models have their tensors, and nothing is out of the ordinary."""
        usual = self.memory == "transposed" or self.shape[1] == 1
        return usual and not self.rotary_dim and self.shape[-1] in (64, 128) and self.dtype == "bfloat16"

    def compiles(self) -> bool:
        """Whether compiled forms take part: a compiler takes its time."""
        simple = self.work == "forward" and not self.norm and self.shape == TRAINING
        return self.against_all() and self.shape in (TRAINING, DECODE) and (self.pairing == "half" or simple)

    def title(self) -> str:
        """The case in one line."""
        what = "QK-norm + RoPE, " if self.norm else ""
        part = f", {self.rotary_dim} turn" if self.rotary_dim else ""
        return f"{self.shape}{part}, {self.dtype}, {self.pairing}, {self.memory}: {what}{self.work}"


@dataclass(frozen=True)
class GpuLine:
    """A row of the table. A path that is wrong gets no time; the host's is taken where it decides."""

    path: str
    us: float | None
    gb_per_s: float | None
    share_of_copy: float | None
    ratio_to_ropewalk: float | None
    error_over_budget: float | None
    host_us: float | None = None
    note: str | None = None


def gpu_cases(quick: bool) -> list[GpuCase]:
    """All of them, or one of each kind."""
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
    """Each path by its name, and whether it writes into its input."""
    dim, positions, dtype = case.shape[-1], case.positions(), getattr(torch, case.dtype)
    compiled = compiled and case.compiles()
    spec = RopeSpec(dim, rotary_dim=case.rotated_features(), pairing=case.pairing)
    rope, formula = (RotaryEmbedding(spec, backend=backend).to(timing.DEVICE) for backend in (None, "torch"))
    ids = torch.arange(positions.start, positions.stop, device=timing.DEVICE)
    angles = rope.at(ids)

    def ours(module: RotaryEmbedding, **where: Any) -> Rotation:
        if case.norm:
            return lambda q, k: qk_norm_rope(q, k, module, q_weight=weights[0], k_weight=weights[1], eps=EPS, **where)
        return lambda q, k: module(q, k, **where)

    # A model computes its angles once per forward pass, as it computes the peers' tables; a decoder has an offset.
    if len(positions) == 1:
        yield OURS, ours(rope, offset=positions.start), False
        yield f"{OURS}, angles given", ours(rope, angles=angles), False
    else:
        yield OURS, ours(rope, angles=angles), False
    yield f"{OURS}, from positions", ours(rope, positions=ids), False
    if compiled:
        yield f"{OURS}, compiled", torch.compile(ours(rope, angles=angles), dynamic=False), False
        yield f"{OURS}, formula compiled", torch.compile(ours(formula, angles=angles), dynamic=False), False
    for name, peer in GPU_PEERS.items():
        # A norm before others' kernels would be an eager one, which is not theirs.
        once = (case.shape, case.pairing, case.work) == (TRAINING, "half", "forward")
        others = not case.norm and case.against_all() and (once or not peer.tunes)
        if name != "transformers" and not others:
            continue
        rotation = peer.maker(positions, dim, case.rotated_features(), dtype, case.pairing)
        if rotation is None:
            continue
        rotation = norm_before(rotation, weights, EPS) if case.norm else rotation
        yield name, rotation, peer.in_place
        if compiled and peer.compiles:
            yield f"{name}, compiled", torch.compile(rotation, dynamic=False), False


def _contestant(
    case: GpuCase,
    name: str,
    rotation: Rotation,
    in_place: bool,
    tensors: list[Tensor],
    cotangents: list[Tensor],
    weights: tuple[Tensor, Tensor],
) -> Contestant:
    fresh = [x.clone() for x in tensors] if in_place else tensors
    if case.work == "forward":
        return Contestant(name, lambda: rotation(*fresh), lambda: rotation(*(x.clone() for x in tensors)))
    leaves = [x.detach().requires_grad_() for x in fresh]
    learned = list(weights) if case.norm else []

    # What rotates its argument needs one that is no leaf; an alias costs nothing on the device.
    def inputs() -> list[Tensor]:
        return [x.view_as(x) for x in leaves] if in_place else leaves

    def forward_backward() -> object:
        return torch.autograd.grad(rotation(*inputs()), [*leaves, *learned], cotangents)

    def everything() -> list[Tensor]:
        copies = [x.detach().clone().requires_grad_() for x in tensors]
        outputs = [y.clone() for y in rotation(*([x.clone() for x in copies] if in_place else copies))]
        return [*outputs, *torch.autograd.grad(outputs, [*copies, *learned], [g.clone() for g in cotangents])]

    return Contestant(name, forward_backward, everything)


def _copy(case: GpuCase, tensors: list[Tensor]) -> Contestant:
    """The ceiling: q and k copied, once for every pass."""
    targets = [torch.empty_like(x) for x in tensors]
    times = 2 if case.work == "forward+backward" else 1
    return Contestant(COPY, lambda: [y.copy_(x) for _ in range(times) for y, x in zip(targets, tensors, strict=True)])


def _bare_launch(case: GpuCase, tensors: list[Tensor]) -> Contestant:
    """Two outputs and a launch of our kernel as Triton's own interface makes it: what a call's host time is held to."""
    from ropewalk.kernels.triton_launch import LAUNCHES

    rope = RotaryEmbedding(case.shape[-1], pairing=case.pairing).to(timing.DEVICE)
    cos, sin = rope.at(torch.arange(case.positions().start, case.positions().stop, device=timing.DEVICE))
    LAUNCHES.clear()
    rope(*tensors, angles=(cos, sin))
    (launch,) = LAUNCHES.values()

    def run() -> object:
        outputs = [torch.empty_like(x) for x in tensors]
        launch.bare(*tensors, *outputs, cos, sin, 0)
        return outputs

    return Contestant(BARE, run)


def measure(case: GpuCase, rounds: int, compiled: bool) -> list[GpuLine]:
    """The lines of one case: copy, then the paths from the fastest on, then those that are wrong, without a time."""
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
    # A peer rounds tables and products to the dtype, and forms angles in float32, whose error grows with the length.
    lenient = (4 if case.norm else 2) * torch.finfo(dtype).eps + case.positions().stop * 2.0**-22
    contestants, errors, failed = [_copy(case, tensors)], {}, {}
    for name, rotation, in_place in _rotations(case, weights, compiled):  # pyright: ignore[reportArgumentType]
        contestant = _contestant(case, name, rotation, in_place, tensors, cotangents, weights)  # pyright: ignore[reportArgumentType]
        try:
            outputs = contestant.outputs() if contestant.outputs else []
        except Exception as error:
            # A peer that fails must not cost the other figures.
            if name.startswith(OURS):
                raise
            failed[name] = f"{type(error).__name__}: {error}".splitlines()[0]
            continue
        pairs = [truth.errors(y) for truth, y in zip(truths, outputs, strict=True)]
        errors[name], relative = (max(error) for error in zip(*pairs, strict=True))
        if errors[name] <= 1 if name.startswith(OURS) else relative <= lenient:
            contestants.append(contestant)
    del truths
    one_token = case.shape[1] == 1
    if one_token:
        contestants.append(_bare_launch(case, tensors))
    taken = timing.device_times(contestants, rounds)
    host = timing.host_times(contestants, 7) if one_token else {}
    moved = 2 * sum(x.numel() * x.element_size() for x in tensors) * (2 if backward else 1)
    lines = [
        GpuLine(
            name,
            us,
            moved / us * 1e-3,
            taken[COPY] / us,
            us / taken[OURS] if OURS in taken else None,
            errors.get(name),
            host.get(name),
        )
        for name, us in sorted(taken.items(), key=lambda item: (item[0] != COPY, item[1]))
    ]
    lines += [GpuLine(name, None, None, None, None, error) for name, error in errors.items() if name not in taken]
    return lines + [GpuLine(name, None, None, None, None, None, note=note) for name, note in failed.items()]


def _shown(lines: list[GpuLine]) -> str:
    """A table of 80 columns at most."""

    def number(value: float | None, digits: int) -> str:
        return "" if value is None else f"{value:.{digits}f}"

    text = [f"  {'path':<29}{'us':>9}{'GB/s':>6}{'of copy':>9}{'x ours':>8}{'error':>7}{'host us':>9}"]
    for line in lines:
        error = number(line.error_over_budget, 0 if (line.error_over_budget or 0) >= 100 else 3)
        us = number(line.us, 1) or ("failed" if line.note else "wrong")
        text.append(
            f"  {line.path:<29}{us:>9}{number(line.gb_per_s, 0):>6}"
            f"{number(line.share_of_copy, 3):>9}{number(line.ratio_to_ropewalk, 2):>8}{error:>7}"
            f"{number(line.host_us, 1):>9}" + (f"  {line.note}" if line.note else "")
        )
    return "\n".join(line.rstrip() for line in text) + "\n"


def bench_gpu(json_file: str | None = None, quick: bool = False) -> int:
    """Times the GPU and prints one table per case; 0, or 1 if one of our own paths is past its budget."""
    reason = backend_reasons()["triton"]
    if reason is not None or not torch.cuda.is_available():
        raise RopewalkError(
            asked="ropewalk bench gpu",
            expected="a CUDA device and Triton",
            got=reason or "no CUDA device",
            do="run it on a machine with a GPU; `ropewalk bench cpu` times this one",
        )
    if json_file is not None:
        require_writable_file(json_file, asked=f"ropewalk bench gpu --json {json_file}")
    show = sys.stderr if json_file == "-" else sys.stdout
    rounds, compiled = (9, False) if quick else (31, True)
    name = torch.cuda.get_device_name()
    show.write(
        f"{name}; medians of {rounds} rounds in turns, from an empty L2.\n"
        "Shapes: batch, seq, q heads, k heads, dim. Of copy: its time over this;\n"
        "x ours: this over ropewalk's; error: in budgets, of which our paths may use one.\n\n"
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
    chosen = gpu_cases(quick)
    for number, case in enumerate(chosen, 1):
        lines = measure(case, rounds, compiled)
        record["cases"].append(asdict(case) | {"lines": [asdict(line) for line in lines]})
        show.write(f"{number}/{len(chosen)}  {case.title()}\n{_shown(lines)}\n")
        show.flush()
        torch.cuda.empty_cache()
        if json_file not in (None, "-"):
            # After every case: what was measured is kept, whatever stops the rest.
            write_json(record, json_file)
    if json_file == "-":
        write_json(record, json_file)
    results = record["cases"]
    ours = (line for case in results for line in case["lines"] if line["path"].startswith(OURS))
    return int(any(line["us"] is None for line in ours))


def main() -> None:
    """`python -m ropewalk.tools.bench.gpu`."""
    parser = argparse.ArgumentParser(prog="python -m ropewalk.tools.bench.gpu", description=bench_gpu.__doc__)
    parser.add_argument("--json", metavar="FILE", help="write the figures as JSON; - for standard output")
    parser.add_argument("--quick", action="store_true", help="one case of each kind, few rounds, nothing compiled")
    options = parser.parse_args()
    try:
        raise SystemExit(bench_gpu(options.json, options.quick))
    except RopewalkError as error:
        sys.stderr.write(f"{error}\n")
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
