"""Rope types that `register_rope_types` adds to transformers: the same frequencies, validated, in models."""

import logging
from typing import Any

import numpy as np
import pytest
import torch
from huggingface_hub.errors import StrictDataclassClassValidationError
from transformers import DeepseekV3Config, Gemma3TextConfig, GPTNeoXConfig, LlamaConfig, LlamaForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS, RotaryEmbeddingConfigMixin

from ropewalk import Explicit, Llama3, RopeSpec, RopewalkError, RotaryEmbedding, Yarn, load_spec
from ropewalk.hub import extend_model, register_rope_types
from ropewalk.hub.adapters.rope_types import rope_parameters_of
from ropewalk.spec import AcrossHeads, DynamicNTK, NTKByParts, NTKFixed, NTKMixed

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "attn_implementation": "eager",
}
RULES = [
    NTKByParts(10_000, factor=4, trained_length=64),
    NTKFixed(10_000, factor=4),
    NTKMixed(10_000, factor=4),
    Yarn(10_000, 4, 64, ramp="ratio"),
    Yarn(10_000, 40, 64, mscale=0.7, policy="deepseek"),
    Llama3(500_000, 8, 64),
    Explicit([1.0, 0.3, 0.0, 1e-4]),
]


class OwnAngles(torch.nn.Module):
    """The angles of a spec by ropewalk, in the form that layers of Llama receive."""

    def __init__(self, spec: RopeSpec) -> None:
        super().__init__()
        self.rope = RotaryEmbedding(spec)

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor, **options: Any) -> tuple[torch.Tensor, ...]:
        length = int(position_ids.max()) + 1 if self.rope.spec.varies else None
        tables = self.rope.at(position_ids, **({} if length is None else {"length": length}))
        cos, sin = (torch.cat((table, table), dim=-1).to(x.dtype) for table in tables)
        return cos, sin


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
def test_logits_are_those_of_our_own_angles(rule, caplog):
    register_rope_types()
    spec = RopeSpec(8, rule, pairing="half")
    with caplog.at_level(logging.WARNING, logger="transformers"):
        config = LlamaConfig(**SIZES, max_position_embeddings=256, **spec.to_config("ropewalk"))
    assert "rope" not in caplog.text
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).double().eval()
    ids = torch.randint(64, (2, 40))
    # The rotation is seen in the logits only if the rule differs from the default of transformers.
    plain = LlamaForCausalLM(LlamaConfig(**SIZES)).double().eval()
    plain.load_state_dict(model.state_dict())
    with torch.no_grad():
        through_transformers, without = model(ids).logits, plain(ids).logits
        setattr(model.model, "rotary_emb", OwnAngles(spec))  # noqa: B010, another class for pyright
        wanted = model(ids).logits
    size = wanted.abs().max()
    assert (through_transformers - wanted).abs().max() < 1e-5 * size
    assert (without - wanted).abs().max() > 1e-3 * size
    again = load_spec(LlamaConfig.from_dict(config.to_dict()))
    assert isinstance(again, RopeSpec)
    assert again.frequencies == rule


def test_a_rule_that_depends_on_the_length_grows_with_it():
    register_rope_types()
    rule = DynamicNTK(10_000, factor=2, trained_length=32)
    spec = RopeSpec(8, rule, pairing="half")
    keys = spec.to_config("ropewalk")
    assert keys["rope_parameters"]["rope_type"] == "ropewalk_dynamic"
    rotary = LlamaForCausalLM(LlamaConfig(**SIZES, **keys)).model.rotary_emb
    for length in (8, 32, 48, 80):
        cos, sin = rotary(torch.zeros(1), torch.arange(length)[None])
        for table, own in zip((cos, sin), OwnAngles(spec)(torch.zeros(1), torch.arange(length)[None]), strict=True):
            # transformers computes angles in float32.
            torch.testing.assert_close(table, own, rtol=0, atol=length * 2**-23)


