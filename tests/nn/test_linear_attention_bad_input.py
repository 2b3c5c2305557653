"""What linear attention refuses, and in which words."""

import pytest
import torch

import ropewalk as rw
from nn.linear_cases import drawn

Q, K, V = drawn(2, 4, 2, 6, 8, 3, torch.float32)
ROPE = rw.RotaryEmbedding(8)
_, STATE = rw.linear_attention(Q, K, V, rope=ROPE, return_state=True)
_, OF_FUNCTION = rw.linear_attention(Q, K, V, rope=ROPE, feature_map=torch.relu, return_state=True)
ONE = [x[:1] for x in (Q, K, V)]


@pytest.mark.parametrize(
    ("inputs", "options", "words"),
    [
        ((Q[..., :4], K, V), {}, "the same width of q and k"),
        ((Q, K[:, :, :3], V), {}, "one value per key"),
        ((Q, K, V[:1]), {}, "one batch"),
        ((Q, K, V[:, :1]), {}, "the same number of heads of k and v"),
        ((Q[0], K[0], V[0]), {}, "dimensions"),
        ((Q[None], K[None], V[None]), {}, "batch, heads, q_seq, dim"),
        ((Q, K, V), {"rope": rw.encoding("sinusoidal", dim=8, num_heads=1)}, "omit rope"),
        ((Q, K, V), {"feature_map": "favor"}, "FavorFeatures"),
        ((Q, K, V), {"rope": ROPE, "state": (Q, STATE)}, "pass the second"),
        ((Q[:, :3], K, V), {}, "multiple of kv_heads"),
        ((Q, K[:, :, :3], V[:, :, :3]), {}, "no more queries than keys"),
        ((Q, K.double(), V), {}, "one dtype, on one device"),
        ((Q.long(), K, V), {}, "float32, float64, bfloat16 or float16"),
        ((Q, K, None), {}, "None"),
        ((Q.to("meta"), K, V), {}, "meta"),
        ((Q, K, V), {"rope": rw.RotaryEmbedding(16)}, "the number of features"),
        ((Q, K, V), {"rope": rw.RotaryEmbedding(8, seq_dim=-3)}, "seq_dim=-2"),
        ((Q, K, V), {"rope": 7}, "a RotaryEmbedding, an Encoding, or None"),
        ((Q, K, V), {"rope": ROPE, "positions": torch.arange(5)}, "positions"),
        ((Q, K, V), {"positions": torch.arange(6)}, "positions, and neither"),
        ((Q, K, V), {"feature_map": "softmax"}, "'elu', 'relu', 'squared_relu'"),
        ((Q, K, V), {"feature_map": 3}, "FavorFeatures"),
        ((Q, K, V), {"feature_map": lambda x: x[..., 0]}, "the last dimension only"),
        ((Q, K, V), {"feature_map": (lambda x: x, lambda x: x[..., :4])}, "the same number of features"),
        ((Q, K, V), {"causal": 1}, "True or False"),
        ((Q, K, V), {"return_state": 1}, "True or False"),
        ((Q, K, V), {"backend": "native"}, "native"),
        ((Q, K, V), {"key_mask": torch.ones(2, 6)}, "True is a visible key"),
        ((Q, K, V), {"key_mask": torch.ones(2, 5, dtype=torch.bool)}, r"\[2, 6\]"),
        ((Q, K, V), {"cu_seqlens": torch.tensor([0, 6])}, "a batch of 1"),
        (ONE, {"cu_seqlens": torch.tensor([0, 3, 7])}, "end at 6 at most"),
        (ONE, {"cu_seqlens": torch.tensor([0])}, "at least 2"),
        (ONE, {"cu_seqlens": [0, 6]}, "torch.tensor"),
        ((Q, K, V), {"rope": ROPE, "state": STATE.above}, "a LinearState, or None"),
        (ONE, {"rope": ROPE, "state": STATE}, "sequences, heads, features"),
        ((Q, Q, Q[..., :3]), {"rope": ROPE, "state": STATE}, "sequences, heads, features"),
        ((Q, K, V), {"state": STATE}, "cannot be rotated again"),
        ((Q, K, V), {"rope": rw.RotaryEmbedding(8, base=500.0), "state": STATE}, "cannot be rotated again"),
        ((Q, K, V), {"rope": ROPE, "feature_map": "relu", "state": STATE}, "a state of the feature map"),
        (
            (Q, K, V),
            {"rope": ROPE, "feature_map": torch.relu, "state": STATE},
            "a state of the feature map",
        ),
        ((Q, K, V), {"rope": ROPE, "state": OF_FUNCTION}, "a state of the feature map"),
        ((Q, K, V), {"rope": rw.RotaryEmbedding(8, learned=True), "state": STATE}, "of .* with learned frequencies"),
        ((Q, K, V), {"feature_map": "favour"}, "favor"),
        ([x.double() for x in (Q, K, V)], {"rope": ROPE, "state": STATE}, "sums of torch.float64"),
    ],
)
def test_a_mistake_is_named(inputs, options, words):
    with pytest.raises(rw.RopewalkError, match=words):
        rw.linear_attention(*inputs, **options)


