"""KVCache: prefill and decode are prefill, for tokens, chunks and ragged batches; eviction, beams, compilers."""

import copy
import inspect
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounterWithBackend

from meant import meant
from nn.test_attention import CLOSE, DIM, HEADS, KINDS, WIDTH, layer
from ropewalk import Axes, DynamicNTK, RopeSpec, RopewalkError, RotaryEmbedding
from ropewalk.nn.attention.cache import KVCache
from ropewalk.nn.attention.layer import Attention
from ropewalk.nn.encodings.bias import AlibiBias, T5Bias
from ropewalk.nn.encodings.by_name import encoding
from ropewalk.nn.encodings.rotary import RotaryEncoding
from strategies import seeds, vector

ALL = [*KINDS, "xpos"]
NAN = float("nan")


def cache_for(batch, max_length=40, **options):
    return KVCache(batch, 2, max_length, WIDTH, **{"dtype": torch.float64} | options)


@pytest.mark.parametrize("kind", ALL)
@settings(max_examples=15)
@given(seed=seeds, parts=st.lists(st.integers(1, 7), min_size=1, max_size=8))
def test_chunks_are_as_the_whole(kind, seed, parts):
    attention, x = layer(kind), vector(seed, 2, sum(parts), DIM)
    cache = cache_for(2, sum(parts))  # it is full in the end, and no fuller
    with torch.no_grad():
        y = torch.cat([attention(chunk, cache=cache) for chunk in x.split(parts, dim=1)], dim=1)
        assert torch.allclose(y, attention(x), **CLOSE)
    assert cache.lengths.tolist() == [sum(parts)] * 2


@pytest.mark.parametrize("kind", ALL)
def test_one_token_at_a_time(kind):
    attention, x = layer(kind), vector(0, 3, 30, DIM)
    for prompt in (0, 1, 17):
        cache = cache_for(3)
        with torch.inference_mode():
            parts = [x[:, :prompt]] * (prompt > 0) + list(x[:, prompt:].split(1, dim=1))
            y = torch.cat([attention(part, cache=cache) for part in parts], dim=1)
            assert torch.allclose(y, attention(x), **CLOSE)


@pytest.mark.parametrize("kind", ALL)
@settings(max_examples=10)
@given(seed=seeds, rounds=st.lists(st.tuples(*[st.integers(0, 5)] * 3), min_size=1, max_size=6))
def test_ragged_sequences_are_as_if_alone(kind, seed, rounds):
    attention, x = layer(kind), vector(seed, 3, 40, DIM)
    cache, done = cache_for(3), [0, 0, 0]
    with torch.no_grad():
        alone = attention(x)
        for counts in rounds:
            chunk = torch.full((3, max(*counts, 1), DIM), NAN, dtype=torch.float64)
            for row, count in enumerate(counts):
                chunk[row, :count] = x[row, done[row] : done[row] + count]
            y = attention(chunk, cache=cache, counts=torch.tensor(counts))
            for row, count in enumerate(counts):
                assert torch.allclose(y[row, :count], alone[row, done[row] : done[row] + count], **CLOSE)
                done[row] += count
        # And each goes on by a token at a time, from where it stands.
        for _ in range(3):
            step = torch.stack([x[row, n] for row, n in enumerate(done)])[:, None]
            y = attention(step, cache=cache)[:, 0]
            assert torch.allclose(y, torch.stack([alone[row, n] for row, n in enumerate(done)]), **CLOSE)
            done = [n + 1 for n in done]
    assert cache.lengths.tolist() == done
    assert cache.filled_at_most == max(done)
    for row, n in enumerate(done):
        assert not cache.keys[row, :, n:].any()
        assert not cache.values[row, :, n:].any()


