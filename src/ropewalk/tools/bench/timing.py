"""Contestants that take turns, and what each call takes: on the CPU by the clock, on a GPU by events or by the host."""

import gc
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ropewalk.kernels.torch_internals import delay

__all__ = ["Contestant", "device_times", "host_times", "take_turns"]

DEVICE = "cuda"

# More than any L2 holds.
FLUSH_BYTES = 512 << 20

# Cycles, some two milliseconds: longer than the host takes for any call that is timed here.
HEAD_START = 4_000_000


@dataclass(frozen=True)
class Contestant:
    """A path under its name: `run` is what is timed. Ours may be off by a budget, a peer by `limit` norms of a pair."""

    name: str
    run: Callable[[], object]
    outputs: Callable[[], Sequence[Tensor]] | None = None
    limit: float | None = None


def take_turns(
    contestants: Sequence[Contestant], rounds: int, calls: int, done: Callable[[], None] = lambda: None
) -> dict[str, float]:
    """The median of each in milliseconds per call.

    Each round they run in another order, so that none always follows the same one. A busy machine slows all of them.
    """
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


def device_times(
    contestants: Sequence[Contestant], rounds: int, done: Callable[[], None] = lambda: None
) -> dict[str, float]:
    """The median of each in microseconds on the device.

    Each round they run in another order; before each the cache is overwritten. The host waits for nothing until the
    end, so that the device never idles before a contestant.
    """
    flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda")
    events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []
    order, shuffle, warm_up = list(contestants), random.Random(0), 3
    for number in range(rounds + warm_up):
        shuffle.shuffle(order)
        for contestant in order:
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            flush.zero_()
            # The device is kept busy while the host puts together what the contestant launches: its gaps do not count.
            delay(HEAD_START)
            start.record()
            contestant.run()
            stop.record()
            if number >= warm_up:
                events.append((contestant.name, start, stop))
        done()
    torch.cuda.synchronize()
    taken: dict[str, list[float]] = {contestant.name: [] for contestant in contestants}
    for name, start, stop in events:
        taken[name].append(start.elapsed_time(stop) * 1e3)
    return {name: statistics.median(times) for name, times in taken.items()}


def host_times(contestants: Sequence[Contestant], rounds: int, calls: int = 200) -> dict[str, float]:
    """The median of the host's time per call in microseconds: many calls in a row, none of which is waited for."""
    taken: dict[str, list[float]] = {contestant.name: [] for contestant in contestants}
    order, shuffle = list(contestants), random.Random(0)
    for number in range(rounds + 1):
        shuffle.shuffle(order)
        for contestant in order:
            torch.cuda.synchronize()
            start = time.perf_counter_ns()
            for _ in range(calls):
                contestant.run()
            if number:
                taken[contestant.name].append((time.perf_counter_ns() - start) / calls * 1e-3)
    torch.cuda.synchronize()
    return {name: statistics.median(times) for name, times in taken.items()}
