"""States of keys alone, and states that are merged: both are the state of one call."""

import functools
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import ropewalk as rw
from kernels.triton_device import DEVICE
from meant import meant
from nn.linear_cases import drawn
from nn.test_linear_weights_states import BUCKETS, assert_same_states, in_parts, weights_of
from nn.weighted_cases import KINDS, assert_same, rule_of
from ropewalk.kernels.linear.packed import attend_packed
from ropewalk.kernels.types import Features, Weighting
from slow import slow

RULES = st.sampled_from(("plain", *KINDS))
LENGTHS = st.lists(st.sampled_from([1, 2, 5, 19, 64, 130]), min_size=1, max_size=4)


def states_of(k, v, rule, heads, lengths, rope=None, **options):
    """The state of each part, computed alone."""
    weights, bounds = weights_of(rule, heads), [0, *itertools.accumulate(lengths)]
    uses_positions = rope is not None or rule.kind in ("alibi", "t5")
    states = []
    for start, stop in itertools.pairwise(bounds):
        positions = torch.arange(start, stop) if uses_positions else None
        part = slice(start, stop)
        tensors = k[:, :, part], v[:, :, part]
        states.append(rw.linear_state(*tensors, rope=rope, positions=positions, **weights(start, stop), **options))
    return states


def error(call):
    with pytest.raises(rw.RopewalkError) as info:
        call()
    return info.value


def assert_equal(a, b):
    assert_same_states(a, b)
    rows = len(a.above)
    assert torch.as_tensor(a.start(rows)).expand(rows).tolist() == torch.as_tensor(b.start(rows)).expand(rows).tolist()
    assert (a.log_decay is None) == (b.log_decay is None)
    if a.log_decay is not None:
        assert_same(a.log_decay, b.log_decay)


@settings(max_examples=40)
@given(RULES, LENGTHS, st.booleans(), st.sampled_from([1, 2, 4]), st.integers(0, 1000))
def test_merged_states_are_the_state_of_one_call(kind, lengths, rotated, kv_heads, seed):
    total = sum(lengths)
    q, k, v = drawn(2, 4, kv_heads, total, 8, 3, seed=seed)
    rule = rule_of(kind, 2, 4, kv_heads, total, seed=seed, buckets=BUCKETS)
    rope = rw.RotaryEmbedding(8) if rotated else None
    _, truth = in_parts(q, k, v, rule, [total], rope=rope)
    states = states_of(k, v, rule, 4, lengths, rope)
    assert_equal(functools.reduce(lambda a, b: a.merge(b), states), truth)
    # Associative: the last two first.
    assert_equal(functools.reduce(lambda b, a: a.merge(b), reversed(states)), truth)


@pytest.mark.parametrize("kind", ["plain", *KINDS])
def test_merging_is_continuing(kind):
    q, k, v = drawn(2, 4, 2, 150, 8, 3)
    rule, rope = rule_of(kind, 2, 4, 2, 150, buckets=BUCKETS), rw.RotaryEmbedding(8)
    first, second, third = states_of(k, v, rule, 4, [64, 40, 46], rope)
    last = slice(104, 150)
    options = weights_of(rule, 4)(104, 150) | {"rope": rope}
    out = rw.linear_attention(*(x[:, :, last] for x in (q, k, v)), state=first.merge(second), **options)
    assert_same(out, in_parts(q, k, v, rule, [150], rope=rope)[0][:, :, last])
    continued = rw.linear_state(
        k[:, :, last], v[:, :, last], rope=rope, state=first.merge(second), **weights_of(rule, 4)(104, 150)
    )
    assert_equal(first.merge(second).merge(third), continued)


@settings(max_examples=20)
@given(RULES, st.lists(st.sampled_from([0, 1, 7, 40]), min_size=1, max_size=4), st.integers(0, 2), st.booleans())
@meant("cu_seqlens")
def test_packed_keys_alone(kind, lengths, rest, rotated):
    total = sum(lengths) + rest
    q, k, v = drawn(1, 4, 2, max(total, 1), 8, 3)
    q, k, v = (x[:, :, :total] for x in (q, k, v))
    rule, rope = rule_of(kind, 1, 4, 2, total, buckets=BUCKETS), rw.RotaryEmbedding(8) if rotated else None
    ends = torch.tensor([0, *itertools.accumulate(lengths)])
    options = weights_of(rule, 4)(0, total) | {"rope": rope, "cu_seqlens": ends}
    _, truth = rw.linear_attention(q, k, v, return_state=True, **options)
    state = rw.linear_state(k, v, **options)
    assert_equal(state, truth)
    alone = [
        rw.linear_state(k[:, :, a:b], v[:, :, a:b], rope=rope, **weights_of(rule, 4)(a, b))
        for a, b in itertools.pairwise(ends.tolist())
    ]
    for row, other in enumerate(alone):
        assert_equal(state.reorder(torch.tensor([row])), other)


