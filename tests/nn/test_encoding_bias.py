"""T5's buckets and ALiBi: bias and score_mod against the reference, and inside FlexAttention."""

import inspect
import itertools

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import flex_attention

from ropewalk import RopewalkError
from ropewalk.nn.encodings.bias import FARTHEST, AlibiBias, T5Bias
from ropewalk.reference import alibi_bias, alibi_slopes, softmax_attention, t5_bias, t5_bucket
from slow import slow
from strategies import seeds, vector

places = st.lists(st.integers(-(2**40), 2**40), min_size=1, max_size=6).map(torch.tensor)
near = st.lists(st.integers(-300, 300), min_size=1, max_size=6).map(torch.tensor)


def t5(seed: int = 0, heads: int = 3, **options) -> T5Bias:
    made = T5Bias(heads, **options).double()
    made.weight.data = vector(seed, *made.weight.shape)
    return made


@given(seeds, near | places, near | places, st.booleans(), st.integers(4, 40), st.integers(21, 300), st.integers(1, 5))
@example(0, torch.tensor([0, 3]), torch.arange(-4, 5), True, 4, 3, 1)  # the last bucket begins at max_distance
def test_t5_is_the_references(seed, q, k, causal, num_buckets, max_distance, heads):
    made = t5(seed, heads, causal=causal, num_buckets=num_buckets, max_distance=max_distance)
    truth = t5_bias(q, k, made.weight, causal=causal, max_distance=max_distance)
    assert torch.equal(made.bias(q, k), truth)


@pytest.mark.parametrize("causal", [False, True])
def test_t5_buckets_at_every_distance(causal):
    made = T5Bias(1, causal=causal)
    made.weight.data = torch.arange(32.0)[:, None]
    k = torch.arange(-400, 401)
    assert made.bias(torch.tensor([0]), k)[0, 0].long().equal(t5_bucket(k, causal=causal))


@given(near | places, near | places, st.integers(1, 33))
def test_alibi_is_the_references(q, k, heads):
    made, truth = AlibiBias(heads), alibi_bias(q, k, heads)
    single = made.bias(q, k)
    assert single.dtype == torch.float32
    # The slope, the distance and their product are rounded.
    assert torch.allclose(single.double(), truth, rtol=2.0**-22, atol=0)
    assert torch.allclose(made.double().bias(q, k), truth, rtol=1e-15, atol=1e-10)


def test_alibi_between_whole_positions():
    q, k = torch.tensor([0.5, 2.25]), torch.tensor([1.0, -3.75], dtype=torch.float64)
    assert torch.allclose(AlibiBias(5).double().bias(q, k), alibi_bias(q, k, 5), rtol=0, atol=1e-15)


KINDS = {"t5": t5(1), "t5 causal": t5(2, causal=True, num_buckets=8, max_distance=10), "alibi": AlibiBias(3).double()}
Q2, K2 = torch.tensor([[0, 7, 90], [5, 4, 3]]), torch.tensor([[1, 2, 70, 8], [0, 50, 4, 5]])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("q", "k"), list(itertools.product([Q2[0], Q2[:1], Q2], [K2[0], K2[:1], K2])))
def test_one_row_of_positions_per_sequence(kind, q, k):
    made = KINDS[kind]
    added = made.bias(q, k)
    if q.dim() == k.dim() == 1:
        assert added.shape == (3, 3, 4)
        added = added[None]
    rows = max([1, *(ids.shape[0] for ids in (q, k) if ids.dim() == 2)])
    assert added.shape == (rows, 3, 3, 4)
    for b in range(rows):
        alone = [ids if ids.dim() == 1 else ids[min(b, ids.shape[0] - 1)] for ids in (q, k)]
        assert torch.equal(added[b], made.bias(*alone))
    # score_mod adds the same, to the bit.
    score = torch.tensor(0.5, dtype=torch.float64)
    for modify in (made.score_mod(q, k), made.score_mod_once(q, k)):
        for b, h, i, j in itertools.product(range(rows), range(3), range(3), range(4)):
            index = [torch.tensor(n) for n in (b, h, i, j)]
            assert torch.equal(modify(score, *index), score + added[b, h, i, j])
            assert modify(score.float(), *index).dtype == torch.float32


def reference_bias(encoding, q, k):
    """The reference's bias, of positions [seq] or [batch, seq]."""
    if q.dim() == 2:
        return torch.stack([reference_bias(encoding, *rows) for rows in zip(q, k, strict=True)])
    if isinstance(encoding, AlibiBias):
        return alibi_bias(q, k, encoding.num_heads)
    return t5_bias(q, k, encoding.weight, causal=encoding.causal, max_distance=encoding.max_distance)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("batched", [False, slow(True)])
@pytest.mark.parametrize("hook", ["score_mod", "score_mod_once"])
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
# Of torch's compiler, which asks what T5's numbers by distance are, a result and no parameter.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_inside_flex_attention(kind, batched, hook):
    made = KINDS[kind]
    q, k, v = vector(0, 2, 3, 3, 8), vector(1, 2, 3, 4, 8), vector(2, 2, 3, 4, 8)
    places = (Q2, K2) if batched else (Q2[0], K2[0])
    scale = made.scale or 8**-0.5
    out = flex_attention(q, k, v, score_mod=getattr(made, hook)(*places), scale=scale)
    truth = softmax_attention(q, k, v, bias=reference_bias(made, *places), scale=scale)
    assert torch.allclose(out, truth, rtol=0, atol=1e-12)
    parameters = list(made.parameters())
    if parameters:
        gradients = [torch.autograd.grad(y.square().sum(), parameters)[0] for y in (out, truth)]
        assert torch.allclose(*gradients, rtol=0, atol=1e-10)


