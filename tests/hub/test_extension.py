"""Rules that extend a context: their frequencies, their limits in theory, their config keys and flags."""

import dataclasses
import functools
import json
import math
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from formulas import plain_frequencies, score_sums
from hub.configs import load_spec
from ropewalk import RopeSpec, RopewalkError
from ropewalk.hub import read_model
from ropewalk.hub.extend.config_forms import extended_config, forms_of
from ropewalk.hub.extend.effects import cache_bytes, effect_of, trained_rotations
from ropewalk.hub.extend.measured import MEASURED, measured
from ropewalk.hub.extend.rules import RULES, Extension, Start, extensions, start_of
from ropewalk.hub.extend.stacks import flags_for
from ropewalk.hub.families.family import Family
from ropewalk.spec import DynamicNTK, Explicit, Llama3, Plain, PositionInterpolation, Proportional, Yarn

CONFIGS = Path(__file__).parent.parent / "data" / "configs"
LLAMA_2 = Start("", RopeSpec(128, Plain(10_000), pairing="half", angles="float32"), 10_000.0, 4096, 4096)
CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "max_position_embeddings": 4096,
}


@functools.cache
def made(start: Start, length: int) -> dict[str, Extension]:
    return {one.rule: one for one in extensions(start, length)}


def frequencies(start: Start, length: int, rule: str) -> Any:
    spec = made(start, length)[rule].spec
    assert spec is not None
    return spec.frequencies


def started(config: Any, trained: int | None = None) -> Start:
    return start_of(read_model(config), trained)


def test_the_rules_of_llama_2_are_the_papers():
    assert frequencies(LLAMA_2, 65_536, "pi") == PositionInterpolation(10_000, 16)
    assert frequencies(LLAMA_2, 65_536, "yarn") == Yarn(10_000, 16, 4096)
    assert frequencies(LLAMA_2, 65_536, "yarn-paper") == Yarn(10_000, 16, 4096, ramp="ratio")
    assert frequencies(LLAMA_2, 65_536, "llama3") == Llama3(10_000, 16, 4096)
    assert frequencies(LLAMA_2, 65_536, "dynamic") == DynamicNTK(10_000, 1, 4096)
    # bloc97's b' = b s^(d/(d-2)), and eq. 16a of Liu et al.
    assert made(LLAMA_2, 65_536)["ntk"].base == pytest.approx(167_198.739, abs=1e-3)
    assert made(LLAMA_2, 16_384)["base-law"].base == pytest.approx(71_738, abs=1)
    assert made(LLAMA_2, 65_536).keys() == RULES.keys()


def test_a_dynamic_base_is_that_of_ntk_at_the_length():
    ntk, dynamic = (made(LLAMA_2, 16_384)[rule].spec for rule in ("ntk", "dynamic"))
    assert ntk is not None
    assert dynamic is not None
    np.testing.assert_allclose(dynamic.inv_freq(16_384), ntk.inv_freq(), rtol=1e-14)
    np.testing.assert_array_equal(dynamic.inv_freq(4096), LLAMA_2.spec.inv_freq())


@pytest.mark.parametrize(("length", "lowest"), [(16_384, 231_650), (8192, 83_764)])
def test_the_base_of_the_bound_keeps_the_sum_and_is_near_the_lowest_known(length, lowest):
    base = made(LLAMA_2, length)["base-bound"].base
    assert base is not None
    # The lowest base of a scan over all integers. Ours are 0.4 % apart and may miss an isolated one.
    assert lowest <= base <= 1.05 * lowest
    assert (score_sums(plain_frequencies(128, base), length + 1) >= 0).all()
    assert "bases were tried" in made(LLAMA_2, length)["base-bound"].notes[0]


