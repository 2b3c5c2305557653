"""Mistakes that compute something: those that are known to be wrong raise, those that are probably wrong warn."""

import copy
import gc
import pickle
import warnings

import pytest
import torch

import ropewalk as rw
from ropewalk.nn.encodings import base
from ropewalk.nn.encodings.bias import T5Bias

pytestmark = pytest.mark.usefixtures("as_a_user")

X = torch.randn(1, 5, 16, generator=torch.Generator().manual_seed(0))
EMBEDDINGS = {
    "learned": {"length": 8},
    "multiplicative": {"length": 8},
    "sinusoidal": {},
    "concatenated": {"width": 4},
    "recurrent": {},
}


@pytest.fixture
def nothing_embedded(monkeypatch):
    monkeypatch.setattr(base, "_EMBEDDED", set())


@pytest.mark.usefixtures("nothing_embedded")
@pytest.mark.parametrize("name", EMBEDDINGS)
@pytest.mark.parametrize("layer", [rw.Attention, rw.LinearAttention])
def test_an_embedding_that_nobody_embedded(name, layer):
    encoding = rw.encoding(name, dim=16, num_heads=2, **EMBEDDINGS[name])
    attention = layer(16, 2, encoding=encoding)
    with pytest.warns(
        rw.RopewalkWarning, match=r"embed was never called(.|\n)*call encoding.embed\(tokens\)"
    ) as caught:
        attention(X)
    assert caught[0].filename == __file__
    # A copy of the layer has a copy of the encoding.
    copied = copy.deepcopy(attention)
    encoding.embed(X)
    attention(X)
    copied(X)


@pytest.mark.parametrize("name", ["none", "alibi", "rope", "rope-across-heads"])
def test_other_encodings_need_no_embedding(name):
    rw.Attention(16, 2, encoding=rw.encoding(name, dim=16, num_heads=2))(X)


class Shifted(rw.Encoding):
    """An encoding of a user, whose layer cannot know whether it was embedded."""

    def embed(self, x, positions=None, *, cache=None):
        return x + 1


def test_an_encoding_of_a_user_is_not_suspected():
    rw.Attention(16, 2, encoding=Shifted())(X)


@pytest.mark.usefixtures("nothing_embedded")
@pytest.mark.parametrize("name", EMBEDDINGS)
def test_a_compiled_embedding_is_noticed(name):
    encoding = rw.encoding(name, dim=16, num_heads=2, **EMBEDDINGS[name])
    attention = rw.Attention(16, 2, encoding=encoding)
    compiled = torch.compile(encoding.embed, fullgraph=True, backend="eager")
    torch.testing.assert_close(attention(compiled(X)), attention(encoding.embed(X)))
    whole = torch.compile(lambda x: attention(encoding.embed(x)), fullgraph=True, backend="eager")
    torch.testing.assert_close(whole(X), attention(encoding.embed(X)))


def test_a_causal_bias_in_a_layer_that_is_not_causal():
    with pytest.raises(rw.RopewalkError, match="one number for all keys after a query") as error:
        rw.Attention(16, 2, causal=False, encoding=T5Bias(2, causal=True))
    assert "causal=False" in error.value.do
    with pytest.warns(rw.RopewalkWarning, match="half of its buckets"):
        rw.Attention(16, 2, encoding=T5Bias(2))
    for causal in (False, True):
        rw.Attention(16, 2, causal=causal, encoding=T5Bias(2, causal=causal))
        # `causal` of an encoding of a user can mean anything.
        encoding = Shifted()
        encoding.causal = True
        rw.Attention(16, 2, causal=causal, encoding=encoding)


def test_one_cache_for_two_layers():
    first, second = rw.Attention(16, 2), rw.Attention(16, 2)
    cache = rw.KVCache(1, 2, max_length=16, head_dim=8)
    with torch.no_grad():
        first(X, cache=cache)
        keys, lengths = cache.keys.clone(), cache.lengths.clone()
        with pytest.raises(rw.RopewalkError, match=r"tokens of another layer(.|\n)*one cache per layer"):
            second(X, cache=cache)
        assert torch.equal(cache.keys, keys)
        assert torch.equal(cache.lengths, lengths)
        first(X[:, :1], cache=cache)
        # A copy belongs to no layer yet, and neither does a cache that was emptied.
        for other in (copy.copy(cache), copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))):
            copy.deepcopy(first)(X[:, :1], cache=other)
        cache.reset()
        second(X, cache=cache)
        with pytest.raises(rw.RopewalkError, match="another layer"):
            first(X, cache=cache)
        del second
        gc.collect()
        first(X, cache=cache)


def test_a_mask_that_hides_everything():
    attention, linear, q = rw.Attention(16, 2), rw.LinearAttention(16, 2), torch.randn(1, 2, 5, 8)
    hidden = torch.zeros(1, 5, dtype=torch.bool)
    for call in (
        lambda mask: attention(X, key_mask=mask),
        lambda mask: linear(X, key_mask=mask),
        lambda mask: rw.linear_attention(q, q, q, key_mask=mask),
    ):
        with pytest.warns(rw.RopewalkWarning, match="no query sees a key(.|\n)*pass ~mask"):
            call(hidden)
        call(~hidden)
        call(torch.arange(5)[None] > 3)