@pytest.mark.parametrize("kind", KINDS)
def test_prompts_that_are_padded_before_their_start(kind):
    attention, x = layer(kind), vector(0, 2, 12, DIM)
    pad = torch.tensor([[0], [3]])
    mask, ids = torch.arange(40) >= pad, torch.arange(12) - pad
    cache = cache_for(2)
    with torch.no_grad():
        y = attention(x[:, :8], ids[:, :8], cache, key_mask=mask)
        y = torch.cat([y, attention(x[:, 8:9], ids[:, 8:9], cache, key_mask=mask)], dim=1)
        y = torch.cat([y, attention(x[:, 9:], ids[:, 9:], cache, key_mask=mask)], dim=1)
        assert torch.allclose(y[1, 3:], attention(x[1:, 3:])[0], **CLOSE)
        assert torch.allclose(y[0], attention(x[:1])[0], **CLOSE)
        assert not y[1, :3].any()


@pytest.mark.parametrize("kind", ALL)
@meant("positions")
def test_positions_are_kept_with_the_keys(kind):
    attention, x = layer(kind), vector(0, 2, 9, DIM)
    ids = torch.randint(0, 60, (2, 9), generator=torch.Generator().manual_seed(0))
    for places in (ids, ids[0]):
        cache = cache_for(2)
        with torch.no_grad():
            y = [attention(x[:, a:b], places[..., a:b], cache) for a, b in ((0, 4), (4, 5), (5, 9))]
            assert torch.allclose(torch.cat(y, dim=1), attention(x, places), **CLOSE)


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize("ragged", [False, True])
def test_after_eviction_the_rest_is_as_if_it_had_been_first(kind, ragged):
    attention, x = layer(kind), vector(0, 2, 20, DIM)
    cache, counts = cache_for(2), torch.tensor([12, 9]) if ragged else None
    with torch.no_grad():
        attention(x[:, :12], cache=cache, counts=counts)
        cache.evict_prefix(5, attention.encoding)
        assert cache.lengths.tolist() == ([7, 4] if ragged else [7, 7])
        assert cache.filled_at_most == 7
        chunk = attention(x[:, 12:14], cache=cache)
        cache.evict_prefix(2, attention.encoding)
        step = attention(x[:, 14:15], cache=cache)
        for row, end in enumerate((12, 9 if ragged else 12)):
            seen = torch.cat([x[row, 5:end], x[row, 12:14]])[None]
            fresh = attention(seen)[0, -2:]
            assert torch.allclose(chunk[row], fresh, **CLOSE)
            seen = torch.cat([x[row, 7:end], x[row, 12:15]])[None]
            assert torch.allclose(step[row], attention(seen)[0, -1:], **CLOSE)
            made = cache_for(1)
            attention(seen, cache=made)
            n = seen.shape[1]
            assert torch.allclose(cache.keys[row, :, :n], made.keys[0, :, :n], **CLOSE)
            # Without an encoding keys keep their positions, which nothing uses.
            assert torch.equal(cache.positions[row, :n], torch.arange(n)) or kind == "none"
    assert not cache.keys[:, :, cache.filled_at_most :].any()


def test_eviction_of_keys_that_were_rotated_for_a_length():
    spec = RopeSpec(WIDTH, DynamicNTK(1e4, 2, 8))
    made = RotaryEncoding(RotaryEmbedding(spec), at_length=64)
    attention, x = Attention(DIM, HEADS, num_kv_heads=2, encoding=made).double(), vector(0, 1, 9, DIM)
    cache, fresh = cache_for(1), cache_for(1)
    with torch.no_grad():
        attention(x, cache=cache)
        cache.evict_prefix(4, made)
        attention(x[:, 4:], cache=fresh)
        assert torch.allclose(cache.keys, fresh.keys, **CLOSE)
        with pytest.raises(RopewalkError, match="length"):
            cache.evict_prefix(1, made.rope)
    assert cache.filled_at_most == 5


