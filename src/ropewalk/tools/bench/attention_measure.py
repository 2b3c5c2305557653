"""One case of `ropewalk bench attention`: its paths are checked, their memory is taken, and they are timed in turns."""

import itertools
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ropewalk.tools.bench import gpu_timing
from ropewalk.tools.bench.attention_paths import PATHS, Attend, AttentionPath, Truth, checked_tokens
from ropewalk.tools.bench.timing import Contestant, take_turns

__all__ = ["OURS", "AttentionCase", "AttentionLine", "attention_cases", "measure"]

OURS = "ropewalk"

# What a result may be off by, of its own norm: several times what the arithmetic of a path explains, and far less than
# a forgotten rotation, mask or denominator.
LIMITS = {"float32": 2.0**-15, "bfloat16": 2.0**-5}

# Seconds: a round that takes longer is repeated less often.
LONG_ROUND = 1.0


@dataclass(frozen=True)
class AttentionCase:
    """What is timed: q, k and v of (batch, heads, N, dim), causal. Work is "forward", without gradients, or
    "forward+backward". Those of the sweep differ in N alone, and growth is fitted to them."""

    shape: tuple[int, int, int, int]
    dtype: str
    work: str = "forward"
    sweep: bool = True

    def title(self) -> str:
        """The case in a line."""
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
    found = [AttentionCase((4, 16, 8192, 128), "bfloat16", work, sweep=False) for work in works]
    found += [AttentionCase((1, 16, seq, 64), "bfloat16", work) for work in works for seq in lengths]
    return found + ([] if quick else [AttentionCase((1, 4, 1_048_576, 64), "bfloat16", sweep=False)])


def _contestant(
    name: str, path: AttentionPath, attend: Attend, tensors: list[Tensor], cotangents: list[Tensor]
) -> Contestant:
    """The path on tensors as it takes them, so that none pays for another's layout."""

    def own(x: Tensor) -> Tensor:
        return x.transpose(1, 2).contiguous() if path.tokens_first else x

    given = [own(x) for x in tensors]
    if not cotangents:
        back = (lambda y: y.transpose(1, 2)) if path.tokens_first else (lambda y: y)
        return Contestant(name, lambda: attend(*given), lambda: [back(attend(*given))])
    leaves = [x.detach().requires_grad_() for x in given]
    timed, checked = map(own, cotangents)

    def everything() -> list[Tensor]:
        out = attend(*leaves)
        found = [out.detach(), *torch.autograd.grad(out, leaves, checked)]
        return [x.transpose(1, 2) for x in found] if path.tokens_first else found

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
            found = contestant.outputs() if contestant.outputs else []
        except Exception as error:
            # What a peer cannot do is its own affair, and no reason to lose the other figures.
            if name.startswith(OURS):
                raise
            notes[name] = f"{type(error).__name__}: {error}".splitlines()[0]
            continue
        if path.kind not in truths:
            truths[path.kind] = Truth(path.kind, tensors, cotangents[1] if cotangents else None)
        errors[name] = truths[path.kind].error(found)
        del found
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
        return {name: us * 1e-3 for name, us in gpu_timing.device_times(contestants, rounds).items()}
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
