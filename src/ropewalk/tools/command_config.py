"""Reads the configs that commands accept, which are paths, with errors in the words of a command line."""

import difflib
import os
from dataclasses import dataclass

from ropewalk.errors import RopewalkError
from ropewalk.hub.bundled import bundled_config, bundled_names
from ropewalk.hub.configs import other_files
from ropewalk.hub.configs.caller import Caller
from ropewalk.hub.configs.model import Model, model_for

__all__ = ["CommandLine", "locate_config", "read_named_config", "refuse_other_files"]

# Options whose name on the command line differs from the name in Python.
_OPTIONS = {"from_pairing": "--from"}


@dataclass(frozen=True)
class CommandLine(Caller):
    """The wording of errors for a command: arguments are options, and a config is specified by its path.

    >>> CommandLine("ropewalk inspect config.json").option("pairing", "half")
    '--pairing half'
    """

    verb: str = "specify"
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
        config: The path of a config or of a model folder, or the name of a bundled config if there is no such path.
        pairing: The pairing, if the model family is unknown.
        asked: The command, for error messages.

    Returns:
        The model.

    Raises:
        RopewalkError: If the config cannot be read.
    """
    return model_for(CommandLine(asked), locate_config(config, asked), pairing)


def locate_config(config: str, asked: str) -> str:
    """Return the path of a config: `config` itself if it is a path, or that of the bundled config with this name.

    Args:
        config: The path of a config or of a model folder, or the name of a bundled config if there is no such path.
        asked: The command, for error messages.

    Returns:
        The path. Only that of a bundled config is known to exist.

    Raises:
        RopewalkError: If `config` is a name, and no bundled config has it.

    >>> locate_config("models/config.json", "ropewalk inspect models/config.json")
    'models/config.json'
    """
    if os.path.lexists(config) or os.path.basename(config) != config or config.endswith(".json"):
        return config
    bundled = bundled_config(config)
    if bundled is None:
        names = bundled_names()
        near = difflib.get_close_matches(config, names, n=1)
        raise RopewalkError(
            asked=asked,
            expected="the path of a config.json or of a model folder, or the name of one of the bundled configs",
            got="no file, folder or bundled config with this name",
            do=f"did you mean {near[0]!r}?" if near else f"use one of {', '.join(names)}, or the path of a config",
        )
    return str(bundled)


def refuse_other_files(config: str, asked: str) -> None:
    """Raise `RopewalkError` with specific advice if `config` is a GGUF file, an adapter, weights or a hub id."""
    other_files.refuse_other_files(config, CommandLine(asked))
