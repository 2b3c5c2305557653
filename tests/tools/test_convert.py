"""`ropewalk convert` as a person or a script uses it: in a process of its own."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

from hub.checkpoints import CONFIG, Q, llama
from hub.configs import load_spec
from ropewalk.hub.convert.folders import write_file
from ropewalk.tools.convert import convert
from tools.command import Outcome, ropewalk


def convert_command(*arguments: object, columns: int = 80) -> Outcome:
    return ropewalk("convert", *arguments, columns=columns)


def test_it_says_what_it_did_and_what_it_is_for(tmp_path):
    model, out = llama(tmp_path / "model", shards=2), tmp_path / "out"
    (model / "pytorch_model.bin").write_bytes(b"pickle")
    result = convert_command(model, out, "--to", "interleaved", "--verify", columns=100)
    assert result.returncode == 0, result.stderr
    said = " ".join(result.stdout.split())
    assert f"llama: half to interleaved, 0.0 MB in {out}" in said
    assert "4 tensors of q and k permuted, 5 others copied byte for byte." in said
    assert "Not copied: pytorch_model.bin." in said
    assert "Proven: attention scores of 2 layers differ by at most" in said
    assert "all 9 tensors have the expected bytes." in said
    assert "The code of transformers for this family still uses half" in said
    assert result.stderr == ""
    assert load_spec(out).pairing == "interleaved"


def test_json_on_standard_output_is_all_that_is_there(tmp_path):
    model, out = llama(tmp_path / "model"), tmp_path / "out"
    result = convert_command(model, out, "--to", "interleaved", "--verify", "--json", "-")
    done = json.loads(result.stdout)
    assert (done["from"], done["to"], done["model_code"], done["tensors"]) == ("half", "interleaved", "half", 9)
    assert done["permuted"] == [f"model.layers.{i}.self_attn.{role}_proj.weight" for i in (0, 1) for role in "kq"]
    assert done["proof"]["holds"] is True
    assert [layer["layer"] for layer in done["proof"]["layers"]] == [
        "model.layers.0.self_attn",
        "model.layers.1.self_attn",
    ]
    assert all(layer["difference"] <= 1e-15 for layer in done["proof"]["layers"])
    assert "Proven" in result.stderr


def test_a_new_family_is_asked_for_its_pairing(tmp_path):
    model, out = llama(tmp_path / "model", config=CONFIG | {"model_type": "mine"}), tmp_path / "out"
    result = convert_command(model, out, "--to", "half")
    assert result.returncode == 2
    assert "--from half if its code rotates two halves" in result.stderr
    result = convert_command(model, out, "--to", "half", "--from", "interleaved", "--json", tmp_path / "done.json")
    assert result.returncode == 0
    assert "note: model_type 'mine' is unknown" in result.stdout
    assert json.loads((tmp_path / "done.json").read_text())["proof"] is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing", "out", "--to", "half"], "no such folder"),
        (["model", "out", "--to", "half"], "weights that are already 'half'"),
        (["model", "out", "--to", "neox"], "'interleaved' or 'half'"),
        (["model", "model", "--to", "interleaved"], "a path that exists"),
        (["model", "model/out", "--to", "interleaved"], "outside of the model's"),
        (["model", "out", "--to", "interleaved", "--from", "interleaved"], "the pairing of its family"),
        (["model", "out", "--to", "interleaved", "--json", "no/file.json"], "in an existing folder"),
    ],
)
def test_bad_input_is_one_message_and_exit_code_2(tmp_path, monkeypatch, arguments, message):
    llama(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    result = convert_command(*arguments)
    assert result.returncode == 2
    assert message in " ".join(result.stderr.split())
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize("byte", [-3, -6000])
def test_a_proof_that_fails_is_exit_code_1_and_leaves_nothing(tmp_path, monkeypatch, capsys, byte):
    model, out = llama(tmp_path / "model"), tmp_path / "out"

    def flawed(path, blocks, mode):
        write_file(path, blocks, mode)
        if path.suffix == ".safetensors":
            data = bytearray(path.read_bytes())
            data[byte] ^= 64
            path.write_bytes(data)

    monkeypatch.setattr("ropewalk.hub.convert.conversion.write_file", flawed)
    assert convert(model, out, "interleaved", verify=True, json_file=str(tmp_path / "done.json")) == 1
    said = capsys.readouterr().out
    assert "The proof failed, and the output was deleted" in said
    assert "wrong bytes in model.layers.1.self_attn" in said
    assert not out.exists()
    done = json.loads((tmp_path / "done.json").read_text())
    assert (done["out"], done["proof"]["holds"]) == (None, False)


def test_it_needs_no_torch(tmp_path):
    llama(tmp_path / "model")
    code = (
        "import sys; sys.modules['torch'] = sys.modules['transformers'] = sys.modules['safetensors'] = None\n"
        "from ropewalk.tools.cli import main; sys.argv[1:] = ['convert', *sys.argv[1:], '--to', 'interleaved']; main()"
    )
    command = [sys.executable, "-c", code, tmp_path / "model", tmp_path / "out"]
    assert subprocess.run(command, capture_output=True, check=False).returncode == 0
    assert (tmp_path / "out" / "config.json").exists()


def test_control_characters_of_names_do_not_reach_the_terminal(tmp_path):
    model, out = llama(tmp_path / "model"), tmp_path / "out"
    for name in (b"esc\x1b[31m.bin", b"new\nline.bin", b"\xff.bin"):
        (model / os.fsdecode(name)).write_bytes(b"pickle")
    (model / os.fsdecode(b"\xfe\x1b.txt")).write_text("copied")
    result = convert_command(model, out, "--to", "interleaved", "--json", tmp_path / "done.json", columns=200)
    assert result.returncode == 0, result.stderr
    assert "Not copied: esc\\x1b[31m.bin, new\\nline.bin, \\udcff.bin." in result.stdout
    assert "\x1b" not in result.stdout + result.stderr
    left = json.loads((tmp_path / "done.json").read_text())["left_out"]
    assert left == ["esc\x1b[31m.bin", "new\nline.bin", "\udcff.bin"]
    assert (out / os.fsdecode(b"\xfe\x1b.txt")).read_text() == "copied"


@pytest.mark.parametrize("name", [b"esc\x1b[31m", b"new\nline", b"\xff"])
def test_a_link_that_leads_outside_is_one_message_whatever_its_name_is(tmp_path, name):
    model, out = llama(tmp_path / "model"), tmp_path / "out"
    (tmp_path / "key").write_text("a private word")
    (model / os.fsdecode(name)).symlink_to(tmp_path / "key")
    result = convert_command(model, out, "--to", "interleaved", columns=200)
    assert result.returncode == 2
    assert repr(os.fsdecode(name)) in result.stderr
    assert f"a link to {str(tmp_path / 'key')!r}" in result.stderr
    assert "\x1b" not in result.stderr
    assert "private word" not in result.stderr
    assert not out.exists()


def test_nan_weights_are_proven(tmp_path):
    content = np.full((32, 32), np.nan, np.float32)
    model = llama(tmp_path / "model", **{Q: content})
    result = convert_command(model, tmp_path / "out", "--to", "interleaved", "--verify")
    assert result.returncode == 0, result.stdout
    assert "Proven" in result.stdout
    assert "at fault" not in result.stdout