@pytest.mark.parametrize(
    ("config_class", "options"),
    [
        (LlamaConfig, SIZES | {"head_dim": 24}),
        (GPTNeoXConfig, {"hidden_size": 64, "num_attention_heads": 4}),
        (DeepseekV3Config, {}),
    ],
)
def test_the_width_is_that_of_the_family(config_class, options):
    register_rope_types()
    plain = load_spec(config_class(**options))
    assert isinstance(plain, RopeSpec)
    rule = NTKByParts(10_000, factor=4, trained_length=64)
    keys = RopeSpec(plain.rotated_dim, rule, pairing=plain.pairing).to_config("ropewalk")["rope_parameters"]
    old = config_class(**options).rope_parameters
    kept = {key: old[key] for key in ("partial_rotary_factor",) if key in old}
    inv_freq, amplitude = rope_parameters_of(config_class(**options, rope_parameters={**keys, **kept}))
    np.testing.assert_array_equal(inv_freq.numpy(), rule.evaluate(plain.rotated_dim).astype(np.float32))
    assert amplitude == 1.0


def test_parameters_per_layer_type():
    register_rope_types()
    rule = Explicit([1.0, 0.5, 0.25, 0.125])
    layers = {
        "full_attention": RopeSpec(8, rule, pairing="half").to_config("ropewalk")["rope_parameters"],
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    }
    config = Gemma3TextConfig(head_dim=8, num_hidden_layers=6, rope_parameters=layers)
    inv_freq, _ = rope_parameters_of(config, layer_type="full_attention")
    assert inv_freq.tolist() == list(rule.evaluate(8))
    loaded: Any = load_spec(config)
    assert loaded["full_attention"].frequencies == rule


def test_extend_writes_the_rules_that_transformers_lacks():
    register_rope_types()
    base = {"model_type": "llama", **SIZES, "head_dim": 8, "max_position_embeddings": 64, "rope_theta": 10_000.0}
    extended = extend_model(base, 256, rule="yarn-paper")
    (offer,) = extended.offers
    assert offer.engines == 0  # without the registration
    assert [form.name for form in offer.forms] == ["transformers 5 with ropewalk"]
    assert offer.no_keys is None
    keys = extended.config("yarn-paper")
    model = LlamaForCausalLM(LlamaConfig.from_dict(keys))
    rule = Yarn(10_000, 4.0, 64, ramp="ratio")
    np.testing.assert_array_equal(model.model.rotary_emb.inv_freq.numpy(), rule.evaluate(8).astype(np.float32))
    assert model.model.rotary_emb.attention_scaling == rule.amplitude()
    loaded: Any = load_spec(keys)
    assert loaded.frequencies == rule


def test_a_second_registration_changes_nothing():
    own = {name: ROPE_INIT_FUNCTIONS[name] for name in ("yarn", "llama3", "linear")}
    assert register_rope_types() == register_rope_types()
    before = dict(ROPE_INIT_FUNCTIONS)
    register_rope_types()
    assert before == ROPE_INIT_FUNCTIONS
    assert all(ROPE_INIT_FUNCTIONS[name] is function for name, function in own.items())


def test_what_a_model_cannot_compute_is_refused(as_a_user):
    register_rope_types()
    with pytest.raises(RopewalkError, match="one row of frequencies"):
        RopeSpec(8, AcrossHeads(10_000, 4)).to_config("ropewalk")
    good = RopeSpec(8, NTKFixed(10_000, factor=4), pairing="half").to_config("ropewalk")["rope_parameters"]
    for bad in ({"rope_theta": 500.0}, {"rule": {"rule": "NTKFixd"}}, {"rule": None}):
        keys: Any = good | bad
        with pytest.raises(StrictDataclassClassValidationError, match=r"rope_theta|NTKFixed|rule"):
            LlamaConfig(**SIZES, rope_parameters=keys)
        with pytest.raises(RopewalkError, match=r"rope_theta|NTKFixed|rule"):
            load_spec({"model_type": "llama", "head_dim": 8, "rope_parameters": keys})


def test_without_the_registration_transformers_raises_its_own_error(monkeypatch, caplog):
    register_rope_types()
    for name in register_rope_types():
        monkeypatch.delitem(ROPE_INIT_FUNCTIONS, name)
        monkeypatch.delattr(RotaryEmbeddingConfigMixin, f"_validate_{name}_rope_parameters")
    with caplog.at_level(logging.WARNING, logger="transformers"):
        config = LlamaConfig(**SIZES, **RopeSpec(8, NTKFixed(10_000, factor=4)).to_config("ropewalk"))
    with pytest.raises(KeyError, match="'ropewalk'"):
        LlamaForCausalLM(config)
