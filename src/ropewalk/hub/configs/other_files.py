"""Paths that are no configs, with advice for each: GGUF files, adapters, weights, and names of models on a hub."""

import json
import os
import re
from pathlib import Path

from ropewalk.errors import RopewalkError
from ropewalk.hub.configs.caller import NAMES, Caller
from ropewalk.hub.configs.limits import MOST_BYTES
from ropewalk.hub.files import open_regular, read_text

__all__ = ["refuse_other_files"]

_EXPECTED = "the path of a config.json or params.json, or of a folder with one"
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth")
_ADAPTER = "adapter_config.json"
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


def refuse_other_files(config: str, caller: Caller) -> None:
    """Raise an error with specific advice if a path is not that of a config, but one that users mistake for it.

    Args:
        config: The path.
        caller: The function or command that errors name.

    Raises:
        RopewalkError: If it is a GGUF file, an adapter or weights, a folder with one of them and without a config, or
            the name of a model on a hub.

    >>> refuse_other_files("config.json", Caller("load_spec"))
    """
    path, verb = Path(config), caller.verb
    try:
        is_folder, exists = path.is_dir(), path.exists()
        if is_folder and any(os.path.lexists(path / name) for name in NAMES):
            return
        inside = {entry.name for entry in path.iterdir()} if is_folder else set[str]()
    except (OSError, ValueError):
        return
    gguf = [name for name in sorted(inside) if name.endswith(".gguf")]
    if (gguf and _ADAPTER not in inside) or (exists and not is_folder and _is_gguf(path)):
        got = "a GGUF file" if not inside else f"a folder without a config, with the GGUF file {gguf[0]}"
        do = f"{verb} the config.json of the model that the GGUF was made from: it contains the frequencies"
    elif path.name == _ADAPTER or _ADAPTER in inside:
        base = _base_of(path if path.name == _ADAPTER else path / _ADAPTER)
        got = "an adapter, which has the rotation of its base model" + (f": {base}" if base else "")
        do = f"{verb} the config.json of the base model"
    elif exists and path.suffix in _WEIGHTS:
        got, do = "weights", f"{verb} the config.json next to the weights, or their folder"
    elif not exists and _HUB_NAME.fullmatch(config) and path.suffix != ".json":
        got = "No such file or folder; it looks like the name of a model on a hub, but ropewalk does not download"
        do = f"get its config.json first: hf download {config} config.json --local-dir {path.name}"
        do += f"; then {verb} {path.name}"
    else:
        return
    raise RopewalkError(asked=caller.asked_for(config), expected=_EXPECTED, got=got, do=do)


def _is_gguf(path: Path) -> bool:
    if path.suffix == ".json":
        return False
    try:
        with open_regular(path, asked="read the first bytes", expected="a file", do="specify another") as file:
            return path.suffix == ".gguf" or file.read(4) == b"GGUF"
    except (OSError, RopewalkError):
        return False


def _base_of(path: Path) -> str:
    """The base model of an adapter, if its config contains the name, otherwise ""."""
    try:
        text = read_text(path, most=MOST_BYTES, asked="read an adapter", expected="a file", do="specify another")
        name = json.loads(text).get("base_model_name_or_path")
    except (ValueError, AttributeError, RecursionError):
        # RopewalkError is a ValueError, as are errors of json. A list has no `get`.
        return ""
    return name if isinstance(name, str) and len(name) <= 200 and name.isprintable() else ""
