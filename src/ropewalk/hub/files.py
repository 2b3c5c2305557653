"""Reads untrusted files: only regular files, and at most a given number of bytes.

Opening a FIFO blocks, reading a link to /dev/zero never ends, and a sparse file of a few kilobytes on disk can have
gigabytes to read. The type of a file is checked on the open descriptor, so that the file cannot be replaced in between.
"""

import contextlib
import os
import stat
from pathlib import Path
from typing import BinaryIO

from ropewalk.errors import RopewalkError

__all__ = ["is_file", "open_regular", "read_bytes", "read_text"]

# Windows has neither of these flags and does not need them.
_NO_WAIT = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0)
_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a FIFO (named pipe)",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
}
# Bytes per read, so that a short file needs little memory even if the limit is high.
_BLOCK = 1 << 20


def is_file(path: Path) -> bool:
    """Return whether a path leads to a regular file. False if the path cannot be resolved.

    Use it only to choose between names or to word an error. It is not a security check, since the file can be replaced
    before it is opened. `open_regular` is.

    >>> is_file(Path(__file__)), is_file(Path(__file__).parent), is_file(Path("no such file"))
    (True, False, False)
    """
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def open_regular(path: Path, *, asked: str, expected: str, do: str) -> BinaryIO:
    """Opens a regular file for reading bytes. Links are followed; what they lead to must be a regular file.

    The file is opened without waiting (O_NONBLOCK) and its kind is read from the descriptor (fstat).

    Args:
        path: The file.
        asked: The field `asked` of the error, if there is one.
        expected: The field `expected` of the error.
        do: The field `do` of the error.

    Returns:
        The open file. The caller must close it.

    Raises:
        RopewalkError: If the file cannot be opened, or is a folder, a FIFO, a socket or a device.

    >>> with open_regular(Path(__file__), asked="read it", expected="a file", do="use another file") as file:
    ...     file.read(3)
    b'\"\"\"'
    """

    def opened(name: str, flags: int) -> int:
        # Opening alone can have an effect: it wakes the writer of a FIFO and starts a watchdog device. So the type is
        # checked before opening, and again below on the open descriptor.
        require_regular(os.stat(name))
        return os.open(name, flags | _NO_WAIT)

    def require_regular(status: os.stat_result) -> None:
        if not stat.S_ISREG(status.st_mode):
            got = _KINDS.get(stat.S_IFMT(status.st_mode), "a special file")
            raise RopewalkError(asked=asked, expected=expected, got=f"{got}, not a regular file", do=do)

    try:
        with contextlib.ExitStack() as stack:
            file = stack.enter_context(open(path, "rb", opener=opened))
            require_regular(os.fstat(file.fileno()))
            # The file is valid and stays open.
            stack.pop_all()
            return file
    except (OSError, ValueError) as error:
        if isinstance(error, RopewalkError):
            raise
        # A path that contains a NUL raises a ValueError.
        got = f"{type(error).__name__}: {error}"
        raise RopewalkError(asked=asked, expected=expected, got=got, do=do) from None


def read_bytes(path: Path, *, most: int, asked: str, expected: str, do: str) -> bytes:
    """Return the bytes of a regular file.

    The limit applies to the bytes read and not only to the size of the file: files in /proc have a size of 0, and a
    file can grow while it is read.

    Args:
        path: The file.
        most: The largest number of bytes to accept.
        asked: The field `asked` of the error, if there is one.
        expected: The field `expected` of the error.
        do: The field `do` of the error.

    Raises:
        RopewalkError: If `open_regular` raises, or if the file has more than `most` bytes or cannot be read.

    >>> len(read_bytes(Path(__file__), most=1 << 20, asked="read it", expected="a file", do="use another file")) > 1000
    True
    """

    def failure(got: str) -> RopewalkError:
        return RopewalkError(asked=asked, expected=expected, got=got, do=do)

    with open_regular(path, asked=asked, expected=expected, do=do) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise failure(f"{_mebibytes(size)}; the limit is {_mebibytes(most)}")
        blocks, left = list[bytes](), most + 1
        try:
            while left:
                # A non-blocking descriptor returns None if there is no data yet, for example /proc/kmsg.
                block: bytes | None = file.read(min(_BLOCK, left))
                if block is None:
                    raise failure("a file that blocks until more data arrives, like some files in /proc")
                if not block:
                    return b"".join(blocks)
                blocks.append(block)
                left -= len(block)
        except OSError as error:
            raise failure(f"{type(error).__name__}: {error}") from None
    raise failure(f"more than {_mebibytes(most)}, which is the limit")


def read_text(path: Path, *, most: int, asked: str, expected: str, do: str) -> str:
    """Return the text of a regular file in UTF-8.

    Args:
        path: The file.
        most: The largest number of bytes to accept.
        asked: The field `asked` of the error, if there is one.
        expected: The field `expected` of the error.
        do: The field `do` of the error.

    Raises:
        RopewalkError: If `read_bytes` raises, or if the file is not UTF-8.

    >>> read_text(Path(__file__), most=1 << 20, asked="read it", expected="a file", do="use another file")[:3]
    '\"\"\"'
    """
    data = read_bytes(path, most=most, asked=asked, expected=expected, do=do)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        got = f"bytes that are not UTF-8: {error.reason} at byte {error.start}"
        raise RopewalkError(asked=asked, expected=expected, got=got, do=do) from None


def _mebibytes(size: int) -> str:
    return f"{size} bytes" if size < 1 << 20 else f"{size / (1 << 20):.4g} MiB"
