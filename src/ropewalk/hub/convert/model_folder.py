"""Reads the folder of an untrusted model: only regular files, and only files that belong to the model.

Links are followed inside the folder and, in the cache of a hub, inside the snapshot and the blobs of the same model
(models--NAME/snapshots/REVISION and models--NAME/blobs). A blob may be a link to a file in the store that all models of
the cache share (blobs/XX/HASH next to models--NAME). Other links are rejected: a link to a private file would make that
file a part of the output, which may be published.
"""

import contextlib
import errno
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from ropewalk.errors import RopewalkError
from ropewalk.hub.files import open_regular

__all__ = ["Entry", "ModelFolder"]

# The limit on nested folders. Models have two or three levels; a malicious folder can have as many as a path allows.
_DEEPEST = 32
_INSIDE = "files inside the model's folder, or links to such files or to blobs of the same model in a hub's cache"
# The shared store of a hub's cache contains a marker file, and files that are named by their hash.
_MARKER = ".huggingface-shared-blobs"
_HASH = re.compile("[0-9a-f]{64}")
# The limit on chained links; the same as in Linux.
_MOST_LINKS = 40
# Errors for a path in which a folder was replaced by a link or a file, or removed.
_REPLACED = (None, errno.ENOENT, errno.ENOTDIR, errno.ELOOP)


@dataclass(frozen=True)
class Entry:
    """An entry of a model's folder: its relative path, whether it is a folder, and whether it is a link."""

    name: str
    folder: bool
    link: bool


