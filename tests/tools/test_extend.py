"""`ropewalk extend`: its output, the config that it writes, and that transformers loads exactly this config."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding
from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXRotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.olmo3.modeling_olmo3 import Olmo3RotaryEmbedding
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding
from transformers.models.qwen2.modeling_qwen2 import Qwen2RotaryEmbedding

from hub.configs import load_spec
from ropewalk import RopewalkError, RotaryEmbedding
from ropewalk.hub import read_model
from ropewalk.hub.extend import rules
from ropewalk.spec import Plain, Yarn
from ropewalk.tools.cli import main
from ropewalk.tools.extend.command import extend
from tools.command import ropewalk

CONFIGS = Path(__file__).parent.parent / "data" / "configs"
LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "vocab_size": 32000,
}
NEW: dict[str, Any] = {
    "model_type": "qwen2",
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    "hidden_size": 512,
    "num_attention_heads": 8,
    "num_hidden_layers": 2,
    "max_position_embeddings": 32768,
}
GEMMA: dict[str, Any] = {
    "model_type": "gemma3_text",
    "head_dim": 64,
    "num_hidden_layers": 6,
    "max_position_embeddings": 32768,
    "rope_theta": 1000000.0,
    "rope_local_base_freq": 10000.0,
    "sliding_window": 512,
}
OLMO: dict[str, Any] = {
    "model_type": "olmo3",
    "hidden_size": 512,
    "num_attention_heads": 8,
    "num_hidden_layers": 4,
    "max_position_embeddings": 8192,
    "rope_theta": 500000.0,
    "sliding_window": 1024,
}
NEOX: dict[str, Any] = {
    "model_type": "gpt_neox",
    "hidden_size": 512,
    "num_attention_heads": 4,
    "max_position_embeddings": 2048,
    "rotary_pct": 0.25,
    "rotary_emb_base": 10000,
}
PHI: dict[str, Any] = {
    "model_type": "phi3",
    "hidden_size": 512,
    "num_attention_heads": 8,
    "max_position_embeddings": 4096,
    "original_max_position_embeddings": 4096,
    "rope_theta": 10000.0,
    "pad_token_id": 0,
}
# A config, its rotation in transformers, the type of layer that is extended, and the rules that can be written.
BASES = ["ntk", "base-bound", "base-law"]
ALL = ["pi", "dynamic", "yarn", "llama3", *BASES]
FAMILIES = [
    (LLAMA, LlamaRotaryEmbedding, "", ALL),
    (NEW, Qwen2RotaryEmbedding, "", ALL),
    (GEMMA, Gemma3RotaryEmbedding, "full_attention", ["pi", "yarn", "llama3", "ntk", "base-law"]),
    (OLMO, Olmo3RotaryEmbedding, "full_attention", ["pi", "yarn", "llama3", "ntk"]),
    (NEOX, GPTNeoXRotaryEmbedding, "", ["pi", "yarn", "ntk"]),
    (PHI, Phi3RotaryEmbedding, "", ["ntk"]),
]


@pytest.fixture(autouse=True)
def quiet():
    transformers.logging.set_verbosity_error()


@pytest.fixture
def quick_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search for the base of base-bound takes a second. A base of about the same size has the same verdict."""
    monkeypatch.setattr(rules, "lowest_admissible_base", lambda tried, *_: tried[min(900, len(tried) - 1)])


@pytest.fixture
def llama(tmp_path: Path) -> str:
    return saved(tmp_path, LLAMA)


def saved(folder: Path, config: dict[str, Any]) -> str:
    path = folder / "config.json"
    path.write_text(json.dumps(config), encoding="utf-8")
    return str(path)


@pytest.fixture
def run(monkeypatch, capsys):
    """The command line in this process: exit code, standard output, standard error."""

    def called(*arguments: str) -> tuple[Any, str, str]:
        monkeypatch.setattr(sys, "argv", ["ropewalk", *arguments])
        with pytest.raises(SystemExit) as stop:
            main()
        return stop.value.code, *capsys.readouterr()

    return called


