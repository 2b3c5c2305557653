"""States of linear attention with a decay or a bias: parts of a sequence, decode steps, and saved states."""

import functools
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import ropewalk as rw
from meant import meant
from nn.linear_cases import drawn, error, next_positions
from nn.weighted_cases import DECAYS, KINDS, assert_same, expected, recurrence, rule_of
from ropewalk.nn.encodings.bias import T5Bias
from ropewalk.nn.linear import function as linear_function
from ropewalk.nn.linear.near_keys import NearKeys
from ropewalk.reference import linear_attention_by_recurrence
from slow import slow, slow_except
from strategies import theta

BUCKETS = (8, 20)
RULES = st.sampled_from(KINDS)


def weights_of(rule, heads=4):
    """A function of the bounds of a part that returns its arguments: always the same encoding."""
    options = rule.options(heads)
    if rule.tensor is None or rule.tensor.dim() < 3:
        return lambda start, stop: options
    return lambda start, stop: {"decay": rule.tensor[..., start:stop]}


def in_parts(q, k, v, rule, lengths, *, start=0, state=None, **options):
    """Outputs of one part after the other, each with the state of the one before, and the last state."""
    weights, outputs = weights_of(rule, q.shape[1]), []
    for length in lengths:
        part = slice(start, start + length)
        out, state = rw.linear_attention(
            *(x[:, :, part] for x in (q, k, v)),
            state=state,
            return_state=True,
            **weights(start, start + length),
            **options,
        )
        outputs.append(out)
        start += length
    assert state is not None
    return torch.cat(outputs, dim=2), state


def assert_same_states(a, b, tolerance=1e-10):
    assert_same(a.above, b.above, tolerance)
    assert_same(a.below, b.below, tolerance)
    assert (a.weighting, a.spec, a.feature_map) == (b.weighting, b.spec, b.feature_map)
    assert (a.near is None) == (b.near is None)
    for x, y in zip(a.near or (), b.near or (), strict=True):
        assert torch.equal(x, y)


@settings(max_examples=30)
@given(
    RULES, st.lists(st.sampled_from([0, 1, 2, 5, 19, 64, 130]), min_size=1, max_size=5), st.booleans(),
    st.sampled_from([1, 2, 4]), st.booleans(), st.integers(0, 1000),
)  # fmt: skip
def test_parts_with_a_state_are_the_whole(kind, parts, rotated, kv_heads, normalize, seed):
    total = sum(parts)
    q, k, v = (x[:, :, :total] for x in drawn(2, 4, kv_heads, max(total, 1), 8, 3, seed=seed))
    rule = rule_of(kind, 2, 4, kv_heads, total, seed=seed, buckets=BUCKETS)
    rope = rw.RotaryEmbedding(8) if rotated else None
    out, state = in_parts(q, k, v, rule, parts, rope=rope, normalize=normalize)
    assert_same(out, expected(q, k, v, rule, rope, normalize=normalize))
    whole, end = in_parts(q, k, v, rule, [total], rope=rope, normalize=normalize)
    assert_same(whole, out)
    assert_same_states(state, end)
    assert state.position == end.position == total


@pytest.mark.parametrize("kind", DECAYS)
def test_chunks_are_the_recurrence(kind):
    q, k, v = drawn(2, 4, 2, 300, 8, 3)
    rule, rope = rule_of(kind, 2, 4, 2, 300), rw.RotaryEmbedding(8)
    truth = linear_attention_by_recurrence(q, k, v, inv_freq=theta(8), causal=True, decay=rule.tensor)
    assert_same(in_parts(q, k, v, rule, [300], rope=rope)[0], truth)
    assert_same(in_parts(q, k, v, rule, [128, 1, 171], rope=rope)[0], truth)
    assert_same(in_parts(q, k, v, rule, [1] * 300, rope=rope)[0], truth)


@pytest.mark.parametrize("kind", ["alibi", "t5"])
@pytest.mark.parametrize("rotated", [False, True])
def test_steps_of_one_token_are_the_double_sum(kind, rotated):
    q, k, v = drawn(2, 4, 2, 150, 8, 3)
    rule, rope = rule_of(kind, 2, 4, 2, 150), rw.RotaryEmbedding(8) if rotated else None
    out, state = in_parts(q, k, v, rule, [1] * 150, rope=rope)
    assert_same(out, expected(q, k, v, rule, rope))
    assert_same_states(state, in_parts(q, k, v, rule, [150], rope=rope)[1])