def test_a_shorter_sequence_is_emptied_and_may_start_anew():
    attention, x = layer("rope"), vector(0, 2, 9, DIM)
    cache = cache_for(2)
    with torch.no_grad():
        attention(x[:, :6], cache=cache, counts=torch.tensor([6, 2]))
        cache.evict_prefix(4, attention.encoding)
        assert cache.lengths.tolist() == [2, 0]
        y = attention(x[:, 6:7], cache=cache)
        assert torch.allclose(y[1], attention(x[1:, 6:7])[0], **CLOSE)
        cache.evict_prefix(3, attention.encoding)
        assert cache.even
        assert torch.allclose(attention(x, cache=cache), attention(x), **CLOSE)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (encoding("sinusoidal", dim=DIM, num_heads=HEADS), "if it is absolute, call reset()"),
        (encoding("learned", dim=DIM, num_heads=HEADS, length=9), "LearnedEncoding"),
        (RotaryEmbedding(8), "a spec with head_dim=6"),
        (RotaryEmbedding(RopeSpec(8, axes=Axes.repeated(2, 8))), "with one axis"),
        ("rope", "'rope'"),
    ],
    ids=["sinusoidal", "learned", "head_dim", "axes", "a name"],
)
def test_what_cannot_be_moved_is_refused_and_stays(given, said):
    cache = cache_for(1)
    cache.append(vector(0, 1, 2, 5, WIDTH), vector(1, 1, 2, 5, WIDTH))
    before = copy.deepcopy(cache)
    with pytest.raises(RopewalkError) as error:
        cache.evict_prefix(2, given)
    assert said in str(error.value)
    for count, message in ((6, "at most 5 tokens"), (0, "at least 1"), (1.5, "count"), (True, "count")):
        with pytest.raises(RopewalkError, match=message):
            cache.evict_prefix(count, None)
    same_as(cache, before)


def same_as(cache, other):
    assert (cache.filled_at_most, cache.even) == (other.filled_at_most, other.even)
    for name in ("keys", "values", "lengths", "positions"):
        assert torch.equal(getattr(cache, name), getattr(other, name)), name


def test_beams():
    attention, x = layer("alibi"), vector(0, 3, 9, DIM)
    cache, order = cache_for(3), torch.tensor([2, 2, 0])
    cache.encoding_state = torch.arange(3.0)[:, None]
    with torch.no_grad():
        ids = torch.arange(7) * torch.tensor([[1], [2], [3]])
        attention(x[:, :6], ids[:, :6], cache, counts=torch.tensor([6, 5, 3]))
        cache.reorder(order)
        assert cache.lengths.tolist() == [3, 3, 6]
        assert cache.encoding_state.flatten().tolist() == [2, 2, 0]
        y = attention(x[:, 6:7], torch.tensor([30]), cache)
        for row, (source, n) in enumerate(((2, 3), (2, 3), (0, 6))):
            places = torch.cat([ids[source, :n], torch.tensor([30])])
            alone = attention(torch.cat([x[source, :n], x[row, 6:7]])[None], places)
            assert torch.allclose(y[row], alone[0, -1:], **CLOSE)
    before = copy.deepcopy(cache)
    for index in (torch.tensor([0, 1, 3]), torch.tensor([0, -1, 1]), torch.ones(3), [0, 1, 2]):
        with pytest.raises(RopewalkError, match=r"whole numbers \[any\] from 0 to 2"):
            cache.reorder(index)
    same_as(cache, before)


def test_beams_of_one_prompt_and_sequences_that_end():
    attention, x = layer("alibi"), vector(0, 4, 9, DIM)
    cache = cache_for(1)
    with torch.no_grad():
        attention(x[:1, :5], cache=cache)
        cache.reorder(torch.zeros(4, dtype=torch.int64))
        assert cache.batch == 4
        y = attention(x[:, 5:6], cache=cache)
        whole = attention(torch.cat([x[:1, :5].expand(4, -1, -1), x[:, 5:]], dim=1))
        assert torch.allclose(y, whole[:, 5:6], **CLOSE)
        cache.reorder(torch.tensor([3, 1]))
        assert torch.allclose(attention(x[[3, 1], 6:7], cache=cache), whole[[3, 1], 6:7], **CLOSE)


