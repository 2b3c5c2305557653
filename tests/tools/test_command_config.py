"""What commands are given that is no config, and what they say of models, as a first-time user meets it."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from ropewalk.tools.cli import main

CONFIGS = Path(__file__).parent.parent / "data" / "configs"
COMMANDS = (("inspect",), ("extend", "--to", "1M"), ("plot", "decay", "--json", "-"), ("plot", "bias", "--json", "-"))
GEMMA_2: dict[str, Any] = {
    "model_type": "gemma2",
    "num_hidden_layers": 42,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 256,
    "sliding_window": 4096,
    "max_position_embeddings": 8192,
}
GPT_J = {"model_type": "gptj", "n_embd": 4096, "n_head": 16, "n_layer": 28, "n_positions": 2048, "rotary_dim": 64}


@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    """The command line in this process and a folder of its own: exit code, standard output, standard error."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")

    def called(*arguments: str) -> tuple[Any, str, str]:
        monkeypatch.setattr(sys, "argv", ["ropewalk", *arguments])
        with pytest.raises(SystemExit) as stop:
            main()
        return stop.value.code, *capsys.readouterr()

    return called


def saved(name: str, config: dict[str, Any]) -> str:
    Path(name).write_text(json.dumps(config), encoding="utf-8")
    return name


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_what_is_no_config_is_told_apart(run, command):
    for folder in ("gguf", "adapter", "weights"):
        Path(folder).mkdir()
    Path("gguf/model.gguf").write_bytes(b"GGUF\x03\x00")
    Path("blob").write_bytes(b"GGUF\x03\x00")
    Path("weights/model.safetensors").write_bytes(b"")
    saved("adapter/adapter_config.json", {"base_model_name_or_path": "org/base", "peft_type": "LORA"})
    for named, got, do in (
        ("gguf", "the GGUF file model.gguf", "the model that the GGUF was made from"),
        ("gguf/model.gguf", "a GGUF file", "the model that the GGUF was made from"),
        ("blob", "a GGUF file", "the model that the GGUF was made from"),
        ("adapter", "an adapter, which has the rotation of its base model: org/base", "of the base model"),
        ("adapter/adapter_config.json", "an adapter", "of the base model"),
        ("weights/model.safetensors", "weights", "the config.json next to the weights"),
        ("org/Model-7b", "ropewalk does not download", "hf download org/Model-7b config.json --local-dir Model-7b"),
    ):
        code, out, err = run(*command, named)
        assert (code, out) == (2, ""), named
        assert got in err
        assert do in err
        assert [line.split(":")[0] for line in err.splitlines()] == ["asked", "expected", "got", "do this"]


@pytest.mark.parametrize(
    ("config", "more", "do"),
    [
        ({"model_type": "gpt_oss"}, (), "to_json_file('whole.json', use_diff=False)"),
        ({"model_type": "llama"}, (), "to_json_file('whole.json', use_diff=False)"),
        ({"model_type": "llama", "head_dim": 8}, ("--pairing", "interleaved"), "do this:  leave --pairing out\n"),
    ],
)
def test_advice_is_for_a_command_line(run, config, more, do):
    code, _, err = run("inspect", saved("config.json", config), *more)
    assert code == 2
    assert do in err
    assert all(word not in err for word in ("load_spec", "dataclasses", "as a dict", "config object"))
    assert "as a dict" not in run("inspect", "nowhere")[2]


def test_a_bundled_config_may_be_named(run, tmp_path, monkeypatch):
    code, out, _ = run("inspect", "llama-2-7b")
    assert (code, out.splitlines()[0]) == (0, "llama-2-7b (model_type llama)")
    assert run("extend", "llama-2-7b", "--to", "16k", "--rule", "pi")[0] == 0
    # A path of the same name comes first.
    monkeypatch.chdir(tmp_path)
    (tmp_path / "llama-2-7b").mkdir()
    assert run("inspect", "llama-2-7b")[0] == 2


@pytest.mark.parametrize("command", COMMANDS[:3], ids=" ".join)  # bias reads weights
def test_a_name_that_no_bundled_config_has(run, command):
    code, out, err = run(*command, "lama-2-7b")
    assert (code, out) == (2, "")
    assert "expected: the path of a config.json or of a model folder, or the name of one of the bundled" in err
    assert err.endswith("do this:  did you mean 'llama-2-7b'?\n")
    assert "use one of " in run(*command, "nowhere")[2]
    # A path is a path, even if a bundled config has its name.
    assert "No such file" in run(*command, "llama-2-7b.json")[2]


def test_lengths_may_be_typed_short(run):
    llama = str(CONFIGS / "llama-2-7b.json")
    assert "4,096 → 131,072 positions" in run("extend", llama, "--to", "128k", "--rule", "pi")[1]
    assert "8,192 → 1,048,576 positions" in run("extend", llama, "--to", "1M", "--trained", "8K", "--rule", "pi")[1]
    for wrong in ("128kb", "1.5k", "long", ""):
        code, out, err = run("extend", llama, "--to", wrong)
        assert (code, out) == (2, "")
        assert f"{wrong!r} is not an integer number of positions; use for example 131072, 128k or 1M" in err


