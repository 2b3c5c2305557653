"""Where an added encoding is added: to the tokens, to q, k and v after their projections, or to q and k alone."""

import copy
import functools
import itertools
import pickle
from typing import Any

import numpy as np
import pytest
import torch

import ropewalk as rw
from nn.placement_oracle import Layer, derivative, output
from ropewalk import reference
from ropewalk.nn.encodings import base
from ropewalk.nn.encodings.absolute import LearnedEncoding, SinusoidalEncoding
from ropewalk.nn.encodings.by_name import ENCODINGS, options_of
from ropewalk.nn.encodings.rotary import RotaryEncoding
from strategies import vector

DIM, HEADS, WIDTH, LENGTH, BATCH, SEQ = 12, 3, 4, 16, 2, 5
PLACEMENTS = ["input", "projection", "scores"]
AFTER = ["projection", "scores"]
KINDS = ["learned", "sinusoidal"]
WEIGHTS = ("q", "k", "v", "o")
EXACT = {"rtol": 0, "atol": 1e-12}
IDS = {
    "range": None,
    "ids": torch.tensor([3, 4, 6, 7, 15]),
    "ids of a batch": torch.tensor([[0, 2, 3, 9, 11], [5, 6, 7, 8, 9]]),
}
REQUIRED: dict[str, dict[str, Any]] = {
    "learned": {"length": LENGTH},
    "multiplicative": {"length": LENGTH},
    "concatenated": {"width": 4},
    "xpos": {"spec": rw.RopeSpec(WIDTH, xpos=rw.XPos(64))},
}


def made(kind: str, placement: Any, seed: int = 0, **options: Any) -> Any:
    """In float64, with a table that is as large as the tokens."""
    options = REQUIRED.get(kind, {}) | options
    encoding = rw.encoding(kind, dim=DIM, num_heads=HEADS, placement=placement, **options).double()
    for parameter in encoding.parameters():
        parameter.data = vector(seed + 9, *parameter.shape)
    return encoding


def layer_of(encoding: Any, kind: Any = rw.Attention, **options: Any) -> Any:
    """A layer in float64, with weights from a fixed seed; grouped heads unless something else is asked for."""
    layer = kind(DIM, HEADS, encoding=encoding, **{"num_kv_heads": 1} | options).double().eval()
    for number, name in enumerate(WEIGHTS):
        weight = getattr(layer, f"{name}_proj").weight
        weight.data = vector(number + 1, *weight.shape) / 2
    return layer


def oracle_of(layer: Any, x: torch.Tensor, ids: torch.Tensor | None, **options: Any) -> Layer:
    encoding = layer.encoding
    table = encoding.weight.detach().numpy() if isinstance(encoding, LearnedEncoding) else None
    numbers = torch.arange(x.shape[1]) if ids is None else ids
    return Layer(
        x.detach().numpy(),
        *(getattr(layer, f"{name}_proj").weight.detach().numpy() for name in WEIGHTS),
        table=table,
        ids=numbers.expand(x.shape[:2]).numpy(),
        placement=encoding.placement,
        heads=layer.num_heads,
        kv_heads=layer.num_kv_heads,
        causal=layer.causal,
        linear=isinstance(layer, rw.LinearAttention),
        window=getattr(layer, "window", None),
        **options,
    )


def applied(layer: Any, x: torch.Tensor, ids: torch.Tensor | None, **options: Any) -> Any:
    """A model of one layer: the hook of the model, then the layer."""
    return layer(layer.encoding.embed(x, ids), ids, **options)


def check(layer: Any, x: torch.Tensor, ids: torch.Tensor | None) -> None:
    """Value, and the gradients of tokens, weights and table, in random directions."""
    oracle, x = oracle_of(layer, x, ids), x.clone().requires_grad_()
    y = applied(layer, x, ids)
    np.testing.assert_allclose(y.detach().numpy(), output(oracle), **EXACT)
    cotangent = vector(77, *y.shape)
    inputs = {"x": x} | {name: getattr(layer, f"{name}_proj").weight for name in WEIGHTS}
    if oracle.table is not None:
        inputs["table"] = layer.encoding.weight
    grads = torch.autograd.grad(y, list(inputs.values()), cotangent)
    for (name, tensor), grad in zip(inputs.items(), grads, strict=True):
        for seed in (80, 81):
            direction = vector(seed, *tensor.shape)
            expected = derivative(oracle, name, direction.numpy(), cotangent.numpy())
            assert (grad * direction).sum().item() == pytest.approx(expected, rel=1e-12, abs=1e-12), name


