"""A config as plain data, checked key by key. Errors are written in the words of whoever asked for the config."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeAlias, cast

from ropewalk.errors import RopewalkError, as_float, shown
from ropewalk.hub.configs.pitfalls import PITFALLS
from ropewalk.spec.value import without_repeats

__all__ = ["Caller", "ConfigError", "ConfigSource", "HasToDict", "Keys", "read_config"]

# The largest config on model hubs is far below this; what is larger is no config.
MOST_BYTES = 16 << 20
# Files that a folder may hold a config in, in the order in which they are looked for.
NAMES = ("config.json", "params.json")


class HasToDict(Protocol):
    """A config object, such as those of transformers."""

    def to_dict(self) -> Mapping[str, object]:
        """The config as plain data."""
        ...


# The path of a config or of its folder, the config itself, or a config object of transformers.
ConfigSource: TypeAlias = str | Path | Mapping[str, object] | HasToDict


@dataclass(frozen=True)
class Caller:
    """How a caller names itself and what it can pass: errors are written in these words, here those of Python.

    Commands have a subclass with the words of a command line.

    >>> Caller("load_spec").asked("the key 'factor'"), Caller("load_spec").option("pairing", "half")
    ("load_spec: the key 'factor'", "pairing='half'")
    """

    call: str
    # What to do about a path that is no config, about data that is none, and about a file that leaves too much out.
    pass_path: str = "pass the path of a config, or the config itself as a dict"
    pass_config: str = "pass the config.json of a model"
    pass_whole_config: str = "pass the config object: AutoConfig.from_pretrained(...)"
    # How to find the pairing of a new family, and what else to do where the pairing of a known one is another.
    find_pairing: str = 'look at its model code: rotate_half over two halves is pairing="half", else "interleaved"'
    converted_weights: str = "; for converted weights use dataclasses.replace(spec, pairing=...)"

    def asked(self, subject: str) -> str:
        """The call, and what it is about."""
        return f"{self.call}: {subject}"

    def asked_for(self, config: object) -> str:
        """The call with this config."""
        return f"{self.call}({repr(config) if isinstance(config, str) else shown(config)})"

    def asked_with(self, name: str, value: object) -> str:
        """The call with this option."""
        return f"{self.call}({self.option(name, value)})"

    def option(self, name: str, value: object = None) -> str:
        """An option with its value, or its bare name."""
        return f"{name}=" if value is None else f"{name}={value!r}"

    def leave_out(self, name: str) -> str:
        """The advice to leave an option out."""
        return f"leave {name} out"


_LOAD_SPEC = Caller("load_spec")


class ConfigError(RopewalkError):
    """The error of a key in a config, which names the key."""


def read_config(config: object, caller: Caller = _LOAD_SPEC) -> dict[str, Any]:
    """The config as a dict that belongs to nobody else.

    >>> read_config({"model_type": "llama"})
    {'model_type': 'llama'}
    """
    if isinstance(config, str | Path):
        data: Any = _read_file(Path(config), caller)
    elif isinstance(config, Mapping):
        data = dict(cast("Mapping[str, Any]", config))
    elif callable(getattr(config, "to_dict", None)):
        data = cast("Any", config).to_dict()
    else:
        raise RopewalkError(
            asked=f"{caller.call}(config)",
            expected="the path of a config.json or of its folder, a dict, or a config of transformers",
            got=shown(config),
            do='pass for example "models/llama/config.json"',
        )
    copied = _copied(data, 0, "config", caller)
    if not isinstance(copied, dict):
        raise RopewalkError(
            asked=caller.asked_for(config),
            expected="a JSON object",
            got=shown(data),
            do=caller.pass_config,
        )
    return cast("dict[str, Any]", copied)


def _read_file(path: Path, caller: Caller) -> Any:
    try:
        if path.is_dir():
            files = [path / name for name in NAMES if (path / name).is_file()]
            if not files:
                raise _unreadable(caller, path, f"a folder without {' or '.join(NAMES)}")
            path = files[0]
        size = path.stat().st_size
        if size > MOST_BYTES:
            raise _unreadable(caller, path, f"{size >> 20} MiB; a config has at most {MOST_BYTES >> 20}")
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        if isinstance(error, RopewalkError):
            raise
        raise _unreadable(caller, path, f"{type(error).__name__}: {error}") from None
    try:
        return json.loads(text, object_pairs_hook=without_repeats)
    except (ValueError, RecursionError) as error:
        raise _unreadable(caller, path, f"not JSON: {error}") from None


def _copied(value: Any, depth: int, name: str, caller: Caller) -> Any:
    """A deep copy with plain strings as keys, that refuses what no config is nested like."""
    if depth > 32:
        raise Keys({}, caller=caller).error(name, "at most 32 levels", "more", caller.pass_config)
    if isinstance(value, dict):
        return {str(key): _copied(entry, depth + 1, str(key), caller) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_copied(entry, depth + 1, name, caller) for entry in value]
    return value


def _unreadable(caller: Caller, path: Path, reason: str) -> RopewalkError:
    return RopewalkError(
        asked=caller.asked_for(str(path)),
        expected="a readable config.json or params.json, or a folder with one",
        got=reason,
        do=caller.pass_path,
    )


class Keys:
    """A part of a config that checks what is read from it, and remembers which keys were read.

    `place` is the key under which the part is stored. Errors are written in the words of `caller`, and `warn` adds to
    the list `pitfalls`; parts of one config share both.

    >>> keys = Keys({"factor": 4, "typo": 1})
    >>> keys.number("factor"), keys.unread()
    (4.0, ['typo'])
    """

    def __init__(
        self,
        data: dict[str, Any],
        place: str = "",
        *,
        caller: Caller = _LOAD_SPEC,
        pitfalls: list[tuple[str, str]] | None = None,
    ) -> None:
        self.data: dict[str, Any] = data
        self.caller: Caller = caller
        self.pitfalls: list[tuple[str, str]] = [] if pitfalls is None else pitfalls
        self._place, self._read = place, set[str]()

    def of(self, data: dict[str, Any], place: str) -> "Keys":
        """Another part of the same config."""
        return Keys(data, place, caller=self.caller, pitfalls=self.pitfalls)

    def under(self, key: str) -> "Keys":
        """The keys of the object under a key: none where there is no object."""
        return self.of(self.part(key), self.name(key))

    def warn(self, name: str, text: str) -> None:
        """Adds a pitfall, by a name of PITFALLS."""
        if name not in PITFALLS:
            raise KeyError(name)
        self.pitfalls.append((name, text))

    def error(self, key: str, expected: str, got: str, do: str) -> ConfigError:
        """The error of a key, which is named in full."""
        return ConfigError(asked=self.caller.asked(f"the key {key!r}"), expected=expected, got=got, do=do)

    def name(self, key: str) -> str:
        """The key in full, as an error names it."""
        return f"{self._place}.{key}" if self._place else key

    def has(self, key: str) -> bool:
        """Whether the key is there and not null."""
        self._read.add(key)
        return self.data.get(key) is not None

    def stands(self, key: str) -> bool:
        """Whether the key is there, be it null."""
        return key in self.data

    def raw(self, key: str) -> Any:
        """What stands there, unchecked; None if nothing does."""
        self._read.add(key)
        return self.data.get(key)

    def unread(self) -> list[str]:
        """Keys that nobody asked for."""
        return [key for key in self.data if key not in self._read]

    def number(self, key: str, default: float | None = None, *, at_least: float | None = None) -> float:
        """A finite number. One that is missing and has no default is an error."""
        value = self.raw(key)
        if value is None and default is not None:
            return default
        number = as_float(value)
        if number is None or (at_least is not None and number < at_least):
            expected = "a number" + ("" if at_least is None else f" of at least {at_least:g}")
            raise self.error(self.name(key), expected, self._shown(key), f"set {key} as the model was trained")
        return number

    def whole(self, key: str, default: int | None = None, *, at_least: int = 1) -> int:
        """A whole number; 4096.0 is one."""
        value = self.raw(key)
        if value is None and default is not None:
            return default
        number = self.number(key, at_least=at_least)
        if number != int(number) or number > 2**53:
            raise self.error(self.name(key), "a whole number", self._shown(key), f"set {key} to a whole number")
        return int(number)

    def numbers(self, key: str) -> list[float]:
        """A list of finite numbers."""
        values = self.raw(key)
        if not isinstance(values, list) or not values:
            raise self.error(self.name(key), "a list of numbers", self._shown(key), f"copy {key} from the model")
        parts = self.of({str(i): value for i, value in enumerate(values)}, self.name(key))
        return [parts.number(str(i)) for i in range(len(values))]

    def flag(self, key: str, default: bool) -> bool:
        """True or false."""
        value = self.raw(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(self.name(key), "true or false", self._shown(key), f"set {key} to true or false")
        return value

    def part(self, key: str) -> dict[str, Any]:
        """An object; an empty one where there is none."""
        value = self.raw(key)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise self.error(self.name(key), "an object", self._shown(key), f"make {key} an object, or null")
        return cast("dict[str, Any]", value)

    def text(self, key: str, default: str | None = None) -> str | None:
        """A string."""
        value = self.raw(key)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self.error(self.name(key), "a string", self._shown(key), f"make {key} a string")
        return value

    def _shown(self, key: str) -> str:
        return shown(self.data[key]) if key in self.data else "nothing"
