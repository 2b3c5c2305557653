"""The parts of the GPU benchmark that run without a GPU: its cases, its check of every candidate, its record."""

import json
import time

import pytest
import torch

from ropewalk.errors import RopewalkError
from ropewalk.tools.bench import gpu as bench_gpu
from ropewalk.tools.bench import timing
from ropewalk.tools.bench.floors import gpu_floors
from ropewalk.tools.bench.gpu import COPY, COPY_FUNCTION, OURS, GpuCase, gpu_cases, measure
from ropewalk.tools.bench.peers import GPU_PEERS, GpuPeer


@pytest.fixture
def _on_the_cpu(monkeypatch):
    """Runs the candidates on CPU tensors, with a clock instead of device events."""

    def times(candidates, rounds):
        elapsed = {}
        for candidate in candidates:
            start = time.perf_counter()
            candidate.run()
            elapsed[candidate.name] = (time.perf_counter() - start) * 1e6
        return elapsed

    monkeypatch.setattr(timing, "DEVICE", "cpu")
    monkeypatch.setattr(timing, "device_times", times)
    real = timing.clock_times
    monkeypatch.setattr(timing, "clock_times", lambda candidates, *_: real(candidates, 1, 1, lambda: None))
    monkeypatch.setattr(bench_gpu, "bare_launch", lambda q, k: lambda: None)


def test_every_kind_of_case_exists():
    cases = gpu_cases(quick=False)
    assert len(set(cases)) == len(cases)
    assert {case.shape[-1] for case in cases} == {64, 80, 96, 128}
    for kind in (
        {"memory": "contiguous", "work": "forward+backward"},
        {"norm": True, "work": "forward+backward"},
        {"rotary_dim": 64, "pairing": "half"},
        {"shape": (64, 1, 32, 8, 128)},
    ):
        assert any(all(getattr(case, name) == value for name, value in kind.items()) for case in cases), kind
    assert len(gpu_cases(quick=True)) == 5


@pytest.mark.usefixtures("_on_the_cpu")
@pytest.mark.parametrize("pairing", ["half", "interleaved"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"memory": "contiguous"},
        {"rotary_dim": 32},
        {"work": "forward+backward"},
        {"norm": True},
        {"norm": True, "work": "forward+backward"},
    ],
    ids=str,
)
def test_every_candidate_is_compared_with_the_reference(options, pairing):
    lines = measure(GpuCase((2, 16, 4, 2, 64), pairing, **options), rounds=1, compiled=False)
    by_path = {line.path: line for line in lines}
    assert lines[0].path == COPY
    ours = [line for line in lines if line.path.startswith(OURS)]
    assert len(ours) == 2
    assert (COPY_FUNCTION in by_path) == (options.get("work") == "forward+backward")
    for line in lines:
        if line.us is not None:
            assert line.host_us is not None
            assert line.wall_us is not None
            assert line.host_us <= line.wall_us
    for line in ours:
        assert line.us is not None
        assert line.error_over_budget is not None
        assert line.error_over_budget <= 1
    if "rotary_dim" not in options:
        peer = by_path["transformers"]
        assert peer.us is not None
        assert peer.error_over_budget is not None
        assert peer.error_over_budget > 1  # its tables are bfloat16


@pytest.mark.usefixtures("_on_the_cpu")
def test_a_wrong_candidate_gets_no_time_and_a_failing_one_a_note(monkeypatch):
    def wrong(*arguments):
        return lambda q, k: (q * 1.5, k)

    def broken(*arguments):
        def fail(q, k):
            raise ValueError("no kernel for this shape")

        return fail

    monkeypatch.setitem(GPU_PEERS, "wrong", GpuPeer(wrong))
    monkeypatch.setitem(GPU_PEERS, "broken", GpuPeer(broken))
    lines = {line.path: line for line in measure(GpuCase((1, 8, 2, 1, 64), "half"), rounds=1, compiled=False)}
    assert lines["wrong"].us is None
    assert lines["broken"].us is None
    assert lines["broken"].note == "ValueError: no kernel for this shape"
    shown = bench_gpu._shown(list(lines.values()))
    assert "wrong" in shown
    assert "failed" in shown


@pytest.mark.usefixtures("_on_the_cpu")
def test_the_record_is_written_after_every_case(monkeypatch, tmp_path):
    monkeypatch.setattr(bench_gpu, "backend_reasons", lambda: {"triton": None})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a device")
    small = [GpuCase((1, 8, 2, 1, 64), "half"), GpuCase((2, 1, 2, 1, 64), "interleaved", "contiguous")]
    monkeypatch.setattr(bench_gpu, "gpu_cases", lambda quick: small)
    target = tmp_path / "gpu.json"
    assert bench_gpu.bench_gpu(str(target), quick=True) == 0
    record = json.loads(target.read_text(encoding="utf-8"))
    assert record["hardware"]["gpu"] == "a device"
    assert [case["pairing"] for case in record["cases"]] == ["half", "interleaved"]
    lines = [line for case in record["cases"] for line in case["lines"]]
    assert all(line[unit] is not None for line in lines for unit in ("us", "wall_us", "host_us"))
    assert "bare Triton launch" in {line["path"] for line in lines}