X = vector(0, BATCH, SEQ, DIM)
LAYERS = [rw.Attention, rw.LinearAttention]
named = functools.partial(pytest.mark.parametrize, ids=lambda value: getattr(value, "__name__", str(value)))


@pytest.mark.parametrize("positions", IDS)
@pytest.mark.parametrize("kv_heads", [1, 3])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("kind", KINDS)
@named("layer", LAYERS)
def test_values_and_gradients(layer, kind, placement, causal, kv_heads, positions):
    check(layer_of(made(kind, placement), layer, causal=causal, num_kv_heads=kv_heads), X, IDS[positions])


@pytest.mark.parametrize("placement", PLACEMENTS)
@named("layer", LAYERS)
def test_a_width_of_heads_that_is_not_a_part_of_the_model(layer, placement):
    options = {} if placement == "input" else {"head_dim": 6}
    encoding = made("learned", placement, **options)
    assert encoding.head_dim == options.get("head_dim")
    check(layer_of(encoding, layer, head_dim=6), X, IDS["ids"])


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_the_base(placement):
    layer = layer_of(made("sinusoidal", placement, base=50.0))
    oracle = oracle_of(layer, X, None, base=50.0)
    np.testing.assert_allclose(applied(layer, X, None).detach().numpy(), output(oracle), **EXACT)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_the_reference_says_the_same(kind, placement):
    """`project` per head, and the four hooks of the reference's layer."""
    layer, ids = layer_of(made(kind, placement), num_kv_heads=3), IDS["ids of a batch"]
    table = layer.encoding.weight if kind == "learned" else None

    def encode(x, positions):
        return reference.sinusoidal(x, positions) if table is None else reference.learned(x, positions, table)

    heads = {}
    for role in "qkv":
        weights = getattr(layer, f"{role}_proj").weight.view(HEADS, WIDTH, DIM)
        parts = [reference.project(X, ids, weight, encode, placement, role) for weight in weights]
        heads[role] = torch.stack(parts, dim=1)
    y = reference.softmax_attention(heads["q"], heads["k"], heads["v"], causal=True)
    truth = layer.joined(y)
    assert torch.allclose(applied(layer, X, ids), truth, **EXACT)
    by_hooks = reference.multi_head_attention(
        X,
        reference.Projections(*(getattr(layer, f"{name}_proj").weight for name in WEIGHTS)),
        num_heads=HEADS,
        positions=ids,
        causal=True,
        embed=layer.encoding.embed,
        encode_heads=layer.encoding.encode_heads,
        rotate=layer.encoding.rotate,
    )
    assert torch.allclose(by_hooks, truth, **EXACT)


def test_the_three_placements_differ():
    results = [applied(layer_of(made("sinusoidal", placement)), X, None) for placement in PLACEMENTS]
    for a, b in itertools.combinations(results, 2):
        assert (a - b).abs().max() > 1e-2


# Wrong encodings: the comparison above has to reject each of them.


class AddsToValuesToo(SinusoidalEncoding):
    def encode_heads(self, q, k, v, positions=None, *, k_positions=None):
        self.placement = "projection"
        q, k, v = super().encode_heads(q, k, v, positions, k_positions=k_positions)
        self.placement = "scores"
        return q, k, v


class LeavesValues(SinusoidalEncoding):
    def encode_heads(self, q, k, v, positions=None, *, k_positions=None):
        return *super().encode_heads(q, k, v, positions, k_positions=k_positions)[:2], v


class AddsToQueriesAlone(SinusoidalEncoding):
    def encode_heads(self, q, k, v, positions=None, *, k_positions=None):
        return super().encode_heads(q, k, v, positions, k_positions=k_positions)[0], k, v


class AlsoEmbeds(SinusoidalEncoding):
    def embed(self, x, positions=None, *, cache=None):
        return x + SinusoidalEncoding(DIM).embed(torch.zeros_like(x), positions)


class AddsToTheFirstHeadAlone(SinusoidalEncoding):
    def encode_heads(self, q, k, v, positions=None, *, k_positions=None):
        changed = super().encode_heads(q, k, v, positions, k_positions=k_positions)
        first = [torch.cat((new[:, :1], old[:, 1:]), 1) for new, old in zip(changed, (q, k, v), strict=True)]
        return first[0], first[1], first[2]


class CountsFromZero(SinusoidalEncoding):
    def encode_heads(self, q, k, v, positions=None, *, k_positions=None):
        return super().encode_heads(q, k, v)


