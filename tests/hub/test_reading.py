"""read_model: layers, lengths and warnings of a config, however it is given."""

import json
import warnings
from pathlib import Path
from typing import Any

import pytest

from hub.configs import LLAMA, LLAMA3, LONG, YARN, load_spec, loaded
from ropewalk import RopewalkError
from ropewalk.hub import Lengths, Model, read_model
from ropewalk.hub.configs import keys as keys_module
from ropewalk.spec import Plain, PositionInterpolation

PI = {"rope_type": "linear", "factor": 8.0}
PARAMS = {"dim": 4096, "n_heads": 32, "head_dim": 128, "rope_theta": 1e6}
PLAIN = {key: value for key, value in LLAMA.items() if key != "max_position_embeddings"}
GEMMA = {"model_type": "gemma3_text", "head_dim": 256, "max_position_embeddings": 131072, "rope_local_base_freq": 1e4}


@pytest.mark.parametrize(
    ("config", "trained", "configured"),
    [
        (LLAMA, 131072, 131072),
        (PLAIN, None, None),
        (LLAMA | {"rope_scaling": LLAMA3}, 8192, 131072),
        (LLAMA | {"rope_scaling": YARN}, 8192, 131072),
        # Beside the parameters, as Phi-3 has it.
        (LLAMA | {"rope_scaling": LONG | {"long_factor": [2.0] * 64}}, 64, 131072),
        (LLAMA | {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, 131072, 131072),
        # Positions are divided, and no key says from which length on.
        (LLAMA | {"rope_scaling": PI}, None, 131072),
        (LLAMA | {"rope_scaling": PI | {"factor": 1.0}}, 131072, 131072),
        (LLAMA | {"rope_scaling": PI, "original_max_position_embeddings": 16384}, 16384, 131072),
        (GEMMA | {"rope_theta": 1e6, "rope_scaling": PI}, None, 131072),
        (GEMMA | {"rope_theta": 1e6}, 131072, 131072),
        ({"model_type": "gemma3", "text_config": GEMMA}, 131072, 131072),
        ({"model_type": "gptj", "n_embd": 4096, "n_head": 16, "n_positions": 2048}, 2048, 2048),
        (PARAMS, None, None),
        (PARAMS | {"max_seq_len": 32768}, 32768, 32768),
        (PARAMS | {"yarn": {"factor": 16, "original_max_position_embeddings": 16384}}, 16384, None),
        (PLAIN | {"rope_parameters": {"rope_type": "default", "max_position_embeddings": 4096}}, 4096, 4096),
        # No pair is rotated, so that no pair was trained.
        (LLAMA | {"model_type": "falcon", "alibi": True}, None, 131072),
    ],
)
@pytest.mark.filterwarnings("ignore::ropewalk.hub.RopeConfigWarning")
def test_lengths(config, trained, configured):
    assert read_model(config).lengths == Lengths(trained, configured)
    assert read_model(config).lengths == Lengths(trained, configured)


def test_however_it_is_given(tmp_path: Path):
    from transformers import LlamaConfig

    data = LLAMA | {"rope_parameters": LLAMA3 | {"rope_theta": 5e5}}
    path = tmp_path / "llama-3" / "config.json"
    path.parent.mkdir()
    path.write_text(json.dumps(data))
    given = LlamaConfig(**{key: value for key, value in data.items() if key != "model_type"})
    for config in (data, path, str(path), path.parent, given):
        model = read_model(config)
        assert model.layers == (("", load_spec(data)),)
        assert model.lengths == Lengths(8192, 131072)
        assert (model.model_type, model.warnings) == ("llama", ())


@pytest.mark.parametrize(
    ("place", "name"), [("mine/config.json", "mine"), ("mine/params.json", "mine"), ("mine/qwen.json", "qwen")]
)
def test_a_model_is_called_by_its_place(place, name, tmp_path, monkeypatch):
    path = tmp_path / place
    path.parent.mkdir()
    path.write_text(json.dumps(LLAMA))
    assert (read_model(path).name, read_model(path).path) == (name, path)
    monkeypatch.chdir(path.parent)
    assert read_model(path.name).name == name
    if path.name != "qwen.json":
        assert read_model(".").name == name


def test_without_a_place_it_is_called_by_its_family():
    assert read_model(LLAMA).name == "llama"
    assert (read_model(PARAMS).name, read_model(PARAMS).model_type) == ("model", None)
    composite = read_model({"model_type": "gemma3", "text_config": GEMMA | {"rope_scaling": PI}})
    assert (composite.name, composite.path) == ("gemma3", None)
    assert [(name, spec and spec.frequencies) for name, spec in composite.layers] == [
        ("sliding_attention", Plain(1e4)),
        ("full_attention", PositionInterpolation(1e6, 8)),
    ]


def test_warnings_are_kept_and_not_shown():
    config = LLAMA | {"model_type": "brandnew", "rope_scaling": YARN | {"factor": 4.0, "typo": 1}}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = read_model(config, pairing="half")
    _, names = loaded(config, pairing="half")
    assert [name for name, _ in model.warnings] == names == ["unknown-family", "factor-differs", "key-ignored"]
    assert all("[" not in text for _, text in model.warnings)


def test_what_is_said_twice_is_kept_once():
    sliding = {"rope_type": "default", "factor": 2.0}
    config = LLAMA | {"rope_theta": 1e4, "rotary_base": 1e4, "layer_types": ["a", "b"]}
    config |= {"rope_parameters": {"a": {"rope_type": "default"}, "b": sliding}}
    _, names = loaded(config)
    assert names == ["key-ignored"] * 3
    assert [name for name, _ in read_model(config).warnings] == ["key-ignored"] * 2


def test_warnings_of_others_go_on(monkeypatch):
    copied = keys_module._copied

    def noisy(*arguments: Any) -> Any:
        warnings.warn("somebody else's", UserWarning, stacklevel=1)
        return copied(*arguments)

    monkeypatch.setattr(keys_module, "_copied", noisy)
    with pytest.warns(UserWarning, match="somebody else's"):
        assert isinstance(read_model(LLAMA), Model)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "brandnew"}, "pairing="),
        (LLAMA | {"max_position_embeddings": "long"}, "max_position_embeddings"),
        (LLAMA | {"rope_scaling": PI, "original_max_position_embeddings": 0.5}, "original_max_position_embeddings"),
        ("no/such/config.json", "No such file"),
        (7, "the path of a config.json"),
    ],
)
def test_bad_input(config, message):
    with pytest.raises(RopewalkError, match=message):
        read_model(config)
