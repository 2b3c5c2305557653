"""A model's folder, read without trust: its regular files, none of which is outside of the model.

Links are followed as far as the model goes: its own folder and, in the cache of a hub, the snapshot and the blobs of
the same model (models--NAME/snapshots/REVISION and models--NAME/blobs). A blob may itself be a link to a file in the
store that all models of the cache share (blobs/XX/HASH beside models--NAME). A link to a private file elsewhere would
make that file a part of the output, which may be published.
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

# Folders in folders; those of models have two or three levels, and a hostile one has as many as a path can have.
_DEEPEST = 32
_INSIDE = "files inside of the model's folder, or links to such files or to blobs of the same model in a hub's cache"
# What the shared store of a hub's cache has: a file that marks it as one, and files by their hash.
_MARKER = ".huggingface-shared-blobs"
_HASH = re.compile("[0-9a-f]{64}")
# Links to links that are followed; Linux follows as many.
_MOST_LINKS = 40
# What the system says of a path in which a folder has become a link, a file, or nothing.
_EXCHANGED = (None, errno.ENOENT, errno.ENOTDIR, errno.ELOOP)


@dataclass(frozen=True)
class Entry:
    """Something in a model's folder, by its path in it: a file, a folder, or a link to a folder."""

    name: str
    folder: bool
    link: bool


