"""Compares the speed of two checkouts on one machine, in one run, in interleaved rounds.

python benchmarks/compare_commits.py OLD_SRC NEW_SRC --suite cpu|gpu [--rounds N] [--repeats N] [--only TEXT]
    [--json FILE]

OLD_SRC and NEW_SRC are the `src` folders of two checkouts (both with the C extension built, for the CPU). One worker
process per checkout is kept alive. Both build the same cases from public names only, so one script supports both.

In each round, each worker times a short burst of calls. The order of the two workers is swapped after every round. The
result is the median over the rounds of new / old, because a busy machine slows both halves of a round. A ratio above
1.03 is flagged. Two processes with the same code may differ by chance (memory placement), so flagged cases are timed
again in new workers, and the median over these repeats is the result.

On a GPU every case has two times: "device", by events, from an empty L2 cache; and "host", the wall-clock time per call
of asynchronous calls. Needs Python, torch (and Triton for CUDA) only.
"""

import argparse
import gc
import importlib
import inspect
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

FLAGGED = 1.03
Call = Callable[[], object]

# Seconds per burst, and the fewest and the most samples in it.
BURST, FEWEST, MOST = 0.04, 2, 41
# Microseconds per sample: a shorter call is repeated within one sample, so that the clock's own cost does not count.
SAMPLE = 200.0
# Seconds of calls before a burst: the threads of the other worker stop spinning, and the core clock rises.
WARM_UP = 0.01

# glibc keeps freed memory, so that page faults of large results, which differ between equal processes, are not timed.
KEEP_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40), "MALLOC_TOP_PAD_": str(1 << 28)}

# GPU: bytes, larger than any L2 cache; cycles that keep the device busy while the host prepares the call.
FLUSH_BYTES, HEAD_START = 512 << 20, 4_000_000
# The number of calls per host sample, and the maximum number of samples per burst: device times hardly vary.
HOST_CALLS, MOST_ON_GPU = 30, 9

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 32,
    "max_position_embeddings": 131_072,
    "rope_theta": 500_000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}


@dataclass(frozen=True)
class Case:
    """A call to time.

    Attributes:
        name: The name of the case.
        make: Builds the tensors and returns the call.
        grad: Whether autograd is enabled.
        host_only: Whether only host time is measured.
    """

    name: str
    make: Callable[[], Call]
    grad: bool = False
    host_only: bool = False


# ---------------------------------------------------------------------------------------------------------------------
# The cases. They use only names that both checkouts export.


