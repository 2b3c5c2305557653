"""Extensions of models that are already scaled: factors, amplitudes, softmax scales, and configs that load."""

import json
import math
from pathlib import Path

import pytest
from transformers import AutoConfig
from transformers.models.mixtral.modeling_mixtral import MixtralRotaryEmbedding

from ropewalk import RopewalkError
from ropewalk.hub import Model, read_model
from ropewalk.hub.extend.config_forms import extended_config, forms_of
from ropewalk.hub.extend.effects import effect_of, trained_rotations
from ropewalk.hub.extend.rules import Extension, Start, extensions, start_of
from ropewalk.hub.extend.stacks import flags_for

CONFIGS = Path(__file__).parent.parent / "data" / "configs"


def started(name: str, trained: int | None = None) -> tuple[Model, Start]:
    model = read_model(CONFIGS / f"{name}.json")
    return model, start_of(model, trained)


def made(name: str, length: int, rule: str) -> Extension:
    return extensions(started(name)[1], length, rule)[0]


@pytest.mark.parametrize(
    ("name", "length", "factor"),
    [
        ("llama-3.2-1b", 262_144, 64.0),
        ("llama-3.1-8b", 262_144, 16.0),
        ("llama-3.1-8b", 131_080, 8 * 131_080 / 131_072),
    ],
)
def test_the_factor_of_the_models_own_rule_is_multiplied(name, length, factor):
    spec = made(name, length, "llama3").spec
    assert spec is not None
    assert getattr(spec.frequencies, "factor", None) == pytest.approx(factor, rel=1e-12)
    # Another rule starts from the trained length.
    other = made(name, length, "pi").spec
    assert other is not None
    assert getattr(other.frequencies, "factor", None) == length / 8192


def test_a_specified_trained_length_is_not_multiplied_by_the_factor():
    start = started("llama-3.1-8b", 131_072)[1]
    assert start.reach == 131_072
    with pytest.raises(RopewalkError, match="more than the 131072"):
        extensions(start, 131_072)


def test_an_explicit_amplitude_is_recomputed_for_the_new_factor():
    spec = made("olmo-3-7b", 131_072, "yarn").spec
    assert spec is not None
    assert spec.amplitude() == pytest.approx(0.1 * math.log(16) + 1, rel=1e-12)


def test_a_changed_softmax_scale_is_reported():
    own = made("deepseek-v3", 327_680, "yarn")
    notes = " ".join(made("deepseek-v3", 327_680, "ntk").notes)
    assert "the softmax scale is multiplied by 1 instead of 1.87385" in notes
    assert any("2.06" in note for note in own.notes)


def test_vllm_has_one_rule_for_latent_attention():
    model, start = started("deepseek-v3")
    for rule, supported in (("pi", False), ("llama3", False), ("yarn", True)):
        extension = extensions(start, 327_680, rule)[0]
        assert extension.spec is not None
        form = forms_of(model.config, start, extension.spec, 327_680)[0]
        result = flags_for("vllm", start, extension, 327_680, form=form, model_type="deepseek_v3")
        assert (result.flags is not None) == supported


@pytest.mark.parametrize("rule", ["yarn", "dynamic", "llama3"])
def test_head_dim_is_written_for_classes_without_a_default(rule, tmp_path):
    model, start = started("mixtral-8x7b")
    assert "head_dim" not in model.config.data
    extension = extensions(start, 131_072, rule)[0]
    assert extension.spec is not None
    for form in forms_of(model.config, start, extension.spec, 131_072):
        (tmp_path / "config.json").write_text(json.dumps(extended_config(model.config, form)), encoding="utf-8")
        config = AutoConfig.from_pretrained(tmp_path)
        assert len(MixtralRotaryEmbedding(config).inv_freq) == 64


def test_pairs_that_are_not_rotated_are_ignored():
    parameters = {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25}
    data = {"model_type": "llama", "head_dim": 512, "max_position_embeddings": 131_072, "rope_parameters": parameters}
    start = start_of(read_model(data))
    assert not start.scaled
    # The slowest of 64 pairs rotates by 1e6^(-126/512) per position.
    assert trained_rotations(start) == pytest.approx(131_072 * 1e6 ** (-126 / 512) / (2 * math.pi), rel=1e-12)
    by_rule = {extension.rule: extension for extension in extensions(start, 262_144)}
    assert by_rule["base-bound"].spec is None
    ntk = by_rule["ntk"].spec
    assert ntk is not None
    effect = effect_of(start, ntk, 262_144, by_rule["ntk"].base)
    assert effect.counts["still"] == 192
    assert effect.divided == pytest.approx((by_rule["ntk"].base or 0) ** (126 / 512) / 1e6 ** (126 / 512), rel=1e-9)