class AddsTwice(SinusoidalEncoding):
    def encode_heads(self, q, k, v, positions=None, *, k_positions=None):
        once = super().encode_heads(q, k, v, positions, k_positions=k_positions)
        return super().encode_heads(*once, positions, k_positions=k_positions)


MUTANTS = [
    (AddsToValuesToo, "scores"),
    (LeavesValues, "projection"),
    *itertools.product((AddsToQueriesAlone, AlsoEmbeds, AddsToTheFirstHeadAlone, CountsFromZero, AddsTwice), AFTER),
]


@named(("mutant", "placement"), MUTANTS)
@named("layer", LAYERS)
def test_wrong_placements_are_noticed(layer, mutant, placement):
    wrong = layer_of(mutant(WIDTH, placement=placement).double(), layer)
    with pytest.raises(AssertionError):
        check(wrong, X, IDS["ids of a batch"])


class AddsAfterTheFeatureMap(rw.LinearAttention):
    def forward(self, x, positions=None, state=None, **options):
        q, k, v = self.heads_of(x)
        p, zero = SinusoidalEncoding(WIDTH).double(), torch.zeros(1, 1, SEQ, WIDTH).double()
        added = p.embed(zero[0], positions)
        return self.joined(rw.linear_attention(q, k, v, feature_map=lambda z: torch.nn.functional.elu(z) + 1 + added))


def test_an_addition_after_the_feature_map_is_noticed():
    with pytest.raises(AssertionError):
        check(layer_of(made("sinusoidal", "scores"), AddsAfterTheFeatureMap), X, None)


# Caches and states: a stored key and its value contain their vector.


def steps(layer: Any, x: torch.Tensor, parts: tuple[int, ...], cache: Any, start: int = 0) -> torch.Tensor:
    """The layer over parts of x, with a cache."""
    outputs = []
    for part in x.split(parts, dim=1):
        ids = torch.arange(start, start + part.shape[1])
        outputs.append(layer(layer.encoding.embed(part, ids), cache=cache))
        start += part.shape[1]
    return torch.cat(outputs, dim=1)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("parts", [(1,) * 9, (4, 1, 3, 1)], ids=["token by token", "parts"])
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_decoding_is_the_whole(kind, placement, parts, window):
    layer, x = layer_of(made(kind, placement), window=window), vector(5, BATCH, 9, DIM)
    truth = torch.as_tensor(output(oracle_of(layer, x, None)))
    cache = layer.make_cache(BATCH, 9)
    assert isinstance(cache, rw.RollingKVCache) == (window is not None)
    assert torch.allclose(steps(layer, x, parts, cache), truth, **EXACT)


@pytest.mark.parametrize("placement", AFTER)
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_a_cache_that_was_saved_copied_or_reordered(kind, placement):
    layer, x = layer_of(made(kind, placement)), vector(5, BATCH, 9, DIM)
    truth = torch.as_tensor(output(oracle_of(layer, x, None)))
    cache, loaded = layer.make_cache(BATCH, 9), layer.make_cache(BATCH, 12)
    steps(layer, x[:, :6], (6,), cache)
    loaded.load_state_dict(cache.state_dict())
    for other in (loaded, copy.copy(cache), pickle.loads(pickle.dumps(cache))):
        assert torch.allclose(steps(layer, x[:, 6:], (1, 2), other, 6), truth[:, 6:], **EXACT)
    swapped = torch.tensor([1, 0])
    cache.reorder(swapped)
    assert torch.allclose(steps(layer, x[swapped, 6:], (3,), cache, 6), truth[swapped, 6:], **EXACT)


@pytest.mark.parametrize("placement", AFTER)
@torch.no_grad()
def test_positions_continue_from_a_cache_and_lengths_differ(placement):
    layer, x = layer_of(made("learned", placement)), vector(5, BATCH, 6, DIM)
    ids = torch.tensor([2, 3, 5, 9, 10, 11])
    truth = torch.as_tensor(output(oracle_of(layer, x, ids)))
    cache = layer.make_cache(BATCH, 8)
    first = layer(x[:, :4], ids[:4], cache=cache)
    assert torch.allclose(torch.cat((first, layer(x[:, 4:], cache=cache)), dim=1), truth, **EXACT)
    # The second sequence has two tokens less.
    cache, shorter = layer.make_cache(BATCH, 8), torch.as_tensor(output(oracle_of(layer, x[1:, 2:], None)))
    padded = torch.stack((x[0, :4], torch.cat((x[1, 2:4], x[1, :2]))))
    layer(padded, cache=cache, counts=torch.tensor([4, 2]))
    last = layer(x[:, 4:], cache=cache)
    whole = torch.as_tensor(output(oracle_of(layer, x[:1], None)))
    assert torch.allclose(last, torch.cat((whole[:, 4:], shorter[:, 2:])), **EXACT)


