"""What commands write: files, whole or not at all, JSON, tables in a pipe, and the versions that a record names."""

import json
import os
import platform
import secrets
import stat
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from ropewalk.errors import RopewalkError

if TYPE_CHECKING:
    # Benchmarks run where torch is installed and rich is not.
    from rich.console import Console

__all__ = [
    "package_version",
    "processor",
    "require_writable_file",
    "require_writable_folder",
    "trimmed",
    "write_json",
    "write_whole",
]


def require_writable_folder(folder: Path, *, asked: str) -> None:
    """Makes `folder` if it does not exist; raises for one that cannot be written, before any work is done for it."""
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
    """Raises for a `target` that is a folder, or is in one that cannot be written. "-" is standard output."""
    if target == "-":
        return
    path = Path(target)
    if target == "" or path.is_dir() or not path.parent.is_dir():
        raise RopewalkError(
            asked=asked,
            expected="a file name in a folder that is there",
            got=repr(target),
            do="make the folder first, and add a file name",
        )
    require_writable_folder(path.parent, asked=asked)


def write_json(data: object, target: str) -> None:
    """`data` as JSON into the file `target`, which is replaced whole, or to standard output for "-"."""
    if target == "-":
        # A terminal may not have the letters; JSON's escapes it always has.
        sys.stdout.write(json.dumps(data, indent=2) + "\n")
        return
    text = json.dumps(data, ensure_ascii=False, indent=2) + "\n"
    # Names of files may have bytes that are no UTF-8; what Python replaces them by is written as JSON escapes it.
    write_whole(text.encode("utf-8", "backslashreplace"), target)


def write_whole(data: bytes, target: str) -> None:
    """`data` into the file `target`, which is replaced whole, or left as it is where that fails.

    A file that is replaced keeps its permissions, and its group where this process may set it. A new file has those
    that new files have here.
    """
    path = Path(target)
    if path.is_symlink() or (path.exists() and not path.is_file()):
        # A link, a pipe or a device is written through: replacing it would take it away.
        path.write_bytes(data)
        return
    old = path.stat() if path.exists() else None
    # The kernel applies the umask. To read it, one has to set it, for every thread of the process.
    part = path.with_name(f".ropewalk-{secrets.token_hex(8)}")
    # Without O_BINARY, Windows writes each line feed as two bytes.
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
    handle = os.open(part, flags, 0o666 if old is None else 0o600)
    try:
        with open(handle, "wb") as file:
            file.write(data)
            file.flush()
            if old is not None:
                _set_mode(part, handle, _permissions_like(old, handle))
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def _permissions_like(old: os.stat_result, handle: int) -> int:
    """The permissions of a file that is replaced, for the new one, which gets its group; without it, no group's."""
    mode = stat.S_IMODE(old.st_mode) & 0o777
    if os.fstat(handle).st_gid == old.st_gid:
        return mode
    try:
        os.fchown(handle, -1, old.st_gid)
    except (OSError, AttributeError):
        # What the old group might do, another one must not. Windows has no such groups, and no fchown.
        return mode & ~0o070
    return mode


def _set_mode(path: Path, handle: int, mode: int) -> None:
    """Sets the permissions of an open file. Before Python 3.13, Windows sets them by its path alone."""
    if hasattr(os, "fchmod"):
        os.fchmod(handle, mode)
    else:
        os.chmod(path, mode)


@contextmanager
def trimmed(console: "Console") -> Iterator[None]:
    """Within it, what `console` prints loses the spaces at the ends of its lines, unless it is a terminal."""
    if console.is_terminal:
        yield
        return
    with console.capture() as caught:
        yield
    console.file.write("".join(f"{line.rstrip(' ')}\n" for line in caught.get().split("\n")[:-1]))


def package_version(package: str) -> str | None:
    """The version of a package that is installed, or None.

    >>> package_version("no-such-package") is None
    True
    """
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def processor() -> str:
    """What this machine's processor is called, as far as it says so.

    >>> isinstance(processor(), str)
    True
    """
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith(("model name", "CPU part"))]
    return names[0] if names else platform.processor()
