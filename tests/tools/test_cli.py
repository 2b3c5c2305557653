"""The command line as a person or a script uses it: in a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ropewalk.claims import Finding
from ropewalk.tools.cli import app
from ropewalk.tools.verify import verify

KEYS = {"id", "statement", "source", "method", "expected", "measured", "verdict"}


def ropewalk(*arguments: str, encoding: str = "utf-8") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ropewalk", *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "COLUMNS": "80", "PYTHONIOENCODING": encoding},
    )


def test_verify_measures_everything_and_writes_table_json_and_pictures(tmp_path):
    result = ropewalk("verify", "--json", str(tmp_path / "ledger.json"), "--plots", str(tmp_path / "pictures"))
    assert result.returncode == 0, result.stdout + result.stderr
    assert max(len(line) for line in result.stdout.splitlines() if not line.startswith("picture: ")) <= 80
    assert "Every measurement agrees with its recorded verdict." in result.stdout
    entries = json.loads((tmp_path / "ledger.json").read_text(encoding="utf-8"))
    assert len(entries) > 100
    assert all(set(entry) >= KEYS for entry in entries)
    assert not any(entry["contradicted"] for entry in entries)
    s20 = next(entry for entry in entries if entry["id"] == "decay.s20")
    assert (s20["measured"], s20["verdict"]) == ("1.908555", "does not hold")
    pictures = sorted(path.name for path in (tmp_path / "pictures").iterdir())
    assert pictures == ["decay.png", "rotation.png", "sinusoid.png", "wavelengths.png"]
    for path in (tmp_path / "pictures").iterdir():
        assert path.read_bytes().startswith(b"\x89PNG")
        assert path.stat().st_size > 10_000
        assert str(path) in result.stdout


def test_json_on_standard_output_is_all_that_is_there():
    result = ropewalk("verify", "--only", "DECAY.S0", "--only", "decay.s2", "--json", "-", encoding="ascii")
    assert result.returncode == 0
    assert [entry["id"] for entry in json.loads(result.stdout)] == ["decay.s0", "decay.s2", "decay.s20"]
    assert "S(20)" in result.stderr


def test_a_contradicted_verdict_is_exit_code_1(monkeypatch, capsys):
    from ropewalk import claims

    broken = claims.Chapter("Broken: on purpose")
    broken.claim("broken.sum", "1 + 1 is 3.", "nobody", method="add", expected="3")(lambda: Finding("2", stated=False))
    monkeypatch.setattr(claims, "CHAPTERS", (broken,))
    assert verify() == 1
    out = capsys.readouterr().out
    assert "WRONG" in out
    assert "1 contradict the ledger: broken.sum" in out


def test_the_exit_code_reaches_the_shell():
    code = (
        "from ropewalk import claims; from ropewalk.claims import Chapter, Finding\n"
        "broken = Chapter('Broken: on purpose')\n"
        "broken.claim('broken.sum', '1 + 1 is 3.', 'no', method='add', expected='3')(lambda: Finding('2', False))\n"
        "claims.CHAPTERS = (broken,)\n"
        "import sys; from ropewalk.tools.cli import main; sys.argv[1:] = ['verify']; main()"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 1


def test_links_and_pipes_are_written_through(tmp_path: Path):
    target, link = tmp_path / "target.json", tmp_path / "link.json"
    target.write_text("old")
    link.symlink_to(target)
    assert verify(json_file=str(link), only=["decay.s0"]) == 0
    assert link.is_symlink()
    assert json.loads(target.read_text(encoding="utf-8"))[0]["id"] == "decay.s0"
    assert verify(json_file="/dev/null", only=["decay.s0"]) == 0
    assert not Path("/dev/null").is_file()


def test_help_and_version():
    result = CliRunner().invoke(app, ["--help"])
    assert result.exit_code == 0
    assert "verify" in result.stdout
    assert CliRunner().invoke(app, ["--version"]).stdout.startswith("ropewalk 0.")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["verify", "--only", "no-such-thing"], "try a subject: absolute, alibi"),
        (["verify", "--json", "/proc/nowhere/ledger.json"], "a folder that is there"),
        (["verify", "--json", "/proc/ledger.json"], "a folder that can be written"),
        (["verify", "--plots", "/proc/nowhere"], "a folder that can be written"),
        (["verify", "--json", "."], "a file name"),
    ],
)
def test_bad_input_is_one_message_and_exit_code_2(arguments, message):
    result = ropewalk(*arguments)
    assert result.returncode == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    assert all(part in result.stderr for part in ("asked:", "expected:", "got:", "do this:"))


def test_a_file_that_is_there_is_replaced_whole(tmp_path: Path):
    target = tmp_path / "ledger.json"
    target.write_text("old")
    assert verify(json_file=str(target), only=["decay.s0"]) == 0
    assert [entry["id"] for entry in json.loads(target.read_text(encoding="utf-8"))] == ["decay.s0"]
    assert [path.name for path in tmp_path.iterdir()] == ["ledger.json"]


def test_without_matplotlib_the_extra_is_named(tmp_path):
    code = (
        "import sys; sys.modules['matplotlib'] = None;"
        "from ropewalk.tools.cli import main; sys.argv[1:] = ['verify', '--plots', sys.argv[1]]; main()"
    )
    result = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert "pip install 'ropewalk[plots]'" in result.stderr


def test_help_needs_neither_torch_nor_numpy():
    code = (
        "import sys\nfrom ropewalk.tools.cli import main\nsys.argv[1:] = ['--help']\n"
        "try:\n    main()\nexcept SystemExit as stop:\n    assert stop.code == 0\n"
        "assert not {'torch', 'numpy', 'matplotlib'} & set(sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, stdout=subprocess.DEVNULL).returncode == 0
