"""Linear attention where there is nothing: empty sequences, hidden ones, padding, empty batches, and what follows."""

import itertools
from dataclasses import replace

import pytest
import torch

import ropewalk as rw
from meant import meant
from nn.linear_cases import drawn, exact, next_positions, with_gradients

ROPE = rw.RotaryEmbedding(8)
ENDS = ([0, 0, 3], [0, 0, 0], [0, 0], [0, 0, 0, 3], [0, 3, 3], [0, 2, 2, 3], [0, 0, 2], [0, 1, 1], [0, 3])
UNSIGNED = (torch.uint8, torch.uint16, torch.uint32, torch.uint64)


def packed(ends, **options):
    inputs = drawn(1, 2, 1, 3, 8, 3)
    return rw.linear_attention(*inputs, rope=ROPE, cu_seqlens=torch.tensor(ends), return_state=True, **options)


@pytest.mark.parametrize("ends", ENDS, ids=str)
@pytest.mark.parametrize("given", [None, (40, 50, 60), (7, 6, 5), (-3, -2, -1), (0.5, 1.0, 1.5)], ids=str)
@meant("cu_seqlens")
@meant("key_mask")
def test_a_sequence_without_a_token_that_is_seen_stays_where_it_was(ends, given):
    for hidden in (None, (), (0,), (0, 1, 2), (2,)):
        check_positions_and_go_on(ends, hidden, given)


def check_positions_and_go_on(ends, hidden, given):
    mask = torch.ones(1, 3, dtype=torch.bool)
    mask[0, list(hidden or ())] = False
    options = {} if hidden is None else {"key_mask": mask}
    options |= {} if given is None else {"positions": torch.tensor(given)}
    _, state = packed(ends, **options)
    expected = []
    for start, stop in itertools.pairwise(ends):
        seen = [i for i in range(start, stop) if mask[0, i]]
        expected.append(0 if not seen else 1 + (seen[-1] - start if given is None else given[seen[-1]]))
    assert next_positions(state) == expected
    # One more token each, behind the state: in a batch, and packed.
    rows = len(expected)
    q, k, v = drawn(rows, 2, 1, 1, 8, 3, seed=1)
    out, after = rw.linear_attention(q, k, v, rope=ROPE, state=state, return_state=True)
    assert next_positions(after) == [x + 1 for x in expected]
    ids = torch.tensor(expected)[:, None]
    torch.testing.assert_close(out, rw.linear_attention(q, k, v, rope=ROPE, state=state, positions=ids))
    laid = [x.permute(2, 1, 0, 3) for x in (q, k, v)]
    again = rw.linear_attention(*laid, rope=ROPE, state=state, cu_seqlens=torch.arange(rows + 1))
    torch.testing.assert_close(again.permute(2, 1, 0, 3), out)


@meant("cu_seqlens")
@meant("key_mask")
def test_sequences_behind_a_state_stay_there_without_a_token():
    _, state = packed([0, 1, 3])
    mask = torch.tensor([[True, False, False]])
    for ends, expected in (([0, 0, 3], [1, 3]), ([0, 0, 0], [1, 2]), ([0, 3, 3], [2, 2]), ([0, 1, 1], [2, 2])):
        _, after = packed(ends, state=state, key_mask=mask)
        assert next_positions(after) == expected


def test_no_tokens_at_all():
    nothing = [x[:, :, :0] for x in drawn(1, 2, 1, 3, 8, 3)]
    mask = torch.ones(1, 0, dtype=torch.bool)
    for options in ({}, {"key_mask": mask}, {"positions": torch.arange(0)}, {"positions": torch.zeros(1, 0)}):
        out, state = rw.linear_attention(
            *nothing, rope=ROPE, cu_seqlens=torch.tensor([0, 0, 0]), return_state=True, **options
        )
        assert out.shape == (1, 2, 0, 3)
        assert next_positions(state) == [0, 0]
        assert not state.above.any()
        assert not state.below.any()


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.int32, *UNSIGNED])
def test_ends_of_any_dtype_that_counts(dtype):
    for options in ({}, {"key_mask": torch.ones(1, 3, dtype=torch.bool)}, {"positions": torch.arange(3)}):
        out, state = packed([0, 0, 2, 3], **options)
        inputs, ends = drawn(1, 2, 1, 3, 8, 3), torch.tensor([0, 0, 2, 3]).to(dtype)
        same, after = rw.linear_attention(*inputs, rope=ROPE, cu_seqlens=ends, return_state=True, **options)
        assert torch.equal(same, out)
        assert next_positions(after) == next_positions(state)
        behind, _ = rw.linear_attention(*inputs, rope=ROPE, cu_seqlens=ends, state=state, return_state=True)
        torch.testing.assert_close(behind, packed([0, 0, 2, 3], state=state)[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_decoding_goes_on_from_fractions(dtype):
    q, k, v = drawn(2, 2, 1, 5, 8, 3)
    ids = torch.tensor([[0.5, 1.5, 2.5, 3.5, 4.5], [-2.25, -1.25, -0.25, 0.75, 1.75]], dtype=dtype)
    outputs, state = [], None
    for part in (slice(0, 2), slice(2, 3), slice(3, 5)):
        options = {"positions": ids[:, part]} if state is None else {}
        out, state = rw.linear_attention(
            *(x[:, :, part] for x in (q, k, v)), rope=ROPE, state=state, return_state=True, **options
        )
        outputs.append(out)
    assert next_positions(state) == [5.5, 2.75]
    for row in range(2):
        one = [x[row : row + 1] for x in (q, k, v)]
        truth = exact(*one, ROPE, positions=ids[row])
        torch.testing.assert_close(torch.cat(outputs, dim=2)[row : row + 1], truth, rtol=0, atol=1e-10)


def test_a_state_without_keys_is_of_no_length():
    rope = rw.RotaryEmbedding(rw.RopeSpec(8, rw.DynamicNTK(1e4, 2.0, 16)))
    inputs = drawn(1, 2, 1, 20, 8, 3)
    nothing = [x[:, :, :0] for x in inputs]
    for length in (None, 40):
        _, state = rw.linear_attention(*nothing, rope=rope, length=length, return_state=True)
        assert state.length is None
        out, after = rw.linear_attention(*inputs, rope=rope, state=state, return_state=True)
        assert after.length == 20
        assert torch.equal(out, rw.linear_attention(*inputs, rope=rope))
        _, later = rw.linear_attention(*nothing, rope=rope, length=20, state=after, return_state=True)
        assert later.length == 20


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e4])
@pytest.mark.parametrize(
    "feature_map",
    ["elu", "exp", torch.exp, ("relu", torch.exp), (torch.relu, "exp")],
    ids=["elu", "exp", "function", "name and function", "function and name"],
)
@meant("cu_seqlens")
@meant("key_mask")
def test_hidden_keys_and_padding_may_hold_anything(feature_map, bad):
    q, k, v = drawn(1, 2, 1, 6, 8, 3, torch.float32)
    mask, ends = torch.tensor([[True, False, True, True, True, True]]), torch.tensor([0, 0, 3, 4])

    def f(q, k, v):
        return rw.linear_attention(q, k, v, rope=ROPE, feature_map=feature_map, key_mask=mask, cu_seqlens=ends)

    cotangent = drawn(1, 2, 2, 6, 8, 3, seed=2)[2]
    clean = with_gradients(f, (q, k, v), cotangent)
    q[:, :, 4:], k[:, :, 4:], v[:, :, 4:] = bad, bad, bad
    k[:, :, 1], v[:, :, 1] = bad, bad
    for ours, truth in zip(with_gradients(f, (q, k, v), cotangent), clean, strict=True):
        assert torch.equal(ours, truth)


