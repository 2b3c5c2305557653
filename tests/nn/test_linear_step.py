"""One token after a state: the C kernel against the general path, and the calls for which it must not be used."""

import copy
import pickle
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ropewalk as rw
from nn.linear_cases import NAMES
from ropewalk.kernels.backend import Backend, register, registered
from ropewalk.kernels.types import FeatureMap, Layout
from ropewalk.nn.linear import step as steps
from ropewalk.nn.linear.step import Step

WORKING = {torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 1.5e-3}


def tokens(batch, heads, kv_heads, seq, dim, v_dim, dtype, seed=0):
    random = torch.Generator().manual_seed(seed)
    shapes = (batch, heads, seq, dim), (batch, kv_heads, seq, dim), (batch, kv_heads, seq, v_dim)
    q, k, v = (torch.randn(shape, generator=random).to(dtype) for shape in shapes)
    return q, k, v


def after_prompt(arguments, options, length=20):
    _, state = rw.linear_attention(*arguments(length), return_state=True, **options)
    return state


def both(q, k, v, state, **options):
    """The results of the step and of the general path."""
    with mock.patch.object(steps.Step, "__call__", autospec=True, side_effect=Step.__call__) as called:
        result = rw.linear_attention(q, k, v, state=state, return_state=True, **options)
    assert called.call_count == 1
    with mock.patch.object(steps.Step, "__call__", return_value=None):
        general = rw.linear_attention(q, k, v, state=replace(state), return_state=True, **options)
    return result, general


def general_only(q, k, v, state, **options):
    """The result of a call that must not use the step, or that the step must leave to the general path."""
    results = []
    original = Step.__call__

    def watched(self, *arguments):
        results.append(original(self, *arguments))
        return results[-1]

    with mock.patch.object(steps.Step, "__call__", watched):
        out = rw.linear_attention(q, k, v, state=state, return_state=True, **options)
    assert all(result is None for result in results)
    return out


