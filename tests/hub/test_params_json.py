"""Meta's params.json, as published beside the original weights of Llama 1 to 3.3."""

import json
import math
import sys
from typing import Any

import numpy as np
import pytest

import ropewalk as rw
from hub.configs import load_spec, loaded
from ropewalk.hub import extend_model, inspect_model, read_model
from ropewalk.tools.cli import main

SIZES = {"multiple_of": 256, "norm_eps": 1e-05}
LLAMA_1: dict[str, Any] = SIZES | {"dim": 4096, "n_heads": 32, "n_layers": 32, "vocab_size": -1}
LLAMA_2_70B: dict[str, Any] = SIZES | {"dim": 8192, "n_heads": 64, "n_kv_heads": 8, "n_layers": 80, "vocab_size": -1}
CODE_LLAMA = LLAMA_1 | {"rope_theta": 1e6, "ffn_dim_multiplier": 1.0}
LLAMA_3 = LLAMA_1 | {"n_kv_heads": 8, "vocab_size": 128256, "rope_theta": 500000.0, "ffn_dim_multiplier": 1.3}
LLAMA_3_1 = LLAMA_3 | {"use_scaled_rope": True}
LLAMA_3_2_1B = LLAMA_3_1 | {"dim": 2048, "n_layers": 16}
LLAMA_3_2_3B = LLAMA_3_1 | {"dim": 3072, "n_heads": 24, "n_layers": 28}
LLAMA_3_2_11B = LLAMA_3_1 | {"vision_chunk_size": 448, "vision_num_cross_attention_layers": 8}


@pytest.mark.parametrize(
    ("params", "rule", "head_dim"),
    [
        (LLAMA_1, rw.Plain(1e4), 128),
        (LLAMA_2_70B, rw.Plain(1e4), 128),
        (CODE_LLAMA, rw.Plain(1e6), 128),
        (LLAMA_3, rw.Plain(5e5), 128),
        (LLAMA_3 | {"use_scaled_rope": False}, rw.Plain(5e5), 128),
        (LLAMA_3_1, rw.Llama3(5e5, 8, 8192, 1, 4), 128),
        (LLAMA_3_2_11B, rw.Llama3(5e5, 8, 8192, 1, 4), 128),
        # Without n_kv_heads and multiple_of, as people cut it down.
        ({"dim": 64, "n_heads": 4, "rope_theta": 1e4, "use_scaled_rope": False}, rw.Plain(1e4), 16),
    ],
)
def test_the_rotation(params, rule, head_dim, tmp_path):
    (tmp_path / "params.json").write_text(json.dumps(params))
    for given in (params, tmp_path, tmp_path / "params.json", str(tmp_path)):
        spec, names = loaded(given)
        assert (spec.frequencies, spec.head_dim, spec.rotated_dim, names) == (rule, head_dim, head_dim, [])
        # Meta's code views features as complex numbers: neighbours form a pair. Converted weights are half.
        assert spec.pairing == "interleaved"


@pytest.mark.parametrize(("params", "head_dim"), [(LLAMA_3_2_1B, 64), (LLAMA_3_2_3B, 128)])
def test_a_factor_that_the_file_does_not_state_is_warned_of(params, head_dim):
    spec, names = loaded(params)
    assert (spec.frequencies, spec.head_dim) == (rw.Llama3(5e5, 8, 8192, 1, 4), head_dim)
    assert names == ["factor-not-stated"]
    assert "it is 32" in dict(read_model(params).warnings)["factor-not-stated"]


