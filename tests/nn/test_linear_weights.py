"""linear_attention with a decay or a bias: outputs and gradients against sums over all pairs of tokens."""

import functools

import pytest
import torch

import ropewalk as rw
from meant import meant
from nn import weighted_cases
from nn.linear_cases import drawn, error, with_gradients
from nn.weighted_cases import DECAYS, KINDS, assert_same, call_of, covering_cases, expected, rule_of, t5_bias
from ropewalk.kernels.linear import chunks as linear_chunks
from ropewalk.kernels.linear import torch as linear_torch
from ropewalk.nn.encodings.bias import AlibiBias
from ropewalk.nn.linear import weighting as linear_weighting
from ropewalk.reference import linear_attention_by_recurrence, linear_attention_by_sum, t5_bucket
from slow import slow, slow_except
from strategies import theta

# Of torch, on a CPU that has no bfloat16.
pytestmark = pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")

CASES = covering_cases()
BOTH = [(kind, causal) for kind in KINDS for causal in (True, False) if causal or "token" not in kind]


def named(case):
    return " ".join(f"{name}={value}" for name, value in case.items())


def ours(q, k, v, rule, rope=None, *, causal=True, tensor=None, **options):
    weights = rule.options(q.shape[1], causal=causal, tensor=tensor)
    return rw.linear_attention(q, k, v, rope=rope, causal=causal, **weights, **options)


def test_the_cases_have_every_pair():
    pairs = set().union(*map(weighted_cases.pairs_of, CASES))
    assert weighted_cases.all_pairs() <= pairs
    assert all(map(weighted_cases.is_possible, CASES))
    assert (("causal", False), ("kind", "per token")) not in pairs
    assert {("kind", "t5"), ("seq", 4096)} in map(set, pairs)


@pytest.mark.parametrize(
    "case", [slow(case) if case["seq"] == 4096 else case for case in CASES], ids=named
)  # fmt: skip
@meant("cu_seqlens")
def test_every_pair_of_options_is_the_double_sum(case):
    tensors, rule, rope, options = call_of(case)
    assert_same(ours(*tensors, rule, rope, **options), expected(*tensors, rule, rope, **options))


@pytest.mark.parametrize(("kind", "causal"), BOTH)
def test_the_expected_values_are_the_references(kind, causal):
    q, k, v = drawn(2, 4, 2, 40, 8, 3)
    rule, rope = rule_of(kind, 2, 4, 2, 40, buckets=(8, 20)), rw.RotaryEmbedding(8)
    options = {"inv_freq": theta(8), "causal": causal}
    ids = torch.arange(40)
    if kind in DECAYS:
        options["decay"] = rule.tensor
    elif kind == "t5":
        table = t5_bucket(ids - ids[:, None], causal=causal, num_buckets=8, max_distance=20)
        assert rule.tensor is not None
        options["bias"] = rule.tensor[table].permute(2, 0, 1)
    else:
        options["bias"] = rw.reference.alibi_bias(ids, ids, 4)
    for normalize in (True, False):
        truth = linear_attention_by_sum(q, k, v, normalize=normalize, **options)
        assert_same(expected(q, k, v, rule, rope, causal=causal, normalize=normalize), truth, 1e-12)
        assert_same(ours(q, k, v, rule, rope, causal=causal, normalize=normalize), truth)
        if causal and "bias" not in options:
            assert_same(linear_attention_by_recurrence(q, k, v, normalize=normalize, **options), truth, 1e-12)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("buckets", [(32, 128), (8, 20), (4, 600)])
def test_t5s_buckets_are_those_of_the_reference(buckets, causal):
    ids = torch.arange(-700, 701)
    theirs = t5_bucket(ids, causal=causal, num_buckets=buckets[0], max_distance=buckets[1])
    weight = torch.arange(buckets[0], dtype=torch.float64)[:, None]
    here = t5_bias(weight, torch.zeros(1, 1, dtype=torch.int64), ids[None], buckets, causal=causal)
    assert torch.equal(here.flatten(), theirs.double())


