"""Checkpoints converted between pairings: real models say the same, every other byte is the same, and back again."""

import json
import os
import re
import shutil
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

import ropewalk as rw
from hub.checkpoints import CONFIG, llama, weights
from hub.configs import load_spec
from hub.conversions import loaded, logits, quiet, rotating_between, rotating_by_definition, saved, tensors_of, tiny
from hub.tiny_models import config_classes
from ropewalk.hub import RopeConfigWarning, convert_checkpoint, verify_conversion
from ropewalk.hub.convert.permutation import row_order
from ropewalk.hub.convert.projections import LAYOUTS, Counts
from ropewalk.hub.families.table import FAMILIES
from slow import slow

OTHER = {"half": "interleaved", "interleaved": "half"}
# Families and what they have that others have not; the changes make it show.
NAMED = {
    "llama": {"num_key_value_heads": 1, "num_attention_heads": 2},
    "qwen2": {"num_attention_heads": 4, "num_key_value_heads": 2},  # biases
    "qwen3": {"num_attention_heads": 4, "num_key_value_heads": 2},  # norms of a head
    "olmo2": {"num_attention_heads": 2, "num_key_value_heads": 2},  # norms of all heads
    "phi3": {"num_attention_heads": 2, "num_key_value_heads": 1},  # fused, by role
    "gpt_neox": {},  # fused, by head; a quarter of the features is rotated
    "cohere": {"use_qk_norm": True},  # interleaved; norms with a weight for each feature of each head
    "glm4": {},  # interleaved; half of the features are rotated
    "smollm3": {"no_rope_layers": [1, 0, 1, 1], "num_hidden_layers": 4},
}

# Layers between those with attention, which take long where they are as wide as they are.
SMALL_RECURRENCE = {
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
PAGE = Path(__file__).parents[2] / "docs" / "pairing.md"


def specs_of(config):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RopeConfigWarning)
        found = load_spec(config)
    return [spec for spec in (found.values() if isinstance(found, dict) else [found]) if spec is not None]


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def difference(left, right):
    return float((left - right).abs().max() / right.abs().max())


@pytest.mark.slow
@pytest.mark.parametrize("family", NAMED)
def test_the_model_says_the_same_when_it_rotates_in_the_other_pairing(family, tmp_path):
    folder = saved(tiny(family, causal=True, **NAMED[family]), tmp_path / "model", shard="200KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    model = loaded(tiny(family, causal=True, **NAMED[family]), folder)
    own = specs_of(folder)[0].pairing
    result = convert_checkpoint(folder, tmp_path / "out", to=OTHER[own], verify=True)
    assert result.proof is not None
    assert result.proof.holds
    assert result.model_code == own
    assert {spec.pairing for spec in specs_of(tmp_path / "out")} == {OTHER[own]}
    converted, before = loaded(model, tmp_path / "out"), logits(model)
    with rotating_by_definition(converted, OTHER[own]):
        # Norms are computed in float32 whatever the model has, and sum in another order.
        assert difference(logits(converted), before) < 2e-6
    # As it is, transformers rotates these weights in the pairing that they do not have.
    assert difference(logits(converted), before) > 0.01


@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt_neox", "cohere"])
def test_there_and_back_every_file_is_the_same(family, tmp_path):
    folder = saved(tiny(family, **NAMED[family]), tmp_path / "model", shard="200KB")
    own = specs_of(folder)[0].pairing
    convert_checkpoint(folder, tmp_path / "there", to=OTHER[own])
    convert_checkpoint(tmp_path / "there", tmp_path / "back", to=own)
    before, there, back = (contents(tmp_path / name) for name in ("model", "there", "back"))
    assert back == before
    assert there.keys() == before.keys()
    assert there["config.json"] != before["config.json"]
    # Headers and all that is not q or k are the same bytes.
    moved = {
        name
        for name, value in tensors_of(folder).items()
        if not torch.equal(value, tensors_of(tmp_path / "there")[name])
    }
    assert moved
    assert all(any(part in name for part in ("q_", "k_", "query", "qkv")) for name in moved)


def test_latent_attention_is_told_by_its_flag_and_runs_as_it_is(tmp_path):
    folder = saved(tiny("deepseek_v3", causal=True), tmp_path / "model")
    model = loaded(tiny("deepseek_v3", causal=True), folder)
    result = convert_checkpoint(folder, tmp_path / "out", to="half", verify=True)
    assert result.model_code == "half"
    assert json.loads((tmp_path / "out" / "config.json").read_text())["rope_interleave"] is False
    converted = loaded(model, tmp_path / "out")
    torch.testing.assert_close(logits(converted), logits(model), rtol=0, atol=2e-6)
    before, after = tensors_of(folder), tensors_of(tmp_path / "out")
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert {name.split("self_attn.")[1] for name in moved} == {"q_b_proj.weight", "kv_a_proj_with_mqa.weight"}
    name = "model.layers.0.self_attn.kv_a_proj_with_mqa.weight"
    # The latent comes first and stays.
    assert torch.equal(before[name][:-64], after[name][:-64])
    assert torch.equal(before[name][-64:][::2], after[name][-64:-32])
    convert_checkpoint(tmp_path / "out", tmp_path / "back", to="interleaved", verify=True)
    back = tensors_of(tmp_path / "back")
    assert all(torch.equal(before[name], back[name]) for name in before)
    assert "ropewalk" not in json.loads((tmp_path / "back" / "config.json").read_text())
    assert specs_of(tmp_path / "back") == specs_of(folder)


# Not asked for at import: making every config takes longer than importing all tests.
NOT_IN_TRANSFORMERS = {"internlm2", "internlm3", "kimi_k2"}


@pytest.mark.slow
def test_families_that_transformers_does_not_have():
    assert set(LAYOUTS) - set(config_classes()) == NOT_IN_TRANSFORMERS


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted(set(LAYOUTS) - NOT_IN_TRANSFORMERS))
def test_every_family_that_is_not_refused(family, tmp_path):
    changes = SMALL_RECURRENCE if family.startswith(("qwen3_next", "qwen3_5")) else {}
    folder = saved(tiny(family, **changes), tmp_path / "model")
    model = loaded(tiny(family, **changes), folder)
    spec = specs_of(model.config)[0]
    to = OTHER[spec.pairing]
    result = convert_checkpoint(folder, tmp_path / "out", to=to, verify=True)
    convert_checkpoint(tmp_path / "out", tmp_path / "back", to=spec.pairing)
    assert contents(tmp_path / "back")["model.safetensors"] == contents(folder)["model.safetensors"]
    converted, before = loaded(model, tmp_path / "out"), logits(model)
    plain = difference(logits(converted), before)
    if result.model_code == to:
        assert plain < 2e-6
        return
    assert plain > 0.01
    with rotating_between(converted, spec, to):
        assert difference(logits(converted), before) < 2e-6