def test_a_copy_is_another_cache():
    attention, x = layer("rope"), vector(0, 2, 9, DIM)
    cache = cache_for(2)
    with torch.no_grad():
        attention(x[:, :5], cache=cache)
        copied = copy.copy(cache)
        attention(x[:, :3], cache=copied)
        assert torch.allclose(attention(x[:, 5:], cache=cache), attention(x)[:, 5:], **CLOSE)


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize("window", [None, 4])
def test_positions_continue_from_the_last_one(kind, window):
    """Prompts that are padded at the start, with positions that do not count padding, then steps without positions."""
    attention, x = layer(kind, window=window), vector(0, 2, 9, DIM)
    real = torch.tensor([[True] * 6, [False] * 2 + [True] * 4])
    ids = (real.cumsum(1) - 1).clamp(min=0)
    for cache in (cache_for(2), attention.make_cache(2, 40)):
        with torch.no_grad():
            attention(x[:, :6], ids, cache, key_mask=real)
            assert cache.next_positions().tolist() == [6, 4]
            loaded = copy.copy(cache)
            loaded.reset()
            loaded.load_state_dict(cache.state_dict())
            for continued in (cache, loaded):
                y = torch.cat([attention(part, cache=continued) for part in x[:, 6:].split([1, 2], dim=1)], dim=1)
                assert torch.allclose(y[:1], attention(x[:1])[:, 6:], **CLOSE)
                assert torch.allclose(y[1:], attention(x[1:, 2:])[:, 4:], **CLOSE)


def test_a_cache_that_is_full_says_so_and_keeps_what_it_has():
    attention, x = layer("rope"), vector(0, 2, 9, DIM)
    cache = cache_for(2, 10)
    with torch.no_grad():
        attention(x, cache=cache)
        before = copy.deepcopy(cache)
        for call in (
            lambda: attention(x[:, :2], cache=cache),
            lambda: cache.append(*[torch.ones(2, 2, 2, WIDTH).double()] * 2),
            lambda: attention(x[:, :2], cache=cache, counts=torch.tensor([1, 1])),
        ):
            with pytest.raises(RopewalkError, match="at most 1, because 9 slots may be filled"):
                call()
            same_as(cache, before)
        attention(x[:, :1], cache=cache)
        with pytest.raises(RopewalkError, match="evict_prefix"):
            attention(x[:, :1], cache=cache)
        cache.reset()
        same_as(cache, cache_for(2, 10))
        assert torch.allclose(attention(x, cache=cache), attention(x), **CLOSE)


K = torch.ones(2, 2, 3, WIDTH, dtype=torch.float64)


def test_how_it_is_made():
    sizes = {"batch": 2, "num_kv_heads": 3, "max_length": 4, "head_dim": 5}
    for name in sizes:
        for value in (0, -1, 1.5, "2", None, True):
            with pytest.raises(RopewalkError, match=f"KVCache\\({name}"):
                KVCache(**sizes | {name: value})
    for dtype in (torch.int64, "float32"):
        with pytest.raises(RopewalkError, match="floating-point dtype"):
            KVCache(**sizes, dtype=dtype)
        with pytest.raises(RopewalkError, match="floating-point dtype"):
            KVCache(**sizes).to(dtype=dtype)
    changes = sizes | {"v_dim": 7, "dtype": torch.bfloat16, "device": "meta"}
    assert set(changes) == set(inspect.signature(KVCache).parameters)

    def made(**options):
        cache = KVCache(**sizes | options)
        return cache.keys.shape, cache.values.shape, cache.keys.dtype, cache.keys.device, repr(cache)

    for name in changes:
        change = changes[name] + 1 if name in sizes else changes[name]
        assert made(**{name: change}) != made(), name
    assert "v_dim=7" in repr(KVCache(**sizes, v_dim=7))
    assert KVCache(**sizes, v_dim=7).values.shape == (2, 3, 4, 7)
    cache = KVCache(**sizes)
    cache.encoding_state = torch.ones(2, 1)
    moved = cache.to("meta", torch.float64)
    assert moved is cache
    assert {x.device.type for x in (cache.keys, cache.values, cache.lengths, cache.encoding_state)} == {"meta"}
    assert (cache.keys.dtype, cache.lengths.dtype, cache.positions.dtype) == (torch.float64, torch.int64, torch.int64)


