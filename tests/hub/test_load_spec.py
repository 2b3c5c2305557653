"""load_spec: what well-known configs say, in every form in which they are written, and what is refused."""

import json
import math
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

from hub.configs import LLAMA, LLAMA3, SCALED, YARN, load_spec, loaded
from ropewalk.hub import RopeConfigWarning
from ropewalk.hub.configs.pitfalls import PITFALLS
from ropewalk.hub.families.table import FAMILIES
from ropewalk.spec import (
    NTK,
    Axes,
    DynamicNTK,
    Llama3,
    LongRope,
    NTKFixed,
    NTKMixed,
    Plain,
    PositionInterpolation,
    Proportional,
    StepTemperature,
    Yarn,
)

DEEPSEEK: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "max_position_embeddings": 163840,
    "rope_theta": 10000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "original_max_position_embeddings": 4096,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "beta_fast": 32,
        "beta_slow": 1,
    },
}


@pytest.mark.parametrize(
    "said",
    [
        {"rope_theta": 500000.0, "rope_scaling": {"rope_type": "llama3"} | SCALED},
        {"rope_theta": 500000.0, "rope_scaling": {"type": "llama3"} | SCALED},
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 500000.0} | SCALED},
        {"rope_parameters": {"rope_type": "llama3"} | SCALED, "rope_theta": 500000.0},
    ],
)
def test_llama_3_1_in_both_forms(said):
    spec, names = loaded(LLAMA | said)
    assert (spec.frequencies, spec.head_dim, spec.rotated_dim) == (Llama3(500_000, 8, 8192), 128, 128)
    assert (spec.pairing, spec.rotary_slice, spec.angles, names) == ("half", "leading", "float32", [])


def test_deepseek_v3():
    spec, names = loaded(DEEPSEEK)
    assert (spec.head_dim, spec.rotated_dim, spec.rotary_slice, spec.pairing) == (192, 64, "trailing", "interleaved")
    assert spec.amplitude() == 1
    assert spec.softmax_scale == pytest.approx(1.8738542070926265)
    assert names == []
    assert load_spec(DEEPSEEK | {"rope_interleave": False}).pairing == "half"


def test_gemma_3_in_both_forms():
    old = {
        "model_type": "gemma3_text",
        "head_dim": 256,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    }
    new = {
        "model_type": "gemma3_text",
        "head_dim": 256,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
        },
    }
    for config in (old, new, {"model_type": "gemma3", "text_config": old}):
        specs = load_spec(config)
        assert specs["sliding_attention"].frequencies == Plain(1e4)
        assert specs["full_attention"].frequencies == PositionInterpolation(1e6, 8)


