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
        loaded = rw.KVCache(1, 2, max_length=16, head_dim=8)
        loaded.load_state_dict(cache.state_dict())
        for other in (copy.copy(cache), copy.deepcopy(cache), pickle.loads(pickle.dumps(cache)), loaded):
            copy.deepcopy(first)(X[:, :1], cache=other)
        cache.reset()
        second(X, cache=cache)
        with pytest.raises(rw.RopewalkError, match="another layer"):
            first(X, cache=cache)
        del second
        gc.collect()
        first(X, cache=cache)


def test_a_mask_row_that_hides_everything():
    attention, linear, q = rw.Attention(16, 2), rw.LinearAttention(16, 2), torch.randn(2, 2, 5, 8)
    x = X.expand(2, 5, 16)
    hidden = torch.zeros(2, 5, dtype=torch.bool)
    one = torch.tensor([[True] * 5, [False] * 5])
    for call in (
        lambda mask: attention(x, key_mask=mask),
        lambda mask: attention(x, key_mask=mask, cache=attention.make_cache(2, 8)),
        lambda mask: linear(x, key_mask=mask),
        lambda mask: rw.linear_attention(q, q, q, key_mask=mask),
        lambda mask: rw.attention(q, q, q, key_mask=mask),
    ):
        with torch.no_grad():
            for mask in (hidden, one):
                with pytest.warns(rw.RopewalkWarning, match="a row without True(.|\n)*pass ~mask"):
                    call(mask)
            call(~hidden)
            call(torch.arange(5).expand(2, 5) > 3)


def test_a_sequence_that_has_ended_is_not_suspected():
    attention = rw.Attention(16, 2, window=4)
    for cache in (attention.make_cache(2), rw.KVCache(2, 2, 16, 8)):
        with torch.no_grad():
            attention(X.expand(2, 5, 16), cache=cache)
            attention(X[:, :1].expand(2, 1, 16), cache=cache, key_mask=torch.tensor([[True], [False]]))


def test_packed_sequences_that_end_before_the_tokens():
    rope, q = rw.RotaryEmbedding(8), torch.randn(1, 2, 5, 8)
    attention, linear = rw.Attention(16, 2, encoding=rope), rw.LinearAttention(16, 2, encoding=rope)
    for call in (
        lambda ends: rope(q, cu_seqlens=ends),
        lambda ends: attention(X, cu_seqlens=ends),
        lambda ends: linear(X, cu_seqlens=ends),
        lambda ends: rw.attention(q, q, q, cu_seqlens=ends),
        lambda ends: rw.linear_attention(q, q, q, cu_seqlens=ends),
    ):
        with pytest.warns(rw.RopewalkWarning, match="a smaller end: the tokens after it"):
            call(torch.tensor([0, 2, 3]))
        call(torch.tensor([0, 2, 5]))


@pytest.mark.parametrize("layer", [rw.Attention, rw.LinearAttention])
def test_positions_that_restart_in_a_row(layer):
    attention = layer(16, 2, encoding=rw.RotaryEmbedding(8))
    for ids in ([0, 1, 2, 0, 1], [[0, 1, 2, 3, 0]], [7, 8, 0, 1, 0]):
        with pytest.warns(rw.RopewalkWarning, match=r"occurs earlier in the row\n.*pass cu_seqlens="):
            attention(X, torch.tensor(ids))
    for ids in ([0, 1, 2, 3, 4], [4, 3, 2, 1, 0], [2, 0, 1, 4, 3], [0, 0, 0, 1, 1], [5.5, 6, 6.5, 7, 9]):
        attention(X, torch.tensor(ids))
    # Packed, or padded at the start as tokenizers do.
    attention(X, torch.tensor([0, 1, 2, 0, 1]), cu_seqlens=torch.tensor([0, 3, 5]))
    attention(X, torch.tensor([[1, 1, 0, 1, 2]]), key_mask=torch.tensor([[False, False, True, True, True]]))
    attention(X, torch.tensor([[0, 1, 2, 1, 1]]), key_mask=torch.tensor([[True, True, True, False, False]]))
    # Not read inside a graph.
    torch.compiler.reset()
    torch.compile(attention, fullgraph=True, backend="eager")(X, torch.tensor([0, 1, 2, 0, 1]))


def test_two_axes_may_restart():
    spec = rw.RopeSpec(8, axes=rw.Axes.chunked((2, 2)))
    rw.Attention(16, 2, encoding=rw.RotaryEmbedding(spec))(X, torch.tensor([[0, 0, 0, 1, 1], [0, 1, 2, 0, 1]]))