class Suite:
    """The cases of one device, in the order in which they are timed."""

    def __init__(self, device: str) -> None:
        self.torch: Any = importlib.import_module("torch")
        self.rw: Any = importlib.import_module("ropewalk")
        self.device = device
        parameters = list(inspect.signature(self.rw.qk_norm_rope).parameters)
        self.rope_is_third = parameters[2] == "rope"

    def cases(self) -> list[Case]:
        """All cases of the device."""
        return [*(self._cpu() if self.device == "cpu" else self._gpu())]

    # Building blocks of cases.

    def rope(self, dim: int, pairing: str, backend: str | None = None, rotary_dim: int | None = None) -> Any:
        """A module on the device."""
        spec = self.rw.RopeSpec(dim, rotary_dim=rotary_dim, pairing=pairing)
        return self.rw.RotaryEmbedding(spec, backend=backend).to(self.device)

    def tensors(self, shape: Sequence[int], memory: str, dtype: str, count: int = 2) -> list[Any]:
        """q and k for (batch, seq, q heads, k heads, dim), as [batch, heads, seq, dim]."""
        batch, seq, q_heads, k_heads, dim = shape
        random = self.torch.Generator(self.device).manual_seed(0)
        heads = [q_heads, k_heads][:count]
        drawn = [self.torch.randn(batch, seq, h, dim, generator=random, device=self.device) for h in heads]
        views = [x.to(getattr(self.torch, dtype)).transpose(1, 2) for x in drawn]
        return views if memory == "transposed" else [x.contiguous() for x in views]

    def ids(self, positions: range) -> Any:
        """The positions as a tensor on the device."""
        return self.torch.arange(positions.start, positions.stop, device=self.device)

    def norm(self, q: Any, k: Any, weights: Sequence[Any], rope: Any, **position: Any) -> Any:
        """qk_norm_rope, whose argument order differs between checkouts."""
        if self.rope_is_third:
            return self.rw.qk_norm_rope(q, k, rope, q_weight=weights[0], k_weight=weights[1], **position)
        return self.rw.qk_norm_rope(q, k, weights[0], weights[1], rope, **position)

    def backward(self, forward: Callable[..., Any], leaves: Sequence[Any]) -> Call:
        """The call that computes forward and the gradients of all leaves."""
        for leaf in leaves:
            leaf.requires_grad_()
        with self.torch.enable_grad():
            outputs = forward()
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        cotangents = [self.torch.ones_like(y) for y in outputs]
        grad = self.torch.autograd.grad

        def call() -> object:
            result = forward()
            return grad(result if isinstance(result, tuple) else (result,), leaves, cotangents)

        return call

    def rotation(
        self,
        shape: Sequence[int],
        pairing: str,
        memory: str,
        dtype: str,
        work: str = "forward",
        position_argument: str = "angles",
        rotary_dim: int | None = None,
        norm: bool = False,
        backend: str | None = None,
        in_place: bool = False,
        compiled: bool = False,
    ) -> Callable[[], Call]:
        """The function that builds a rotation. `position_argument` is the argument that specifies the positions."""

        def make() -> Call:
            positions = range(shape[1]) if shape[1] > 1 else range(1000, 1001)
            rope = self.rope(shape[-1], pairing, backend, rotary_dim)
            tensors = self.tensors(shape, memory, dtype)
            arguments: dict[str, Any] = {
                "nothing": lambda: {},
                "offset": lambda: {"offset": positions.start},
                "offsets": lambda: {"offset": self.torch.full((shape[0],), positions.start, device=self.device)},
                "positions": lambda: {"positions": self.ids(positions)},
                "angles": lambda: {"angles": rope.at(self.ids(positions))},
            }[position_argument]()
            q, k = tensors
            if norm:
                random = self.torch.Generator(self.device).manual_seed(1)
                weights = [
                    (self.torch.rand(shape[-1], generator=random, device=self.device) + 0.5).to(q.dtype)
                    for _ in range(2)
                ]
                tensors = [*tensors, *weights]

                def rotate(q: Any, k: Any) -> Any:
                    return self.norm(q, k, weights, rope, **arguments)
            elif in_place:

                def rotate(q: Any, k: Any) -> Any:
                    return rope.rotate_(q, k, **arguments)
            else:

                def rotate(q: Any, k: Any) -> Any:
                    return rope(q, k, **arguments)

            function = self.torch.compile(rotate, dynamic=False) if compiled else rotate
            if work == "forward":
                return lambda: function(q, k)
            if work == "forward, grad":
                for x in tensors:
                    x.requires_grad_()
                return lambda: function(q, k)
            return self.backward(lambda: function(q, k), tensors)

        return make

    def linear(self, shape: Sequence[int], dtype: str, work: str, rotated: bool) -> Callable[[], Call]:
        """The function that builds a call of linear attention on q, k, v of (batch, heads, seq, dim)."""

        def make() -> Call:
            random = self.torch.Generator(self.device).manual_seed(0)
            q, k, v = (
                self.torch.randn(shape, generator=random, device=self.device).to(getattr(self.torch, dtype))
                for _ in range(3)
            )
            rope = self.rw.RotaryEmbedding(shape[-1]).to(self.device) if rotated else None

            def attend() -> Any:
                return self.rw.linear_attention(q, k, v, rope=rope)

            return attend if work == "forward" else self.backward(attend, [q, k, v])

        return make

    def linear_step(self, dtype: str) -> Callable[[], Call]:
        """The function that builds a call for one token after a state."""

        def make() -> Call:
            random = self.torch.Generator(self.device).manual_seed(0)
            q, k, v = (
                self.torch.randn(1, 8, 65, 64, generator=random, device=self.device).to(getattr(self.torch, dtype))
                for _ in range(3)
            )
            rope = self.rw.RotaryEmbedding(64).to(self.device)
            before = [x[:, :, :64] for x in (q, k, v)]
            _, state = self.rw.linear_attention(*before, rope=rope, return_state=True)
            last = [x[:, :, 64:].contiguous() for x in (q, k, v)]
            return lambda: self.rw.linear_attention(*last, rope=rope, state=state, return_state=True)

        return make

    def angles(self, seq: int) -> Callable[[], Call]:
        """The function that builds a call of rope.at."""

        def make() -> Call:
            rope, ids = self.rope(128, "half"), self.ids(range(1000, 1000 + seq))
            return lambda: rope.at(ids)

        return make

    def new_module(self) -> Call:
        """A call that creates a module and calls it once."""
        q, k = self.tensors((1, 16, 4, 2, 64), "contiguous", "float32")
        return lambda: self.rw.RotaryEmbedding(64).to(self.device)(q, k)

    def layer(self, name: str, linear: bool) -> Callable[[], Call]:
        """The function that builds a forward pass of an attention layer."""

        def make() -> Call:
            self.torch.manual_seed(0)
            encoding = self.rw.encoding(name, dim=512, num_heads=8)
            kind = self.rw.LinearAttention if linear else self.rw.Attention
            layer = kind(512, num_heads=8, encoding=encoding).to(self.device)
            x = self.torch.randn(1, 128, 512, device=self.device)
            return lambda: layer(x)

        return make

    def specs(self, as_file: bool) -> Callable[[], Call]:
        """The function that builds a call of load_spec on a config of Llama 3.1."""

        def make() -> Call:
            if not as_file:
                return lambda: self.rw.load_spec(LLAMA)
            path = Path(tempfile.mkdtemp()) / "config.json"
            path.write_text(json.dumps(LLAMA), encoding="utf-8")
            return lambda: self.rw.load_spec(str(path))

        return make

    def seed_function(self) -> Call:
        """A call of apply_rope, the function of the seeds."""
        cos, sin = self.rw.build_rotary_frequencies(128, 2048)
        (q,) = self.tensors((1, 2048, 32, 8, 128), "contiguous", "float32", count=1)
        cos, sin = cos.to(self.device), sin.to(self.device)
        return lambda: self.rw.apply_rope(q, cos, sin)

    # The cases of each device.

    def _cpu(self) -> Iterator[Case]:
        prefill, token = (1, 2048, 32, 8, 128), (1, 1, 32, 8, 128)
        dtypes, pairings = ("float32", "bfloat16"), ("half", "interleaved")
        memories = ("transposed", "contiguous")
        for work, dtype, pairing, memory in itertools.product(
            ("forward", "forward+backward"), dtypes, pairings, memories
        ):
            make = self.rotation(prefill, pairing, memory, dtype, work, "offset")
            yield Case(f"prefill 2048, {dtype}, {pairing}, {memory}, {work}", make, work != "forward")
        for work, dtype, pairing in itertools.product(("forward", "forward, grad"), dtypes, pairings):
            make = self.rotation(token, pairing, "contiguous", dtype, work, "offset")
            yield Case(f"token, {dtype}, {pairing}, offset=, {work}", make, work != "forward")
        for pairing, work in itertools.product(pairings, ("forward", "forward+backward")):
            make = self.rotation(prefill, pairing, "transposed", "float32", work, "offset", backend="torch")
            yield Case(f"prefill 2048, float32, {pairing}, backend torch, {work}", make, work != "forward")
        for position_argument in ("nothing", "offsets", "positions", "angles"):
            make = self.rotation(token, "half", "contiguous", "float32", position_argument=position_argument)
            yield Case(f"token, float32, half, {position_argument}=", make)
        for position_argument in ("positions", "angles"):
            make = self.rotation(prefill, "half", "transposed", "bfloat16", position_argument=position_argument)
            yield Case(f"prefill 2048, bfloat16, half, {position_argument}=", make)
        for name, shape in (("token", token), ("prefill 2048", prefill)):
            make = self.rotation(shape, "half", "contiguous", "float32", position_argument="offset", in_place=True)
            yield Case(f"{name}, float32, half, rotate_", make)
            for work in ("forward", "forward+backward"):
                make = self.rotation(shape, "half", "contiguous", "float32", work, "offset", norm=True)
                yield Case(f"{name}, float32, half, qk_norm_rope, {work}", make, work != "forward")
            make = self.rotation(shape, "half", "contiguous", "float32", position_argument="angles", compiled=True)
            yield Case(f"{name}, float32, half, angles=, compiled", make)
        make = self.rotation(token, "half", "contiguous", "float32", position_argument="nothing", compiled=True)
        yield Case("token, float32, half, positions 0.., compiled", make)
        make = self.rotation(prefill, "half", "contiguous", "float32", "forward+backward", "angles", compiled=True)
        yield Case("prefill 2048, float32, half, angles=, compiled, forward+backward", make, grad=True)
        for seq, work, rotated in itertools.product((64, 1024), ("forward", "forward+backward"), (False, True)):
            make = self.linear((1, 8, seq, 64), "float32", work, rotated)
            yield Case(f"linear {seq}, float32{', rope' if rotated else ''}, {work}", make, work != "forward")
        yield Case("linear, one token after a state, rope", self.linear_step("float32"))
        yield Case("linear 8192, float32, rope, forward", self.linear((1, 8, 8192, 64), "float32", "forward", True))
        yield from self._shared()

    def _shared(self) -> Iterator[Case]:
        """Cases for which only host time is measured."""
        yield Case("rope.at, 1 position", self.angles(1), host_only=True)
        yield Case("rope.at, 2048 positions", self.angles(2048), host_only=True)
        yield Case("new module, first call", self.new_module, host_only=True)
        yield Case("load_spec, dict", self.specs(as_file=False), host_only=True)
        yield Case("load_spec, file", self.specs(as_file=True), host_only=True)
        for name in ("rope", "alibi"):
            yield Case(f"Attention, {name}, forward", self.layer(name, linear=False), host_only=True)
        yield Case("LinearAttention, rope, forward", self.layer("rope", linear=True), host_only=True)
        yield Case("apply_rope, 2048 tokens", self.seed_function, host_only=True)

    def _gpu(self) -> Iterator[Case]:
        training, long = (4, 8192, 32, 8, 128), (1, 131_072, 32, 8, 128)
        small, token = (8, 2048, 16, 16, 64), (64, 1, 32, 8, 128)
        pairings, memories, works = (
            ("half", "interleaved"),
            ("transposed", "contiguous"),
            ("forward", "forward+backward"),
        )
        for shape, pairing, memory in itertools.product((training, long, small), pairings, memories):
            yield Case(f"{shape}, {pairing}, {memory}", self.rotation(shape, pairing, memory, "bfloat16"))
        for pairing in pairings:
            make = self.rotation(training, pairing, "transposed", "bfloat16", rotary_dim=64)
            yield Case(f"{training}, {pairing}, 64 features rotated", make)
        for dim, pairing in itertools.product((96, 80), pairings):
            shape = (*training[:4], dim)
            yield Case(f"{shape}, {pairing}", self.rotation(shape, pairing, "transposed", "bfloat16"))
        for dtype in ("float32", "float16"):
            yield Case(f"{training}, half, {dtype}", self.rotation(training, "half", "transposed", dtype))
        make = self.rotation(training, "half", "transposed", "bfloat16", position_argument="positions")
        yield Case(f"{training}, half, positions=", make)
        make = self.rotation(training, "half", "transposed", "bfloat16", position_argument="nothing")
        yield Case(f"{training}, half, positions 0..", make)
        for shape, pairing, memory in itertools.product((training, small), pairings, memories):
            make = self.rotation(shape, pairing, memory, "bfloat16", "forward+backward")
            yield Case(f"{shape}, {pairing}, {memory}, forward+backward", make, grad=True)
        for work, pairing, memory in itertools.product(works, pairings, memories):
            make = self.rotation(training, pairing, memory, "bfloat16", work, norm=True)
            yield Case(f"{training}, {pairing}, {memory}, qk_norm_rope, {work}", make, work != "forward")
        for pairing, position_argument in itertools.product(pairings, ("offset", "offsets", "positions", "angles")):
            make = self.rotation(token, pairing, "contiguous", "bfloat16", position_argument=position_argument)
            yield Case(f"token {token}, {pairing}, {position_argument}=", make)
        make = self.rotation(token, "half", "contiguous", "bfloat16", "forward, grad", "offset")
        yield Case(f"token {token}, half, offset=, with grad", make, grad=True)
        make = self.rotation(token, "half", "contiguous", "bfloat16", "forward+backward", "offset")
        yield Case(f"token {token}, half, offset=, forward+backward", make, grad=True)
        for shape, name in ((token, "token "), (training, "")):
            make = self.rotation(shape, "half", "contiguous", "bfloat16", position_argument="offset", in_place=True)
            yield Case(f"{name}{shape}, half, rotate_", make)
            make = self.rotation(shape, "half", "contiguous", "bfloat16", compiled=True)
            yield Case(f"{name}{shape}, half, angles=, compiled", make)
        make = self.rotation(training, "half", "transposed", "bfloat16", "forward+backward", compiled=True)
        yield Case(f"{training}, half, angles=, compiled, forward+backward", make, grad=True)
        for work in works:
            make = self.rotation(token, "half", "contiguous", "bfloat16", work, "offset", norm=True)
            yield Case(f"token {token}, half, qk_norm_rope, {work}", make, work != "forward")
        for shape, work, rotated in itertools.product(
            ((1, 16, 1024, 64), (4, 16, 8192, 128), (1, 16, 65_536, 64)), works, (False, True)
        ):
            make = self.linear(shape, "bfloat16", work, rotated)
            yield Case(f"linear {shape}{', rope' if rotated else ''}, {work}", make, work != "forward")
        yield Case("linear, one token after a state, rope", self.linear_step("bfloat16"))
        yield from self._shared()