@settings(max_examples=60)
@given(
    st.sampled_from([(1, 1), (2, 1), (4, 2), (6, 6)]),
    st.sampled_from([(2, 2), (8, 8), (8, 3), (16, 40), (64, 64), (80, 33), (24, 100)]),
    st.sampled_from(list(WORKING)),
    st.sampled_from(NAMES),
    st.sampled_from(["none", "kv", "heads", "token", "alibi"]),
    st.sampled_from(["none", "interleaved", "half", "partial"]),
    st.booleans(),
    st.integers(1, 3),
    st.integers(0, 1000),
)
def test_a_step_is_the_general_path(sizes, widths, dtype, feature_map, kind, rotation, normalize, batch, seed):
    (heads, kv_heads), (dim, v_dim) = sizes, widths
    options: dict = {"feature_map": feature_map, "normalize": normalize}
    if not normalize:
        options["scale"] = 0.25
    spec = rw.RopeSpec(dim, rotary_dim=dim // 4 * 2 or 2, rotary_slice="trailing")
    ropes = {"interleaved": dim, "half": dim, "partial": spec}
    if rotation != "none":
        pairing = {"pairing": rotation} if rotation in ("interleaved", "half") else {}
        options["rope"] = rw.RotaryEmbedding(ropes[rotation], **pairing)
    if kind == "alibi":
        options["bias"] = rw.encoding("alibi", dim=heads * dim, num_heads=heads)

    def decay(seq):
        random = torch.Generator().manual_seed(seed)
        shape = {"kv": (kv_heads,), "heads": (heads,), "token": (batch, heads, seq)}
        return {} if kind in ("none", "alibi") else {"decay": -torch.rand(shape[kind], generator=random)}

    given_decay = decay(5)
    _, state = rw.linear_attention(
        *tokens(batch, heads, kv_heads, 5, dim, v_dim, dtype, seed), return_state=True, **options, **given_decay
    )
    token = tokens(batch, heads, kv_heads, 1, dim, v_dim, dtype, seed + 1)
    step_decay = decay(1) if kind == "token" else given_decay
    (out, after), (expected, end) = both(*token, state, **options, **step_decay)
    tolerance = WORKING[dtype]
    size = expected.float().abs().amax().clamp_min(1.0).item()
    # The denominators of the identity map can be near 0.
    if feature_map != "identity" or not normalize:
        torch.testing.assert_close(out.float(), expected.float(), rtol=tolerance, atol=tolerance * size)
    assert out.dtype == expected.dtype
    assert out.shape == expected.shape
    torch.testing.assert_close(after.above, end.above, rtol=2e-6, atol=2e-6 * end.above.abs().amax().item())
    torch.testing.assert_close(after.below, end.below, rtol=2e-6, atol=2e-6 * end.below.abs().amax().item())
    fields = ("position", "spec", "feature_map", "learned", "length", "encoding", "weighting", "near")
    assert [getattr(after, name) for name in fields] == [getattr(end, name) for name in fields]


def test_many_steps_are_the_whole():
    rope, decay = rw.RotaryEmbedding(16), -torch.rand(4)
    q, k, v = tokens(2, 4, 2, 700, 16, 8, torch.float32)
    whole = rw.linear_attention(*(x.double() for x in (q, k, v)), rope=rope, decay=decay.double())
    state, outputs = None, []
    for token in zip(*(x.split(1, dim=2) for x in (q, k, v)), strict=True):
        out, state = rw.linear_attention(*token, rope=rope, decay=decay, state=state, return_state=True)
        outputs.append(out)
    torch.testing.assert_close(torch.cat(outputs, dim=2).double(), whole, rtol=1e-4, atol=1e-4)
    assert state is not None
    assert state.position == 700


@pytest.mark.parametrize(
    "value", [0.0, -0.0, 1e-40, -80.0, -95.0, -103.9, -200.0, 88.0, 1e30, float("inf"), float("nan")]
)
@pytest.mark.parametrize("feature_map", NAMES)
def test_unusual_numbers(value, feature_map):
    q, k, v = (torch.full((1, 1, 1, 20), value) for _ in range(3))
    q[..., 0], k[..., 1] = -1.0, 0.5
    _, state = rw.linear_attention(
        *(torch.ones(1, 1, 2, 20) for _ in range(3)), feature_map=feature_map, return_state=True
    )
    (out, after), (expected, end) = both(q, k, v, state, feature_map=feature_map)
    torch.testing.assert_close(out, expected, rtol=4e-6, atol=1e-30, equal_nan=True)
    torch.testing.assert_close(after.above, end.above, rtol=4e-6, atol=1e-37, equal_nan=True)
    torch.testing.assert_close(after.below, end.below, rtol=4e-6, atol=1e-37, equal_nan=True)


def step_of_kernel(q, k, v, above, below, maps, normalize=True, layout=(True, 0, -2)):
    run = registered("native").linear_step
    assert run is not None
    return run(q, k, v, above, below, None, None, 0, None, layout, maps, normalize, 1.0)


@pytest.mark.parametrize("name", ["elu", "exp"])
def test_exponentials_are_rounded_well(name):
    pieces = [np.linspace(*ends) for ends in ((-104, 88.7, 180_000), (-1, 1, 100_000), (-90, -85, 27_200))]
    x = torch.from_numpy(np.concatenate(pieces)).float().view(600, 1, 1, 512)
    above, below = torch.zeros(600, 1, 512, 1), torch.zeros(600, 1, 512)
    maps = (FeatureMap[name].value,) * 2
    result = step_of_kernel(x, x, x[..., :1], above, below, maps)
    assert result is not None
    after = result[2]
    wide = x[:, :, 0].double()
    exact = wide.exp() if name == "exp" else torch.where(wide > 0, wide + 1, wide.exp())
    units = torch.from_numpy(np.spacing(exact.float().numpy())).double()
    assert ((after.double() - exact).abs() / units).amax() < 2


@settings(max_examples=20)
@given(st.sampled_from([(64, 64), (100, 40)]), st.sampled_from(["kv", "none"]), st.integers(0, 1000))
def test_the_number_of_threads_changes_nothing(widths, kind, seed):
    rope = rw.RotaryEmbedding(widths[0])
    options = {"rope": rope, "decay": -torch.rand(8)} if kind == "kv" else {"rope": rope}
    prompt = tokens(3, 16, 8, 5, *widths, torch.float32, seed)
    _, state = rw.linear_attention(*prompt, return_state=True, **options)
    token, threads = tokens(3, 16, 8, 1, *widths, torch.float32, seed + 1), torch.get_num_threads()
    results = []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            results.append(rw.linear_attention(*token, state=state, return_state=True, **options))
    finally:
        torch.set_num_threads(threads)
    for out, after in results[1:]:
        assert torch.equal(out, results[0][0])
        assert torch.equal(after.above, results[0][1].above)
        assert torch.equal(after.below, results[0][1].below)


def test_the_kernel_rejects_options_that_no_step_has():
    one, sums = torch.ones(1, 1, 1, 2), (torch.ones(1, 1, 2, 2), torch.ones(1, 1, 2))
    assert step_of_kernel(one, one, one, *sums, (3, 3)) is not None
    for maps, layout in (((3, 5), (True, 0, -2)), ((-1, 3), (True, 0, -2)), ((3, 3), (True, -1, -2))):
        with pytest.raises(ValueError, match="invalid"):
            step_of_kernel(one, one, one, *sums, maps, layout=layout)
    for maps, layout in (((3,), Layout(True, 0, -2)), ((3, 3), (True, 0)), ([3, 3], Layout(True, 0, -2))):
        with pytest.raises(ValueError, match="expects"):
            step_of_kernel(one, one, one, *sums, maps, layout=layout)
    with pytest.raises(TypeError):
        step_of_kernel(one, one, one, *sums, ("elu", "elu"))


def test_weights_that_underflow():
    q = k = v = torch.tensor([[[[-1.0, 1.0]]]])
    _, state = rw.linear_attention(
        *(-x for x in (q, k, v)), feature_map="relu", decay=torch.tensor([-200.0]), return_state=True
    )
    options = {"feature_map": "relu", "decay": torch.tensor([-200.0])}
    state = after_prompt(lambda _: [-x for x in (q, k, v)], options)
    (out, _), (expected, _) = both(-q.abs(), k, v, state, **options)
    assert out.abs().sum() == expected.abs().sum() == 0


LENGTHS = tokens(1, 2, 2, 20, 8, 8, torch.float32), tokens(1, 2, 2, 1, 8, 8, torch.float32)


def prompted(**options):
    return rw.linear_attention(*LENGTHS[0], return_state=True, **options)[1]


def test_other_arguments_use_the_general_path():
    rope, other = rw.RotaryEmbedding(8), rw.RotaryEmbedding(8)
    state = prompted(rope=rope)
    expected = both(*LENGTHS[1], state, rope=rope)
    # An equal rope is checked, and then has its own step.
    assert torch.equal(rw.linear_attention(*LENGTHS[1], rope=other, state=replace(state)), expected[0][0])
    for options in (
        {"rope": rope, "positions": torch.tensor([20])},
        {"rope": rope, "key_mask": torch.tensor([[True]])},
        {"rope": rope, "cu_seqlens": torch.tensor([0, 1])},
        {"rope": rope, "backend": "torch"},
    ):
        out, _ = general_only(*LENGTHS[1], state, **options)
        torch.testing.assert_close(out, expected[1][0])
    with pytest.raises(rw.RopewalkError, match="a state of"):
        rw.linear_attention(*LENGTHS[1], state=state)
    with pytest.raises(rw.RopewalkError, match="feature map"):
        rw.linear_attention(*LENGTHS[1], rope=rope, feature_map="relu", state=state)
    with pytest.raises(rw.RopewalkError, match="decay"):
        rw.linear_attention(*LENGTHS[1], rope=rope, decay=torch.zeros(2), state=state)
    with pytest.raises(rw.RopewalkError, match="normalize"):
        rw.linear_attention(*LENGTHS[1], rope=rope, normalize=1, state=state)


def test_tensors_that_are_unusual_use_the_general_path():
    state = prompted()
    q, k, v = LENGTHS[1]
    general_only(*LENGTHS[0], state)
    general_only(
        q.double(), k.double(), v.double(), replace(state, above=state.above.double(), below=state.below.double())
    )
    general_only(q.clone().requires_grad_(), k, v, state)
    general_only(q, k, v, state._with_step(replace(state, above=state.above.clone().requires_grad_())))
    spread = torch.zeros(1, 2, 1, 16)[..., ::2].copy_(q)
    out, _ = general_only(spread, k, v, state)
    torch.testing.assert_close(out, both(q, k, v, state)[0][0], rtol=1e-5, atol=1e-6)
    negated = torch.complex(q, q).conj().imag
    assert negated.is_neg()
    out, _ = general_only(negated, k, v, state)
    torch.testing.assert_close(out, both(-q, k, v, state)[0][0], rtol=1e-5, atol=1e-6)
    swapped = torch.empty(1, 2, 8, 8).transpose(-1, -2).copy_(state.above)
    general_only(q, k, v, state._with_step(replace(state, above=swapped)))
    with pytest.raises(rw.RopewalkError, match="one dtype"):
        rw.linear_attention(q, k.bfloat16(), v, state=state)
    with pytest.raises(rw.RopewalkError, match="width"):
        rw.linear_attention(q[..., :6], k, v, state=state)
    with pytest.raises(rw.RopewalkError, match="as a tensor"):
        rw.linear_attention(None, k, v, state=state)


def test_a_decay_is_read_at_each_token():
    decay = torch.full((2,), -0.5)
    state = prompted(decay=decay)
    before, _ = rw.linear_attention(*LENGTHS[1], decay=decay, state=state, return_state=True)
    decay.fill_(-3.0)
    (out, _), (expected, _) = both(*LENGTHS[1], state, decay=decay)
    torch.testing.assert_close(out, expected)
    assert not torch.allclose(out, before)
    decay.fill_(0.25)
    with pytest.raises(rw.RopewalkError, match="at most 0"):
        rw.linear_attention(*LENGTHS[1], decay=decay, state=state)


def test_a_decay_with_a_gradient_gets_one():
    decay = torch.nn.Parameter(torch.full((2,), -0.5))
    with torch.no_grad():
        state = prompted(decay=decay)
    out, _ = general_only(*LENGTHS[1], state, decay=decay)
    (gradient,) = torch.autograd.grad(out.sum(), [decay])
    assert gradient.abs().sum() > 0


def test_positions_end_with_the_context():
    rope = rw.RotaryEmbedding(8, context_length=21)
    state = prompted(rope=rope)
    _, state = rw.linear_attention(*LENGTHS[1], rope=rope, state=state, return_state=True)
    with pytest.raises(rw.RopewalkError, match="context_length"):
        rw.linear_attention(*LENGTHS[1], rope=rope, state=state)


@pytest.mark.parametrize("maps", [rw.FavorFeatures(8, 8), (rw.FavorFeatures(8, 8), torch.relu), ("elu", torch.exp)])
def test_functions_use_the_general_path(maps):
    state = prompted(feature_map=maps)
    out, _ = general_only(*LENGTHS[1], state, feature_map=maps)
    joined = [torch.cat(parts, dim=2) for parts in zip(*LENGTHS, strict=True)]
    torch.testing.assert_close(out, rw.linear_attention(*joined, feature_map=maps)[:, :, -1:], rtol=1e-4, atol=1e-5)


def test_a_state_without_a_step_has_the_same_result():
    rope, decay = rw.RotaryEmbedding(8), -torch.rand(2)
    state = prompted(rope=rope, decay=decay)
    loaded = rw.LinearState.from_state_dict(state.state_dict())
    results = [
        rw.linear_attention(*LENGTHS[1], rope=rope, decay=decay, state=each, return_state=True)
        for each in (state, loaded)
    ]
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1].above, results[1][1].above)


