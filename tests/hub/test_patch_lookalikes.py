"""accelerate and what only resembles a rotation, an RMSNorm or a doubled table: left alone, or computed rightly."""

import copy
import warnings
from typing import Any

import pytest
import torch
import transformers
from transformers.models.llama import modeling_llama
from transformers.models.qwen3 import modeling_qwen3

from hub import lookalikes
from hub.accelerated import outcome, rms, tiny, tokens
from hub.lookalikes import GAINS, NORMS, NOT_DOUBLED, NOT_ROTATIONS, ROTATIONS, Tables, rotate_half, rotated
from ropewalk import RopewalkError
from ropewalk.hub.accelerate import plan
from ropewalk.hub.accelerate.acceleration import Acceleration, accelerate

# Batch, length, dtype, training mode, gradients: calls that a probe may not have made.
CALLS = [
    (1, 1, torch.float32, False, False),
    (2, 12, torch.float32, False, True),
    (3, 37, torch.float32, True, True),
    (1, 80, torch.float32, True, False),
    (2, 33, torch.bfloat16, False, False),
]
# Of float32 results, relative to their size; a look-alike is off by more than a tenth.
APART = {torch.float32: 1e-4, torch.bfloat16: 0.05}


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    transformers.logging.set_verbosity_error()
    monkeypatch.setattr(lookalikes, "TRAINS", False)
    lookalikes.CALLS.clear()
    lookalikes.TABLES.clear()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "mkldnn_matmul failed")
        yield