# ---------------------------------------------------------------------------------------------------------------------
# The worker: one per checkout. One line of JSON per request and per answer.


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
    """The loop of a worker."""
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


# ---------------------------------------------------------------------------------------------------------------------
# The parent: starts both workers, alternates between them, and reports.


class Checkout:
    """A worker process on one checkout."""

    def __init__(self, name: str, source: str, device: str) -> None:
        self.name, self.source = name, source
        environment = os.environ | KEEP_MEMORY | {"PYTHONPATH": str(Path(source).resolve())}
        command = [sys.executable, str(Path(__file__).resolve()), "--worker", device, source]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def answer(self) -> Any:
        """The next line of the worker."""
        stdout = self.process.stdout
        line = stdout.readline() if stdout is not None else ""
        if not line:
            raise SystemExit(f"the worker of {self.name} ({self.source}) stopped with {self.process.wait()}")
        return json.loads(line)

    def ask(self, **request: object) -> Any:
        """Sends a request and waits for its answer."""
        stdin = self.process.stdin
        if stdin is None:
            raise SystemExit(f"the worker of {self.name} has no input")
        stdin.write(json.dumps(request) + "\n")
        stdin.flush()
        return self.answer()

    def stop(self) -> None:
        """Ends the worker."""
        if self.process.stdin is not None:
            with suppress(OSError):
                self.process.stdin.close()
        self.process.wait()


