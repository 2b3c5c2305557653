"""Configs that are no regular files, or far too long ones, through every function and command that reads a config."""

import json
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import ropewalk as rw
from hub.special_files import SPECIAL
from ropewalk.hub import extend_model, inspect_model, read_model
from ropewalk.hub.configs.keys import read_config
from ropewalk.tools.cli import main
from slow import slow
from waiting import outcome

MOST_MEMORY = 200 << 20
FUNCTIONS: dict[str, Callable[[Path], Any]] = {
    "load_spec": rw.load_spec,
    "read_model": read_model,
    "inspect_model": inspect_model,
    "extend_model": lambda path: extend_model(path, 16384),
}
COMMANDS = (
    ("inspect",),
    ("extend", "--to", "1M"),
    ("plot", "decay", "--json", "-"),
    ("plot", "bias", "--json", "-"),
    ("bench", "attention", "--plot", "figure.png", "--from"),
)


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def raised(function: Callable[[], Any]) -> BaseException | None:
    """The exception of a function, which neither waits nor uses memory; None where it returns."""
    before, result = peak(), outcome(function)
    assert peak() - before < MOST_MEMORY
    return result if isinstance(result, BaseException) else None


@pytest.mark.parametrize("name", ["config.json", "params.json"])
@pytest.mark.parametrize("kind", SPECIAL)
def test_functions_refuse_it(kind, name, tmp_path):
    SPECIAL[kind](tmp_path / name)
    for function in FUNCTIONS.values():
        for path in (tmp_path / name, tmp_path):
            error = raised(lambda function=function, path=path: function(path))
            assert isinstance(error, rw.RopewalkError), path
            # The folder's error is about the file in it.
            if kind not in ("folder", "link to a folder"):
                assert name in error.asked


@pytest.mark.parametrize(
    ("kind", "name"),
    [(kind, "config.json") for kind in SPECIAL]
    + [slow(kind, name) for kind in SPECIAL for name in ("adapter_config.json", "blob")]
    + [(kind, name) for kind in ("FIFO", "link to /dev/zero") for name in ("model.gguf", "model.safetensors")],
)
def test_commands_refuse_it(kind, name, tmp_path, monkeypatch, capsys):
    folder = tmp_path / "model"
    folder.mkdir()
    SPECIAL[kind](folder / name)
    monkeypatch.chdir(tmp_path)
    for command in COMMANDS:
        for path in (folder / name, folder):
            monkeypatch.setattr(sys, "argv", ["ropewalk", *command, str(path)])
            stop = raised(main)
            assert isinstance(stop, SystemExit), (command, path)
            assert stop.code == 2
            assert "Traceback" not in capsys.readouterr().err


def test_a_link_to_a_config_is_read(tmp_path):
    # As the caches of model hubs have it: the file itself is in another folder.
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshot").mkdir()
    (tmp_path / "blobs" / "1234").write_text(json.dumps({"model_type": "llama", "head_dim": 64}))
    (tmp_path / "snapshot" / "config.json").symlink_to(Path("..", "blobs", "1234"))
    assert rw.load_spec(tmp_path / "snapshot") == rw.load_spec({"model_type": "llama", "head_dim": 64})


PIECES = {
    "empty objects": (b"{},", b"{}"),
    "objects": (b'{"a":1},', b"{}"),
    "lists": (b"[],", b"[]"),
    "nested lists": (b"[" * 15 + b"]" * 15 + b",", b"[]"),
    "floats": (b"1.5,", b"0"),
    "strings": (b'"ab",', b"0"),
}


@pytest.mark.parametrize("piece", PIECES)
def test_what_a_config_of_allowed_length_takes_of_memory(piece, tmp_path):
    more, last = PIECES[piece]
    start, stop = b'{"model_type": "llama", "head_dim": 64, "more": [', last + b"]}"
    path = tmp_path / "config.json"
    path.write_bytes(start + more * (((16 << 20) - 100) // len(more)) + stop)
    assert isinstance(raised(lambda: rw.load_spec(path)), rw.RopewalkError)
    path.write_bytes(start + more * 1000 + stop)
    assert raised(lambda: rw.load_spec(path)) is None


def test_a_long_text_takes_little_memory(tmp_path):
    # One letter beyond the first plane makes all letters of a string four bytes wide.
    path = tmp_path / "config.json"
    path.write_text('{"model_type": "llama", "head_dim": 64, "more": "\N{KNOT}' + "x" * (16_000_000) + '"}', "utf-8")
    assert raised(lambda: rw.load_spec(path)) is None


@pytest.mark.parametrize(
    "text",
    [
        '{"' + '":1,"'.join(f"{i:07}" for i in range(100_000)) + '":1,"0099999":1}',
        '{"model_type": "' + "x" * 8_000_000 + '"}',
        '{"model_type": "llama", "head_dim": 64, "' + "x" * 8_000_000 + '": 1}',
        '{"model_type": "llama", "head_dim": 64, "' + '":1,"'.join(f"rope_the_{i:06}" for i in range(20_000)) + '":1}',
        '{"model_type": "llama", "head_dim": 64, "rope_scaling": {"rope_type": "' + "x" * 8_000_000 + '"}}',
        '{"model_type": "llama", "head_dim": 64, "layer_types": ["' + "x" * 8_000_000 + '"]}',
        '{"model_type": "llama", "head_dim": ' + "9" * 4000 + "}",
        '{"model_type": "llama", "head_dim": ' + "9" * 8_000_000 + "}",
        '{"model_type": "llama", "head_dim": 64, "other": ' + "9" * 4000 + "}",
        '{"model_type": "\\ud800", "head_dim": 64}',
        '{"model_type": "llama", "head_dim": 64, "\\ud800": 64}',
        '{"model_type": "llama", "head_dim": 8, "layer_types": ["\\u001b[m"], "rope_parameters": {"\\u001b[m": {}}}',
    ],
    ids=lambda text: f"{text[:60]}..{len(text)}",
)
def test_texts_that_no_config_has_are_refused_at_once(text, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(text, encoding="utf-8")
    error = raised(lambda: rw.load_spec(path))
    assert isinstance(error, rw.RopewalkError)
    assert len(str(error)) < 5000
    str(error).encode("utf-8")


def test_values_that_contain_themselves_are_refused():
    # As dicts can, and no file: 10 ways down at each of 32 levels.
    endless: list[Any] = []
    endless += [endless] * 10
    shared: Any = 1
    for _ in range(30):
        shared = [shared] * 10
    for value in (endless, shared):
        error = raised(lambda value=value: read_config({"model_type": "llama", "head_dim": 64, "more": value}))
        assert isinstance(error, rw.RopewalkError)


@pytest.mark.parametrize("key", [10**5000, ("a",), b"a", 1.5, None, frozenset()], ids=lambda key: type(key).__name__)
def test_keys_that_no_config_has_are_refused(key):
    error = raised(lambda: read_config({"model_type": "llama", "more": {key: 1}}))
    assert isinstance(error, rw.RopewalkError)
