"""A config as plain data with checked access to its keys. Errors name the function or command that read the config."""

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, TypeAlias, cast

from ropewalk.errors import RopewalkError, as_float, as_int, shown
from ropewalk.hub.configs.caller import NAMES, Caller
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
from ropewalk.hub.configs.other_files import refuse_other_files
from ropewalk.hub.configs.pitfalls import PITFALLS
from ropewalk.hub.files import read_text
from ropewalk.spec.value import without_repeats

__all__ = ["MOST_BYTES", "NAMES", "Caller", "ConfigError", "ConfigSource", "HasToDict", "Keys", "read_config"]


class HasToDict(Protocol):
    """A config object, such as those of transformers."""

    def to_dict(self) -> Mapping[str, object]:
        """Return the config as plain data."""
        ...


# The path of a config or of its folder, the contents of a config, or a config object of transformers.
ConfigSource: TypeAlias = str | Path | Mapping[str, object] | HasToDict


_LOAD_SPEC = Caller("load_spec")
_SURROGATE = re.compile("[\ud800-\udfff]")
_EXPECTED = "a readable config.json or params.json, or a folder with one"


class ConfigError(RopewalkError):
    """An invalid key of a config. The error names the key."""


def read_config(config: object, caller: Caller = _LOAD_SPEC) -> dict[str, Any]:
    """Read a config into a new dict.

    Args:
        config: A path, a dict or a config object.
        caller: The function that errors name.

    Returns:
        A deep copy of the config. Its keys are strings.

    Raises:
        RopewalkError: If the config cannot be read, is not JSON, or exceeds the limits of `hub.configs.limits`.

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
            do='pass a path such as "models/llama/config.json"',
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
    refuse_other_files(str(path), caller)
    path = _in_folder(path, caller)
    expected, do = _EXPECTED, caller.pass_path
    text = read_text(path, most=MOST_BYTES, asked=caller.asked_for(str(path)), expected=expected, do=do)
    # Each value follows a comma or a bracket, so this is an upper bound. It is computed without parsing.
    values = 1 + sum(map(text.count, ",[{"))
    if values > MOST_VALUES:
        raise _unreadable(caller, path, f"up to {values} values; the limit is {MOST_VALUES}")
    try:
        return json.loads(text, object_pairs_hook=without_repeats)
    except (ValueError, RecursionError) as error:
        raise _unreadable(caller, path, f"not JSON: {error}") from None


def _in_folder(path: Path, caller: Caller) -> Path:
    """Return the config file of a folder. Return any other path unchanged."""
    try:
        if not path.is_dir():
            return path
        # Not is_file: if the name exists but is not a file, opening it raises an error that says so.
        files = [path / name for name in NAMES if os.path.lexists(path / name)]
    except (OSError, ValueError) as error:
        raise _unreadable(caller, path, f"{type(error).__name__}: {error}") from None
    if not files:
        raise _unreadable(caller, path, f"a folder without {' or '.join(NAMES)}")
    return files[0]


def _copied(value: Any, depth: int, name: str, caller: Caller, left: list[int]) -> Any:
    """Return a deep copy with strings as keys. Raise for values that no config has.

    `left` contains the number of values that may follow. A dict can contain itself, or one list a thousand times.
    """
    error = Keys({}, caller=caller).error
    left[0] -= 1
    if left[0] < 0:
        raise error(name, f"a config with at most {MOST_VALUES} values", "more values", caller.pass_config)
    if depth > DEEPEST:
        raise error(name, f"at most {DEEPEST} levels of nesting", "more levels", caller.pass_config)
    if isinstance(value, dict):
        names = [(_copied_key(key, name, caller), entry) for key, entry in value.items()]
        return {key: _copied(entry, depth + 1, key, caller, left) for key, entry in names}
    if isinstance(value, list | tuple):
        return [_copied(entry, depth + 1, name, caller, left) for entry in value]
    if isinstance(value, int) and value.bit_length() > MOST_BITS:
        got = f"an integer of {value.bit_length()} bits"
        raise error(name, "a number within the range of a float", got, caller.pass_config)
    if isinstance(value, str) and not _is_text(value):
        raise error(name, "valid Unicode text", "half of a surrogate pair", caller.pass_config)
    return value


def _copied_key(key: object, name: str, caller: Caller) -> str:
    """Return a key as a string. Config objects have integer keys for labels; JSON has no other types."""
    error = Keys({}, caller=caller).error
    number = as_int(key)
    if not isinstance(key, str) and (number is None or number.bit_length() > MOST_BITS):
        raise error(name, "strings as keys", f"a key of type {type(key).__name__}", caller.pass_config)
    text = str(key)
    if len(text) > MOST_LETTERS or not _is_text(text):
        raise error(name, f"keys of at most {MOST_LETTERS} characters", f"{text[:40]!r}...", caller.pass_config)
    return text


def _is_text(text: str) -> bool:
    """Return whether a string can be encoded. JSON can contain halves of surrogate pairs."""
    return text.isascii() or _SURROGATE.search(text) is None


def _unreadable(caller: Caller, path: Path, reason: str) -> RopewalkError:
    return RopewalkError(asked=caller.asked_for(str(path)), expected=_EXPECTED, got=reason, do=caller.pass_path)


class Keys:
    """A part of a config with checked access. It records which keys were read.

    All methods that return a value raise a `ConfigError` that names the key if its value is invalid.

    Args:
        data: The part of the config.
        place: The key under which the part is stored; "" for the whole config.
        caller: The function that errors name. Parts of one config share it.
        pitfalls: The list that `warn` appends to. Parts of one config share it.

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
        """Return another part of the same config."""
        return Keys(data, place, caller=self.caller, pitfalls=self.pitfalls)

    def under(self, key: str) -> "Keys":
        """Return the object under `key` as a part. It is empty if the key is missing or null."""
        return self.of(self.part(key), self.name(key))

    def warn(self, name: str, text: str) -> None:
        """Add a pitfall. `name` is one of PITFALLS."""
        if name not in PITFALLS:
            raise KeyError(name)
        self.pitfalls.append((name, text))

    def error(self, key: str, expected: str, got: str, do: str) -> ConfigError:
        """Return the error for a key, given by its full name."""
        name = repr(key) if len(key) <= 200 else f"{key[:200]!r}..."
        return ConfigError(asked=self.caller.asked(f"the key {name}"), expected=expected, got=got, do=do)

    def name(self, key: str) -> str:
        """Return the full name of a key, such as "rope_parameters.factor"."""
        return f"{self._place}.{key}" if self._place else key

    def has(self, key: str) -> bool:
        """Return whether the config contains the key with a value other than null."""
        self._read.add(key)
        return self.data.get(key) is not None

    def contains(self, key: str) -> bool:
        """Return whether the config contains the key. Its value may be null."""
        return key in self.data

    def raw(self, key: str) -> Any:
        """Return the value of a key without a check, or None if the key is missing."""
        self._read.add(key)
        return self.data.get(key)

    def unread(self) -> list[str]:
        """Return the keys that were never read."""
        return [key for key in self.data if key not in self._read]

    def number(self, key: str, default: float | None = None, *, at_least: float | None = None) -> float:
        """Return a finite number. Raise if it is missing and there is no default."""
        value = self.raw(key)
        if value is None and default is not None:
            return default
        number = as_float(value)
        if number is None or (at_least is not None and number < at_least):
            expected = "a number" + ("" if at_least is None else f" of at least {at_least:g}")
            raise self.error(
                self.name(key), expected, self._shown(key), f"set {key} to the value the model was trained with"
            )
        return number

    def integer(self, key: str, default: int | None = None, *, at_least: int = 1) -> int:
        """Return an integer up to the limit of its key. A float such as 4096.0 is accepted."""
        value, most = self.raw(key), LIMITS.get(key, MOST_LENGTH)
        if value is None and default is not None:
            return default
        number = self.number(key, at_least=at_least)
        if number > most:
            raise self._above(key, most)
        if number != int(number):
            raise self.error(self.name(key), "an integer", self._shown(key), f"set {key} to an integer")
        return int(number)

    def check_limits(self) -> None:
        """Raise if there are too many keys, or if a number of layers or heads exceeds its limit.

        These numbers are also read from plain data, in several modules. All other numbers are checked when they are
        read; numbers that are never read are not checked.
        """
        if len(self.data) > MOST_KEYS:
            name = self._place or "config"
            raise self.error(name, f"at most {MOST_KEYS} keys", f"{len(self.data)} keys", self.caller.pass_config)
        for names in (LAYERS, CACHED_HEADS):
            for key in names:
                value = self.data.get(key)
                # `not <=` instead of `>`: NaN must raise.
                if isinstance(value, int | float) and not value <= LIMITS[key]:
                    raise self._above(key, LIMITS[key])
                # Readers use the first key that has a positive integer.
                if (as_int(value) or 0) > 0:
                    break

    def _above(self, key: str, most: int) -> ConfigError:
        do = f"set {key} to the value the model was trained with"
        return self.error(self.name(key), f"a number of at most {most}", self._shown(key), do)

    def numbers(self, key: str) -> list[float]:
        """Return a list of finite numbers."""
        values = self.raw(key)
        if not isinstance(values, list) or not values:
            raise self.error(
                self.name(key), "a list of numbers", self._shown(key), f"copy {key} from the original config"
            )
        if len(values) > MOST_COUNT:
            expected, got = f"a list of at most {MOST_COUNT} numbers", f"{len(values)} entries"
            raise self.error(self.name(key), expected, got, f"copy {key} from the original config")
        parts = self.of({str(i): value for i, value in enumerate(values)}, self.name(key))
        return [parts.number(str(i)) for i in range(len(values))]

    def flag(self, key: str, default: bool) -> bool:
        """Return a bool."""
        value = self.raw(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(self.name(key), "true or false", self._shown(key), f"set {key} to true or false")
        return value

    def part(self, key: str) -> dict[str, Any]:
        """Return an object, or an empty one if the key is missing or null."""
        value = self.raw(key)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise self.error(self.name(key), "a JSON object", self._shown(key), f"set {key} to an object or to null")
        return cast("dict[str, Any]", value)

    def text(self, key: str, default: str | None = None) -> str | None:
        """Return a string that is a name: printable and short."""
        value = self.raw(key)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self.error(self.name(key), "a string", self._shown(key), f"set {key} to a string")
        return self.as_name(value, key)

    def as_name(self, value: str, key: str) -> str:
        """Return `value`, which is stored under `key`. Raise if it is not printable or too long."""
        if len(value) > MOST_LETTERS or not value.isprintable():
            expected = f"a name of at most {MOST_LETTERS} printable characters"
            do = f"copy {key} from the original config"
            raise self.error(self.name(key), expected, self._shown(key), do)
        return value

    def _shown(self, key: str) -> str:
        return shown(self.data[key]) if key in self.data else "no such key"
