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


@dataclass(frozen=True)
class Truth:
    """A result in float64, what each element may be off by, and the size that errors of peers are measured by."""

    value: Tensor
    allowed: Tensor
    norm: Tensor
    dtype: torch.dtype

    @classmethod
    def of_rotation(cls, x: Tensor, positions: Tensor, inv_freq: Tensor, pairing: str, conjugate: bool) -> "Truth":
        """The rotation of x, [batch, heads, seq, dim], whose first 2 * pairs features turn."""
        turning = 2 * inv_freq.shape[-1]
        value = rotate(x.detach().double(), positions, inv_freq, pairing=pairing, conjugate=conjugate)
        norm = torch.hypot(*split_pairs(value[..., :turning], pairing))
        norm = torch.cat((join_pairs(norm, norm, pairing), value[..., turning:].abs()), dim=-1)
        return cls(value, rotation_budget(value, x.dtype, rotary_dim=turning, pairing=pairing), norm, x.dtype)

    def errors(self, y: Tensor) -> tuple[float, float]:
        """The largest error of any element of y, in budgets and in norms of its pair; infinite for another dtype."""
        if y.shape != self.value.shape or y.dtype != self.dtype:
            return torch.inf, torch.inf
        error = torch.nan_to_num((y.detach().double() - self.value).abs_(), nan=torch.inf)
        # What is only copied is allowed no error, and 0 / 0 is none.
        return tuple(float(torch.where(error == 0, 0, error / size).max()) for size in (self.allowed, self.norm))  # pyright: ignore[reportReturnType]


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
