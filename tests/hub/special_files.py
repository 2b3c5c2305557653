"""Things that a path can lead to and that are no file to read: what opens them naively waits, fails or fills memory."""

import os
import socket
from collections.abc import Callable
from pathlib import Path

__all__ = ["HUGE", "SPECIAL"]

# More than any limit of ours, and next to nothing on a disk: the file has a hole.
HUGE = 1 << 40


def _socket(path: Path) -> None:
    # The name of a socket may have 107 bytes, and folders of tests are deep.
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(f"/proc/self/fd/{folder}/{path.name}")
    finally:
        os.close(folder)


def _huge(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(HUGE)


def _linked(kind: Callable[[Path], None]) -> Callable[[Path], None]:
    """The same thing, behind a link."""

    def make(path: Path) -> None:
        target = path.with_name(f".{path.name}.target")
        kind(target)
        path.symlink_to(target.name)

    return make


# What makes each of them at a path.
SPECIAL: dict[str, Callable[[Path], None]] = {
    "FIFO": os.mkfifo,
    "link to a FIFO": _linked(os.mkfifo),
    "link to /dev/zero": lambda path: path.symlink_to("/dev/zero"),
    "link to /dev/random": lambda path: path.symlink_to("/dev/random"),
    "link to /dev/tty": lambda path: path.symlink_to("/dev/tty"),
    "folder": lambda path: path.mkdir(),
    "link to a folder": _linked(lambda path: path.mkdir()),
    "socket": _socket,
    "huge file": _huge,
    "link to a huge file": _linked(_huge),
    "link to nothing": lambda path: path.symlink_to("nothing"),
    "link to itself": lambda path: path.symlink_to(path.name),
    "link to memory": lambda path: path.symlink_to("/proc/self/mem"),
    "link to page map": lambda path: path.symlink_to("/proc/self/pagemap"),
}
