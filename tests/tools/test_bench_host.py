"""ropewalk bench host: its rows, what they are compared with, its record. No test depends on a time."""

import json
import sys
import types
from dataclasses import replace
from typing import Any

import pytest
import torch

from ropewalk import RopewalkError, linear_attention
from ropewalk.kernels.backend import backends, register
from ropewalk.tools.bench import bare, host_linear, timing
from ropewalk.tools.bench import host as bench_host
from ropewalk.tools.bench.floors import HOST, HOST_LINEAR, HOST_LINEAR_US, host_floors
from ropewalk.tools.bench.host import HostLine, Token, measure, measure_linear, measure_token
from ropewalk.tools.bench.host_linear import Sequences
from ropewalk.tools.bench.truth import Truth
from tools.command import ropewalk


def by_path(lines) -> dict[str, Any]:
    return {line.path: line for line in lines}


def test_every_call_has_a_time_a_floor_and_a_right_result():
    lines = by_path(measure("cpu", rounds=1, calls=1))
    assert HOST["cpu"].keys() <= lines.keys()
    for line in lines.values():
        assert line.us is not None
        assert line.us > 0
        if line.floor is not None:
            assert line.ratio == pytest.approx(line.us / line.floor_us)
            assert line.error_over_budget <= 1
    copy = lines["copy"].us
    assert lines["rope(q, k, offset=n)"].floor_us == lines["rope.rotate_(q, k, offset=n)"].floor_us == copy
    assert lines["rope(q, k, offset=n), grad"].floor_us == lines["copy Function"].us
    assert lines["rope(q, k, offset=n), fwd+bwd"].floor_us == lines["copy Function, fwd+bwd"].us


def test_on_a_gpu_launches_and_outputs_are_the_floor():
    launches = []
    token = Token("cpu", torch.bfloat16)
    lines = by_path(measure_token(token, 1, 1, lambda: None, lambda: launches.append(1)))
    assert HOST["cuda"].keys() <= lines.keys()
    launch, empty = lines["launch"].us, lines["empty_like"].us
    for path in (path for path, most in HOST["cuda"].items() if most == 2):
        assert lines[path].floor == "launch + 2 empty_like"
        assert lines[path].floor_us == pytest.approx(launch + 2 * empty)
    assert lines["rope.rotate_(q, k, offset=n)"].floor_us == launch
    assert lines["rope(q, offset=n)"].floor_us == pytest.approx(launch + empty)
    assert lines["rope(q, k, offset=n), grad"].floor_us == pytest.approx(lines["Function"].us + launch)
    assert lines["rope(q, k, angles=a), fwd+bwd"].floor_us == lines["launch Function, fwd+bwd"].us
    norm = lines["qk_norm_rope(q, k), fwd+bwd"]
    assert (norm.floor, norm.floor_us) == ("launch Function(4)", lines["launch Function(4), fwd+bwd"].us)


def test_bare_functions_launch_as_often_as_a_rotation_and_a_norm():
    launches = []
    q, k, q_weight, k_weight = (torch.ones(4, requires_grad=True) for _ in range(4))

    def launch():
        launches.append(1)

    rotation = bare.bare_function(bare.copied, launch)
    outputs = rotation(q, k)
    assert len(launches) == 1
    assert [y.tolist() for y in torch.autograd.grad(outputs, (q, k), outputs)] == [[1.0] * 4] * 2
    assert len(launches) == 2
    norm = bare.bare_norm_function(bare.copied, q_weight.detach(), launch)
    outputs = norm(q, k, q_weight, k_weight)
    assert len(launches) == 3
    assert len(torch.autograd.grad(outputs, (q, k, q_weight, k_weight), outputs)) == 4
    assert len(launches) == 5


def test_a_bare_launch_passes_what_the_compiled_kernel_expects(monkeypatch):
    calls = []

    class Kernel:
        """A compiled kernel, as Triton returns it."""

        function, packed_metadata = "function", "metadata"

        def __getitem__(self, grid):
            return lambda *arguments: self

        def run(self, *arguments):
            calls.append(arguments)

    fake = types.ModuleType("ropewalk.tools.bench.bare_kernel")
    fake.__dict__["touch"] = Kernel()
    monkeypatch.setitem(sys.modules, "ropewalk.tools.bench.bare_kernel", fake)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: types.SimpleNamespace(cuda_stream=7))
    q, k = torch.ones(1, 4, 1, 8), torch.ones(1, 2, 1, 8)
    bare.bare_launch(q, k)()
    ((*start, first, second, q_out, k_out, cos, sin, seq, q_heads, k_heads, dim),) = calls
    assert start == [1, 1, 1, 7, "function", "metadata", None, None, None]
    assert first is q
    assert second is k
    assert [x.shape for x in (q_out, k_out, cos, sin)] == [q.shape, k.shape, (1, 4), (1, 4)]
    assert (seq, q_heads, k_heads, dim) == (1, 4, 2, 8)