@pytest.mark.parametrize("name", ["elu", "relu", "squared_relu", "identity", "exp"])
def test_features_of_no_width_have_no_output(name):
    out = rw.linear_attention(torch.ones(1, 2, 3, 0), torch.ones(1, 1, 3, 0), torch.ones(1, 1, 3, 2), feature_map=name)
    assert torch.equal(out, torch.zeros(1, 2, 3, 2))


def test_an_empty_batch_goes_on():
    inputs = [x[:0] for x in drawn(1, 2, 1, 3, 8, 3)]
    for options in ({}, {"key_mask": torch.ones(0, 3, dtype=torch.bool)}, {"positions": torch.ones(0, 3)}):
        _, state = rw.linear_attention(*inputs, rope=ROPE, return_state=True, **options)
        state = state.reorder(torch.zeros(0, dtype=torch.int64))
        out, after = rw.linear_attention(*inputs, rope=ROPE, state=state, return_state=True)
        assert out.shape == (0, 2, 3, 3)
        assert after.above.shape == (0, 1, 8, 3)


@pytest.mark.parametrize(
    "position", [torch.tensor([True]), torch.tensor([300.0], dtype=torch.bfloat16), torch.tensor([1j]), True, 2.5]
)
def test_a_state_counts_in_what_can_count(position):
    inputs = drawn(1, 2, 1, 3, 8, 3)
    _, state = rw.linear_attention(*inputs, rope=ROPE, return_state=True)
    with pytest.raises(rw.RopewalkError, match="position"):
        rw.linear_attention(*inputs, rope=ROPE, state=replace(state, position=position))


@meant("cu_seqlens")
@meant("key_mask")
def test_a_layer_goes_on_from_empty_and_hidden_sequences():
    layer = rw.LinearAttention(16, 2, encoding=ROPE, dtype=torch.float64)
    x = torch.randn(1, 5, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    ends, mask = torch.tensor([0, 0, 2, 4, 4]), torch.tensor([[True, True, False, False, True]])
    _, state = layer(x, cu_seqlens=ends, key_mask=mask, return_state=True)
    assert next_positions(state) == [0, 2, 0, 0]
    token = torch.randn(4, 1, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    y, after = layer.step(token, state)
    assert next_positions(after) == [1, 3, 1, 1]
    for row, before in enumerate((x[:, :0], x[:, :2], x[:, :0], x[:, :0])):
        whole = layer(torch.cat([before, token[row : row + 1]], dim=1))
        torch.testing.assert_close(y[row], whole[0, -1:], rtol=0, atol=1e-10)


@pytest.mark.slow
@meant("cu_seqlens")
@meant("key_mask")
def test_a_graph_has_the_same_positions():
    def f(q, k, v, ends, mask):
        options = {"cu_seqlens": ends, "key_mask": mask, "return_state": True}
        out, state = rw.linear_attention(q, k, v, rope=ROPE, **options)
        return out, state.above, state.below, state.position

    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    inputs = drawn(1, 2, 1, 6, 8, 3)
    for ends in ([0, 0, 4], [0, 0, 0], [0, 4, 4]):
        for mask in ([[True] * 6], [[False] * 6], [[True, False] * 3]):
            arguments = *inputs, torch.tensor(ends), torch.tensor(mask)
            for ours, eager in zip(compiled(*arguments), f(*arguments), strict=True):
                torch.testing.assert_close(ours, eager)
