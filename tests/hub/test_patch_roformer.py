"""accelerate on RoFormer: a static method, one table of sines and cosines, and values that may be rotated too."""

import copy
import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers.models.roformer.modeling_roformer import RoFormerSelfAttention

from hub.accelerated import ROFORMER, SIZES, exact, outcome, rms, tiny, tokens
from ropewalk import RopewalkError
from ropewalk.hub.accelerate.acceleration import accelerate
from ropewalk.hub.accelerate.fused_rotation import fused_rotation
from ropewalk.hub.accelerate.rotation_probe import Rotation, rotation_of
from ropewalk.hub.accelerate.source import Sources
from slow import slow

OWN = RoFormerSelfAttention.apply_rotary_position_embeddings
TIMES = 2.0
HEADS = ["Model"] + [
    f"For{task}" for task in ("SequenceClassification", "TokenClassification", "QuestionAnswering", "MultipleChoice")
]


@pytest.fixture(autouse=True)
def quiet():
    transformers.logging.set_verbosity_error()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "mkldnn_matmul failed")
        yield


def made(head: str = "Model", seed: int = 0, **changes: Any) -> Any:
    torch.manual_seed(seed)
    config = transformers.RoFormerConfig(**SIZES | ROFORMER | {"is_decoder": False} | changes)
    model = getattr(transformers, f"RoFormer{head}")(config).eval()
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1 and "embed_positions" not in name:
            parameter.data = torch.randn_like(parameter) * 1.5 * parameter[0].numel() ** -0.5
    return model


def first_of(model: Any, *given: Any, **more: Any) -> Tensor:
    with torch.no_grad():
        return model(*given, **more)[0].double()


@pytest.mark.parametrize("rotary_value", [False, True], ids=["", "values"])
@pytest.mark.parametrize("dtype", [torch.float32, slow(torch.bfloat16)])
@pytest.mark.parametrize("head", ["ForMaskedLM", *map(slow, HEADS)])
def test_encoders_with_masks(head, dtype, rotary_value):
    # Enough sequences for a mean of squares: some heads return two numbers per sequence, or one.
    model, ids = made(head, rotary_value=rotary_value).to(dtype), tokens(64, 20)
    mask = torch.ones_like(ids)
    mask[::3, 13:], mask[1::3, :4] = 0, 0
    ids, mask = (x.view(32, 2, 20) if head == "ForMultipleChoice" else x for x in (ids, mask))
    own = first_of(model, ids, attention_mask=mask)
    right = first_of(copy.deepcopy(model).double(), ids, attention_mask=mask)
    with accelerate(model) as handle:
        ours = first_of(model, ids, attention_mask=mask)
        assert [part.kind for part in handle.patched] == ["RoFormerSelfAttention"] * 2
    assert 0 < rms(ours - right) <= TIMES * rms(own - right)
    assert torch.equal(first_of(model, ids, attention_mask=mask), own)


@pytest.mark.parametrize("family", ["roformer", "roformer_with_values"])
def test_gradients_with_a_mask(family):
    model, ids = tiny(family), tokens(2, 20)
    mask = torch.ones_like(ids)
    mask[0, 13:] = 0
    own, truth = outcome(model, ids, attention_mask=mask), exact(model, ids, attention_mask=mask)
    with accelerate(model):
        ours = outcome(model, ids, attention_mask=mask)
    for mine, theirs, right in zip(ours, own, truth, strict=True):
        assert 0 < rms(mine - right) <= TIMES * rms(theirs - right)


@pytest.mark.parametrize("family", ["roformer", "roformer_with_values"])
def test_a_decoder_with_a_cache(family):
    model, ids = tiny(family), tokens(2, 12)
    with torch.no_grad():
        own = model(ids, use_cache=False).logits
        with accelerate(model):
            start = model(ids[:, :7], use_cache=True)
            rest = model(ids[:, 7:11], past_key_values=start.past_key_values, use_cache=True)
        # The cache has the content of the plain model, so the plain model continues it.
        last = model(ids[:, 11:], past_key_values=rest.past_key_values, use_cache=True)
    together = torch.cat((start.logits, rest.logits, last.logits), dim=1)
    torch.testing.assert_close(together, own, rtol=1e-4, atol=1e-4)


