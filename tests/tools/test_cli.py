"""The command line, run in a subprocess as a person or a script runs it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ropewalk.claims import Finding
from ropewalk.errors import require_even
from ropewalk.tools.cli import app
from ropewalk.tools.verify import verify
from slow import slow
from tools.command import ropewalk

CONFIG = str(Path(__file__).parent.parent / "data" / "configs" / "gemma-3-4b.json")
KEYS = {"id", "statement", "places", "method", "expected", "measured", "verdict", "available", "record"}


@pytest.mark.parametrize("only", [("--only", "decay"), slow(())])
def test_verify_measures_every_claim_and_writes_table_json_and_pictures(only, tmp_path):
    result = ropewalk("verify", *only, "--json", str(tmp_path / "claims.json"), "--plots", str(tmp_path / "pictures"))
    assert result.returncode == 0, result.stdout + result.stderr
    assert max(len(line) for line in result.stdout.splitlines() if not line.startswith("picture: ")) <= 80
    assert "Every measurement agrees with its recorded verdict." in result.stdout
    entries = json.loads((tmp_path / "claims.json").read_text(encoding="utf-8"))
    assert len(entries) > (3 if only else 100)
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


def test_json_on_standard_output_is_the_only_output():
    result = ropewalk("verify", "--only", "DECAY.S0", "--only", "decay.s2", "--json", "-", encoding="ascii")
    assert result.returncode == 0
    assert [entry["id"] for entry in json.loads(result.stdout)] == ["decay.s0", "decay.s2"]
    assert "S(2) = 1.4" in result.stderr


def test_a_contradicted_verdict_is_exit_code_1(monkeypatch, capsys):
    from ropewalk import claims

    broken = claims.Chapter("Broken: on purpose")
    nobody = claims.Source("nobody", "nobody")
    broken.claim("broken.sum", "1 + 1 is 3.", nobody, method="add", expected="3")(lambda: Finding("2", stated=False))
    monkeypatch.setattr(claims, "CHAPTERS", (broken,))
    assert verify() == 1
    out = capsys.readouterr().out
    assert "WRONG" in out
    assert "The measurement contradicts the recorded verdict of 1: broken.sum" in out


def test_links_and_pipes_are_written_through(tmp_path: Path):
    target, link = tmp_path / "target.json", tmp_path / "link.json"
    target.write_text("old")
    link.symlink_to(target)
    assert verify(json_file=str(link), only=["decay.s0"]) == 0
    assert link.is_symlink()
    assert json.loads(target.read_text(encoding="utf-8"))[0]["id"] == "decay.s0"
    assert verify(json_file="/dev/null", only=["decay.s0"]) == 0
    assert not Path("/dev/null").is_file()


def test_version():
    assert CliRunner().invoke(app, ["--version"]).stdout.startswith("ropewalk 0.")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["verify", "--only", "no-such-thing"], "alibi.: slopes"),
        (["verify", "--only", "decay.s20", "--only", "no-such-thing"], "decay.: polar,"),
        (["verify", "--source", "005"], "002: note 002 (zh), RoPE and linear attention"),
        (["verify", "--source", "note"], "5 sources with such a title"),
        (["verify", "--source", ""], "2104.09864: RoFormer"),
        (["verify", "--only", ""], "alibi.: slopes"),
        (["verify", "--source", "002", "--only", "decay.random"], "a claim that both options select"),
        (["verify", "--json", "/proc/nowhere/claims.json"], "in an existing folder"),
        (["verify", "--json", "/proc/claims.json"], "a folder that can be written"),
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


def test_an_existing_file_is_replaced_completely(tmp_path: Path):
    target = tmp_path / "claims.json"
    target.write_text("old")
    assert verify(json_file=str(target), only=["decay.s0"]) == 0
    assert [entry["id"] for entry in json.loads(target.read_text(encoding="utf-8"))] == ["decay.s0"]
    assert [path.name for path in tmp_path.iterdir()] == ["claims.json"]


def test_without_matplotlib_the_error_names_the_extra(tmp_path):
    code = (
        "import sys; sys.modules['matplotlib'] = None;"
        "from ropewalk.tools.cli import main; sys.argv[1:] = ['verify', '--plots', sys.argv[1]]; main()"
    )
    result = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert "pip install 'ropewalk[plots]'" in result.stderr


def no_space(**options: object) -> int:
    raise OSError(28, "No space left on device", "a.json")


def bug(**options: object) -> int:
    return [].pop()


@pytest.mark.parametrize(
    ("body", "code", "message"),
    [
        (lambda **options: 0, 0, ""),
        (lambda **options: 1, 1, ""),
        (lambda **options: require_even(3, asked="a", do="b"), 2, "an even integer"),
        (
            lambda **options: Path("/no/such/file").read_text(),
            2,
            "ropewalk: [Errno 2] No such file or directory: '/no/such/file'",
        ),
        (no_space, 2, "No space left on device: 'a.json'"),
        (bug, 70, "ropewalk: IndexError: pop from empty list\nThis is a bug in ropewalk. Put --debug before"),
    ],
    ids=["success", "a check failed", "bad input", "no file", "no space", "a bug"],
)
def test_exit_codes_and_messages_without_a_traceback(body, code, message, monkeypatch):
    monkeypatch.setattr("ropewalk.tools.verify.verify", body)
    result = ropewalk("verify")
    assert (result.returncode, result.stdout) == (code, "")
    assert message in result.stderr
    assert bool(message) == bool(result.stderr)
    assert "Traceback" not in result.stderr
    debugged = ropewalk("--debug", "verify")
    assert debugged.returncode == code
    assert ("Traceback" in debugged.stderr) == (code in (2, 70))
    assert message in debugged.stderr


def with_verify(body: str) -> subprocess.CompletedProcess[str]:
    """Runs `ropewalk verify` in a process of its own, with its implementation replaced by `body`."""
    code = (
        f"import os, signal, sys, warnings\nfrom ropewalk.tools import verify\ndef run(**options):\n    {body}\n"
        "verify.verify = run\nfrom ropewalk.tools.cli import main\nmain()"
    )
    command = [sys.executable, "-c", code, "verify"]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_exit_codes_of_a_process():
    # A process that a shell starts in the background ignores SIGINT, so the default handler is set first.
    interrupt = "signal.signal(signal.SIGINT, signal.default_int_handler); os.kill(os.getpid(), signal.SIGINT)"
    stopped, failed = with_verify(interrupt), with_verify("[].pop()")
    assert (stopped.returncode, stopped.stdout, stopped.stderr) == (130, "", "")
    assert (failed.returncode, failed.stdout) == (70, "")
    assert failed.stderr.startswith("ropewalk: IndexError: pop from empty list\n")


def test_a_warning_is_one_line_on_standard_error():
    assert with_verify("warnings.warn('beware')").stderr == "warning: beware\n"


@pytest.mark.parametrize("arguments", [["inspect", CONFIG], ["plot", "bias", "--json", "-"], ["--help"]])
def test_a_closed_pipe_is_no_error(arguments):
    command = [sys.executable, "-m", "ropewalk", *arguments]
    # The reader is gone before the process starts, so that it cannot have written everything before.
    reading, writing = os.pipe()
    os.close(reading)
    try:
        result = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, check=False)
    finally:
        os.close(writing)
    assert result.returncode == 141
    assert "Traceback" not in result.stderr
    assert "BrokenPipe" not in result.stderr


@pytest.mark.parametrize("arguments", [[], ["nothing"], ["plot", "decay", "--nothing"], ["inspect"], ["bench", "tpu"]])
def test_bad_usage_is_exit_code_2_with_nothing_on_standard_output(arguments):
    result = ropewalk(*arguments)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("Usage: ")
    assert "Traceback" not in result.stderr


def test_characters_that_a_terminal_cannot_encode_are_no_error():
    result = ropewalk("inspect", CONFIG, encoding="ascii")
    assert result.returncode == 0
    assert "?" in result.stdout


def test_tables_have_no_colours_when_piped():
    result = ropewalk("inspect", CONFIG)
    assert result.returncode == 0
    assert "\x1b" not in result.stdout + result.stderr
