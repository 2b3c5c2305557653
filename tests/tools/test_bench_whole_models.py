"""`ropewalk bench accelerate --device cuda` with tiny models on the CPU: its rows, its record, and what it restores."""

import copy
import json
import sys
import types
from dataclasses import replace

import pytest
import torch
import transformers
from transformers.models.qwen3 import modeling_qwen3

from ropewalk import RopewalkError, accelerate
from ropewalk.tools.bench import whole_models as bench
from ropewalk.tools.bench.accelerate import LIMITS, build_model
from ropewalk.tools.bench.floors import accelerate_floors, generate_floors
from slow import slow
from tools.command import ropewalk


@pytest.fixture(autouse=True)
def quiet():
    transformers.logging.set_verbosity_error()


def pair():
    torch.manual_seed(0)
    plain = build_model(replace(bench.whole_models(quick=True)["qwen3"], dtype="float32"))
    return plain, copy.deepcopy(plain)


@pytest.mark.parametrize(
    "work",
    # Compiling the backward pass of a model takes minutes on a CPU.
    [
        slow(work) if work.compiled else work
        for work in bench.works(quick=True)
        if not work.compiled or work.kind == bench.FORWARD
    ],
    ids=lambda work: work.title(),
)
def test_every_work_is_timed_and_its_results_agree(work):
    plain, fast = pair()
    with accelerate(fast):
        lines, apart = bench.measure_model(plain, fast, work, rounds=1)
    assert [line.path for line in lines] == [bench.OWN, bench.OURS]
    assert all(line.wall_ms > 0 and line.device_ms is None for line in lines)
    assert apart < LIMITS["float32"]
    # The two paths round differently, so a difference of 0 would mean that one model was timed twice.
    assert (apart > 0) == (work.kind == bench.FORWARD) or work.kind == bench.TRAINING
    assert all(parameter.grad is None for model in (plain, fast) for parameter in model.parameters())


def test_a_wrong_rotation_is_noticed():
    plain, fast = pair()
    work = bench.works(quick=True)[0]
    with torch.no_grad():
        for name, parameter in fast.named_parameters():
            parameter.mul_(1.5 if "v_proj" in name else 1.0)
    with accelerate(fast):
        assert bench.measure_model(plain, fast, work, rounds=1)[1] > LIMITS["float32"]


def test_ligers_rope_replaces_the_function_of_the_modeling_file_and_goes(monkeypatch):
    calls = []

    def rope(q, k, cos, sin, position_ids=None, unsqueeze_dim=1):
        calls.append(q.shape)
        return q, k

    package = types.ModuleType("liger_kernel.transformers.rope")
    package.__dict__["liger_rotary_pos_emb"] = rope
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers.rope", package)
    plain, _ = pair()
    original = modeling_qwen3.apply_rotary_pos_emb
    with bench._liger_in(plain), torch.no_grad():
        plain(torch.zeros(1, 3, dtype=torch.int64))
    assert len(calls) == 2
    assert modeling_qwen3.apply_rotary_pos_emb is original


def test_the_record_and_the_exit_code(tmp_path, monkeypatch, capsys):
    target = tmp_path / "figures.json"
    monkeypatch.setattr(bench, "works", lambda quick: [bench.Work(bench.FORWARD, False, 1, 4)])
    assert bench.bench_whole_models(str(target), quick=True, device="cpu") == 0
    record = json.loads(target.read_text(encoding="utf-8"))
    assert record["command"] == "ropewalk bench accelerate --device cpu --quick"
    assert [case["model"] for case in record["cases"]] == ["llama", "qwen3"]
    assert "wall clock ms" in capsys.readouterr().out
    with pytest.raises(RopewalkError, match="'generate' or 'forward' or 'training'"):
        bench.bench_whole_models(quick=True, device="cpu", only="decode")
    assert bench.bench_whole_models(str(target), quick=True, device="cpu", only="generate") == 0
    record = json.loads(target.read_text(encoding="utf-8"))
    assert record["command"] == "ropewalk bench accelerate --device cpu --only generate --quick"
    assert record["cases"] == []
    monkeypatch.setitem(LIMITS, "bfloat16", -1.0)
    assert bench.bench_whole_models(quick=True, device="cpu") == 1


def test_a_floor_that_is_missed_is_named():
    lines = [{"path": bench.OWN, "wall_ms": 100.0}, {"path": bench.OURS, "wall_ms": 99.0}]
    case = {"model": "Qwen3 1.7B", "family": "qwen3", "kind": bench.FORWARD, "compiled": False, "lines": lines}
    assert accelerate_floors([case]) == ["Qwen3 1.7B, forward, eager: 1.010 times as fast, below 1.25"]
    assert accelerate_floors([case | {"compiled": True}]) == []
    (missed,) = generate_floors([case | {"kind": bench.GENERATE}, case])
    assert missed == "Qwen3 1.7B, generate: 1.010 times as fast, below 1.1"
    assert generate_floors([case | {"kind": bench.GENERATE, "family": "llama"}]) == []


def test_bad_input(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RopewalkError, match="a CUDA device"):
        bench.bench_whole_models(device="cuda")
    with pytest.raises(RopewalkError, match="a file name in an existing folder"):
        bench.bench_whole_models(str(tmp_path / "no" / "file.json"), device="cpu")
    result = ropewalk("bench", "accelerate", "--device", "cpu", "--only", "generate")
    assert result.returncode == 2
    assert "--only with --device cuda" in result.stderr
    result = ropewalk("bench", "accelerate", "--device", "gpu")
    assert result.returncode == 2
    assert "expected: 'cpu' or 'cuda'" in result.stderr
