"""RollingKVCache: a window in constant memory decodes as the whole sequence in one call, and as a KVCache."""

import copy
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounter

import ropewalk as rw
from nn.test_attention import DIM, HEADS, WIDTH, encoding_for, layer
from nn.test_attention_scores import as_on_a_gpu, flex_in_eager_mode
from ropewalk.nn.attention import scores
from ropewalk.nn.attention.rolling_cache import RollingKVCache
from slow import slow
from strategies import seeds, vector

TIGHT = {"rtol": 0.0, "atol": 1e-12}
ALL = ["none", "rope", "alibi", "t5", "xpos"]


def read(attention, x, sizes, cache, **options):
    with torch.inference_mode():
        return torch.cat([attention(part, cache=cache, **options) for part in x.split(sizes, dim=1)], dim=1)


@pytest.mark.parametrize("kind", ALL)
@settings(max_examples=12)
@given(seed=seeds, window=st.integers(1, 9), parts=st.lists(st.integers(0, 7), min_size=1, max_size=8))
def test_chunks_are_as_the_whole(kind, seed, window, parts):
    attention, x = layer(kind, window=window), vector(seed, 2, sum(parts), DIM)
    cache = attention.make_cache(2)
    assert isinstance(cache, RollingKVCache)
    assert cache.keys.shape == (2, 2, window, WIDTH)
    torch.testing.assert_close(read(attention, x, parts, cache), attention(x).detach(), **TIGHT)
    assert cache.lengths.tolist() == [sum(parts)] * 2
    # More slots than the window, and an ordinary cache.
    for slots, kind_of_cache in ((window + 3, rw.RollingKVCache), (max(1, sum(parts)), rw.KVCache)):
        other = kind_of_cache(2, 2, slots, WIDTH, dtype=torch.float64)
        torch.testing.assert_close(read(attention, x, parts, other), attention(x).detach(), **TIGHT)


def test_a_prompt_of_five_windows_then_steps():
    attention, x = layer("rope", window=4), vector(0, 2, 26, DIM)
    whole = attention(x).detach()
    for sizes in ([20] + [1] * 6, [7, 13, 6], [1] * 26):
        cache = attention.make_cache(2)
        torch.testing.assert_close(read(attention, x, sizes, cache), whole, **TIGHT)
        # The last window, in slots by index: token n is in slot n % 4.
        assert cache.positions.tolist() == [[24, 25, 22, 23]] * 2


def test_stored_keys_are_the_rotated_keys_bit_for_bit():
    rope = rw.RotaryEmbedding(WIDTH)
    k, v = (vector(seed, 1, 2, 11, WIDTH).float() for seed in range(2))
    rotated, cache = rope(k), RollingKVCache(1, 2, 4, WIDTH)
    for n in range(11):
        # The rotation of one token at its offset is that of the whole sequence, and storing it changes nothing.
        cache.append(rope(k[:, :, n : n + 1], offset=n), v[:, :, n : n + 1])
        for index in range(max(0, n - 3), n + 1):
            assert torch.equal(cache.keys[:, :, index % 4], rotated[:, :, index])
            assert torch.equal(cache.values[:, :, index % 4], v[:, :, index])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_steps_in_low_precision_are_as_exact_as_a_prefill(dtype):
    """The two-times rule: the error of decoding is at most twice that of one call over the whole sequence."""
    exact = layer("rope", window=5)
    x = vector(0, 2, 40, DIM).to(dtype)
    expected = exact(x.double()).detach()
    rounded = copy.deepcopy(exact).to(dtype)
    expected_of_rounded = copy.deepcopy(rounded).double()(x.double()).detach()
    steps = read(rounded, x, [1] * 40, rounded.make_cache(2))
    prefill = rounded(x).detach()
    errors = [(y.double() - expected_of_rounded).abs().max() for y in (steps, prefill)]
    assert errors[0] <= 2 * errors[1]
    assert errors[1] < 0.05
    assert expected.shape == steps.shape


@pytest.mark.parametrize("kind", ALL)
def test_ragged_counts(kind):
    attention, x = layer(kind, window=3), vector(0, 3, 20, DIM)
    whole, cache = attention(x).detach(), attention.make_cache(3)
    taken = torch.zeros(3, dtype=torch.int64)
    with torch.inference_mode():
        for counts in ([5, 0, 2], [1, 1, 1], [4, 4, 0], [0, 7, 1], [1, 1, 1]):
            counts = torch.tensor(counts)
            seq = int(counts.max())
            rows = [
                torch.cat([row[n : n + c], row.new_full((seq - c, DIM), torch.nan)])
                for row, n, c in zip(x, taken, counts, strict=True)
            ]
            y = attention(torch.stack(rows), cache=cache, counts=counts)
            for row, (n, c) in enumerate(zip(taken.tolist(), counts.tolist(), strict=True)):
                torch.testing.assert_close(y[row, :c], whole[row, n : n + c], **TIGHT)
            taken += counts
            assert torch.equal(cache.lengths, taken)


