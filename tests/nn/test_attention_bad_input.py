"""What Attention and KVCache refuse, before anything is computed or written; every argument of Attention matters."""

import copy
import inspect

import pytest
import torch

from nn.test_attention import DIM, HEADS, WIDTH, layer
from nn.test_cache import K, cache_for, same_as
from ropewalk import AcrossHeads, DynamicNTK, RopeSpec, RopewalkError, RotaryEmbedding
from ropewalk.nn.attention.cache import KVCache
from ropewalk.nn.attention.layer import Attention
from ropewalk.nn.attention.scores import ScoreBias, attend
from ropewalk.nn.attention.visibility import Visibility
from ropewalk.nn.encodings.base import Encoding
from ropewalk.nn.encodings.bias import AlibiBias
from strategies import vector

WHOLE = RotaryEmbedding(RopeSpec(WIDTH, AcrossHeads(1e4, HEADS)))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"dim": 0}, "Attention(dim=...)"),
        ({"dim": 24.0}, "24.0 (float)"),
        ({"num_heads": 5}, "a multiple of num_heads, or a head_dim"),
        ({"num_heads": None}, "Attention(num_heads=...)"),
        ({"num_kv_heads": 3}, "a num_kv_heads that divides 4"),
        ({"num_kv_heads": 0}, "Attention(num_kv_heads=...)"),
        ({"head_dim": -1}, "Attention(head_dim=...)"),
        ({"encoding": "rope"}, "an Encoding, a RotaryEmbedding, or None"),
        ({"encoding": torch.nn.Linear(2, 2)}, "(Linear)"),
        ({"encoding": RotaryEmbedding(8)}, "a rope with head_dim=6"),
        ({"encoding": RotaryEmbedding(WIDTH, seq_dim=-3)}, "seq_dim=-2"),
        ({"encoding": RotaryEmbedding(RopeSpec(WIDTH, DynamicNTK(1e4, 2, 64)))}, "the length that determines"),
        ({"encoding": AlibiBias(3)}, "AlibiBias for 3 heads"),
        ({"encoding": WHOLE, "num_kv_heads": 2}, "omit num_kv_heads"),
        ({"encoding": WHOLE, "num_heads": 2, "head_dim": WIDTH}, "for 4 heads"),
        ({"causal": 1}, "Attention(causal=...)"),
        ({"dropout": 1.0}, "from 0 to below 1"),
        ({"dropout": -0.1}, "-0.1"),
        ({"dropout": float("nan")}, "nan"),
        ({"dropout": "0"}, "'0'"),
        ({"qkv_bias": "yes"}, "Attention(qkv_bias=...)"),
        ({"out_bias": None}, "Attention(out_bias=...)"),
    ],
)
def test_layers_that_cannot_be(arguments, said):
    with pytest.raises(RopewalkError) as error:
        Attention(**{"dim": DIM, "num_heads": HEADS} | arguments)
    assert said in str(error.value)


