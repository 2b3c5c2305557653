"""Writes a folder completely or not at all: it has a temporary name until it is complete, and is renamed at the end."""

import contextlib
import fcntl
import os
import shutil
import stat
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from ropewalk.errors import RopewalkError

__all__ = ["SUFFIX", "atomic_folder", "require_writable", "write_file"]

# Suffix of the folder's name until it is complete.
SUFFIX = ".ropewalk-partial"


def require_writable(out: Path, source: Path, nbytes: int) -> None:
    """Raise if `out` exists, is inside `source`, or if its disk has fewer than `nbytes` free bytes.

    Args:
        out: The folder to write.
        source: The folder of the model.
        nbytes: The number of bytes that will be written.

    Raises:
        RopewalkError: If `out` cannot be written. Nothing has been written.
    """
    place = out.parent.resolve() / out.name
    if os.path.lexists(out):
        raise _error(out, "a path that does not exist", "a path that exists", "use another path, or remove this one")
    if not out.name or place.is_relative_to(source.resolve()):
        got = f"a folder inside {str(source)!r}"
        raise _error(out, "a folder outside of the model's folder", got, "use a folder next to it")
    partial = place.with_name(place.name + SUFFIX)
    if source.resolve().is_relative_to(partial):
        # The source would look like the remains of an interrupted conversion, and be removed.
        expected = f"a model that is not inside {partial.name!r}"
        raise _error(out, expected, repr(str(source)), "use another output folder")
    if not out.parent.is_dir():
        raise _error(
            out, "an existing parent folder", f"no folder {str(out.parent)!r}", "create the parent folder first"
        )
    free = shutil.disk_usage(out.parent).free
    if free < nbytes:
        expected, got = f"{nbytes / 1e9:.2f} GB of free disk space", f"{free / 1e9:.2f} GB"
        raise _error(out, expected, got, "free some disk space, or use another disk")


@contextlib.contextmanager
def atomic_folder(out: Path, modes: Mapping[str, int]) -> Iterator[Path]:
    """Context manager: a folder to write to. It is renamed to `out` if the block succeeds, and removed if it fails.

    While the block runs, the folder is named `out` + SUFFIX and is locked. If a process is killed, the next one that
    writes `out` removes what is left. If another running process writes `out`, an error is raised.

    Args:
        out: The folder.
        modes: The permissions of the source folders by relative path, parents first; that of the root under "". These
            folders are created. They never have a permission that is not in `modes`, except that the owner may write
            while the block runs.

    Yields:
        The folder to write to.

    Raises:
        RopewalkError: If the folder cannot be written.
    """
    partial = out.with_name(out.name + SUFFIX)
    try:
        with contextlib.suppress(FileExistsError):
            partial.mkdir(modes[""] & 0o777 | 0o700)
        handle = os.open(partial, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError as error:
        raise _error(out, "a writable folder", _reason(error), "use another output folder") from None
    try:
        try:
            # The kernel releases the lock when the process ends, even if it is killed.
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            got = f"another process that is writing {partial.name!r}"
            raise _error(out, "no other process that writes it", got, "wait until it ends") from None
        if not partial.exists() or not os.path.samestat(os.fstat(handle), partial.stat()):
            got = "another process that has just written it"
            raise _error(out, "no other process that writes it", got, "run it again")
        try:
            _empty(partial)
            # A folder left by a killed process may have other permissions.
            _narrow(handle, modes[""] | 0o700)
            for name, mode in modes.items():
                if name:
                    (partial / name).mkdir(mode & 0o777 | 0o700)
            yield partial
            for name, mode in reversed(list(modes.items())):
                _finish(partial / name, mode)
            if os.path.lexists(out):
                got = "a path that was created during the conversion"
                raise _error(out, "a path that does not exist", got, "use another path")
            os.rename(partial, out)
        except BaseException as error:
            with contextlib.suppress(OSError):
                _empty(partial)
                partial.rmdir()
            if isinstance(error, OSError):
                do = "free some disk space, or use another disk; the incomplete output was removed"
                raise _error(out, "a folder that can be written completely", _reason(error), do) from None
            raise
        _finish(out.parent)
    finally:
        os.close(handle)


def write_file(path: Path, blocks: Iterable[bytes], mode: int) -> None:
    """Write blocks to a new file and flush it to the disk. Its permissions are `mode` without the umask."""
    # O_EXCL: on some file systems, names that differ in case only are the same file.
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode & 0o777)
    with open(handle, "wb") as file:
        for block in blocks:
            file.write(block)
        file.flush()
        os.fsync(file.fileno())


def _empty(folder: Path) -> None:
    """Remove the contents of a folder, but not the folder itself, which is locked."""
    # Folders copied from a read-only model are read-only.
    os.chmod(folder, stat.S_IMODE(folder.stat().st_mode) | 0o700)
    for entry in list(folder.iterdir()):
        if entry.is_dir() and not entry.is_symlink():
            _empty(entry)
            entry.rmdir()
        else:
            entry.unlink()


def _finish(folder: Path, mode: int = 0o777) -> None:
    """Flush the entries of a folder to the disk, and remove permissions that are not in `mode`."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        _narrow(handle, mode)
        os.fsync(handle)
    finally:
        os.close(handle)


def _narrow(handle: int, mode: int) -> None:
    """Remove the permissions of an open file or folder that are not in `mode`."""
    current = stat.S_IMODE(os.fstat(handle).st_mode)
    if current & 0o777 & ~mode:
        os.fchmod(handle, current & ~(0o777 & ~mode))


def _reason(error: OSError) -> str:
    return f"{error.strerror or error}" + (f": {error.filename!r}" if error.filename else "")


def _error(out: Path, expected: str, got: str, do: str) -> RopewalkError:
    return RopewalkError(asked=f"write the converted model to {str(out)!r}", expected=expected, got=got, do=do)
