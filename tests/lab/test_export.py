"""Trained models as folders: transformers, `inspect`, `convert` and `extend` read them."""

import dataclasses
import json

import pytest
import torch
from transformers import LlamaForCausalLM

from lab.small_runs import CPU, TINY
from ropewalk.errors import RopewalkError
from ropewalk.hub import convert_checkpoint, load_spec
from ropewalk.lab.export import export, load_weights
from ropewalk.lab.training import train
from ropewalk.spec import RopeSpec

TOKENS = torch.arange(12)[None] * 7 % 256


@pytest.fixture(scope="module")
def half(tmp_path_factory):
    run = dataclasses.replace(TINY, encoding="rope pairing=half", steps=3)
    model, _ = train(run, CPU)
    with torch.no_grad():
        # After three steps attention is almost uniform, and a wrong pairing would hardly change it.
        for name, parameter in model.named_parameters():
            if "q_proj" in name or "k_proj" in name:
                parameter.mul_(20)
    folder = tmp_path_factory.mktemp("half")
    export(model, run, folder)
    return run, model, folder


def test_transformers_computes_the_same(half):
    _, model, folder = half
    llama = LlamaForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(llama(TOKENS).logits, model(TOKENS), rtol=1e-5, atol=1e-5)


def test_the_spec_of_the_folder_is_that_of_the_model(half):
    _, _, folder = half
    spec = load_spec(folder)
    assert isinstance(spec, RopeSpec)
    assert (spec.head_dim, spec.pairing) == (16, "half")
    assert spec.inv_freq().tolist() == RopeSpec(16).inv_freq().tolist()


def test_a_converted_model_has_the_same_logits(half, tmp_path):
    run, model, folder = half
    convert_checkpoint(folder, tmp_path / "pairs", to="interleaved")
    converted = load_weights(dataclasses.replace(run, encoding="rope"), tmp_path / "pairs")
    wrong = load_weights(run, tmp_path / "pairs")
    with torch.no_grad():
        torch.testing.assert_close(converted(TOKENS), model(TOKENS), rtol=1e-5, atol=1e-5)
        assert not torch.allclose(wrong(TOKENS), model(TOKENS), atol=1e-3)


@pytest.mark.parametrize("encoding", ["t5", "learned", "rope", "rope learned=True", "alibi"])
def test_other_models_are_read_back(encoding, tmp_path):
    run = dataclasses.replace(TINY, encoding=encoding, steps=2)
    model, _ = train(run, CPU)
    export(model, run, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "ropewalk_lab"
    if encoding == "rope":
        for pairing in (None, "interleaved"):
            assert load_spec(tmp_path, pairing=pairing, angles="exact") == RopeSpec(16)
        with pytest.raises(RopewalkError, match="expected: 'interleaved', the pairing of this family"):
            load_spec(tmp_path, pairing="half")
        return
    # Not even with a pairing: the rest of the config does not say that it is no plain RoPE.
    for pairing in (None, "half"):
        with pytest.raises(RopewalkError, match=f"got: +softmax attention, and the encoding '{encoding}'\n"):
            load_spec(tmp_path, pairing=pairing)
    with torch.no_grad():
        assert torch.equal(load_weights(run, tmp_path)(TOKENS[:, :8]), model(TOKENS[:, :8]))