def test_layers_that_do_not_rotate_are_left_alone(tmp_path):
    folder = saved(tiny("smollm3", **NAMED["smollm3"]), tmp_path / "model")
    result = convert_checkpoint(folder, tmp_path / "out", to="interleaved")
    assert result.still == ("layers.1.self_attn",)
    before, after = tensors_of(folder), tensors_of(tmp_path / "out")
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert (
        moved
        == {f"layers.{i}.self_attn.{role}_proj.weight" for i in (0, 2, 3) for role in "qk"}
        == set(result.permuted)
    )


def test_the_rows_by_hand(tmp_path):
    """Two heads of six features, of which four are rotated: (0,2), (1,3) are pairs of halves; 4 and 5 are not."""
    config = {
        "model_type": "stablelm",
        "hidden_size": 12,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "num_hidden_layers": 1,
        "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.7},
    }
    rows = torch.arange(12.0)
    tensors = {
        f"model.layers.0.self_attn.{role}_proj.weight": rows[:n, None].repeat(1, 12)
        for role, n in (("q", 12), ("k", 6), ("v", 6))
    }
    folder = tmp_path / "model"
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt", "kept": "yes"})
    (folder / "config.json").write_text(json.dumps(config))
    result = convert_checkpoint(folder, tmp_path / "out", to="interleaved")
    after = load_file(tmp_path / "out" / "model.safetensors")
    assert after["model.layers.0.self_attn.q_proj.weight"][:, 3].tolist() == [0, 2, 1, 3, 4, 5, 6, 8, 7, 9, 10, 11]
    assert after["model.layers.0.self_attn.k_proj.weight"][:, 0].tolist() == [0, 2, 1, 3, 4, 5]
    assert torch.equal(
        after["model.layers.0.self_attn.v_proj.weight"], tensors["model.layers.0.self_attn.v_proj.weight"]
    )
    assert b'"kept":"yes"' in (tmp_path / "out" / "model.safetensors").read_bytes()
    # Of 6 features 0.7 are 4.2, which is cut off.
    assert result.notes == (
        "'rope_parameters.partial_rotary_factor' = 0.7 times head_dim = 6 is 4.2; transformers rounds it down to 4",
    )


