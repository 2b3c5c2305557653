"""Contestants that take turns: what each call takes, held against the float64 reference before it is timed."""

import gc
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ropewalk.reference.budget import rotation_budget
from ropewalk.reference.rotate import rotate

__all__ = ["Contestant", "Line", "Truth", "take_turns"]


@dataclass(frozen=True)
class Contestant:
    """A path under its name: `run` is what is timed; `limit` is how many budgets it may be off."""

    name: str
    run: Callable[[], object]
    outputs: Callable[[], Sequence[Tensor]] | None = None
    limit: float = 1.0


@dataclass(frozen=True)
class Line:
    """A row of the table. No time is given for a path that is wrong."""

    path: str
    ms: float | None
    gb_per_s: float | None
    share_of_copy: float | None
    ratio_to_ropewalk: float | None
    error_over_budget: float | None


class Truth:
    """The rotation of a tensor [batch, heads, seq, dim] in float64, and what each element may be off by."""

    def __init__(self, x: Tensor, positions: Tensor, inv_freq: Tensor, pairing: str, conjugate: bool) -> None:
        self.dtype = x.dtype
        self.value = rotate(x.detach().double(), positions, inv_freq, pairing=pairing, conjugate=conjugate)
        self.allowed = rotation_budget(self.value, x.dtype, rotary_dim=x.shape[-1], pairing=pairing)

    def error_over_budget(self, y: Tensor) -> float:
        """The largest error of any element of y, in budgets; infinite for another shape or dtype."""
        if y.shape != self.value.shape or y.dtype != self.dtype:
            return torch.inf
        off = y.detach().double().sub_(self.value).abs_().div_(self.allowed)
        return float(torch.nan_to_num(off, nan=torch.inf).max())


def take_turns(
    contestants: Sequence[Contestant], rounds: int, calls: int, done: Callable[[], None] = lambda: None
) -> dict[str, float]:
    """The median of each in milliseconds a call. Each round they run in another order, so that none always follows the
    same one, and a busy machine slows all of them."""
    taken: dict[str, list[float]] = {contestant.name: [] for contestant in contestants}
    order, shuffle = list(contestants), random.Random(0)
    warm_up = 2
    collecting = gc.isenabled()
    gc.disable()
    try:
        for number in range(rounds + warm_up):
            shuffle.shuffle(order)
            for contestant in order:
                start = time.perf_counter_ns()
                for _ in range(calls):
                    contestant.run()
                if number >= warm_up:
                    taken[contestant.name].append((time.perf_counter_ns() - start) / calls * 1e-6)
            done()
    finally:
        if collecting:
            gc.enable()
    return {name: statistics.median(times) for name, times in taken.items()}
