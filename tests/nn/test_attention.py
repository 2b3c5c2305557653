"""Attention against the reference: every encoding, grouped heads, positions, padding, packed sequences, gradients."""

import copy
import functools
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from formulas import rotate_by_spec
from meant import meant
from ropewalk import Axes, RopeSpec, RotaryEmbedding, XPos, Yarn
from ropewalk.nn.attention import scores
from ropewalk.nn.attention.cache import KVCache
from ropewalk.nn.attention.layer import Attention
from ropewalk.nn.encodings.base import Encoding
from ropewalk.nn.encodings.bias import AlibiBias, T5Bias
from ropewalk.nn.encodings.by_name import encoding
from ropewalk.nn.encodings.rotary import RotaryEncoding
from ropewalk.reference import Projections, alibi_bias, multi_head_attention, t5_bias
from strategies import seeds, vector

KINDS = ["none", "rope", "alibi", "t5"]
CLOSE = {"rtol": 0, "atol": 1e-10}
DIM, HEADS, WIDTH = 24, 4, 6


def encoding_for(kind, *, causal=True):
    if kind == "t5":
        t5 = T5Bias(HEADS, causal=causal, max_distance=20)
        torch.nn.init.normal_(t5.weight, generator=torch.Generator().manual_seed(7))
        return t5
    rope = {"rope": RopeSpec(WIDTH, pairing="half"), "xpos": RopeSpec(WIDTH, xpos=XPos(4096))}
    made = {"none": None, "alibi": AlibiBias(HEADS)}
    return made[kind] if kind in made else RotaryEncoding(RotaryEmbedding(rope[kind]))


def layer(kind, **options):
    """A layer in float64, with weights from a fixed seed."""
    torch.manual_seed(3)
    given = {"num_kv_heads": 2, "causal": True} | options
    made = encoding_for(kind, causal=given["causal"])
    return Attention(DIM, HEADS, encoding=made, **given).double().eval()


def rotated_by_formula(encoding, q, k, ids):
    """q and k rotated as the spec of an encoding describes, in their dtype."""
    if not isinstance(encoding, RotaryEncoding):
        return q, k
    return tuple(rotate_by_spec(x, encoding.rope.spec, ids, role=role) for x, role in ((q, "q"), (k, "k")))


def reference_bias(encoding, ids):
    """The bias of an encoding between positions `ids`, from the reference."""
    if isinstance(encoding, AlibiBias):
        return alibi_bias(ids, ids, encoding.num_heads)
    return t5_bias(ids, ids, encoding.weight, causal=encoding.causal, max_distance=encoding.max_distance)


def truth(attention, x, positions=None):
    """What the reference computes with the weights of a layer."""
    encoding = attention.encoding

    def rotated(q, k, ids):
        # The reference divides by sqrt(head_dim). Any other scale is applied to the queries.
        return rotated_by_formula(encoding, q * attention.scale * attention.head_dim**0.5, k, ids)

    def added(ids, _):
        return (
            reference_bias(encoding, ids)
            if ids.dim() == 1
            else torch.stack([reference_bias(encoding, row) for row in ids])
        )

    return multi_head_attention(
        x,
        Projections(*(getattr(attention, f"{name}_proj").weight for name in "qkvo")),
        num_heads=attention.num_heads,
        num_kv_heads=attention.num_kv_heads,
        positions=positions,
        causal=attention.causal,
        rotate=rotated,
        bias=added if isinstance(encoding, AlibiBias | T5Bias) else None,
    )


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_parity(kind, kv_heads, causal):
    attention = layer(kind, num_kv_heads=kv_heads, causal=causal)
    with torch.no_grad():
        for seq in (1, 2, 17, 64):
            x = vector(seq, 3, seq, DIM)
            rows = torch.stack([torch.arange(seq) * 2, torch.arange(seq).flip(0), torch.arange(seq) - 5])
            for positions in (None, torch.arange(seq) + 9, rows, rows[:1]):
                y, expected = attention(x, positions), truth(attention, x, positions)
                assert torch.allclose(y, expected, **CLOSE), (seq, positions)


def test_xpos_and_positions_that_are_no_whole_numbers():
    attention, x = layer("xpos"), vector(0, 2, 9, DIM)
    halves = torch.arange(9) / 2
    for positions in (None, halves):
        ids = torch.arange(9) if positions is None else positions
        assert torch.allclose(attention(x, positions), truth(attention, x, ids), **CLOSE)
    alibi = layer("alibi")
    assert torch.allclose(alibi(x, halves), truth(alibi, x, halves), **CLOSE)


