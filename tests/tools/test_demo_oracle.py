"""The oracle of `ropewalk demo` is transformers' rotation, and the comparison with it finds every wrong module."""

import ast
import dataclasses
import importlib
import json
import sys
from pathlib import Path

import pytest
import torch

import ropewalk as rw
from ropewalk.hub.bundled import bundled_config, bundled_names
from ropewalk.hub.inspection import inspect_model
from ropewalk.tools.demo import oracle, sheet
from ropewalk.tools.demo.agreement import LIMIT, compare, rotation_error
from ropewalk.tools.demo.oracle import NotCoveredError, Oracle, oracle_for, read_keys

CONFIGS = Path(__file__).parent.parent / "data" / "configs"
POSITIONS = (1_000, 10_000, 100_000, 1_000_000)
# A model of few features.
SMALL = {"model_type": "llama", "head_dim": 8, "num_hidden_layers": 2, "max_position_embeddings": 64}


def demonstrated(path: Path) -> tuple[rw.RopeSpec, Oracle]:
    """The spec that the demo shows for a config, and the rotation that its keys describe."""
    layer, spec = sheet.main_layer(inspect_model(path))
    return spec, oracle_for(read_keys(str(path)), layer.name)


def bundled(name: str) -> tuple[rw.RopeSpec, Oracle]:
    path = bundled_config(name)
    assert path is not None
    return demonstrated(path)


def altered(spec: rw.RopeSpec, **frequencies: object) -> rw.RopeSpec:
    """The spec with other parameters of its rule."""
    return dataclasses.replace(spec, frequencies=dataclasses.replace(spec.frequencies, **frequencies))


@pytest.mark.parametrize("name", bundled_names())
def test_every_bundled_config_agrees_as_loaded_and_if_exact(name):
    rows = compare(*bundled(name), POSITIONS)
    assert [row.position for row in rows] == list(POSITIONS)
    for row in rows:
        assert row.to_formula is not None
        assert row.to_formula <= LIMIT
        assert row.exact <= LIMIT
        assert row.agrees
        assert row.same_tables
    # float32 angles have an error that grows with the position: that of the frequency, times the position.
    first, last = rows[0].formula, rows[-1].formula
    assert first is not None
    assert last is not None
    assert last > 100 * LIMIT
    assert last > 100 * first