def computed(model: Any, monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Logits, and gradients where they are asked for, of each call; large weights, so that a clamp would show."""
    results: list[torch.Tensor] = []
    for batch, length, dtype, training, gradients in CALLS:
        monkeypatch.setattr(lookalikes, "TRAINS", training)
        called, ids = model.to(dtype).train(training), tokens(batch, length)
        if gradients:
            results += outcome(called, ids)
        else:
            with torch.no_grad():
                results.append(called(ids, use_cache=False).logits.double())
    return results


def agrees(model: Any, plain: Any, monkeypatch: pytest.MonkeyPatch) -> bool:
    sizes = [APART[dtype] for _, _, dtype, _, gradients in CALLS for _ in range(1 + gradients)]
    ours, own = computed(model, monkeypatch), computed(plain, monkeypatch)
    return all(rms(mine - right) <= size * rms(right) for mine, right, size in zip(ours, own, sizes, strict=True))


def tried(model: Any) -> Acceleration | str:
    try:
        return accelerate(model)
    except RopewalkError as error:
        return error.got


@pytest.mark.parametrize("name", NOT_ROTATIONS)
def test_what_only_resembles_a_rotation_is_refused(name, monkeypatch):
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", NOT_ROTATIONS[name])
    found = tried(tiny("llama"))
    assert isinstance(found, str)
    reasons = ("its code may depend on the call: line ", "its results have neither the dtype of q nor", "source is not")
    reasons += ("it computes a different rotation for a batch of ", "its code has a constant other than 0, 0.5, ")
    reasons += ("its code splits features too often: ", "its code joins tensors too often: ")
    assert any(reason in found for reason in reasons)
    # It was not called either: a cache would hold the tables of a probe.
    assert (lookalikes.CALLS, lookalikes.TABLES) == ([], {})


@pytest.mark.parametrize("name", ROTATIONS)
def test_what_is_a_rotation_is_taken(name, monkeypatch):
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", ROTATIONS[name])
    model = tiny("llama")
    plain = copy.deepcopy(model)
    assert isinstance(accelerate(model), Acceleration)
    assert agrees(model, plain, monkeypatch)


@pytest.mark.parametrize("name", NORMS)
def test_what_only_resembles_a_norm_is_called_itself(name, monkeypatch):
    monkeypatch.setattr(modeling_qwen3, "Qwen3RMSNorm", NORMS[name])
    model = tiny("qwen3")
    with torch.no_grad():
        for layer in model.model.layers:
            # Rows above the clamp.
            layer.self_attn.q_proj.weight *= 100
    plain = copy.deepcopy(model)
    handle = accelerate(model)
    assert {part.norm for part in handle.patched} != {"fused"}
    assert agrees(model, plain, monkeypatch)


@pytest.mark.parametrize("name", GAINS)
def test_norms_that_read_more_than_weight_and_epsilon_may_differ_by_layer_and_change(name, monkeypatch):
    monkeypatch.setattr(modeling_qwen3, "Qwen3RMSNorm", GAINS[name])
    model = tiny("qwen3")

    def set_to(models: list[Any], *gains: float) -> None:
        for one in models:
            for layer, gain in zip(one.model.layers, gains, strict=True):
                for norm in (layer.self_attn.q_norm, layer.self_attn.k_norm):
                    norm.gain.fill_(gain)
                    norm.scale, norm.variance_epsilon = gain, gain - 1 + 1e-6

    set_to([model], 1, 3)
    plain = copy.deepcopy(model)
    accelerate(model)
    assert agrees(model, plain, monkeypatch)
    set_to([model, plain], 3, 2)
    assert agrees(model, plain, monkeypatch)


def test_norms_with_other_epsilons_are_fused(monkeypatch):
    model = tiny("qwen3")
    for layer, eps in zip(model.model.layers, (1e-6, 0.5), strict=True):
        layer.self_attn.q_norm.variance_epsilon = layer.self_attn.k_norm.variance_epsilon = eps
    plain = copy.deepcopy(model)
    assert {part.norm for part in accelerate(model).patched} == {"fused"}
    assert agrees(model, plain, monkeypatch)


def test_a_norm_whose_weight_is_computed_is_called_itself(monkeypatch):
    model = tiny("qwen3")
    for layer in model.model.layers:
        for norm in (layer.self_attn.q_norm, layer.self_attn.k_norm):
            torch.nn.utils.parametrize.register_parametrization(norm, "weight", torch.nn.Softplus())
    plain = copy.deepcopy(model)
    assert {part.norm for part in accelerate(model).patched} != {"fused"}
    assert agrees(model, plain, monkeypatch)


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_the_probes_have_a_device_of_their_own(device):
    model = tiny("qwen3")
    with torch.device(device):
        assert {part.norm for part in accelerate(model).patched} == {"fused"}


@pytest.mark.parametrize("name", NOT_DOUBLED)
def test_tables_that_may_have_two_angles_in_a_pair_are_refused(name):
    model = tiny("llama")
    model.model.rotary_emb = NOT_DOUBLED[name](model.config).eval()
    assert f"the code of {name} does not guarantee the same angle for both features of a pair" in str(tried(model))


def test_tables_that_are_doubled_are_taken(monkeypatch):
    model = tiny("llama")
    model.model.rotary_emb.__class__ = Tables
    plain = copy.deepcopy(model)
    assert isinstance(accelerate(model), Acceleration)
    assert agrees(model, plain, monkeypatch)


def test_a_function_in_a_closure_or_without_source_is_refused(monkeypatch):
    names: dict[str, Any] = {"rotate_half": rotate_half}
    code = "def apply(q, k, cos, sin):\n    return [x * cos[:, None] + rotate_half(x) * sin[:, None] for x in (q, k)]\n"
    exec(code, names)
    factor = 1.0

    def closed(q, k, cos, sin, unsqueeze_dim=1):
        return rotated(q * factor, k, cos, sin, unsqueeze_dim)

    for function, reason in ((names["apply"], "its source is not available"), (closed, "line .*, factor")):
        monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", function)
        with pytest.raises(RopewalkError, match=reason):
            accelerate(tiny("llama"))


def test_layers_are_looked_at_once(monkeypatch):
    calls: list[str] = []

    def counted(name: str) -> None:
        function = getattr(plan, name)
        monkeypatch.setattr(plan, name, lambda *given: (calls.append(name), function(*given))[1])

    names = ("rotation_of", "table_widths", "why_not_doubled", "norm_kind", "fused_method")
    for name in names:
        counted(name)
    handle = accelerate(tiny("qwen3", num_hidden_layers=6))
    assert len(handle.patched) == 6
    assert sorted(calls) == sorted(names)
    assert len({type(module) for module, _ in handle._modules}) == 1
