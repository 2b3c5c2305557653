"""Masks and biases as tensors and as functions of FlexAttention; which attention is asked, with what; compilers."""

import itertools

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch.nn import functional

from meant import meant
from nn.test_attention import CLOSE, DIM, HEADS, KINDS, WIDTH, encoding_for, layer
from ropewalk.nn.attention import scores
from ropewalk.nn.attention.cache import KVCache
from ropewalk.nn.attention.layer import Attention
from ropewalk.nn.attention.scores import ScoreBias, attend
from ropewalk.nn.attention.visibility import Visibility, documents_of
from ropewalk.nn.encodings.base import Encoding
from ropewalk.nn.encodings.bias import AlibiBias, T5Bias
from slow import slow
from strategies import vector


def flex_in_eager_mode(test):
    """torch says that this is slow, and warns of what it does itself when it traces."""
    for said in ("flex_attention called without torch.compile:UserWarning", ".*not be instantiated:DeprecationWarning"):
        test = pytest.mark.filterwarnings(f"ignore:{said}")(test)
    return test


def as_on_a_gpu(monkeypatch):
    monkeypatch.setattr(scores, "FLEX_DEVICES", ("cpu",))
    monkeypatch.setattr(scores, "FLEX_DTYPES", (torch.float64,))


def visibilities(batch, queries, keys):
    starts = torch.tensor([keys - queries, 2])[:batch]
    hidden = torch.rand(batch, keys, generator=torch.Generator().manual_seed(1)) > 0.5
    hidden[-1] = False
    yield from (Visibility(), Visibility(True, starts), Visibility(True, starts[0]), Visibility(False, None, hidden))
    yield Visibility(True, starts, hidden)
    if queries == keys:
        documents = documents_of(torch.tensor([0, 5, 12]), keys)
        yield from (Visibility(True), Visibility(True, None, hidden), Visibility(False, None, None, documents))
        yield Visibility(True, None, hidden, documents)


@pytest.mark.slow
@flex_in_eager_mode
@pytest.mark.parametrize("kind", ["none", "alibi", "t5"])
def test_flex_attention_and_the_mask_agree(kind):
    made = encoding_for(kind)
    made = made if made is None else made.double()
    for queries, keys in ((18, 18), (5, 18)):
        q, k, v = vector(0, 2, 4, queries, 16), vector(1, 2, 2, keys, 16), vector(2, 2, 2, keys, 16)
        shared = torch.arange(keys - queries, keys), torch.arange(keys)
        rows = torch.stack([shared[0], shared[0] * 2]), torch.stack([shared[1], shared[1] + 3])
        for visibility, places in zip(
            visibilities(2, queries, keys), itertools.cycle((rows, shared, (shared[0], rows[1]), rows))
        ):
            score_bias = None if made is None else ScoreBias(made, *places)
            with torch.no_grad():
                y, z = (
                    attend(q, k, v, visibility, scale=0.3, score_bias=score_bias, flex=flex) for flex in (True, False)
                )
            assert torch.allclose(y, z, **CLOSE), (visibility, places)
            if visibility.key_mask is not None:
                assert not y[1].any()


@flex_in_eager_mode
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["none", "t5"])
def test_whole_layers_by_flex_attention(kind, monkeypatch):
    attention = Attention(64, HEADS, num_kv_heads=2, encoding=encoding_for(kind)).double()
    x, mask = vector(0, 2, 20, 64), torch.arange(20) < torch.tensor([[20], [7]])
    ends = torch.tensor([0, 4, 20])
    calls = [({}, x), ({"key_mask": mask}, x), ({"cu_seqlens": ends}, x[:1])]
    # Under a compiler cu_seqlens cannot be looked at.
    monkeypatch.setattr(scores, "can_read_values", lambda ids: False)
    with torch.inference_mode():
        expected = [attention(x, **given) for given, x in calls]
        as_on_a_gpu(monkeypatch)
        used = []
        real = scores._by_flex
        monkeypatch.setattr(scores, "_by_flex", lambda *given: used.append(given) or real(*given))
        found = [attention(x, **given) for given, x in calls]
        assert len(used) == (2 if kind == "none" else 3)  # plain causal attention needs no mask
        monkeypatch.setattr(scores, "_by_flex", real)
        for y, z in zip(found, expected, strict=True):
            assert torch.allclose(y, z, **CLOSE)
        torch.compiler.reset()
        compiled = torch.compile(attention, fullgraph=True, backend="eager")
        for (given, x), z in zip(calls, expected, strict=True):
            assert torch.allclose(compiled(x, **given), z, **CLOSE)


