"""Windows of attention against a band mask over float64 scores: every encoding, direction, padding and packing."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ropewalk as rw
from meant import meant
from nn.test_attention import DIM, HEADS, WIDTH, encoding_for, layer
from nn.test_attention_scores import flex_in_eager_mode
from ropewalk.nn.attention import scores
from ropewalk.nn.attention.scores import ScoreBias, attend, attend_with_lse
from ropewalk.nn.attention.visibility import FLEX_BLOCK, Visibility, window_blocks
from slow import slow
from strategies import seeds, vector

TIGHT = {"rtol": 0.0, "atol": 1e-12}
ALL = ["none", "rope", "alibi", "t5", "xpos"]


def band(seq, window, causal):
    """True where query m sees key n: 0 <= m - n < window, or |m - n| < window."""
    ahead = torch.arange(seq)[:, None] - torch.arange(seq)
    return (ahead >= 0) & (ahead < window) if causal else ahead.abs() < window


def by_band(attention, x, visible, positions=None):
    """The layer in plain torch, with a mask [batch or 1, seq, seq]."""
    q, k, v = attention.heads_of(x)
    ids = torch.arange(x.shape[1]) if positions is None else positions
    if attention.encoding is not None:
        q, k = attention.encoding.rotate(q, k, ids)
    k, v = (heads.repeat_interleave(q.shape[1] // heads.shape[1], dim=1) for heads in (k, v))
    table = q @ k.mT * attention.scale
    bias = None if attention.encoding is None else attention.encoding.bias(ids, ids)
    table = table if bias is None else table + bias
    weights = torch.softmax(table.masked_fill(~visible[:, None], -torch.inf), dim=-1)
    return attention.joined(weights @ v)


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize("causal", [True, False])
@settings(max_examples=10)
@given(seed=seeds, window=st.integers(1, 14), seq=st.integers(1, 12), heads=st.sampled_from([1, 2, 4]))
def test_a_window_is_a_band(kind, causal, seed, window, seq, heads):
    attention = layer(kind, causal=causal, window=window, num_kv_heads=heads)
    x = vector(seed, 2, seq, DIM).requires_grad_()
    ids = torch.arange(seq) * 3 + 5
    for positions in (None, ids):
        y = attention(x, positions)
        expected = by_band(attention, x, band(seq, window, causal)[None], positions)
        torch.testing.assert_close(y, expected, **TIGHT)
        inputs = [x, *attention.parameters()]
        cotangent = vector(seed + 1, *y.shape)
        gradients = (torch.autograd.grad(out, inputs, cotangent, allow_unused=True) for out in (y, expected))
        for ours, theirs in zip(*gradients, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize("causal", [True, False])
def test_padding_in_a_window(kind, causal):
    attention, x = layer(kind, causal=causal, window=3), vector(0, 2, 9, DIM)
    mask = torch.tensor([[True] * 9, [False] * 2 + [True] * 4 + [False, True, True]])
    y = attention(x.masked_fill(~mask[..., None], torch.nan), key_mask=mask)
    visible = band(9, 3, causal) & mask[:, None]
    expected = by_band(attention, x, visible)
    for row in range(2):
        torch.testing.assert_close(y[row, mask[row]], expected[row, mask[row]], **TIGHT)


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("readable", [True, False])
@meant("cu_seqlens")
def test_packed_sequences_in_a_window(kind, causal, readable, monkeypatch):
    if not readable:
        monkeypatch.setattr(scores, "can_read_values", lambda ids: False)
    attention, x = layer(kind, causal=causal, window=3), vector(0, 1, 12, DIM)
    ends = torch.tensor([0, 5, 5, 6, 11])
    y = attention(x, cu_seqlens=ends)
    for start, end in itertools.pairwise(ends.tolist()):
        torch.testing.assert_close(y[:, start:end], attention(x[:, start:end]), **TIGHT)
    assert not y[:, 11:].any()


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("queries", "keys"), [(23, 23), slow(11, 23)])
def test_chunks_of_a_long_window_are_the_whole(kind, causal, queries, keys, monkeypatch):
    q, k, v = vector(0, 2, HEADS, queries, WIDTH), vector(1, 2, 2, keys, WIDTH), vector(2, 2, 2, keys, 3)
    mask = torch.rand(2, keys, generator=torch.Generator().manual_seed(0)) > 0.3
    made, ids = encoding_for(kind, causal=causal), torch.arange(keys)
    bias = None if made is None else ScoreBias(made.double(), ids[keys - queries :], ids)
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    chunks, real = [], scores._in_chunks
    monkeypatch.setattr(scores, "_in_chunks", lambda *given: chunks.append(1) or real(*given))
    for window, key_mask in itertools.product((1, 2, 4), (None, mask)):
        visibility = Visibility(causal, keys - queries or None, key_mask, window=window)
        outputs = []
        for chunk in (10**9, 4):
            monkeypatch.setattr(scores, "SMALLEST_CHUNK", chunk)
            chunks.clear()
            y = attend(q, k, v, visibility, scale=0.3, score_bias=bias)
            z, lse = attend_with_lse(q, k, v, visibility, scale=0.3, score_bias=bias)
            assert len(chunks) == (2 if chunk == 4 else 0)
            torch.testing.assert_close(y, z, **TIGHT)
            lse = lse.masked_fill(lse.isinf(), 0)
            outputs.append((y, lse, *torch.autograd.grad((y.sum(), lse.sum()), (q, k, v))))
        for whole, parts in zip(*outputs, strict=True):
            torch.testing.assert_close(parts, whole, **TIGHT)


def listed(counts, indices):
    """The table of blocks that a list of indices per row stands for."""
    table = torch.zeros(indices.shape[2:], dtype=torch.bool)
    for row, count in enumerate(counts[0, 0].tolist()):
        table[row, indices[0, 0, row, :count].long()] = True
        assert int(table[row].sum()) == count
    assert 0 <= int(indices.min()) <= int(indices.max()) < len(table)
    return table


@pytest.mark.parametrize("causal", [True, False])
@settings(max_examples=40)
@given(tokens=st.integers(1, 900), window=st.integers(1, 1000), hides=st.booleans())
def test_the_block_mask_of_a_window(causal, tokens, window, hides):
    mask = torch.ones(1, tokens, dtype=torch.bool) if hides else None
    visibility = Visibility(causal, None, mask, window=window)
    options = (visibility, tokens, lambda b, h, i, j: visibility.visible(b, i, j), torch.device("cpu"))
    blocks = window_blocks(*options, gradients=True)
    assert window_blocks(*options, gradients=False).q_indices is None
    number = -(-tokens // FLEX_BLOCK)
    padded = torch.zeros(number * FLEX_BLOCK, number * FLEX_BLOCK, dtype=torch.bool)
    padded[:tokens, :tokens] = band(tokens, window, causal)
    tiles = padded.view(number, FLEX_BLOCK, number, FLEX_BLOCK).transpose(1, 2)
    touched, whole = (
        listed(getattr(blocks, f"{full}kv_num_blocks"), getattr(blocks, f"{full}kv_indices")) for full in ("", "full_")
    )
    # The same blocks, listed by key.
    assert torch.equal(listed(blocks.q_num_blocks, blocks.q_indices), touched.T)
    assert torch.equal(listed(blocks.full_q_num_blocks, blocks.full_q_indices), whole.T)
    assert not (touched & whole).any()
    assert torch.equal(touched | whole, tiles.flatten(2).any(-1))
    assert not whole.any() if hides else torch.equal(whole, tiles.flatten(2).all(-1))
    assert blocks.shape == (1, 1, tokens, tokens)


@pytest.mark.slow
@flex_in_eager_mode
def test_a_window_by_flex_attention():
    for causal, kind in itertools.product((True, False), ("none", "alibi")):
        q, k, v = vector(0, 2, HEADS, 300, 16), vector(1, 2, 2, 300, 16), vector(2, 2, 2, 300, 16)
        made, ids = encoding_for(kind, causal=causal), torch.arange(300)
        bias = None if made is None else ScoreBias(made.double(), ids, ids)
        for window, key_mask in ((7, None), (150, torch.arange(300).expand(2, 300) % 7 > 0)):
            visibility = Visibility(causal, None, key_mask, window=window)
            with torch.no_grad():
                y, z = (attend(q, k, v, visibility, scale=0.3, score_bias=bias, flex=flex) for flex in (True, False))
            torch.testing.assert_close(y, z, **TIGHT)


def test_a_window_that_holds_everything_changes_nothing():
    x = vector(0, 2, 9, DIM)
    for causal in (True, False):
        whole, windowed = (layer("rope", causal=causal, window=window)(x) for window in (None, 9))
        torch.testing.assert_close(windowed, whole, **TIGHT)


def test_an_encoding_by_position_and_a_window_by_order():
    attention, x = layer("rope", window=2), vector(0, 1, 6, DIM)
    # Positions far apart are neighbours by order.
    y = attention(x, torch.arange(6) * 100)
    torch.testing.assert_close(y[:, 1], attention(x[:, :2], torch.tensor([0, 100]))[:, 1], **TIGHT)
    torch.testing.assert_close(y[:, 5], attention(x[:, 4:], torch.tensor([400, 500]))[:, 1], **TIGHT)


@pytest.mark.parametrize("kind", ["rope", "alibi"])
def test_compiled_windows(kind):
    attention, x = layer(kind, window=3), vector(0, 2, 9, DIM)
    torch.compiler.reset()
    compiled = torch.compile(attention, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x), attention(x), **TIGHT)


def test_transformers_sliding_window_is_the_same():
    transformers = pytest.importorskip("transformers.masking_utils")
    sees = transformers.sliding_window_causal_mask_function(4)
    theirs = torch.tensor([[bool(sees(0, 0, torch.tensor(m), torch.tensor(n))) for n in range(12)] for m in range(12)])
    ours = Visibility(True, window=4).mask(1, 12, 12, torch.device("cpu"))[0]
    assert torch.equal(ours, theirs)
    assert "window=4" in repr(rw.Attention(8, 2, window=4))


NAMED = {
    "none": {},
    "learned": {"length": 16},
    "multiplicative": {"length": 16},
    "sinusoidal": {},
    "concatenated": {"width": 4},
    "recurrent": {},
    "rope": {"pairing": "half"},
    "rope-across-heads": {},
    "xpos": {"spec": rw.RopeSpec(4, xpos=rw.XPos(512))},
    "alibi": {},
    "t5": {"causal": True},
}


@pytest.mark.parametrize("name", NAMED)
def test_every_encoding_by_name(name):
    made = rw.encoding(name, dim=16, num_heads=4, **NAMED[name])
    attention = rw.Attention(16, 4, encoding=made, window=3).double()
    with torch.no_grad():
        x = made.embed(vector(0, 2, 9, 16))
        expected = by_band(attention, x, band(9, 3, True)[None])
        torch.testing.assert_close(attention(x), expected, **TIGHT)
        cache = attention.make_cache(2)
        steps = torch.cat([attention(token, cache=cache) for token in x.split(1, dim=1)], dim=1)
        torch.testing.assert_close(steps, expected, **TIGHT)