def test_the_bare_kernel_runs():
    from ropewalk.tools.bench.bare_kernel import touch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    q, out = torch.full((16,), 3.0, device=device), torch.zeros(16, device=device)
    touch[(1,)](q, q, out, out, q, q, 1, 4, 2, 16)
    assert out.tolist() == [3.0] + [0.0] * 15


def test_a_wrong_result_gets_no_time_and_exit_code_1(monkeypatch, capsys):
    monkeypatch.setattr(Truth, "errors", lambda *arguments: (1.5, 0.0))
    assert bench_host.bench_host("cpu", quick=True) == 1
    assert "rope(q, k, offset=n)            wrong" in capsys.readouterr().out


def test_a_run_without_the_c_extension_says_so_and_cannot_be_published(capsys, tmp_path):
    """Calls on a GPU take longer without it, too."""
    native = next(backend for backend in backends() if backend.name == "native")
    undo = register(replace(native, why_missing=lambda: "the C kernel was not built"))
    try:
        bench_host.bench_host("cpu", quick=True, json_file=str(tmp_path / "host.json"))
    finally:
        undo()
    assert "all calls take longer: the C kernel was not built" in capsys.readouterr().out
    assert json.loads((tmp_path / "host.json").read_text("utf-8"))["missed"][0].startswith("all calls take longer")


def test_a_slow_or_missing_call_misses_its_floor():
    lines = [{"path": path, "ratio": most, "floor": "copy"} for path, most in HOST["cpu"].items()]
    assert host_floors("cpu", [{"lines": lines}]) == []
    slow = [lines[0] | {"ratio": 1.16}, *lines[2:]]
    assert host_floors("cpu", [{"lines": slow}]) == [
        "rope(q, k, offset=n): 1.16 times copy, above 1.15",
        "rope(q, k, angles=a): has no time",
    ]


def test_host_time_ends_before_the_wait_and_wall_time_after_it():
    events = []
    candidates = [timing.Candidate(name, lambda name=name: events.append(name)) for name in "ab"]
    times = timing.clock_times(candidates, rounds=2, calls=3, wait=lambda: events.append("wait"))
    assert all(host <= wall for host, wall in times.values())
    # One round more, which is not counted.
    assert len(events) == 3 * 2 * 5
    for start in range(0, len(events), 5):
        assert events[start] == events[start + 4] == "wait"
        assert len(set(events[start + 1 : start + 4])) == 1
    assert timing.host_times(candidates, 1, 1, lambda: None).keys() == {"a", "b"}


def test_the_command(tmp_path):
    target = tmp_path / "host.json"
    result = ropewalk("bench", "host", "--quick", "--device", "cpu", "--json", str(target))
    assert result.returncode == 0, result.stderr
    assert max(map(len, result.stdout.splitlines())) <= 80
    record = json.loads(target.read_text(encoding="utf-8"))
    assert record["command"] == "ropewalk bench host --device cpu --quick"
    case, linear = record["cases"]
    assert (case["shape"], case["dtype"]) == ([1, 1, 32, 8, 128], "float32")
    assert (linear["kind"], linear["shape"], linear["dtype"]) == ("linear", [1, 16, 4096, 64], "float32")
    assert [line["path"] for line in linear["lines"]] == ["copy of state", "linear step"]
    assert record["missed"] == host_floors("cpu", record["cases"])


def linear_lines(launch, dtype=torch.bfloat16, length=20):
    token = measure_token(Token("cpu", dtype), 1, 1, lambda: None, launch)
    return token, measure_linear(Sequences("cpu", dtype, length), 1, 1, lambda: None, token)


def test_the_table_of_a_gpu_fits_the_screen():
    token, linear = linear_lines(lambda: None)
    # Times of this size appear on a GPU.
    lines = [replace(line, us=345.6, floor_us=123.4, ratio=99.99) for line in (*token, *linear)]
    text = bench_host._shown("cuda", lines)
    assert max(map(len, text.splitlines())) <= 80
    assert "  launch + 2 empty_like" in text
    assert "100us  3 launch + empty_like" in text
    assert " 40us  launch + 3 empty_like" in text
    assert "  2.00  SDPA, N=4096" in text