@dataclass
class Result:
    """The times of one case in us, per pair of workers and round, for the old and the new checkout."""

    name: str
    kind: str
    old: list[list[float]] = field(default_factory=list)
    new: list[list[float]] = field(default_factory=list)
    note: str | None = None

    def measured(self) -> bool:
        """Whether there are times."""
        return bool(self.old)

    def ratios(self) -> list[list[float]]:
        """new / old, per pair of workers and round."""
        return [[b / a for a, b in zip(old, new, strict=True)] for old, new in zip(self.old, self.new, strict=True)]

    def ratio(self) -> float:
        """The median over pairs of workers of the median over rounds."""
        return statistics.median(statistics.median(ratios) for ratios in self.ratios())

    def flagged(self) -> bool:
        """Whether the case is slower by more than 3 %, or was not measured."""
        return not self.measured() or self.ratio() > FLAGGED

    def as_dict(self) -> dict[str, Any]:
        """The result for JSON."""
        shown: dict[str, Any] = {"case": self.name, "kind": self.kind, "note": self.note, "flagged": self.flagged()}
        if self.measured():
            old, new = (list(itertools.chain(*times)) for times in (self.old, self.new))
            shown |= {
                "ratio": self.ratio(),
                "ratio_quartiles": quartiles(list(itertools.chain(*self.ratios()))),
                "ratio_of_best": min(new) / min(old),
                "old_us": statistics.median(old),
                "new_us": statistics.median(new),
                "pairs_of_workers": len(self.old),
            }
        return shown

    def line(self) -> str:
        """The result as a row of the table."""
        shown = self.as_dict()
        if not self.measured():
            return f"{self.name}  [{self.kind}]  {self.note}"
        low, high = shown["ratio_quartiles"]
        # If the fastest bursts are equally fast, the machine may have been busy.
        flag = "" if not self.flagged() else "  SLOWER" if shown["ratio_of_best"] > FLAGGED else "  slower?"
        return (
            f"{shown['old_us']:>11.1f}{shown['new_us']:>11.1f}{shown['ratio']:>8.3f}  {low:.3f}-{high:.3f}"
            f"{shown['ratio_of_best']:>8.3f}  {self.kind:<8}{self.name}{flag}"
            + (f"  ({self.note})" if self.note else "")
        )