def test_the_state_of_a_recurrent_encoding():
    made = encoding("recurrent", dim=DIM, num_heads=HEADS)
    attention, x = Attention(DIM, HEADS, num_kv_heads=2, encoding=made).double(), vector(0, 2, 7, DIM)
    cache = cache_for(2)
    with torch.no_grad():
        parts = [attention(made.embed(part, cache=cache), cache=cache) for part in x.split([4, 1, 2], dim=1)]
        assert torch.allclose(torch.cat(parts, dim=1), attention(made.embed(x)), **CLOSE)
        assert cache.encoding_state is not None
        assert cache.encoding_state.shape == (2, DIM)
        cache.reset()
        assert cache.encoding_state is None


def test_inference_mode_and_what_was_born_in_it():
    attention, x = layer("rope"), vector(0, 1, 6, DIM)
    modes = (torch.inference_mode, torch.no_grad)
    for born, used in itertools.product(modes, modes):
        with born():
            cache = cache_for(1).to(dtype=torch.float64)
        for mode in (used, *modes):
            with mode():
                cache.reset()
                parts = [attention(part, cache=cache) for part in x.split([3, 2, 1], dim=1)]
                assert torch.allclose(torch.cat(parts, dim=1), attention(x), **CLOSE)
                cache.evict_prefix(1, attention.encoding)
                cache.reorder(torch.tensor([0]))
    with pytest.raises(RopewalkError, match="without a gradient"):
        attention(x, cache=cache_for(1))


def test_nothing_is_asked_of_a_device():
    # On meta there is nothing to be asked.
    attention = Attention(DIM, HEADS, num_kv_heads=2, encoding=AlibiBias(HEADS), device="meta")
    cache = KVCache(2, 2, 40, WIDTH, device="meta")
    x, counts = torch.empty(2, 5, DIM, device="meta"), torch.ones(2, dtype=torch.int64, device="meta")
    with torch.no_grad():
        for given in ({}, {"counts": counts}, {"key_mask": torch.empty(2, 40, dtype=torch.bool, device="meta")}):
            assert attention(x, cache=cache, **given).shape == x.shape
        assert cache.filled_at_most == 15
        cache.evict_prefix(3, RotaryEmbedding(WIDTH))
        cache.reorder(counts)
        assert attention(x[:, :1], cache=cache).shape == (2, 1, DIM)
    assert cache.filled_at_most == 13


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("kind", KINDS)
def test_compiled_decoding_in_one_graph(kind, backend):
    torch.compiler.reset()
    attention, x = layer(kind), vector(0, 2, 20, DIM)
    graphs = CompileCounterWithBackend(backend)
    compiled = torch.compile(attention, fullgraph=True, backend=graphs)
    cache, counts = cache_for(2), torch.tensor([5, 3])
    alone = cache_for(2)
    with torch.inference_mode():
        for part, given in ((x[:, :5], {}), *((step, {}) for step in x[:, 5:].split(1, dim=1))):
            y = compiled(part, cache=cache, **given)
            assert torch.allclose(y, attention(part, cache=alone, **given), **CLOSE)
        same_as_shorter(cache, alone)
        # The prefill, the first step, and at most one more when the number of tokens is seen to change.
        assert graphs.frame_count <= 3
        before = graphs.frame_count
        cache.reset()
        alone.reset()
        y, z = compiled(x[:, :5], cache=cache, counts=counts), attention(x[:, :5], cache=alone, counts=counts)
        assert torch.allclose(y, z, **CLOSE)
        for step in x[:, 5:].split(1, dim=1):
            assert torch.allclose(compiled(step, cache=cache), attention(step, cache=alone), **CLOSE)
        same_as_shorter(cache, alone)
        assert graphs.frame_count <= before + 3


def same_as_shorter(cache, other):
    assert cache.lengths.tolist() == other.lengths.tolist()
    for name in ("keys", "values", "positions"):
        assert torch.allclose(getattr(cache, name).double(), getattr(other, name).double(), **CLOSE), name