# What a GPU uses, where the host does not read the ends.
@pytest.mark.parametrize("decay", [None, torch.tensor([[[-0.1], [-0.3]]], dtype=torch.float64)])
def test_packed_sums_without_queries_by_chunks(decay):
    _, k, v = drawn(1, 2, 2, 100, 4, 3)
    ends, keys = torch.tensor([0, 30, 30, 95]), Features(k, k * 2)
    weighting = Weighting(decay=decay)
    with_queries = attend_packed(keys, keys, v, None, ends, weighting, causal=True)[1]
    none = Features(*(x[:, :, :0] for x in keys))
    parts, sums = attend_packed(none, keys, v, None, ends, weighting, causal=True)
    assert parts.above.shape == (1, 2, 0, 3)
    for a, b in zip(sums, with_queries, strict=True):
        assert_same(a, b)


def test_the_length_of_keys_alone_is_their_number():
    q, k, v = drawn(2, 4, 2, 40, 8, 3)
    rope = rw.RotaryEmbedding(rw.RopeSpec(8, rw.DynamicNTK(trained_length=16, factor=2.0)))
    whole, state = rw.linear_attention(q, k, v, rope=rope, return_state=True)
    assert_equal(rw.linear_state(k, v, rope=rope), state)
    last = rw.linear_attention(q[:, :, -3:], k, v, rope=rope)
    assert_same(last, whole[:, :, -3:])
    # Another length implies other frequencies.
    assert not torch.equal(rw.linear_state(k, v, rope=rope, length=64).above, state.above)


def test_positions_with_gaps_and_rows_of_their_own():
    ids = torch.tensor([[0, 1, 5, 6, 9, 20, 21, 30], [3, 4, 5, 8, 9, 10, 11, 12]])
    _, k, v = drawn(2, 4, 2, 8, 8, 3)
    rope = rw.RotaryEmbedding(8)
    for kind in ("plain", "alibi", "t5"):
        options = rule_of(kind, 2, 4, 2, 8, buckets=(8, 6)).options(4) | {"rope": rope}
        whole = rw.linear_state(k, v, positions=ids, **options)
        parts = [
            rw.linear_state(k[:, :, part], v[:, :, part], positions=ids[:, part], **options)
            for part in (slice(0, 3), slice(3, 7), slice(7, 8))
        ]
        assert_equal(functools.reduce(lambda a, b: a.merge(b), parts), whole)


def test_hidden_keys():
    _, k, v = drawn(2, 4, 2, 12, 8, 3)
    mask = torch.tensor([[True] * 9 + [False] * 3, [False, True] * 6])
    options = {"decay": -torch.rand(4, dtype=torch.float64), "rope": rw.RotaryEmbedding(8)}
    first = rw.linear_state(k, v, key_mask=mask, **options)
    truth = rw.linear_attention(k.repeat_interleave(2, 1), k, v, key_mask=mask, return_state=True, **options)[1]
    assert_equal(first, truth)
    ids = torch.arange(12) + torch.tensor([[9], [12]])
    later = rw.linear_state(k, v, key_mask=mask, positions=ids, **options)
    assert_equal(first.merge(later), rw.linear_state(k, v, key_mask=mask, state=first, positions=ids, **options))


@pytest.mark.parametrize("feature_map", ["relu", ("elu", "exp"), torch.exp, ("identity", torch.square)])
def test_keys_that_leave_the_window_have_the_features_of_the_map(feature_map):
    _, k, v = drawn(2, 4, 2, 50, 8, 3)
    rule, rope = rule_of("t5", 2, 4, 2, 50, buckets=BUCKETS), rw.RotaryEmbedding(8)
    options = {"rope": rope, "feature_map": feature_map}
    truth = rw.linear_state(k, v, **options, **rule.options(4))
    merged = functools.reduce(lambda a, b: a.merge(b), states_of(k, v, rule, 4, [30, 3, 17], **options))
    assert_equal(merged, truth)


