"""RopeSpec.to_config: keys that load_spec, and transformers, read back to the same rotation."""

import numpy as np
import pytest

from hub.configs import LLAMA, LLAMA3, LONG, YARN, loaded
from hub.test_load_spec import DEEPSEEK
from ropewalk import Explicit, LogTemperature, RopeSpec, RopewalkError, XPos
from ropewalk.spec import Axes, Proportional, StepTemperature, Yarn


def test_a_spec_writes_keys_that_load_it_again():
    configs = [
        LLAMA | {"rope_theta": 5e5},
        LLAMA | {"rope_scaling": LLAMA3, "rope_theta": 5e5},
        LLAMA | {"rope_scaling": YARN | {"attention_factor": 0.9, "beta_fast": 30.0, "truncate": False}},
        LLAMA | {"rope_scaling": {"type": "linear", "factor": 4.0}},
        LLAMA | {"rope_scaling": {"type": "dynamic", "factor": 4.0}},
        LLAMA | {"rope_scaling": LONG | {"long_factor": [2.0] * 64, "factor": 4.0}},
        LLAMA | {"model_type": "stablelm", "partial_rotary_factor": 0.25},
        LLAMA
        | {"model_type": "qwen2_vl_text", "rope_scaling": {"rope_type": "default", "mrope_section": [16, 24, 24]}},
        LLAMA
        | {"model_type": "qwen3_vl_text", "rope_scaling": {"rope_type": "default", "mrope_section": [24, 20, 20]}},
        DEEPSEEK,
    ]
    for config in configs:
        spec, _ = loaded(config)
        rest = {key: value for key, value in config.items() if key not in ("rope_scaling", "rope_theta")}
        rest = {key: value for key, value in rest.items() if key != "partial_rotary_factor"}
        assert loaded(rest | spec.to_config("transformers"))[0] == spec


def test_ntk_is_written_as_another_base():
    spec, _ = loaded(LLAMA | {"model_type": "hunyuan_v1_dense", "rope_scaling": {"type": "dynamic", "alpha": 1000.0}})
    again, _ = loaded(LLAMA | {"model_type": "hunyuan_v1_dense"} | spec.to_config("transformers"))
    np.testing.assert_allclose(again.inv_freq(), spec.inv_freq(), rtol=1e-13)


def test_keys_that_would_say_something_else_are_not_written():
    for spec in (
        RopeSpec(128, axes=Axes.rarest_first([16, 24, 24])),
        RopeSpec(8, axes=Axes([[0.5] * 4, [0.5] * 4], range(4), 8)),
        RopeSpec(128, Proportional(1e4, 0.25), rotary_dim=64),
        RopeSpec(128, Yarn(1e4, 4, 4096), query_temperature=StepTemperature(0.1, 8192)),
        RopeSpec(8, query_temperature=LogTemperature(9)),
    ):
        with pytest.raises(RopewalkError, match="to_config"):
            spec.to_config("transformers")
    for rule in (
        Yarn(1e4, 40, 4096, mscale=0.7, policy="deepseek"),
        Yarn(1e4, 40, 4096, attention_factor=0.5, mscale=1.0, mscale_all_dim=0.5, policy="vllm"),
    ):
        again = loaded(LLAMA | RopeSpec(128, rule).to_config("transformers"))[0]
        assert again.amplitude() == pytest.approx(rule.amplitude())


@pytest.mark.slow
def test_every_rotated_width_is_read_back():
    for head_dim in range(8, 400, 2):
        # Other values for each head_dim.
        for rotated_dim in range(2 + head_dim % 14, head_dim, 14):
            spec = RopeSpec(head_dim, rotary_dim=rotated_dim, pairing="half")
            assert (
                loaded({"model_type": "phi3", "head_dim": head_dim} | spec.to_config("transformers"))[0].rotated_dim
                == rotated_dim
            )


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("xpos", "a rotation that transformers computes"),
        ("ratio", "a rule that transformers has a rope_type for"),
        ("explicit", "a rule that transformers has a rope_type for"),
        ("log", "a temperature that transformers has a key for"),
    ],
)
def test_what_transformers_has_no_key_for_is_refused(spec, message, as_a_user):
    made = {
        "xpos": RopeSpec(8, xpos=XPos(64)),
        "ratio": RopeSpec(8, Yarn(1e4, 4, 64, ramp="ratio")),
        "explicit": RopeSpec(4, Explicit([1.0, 0.5])),
        "log": RopeSpec(8, query_temperature=LogTemperature(9)),
    }[spec]
    with pytest.raises(RopewalkError, match=message):
        made.to_config("transformers")
    with pytest.raises(RopewalkError, match="'transformers'"):
        made.to_config("vllm")