@pytest.mark.parametrize("kind", ["rope", "alibi"])
def test_hidden_tokens_stay_hidden(kind):
    attention, x = layer(kind, window=4), vector(0, 2, 12, DIM)
    mask = torch.rand(2, 12, generator=torch.Generator().manual_seed(1)) > 0.4
    mask[:, 0] = True
    whole = attention(x, key_mask=mask).detach()
    for sizes in ([12], [5] + [1] * 7, [1] * 12, [3, 6, 3]):
        parts = zip(x.split(sizes, dim=1), mask.split(sizes, dim=1), strict=True)
        for cache in (attention.make_cache(2), rw.KVCache(2, 2, 20, WIDTH, dtype=torch.float64)):
            with torch.inference_mode():
                parts, again = itertools.tee(parts)
                y = torch.cat([attention(part, cache=cache, key_mask=shown) for part, shown in again], dim=1)
            torch.testing.assert_close(y, whole, **TIGHT)
            cache.reset()
            assert cache.hidden is None


def test_beam_search():
    attention, x = layer("rope", window=4), vector(0, 3, 15, DIM)
    cache, index = attention.make_cache(3), torch.tensor([2, 0, 2])
    read(attention, x[:, :9], [9], cache)
    cache.reorder(index)
    steps = read(attention, x[:, 9:], [1] * 6, cache)
    chosen = torch.cat([x[index, :9], x[:, 9:]], dim=1)
    torch.testing.assert_close(steps, attention(chosen)[:, 9:].detach(), **TIGHT)


@pytest.mark.slow
def test_memory_is_constant_over_ten_thousand_steps():
    attention = rw.Attention(8, 2, window=16, encoding=rw.RotaryEmbedding(4)).eval()
    cache, x = attention.make_cache(1), torch.randn(1, 10_000, 8, generator=torch.Generator().manual_seed(0))
    buffers = {name: (x.data_ptr(), x.untyped_storage().nbytes()) for name, x in cache._buffers().items()}
    with torch.inference_mode():
        y = attention(x[:, :1], cache=cache)
        for n in range(1, 10_000):
            y = attention(x[:, n : n + 1], cache=cache)
    assert {name: (x.data_ptr(), x.untyped_storage().nbytes()) for name, x in cache._buffers().items()} == buffers
    assert {name for name, value in vars(cache).items() if isinstance(value, torch.Tensor)} == {*buffers}
    assert cache.lengths.tolist() == [10_000]
    # The last window read again, at its positions.
    last = attention(x[:, -16:], torch.arange(9_984, 10_000))[:, -1:]
    torch.testing.assert_close(y, last, rtol=0, atol=1e-5)


@pytest.mark.parametrize("backend", ["eager", slow("inductor")])
def test_compiled_steps(backend):
    attention, x = layer("rope", window=4), vector(0, 2, 14, DIM)
    whole, cache = attention(x).detach(), attention.make_cache(2)
    torch.compiler.reset()
    compiled = torch.compile(attention, fullgraph=True, backend=backend)
    with torch.no_grad():
        y = [attention(x[:, :6], cache=cache)] + [compiled(token, cache=cache) for token in x[:, 6:].split(1, dim=1)]
    torch.testing.assert_close(torch.cat(y, dim=1), whole, rtol=0, atol=1e-10)


def test_bad_input():
    attention, x = layer("rope", window=4), vector(0, 2, 3, DIM)
    cache = attention.make_cache(2)
    for call, message in (
        (lambda: layer("rope")(x, cache=rw.RollingKVCache(2, 2, 4, WIDTH, dtype=torch.float64)), "without a window"),
        (lambda: layer("rope", window=9)(x, cache=cache), "a window of at most 4(.|\n)*window=9"),
        (lambda: attention(x[:1], cache=cache), "batch=1(.|\n)*batch=2(.|\n)*make_cache"),
        (lambda: attention(x, cache=rw.KVCache(2, 4, 9, WIDTH)), "num_kv_heads=2(.|\n)*num_kv_heads=4"),
        (lambda: cache.evict_prefix(1, attention.encoding), "replaces the oldest one"),
        (lambda: cache.truncate(1), "copy.copy"),
        (lambda: attention(x, cache=cache, key_mask=torch.ones(2, 4, dtype=torch.bool)), r"bool \[2, 3\]"),
        (lambda: rw.RollingKVCache(2, 2, 0, WIDTH), "an integer of at least 1"),
        (lambda: layer("rope").make_cache(2), "a max_length: this layer has no window"),
        (lambda: layer("rope").make_cache(2, 0), "an integer of at least 1"),
        (lambda: layer("rope").make_cache(0, 4), "an integer of at least 1"),
    ):
        with torch.no_grad(), pytest.raises(rw.RopewalkError, match=message):
            call()
    assert cache.lengths.tolist() == [0, 0]
    assert not cache.keys.any()