@settings(max_examples=20)
@given(
    RULES, st.lists(st.sampled_from([0, 1, 7, 40, 130]), min_size=1, max_size=4), st.integers(0, 2), st.booleans(),
    st.integers(0, 1000),
)  # fmt: skip
@meant("cu_seqlens")
def test_packed_states_continue_each_sequence(kind, lengths, rest, rotated, seed):
    rope = rw.RotaryEmbedding(8) if rotated else None
    calls = [lengths, list(reversed(lengths)), [1] * len(lengths)]
    totals = [sum(each) + rest for each in calls]
    q, k, v = drawn(1, 4, 2, max(sum(totals), 1), 8, 3, seed=seed)
    rule = rule_of(kind, 1, 4, 2, sum(totals), seed=seed, buckets=BUCKETS)
    weights, state, start, outputs = weights_of(rule), None, 0, []
    for each, total in zip(calls, totals, strict=True):
        ends = torch.tensor([0, *each]).cumsum(0)
        part = [x[:, :, start : start + total] for x in (q, k, v)]
        out, state = rw.linear_attention(
            *part, rope=rope, cu_seqlens=ends, state=state, return_state=True, **weights(start, start + total)
        )
        outputs.append(out)
        start += total
    assert state is not None
    assert next_positions(state) == [sum(each) for each in zip(*calls, strict=True)]
    whole = torch.cat(outputs, dim=2)
    for i in range(len(lengths)):
        tokens, begin = [], 0
        for each, total in zip(calls, totals, strict=True):
            tokens += range(begin + sum(each[:i]), begin + sum(each[: i + 1]))
            begin += total
        one = [x[:, :, tokens] for x in (q, k, v)]
        alone = rule if rule.tensor is None or rule.tensor.dim() < 3 else rule._replace(tensor=rule.tensor[..., tokens])
        assert_same(whole[:, :, tokens], expected(*one, alone, rope))
        end = in_parts(*one, alone, [len(tokens)], rope=rope)[1]
        assert_same_states(state.reorder(torch.tensor([i])), end)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("rotated", [True, False])
def test_padding_on_the_right_is_as_if_it_were_not_there(kind, normalize, rotated):
    q, k, v = drawn(3, 4, 2, 60, 8, 3)
    rule, rope = rule_of(kind, 3, 4, 2, 60, buckets=BUCKETS), rw.RotaryEmbedding(8) if rotated else None
    lengths = torch.tensor([40, 23, 1])
    seen = torch.arange(40) < lengths[:, None]
    v[:, :, :40] = v[:, :, :40].masked_fill(~seen[:, None, :, None], float("nan"))
    options = {"rope": rope, "normalize": normalize}
    weights = weights_of(rule)
    out, state = rw.linear_attention(
        *(x[:, :, :40] for x in (q, k, v)), key_mask=seen, return_state=True, **weights(0, 40), **options
    )
    assert next_positions(state) == lengths.tolist()
    # The second call is padded too, and the third is not.
    seen = torch.arange(10) < torch.tensor([[10], [4], [0]])
    more, state = rw.linear_attention(
        *(x[:, :, 40:50] for x in (q, k, v)),
        key_mask=seen,
        state=state,
        return_state=True,
        **weights(40, 50),
        **options,
    )
    assert next_positions(state) == [50, 27, 1]
    last, state = rw.linear_attention(
        *(x[:, :, 50:] for x in (q, k, v)), state=state, return_state=True, **weights(50, 60), **options
    )
    assert next_positions(state) == [60, 37, 11]
    whole = torch.cat([out, more, last], dim=2)
    for row, counts in enumerate(((40, 10), (23, 4), (1, 0))):
        tokens = [*range(counts[0]), *range(40, 40 + counts[1]), *range(50, 60)]
        one = [x[row : row + 1, :, tokens] for x in (q, k, v)]
        alone = rule
        if rule.tensor is not None and rule.tensor.dim() == 3:
            alone = rule._replace(tensor=rule.tensor[row : row + 1][..., tokens])
        assert_same(whole[row : row + 1][:, :, tokens], expected(*one, alone, rope, normalize=normalize))
        end = in_parts(*one, alone, [len(tokens)], **options)[1]
        assert_same_states(state.reorder(torch.tensor([row])), end)


