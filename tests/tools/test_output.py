"""Files that commands write: whole, with the permissions that they should have, and with no effect on other threads."""

import json
import os
import stat
import threading
from pathlib import Path

import pytest

from ropewalk.tools.output import write_json, write_whole


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture(params=[0o000, 0o022, 0o027, 0o077], ids=oct)
def mask(request):
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def test_a_new_file_has_the_permissions_that_new_files_have(tmp_path, mask):
    write_whole(b"data", str(tmp_path / "new"))
    (tmp_path / "usual").touch()
    assert mode_of(tmp_path / "new") == mode_of(tmp_path / "usual") == 0o666 & ~mask
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new", "usual"]


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o400, 0o664, 0o755, 0o777], ids=oct)
def test_a_file_that_is_replaced_keeps_its_permissions(tmp_path, mask, mode):
    path = tmp_path / "file"
    path.write_bytes(b"old")
    path.chmod(mode)
    write_whole(b"new", str(path))
    assert path.read_bytes() == b"new"
    assert mode_of(path) == mode
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_the_umask_is_never_set(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "umask", lambda mask: pytest.fail("os.umask is for the whole process"))
    write_whole(b"data", str(tmp_path / "file"))
    write_whole(b"more", str(tmp_path / "file"))
    write_json({}, str(tmp_path / "file.json"))


def test_threads_that_write_one_file_leave_one_of_their_texts(tmp_path):
    texts = [bytes([65 + number]) * 50_000 for number in range(8)]
    threads = [
        threading.Thread(target=lambda text=text: [write_whole(text, str(tmp_path / "file")) for _ in range(20)])
        for text in texts
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (tmp_path / "file").read_bytes() in texts
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("call", ["replace", "fchmod"])
def test_what_fails_leaves_the_file_as_it_was(tmp_path, monkeypatch, call):
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def failing(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, call, failing)
    with pytest.raises(OSError, match="No space"):
        write_whole(b"new", str(path))
    assert path.read_bytes() == b"old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_a_group_that_cannot_be_kept_loses_its_permissions(tmp_path, monkeypatch):
    path = tmp_path / "file"
    path.write_bytes(b"old")
    path.chmod(0o664)
    old, original = path.stat(), os.fstat

    def other_group(handle):
        status = list(original(handle))
        status[5] = old.st_gid + 1
        return os.stat_result(status)

    def refused(*args):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "fstat", other_group)
    monkeypatch.setattr(os, "fchown", refused)
    write_whole(b"new", str(path))
    assert mode_of(path) == 0o604


def test_a_file_is_opened_for_bytes_where_the_system_asks_for_it(tmp_path, monkeypatch):
    """Windows writes a line feed as two bytes unless it is told not to; no flag of this system has this bit."""
    binary, original, seen = 1 << 40, os.open, []

    def opened(path, flags, *rest):
        seen.append(flags & binary)
        return original(path, flags & ~binary, *rest)

    monkeypatch.setattr(os, "O_BINARY", binary, raising=False)
    monkeypatch.setattr(os, "open", opened)
    write_whole(b"a\nb\n", str(tmp_path / "file"))
    write_json({}, str(tmp_path / "file.json"))
    assert seen == [binary, binary]


@pytest.mark.parametrize("group", ["same", "other"])
def test_a_system_without_fchmod_and_fchown(tmp_path, monkeypatch, group):
    """Windows, before Python 3.13."""
    path = tmp_path / "file"
    path.write_bytes(b"old")
    path.chmod(0o640)
    original, step = os.fstat, int(group == "other")

    def status(handle):
        values = list(original(handle))
        return os.stat_result([*values[:5], values[5] + step, *values[6:]])

    monkeypatch.setattr(os, "fstat", status)
    monkeypatch.delattr(os, "fchmod")
    monkeypatch.delattr(os, "fchown")
    write_whole(b"new", str(path))
    assert (path.read_bytes(), mode_of(path)) == (b"new", 0o600 if step else 0o640)
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_links_and_pipes_are_written_through(tmp_path):
    (tmp_path / "target").write_bytes(b"old")
    (tmp_path / "target").chmod(0o600)
    (tmp_path / "link").symlink_to("target")
    write_whole(b"new", str(tmp_path / "link"))
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "target").read_bytes() == b"new"
    assert mode_of(tmp_path / "target") == 0o600
    write_whole(b"gone", "/dev/null")


def test_the_longest_name_that_a_file_can_have(tmp_path):
    name = "x" * 250 + ".json"
    write_json({"a": 1}, str(tmp_path / name))
    assert json.loads((tmp_path / name).read_text()) == {"a": 1}


def test_names_with_bytes_that_are_no_utf_8_are_written(tmp_path):
    data = {"left_out": ["é", os.fsdecode(b"\xff.bin")]}
    write_json(data, str(tmp_path / "file.json"))
    assert json.loads((tmp_path / "file.json").read_text(encoding="utf-8")) == data
    assert "é" in (tmp_path / "file.json").read_text(encoding="utf-8")
