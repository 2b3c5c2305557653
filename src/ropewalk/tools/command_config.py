"""Configs as commands take them: paths only. What else was named is told apart, and advice is for a command line."""

import json
import re
from pathlib import Path

from ropewalk.errors import RopewalkError
from ropewalk.hub.configs.model import Model, read_model
from ropewalk.hub.configs.read import NAMES

__all__ = ["read_named_config", "refuse_other_files"]

_EXPECTED = "the path of a config.json or params.json, or of a folder with one"
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth")
_ADAPTER = "adapter_config.json"
# What errors tell a caller in Python, and what a person at a command line can do instead.
_WHOLE = (
    "write the whole config with transformers, and name that:"
    " AutoConfig.from_pretrained(FOLDER).to_json_file('whole.json', use_diff=False)"
)
_INSTEAD = (
    (r"pass the config object: AutoConfig\.from_pretrained\(\.\.\.\)", _WHOLE),
    (r", or the config itself as a dict", ""),
    (r"leave pairing out.*", "leave --pairing out"),
    (r"^pass the ", "name the "),
)


def read_named_config(config: str, pairing: str | None, asked: str) -> Model:
    """The model of a path that a command was given. `asked` is the command, as an error shows it."""
    refuse_other_files(config, asked)
    try:
        return read_model(config, pairing=pairing)
    except RopewalkError as error:
        do = error.do
        for pattern, instead in _INSTEAD:
            do = re.sub(pattern, instead, do)
        # On a command line an argument is an option.
        if pairing is None and "pairing=" in error.expected:
            do += "; then add --pairing half or --pairing interleaved"
        what = re.sub(r"^load_spec\(config, pairing='(\w+)'\)", r"--pairing \1", error.asked)
        what = re.sub(r"^load_spec(\('.*'\)$| of |: )?", "", what)
        where = f"{asked}: {what}" if what else asked
        expected = error.expected.replace("or pairing=", "or --pairing")
        raise RopewalkError(asked=where, expected=expected, got=error.got, do=do) from None


def refuse_other_files(config: str, asked: str) -> None:
    """An error that says what was named, where it is a well-known thing that is no config."""
    path = Path(config)
    try:
        inside = {entry.name for entry in path.iterdir()} if path.is_dir() else set[str]()
        exists = path.exists()
    except (OSError, ValueError):
        return
    if inside & set(NAMES):
        return
    gguf = [name for name in sorted(inside) if name.endswith(".gguf")]
    if _is_gguf(path) or (gguf and _ADAPTER not in inside):
        got = "a GGUF file" if not inside else f"a folder without one, with the GGUF file {gguf[0]}"
        do = "name the config.json of the model that the GGUF was made from: that has its frequencies"
    elif path.name == _ADAPTER or _ADAPTER in inside:
        base = _base_of(path if path.name == _ADAPTER else path / _ADAPTER)
        got = "an adapter, which has the rotation of the model that it is for" + (f": {base}" if base else "")
        do = "name the config.json of that model"
    elif exists and path.suffix in _WEIGHTS:
        got, do = "weights", "name the config.json beside them, or the folder of both"
    elif not exists and re.fullmatch(r"[\w.-]+/[\w.-]+", config) and path.suffix != ".json":
        got = "No such file or folder; it looks like the name of a model on a hub, and commands download nothing"
        do = f"get its config.json first: hf download {config} config.json --local-dir {path.name}"
        do += f"; then name {path.name}"
    else:
        return
    raise RopewalkError(asked=asked, expected=_EXPECTED, got=got, do=do)


def _is_gguf(path: Path) -> bool:
    if not path.is_file():
        return False
    try:
        with path.open("rb") as file:
            return path.suffix == ".gguf" or file.read(4) == b"GGUF"
    except OSError:
        return False


def _base_of(path: Path) -> str:
    """The model that an adapter is for, where its config says it."""
    try:
        name = json.loads(path.read_text(encoding="utf-8"))["base_model_name_or_path"]
    except (OSError, ValueError, KeyError, TypeError):
        return ""
    return name if isinstance(name, str) else ""