def printed_table(out: str) -> list[float]:
    """The column inv_freq of the table of pairs."""
    rows = re.findall(
        r"^ *(\d+) +(\d\S*) +\S+ +\S+ +\S+ +(?:unchanged|between|interpolated|faster) *$", out, re.MULTILINE
    )
    assert [int(pair) for pair, _ in rows] == list(range(len(rows)))
    return [float(value) for _, value in rows]


@pytest.mark.parametrize(
    ("config", "rotation", "layer", "rule"),
    [(*family[:3], rule) for family in FAMILIES for rule in family[3]],
    ids=[f"{family[0]['model_type']}-{rule}" for family in FAMILIES for rule in family[3]],
)
def test_transformers_loads_what_is_written_and_has_the_table_that_was_printed(
    config, rotation, layer, rule, tmp_path, capsys
):
    length, folder = 4 * config["max_position_embeddings"], tmp_path / "extended"
    folder.mkdir()
    out = folder / "config.json"
    assert extend(saved(tmp_path, config), length, rule=rule, write=str(out)) == 0
    printed = printed_table(capsys.readouterr().out)
    loaded = AutoConfig.from_pretrained(folder)
    spec = dict(read_model(str(out)).layers)[layer]
    assert spec is not None
    if rule == "dynamic":
        # transformers computes it from the sequence length.
        theirs = ROPE_INIT_FUNCTIONS["dynamic"](loaded, seq_len=length)[0]
    else:
        theirs = getattr(rotation(loaded), f"{layer}_inv_freq" if layer else "inv_freq")
        # The module of the written config has the same bits as transformers ...
        assert torch.equal(RotaryEmbedding(spec).inv_freq, theirs)
    # ... and the printed frequencies agree within the rounding of float32.
    assert len(printed) == theirs.numel()
    np.testing.assert_allclose(np.float32(printed), theirs.numpy(), rtol=8 * 2.0**-24, atol=0)
    assert loaded.max_position_embeddings == (length if rule != "dynamic" else config["max_position_embeddings"])


def test_local_layers_stay_as_they_were(tmp_path, capsys):
    config, out = saved(tmp_path, GEMMA), tmp_path / "out"
    out.mkdir()
    extend(config, 131_072, rule="ntk", write=str(out / "config.json"))
    before, after = (Gemma3RotaryEmbedding(AutoConfig.from_pretrained(folder)) for folder in (tmp_path, out))
    assert torch.equal(before.sliding_attention_inv_freq, after.sliding_attention_inv_freq)
    assert not torch.equal(before.full_attention_inv_freq, after.full_attention_inv_freq)
    assert "Not changed: layers of type sliding_attention" in capsys.readouterr().out


def test_the_verdict_comes_first_and_fits_80_columns(llama):
    result = ropewalk("extend", llama, "--to", "16384")
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert max(len(line) for line in lines if not line.startswith('  use  "max_position')) <= 80
    assert len(lines) <= 24
    assert lines[2] == "without fine-tuning: ntk"
    assert lines[3].startswith("  why  without tuning, better than no rule and pi")
    starts = [line.split("  ")[1] for line in lines if line.startswith(("  why  ", "  use  "))]
    assert starts == ["why", "use"] * 2
    keys = [json.loads(f"{{{line.removeprefix('  use  ')}}}") for line in lines if line.startswith("  use")]
    as_it_is, tuned = (load_spec(LLAMA | each).frequencies for each in keys)
    assert as_it_is == Plain(keys[0]["rope_theta"])
    assert as_it_is.base == pytest.approx(40_889.94, abs=0.01)
    assert tuned == Yarn(10_000, 4, 4096)
    assert "with fine-tuning: yarn" in lines
    assert lines[-2].startswith("Every rule, with figures and sources: --all.")
    assert "pairs" not in result.stdout.split("with fine-tuning")[0]


@pytest.mark.usefixtures("quick_search")
def test_the_verdict_for_an_engine_has_its_flags(llama):
    out = ropewalk("extend", llama, "--to", "16384", "--for", "llama.cpp").stdout
    assert "  use  --rope-scaling none --rope-freq-base 40889.9424 -c 16384\n" in out
    assert "  use  --rope-scaling yarn --rope-scale 4 --yarn-orig-ctx 4096 -c 16384\n" in out
    assert "max_position" not in out
    unsupported = ropewalk("extend", CONFIGS / "llama-3.1-8b.json", "--to", "262144", "--for", "llama.cpp").stdout
    assert max(map(len, unsupported.splitlines())) <= 80
    assert "use  llama.cpp does not support it" in unsupported