def quartiles(values: Sequence[float]) -> tuple[float, float]:
    """The first and the third quartile."""
    if len(values) < 2:
        return values[0], values[0]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high


def compare_case(number: int, name: str, old: Checkout, new: Checkout, rounds: int) -> list[Result]:
    """Time one case in both workers, in alternating order."""
    first = {worker.name: worker.ask(prepare=number) for worker in (old, new)}
    errors = [f"{worker}: {answer['error']}" for worker, answer in first.items() if "error" in answer]
    if errors:
        return [Result(name, "error", note="; ".join(errors))]
    us = max(answer["us"] for answer in first.values())
    inner = max(1, round(SAMPLE / us))
    samples = max(FEWEST, min(MOST, round(BURST * 1e6 / (inner * us))))
    results: dict[str, Result] = {}
    for index in range(rounds + 1):
        for worker in (old, new) if index % 2 else (new, old):
            answer = worker.ask(inner=inner, samples=samples)
            if "error" in answer:
                return [Result(name, "error", note=f"{worker.name}: {answer['error']}")]
            # The first round is a warm-up.
            for kind, time_us in answer.items() if index else ():
                result = results.setdefault(kind, Result(name, kind, [[]], [[]]))
                (result.old if worker is old else result.new)[0].append(time_us)
    sums = [answer["sum"] for answer in first.values()]
    if None not in sums and abs(sums[0] - sums[1]) > 1e-3 * max(map(abs, sums)):
        for result in results.values():
            result.note = f"RESULTS DIFFER: sums of magnitudes {sums[0]:.6g} and {sums[1]:.6g}"
    return list(results.values())


