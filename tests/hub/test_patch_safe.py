"""accelerate where things go wrong: interrupts, threads, modules for functions, random numbers, changed files."""

import copy
import linecache
import threading

import pytest
import torch
from torch import nn
from transformers.models.llama import modeling_llama

from hub.accelerated import tiny, tokens
from ropewalk import RopewalkError
from ropewalk.hub.accelerate import acceleration
from ropewalk.hub.accelerate.acceleration import accelerate
from ropewalk.hub.accelerate.norm_fusion import fused_method
from ropewalk.hub.accelerate.plan import PLAIN
from ropewalk.hub.accelerate.rotation_probe import rotation_of


class AsModule(nn.Module):
    """What packages of kernels make of a function."""

    def __init__(self, function):
        super().__init__()
        self.forward = function


def test_a_function_that_was_made_a_module_is_known(monkeypatch):
    function = modeling_llama.apply_rotary_pos_emb
    assert rotation_of(AsModule(function)) == rotation_of(function)
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", AsModule(function))
    model, ids = tiny("llama"), tokens(1, 5)
    before = model(ids).logits
    handle = accelerate(model)
    assert len(handle.patched) == model.config.num_hidden_layers
    assert torch.allclose(model(ids).logits, before, atol=1e-5)


def test_random_numbers_come_as_they_would_have_come(monkeypatch):
    model, seeded = tiny("qwen3"), []
    for name in ("manual_seed", "seed"):
        monkeypatch.setattr(torch, name, lambda *given: seeded.append(given))
    state = torch.random.get_rng_state()
    accelerate(model)
    assert not seeded
    assert torch.equal(torch.random.get_rng_state(), state)


def test_an_interrupt_leaves_the_model_as_it_was(monkeypatch):
    model = tiny("llama")
    done = []

    def once(module, functions):
        done.append(module)
        if len(done) == 2:
            raise KeyboardInterrupt
        return {}

    monkeypatch.setattr(acceleration, "bound_methods", once)
    with pytest.raises(KeyboardInterrupt):
        accelerate(model)
    monkeypatch.undo()
    assert not any(hasattr(type(module), PLAIN) for module in model.modules())
    assert accelerate(model).active


def test_of_several_threads_one_gets_the_handle():
    model, handles, refused = tiny("llama"), [], []

    def run():
        try:
            handles.append(accelerate(model))
        except RopewalkError as error:
            refused.append(error)

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(handles), len(refused)) == (1, 3)
    handles[0].undo()
    assert not any(hasattr(type(module), PLAIN) for module in model.modules())


def test_a_subclass_of_the_subclass_is_copied_as_what_it_is():
    model = tiny("llama")
    accelerate(model)
    attention = model.model.layers[0].self_attn
    # Sharding packages make a subclass of what they find.
    made = type("Sharded", (type(attention),), {})
    attention.__class__ = made
    assert type(copy.deepcopy(attention)) is made


def test_a_method_that_hides_one_that_rotates_is_named():
    class Quiet(modeling_llama.LlamaAttention):
        def forward(self, *args, **kwargs):
            return super().forward(*args, **kwargs)

    model = tiny("llama")
    model.model.layers[0].self_attn.__class__ = Quiet
    handle = accelerate(model)
    assert [part.name for part in handle.left] == ["model.layers.0.self_attn"]
    assert "its forward may call the method of its base class, which rotates" in str(handle.left[0])
    assert len(handle.patched) == model.config.num_hidden_layers - 1


SOURCE = """def apply(q, k, cos, sin):
    return q, k

def forward(self, q, k, cos, sin):
    scale = {number}
    q = self.q_norm(q)
    k = self.k_norm(k)
    q, k = apply(q, k, cos, sin)
    return q * scale, k
"""


def test_a_file_that_changed_in_a_number_is_not_what_runs(tmp_path):
    path = tmp_path / "model.py"
    path.write_text(SOURCE.format(number="2.0"), encoding="utf-8")
    names: dict = {}
    exec(compile(path.read_text(encoding="utf-8"), str(path), "exec"), names)
    assert not isinstance(fused_method(names["forward"], "apply"), str)
    path.write_text(SOURCE.format(number="5.0"), encoding="utf-8")
    linecache.checkcache(str(path))
    assert fused_method(names["forward"], "apply") == "its source is not available, or differs from the running code"
