"""Times on a GPU: by events, in turns, from an empty cache; and the host's time, apart."""

import random
import statistics
import time
from collections.abc import Callable, Sequence

import torch

from ropewalk.tools.bench.timing import Contestant

__all__ = ["device_times", "host_times"]

DEVICE = "cuda"

# More than any L2 holds.
FLUSH_BYTES = 512 << 20

# Cycles, some two milliseconds: longer than the host takes for any call that is timed here.
HEAD_START = 4_000_000


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
            torch.cuda._sleep(HEAD_START)
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
    """The median of what a call takes of the host, in microseconds: many in a row, for none of which it waits."""
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
