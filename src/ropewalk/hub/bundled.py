"""Configs of well-known models that are installed with ropewalk, for trying it without a download.

They contain the keys that describe positions, layers and heads. They are no complete configs of transformers.
"""

from pathlib import Path

__all__ = ["bundled_config", "bundled_names"]

_FOLDER = Path(__file__).parents[1] / "data" / "configs"


def bundled_names() -> tuple[str, ...]:
    """The names of the bundled configs, sorted.

    >>> "llama-3.1-8b" in bundled_names()
    True
    """
    return tuple(sorted(path.stem for path in _FOLDER.glob("*.json")))


def bundled_config(name: str) -> Path | None:
    """The path of a bundled config, or None if no bundled config has this name.

    >>> bundled_config("llama-3.1-8b").name
    'llama-3.1-8b.json'
    >>> bundled_config("../configs/llama-3.1-8b") is None
    True
    """
    return _FOLDER / f"{name}.json" if name in bundled_names() else None
