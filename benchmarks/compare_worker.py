"""A process of compare_commits.py, one per checkout, which times the calls of compare_cases.py.

python compare_worker.py DEVICE SRC, with SRC in PYTHONPATH. One line of JSON per request on standard input, and per
answer on standard output.
"""

import gc
import importlib
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from compare_cases import Call, Case, Suite

# Seconds of calls before a burst: the threads of the other worker stop spinning, and the core clock rises.
WARM_UP = 0.01
# GPU: bytes, larger than any L2 cache; cycles that keep the device busy while the host prepares the call.
FLUSH_BYTES, HEAD_START = 512 << 20, 4_000_000
# The number of calls per host sample, and the maximum number of samples per burst: device times hardly vary.
HOST_CALLS, MOST_ON_GPU = 30, 9


class Worker:
    """Builds one case at a time and times bursts of its calls."""

    def __init__(self, suite: Suite) -> None:
        self.suite, self.torch = suite, suite.torch
        self.cases = suite.cases()
        self.call: Call = lambda: None
        self.case = Case("", lambda: self.call)
        self.on_gpu = suite.device == "cuda"
        self.flush: Any = self.torch.empty(FLUSH_BYTES, dtype=self.torch.int8, device="cuda") if self.on_gpu else None

    def prepare(self, number: int) -> dict[str, Any]:
        """Build a case and call it a few times. Returns the approximate time per call and a checksum of the result."""
        self.call = lambda: None
        gc.collect()
        self.torch.compiler.reset()
        if self.on_gpu:
            self.torch.cuda.empty_cache()
        self.case = self.cases[number]
        with self.torch.set_grad_enabled(self.case.grad):
            self.call = self.case.make()
            total = self._sum(self.call())
            times = []
            for _ in range(5):
                start = time.perf_counter()
                self.call()
                self._wait()
                times.append((time.perf_counter() - start) * 1e6)
        return {"us": min(times), "sum": total}

    def burst(self, inner: int, samples: int) -> dict[str, float]:
        """Medians over the samples of a burst, in microseconds per call."""
        with self.torch.set_grad_enabled(self.case.grad):
            gc.disable()
            try:
                if not self.on_gpu:
                    return {"wall": self._wall(inner, samples)}
                samples = min(samples, MOST_ON_GPU)
                times = {"host": self._host(samples)}
                return times if self.case.host_only else times | {"device": self._device(samples)}
            finally:
                gc.enable()

    def _wall(self, inner: int, samples: int) -> float:
        call, now = self.call, time.perf_counter_ns
        until = now() + WARM_UP * 1e9
        call()
        while now() < until:
            call()
        times = []
        for _ in range(samples):
            start = now()
            for _ in range(inner):
                call()
            times.append((now() - start) / inner)
        return statistics.median(times) * 1e-3

    def _host(self, samples: int) -> float:
        """Wall-clock time per call, without synchronization between calls."""
        call, times = self.call, []
        for _ in range(samples + 1):
            self._wait()
            start = time.perf_counter_ns()
            for _ in range(HOST_CALLS):
                call()
            times.append((time.perf_counter_ns() - start) / HOST_CALLS)
        self._wait()
        return statistics.median(times[1:]) * 1e-3

    def _device(self, samples: int) -> float:
        """Time on the device by events, from an empty L2 cache."""
        events, cuda = [], self.torch.cuda
        for _ in range(samples + 1):
            start, stop = (cuda.Event(enable_timing=True) for _ in range(2))
            self.flush.zero_()
            # The device is busy while the host prepares the call, so gaps between launches do not count.
            cuda._sleep(HEAD_START)
            start.record()
            self.call()
            stop.record()
            events.append((start, stop))
        self._wait()
        return statistics.median(start.elapsed_time(stop) * 1e3 for start, stop in events[1:])

    def _wait(self) -> None:
        if self.on_gpu:
            self.torch.cuda.synchronize()

    def _sum(self, result: Any) -> float | None:
        """A checksum that must agree between two checkouts: the sum of the magnitudes of all tensors in the result."""
        if isinstance(result, self.torch.Tensor):
            return float(result.detach().abs().sum(dtype=self.torch.float64))
        if isinstance(result, tuple | list):
            sums = [self._sum(part) for part in result]
            return sum(part for part in sums if part is not None)
        return None


def work(device: str, source: str) -> None:
    """Answer requests until standard input ends."""
    # Only answers are written to standard output. All other output goes to standard error.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    torch = importlib.import_module("torch")
    if device == "cpu":
        torch.set_num_threads(2)
    package = importlib.import_module("ropewalk")
    if Path(source).resolve() not in Path(str(package.__file__)).resolve().parents:
        raise SystemExit(f"imported {package.__file__}, which is not in {source}")
    worker = Worker(Suite(device))

    def answer(value: object) -> None:
        answers.write(json.dumps(value) + "\n")
        answers.flush()

    answer([[case.name, case.host_only] for case in worker.cases])
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if "prepare" in request:
                answer(worker.prepare(request["prepare"]))
            else:
                answer(worker.burst(request["inner"], request["samples"]))
        except Exception as error:
            # One checkout may lack a name that a case needs: report the case as failed and continue with the others.
            answer({"error": f"{type(error).__name__}: {error}".splitlines()[0]})


if __name__ == "__main__":
    work(sys.argv[1], sys.argv[2])