def test_cross_attention_rotates_nothing():
    model = made("ForCausalLM", is_decoder=True, add_cross_attention=True)
    ids, encoded = tokens(2, 9), torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(0))
    own = first_of(model, ids, encoder_hidden_states=encoded)
    with accelerate(model) as handle:
        assert len(handle.patched) == 4
        ours = first_of(model, ids, encoder_hidden_states=encoded)
    torch.testing.assert_close(ours, own, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["roformer", "roformer_with_values"])
def test_compile_in_one_graph(family):
    model, ids = tiny(family), tokens(2, 6)
    own = first_of(model, ids, use_cache=False)
    with accelerate(model):
        compiled = torch.compile(lambda ids: model(ids, use_cache=False).logits, fullgraph=True, backend="aot_eager")
        with torch.no_grad():
            torch.testing.assert_close(compiled(ids).double(), own, rtol=1e-4, atol=1e-4)
    # A compiled function sees that the model was restored.
    plain = torch.compile(lambda ids: model(ids, use_cache=False).logits, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        torch.testing.assert_close(plain(ids).double(), own, rtol=1e-6, atol=1e-6)


def test_the_function_is_known_by_what_it_computes():
    found = rotation_of(OWN, Sources())
    assert isinstance(found, Rotation)
    assert (found.pairing, found.table, found.packing, found.values) == (
        *("interleaved", "single", "sin, cos"),
        "value_layer",
    )
    assert (found.conjugate, found.reorders, found.keeps_dtype, found.part) == (False, False, False, None)


@pytest.mark.parametrize("wrong", [{"packing": "cos, sin"}, {"pairing": "half"}, {"conjugate": True}])
def test_a_wrong_rotation_is_noticed(wrong, monkeypatch):
    model, ids = made(), tokens(2, 20)
    own, right = first_of(model, ids), first_of(copy.deepcopy(model).double(), ids)
    found: Any = rotation_of(OWN)
    monkeypatch.setattr("ropewalk.hub.accelerate.plan.rotation_of", lambda *given: replace(found, **wrong))
    with accelerate(model):
        assert rms(first_of(model, ids) - right) > 100 * TIMES * rms(own - right)


def table(seq: int = 7, pairs: int = 4, batch: int = 1) -> Tensor:
    angles = torch.rand(batch, 1, seq, pairs, generator=torch.Generator().manual_seed(3)) * 6
    return torch.cat((angles.sin(), angles.cos()), dim=-1)


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("dtypes", [(torch.float32,) * 2, (torch.bfloat16,) * 2, (torch.bfloat16, torch.float32)])
def test_the_replacement_computes_the_same(dtypes, batch):
    found: Any = rotation_of(OWN, Sources())
    fast, wide = fused_rotation(OWN, found, None), table(batch=batch).to(dtypes[1])
    q, k, v = (torch.randn(2, heads, 7, 8, generator=torch.Generator().manual_seed(heads)) for heads in (4, 2, 3))
    q, k, v = (x.to(dtypes[0]) for x in (q, k, v))
    for given in ((q, k), (q, k, None), (q, k, v)):
        ours, own = fast(wide, *given), OWN(wide, *given)
        right = OWN(wide.double(), *(None if x is None else x.double() for x in given))
        assert [y.dtype for y in ours] == [y.dtype for y in own]
        for mine, theirs, exactly in zip(ours, own, right, strict=True):
            assert rms(mine.double() - exactly) <= TIMES * rms(theirs.double() - exactly)


def test_other_shapes_of_the_table_go_to_the_models_own_function():
    found, calls = rotation_of(OWN), []

    def counted(sinusoidal_pos, query_layer, key_layer, value_layer=None):
        calls.append(sinusoidal_pos.shape)
        return OWN(sinusoidal_pos, query_layer, key_layer, value_layer)

    assert isinstance(found, Rotation)
    fast, q = fused_rotation(counted, found, None), torch.randn(2, 3, 7, 8)
    fast(table(), q, q)
    fast(sinusoidal_pos=table(batch=2), query_layer=q, key_layer=q, value_layer=q)
    assert calls == []
    # No dimension of heads, one row for all tokens, one table per head.
    for other in (table()[0, 0], table(seq=1), table().expand(1, 3, 7, 8)):
        for mine, theirs in zip(fast(other, q, q), OWN(other, q, q), strict=True):
            assert torch.equal(mine, theirs)
    assert len(calls) == 3


def neighbours(x):
    return torch.stack([-x[..., 1::2], x[..., ::2]], dim=-1).reshape_as(x)


def packed(sinusoidal_pos, query_layer, key_layer, value_layer=None) -> Any:
    sin, cos = sinusoidal_pos.chunk(2, dim=-1)
    sin = torch.stack([sin, sin], dim=-1).reshape_as(sinusoidal_pos)
    cos = torch.stack([cos, cos], dim=-1).reshape_as(sinusoidal_pos)
    q, k = query_layer * cos + neighbours(query_layer) * sin, key_layer * cos + neighbours(key_layer) * sin
    if value_layer is None:
        return q, k
    return q, k, value_layer * cos + neighbours(value_layer) * sin


def cosines_first(sinusoidal_pos, query_layer, key_layer):
    cos, sin = sinusoidal_pos.chunk(2, dim=-1)
    return packed(torch.cat((sin, cos), dim=-1), query_layer, key_layer)


def backwards(sinusoidal_pos, query_layer, key_layer):
    sin, cos = sinusoidal_pos.chunk(2, dim=-1)
    return packed(torch.cat((-sin, cos), dim=-1), query_layer, key_layer)


def of_one_tensor(sinusoidal_pos, x):
    x, _ = packed(sinusoidal_pos, x, x)
    return x


@pytest.mark.parametrize("function", [packed, cosines_first, backwards, of_one_tensor])
def test_other_forms_of_one_table_are_known(function):
    found: Any = rotation_of(function, Sources())
    assert isinstance(found, Rotation), found
    assert found.packing == ("cos, sin" if function is cosines_first else "sin, cos")
    assert (found.conjugate, found.both) == (function is backwards, function is not of_one_tensor)
    assert found.values == ("value_layer" if function is packed else None)
    x = torch.randn(2, 3, 7, 8)
    given = (x,) if function is of_one_tensor else (x, x + 1)
    ours, own = fused_rotation(function, found, None)(table(), *given), function(table(), *given)
    torch.testing.assert_close(ours, own, rtol=1e-5, atol=1e-5)


def by_length(sinusoidal_pos, query_layer, key_layer, value_layer=None):
    return packed(sinusoidal_pos, query_layer * 2 if query_layer.shape[-2] > 16 else query_layer, key_layer)


def table_by_length(sinusoidal_pos, query_layer, key_layer, value_layer=None):
    wide = sinusoidal_pos * 2 if sinusoidal_pos.shape[-2] > 16 else sinusoidal_pos
    return packed(wide, query_layer, key_layer)


def keys_left(sinusoidal_pos, query_layer, key_layer, value_layer=None):
    return of_one_tensor(sinusoidal_pos, query_layer), key_layer


def sines_twice(sinusoidal_pos, query_layer, key_layer, value_layer=None):
    sin, _ = sinusoidal_pos.chunk(2, dim=-1)
    return packed(torch.cat((sin, sin), dim=-1), query_layer, key_layer)


def without_gradients(sinusoidal_pos, query_layer, key_layer, value_layer=None):
    return packed(sinusoidal_pos, query_layer.detach(), key_layer)


NOT_ROTATIONS = [by_length, table_by_length, keys_left, sines_twice, without_gradients]


@pytest.mark.parametrize("function", NOT_ROTATIONS)
def test_what_only_resembles_the_rotation_is_refused(function, monkeypatch):
    monkeypatch.setattr(RoFormerSelfAttention, "apply_rotary_position_embeddings", staticmethod(function))
    with pytest.raises(RopewalkError, match="apply_rotary_position_embeddings: it"):
        accelerate(made())


def values_left(sinusoidal_pos, query_layer, key_layer, value_layer=None):
    q, k = packed(sinusoidal_pos, query_layer, key_layer)
    return (q, k) if value_layer is None else (q, k, value_layer)


def values_negated(sinusoidal_pos, query_layer, key_layer, value_layer=None):
    q, k = packed(sinusoidal_pos, query_layer, key_layer)
    return (q, k) if value_layer is None else (q, k, of_one_tensor(-sinusoidal_pos, value_layer))


def values_by_length(sinusoidal_pos, query_layer, key_layer, value_layer=None):
    if value_layer is None:
        return packed(sinusoidal_pos, query_layer, key_layer)
    q, k, v = packed(sinusoidal_pos, query_layer, key_layer, value_layer)
    return q, k, v * 2 if v.shape[-2] > 16 else v


@pytest.mark.parametrize("rotary_value", [False, True], ids=["", "values"])
@pytest.mark.parametrize("function", [packed, values_left, values_negated, values_by_length])
def test_values_that_are_not_rotated_as_keys_are_left_to_the_model(function, rotary_value, monkeypatch):
    monkeypatch.setattr(RoFormerSelfAttention, "apply_rotary_position_embeddings", staticmethod(function))
    model, ids = made(rotary_value=rotary_value), tokens(2, 20)
    own = first_of(model, ids)
    with accelerate(model):
        ours = first_of(model, ids)
    torch.testing.assert_close(ours, own, rtol=1e-4, atol=1e-4)
    # Without values it is fused; with values only if these are rotated in the same way.
    assert torch.equal(ours, own) == (rotary_value and function is not packed)


def test_a_function_that_was_replaced_in_an_instance_is_left_alone():
    model = made()
    for layer in model.encoder.layer:
        layer.attention.self.apply_rotary_position_embeddings = OWN
    with pytest.raises(RopewalkError, match="its apply_rotary_position_embeddings was replaced in this instance"):
        accelerate(model)


class ByItsClass(RoFormerSelfAttention):
    """Calls the function of its class, which no subclass overrides."""

    def forward(
        self,
        hidden_states,
        attention_mask=None,
        sinusoidal_pos=None,
        encoder_hidden_states=None,
        past_key_values=None,
        output_attentions=False,
        **kwargs,
    ):
        shape = (*hidden_states.shape[:-1], -1, self.attention_head_size)
        q, k = (layer(hidden_states).view(shape).transpose(1, 2) for layer in (self.query, self.key))
        q, k, *_ = RoFormerSelfAttention.apply_rotary_position_embeddings(sinusoidal_pos, q, k)
        return (q + k).transpose(1, 2).flatten(-2), None


def test_a_static_method_that_is_not_called_through_self_is_not_counted():
    model = made()
    for layer in model.encoder.layer:
        layer.attention.self.__class__ = ByItsClass
    with pytest.raises(RopewalkError, match="forward may call the method of its base class, which rotates"):
        accelerate(model)


def test_a_copy_is_the_plain_model():
    model = made()
    with accelerate(model):
        copied = copy.deepcopy(model)
        attention = model.encoder.layer[0].attention.self
        assert type(attention) is not RoFormerSelfAttention
        assert type(attention).apply_rotary_position_embeddings is not OWN
        assert type(copied.encoder.layer[0].attention.self) is RoFormerSelfAttention
    assert RoFormerSelfAttention.apply_rotary_position_embeddings is OWN
