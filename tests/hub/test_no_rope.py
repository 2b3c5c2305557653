"""Families without RoPE: what is said of them, and that transformers' code of none of them rotates."""

import inspect
import re
from pathlib import Path
from typing import Any

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from hub.configs import load_spec
from ropewalk import RopewalkError
from ropewalk.hub import read_model
from ropewalk.hub.extend.config_forms import FIXED
from ropewalk.hub.families.table import FAMILIES, WITHOUT_ROPE


def code_of(name: str) -> str:
    """The model code of a family in transformers."""
    folder = Path(inspect.getfile(CONFIG_MAPPING[name])).parent
    return "".join(path.read_text(encoding="utf-8") for path in sorted(folder.glob("modeling*.py")))


@pytest.mark.parametrize("name", WITHOUT_ROPE)
def test_no_code_of_theirs_rotates(name):
    assert name not in FAMILIES
    code = code_of(name)
    # Jamba's file has the function, and does not call it.
    assert not re.search(r"= apply_rotary_pos_emb\(|RotaryEmbedding\(|rope_parameters|rope_theta", code)
    traces = {"ALiBi": "alibi", "T5's relative position bias": "relative_attention_bias"}
    assert traces.get(WITHOUT_ROPE[name], "") in code


@pytest.mark.parametrize(
    ("name", "what", "do"),
    [
        ("bloom", "ALiBi", "ropewalk plot bias"),
        ("mpt", "ALiBi", "ropewalk plot bias"),
        ("t5", "T5's relative position bias", "ropewalk plot bias"),
        ("bert", "learned position embeddings", "a model with RoPE"),
        ("gpt2", "learned position embeddings", "a model with RoPE"),
        ("clip", "learned position embeddings", "a model with RoPE"),
        ("mamba", "no position encoding: order comes from its recurrence", "a model with RoPE"),
        ("xglm", "sinusoidal position embeddings", "ropewalk plot sinusoidal"),
    ],
)
@pytest.mark.parametrize("pairing", [None, "half"])
def test_what_they_have_is_said(name, what, do, pairing):
    with pytest.raises(RopewalkError) as caught:
        read_model({"model_type": name, "text_config": {"model_type": name}}, pairing=pairing)
    assert caught.value.got == f"{name}, which has {what} and no RoPE"
    assert do in caught.value.do
    assert "did you mean" not in str(caught.value)


@pytest.mark.parametrize(
    "keys", [{"rope_theta": 1e4}, {"position_embedding_type": "rope"}, {"attn_config": {"rope": True}}]
)
def test_one_that_took_the_name_and_rotates_is_read(keys):
    config: dict[str, Any] = {"model_type": "mpt", "head_dim": 8, **keys}
    assert read_model(config, pairing="half").layers[0][1] is not None


def test_families_whose_code_reads_no_rope_parameters_are_all_known():
    """Such code would load an extended config and compute what it did before."""
    families = [name for name in FAMILIES if name in CONFIG_MAPPING and not callable(FAMILIES[name].axes)]
    deaf = {name for name in families if "rope_parameters" not in code_of(name)}
    # Kimi Linear does not rotate.
    assert deaf - {"kimi_linear"} == set(FIXED)


def test_load_spec_says_it_too():
    with pytest.raises(RopewalkError, match="bert, which has learned position embeddings and no RoPE"):
        load_spec({"model_type": "bert", "hidden_size": 64, "num_attention_heads": 4})
