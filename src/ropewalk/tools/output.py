"""Output of commands: atomic writing of files, JSON, tables without trailing spaces, and versions for records."""

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
    """Create `folder` if it does not exist, and check that files can be written there.

    Args:
        folder: The folder.
        asked: The request, for the error message.

    Raises:
        RopewalkError: If the folder cannot be created or written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise RopewalkError(
            asked=asked,
            expected="a folder that can be written",
            got=f"{folder}: {error.strerror or error}",
            do="specify another folder",
        ) from None


def require_writable_file(target: str, *, asked: str) -> None:
    """Check that a file can be written.

    Args:
        target: The path of the file; "-" for standard output.
        asked: The request, for the error message.

    Raises:
        RopewalkError: If `target` is a folder, or its folder does not exist or cannot be written.
    """
    if target == "-":
        return
    path = Path(target)
    # A link may lead to a folder that does not exist.
    if target == "" or path.is_dir() or not path.resolve().parent.is_dir():
        raise RopewalkError(
            asked=asked,
            expected="a file name in an existing folder",
            got=repr(target),
            do="create the folder first, and add a file name",
        )
    require_writable_folder(path.parent, asked=asked)


def write_json(data: object, target: str) -> None:
    """Write `data` as JSON to the file `target`, which is replaced atomically, or to standard output for "-"."""
    if target == "-":
        # Escaped, because a terminal may not support all characters.
        sys.stdout.write(json.dumps(data, indent=2) + "\n")
        return
    text = json.dumps(data, ensure_ascii=False, indent=2) + "\n"
    # File names may contain bytes that are not UTF-8. Python's surrogates for them are written as JSON escapes.
    write_whole(text.encode("utf-8", "backslashreplace"), target)


def write_whole(data: bytes, target: str) -> None:
    """Write `data` to the file `target`. An existing file is replaced atomically, or unchanged if that fails.

    A replaced file keeps its permissions, and its group if this process may set it. A new file has the default
    permissions.

    Args:
        data: The content.
        target: The path of the file.
    """
    path = Path(target)
    if path.is_symlink() or (path.exists() and not path.is_file()):
        # A link, a pipe or a device is written to, because replacing it would remove it.
        path.write_bytes(data)
        return
    old = path.stat() if path.exists() else None
    # os.open lets the kernel apply the umask. Python can only read the umask by setting it for all threads.
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
    """The permissions of the replaced file, for the new one. Sets its group; if that fails, the group gets none."""
    mode = stat.S_IMODE(old.st_mode) & 0o777
    if os.fstat(handle).st_gid == old.st_gid:
        return mode
    try:
        os.fchown(handle, -1, old.st_gid)
    except (OSError, AttributeError):
        # Another group must not get the permissions of the old group. Windows has no fchown.
        return mode & ~0o070
    return mode


def _set_mode(path: Path, handle: int, mode: int) -> None:
    """Set the permissions of an open file. Before Python 3.13, Windows can only set them by path."""
    if hasattr(os, "fchmod"):
        os.fchmod(handle, mode)
    else:
        os.chmod(path, mode)


@contextmanager
def trimmed(console: "Console") -> Iterator[None]:
    """Remove trailing spaces from all lines that `console` prints in the `with` block, unless it is a terminal."""
    if console.is_terminal:
        yield
        return
    with console.capture() as captured:
        yield
    console.file.write("".join(f"{line.rstrip(' ')}\n" for line in captured.get().split("\n")[:-1]))


def package_version(package: str) -> str | None:
    """The version of an installed package, or None.

    >>> package_version("no-such-package") is None
    True
    """
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def processor() -> str:
    """The name of the processor, as far as the system reports it.

    >>> isinstance(processor(), str)
    True
    """
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith(("model name", "CPU part"))]
    return names[0] if names else platform.processor()