def test_make_cache():
    attention = rw.Attention(32, HEADS, num_kv_heads=2, window=8)
    kinds = {None: rw.RollingKVCache, 8: rw.RollingKVCache, 100: rw.RollingKVCache, 5: rw.KVCache}
    for max_length, kind in kinds.items():
        cache = attention.make_cache(3, max_length)
        assert type(cache) is kind
        assert cache.max_length == min(8, max_length or 8)
    full = rw.Attention(32, HEADS).to(torch.bfloat16).make_cache(3, 20)
    assert (type(full), full.max_length, full.keys.dtype, full.batch) == (rw.KVCache, 20, torch.bfloat16, 3)
    assert attention.make_cache(1, dtype=torch.float64, device="meta").keys.is_meta
    assert rw.Attention(16, 2, device="meta", window=4).make_cache(1).keys.is_meta
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.inference_mode():
        cache = attention.make_cache(1)
        assert cache.keys.dtype == torch.bfloat16
        attention(torch.randn(1, 5, 32), cache=cache)


@flex_in_eager_mode
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["none", "alibi", "t5"])
def test_by_flex_attention(kind, monkeypatch):
    """Chunks of more than 16 tokens, for which FlexAttention is used on a GPU."""
    attention = rw.Attention(64, 4, num_kv_heads=2, encoding=encoding_for(kind), window=20).double().eval()
    x, counts = vector(0, 2, 70, 64), torch.tensor([30, 19])
    whole = attention(x).detach()
    as_on_a_gpu(monkeypatch)
    used, real = [], scores._by_flex
    monkeypatch.setattr(scores, "_by_flex", lambda *given: used.append(given[3]) or real(*given))
    for cache in (attention.make_cache(2), rw.KVCache(2, 2, 100, 16, dtype=torch.float64)):
        used.clear()
        torch.testing.assert_close(read(attention, x, [30, 1, 18, 21], cache), whole, **TIGHT)
        assert [visibility.starts for visibility in used[:1]] == [None]
        assert len(used) == 3
    cache = attention.make_cache(2)
    with torch.inference_mode():
        attention(x[:, :30], cache=cache, counts=counts)
        following = torch.stack([x[0, 30:50], x[1, 19:39]])
        y = attention(following, cache=cache)
    torch.testing.assert_close(y, torch.stack([whole[0, 30:50], whole[1, 19:39]]), **TIGHT)


@pytest.mark.slow
def test_prompts_of_many_lengths_are_few_graphs():
    attention = layer("rope", window=4)
    cache, counter = attention.make_cache(1), CompileCounter()
    torch.compiler.reset()
    compiled = torch.compile(attention, fullgraph=True, backend=counter)
    with torch.no_grad():
        for length in range(5, 20):
            cache.reset()
            x = vector(length, 1, length, DIM)
            torch.testing.assert_close(compiled(x, cache=cache), attention(x), rtol=0, atol=1e-10)
    assert counter.frame_count <= 3


@pytest.mark.parametrize("sizes", [[40, 40], [3, 50, 30], [5, 70]])
def test_a_second_long_prompt_is_computed_in_chunks(sizes, monkeypatch):
    """Stored tokens in the order of their indices: no mask over all queries and keys."""
    attention, x = layer("alibi", window=4), vector(0, 2, sum(sizes), DIM)
    whole = attention(x).detach()
    monkeypatch.setattr(scores, "SMALLEST_CHUNK", 8)
    widths, real = [], scores._mask
    monkeypatch.setattr(scores, "_mask", lambda *given: widths.append(given[2].shape[2]) or real(*given))
    for cache in (attention.make_cache(2), rw.KVCache(2, 2, 100, WIDTH, dtype=torch.float64)):
        torch.testing.assert_close(read(attention, x, sizes, cache), whole, **TIGHT)
    assert max(widths) <= 16


def test_rows_whose_slots_are_all_empty():
    """A cache of one's own can have such rows: they see nothing."""
    q = vector(0, 2, 2, 3, 4)
    indices = torch.tensor([[0, 1, 2], [-1, -1, -1]])
    y = scores.attend(q, q, q, rw.Visibility(True, key_indices=indices), scale=1.0)
    assert not y[1].any()
    assert y.isfinite().all()