X = vector(0, 2, 5, DIM)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"x": X[0]}, "tokens [batch, seq, 24]"),
        ({"x": X[..., :6]}, "[2, 5, 6]"),
        ({"x": X.long()}, "torch.int64"),
        ({"x": None}, "None"),
        ({"x": X.float()}, "tokens of torch.float64 on cpu"),
        ({"x": X.to("meta")}, "on meta"),
        ({"positions": torch.arange(4)}, "positions [5] or [2, 5]"),
        ({"positions": torch.arange(15).view(3, 5)}, "positions [5] or [2, 5]"),
        ({"positions": torch.arange(5, device="meta")}, "on meta"),
        ({"positions": torch.arange(5) > 2}, "torch.bool"),
        ({"positions": 3}, "attention(positions=...)"),
        ({"positions": torch.full((5,), float("nan"))}, "finite"),
        ({"key_mask": torch.ones(2, 4, dtype=torch.bool)}, "bool [2, 5] on cpu: [batch, seq]"),
        ({"key_mask": torch.ones(5, dtype=torch.bool)}, "torch.bool [5]"),
        ({"key_mask": torch.ones(2, 5)}, "mask.bool()"),
        ({"key_mask": torch.ones(2, 5, dtype=torch.bool, device="meta")}, "on meta"),
        ({"key_mask": [True] * 5}, "(list)"),
        ({"cu_seqlens": torch.tensor([0, 5])}, "a batch of 1"),
        ({"x": X[:1], "cu_seqlens": torch.tensor([0, 6])}, "end at 5 at most"),
        ({"x": X[:1], "cu_seqlens": torch.tensor([2, 5])}, "start at 0"),
        ({"x": X[:1], "cu_seqlens": torch.tensor([0, 4, 3])}, "never decrease"),
        ({"x": X[:1], "cu_seqlens": torch.tensor([], dtype=torch.int64)}, "put a 0 before"),
        ({"x": X[:1], "cu_seqlens": torch.tensor([[0, 5]])}, "[sequences + 1]"),
        ({"x": X[:1], "cu_seqlens": torch.tensor([0.0, 5.0])}, "whole numbers"),
        ({"x": X[:1], "cu_seqlens": torch.tensor([0, 5], device="meta")}, "on meta"),
        ({"x": X[:1], "cu_seqlens": 5}, "attention(cu_seqlens=...)"),
        ({"counts": torch.tensor([1, 2])}, "hide padding with key_mask="),
        ({"cache": 7}, "a KVCache or another Cache"),
        ({"cache": cache_for(3)}, "batch=3"),
        ({"cache": KVCache(2, 4, 40, WIDTH)}, "num_kv_heads=2"),
        ({"cache": KVCache(2, 2, 40, 8)}, "head_dim=8"),
        ({"cache": cache_for(2, v_dim=3)}, "v_dim=3"),
        ({"cache": cache_for(2, device="meta")}, "on meta"),
        ({"cache": cache_for(2, dtype=torch.float32)}, "of torch.float32 on cpu"),
        ({"cache": cache_for(2, 4)}, "at most 4, because 0 slots may be filled"),
        ({"cache": cache_for(2), "counts": torch.tensor([5, 6])}, "from 0 to 5"),
        ({"cache": cache_for(2), "key_mask": torch.ones(2, 9, dtype=torch.bool)}, "all slots of the cache"),
        ({"x": X[:1], "cache": cache_for(1), "cu_seqlens": torch.tensor([0, 5])}, "one row of the batch per sequence"),
    ],
)
def test_calls_that_cannot_be(arguments, said):
    attention = layer("rope")
    cache = arguments.get("cache")
    before = copy.deepcopy(cache)
    with torch.no_grad(), pytest.raises(RopewalkError) as error:
        attention(**{"x": X} | arguments)
    assert said in str(error.value)
    if isinstance(cache, KVCache) and not cache.keys.is_meta:
        same_as(cache, before)


def test_a_cache_without_causality():
    with torch.no_grad(), pytest.raises(RopewalkError, match="causal=False"):
        layer("none", causal=False)(X, cache=cache_for(2))


def test_fractions_cannot_be_kept_for_a_bias_but_can_be_rotated_by():
    halves, cache = torch.arange(5) / 2, cache_for(2)
    with torch.no_grad():
        layer("rope")(X, halves, cache_for(2))
        with pytest.raises(RopewalkError, match="whole numbers"):
            layer("alibi")(X, halves, cache)
    same_as(cache, cache_for(2))


class Doubled(torch.nn.Linear):
    """A layer of a user's, which takes what a plain one does not."""

    def forward(self, input):
        return super().forward(input.to(self.weight.dtype))


def test_layers_in_place_of_projections_are_asked_themselves():
    attention = layer("rope")
    expected = attention(X.float().double())
    for name, rows in (("q_proj", 24), ("k_proj", 12), ("v_proj", 12)):
        other = Doubled(DIM, rows, bias=False).double()
        other.load_state_dict(getattr(attention, name).state_dict())
        setattr(attention, name, other)
    assert torch.equal(attention(X.float()), expected)


class Wrong(Encoding):
    def bias(self, q_positions, k_positions):
        return torch.zeros(3, len(q_positions), len(k_positions))


