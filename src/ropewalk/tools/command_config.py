"""Configs as commands take them: paths only. GGUF files, adapters and hub ids get errors of their own."""

import re
from dataclasses import dataclass
from pathlib import Path

from ropewalk.errors import RopewalkError
from ropewalk.hub.configs.keys import NAMES, Caller, Keys, read_config
from ropewalk.hub.configs.model import Model, model_for
from ropewalk.hub.files import open_regular

__all__ = ["CommandLine", "read_named_config", "refuse_other_files"]

_EXPECTED = "the path of a config.json or params.json, or of a folder with one"
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth")
_ADAPTER = "adapter_config.json"
# Options whose name on a command line is another than in Python.
_OPTIONS = {"from_pairing": "--from"}


@dataclass(frozen=True)
class CommandLine(Caller):
    """A command as the caller of readers: arguments are options, and a config is named and not passed.

    >>> CommandLine("ropewalk inspect config.json").option("pairing", "half")
    '--pairing half'
    """

    pass_path: str = "name the path of a config"
    pass_config: str = "name the config.json of a model"
    pass_whole_config: str = (
        "write the whole config with transformers, and name that:"
        " AutoConfig.from_pretrained(FOLDER).to_json_file('whole.json', use_diff=False)"
    )
    find_pairing: str = (
        "look at its model code: rotate_half over two halves is half, else interleaved;"
        " then add --pairing half or --pairing interleaved"
    )
    converted_weights: str = ""

    def asked_for(self, config: object) -> str:
        """The command, which has the config in it."""
        return self.call

    def asked_with(self, name: str, value: object) -> str:
        """The command with this option."""
        return f"{self.call} {self.option(name, value)}"

    def option(self, name: str, value: object = None) -> str:
        """An option with its value, or its bare name."""
        option = _OPTIONS.get(name, f"--{name}")
        return option if value is None else f"{option} {value}"

    def leave_out(self, name: str) -> str:
        """The advice to leave an option out."""
        return f"leave {self.option(name)} out"


def read_named_config(config: str, pairing: str | None, asked: str) -> Model:
    """The model of a path that a command was given. `asked` is the command, as an error shows it."""
    refuse_other_files(config, asked)
    return model_for(CommandLine(asked), config, pairing)


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
    try:
        with open_regular(path, asked="read the first bytes", expected="a file", do="name another") as file:
            return path.suffix == ".gguf" or file.read(4) == b"GGUF"
    except (OSError, RopewalkError):
        return False


def _base_of(path: Path) -> str:
    """The model that an adapter is for, where its config says it."""
    try:
        return Keys(read_config(path)).text("base_model_name_or_path") or ""
    except RopewalkError:
        return ""
