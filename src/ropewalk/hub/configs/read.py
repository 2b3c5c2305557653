"""Configs as plain dicts: from a file, a folder, a dict, or a config object of transformers."""

import json
from pathlib import Path
from typing import Any, cast

from ropewalk.errors import RopewalkError, as_float, shown
from ropewalk.spec.value import without_repeats

__all__ = ["Keys", "config_error", "read_config"]

# The largest config on model hubs is far below this; what is larger is no config.
MOST_BYTES = 16 << 20
# Files that a folder may hold a config in, in the order in which they are looked for.
NAMES = ("config.json", "params.json")


def read_config(config: object) -> dict[str, Any]:
    """The config as a dict that belongs to nobody else.

    >>> read_config({"model_type": "llama"})
    {'model_type': 'llama'}
    """
    if isinstance(config, dict):
        data: Any = config
    elif isinstance(config, str | Path):
        data = _read_file(Path(config))
    elif callable(getattr(config, "to_dict", None)):
        data = cast("Any", config).to_dict()
    else:
        raise RopewalkError(
            asked="load_spec(config)",
            expected="the path of a config.json or of its folder, a dict, or a config of transformers",
            got=shown(config),
            do='pass for example "models/llama/config.json"',
        )
    copied = _copied(data, 0, "config")
    if not isinstance(copied, dict):
        raise RopewalkError(
            asked=f"load_spec({shown(config)})",
            expected="a JSON object",
            got=shown(data),
            do="pass the config.json of a model",
        )
    return cast("dict[str, Any]", copied)


def _read_file(path: Path) -> Any:
    try:
        if path.is_dir():
            found = [path / name for name in NAMES if (path / name).is_file()]
            if not found:
                raise _unreadable(path, f"a folder without {' or '.join(NAMES)}")
            path = found[0]
        size = path.stat().st_size
        if size > MOST_BYTES:
            raise _unreadable(path, f"{size >> 20} MiB; a config has at most {MOST_BYTES >> 20}")
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        if isinstance(error, RopewalkError):
            raise
        raise _unreadable(path, f"{type(error).__name__}: {error}") from None
    try:
        return json.loads(text, object_pairs_hook=without_repeats)
    except (ValueError, RecursionError) as error:
        raise _unreadable(path, f"not JSON: {error}") from None


def _copied(value: Any, depth: int, name: str) -> Any:
    """A deep copy with plain strings as keys, that refuses what no config is nested like."""
    if depth > 32:
        raise config_error(name, "at most 32 levels", "more", "pass the config of a model")
    if isinstance(value, dict):
        return {str(key): _copied(entry, depth + 1, str(key)) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_copied(entry, depth + 1, name) for entry in value]
    return value


def _unreadable(path: Path, reason: str) -> RopewalkError:
    return RopewalkError(
        asked=f"load_spec({str(path)!r})",
        expected="a readable config.json or params.json, or a folder with one",
        got=reason,
        do="pass the path of a config, or the config itself as a dict",
    )


def config_error(key: str, expected: str, got: str, do: str) -> RopewalkError:
    """The error of a key in a config."""
    return RopewalkError(asked=f"load_spec: the key {key!r}", expected=expected, got=got, do=do)


class Keys:
    """A part of a config that checks what it is asked for, and remembers what it was.

    >>> keys = Keys({"factor": 4, "typo": 1})
    >>> keys.number("factor"), keys.unread()
    (4.0, ['typo'])
    """

    def __init__(self, data: dict[str, Any], where: str = "") -> None:
        self._data, self._where, self._read = data, where, set[str]()

    def name(self, key: str) -> str:
        """The key as an error names it."""
        return f"{self._where}.{key}" if self._where else key

    def has(self, key: str) -> bool:
        """Whether the key is there and not null."""
        self._read.add(key)
        return self._data.get(key) is not None

    def stands(self, key: str) -> bool:
        """Whether the key is there, be it null."""
        return key in self._data

    def raw(self, key: str) -> Any:
        """What stands there, unchecked; None if nothing does."""
        self._read.add(key)
        return self._data.get(key)

    def unread(self) -> list[str]:
        """Keys that nobody asked for."""
        return [key for key in self._data if key not in self._read]

    def number(self, key: str, default: float | None = None, *, at_least: float | None = None) -> float:
        """A finite number. One that is missing and has no default is an error."""
        value = self.raw(key)
        if value is None and default is not None:
            return default
        number = as_float(value)
        if number is None or (at_least is not None and number < at_least):
            expected = "a number" + ("" if at_least is None else f" of at least {at_least:g}")
            raise config_error(self.name(key), expected, self._shown(key), f"set {key} as the model was trained")
        return number

    def whole(self, key: str, default: int | None = None, *, at_least: int = 1) -> int:
        """A whole number; 4096.0 is one."""
        value = self.raw(key)
        if value is None and default is not None:
            return default
        number = self.number(key, at_least=at_least)
        if number != int(number) or number > 2**53:
            raise config_error(self.name(key), "a whole number", self._shown(key), f"set {key} to a whole number")
        return int(number)

    def numbers(self, key: str) -> list[float]:
        """A list of finite numbers."""
        values = self.raw(key)
        if not isinstance(values, list) or not values:
            raise config_error(self.name(key), "a list of numbers", self._shown(key), f"copy {key} from the model")
        parts = Keys({str(i): value for i, value in enumerate(values)}, self.name(key))
        return [parts.number(str(i)) for i in range(len(values))]

    def flag(self, key: str, default: bool) -> bool:
        """True or false."""
        value = self.raw(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise config_error(self.name(key), "true or false", self._shown(key), f"set {key} to true or false")
        return value

    def part(self, key: str) -> dict[str, Any]:
        """An object; an empty one where there is none."""
        value = self.raw(key)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise config_error(self.name(key), "an object", self._shown(key), f"make {key} an object, or null")
        return cast("dict[str, Any]", value)

    def text(self, key: str, default: str | None = None) -> str | None:
        """A string."""
        value = self.raw(key)
        if value is None:
            return default
        if not isinstance(value, str):
            raise config_error(self.name(key), "a string", self._shown(key), f"make {key} a string")
        return value

    def _shown(self, key: str) -> str:
        return shown(self._data[key]) if key in self._data else "nothing"