@pytest.mark.parametrize("seq_dim", [-2, -3])
def test_more_heads_than_any_model_has(seq_dim):
    rope = rw.RotaryEmbedding(4, seq_dim=seq_dim)
    few, many = torch.ones(1, 8, 300, 4), torch.ones(1, 300, 8, 4)
    right, wrong = (few, many) if seq_dim == -2 else (many, few)
    rope(right, right)
    rope(wrong)  # windows of an image, for example
    rope = rw.RotaryEmbedding(4, seq_dim=seq_dim)
    with pytest.warns(rw.RopewalkWarning, match=f"300 heads of 8 tokens(.|\n)*seq_dim={-5 - seq_dim}, or transpose"):
        rope(wrong, wrong)
    long = torch.ones(1, 300, 300, 4)
    rw.RotaryEmbedding(4, seq_dim=seq_dim)(long, long)


@pytest.mark.usefixtures("nothing_embedded")
def test_a_warning_is_shown_once_per_line_of_the_user():
    attention = rw.Attention(16, 2, encoding=rw.encoding("sinusoidal", dim=16, num_heads=2))
    with warnings.catch_warnings(record=True) as caught:
        warnings.resetwarnings()
        warnings.simplefilter("default")
        for _ in range(3):
            attention(X)
    assert len(caught) == 1


RULES = [rw.PositionInterpolation, rw.NTK, rw.NTKByParts, rw.Yarn, rw.spec.NTKFixed, rw.spec.NTKMixed]


@pytest.mark.parametrize("rule", RULES)
def test_a_rule_for_longer_contexts_without_a_factor(rule):
    with pytest.raises(
        rw.RopewalkError, match=f"{rule.__name__}.factor=(.|\n)*got:      no factor\ndo this:  pass the ratio"
    ):
        rule(10_000.0)
    assert rule(10_000.0, 1).factor == 1


def test_lengths_instead_of_their_sums():
    rope, x = rw.RotaryEmbedding(4), torch.ones(1, 1, 5, 4)
    for call in (
        lambda: rope(x, cu_seqlens=torch.tensor([3, 2])),
        lambda: rw.Attention(4, 1)(x[0], cu_seqlens=torch.tensor([3, 2])),
        lambda: rw.linear_attention(x, x, x, cu_seqlens=torch.tensor([3, 2])),
    ):
        with pytest.raises(rw.RopewalkError, match="pass the cumulative sum of the lengths with a 0 before it"):
            call()


def test_equal_heads_in_the_other_layout_are_found_by_their_positions():
    q = torch.ones(1, 7, 2, 4)  # [batch, seq, heads, head_dim]
    with pytest.raises(rw.RopewalkError, match=r"positions \[2\]"):
        rw.RotaryEmbedding(4)(q, q, positions=torch.arange(7))
    with pytest.raises(rw.RopewalkError, match="seq_dim=-3"):
        rw.RotaryEmbedding(4)(q, q[:, :, :1])


# The arguments of a call, and what must name the method that received them.
WRONG = [
    {"q": torch.ones(1, 1, 5, 6)},
    {"q": [1.0]},
    {"positions": torch.arange(4)},
    {"positions": torch.arange(5).bool()},
    {"offset": 3, "positions": torch.arange(5)},
    {"cu_seqlens": torch.tensor([3, 2])},
    {"positions": torch.arange(5) + 99},
    {"offset": 99},
    {"angles": (torch.ones(5, 4), torch.ones(5, 4))},
    {"role": "v"},
]


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: "-".join(wrong))
def test_errors_name_the_method_that_was_called(wrong):
    rope, given = rw.RotaryEmbedding(4, context_length=64), {"q": torch.ones(1, 1, 5, 4)} | wrong
    one = {("x" if name == "q" else name): value for name, value in given.items()}
    for call, name in (
        (lambda: rope(**given), "rope("),
        (lambda: rope.rotate_(**given), "rope.rotate_("),
        (lambda: rope.unrotate(**one), "rope.unrotate("),
    ):
        with pytest.raises(rw.RopewalkError) as error:
            call()
        assert error.value.asked.startswith(name)


@pytest.mark.parametrize("k", [torch.ones(1, 1, 4, 4), torch.ones(1, 1, 5, 4).double(), torch.arange(5)])
def test_errors_of_pairs_name_the_method(k):
    rope, q = rw.RotaryEmbedding(4), torch.ones(1, 1, 5, 4)
    for call, name in (
        (rope, "rope("),
        (rope.rotate_, "rope.rotate_("),
        (lambda q, k: rw.qk_norm_rope(q, k, rope), "qk_norm_rope("),
    ):
        with pytest.raises(rw.RopewalkError) as error:
            call(q, k)
        assert error.value.asked.startswith(name)


def test_errors_of_the_other_methods_name_them():
    dynamic, x = rw.RotaryEmbedding(rw.RopeSpec(4, rw.DynamicNTK(1e4, 2.0, 8))), torch.ones(1, 1, 5, 4)
    for call, name in (
        (lambda: dynamic(x, offset=3), "rope("),
        (lambda: dynamic.rotate_(x, offset=3), "rope.rotate_("),
        (lambda: dynamic.unrotate(x, offset=3), "rope.unrotate("),
        (lambda: dynamic.at(torch.arange(3)), "rope.at("),
        (lambda: dynamic.shift(x, 1), "rope.shift("),
        (lambda: dynamic.retune(x, dynamic, offset=3), "rope.retune("),
        (lambda: rw.qk_norm_rope(x, x, dynamic, offset=3), "qk_norm_rope("),
    ):
        with pytest.raises(rw.RopewalkError, match="whose frequencies depend on the length") as error:
            call()
        assert error.value.asked.startswith(name)