@pytest.mark.parametrize(("kind", "causal"), [(kind, causal) for kind in ("alibi", "t5") for causal in (True, False)])
@pytest.mark.parametrize("rotated", [True, False])
@pytest.mark.parametrize("masked", [True, False])
def test_a_bias_uses_positions(kind, causal, rotated, masked):
    q, k, v = drawn(2, 4, 2, 200, 8, 3)
    steps = torch.randint(1, 4, (2, 200), generator=torch.Generator().manual_seed(0))
    steps[1] = torch.where(torch.arange(200) % 9 == 0, 40, 1)
    ids = steps.cumsum(-1)
    if kind == "alibi":
        ids = ids // 2  # with repetitions
    rope = rw.RotaryEmbedding(8) if rotated else None
    options = {"causal": causal}
    if masked:
        options["key_mask"] = torch.rand(2, 200, generator=torch.Generator().manual_seed(1)) < 0.8
        options["key_mask"][:, 190:] = False
    rule = rule_of(kind, 2, 4, 2, 200)
    for normalize in (True, False):
        out = ours(q, k, v, rule, rope, positions=ids, normalize=normalize, **options)
        assert_same(out, expected(q, k, v, rule, rope, positions=ids, normalize=normalize, **options))
    ends = torch.tensor([0, 50, 50, 190])
    options = {"causal": causal, "cu_seqlens": ends, "positions": ids[:1] - 3 * (torch.arange(200) >= 50)}
    one = [x[:1] for x in (q, k, v)]
    if masked:
        options["key_mask"] = torch.rand(1, 200, generator=torch.Generator().manual_seed(1)) < 0.8
    out = meant_call(*one, rule, rope, **options)
    assert_same(out, expected(*one, rule, rope, **options))


def meant_call(*arguments, **options):
    """The call, whose packed sequences end before the last token on purpose."""
    with pytest.warns(rw.RopewalkWarning, match="cu_seqlens"):
        return ours(*arguments, **options)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kind", ["alibi", "t5"])
def test_positions_of_hidden_keys_do_not_matter(kind, causal):
    q, k, v = drawn(2, 4, 2, 30, 8, 3)
    seen = torch.ones(2, 30, dtype=torch.bool)
    seen[0, :4], seen[1, 25:], seen[:, 12:14] = False, False, False
    ids = torch.arange(30).expand(2, -1)
    rule, options = rule_of(kind, 2, 4, 2, 30, buckets=(8, 20)), {"causal": causal, "key_mask": seen}
    truth = ours(q, k, v, rule, positions=ids, **options)
    for other in (0, 1000):
        out = ours(q, k, v, rule, positions=torch.where(seen, ids, other), **options)
        visible = seen[:, None, :, None].expand_as(out)
        assert_same(out[visible], truth[visible], 1e-12)


def test_fractional_positions_of_alibi():
    q, k, v = drawn(2, 4, 2, 150, 8, 3)
    ids = torch.rand(2, 150, generator=torch.Generator().manual_seed(0), dtype=torch.float64).cumsum(-1)
    rule = rule_of("alibi", 2, 4, 2, 150)
    for causal in (True, False):
        out = ours(q, k, v, rule, causal=causal, positions=ids)
        assert_same(out, expected(q, k, v, rule, causal=causal, positions=ids))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rotated", [True, False])
def test_queries_are_the_last_of_more_keys(kind, rotated):
    rope = rw.RotaryEmbedding(8) if rotated else None
    for queries, keys in ((1, 140), (20, 97), (130, 300), (0, 9)):
        q, k, v = drawn(2, 4, 2, queries, 8, 3, keys=keys)
        rule = rule_of(kind, 2, 4, 2, keys)
        assert_same(ours(q, k, v, rule, rope), expected(q, k, v, rule, rope))
        ids = 2 * torch.arange(keys)
        if rotated or kind in ("alibi", "t5"):
            out = ours(q, k, v, rule, rope, positions=ids[keys - queries :], k_positions=ids)
            assert_same(out, expected(q, k, v, rule, rope, positions=ids))


