"""Reads the configs that commands accept, which are paths. GGUF files, adapters and hub ids have specific errors."""

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
# Options whose name on the command line differs from the name in Python.
_OPTIONS = {"from_pairing": "--from"}


@dataclass(frozen=True)
class CommandLine(Caller):
    """The wording of errors for a command: arguments are options, and a config is specified by its path.

    >>> CommandLine("ropewalk inspect config.json").option("pairing", "half")
    '--pairing half'
    """

    pass_path: str = "specify the path of a config"
    pass_config: str = "specify the config.json of a model"
    pass_whole_config: str = (
        "write the whole config with transformers, and specify that file:"
        " AutoConfig.from_pretrained(FOLDER).to_json_file('whole.json', use_diff=False)"
    )
    find_pairing: str = (
        "look at the code of the model: rotate_half over two halves means half, otherwise interleaved;"
        " then add --pairing half or --pairing interleaved"
    )
    converted_weights: str = ""

    def asked_for(self, config: object) -> str:
        """The command. It contains the config."""
        return self.call

    def asked_with(self, name: str, value: object) -> str:
        """The command with this option."""
        return f"{self.call} {self.option(name, value)}"

    def option(self, name: str, value: object = None) -> str:
        """An option with its value, or only its name."""
        option = _OPTIONS.get(name, f"--{name}")
        return option if value is None else f"{option} {value}"

    def leave_out(self, name: str) -> str:
        """The advice to leave an option out."""
        return f"leave {self.option(name)} out"


def read_named_config(config: str, pairing: str | None, asked: str) -> Model:
    """Read the model of a config.

    Args:
        config: The path of a config or of a model folder.
        pairing: The pairing, if the model family is unknown.
        asked: The command, for error messages.

    Returns:
        The model.

    Raises:
        RopewalkError: If the config cannot be read.
    """
    refuse_other_files(config, asked)
    return model_for(CommandLine(asked), config, pairing)


def refuse_other_files(config: str, asked: str) -> None:
    """Raise `RopewalkError` with specific advice if `config` is a GGUF file, an adapter, weights or a hub id."""
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
        got = "a GGUF file" if not inside else f"a folder without a config, with the GGUF file {gguf[0]}"
        do = "specify the config.json of the model that the GGUF was made from: it contains the frequencies"
    elif path.name == _ADAPTER or _ADAPTER in inside:
        base = _base_of(path if path.name == _ADAPTER else path / _ADAPTER)
        got = "an adapter, which has the rotation of its base model" + (f": {base}" if base else "")
        do = "specify the config.json of the base model"
    elif exists and path.suffix in _WEIGHTS:
        got, do = "weights", "specify the config.json next to the weights, or their folder"
    elif not exists and re.fullmatch(r"[\w.-]+/[\w.-]+", config) and path.suffix != ".json":
        got = "No such file or folder; it looks like the name of a model on a hub, but commands do not download"
        do = f"get its config.json first: hf download {config} config.json --local-dir {path.name}"
        do += f"; then specify {path.name}"
    else:
        return
    raise RopewalkError(asked=asked, expected=_EXPECTED, got=got, do=do)


def _is_gguf(path: Path) -> bool:
    try:
        with open_regular(path, asked="read the first bytes", expected="a file", do="specify another") as file:
            return path.suffix == ".gguf" or file.read(4) == b"GGUF"
    except (OSError, RopewalkError):
        return False


def _base_of(path: Path) -> str:
    """The base model of an adapter, if its config contains the name, otherwise ""."""
    try:
        return Keys(read_config(path)).text("base_model_name_or_path") or ""
    except RopewalkError:
        return ""