def test_linear_attention_has_right_results_times_and_yardsticks():
    token, linear = linear_lines(lambda: None)
    lines = by_path(linear)
    assert (HOST_LINEAR["cuda"] | HOST_LINEAR_US["cuda"]).keys() <= lines.keys()
    assert all(line.us > 0 for line in lines.values())
    assert all(0 < line.error_over_budget <= 1 for line in lines.values() if line.floor is not None)
    both = lines["linear, N=4096, fwd+bwd"]
    assert both.floor_us == lines["SDPA, N=4096, fwd+bwd"].us
    assert both.ratio == pytest.approx(both.us / both.floor_us)
    launch, empty = by_path(token)["launch"].us, by_path(token)["empty_like"].us
    assert lines["linear step"].floor_us == pytest.approx(launch + 3 * empty)
    assert lines["linear, N=4096"].floor_us == pytest.approx(3 * launch + empty)
    _, on_cpu = linear_lines(None, torch.float32)
    lines = by_path(on_cpu)
    assert HOST_LINEAR_US["cpu"].keys() <= lines.keys()
    assert lines["linear step"].floor_us == lines["copy of state"].us


def test_every_step_continues_from_the_one_before():
    steps = host_linear.Steps(Sequences("cpu", torch.float32, 1))
    start = steps.state.position
    for _ in range(3):
        steps.step()
    assert (start, steps.state.position) == (host_linear.PROMPT, host_linear.PROMPT + 3)


@pytest.mark.parametrize("wrong", ["output", "gradient", "step"])
def test_a_wrong_linear_attention_gets_no_time(monkeypatch, wrong):
    right = linear_attention

    def altered(q, k, v, **options):
        if options.get("state") is not None:
            out, state = right(q, k, v, **options)
            return out * (1.1 if wrong == "step" else 1.0), state
        if options.get("return_state"):
            return right(q, k, v, **options)
        if wrong == "gradient":
            return right(q, k.detach() + 0.9 * (k - k.detach()), v, **options)
        return right(q, k, v, **options) * (1.1 if wrong == "output" else 1.0)

    monkeypatch.setattr(host_linear, "linear_attention", altered)
    token = [HostLine(path, 1.0) for path in ("launch", "empty_like")]
    linear = measure_linear(Sequences("cpu", torch.bfloat16, 20), 1, 1, lambda: None, token)
    names = {"output": {"linear, N=4096", "linear, N=4096, fwd+bwd"}, "gradient": {"linear, N=4096, fwd+bwd"}}
    assert {line.path for line in linear if line.us is None} == names.get(wrong, {"linear step"})


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_linear_attention_beyond_a_limit_misses_its_floor(device):
    lines = [{"path": path, "us": most, "ratio": 9.0, "floor": ""} for path, most in HOST_LINEAR_US[device].items()]
    lines += [
        {"path": path, "us": 9e9, "ratio": most, "floor": "SDPA, N=4096"} for path, most in HOST_LINEAR[device].items()
    ]

    def missed(changed):
        return host_floors(device, [{"kind": "linear", "lines": changed}])

    assert missed(lines) == []
    assert "linear step: 40.1 µs, above 40" in missed([line | {"us": line["us"] + 0.1} for line in lines])
    assert len(missed([])) == len(lines)
    assert "linear step: has no time" in missed([line | {"us": None} for line in lines])
    if device == "cuda":
        assert missed([line | {"us": 100.1} for line in lines[:1]] + lines[1:]) == [
            "linear, N=4096: 100.1 µs, above 100"
        ]
        assert missed([line | {"ratio": 2.01} for line in lines]) == [
            "linear, N=4096, fwd+bwd: 2.01 times SDPA, N=4096, above 2.0"
        ]
    # A record without these rows has not measured them.
    token = [{"path": path, "ratio": most, "floor": "copy"} for path, most in HOST[device].items()]
    assert host_floors(device, [{"lines": token}]) == []


def test_bad_input(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RopewalkError, match="a CUDA device and Triton"):
        bench_host.bench_host("cuda")
    with pytest.raises(RopewalkError, match="a file name in an existing folder"):
        bench_host.bench_host("cpu", str(tmp_path / "no" / "file.json"))
    result = ropewalk("bench", "host", "--device", "tpu")
    assert result.returncode == 2
    assert "expected: 'cpu' or 'cuda'" in result.stderr