class ModelFolder:
    """A folder whose files are opened by name, and only if they are inside of the model.

    >>> ModelFolder(Path(__file__).parent).read("__init__.py", most=100)[3:14]
    b'Checkpoints'
    """

    def __init__(self, path: Path) -> None:
        self.path: Path = path
        try:
            place = Path(os.path.realpath(path, strict=True))
            # What these folders are is remembered, so that another one in the place of one of them is seen.
            snapshot, self._blobs, self._store = _of_cache(place)
            roots = (place, snapshot, self._blobs, self._store)
            self._roots: dict[Path, os.stat_result] = {root: os.lstat(root) for root in roots if root is not None}
        except (OSError, ValueError):
            raise _no_folder(path, "no such folder") from None
        if not stat.S_ISDIR(self._roots[place].st_mode):
            raise _no_folder(path, "something else than a folder")

    @property
    def mode(self) -> int:
        """The permissions of the folder itself."""
        return stat.S_IMODE(next(iter(self._roots.values())).st_mode)

    def names(self) -> list[str]:
        """What is in the folder, sorted."""
        return [entry.name for entry in self._listed("")]

    def entries(self) -> Iterator[Entry]:
        """What is in the folder and in its folders, each before what it holds, of which the caller opens what it wants.

        Links to folders and folders whose name begins with a dot are not looked into. A link that leads outside, or
        nowhere, is refused.
        """
        waiting = self._listed("")[::-1]
        while waiting:
            entry = waiting.pop()
            if entry.link:
                root, inner = self._place(entry.name)
                yield Entry(entry.name, (root / inner).is_dir(), link=True)
                continue
            yield entry
            if entry.folder and not os.path.basename(entry.name).startswith("."):
                if entry.name.count("/") + 1 >= _DEEPEST:
                    got = f"more in {entry.name[:40] + '...'!r}"
                    raise self._refused("", f"at most {_DEEPEST} levels of folders", got, "remove what is no model")
                waiting += self._listed(entry.name)[::-1]

    def open(self, name: str) -> BinaryIO:
        """Opens a regular file of the model, by its path in the folder.

        Where links lead is found first and opened next; that the open file is the one in that place is then checked
        along a path without links. So nothing can be exchanged in between.
        """
        root, inner = self._place(name)
        words = {"expected": "a regular file", "do": "download the model again, or remove what is no part of it"}
        with contextlib.ExitStack() as stack:
            file = stack.enter_context(open_regular(root / inner, asked=self._asked(name), **words))
            try:
                same = os.path.samestat(os.fstat(file.fileno()), self._status(root, inner))
            except OSError as error:
                if error.errno not in _EXCHANGED:
                    got = f"{name!r}: {error.strerror}"
                    raise self._refused(name, "folders that can be opened", got, "change their permissions") from None
                same = False
            if not same:
                got = f"{name!r}, which was exchanged while it was opened"
                raise self._refused(name, _INSIDE, got, "leave the folder alone, and run it again")
            stack.pop_all()
            return file

    def read(self, name: str, *, most: int) -> bytes:
        """The bytes of a file of the model that has at most `most` of them."""
        with self.open(name) as file:
            try:
                data = file.read(most + 1)
            except OSError as error:
                raise self._refused(name, "a readable file", f"{error}", "download the model again") from None
        if len(data) > most:
            raise self._refused(name, f"at most {most >> 20} MiB", "more", "download the model again")
        return data

    def _listed(self, name: str) -> list[Entry]:
        """What a folder of the model has, sorted by name."""
        try:
            with os.scandir(self.path / name) as found:
                entries = [
                    Entry(os.path.join(name, item.name), item.is_dir(follow_symlinks=False), item.is_symlink())
                    for item in found
                ]
        except OSError as error:
            got = f"{name!r}: {error.strerror or error}"
            raise self._refused("", "folders that can be listed", got, "change its permissions") from None
        return sorted(entries, key=lambda entry: entry.name)

    def _place(self, name: str) -> tuple[Path, Path]:
        """Where a file or folder of the model is: one of the roots, and a path without links in it."""
        path = self.path / name
        try:
            place = Path(os.path.realpath(path, strict=True))
        except (OSError, ValueError) as error:
            reason = error.strerror or str(error) if isinstance(error, OSError) else str(error)
            raise self._refused(name, _INSIDE, f"{self._led(name)}: {reason}", "download the model again") from None
        root = next((root for root in self._roots if place.is_relative_to(root)), None)
        if root is None or (root == self._store and not self._is_shared_blob(path, place)):
            do = "put a copy of the file in the place of the link, or remove the link"
            raise self._refused(name, _INSIDE, self._led(name), do)
        return root, place.relative_to(root)

    def _is_shared_blob(self, path: Path, place: Path) -> bool:
        """Whether a path leads to a file of the shared store, and does so through a blob of this model.

        The store has files of other models, too: a blob of this one is what says that such a file is a part of it.
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

    def _led(self, name: str) -> str:
        """A name, and where it leads."""
        path = self.path / name
        if not path.is_symlink():
            return repr(name)
        link, end = os.readlink(path), os.path.realpath(path)
        return f"{name!r}, a link to {link!r}" + ("" if link == end else f", which is {end!r}")

    def _status(self, root: Path, inner: Path) -> os.stat_result:
        """The status of a file, found from the root through folders that are no links."""
        with contextlib.ExitStack() as stack:

            def entered(part: "Path | str", place: int | None) -> int:
                # To pass through a folder, one needs no right to list it. Linux alone can open one without that.
                reading = getattr(os, "O_PATH", os.O_RDONLY)
                handle = os.open(part, reading | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=place)
                stack.callback(os.close, handle)
                return handle

            handle = entered(root, None)
            if not os.path.samestat(os.fstat(handle), self._roots[root]):
                raise OSError(f"{root} is another folder than it was")
            for part in inner.parts[:-1]:
                handle = entered(part, handle)
            return os.stat(inner.name, dir_fd=handle, follow_symlinks=False)

    def _asked(self, name: str) -> str:
        return f"read the model in {str(self.path)!r}" + (f": {name!r}" if name else "")

    def _refused(self, name: str, expected: str, got: str, do: str) -> RopewalkError:
        return RopewalkError(asked=self._asked(name), expected=expected, got=got, do=do)


def _of_cache(place: Path) -> tuple[Path | None, Path | None, Path | None]:
    """The snapshot that a folder is or is in, the blobs of its model, and the store that the models of a cache share.

    None for what is not there, and for what is a link.
    """
    for snapshot in (place, *place.parents):
        model = snapshot.parent.parent
        if snapshot.parent.name == "snapshots" and model.name.startswith("models--"):
            blobs, store = model / "blobs", model.parent / "blobs"
            own = blobs if _is_folder(blobs) else None
            return snapshot, own, store if own is not None and _is_folder(store) and _is_marked(store) else None
    return None, None, None


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _is_marked(store: Path) -> bool:
    """Whether a folder has the file by which the hub knows a store that it has made itself."""
    try:
        return stat.S_ISREG(os.lstat(store / _MARKER).st_mode)
    except OSError:
        return False


def _no_folder(path: Path, got: str) -> RopewalkError:
    return RopewalkError(
        asked=f"read the model in {str(path)!r}",
        expected="a model folder",
        got=got,
        do="pass the folder that has config.json",
    )