@pytest.mark.parametrize(
    ("family", "name", "queries", "keys"),
    [
        # Four query heads and two key heads of ten features.
        ("internlm2", "wqkv", (0, 10, 40, 50), (20, 60)),
        ("phi3", "qkv_proj", (0, 10, 20, 30), (40, 50)),
        ("dbrx", "Wqkv", (0, 10, 20, 30), (40, 50)),
        ("gpt_neox", "query_key_value", (0, 30, 60, 90), (10, 40, 70, 100)),
        ("falcon", "query_key_value", (0, 10, 20, 30), (40,)),
        ("codegen", "qkv_proj", (0, 30, 60, 90), (20, 50, 80, 110)),
        ("qwen3_next", "q_proj", (0, 20, 40, 60), ()),
    ],
)
def test_where_heads_begin(family, name, queries, keys):
    heads = LAYOUTS[family].projections[name](Counts(4, 2, 10))
    assert (heads.queries, heads.keys) == (queries, keys)


@pytest.mark.parametrize("flags", [(True, True), (False, True), (False, False)])
def test_the_three_layouts_of_falcon(flags, tmp_path):
    changes = dict(zip(("new_decoder_architecture", "multi_query"), flags, strict=True))
    changes |= {"num_attention_heads": 4, "num_kv_heads": 2 if flags[1] else 4, "hidden_size": 256}
    folder = saved(tiny("falcon", **changes), tmp_path / "model")
    model = loaded(tiny("falcon", **changes), folder)
    convert_checkpoint(folder, tmp_path / "out", to="interleaved", verify=True)
    converted, before = loaded(model, tmp_path / "out"), logits(model)
    assert difference(logits(converted), before) > 0.01
    with rotating_by_definition(converted, "interleaved"):
        assert difference(logits(converted), before) < 2e-6


def test_layers_that_predict_further_tokens_are_converted_too(tmp_path):
    more = {name.replace("layers.1", "layers.2"): value for name, value in weights().items() if "layers.1" in name}
    apart = {name.replace("model.layers.2", "mtp.layers.0"): value for name, value in more.items()}
    config = CONFIG | {"num_nextn_predict_layers": 1}
    folder = llama(tmp_path / "model", config=config, **more, **apart)
    result = convert_checkpoint(folder, tmp_path / "out", to="interleaved", verify=True)
    assert {name.split(".self_attn")[0] for name in result.permuted} == {
        *(f"model.layers.{i}" for i in range(3)),
        "mtp.layers.0",
    }


@given(st.integers(1, 64), st.sampled_from(["half", "interleaved"]))
@settings(max_examples=50)
def test_the_order_of_rows_takes_pairs_to_pairs(pairs, to):
    order = row_order(2 * pairs, to)
    assert np.array_equal(order[row_order(2 * pairs, OTHER[to])], np.arange(2 * pairs))
    places = {"half": lambda i: (i, i + pairs), "interleaved": lambda i: (2 * i, 2 * i + 1)}
    for i in range(pairs):
        assert tuple(order[list(places[to](i))]) == places[OTHER[to]](i)