@pytest.mark.parametrize("kind", KINDS)
def test_padding_on_the_left_decays_nothing_that_is_there(kind):
    q, k, v = drawn(2, 4, 2, 30, 8, 3)
    rule = rule_of(kind, 2, 4, 2, 30, buckets=BUCKETS)
    seen = torch.arange(30) >= torch.tensor([[0], [12]])
    out, state = rw.linear_attention(q, k, v, key_mask=seen, return_state=True, **weights_of(rule)(0, 30))
    assert_same(out, expected(q, k, v, rule, key_mask=seen))
    one = [x[1:, :, 12:] for x in (q, k, v)]
    alone = rule if rule.tensor is None or rule.tensor.dim() < 3 else rule._replace(tensor=rule.tensor[1:, :, 12:])
    short, end = in_parts(*one, alone, [18])
    assert_same(out[1:, :, 12:], short)
    assert_same(state.above[1:], end.above)
    assert next_positions(state) == [30, 30]


@pytest.mark.parametrize("kind", ["alibi", "t5"])
@pytest.mark.parametrize("rotated", [True, False])
def test_explicit_positions_with_gaps(kind, rotated):
    q, k, v = drawn(2, 4, 2, 90, 8, 3)
    steps = torch.randint(1, 9, (2, 90), generator=torch.Generator().manual_seed(0))
    ids, rule = steps.cumsum(-1), rule_of(kind, 2, 4, 2, 90, buckets=BUCKETS)
    rope, weights = rw.RotaryEmbedding(8) if rotated else None, weights_of(rule)
    truth = expected(q, k, v, rule, rope, positions=ids)
    state, outputs, start = None, [], 0
    for length in (1, 30, 1, 1, 57):
        part = slice(start, start + length)
        out, state = rw.linear_attention(
            *(x[:, :, part] for x in (q, k, v)), rope=rope, positions=ids[:, part], state=state, return_state=True,
            **weights(0, 0),
        )  # fmt: skip
        outputs.append(out)
        start += length
        assert next_positions(state) == (ids[:, start - 1] + 1).tolist()
    assert_same(torch.cat(outputs, dim=2), truth)


def test_a_finished_row_may_have_any_positions():
    q, k, v = drawn(2, 4, 2, 6, 8, 3)
    for kind in ("alibi", "t5"):
        weights = weights_of(rule_of(kind, 2, 4, 2, 6, buckets=BUCKETS))(0, 0)
        _, state = rw.linear_attention(q, k, v, return_state=True, **weights)
        seen, ids = torch.tensor([[True] * 6, [False] * 6]), torch.tensor([[6, 7, 8, 9, 10, 11], [0] * 6])
        _, after = rw.linear_attention(q, k, v, state=state, key_mask=seen, positions=ids, return_state=True, **weights)
        assert next_positions(after) == [12, 6]
        same = state.reorder(torch.tensor([1]))
        assert_same_states(after.reorder(torch.tensor([1])), same)


@pytest.mark.parametrize("kind", ["alibi", "t5"])
@meant("cu_seqlens")
def test_empty_calls_with_positions(kind):
    q, k, v = drawn(1, 4, 2, 5, 8, 3)
    weights = weights_of(rule_of(kind, 1, 4, 2, 5, buckets=BUCKETS))(0, 0)
    none = [x[:, :, :0] for x in (q, k, v)]
    for ids in (torch.arange(0), torch.zeros(1, 0, dtype=torch.int64)):
        out, state = rw.linear_attention(*none, positions=ids, return_state=True, **weights)
        assert out.shape == (1, 4, 0, 3)
        assert not state.above.any()
    ids, ends = torch.tensor([0, 1, 4, 5, 6]), torch.tensor([0, 2, 2, 5])
    out, state = rw.linear_attention(q, k, v, positions=ids, cu_seqlens=ends, return_state=True, **weights)
    assert next_positions(state) == [2, 0, 7]
    for part in (slice(0, 2), slice(2, 5)):
        one = [x[:, :, part] for x in (q, k, v)]
        assert_same(out[:, :, part], rw.linear_attention(*one, positions=ids[part], **weights))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_the_heads_of_a_state(kind, kv_heads):
    q, k, v = drawn(3, 4, kv_heads, 30, 8, 5)
    rule = rule_of(kind, 3, 4, kv_heads, 30, buckets=BUCKETS)
    _, state = in_parts(q, k, v, rule, [30])
    heads = 4 if kind in ("per query head", "per token and query head", "alibi") else kv_heads
    assert state.above.shape == (3, heads, 8, 5)
    assert state.below.shape == (3, heads, 8)
    assert state.weighting == ("decay" if kind in DECAYS else "AlibiBias" if kind == "alibi" else "T5Bias")
    if kind != "t5":
        assert state.near is None
        return
    # 8 buckets and 20 distances: the last bucket begins at distance 14, and 13 keys are nearer to the next token.
    assert state.near is not None
    assert state.near.keys.shape == (3, kv_heads, 13, 8)
    assert state.near.values.shape == (3, kv_heads, 13, 5)
    assert torch.equal(state.near.positions, torch.arange(17, 30).expand(3, -1))
    assert torch.equal(state.near.keys, k[:, :, 17:])
    assert "13 near keys" in repr(state)


