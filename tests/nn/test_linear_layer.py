"""LinearAttention, random features, and every encoding through one interface in both kinds of attention."""

import copy
import math
import pickle

import pytest
import torch

import ropewalk as rw
from nn.linear_cases import exact
from ropewalk.nn.encodings.by_name import ENCODINGS

# Of torch, on a CPU that has no bfloat16.
pytestmark = pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")

DIM, HEADS, SEQ = 32, 4, 10
OPTIONS = {
    "learned": {"length": 64},
    "multiplicative": {"length": 64},
    "concatenated": {"width": 8},
    "t5": {"causal": True},
}
NAMES = tuple(ENCODINGS)
# Whether attention over embedded tokens moves when all positions shift by a constant. The recurrent encoding goes by
# the order of tokens, which a shift leaves as it is.
MOVES = {
    "none": False,
    "learned": True,
    "sinusoidal": True,
    "recurrent": False,
    "multiplicative": True,
    "concatenated": True,
    "t5": False,
    "alibi": False,
    "rope": False,
    "rope-across-heads": False,
    "xpos": False,
}


def made(name):
    torch.manual_seed(0)
    options = OPTIONS.get(name, {})
    if name == "xpos":
        options = {"spec": rw.RopeSpec(DIM // HEADS, xpos=rw.XPos(512))}
    encoding = rw.encoding(name, dim=DIM, num_heads=HEADS, **options).double()
    with torch.no_grad():
        for parameter in encoding.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.5)
    return encoding


def layers(encoding):
    """Both kinds of attention."""
    torch.manual_seed(1)
    return [kind(DIM, HEADS, encoding=encoding, dtype=torch.float64) for kind in (rw.Attention, rw.LinearAttention)]


def test_every_name_has_its_line_in_the_table():
    assert set(MOVES) == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_every_encoding_runs_in_the_attention_that_can_use_it(name):
    encoding = made(name)
    assert encoding.linear
    x = torch.randn(2, SEQ, DIM, dtype=torch.float64)
    for layer in layers(encoding):
        y = layer(encoding.embed(x, None))
        assert y.shape == x.shape
        assert y.isfinite().all()
        y.square().sum().backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in layer.parameters() if p.requires_grad)
        layer.zero_grad()


@pytest.mark.parametrize("name", NAMES)
def test_what_moves_when_all_positions_shift(name):
    encoding, ids = made(name), torch.arange(SEQ)
    x = torch.randn(2, SEQ, DIM, dtype=torch.float64)
    for layer in layers(encoding):
        here, there = (layer(encoding.embed(x, at), positions=at) for at in (ids, ids + 37))
        moved = (here - there).abs().max().item()
        assert (moved > 1e-3) if MOVES[name] else (moved < 1e-10), (type(layer).__name__, moved)
        assert encoding.relative == (not MOVES[name])


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("causal", [True, False])
def test_a_layer_is_projections_around_the_function(kv_heads, causal):
    torch.manual_seed(0)
    rope = rw.RotaryEmbedding(8)
    layer = rw.LinearAttention(
        DIM,
        HEADS,
        num_kv_heads=kv_heads,
        encoding=rope,
        causal=causal,
        qkv_bias=True,
        out_bias=True,
        dtype=torch.float64,
    )
    x = torch.randn(2, SEQ, DIM, dtype=torch.float64)
    q, k, v = (f(x).view(2, SEQ, -1, 8).transpose(1, 2) for f in (layer.q_proj, layer.k_proj, layer.v_proj))
    truth = layer.o_proj(exact(q, k, v, rope, causal=causal).transpose(1, 2).flatten(2))
    torch.testing.assert_close(layer(x), truth, rtol=0, atol=1e-10)


@pytest.mark.parametrize("feature_map", ["elu", "relu", "exp", "favor"])
def test_steps_are_the_whole(feature_map):
    torch.manual_seed(0)
    layer = rw.LinearAttention(
        DIM, HEADS, num_kv_heads=2, encoding=rw.RotaryEmbedding(8), feature_map=feature_map, dtype=torch.float64
    ).double()
    x = torch.randn(2, SEQ, DIM, dtype=torch.float64)
    y, state = layer.step(x[:, :4])
    steps = [y]
    for token in x[:, 4:].split(1, dim=1):
        y, state = layer.step(token, state)
        steps.append(y)
    torch.testing.assert_close(torch.cat(steps, dim=1), layer(x), rtol=1e-10, atol=1e-10)
    ends, packed = torch.tensor([0, 4, 10]), x[:1]
    parts = [layer(packed[:, :4]), layer(packed[:, 4:])]
    torch.testing.assert_close(layer(packed, cu_seqlens=ends), torch.cat(parts, dim=1), rtol=1e-10, atol=1e-10)
    seen = torch.arange(SEQ) < 7
    short = layer(x, key_mask=seen.expand(2, SEQ))[:, :7]
    torch.testing.assert_close(short, layer(x[:, :7]), rtol=1e-10, atol=1e-10)


