"""Where commands write: JSON to a file or to standard output, whole or not at all."""

import json
import os
import sys
import tempfile
from pathlib import Path

from ropewalk.errors import RopewalkError

__all__ = ["require_writable_file", "require_writable_folder", "write_json"]


def require_writable_folder(folder: Path, *, asked: str) -> None:
    """Makes `folder` if it is not there; refuses one that cannot be written, before any work is done for it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise RopewalkError(
            asked=asked,
            expected="a folder that can be written",
            got=f"{folder}: {error.strerror or error}",
            do="name another folder",
        ) from None


def require_writable_file(target: str, *, asked: str) -> None:
    """Refuses a `target` that is a folder, or lies in one that cannot be written. "-" is standard output."""
    if target == "-":
        return
    require_writable_folder(Path(target).parent, asked=asked)
    if Path(target).is_dir():
        raise RopewalkError(asked=asked, expected="a file name", got=f"the folder {target}", do="add a file name")


def write_json(data: object, target: str) -> None:
    """`data` as JSON into the file `target`, which is replaced whole, or to standard output for "-"."""
    text = json.dumps(data, ensure_ascii=False, indent=2) + "\n"
    if target == "-":
        sys.stdout.write(text)
        return
    path = Path(target)
    with tempfile.NamedTemporaryFile(
        "w", encoding="utf-8", dir=path.parent, prefix=f".{path.name}.", delete=False
    ) as part:
        part.write(text)
    # A temporary file is private to its owner; what a command writes has the rights that new files have.
    mask = os.umask(0)
    os.umask(mask)
    os.chmod(part.name, 0o666 & ~mask)
    os.replace(part.name, path)