@pytest.mark.usefixtures("quick_search")
def test_a_composite_config_names_the_place_of_the_keys():
    out = ropewalk("extend", CONFIGS / "gemma-3-4b.json", "--to", "262144", "--trained", "32768").stdout
    assert out.count('  use  in text_config: "max_position_embeddings": 262144') == 2


@pytest.mark.usefixtures("quick_search")
@pytest.mark.parametrize("name", ["phi-3-mini-128k", "gpt-j-6b", "mistral-7b-v0.1"])
def test_a_verdict_without_a_rule_says_what_to_do(name):
    reach = read_model(CONFIGS / f"{name}.json").lengths.configured
    result = ropewalk("extend", CONFIGS / f"{name}.json", "--to", str(2 * (reach or 0)))
    assert result.returncode == 0
    assert max(len(line) for line in result.stdout.splitlines() if "max_position" not in line) <= 80
    assert re.search("^with(out| and without) fine-tuning: no rule", result.stdout, re.MULTILINE)
    assert f"stay within {reach:,} positions" in result.stdout or "no rule is needed" in result.stdout


def test_the_limits_of_the_critical_base_are_explained_within_80_columns(llama):
    result = ropewalk("extend", llama, "--to", "16384", "--rule", "base-law")
    assert result.returncode == 0, result.stderr
    assert max(len(line) for line in result.stdout.splitlines() if "max_position" not in line) <= 80
    text = " ".join(result.stdout.split())
    assert re.search(r"base-law( [\d.]+)+ 19420 ", text)
    assert "the limit of a model tuned with it at 16384 is 16384" in text
    assert "tuned at 4096, the limit is 19420: d_extra is rounded up to a whole pair" in text


def test_all_rules_are_printed_side_by_side_within_80_columns(llama):
    result = ropewalk("extend", llama, "--to", "131072", "--all")
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    # Keys to paste are one line each, of any length.
    assert max(len(line) for line in lines if '"max_position' not in line) <= 80
    assert next(line.split() for line in lines if "unchanged" in line)[:1] == ["rule"]
    for rule in ("pi", "ntk", "dynamic", "yarn", "yarn-paper", "llama3", "base-bound", "base-law"):
        assert any(line.startswith(f"{rule} ") for line in lines), rule
        assert any(line.startswith(f"{rule}:") for line in lines), rule
    text = " ".join(result.stdout.split())
    for phrase in (
        "4,096 → 131,072 positions, 32 ×",
        "completes 0.07528 rotations in it",
        "pairs slowed those that rotate slower",
        "trained angles to the length up to which",
        "without fine-tuning: ntk (unproven)",
        "perplexity 16.10, 112.13 [Chen et al., 2306.15595, table 3]",
        "perplexity 2.37; 99.4 % found [Peng et al., 2309.00071, section 4.3]",
        "longrope its divisors come from a search",
        "no figure above was measured on this model",
        "need 64 GiB in bfloat16",
        "transformers 5 with ropewalk, without rope_theta",
        "transformers loads this one after hub.register_rope_types()",
    ):
        assert phrase in text, phrase
    # Su's scan has 4.9e6 for 131072 and heads of 128 (kexue.fm 10122).
    assert "base-bound: base 4869745.71" in text
    assert "…" not in result.stdout
    assert "\x1b" not in result.stdout


def test_a_rule_has_the_name_of_configs_as_well(llama):
    named, alias = (ropewalk("extend", llama, "--to", "16384", "--rule", rule) for rule in ("pi", "linear"))
    assert named == alias
    assert (named.returncode, named.stderr) == (0, "")


def test_keys_to_paste_are_json_that_loads(llama):
    out = ropewalk("extend", llama, "--to", "16384", "--rule", "yarn", columns=140).stdout
    pasted = [json.loads(f"{{{line}}}") for line in out.splitlines() if line.startswith('"max_position')]
    assert len(pasted) == 2
    kept = {key: value for key, value in LLAMA.items() if not key.startswith("rope")}
    assert load_spec(kept | pasted[0]) == load_spec(kept | pasted[1])
    assert pasted[1]["rope_scaling"]["factor"] == 4.0