def test_other_models():
    phi = {
        "model_type": "phi3",
        "hidden_size": 16,
        "num_attention_heads": 2,
        "max_position_embeddings": 131072,
        "original_max_position_embeddings": 4096,
        "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4},
    }
    spec = load_spec(phi)
    assert spec.frequencies == LongRope(1e4, [1.0] * 4, [2.0] * 4, 4096, 32)
    assert spec.amplitude() == pytest.approx(1.1902380714238083)
    oss = {"model_type": "gpt_oss", "head_dim": 64, "max_position_embeddings": 131072, "rope_theta": 150000}
    oss["rope_scaling"] = {
        "rope_type": "yarn",
        "factor": 32.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    }
    assert load_spec(oss).frequencies == Yarn(150_000, 32, 4096, truncate=False)
    neox = {"model_type": "gpt_neox", "hidden_size": 64, "num_attention_heads": 4, "rotary_pct": 0.25}
    assert (load_spec(neox).rotated_dim, load_spec(neox | {"rotary_emb_base": 500}).frequencies) == (4, Plain(500))
    gptj = {"model_type": "gptj", "n_embd": 4096, "n_head": 16, "rotary_dim": 64}
    assert (load_spec(gptj).rotated_dim, load_spec(gptj).head_dim, load_spec(gptj).pairing) == (64, 256, "interleaved")
    hunyuan = LLAMA | {"model_type": "hunyuan_v1_dense", "rope_scaling": {"type": "dynamic", "alpha": 1000.0}}
    assert load_spec(hunyuan).frequencies == NTK(1e4, 1000)
    qwen = LLAMA | {"model_type": "qwen2_vl", "hidden_size": 3584, "num_attention_heads": 28, "rope_theta": 1e6}
    spec = load_spec(qwen | {"rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}})
    assert (spec.axes, spec.frequencies) == (Axes.chunked([16, 24, 24]), Plain(1e6))
    ministral = {"model_type": "ministral3", "head_dim": 128, "max_position_embeddings": 262144}
    yarn = {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 16384, "rope_theta": 1e6}
    spec = load_spec(ministral | {"rope_parameters": yarn | {"llama_4_scaling_beta": 0.1}})
    assert spec.query_temperature == StepTemperature(0.1, 16384)
    gemma = {"model_type": "gemma4_text", "head_dim": 256, "global_head_dim": 512, "layer_types": ["full_attention"]}
    full = {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6}
    spec = load_spec(gemma | {"rope_parameters": {"full_attention": full}})["full_attention"]
    assert (spec.frequencies, spec.head_dim, spec.rotated_dim) == (Proportional(1e6, 0.25), 512, 512)


def test_vllms_keys():
    bert = LLAMA | {"rope_scaling": {"rope_type": "ntk", "factor": 2.0}}
    assert load_spec(bert).frequencies == NTKFixed(1e4, 2)
    mixed = LLAMA | {"rope_scaling": {"rope_type": "ntk", "factor": 2.0, "mixed_b": 0.625}}
    assert load_spec(mixed).frequencies == NTKMixed(1e4, 2, 0.625)
    nomic = LLAMA | {"rope_scaling": {"type": "dynamic", "factor": 2.0, "max_trained_positions": 2048}}
    assert loaded(nomic)[0].frequencies == DynamicNTK(1e4, 2, 2048)
    yarn = {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 8192, "attn_factor": 0.878}
    spec, names = loaded(LLAMA | {"rope_scaling": yarn})
    assert names == ["amplitude-differs"]
    assert spec.frequencies.attention_factor is None
    spec, names = loaded(LLAMA | {"rope_scaling": yarn}, policy="vllm")
    assert names == []
    assert spec.amplitude() == pytest.approx(0.878 * (0.1 * math.log(16) + 1))


def test_mistrals_params_json(tmp_path):
    params = {"dim": 5120, "n_heads": 32, "head_dim": 128, "rope_theta": 1e9, "n_kv_heads": 8}
    (tmp_path / "params.json").write_text(json.dumps(params))
    spec = load_spec(tmp_path)
    assert (spec.frequencies, spec.pairing, spec.head_dim) == (Plain(1e9), "interleaved", 128)
    yarn = {"factor": 16, "original_max_position_embeddings": 8192, "beta": 32, "alpha": 1, "apply_scale": False}
    spec = load_spec(params | {"yarn": yarn})
    assert (spec.frequencies.factor, spec.amplitude()) == (16, 1.0)
    spec = load_spec(
        params | {"yarn": yarn, "llama_4_scaling": {"original_max_position_embeddings": 8192, "beta": 0.1}}
    )
    assert spec.query_temperature == StepTemperature(0.1, 8192)


def test_layers_without_rotation_are_none():
    smol = LLAMA | {"model_type": "smollm3", "no_rope_layers": [1, 1, 1, 0]}
    specs = load_spec(smol)
    assert specs["no_rope"] is None
    assert specs["rope"].frequencies == Plain(2e6)
    cohere = LLAMA | {"model_type": "cohere2", "sliding_window": 4096}
    assert load_spec(cohere) == {"sliding_attention": load_spec(cohere)["sliding_attention"], "full_attention": None}
    nested = LLAMA | {"layer_types": ["a", "b"], "rope_parameters": {"a": {"rope_type": "default"}, "b": None}}
    assert load_spec(nested)["b"] is None
    granite = LLAMA | {"model_type": "granite_swa", "layer_rope_theta": [10000.0, 0, 5e5]}
    assert sorted(load_spec(granite)) == ["no_rope", "rope_theta=10000", "rope_theta=500000"]
    with pytest.warns(RopeConfigWarning, match=r"StepTemperature\(0.1, 8192, first=1\)"):
        assert load_spec(LLAMA | {"model_type": "llama4_text"})["no_rope"] is None
    assert load_spec(LLAMA | {"model_type": "falcon", "alibi": True}) is None


class Given:
    """A config object."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config

    def to_dict(self) -> dict[str, Any]:
        return self.config


def test_encodings_that_are_only_there_if_asked_for():
    assert load_spec(LLAMA | {"model_type": "esm"}) is None
    assert load_spec(LLAMA | {"model_type": "esm", "position_embedding_type": "rotary"}) is not None
    assert load_spec(LLAMA | {"model_type": "zamba2"}) is None
    assert load_spec(LLAMA | {"model_type": "zamba2", "use_mem_rope": True}) is not None
    exaone = LLAMA | {"model_type": "exaone4"}
    assert load_spec(exaone | {"layer_types": ["sliding_attention", "full_attention"]})["full_attention"] is None
    assert load_spec(exaone).frequencies == Plain(1e4)
    assert sorted(load_spec(LLAMA | {"model_type": "smollm3", "no_rope_layers": [1, 1]})) == ["rope"]


def test_stacks_read_their_own_keys():
    # alpha is HunYuan's; latent attention is DeepSeek's whatever stack reads it; apply_yarn_scaling is vLLM's.
    both = {"type": "dynamic", "factor": 2.0, "alpha": 8.0}
    assert loaded(LLAMA | {"rope_scaling": both})[0].frequencies == DynamicNTK(1e4, 2, 131072)
    assert load_spec(LLAMA | {"model_type": "hunyuan_v1_dense", "rope_scaling": both}).frequencies == NTK(1e4, 8)
    assert load_spec(DEEPSEEK, policy="vllm").softmax_scale == load_spec(DEEPSEEK).softmax_scale
    quiet = YARN | {"apply_yarn_scaling": False, "attn_factor": 1.5}
    assert load_spec(LLAMA | {"rope_scaling": quiet}, policy="vllm").amplitude() == pytest.approx(1.5)
    one = YARN | {"mscale": 0.7}
    assert loaded(DEEPSEEK | {"rope_scaling": one})[0].amplitude() == pytest.approx(0.1 * math.log(16) + 1)
    pangu = LLAMA | {
        "model_type": "pangu",
        "rope_parameters": {"rope_type": "openpangu", "mrope_section": [24, 20, 20]},
    }
    assert loaded(pangu, pairing="half")[0].axes == Axes.rarest_first([24, 20, 20])
    phi = {
        "model_type": "phi3",
        "head_dim": 8,
        "max_position_embeddings": 2048,
        "original_max_position_embeddings": 4096,
    }
    lists = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "original_max_position_embeddings": 64}
    # The length beside the parameters wins, and a ratio below 1 is no factor.
    spec = load_spec(phi | {"rope_scaling": {"type": "longrope"} | lists})
    assert (spec.frequencies.trained_length, spec.amplitude()) == (4096, 1.0)


def test_files_folders_dicts_and_objects_say_the_same(tmp_path):
    config = LLAMA | {"rope_theta": 5e5}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    before = json.dumps(config)
    specs = [load_spec(given) for given in (config, path, str(path), tmp_path, Given(config))]
    assert len(set(specs)) == 1
    assert json.dumps(config) == before


def test_it_needs_neither_torch_nor_transformers(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    code = (
        "import sys, ropewalk as rw; rw.load_spec(sys.argv[1]).to_config('transformers');"
        "sys.exit(any(name in sys.modules for name in ('torch', 'transformers')))"
    )
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False).returncode == 0


PITFALL_CASES = [
    ("amplitude-differs", {"rope_scaling": YARN | {"mscale": 0.7}}),
    ("dynamic-batch", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}),
    ("factor-differs", {"rope_scaling": YARN | {"factor": 4.0}}),
    ("factor-not-stated", {"model_type": None, "dim": 64, "n_heads": 4, "rope_theta": 5e5, "use_scaled_rope": True}),
    ("head-dim-null", {"head_dim": None, "rope_scaling": YARN}),
    ("int-for-float", {"rope_scaling": {"type": "linear", "factor": 4}}),
    ("int-for-float", {"rope_scaling": YARN | {"attention_factor": 1}}),
    ("key-ignored", {"rope_scaling": YARN | {"fator": 4.0}}),
    ("key-ignored", {"rope_parameters": {"rope_type": "default", "factor": 4.0}}),
    ("legacy-type", {"rope_scaling": {"type": "su", "short_factor": [1.0] * 64, "long_factor": [1.0] * 64}}),
    ("nested-truncate", {"layer_types": ["a"], "rope_parameters": {"a": YARN | {"truncate": False}}}),
    ("no-ramp", {"rope_scaling": LLAMA3 | {"high_freq_factor": 1.0}}),
    ("original-is-extended", {"max_position_embeddings": 8192, "rope_scaling": YARN}),
    ("partial-truncated", {"model_type": "phi3", "head_dim": 192, "partial_rotary_factor": 0.334}),
    ("temperature-without-rotation", {"model_type": "llama4_text"}),
    ("unknown-family", {"model_type": "unheard_of"}),
    ("key-ignored", {"rope_thetta": 5e5}),
    ("key-ignored", {"rotary_emb_base": 5e5}),
    ("key-ignored", {"rope_base": 5e5}),
    ("key-ignored", {"rotary_dim": 8}),
    ("key-ignored", {"partial_rotary_factor": 0.5}),
    ("vllm-mrope-yarn", {"model_type": "qwen2_vl_text", "rope_scaling": YARN | {"mrope_section": [16, 24, 24]}}),
    ("zero-is-unset", {"rope_scaling": YARN | {"beta_fast": 0}}),
    ("zero-is-unset", {"rope_scaling": YARN | {"mscale": 0, "mscale_all_dim": 0}}),
]


@pytest.mark.parametrize(("name", "said"), PITFALL_CASES)
def test_a_pitfall_has_its_name(name, said):
    if said.get("rope_scaling", {}).get("type") == "su":
        said = said | {"original_max_position_embeddings": 4096}
    given: Any = LLAMA | said
    if name == "original-is-extended":
        # What a file says is taken at its word; a config object may have had it filled in.
        assert loaded(given)[1] == ["factor-differs"]
        given = Given(given)
    options = {"pairing": "half"} if name == "unknown-family" else {}
    assert name in loaded(given, **options)[1]


LONG_FACTORS = {"short_factor": [1.0] * 64, "long_factor": [2.0] * 64}


@pytest.mark.parametrize(
    "rope", [{"rope_type": "yarn"}, {"rope_type": "longrope"} | LONG_FACTORS], ids=["yarn", "longrope"]
)
@pytest.mark.parametrize(
    ("longest", "factor", "differs"),
    [
        (131_072, 16.0, False),
        (131_072, 8.0, True),
        (131_072, 32.0, True),
        # Qwen 2.5 and 3 as their makers describe them: older versions of transformers compute a factor of 1 and 1.25.
        (8192, 4.0, True),
        (10_240, 4.0, True),
        (8192, 1.0, False),
        (None, 4.0, False),
    ],
)
def test_a_factor_that_some_stack_replaces_by_the_ratio_of_the_lengths_is_reported(rope, longest, factor, differs):
    scaling = rope | {"factor": factor, "original_max_position_embeddings": 8192}
    config = {key: value for key, value in LLAMA.items() if key != "max_position_embeddings"}
    config |= {"rope_scaling": scaling} | ({} if longest is None else {"max_position_embeddings": longest})
    assert ("factor-differs" in loaded(config)[1]) == differs


def test_no_stack_computes_the_factor_of_llama_3_from_the_lengths():
    # Llama 3.1 and 3.2: factors 8 and 32, and 16 times the original length.
    for factor in (8.0, 32.0):
        assert loaded(LLAMA | {"rope_scaling": LLAMA3 | {"factor": factor}})[1] == []


def test_every_pitfall_has_a_case_and_a_line_in_the_docs():
    assert {name for name, _ in PITFALL_CASES} == set(PITFALLS)
    page = (Path(__file__).parents[2] / "docs" / "config.md").read_text(encoding="utf-8")
    for name, text in PITFALLS.items():
        assert f"| `{name}` | {text} |" in page


def test_a_warning_names_the_line_that_asked():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        load_spec(LLAMA | {"rope_scaling": {"type": "dynamic", "factor": 2.0}})
    assert caught[0].filename == __file__


def test_an_unknown_family_is_served_with_its_pairing():
    spec, names = loaded(LLAMA | {"model_type": "unheard_of", "rope_ratio": 4}, pairing="interleaved")
    assert names == ["unknown-family", "key-ignored"]
    assert (spec.pairing, spec.frequencies) == ("interleaved", Plain(1e4))


def test_published_models_with_equal_bounds():
    scout = {"model_type": "llama4_text", "head_dim": 128, "rope_theta": 5e5, "max_position_embeddings": 10485760}
    equal = LLAMA3 | {"factor": 16.0, "high_freq_factor": 1.0}
    spec, names = loaded(scout | {"rope_scaling": equal})
    assert spec["rope"].frequencies == Llama3(5e5, 16, 8192, 1, 1)
    assert "no-ramp" in names


def test_towers_are_not_taken_for_their_language_model():
    tower = {"model_type": "qwen3_vl", "depth": 24, "hidden_size": 1024, "num_heads": 16, "patch_size": 16}
    spec = load_spec(tower)
    assert (spec.frequencies, spec.axes, spec.head_dim) == (Plain(1e4), Axes.repeated(2, 64), 64)
    whole = {"model_type": "qwen3_vl", "text_config": LLAMA | {"model_type": "qwen3_vl_text"}, "vision_config": tower}
    assert load_spec(whole).axes == Axes.interleaved([24, 20, 20])


def test_a_head_dim_that_files_leave_out():
    # Gemma-3-4B's file names neither heads nor head_dim, and its class has 256 whatever the width is.
    text = {"model_type": "gemma3_text", "hidden_size": 2560, "sliding_window": 1024}
    specs = load_spec({"model_type": "gemma3", "text_config": text})
    assert specs["full_attention"].head_dim == 256
    assert load_spec(LLAMA | {"model_type": "qwen3", "hidden_size": 1024}).head_dim == 128
    assert load_spec(LLAMA | {"model_type": "qwen3", "hidden_size": 1024, "head_dim": None}).head_dim == 32


def test_families_are_values_that_make_sense():
    for name, family in FAMILIES.items():
        assert family.pairing in ("half", "interleaved"), name
        assert family.base > 0, name
