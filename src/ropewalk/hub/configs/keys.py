"""A config as plain data, checked key by key. Errors are written in the words of whoever asked for the config."""

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeAlias, cast

from ropewalk.errors import RopewalkError, as_float, as_int, shown
from ropewalk.hub.configs.limits import (
    CACHED_HEADS,
    DEEPEST,
    LAYERS,
    LIMITS,
    MOST_BITS,
    MOST_BYTES,
    MOST_COUNT,
    MOST_KEYS,
    MOST_LENGTH,
    MOST_LETTERS,
    MOST_VALUES,
)
from ropewalk.hub.configs.pitfalls import PITFALLS
from ropewalk.hub.files import read_text
from ropewalk.spec.value import without_repeats

__all__ = ["MOST_BYTES", "NAMES", "Caller", "ConfigError", "ConfigSource", "HasToDict", "Keys", "read_config"]

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
_SURROGATE = re.compile("[\ud800-\udfff]")
_EXPECTED = "a readable config.json or params.json, or a folder with one"


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
    copied = _copied(data, 0, "config", caller, [MOST_VALUES])
    if not isinstance(copied, dict):
        raise RopewalkError(
            asked=caller.asked_for(config),
            expected="a JSON object",
            got=shown(data),
            do=caller.pass_config,
        )
    return cast("dict[str, Any]", copied)


def _read_file(path: Path, caller: Caller) -> Any:
    path = _in_folder(path, caller)
    expected, do = _EXPECTED, caller.pass_path
    text = read_text(path, most=MOST_BYTES, asked=caller.asked_for(str(path)), expected=expected, do=do)
    # Each value follows a comma or a bracket: more values than these there cannot be, and none is made to know it.
    values = 1 + sum(map(text.count, ",[{"))
    if values > MOST_VALUES:
        raise _unreadable(caller, path, f"about {values} values; the limit is {MOST_VALUES}")
    try:
        return json.loads(text, object_pairs_hook=without_repeats)
    except (ValueError, RecursionError) as error:
        raise _unreadable(caller, path, f"not JSON: {error}") from None


def _in_folder(path: Path, caller: Caller) -> Path:
    """The config of a folder, and a path that is no folder as it is."""
    try:
        if not path.is_dir():
            return path
        # Not is_file: what has the name and is no file is an error that says so.
        files = [path / name for name in NAMES if os.path.lexists(path / name)]
    except (OSError, ValueError) as error:
        raise _unreadable(caller, path, f"{type(error).__name__}: {error}") from None
    if not files:
        raise _unreadable(caller, path, f"a folder without {' or '.join(NAMES)}")
    return files[0]


def _copied(value: Any, depth: int, name: str, caller: Caller, left: list[int]) -> Any:
    """A deep copy with plain strings as keys, that refuses what no config has.

    `left` is how many values may still come: dicts can contain themselves, or one list a thousand times.
    """
    refused = Keys({}, caller=caller).error
    left[0] -= 1
    if left[0] < 0:
        raise refused(name, f"at most {MOST_VALUES} values in a config", "more", caller.pass_config)
    if depth > DEEPEST:
        raise refused(name, f"at most {DEEPEST} levels", "more", caller.pass_config)
    if isinstance(value, dict):
        names = [(_copied_key(key, name, caller), entry) for key, entry in value.items()]
        return {key: _copied(entry, depth + 1, key, caller, left) for key, entry in names}
    if isinstance(value, list | tuple):
        return [_copied(entry, depth + 1, name, caller, left) for entry in value]
    if isinstance(value, int) and value.bit_length() > MOST_BITS:
        raise refused(name, "a number that a float can hold", f"one of {value.bit_length()} bits", caller.pass_config)
    if isinstance(value, str) and not _is_text(value):
        raise refused(name, "text", "half of a surrogate pair, which is no letter", caller.pass_config)
    return value


def _copied_key(key: object, name: str, caller: Caller) -> str:
    """A key as a string. Config objects have labels by number; other keys no JSON has."""
    refused = Keys({}, caller=caller).error
    number = as_int(key)
    if not isinstance(key, str) and (number is None or number.bit_length() > MOST_BITS):
        raise refused(name, "keys that are strings", f"a key of type {type(key).__name__}", caller.pass_config)
    text = str(key)
    if len(text) > MOST_LETTERS or not _is_text(text):
        raise refused(name, f"keys of at most {MOST_LETTERS} letters", f"{text[:40]!r}...", caller.pass_config)
    return text


def _is_text(text: str) -> bool:
    """Whether a string can be written: JSON can contain halves of surrogate pairs."""
    return text.isascii() or _SURROGATE.search(text) is None


def _unreadable(caller: Caller, path: Path, reason: str) -> RopewalkError:
    return RopewalkError(asked=caller.asked_for(str(path)), expected=_EXPECTED, got=reason, do=caller.pass_path)


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
        name = repr(key) if len(key) <= 200 else f"{key[:200]!r}..."
        return ConfigError(asked=self.caller.asked(f"the key {name}"), expected=expected, got=got, do=do)

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
        """A whole number, up to the limit of its key; 4096.0 is one."""
        value, most = self.raw(key), LIMITS.get(key, MOST_LENGTH)
        if value is None and default is not None:
            return default
        number = self.number(key, at_least=at_least)
        if number > most:
            raise self._above(key, most)
        if number != int(number):
            raise self.error(self.name(key), "a whole number", self._shown(key), f"set {key} to a whole number")
        return int(number)

    def check_limits(self) -> None:
        """Raises for more keys than a model has, and for counts that are above their limits.

        Counts are read from plain data, in several places. Other numbers are checked where they are read: a number that
        nobody reads may be anything.
        """
        if len(self.data) > MOST_KEYS:
            name = self._place or "config"
            raise self.error(name, f"at most {MOST_KEYS} keys", f"{len(self.data)}", self.caller.pass_config)
        for names in (LAYERS, CACHED_HEADS):
            for key in names:
                value = self.data.get(key)
                # A bool is no number, and below every limit. NaN is not below.
                if isinstance(value, int | float) and not value <= LIMITS[key]:
                    raise self._above(key, LIMITS[key])
                # Whoever reads the count takes the first that is one.
                if (as_int(value) or 0) > 0:
                    break

    def _above(self, key: str, most: int) -> ConfigError:
        do = f"set {key} as the model was trained"
        return self.error(self.name(key), f"a number of at most {most}", self._shown(key), do)

    def numbers(self, key: str) -> list[float]:
        """A list of finite numbers."""
        values = self.raw(key)
        if not isinstance(values, list) or not values:
            raise self.error(self.name(key), "a list of numbers", self._shown(key), f"copy {key} from the model")
        if len(values) > MOST_COUNT:
            expected, got = f"a list of at most {MOST_COUNT} numbers", f"{len(values)} entries"
            raise self.error(self.name(key), expected, got, f"copy {key} from the model")
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
        """A string that is a name: it can be printed, and is not long."""
        value = self.raw(key)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self.error(self.name(key), "a string", self._shown(key), f"make {key} a string")
        return self.as_name(value, key)

    def as_name(self, value: str, key: str) -> str:
        """A string under this key, if it can be printed and has at most as many letters as a name may have."""
        if len(value) > MOST_LETTERS or not value.isprintable():
            expected = f"a name: at most {MOST_LETTERS} letters that can be printed"
            raise self.error(self.name(key), expected, self._shown(key), f"set {key} as the model was trained")
        return value

    def _shown(self, key: str) -> str:
        return shown(self.data[key]) if key in self.data else "nothing"