# Whole processes: the cost of an import and of a help text.
PROCESSES = {
    "python -c 'import ropewalk'": ["-c", "import ropewalk"],
    "python -c 'import ropewalk; ropewalk.RotaryEmbedding'": ["-c", "import ropewalk; ropewalk.RotaryEmbedding"],
    "python -m ropewalk --help": ["-m", "ropewalk", "--help"],
    "python -m ropewalk plot decay --help": ["-m", "ropewalk", "plot", "decay", "--help"],
}


def compare_process(name: str, sources: tuple[str, str], rounds: int) -> Result:
    """Time a whole process in both checkouts, in alternating order."""
    result = Result(name, "process", [[]], [[]])
    for index in range(rounds + 1):
        for number in (0, 1) if index % 2 else (1, 0):
            environment = os.environ | {"PYTHONPATH": str(Path(sources[number]).resolve())}
            start = time.perf_counter()
            finished = subprocess.run(
                [sys.executable, *PROCESSES[name]], env=environment, capture_output=True, check=False
            )
            if index:
                (result.new if number else result.old)[0].append((time.perf_counter() - start) * 1e6)
            if finished.returncode:
                return Result(name, "process", note=f"failed in {sources[number]}")
    return result


@dataclass
class Comparison:
    """Two checkouts and their results so far."""

    sources: tuple[str, str]
    suite: str
    rounds: int
    json_file: str | None = None
    results: dict[tuple[str, str], Result] = field(default_factory=dict)

    def run(self, wanted: Callable[[str], bool]) -> None:
        """Time the cases whose names are wanted in a new pair of workers, and add the times to the results."""
        device = "cuda" if self.suite == "gpu" else "cpu"
        old, new = (Checkout(name, self.sources[i], device) for i, name in enumerate(("old", "new")))
        try:
            cases, other = old.answer(), new.answer()
            if cases != other:
                raise SystemExit("the two checkouts build different cases")
            for number, (name, _) in enumerate(cases):
                if wanted(name):
                    for result in compare_case(number, name, old, new, self.rounds):
                        self._add(result)
        finally:
            old.stop()
            new.stop()
        for name in PROCESSES if self.suite == "cpu" else ():
            if wanted(name):
                self._add(compare_process(name, self.sources, self.rounds))

    def flagged(self) -> set[str]:
        """The names of the flagged cases."""
        return {result.name for result in self.results.values() if result.flagged()}

    def _add(self, result: Result) -> None:
        known = self.results.setdefault((result.name, result.kind), result)
        if known is not result:
            known.old += result.old
            known.new += result.new
            known.note = known.note or result.note
        print(known.line(), flush=True)
        if self.json_file is not None:
            Path(self.json_file).write_text(json.dumps(self.record(), indent=2) + "\n", encoding="utf-8")

    def record(self) -> dict[str, Any]:
        """The record for JSON."""
        return {
            "command": f"python benchmarks/compare_commits.py OLD_SRC NEW_SRC --suite {self.suite}"
            f" --rounds {self.rounds}",
            "date": datetime.now(UTC).date().isoformat(),
            "hardware": hardware(self.suite),
            "rounds": self.rounds,
            "cases": [result.as_dict() for result in self.results.values()],
        }

    def show(self) -> None:
        """Print a summary and the flagged cases."""
        ratios = [result.ratio() for result in self.results.values() if result.measured()]
        if ratios:
            print(f"{len(ratios)} figures: median ratio {statistics.median(ratios):.3f}, largest {max(ratios):.3f}.")
        flagged = [result for result in self.results.values() if result.flagged()]
        print(f"{len(flagged)} slower by more than 3 % or failed{':' if flagged else '.'}")
        for result in flagged:
            print(result.line())