def test_a_bias_of_the_wrong_shape():
    ids = torch.arange(5)
    with pytest.raises(RopewalkError, match="a bias that broadcasts to"):
        Attention(DIM, HEADS, encoding=Wrong())(X.float())
    q = torch.zeros(2, 3, 5, 4)
    assert attend(q, q, q, Visibility(), scale=1.0, score_bias=ScoreBias(Wrong(), ids, ids)).shape == q.shape


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"k": K.float()}, "[2, 2, seq, 6] of torch.float64"),
        ({"v": K.bfloat16()}, "torch.bfloat16 [2, 2, 3, 6]"),
        ({"k": K[:1]}, "[1, 2, 3, 6]"),
        ({"k": K[:, :1]}, "of the batch, heads and dtype"),
        ({"v": K[..., :4]}, "append(v)"),
        ({"k": K[0]}, "[2, 3, 6]"),
        ({"k": None}, "None"),
        ({"k": K.to("meta")}, "on meta"),
        ({"v": K[:, :, :2]}, "3 keys and 2 values"),
        ({"k": K.clone().requires_grad_()}, "torch.inference_mode()"),
        ({"v": K.clone().requires_grad_()}, "without a gradient"),
        ({"counts": torch.tensor([1, 4])}, "from 0 to 3"),
        ({"counts": torch.tensor([-1, 3])}, "[-1, 3]"),
        ({"counts": torch.tensor([1])}, "whole numbers [2]"),
        ({"counts": torch.tensor([1.0, 2.0])}, "torch.float32"),
        ({"counts": torch.tensor([1, 2], device="meta")}, "on meta"),
        ({"counts": [1, 2]}, "[1, 2] (list)"),
        ({"positions": torch.arange(2)}, "[3]"),
        ({"positions": torch.arange(3.0)}, "whole numbers"),
        ({"positions": torch.arange(9).view(3, 3)}, "[2, 3]"),
        ({"positions": 3}, "3"),
    ],
)
def test_bad_input_writes_nothing(arguments, said):
    cache = cache_for(2)
    cache.append(K, K)
    before = copy.deepcopy(cache)
    with pytest.raises(RopewalkError) as error:
        cache.append(**{"k": K, "v": K} | arguments)
    assert said in str(error.value)
    same_as(cache, before)


def test_every_argument_matters():
    x, other = vector(0, 1, 6, DIM).float(), vector(1, 1, 6, DIM).float()
    usual = {"dim": DIM, "num_heads": HEADS, "encoding": AlibiBias(HEADS)}
    changes = {
        "dim": 16,
        "num_heads": 2,
        "num_kv_heads": 2,
        "head_dim": 5,
        "encoding": None,
        "causal": False,
        "window": 2,
        "dropout": 0.5,
        "qkv_bias": True,
        "out_bias": True,
        "device": "meta",
        "dtype": torch.float64,
    }
    assert set(changes) == set(inspect.signature(Attention).parameters)

    def made(**options):
        torch.manual_seed(0)
        options = usual | ({"encoding": None} if "num_heads" in options else {}) | options
        attention = Attention(**options)
        weight = attention.q_proj.weight
        y = attention(x[..., : attention.dim].to(weight))
        return [str(y.device), str(y.dtype), list(y.shape), [] if y.is_meta else y.tolist()]

    for name, change in changes.items():
        assert made(**{name: change}) != made(**{"encoding": None} if name == "num_heads" else {}), name
    attention = layer("alibi").float()
    cache = KVCache(1, 2, 16, WIDTH)
    with torch.no_grad():
        attention(other, cache=cache)
        calls = {
            "x": other,
            "positions": torch.arange(6) * 2,
            "key_mask": torch.arange(6)[None] < 3,
            "cu_seqlens": torch.tensor([0, 3, 6]),
            "cache": cache,
        }
        assert {*calls, "counts"} == set(inspect.signature(attention.forward).parameters)
        before = attention(x)
        for name, value in calls.items():
            assert not torch.equal(attention(**{"x": x} | {name: value}), before), name
