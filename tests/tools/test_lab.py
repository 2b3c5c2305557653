"""`ropewalk lab`: tables, files, a user's encoding, and mistakes."""

import json

import pytest
from typer.testing import CliRunner

import ropewalk as rw
from ropewalk.lab.experiments import EXPERIMENTS
from ropewalk.tools.cli import app

QUICK = ("--seeds", "1", "--steps", "2", "--jobs", "1", "--device", "cpu")


def lab(*words):
    result = CliRunner().invoke(app, ["lab", *map(str, words)], env={"COLUMNS": "80"})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_lists_fit_the_screen(tmp_path):
    for words in (("list",), ("show", "extrapolation"), ("show", "length-generalisation", "--size", "tiny")):
        result = lab(*words, "--json", tmp_path / "list.json")
        assert result.exit_code == 0
        assert max(map(len, result.stdout.splitlines())) <= 80
    listed = lab("list", "--json", tmp_path / "list.json")
    assert [x["name"] for x in json.loads((tmp_path / "list.json").read_text())] == list(EXPERIMENTS)
    assert all(name in listed.stdout for name in EXPERIMENTS)


def test_a_run_writes_tables_pictures_and_figures(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine_for_lab.py").write_text("import ropewalk as rw\n\n\nclass Mine(rw.Encoding):\n    pass\n")
    command = ["run", "convergence", *QUICK, "--only", "rope", "--with", "mine_for_lab:Mine", "--out", "out"]
    result = lab(*command, "--json", "a.json", "--plot", "a.png")
    assert result.exit_code == 0
    assert max(map(len, result.stdout.splitlines())) <= 80
    record = json.loads((tmp_path / "a.json").read_text())
    assert [arm["label"] for arm in record["arms"]] == ["rope", "mine_for_lab:Mine"]
    # Another number of steps decides nothing.
    assert record["statements"] == []
    assert (tmp_path / "a.png").stat().st_size > 10_000
    folders = sorted((tmp_path / "out").iterdir())
    assert all((folder / "model" / "model.safetensors").is_file() for folder in folders)
    assert all(list(folder.glob("tensorboard/events*")) for folder in folders)

    compared = lab("compare", *folders, "--plot", "b.png", "--json", "b.json")
    assert "mine_for_lab:Mine" in compared.stdout
    assert len(json.loads((tmp_path / "b.json").read_text())) == 2
    # A run that differs in something else is another line, not another seed of the same.
    lab("run", "convergence", *QUICK[:2], "--steps", "1", *QUICK[4:], "--only", "rope", "--out", "other")
    compared = lab("compare", *folders, *(tmp_path / "other").iterdir())
    assert "rope, seed 0, steps 1" in compared.stdout
    assert "rope, seed 0, steps 2" in compared.stdout
    (folders[0] / "result.json").write_text("{}")
    with pytest.raises(rw.RopewalkError, match="the result of a run in"):
        lab("compare", folders[0])
    (folders[0] / "result.json").unlink()
    again = lab("run", "convergence", "--from", "a.json")
    assert again.stdout.rstrip() in result.stdout

    with pytest.raises(rw.RopewalkError, match="add --resume"):
        lab(*command)
    resumed = lab(*command, "--resume")
    assert resumed.exit_code == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("run", "convergense"), "did you mean 'convergence'"),
        (("show", "x"), "'extrapolation'"),
        (("run", "convergence", "--size", "huge"), "'micro' or 'tiny' or 'small'"),
        (("run", "convergence", "--only", "ropes"), "did you mean 'rope'"),
        (("run", "convergence", "--with", "roep"), "or package.module:Class"),
        (("run", "convergence", "--device", "cuda"), "a CUDA device that torch can use"),
        (("run", "convergence", "--device", "tpu"), "'cpu' or 'cuda'"),
        (("run", "convergence", "--dtype", "float8"), "'float32' or 'bfloat16'"),
        (("run", "convergence", "--parallel", "tensor"), "'ddp' or 'fsdp' or 'context'"),
        (("run", "convergence", "--plot", "a.txt"), "suffix of a picture"),
        (("run", "convergence", "--from", "missing.json"), "no such file"),
        (("run", "convergence", *QUICK, "--text", "missing"), "no such folder"),
        (("compare", "missing"), "no such folder"),
    ],
    ids=lambda x: "" if isinstance(x, str) else " ".join(x),
)
def test_mistakes(words, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(rw.RopewalkError, match=message):
        lab(*words)
