"""Times candidates in alternating order: by wall clock, on the device, and on the host."""

import gc
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ropewalk.kernels.torch_internals import delay

__all__ = ["Candidate", "clock_times", "device_times", "host_times", "wall_times"]

DEVICE = "cuda"

# Larger than any L2 cache.
FLUSH_BYTES = 512 << 20

# Cycles, about two milliseconds: longer than the host needs to launch any call that is timed here.
HEAD_START = 4_000_000


@dataclass(frozen=True)
class Candidate:
    """A function to time.

    Attributes:
        name: Its name in the table.
        run: The call that is timed.
        outputs: A call that returns the tensors to check.
        limit: The allowed error in norms of a pair. None for ropewalk, whose error is limited by a budget.
    """

    name: str
    run: Callable[[], object]
    outputs: Callable[[], Sequence[Tensor]] | None = None
    limit: float | None = None


def wall_times(
    candidates: Sequence[Candidate], rounds: int, calls: int, advance: Callable[[], None] = lambda: None
) -> dict[str, float]:
    """The median wall-clock time per call of each candidate, in milliseconds.

    The order is shuffled in every round, so that no candidate always follows the same other one. A busy machine slows
    all candidates down.

    Args:
        candidates: The functions to time.
        rounds: The number of rounds.
        calls: The number of calls per round and candidate.
        advance: Called after every round.

    Returns:
        The medians by name.
    """
    times: dict[str, list[float]] = {candidate.name: [] for candidate in candidates}
    order, shuffle = list(candidates), random.Random(0)
    warm_up = 2
    collecting = gc.isenabled()
    gc.disable()
    try:
        for number in range(rounds + warm_up):
            shuffle.shuffle(order)
            for candidate in order:
                start = time.perf_counter_ns()
                for _ in range(calls):
                    candidate.run()
                if number >= warm_up:
                    times[candidate.name].append((time.perf_counter_ns() - start) / calls * 1e-6)
            advance()
    finally:
        if collecting:
            gc.enable()
    return {name: statistics.median(samples) for name, samples in times.items()}


def device_times(
    candidates: Sequence[Candidate], rounds: int, advance: Callable[[], None] = lambda: None
) -> dict[str, float]:
    """The median time of each candidate on the device, in microseconds.

    The order is shuffled in every round, and the cache is overwritten before every call. The host does not synchronize
    until the end, so that the device is never idle before a call. For the arguments see `wall_times`.
    """
    flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda")
    events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []
    order, shuffle, warm_up = list(candidates), random.Random(0), 3
    for number in range(rounds + warm_up):
        shuffle.shuffle(order)
        for candidate in order:
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            flush.zero_()
            # Keeps the device busy while the host launches the kernels, so that gaps between launches do not count.
            delay(HEAD_START)
            start.record()
            candidate.run()
            stop.record()
            if number >= warm_up:
                events.append((candidate.name, start, stop))
        advance()
    torch.cuda.synchronize()
    times: dict[str, list[float]] = {candidate.name: [] for candidate in candidates}
    for name, start, stop in events:
        times[name].append(start.elapsed_time(stop) * 1e3)
    return {name: statistics.median(samples) for name, samples in times.items()}


def clock_times(
    candidates: Sequence[Candidate], rounds: int, calls: int = 200, wait: Callable[[], object] = torch.cuda.synchronize
) -> dict[str, tuple[float, float]]:
    """The median host time and wall-clock time per call, in microseconds.

    Calls follow each other, and nobody waits for a result. The host time ends when the last call returns, the wall
    clock when the device has finished. The order is shuffled in every round.

    Args:
        candidates: The functions to time.
        rounds: The number of rounds.
        calls: The number of calls per round and candidate. All their launches must fit into the queue of the device,
            about a thousand. Otherwise the host waits for the device.
        wait: Waits for the device.

    Returns:
        The host time and the wall-clock time by name.

    >>> times = clock_times([Candidate("nothing", lambda: None)], rounds=3, calls=2, wait=lambda: None)
    >>> 0 < times["nothing"][0] <= times["nothing"][1]
    True
    """
    times: dict[str, list[tuple[float, float]]] = {candidate.name: [] for candidate in candidates}
    order, shuffle = list(candidates), random.Random(0)
    collecting = gc.isenabled()
    try:
        for number in range(rounds + 1):
            shuffle.shuffle(order)
            for candidate in order:
                run = candidate.run
                wait()
                gc.disable()
                start = time.perf_counter_ns()
                for _ in range(calls):
                    run()
                host = time.perf_counter_ns()
                wait()
                wall = time.perf_counter_ns()
                # Between two candidates, so that what one of them leaves is collected.
                if collecting:
                    gc.enable()
                if number:
                    times[candidate.name].append(((host - start) / calls * 1e-3, (wall - start) / calls * 1e-3))
    finally:
        if collecting:
            gc.enable()
    return {
        name: (statistics.median(host for host, _ in samples), statistics.median(wall for _, wall in samples))
        for name, samples in times.items()
    }


def host_times(
    candidates: Sequence[Candidate], rounds: int, calls: int = 200, wait: Callable[[], object] = torch.cuda.synchronize
) -> dict[str, float]:
    """The median host time per call, in microseconds. For the arguments see `clock_times`."""
    return {name: host for name, (host, _) in clock_times(candidates, rounds, calls, wait).items()}