class Doubled(rw.Encoding):
    """An encoding of a user, which says nothing of being absolute."""

    def encode_heads(self, q, k, v, positions=None, *, k_positions=None):
        return q, 2 * k, v


class DoubledRope(RotaryEncoding):
    def encode_heads(self, q, k, v, positions=None, *, k_positions=None):
        return q, 2 * k, v


@named(
    "encoding",
    [
        *(made(kind, placement) for kind in KINDS for placement in AFTER),
        Doubled(),
        DoubledRope(rw.RotaryEmbedding(WIDTH)),
    ],
)
@torch.no_grad()
def test_keys_with_an_added_vector_are_not_moved(encoding):
    layer = layer_of(encoding)
    cache, x = layer.make_cache(BATCH, 9), vector(5, BATCH, 9, DIM)
    layer(x[:, :6], cache=cache)
    with pytest.raises(rw.RopewalkError, match=r"if it is absolute, call reset\(\)"):
        cache.evict_prefix(2, encoding)
    assert cache.lengths.tolist() == [6, 6]


@pytest.mark.parametrize("placement", AFTER)
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_a_prefix_is_dropped_if_the_others_keep_their_positions(kind, placement):
    layer = layer_of(made(kind, placement))
    cache, x = layer.make_cache(BATCH, 9), vector(5, BATCH, 9, DIM)
    layer(x[:, :6], cache=cache)
    cache.evict_prefix(2, None)
    last = layer(x[:, 6:], cache=cache)
    truth = output(oracle_of(layer, x[:, 2:], torch.arange(2, 9)))[:, 4:]
    np.testing.assert_allclose(last.numpy(), truth, **EXACT)


@pytest.mark.parametrize("window", [None, 2])
@pytest.mark.parametrize("placement", AFTER)
@pytest.mark.parametrize("kind", KINDS)
def test_packed_sequences_and_padding(kind, placement, window):
    layer, ends = layer_of(made(kind, placement), window=window), torch.tensor([0, 3, 9])
    x = vector(5, 1, 9, DIM)
    parts = [output(oracle_of(layer, x[:, part], None)) for part in (slice(3), slice(3, 9))]
    packed = layer(x, cu_seqlens=ends).detach().numpy()
    np.testing.assert_allclose(packed, np.concatenate(parts, axis=1), **EXACT)
    # Padding at the front: the first two tokens are hidden, and contain NaN.
    hidden = x.clone()
    hidden[:, :2] = float("nan")
    seen = torch.arange(9)[None] >= 2
    ids = (torch.arange(9) - 2).clamp_min(0)
    y = layer(hidden, ids, key_mask=seen)[:, 2:].detach().numpy()
    np.testing.assert_allclose(y, output(oracle_of(layer, x[:, 2:], None)), **EXACT)


@pytest.mark.parametrize("placement", AFTER)
@pytest.mark.parametrize("kind", KINDS)
def test_the_function(kind, placement):
    """Queries that are the last tokens, positions of both sides, and no causality."""
    layer = layer_of(made(kind, placement))
    truth = torch.as_tensor(output(oracle_of(layer, X, IDS["ids of a batch"])))
    q, k, v = layer.heads_of(X)
    call = functools.partial(rw.attention, encoding=layer.encoding, k_positions=IDS["ids of a batch"])
    assert torch.allclose(layer.joined(call(q, k, v)), truth, **EXACT)
    assert torch.allclose(layer.joined(call(q[:, :, 3:], k, v)), truth[:, 3:], **EXACT)
    layer.causal = False
    truth = torch.as_tensor(output(oracle_of(layer, X, IDS["ids of a batch"])))
    last = call(q[:, :, 3:], k, v, q_positions=IDS["ids of a batch"][:, 3:], causal=False, return_lse=True)[0]
    assert torch.allclose(layer.joined(last), truth[:, 3:], **EXACT)