def test_the_effect_of_yarn_on_llama_2():
    spec = made(LLAMA_2, 65_536)["yarn"].spec
    assert spec is not None
    effect = effect_of(LLAMA_2, spec, 65_536)
    counts = (effect.counts["unchanged"], effect.counts["between"], effect.counts["interpolated"])
    assert counts == (21, 25, 18)
    assert effect.amplitude == pytest.approx(1.2772589)
    assert effect.divided == pytest.approx(16)
    # The slowest pair rotates as far as in training: 4096 / (2 pi 10000^(126/128)) times.
    assert effect.slowest == pytest.approx(trained_rotations(LLAMA_2))
    assert effect.slowest == pytest.approx(0.0752801, abs=1e-7)
    assert effect.seen == pytest.approx(65_536)
    assert effect.limit is None
    assert effect.inv_freq[63] == pytest.approx(7.217387e-6, rel=1e-6)


def test_the_effect_of_a_new_base():
    ntk = made(LLAMA_2, 16_384)["ntk"]
    assert ntk.spec is not None
    effect = effect_of(LLAMA_2, ntk.spec, 16_384, ntk.base)
    assert (effect.counts["unchanged"], effect.counts["between"], effect.counts["interpolated"]) == (1, 62, 1)
    assert effect.limit == pytest.approx(2 * math.pi * 40_889.942 ** (92 / 128), rel=1e-6)
    # Pair 46 is the first that completed no rotation. It is divided by 4^(46/63), less than the pairs after it.
    assert effect.seen == pytest.approx(4096 * 4 ** (46 / 63), rel=1e-9)
    sums = score_sums(plain_frequencies(128, 10_000 * 4 ** (128 / 126)), 16_385)
    assert effect.negative == int(np.flatnonzero(sums < 0)[0])


def test_a_new_base_has_no_limit_if_every_pair_completed_a_rotation():
    small = Start("", RopeSpec(128, Plain(100)), 100.0, 4096, 4096)
    (ntk,) = extensions(small, 8192, "ntk")
    assert ntk.spec is not None
    assert effect_of(small, ntk.spec, 8192, ntk.base).limit is None


def test_the_critical_base_of_a_very_short_model_exceeds_float64():
    (law,) = extensions(Start("", RopeSpec(128), 10_000.0, 7, 7), 1 << 20, "base-law")
    assert "exceeds float64" in str(law.why_not)


def test_the_critical_base_states_the_limit_of_smaller_bases():
    (law,) = extensions(LLAMA_2, 16_384, "base-law")
    assert any("with any smaller base the limit of a model tuned at 16384 is 16384 too" in note for note in law.notes)


@pytest.mark.parametrize(("dim", "trained", "length"), [(128, 4096, 16_384), (128, 2048, 8192), (64, 4096, 131_072)])
def test_the_critical_base_explains_its_limit_at_the_trained_length(dim, trained, length):
    start = Start("", RopeSpec(dim), 10_000.0, trained, trained)
    (law,) = extensions(start, length, "base-law")
    assert law.spec is not None
    limit = effect_of(start, law.spec, length, law.base).limit
    assert limit is not None
    assert limit > length + 1
    assert any(f"tuned at {trained}, the limit is {limit:.0f}: d_extra is rounded up" in note for note in law.notes)
    # Without the rounding, both limits are the length.
    unrounded = dim / 2 * math.log(trained / math.tau, 10_000)
    assert math.tau * (law.base or 0) ** (unrounded / (dim / 2)) == pytest.approx(length, rel=1e-9)


def test_a_limit_without_rounding_has_no_explanation():
    # 2 pi 10000^(1/2) = 628.3: half of the pairs, almost without rounding.
    start = Start("", RopeSpec(128), 10_000.0, 628, 628)
    (law,) = extensions(start, 629, "base-law")
    assert law.spec is not None
    assert round(effect_of(start, law.spec, 629, law.base).limit or 0) == 629
    assert not any("rounded" in note for note in law.notes)


@settings(max_examples=40)
@given(st.integers(2, 32).map(lambda pairs: 2 * pairs), st.floats(100, 1e7), st.integers(64, 8192), st.floats(1.01, 9))
def test_rules_that_interpolate_keep_slow_pairs_within_the_angles_of_training(dim, base, trained, times):
    start = Start("", RopeSpec(dim, Plain(base)), base, trained, trained)
    length = math.ceil(trained * times)
    if length <= trained:
        return
    for rule in ("pi", "yarn-paper", "llama3"):
        one = RULES[rule](start, length, length / trained)
        assert one.spec is not None
        seen = effect_of(start, one.spec, length).seen
        assert seen is None or seen >= length * (1 - 1e-9)