def test_a_composite_model_keeps_its_tower(tmp_path):
    folder = saved(tiny("llama", causal=True), tmp_path / "model")
    tensors = tensors_of(folder)
    inner = json.loads((folder / "config.json").read_text())
    named = {name.replace("model.", "model.language_model.", 1): value for name, value in tensors.items()}
    tower = {"model.vision_tower.layers.0.self_attn.q_proj.weight": torch.ones(4, 4)}
    save_file({**named, **tower}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": "llava", "text_config": inner, "vision_config": {}}))
    convert_checkpoint(folder, tmp_path / "out", to="interleaved", verify=True)
    after = tensors_of(tmp_path / "out")
    assert torch.equal(after["model.vision_tower.layers.0.self_attn.q_proj.weight"], torch.ones(4, 4))
    name = "model.layers.0.self_attn.q_proj.weight"
    assert not torch.equal(after[name.replace("model.", "model.language_model.")], tensors[name])
    assert load_spec(tmp_path / "out").pairing == "interleaved"


def test_what_the_output_says_of_itself(tmp_path):
    folder = saved(tiny("llama"), tmp_path / "model")
    convert_checkpoint(folder, tmp_path / "out", to="interleaved")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config.pop("ropewalk") == {"pairing": "interleaved", "converted_from": "half", "model_code": "half"}
    assert config == json.loads((folder / "config.json").read_text())
    with quiet():
        # A config object of transformers carries it, too.
        assert load_spec(AutoConfig.from_pretrained(tmp_path / "out")).pairing == "interleaved"
    assert load_spec(tmp_path / "out", pairing="interleaved").pairing == "interleaved"
    with pytest.raises(rw.RopewalkError, match="that the weights were converted to"):
        load_spec(tmp_path / "out", pairing="half")
    with pytest.raises(rw.RopewalkError, match=r"'half' or 'interleaved'|'interleaved' or 'half'"):
        load_spec({"model_type": "llama", "head_dim": 8, "ropewalk": {"pairing": "neox"}})


def test_a_family_that_is_not_known_takes_the_pairing_that_is_said(tmp_path):
    folder = saved(tiny("llama"), tmp_path / "model")
    config = json.loads((folder / "config.json").read_text()) | {"model_type": "mine"}
    (folder / "config.json").write_text(json.dumps(config))
    result = convert_checkpoint(folder, tmp_path / "out", to="half", from_pairing="interleaved", verify=True)
    assert "model_type 'mine' is unknown" in result.notes[0]
    with pytest.warns(RopeConfigWarning, match="unknown-family"):
        assert load_spec(tmp_path / "out").pairing == "half"
    convert_checkpoint(tmp_path / "out", tmp_path / "back", to="interleaved", verify=True)
    assert contents(tmp_path / "back")["model.safetensors"] == contents(folder)["model.safetensors"]


def test_files_beside_the_weights(tmp_path):
    """Weights in other formats, hidden folders and links to folders are left out, and named."""
    folder = saved(tiny("llama"), tmp_path / "model")
    (folder / "sub").mkdir()
    (folder / "empty").mkdir()
    (folder / ".git").mkdir()
    (folder / "tokenizer.json").write_text("{}")
    (folder / "sub" / "template.jinja").write_text("hello")
    (folder / "pytorch_model.bin").write_bytes(b"pickle")
    (folder / "same").symlink_to("sub")
    result = convert_checkpoint(folder, tmp_path / "out", to="interleaved")
    assert sorted(contents(tmp_path / "out")) == [
        "config.json",
        "model.safetensors",
        "sub/template.jinja",
        "tokenizer.json",
    ]
    assert not (tmp_path / "out" / "empty").exists()
    assert sorted(result.left_out) == [".git/", "pytorch_model.bin", "same/"]


@pytest.mark.parametrize("what", [slow("q row"), "other tensor", "norm", "missing"])
def test_the_proof_fails_where_the_output_is_wrong(what, tmp_path):
    folder = saved(tiny("qwen3", **NAMED["qwen3"]), tmp_path / "model")
    convert_checkpoint(folder, tmp_path / "out", to="interleaved")
    assert verify_conversion(folder, tmp_path / "out").holds
    tensors = tensors_of(tmp_path / "out")
    names = {"q row": "layers.1.self_attn.q_proj.weight", "norm": "layers.1.self_attn.k_norm.weight"}
    name = names.get(what, "layers.0.mlp.up_proj.weight")
    if what == "missing":
        del tensors[name]
    else:
        # The last bit of one number.
        flat = tensors[name].view(torch.int16).flatten()
        flat[5] ^= 1
    save_file(tensors, tmp_path / "out" / "model.safetensors")
    proof = verify_conversion(folder, tmp_path / "out")
    assert not proof.holds
    assert proof.differing == (name,)
    assert [layer.layer for layer in proof.layers if not layer.equal] == (
        ["layers.1.self_attn"] if what in names else []
    )


def test_the_proof_fails_where_nothing_was_permuted(tmp_path):
    folder = saved(tiny("llama"), tmp_path / "model")
    convert_checkpoint(folder, tmp_path / "out", to="interleaved")
    shutil.copy(folder / "model.safetensors", tmp_path / "out" / "model.safetensors")
    proof = verify_conversion(folder, tmp_path / "out")
    assert not any(layer.equal for layer in proof.layers)
    assert proof.worst.difference > 1e-3


def test_the_source_is_never_written(tmp_path):
    folder = saved(tiny("llama"), tmp_path / "model")
    before = contents(folder)
    for path in folder.iterdir():
        os.chmod(path, 0o444)
    convert_checkpoint(folder, tmp_path / "out", to="interleaved", verify=True)
    assert contents(folder) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "out"]


def test_the_page_has_the_families_by_pairing():
    page = PAGE.read_text(encoding="utf-8")
    listed: dict[str, str] = {}
    for pairing, names in re.findall(r"^\| (half|interleaved|either)\b[^|]*\| ([^|]*) \|$", page, re.MULTILINE):
        listed |= dict.fromkeys(re.findall(r"[a-z0-9_]+", names), pairing)
    either = {name for name, family in FAMILIES.items() if family.interleave_key is not None}
    assert listed == {name: "either" if name in either else FAMILIES[name].pairing for name in LAYOUTS}
