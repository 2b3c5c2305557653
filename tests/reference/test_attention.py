"""Softmax attention: comparison with torch, grouped heads, the causal mask, the four hooks."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention

from ropewalk import RopewalkError
from ropewalk.reference import alibi_bias, multi_head_attention, rotate, sinusoidal, softmax_attention
from ropewalk.reference.attention import Projections
from strategies import seeds, theta, vector


@given(seeds, st.booleans(), st.sampled_from([(4, 4), (4, 2), (4, 1)]), st.booleans(), st.integers(1, 9))
def test_it_equals_torchs_attention(seed, causal, heads, biased, seq):
    q, k, v = (vector(seed + i, 2, h, seq, 6) for i, h in enumerate((heads[0], heads[1], heads[1])))
    bias = vector(seed + 3, 4, seq, seq) if biased else None
    mask = torch.zeros(seq, seq, dtype=torch.float64)
    if causal:
        mask = mask.masked_fill(~torch.ones(seq, seq, dtype=torch.bool).tril(), float("-inf"))
    expected = scaled_dot_product_attention(q, k, v, attn_mask=mask if bias is None else mask + bias, enable_gqa=True)
    assert torch.allclose(softmax_attention(q, k, v, causal=causal, bias=bias), expected, atol=1e-12)


@given(seeds, st.integers(1, 8))
def test_causal_queries_are_the_last_tokens(seed, last):
    q, k, v = vector(seed, 3, 1, 2, 8, 4)
    whole = softmax_attention(q, k, v, causal=True)
    assert torch.allclose(softmax_attention(q[:, :, -last:], k, v, causal=True), whole[:, :, -last:], atol=1e-14)


def test_scale():
    q, k, v = vector(0, 3, 1, 1, 4, 16)
    assert torch.allclose(softmax_attention(q, k, v, scale=0.25), softmax_attention(q, k, v), atol=1e-14)
    assert not torch.allclose(softmax_attention(q, k, v, scale=1.0), softmax_attention(q, k, v))


def test_the_hooks_are_applied_in_order():
    x, weights = vector(1, 2, 5, 8), Projections(*vector(2, 4, 8, 8))
    ids = torch.tensor([3, 1, 4, 1, 5])
    y = multi_head_attention(
        x,
        weights,
        num_heads=2,
        positions=ids,
        causal=True,
        embed=sinusoidal,
        encode_heads=lambda q, k, v, m: (sinusoidal(q, m), 2 * k, sinusoidal(v, -m)),
        rotate=lambda q, k, m: (rotate(q, m, theta(4)), rotate(k, m, theta(4))),
        bias=lambda m, n: alibi_bias(m, n, 2),
    )
    embedded = sinusoidal(x, ids)
    q, k, v = ((embedded @ w.T).view(2, 5, 2, 4).transpose(1, 2) for w in weights[:3])
    q, k, v = sinusoidal(q, ids), 2 * k, sinusoidal(v, -ids)
    q, k = rotate(q, ids, theta(4)), rotate(k, ids, theta(4))
    out = softmax_attention(q, k, v, causal=True, bias=alibi_bias(ids, ids, 2))
    assert torch.allclose(y, out.transpose(1, 2).reshape(2, 5, 8) @ weights.output.T, atol=1e-13)


def test_grouped_heads_share_their_keys():
    x, q_w, kv_w, out = vector(1, 2, 5, 8), vector(2, 8, 8), vector(3, 2, 4, 8), vector(4, 8, 8)
    grouped = multi_head_attention(x, Projections(q_w, kv_w[0], kv_w[1], out), num_heads=4, num_kv_heads=2)
    keys, values = (w.view(2, 2, 8).repeat_interleave(2, dim=0).reshape(8, 8) for w in kv_w)
    doubled = multi_head_attention(x, Projections(q_w, keys, values, out), num_heads=4)
    assert torch.allclose(grouped, doubled, atol=1e-13)


@pytest.mark.usefixtures("as_a_user")
@pytest.mark.parametrize(
    ("shapes", "causal"),
    [
        (((1, 2, 3, 4), (1, 2, 3, 5), (1, 2, 3, 4)), False),
        (((1, 2, 3, 4), (2, 2, 3, 4), (2, 2, 3, 4)), False),
        (((1, 3, 3, 4), (1, 2, 3, 4), (1, 2, 3, 4)), False),
        (((1, 2, 3, 4), (1, 2, 3, 4), (1, 2, 4, 4)), False),
        (((1, 2, 5, 4), (1, 2, 3, 4), (1, 2, 3, 4)), True),
        (((1, 2, 3, 4), (1, 0, 3, 4), (1, 0, 3, 4)), False),
    ],
)
def test_shapes_that_do_not_match_raise(shapes, causal):
    with pytest.raises(RopewalkError, match=r"heads a multiple of kv_heads"):
        softmax_attention(*(torch.ones(shape) for shape in shapes), causal=causal)


@pytest.mark.usefixtures("as_a_user")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.ones(2, 3, 4)}, "4 or more dimensions"),
        ({"v": torch.ones(1, 2, 3, 4).int()}, "a floating-point tensor"),
        ({"k": [[1.0]]}, "a torch.Tensor"),
        ({"causal": "no"}, "True or False"),
        ({"bias": torch.ones(3, 3, 3)}, r"broadcasts to \[1, 2, 3, 3\]"),
        ({"bias": torch.ones(3)}, r"broadcasts to \[1, 2, 3, 3\]"),
        ({"bias": torch.ones(3, 4)}, r"broadcasts to \[1, 2, 3, 3\]"),
    ],
)
def test_bad_input(change, message):
    with pytest.raises(RopewalkError, match=message):
        softmax_attention(**dict.fromkeys("qkv", torch.ones(1, 2, 3, 4)) | change)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_result_is_the_float64_result_rounded_once(dtype):
    q, k, v = (x.to(dtype) for x in vector(5, 3, 1, 4, 6, 8))
    bias = alibi_bias(torch.arange(6), torch.arange(6), 4)
    exact = softmax_attention(q.double(), k.double(), v.double(), causal=True, bias=bias)
    assert torch.equal(softmax_attention(q, k, v, causal=True, bias=bias), exact.to(dtype))


@pytest.mark.usefixtures("as_a_user")
def test_heads_that_do_not_divide_raise():
    weights = Projections(*[torch.eye(8)] * 4)
    with pytest.raises(RopewalkError, match="number of rows is a multiple of the heads"):
        multi_head_attention(torch.ones(1, 2, 8), weights, num_heads=3)
    with pytest.raises(RopewalkError, match=r"expected: Projections\(query, key, value, output\)"):
        multi_head_attention(torch.ones(1, 2, 8), tuple(weights), num_heads=2)
    with pytest.raises(RopewalkError, match="an integer of at least 1"):
        multi_head_attention(torch.ones(1, 2, 8), weights, num_heads=0)
