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
from ropewalk.reference.pairs import join_pairs, split_pairs
from ropewalk.reference.rotate import rotate

__all__ = ["Contestant", "Line", "Truth", "take_turns"]


@dataclass(frozen=True)
class Contestant:
    """A path under its name: `run` is what is timed. Ours may be off by a budget, a peer by `limit` norms of a pair."""

    name: str
    run: Callable[[], object]
    outputs: Callable[[], Sequence[Tensor]] | None = None
    limit: float | None = None


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
        norm = torch.hypot(*split_pairs(self.value, pairing))
        self.norm = join_pairs(norm, norm, pairing)

    def errors(self, y: Tensor) -> tuple[float, float]:
        """The largest error of any element of y, in budgets and in norms of its pair; infinite for another dtype."""
        if y.shape != self.value.shape or y.dtype != self.dtype:
            return torch.inf, torch.inf
        error = torch.nan_to_num((y.detach().double() - self.value).abs_(), nan=torch.inf)
        return float((error / self.allowed).max()), float((error / self.norm).max())


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
