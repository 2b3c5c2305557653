"""accelerate: tiny models of each family give their own logits and gradients, and are left as they were."""

import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers

from hub.accelerated import FAMILIES, exact, outcome, rms, tiny, tokens
from ropewalk.hub.accelerate.acceleration import accelerate
from ropewalk.hub.accelerate.plan import PLAIN
from ropewalk.hub.accelerate.rotation_probe import rotation_of
from slow import slow

# Both round the same numbers, each in its own order: neither is often twice as far from the truth as the other.
TIMES = 2.0


@pytest.fixture(autouse=True)
def quiet():
    transformers.logging.set_verbosity_error()
    with warnings.catch_warnings():
        # On processors without bfloat16 torch says at every product that it takes another way.
        warnings.filterwarnings("ignore", "mkldnn_matmul failed")
        yield


def attention_of(model: Any) -> list[Any]:
    # The attention module of RoFormer contains the one that rotates.
    modules = [module for name, module in model.named_modules() if name.endswith(("self_attn", "attention"))]
    return [getattr(module, "self", module) for module in modules]


def state_of(model: Any) -> list[tuple[type, dict[str, Any]]]:
    return [(type(module), dict(module.__dict__)) for module in model.modules()]


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_gradients_are_the_models_own(family):
    model, ids = tiny(family), tokens()
    own, truth = outcome(model, ids), exact(model, ids)
    before = state_of(model)
    with accelerate(model) as handle:
        rotation, norm = FAMILIES[family][3:]
        assert {part.rotation for part in handle.patched} == {rotation}
        assert {part.norm for part in handle.patched} == {norm}
        assert len(handle.patched) == len(attention_of(model)) == 2
        assert handle.left == ()
        ours = outcome(model, ids)
    for mine, theirs, right in zip(ours, own, truth, strict=True):
        assert rms(mine - right) <= TIMES * rms(theirs - right)
        # Something was done, and little: float32 rounds to 2^-24 of each number.
        assert 0 < rms(mine - theirs) < 1e-4 * rms(right)
    assert state_of(model) == before
    assert all(torch.equal(again, first) for again, first in zip(outcome(model, ids), own, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, slow(torch.float16)], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_half_precision_is_no_further_from_the_truth(family, dtype):
    model, ids = tiny(family).to(dtype), tokens()
    own, truth = outcome(model, ids), exact(model, ids)
    with accelerate(model):
        ours = outcome(model, ids)
    for mine, theirs, right in zip(ours, own, truth, strict=True):
        assert rms(mine - right) <= TIMES * rms(theirs - right)


@pytest.mark.parametrize("family", ["llama", "qwen3", "deepseek_v3", "cohere"])
def test_float64_agrees_to_the_last_bits(family):
    model, ids = tiny(family).double(), tokens()
    own = outcome(model, ids)
    with accelerate(model):
        ours = outcome(model, ids)
    # Cohere rotates in float32 and Qwen 3 normalizes in float32, whatever the dtype of the input.
    size = 1e-5 if family in ("cohere", "qwen3") else 1e-12
    for mine, theirs in zip(ours, own, strict=True):
        assert rms(mine - theirs) < size * rms(theirs)


@pytest.mark.parametrize("family", FAMILIES)
def test_other_models_of_the_class_are_left_alone(family):
    model, other, ids = tiny(family), tiny(family, seed=1), tokens(1, 5)
    kind = type(attention_of(model)[0])
    names = dict(kind.forward.__globals__)
    before, own, forward = state_of(other), other(ids).logits, kind.forward
    with accelerate(model):
        assert type(attention_of(model)[0]) is not kind
        assert issubclass(type(attention_of(model)[0]), kind)
        assert kind.forward is forward
        assert kind.forward.__globals__ == names
        assert state_of(other) == before
        assert torch.equal(other(ids).logits, own)
        # What is loaded later, too.
        assert type(attention_of(tiny(family, seed=2))[0]) is kind


def test_a_wrong_pairing_is_noticed():
    # Llama's own model with the pairs of GPT-J is another model: were the probe to say so, logits would tell.
    model, ids = tiny("llama"), tokens()
    own, truth = outcome(model, ids), exact(model, ids)
    found: Any = rotation_of(type(attention_of(model)[0]).forward.__globals__["apply_rotary_pos_emb"])
    with pytest.MonkeyPatch.context() as patch:
        wrong = replace(found, pairing="interleaved")
        patch.setattr("ropewalk.hub.accelerate.plan.rotation_of", lambda *given: wrong)
        with accelerate(model):
            ours = outcome(model, ids)
    for mine, theirs, right in zip(ours, own, truth, strict=True):
        assert rms(mine - right) > 100 * TIMES * rms(theirs - right)


def test_what_the_handle_says():
    model = tiny("qwen3")
    handle = accelerate(model)
    assert repr(handle) == (
        "Acceleration of Qwen3ForCausalLM: 2 modules with ropewalk's rotation\n"
        "  2 x Qwen3Attention: apply_rotary_pos_emb, half pairs; QK-norm: fused"
    )
    assert [part.name for part in handle.patched] == ["model.layers.0.self_attn", "model.layers.1.self_attn"]
    assert handle.active
    assert hasattr(type(attention_of(model)[0]), PLAIN)
    handle.undo()
    handle.undo()
    assert not handle.active
    assert "undone" in repr(handle)
    assert not hasattr(type(attention_of(model)[0]), PLAIN)


def test_an_error_inside_the_block_undoes_it():
    model = tiny("llama")
    kind = type(attention_of(model)[0])
    with pytest.raises(KeyError), accelerate(model):
        raise KeyError
    assert type(attention_of(model)[0]) is kind