def test_a_rope_alone_is_taken_as_an_encoding_and_its_softmax_scale_counts():
    spec = RopeSpec(WIDTH, Yarn(1e4, 40, 4096, mscale=1, mscale_all_dim=1, policy="deepseek"))
    attention = Attention(DIM, HEADS, encoding=RotaryEmbedding(spec)).double()
    assert isinstance(attention.encoding, RotaryEncoding)
    assert attention.scale == spec.softmax_scale * WIDTH**-0.5 != WIDTH**-0.5
    x = vector(0, 2, 9, DIM)
    assert spec.amplitude() == 1.0
    assert torch.allclose(attention(x), truth(attention, x), **CLOSE)
    assert layer("t5").scale == 1.0
    assert layer("rope").scale == layer("none").scale == WIDTH**-0.5


def test_several_axes():
    spec = RopeSpec(WIDTH, axes=Axes.chunked([1, 1, 1]))
    attention = Attention(DIM, HEADS, encoding=RotaryEmbedding(spec), causal=False).double()
    x, ids = vector(0, 2, 5, DIM), torch.randint(0, 50, (3, 5))
    assert attention.axes == 3
    assert torch.allclose(attention(x, ids), attention(x, ids[:, None].expand(3, 2, 5)), **CLOSE)
    assert torch.allclose(attention(x, ids), attention(x, ids + 4), **CLOSE)
    assert not torch.allclose(attention(x, ids), attention(x, ids * 2))
    packed = attention(x[:1], ids, cu_seqlens=torch.tensor([0, 2, 5]))
    assert torch.allclose(packed[:, 2:], attention(x[:1, 2:], ids[:, 2:]), **CLOSE)


@settings(max_examples=25)
@given(seeds, st.sampled_from([*KINDS, "xpos"]), st.integers(-50, 50))
def test_a_common_shift_of_positions_changes_nothing(seed, kind, shift):
    attention, x = layer(kind), vector(seed, 2, 6, DIM)
    ids = torch.arange(12).view(2, 6) + 60
    with torch.no_grad():
        assert torch.allclose(attention(x, ids), attention(x, ids + shift), **CLOSE)


@settings(max_examples=25)
@given(seeds, st.sampled_from(KINDS), st.permutations(range(6)))
def test_without_a_causal_mask_only_positions_say_the_order(seed, kind, order):
    attention, x = layer(kind, causal=False), vector(seed, 2, 6, DIM)
    with torch.no_grad():
        mixed = attention(x[:, order], torch.tensor(order))
        assert torch.allclose(mixed, attention(x)[:, order], **CLOSE)


@pytest.mark.parametrize("kind", KINDS)
@meant("cu_seqlens")
@meant("key_mask")
def test_gradients(kind):
    attention, x = layer(kind, qkv_bias=True, out_bias=True), vector(0, 2, 5, DIM).requires_grad_()
    parameters = dict(attention.named_parameters())
    mask = torch.tensor([[True] * 5, [False, False, True, True, False]])

    def call(x, *values, **options):
        return torch.func.functional_call(attention, dict(zip(parameters, values, strict=True)), (x,), options)

    one = vector(1, 1, 5, DIM).requires_grad_()
    for tokens, options in ((x, {}), (x, {"key_mask": mask}), (one, {"cu_seqlens": torch.tensor([0, 2, 4])})):
        leaves = tokens, *parameters.values()
        assert torch.autograd.gradcheck(functools.partial(call, **options), leaves, fast_mode=True)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("causal", [True, False])
def test_padding_is_as_if_it_were_not_there(kind, causal):
    attention, x = layer(kind, causal=causal), vector(0, 3, 9, DIM)
    lengths = [9, 4, 1]
    kept = torch.arange(9) < torch.tensor(lengths)[:, None]
    for side in ("right", "left"):
        mask = kept if side == "right" else kept.flip(1)
        rubbish = torch.where(mask[:, :, None], x, float("nan"))
        shift = torch.tensor([[0 if side == "right" else 9 - n] for n in lengths])
        y = attention(rubbish, torch.arange(9) - shift, key_mask=mask)
        for row, keep in enumerate(mask):
            assert torch.allclose(y[row, keep], attention(x[row : row + 1, keep])[0], **CLOSE)