def test_the_sums_of_a_state_are_those_of_the_formula():
    q, k, v = drawn(2, 4, 2, 40, 8, 3)
    features = torch.where(k > 0, k + 1, k.clamp_max(0).exp())
    rule = rule_of("per token", 2, 4, 2, 40)
    assert rule.tensor is not None
    after = torch.exp(rule.tensor.flip(-1).cumsum(-1).flip(-1) - rule.tensor)[..., None]  # g_{n+1} + ... + g_N
    _, state = in_parts(q, k, v, rule, [40])
    assert_same(state.below, (features * after).sum(2))
    assert_same(state.above, (features * after).transpose(-1, -2) @ v)
    _, state = in_parts(q, k, v, rule_of("t5", 2, 4, 2, 40, buckets=BUCKETS), [40])
    assert_same(state.below, features[:, :, :27].sum(2))


@pytest.mark.parametrize("kind", KINDS)
def test_what_can_be_done_with_a_state(kind, tmp_path):
    q, k, v = drawn(3, 4, 2, 30, 8, 5)
    rule = rule_of(kind, 3, 4, 2, 30, buckets=BUCKETS)
    _, state = in_parts(*(x.requires_grad_() for x in (q, k, v)), rule, [20], rope=rw.RotaryEmbedding(8))
    assert state.above.requires_grad
    tensors = [state.above, state.below, *(state.near or ())]
    cut = state.detach()
    assert not any(x.requires_grad for x in (cut.above, cut.below, *(cut.near or ())))
    assert state.to("meta").above.is_meta
    assert all(x.is_meta for x in state.to("meta").near or ())
    index = torch.tensor([2, 0, 2])
    chosen = state.reorder(index)
    for x, y in zip((chosen.above, chosen.below, *(chosen.near or ())), tensors, strict=True):
        assert torch.equal(x, y[index])
    torch.save(state.state_dict(), tmp_path / "state.pt")
    save_file(state.state_dict(), tmp_path / "state.safetensors")
    rope = rw.RotaryEmbedding(8)
    following, _ = in_parts(q, k, v, rule, [10], start=20, state=state, rope=rope)
    for saved in (torch.load(tmp_path / "state.pt", weights_only=True), load_file(tmp_path / "state.safetensors")):
        loaded = rw.LinearState.from_state_dict(saved)
        assert_same_states(loaded, state.detach(), 0.0)
        assert_same(in_parts(q, k, v, rule, [10], start=20, state=loaded, rope=rope)[0], following)


def saved_t5_state():
    q, k, v = drawn(2, 4, 2, 30, 8, 5)
    return in_parts(q, k, v, rule_of("t5", 2, 4, 2, 30, buckets=BUCKETS), [30])[1].state_dict()


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("near_keys", None, "or none of them"),
        ("near_keys", torch.zeros(2, 2, 13, 9, dtype=torch.float64), "near_keys"),
        ("near_keys", torch.zeros(2, 2, 13, dtype=torch.float64), "near_keys"),
        ("near_values", torch.zeros(2, 2, 12, 5, dtype=torch.float64), "near_values"),
        ("near_values", torch.zeros(2, 2, 13, 5), "near_values"),
        ("near_positions", torch.zeros(2, 13), "near_positions"),
        ("near_positions", torch.zeros(1, 13, dtype=torch.int64), "near_positions"),
    ],
)
def test_a_saved_state_that_was_changed_is_refused(name, value, words):
    saved = saved_t5_state()
    if value is None:
        del saved[name]
    else:
        saved[name] = value
    with pytest.raises(rw.RopewalkError, match=words):
        rw.LinearState.from_state_dict(saved)