def test_far_positions():
    rope = rw.RotaryEmbedding(8)
    state = prompted(rope=rope)
    for position in (511, 512, 100_000, 3, 1 << 24):
        moved = state._with_step(replace(state, position=position))
        (out, after), (expected, _) = both(*LENGTHS[1], moved, rope=rope)
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)
        assert after.position == position + 1


def test_states_are_saved_copied_and_reordered():
    rope = rw.RotaryEmbedding(8)
    state = prompted(rope=rope)
    expected, _ = rw.linear_attention(*LENGTHS[1], rope=rope, state=state, return_state=True)
    for other in (pickle.loads(pickle.dumps(state)), copy.deepcopy(state), copy.copy(state)):
        assert "_step" not in other.__dict__
        out, _ = rw.linear_attention(*LENGTHS[1], rope=rope, state=other, return_state=True)
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)
    twice = state.reorder(torch.tensor([0, 0]))
    (out, _), _ = both(*(x.expand(2, -1, -1, -1) for x in LENGTHS[1]), twice, rope=rope)
    torch.testing.assert_close(out[1:], expected)


def test_a_backend_that_is_registered_replaces_the_step():
    state = prompted()
    both(*LENGTHS[1], state)
    undo = register(Backend("mine", {}, devices=("cpu",), linear_step=lambda *_: None))
    try:
        out, _ = general_only(*LENGTHS[1], state)
    finally:
        undo()
    torch.testing.assert_close(out, rw.linear_attention(*LENGTHS[1], state=state), rtol=1e-5, atol=1e-6)


