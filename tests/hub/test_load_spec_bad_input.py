"""Configs that no model can have, and files that are none."""

import pytest

from hub.configs import LLAMA, LLAMA3, LONG, YARN, load_spec, loaded
from ropewalk import RopeConfigWarning, RopewalkError


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"model_type": "unheard_of"}, "a model_type that ropewalk knows, or pairing="),
        ({"model_type": None}, "model_type None"),
        ({"model_type": "lama"}, "did you mean 'llama'"),
        ({"model_type": "qwen9_vl", "vocab_size": None, "patch_size": 14}, "a vision config with model_type"),
        ({"model_type": 7}, "'model_type'\nexpected: a string"),
        ({"hidden_size": None}, "'hidden_size'\nexpected: an integer; files may omit keys"),
        ({"num_attention_heads": 0}, "'num_attention_heads'\nexpected: a number of at least 1"),
        ({"num_attention_heads": 2.5}, "an integer\ngot:      2.5"),
        ({"head_dim": 63}, "an even number of rotated features"),
        ({"head_dim": "128"}, "'head_dim'\nexpected: a number"),
        ({"rope_theta": -1.0}, "a number above 0"),
        ({"rope_theta": float("nan")}, "'rope_theta'\nexpected: a number\ngot:      nan"),
        ({"rope_theta": True}, "'rope_theta'\nexpected: a number"),
        ({"rope_scaling": {"type": "liner", "factor": 2.0}}, "did you mean 'linear'"),
        ({"rope_scaling": {"type": "nope"}}, "the key 'rope_scaling.type'\nexpected: "),
        ({"rope_scaling": {"rope_type": "nope"}}, "the key 'rope_scaling.rope_type'\nexpected: "),
        ({"rope_scaling": {"rope_type": None, "type": "nope"}}, "the key 'rope_scaling.type'\nexpected: "),
        ({"rope_parameters": {"rope_type": "nope"}}, "the key 'rope_parameters.rope_type'\nexpected: "),
        (
            {"rope_scaling": {"type": "linear"}},
            "rope_scaling.factor'\nexpected: a number of at least 1\ngot:      no such key",
        ),
        ({"rope_scaling": {"type": "linear", "factor": 0.5}}, "a number of at least 1\ngot:      0.5"),
        ({"rope_scaling": {"type": "linear", "factor": None}}, "rope_scaling.factor"),
        ({"rope_scaling": {"type": "linear", "rope_type": "yarn", "factor": 2.0}}, "one rope type"),
        ({"rope_scaling": "linear"}, "'rope_scaling'\nexpected: a JSON object"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "transformers would silently use max_position_embeddings"),
        ({"rope_scaling": YARN | {"original_max_position_embeddings": 1}}, "at least 2"),
        ({"rope_scaling": YARN | {"beta_fast": 1.0, "beta_slow": 32.0}}, "beta_fast not below beta_slow"),
        ({"rope_scaling": YARN | {"truncate": "no"}}, "true or false"),
        (
            {"rope_scaling": LLAMA3 | {"low_freq_factor": 4.0, "high_freq_factor": 1.0}},
            "high_freq_factor not below low",
        ),
        ({"rope_scaling": LLAMA3 | {"low_freq_factor": None}}, "low_freq_factor"),
        ({"rope_scaling": LONG | {"long_factor": [1.0] * 63}}, "64 numbers in long_factor"),
        ({"rope_scaling": LONG | {"long_factor": [1.0] * 63 + ["x"]}}, "long_factor.63"),
        ({"rope_scaling": LONG | {"long_factor": "x"}}, "a list of numbers"),
        ({"rope_scaling": LONG}, "long_factor"),
        ({"head_dim": 2, "rope_scaling": {"type": "dynamic", "factor": 2.0}}, "a rotary_dim of at least 4"),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"rope_type": "default"}},
            "remove the wrong one",
        ),
        ({"rope_theta": 1e4, "rope_parameters": {"rope_theta": 5e5}}, "10000, and 500000.0"),
        ({"partial_rotary_factor": 0.5, "rotary_dim": 32, "model_type": "phi3"}, "one number of rotated features"),
        ({"partial_rotary_factor": 1.5, "model_type": "phi3"}, "a share from 0 to 1"),
        ({"partial_rotary_factor": 0.0, "model_type": "phi3"}, "from 2 to head_dim = 128"),
        ({"rope_parameters": {"full": {"rope_type": "default"}}}, "the name of a layer type of this model"),
        ({"layer_types": "full", "rope_parameters": {}}, "a list of strings"),
        ({"layer_types": ["a"], "rope_parameters": {"a": 3}}, "an object or null"),
        ({"layer_types": ["a"], "rope_parameters": {"a": {}, "factor": 2.0}}, "only layer types at this level"),
        ({"rope_parameters": {"mrope_section": [16, 24, 24]}}, "knows to have several positions"),
        ({"model_type": "qwen2_vl_text", "rope_parameters": {"mrope_section": [16, 24, 25]}}, "that sum to 64"),
        ({"model_type": "qwen2_vl_text", "rope_parameters": {"mrope_section": [16.5, 24, 24]}}, "that sum to 64"),
        ({"model_type": "gpt_oss"}, "the defaults of this family are not plain RoPE"),
        (
            {"model_type": "mimo_v2_flash", "rope_theta": 5e6, "rope_parameters": {"rope_type": "default"}},
            "one set for",
        ),
        ({"rope_scaling": YARN | {"extrapolation_factor": 2.0}}, "1, as in every released model"),
        ({"model_type": "smollm3", "no_rope_layers": [2]}, "a list of 0 and 1"),
        ({"model_type": "granite_swa", "layer_rope_theta": [-1, 1e4]}, "bases above 0"),
    ],
)
def test_what_no_model_can_have_is_refused(said, message):
    with pytest.raises(RopewalkError, match=message) as caught:
        loaded(LLAMA | said)
    assert caught.value.asked.startswith("load_spec")