def test_flags_are_one_line_to_paste(llama):
    vllm = ropewalk("extend", llama, "--to", "16384", "--rule", "yarn", "--for", "vllm").stdout
    (line,) = [line for line in vllm.splitlines() if line.startswith("--hf-overrides")]
    assert line.endswith("--max-model-len 16384")
    cpp = ropewalk("extend", llama, "--to", "16384", "--for", "llama.cpp", "--all").stdout
    assert "--rope-scaling yarn --rope-scale 4 --yarn-orig-ctx 4096 -c 16384\n" in cpp
    assert "not supported" in cpp
    assert "rope_parameters" not in cpp


def test_json_contains_everything_and_standard_output_only_json(llama):
    result = ropewalk("extend", llama, "--to", "16384", "--all", "--json", "-")
    data = json.loads(result.stdout)
    assert (data["trained_length"], data["factor"], data["base"]) == (4096, 4.0, 10_000.0)
    rules = {rule["rule"]: rule for rule in data["rules"]}
    assert rules["pi"]["effect"]["counts"]["interpolated"] == 64
    assert len(rules["yarn"]["effect"]["inv_freq"]) == 64
    assert rules["yarn"]["config"]["transformers 5"]["set"]["rope_parameters"]["factor"] == 4.0
    assert rules["yarn"]["flags"]["llama.cpp"]["flags"].startswith("--rope-scaling yarn")
    assert not rules["longrope"]["applies"]
    assert (data["verdict"]["as_it_is"]["rule"], data["verdict"]["tuned"]["rule"]) == ("ntk", "yarn")
    assert "pi: divides all positions by 4" in result.stderr


def test_the_recommended_config_is_written_without_a_rule(llama, tmp_path, run):
    code, out, _ = run("extend", llama, "--to", "16384", "--write", str(tmp_path / "long.json"))
    assert (code, "long.json (ntk, without fine-tuning)" in " ".join(out.split())) == (0, True)
    assert json.loads((tmp_path / "long.json").read_text())["rope_theta"] == pytest.approx(40_889.94, abs=0.01)
    target = tmp_path / "none.json"
    code, _, err = run("extend", str(CONFIGS / "phi-3-mini-128k.json"), "--to", "262144", "--write", str(target))
    assert (code, target.exists()) == (2, False)
    assert "or add --rule base-" in err


def test_a_scaled_model_shows_its_starting_point(capsys):
    assert extend(str(CONFIGS / "llama-3.1-8b.json"), 262_144, rule="llama3") == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "already scaled by Llama3 to 131,072 positions" in out
    assert "131,072 → 262,144 positions, 2 × (32 × the original length)" in out


def test_a_window_of_all_layers_is_reported(tmp_path, capsys):
    config = saved(tmp_path, LLAMA | {"model_type": "mistral", "sliding_window": 1024})
    extend(config, 16_384, rule="pi")
    assert "Every layer has a window of 1,024" in capsys.readouterr().out
    config = saved(tmp_path, LLAMA | {"model_type": "qwen2", "sliding_window": 1024, "use_sliding_window": False})
    extend(config, 16_384, rule="pi")
    assert "has a window" not in capsys.readouterr().out


def test_the_trained_length_can_be_specified(capsys):
    vicuna = str(CONFIGS / "vicuna-7b-v1.5-16k.json")
    assert extend(vicuna, 32_768, rule="pi", trained=4096) == 0
    assert "Original length 4,096 (from --trained)" in capsys.readouterr().out
    with pytest.raises(
        RopewalkError, match="more than the 16384 positions that the model supports according to its config"
    ):
        extend(vicuna, 16_384, rule="pi", trained=4096)


def test_a_trained_length_that_contradicts_the_config_is_reported(llama, capsys):
    assert extend(llama, 131_072, rule="pi", trained=65_536) == 0
    assert "Trained length 65,536 (from --trained; 4,096 in the config)" in capsys.readouterr().out
    with pytest.raises(
        RopewalkError, match="more than the 65536 positions that the model supports according to the specified"
    ):
        extend(llama, 32_768, trained=65_536)