@pytest.mark.usefixtures("_on_the_cpu")
def test_a_long_sequence_is_timed_without_positions_too(monkeypatch):
    monkeypatch.setattr(bench_gpu, "LONG", (1, 32, 2, 1, 64))
    lines = {line.path: line for line in measure(GpuCase((1, 32, 2, 1, 64), "half"), rounds=1, compiled=False)}
    error = lines["ropewalk, rope(q, k)"].error_over_budget
    assert error is not None
    assert error <= 1


def test_the_table_fits_the_screen():
    line = bench_gpu.GpuLine("ropewalk, formula compiled", 16144.5, 4100.0, 0.987, 12.34, 0.987, 23456.7, 16150.1)
    small = bench_gpu.GpuLine("copy, autograd.Function", 5.13, 4100.0, 1.0, 0.5, None, 110.4, 111.5)
    shown = bench_gpu._shown([line, small]).splitlines()
    assert max(map(len, shown)) <= 80
    assert shown[0].split() == ["path", "device", "wall", "host", "GB/s", "of", "copy", "x", "ours", "error"]
    assert shown[1].split()[3:6] == ["16144", "16150", "23457"]


def test_without_a_gpu_it_raises():
    if torch.cuda.is_available():
        return
    with pytest.raises(RopewalkError, match="a CUDA device and Triton"):
        bench_gpu.bench_gpu()


def case_of(shape, times, **fields):
    """A case of a record, with its times as (device, wall)."""
    lines = [
        {"path": path, "us": us, "wall_us": wall, "host_us": wall, "error_over_budget": 0.5}
        for path, (us, wall) in times.items()
    ]
    usual = {"pairing": "half", "memory": "transposed", "work": "forward", "rotary_dim": 0, "norm": False}
    return usual | {"shape": list(shape), "dtype": "bfloat16", "lines": lines} | fields


def test_floors_of_calls_without_positions_and_by_the_clock():
    path = "ropewalk, rope(q, k)"
    times = {"copy": (600.0, 600.0), "ropewalk": (610.0, 610.0), path: (617.0, 617.0)}
    assert gpu_floors([case_of(bench_gpu.LONG, times)]) == []
    (missed,) = gpu_floors([case_of(bench_gpu.LONG, times | {path: (619.0, 619.0)})])
    assert "rope(q, k) takes 1.032 times as long as copy_, above 1.03" in missed
    assert gpu_floors([case_of(bench_gpu.LONG, times | {path: (630.0, 630.0)}, memory="contiguous")]) == []
    del times[path]
    assert "rope(q, k) has no time" in gpu_floors([case_of(bench_gpu.LONG, times)])[0]
    times = {"copy": (80.0, 80.0), "ropewalk": (80.0, 129.0), COPY_FUNCTION: (80.0, 100.0)}
    assert gpu_floors([case_of(bench_gpu.SMALL, times, work="forward+backward")]) == []
    (missed,) = gpu_floors([case_of(bench_gpu.SMALL, times | {"ropewalk": (80.0, 131.0)}, work="forward+backward")])
    assert missed.endswith("1.31 times copy, autograd.Function by wall clock, above 1.3")
    del times[COPY_FUNCTION]
    assert "by wall clock" in gpu_floors([case_of(bench_gpu.SMALL, times, work="forward+backward")])[0]


def test_floors_of_one_token_and_of_a_norm():
    times = {"copy": (7.0, 9.0), "ropewalk": (5.0, 18.0), "bare Triton launch": (5.0, 9.0)}
    assert gpu_floors([case_of(bench_gpu.DECODE, times)]) == []
    (missed,) = gpu_floors([case_of(bench_gpu.DECODE, times | {"ropewalk": (5.0, 18.5)})])
    assert missed.endswith("18.5 µs of host time, a bare launch 9.0, above 2 times")
    norm = {"norm": True, "work": "forward+backward"}
    assert gpu_floors([case_of(bench_gpu.TRAINING, {"copy": (100.0, 1.0), "ropewalk": (134.0, 1.0)}, **norm)]) == []
    (missed,) = gpu_floors([case_of(bench_gpu.TRAINING, {"copy": (100.0, 1.0), "ropewalk": (136.0, 1.0)}, **norm)])
    assert missed.endswith("1.36 times copy_, above 1.35")
