"""Linear attention: positions of tokens after a state, supported encodings, and the context of a call."""

import itertools
from dataclasses import replace

import pytest
import torch

import ropewalk as rw
from nn.linear_cases import drawn, exact, next_positions, with_gradients
from ropewalk.nn.encodings.rotary import RotaryEncoding

ROPE = rw.RotaryEmbedding(8)


def close(a, b):
    torch.testing.assert_close(a, b, rtol=0, atol=1e-10)


def parts(inputs, *bounds):
    return [[x[:, :, start:stop] for x in inputs] for start, stop in itertools.pairwise(bounds)]


def test_packed_tokens_go_on_behind_a_state_of_one_position():
    inputs = drawn(3, 2, 1, 5, 8, 3)
    prompt, last = parts(inputs, 0, 4, 5)
    _, state = rw.linear_attention(*prompt, rope=ROPE, return_state=True)
    assert state.position == 4
    packed = [x.permute(2, 1, 0, 3) for x in last]
    out, after = rw.linear_attention(*packed, rope=ROPE, state=state, cu_seqlens=torch.arange(4), return_state=True)
    close(out.permute(2, 1, 0, 3), rw.linear_attention(*last, rope=ROPE, state=state))
    assert next_positions(after) == [5, 5, 5]


def test_keys_before_the_first_query_count_behind_a_state_too():
    q, k, v = drawn(2, 2, 1, 12, 8, 3)
    prompt, rest = parts((q, k, v), 0, 4, 12)
    _, state = rw.linear_attention(*prompt, rope=ROPE, return_state=True)
    few = rw.linear_attention(rest[0][:, :, 5:], *rest[1:], rope=ROPE, state=state)
    close(few, exact(q[:, :, 9:], k, v, ROPE))


def test_queries_stand_with_the_last_keys_wherever_those_are():
    q, k, v = drawn(1, 2, 1, 6, 8, 3)
    prompt, rest = parts((q, k, v), 0, 3, 6)
    _, state = rw.linear_attention(*prompt, rope=ROPE, return_state=True)
    close(
        rw.linear_attention(*rest, rope=ROPE, state=state, k_positions=torch.arange(3, 6)),
        exact(q, k, v, ROPE)[:, :, 3:],
    )
    few = rw.linear_attention(q[:, :, 3:], k, v, rope=ROPE, k_positions=torch.arange(6))
    close(few, exact(q[:, :, 3:], k, v, ROPE))


def test_given_positions_say_where_the_next_token_stands():
    inputs = drawn(1, 2, 1, 6, 8, 3)
    ids, ends = torch.tensor([10, 11, 20, 21, 22, 23]), torch.tensor([0, 2, 2, 6])
    _, state = rw.linear_attention(*inputs, rope=ROPE, positions=ids, cu_seqlens=ends, return_state=True)
    assert next_positions(state) == [12, 0, 24]
    _, state = rw.linear_attention(*drawn(2, 2, 1, 6, 8, 3), rope=ROPE, positions=ids, return_state=True)
    assert next_positions(state.reorder(torch.tensor([1, 0]))) == [24, 24]
    nothing = [x[:, :, :0] for x in inputs]
    _, state = rw.linear_attention(*nothing, rope=ROPE, positions=ids[:0], return_state=True)
    assert state.position == 0


@pytest.mark.parametrize("given", [None, torch.arange(50, 60)], ids=["counted", "given"])
def test_packed_states_stand_behind_the_last_token_that_may_be_seen(given):
    inputs, ends = drawn(1, 2, 1, 10, 8, 3), torch.tensor([0, 5, 10, 10])
    mask = torch.tensor([[1, 1, 1, 0, 0, 1, 0, 1, 1, 0]], dtype=torch.bool)
    _, state = rw.linear_attention(
        *inputs, rope=ROPE, positions=given, cu_seqlens=ends, key_mask=mask, return_state=True
    )
    assert next_positions(state) == ([3, 4, 0] if given is None else [53, 59, 0])
    rows = [x[0].unflatten(1, (2, 5)).transpose(0, 1) for x in inputs]
    where = None if given is None else given.view(2, 5)
    _, apart = rw.linear_attention(*rows, rope=ROPE, positions=where, key_mask=mask.view(2, 5), return_state=True)
    assert next_positions(apart) == next_positions(state)[:2]
    token = drawn(2, 2, 1, 1, 8, 3, seed=1)
    close(
        rw.linear_attention(*token, rope=ROPE, state=state.reorder(torch.tensor([0, 1]))),
        rw.linear_attention(*token, rope=ROPE, state=apart),
    )
    # Nothing to be seen: the state stays where it stood.
    nothing = torch.zeros(2, 5, dtype=torch.bool)
    _, after = rw.linear_attention(
        *rows, rope=ROPE, positions=torch.arange(80, 85), key_mask=nothing, state=apart, return_state=True
    )
    assert next_positions(after) == next_positions(apart)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32])