@flex_in_eager_mode
# Of torch, which looks at tensors that it traces.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_compiled_gradients_of_t5s_numbers_by_flex_attention(monkeypatch):
    # torch refuses derivatives on a CPU, though what runs here, without kernels, has them.
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *given: None)
    t5 = T5Bias(HEADS, causal=True)
    torch.nn.init.normal_(t5.weight, generator=torch.Generator().manual_seed(7))
    attention = Attention(64, HEADS, encoding=t5).double()
    # More queries than there are copies of the numbers.
    x, learned = vector(0, 1, 150, 64), [t5.weight]
    y = attention(x)
    cotangent = vector(1, *y.shape)
    expected = torch.autograd.grad(y, learned, cotangent)
    as_on_a_gpu(monkeypatch)
    torch.compiler.reset()
    compiled = torch.compile(attention, fullgraph=True, backend="eager")
    for call in (attention, compiled):
        for a, b in zip(torch.autograd.grad(call(x), learned, cotangent), expected, strict=True):
            assert torch.allclose(a, b, **CLOSE)


def test_flex_attention_is_chosen_where_it_serves(monkeypatch):
    q = vector(0, 2, 4, 17, 16)
    assert not scores._supports_flex(q, q)
    assert scores.FLEX_DEVICES in ((), ("cuda",))
    assert torch.float64 not in scores.FLEX_DTYPES
    as_on_a_gpu(monkeypatch)
    assert scores._supports_flex(q, q)
    for other in (q[:, :, :16], q[..., :15], q.float(), q[:0]):
        assert not scores._supports_flex(other, other)
    assert not scores._supports_flex(q, q[:, :, :0])
    assert not torch.func.vmap(lambda x: torch.tensor(scores._supports_flex(x[None], x[None])))(q).any()
    # With dropout, or for what kernels know without a mask, it is not asked.
    monkeypatch.setattr(scores, "_by_flex", lambda *given: pytest.fail("FlexAttention was asked"))
    for visibility, dropout in ((Visibility(), 0.0), (Visibility(True), 0.0), (Visibility(True, torch.tensor(0)), 0.5)):
        attend(q, q, q, visibility, scale=1.0, dropout=dropout)


class Other:
    """A tensor on another device, as far as the choice of a kernel looks at it."""

    def __init__(self, device, dtype):
        self.device, self.dtype = torch.device(device), dtype


def test_heads_are_grouped_where_a_kernel_takes_them_so():
    expected = {"cpu": [True] * 4, "cuda": [True, False, False, False], "mps": [False] * 4}
    for device, said in expected.items():
        cases = itertools.product((torch.bfloat16, torch.float32), (None, torch.ones(1)))
        assert [scores._has_grouped_kernel(Other(device, dtype), mask) for dtype, mask in cases] == said


class OnlyBias(Encoding):
    """An encoding of a user's, without a score_mod."""

    def bias(self, q_positions, k_positions):
        assert q_positions is not None
        assert k_positions is not None
        return (k_positions - q_positions[:, None]).double()[None]