@pytest.mark.parametrize("max_distance", [3, 128, 129, 257, 1000])
@pytest.mark.parametrize("causal", [True, False])
def test_every_window_of_t5(max_distance, causal):
    buckets = (4, max_distance)
    q, k, v = drawn(1, 2, 1, 400, 8, 3)
    rule = rule_of("t5", 1, 2, 1, 400, buckets=buckets)
    assert_same(ours(q, k, v, rule, causal=causal), expected(q, k, v, rule, causal=causal))


@pytest.mark.parametrize("causal", [True, False])
def test_a_bias_and_a_rotation_of_one_encoding(causal):
    class Rotated(AlibiBias):
        def __init__(self, heads, rope):
            super().__init__(heads)
            self.rope = rope

    q, k, v = drawn(2, 4, 2, 150, 8, 3)
    rope = rw.RotaryEmbedding(8)
    both = Rotated(4, rope)
    out = rw.linear_attention(q, k, v, rope=both, bias=both, causal=causal)
    assert_same(out, expected(q, k, v, rule_of("alibi", 2, 4, 2, 150), rope, causal=causal))


def test_numbers_of_t5_in_float32_are_exact():
    q, k, v = drawn(1, 2, 2, 150, 8, 3)
    for dtype in (torch.float32, torch.bfloat16):
        rule = rule_of("t5", 1, 2, 2, 150, dtype)
        assert rule.tensor is not None
        truth = expected(q, k, v, rule._replace(tensor=rule.tensor.double()))
        assert_same(ours(q, k, v, rule), truth)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("kind", "causal"), BOTH)
@pytest.mark.parametrize("seq", [64, slow(300)])
def test_errors_are_at_most_twice_those_of_the_formula(kind, causal, seq, dtype):
    # Many heads: an error of two numbers, the gradients of two decays, is small by chance.
    q, k, v = drawn(1, 16, 8, seq, 32, 16, dtype)
    rope, rule = rw.RotaryEmbedding(32), rule_of(kind, 1, 16, 8, seq, dtype)
    cotangent = drawn(1, 16, 16, seq, 32, 16, seed=7)[2]
    inputs = [q, k, v] + ([] if rule.tensor is None else [rule.tensor])

    def formula(q, k, v, *tensor):
        return expected(q, k, v, rule._replace(tensor=tensor[0] if tensor else None), rope, causal=causal)

    def call(q, k, v, *tensor):
        return ours(q, k, v, rule, rope, causal=causal, tensor=tensor[0] if tensor else None)

    truth = with_gradients(formula, [x.double() for x in inputs], cotangent)
    results = with_gradients(call, inputs, cotangent)
    plain = with_gradients(formula, inputs, cotangent)
    for name, a, b, c in zip(("o", "dq", "dk", "dv", "dg"), results, plain, truth, strict=False):
        assert a.dtype == dtype
        assert error(a, c) <= 2 * error(b, c), name


@pytest.mark.parametrize(("kind", "causal"), BOTH)
@pytest.mark.parametrize("normalize", [True, slow(False)])
@meant("cu_seqlens")
def test_gradients_of_many_chunks_are_those_of_the_double_sum(kind, causal, normalize):
    rope, rule = rw.RotaryEmbedding(8), rule_of(kind, 1, 4, 2, 300)
    inputs = [*drawn(1, 4, 2, 300, 8, 3)] + ([] if rule.tensor is None else [rule.tensor])
    cotangent = drawn(1, 4, 4, 300, 8, 3, seed=7)[2]
    for ends in (None, torch.tensor([0, 130, 130, 298])):
        options = {"causal": causal, "normalize": normalize, "cu_seqlens": ends}

        def formula(q, k, v, *tensor, options=options):
            return expected(q, k, v, rule._replace(tensor=tensor[0] if tensor else None), rope, **options)

        def call(q, k, v, *tensor, options=options):
            return ours(q, k, v, rule, rope, tensor=tensor[0] if tensor else None, **options)

        truth, results = (with_gradients(f, inputs, cotangent) for f in (formula, call))
        for a, b in zip(results, truth, strict=True):
            assert_same(a, b)