@pytest.mark.parametrize("packed", [False, True])
def test_narrow_positions_do_not_wrap(dtype, packed):
    last = torch.iinfo(dtype).max
    ids = torch.arange(last - 4, last + 1).to(dtype)
    given = {"cu_seqlens": torch.tensor([0, 5], dtype=torch.int32)} if packed else {}
    inputs = drawn(1, 2, 1, 5, 8, 3)
    for mask in (None, torch.ones(1, 5, dtype=torch.bool)):
        _, state = rw.linear_attention(*inputs, rope=ROPE, positions=ids, key_mask=mask, return_state=True, **given)
        assert next_positions(state) == [last + 1]
    narrow = replace(state, position=torch.tensor([last], dtype=dtype))
    _, after = rw.linear_attention(*inputs, rope=ROPE, state=narrow, return_state=True)
    assert next_positions(after) == [last + 5]


def test_a_position_for_all_sequences_of_a_batch():
    inputs, ends = drawn(1, 2, 1, 10, 8, 3), torch.tensor([0, 5, 10])
    state = rw.LinearState(torch.zeros(2, 1, 8, 3).double(), torch.zeros(2, 1, 8).double(), torch.tensor(5), ROPE.spec)
    out, after = rw.linear_attention(*inputs, rope=ROPE, state=state, cu_seqlens=ends, return_state=True)
    assert next_positions(after) == [10, 10]
    close(out, rw.linear_attention(*inputs, rope=ROPE, state=replace(state, position=5), cu_seqlens=ends))


def test_a_state_keeps_the_length_that_its_keys_were_rotated_for():
    rope = rw.RotaryEmbedding(rw.RopeSpec(8, rw.DynamicNTK(1e4, 2.0, 16)))
    prompt, rest = parts(drawn(2, 2, 1, 12, 8, 3), 0, 10, 12)
    for first, then, good in [(40, 40, True), (40, 41, False), (10, 16, True), (None, 12, True), (None, 40, False)]:
        _, state = rw.linear_attention(*prompt, rope=rope, length=first, return_state=True)
        for length in (then, torch.tensor(then), torch.tensor([then, then])):
            if good:
                rw.linear_attention(*rest, rope=rope, length=length, state=state.reorder(torch.tensor([1, 0])))
                continue
            with pytest.raises(rw.RopewalkError, match="a state of length"):
                rw.linear_attention(*rest, rope=rope, length=length, state=state)
    _, state = rw.linear_attention(*prompt, rope=rope, length=torch.tensor([40, 50]), return_state=True)
    kept = state.reorder(torch.tensor([1])).length
    assert isinstance(kept, torch.Tensor)
    assert kept.tolist() == [50]
    for wrong in ("long", 4.5, torch.tensor([3, 4, 5]), torch.tensor([2.5, 3.0]), -3, torch.tensor([-3, 7])):
        with pytest.raises(rw.RopewalkError):
            rw.linear_attention(*rest, rope=rope, length=wrong, state=state)
    with pytest.raises(rw.RopewalkError, match="a state of length"):
        rw.linear_attention(*rest, rope=rope, length=torch.tensor([50, 40]), state=state)


def test_a_length_is_the_rules():
    rope = rw.RotaryEmbedding(rw.RopeSpec(8, rw.DynamicNTK(1e4, 4.0, 4)))
    encoding, (q, k, v) = RotaryEncoding(rope, at_length=64), drawn(1, 2, 2, 10, 8, 3)
    long = rw.linear_attention(q, k, v, rope=rope, length=64)
    close(rw.linear_attention(q, k, v, rope=encoding), long)
    assert (rw.linear_attention(q, k, v, rope=rope) - long).abs().max() > 1e-3
    layer = rw.LinearAttention(16, 2, encoding=encoding, dtype=torch.float64)
    x = torch.randn(1, 4, 16, dtype=torch.float64)
    first, state = layer.step(x[:, :2])
    second, _ = layer.step(x[:, 2:], state)
    close(torch.cat([first, second], dim=1), layer(x))
    with pytest.raises(rw.RopewalkError, match="a length and no rope"):
        rw.linear_attention(q, k, v, length=3)


def test_positions_of_a_layer_are_those_of_the_function():
    layer = rw.LinearAttention(16, 2, encoding=ROPE, dtype=torch.float64)
    x, ids = torch.randn(1, 6, 16, dtype=torch.float64), torch.tensor([0, 3, 4, 9, 11, 12])
    q, k, v = (f(x).view(1, 6, 2, 8).transpose(1, 2) for f in (layer.q_proj, layer.k_proj, layer.v_proj))
    truth = layer.o_proj(exact(q, k, v, ROPE, positions=ids).transpose(1, 2).flatten(2))
    close(layer(x, positions=ids), truth)


@pytest.mark.parametrize(
    "spec",
    [
        rw.RopeSpec(8, query_temperature=rw.LogTemperature(2)),
        rw.RopeSpec(8, rw.Yarn(1e4, factor=40, trained_length=16)),
        rw.RopeSpec(8, rw.LongRope(1e4, (1.0,) * 4, (2.0,) * 4, 16, factor=4.0)),
    ],
    ids=("temperature", "yarn", "longrope"),
)
def test_factors_that_would_scale_the_output_are_refused(spec):
    with pytest.raises(rw.RopewalkError, match="would scale the outputs"):
        rw.linear_attention(*drawn(1, 1, 1, 3, 8, 3), rope=rw.RotaryEmbedding(spec), length=64)


