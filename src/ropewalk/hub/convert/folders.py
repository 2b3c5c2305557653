"""A folder that is there whole, or not at all: written beside its place under another name, and renamed at the end."""

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

from ropewalk.errors import RopewalkError
from ropewalk.hub.convert.checkpoint import Checkpoint, is_weights

__all__ = ["SUFFIX", "other_files", "require_room", "whole_folder", "write_file"]

# What the name of a folder ends with as long as it is not whole.
SUFFIX = ".ropewalk-partial"


def other_files(checkpoint: Checkpoint) -> tuple[list[str], list[str]]:
    """The files of a model's folder that are no weights, and the names of what is left out: other weights, folders
    whose name begins with a dot, and links to folders."""
    copied: list[str] = []
    left: list[str] = []
    shards = {shard.path.name for shard in checkpoint.shards}
    for place, folders, files in os.walk(checkpoint.folder):
        here = Path(place).relative_to(checkpoint.folder)
        skipped = [name for name in folders if name.startswith(".") or (Path(place) / name).is_symlink()]
        left += [f"{here / name}/" for name in skipped]
        folders[:] = sorted(set(folders) - set(skipped))
        for name in sorted(files):
            if here == Path() and name in shards:
                continue
            plain = not is_weights(name) and (Path(place) / name).is_file()
            (copied if plain else left).append(str(here / name))
    return copied, left


def require_room(out: Path, source: Path, nbytes: int) -> None:
    """Refuses an `out` that is there, lies in the source, or has no room, before anything is written."""
    place = out.parent.resolve() / out.name
    if os.path.lexists(out):
        raise _refused(out, "a name that is free", "something that is there", "name another folder, or remove that one")
    if not out.name or place.is_relative_to(source.resolve()):
        raise _refused(out, "a folder outside of the model's", f"one in {source}", "name a folder beside it")
    partial = place.with_name(place.name + SUFFIX)
    if source.resolve().is_relative_to(partial):
        # What lies there would be taken for the rest of an earlier try, and removed.
        raise _refused(out, f"a model that is not in {partial.name}", str(source), "name another folder to write")
    if not out.parent.is_dir():
        raise _refused(out, "a folder to put it in", f"no folder {out.parent}", "make it first")
    free = shutil.disk_usage(out.parent).free
    if free < nbytes:
        raise _refused(
            out, f"room for {nbytes / 1e9:.2f} GB", f"{free / 1e9:.2f} GB", "free some, or name another disk"
        )


@contextlib.contextmanager
def whole_folder(out: Path) -> Iterator[Path]:
    """A folder to write into, which is `out` once the block is done, and gone if it fails.

    As long as it is written it is called `out` and SUFFIX, and locked. What a process that was killed has left there
    is removed by the next one that writes `out`; what a living process writes is refused.
    """
    partial = out.with_name(out.name + SUFFIX)
    try:
        partial.mkdir(exist_ok=True)
        handle = os.open(partial, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError as error:
        raise _refused(out, "a folder that can be written", _reason(error), "name another folder") from None
    try:
        try:
            # The kernel takes the lock back when the process ends, however it ends.
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise _refused(out, "nobody else who writes it", f"{partial.name} is being written", "wait") from None
        if not partial.exists() or not os.path.samestat(os.fstat(handle), partial.stat()):
            raise _refused(out, "nobody else who writes it", "another process that was faster", "run it again")
        try:
            _empty(partial)
            yield partial
            for place, _, _ in os.walk(partial):
                _sync(place)
            if os.path.lexists(out):
                raise _refused(out, "a name that is still free", "something that came while we wrote", "name another")
            os.rename(partial, out)
        except BaseException as error:
            shutil.rmtree(partial, ignore_errors=True)
            if isinstance(error, OSError):
                do = "free some room, or name a folder on another disk; nothing is left of this try"
                raise _refused(out, "a folder that can be written to its end", _reason(error), do) from None
            raise
        _sync(out.parent)
    finally:
        os.close(handle)


def write_file(path: Path, blocks: Iterable[bytes]) -> None:
    """A file from its blocks, on the disk when this returns."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        for block in blocks:
            file.write(block)
        file.flush()
        os.fsync(file.fileno())


def _empty(folder: Path) -> None:
    """Removes what is in a folder, which stays: it is what is locked."""
    for entry in folder.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def _sync(folder: str | Path) -> None:
    """The names in a folder, on the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _reason(error: OSError) -> str:
    return f"{error.strerror or error}" + (f": {error.filename}" if error.filename else "")


def _refused(out: Path, expected: str, got: str, do: str) -> RopewalkError:
    return RopewalkError(asked=f"write the converted model to {str(out)!r}", expected=expected, got=got, do=do)