def test_keys_that_are_zero_are_near_as_others():
    """What tells a slot without a key from a key is not its value: the gradient of a key of zeros has its weight."""
    _, k, v = drawn(1, 4, 2, 20, 8, 3)
    q, k[:, :, 7::2] = drawn(1, 4, 2, 6, 8, 3, seed=1)[0], 0.0
    rule = rule_of("t5", 1, 4, 2, 20, buckets=(4, 6))
    options = {"feature_map": "identity", "normalize": False, **rule.options(4)}
    results = []
    for lengths in ([20], [14, 2, 4], [14, 6], [2, 12, 6]):
        leaf = k.clone().requires_grad_()
        parts = states_of(leaf, v, rule, 4, lengths, feature_map="identity")
        state = functools.reduce(lambda a, b: a.merge(b), parts)
        out = rw.linear_attention(q, *drawn(1, 4, 2, 6, 8, 3, seed=2)[1:], state=state, **options)
        results.append((out, *torch.autograd.grad(out.square().sum(), leaf), state.near.positions))
    for out, gradient, positions in results[1:]:
        assert_same(out, results[0][0])
        assert_same(gradient, results[0][1])
        assert torch.equal(positions, results[0][2])


@pytest.mark.parametrize("kind", ["per query head", slow("per token"), slow("alibi"), "t5"])
def test_gradients_of_merged_states(kind):
    _, k, v = drawn(1, 2, 1, 9, 4, 2)
    rule = rule_of(kind, 1, 2, 1, 9, buckets=(4, 3))
    leaves = [x.detach().requires_grad_() for x in (k, v, rule.tensor) if x is not None]

    def merged(k, v, tensor=None):
        a, b = states_of(k, v, rule._replace(tensor=tensor), 2, [4, 5], rw.RotaryEmbedding(4))
        state = a.merge(b)
        return state.above, state.below, *([] if state.log_decay is None else [state.log_decay])

    assert torch.autograd.gradcheck(merged, leaves)