def test_values_of_another_width():
    """The scores do not change values; a vector of the heads' width cannot be added to others."""
    q, k, v = vector(0, 1, 2, 5, WIDTH), vector(1, 1, 1, 5, WIDTH), vector(2, 1, 1, 5, 7)
    for attention in (rw.attention, lambda *x, encoding: rw.linear_attention(*x, rope=encoding)):
        assert attention(q, k, v, encoding=made("sinusoidal", "scores")).shape == (1, 2, 5, 7)
        with pytest.raises(rw.RopewalkError, match=r"encode_heads\(v\)\nexpected: heads \[batch, heads, seq, 4\]"):
            attention(q, k, v, encoding=made("sinusoidal", "projection"))


# Linear attention: φ(q + p) · φ(k + p), and values with or without p.


@pytest.mark.parametrize("parts", [(1,) * 9, (4, 1, 3, 1)], ids=["token by token", "parts"])
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("kind", KINDS)
def test_steps_of_linear_attention_are_the_whole(kind, placement, parts):
    layer, x = layer_of(made(kind, placement), rw.LinearAttention), vector(5, BATCH, 9, DIM)
    truth = torch.as_tensor(output(oracle_of(layer, x, None)))
    for state in (None, layer.make_state(BATCH)):
        outputs, start, position = [], 0, None
        for part in x.split(parts, dim=1):
            y, state = layer.step(layer.encoding.embed(part, torch.arange(start, start + part.shape[1])), state)
            outputs.append(y)
            start, position = start + part.shape[1], state.position
        assert torch.allclose(torch.cat(outputs, dim=1), truth, **EXACT)
        assert position == 9


@pytest.mark.parametrize("placement", AFTER)
@pytest.mark.parametrize("kind", KINDS)
def test_positions_continue_from_a_state(kind, placement):
    layer, x = layer_of(made(kind, placement), rw.LinearAttention), vector(5, BATCH, 6, DIM)
    ids = torch.tensor([[2, 3, 5, 9, 10, 11], [0, 1, 7, 8, 9, 10]])
    truth = torch.as_tensor(output(oracle_of(layer, x, ids)))
    first, state = layer(x[:, :4], ids[:, :4], return_state=True)
    assert state.position.tolist() == [10, 9]
    loaded = type(state).from_state_dict(state.state_dict())
    for other in (state, loaded):
        assert torch.allclose(torch.cat((first, layer(x[:, 4:], state=other)), dim=1), truth, **EXACT)
    if kind == "sinusoidal":
        _, state = layer(x[:, :4], ids[:, :4] + 0.5, return_state=True)
        truth = torch.as_tensor(output(oracle_of(layer, x, ids + 0.5)))
        assert torch.allclose(layer(x[:, 4:], state=state), truth[:, 4:], **EXACT)


@pytest.mark.parametrize("placement", AFTER)
@pytest.mark.parametrize("kind", KINDS)
def test_packed_sequences_and_padding_of_linear_attention(kind, placement):
    layer, ends = layer_of(made(kind, placement), rw.LinearAttention), torch.tensor([0, 3, 9])
    x = vector(5, 1, 9, DIM)
    parts = [torch.as_tensor(output(oracle_of(layer, x[:, part], None))) for part in (slice(3), slice(3, 9))]
    truth = torch.cat(parts, dim=1)
    assert torch.allclose(layer(x, cu_seqlens=ends), truth, **EXACT)
    # Each sequence in two parts: the state has one row per sequence.
    first = torch.cat((x[:, :2], x[:, 3:5]), dim=1)
    rest = torch.cat((x[:, 2:3], x[:, 5:]), dim=1)
    _, state = layer(first, cu_seqlens=torch.tensor([0, 2, 4]), return_state=True)
    y = layer(rest, state=state, cu_seqlens=torch.tensor([0, 1, 5]))
    assert torch.allclose(y, torch.cat((truth[:, 2:3], truth[:, 5:]), dim=1), **EXACT)
    hidden = x.clone()
    hidden[:, 7:] = float("nan")
    y = layer(hidden, key_mask=torch.arange(9)[None] < 7)[:, :7]
    assert torch.allclose(y, torch.as_tensor(output(oracle_of(layer, x[:, :7], None))), **EXACT)