@pytest.mark.slow
def test_a_scaled_model_starts_from_its_values_before_scaling():
    start = started(CONFIGS / "llama-3.1-8b.json")
    assert (start.base, start.trained, start.configured, start.reach) == (500_000, 8192, 131_072, 131_072)
    assert frequencies(start, 262_144, "llama3") == Llama3(500_000, 16, 8192)
    assert frequencies(start, 262_144, "pi") == PositionInterpolation(500_000, 32)
    assert "own rule" in made(start, 262_144)["llama3"].notes[-1]
    assert "replaces the model's own Llama3" in made(start, 262_144)["yarn"].notes[-1]
    # gpt-oss does not round the ends of its ramp. This is kept.
    oss = started(CONFIGS / "gpt-oss-20b.json")
    assert frequencies(oss, 135_168, "yarn") == Yarn(150_000, 33, 4096, truncate=False)


def test_a_config_that_keeps_the_old_length_supports_a_longer_one():
    start = started(CONFIGS / "qwen2.5-7b-instruct-yarn.json")
    assert (start.configured, start.reach) == (32_768, 131_072)
    with pytest.raises(RopewalkError, match="more than the 131072"):
        extensions(start, 131_072)


def test_layers_with_a_window_and_layers_without_rotation_are_not_changed():
    assert started(CONFIGS / "gemma-3-4b.json", 32_768).layer == "full_attention"
    left = dict(started(CONFIGS / "gemma-3-4b.json", 32_768).left)
    assert left == {"sliding_attention": "attends to a window only"}
    assert dict(started(CONFIGS / "smollm3-3b.json").left) == {"no_rope": "does not rotate"}


@pytest.mark.slow
def test_rules_that_do_not_apply_give_the_reason():
    refused = {one.rule: one.why_not for one in extensions(LLAMA_2, 8192) if not one.applies}
    assert refused == {"longrope": "its divisors come from a search that runs the model (2402.13753)"}
    partial = Start("", RopeSpec(128, rotary_dim=32), 10_000.0, 2048, 2048)
    assert "never negative" in str(made(partial, 8192)["base-bound"].why_not)
    wide = Start("", RopeSpec(128, Plain(1e9)), 1e9, 4096, 4096)
    assert "already keeps" in str(made(wide, 8192)["base-bound"].why_not)
    small = Start("", RopeSpec(128, Plain(100)), 100.0, 4096, 4096)
    assert "sets no limit" in str(made(small, 8192)["base-law"].why_not)
    two = Start("", RopeSpec(2), 10_000.0, 4096, 4096)
    assert {rule for rule, one in made(two, 8192).items() if not one.applies} >= {"ntk", "dynamic"}
    parts = Start("", RopeSpec(64, Proportional(1e6, 0.25)), 1e6, 4096, 4096)
    assert {rule for rule, one in made(parts, 8192).items() if one.applies} >= {"pi", "ntk"}
    assert "p-RoPE" in str(made(parts, 8192)["yarn"].why_not)
    assert frequencies(parts, 8192, "pi") == Proportional(1e6, 0.25, 2)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (CONFIGS / "vicuna-7b-v1.5-16k.json", "trained='LENGTH'"),
        (CONFIGS / "llama-4-scout.json", "its rotation does not need a change"),
        (
            {"model_type": "granite_swa", "head_dim": 8, "layer_rope_theta": [1e4, 1e5], "max_position_embeddings": 64},
            "one type of layer",
        ),
    ],
)
def test_models_that_cannot_be_extended(config, message):
    with pytest.raises(RopewalkError, match=message):
        started(config)


def test_frequencies_without_a_base_are_rejected():
    model = read_model(CONFIG)
    explicit = RopeSpec(4, Explicit([1.0, 0.5]))
    with pytest.raises(RopewalkError, match="a base above 1"):
        start_of(dataclasses.replace(model, layers=(("", explicit),)))


