"""The help texts: their examples run, they fit the screen, and docs/commands.md has the same options."""

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from typer.main import get_command
from typer.testing import CliRunner

from ropewalk.tools.cli import app

ROOT = Path(__file__).parent.parent.parent
PAGE = ROOT / "docs" / "commands.md"
# Commands that take too long for a test or need a GPU: only their options are parsed.
LONG = ("demo", "bench cpu", "bench gpu", "bench attention --quick", "verify --json", "lab run", "lab compare")


def commands(command: Any = None, path: tuple[str, ...] = ()) -> dict[tuple[str, ...], Any]:
    """Every command and group, by the words of its name."""
    command = command or get_command(app)
    by_path = {path: command}
    for name, inner in getattr(command, "commands", {}).items():
        by_path |= commands(inner, (*path, name))
    return by_path


COMMANDS = commands()


def shown(path: tuple[str, ...], columns: int = 80) -> str:
    result = CliRunner().invoke(app, [*path, "--help"], env={"COLUMNS": str(columns), "TERMINAL_WIDTH": str(columns)})
    assert result.exit_code == 0
    return result.stdout


def page_examples() -> list[str]:
    """The examples in docs/commands.md."""
    blocks = re.findall(r"```sh\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    return [line.removeprefix("ropewalk ") for block in blocks for line in block.splitlines()]


def examples(path: tuple[str, ...]) -> list[str]:
    text = re.sub(r"\\\n\s*", "", COMMANDS[path].help or "")
    return [
        line.strip().removeprefix("ropewalk ") for line in text.splitlines() if line.strip().startswith("ropewalk ")
    ]


EXAMPLES = list(dict.fromkeys([*(line for path in COMMANDS for line in examples(path)), *page_examples()]))


@pytest.fixture
def workplace(tmp_path, monkeypatch):
    """A folder with the files that the examples use."""
    configs = ROOT / "tests" / "data" / "configs"
    shutil.copy(configs / "qwen3-8b.json", tmp_path / "config.json")
    shutil.copy(ROOT / "benchmarks" / "attention_cpu.json", tmp_path / "figures.json")
    keys = {"hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1, "rope_theta": 10000.0}
    for name, model_type in (("llama", "llama"), ("qwen", "qwen2"), ("mine", "brand-new")):
        folder = tmp_path / "models" / name
        folder.mkdir(parents=True)
        # An unknown family requires --pairing, which is --from in `convert`.
        config = keys | {"model_type": model_type, "max_position_embeddings": 64}
        (folder / "config.json").write_text(json.dumps(config))
        weights = {f"model.layers.0.self_attn.{q}_proj.weight": np.eye(8, dtype=np.float32) for q in "qkvo"}
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_every_command_has_an_example(path):
    assert all(line.split()[: len(path)] == list(path) for line in examples(path))
    assert examples(path) or not path


@pytest.mark.parametrize("line", EXAMPLES)
@pytest.mark.filterwarnings("default")
def test_the_examples_run(line, workplace):
    words = shlex.split(line)
    if line.startswith(LONG):
        inner, depth = next(
            (COMMANDS[key], len(key))
            for key in sorted(COMMANDS, key=len, reverse=True)
            if key == tuple(words[: len(key)])
        )
        inner.make_context("ropewalk", words[depth:])
        return
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, f"{result.output}\n{result.exception}"
    written = [word for word in words if Path(word).suffix in (".png", ".svg", ".json", ".html")]
    assert all((workplace / word).is_file() for word in written)
    if line.startswith("plot") and line in page_examples():
        committed = (PAGE.parent / "pictures" / written[-1]).read_bytes()
        # The header of a PNG contains width and height. The rendering of text may differ between machines.
        assert committed[:24] == (workplace / written[-1]).read_bytes()[:24]
        assert len(committed) < 100_000


def test_the_first_screen_has_one_line_per_command():
    text = shown(())
    listed = text.split("Commands:\n")[1].splitlines()
    assert [line.split()[0] for line in listed] == [
        "demo",
        "inspect",
        "extend",
        "convert",
        "verify",
        "explore",
        "plot",
        "bench",
        "lab",
    ]
    assert all(len(line) <= 80 and line.endswith(".") and not line.endswith("...") for line in listed)
    assert len(text.splitlines()) <= 24


@pytest.mark.parametrize("columns", [80, 140])
@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_help_fits_the_screen_and_has_no_colours(path, columns):
    text = shown(path, columns)
    assert max(map(len, text.splitlines())) <= columns
    assert "\x1b" not in text
    assert "\b" not in text


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_the_page_of_commands_names_every_command_and_option(path):
    page = PAGE.read_text(encoding="utf-8")
    sections = dict(re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL))
    text = sections[f"`ropewalk {path[0]}`" if path else "Every command"]
    options = {option for parameter in COMMANDS[path].params for option in parameter.opts if option.startswith("--")}
    named = set(re.findall(r"--[a-z][a-z-]+", text))
    assert options - {"--help"} <= named
    assert " ".join(path) in page


def test_the_page_of_commands_names_no_unknown_option():
    page = PAGE.read_text(encoding="utf-8")
    known = {option for command in COMMANDS.values() for parameter in command.params for option in parameter.opts}
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", page)) <= known | {"--help"}


def test_help_needs_neither_torch_nor_numpy_nor_rich():
    code = (
        "import sys\nfrom ropewalk.tools.cli import main\n"
        "for path in sys.argv[1:]:\n"
        "    sys.argv[1:] = [*path.split(), '--help']\n"
        "    try:\n        main()\n    except SystemExit as stop:\n        assert stop.code == 0\n"
        "assert not {'torch', 'numpy', 'matplotlib', 'rich'} & set(sys.modules)"
    )
    command = [sys.executable, "-c", code, *(" ".join(path) for path in COMMANDS)]
    assert subprocess.run(command, check=False, stdout=subprocess.DEVNULL).returncode == 0