def test_frequencies_by_the_formula_of_metas_code():
    # Written from the published rule: a wavelength below 8192 / 4 stays, one above 8192 is divided by 8, and between
    # them the share of each goes with the number of rotations within 8192.
    def scaled(frequency: float) -> float:
        wavelength = 2 * math.pi / frequency
        if wavelength < 8192 / 4:
            return frequency
        if wavelength > 8192 / 1:
            return frequency / 8
        share = (8192 / wavelength - 1) / (4 - 1)
        return (1 - share) * frequency / 8 + share * frequency

    expected = [scaled(500000.0 ** (-2 * i / 128)) for i in range(64)]
    np.testing.assert_allclose(load_spec(LLAMA_3_1).inv_freq(), expected, rtol=1e-14)
    # As the config.json of the same model has it, but for the pairing.
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    llama = {"model_type": "llama", "head_dim": 128, "rope_theta": 500000.0}
    other = load_spec(llama | {"rope_scaling": {"rope_type": "llama3"} | scaling})
    assert (other.frequencies, other.pairing) == (load_spec(LLAMA_3_1).frequencies, "half")


def test_what_else_is_read():
    model = read_model(LLAMA_3_1)
    assert (model.lengths.trained, model.lengths.configured, model.model_type) == (8192, None, None)
    assert model.kinds == ("full_attention",) * 32
    (layer,) = inspect_model(LLAMA_3_1).layers
    assert layer.views[0].counted() == {"unchanged": 29, "between": 6, "interpolated": 29}
    extended = extend_model(LLAMA_3_1, 262_144, rule="yarn")
    assert extended.cache == 2 * 32 * 8 * 128 * 262_144 * 2
    # There are no keys in which a params.json could say it.
    assert all(offer.forms == () for offer in extended.offers)
    assert read_model(LLAMA_1).lengths.trained is None
    assert read_model(LLAMA_1 | {"max_seq_len": 4096}).lengths.trained == 4096


def test_the_command_shows_it(tmp_path, monkeypatch, capsys):
    (tmp_path / "Llama-3.2-1B").mkdir()
    (tmp_path / "Llama-3.2-1B" / "params.json").write_text(json.dumps(LLAMA_3_2_1B))
    (tmp_path / "Llama-3.2-1B" / "consolidated.00.pth").write_bytes(b"")
    monkeypatch.setattr(sys, "argv", ["ropewalk", "inspect", str(tmp_path / "Llama-3.2-1B")])
    with pytest.raises(SystemExit) as stop:
        main()
    out = capsys.readouterr().out
    assert stop.value.code in (0, None)
    assert "Llama-3.2-1B" in out
    assert "interleaved" in out
    assert "factor-not-stated" in out


def test_a_pairing_beside_it_must_agree():
    assert load_spec(LLAMA_1, pairing="interleaved") == load_spec(LLAMA_1)
    with pytest.raises(rw.RopewalkError, match="'interleaved', the pairing of this family"):
        load_spec(LLAMA_1, pairing="half")


def test_a_file_that_could_be_of_either_says_how_they_are_told_apart():
    with pytest.raises(rw.RopewalkError, match="'rope_theta'") as caught:
        load_spec({"dim": 4096, "n_layers": 32, "n_heads": 32})
    for word in ("Meta", "multiple_of", "ffn_dim_multiplier", "use_scaled_rope", "Mistral", "rope_theta"):
        assert word in str(caught.value)


@pytest.mark.parametrize("params", [LLAMA_1, LLAMA_3_1, {"dim": 4096, "n_layers": 32, "n_heads": 32}])
@pytest.mark.parametrize("base", [-1, 0, math.nan, math.inf, "10000", True])
def test_a_base_that_cannot_be_is_named_as_in_the_file(params, base):
    with pytest.raises(rw.RopewalkError, match="the key 'rope_theta'"):
        load_spec(params | {"rope_theta": base})


@pytest.mark.parametrize("params", [LLAMA_3, {"dim": 4096, "n_layers": 32, "rope_theta": 1e6}])
def test_heads_that_do_not_divide_the_width_are_an_error(params):
    with pytest.raises(rw.RopewalkError, match="the key 'n_heads'"):
        load_spec(params | {"n_heads": 33})
    assert load_spec(params | {"n_heads": 33, "head_dim": 128}).head_dim == 128
    with pytest.raises(rw.RopewalkError, match="the key 'n_heads'"):
        load_spec(params | {"n_heads": 0})