@pytest.mark.parametrize("length", [1, 4095, 4096])
def test_a_length_that_the_model_already_supports_is_rejected(length):
    with pytest.raises(RopewalkError, match="more than the 4096"):
        extensions(LLAMA_2, length)


def test_all_other_keys_of_a_config_and_their_order_are_kept():
    data = {"vocab_size": 8, **CONFIG, "rope_theta": 10_000.0, "zeta": {"a": [1, None]}, "alpha": "ö"}
    spec = made(LLAMA_2, 16_384)["yarn"].spec
    assert spec is not None
    config = read_model(data).config
    new, old = forms_of(config, LLAMA_2, spec, 16_384)
    whole = extended_config(config, old)
    assert [key for key in whole if key != "rope_scaling"] == list(data)
    assert {key for key in data if whole[key] != data[key]} == {"max_position_embeddings"}
    assert whole["rope_scaling"]["rope_type"] == "yarn"
    assert "rope_theta" not in extended_config(config, new)
    for form in (new, old):
        assert load_spec(extended_config(config, form)) == spec
    assert data["max_position_embeddings"] == 4096


def test_the_config_of_the_language_model_is_found():
    inner = {"model_type": "gemma3_text", "head_dim": 8}
    for data, place in (
        ({"a": 1, "text_config": inner}, ("text_config",)),
        ({"thinker_config": {"text_config": inner}}, ("thinker_config", "text_config")),
        (inner, ()),
    ):
        language = read_model(data).config.language
        assert (language.place, language.data) == (place, inner)


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.json")), ids=lambda path: path.stem)
def test_every_form_is_parsed_as_the_intended_rotation(path):
    model = read_model(path)
    try:
        start = start_of(model, model.lengths.trained or 2048)
    except RopewalkError:
        return
    length = 2 * start.reach
    for rule in ("pi", "ntk", "dynamic", "yarn", "llama3", "base-law"):
        one = RULES[rule](start, length, length / start.trained)
        if one.spec is None:
            continue
        takes_bases_alone = path.stem == "phi-3-mini-128k" and rule not in ("ntk", "base-law")
        if takes_bases_alone or path.stem in ("mistral-7b-v0.3-params", "gpt-j-6b"):
            with pytest.raises(RopewalkError, match="a config of an extended model"):
                forms_of(model.config, start, one.spec, length)
            continue
        for form in forms_of(model.config, start, one.spec, length):
            again, before = dict(read_model(extended_config(model.config, form)).layers), dict(model.layers)
            new = again.pop(start.layer)
            before.pop(start.layer)
            assert again == before
            assert new is not None
            np.testing.assert_allclose(new.inv_freq(length), one.spec.inv_freq(length), rtol=1e-13)
            assert new.amplitude(length) == pytest.approx(one.spec.amplitude(length))


def flags(stack: str, start: Start, length: int, rule: str, data: dict[str, Any] = CONFIG) -> Any:
    one = made(start, length)[rule]
    config = read_model(data).config
    try:
        form = forms_of(config, start, one.spec, length)[0] if one.spec else None
    except RopewalkError:
        form = None
    kind = str(data.get("model_type"))
    return flags_for(stack, start, one, length, form=form, place=config.language.place, model_type=kind)


def overrides(flags: str) -> tuple[dict[str, Any], int]:
    name, text, other, most = shlex.split(flags)
    assert (name, other) == ("--hf-overrides", "--max-model-len")
    return json.loads(text), int(most)


def test_the_flags_of_vllm():
    yarn, most = overrides(flags("vllm", LLAMA_2, 16_384, "yarn").flags)
    assert most == 16_384
    wanted = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096, "rope_theta": 10_000.0}
    assert wanted.items() <= yarn["rope_parameters"].items()
    # vLLM allows the original length times the factor for YaRN, and max_position_embeddings times it for PI.
    assert "max_position_embeddings" not in yarn
    assert overrides(flags("vllm", LLAMA_2, 16_384, "pi").flags)[0]["max_position_embeddings"] == 4096
    assert overrides(flags("vllm", LLAMA_2, 16_384, "ntk").flags)[0]["max_position_embeddings"] == 16_384
    assert flags("vllm", LLAMA_2, 16_384, "dynamic").flags is None
    assert flags("vllm", LLAMA_2, 16_384, "yarn-paper").flags is None
    assert "search" in flags("vllm", LLAMA_2, 16_384, "longrope").notes[0]


