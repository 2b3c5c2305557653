"""Files that are read without trust: what is no regular file is refused, and nothing is read past a limit."""

import importlib
import io
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from hub.special_files import SPECIAL
from ropewalk import RopewalkError
from ropewalk.hub import files
from waiting import outcome

WORDS: dict[str, Any] = {"asked": "read the thing", "expected": "a readable thing", "do": "name another"}
LIMIT = 1 << 20


def tried(function: Any, path: Path, **options: Any) -> Any:
    """The result of a function that must not wait, or its error."""
    return outcome(lambda: function(path, **options, **WORDS))


@pytest.mark.parametrize("kind", SPECIAL)
def test_what_is_no_file_to_read_is_refused(kind, tmp_path):
    SPECIAL[kind](tmp_path / "thing")
    for function in (files.read_text, files.read_bytes):
        error = tried(function, tmp_path / "thing", most=LIMIT)
        assert isinstance(error, RopewalkError)
        assert (error.asked, error.expected, error.do) == tuple(WORDS.values())
    if kind not in ("huge file", "link to a huge file", "link to memory", "link to page map"):
        assert isinstance(tried(files.open_regular, tmp_path / "thing"), RopewalkError)


@pytest.mark.parametrize(
    ("kind", "got"),
    [
        ("FIFO", "a FIFO (named pipe), not a regular file"),
        ("link to /dev/zero", "a character device, not a regular file"),
        ("folder", "a folder, not a regular file"),
        ("socket", "a socket, not a regular file"),
        ("huge file", "1.049e+06 MiB; the limit is 1 MiB"),
        ("link to nothing", "FileNotFoundError: "),
        ("link to itself", "OSError: "),
    ],
)
def test_the_error_states_what_it_is(kind, got, tmp_path):
    SPECIAL[kind](tmp_path / "thing")
    assert got in tried(files.read_text, tmp_path / "thing", most=LIMIT).got


@pytest.mark.parametrize("exchanged", ["FIFO", "link to /dev/zero", "folder", "socket"])
def test_what_is_exchanged_between_the_look_and_the_opening_is_refused(exchanged, tmp_path, monkeypatch):
    path, plain = tmp_path / "thing", tmp_path / "plain"
    plain.write_text("{}")
    SPECIAL[exchanged](path)
    before = set(os.listdir("/proc/self/fd"))
    # The look by name sees a regular file, as it would before the exchange.
    monkeypatch.setattr(os, "stat", lambda name, **_: os.lstat(plain))
    error = tried(files.open_regular, path)
    monkeypatch.undo()
    assert isinstance(error, RopewalkError)
    assert set(os.listdir("/proc/self/fd")) <= before, "the descriptor is still open"


def test_a_fifo_is_not_even_opened(tmp_path):
    # A writer that waits for a reader would go on, and lose what it writes.
    os.mkfifo(tmp_path / "fifo")
    reader = os.open(tmp_path / "fifo", os.O_RDONLY | os.O_NONBLOCK)
    writer = os.open(tmp_path / "fifo", os.O_WRONLY | os.O_NONBLOCK)
    os.write(writer, b"{}")
    assert isinstance(tried(files.read_text, tmp_path / "fifo", most=LIMIT), RopewalkError)
    assert os.read(reader, 2) == b"{}"
    os.close(reader)
    os.close(writer)


@pytest.mark.parametrize("size", [0, 1, LIMIT - 1, LIMIT])
def test_a_file_within_the_limit_is_read_whole(size, tmp_path):
    text = "x" * size
    (tmp_path / "file").write_text(text)
    (tmp_path / "link").symlink_to("file")
    for name in ("file", "link"):
        assert files.read_text(tmp_path / name, most=LIMIT, **WORDS) == text
        assert files.read_bytes(tmp_path / name, most=LIMIT, **WORDS) == text.encode()
        with files.open_regular(tmp_path / name, **WORDS) as file:
            assert file.read() == text.encode()


@pytest.mark.parametrize("size", [LIMIT + 1, 2 * LIMIT, 100 * LIMIT])
def test_the_limit_holds_whatever_size_a_file_claims(size, tmp_path, monkeypatch):
    (tmp_path / "file").write_bytes(b"x" * min(size, 3 * LIMIT))
    with pytest.raises(RopewalkError, match="the limit"):
        files.read_bytes(tmp_path / "file", most=LIMIT, **WORDS)
    # A file that grows after the look, as those of /proc do that claim a size of 0.
    status = os.stat(tmp_path / "file")
    claimed = os.stat_result((*status[:6], 0, *status[7:]))
    monkeypatch.setattr(os, "fstat", lambda _: claimed)
    with pytest.raises(RopewalkError, match=r"more than 1 MiB, which is the limit"):
        files.read_bytes(tmp_path / "file", most=LIMIT, **WORDS)


def test_a_regular_file_that_waits_is_refused(tmp_path, monkeypatch):
    # /proc/kmsg claims to be a regular file: without O_NONBLOCK it waits for the kernel's next message.
    class Waiting(io.BytesIO):
        def fileno(self) -> int:
            return descriptor

        def read(self, _size: int | None = -1, /) -> Any:
            return None

    (tmp_path / "file").write_text("{}")
    descriptor = os.open(tmp_path / "file", os.O_RDONLY)
    monkeypatch.setattr(files, "open_regular", lambda *_, **__: Waiting())
    with pytest.raises(RopewalkError, match="blocks until more data"):
        files.read_bytes(tmp_path / "file", most=LIMIT, **WORDS)
    os.close(descriptor)


def test_it_is_opened_without_waiting_and_not_inherited(tmp_path, monkeypatch):
    seen: list[int] = []
    opened = os.open
    monkeypatch.setattr(os, "open", lambda name, flags: seen.append(flags) or opened(name, flags))
    (tmp_path / "file").write_text("{}")
    with files.open_regular(tmp_path / "file", **WORDS) as file:
        assert not os.get_inheritable(file.fileno())
        assert stat.S_ISREG(os.fstat(file.fileno()).st_mode)
    assert seen[0] & os.O_NONBLOCK
    assert seen[0] & os.O_CLOEXEC


@pytest.mark.parametrize("data", [b"\xff\xfe{}", b'{"a": "\xed\xa0\x80"}', b"\x80"])
def test_what_is_not_utf_8_is_refused(data, tmp_path):
    (tmp_path / "file").write_bytes(data)
    with pytest.raises(RopewalkError, match="not UTF-8"):
        files.read_text(tmp_path / "file", most=LIMIT, **WORDS)


@pytest.mark.parametrize("name", ["with\0nul", "x" * 5000])
def test_names_that_no_file_can_have(name, tmp_path):
    assert not files.is_file(tmp_path / name)
    with pytest.raises(RopewalkError):
        files.open_regular(tmp_path / name, **WORDS)


def test_it_imports_where_these_flags_are_missing(tmp_path, monkeypatch):
    # As on Windows.
    for name in ("O_NONBLOCK", "O_NOCTTY", "O_CLOEXEC"):
        monkeypatch.delattr(os, name)
    (tmp_path / "file").write_text("{}")
    try:
        assert importlib.reload(files).read_text(tmp_path / "file", most=LIMIT, **WORDS) == "{}"
    finally:
        monkeypatch.undo()
        importlib.reload(files)