def test_nothing_of_the_state_is_written():
    state = prompted()
    copies = state.above.clone(), state.below.clone()
    first, _ = rw.linear_attention(*LENGTHS[1], state=state, return_state=True)
    again, _ = rw.linear_attention(*LENGTHS[1], state=state, return_state=True)
    assert torch.equal(first, again)
    assert torch.equal(state.above, copies[0])
    assert torch.equal(state.below, copies[1])


@pytest.mark.slow
def test_compilers_see_the_general_path():
    rope = rw.RotaryEmbedding(8)
    state = prompted(rope=rope)

    def f(q, k, v, above, below):
        moved = replace(state, above=above, below=below)
        return rw.linear_attention(q, k, v, rope=rope, state=moved)

    def with_step(q, k, v):
        return rw.linear_attention(q, k, v, rope=rope, state=state)

    compiled = torch.compile(with_step, fullgraph=True, backend="aot_eager")(*LENGTHS[1])
    torch.testing.assert_close(compiled, both(*LENGTHS[1], state, rope=rope)[0][0], rtol=1e-5, atol=1e-6)
    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")(*LENGTHS[1], state.above, state.below)
    torch.testing.assert_close(compiled, both(*LENGTHS[1], state, rope=rope)[0][0], rtol=1e-5, atol=1e-6)


class LearnedSlopes(rw.Encoding):
    """A bias that is linear in the distance, with slopes that are learned."""

    name = "learned slopes"
    linear = True

    def __init__(self):
        super().__init__()
        self.slopes = torch.nn.Parameter(torch.full((2,), 0.3))

    def distance_bias(self):
        return rw.DistanceBias(slopes=self.slopes)


def test_learned_slopes_are_read_at_each_token_and_get_gradients():
    bias, (q, k, v) = LearnedSlopes(), tokens(1, 2, 2, 4, 8, 8, torch.float32)
    with torch.no_grad():
        _, state = rw.linear_attention(q[:, :, :3], k[:, :, :3], v[:, :, :3], bias=bias, return_state=True)
    last = [x[:, :, 3:] for x in (q, k, v)]
    out, _ = rw.linear_attention(*last, bias=bias, state=state, return_state=True)
    assert torch.autograd.grad(out.sum(), bias.slopes)[0].any()
    with torch.no_grad():
        bias.slopes.mul_(5)
        changed, _ = rw.linear_attention(*last, bias=bias, state=state, return_state=True)
    assert not torch.allclose(out, changed)