@pytest.mark.slow
def test_a_layer_survives_what_is_done_to_layers():
    layer = rw.LinearAttention(DIM, HEADS, encoding=rw.RotaryEmbedding(16), feature_map="favor", num_features=16)
    x = torch.randn(1, SEQ, DIM)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(other(x), layer(x))
    twin = rw.LinearAttention(DIM, HEADS, encoding=rw.RotaryEmbedding(16), feature_map="favor", num_features=16)
    twin.load_state_dict(layer.state_dict())
    assert torch.equal(twin(x), layer(x))
    assert layer.to(torch.bfloat16)(x.to(torch.bfloat16)).isfinite().all()
    compiled = torch.compile(twin, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), twin(x), rtol=1e-5, atol=1e-5)


def test_random_features_outlive_casts_and_empty_memory():
    phi = rw.FavorFeatures(8, 20, seed=3)
    drawn = phi.projection.clone()
    assert torch.equal(phi.to(torch.bfloat16).projection, drawn)
    assert torch.equal(phi.double().projection, drawn)
    with torch.device("meta"):
        empty = rw.FavorFeatures(8, 20, seed=3)
    assert torch.equal(empty.to("meta").to_empty(device="cpu").projection, drawn)
    layer = rw.LinearAttention(DIM, HEADS, feature_map="favor")
    assert [name for name in layer.state_dict() if "projection" in name] == ["q_map.projection"]
    assert "causal=True" in repr(layer)


@pytest.mark.slow
def test_one_graph_serves_every_length():
    torch.compiler.reset()
    layer = rw.LinearAttention(DIM, HEADS, encoding=rw.RotaryEmbedding(DIM // HEADS))
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=True)
    # More and fewer than a chunk of 128, and whole chunks, to which nothing is added.
    for seq in (100, 64, 300, 256, 128):
        x = torch.randn(1, seq, DIM)
        torch.testing.assert_close(compiled(x), layer(x), rtol=1e-5, atol=1e-5)


def test_what_does_not_go_with_a_layer_is_refused():
    x = torch.randn(1, 4, DIM)
    layer = rw.LinearAttention(DIM, HEADS, causal=False)
    _, state = layer(x, return_state=True)
    for call in (lambda: layer.step(x), lambda: layer(x, state=state)):
        with pytest.raises(rw.RopewalkError, match="tokens in a state were read without"):
            call()
    for wrong in ("here", torch.arange(3)):
        with pytest.raises(rw.RopewalkError, match="positions"):
            layer(x, positions=wrong)
    assert torch.equal(layer(x, positions=torch.arange(4)), layer(x))
    with pytest.raises(rw.RopewalkError, match=r"pass RotaryEmbedding\(24\)"):
        rw.LinearAttention(DIM, HEADS, feature_map="favor", num_features=24, encoding=rw.RotaryEmbedding(16))
    assert "feature_map=('elu', 'relu')" in repr(rw.LinearAttention(DIM, HEADS, feature_map=("elu", "relu")))


@pytest.mark.parametrize(
    "index", [0, torch.tensor([True]), torch.tensor([1]), torch.tensor([[0]]), torch.tensor([0.0])]
)
def test_a_state_is_of_sequences_that_there_are(index):
    _, state = rw.linear_attention(*torch.randn(3, 1, 2, 4, 8), return_state=True)
    with pytest.raises(rw.RopewalkError, match="from 0 to 0"):
        state.reorder(index)
    assert len(state.reorder(torch.tensor([0, 0])).above) == 2


def test_a_state_can_be_read_and_moved():
    _, state = rw.linear_attention(*torch.randn(3, 1, 2, 4, 8), return_state=True)
    assert repr(state).startswith("LinearState(1 sequences, 2 heads, 8 features, 8 values")
    assert torch.equal(state.to("cpu").above, state.above)


def test_random_features_are_unbiased_and_orthogonal_ones_vary_less():
    torch.manual_seed(0)
    q, k = torch.randn(2, 8, dtype=torch.float64) * 0.25
    truth, draws = math.exp((q @ k).item() / math.sqrt(8)), 400
    maps = [rw.FavorFeatures(8, 16, seed=seed) for seed in range(draws)]
    found = torch.stack([(m(q[None]) * m(k[None])).sum() for m in maps])
    # Within four standard errors, which a wrong scale or a missing |y|^2 is not.
    assert abs(found.mean() - truth) < 4 * found.std() / math.sqrt(draws)
    random = torch.Generator().manual_seed(1)
    free = []
    for m in maps:
        m.projection = torch.randn(16, 8, generator=random)
        free.append((m(q[None]) * m(k[None])).sum())
    assert found.var() < torch.stack(free).var()
    assert all((m(torch.randn(5, 8)) > 0).all() for m in maps[:3])


def test_random_features_approximate_softmax():
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 24, 8, dtype=torch.float64) * 0.5
    soft = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    errors = [
        (rw.linear_attention(q, k, v, feature_map=rw.FavorFeatures(8, m)) - soft).norm() / soft.norm()
        for m in (32, 2048)
    ]
    assert errors[1] < 0.05 < errors[0]


def test_the_same_seed_is_the_same_draw():
    assert torch.equal(rw.FavorFeatures(8, 20, seed=3).projection, rw.FavorFeatures(8, 20, seed=3).projection)
    assert not torch.equal(rw.FavorFeatures(8, 20, seed=3).projection, rw.FavorFeatures(8, 20, seed=4).projection)