def test_every_argument_of_its_methods_matters():
    other = K + torch.arange(3)[:, None].double()

    def after(**given):
        cache = cache_for(2)
        cache.append(**{"k": K, "v": K} | given)
        return [x.tolist() for x in (cache.keys, cache.values, cache.lengths, cache.positions)]

    changes = {"k": other, "v": other, "counts": torch.tensor([3, 1]), "positions": torch.arange(3) + 4}
    assert set(changes) == set(inspect.signature(KVCache.append).parameters) - {"self"}
    for name, value in changes.items():
        assert after(**{name: value}) != after(), name

    def evicted(count, rope):
        cache = cache_for(2)
        cache.append(other, other)
        cache.evict_prefix(count, rope)
        return cache.keys.tolist()

    assert evicted(1, None) != evicted(2, None)
    assert evicted(1, None) != evicted(1, RotaryEmbedding(WIDTH))
    assert evicted(1, None) == evicted(1, T5Bias(HEADS))


def test_a_mask_over_slots_hides_new_tokens_for_good_and_others_in_one_call():
    attention, x = layer("rope"), vector(0, 1, 8, DIM)
    slots = torch.ones(1, 40, dtype=torch.bool)
    slots[0, 2] = False
    cache, other = cache_for(1), cache_for(1)
    with torch.no_grad():
        attention(x[:, :5], cache=cache, key_mask=slots)
        attention(x[:, :5], cache=other, key_mask=slots[:, :5])
        assert torch.equal(attention(x[:, 5:6], cache=cache), attention(x[:, 5:6], cache=other))
        slots[0, 3] = False
        hidden = attention(x, key_mask=slots[:, :8])
        step = attention(x[:, 6:7], cache=cache, key_mask=slots)
        assert torch.allclose(step, hidden[:, 6:7], **CLOSE)
        slots[0, 3] = True
        assert torch.allclose(attention(x[:, 7:], cache=cache), attention(x, key_mask=slots[:, :8])[:, 7:], **CLOSE)


def test_keys_that_keep_their_positions_after_eviction():
    attention, x = layer("rope"), vector(0, 1, 12, DIM)
    caches = cache_for(1), cache_for(1)
    with torch.no_grad():
        for cache, rope in zip(caches, (None, attention.encoding), strict=True):
            attention(x[:, :10], cache=cache)
            cache.evict_prefix(3, rope)
        y, z = (attention(x[:, 10:], cache=cache) for cache in caches)
    assert torch.allclose(y, z, **CLOSE)
    assert caches[0].next_positions().tolist() == [12]


def test_truncation():
    attention, x = layer("alibi"), vector(0, 2, 12, DIM)
    cache = cache_for(2)
    with torch.no_grad():
        attention(x[:, :8], cache=cache, key_mask=torch.arange(8).expand(2, 8) != 7)
        cache.truncate(6)
        assert cache.lengths.tolist() == [6, 6]
        assert not cache.keys[:, :, 6:].any()
        y = attention(x[:, 6:], cache=cache)
        assert torch.allclose(y, attention(x)[:, 6:], **CLOSE)
        cache.truncate(40)
        assert cache.lengths.tolist() == [12, 12]
    with pytest.raises(RopewalkError, match="the number of tokens to keep"):
        cache.truncate(0)


def test_next_positions_are_a_copy():
    cache = cache_for(2)
    before = cache.next_positions()
    cache.append(torch.zeros(2, 2, 3, WIDTH).double(), torch.zeros(2, 2, 3, WIDTH).double())
    assert (before.tolist(), cache.next_positions().tolist()) == ([0, 0], [3, 3])


def test_copies_made_in_inference_mode_are_usable_outside():
    attention, x = layer("rope"), vector(0, 1, 5, DIM)
    with torch.inference_mode():
        cache = cache_for(1)
        attention(x[:, :3], cache=cache)
        copies = copy.copy(cache), copy.deepcopy(cache)
    with torch.no_grad():
        for copied in copies:
            assert torch.allclose(attention(x[:, 3:], cache=copied), attention(x)[:, 3:], **CLOSE)


def test_caches_of_earlier_versions():
    attention, x = layer("rope"), vector(0, 1, 5, DIM)
    cache = cache_for(1)
    with torch.no_grad():
        attention(x[:, :3], cache=cache)
        old = KVCache.__new__(KVCache)
        new = {"hidden", "_counts_positions", "_knows_positions"}
        old.__setstate__({name: value for name, value in vars(cache).items() if name not in new})
        assert torch.allclose(attention(x[:, 3:], cache=old), attention(x)[:, 3:], **CLOSE)