def test_the_flags_of_vllm_for_a_composite_model_set_its_text_config():
    data = json.loads((CONFIGS / "gemma-3-4b.json").read_text())
    start = started(CONFIGS / "gemma-3-4b.json", 32_768)
    keys = overrides(flags("vllm", start, 262_144, "yarn", data).flags)[0]["text_config"]
    assert keys["rope_parameters"]["sliding_attention"] == {"rope_type": "default", "rope_theta": 10_000.0}
    assert keys["rope_parameters"]["full_attention"]["rope_type"] == "yarn"
    # vLLM uses the length of Gemma 3 unchanged.
    assert keys["max_position_embeddings"] == 262_144


def test_the_flags_of_vllm_contain_another_amplitude():
    data = CONFIG | {
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 1024,
            "attention_factor": 1.0,
        }
    }
    keys, _ = overrides(flags("vllm", started(data), 8192, "yarn", data).flags)
    assert keys["rope_parameters"]["attn_factor"] == pytest.approx(1 / (0.1 * math.log(8) + 1))


def test_the_flags_of_llama_cpp():
    assert flags("llama.cpp", LLAMA_2, 16_384, "pi").flags == "--rope-scaling linear --rope-scale 4 -c 16384"
    ntk = flags("llama.cpp", LLAMA_2, 16_384, "ntk").flags
    assert ntk == "--rope-scaling none --rope-freq-base 40889.9424 -c 16384"
    for rule in ("dynamic", "llama3", "yarn-paper", "longrope"):
        assert flags("llama.cpp", LLAMA_2, 16_384, rule).flags is None
    llama_3 = started(CONFIGS / "llama-3.1-8b.json")
    data = json.loads((CONFIGS / "llama-3.1-8b.json").read_text())
    refused = flags("llama.cpp", llama_3, 262_144, "yarn", data)
    assert refused.flags is None
    assert "convert_hf_to_gguf.py" in refused.notes[0]
    oss = started(CONFIGS / "gpt-oss-20b.json")
    data = json.loads((CONFIGS / "gpt-oss-20b.json").read_text())
    assert any("not rounded" in note for note in flags("llama.cpp", oss, 262_144, "yarn", data).notes)


def test_the_bytes_of_keys_and_values():
    model = {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8}
    assert cache_bytes(model, Family(), 128, 131_072) == 2 * 32 * 8 * 128 * 131_072 * 2 == 16 << 30
    latent = {"num_hidden_layers": 61, "num_attention_heads": 128, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
    assert cache_bytes(latent, Family(), 192, 1000) == 61 * 576 * 1000 * 2
    mixed = model | {"num_hidden_layers": 2, "layer_types": ["full_attention", "sliding_attention"]}
    assert cache_bytes(mixed | {"sliding_window": 10}, Family(), 128, 100) == 2 * 8 * 128 * 110 * 2
    assert cache_bytes({"num_attention_heads": 32}, Family(), 128, 100) is None
    falcon = {"num_hidden_layers": 32, "num_attention_heads": 71, "multi_query": True}
    assert cache_bytes(falcon, Family(), 64, 1000) == 2 * 32 * 64 * 1000 * 2
    assert cache_bytes(model | {"layer_types": ["full_attention"]}, Family(), 128, 100) is None
    assert cache_bytes(mixed | {"layer_types": ["full_attention", "mamba"]}, Family(), 128, 100) is None


def test_measurements_name_their_rules_models_and_sources():
    for one in MEASURED:
        assert set(one.results) <= {*RULES, "none", "new base"}
        assert any(word in one.source for word in ("table", "section", "README", "kexue.fm"))
        assert any(digit.isdigit() for digit in one.model)
    assert {rule for rule in RULES if measured(rule, tuned=False)} == {"pi", "ntk", "dynamic", "yarn"}
