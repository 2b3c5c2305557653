"""accelerate in use: generation, caches, padding, compilers, training, copies, pickles, hooks, and what it refuses."""

import copy
import io
import pickle
import types
import warnings
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers import StaticCache

from hub.accelerated import exact, outcome, rms, tiny, tokens
from ropewalk import RopewalkError
from ropewalk.hub.accelerate.acceleration import accelerate
from ropewalk.hub.accelerate.plan import PLAIN

THREE = ["llama", "gemma3", "glm4"]


@pytest.fixture(autouse=True)
def quiet():
    transformers.logging.set_verbosity_error()
    with warnings.catch_warnings():
        # transformers' own: it exports a name of typing that is to go.
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        yield


def is_fast(model: Any) -> bool:
    return any(hasattr(type(module), PLAIN) for module in model.modules())


@pytest.mark.parametrize("family", [*THREE, "deepseek_v3", "gpt_oss"])
def test_generate_gives_the_same_tokens(family):
    model, ids = tiny(family), tokens(2, 6)
    ids[0, :3] = 0
    how: dict[str, Any] = {"attention_mask": (ids != 0).long(), "max_new_tokens": 8, "do_sample": False}
    own = model.generate(ids, **how)
    with accelerate(model):
        assert torch.equal(model.generate(ids, **how), own)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_cache_goes_over_from_one_to_the_other(family):
    # What the plain model cached, the accelerated one reads, and the other way round: keys lie as they lay.
    model, ids = tiny(family), tokens(1, 10)
    with torch.no_grad():
        whole = model(ids).logits[:, 6:]
        half = model(ids[:, :6], use_cache=True).past_key_values
        with accelerate(model):
            rest = model(ids[:, 6:], past_key_values=half).logits
            half = model(ids[:, :6], use_cache=True).past_key_values
        back = model(ids[:, 6:], past_key_values=half).logits
    for found in (rest, back):
        torch.testing.assert_close(found, whole, rtol=1e-4, atol=1e-4)


def test_keys_in_the_cache_of_deepseek_lie_as_they_lay():
    model, ids = tiny("deepseek_v3"), tokens(1, 6)
    with torch.no_grad():
        own = model(ids, use_cache=True).past_key_values.layers[0]
        with accelerate(model):
            ours = model(ids, use_cache=True).past_key_values.layers[0]
    torch.testing.assert_close(ours.values, own.values, rtol=1e-5, atol=1e-5)
    assert ours.values.shape[-1] == 8  # the rotated features