def test_yarn_without_its_factor_rotates():
    rope = rw.RotaryEmbedding(rw.RopeSpec(8, rw.Yarn(1e4, factor=40, trained_length=16, attention_factor=1.0)))
    q, k, v = drawn(1, 1, 1, 9, 8, 3)
    close(rw.linear_attention(q, k, v, rope=rope), exact(q, k, v, rope))


class Biased(rw.Encoding):
    def bias(self, q_positions, k_positions):
        return torch.zeros(())


class Rotated(rw.Encoding):
    def rotate(self, q, k, positions=None, *, k_positions=None):
        return q, k


def test_hooks_that_would_not_be_called_are_refused():
    with pytest.raises(rw.RopewalkError, match="constant beyond a window"):
        rw.LinearAttention(16, 2, encoding=Biased())
    with pytest.raises(rw.RopewalkError, match="which overrides rotate"):
        rw.LinearAttention(16, 2, encoding=Rotated())


def test_autocast_leaves_the_sums_alone():
    q, k, v = drawn(1, 2, 1, 300, 8, 3, torch.float32)
    phi = rw.FavorFeatures(8, 8)
    for feature_map in ("elu", phi):
        plain = rw.linear_attention(q, k, v, rope=ROPE, feature_map=feature_map)
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(rw.linear_attention(q, k, v, rope=ROPE, feature_map=feature_map), plain)


@pytest.mark.parametrize("causal", [True, False])
def test_an_empty_batch_stays_empty(causal):
    q, k, v = torch.zeros(0, 2, 3, 8), torch.zeros(0, 1, 3, 8), torch.zeros(0, 1, 3, 2)
    assert rw.linear_attention(q, k, v, rope=ROPE, causal=causal).shape == (0, 2, 3, 2)


def test_a_function_beside_a_name_and_features_of_any_dtype():
    q, k, v = drawn(1, 2, 1, 9, 8, 3, torch.float32)
    truth = exact(q, k, v, ROPE, feature_map=("relu", torch.exp))
    for function in (torch.exp, lambda x: x.double().exp()):
        out = rw.linear_attention(q, k, v, rope=ROPE, feature_map=("relu", function))
        torch.testing.assert_close(out.double(), truth, rtol=1e-5, atol=1e-5)


def test_large_features_have_finite_gradients():
    q, k, v = drawn(1, 1, 1, 4, 8, 3)
    q[..., 0], k[..., 1] = 1e3, 1e3
    for grad in with_gradients(rw.linear_attention, (q, k, v), torch.ones_like(v)):
        assert grad.isfinite().all()


def test_a_denominator_that_vanishes_with_something_above_it():
    q = torch.tensor([[[[1.0, 1.0]]]])
    k, v = torch.tensor([[[[1.0, -1.0]]]]), torch.ones(1, 1, 1, 1)
    assert rw.linear_attention(q, k, v, rope=rw.RotaryEmbedding(2), positions=torch.tensor([0]),
                               k_positions=torch.tensor([1]), feature_map="identity").item() == 0  # fmt: skip


def test_a_detached_state_has_no_graph():
    q, k, v = (x.requires_grad_() for x in drawn(1, 1, 1, 4, 8, 3))
    _, state = rw.linear_attention(q, k, v, return_state=True)
    assert state.above.requires_grad
    assert state.below.requires_grad
    assert not state.detach().above.requires_grad
    assert not state.detach().below.requires_grad


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"above": None}, "two tensors of sums"),
        ({"position": "a"}, "two tensors of sums"),
        ({"position": torch.tensor([1, 2])}, r"a tensor \[1\]"),
        ({"below": torch.zeros(1, 1, 7)}, "sequences, heads, features"),
        ({"below": torch.zeros(1, 1, 8)}, "torch.float32"),
    ],
)
def test_a_state_that_was_tampered_with_is_refused(change, words):
    inputs = drawn(1, 1, 1, 4, 8, 3)
    _, state = rw.linear_attention(*inputs, return_state=True)
    with pytest.raises(rw.RopewalkError, match=words):
        rw.linear_attention(*inputs, state=replace(state, **change))


def test_what_padding_holds_does_not_reach_a_cache():
    torch.manual_seed(0)
    layer = rw.Attention(16, 2, encoding=rw.encoding("rope", dim=16, num_heads=2))
    x = torch.randn(1, 6, 16)
    mask = torch.ones(1, 16, dtype=torch.bool)
    mask[:, :2] = False
    outputs = []
    for bad in (0.0, float("nan")):
        x[:, :2] = bad
        cache = rw.KVCache(1, 2, 16, 8)
        with torch.inference_mode():
            first = layer(x, cache=cache, key_mask=mask)[:, 2:]
            outputs.append(torch.cat([first, layer(torch.ones(1, 1, 16), cache=cache, key_mask=mask)], dim=1))
    assert torch.equal(*outputs)
    assert outputs[1].isfinite().all()