@pytest.mark.parametrize("kind", KINDS)
@meant("key_mask")
def test_a_query_that_sees_nothing_gives_zero_with_finite_gradients(kind):
    attention, x = layer(kind), vector(0, 2, 5, DIM).requires_grad_()
    mask = torch.tensor([[False] * 5, [False, False, True, True, True]])
    y = attention(x, key_mask=mask)
    assert not y[0].any()
    assert not y[1, :2].any()
    assert y[1, 2:].all()
    y.square().sum().backward()
    gradients = [x.grad, *(parameter.grad for parameter in attention.parameters())]
    assert all(grad is not None and torch.isfinite(grad).all() for grad in gradients)
    assert x.grad is not None
    assert not x.grad[0].any()


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("looked_at", [True, False])
@meant("cu_seqlens")
@meant("positions")
def test_packed_sequences_are_as_if_alone(kind, causal, looked_at, monkeypatch):
    if not looked_at:
        # As on a device: no loop, but a mask.
        monkeypatch.setattr(scores, "can_read_values", lambda ids: False)
    attention, x = layer(kind, causal=causal), vector(0, 1, 13, DIM)
    ends = torch.tensor([0, 3, 3, 4, 11], dtype=torch.int32)
    mask, ids = torch.rand(1, 13) > 0.3, torch.randint(0, 30, (13,))
    cases = [{}, {"positions": ids}, {"positions": ids[None]}, {"key_mask": mask}]
    for options in cases:
        y = attention(x, **options, cu_seqlens=ends)
        assert not y[:, 11:].any()
        for start, end in itertools.pairwise(ends.tolist()):
            own = {name: value[..., start:end] for name, value in options.items()}
            assert torch.allclose(y[:, start:end], attention(x[:, start:end], **own), **CLOSE)


class Louder(Encoding):
    """Queries grow with their positions, which no shift undoes."""

    def rotate(self, q, k, positions=None, *, k_positions=None):
        places = torch.arange(q.shape[2]) if positions is None else positions
        return q * (1 + (places if places.dim() == 1 else places[:, None])[..., None]), k


def test_where_tokens_start():
    torch.manual_seed(0)
    attention, x = Attention(DIM, HEADS, encoding=Louder()).double(), vector(0, 2, 9, DIM)
    whole = attention(x[:1])
    packed = attention(x[:1].repeat(1, 2, 1), cu_seqlens=torch.tensor([0, 9, 18]))
    assert torch.allclose(packed, whole.repeat(1, 2, 1), **CLOSE)
    assert not torch.allclose(attention(x[:1], torch.arange(9) + 1), whole)
    cache = KVCache(2, HEADS, 16, WIDTH, dtype=torch.float64)
    with torch.no_grad():
        attention(x[:, :5], cache=cache, counts=torch.tensor([5, 3]))
        y = attention(torch.stack([x[0, 5:7], x[1, 3:5]]), cache=cache)
        assert torch.allclose(y[0], whole[0, 5:7], **CLOSE)
        assert torch.allclose(y[1], attention(x[1:])[0, 3:5], **CLOSE)


def test_what_is_not_finite_stays_in_its_sequence():
    for kind, causal in itertools.product(KINDS, [True, False]):
        attention, x = layer(kind, causal=causal), vector(0, 1, 9, DIM)
        broken = x.clone()
        broken[0, 4] = float("nan")
        broken[0, 5] = float("inf")
        y = attention(broken, cu_seqlens=torch.tensor([0, 3, 6, 9]))
        fine = attention(x, cu_seqlens=torch.tensor([0, 3, 6, 9]))
        assert y[:, 5].isnan().all()
        assert torch.equal(y[:, :3], fine[:, :3])
        assert torch.equal(y[:, 6:], fine[:, 6:])


def in_dtype(attention, x, dtype):
    """The formula, every step of it rounded to a dtype."""
    weights = [getattr(attention, f"{name}_proj").weight.to(dtype) for name in "qkvo"]
    q, k, v = ((x.to(dtype) @ weight.T).unflatten(-1, (-1, WIDTH)).transpose(1, 2) for weight in weights[:3])
    k, v = k.repeat_interleave(2, dim=1), v.repeat_interleave(2, dim=1)
    ids = torch.arange(x.shape[1])
    q, k = rotated_by_formula(attention.encoding, q, k, ids)
    s = q @ k.transpose(-1, -2) * attention.scale
    if isinstance(attention.encoding, AlibiBias | T5Bias):
        s = s + reference_bias(attention.encoding, ids).to(dtype)
    s = s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool).triu(1), float("-inf"))
    return (torch.softmax(s, -1) @ v).transpose(1, 2).flatten(2) @ weights[3].T


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed:UserWarning")  # on CPUs without bfloat16
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_lower_precision_is_no_worse_than_the_formula_in_it(kind, dtype):
    x = vector(5, 2, 40, DIM).to(dtype)
    lower = layer(kind).to(dtype)
    exact = copy.deepcopy(lower).double()
    with torch.no_grad():
        expected = truth(exact, x.double())
        y, rough = lower(x), in_dtype(lower, x, dtype)
    assert y.dtype == dtype
    for measure in (torch.amax, torch.mean):
        assert measure((y - expected).abs()) <= 2 * measure((rough - expected).abs())


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed:UserWarning")
@pytest.mark.parametrize("kind", KINDS)
def test_autocast(kind):
    attention, x = layer(kind).float(), vector(0, 2, 9, DIM).float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = attention(x)
    assert y.dtype == torch.bfloat16
    assert torch.allclose(y.float(), attention(x), atol=0.05)


