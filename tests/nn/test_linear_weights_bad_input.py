"""What linear attention refuses of decays, biases, scales and their states, and in which words."""

import copy

import pytest
import torch

import ropewalk as rw
from nn.linear_cases import drawn

NAN = float("nan")
Q, K, V = drawn(2, 4, 2, 6, 8, 3, torch.float32)
DECAY, PER_HEAD, PER_TOKEN = -torch.ones(2), -torch.ones(4), -torch.ones(2, 4, 6)
ROPE = rw.RotaryEmbedding(8)
ALIBI = rw.encoding("alibi", dim=32, num_heads=4)
T5 = rw.encoding("t5", dim=32, num_heads=4, causal=True)
SHORT = rw.encoding("t5", dim=32, num_heads=4, causal=True, num_buckets=8, max_distance=20)
IDS = torch.arange(6)
SEEN = torch.ones(2, 6, dtype=torch.bool)
ENDS = torch.tensor([0, 3, 6])


def state_of(**options):
    return rw.linear_attention(Q, K, V, return_state=True, **options)[1]


def changed(tensor, value):
    """The tensor with another last number."""
    tensor = tensor.clone()
    tensor.view(-1)[-1] = value
    return tensor


DECAYS = {
    "positive": (changed(DECAY, 1e-6), "numbers of at most 0(?s:.*)1e-06"),
    "positive per token": (changed(PER_TOKEN, 0.25), "numbers of at most 0(?s:.*)0.25"),
    "infinite": (changed(DECAY, float("inf")), "inf"),
    "NaN": (changed(DECAY, NAN), "NaN"),
    "NaN per token": (changed(PER_TOKEN, NAN), "NaN"),
    "three heads": (-torch.ones(3), r"shape \[2\] or \[4\] or \[2, 2, 6\] or \[2, 4, 6\]"),
    "a scalar": (torch.tensor(-1.0), r"shape \[2\] or \[4\]"),
    "batch and heads": (-torch.ones(2, 4), r"shape \[2\] or \[4\]"),
    "one batch": (PER_TOKEN[:1], r"shape \[2\] or \[4\]"),
    "five tokens": (PER_TOKEN[..., :5], r"shape \[2\] or \[4\]"),
    "tokens before heads": (PER_TOKEN.transpose(1, 2), r"shape \[2\] or \[4\]"),
    "with a dimension too many": (PER_TOKEN[..., None], r"shape \[2\] or \[4\]"),
    "whole numbers": (-torch.ones(2, dtype=torch.int64), "a floating-point tensor(?s:.*)torch.int64"),
    "complex": (-torch.ones(2, dtype=torch.complex64), "a floating-point tensor"),
    "meta": (DECAY.to("meta"), "a tensor on cpu(?s:.*)meta"),
    "a list": ([-1.0, -1.0], "a floating-point tensor"),
    "a number": (-0.5, "a floating-point tensor(?s:.*)-0.5"),
}