@pytest.mark.parametrize("more", [(), ("--json", "-"), ("--write", "out.json")])
def test_a_rule_that_does_not_apply_gives_the_reason(llama, run, more, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, err = run("extend", llama, "--to", "16384", "--rule", "longrope", *more)
    assert (code, out) == (2, "")
    assert "longrope: its divisors come from a search" in err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json"]


def test_what_cannot_be_loaded_is_not_written(llama, tmp_path):
    config = tmp_path / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"model_type": "phi3"}))
    with pytest.raises(RopewalkError, match="a rule that transformers loads"):
        extend(llama, 16_384, rule="pi", write=str(tmp_path / "out.json"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json"]


def test_an_existing_file_is_kept_without_force(llama, tmp_path, capsys):
    out = tmp_path / "out.json"
    out.write_text("mine")
    with pytest.raises(RopewalkError, match="add --force"):
        extend(llama, 16_384, rule="pi", write=str(out))
    assert out.read_text() == "mine"
    assert extend(llama, 16_384, rule="pi", write=str(out), force=True) == 0
    assert json.loads(out.read_text())["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}
    assert f"config: {out}" in capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "out.json"]


def test_a_full_disk_leaves_no_file(llama, tmp_path, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space"):
        extend(llama, 16_384, rule="pi", write=str(tmp_path / "out.json"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json"]


def test_the_config_on_standard_output_is_the_only_output(llama):
    result = ropewalk("extend", llama, "--to", "16384", "--rule", "yarn", "--write", "-")
    assert json.loads(result.stdout)["rope_scaling"]["rope_type"] == "yarn"
    assert "yarn: keeps pairs" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--to", "16384", "--rule", "yarm"], "did you mean 'yarn'?"),
        (["--to", "16384", "--rule", "pi", "--all"], "leave out --rule or --all"),
        (["--to", "16384", "--rule", "x"], "use one of 'pi', 'ntk', 'dynamic', 'yarn'"),
        (["--to", "16384", "--for", "sglang"], "'vllm' or 'llama.cpp'"),
        (["--to", "4096"], "more than the 4096"),
        (["--to", "0"], "at least 2"),
        (["--to", "99999999999"], "at most 16777216"),
        (["--to", "16384", "--trained", "1"], "at least 2"),
        (["--to", "16384", "--force"], "add --write"),
        (["--to", "16384", "--rule", "pi", "--write", "/proc/nowhere/out.json"], "in an existing folder"),
        (["--to", "16384", "--rule", "pi", "--write", "/proc/out.json"], "a folder that can be written"),
        (["--to", "16384", "--json", "/proc/nowhere/out.json"], "in an existing folder"),
        (["--to", "16384", "--rule", "pi", "--write", "-", "--json", "-"], "two different outputs"),
        (["--to", "16384", "--pairing", "interleaved"], "leave --pairing out"),
    ],
)
def test_bad_input_is_one_message_and_exit_code_2(llama, arguments, message, run):
    code, out, err = run("extend", llama, *arguments)
    assert code == 2
    assert message in err
    assert not out
    assert "Traceback" not in err
    assert all(part in err for part in ("asked:", "expected:", "got:", "do this:"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("[]", "a JSON object"),
        ('{"model_type": "no-such-model", "head_dim": 8}', "then add --pairing half"),
        ('{"model_type": "bert"}', "bert, which has learned position embeddings and no RoPE"),
        ('{"model_type": "llama", "head_dim": 8}', "--trained LENGTH"),
    ],
)
def test_configs_that_cannot_be_extended(tmp_path, text, message, run):
    (tmp_path / "config.json").write_text(text)
    code, out, err = run("extend", str(tmp_path), "--to", "8192")
    assert (code, out) == (2, "")
    assert message in err
    assert "Traceback" not in err
    assert run("extend", str(tmp_path / "nowhere"), "--to", "8192")[0] == 2


def test_neither_torch_nor_matplotlib_is_loaded(llama):
    code = (
        "import sys\nfrom ropewalk.tools.cli import main\n"
        f"sys.argv[1:] = ['extend', {llama!r}, '--to', '16384', '--rule', 'yarn', '--for', 'vllm']\n"
        "try:\n    main()\nexcept SystemExit as stop:\n    assert not stop.code\n"
        "assert not {'torch', 'matplotlib', 'transformers'} & set(sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