def layer_of(name, *, causal=True, kv_heads=2, **options):
    torch.manual_seed(0)
    encoding = rw.encoding(name, dim=32, num_heads=4, **({"causal": causal} if name == "t5" else {}))
    layer = rw.LinearAttention(
        32, 4, num_kv_heads=kv_heads, encoding=encoding, causal=causal, dtype=torch.float64, **options
    ).double()
    rule = rule_of(name, 2, 4, kv_heads, 150)
    if isinstance(encoding, T5Bias):
        encoding.weight.data.copy_(rule.tensor)
    return layer, rule


def by_formula(layer, rule, x, **options):
    q, k, v = (
        f(x).unflatten(-1, (-1, 8)).transpose(1, 2) for f in (layer.q_proj, layer.k_proj, layer.v_proj)
    )  # fmt: skip
    return layer.o_proj(expected(q, k, v, rule, causal=layer.causal, **options).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kv_heads", [1, 4])
@pytest.mark.parametrize("name", ["alibi", "t5"])
def test_a_layer_is_projections_around_the_function(name, kv_heads, causal):
    layer, rule = layer_of(name, causal=causal, kv_heads=kv_heads)
    x = torch.randn(2, 150, 32, dtype=torch.float64)
    assert_same(layer(x), by_formula(layer, rule, x))
    ids = 3 * torch.arange(150) + torch.tensor([[0], [7]])
    assert_same(layer(x, ids), by_formula(layer, rule, x, positions=ids))
    assert_same(layer(x, ids), layer(x, ids + 1000), 1e-12)
    seen = torch.arange(150) < torch.tensor([[150], [100]])
    assert_same(layer(x, key_mask=seen), by_formula(layer, rule, x, key_mask=seen))
    ends = torch.tensor([0, 70, 150])
    assert_same(layer(x[:1], cu_seqlens=ends), by_formula(layer, rule, x[:1], cu_seqlens=ends))
    if isinstance(layer.encoding, T5Bias):
        (gradient,) = torch.autograd.grad(layer(x).square().sum(), layer.encoding.weight)
        assert gradient.abs().sum() > 0


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("feature_map", ["elu", "relu", "exp", "favor"])
@pytest.mark.parametrize("name", ["alibi", "t5"])
def test_steps_of_a_layer_from_make_state(name, feature_map, kv_heads):
    layer, _ = layer_of(name, kv_heads=kv_heads, feature_map=feature_map)
    x = torch.randn(2, 20, 32, dtype=torch.float64)
    with torch.no_grad():
        whole, results = layer(x), []
        for state in (None, layer.make_state(2)):
            outputs = []
            for token in x.split(1, dim=1):
                y, state = layer.step(token, state)
                outputs.append(y)
            assert_same(torch.cat(outputs, dim=1), whole)
            results.append(state)
    assert_same_states(*results, 1e-12)
    made, (_, after) = layer.make_state(2), layer.step(x[:, :1])
    assert made.above.shape == after.above.shape
    assert made.weighting == after.weighting
    assert (made.near is None) == (after.near is None)
    for a, b in zip(made.near or (), after.near or (), strict=True):
        assert a.shape == b.shape
        assert a.dtype == b.dtype


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["alibi", "t5"])
def test_made_states_have_the_dtypes_of_later_ones(name, dtype):
    encoding = rw.encoding(name, dim=32, num_heads=4, **({"causal": True} if name == "t5" else {}))
    layer = rw.LinearAttention(32, 4, encoding=encoding, dtype=dtype).to(dtype)
    x = torch.randn(2, 3, 32).to(dtype)
    y, after = layer.step(x, layer.make_state(2))
    assert y.dtype == dtype
    made = layer.make_state(2)
    for a, b in zip((made.above, made.below, *(made.near or ())), (after.above, after.below, *(after.near or ())),
                    strict=True):  # fmt: skip
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
    torch.testing.assert_close(layer(x), y, rtol=2e-2, atol=2e-2)


KINDS_OF_STEPS = ("per key head", "per query head", "per token", "alibi", "t5")
LONG = {"per token": 10_000, "t5": 10_000}