def test_gradients_of_learned_frequencies():
    _, k, v = drawn(1, 2, 1, 30, 4, 2)
    rule, rope = rule_of("t5", 1, 2, 1, 30, buckets=BUCKETS), rw.RotaryEmbedding(4, learned=True).double()
    a, b, c = states_of(k, v, rule, 2, [4, 20, 6], rope)
    whole = states_of(k, v, rule, 2, [30], rope)[0]
    merged = a.merge(b, rope=rope).merge(c, rope=rope)
    weights = torch.randn(whole.above.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    results = [torch.autograd.grad((state.above * weights).sum(), rope.log_scale)[0] for state in (merged, whole)]
    assert_same(results[0], results[1])


def test_a_state_of_steps_is_merged_first_but_not_last():
    q, k, v = drawn(1, 2, 2, 6, 4, 3)
    options = {"decay": torch.tensor([-0.1, -0.2], dtype=torch.float64)}
    state = rw.linear_state(k[:, :, :3], v[:, :, :3], **options)
    for i in range(3, 5):
        one = [x[:, :, i : i + 1] for x in (q, k, v)]
        _, state = rw.linear_attention(*one, state=state, return_state=True, **options)
    later = rw.linear_state(k[:, :, 5:], v[:, :, 5:], **options)
    assert_same_states(state.merge(later), rw.linear_state(k, v, **options))
    if state.log_decay is None:
        assert "single tokens" in error(lambda: later.merge(state)).got


@pytest.mark.parametrize("kind", ["plain", "per token", "alibi", "t5"])
def test_saved_moved_and_reordered_states_are_merged_alike(kind, tmp_path):
    _, k, v = drawn(2, 4, 2, 40, 8, 3)
    rule, rope = rule_of(kind, 2, 4, 2, 40, buckets=BUCKETS), rw.RotaryEmbedding(8)
    a, b = states_of(k, v, rule, 4, [25, 15], rope)
    save_file(b.state_dict(), tmp_path / "state")
    loaded = rw.LinearState.from_state_dict(load_file(tmp_path / "state"))
    assert loaded.first == b.first
    assert_equal(a.merge(loaded), a.merge(b))
    assert_equal(a.to("cpu").detach().merge(b.to("cpu").detach()), a.merge(b))
    rows = torch.tensor([1, 0, 1])
    assert_equal(a.reorder(rows).merge(b.reorder(rows)), a.merge(b).reorder(rows))


@pytest.mark.parametrize("kind", ["plain", "alibi", "t5"])
def test_tokens_that_are_hidden_or_absent_change_nothing(kind):
    _, k, v = drawn(2, 4, 2, 30, 8, 3)
    options = rule_of(kind, 2, 4, 2, 30, buckets=BUCKETS).options(4) | {"rope": rw.RotaryEmbedding(8)}
    state = rw.linear_state(k, v, **options)
    assert_equal(state.merge(rw.linear_state(k[:, :, :0], v[:, :, :0], positions=torch.arange(0), **options)), state)
    mask = torch.ones(2, 30, dtype=torch.bool)
    mask[0] = False
    part = k, v, mask, torch.arange(30, 60)
    merged = state.merge(rw.linear_state(*part[:2], key_mask=part[2], positions=part[3], **options))
    assert_equal(merged, rw.linear_state(*part[:2], key_mask=part[2], positions=part[3], state=state, **options))


def test_functions_of_packed_keys():
    _, k, v = drawn(1, 4, 2, 30, 8, 3)
    ends = torch.tensor([0, 5, 30])

    def q_map(x):
        return torch.exp(x - x.amax((-2, -1), keepdim=True))

    state = rw.linear_state(k, v, cu_seqlens=ends, feature_map=(q_map, torch.exp))
    assert_same(state.below, torch.cat([k[:, :, :5].exp().sum(2), k[:, :, 5:].exp().sum(2)]))


def test_an_empty_state_changes_nothing():
    layer = rw.LinearAttention(16, 2, encoding=rw.encoding("alibi", dim=16, num_heads=2)).double()
    _, k, v = drawn(1, 2, 2, 5, 8, 8)
    state = rw.linear_state(k, v, bias=layer.encoding)
    assert_same_states(layer.make_state(1).merge(state), state)


def test_bad_input():
    _, k, v = drawn(1, 4, 2, 6, 8, 3)
    rope, decay = rw.RotaryEmbedding(8), -torch.ones(2, dtype=torch.float64)
    state = rw.linear_state(k, v, rope=rope)
    assert error(lambda: state.merge(3)).expected == "a LinearState"
    assert error(lambda: state.merge(state)).got == "tokens from position 0 on"
    ids = torch.arange(6, 12)
    for other in (
        rw.linear_state(k, v, rope=rw.RotaryEmbedding(8, base=500), positions=ids),
        rw.linear_state(k, v),
        rw.linear_state(k, v, rope=rope, positions=ids, feature_map="relu"),
        rw.linear_state(k, v, rope=rope, positions=ids, decay=decay),
        rw.linear_state(k, v[..., :2], rope=rope, positions=ids),
        rw.linear_state(k.float(), v.float(), rope=rope, positions=ids),
        rw.linear_state(k, v, rope=rope, positions=ids, bias=rw.encoding("t5", dim=32, num_heads=4, causal=True)),
    ):
        assert error(lambda other=other: state.merge(other)).asked == "LinearState.merge(later)"
    assert "keys" in error(lambda: rw.linear_state(k[0], v)).expected
    assert "one value per key" in error(lambda: rw.linear_state(k, v[:, :, :3])).expected
    assert "linear_attention" in error(lambda: rw.linear_state(k, v, decay=torch.ones(2, dtype=torch.float64))).asked
    with pytest.raises(rw.RopewalkError, match="rope"):
        rw.linear_state(k, v, rope)
    learned = rw.RotaryEmbedding(8, learned=True)
    t5 = rw.encoding("t5", dim=32, num_heads=4, causal=True)
    first = rw.linear_state(k, v, rope=learned, bias=t5)
    second = rw.linear_state(k, v, rope=learned, bias=t5, positions=ids)
    assert "learned frequencies" in error(lambda: first.merge(second)).expected
    assert "the rotation of the state" in error(lambda: first.merge(second, rope=rope)).expected
    assert first.merge(second, rope=learned).position == 12


@pytest.mark.gpu
def test_packed_keys_alone_on_a_gpu():
    _, k, v = drawn(1, 4, 2, 300, 16, 16, torch.float32, device=DEVICE)
    ends, rope = torch.tensor([0, 100, 100, 300]), rw.RotaryEmbedding(16)
    for kind in ("plain", "per query head", "alibi"):
        options = rule_of(kind, 1, 4, 2, 300, torch.float32).options(4)
        truth = rw.linear_state(k.cpu(), v.cpu(), rope=rope, cu_seqlens=ends, **options)
        options = {name: x.to(DEVICE) for name, x in options.items()}
        state = rw.linear_state(k, v, rope=rope.to(DEVICE), cu_seqlens=ends.to(DEVICE), **options)
        torch.testing.assert_close(state.above.cpu(), truth.above, atol=1e-3, rtol=1e-3)