@pytest.mark.parametrize("placement", AFTER)
@pytest.mark.parametrize("kind", KINDS)
def test_the_function_of_linear_attention(kind, placement):
    layer = layer_of(made(kind, placement), rw.LinearAttention)
    ids = IDS["ids of a batch"]
    truth = torch.as_tensor(output(oracle_of(layer, X, ids)))
    q, k, v = layer.heads_of(X)
    call = functools.partial(rw.linear_attention, rope=layer.encoding)
    assert torch.allclose(layer.joined(call(q, k, v, positions=ids)), truth, **EXACT)
    assert torch.allclose(layer.joined(call(q[:, :, 3:], k, v, k_positions=ids)), truth[:, 3:], **EXACT)
    both = {"positions": ids[:, 3:], "k_positions": ids}
    assert torch.allclose(layer.joined(call(q[:, :, 3:], k, v, **both)), truth[:, 3:], **EXACT)
    # Queries are the last tokens after those of a state.
    _, state = call(q[:, :, :1], k[:, :, :1], v[:, :, :1], return_state=True)
    last = call(q[:, :, 3:], k[:, :, 1:], v[:, :, 1:], state=state)
    by_range = torch.as_tensor(output(oracle_of(layer, X, None)))
    assert torch.allclose(layer.joined(last), by_range[:, 3:], **EXACT)
    with pytest.raises(rw.RopewalkError, match=r"linear_attention\(k_positions=...\)"):
        call(q, k, v, k_positions=ids[:, :4])


def test_features_that_are_a_function():
    phi = rw.FavorFeatures(WIDTH, 6).double()
    layer = layer_of(made("learned", "scores"), rw.LinearAttention, feature_map=phi)
    q, k, v = layer.heads_of(X)
    p = layer.encoding.weight[:SEQ]
    truth = layer.joined(rw.linear_attention(q + p, k + p, v, feature_map=phi))
    assert torch.allclose(layer(X), truth, **EXACT)


@pytest.mark.parametrize("placement", [None, *PLACEMENTS])
@pytest.mark.parametrize("name", ENCODINGS)
def test_every_encoding_at_every_placement_is_refused_or_right_in_linear_attention(name, placement, monkeypatch):
    monkeypatch.setattr(base, "_EMBEDDED", set())
    choice = {} if placement is None else {"placement": placement}
    if placement is not None and "placement" not in options_of(name):
        with pytest.raises(
            rw.RopewalkError, match=r"expected: no placement: it .*\n(.|\n)*'learned', 'sinusoidal' can"
        ):
            rw.encoding(name, dim=DIM, num_heads=HEADS, **REQUIRED.get(name, {}), **choice)
        return
    causal = {"causal": True} if name == "t5" else {}
    encoding: Any = rw.encoding(name, dim=DIM, num_heads=HEADS, **REQUIRED.get(name, {}), **choice, **causal).double()
    if name == "t5":
        torch.nn.init.normal_(encoding.weight)
    layer = layer_of(encoding, rw.LinearAttention, num_kv_heads=HEADS)
    x = encoding.embed(X)
    q, k, v = layer.heads_of(x)
    rotated, ids = getattr(encoding, "rope", None), torch.arange(SEQ)
    if placement in AFTER:
        p = encoding.encode_heads(*(torch.zeros_like(z) for z in (q, k, v)))
        q, k, v = q + p[0], k + p[1], v + p[2]
    phi_q, phi_k = (torch.nn.functional.elu(z) + 1 for z in (q, k))
    bias = encoding.bias(ids, ids)
    weights = 1.0 if bias is None else bias.exp()
    below = (phi_q @ phi_k.mT * weights).tril()
    above = below if rotated is None else (lambda a, b: (a @ b.mT).tril())(*rotated(phi_q, phi_k, positions=ids))
    truth = layer.joined(above @ v / below.sum(-1, keepdim=True))
    assert torch.allclose(layer(x), truth, **EXACT)
    assert encoding.only_embeds == (name in ("recurrent", "multiplicative", "concatenated") or placement == "input"
                                    or (placement is None and name in KINDS))  # fmt: skip


@pytest.mark.parametrize("placement", AFTER)
@pytest.mark.parametrize("kind", KINDS)
def test_as_many_keys_as_queries_at_other_positions(kind, placement):
    """Keys and values have the positions of the keys."""
    encoding, ids = made(kind, placement), IDS["ids of a batch"]
    table, eye = getattr(encoding, "weight", None), torch.eye(WIDTH).double()
    heads = [vector(seed, BATCH, HEADS, SEQ, WIDTH) for seed in range(3)]

    def encode(x, positions):
        return reference.sinusoidal(x, positions) if table is None else reference.learned(x, positions, table)

    encoded = encoding.encode_heads(*heads, ids, k_positions=ids + 3)
    for role, x, y in zip("qkv", heads, encoded, strict=True):
        positions = ids if role == "q" else ids + 3
        assert torch.allclose(y, reference.project(x, positions, eye, encode, placement, role), **EXACT)