@pytest.mark.parametrize(
    ("kind", "seq"),
    [*((kind, 300) for kind in KINDS_OF_STEPS), *(slow(kind, LONG.get(kind, 2_000)) for kind in KINDS_OF_STEPS)],
)
def test_thousands_of_steps_are_the_prompt(kind, seq):
    q, k, v = drawn(1, 4, 2, seq, 8, 4)
    rule, rope = rule_of(kind, 1, 4, 2, seq, strength=0.02), rw.RotaryEmbedding(8)
    with torch.inference_mode():
        out, state = in_parts(q, k, v, rule, [1] * seq, rope=rope)
        whole, end = in_parts(q, k, v, rule, [seq], rope=rope)
        assert_same(out, whole)
        assert_same_states(state, end)
        # In float32: at most twice the error of the same recurrence.
        single = [x.float() for x in (q, k, v)]
        low = rule if rule.tensor is None else rule._replace(tensor=rule.tensor.float())
        high = rule if low.tensor is None else rule._replace(tensor=low.tensor.double())
        exact = recurrence(*(x.double() for x in single), high, rope)
        assert_same(in_parts(*(x.double() for x in single), high, [seq], rope=rope)[0], exact)
        steps, plain = in_parts(*single, low, [1] * seq, rope=rope)[0], recurrence(*single, low, rope)
        assert error(steps, exact) <= 2 * error(plain, exact)


MORE = {
    "the state is not decayed by the first number": ("per token", "resolve_weighting", "without_first"),
    "near keys are one position off": ("t5", "split_near", "moved"),
    "one near key too many is in the sums": ("t5", "split_near", "doubled"),
    "hidden tokens at the end decay": ("per query head", "resolve_weighting", "decays_at_the_end"),
}


def without_first(real, decay, bias, tokens, **options):
    weighting = real(decay, bias, tokens, **options)
    if not tokens.has_state:
        return weighting
    return weighting._replace(decay=torch.cat([0 * weighting.decay[..., :1], weighting.decay[..., 1:]], dim=-1))


def moved(real, *arguments):
    k, v, near = real(*arguments)
    return k, v, near._replace(positions=near.positions + 1)


def doubled(real, k, v, ids, near, fill, ends):
    _, _, last = real(k, v, ids, near, fill, ends)
    far, values, _ = real(k, v, ids, near - 1, fill, ends)
    return far, values, last


def decays_at_the_end(real, decay, bias, tokens, **options):
    return real(decay, bias, tokens._replace(key_mask=None), **options)


@pytest.mark.parametrize("name", MORE)
def test_wrong_versions_do_not_pass(monkeypatch, name):
    kind, attribute, wrong = MORE[name]
    test = functools.partial(test_padding_on_the_right_is_as_if_it_were_not_there, kind, False, True)
    test()
    real = getattr(linear_function, attribute)
    monkeypatch.setattr(linear_function, attribute, functools.partial(globals()[wrong], real))
    with pytest.raises(AssertionError):
        test()


def test_a_replaced_state_continues_too():
    q, k, v = drawn(1, 4, 2, 30, 8, 3)
    for kind in KINDS:
        rule = rule_of(kind, 1, 4, 2, 30, buckets=BUCKETS)
        _, state = in_parts(q, k, v, rule, [20])
        near = None if state.near is None else NearKeys(*state.near)
        copied = replace(state, near=near)
        out, _ = in_parts(q, k, v, rule, [10], start=20, state=copied)
        assert_same(out, expected(q, k, v, rule)[:, :, 20:])


@pytest.mark.parametrize("kind", slow_except([], ["per query head", "t5"]))
def test_one_graph_for_a_step(kind):
    torch.compiler.reset()
    rule, rope = rule_of(kind, 1, 4, 2, 40, buckets=BUCKETS), rw.RotaryEmbedding(8)
    q, k, v = drawn(1, 4, 2, 40, 8, 3)
    weights = weights_of(rule)
    _, state = in_parts(q, k, v, rule, [20], rope=rope)

    def step(q, k, v, state, options):
        return rw.linear_attention(q, k, v, rope=rope, state=state, return_state=True, **options)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=True)
    state, outputs = replace(state, position=torch.tensor([20])), []
    for t in range(20, 26):
        out, state = compiled(*(x[:, :, t : t + 1] for x in (q, k, v)), state, weights(t, t + 1))
        outputs.append(out)
    assert_same(torch.cat(outputs, dim=2), expected(q, k, v, rule, rope)[:, :, 20:26])
