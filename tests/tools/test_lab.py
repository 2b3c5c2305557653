"""`ropewalk lab`: tables, files, a user's encoding, and mistakes."""

import dataclasses
import json
import shlex
from pathlib import Path

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

import ropewalk as rw
from ropewalk.lab.conduct import Findings
from ropewalk.lab.experiment import Arm
from ropewalk.lab.experiments import EXPERIMENTS
from ropewalk.lab.run import Run
from ropewalk.lab.training import RunResult, Settings
from ropewalk.tools.cli import app
from ropewalk.tools.lab.command import Options, _arms
from ropewalk.tools.lab.sheet import print_findings
from ropewalk.tools.pictures import COLOURS

# Files that `--from` refuses.
NO_RECORDS = {
    "code.py": "import this\n",
    "list.json": "[]",
    "result.json": '{"curves": {}, "config": {}}',
    "unknown.json": '{"experiment": "x", "size": "micro", "seeds": [], "statements": [], "arms": []}',
}
# What `ropewalk lab run convergence --seeds 1` passes.
PLAIN = {
    **dict.fromkeys(("device", "plot", "json_file", "steps", "saved_every", "jobs", "text", "dtype", "record")),
    **{"name": "convergence", "size": "micro", "seeds": (0,), "others": (), "only": (), "out": Path("runs/lab")},
    **{"resume": False, "every": 25, "abreast": 1, "compiled": False, "parallel": "ddp"},
}
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
    assert "\nno verdicts: --steps 2 is not the registered number, 600\n" in result.stdout
    assert (tmp_path / "a.png").stat().st_size > 10_000
    folders = sorted((tmp_path / "out").iterdir())
    assert all((folder / "model" / "model.safetensors").is_file() for folder in folders)
    assert all(list(folder.glob("tensorboard/events*")) for folder in folders)

    compared = lab("compare", *reversed(folders), *folders, "--plot", "b.png", "--json", "b.json")
    rows = [line.split(",")[0] for line in compared.stdout.splitlines() if ", seed 0" in line]
    assert rows == ["mine_for_lab:Mine", "rope"]
    # Single runs have no range.
    assert "over seeds" not in compared.stdout
    assert len(json.loads((tmp_path / "b.json").read_text())) == 2
    # A run that differs in something else is another line, not another seed of the same.
    lab("run", "convergence", *QUICK[:2], "--steps", "1", *QUICK[4:], "--only", "rope", "--out", "other")
    compared = lab("compare", *folders, *(tmp_path / "other").iterdir())
    assert "rope, seed 0, steps 1" in compared.stdout
    assert "rope, seed 0, steps 2" in compared.stdout
    with pytest.raises(rw.RopewalkError, match=r"do this: +compare the runs in it: out/\*"):
        lab("compare", "out")
    (folders[0] / "result.json").write_text("{}")
    with pytest.raises(rw.RopewalkError, match="the result of a run in"):
        lab("compare", folders[0])
    (folders[0] / "result.json").unlink()
    again = lab("run", "convergence", "--from", "a.json")
    assert again.stdout.rstrip() in result.stdout
    with pytest.raises(
        rw.RopewalkError, match=r"a record of base\n.*one of convergence\n.*run convergence --from a.json"
    ):
        lab("run", "base", "--from", "a.json")

    with pytest.raises(rw.RopewalkError, match="add --resume"):
        lab(*command)
    for option in (
        ["--resume"],
        ["--steps", "3"],
        ["--with", "alibi"],
        ["--seeds", "9"],
        ["--compile"],
        ["--out", "x"],
    ):
        with pytest.raises(rw.RopewalkError, match=f"got: +{option[0]}\n"):
            lab("run", "convergence", "--from", "a.json", *option)
    with pytest.raises(rw.RopewalkError, match="--size micro, of which the record is"):
        lab("run", "convergence", "--from", "a.json", "--size", "tiny")
    resumed = lab(*command, "--resume")
    assert resumed.exit_code == 0
    assert resumed.stdout.startswith("found: 1 of 2 runs complete; checkpoints of others at step 2\n")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("run", "convergense"), "did you mean 'convergence'"),
        (("show", "wrong"), r"show wrong\nexpected: one of 15 experiments\n.*\n.*`ropewalk lab list`"),
        (("run", "convergence", "--size", "huge"), "'micro' or 'tiny' or 'small'"),
        (("run", "convergence", "--only", "ropes"), "did you mean 'rope'"),
        (("run", "convergence", "--with", "roep"), "or package.module:Class"),
        (("run", "convergence", "--device", "cuda"), "a CUDA device that torch can use"),
        (("run", "convergence", "--device", "tpu"), "'cpu' or 'cuda'"),
        (("run", "convergence", "--dtype", "float8"), "'float32' or 'bfloat16'"),
        (("run", "convergence", "--parallel", "tensor"), "'ddp' or 'fsdp' or 'context'"),
        (("run", "convergence", *QUICK, "--parallel", "fsdp"), "the ranks of torchrun"),
        (("run", "convergence", "--plot", "a.txt"), "suffix of a picture"),
        (("run", "convergence", "--from", "missing.json"), "no such file"),
        *[(("run", "convergence", "--from", name), "got: +another file") for name in NO_RECORDS],
        (("run", "convergence", *QUICK, "--text", "missing"), "no such folder"),
        (("run", "convergence", *QUICK, "--text", "list.json"), "got: +a file"),
        (("compare", "missing"), "no such folder"),
        (("compare", "list.json"), "got: +a file"),
    ],
    ids=lambda x: "" if isinstance(x, str) else " ".join(x),
)
def test_mistakes(words, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, content in NO_RECORDS.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(rw.RopewalkError, match=message):
        lab(*words)


BROKEN = """
import ropewalk as rw


class Rotating(rw.Encoding):
    def rotate(self, q, k, positions=None, *, k_positions=None):
        return q.no_such_method(), k


class Constructed(rw.Encoding):
    def __init__(self):
        super().__init__()
        self.size = 1 // 0


class Embedding(rw.Encoding):
    def embed(self, x, positions=None, *, cache=None):
        return x[:, :, :3]
"""


@pytest.mark.parametrize(
    ("name", "got"),
    [
        ("broken_for_lab:Rotating", "AttributeError: .*no_such_method.* \\(.*broken_for_lab.py, line 7\\)"),
        ("broken_for_lab:Constructed", "ZeroDivisionError: .*broken_for_lab.py, line 13"),
        ("broken_for_lab:Embedding", "RuntimeError: "),
        ("typo_for_lab:Mine", "SyntaxError: .*typo_for_lab.py, line 2"),
    ],
)
def test_errors_of_a_users_encoding_are_reported_before_training(name, got, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "broken_for_lab.py").write_text(BROKEN)
    (tmp_path / "typo_for_lab.py").write_text("import ropewalk\nclass Mine(ropewalk.Encoding:\n    pass\n")
    with pytest.raises(rw.RopewalkError, match=f"asked: +encoding {name}\n(.*\n)*got: +{got}"):
        lab("run", "length-generalisation", *QUICK, "--only", "copy, rope", "--with", name, "--out", "out")
    assert not (tmp_path / "out").exists()


def test_steps_of_tuned_runs_are_in_proportion():
    options = Options(**PLAIN | {"name": "extension", "steps": 40})
    arms = _arms(EXPERIMENTS["extension"], options, Settings(torch.device("cpu")))
    assert {(arm.run.parent and arm.run.parent.steps, arm.run.steps) for arm in arms} == {(40, 0), (40, 2)}
    few = _arms(EXPERIMENTS["extension"], dataclasses.replace(options, steps=1), Settings(torch.device("cpu")))
    assert {(arm.run.parent and arm.run.parent.steps, arm.run.steps) for arm in few} == {(1, 0), (1, 1)}


def test_the_command_that_continues_has_every_option():
    words = ["--with", "mine:A b=2", "--plot", "a b.png", "--json", "-", "--compile", "--parallel", "fsdp", "--dtype"]
    words += ["bfloat16", "--save-every", "5", "--abreast", "2", "--jobs", "3", "--every", "7", "--first-seed", "4"]
    words += [
        "--seeds",
        "2",
        "--size",
        "tiny",
        "--only",
        "rope",
        "--text",
        "my texts",
        "--steps",
        "9",
        "--device",
        "cpu",
    ]
    words += ["--out", "o p", "--resume"]
    options = Options(
        **PLAIN
        | {"others": ("mine:A b=2",), "plot": "a b.png", "json_file": "-", "compiled": True, "parallel": "fsdp"}
        | {"dtype": "bfloat16", "saved_every": 5, "abreast": 2, "jobs": 3, "every": 7, "seeds": (4, 5), "size": "tiny"}
        | {"only": ("rope",), "text": "my texts", "steps": 9, "device": "cpu", "out": Path("o p")}
    )
    assert shlex.split(options.continuing)[:4] == ["ropewalk", "lab", "run", "convergence"]
    assert sorted(shlex.split(options.continuing)[4:]) == sorted(words)
    plain = "ropewalk lab run convergence --size micro --seeds 1"
    assert Options(**PLAIN).command == plain
    assert Options(**PLAIN).continuing == f"{plain} --out runs/lab --resume"


def test_a_seed_that_diverged_is_not_left_out_of_a_mean(capsys):
    def result(loss):
        return RunResult({"loss by step": [(0, 3.0), (1, loss)], "loss by length": [(8, 2.0), (16, loss)]}, 0, 0, None)

    findings = Findings(
        dataclasses.replace(EXPERIMENTS["extrapolation"], statements=()),
        "micro",
        (Arm("rope", Run("rope")), Arm("t5", Run("t5"))),
        (0, 1),
        ({"rope": result(1.0), "t5": result(1.0)}, {"rope": result(None), "t5": result(2.0)}),
        (),
    )
    print_findings(Console(), findings)
    shown = capsys.readouterr().out
    rows = [line.split() for line in shown.splitlines()]
    assert ["rope", "-", "2.000", "-"] in rows
    assert ["t5", "1.500", "±0.500", "2.000", "1.500"] in rows
    assert "- is not defined, or not finite" in " ".join(shown.split())


def test_runs_have_a_colour_per_encoding_and_dashes_per_run(tmp_path, monkeypatch):
    from ropewalk.tools.lab import plot

    drawn = []
    monkeypatch.setattr(plot, "save", lambda canvas, _: drawn.extend(canvas.axes[0].lines))
    result = RunResult({"loss by step": [(0, 3.0), (1, 2.0)]}, 0, 0, None)
    labels = ("rope, seed 0", "rope, seed 1", "t5, seed 0")
    plot.plot_runs(dict.fromkeys(labels, result), ["rope", "rope", "t5"], "a.png")
    styles = [(line.get_color(), line.get_linestyle()) for line in drawn]
    assert styles == [(COLOURS[0], "-"), (COLOURS[0], "--"), (COLOURS[1], "-")]
