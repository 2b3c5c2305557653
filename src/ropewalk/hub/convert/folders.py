"""A folder that is there whole, or not at all: written beside its place under another name, and renamed at the end."""

import contextlib
import fcntl
import os
import shutil
import stat
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from ropewalk.errors import RopewalkError

__all__ = ["SUFFIX", "require_room", "whole_folder", "write_file"]

# What the name of a folder ends with as long as it is not whole.
SUFFIX = ".ropewalk-partial"


def require_room(out: Path, source: Path, nbytes: int) -> None:
    """Refuses an `out` that is there, lies in the source, or has no room, before anything is written."""
    place = out.parent.resolve() / out.name
    if os.path.lexists(out):
        raise _refused(out, "a name that is free", "something that is there", "name another folder, or remove that one")
    if not out.name or place.is_relative_to(source.resolve()):
        raise _refused(out, "a folder outside of the model's", f"one in {str(source)!r}", "name a folder beside it")
    partial = place.with_name(place.name + SUFFIX)
    if source.resolve().is_relative_to(partial):
        # What lies there would be taken for the rest of an earlier try, and removed.
        raise _refused(
            out, f"a model that is not in {partial.name!r}", repr(str(source)), "name another folder to write"
        )
    if not out.parent.is_dir():
        raise _refused(out, "a folder to put it in", f"no folder {str(out.parent)!r}", "make it first")
    free = shutil.disk_usage(out.parent).free
    if free < nbytes:
        raise _refused(
            out, f"room for {nbytes / 1e9:.2f} GB", f"{free / 1e9:.2f} GB", "free some, or name another disk"
        )


@contextlib.contextmanager
def whole_folder(out: Path, modes: Mapping[str, int]) -> Iterator[Path]:
    """A folder to write into, which is `out` once the block is done, and gone if it fails.

    As long as it is written it is called `out` and SUFFIX, and locked. What a process that was killed has left there
    is removed by the next one that writes `out`; what a living process writes is refused.

    Args:
        out: The folder.
        modes: The permissions of the folders that it is made from, by their paths in it, each after the one that it is
            in; its own under "". These folders are made, and nobody has a permission there that is not in `modes`,
            but for their owner as long as they are written.

    Yields:
        The folder to write into.
    """
    partial = out.with_name(out.name + SUFFIX)
    try:
        with contextlib.suppress(FileExistsError):
            partial.mkdir(modes[""] & 0o777 | 0o700)
        handle = os.open(partial, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError as error:
        raise _refused(out, "a folder that can be written", _reason(error), "name another folder") from None
    try:
        try:
            # The kernel takes the lock back when the process ends, however it ends.
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise _refused(out, "nobody else who writes it", f"{partial.name!r} is being written", "wait") from None
        if not partial.exists() or not os.path.samestat(os.fstat(handle), partial.stat()):
            raise _refused(out, "nobody else who writes it", "another process that was faster", "run it again")
        try:
            _empty(partial)
            # What was left may have had other permissions.
            _narrow(handle, modes[""] | 0o700)
            for name, mode in modes.items():
                if name:
                    (partial / name).mkdir(mode & 0o777 | 0o700)
            yield partial
            for name, mode in reversed(list(modes.items())):
                _finish(partial / name, mode)
            if os.path.lexists(out):
                raise _refused(out, "a name that is still free", "something that came while we wrote", "name another")
            os.rename(partial, out)
        except BaseException as error:
            with contextlib.suppress(OSError):
                _empty(partial)
                partial.rmdir()
            if isinstance(error, OSError):
                do = "free some room, or name a folder on another disk; nothing is left of this try"
                raise _refused(out, "a folder that can be written to its end", _reason(error), do) from None
            raise
        _finish(out.parent)
    finally:
        os.close(handle)


def write_file(path: Path, blocks: Iterable[bytes], mode: int) -> None:
    """A new file from its blocks, on the disk when this returns, with the permissions of `mode` less the umask."""
    # One that is there is no file of ours: its name differs from another one's in a way that this disk does not see.
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode & 0o777)
    with open(handle, "wb") as file:
        for block in blocks:
            file.write(block)
        file.flush()
        os.fsync(file.fileno())


def _empty(folder: Path) -> None:
    """Removes what is in a folder, which stays: it is what is locked."""
    # The folders of a model that is read-only are so, too.
    os.chmod(folder, stat.S_IMODE(folder.stat().st_mode) | 0o700)
    for entry in list(folder.iterdir()):
        if entry.is_dir() and not entry.is_symlink():
            _empty(entry)
            entry.rmdir()
        else:
            entry.unlink()


def _finish(folder: Path, mode: int = 0o777) -> None:
    """The names in a folder, on the disk, and its permissions no wider than `mode`."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        _narrow(handle, mode)
        os.fsync(handle)
    finally:
        os.close(handle)


def _narrow(handle: int, mode: int) -> None:
    """Takes the permissions from a file or folder that are not in `mode`."""
    current = stat.S_IMODE(os.fstat(handle).st_mode)
    if current & 0o777 & ~mode:
        os.fchmod(handle, current & ~(0o777 & ~mode))


def _reason(error: OSError) -> str:
    return f"{error.strerror or error}" + (f": {error.filename!r}" if error.filename else "")


def _refused(out: Path, expected: str, got: str, do: str) -> RopewalkError:
    return RopewalkError(asked=f"write the converted model to {str(out)!r}", expected=expected, got=got, do=do)