def test_a_score_mod_follows_the_numbers_that_are_learned():
    t5, index = T5Bias(2, causal=True), [torch.tensor(n) for n in (0, 1, 3, 0)]
    with torch.no_grad():
        modify = t5.score_mod(torch.arange(4), torch.arange(4))
    for step in range(1, 3):
        with torch.no_grad():
            t5.weight.add_(1)
        added = modify(torch.zeros(()), *index)
        assert added.item() == step
        (gradient,) = torch.autograd.grad(added, t5.weight)
        assert gradient[3, 1] == 1
        assert gradient.sum() == 1


def test_a_great_max_distance_is_looked_up_by_bucket():
    t5, places = T5Bias(2, max_distance=1 << 17), torch.arange(4)
    held = inspect.getclosurevars(t5.score_mod_once(places, places)).nonlocals.values()
    kept = [x.numel() for x in held if isinstance(x, torch.Tensor)]
    assert max(kept) == (1 << 18) + 1  # the buckets, which are kept anyhow


@pytest.mark.parametrize("kind", KINDS)
@given(near, near, st.integers(-(2**50), 2**50))
def test_a_shift_changes_no_bit(kind, q, k, shift):
    assert torch.equal(KINDS[kind].bias(q, k), KINDS[kind].bias(q + shift, k + shift))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int32, torch.uint16, torch.uint32, torch.uint64])
def test_narrow_and_unsigned_ids_do_not_wrap(kind, dtype):
    q, k = torch.tensor([100, 3]), torch.tensor([0, 120, 7])
    assert torch.equal(KINDS[kind].bias(q.to(dtype), k.to(dtype)), KINDS[kind].bias(q, k))


def test_the_dtype_of_the_bias():
    ids = torch.arange(3)
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        assert T5Bias(2).to(dtype).bias(ids, ids).dtype == dtype
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        assert AlibiBias(2).to(dtype).bias(ids, ids).dtype == wide
        assert AlibiBias(2).double().to(dtype).bias(ids, ids).dtype == wide
    torch.set_default_dtype(torch.float64)
    try:
        assert AlibiBias(2).bias(ids, ids).dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


def test_slopes_survive_a_cast():
    # 2^-0.5 has no short form: in bfloat16 it would be off by 0.1 %.
    cast = AlibiBias(16).to(torch.bfloat16).double()
    assert torch.equal(-cast.bias(torch.tensor([1]), torch.tensor([0])).flatten(), alibi_slopes(16))


def test_no_keys_and_no_queries():
    none, some = torch.empty(0, dtype=torch.int64), torch.arange(3)
    for made in KINDS.values():
        assert made.bias(none, some).shape == (3, 0, 3)
        assert made.bias(some, none).shape == (3, 3, 0)


BAD = {
    "no positions": (None, torch.arange(3), "q_positions", "expected: a tensor [seq] or [batch, seq]"),
    "a list": (torch.arange(3), [0, 1], "k_positions", "wrap them"),
    "bool": (torch.ones(3, dtype=torch.bool), torch.arange(3), "q_positions", "torch.bool"),
    "half precision": (torch.arange(3), torch.arange(3).bfloat16(), "k_positions", "do not represent every integer"),
    "three dimensions": (torch.zeros(1, 1, 3).long(), torch.arange(3), "q_positions", "[seq] or [batch, seq]"),
    "two batches": (torch.zeros(2, 3).long(), torch.zeros(3, 3).long(), "k_positions", "with the same batch"),
    "two devices": (torch.arange(3), torch.arange(3, device="meta"), "k_positions", "on meta"),
    "NaN": (torch.tensor([float("nan")]), torch.arange(3), "q_positions", "or"),
}


@pytest.mark.parametrize("case", BAD)
@pytest.mark.parametrize("kind", KINDS)
def test_bad_positions(case, kind):
    q, k, named, said = BAD[case]
    made = KINDS[kind]
    for hook in ("bias", "score_mod"):
        with pytest.raises(RopewalkError) as error:
            getattr(made, hook)(q, k)
        assert f"{type(made).__name__}.{hook}" in error.value.asked
        assert named in error.value.asked
        assert said in str(error.value)
        assert "rope" not in error.value.asked


def test_t5_has_no_bucket_between_whole_positions():
    with pytest.raises(RopewalkError, match="of whole numbers\n"):
        t5().bias(torch.tensor([0.5]), torch.arange(3))
    with pytest.raises(RopewalkError, match="parameters on meta"):
        T5Bias(2).to("meta").bias(torch.arange(3), torch.arange(3))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"num_heads": 0}, r"T5Bias\(num_heads\)"),
        ({"causal": 1}, "True or False"),
        ({"num_buckets": 3}, "at least 4"),
        ({"num_buckets": 8.0}, "num_buckets"),
        ({"max_distance": 8}, "at least 9"),
        ({"max_distance": FARTHEST + 1}, "at most 1048576"),
        ({"max_distance": "128"}, "max_distance"),
    ],
)
def test_bad_options(options, said, as_a_user):
    with pytest.raises(RopewalkError, match=said):
        T5Bias(**{"num_heads": 2} | options)
    with pytest.raises(RopewalkError, match="AlibiBias"):
        AlibiBias(2.0)