def test_files_that_are_no_configs_are_refused(tmp_path):
    def refused(message, content=None, name="config.json"):
        path = tmp_path / name
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(RopewalkError, match=message):
            load_spec(path)

    refused("No such file")
    refused("a folder without config.json or params.json", name="")
    refused("not JSON", b"{")
    refused("not JSON", b"")
    refused("not UTF-8", b"\xff\xfe")
    refused("occurs twice", b'{"model_type": "llama", "model_type": "gptj"}')
    refused("a JSON object", b"[1, 2]")
    refused("not JSON", b"[" * 100_000)
    refused("at most 32 levels", b'{"a":' * 200 + b"1" + b"}" * 200)
    with (tmp_path / "config.json").open("wb") as file:
        file.truncate(100 << 20)
    refused("100 MiB; the limit is 16 MiB")
    for nothing in (None, 7, [], b"config.json", object()):
        with pytest.raises(RopewalkError, match="the path of a config"):
            load_spec(nothing)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pairing": "halves"}, "did you mean 'half'"),
        ({"pairing": "interleaved"}, "'half', the pairing of this family"),
        ({"policy": "hf"}, "'transformers' or 'deepseek' or 'vllm'"),
        ({"angles": "bf16"}, "'exact' or 'float32'"),
    ],
)
def test_options_are_checked(options, message):
    with pytest.raises(RopewalkError, match=message):
        load_spec(LLAMA, **options)


def test_a_pairing_must_agree_with_a_flag_too():
    latent = {"model_type": "deepseek_v3", "qk_nope_head_dim": 16, "qk_rope_head_dim": 8}
    assert load_spec(latent | {"rope_interleave": False}, pairing="half").pairing == "half"
    with pytest.raises(RopewalkError, match="pairing='interleaved', as in the config"):
        load_spec(latent, pairing="half")


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"dim": 64, "n_heads": 4}, "'rope_theta'"),
        ({"dim": 64, "n_heads": 4, "use_scaled_rope": True}, "only the files of Llama 1 and 2"),
        ({"dim": 64, "n_heads": 4, "multiple_of": 8, "vocab_size": 128256}, "only the files of Llama 1 and 2"),
        ({"dim": 64, "n_heads": 4, "rope_theta": 5e5, "use_scaled_rope": "yes"}, "true or false"),
        ({"dim": 64, "n_heads": 4, "rope_theta": 5e5, "use_scaled_rope": 1}, "true or false"),
        ({"dim": 64, "n_heads": 4, "rope_theta": "5e5", "use_scaled_rope": True}, "'rope_theta'\nexpected: a number"),
        ({"dim": 64, "n_heads": 4, "multiple_of": 8, "rope_theta": 5e5, "nope_layer_interval": 4}, "Llama 1 to 3"),
        (
            {"dim": 64, "n_heads": 4, "use_scaled_rope": True, "rope_theta": 5e5, "rope_scaling_factor": 16},
            "Llama 1 to",
        ),
        ({"dim": 64, "n_heads": 4, "rope_theta": 1e4, "qk_rope_head_dim": 64}, "load the config.json of the model"),
    ],
)
def test_params_of_others_are_refused(params, message):
    with pytest.raises(RopewalkError, match=message):
        load_spec(params)


# Qwen2-VL's vision_config as the hub has it, without a model_type.
TOWER = {
    "depth": 32,
    "embed_dim": 1280,
    "hidden_size": 3584,
    "num_heads": 16,
    "patch_size": 14,
    "spatial_merge_size": 2,
}


@pytest.mark.parametrize("pairing", [None, "half", "interleaved"])
def test_a_vision_config_without_model_type_is_refused(pairing):
    with pytest.raises(RopewalkError, match="a vision config without model_type") as error:
        load_spec(TOWER, pairing=pairing)
    assert 'add the model_type of the whole config: {"model_type": "qwen2_vl", ...}' in error.value.do
    assert load_spec(TOWER | {"model_type": "qwen2_vl"}).head_dim == 80


def test_an_unknown_family_with_two_widths_must_state_its_heads():
    unknown = TOWER | {"model_type": "brandnew"}
    with pytest.raises(RopewalkError, match="got:      hidden_size = 3584, embed_dim = 1280\ndo this:  set head_dim"):
        load_spec(unknown, pairing="half")
    with pytest.warns(RopeConfigWarning, match="unknown-family"):
        assert load_spec(unknown | {"head_dim": 80}, pairing="half").head_dim == 80
    with pytest.warns(RopeConfigWarning, match="unknown-family"):
        assert load_spec(unknown | {"hidden_size": 1280}, pairing="half").head_dim == 80


def test_yarn_without_a_factor_at_equal_lengths_is_plain_and_says_so():
    lengths = {
        "max_position_embeddings": 4096,
        "rope_scaling": {"type": "yarn", "original_max_position_embeddings": 4096},
    }
    with pytest.warns(RopeConfigWarning, match=r"original-is-extended\] there is no 'rope_scaling.factor'"):
        assert load_spec(LLAMA | lengths).frequencies.factor == 1
    longer = lengths | {"max_position_embeddings": 8192}
    assert loaded(LLAMA | longer)[0].frequencies.factor == 2
