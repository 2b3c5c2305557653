"""Files that others wrote, opened and read without trust: regular files only, and no more bytes than a stated limit.

A FIFO blocks whoever opens it, a link to /dev/zero never ends, and a sparse file of some kilobytes on disk has
gigabytes to read. The kind of a file is read from the descriptor, so that nothing can be exchanged in between.
"""

import contextlib
import os
import stat
from pathlib import Path
from typing import BinaryIO

from ropewalk.errors import RopewalkError

__all__ = ["is_file", "open_regular", "read_bytes", "read_text"]

# Windows has neither; there, Python's own flags are enough.
_NEVER_WAIT = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0)
_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a FIFO (named pipe)",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
}
# Bytes that are asked for at once, so that a short file needs little memory however high its limit is.
_BLOCK = 1 << 20


def is_file(path: Path) -> bool:
    """Whether a path leads to a regular file; False also for a path that cannot be followed.

    This chooses between names and words an error. It protects nothing: between this and opening the file, the file
    can be exchanged. `open_regular` is what protects.

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
        asked: What the error says was asked for, if the file is refused.
        expected: What the error says was expected.
        do: What the error advises.

    Returns:
        The open file. The caller closes it.

    Raises:
        RopewalkError: The file cannot be opened, or it is a folder, a FIFO, a socket or a device.

    >>> with open_regular(Path(__file__), asked="read it", expected="a file", do="name another") as file:
    ...     file.read(3)
    b'\"\"\"'
    """

    def opened(name: str, flags: int) -> int:
        # Opening alone can have an effect: a writer that waits at a FIFO goes on, a watchdog starts to count. So what
        # is already seen to be no file is not opened. What is opened is looked at again below.
        refuse_other(os.stat(name))
        return os.open(name, flags | _NEVER_WAIT)

    def refuse_other(status: os.stat_result) -> None:
        if not stat.S_ISREG(status.st_mode):
            got = _KINDS.get(stat.S_IFMT(status.st_mode), "something else")
            raise RopewalkError(asked=asked, expected=expected, got=f"{got}, not a regular file", do=do)

    try:
        with contextlib.ExitStack() as stack:
            file = stack.enter_context(open(path, "rb", opener=opened))
            refuse_other(os.fstat(file.fileno()))
            # It is what was asked for, and stays open.
            stack.pop_all()
            return file
    except (OSError, ValueError) as error:
        if isinstance(error, RopewalkError):
            raise
        # A path with a NUL is a ValueError.
        got = f"{type(error).__name__}: {error}"
        raise RopewalkError(asked=asked, expected=expected, got=got, do=do) from None


def read_bytes(path: Path, *, most: int, asked: str, expected: str, do: str) -> bytes:
    """The bytes of a regular file that has at most `most` of them.

    The limit holds for what is read, whatever size the file claims: files of /proc have a size of 0, and a file can
    grow while it is read.

    Args:
        path: The file.
        most: The limit in bytes.
        asked: What the error says was asked for, if the file is refused.
        expected: What the error says was expected.
        do: What the error advises.

    Raises:
        RopewalkError: What `open_regular` raises, and a file that is longer than `most` or cannot be read.

    >>> len(read_bytes(Path(__file__), most=1 << 20, asked="read it", expected="a file", do="name another")) > 1000
    True
    """

    def refused(got: str) -> RopewalkError:
        return RopewalkError(asked=asked, expected=expected, got=got, do=do)

    with open_regular(path, asked=asked, expected=expected, do=do) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise refused(f"{_mebibytes(size)}; the limit is {_mebibytes(most)}")
        blocks, left = list[bytes](), most + 1
        try:
            while left:
                # None is what a descriptor that never waits returns where there is nothing yet: /proc/kmsg.
                block: bytes | None = file.read(min(_BLOCK, left))
                if block is None:
                    raise refused("a file that waits for more, as some of /proc do")
                if not block:
                    return b"".join(blocks)
                blocks.append(block)
                left -= len(block)
        except OSError as error:
            raise refused(f"{type(error).__name__}: {error}") from None
    raise refused(f"more than {_mebibytes(most)}, which is the limit")


def read_text(path: Path, *, most: int, asked: str, expected: str, do: str) -> str:
    """The text of a regular file in UTF-8 that has at most `most` bytes.

    Args:
        path: The file.
        most: The limit in bytes.
        asked: What the error says was asked for, if the file is refused.
        expected: What the error says was expected.
        do: What the error advises.

    Raises:
        RopewalkError: What `read_bytes` raises, and a file that is not UTF-8.

    >>> read_text(Path(__file__), most=1 << 20, asked="read it", expected="a file", do="name another")[:3]
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