# Wrong specs for a config: each differs in one respect from what its keys describe.
MUTANTS = {
    "another rule": ("llama-3.1-8b", lambda spec: dataclasses.replace(spec, frequencies=rw.Plain(500_000.0))),
    "another base": ("llama-3.1-8b", lambda spec: altered(spec, base=500_001.0)),
    "another factor": ("gemma-3-4b", lambda spec: altered(spec, factor=8.01)),
    "the base of other layers": ("gemma-3-4b", lambda spec: altered(spec, base=10_000.0)),
    "another length": ("qwen2.5-7b-instruct-yarn", lambda spec: altered(spec, trained_length=16_384)),
    "the ramp of the paper": ("qwen2.5-7b-instruct-yarn", lambda spec: altered(spec, ramp="ratio")),
    "a ramp between integers": ("gpt-oss-20b", lambda spec: altered(spec, truncate=True)),
    "another pairing": ("qwen3-8b", lambda spec: dataclasses.replace(spec, pairing="interleaved")),
    "another pairing of a part": ("gpt-j-6b", lambda spec: dataclasses.replace(spec, pairing="half")),
    "all features": ("gpt-neox-20b", lambda spec: dataclasses.replace(spec, rotary_dim=96)),
    "fewer features": ("llama-2-7b", lambda spec: dataclasses.replace(spec, rotary_dim=64)),
    "the leading features": ("deepseek-v3", lambda spec: dataclasses.replace(spec, rotary_slice="leading")),
    "another head": ("mistral-7b-v0.3", lambda spec: dataclasses.replace(spec, head_dim=64, rotary_dim=64)),
    "the rule's default amplitude": ("deepseek-v3", lambda spec: altered(spec, mscale=None, mscale_all_dim=None)),
    "no amplitude": ("qwen2.5-7b-instruct-yarn", lambda spec: altered(spec, attention_factor=1.0)),
    "long factors for short ones": (
        "phi-3-mini-128k",
        lambda spec: altered(spec, long_factor=spec.frequencies.short_factor),
    ),
    "clockwise": ("llama-2-7b", lambda spec: dataclasses.replace(spec, sign=-1)),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_wrong_spec_does_not_agree(mutant):
    name, change = MUTANTS[mutant]
    spec, truth = bundled(name)
    wrong = change(spec)
    assert wrong != spec
    rows = compare(wrong, truth, [10_000, 1_000_000])
    assert not any(row.agrees for row in rows)


def test_wrong_code_of_a_rule_does_not_agree(monkeypatch):
    spec, truth = bundled("llama-3.1-8b")
    monkeypatch.setattr(type(spec.frequencies), "evaluate", rw.Plain(10_000.0).evaluate)
    assert not any(row.agrees for row in compare(spec, truth, POSITIONS))


def test_the_error_of_a_pair_is_relative_to_its_norm_and_other_features_are_equal():
    truth = oracle_for({"model_type": "llama", "head_dim": 8})
    cos, sin = truth.tables(torch.arange(3), 3, torch.float64)
    x = torch.randn(1, 2, 3, 8, dtype=torch.float64) * 1e-5
    right = truth.rotate(x, cos, sin)
    assert rotation_error(right, right, truth) == 0
    # An angle that is wrong by 1e-3 is an error of 1e-3, for every size of a pair.
    wrong = truth.rotate(right, torch.full_like(cos, 1e-3).cos(), torch.full_like(sin, 1e-3).sin())
    assert rotation_error(wrong, right, truth) == pytest.approx(1e-3, rel=1e-3)
    partial = oracle_for({"model_type": "llama", "head_dim": 8, "partial_rotary_factor": 0.5})
    copied, ones = torch.ones(1, 8), torch.ones(1, 8).double()
    assert rotation_error(copied, ones, partial) == 0
    copied[0, 7] += 1e-6
    assert rotation_error(copied, ones, partial) == float("inf")
    assert rotation_error(torch.full((1, 8), torch.nan), ones, partial) == float("inf")


def test_the_oracle_shares_no_code_with_what_is_compared():
    tree = ast.parse(Path(oracle.__file__).read_text(encoding="utf-8"))
    imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    imported |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    assert {str(name).split(".")[0] for name in imported} <= {*sys.stdlib_module_names, "torch"}


# Configs of the tests that the oracle does not cover, and why.
NOT_COVERED = {
    "falcon-7b": "falcon",
    "internlm2-chat-7b": "internlm2",
    "llama-4-scout": "llama4_text",
    "mistral-7b-v0.3-params": "no model_type",
    "modernbert-base": "modernbert",
}


@pytest.mark.parametrize("name", sorted(path.stem for path in CONFIGS.glob("*.json")))
def test_the_tested_configs_agree_or_the_reason_is_stated(name):
    path = CONFIGS / f"{name}.json"
    if name in NOT_COVERED:
        with pytest.raises(NotCoveredError, match=NOT_COVERED[name]):
            demonstrated(path)
        return
    assert all(row.agrees and row.same_tables for row in compare(*demonstrated(path), [5, 1_000_000]))


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"model_type": "brand-new"}, "family 'brand-new'"),
        ({"model_type": None}, "no model_type"),
        ({"rope_scaling": {"rope_type": "su-2", "factor": 2.0}}, "the rule 'su-2'"),
        ({"rope_scaling": YARN | {"finetuned": True}}, "the key finetuned"),
        ({"rope_parameters": YARN, "rope_scaling": YARN | {"factor": 8.0}}, "rope_scaling and rope_parameters"),
        ({"rope_parameters": {"full_attention": YARN}}, "no rule for the layers ''"),
        ({"rope_percentage": 0.5}, "the key rope_percentage"),
        ({"rope_theta": "10000"}, "rope_theta is no number"),
        ({"rope_scaling": {"rope_type": "linear"}}, "no factor"),
        ({"model_type": "deepseek_v3"}, "no qk_nope_head_dim"),
        ({"model_type": "llama", "head_dim": None}, "no hidden_size"),
    ],
    ids=str,
)
def test_keys_without_a_formula_are_not_covered(keys, reason):
    with pytest.raises(NotCoveredError, match=reason):
        oracle_for(SMALL | keys)