def small(kind, *, seed=0):
    """Few tokens, with a window of T5 that is shorter than them."""
    rule = rule_of(kind, 1, 2, 1, 6, buckets=(4, 3), strength=1.0, seed=seed)
    tensors = [*drawn(1, 2, 1, 6, 4, 3, seed=seed)] + ([] if rule.tensor is None else [rule.tensor])
    return [x.clone().requires_grad_() for x in tensors], rule


GRADCHECKS = [(kind, causal, packed) for kind, causal in BOTH for packed in (False, True)]
QUICK = [("per token and query head", True, False)]


@pytest.mark.parametrize(("kind", "causal", "packed"), [x if x in QUICK else slow(*x) for x in GRADCHECKS])
def test_gradcheck(kind, causal, packed):
    inputs, rule = small(kind)
    options = {"cu_seqlens": torch.tensor([0, 2, 6])} if packed else {}

    def f(q, k, v, *tensor):
        return ours(
            q, k, v, rule, rw.RotaryEmbedding(4), causal=causal, tensor=tensor[0] if tensor else None, **options
        )

    assert torch.autograd.gradcheck(f, inputs)


@pytest.mark.parametrize("normalize", [True, slow(False)])
@pytest.mark.parametrize("kind", slow_except(["t5"], KINDS))
def test_gradcheck_with_a_state(kind, normalize):
    inputs, rule = small(kind)
    rope = rw.RotaryEmbedding(4)

    def f(q, k, v, *tensor):
        tensor = tensor[0] if tensor else None
        parts = [None if tensor is None else tensor[..., part] if tensor.dim() == 3 else tensor for part in CUTS]
        state, results = None, []
        for part, g in zip(CUTS, parts, strict=True):
            one = [x[:, :, part] for x in (q, k, v)]
            options = {"state": state, "return_state": True, "normalize": normalize}
            out, state = ours(*one, rule.part(part.start, part.stop), rope, tensor=g, **options)
            results.append(out)
        assert state is not None
        return torch.cat(results, dim=2), state.above, state.below, *([] if state.near is None else state.near[:2])

    assert torch.autograd.gradcheck(f, inputs)


CUTS = (slice(0, 4), slice(4, 6))


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "causal"), [("per token", True), ("per key head", False), ("t5", True)])
def test_gradgradcheck(kind, causal):
    inputs, rule = small(kind)

    def f(q, k, v, tensor):
        return ours(q, k, v, rule, causal=causal, tensor=tensor)

    assert torch.autograd.gradgradcheck(f, inputs)


@pytest.mark.parametrize("kind", ["per token", "t5"])
def test_transforms_of_functions(kind):
    inputs, rule = small(kind)
    inputs = [x.detach() for x in inputs]
    rope = rw.RotaryEmbedding(4)

    def loss(q, k, v, tensor):
        return (ours(q, k, v, rule, rope, tensor=tensor) ** 2).sum()

    def truth(q, k, v, tensor):
        return (expected(q, k, v, rule._replace(tensor=tensor), rope) ** 2).sum()

    for arguments in (0, 1, 2, 3):
        assert_same(torch.func.grad(loss, arguments)(*inputs), torch.func.grad(truth, arguments)(*inputs))
    stacked = [torch.stack([x, 0.5 * x]) for x in inputs]
    each = torch.func.vmap(torch.func.grad(loss, 3))(*stacked)
    for i in range(2):
        assert_same(each[i], torch.func.grad(truth, 3)(*(x[i] for x in stacked)))