def test_layers_that_share_a_rotation_and_not_a_window(run):
    out = " ".join(run("extend", saved("gemma-2.json", GEMMA_2), "--to", "64k", "--rule", "yarn")[1].split())
    assert "21 of 42 layers have a window of 4,096. No rule extends that window." in out
    assert "21 attend to the whole context" in out
    assert "need 11.2 GiB in bfloat16" in out
    kinds = ["sliding_attention", *["full_attention"] * 41]
    out = run("extend", saved("gemma-2.json", GEMMA_2 | {"layer_types": kinds}), "--to", "64k", "--rule", "yarn")[1]
    assert "1 of 42 layers have a window" in out
    other = GEMMA_2 | {"model_type": "llama", "hidden_size": 4096}
    out = " ".join(run("extend", saved("other.json", other), "--to", "64k", "--rule", "yarn")[1].split())
    assert "Some layers may have a window of 4,096" in out
    assert "need at most 21 GiB in bfloat16" in out
    data = json.loads(run("extend", "gemma-2.json", "--to", "64k", "--rule", "yarn", "--json", "-")[1])
    assert (data["layers_with_window"], data["kv_cache_is_at_most"]) == (1, False)


def test_code_that_reads_no_rope_keys_is_not_extended(run):
    config = saved("gpt-j.json", GPT_J)
    code, out, err = run("extend", config, "--to", "8k", "--rule", "yarn", "--write", "out.json")
    assert (code, out, Path("out.json").exists()) == (2, "", False)
    assert "the code of gptj has a hard-coded base of 10000" in err
    for stack in ("vllm", "llama.cpp"):
        out = " ".join(run("extend", config, "--to", "8k", "--rule", "yarn", "--for", stack)[1].split())
        assert f"{stack} not supported note the code of gptj has a hard-coded base of 10000" in out
    data = json.loads(run("extend", config, "--to", "8k", "--json", "-")[1])
    assert not any(rule["config"] for rule in data["rules"])
    assert all(flags["flags"] is None for rule in data["rules"] for flags in rule["flags"].values())


def test_inspect_counts_layers_and_names_windows(run):
    out = " ".join(run("inspect", saved("gemma-2.json", GEMMA_2))[1].split())
    assert "layers 42: 21 sliding_attention, 21 full_attention window 4,096, of sliding_attention rule" in out
    gemma_3 = GEMMA_2 | {"model_type": "gemma3_text", "sliding_window_pattern": 6}
    out = " ".join(run("inspect", saved("gemma-3.json", gemma_3))[1].split())
    assert "sliding_attention: plain RoPE layers 35 of 42 layers window 4,096 rule" in out
    assert "full_attention: plain RoPE layers 7 of 42 layers rule" in out
    (data,) = json.loads(run("inspect", "gemma-3.json", "--json", "-")[1])
    assert (data["sliding_window"], data["layer_kinds"].count("full_attention")) == (4096, 7)


def test_layers_without_rotation_may_still_know_the_position(run):
    out = " ".join(run("inspect", str(CONFIGS / "llama-4-scout.json"))[1].split())
    assert "12 of 48 layers Queries and keys are not rotated. Queries are multiplied by a temperature" in out
    assert "do not depend on positions" not in out
    assert "do not depend on positions" in run("inspect", str(CONFIGS / "smollm3-3b.json"))[1]


@pytest.mark.parametrize(
    ("name", "words"), [("llama-3.1-8b", ", before scaling score sum"), ("llama-2-7b", "4,096 larger base")]
)
def test_whole_rotations_state_by_which_frequencies(run, name, words):
    config = str(CONFIGS / f"{name}.json")
    out = " ".join(run("inspect", config)[1].split())
    assert words in out
    run("plot", "frequencies", config, "--out", "picture.svg")
    scaled = name == "llama-3.1-8b"
    assert ("32 of 64 periods within 8,192, as scaled" in Path("picture.svg").read_text()) is scaled
    assert ("as scaled" in Path("picture.svg").read_text()) is scaled


@pytest.mark.parametrize(
    "arguments",
    [
        ("inspect", "llama-4-scout.json"),
        ("inspect", "llama-2-7b.json", "gemma-3-4b.json"),
        ("extend", "llama-2-7b.json", "--to", "8k"),
        ("extend", "llama-2-7b.json", "--to", "8k", "--rule", "yarn"),
    ],
    ids=" ".join,
)
def test_lines_in_a_pipe_have_no_spaces_at_their_ends(run, arguments):
    code, out, _ = run(*(str(CONFIGS / name) if name.endswith(".json") else name for name in arguments))
    assert code == 0
    assert out.endswith("\n")
    assert [line for line in out.splitlines() if line != line.rstrip()] == []