@pytest.mark.parametrize("name", ["t5", "alibi"])
def test_a_bias_is_not_a_rope(name):
    encoding = rw.encoding(name, dim=32, num_heads=4)
    with pytest.raises(rw.RopewalkError, match="adds a bias") as caught:
        rw.linear_attention(Q, K, V, rope=encoding)
    assert "pass it as bias=" in str(caught.value)
    # A rotation does not hide the bias beside it.
    rotated = type("Rotated", (type(encoding),), {"rope": ROPE})(4)
    with pytest.raises(rw.RopewalkError, match="pass it as bias=, and as rope= for its rotation"):
        rw.linear_attention(Q, K, V, rope=rotated)
    with pytest.raises(rw.RopewalkError, match="pass it as bias="):
        rw.linear_attention(Q, K, V, rope=rotated, bias=encoding)


@pytest.mark.parametrize(
    "encoding",
    [rw.encoding("rope", dim=32, num_heads=4), rw.encoding("sinusoidal", dim=32, num_heads=4), rw.Encoding()],
    ids=lambda encoding: encoding.name,
)
def test_an_encoding_without_a_bias_is_not_a_bias(encoding):
    with pytest.raises(rw.RopewalkError, match="which has none") as caught:
        rw.linear_attention(Q, K, V, bias=encoding)
    assert "as rope=" in str(caught.value)


class Squared(rw.Encoding):
    """A bias that is neither exponential nor constant beyond a window."""

    name = "squared"

    def bias(self, q_positions, k_positions):
        raise NotImplementedError


class Refused(Squared):
    """The same, with what DistanceBias cannot have."""

    def __init__(self, distances):
        super().__init__()
        self.distances = distances

    def distance_bias(self):
        return self.distances


@pytest.mark.parametrize(
    ("encoding", "words"),
    [
        (Squared(), r"linear in the distance, or constant beyond a window(?s:.*)override distance_bias(?s:.*)softmax"),
        (Refused(rw.DistanceBias()), "slopes .heads., or with numbers"),
        (Refused(rw.DistanceBias(torch.ones(4), torch.ones(4, 3))), "slopes .heads., or with numbers"),
        (Refused(rw.DistanceBias(slopes=torch.ones(4, 3))), "slopes .heads., or with numbers"),
        (Refused(rw.DistanceBias(numbers=torch.ones(3))), "slopes .heads., or with numbers"),
        (Refused(rw.DistanceBias(numbers=torch.ones(4, 4))), "slopes .heads., or with numbers"),
        (Refused(torch.ones(4)), "slopes .heads., or with numbers(?s:.*)Tensor"),
        (Refused(rw.DistanceBias(slopes=[1.0] * 4)), "slopes .heads., or with numbers"),
        (Refused(rw.DistanceBias(slopes=torch.ones(4).long())), "slopes .heads., or with numbers"),
        (Refused(rw.DistanceBias(slopes=-torch.ones(4))), "slopes of at least 0"),
        (Refused(rw.DistanceBias(slopes=torch.full((4,), float("nan")))), "finite slopes"),
        (Refused(rw.DistanceBias(numbers=torch.ones(4, 2 * 1025 + 1))), "at most 1024"),
        (rw.encoding("t5", dim=32, num_heads=4, causal=True, max_distance=100_000), "smaller max_distance"),
    ],
)
def test_a_bias_that_would_not_be_linear_is_refused(encoding, words):
    for call in (
        lambda: rw.linear_attention(Q, K, V, bias=encoding),
        lambda: rw.LinearAttention(32, 4, encoding=encoding),
    ):
        with pytest.raises(rw.RopewalkError, match=words):
            call()


def test_a_bias_of_the_other_kind_of_attention():
    encoding = rw.encoding("t5", dim=32, num_heads=4, causal=True)
    with pytest.raises(rw.RopewalkError, match="the same causal in both"):
        rw.LinearAttention(32, 4, encoding=encoding, causal=False)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"feature_map": "elu", "num_features": 16}, "only with feature_map"),
        ({"feature_map": "favor", "num_features": 0}, "num_features"),
        ({"encoding": rw.RotaryEmbedding(4)}, "head_dim"),
        ({"num_kv_heads": 3}, "num_kv_heads"),
        ({"causal": None}, "True or False"),
    ],
)
def test_a_layer_that_cannot_be_made_is_not_made(options, words):
    with pytest.raises(rw.RopewalkError, match=words):
        rw.LinearAttention(32, 4, **options)


def test_random_features_want_their_width():
    with pytest.raises(rw.RopewalkError, match="8 features"):
        rw.FavorFeatures(8, 16)(torch.ones(2, 4))
    with pytest.raises(rw.RopewalkError, match="an int"):
        rw.FavorFeatures(8, 16, seed="x")
