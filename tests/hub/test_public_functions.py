"""What ropewalk.hub offers: the functions behind commands, in Python's words, without torch; configs parsed once."""

import ast
import importlib
import inspect
import json
import subprocess
import sys
import typing
from pathlib import Path
from typing import Any

import pytest

import ropewalk
from hub.checkpoints import CONFIG, llama
from ropewalk import RopewalkError, hub
from ropewalk.hub.configs import keys, language
from ropewalk.hub.configs.keys import Caller
from ropewalk.hub.convert import conversion
from ropewalk.tools.cli import main
from ropewalk.tools.command_config import CommandLine

PACKAGE = Path(ropewalk.__file__).parent
CONFIGS = Path(__file__).parent.parent / "data" / "configs"
LLAMA_2 = CONFIGS / "llama-2-7b.json"
BRANDNEW: dict[str, Any] = {"model_type": "brandnew", "head_dim": 64}


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How often a file is read, and how often the language model of a config is looked for."""
    counts = {"files": 0, "configs": 0}
    read, locate = keys._read_file, language._locate

    def reading(*arguments: Any) -> Any:
        counts["files"] += 1
        return read(*arguments)

    def locating(*arguments: Any) -> Any:
        counts["configs"] += 1
        return locate(*arguments)

    monkeypatch.setattr(keys, "_read_file", reading)
    monkeypatch.setattr(language, "_locate", locating)
    return counts


@pytest.mark.parametrize("name", ["load_spec", "read_model", "inspect_model"])
def test_a_config_is_parsed_once(name, counted):
    getattr(hub, name)(LLAMA_2)
    assert counted == {"files": 1, "configs": 1}


def test_an_extension_reads_back_the_configs_that_it_offers_and_no_other(counted):
    extended = hub.extend_model(LLAMA_2, 16_384, rule="yarn")
    forms = len(extended.offers[0].forms)
    assert counted == {"files": 1, "configs": 1 + forms}
    extended.config("yarn")
    extended.as_json()
    assert counted == {"files": 1, "configs": 1 + forms}


def test_a_conversion_reads_its_config_once(counted, monkeypatch, tmp_path):
    read = conversion.read_config_file

    def reading(*arguments: Any) -> Any:
        counted["files"] += 1
        return read(*arguments)

    monkeypatch.setattr(conversion, "read_config_file", reading)
    hub.convert_checkpoint(llama(tmp_path / "model"), tmp_path / "out", to="interleaved")
    # Once to see whether the family is known, and once to parse it.
    assert counted == {"files": 1, "configs": 2}


def test_type_checkers_see_the_names_that_load():
    source = ast.parse((PACKAGE / "hub" / "__init__.py").read_text(encoding="utf-8"))
    guarded = next(node for node in source.body if isinstance(node, ast.If))
    seen = {node.names[0].asname: node.module for node in ast.walk(guarded) if isinstance(node, ast.ImportFrom)}
    assert seen == hub._HOME
    assert set(seen) == set(hub.__all__)
    for name in hub.__all__:
        assert getattr(hub, name) is not None
        assert name in dir(hub)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = hub.nothing  # pyright: ignore[reportAttributeAccessIssue]
    # A function that had the name of a subpackage would be hidden by it.
    assert not {path.parent.name for path in (PACKAGE / "hub").glob("*/__init__.py")} & set(hub.__all__)


def test_nothing_of_it_needs_torch():
    code = (
        "import sys; sys.modules['torch'] = None\nfrom ropewalk import hub\n"
        "[getattr(hub, name) for name in hub.__all__]\n"
        f"hub.inspect_model({str(LLAMA_2)!r}); hub.extend_model({str(LLAMA_2)!r}, 8192, rule='pi')"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("name", hub.__all__)
def test_every_name_is_documented_and_typed(name):
    value = getattr(hub, name)
    assert ">>>" in (inspect.getdoc(value) or "")
    if not inspect.isfunction(value):
        return
    parts = ["Returns:"] + ["Args:", "Raises:"] * bool(inspect.signature(value).parameters)
    assert all(part in (inspect.getdoc(value) or "") for part in parts)
    hints = typing.get_type_hints(value)
    assert set(hints) == {*inspect.signature(value).parameters, "return"}
    # JAX is imported by the call, so its arrays have no type here; NumPy's ArrayLike contains Any.
    foreign = {"to_jax": ("positions", "return")}.get(name, ())
    assert not any("Any" in str(hint) for argument, hint in hints.items() if argument not in foreign)


def test_the_functions_have_what_the_commands_write(capsys, monkeypatch, tmp_path):
    def written(*arguments: str) -> Any:
        monkeypatch.setattr(sys, "argv", ["ropewalk", *arguments])
        with pytest.raises(SystemExit):
            main()
        return json.loads(capsys.readouterr().out)

    path = str(CONFIGS / "gemma-3-4b.json")
    assert written("inspect", path, "--json", "-") == [hub.inspect_model(path).as_json()]
    extended = hub.extend_model(path, 262_144, trained=32_768, rule="yarn")
    options = ("--to", "262144", "--trained", "32768", "--rule", "yarn")
    assert written("extend", path, *options, "--json", "-") == json.loads(json.dumps(extended.as_json()))
    assert written("extend", path, *options, "--write", "-") == extended.config("yarn")
    model = llama(tmp_path / "model")
    done = hub.convert_checkpoint(model, tmp_path / "a", to="interleaved", verify=True).as_json()
    command = ("convert", str(model), str(tmp_path / "b"), "--to", "interleaved", "--verify", "--json", "-")
    assert written(*command) == done | {"out": str(tmp_path / "b")}


@pytest.mark.parametrize(
    ("call", "asked", "do"),
    [
        (lambda: hub.load_spec(BRANDNEW), "load_spec: a config with model_type 'brandnew'", 'pairing="half"'),
        (lambda: hub.read_model(BRANDNEW), "read_model: a config with model_type 'brandnew'", 'pairing="half"'),
        (lambda: hub.inspect_model("nowhere"), "inspect_model('nowhere')", "or its contents as a dict"),
        (
            lambda: hub.inspect_model({"model_type": "falcon", "head_dim": 64, "alibi": True}),
            "inspect_model: the RoPE of a model",
            "use a model with RoPE",
        ),
        (lambda: hub.extend_model({"model_type": "gpt_oss"}, 9), "extend_model: the key 'rope_p", "AutoConfig"),
        (lambda: hub.extend_model(LLAMA_2, 8192, rule="yarm"), "extend_model(rule='yarm')", "did you mean 'yarn'"),
        (lambda: hub.extend_model(LLAMA_2, 1), "extend_model: an extension to 1 positions", "the number of positions"),
        (lambda: hub.extend_model(LLAMA_2, 1 << 25), "extend_model: an extension to", "a smaller length"),
        (lambda: hub.extend_model(LLAMA_2, 4096), "extend_model: an extension to 4096", "a larger length"),
        (lambda: hub.extend_model(LLAMA_2, 8192, trained=1), "extend_model(trained=1)", "the trained length"),
        (lambda: hub.extend_model(LLAMA_2, 8192, rule="longrope"), "(rule='longrope')", "leave rule out"),
        (
            lambda: hub.extend_model(LLAMA_2, 8192, rule="pi").config("ntk"),
            "extend_model: a config with the rule ntk",
            "leave rule out",
        ),
        (lambda: hub.extend_model({"model_type": "llama", "head_dim": 8}, 8192), "an extension of", "pass trained="),
        (lambda: hub.load_spec(CONFIG, pairing="interleaved"), "load_spec(pairing='interl", "dataclasses.replace"),
    ],
)
def test_errors_are_in_the_words_of_python(call, asked, do):
    with pytest.raises(RopewalkError) as caught:
        call()
    assert asked in caught.value.asked
    assert do in caught.value.do
    assert "--" not in str(caught.value)


def test_a_new_pairing_of_a_checkpoint_is_asked_for_in_the_callers_words(tmp_path):
    model = llama(tmp_path / "model", config=CONFIG | {"model_type": "mine"})
    from ropewalk.hub.convert.conversion import convert_for

    for caller, words in ((Caller("convert_checkpoint"), "from_pairing='half'"), (CommandLine("x"), "--from half")):
        with pytest.raises(RopewalkError, match=f"add {words} if its code rotates two halves"):
            convert_for(caller, model, tmp_path / "out", to="half")


@pytest.mark.parametrize(
    "path",
    [
        *sorted((PACKAGE / "hub").rglob("*.py")),
        *(PACKAGE / "tools" / name for name in ("command_config.py", "convert.py", "inspect/command.py")),
        PACKAGE / "tools" / "extend" / "command.py",
    ],
    ids=lambda path: str(path.relative_to(PACKAGE)),
)
def test_no_code_parses_the_text_of_an_error(path):
    """What an error has may be shown again, and must not be taken apart."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    names = {handler.name for handler in ast.walk(tree) if isinstance(handler, ast.ExceptHandler) and handler.name}

    def is_text(node: ast.AST) -> bool:
        inside = node.args[0] if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "str" else node
        if inside is not node:
            return isinstance(inside, ast.Name) and inside.id in names
        parts = ("asked", "expected", "got", "do")
        return isinstance(node, ast.Attribute) and node.attr in parts and getattr(node.value, "id", "") in names

    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            assert not any(is_text(side) for side in (node.left, *node.comparators)), f"line {node.lineno}"
        elif isinstance(node, ast.Call):
            method = node.func.value if isinstance(node.func, ast.Attribute) else None
            assert method is None or not is_text(method), f"line {node.lineno}"
            by_re = getattr(method, "id", "") == "re"
            assert not (by_re and any(is_text(argument) for argument in node.args)), f"line {node.lineno}"


@pytest.mark.parametrize("room", ["hub", "tools/inspect", "tools/extend"])
def test_every_package_says_what_it_is(room):
    for path in (PACKAGE / room).rglob("__init__.py"):
        name = ".".join(path.parent.relative_to(PACKAGE.parent).parts)
        assert importlib.import_module(name).__doc__, name