@pytest.mark.parametrize("name", DECAYS)
def test_a_decay_that_is_none_is_refused(name):
    decay, words = DECAYS[name]
    with pytest.raises(rw.RopewalkError, match=words):
        rw.linear_attention(Q, K, V, decay=decay)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"decay": DECAY, "bias": ALIBI}, "one of them(?s:.*)subtract the slopes of ALiBi"),
        ({"decay": DECAY, "bias": T5}, "one of them"),
        ({"decay": PER_TOKEN, "causal": False}, "because attention is not causal"),
        ({"decay": DECAY, "causal": False, "return_state": True}, "no state(?s:.*)return_state=True"),
        ({"decay": DECAY, "causal": False, "state": state_of(decay=DECAY)}, "no state(?s:.*)a state"),
        ({"bias": ALIBI, "causal": False, "return_state": True}, "no state"),
        ({"bias": ALIBI, "causal": False, "state": state_of(bias=ALIBI)}, "no state"),
        ({"bias": T5, "causal": False, "return_state": True}, "no state"),
        ({"scale": 0.5}, "normalize=False"),
        ({"scale": 1.0, "decay": DECAY}, "normalize=False"),
        ({"normalize": False, "scale": NAN}, "finite"),
        ({"normalize": False, "scale": float("inf")}, "finite"),
        ({"normalize": False, "scale": "1"}, "finite"),
        ({"normalize": False, "scale": True}, "finite"),
        ({"normalize": False, "scale": torch.ones(())}, "finite"),
        ({"normalize": 1}, "True or False"),
        ({"normalize": None}, "True or False"),
        ({"bias": "alibi"}, "AlibiBias or T5Bias"),
        ({"bias": ROPE}, "passed as rope="),
        ({"bias": torch.zeros(4, 6, 6)}, "AlibiBias or T5Bias"),
        ({"bias": rw.encoding("alibi", dim=32, num_heads=2)}, "a bias for 4 heads(?s:.*)num_heads=4"),
        ({"bias": rw.encoding("t5", dim=32, num_heads=8)}, "a bias for 4 heads(?s:.*)8 heads"),
        ({"decay": DECAY, "positions": IDS}, "together with a rope or a bias"),
        ({"bias": ALIBI, "positions": IDS.flip(0)}, "do not decrease(?s:.*)a step of -1"),
        ({"bias": ALIBI, "positions": changed(IDS, 3)}, "do not decrease(?s:.*)-1"),
        ({"bias": ALIBI, "positions": changed(IDS, 3), "key_mask": SEEN}, "do not decrease"),
        ({"bias": ALIBI, "positions": changed(IDS, 3), "causal": False}, "do not decrease"),
        ({"bias": ALIBI, "positions": IDS, "state": state_of(bias=ALIBI)}, "do not decrease(?s:.*)-5"),
        ({"bias": ALIBI, "positions": IDS[:5]}, "positions"),
        ({"bias": ALIBI, "positions": changed(IDS.float(), NAN)}, "finite"),
        ({"bias": ALIBI, "positions": IDS.bool()}, "positions"),
        ({"bias": T5, "positions": IDS.flip(0)}, "grow by at least 1 per token"),
        ({"bias": T5, "positions": IDS // 2}, "grow by at least 1 per token"),
        ({"bias": T5, "positions": changed(IDS, 4)}, "grow by at least 1 per token"),
        ({"bias": T5, "positions": changed(IDS, 4), "key_mask": SEEN}, "grow by at least 1 per token"),
        ({"bias": T5, "positions": changed(IDS, 4), "causal": False}, "grow by at least 1 per token"),
        ({"bias": T5, "positions": IDS.double()}, "whole positions(?s:.*)float64"),
        ({"bias": T5, "positions": IDS + 5, "state": state_of(bias=T5)}, "grow by at least 1 per token"),
        ({"bias": ALIBI, "positions": IDS, "k_positions": IDS + 1}, "queries at the positions of the last keys"),
        ({"bias": T5, "positions": IDS, "k_positions": 2 * IDS}, "queries at the positions of the last keys"),
        ({"decay": DECAY, "state": state_of()}, "a state with decay(?s:.*)without decay or bias"),
        ({"state": state_of(decay=DECAY)}, "a state without decay or bias(?s:.*)with decay"),
        ({"decay": PER_HEAD, "state": state_of(decay=DECAY)}, r"\[2, 4, 8, 3\](?s:.*)\[2, 2, 8, 3\]"),
        ({"decay": DECAY, "state": state_of(decay=PER_TOKEN)}, r"\[2, 2, 8, 3\](?s:.*)\[2, 4, 8, 3\]"),
        ({"bias": ALIBI, "state": state_of(bias=T5)}, "with AlibiBias(?s:.*)with T5Bias"),
        ({"bias": T5, "state": state_of(bias=ALIBI)}, "with T5Bias(?s:.*)with AlibiBias"),
        ({"bias": T5, "state": state_of()}, "with T5Bias(?s:.*)without decay or bias"),
        ({"state": state_of(bias=T5)}, "without decay or bias(?s:.*)with T5Bias"),
        ({"bias": ALIBI, "state": state_of(decay=PER_HEAD)}, "with AlibiBias(?s:.*)with decay"),
        ({"bias": SHORT, "state": state_of(bias=T5)}, r"13 near keys(?s:.*)112"),
        ({"bias": T5, "rope": ROPE, "state": state_of(bias=T5)}, "cannot be rotated again"),
        ({"bias": T5, "feature_map": "relu", "state": state_of(bias=T5)}, "a state of the feature map"),
    ],
)
def test_a_mistake_is_named(options, words):
    with pytest.raises(rw.RopewalkError, match=words):
        rw.linear_attention(Q, K, V, **options)