def test_a_static_cache():
    model, ids = tiny("llama"), tokens(1, 8)

    def stepped() -> torch.Tensor:
        cache = StaticCache(model.config, max_cache_len=16)
        with torch.no_grad():
            first = model(ids[:, :5], past_key_values=cache).logits
            steps = [model(ids[:, i : i + 1], past_key_values=cache).logits for i in range(5, 8)]
        return torch.cat([first, *steps], dim=1)

    own = stepped()
    with accelerate(model):
        torch.testing.assert_close(stepped(), own, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_positions_and_attention_implementations(attention):
    model, ids = tiny("llama", attention=attention), tokens()
    # One row of positions per sequence, neither of which starts at 0.
    positions = torch.arange(12)[None] + torch.tensor([[3], [4000]])
    own, truth = (run(model, ids, position_ids=positions) for run in (outcome, exact))
    with accelerate(model):
        ours = outcome(model, ids, position_ids=positions)
    for mine, theirs, right in zip(ours, own, truth, strict=True):
        assert rms(mine - right) <= 2 * rms(theirs - right) + 1e-7 * rms(right)


def test_what_transformers_records_of_attention_is_recorded():
    model, ids = tiny("llama", attention="eager"), tokens(1, 5)
    with torch.no_grad(), accelerate(model):
        seen = model(ids, output_attentions=True, output_hidden_states=True)
    assert [tuple(weights.shape) for weights in seen.attentions] == [(1, 4, 5, 5)] * 2
    assert len(seen.hidden_states) == 3


def test_autocast_gives_the_dtypes_that_the_model_gives():
    model, ids = tiny("qwen3"), tokens(1, 5)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "mkldnn_matmul failed")
        own = model(ids, use_cache=True)
        with accelerate(model):
            ours = model(ids, use_cache=True)
    keys = [result.past_key_values.layers[0].keys for result in (own, ours)]
    assert keys[0].dtype == keys[1].dtype
    torch.testing.assert_close(ours.logits, own.logits, rtol=0.1, atol=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("family", THREE)
def test_compile_in_one_graph(family):
    model, ids = tiny(family), tokens()
    torch._dynamo.reset()
    with torch.no_grad():
        own = model(ids, use_cache=False).logits
        with accelerate(model):
            ours = torch.compile(model, fullgraph=True)(ids, use_cache=False).logits
    torch.testing.assert_close(ours, own, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_what_was_compiled_sees_that_the_model_changed(family):
    model, ids = tiny(family), tokens()
    calls: list[int] = []

    def watched(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        calls.append(sum("ropewalk" in str(node.target) for node in graph.graph.nodes))
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend=watched)
    with torch.no_grad():
        own = compiled(ids, use_cache=False).logits
        with accelerate(model):
            ours = compiled(ids, use_cache=False).logits
            other = tiny(family, seed=1)
            beside = torch.compile(other, fullgraph=True, backend=watched)(ids, use_cache=False).logits
        again = compiled(ids, use_cache=False).logits
    # The graph of the plain model serves it again, and another of its class; the accelerated one has its own.
    assert calls == [0, 2]
    assert torch.equal(again, own)
    torch.testing.assert_close(beside, other(ids, use_cache=False).logits, rtol=1e-6, atol=1e-6)
    assert not torch.equal(ours, own)
    torch.testing.assert_close(ours, own, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_compiled_gradients(family):
    model, ids = tiny(family), tokens()
    torch._dynamo.reset()
    own, truth = outcome(model, ids), exact(model, ids)
    with accelerate(model):
        model.forward = torch.compile(model.forward)
        ours = outcome(model, ids)
        del model.forward
    for mine, theirs, right in zip(ours, own, truth, strict=True):
        assert rms(mine - right) <= 2 * rms(theirs - right)


def test_training_with_checkpointing():
    model, ids = tiny("qwen3").train(), tokens()
    own, truth = outcome(model, ids), exact(model, ids)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    with accelerate(model):
        ours = outcome(model, ids)
        for mine, theirs, right in zip(ours, own, truth, strict=True):
            assert rms(mine - right) <= 2 * rms(theirs - right)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        losses = []
        for _ in range(4):
            loss = model(ids, labels=ids, use_cache=False).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert losses[-1] < losses[0]


def test_a_copy_and_a_pickle_are_the_plain_model():
    model, ids = tiny("qwen3"), tokens(1, 5)
    own, keys = model(ids).logits, list(model.state_dict())
    with accelerate(model):
        fast = model(ids).logits
        assert list(model.state_dict()) == keys
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        copies = [
            copy.deepcopy(model),
            pickle.loads(pickle.dumps(model)),
            torch.load(file, weights_only=False),
        ]
        for other in copies:
            assert not is_fast(other)
            assert torch.equal(other(ids).logits, own)
        # The model itself is as it was, and so is a copy that is accelerated by itself.
        assert is_fast(model)
        with accelerate(copies[0]):
            assert torch.equal(copies[0](ids).logits, fast)
    assert not is_fast(model)


def test_weights_are_saved_and_loaded_as_ever(tmp_path):
    model, ids = tiny("llama"), tokens(1, 5)
    own = model(ids).logits
    with accelerate(model):
        model.save_pretrained(tmp_path)
        assert torch.equal(type(model).from_pretrained(tmp_path)(ids).logits, own)
        model.load_state_dict(tiny("llama", seed=3).state_dict())
        torch.testing.assert_close(model(ids).logits, tiny("llama", seed=3)(ids).logits)


def test_twice_is_refused():
    model = tiny("llama")
    with accelerate(model), pytest.raises(RopewalkError, match=r"(?s)not accelerated.*already has.*undo\(\)"):
        accelerate(model)
    with accelerate(model.model), pytest.raises(RopewalkError, match="already has the fused rotation"):
        accelerate(model)


def test_undo_after_the_class_was_changed_touches_nothing():
    model, ids = tiny("llama"), tokens(1, 5)
    handle = accelerate(model)
    first, made = model.model.layers[0].self_attn, type(model.model.layers[0].self_attn)
    first.__class__ = type("Sharded", (made,), {})
    with pytest.raises(RopewalkError, match=r"another class in 1 of \d+ modules, the first Sharded"):
        handle.undo()
    assert is_fast(model)
    assert handle.active
    first.__class__ = made
    handle.undo()
    assert not is_fast(model)
    assert model(ids).logits.isfinite().all()


def test_hooks_that_keep_the_method_they_wrap():
    # As accelerate's, for models on several devices: forward is replaced, and calls what was there.
    def hooked(module: Any) -> None:
        module._old_forward = module.forward
        module.calls = 0

        def forward(self: Any, *args: Any, **more: Any) -> Any:
            self.calls += 1
            return self._old_forward(*args, **more)

        module.forward = types.MethodType(forward, module)

    model, ids = tiny("llama"), tokens(1, 5)
    own = model(ids).logits
    first = model.model.layers[0].self_attn
    hooked(first)
    plain = first._old_forward
    with accelerate(model) as handle:
        assert len(handle.patched) == 2
        assert not torch.equal(model(ids).logits, own)
        other = copy.deepcopy(model)
        assert torch.equal(other(ids).logits, own)
    assert first.calls == 1
    assert first._old_forward == plain
    assert torch.equal(model(ids).logits, own)
    # Hooks that came after accelerate are undone with it.
    second = model.model.layers[1].self_attn
    handle = accelerate(model)
    hooked(second)
    handle.undo()
    assert torch.equal(model(ids).logits, own)


def test_hooks_of_norms_still_run():
    model, ids = tiny("qwen3"), tokens(1, 5)
    with accelerate(model):
        fused = model(ids).logits
        seen: list[torch.Tensor] = []
        norm = model.model.layers[0].self_attn.q_norm
        with norm.register_forward_hook(lambda module, given, result: seen.append(result)):
            beside = model(ids).logits
        assert [tuple(x.shape) for x in seen] == [(1, 4, 5, 16)]
        assert torch.equal(model(ids).logits, fused)
    torch.testing.assert_close(beside, fused, rtol=1e-5, atol=1e-5)


def test_a_norm_with_another_epsilon_is_not_taken_for_the_first():
    model, ids = tiny("qwen3"), tokens(1, 5)
    model.model.layers[1].self_attn.k_norm.variance_epsilon = 0.5
    own = model(ids).logits
    with accelerate(model) as handle:
        assert [part.norm for part in handle.patched] == ["fused", "not fused, its norms of q and k differ"]
        torch.testing.assert_close(model(ids).logits, own, rtol=1e-4, atol=1e-4)
        # Changed later: it is read when it is used.
        model.model.layers[0].self_attn.k_norm.variance_epsilon = 0.5
        changed = model(ids).logits
    torch.testing.assert_close(changed, model(ids).logits, rtol=1e-4, atol=1e-4)


def test_what_is_no_model_is_refused(as_a_user):
    for given in ("llama", None, {"model": 1}):
        with pytest.raises(RopewalkError, match=r"torch\.nn\.Module"):
            accelerate(given)  # pyright: ignore[reportArgumentType]
    with pytest.raises(RopewalkError, match="Linear: no module calls a function of cos and sin"):
        accelerate(nn.Linear(2, 2))


def test_a_layer_without_its_tables_is_refused():
    model = tiny("llama")
    with pytest.raises(RopewalkError, match="the module that computes its cos and sin was not found"):
        accelerate(model.model.layers[0])
    # GPT-OSS reads tables of half width, in which nothing stands twice: nobody has to look at them.
    assert len(accelerate(tiny("gpt_oss").model.layers[0]).patched) == 1


def test_a_model_on_the_meta_device_is_refused():
    with torch.device("meta"):
        model = tiny("llama")
    with pytest.raises(RopewalkError, match="the cos and sin of LlamaRotaryEmbedding could not be computed"):
        accelerate(model)


def test_a_forward_that_was_replaced_is_left_alone():
    model, ids = tiny("llama"), tokens(1, 5)
    own = model(ids).logits
    first = model.model.layers[0].self_attn
    kept = first.forward
    first.forward = lambda *args, **more: kept(*args, **more)
    with accelerate(model) as handle:
        assert len(handle.patched) == 1
        assert [str(part) for part in handle.left] == ["LlamaAttention: its forward was replaced in this instance"]
        assert "not changed: 1 x LlamaAttention" in repr(handle)
        torch.testing.assert_close(model(ids).logits, own)
    assert torch.equal(model(ids).logits, own)