@pytest.mark.parametrize("g", [-1e-6, -1e-3, -0.1, -1.0, -10.0, -50.0, -float("inf")])
@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("seq", [2, 130, slow(1000)])
def test_decays_of_every_size(g, per_token, seq):
    q, k, v = drawn(1, 2, 1, seq, 8, 3)
    decay = torch.full((1, 1, seq) if per_token else (1,), g, dtype=torch.float64)
    if per_token:
        decay = decay * torch.rand(decay.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    rule = weighted_cases.Rule("per token" if per_token else "per key head", decay)
    rope = rw.RotaryEmbedding(8)
    for causal in (True,) if per_token else (True, False):
        # Without any other key, a query reads its own value: the rotations of query and key are the same.
        alone = g == -float("inf")
        truth = v.expand(-1, 2, -1, -1) if alone else expected(q, k, v, rule, rope, causal=causal)
        assert_same(ours(q, k, v, rule, rope, causal=causal), truth)


def test_sequences_that_a_decay_separates():
    q, k, v = drawn(1, 2, 1, 300, 8, 3)
    g = -0.1 * torch.rand(1, 1, 300, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    apart = [ours(q[:, :, a:b], k[:, :, a:b], v[:, :, a:b], weighted_cases.Rule("per token", g[..., a:b]))
             for a, b in ((0, 130), (130, 131), (131, 300))]  # fmt: skip
    g[..., [130, 131]] = -float("inf")
    assert_same(ours(q, k, v, weighted_cases.Rule("per token", g)), torch.cat(apart, dim=2))


@pytest.mark.parametrize("kind", ["per key head", "per query head", "per token", "alibi", "t5"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("seq", [5, 300])
def test_weights_that_underflow_are_zero_and_not_nan(kind, causal, seq):
    if kind == "per token" and not causal:
        causal = True
    q, k, v = (x.requires_grad_() for x in drawn(1, 2, 1, seq, 8, 3, torch.float32))
    with torch.no_grad():
        k[:, :, 1:] = -1.0  # no features, except those of the first key
    rule, options = rule_of(kind, 1, 2, 1, seq, torch.float32), {"feature_map": "relu", "causal": causal}
    if rule.tensor is not None:
        rule = rule._replace(tensor=torch.full_like(rule.tensor, -50.0).requires_grad_())
    if kind == "t5" and rule.tensor is not None:
        with torch.no_grad():
            rule.tensor[0] = 50.0
    ids = torch.arange(seq) * (10_000 if kind == "alibi" else 1)
    inputs = [x for x in (q, k, v, rule.tensor) if x is not None]
    more = {"positions": ids} if kind == "alibi" else {}
    for normalize in (True, False):
        out = ours(q, k, v, rule, tensor=rule.tensor, normalize=normalize, **options, **more)
        gradients = torch.autograd.grad(out.sum(), inputs)
        assert all(x.isfinite().all() for x in (out, *gradients))
        assert out[:, :, 0].all()
        if normalize or kind != "t5":
            # exp(-50) is a number, which T5's exp(50) makes too small in a quotient.
            assert not out[:, :, 4:].any()
            assert not gradients[0][:, :, 4:].any()


def test_weights_that_vanish_beside_large_ones_do_not_matter():
    q, k, v = drawn(1, 2, 1, 300, 8, 3, torch.float32)
    g = torch.full((1,), -50.0)
    out = rw.linear_attention(q, k, v, decay=g)
    torch.testing.assert_close(out, v.expand(-1, 2, -1, -1), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("heads", [2, 5])
def test_retention_by_its_formulas(heads):
    """RetNet, 2307.08621, eq. 5 (parallel) and 6 (recurrent), with gamma of eq. 8 and without its xPos scale."""
    seq, dim = 150, 8
    q, k, v = drawn(2, heads, heads, seq, dim, 6)
    gamma = 1 - 2.0 ** (-5 - torch.arange(heads, dtype=torch.float64))
    rope = rw.RotaryEmbedding(dim)
    angles = torch.arange(seq, dtype=torch.float64)[:, None] * theta(dim)
    phase = torch.polar(torch.ones_like(angles), angles)
    a, b = (torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2))) * phase).flatten(-2) for x in (q, k))
    distance = torch.arange(seq)[:, None] - torch.arange(seq)
    mask = torch.where(distance >= 0, gamma[:, None, None] ** distance, 0.0)
    parallel = ((a @ b.transpose(-1, -2)) * mask) @ v
    state, recurrent = torch.zeros(2, heads, dim, 6, dtype=torch.float64), []
    for n in range(seq):
        state = gamma[:, None, None] * state + b[:, :, n, :, None] * v[:, :, n, None, :]
        recurrent.append((a[:, :, n, None, :] @ state).squeeze(-2))
    assert_same(torch.stack(recurrent, dim=2), parallel, 1e-12)
    out, after = rw.linear_attention(
        q, k, v, rope=rope, feature_map="identity", normalize=False, decay=gamma.log(), return_state=True
    )
    assert_same(out, parallel)
    assert_same(after.above, state)
    scaled = rw.linear_attention(
        q, k, v, rope=rope, feature_map="identity", normalize=False, scale=dim**-0.5, decay=gamma.log()
    )
    assert_same(scaled, parallel * dim**-0.5)


@pytest.mark.parametrize("layer_index", [0, 1, 3])
@pytest.mark.parametrize("seq", [1, 16, 50])
def test_lightning_attention_of_transformers(layer_index, seq):
    from transformers.models.minimax.configuration_minimax import MiniMaxConfig
    from transformers.models.minimax.modeling_minimax import MiniMaxLightningAttention

    torch.manual_seed(0)
    config = MiniMaxConfig(
        hidden_size=32, num_attention_heads=4, head_dim=8, num_hidden_layers=4, block_size=16,
        layer_types=["linear_attention"] * 4,
    )  # fmt: skip
    layer = MiniMaxLightningAttention(config, layer_index).double()
    # The buffers are computed in float32, and rounded.
    slopes = 2.0 ** (-2.0 * torch.arange(1, 5, dtype=torch.float64)) * (1 - layer_index / (3 + 1e-5) + 1e-5)
    torch.testing.assert_close(layer.slope_rate.flatten(), slopes, rtol=1e-6, atol=0)
    exact = layer.decay_factors(slopes[:, None, None])
    for name, x in zip(
        ("slope_rate", "query_decay", "key_decay", "diagonal_decay"), (slopes[:, None, None], *exact), strict=True
    ):
        setattr(layer, name, torch.nn.Buffer(x))
    before_norm = []
    layer.norm.register_forward_pre_hook(lambda module, inputs: before_norm.append(inputs[0]))
    x = torch.randn(2, seq, 32, dtype=torch.float64)
    out, end = layer(x, None, None)
    heads = torch.nn.functional.silu(layer.qkv_proj(x)).unflatten(-1, (4, 24)).transpose(1, 2)
    q, k, v = heads.split(8, dim=-1)
    here, state = rw.linear_attention(
        q, k, v, feature_map="identity", normalize=False, decay=-slopes, return_state=True
    )
    assert_same(here.transpose(1, 2).flatten(2), before_norm[0])
    # The second result is the state after the last block, not a list of weights.
    assert_same(state.above, end)
    gated = torch.sigmoid(layer.output_gate(x)) * layer.norm(here.transpose(1, 2).flatten(2))
    assert_same(layer.out_proj(gated), out)


def inclusive(real, decay, count, size):
    """Decays of n .. m-1 instead of n+1 .. m."""
    step = decay.unflatten(-1, (count, size)).transpose(2, 3) if decay.shape[-1] > 1 else decay.unsqueeze(2)
    return real(decay, count, size) - step


def shifted(real, band, *arguments, **options):
    return real(band.roll(1, dims=-1), *arguments, **options)


def without_far_factor(real, sums, factors):
    return real(sums, None)


def not_strict(real, *arguments, strict, **options):
    return real(*arguments, strict=False, **options)


def only_flipped(real, weighting):
    return weighting._replace(**{name: None if x is None else x.flip(-1) for name, x in
                                 (("decay", weighting.decay), ("band", weighting.band))})  # fmt: skip


def not_flipped(real, weighting):
    return real(weighting)._replace(band=weighting.band)


def rounded(real, *arguments, **options):
    return real(*arguments, **options).bfloat16().double()


def hidden_do_not_decay(real, decay, tokens):
    factors = decay if tokens.key_mask is None else torch.where(tokens.key_mask[:, None], decay, 0.0)
    return real(factors, tokens)


MUTANTS = {
    "decays n .. m-1": (linear_chunks, "running", inclusive, {"kind": "per token"}),
    "the far sums do not decay": (linear_chunks, "Far", without_far_factor, {"kind": "per key head"}),
    "the band is shifted by one": (linear_chunks, "band_weights", shifted, {"kind": "t5"}),
    "the far keys have no bias": (linear_chunks, "Far", without_far_factor, {"kind": "t5"}),
    "the diagonal twice": (linear_torch, "attend_parts", not_strict, {"kind": "per key head", "causal": False}),
    "the diagonal of a band twice": (linear_torch, "attend_parts", not_strict, {"kind": "t5", "causal": False}),
    "the decay of positions is only reversed": (
        linear_torch, "reversed_weighting", only_flipped, {"kind": "alibi", "causal": False, "positions": True},
    ),
    "the band of later keys is that of earlier ones": (
        linear_torch, "reversed_weighting", not_flipped, {"kind": "t5", "causal": False},
    ),
    "weights are rounded": (linear_chunks, "decay_weights", rounded, {"kind": "alibi"}),
    "hidden keys do not decay": (
        linear_weighting, "_until_last_visible", hidden_do_not_decay,
        {"kind": "per query head", "masked": True},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTANTS)
def test_wrong_versions_do_not_pass(monkeypatch, name):
    module, attribute, wrong, case = MUTANTS[name]
    case = {
        "dim": 16, "seq": 300, "pairing": "half", "feature_map": "elu", "normalize": True, "causal": True,
        "packed": False, "grouped": True, "masked": False, "positions": False,
    } | case  # fmt: skip
    tensors, rule, rope, options = call_of(case)
    if case["positions"]:
        options["positions"] = (torch.arange(300) ** 2) // 50
    truth = expected(*tensors, rule, rope, **options)
    assert_same(ours(*tensors, rule, rope, **options), truth)
    monkeypatch.setattr(module, attribute, functools.partial(wrong, getattr(module, attribute)))
    with pytest.raises(AssertionError):
        assert_same(ours(*tensors, rule, rope, **options), truth)


# Each factor, causal or not, packed or not.
COMPILED = [("per token", True, False), ("t5", False, False), ("alibi", False, True), ("t5", True, True)]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "causal", "packed"), COMPILED)
def test_one_graph_for_every_length(kind, causal, packed):
    torch.compiler.reset()
    rope, encoding = rw.RotaryEmbedding(8), rule_of(kind, 1, 4, 2, 1, buckets=(8, 20)).options(4, causal=causal)

    def f(q, k, v, decay, ends):
        bias = encoding.get("bias")
        return rw.linear_attention(q, k, v, rope=rope, causal=causal, decay=decay, bias=bias, cu_seqlens=ends)

    compiled = torch.compile(f, fullgraph=True, backend="aot_eager", dynamic=True)
    for seq in (300, 60):
        rule = rule_of(kind, 1, 4, 2, seq, buckets=(8, 20))
        ends = torch.tensor([0, seq // 3, seq]) if packed else None
        inputs = [*drawn(1, 4, 2, seq, 8, 3)] + ([rule.tensor] if kind in DECAYS else [])
        cotangent = drawn(1, 4, 4, seq, 8, 3, seed=7)[2]

        def run(call, q, k, v, decay=None, ends=ends):
            return call(q, k, v, decay, ends)

        here, there = (with_gradients(functools.partial(run, call), inputs, cotangent) for call in (compiled, f))
        for a, b in zip(here, there, strict=True):
            assert_same(a, b)
        assert_same(here[0], expected(*inputs[:3], rule, rope, causal=causal, cu_seqlens=ends))