class ModelFolder:
    """The folder of a model. Files are opened by relative path, and only if they belong to the model.

    Args:
        path: The folder.

    Raises:
        RopewalkError: If it is not a folder.

    >>> ModelFolder(Path(__file__).parent).read("__init__.py", most=100)[3:14]
    b'Checkpoints'
    """

    def __init__(self, path: Path) -> None:
        self.path: Path = path
        try:
            place = Path(os.path.realpath(path, strict=True))
            # The status of these folders is stored, to detect that one of them was replaced.
            snapshot, self._blobs, self._store = _of_cache(place)
            roots = (place, snapshot, self._blobs, self._store)
            self._roots: dict[Path, os.stat_result] = {root: os.lstat(root) for root in roots if root is not None}
        except (OSError, ValueError):
            raise _no_folder(path, "no such folder") from None
        if not stat.S_ISDIR(self._roots[place].st_mode):
            raise _no_folder(path, "a path that is not a folder")

    @property
    def mode(self) -> int:
        """The permissions of the folder itself."""
        return stat.S_IMODE(next(iter(self._roots.values())).st_mode)

    def names(self) -> list[str]:
        """Return the names of the entries of the folder, sorted."""
        return [entry.name for entry in self._listed("")]

    def entries(self) -> Iterator[Entry]:
        """Yield the entries of the folder and of its subfolders, each folder before its contents.

        The contents of links to folders and of folders that begin with a dot are skipped.

        Raises:
            RopewalkError: If a link is broken or leads outside of the model, or if folders are nested too deeply.
        """
        pending = self._listed("")[::-1]
        while pending:
            entry = pending.pop()
            if entry.link:
                root, inner = self._place(entry.name)
                yield Entry(entry.name, (root / inner).is_dir(), link=True)
                continue
            yield entry
            if entry.folder and not os.path.basename(entry.name).startswith("."):
                if entry.name.count("/") + 1 >= _DEEPEST:
                    got = f"more levels in {entry.name[:40] + '...'!r}"
                    do = "remove folders that do not belong to the model"
                    raise self._error("", f"at most {_DEEPEST} levels of folders", got, do)
                pending += self._listed(entry.name)[::-1]

    def open(self, name: str) -> BinaryIO:
        """Open a regular file of the model by its relative path.

        Links are resolved first, then the file is opened, then the open file is compared with the resolved path, which
        has no links. So the file cannot be replaced between the check and its use.

        Raises:
            RopewalkError: If the file does not belong to the model, is not a regular file, or was replaced.
        """
        root, inner = self._place(name)
        advice = {
            "expected": "a regular file",
            "do": "download the model again, or remove files that do not belong to it",
        }
        with contextlib.ExitStack() as stack:
            file = stack.enter_context(open_regular(root / inner, asked=self._asked(name), **advice))
            try:
                same = os.path.samestat(os.fstat(file.fileno()), self._status(root, inner))
            except OSError as error:
                if error.errno not in _REPLACED:
                    got = f"{name!r}: {error.strerror}"
                    raise self._error(name, "folders that can be opened", got, "change their permissions") from None
                same = False
            if not same:
                got = f"{name!r}, which was replaced while it was opened"
                raise self._error(name, _INSIDE, got, "run it again while nothing changes the folder")
            stack.pop_all()
            return file

    def read(self, name: str, *, most: int) -> bytes:
        """Return the bytes of a file of the model. Raise if it has more than `most` bytes."""
        with self.open(name) as file:
            try:
                data = file.read(most + 1)
            except OSError as error:
                raise self._error(name, "a readable file", f"{error}", "download the model again") from None
        if len(data) > most:
            raise self._error(name, f"a file of at most {most >> 20} MiB", "a larger file", "download the model again")
        return data

    def _listed(self, name: str) -> list[Entry]:
        """Return the entries of a folder of the model, sorted by name."""
        try:
            with os.scandir(self.path / name) as items:
                entries = [
                    Entry(os.path.join(name, item.name), item.is_dir(follow_symlinks=False), item.is_symlink())
                    for item in items
                ]
        except OSError as error:
            got = f"{name!r}: {error.strerror or error}"
            raise self._error("", "folders that can be listed", got, "change its permissions") from None
        return sorted(entries, key=lambda entry: entry.name)

    def _place(self, name: str) -> tuple[Path, Path]:
        """Resolve a path: return one of the roots, and a path without links relative to it."""
        path = self.path / name
        try:
            place = Path(os.path.realpath(path, strict=True))
        except (OSError, ValueError) as error:
            reason = error.strerror or str(error) if isinstance(error, OSError) else str(error)
            raise self._error(name, _INSIDE, f"{self._target(name)}: {reason}", "download the model again") from None
        root = next((root for root in self._roots if place.is_relative_to(root)), None)
        if root is None or (root == self._store and not self._is_shared_blob(path, place)):
            do = "replace the link by a copy of the file, or remove the link"
            raise self._error(name, _INSIDE, self._target(name), do)
        return root, place.relative_to(root)

    def _is_shared_blob(self, path: Path, place: Path) -> bool:
        """Return whether a path leads to a file of the shared store through a blob of this model.

        The store also contains files of other models. Only the files that a blob of this model links to belong to it.
        """
        folder, name = place.parent, place.name
        if self._store != folder.parent or not _HASH.fullmatch(name) or folder.name != name[:2]:
            return False
        for _ in range(_MOST_LINKS):
            path = Path(os.path.realpath(path.parent), path.name)
            if not path.is_symlink():
                return False
            target = path.parent / os.readlink(path)
            if path.parent == self._blobs:
                return Path(os.path.normpath(target)) == place
            path = target
        return False

    def _target(self, name: str) -> str:
        """Format a name for an error, with the target if it is a link."""
        path = self.path / name
        if not path.is_symlink():
            return repr(name)
        link, end = os.readlink(path), os.path.realpath(path)
        return f"{name!r}, a link to {link!r}" + ("" if link == end else f", which is {end!r}")

    def _status(self, root: Path, inner: Path) -> os.stat_result:
        """Return the status of a file. Every folder from the root to the file is opened without following links."""
        with contextlib.ExitStack() as stack:

            def entered(part: "Path | str", parent: int | None) -> int:
                # O_PATH needs no permission to list the folder. Only Linux has it.
                access = getattr(os, "O_PATH", os.O_RDONLY)
                handle = os.open(part, access | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=parent)
                stack.callback(os.close, handle)
                return handle

            handle = entered(root, None)
            if not os.path.samestat(os.fstat(handle), self._roots[root]):
                raise OSError(f"{root} was replaced by another folder")
            for part in inner.parts[:-1]:
                handle = entered(part, handle)
            return os.stat(inner.name, dir_fd=handle, follow_symlinks=False)

    def _asked(self, name: str) -> str:
        return f"read the model in {str(self.path)!r}" + (f": {name!r}" if name else "")

    def _error(self, name: str, expected: str, got: str, do: str) -> RopewalkError:
        return RopewalkError(asked=self._asked(name), expected=expected, got=got, do=do)


def _of_cache(place: Path) -> tuple[Path | None, Path | None, Path | None]:
    """Return the snapshot that contains a folder, the blobs of its model, and the shared store of the cache.

    Each is None if it does not exist or is a link.
    """
    for snapshot in (place, *place.parents):
        model = snapshot.parent.parent
        if snapshot.parent.name == "snapshots" and model.name.startswith("models--"):
            blobs, store = model / "blobs", model.parent / "blobs"
            model_blobs = blobs if _is_folder(blobs) else None
            shared = model_blobs is not None and _is_folder(store) and _is_marked(store)
            return snapshot, model_blobs, store if shared else None
    return None, None, None


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _is_marked(store: Path) -> bool:
    """Return whether a folder contains the marker file of a store created by the hub."""
    try:
        return stat.S_ISREG(os.lstat(store / _MARKER).st_mode)
    except OSError:
        return False


def _no_folder(path: Path, got: str) -> RopewalkError:
    return RopewalkError(
        asked=f"read the model in {str(path)!r}",
        expected="a model folder",
        got=got,
        do="pass the folder that contains config.json",
    )