def compare(sources: tuple[str, str], suite: str, rounds: int, repeats: int, only: str, json_file: str | None) -> int:
    """Compare all cases and print a table. Returns 0, or 1 if a case is flagged or failed."""
    comparison = Comparison(sources, suite, rounds, json_file)
    print(
        f"{suite}, {rounds} interleaved rounds. Times in microseconds per call; ratio: new / old, median over rounds."
    )
    print(f"{'old':>11}{'new':>11}{'ratio':>8}  {'quartiles':<11}{'of best':>8}  {'kind':<8}case")
    comparison.run(lambda name: only in name)
    for repeat in range(repeats):
        again = comparison.flagged()
        if repeat % 2:
            # A median of two is ambiguous: cases that were timed twice are timed a third time.
            again |= {result.name for result in comparison.results.values() if len(result.old) == 2}
        if again:
            print(f"repeated in new workers: {len(again)} cases")
            comparison.run(again.__contains__)
    comparison.show()
    return int(bool(comparison.flagged()))


def hardware(suite: str) -> dict[str, Any]:
    """The hardware of the comparison."""
    if suite == "gpu":
        query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        return {"gpu": subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()}
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith(("model name", "CPU part")):
                return {"processor": line.split(":", 1)[1].strip(), "cores": os.cpu_count()}
    return {"processor": platform.processor(), "cores": os.cpu_count()}


def main() -> None:
    """The command line."""
    if sys.argv[1:2] == ["--worker"]:
        work(sys.argv[2], sys.argv[3])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", metavar="OLD_SRC", help="the src folder of the old checkout")
    parser.add_argument("new", metavar="NEW_SRC", help="the src folder of the new checkout")
    parser.add_argument("--suite", choices=("cpu", "gpu"), default="cpu")
    parser.add_argument("--rounds", type=int, default=15, help="rounds per case (default: 15)")
    parser.add_argument("--repeats", type=int, default=2, help="repeats of flagged cases in new workers (default: 2)")
    parser.add_argument("--only", default="", metavar="TEXT", help="only cases whose name contains TEXT")
    parser.add_argument("--json", metavar="FILE", help="write the results as JSON, after every case")
    options = parser.parse_args()
    sources = (options.old, options.new)
    raise SystemExit(compare(sources, options.suite, options.rounds, options.repeats, options.only, options.json))


if __name__ == "__main__":
    main()