@pytest.mark.parametrize("content", ["{", "[]", None])
def test_a_config_that_is_no_json_object_is_not_covered(content, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if content is not None:
        Path("config.json").write_text(content, encoding="utf-8")
    with pytest.raises(NotCoveredError, match=r"config\.json"):
        read_keys(".")


def test_a_pairing_of_permuted_weights_is_not_that_of_transformers():
    keys = SMALL
    assert oracle_for(keys, pairing="half").first == (0, 1, 2, 3)
    with pytest.raises(NotCoveredError, match="does not use the pairing 'interleaved'"):
        oracle_for(keys, pairing="interleaved")


RULES = {
    "default": None,
    "linear": {"rope_type": "linear", "factor": 2.5},
    "dynamic": {"rope_type": "dynamic", "factor": 2.5},
    "yarn": YARN | {"beta_fast": 16.0, "beta_slow": 2.0},
    "yarn, mscale": YARN | {"mscale": 0.7, "mscale_all_dim": 1.3},
    "llama3": YARN | {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "longrope": {
        "rope_type": "longrope",
        "short_factor": [1.0, 1.5, 2.0, 2.5],
        "long_factor": [1.0, 3.0, 5.0, 7.0],
        "original_max_position_embeddings": 32,
    },
}


@pytest.mark.parametrize("rule", RULES)
def test_the_rules_of_the_oracle_are_those_of_transformers(rule):
    transformers = pytest.importorskip("transformers")
    modeling = pytest.importorskip("transformers.models.llama.modeling_llama")
    keys = SMALL | {"hidden_size": 32, "num_attention_heads": 4, "rope_theta": 5_000.0, "rope_scaling": RULES[rule]}
    module = modeling.LlamaRotaryEmbedding(transformers.AutoConfig.for_model(**json.loads(json.dumps(keys))))
    for start in (0, 4_000):
        positions = torch.arange(start, start + 20)
        cos, sin = module(torch.zeros(1), positions[None])
        expected = (cos[0, :, :4], sin[0, :, :4])
        assert all(map(torch.equal, oracle_for(keys).tables(positions, start + 20, torch.float32), expected))


def transformers_rotation(keys: dict, x: torch.Tensor, positions: torch.Tensor, layer: str) -> torch.Tensor:
    """x [batch, heads, seq, rotated features], rotated by the code of transformers for the family of a config."""
    from transformers import AutoConfig

    keys = keys.get("text_config", keys)
    name = keys["model_type"]
    modeling = importlib.import_module(
        f"transformers.models.{name.removesuffix('_text')}.modeling_{name.removesuffix('_text')}"
    )
    if name == "gptj":
        sin, cos = modeling.create_sinusoidal_positions(int(positions[-1]) + 1, x.shape[-1])[positions][None].chunk(
            2, -1
        )
        return modeling.apply_rotary_pos_emb(x.transpose(1, 2), sin, cos).transpose(1, 2)
    make = next(
        value for key, value in vars(modeling).items() if key.endswith("RotaryEmbedding") and "Vision" not in key
    )
    cos, sin = make(AutoConfig.for_model(**keys))(x, positions[None], *([layer] if layer else []))
    if name == "deepseek_v3":
        # Its result has the first members of all pairs before the second ones.
        rotated = modeling.apply_rotary_pos_emb_interleave(x, x, cos, sin)[0]
        return torch.stack(rotated.chunk(2, dim=-1), dim=-1).flatten(-2)
    return modeling.apply_rotary_pos_emb(x, x, cos, sin)[0]


@pytest.mark.parametrize("name", bundled_names())
def test_the_oracle_is_the_rotation_of_transformers_bit_for_bit(name):
    pytest.importorskip("transformers")
    path = bundled_config(name)
    assert path is not None
    keys = json.loads(path.read_text(encoding="utf-8"))
    layers = [layer.name for layer in inspect_model(path).layers]
    for layer in layers:
        truth = oracle_for(keys, layer)
        features = sorted(truth.first + truth.second)
        for last in (1_000, 10_000):
            positions = torch.arange(last - 5, last + 1)
            x = torch.randn(1, 2, 6, truth.head_dim)
            expected = x.clone()
            expected[..., features] = transformers_rotation(keys, x[..., features], positions, layer)
            assert torch.equal(truth.rotate(x, *truth.tables(positions, last + 1, torch.float32)), expected), layer


def test_the_defaults_of_the_families_are_those_of_transformers():
    transformers = pytest.importorskip("transformers")
    for name, family in oracle._FAMILIES.items():
        if name in ("gptj", "qwen2_vl"):
            continue
        config = transformers.CONFIG_MAPPING[name]()
        parameters = config.rope_parameters
        parameters = parameters.get("full_attention", parameters)
        assert family.base == parameters["rope_theta"], name
        assert family.part == parameters.get("partial_rotary_factor", 1.0), name
        if name not in oracle._LATENT:
            derived = config.hidden_size // config.num_attention_heads
            assert (family.head_dim or derived) == (getattr(config, "head_dim", None) or derived), name
