"""linear_attention against the reference: values, gradients, state, packed sequences, and the two-times rule."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ropewalk as rw
from formulas import favor_features
from meant import meant
from nn.linear_cases import NAMES, drawn, error, exact, formula, next_positions, recurrence, with_gradients
from ropewalk.kernels.linear import torch as linear_torch
from ropewalk.kernels.linear.chunks import attend_parts
from ropewalk.kernels.linear.feature_maps import map_features
from ropewalk.kernels.linear.torch import linear_attention
from ropewalk.kernels.types import Features, Layout, Side, Sums, Tables, Weighting
from ropewalk.reference import elu_plus_one, linear_attention_by_sum
from slow import slow
from strategies import theta

# Of torch, on a CPU that has no bfloat16.
pytestmark = pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")

LENGTHS = (1, 2, 63, 64, 65, 1000)
DIMS = (16, 40, 64, 80, 112, 128, 256)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("seq", LENGTHS)
def test_every_length_is_the_references(seq, causal):
    q, k, v = drawn(2, 4, 2, seq, 16, 5)
    for pairing in ("interleaved", "half"):
        rope = rw.RotaryEmbedding(16, pairing=pairing)
        out = rw.linear_attention(q, k, v, rope=rope, causal=causal)
        torch.testing.assert_close(out, exact(q, k, v, rope, causal=causal), rtol=0, atol=1e-10)


@pytest.mark.parametrize("dim", DIMS)
def test_every_width_is_the_references(dim):
    q, k, v = drawn(1, 2, 1, 130, dim, 24)
    rope = rw.RotaryEmbedding(dim)
    torch.testing.assert_close(rw.linear_attention(q, k, v, rope=rope), exact(q, k, v, rope), rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", NAMES)
def test_every_feature_map_is_the_references(name):
    q, k, v = drawn(1, 2, 2, 70, 8, 8)
    rope = rw.RotaryEmbedding(8)
    out = rw.linear_attention(q, k, v, rope=rope, feature_map=name)
    torch.testing.assert_close(out, exact(q, k, v, rope, feature_map=name), rtol=0, atol=1e-10)
    pair = rw.linear_attention(q, k, v, rope=rope, feature_map=(name, lambda x: x.exp()))
    truth = exact(q, k, v, rope, feature_map=(name, torch.exp))
    torch.testing.assert_close(pair, truth, rtol=0, atol=1e-10)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("pairing", ["interleaved", "half"])
def test_the_expected_values_are_the_references(pairing, causal):
    q, k, v = drawn(2, 4, 2, 9, 8, 3, keys=12)
    ids = torch.randint(0, 500, (2, 12), generator=torch.Generator().manual_seed(0))
    options = {"inv_freq": theta(8), "positions": ids, "pairing": pairing, "causal": causal}
    by_sum = linear_attention_by_sum(q, k, v, **options)
    rope = rw.RotaryEmbedding(8, pairing=pairing)
    torch.testing.assert_close(exact(q, k, v, rope, positions=ids, causal=causal), by_sum, rtol=0, atol=1e-12)


@pytest.mark.parametrize("num_features", [8, 20])
def test_random_features_are_those_of_their_formula(num_features):
    q, k, v = drawn(1, 2, 1, 33, 8, 4)
    phi, rope = rw.FavorFeatures(8, num_features, seed=3), rw.RotaryEmbedding(num_features)
    out = rw.linear_attention(q, k, v, rope=rope, feature_map=phi)
    truth = exact(q, k, v, rope, feature_map=lambda x: favor_features(x, phi.projection))
    torch.testing.assert_close(out, truth, rtol=0, atol=1e-10)


def test_a_function_may_change_the_width():
    q, k, v = drawn(1, 2, 1, 33, 6, 4)

    def wider(x):
        return torch.cat([x.exp(), (-x).exp()], dim=-1)

    rope = rw.RotaryEmbedding(12)
    out = rw.linear_attention(q, k, v, rope=rope, feature_map=wider)
    torch.testing.assert_close(out, exact(q, k, v, rope, feature_map=wider), rtol=0, atol=1e-10)


@pytest.mark.parametrize("chunk", [1, 3, 16, 64, 100])
def test_the_chunk_does_not_matter(chunk):
    q, k, v = drawn(1, 4, 2, 97, 8, 3)
    both = [Features(x.exp(), x.sin()) for x in (q, k)]
    decay = -torch.rand(1, 4, 97).double()
    for weighting in (Weighting(), Weighting(decay=decay), Weighting(decay=decay[..., :1])):
        whole, after = attend_parts(*both, v, None, weighting, chunk=128)
        parts, end = attend_parts(*both, v, None, weighting, chunk=chunk)
        torch.testing.assert_close(parts, whole, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(end, after, rtol=1e-12, atol=1e-12)
    band = Weighting(band=torch.randn(4, 2 * 20 + 1).double())
    whole, _ = attend_parts(*both, v, None, band, chunk=128)
    parts, _ = attend_parts(*both, v, None, band, chunk=chunk)
    torch.testing.assert_close(parts, whole, rtol=1e-12, atol=1e-12)


@settings(max_examples=40)
@given(st.lists(st.integers(1, 70), min_size=1, max_size=5), st.booleans(), st.integers(0, 1000))
def test_parts_with_a_state_are_the_whole(parts, rotated, seed):
    q, k, v = drawn(2, 4, 2, sum(parts), 8, 3, seed=seed)
    rope = rw.RotaryEmbedding(8) if rotated else None
    state, outputs = None, []
    for a, b, c in zip(*(x.split(parts, dim=2) for x in (q, k, v)), strict=True):
        out, state = rw.linear_attention(a, b, c, rope=rope, state=state, return_state=True)
        outputs.append(out)
    whole, end = rw.linear_attention(q, k, v, rope=rope, return_state=True)
    torch.testing.assert_close(torch.cat(outputs, dim=2), whole, rtol=1e-10, atol=1e-10)
    assert state is not None
    torch.testing.assert_close(state.above, end.above, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(state.below, end.below, rtol=1e-10, atol=1e-10)
    assert state.position == end.position == sum(parts)


@settings(max_examples=30)
@given(st.lists(st.integers(0, 80), min_size=1, max_size=5), st.integers(0, 3), st.booleans(), st.integers(0, 1000))
@meant("cu_seqlens")
def test_packed_sequences_are_separate_ones(lengths, rest, causal, seed):
    total = sum(lengths) + rest
    q, k, v = drawn(1, 2, 1, max(total, 1), 8, 3, seed=seed)
    q, k, v = (x[:, :, :total] for x in (q, k, v))
    ends = torch.tensor([0, *lengths]).cumsum(0)
    rope = rw.RotaryEmbedding(8)
    out, state = rw.linear_attention(q, k, v, rope=rope, cu_seqlens=ends, causal=causal, return_state=True)
    assert next_positions(state) == lengths
    for i, (start, stop) in enumerate(zip(ends.tolist(), ends[1:].tolist(), strict=False)):
        one = [x[:, :, start:stop] for x in (q, k, v)]
        alone, end = rw.linear_attention(*one, rope=rope, causal=causal, return_state=True)
        torch.testing.assert_close(out[:, :, start:stop], alone, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(state.above[i : i + 1], end.above, rtol=1e-12, atol=1e-12)
    assert not out[:, :, sum(lengths) :].any()
    # The next tokens of each sequence, packed again behind the state.
    more = drawn(1, 2, 1, 2 * len(lengths), 8, 3, seed=seed + 1)
    ends = 2 * torch.arange(len(lengths) + 1)
    behind = rw.linear_attention(*more, rope=rope, cu_seqlens=ends, causal=causal, state=state)
    for i in range(len(lengths)):
        one = state.reorder(torch.tensor([i]))
        alone = rw.linear_attention(*(x[:, :, 2 * i : 2 * i + 2] for x in more), rope=rope, causal=causal, state=one)
        torch.testing.assert_close(behind[:, :, 2 * i : 2 * i + 2], alone, rtol=1e-12, atol=1e-12)


WEIGHTINGS = {
    "plain": Weighting(),
    "no denominator": Weighting(normalize=False, scale=0.5),
    "per key head": Weighting(decay=-torch.rand(1, 2, 1).double()),
    "per query head": Weighting(decay=-torch.rand(1, 4, 1).double()),
    "per token": Weighting(decay=-torch.rand(1, 4, 40).double()),
    "band": Weighting(band=torch.randn(4, 2 * 5 + 1).double()),
    "positions": Weighting(band=torch.randn(4, 2 * 5 + 1).double(), positions=2 * torch.arange(40)[None]),
}


@pytest.mark.parametrize("kind", WEIGHTINGS)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("chunk", [4, 128])
def test_ends_that_only_the_device_knows(monkeypatch, chunk, causal, kind):
    q, k, v = drawn(1, 4, 2, 40, 8, 3)
    weighting, ends = WEIGHTINGS[kind], torch.tensor([0, 7, 7, 23, 36])
    heads = weighting.state_heads(2)
    above, below = torch.rand(4, heads, 8, 3).double(), torch.rand(4, heads, 8).double()
    learned = [x for x in (weighting.decay, weighting.band) if x is not None]
    inputs = q, k, v, above, below, *learned
    angles = torch.arange(40)[:, None] * torch.rand(4).double()
    tables = Tables(angles.cos(), angles.sin())

    def run(q, k, v, above, below, *numbers):
        used = weighting
        if numbers:
            used = weighting._replace(**{"decay" if weighting.band is None else "band": numbers[0]})
        sides = (Side(x, "elu", None, tables) for x in (q, k))
        out, after = linear_attention(*sides, v, Sums(above, below), Layout(True, 0, -2), causal, ends, weighting=used)
        # With a band, the sums have no meaning.
        return torch.cat([x.flatten() for x in (out, *(after if weighting.band is None else ()))])

    cotangent = torch.randn(run(*inputs).shape, generator=torch.Generator().manual_seed(3)).double()
    apart = with_gradients(run, inputs, cotangent)
    monkeypatch.setattr(linear_torch, "CHUNK", chunk)
    monkeypatch.setattr(linear_torch, "is_plain", lambda *_: False)
    packed = with_gradients(run, inputs, cotangent)
    for a, b in zip(packed, apart, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("causal", [True, False])
@meant("cu_seqlens")
def test_packed_sequences_in_one_graph(causal):
    rope, ends = rw.RotaryEmbedding(8), torch.tensor([0, 7, 30])

    def f(q, k, v):
        return rw.linear_attention(q, k, v, rope=rope, cu_seqlens=ends, causal=causal)

    inputs, cotangent = drawn(1, 2, 1, 33, 8, 3), torch.ones(1, 2, 33, 3)
    compiled = with_gradients(torch.compile(f, fullgraph=True, backend="aot_eager"), inputs, cotangent)
    for a, b in zip(compiled, with_gradients(f, inputs, cotangent), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)
    meta = [x.to("meta") for x in inputs]
    there = rw.linear_attention(*meta, cu_seqlens=ends.to("meta"), causal=causal)
    assert there.shape == (1, 2, 33, 3)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_in_its_sequence(bad):
    q, k, v = drawn(1, 2, 1, 90, 8, 3)
    clean = rw.linear_attention(q, k, v, cu_seqlens=torch.tensor([0, 30, 60, 90]))
    for x in (q, k, v):
        x[:, :, 40] = bad
    out = rw.linear_attention(q, k, v, cu_seqlens=torch.tensor([0, 30, 60, 90]))
    assert torch.equal(out[:, :, :30], clean[:, :, :30])
    assert torch.equal(out[:, :, 60:], clean[:, :, 60:])
    assert not out[:, :, 59].isfinite().all()


@pytest.mark.parametrize("causal", [True, False])
def test_queries_are_the_last_of_more_keys(causal):
    q, k, v = drawn(2, 4, 2, 20, 8, 3, keys=97)
    rope = rw.RotaryEmbedding(8)
    out, state = rw.linear_attention(q, k, v, rope=rope, causal=causal, return_state=True)
    torch.testing.assert_close(out, exact(q, k, v, rope, causal=causal), rtol=0, atol=1e-10)
    assert state.position == 97


@pytest.mark.parametrize("name", NAMES)
def test_a_hidden_key_is_as_if_it_were_not_there(name):
    q, k, v = drawn(2, 2, 1, 12, 8, 3)
    seen = torch.ones(2, 12, dtype=torch.bool)
    seen[0, 8:], seen[1, :3] = False, False
    k[0, :, 8:], v[0, :, 9] = 1e3, float("nan")
    rope = rw.RotaryEmbedding(8)
    out = rw.linear_attention(q, k, v, rope=rope, key_mask=seen, feature_map=name, causal=False)
    for i in range(2):
        ids, rows = seen[i].nonzero().flatten(), slice(i, i + 1)
        one = rw.linear_attention(
            q[rows], k[rows][:, :, ids], v[rows][:, :, ids], rope=rope, positions=torch.arange(12), k_positions=ids,
            feature_map=name, causal=False,
        )  # fmt: skip
        torch.testing.assert_close(out[rows], one, rtol=1e-12, atol=1e-12)


def test_a_state_stands_behind_the_last_token_that_is_seen():
    q, k, v = drawn(2, 2, 1, 9, 8, 3)
    seen = torch.arange(9) < torch.tensor([[9], [5]])
    rope = rw.RotaryEmbedding(8)
    _, state = rw.linear_attention(q, k, v, rope=rope, key_mask=seen, return_state=True)
    assert next_positions(state) == [9, 5]
    more = drawn(2, 2, 1, 2, 8, 3, seed=1)
    out = rw.linear_attention(*more, rope=rope, state=state)
    short = [torch.cat([x[1:, :, :5], y[1:]], dim=2) for x, y in zip((q, k, v), more, strict=True)]
    torch.testing.assert_close(out[1:], exact(*short, rope)[:, :, 5:], rtol=0, atol=1e-10)
    ids = torch.arange(9) * 2
    _, state = rw.linear_attention(q, k, v, rope=rope, key_mask=seen, positions=ids, return_state=True)
    assert next_positions(state) == [17, 9]
    _, state = rw.linear_attention(q, k, v, rope=rope, key_mask=seen.flip(1), return_state=True)
    assert next_positions(state) == [9, 9]


def test_positions_are_those_that_are_given():
    q, k, v = drawn(2, 2, 1, 9, 8, 3)
    rope = rw.RotaryEmbedding(8)
    ids = torch.tensor([[5, 6, 7, 8, 9, 10, 11, 12, 13], [0, 2, 4, 6, 8, 10, 12, 14, 16]])
    out, state = rw.linear_attention(q, k, v, rope=rope, positions=ids, return_state=True)
    for i in range(2):
        one = [x[i : i + 1] for x in (q, k, v)]
        torch.testing.assert_close(out[i : i + 1], exact(*one, rope, positions=ids[i]), rtol=0, atol=1e-10)
    assert next_positions(state) == [14, 17]
    more = drawn(2, 2, 1, 3, 8, 3, seed=1)
    following = torch.tensor([[14, 15, 16], [17, 18, 19]])
    left = rw.linear_attention(*more, rope=rope, state=state)
    right = rw.linear_attention(*more, rope=rope, state=state, positions=following)
    torch.testing.assert_close(left, right, rtol=1e-12, atol=1e-12)


def test_xpos_rotates_features_too():
    q, k, v = drawn(1, 2, 2, 11, 8, 3)
    spec = rw.RopeSpec(8, xpos=rw.XPos(512))
    rope = rw.RotaryEmbedding(spec)
    torch.testing.assert_close(rw.linear_attention(q, k, v, rope=rope), exact(q, k, v, rope), rtol=0, atol=1e-10)


def test_nothing_to_divide_by_is_zero_with_finite_gradients():
    q, k, v = drawn(1, 1, 1, 6, 4, 3)
    k[:, :, :3] = -1.0
    q[:, :, 5] = -1.0
    out, *grads = with_gradients(lambda *x: rw.linear_attention(*x, feature_map="relu"), (q, k, v), torch.ones_like(v))
    assert not out[:, :, :3].any()
    assert not out[:, :, 5].any()
    assert out[:, :, 3:5].all()
    assert all(grad.isfinite().all() for grad in grads)


def test_queries_of_any_size_have_an_exponential():
    q, k, v = drawn(1, 1, 1, 7, 4, 3, torch.float32)
    out = rw.linear_attention(q + 1000, k, v, feature_map="exp")
    torch.testing.assert_close(out, rw.linear_attention(q, k, v, feature_map="exp"), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("causal", [True, slow(False)])
@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_those_of_the_function(name, causal):
    q, k, v = (x.requires_grad_() for x in drawn(1, 2, 1, 5, 4, 3))
    rope = rw.RotaryEmbedding(4)
    _, state = rw.linear_attention(*drawn(1, 2, 1, 3, 4, 3, seed=1), rope=rope, feature_map=name, return_state=True)

    def f(q, k, v, above, below):
        before = rw.LinearState(above, below, 3, rope.spec, name)
        out, after = rw.linear_attention(
            q, k, v, rope=rope, feature_map=name, causal=causal, state=before, return_state=True
        )
        return out, after.above, after.below

    inputs = q, k, v, state.above.requires_grad_(), state.below.requires_grad_()
    assert torch.autograd.gradcheck(f, inputs, check_batched_grad=True)
    if causal and name in ("elu", "exp"):
        assert torch.autograd.gradgradcheck(f, inputs)


def test_the_gradient_of_elu_at_zero_is_one():
    # clamp_max(0), a usual way to write these features, has no gradient at 0 from torch 2.15 on.
    x = torch.tensor([-1.0, -0.0, 0.0, 2.0], dtype=torch.float64, requires_grad=True)
    for features in (map_features(x, "elu"), elu_plus_one(x)):
        gradient = torch.autograd.grad(features.sum(), x)[0]
        torch.testing.assert_close(gradient, torch.tensor([-1.0, 0.0, 0.0, 0.0], dtype=torch.float64).exp())
    unusual = torch.tensor([torch.inf, -torch.inf, -0.0, torch.nan])
    expected = torch.tensor([torch.inf, 0.0, 1.0, torch.nan])
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        torch.testing.assert_close(map_features(unusual.to(dtype), "elu"), expected.to(dtype), equal_nan=True)
    for dtype, flushes in itertools.product((torch.float64, torch.float32, torch.bfloat16, torch.float16), (0, 1)):
        least = torch.finfo(dtype).tiny
        numbers = [0.0, -0.0, least, least * (1 + torch.finfo(dtype).eps), least / 2, -least, 2.0]
        x = torch.tensor(numbers, dtype=dtype, requires_grad=True)
        torch.set_flush_denormal(bool(flushes))
        try:
            gradient = torch.autograd.grad(map_features(x, "elu").sum(), x)[0]
        finally:
            torch.set_flush_denormal(False)
        torch.testing.assert_close(gradient, torch.ones_like(x), rtol=0, atol=0.001 if dtype == torch.float16 else 0)
    q, k, v = drawn(2, 2, 1, 9, 4, 3)
    q[:, :, ::2], k[:, :, ::3] = 0.0, -0.0
    ours, right = (with_gradients(f, (q, k, v), torch.ones_like(q[..., :3])) for f in (rw.linear_attention, exact))
    for mine, expected in zip(ours, right, strict=True):
        torch.testing.assert_close(mine, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("seq", [64, 1000])
def test_errors_are_at_most_twice_those_of_the_formula(seq, dtype):
    q, k, v = drawn(1, 2, 1, seq, 64, 64, dtype)
    rope, cotangent = rw.RotaryEmbedding(64), drawn(1, 2, 2, seq, 64, 64, seed=7)[2]
    truth = with_gradients(lambda *x: exact(*x, rope), [x.double() for x in (q, k, v)], cotangent)
    ours = with_gradients(lambda *x: rw.linear_attention(*x, rope=rope), (q, k, v), cotangent)
    theirs = with_gradients(lambda *x: formula(*x, rope), (q, k, v), cotangent)
    for name, a, b, c in zip(("o", "dq", "dk", "dv"), ours, theirs, truth, strict=True):
        assert a.dtype == dtype
        assert error(a, c) <= 2 * error(b, c), name


@pytest.mark.parametrize(
    ("dtype", "seq"), [(torch.float32, 1000), slow(torch.float32, 10_000), slow(torch.bfloat16, 10_000)]
)
def test_thousands_of_steps_are_the_prompt(dtype, seq):
    q, k, v = drawn(1, 1, 1, seq, 16, 16, dtype)
    rope, state, steps = rw.RotaryEmbedding(16), None, []
    with torch.inference_mode():
        for token in zip(*(x.split(1, dim=2) for x in (q, k, v)), strict=True):
            out, state = rw.linear_attention(*token, rope=rope, state=state, return_state=True)
            steps.append(out)
        tail = slice(seq - 100, seq)
        truth = exact(q[:, :, tail], k, v, rope)
        # A state in float32 adds one token after the other. No model does that in bfloat16.
        is_recurrent = dtype == torch.float32
        plain = recurrence(q, k, v, rope)[:, :, tail] if is_recurrent else formula(q[:, :, tail], k, v, rope)
    out = torch.cat(steps, dim=2)[:, :, tail]
    assert error(out, truth) <= 2 * error(plain, truth)


def test_a_step_does_the_same_work_at_every_position():
    from torch.utils.flop_counter import FlopCounterMode

    rope, counts = rw.RotaryEmbedding(16), []
    for start in (1, 1000):
        _, state = rw.linear_attention(*drawn(1, 1, 1, start, 16, 16), rope=rope, return_state=True)
        assert state.above.shape == (1, 1, 16, 16)
        with FlopCounterMode(display=False) as counter:
            rw.linear_attention(*drawn(1, 1, 1, 1, 16, 16), rope=rope, state=state, return_state=True)
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0


@pytest.mark.slow
@pytest.mark.parametrize("seq", [1, 40])
def test_one_graph_without_a_break(seq):
    rope = rw.RotaryEmbedding(8)
    compiled = torch.compile(lambda *x: rw.linear_attention(*x, rope=rope), fullgraph=True, backend="aot_eager")
    inputs = drawn(1, 2, 1, seq, 8, 3)
    cotangent = torch.ones(1, 2, seq, 3)
    expected = with_gradients(lambda *x: rw.linear_attention(*x, rope=rope), inputs, cotangent)
    for a, b in zip(with_gradients(compiled, inputs, cotangent), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


def test_learned_frequencies_learn():
    q, k, v = drawn(1, 2, 1, 9, 8, 3)
    rope = rw.RotaryEmbedding(8, learned=True)
    assert rope.log_scale is not None
    (grad,) = torch.autograd.grad(rw.linear_attention(q, k, v, rope=rope).sum(), rope.log_scale)
    assert grad.abs().sum() > 0
