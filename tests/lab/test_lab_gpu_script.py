"""benchmarks/lab_gpu.py: what it keeps, records and refuses, with runs of one step on a CPU."""

import importlib.util
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import ropewalk as rw

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "lab_gpu.py"


@pytest.fixture
def script(monkeypatch):
    spec = importlib.util.spec_from_file_location("lab_gpu", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "lab_gpu", module)
    spec.loader.exec_module(module)
    # Threads of this process, whose text is read.
    monkeypatch.setattr(module.concurrent.futures, "ProcessPoolExecutor", lambda jobs, _: ThreadPoolExecutor(jobs))
    return module


def test_records_have_the_command_and_other_options_are_refused(script, tmp_path, monkeypatch, capsys):
    options = ["--out", str(tmp_path), "--device", "cpu", "--sizes", "micro", "--steps", "1", "--seeds", "1"]
    options += ["--jobs", "1", "--only", "whole-model"]
    monkeypatch.setattr(sys, "argv", ["lab_gpu.py", *options])
    script.main()
    assert capsys.readouterr().out.endswith("\ncomplete\n")
    record = json.loads((tmp_path / "whole-model_micro.json").read_text())
    assert record["command"] == f"python benchmarks/lab_gpu.py {' '.join(options)}"
    # Other experiments continue rope, which --only does not mention.
    trained = {arm["label"]: tmp_path / arm["keys"][0] / "model" for arm in record["arms"]}
    assert {label: path.exists() for label, path in trained.items()} == {"rope": True, "rope-across-heads": False}
    monkeypatch.setattr(script, "EVERY", 5)
    with pytest.raises(rw.RopewalkError, match=r"every 50\n.*every 5\n"):
        script.main()


@pytest.mark.parametrize("size", ["micro", "tiny", "small"])
def test_sweeps_of_the_package_are_not_repeated(script, tmp_path, monkeypatch, capsys, size):
    monkeypatch.setattr(sys, "argv", ["lab_gpu.py", "--out", str(tmp_path), "--sizes", size, "--plan"])
    script.main()
    assert capsys.readouterr().out.startswith(f"{size}: at least 0 runs of a sweep\n")
    monkeypatch.setattr(script, "recorded_sweeps", dict)
    script.main()
    assert not capsys.readouterr().out.startswith(f"{size}: at least 0 runs of a sweep\n")