def test_a_bias_without_score_mod_is_a_mask_on_every_device():
    q = vector(0, 1, 2, 4, 16)
    score_bias = ScoreBias(OnlyBias(), torch.arange(4), torch.arange(4))
    y, z = (attend(q, q, q, Visibility(True), scale=1.0, score_bias=score_bias, flex=flex) for flex in (True, False))
    assert torch.equal(y, z)
    nothing = ScoreBias(Encoding(), torch.arange(4), torch.arange(4))
    assert torch.equal(
        attend(q, q, q, Visibility(True), scale=1.0, score_bias=nothing), attend(q, q, q, Visibility(True), scale=1.0)
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_bias_is_not_rounded_with_the_queries(dtype):
    # Slope 1/256: biases of -15.625 and -15.59375, which bfloat16 cannot tell apart.
    score_bias = ScoreBias(AlibiBias(1), torch.tensor([4000]), torch.tensor([0, 8]))
    q, k, v = torch.zeros(1, 1, 1, 4), torch.zeros(1, 1, 2, 4), torch.tensor([0.0, 1.0]).view(1, 1, 2, 1)
    y = attend(q.to(dtype), k.to(dtype), v.to(dtype), Visibility(), scale=1.0, score_bias=score_bias)
    assert abs(float(y) - float(torch.sigmoid(torch.tensor(8 / 256)))) <= 2**-9


@pytest.fixture
def sdpa_calls(monkeypatch):
    calls, real = [], functional.scaled_dot_product_attention

    def spy(*tensors, **options):
        calls.append((*tensors, options))
        return real(*tensors, **options)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", spy)
    return calls


def test_no_mask_is_made_where_none_is_needed(sdpa_calls):
    for kind in ("none", "rope"):
        attention, x = layer(kind), vector(0, 2, 9, DIM)
        attention(x)
        assert sdpa_calls[-1][-1] | {"scale": 0} == {
            "attn_mask": None,
            "dropout_p": 0.0,
            "is_causal": True,
            "scale": 0,
            "enable_gqa": True,
        }
        cache = KVCache(2, 2, 32, WIDTH, dtype=torch.float64)
        with torch.no_grad():
            attention(x, cache=cache)
            assert sdpa_calls[-1][-1]["is_causal"]
            attention(x[:, :1], cache=cache)
        q, k, _, options = sdpa_calls[-1]
        # Nothing is repeated: two query heads are two queries to their key head.
        assert options["attn_mask"] is None
        assert (q.shape, k.shape) == ((2, 2, 2, WIDTH), (2, 2, 10, WIDTH))


@pytest.mark.parametrize("kind", KINDS)
@meant("cu_seqlens")
@meant("key_mask")
def test_no_kernel_is_given_a_query_that_sees_nothing(kind, sdpa_calls):
    # What kernels make of it differs, and some make NaN.
    hidden = torch.tensor([[False] * 5, [False, False, True, True, True]])
    layer(kind)(vector(0, 2, 5, DIM), key_mask=hidden)
    mask = sdpa_calls[-1][-1]["attn_mask"]
    seen = mask if mask.dtype == torch.bool else mask > float("-inf")
    assert seen.any(-1).all()


@pytest.mark.parametrize("kind", KINDS)
def test_repeated_heads_give_what_grouped_ones_do(kind, monkeypatch):
    attention, x = layer(kind), vector(0, 2, 9, DIM)
    expected = attention(x)
    monkeypatch.setattr(scores, "_has_grouped_kernel", lambda q, mask: False)
    assert torch.allclose(attention(x), expected, **CLOSE)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "backend"),
    [
        *((kind, "eager") for kind in KINDS),
        ("rope", "aot_eager"),
        ("xpos", "eager"),
        ("t5", "aot_eager"),
    ],
)
@meant("cu_seqlens")
@meant("key_mask")
def test_compiled(kind, backend):
    torch.compiler.reset()
    attention, mask = layer(kind), torch.arange(9) < torch.tensor([[9], [4]])
    compiled = torch.compile(attention, fullgraph=True, backend=backend)
    calls = [{}, {"positions": torch.arange(9) + 5}, {"key_mask": mask}, {"cu_seqlens": torch.tensor([0, 4, 8])}]
    for options in calls:
        x = vector(0, 1 if "cu_seqlens" in options else 2, 9, DIM).requires_grad_()
        y, z = attention(x, **options), compiled(x, **options)
        assert torch.allclose(y, z, **CLOSE)
        (a,), (b,) = (torch.autograd.grad(out.square().sum(), x) for out in (y, z))
        assert torch.allclose(a, b, **CLOSE)


@pytest.mark.parametrize("kind", ["t5", slow("rope")])
def test_one_dynamic_graph_for_every_length_but_1(kind):
    torch.compiler.reset()
    attention, graphs = layer(kind), CompileCounter()
    compiled = torch.compile(attention, fullgraph=True, backend=graphs, dynamic=True)
    for seq in (7, 2, 30):
        x = vector(seq, 2, seq, DIM)
        assert torch.allclose(compiled(x), attention(x), **CLOSE)
    assert graphs.frame_count == 1
    assert torch.allclose(compiled(x[:, :1]), attention(x[:, :1]), **CLOSE)