def test_positions_that_are_not_beyond_the_cache():
    rope = rw.RotaryEmbedding(8)
    attention, windowed = rw.Attention(16, 2, encoding=rope), rw.Attention(16, 2, encoding=rope, window=3)
    for cache, layer in ((attention.make_cache(1, 32), attention), (windowed.make_cache(1), windowed)):
        with torch.no_grad():
            layer(X, cache=cache)
            with pytest.warns(rw.RopewalkWarning, match="positions beyond that of the last token(.|\n)*omit positions"):
                layer(X[:, :1], torch.tensor([0]), cache=cache)
            layer(X[:, :1], torch.tensor([7]), cache=cache)
            with pytest.warns(rw.RopewalkWarning, match="positions beyond that of the last token"):
                layer(X[:, :2], torch.tensor([[7, 8]]), cache=cache)
            layer(X[:, :1], cache=cache, positions=torch.tensor([[20]]))
            # Fractions are not stored, and not compared. Positions cannot continue from them.
            layer(X[:, :1], cache=cache, positions=torch.tensor([0.5]))
            with pytest.raises(rw.RopewalkError, match="pass positions= in every call"):
                layer(X[:, :1], cache=cache)


def test_hidden_tokens_are_not_compared():
    attention, x = rw.Attention(16, 2, encoding=rw.RotaryEmbedding(8)), X.expand(2, 5, 16)
    real, ids = torch.tensor([[True] * 5, [True] * 3 + [False] * 2]), torch.tensor([[5], [3]])
    for cache in (attention.make_cache(2, 16), attention.make_cache(2, 16)):
        with torch.no_grad():
            attention(x, torch.arange(5), cache, key_mask=real)
            attention(x[:, :1], ids, cache)
            attention(x[:, :1], torch.tensor([[6], [3]]), cache, key_mask=torch.tensor([[True], [False]]))


def test_a_warning_is_one_for_all_batches():
    attention = rw.Attention(16, 2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.resetwarnings()
        warnings.simplefilter("default")
        for end in (2, 3, 4):
            attention(X, cu_seqlens=torch.tensor([0, end]))
    assert len(caught) == 1


def test_a_part_of_the_keys_may_be_padding_only():
    q = torch.randn(2, 2, 5, 8)
    mask = torch.tensor([[True] * 5, [False] * 5])
    _, lse = rw.attention(q, q, q, key_mask=mask, return_lse=True)
    assert lse[1].eq(-torch.inf).all()


def test_ragged_rows_without_a_token_are_not_compared():
    attention, cache = rw.Attention(16, 2, encoding=rw.RotaryEmbedding(8)), rw.KVCache(2, 2, 16, 8)
    x = X.expand(2, 5, 16)
    with torch.no_grad():
        attention(x, cache=cache, counts=torch.tensor([5, 0]))
        attention(x[:, :1], torch.tensor([[0], [0]]), cache=cache, counts=torch.tensor([0, 1]))
        with pytest.warns(rw.RopewalkWarning, match="positions beyond that of the last token"):
            attention(x[:, :1], torch.tensor([[9], [0]]), cache=cache, counts=torch.tensor([1, 1]))


def test_positions_that_are_not_beyond_the_state():
    layer = rw.LinearAttention(16, 2, encoding=rw.RotaryEmbedding(8))
    _, state = layer.step(X)
    with pytest.warns(rw.RopewalkWarning, match="positions from the next one of the state on(.|\n)*omit positions"):
        layer(X[:, :1], torch.tensor([0]), state)
    layer(X[:, :1], torch.tensor([5]), state)
    layer(X[:, :1], torch.tensor([[9]]), state)


@torch.no_grad()
def test_one_state_for_two_layers():
    first, second = rw.LinearAttention(16, 2), rw.LinearAttention(16, 2)
    _, state = first.step(X)
    with pytest.raises(rw.RopewalkError, match=r"tokens of another layer(.|\n)*one state per layer"):
        second.step(X, state)
    first.step(X, state)
    for other in (
        copy.copy(state),
        copy.deepcopy(state),
        pickle.loads(pickle.dumps(state)),
        rw.LinearState.from_state_dict(state.state_dict()),
    ):
        second.step(X, other)
    del first
    gc.collect()
    second.step(X, state)


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
