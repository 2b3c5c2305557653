"""bench.accelerate: its record, its exit codes, and that the model is restored."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest
import transformers
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

from ropewalk import RopewalkError
from ropewalk.tools.bench import accelerate as bench


@pytest.fixture(autouse=True)
def quiet():
    transformers.logging.set_verbosity_error()


def test_shares_are_consistent_and_functions_are_restored():
    (case,) = [case for case in bench.model_cases(quick=True) if case.family == "qwen3"]
    names = dict(Qwen3Attention.forward.__globals__)
    lines, apart = bench.measure(replace(case, tokens=16), rounds=2)
    assert [line.path for line in lines] == ["transformers", "ropewalk"]
    for line in lines:
        assert 0 < line.rotation_ms < line.forward_ms
        assert line.rotation_share == line.rotation_ms / line.forward_ms
    assert 0 < apart < bench.LIMITS["float32"]
    assert Qwen3Attention.forward.__globals__ == names


def test_the_record(tmp_path, capsys, monkeypatch):
    target = tmp_path / "figures.json"
    monkeypatch.setattr(bench, "model_cases", lambda quick, dtype: [replace(CASE, dtype=dtype)])
    assert bench.bench_accelerate(str(target), quick=True) == 0
    record = json.loads(target.read_text(encoding="utf-8"))
    assert record["command"] == "python -m ropewalk.tools.bench.accelerate --dtype float32 --quick"
    assert set(record) == {"command", "date", "hardware", "versions", "rounds", "cases", "missed", "digest"}
    assert record["versions"]["transformers"] == transformers.__version__
    (case,) = record["cases"]
    assert case["family"] == "llama"
    assert [line["path"] for line in case["lines"]] == ["transformers", "ropewalk"]
    assert "rotation ms" in capsys.readouterr().out
    # Logits beyond the limit fail the check. On some processors they are equal, so a limit of 0 is not enough.
    monkeypatch.setitem(bench.LIMITS, "float32", -1.0)
    assert bench.bench_accelerate(quick=True) == 1


CASE = bench.ModelCase("llama", "float32", tokens=8, hidden=32, layers=1, heads=2, kv_heads=1, head_dim=16)


def test_bad_input(tmp_path):
    with pytest.raises(RopewalkError, match="did you mean 'float16'"):
        bench.bench_accelerate(dtype="float15")
    with pytest.raises(RopewalkError, match="a file name in an existing folder"):
        bench.bench_accelerate(str(tmp_path / "no" / "file.json"))


@pytest.mark.slow
def test_bad_usage_is_reported_without_a_traceback():
    command = [sys.executable, "-m", "ropewalk.tools.bench.accelerate", "--dtype", "int8"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert "Traceback" not in result.stderr
    assert "expected: 'float32' or 'bfloat16' or 'float16'" in result.stderr