@pytest.mark.parametrize("options", [{"decay": DECAY}, {"bias": ALIBI}, {"bias": T5}], ids=["decay", "alibi", "t5"])
def test_other_tokens_have_no_distance(options):
    for q, k, v in ((Q[:, :, :4], K, V), (Q, K[:, :, :4], V[:, :, :4])):
        with pytest.raises(rw.RopewalkError, match="as many queries as keys"):
            rw.linear_attention(q, k, v, causal=False, **options)


@pytest.mark.parametrize("bias", [ALIBI, T5], ids=["alibi", "t5"])
def test_packed_positions_are_checked_per_sequence(bias):
    one = [x[:1] for x in (Q, K, V)]
    rw.linear_attention(*one, bias=bias, cu_seqlens=ENDS, positions=torch.tensor([5, 6, 7, 0, 1, 2]))
    for mask in (None, SEEN[:1]):
        with pytest.raises(rw.RopewalkError, match=r"positions=\.\.\., bias="):
            rw.linear_attention(
                *one, bias=bias, cu_seqlens=ENDS, positions=torch.tensor([5, 6, 7, 0, 2, 1]), key_mask=mask
            )
    _, state = rw.linear_attention(*one, bias=bias, cu_seqlens=ENDS, return_state=True)
    after = torch.tensor([3, 4, 5, 7, 8, 9])
    rw.linear_attention(*one, bias=bias, cu_seqlens=ENDS, positions=after, state=state)
    with pytest.raises(rw.RopewalkError, match=r"positions=\.\.\., bias="):
        rw.linear_attention(*one, bias=bias, cu_seqlens=ENDS, positions=changed(after, 9) - 3, state=state)


def test_a_bias_with_several_axes():
    spec = rw.RopeSpec(8, axes=rw.Axes.chunked([2, 2]))
    with pytest.raises(rw.RopewalkError, match="one position per token"):
        rw.linear_attention(Q, K, V, rope=rw.RotaryEmbedding(spec), bias=ALIBI, positions=torch.stack([IDS, IDS]))


def test_layers_refuse_the_states_and_positions_of_others():
    alibi, t5 = (rw.LinearAttention(32, 4, encoding=encoding) for encoding in (ALIBI, T5))
    x = torch.randn(1, 3, 32)
    _, state = alibi.step(x)
    with pytest.raises(rw.RopewalkError, match=r"another layer|with T5Bias"):
        t5.step(x, state)
    with pytest.raises(rw.RopewalkError, match="do not decrease"):
        alibi(x, torch.tensor([2, 1, 0]))
    with pytest.raises(rw.RopewalkError, match="8 heads"):
        rw.LinearAttention(64, 8, encoding=ALIBI)
    encoder = rw.LinearAttention(32, 4, encoding=rw.encoding("t5", dim=32, num_heads=4), causal=False)
    with pytest.raises(rw.RopewalkError, match="causal"):
        encoder.make_state(1)


def test_values_that_the_host_cannot_read_are_not_checked():
    meta = [x.to("meta") for x in (Q, K, V)]
    assert rw.linear_attention(*meta, decay=torch.ones(2, device="meta")).shape == (2, 4, 6, 3)
    assert rw.linear_attention(*meta, bias=ALIBI, positions=IDS.to("meta")).shape == (2, 4, 6, 3)
    out, state = rw.linear_attention(*meta, bias=copy.deepcopy(T5).to("meta"), return_state=True)
    assert out.shape == (2, 4, 6, 3)
    assert state.near is not None
    assert state.near.keys.is_meta