def test_state_and_where_it_lives():
    a, b = layer("t5", qkv_bias=True), layer("t5", qkv_bias=True)
    names = {f"{name}_proj.weight" for name in "qkvo"} | {f"{name}_proj.bias" for name in "qkv"} | {"encoding.weight"}
    assert set(a.state_dict()) == names
    assert {n for n, _ in layer("rope", out_bias=True).named_parameters()} == {
        *(f"{name}_proj.weight" for name in "qkvo"),
        "o_proj.bias",
    }
    torch.manual_seed(11)
    for parameter in b.parameters():
        torch.nn.init.normal_(parameter)
    x = vector(0, 2, 9, DIM)
    assert not torch.allclose(a(x), b(x))
    b.load_state_dict(a.state_dict())
    assert torch.equal(a(x), b(x))
    assert torch.equal(copy.deepcopy(a)(x), a(x))
    shapes = [tuple(a.get_parameter(f"{name}_proj.weight").shape) for name in "qkvo"]
    assert shapes == [(24, 24), (12, 24), (12, 24), (24, 24)]
    wide = Attention(DIM, HEADS, head_dim=10, device="meta", dtype=torch.bfloat16)
    assert wide.q_proj.weight.shape == (40, 24)
    assert wide.o_proj.weight.shape == (24, 40)
    assert wide.k_proj.weight.is_meta
    # On meta nothing can be looked at: no step needs the values of a tensor.
    x = torch.empty(2, 5, DIM, device="meta", dtype=torch.bfloat16)
    mask = torch.ones(2, 5, dtype=torch.bool, device="meta")
    assert wide(x, torch.arange(5, device="meta"), key_mask=mask).shape == (2, 5, DIM)
    assert wide(x[:1], cu_seqlens=torch.tensor([0, 5], device="meta")).shape == (1, 5, DIM)
    assert "num_kv_heads=2" in repr(a)
    assert "dropout=0.5" in repr(Attention(8, 2, dropout=0.5))
    assert "T5Bias" in repr(a)


def test_nothing_in_nothing_out():
    for kind, shape in itertools.product(KINDS, [(2, 0, DIM), (0, 3, DIM)]):
        assert layer(kind)(torch.empty(shape).double()).shape == shape


def test_dropout():
    attention = Attention(16, 1, dropout=0.25, causal=False)
    names = ("q", "k", "v", "o")
    for name, weight in zip(
        names, (torch.zeros(16, 16), torch.zeros(16, 16), torch.eye(16), torch.eye(16)), strict=True
    ):
        getattr(attention, f"{name}_proj").load_state_dict({"weight": weight})
    # Sixteen tokens, each a feature of its own, with equal weights: what comes out are the weights.
    x = torch.eye(16).expand(64, 16, 16)
    torch.manual_seed(0)
    weights = attention(x)
    dropped = weights == 0
    assert torch.allclose(weights[~dropped], torch.tensor(1 / 16 / 0.75))
    # 16384 weights: the share is within five deviations of 0.0034.
    assert abs(dropped.float().mean() - 0.25) < 0.017
    assert not torch.equal(attention(x), weights)
    attention.eval()
    assert torch.allclose(attention(x), torch.tensor(1 / 16))


def test_any_named_encoding_goes_in():
    options = {"learned": {"length": 8}, "multiplicative": {"length": 8}, "concatenated": {"width": 2, "length": 8}}
    options |= {"xpos": {"spec": RopeSpec(WIDTH, xpos=XPos(64))}, "t5": {"causal": True}}
    x = vector(0, 2, 5, DIM).float()
    for name in ("none", "learned", "sinusoidal", "recurrent", "multiplicative", "concatenated", "t5", "alibi"):
        made = encoding(name, dim=DIM, num_heads=HEADS, **options.get(name, {}))
        assert Attention(DIM, HEADS, encoding=made)(made.embed(x)).shape == x.shape
    for name in ("rope", "rope-across-heads", "xpos"):
        made = encoding(name, dim=DIM, num_heads=HEADS, **options.get(name, {}))
        torch.manual_seed(0)
        attention = Attention(DIM, HEADS, encoding=made)
        torch.manual_seed(0)
        assert not torch.allclose(attention(x), Attention(DIM, HEADS)(x))
