"""The time of the rotation on this machine, next to transformers' formula, in interleaved rounds."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ropewalk.nn.rotary.embedding import RotaryEmbedding
from ropewalk.spec.rope import RopeSpec
from ropewalk.tools.bench.peers import Rotation
from ropewalk.tools.bench.timing import Candidate, wall_times
from ropewalk.tools.demo.formula import formula_of

__all__ = ["K_HEADS", "Q_HEADS", "Speed", "dtype_on", "measure"]

# The time for all cases together, and the sizes of a layer of Llama 3.1 8B.
SECONDS, TOKENS, Q_HEADS, K_HEADS = 4.5, 1024, 32, 8
# The position of the single token.
DECODED = 1000
OURS, FORMULA = "ropewalk", "formula"


@dataclass(frozen=True)
class Speed:
    """The medians of one case.

    Attributes:
        case: The case in words.
        ropewalk_ms: Milliseconds of the module.
        formula_ms: Milliseconds of transformers' formula.
        rounds: The number of rounds.

    >>> Speed("one token, forward", ropewalk_ms=0.02, formula_ms=0.12, rounds=31).ratio
    6.0
    """

    case: str
    ropewalk_ms: float
    formula_ms: float
    rounds: int

    @property
    def ratio(self) -> float:
        """How many times as fast as the formula the module is."""
        return self.formula_ms / self.ropewalk_ms


def dtype_on(device: str) -> torch.dtype:
    """The dtype that is timed: bfloat16 on a GPU, as models run there, and float32 on a CPU.

    >>> dtype_on("cpu")
    torch.float32
    """
    return torch.float32 if device == "cpu" else torch.bfloat16


def measure(spec: RopeSpec, device: str) -> list[Speed]:
    """Time the rotation of q and k in three cases: forward, forward and backward, and one token.

    Both paths have their cos and sin before the clock starts, as in a model, which computes them once for all layers.

    Args:
        spec: The rotation.
        device: "cpu" or "cuda".

    Returns:
        One entry per case, in wall-clock time. On a GPU that of calls in a row, until the device has finished.
    """
    cases = (
        (f"{TOKENS:,} tokens, forward", range(TOKENS), False),
        (f"{TOKENS:,} tokens, forward and backward", range(TOKENS), True),
        ("one token, forward", range(DECODED, DECODED + 1), False),
    )
    return [_measure(spec, *case, device, SECONDS / len(cases)) for case in cases]


def _measure(
    spec: RopeSpec,
    case: str,
    positions: range,
    backward: bool,
    device: str,
    seconds: float,
) -> Speed:
    dtype = dtype_on(device)
    # Transposed views, as a projection leaves them.
    q, k = (
        torch.randn(1, len(positions), heads, spec.head_dim, device=device).to(dtype).transpose(1, 2)
        for heads in (Q_HEADS, K_HEADS)
    )
    ids = torch.arange(positions.start, positions.stop)
    length = positions.stop if spec.varies else None
    rotations = {
        OURS: _ours(spec, ids.to(device), length, device),
        FORMULA: formula_of(spec, ids, dtype, length=length, device=device),
    }
    with torch.set_grad_enabled(backward):
        # Calls that take microseconds, and calls that run on behind the host, are timed several in a row.
        calls = 20 if len(positions) == 1 or device != "cpu" else 1
        candidates = [
            Candidate(name, _finished(_call(rotation, q, k, backward), calls, device))
            for name, rotation in rotations.items()
        ]
        rounds = _rounds(candidates, seconds)
        times = {name: ms / calls for name, ms in wall_times(candidates, rounds, 1).items()}
    return Speed(case, times[OURS], times[FORMULA], rounds)


def _finished(call: Callable[[], object], calls: int, device: str) -> Callable[[], None]:
    """A function that makes `calls` calls, and returns when the device has finished."""

    def run() -> None:
        for _ in range(calls):
            call()
        if device != "cpu":
            torch.cuda.synchronize()

    return run


def _ours(spec: RopeSpec, ids: Tensor, length: int | None, device: str) -> Rotation:
    rope, start = RotaryEmbedding(spec).to(device), int(ids[0])
    rows = ids if spec.axes is None else ids.expand(spec.axes.count, -1)
    if not spec.same_for_both:
        return lambda q, k: rope(q, k, positions=rows, length=length)
    if spec.axes is not None or spec.varies:
        angles = rope.at(rows, length=length)
        return lambda q, k: rope(q, k, angles=angles)
    return lambda q, k: rope(q, k, offset=start)


def _call(rotation: Rotation, q: Tensor, k: Tensor, backward: bool) -> Callable[[], object]:
    # The last result is kept, as in a model. Otherwise its memory can go back to the system after every call, and
    # getting it again can take longer than the rotation.
    kept: list[object] = [None]
    leaves = [x.detach().requires_grad_(backward) for x in (q, k)]
    cotangents = [torch.ones_like(x) for x in leaves]

    def run() -> None:
        rotated = rotation(*leaves)
        kept[0] = torch.autograd.grad(rotated, leaves, cotangents) if backward else rotated

    return run


def _rounds(candidates: list[Candidate], seconds: float) -> int:
    """The number of rounds that take about `seconds`: an odd number from 3 to 301."""
    for candidate in candidates:
        candidate.run()
    start = time.perf_counter()
    for candidate in candidates:
        candidate.run()
    round_time = time.perf_counter() - start
    return min(301, max(3, int(seconds / round_time) | 1))
