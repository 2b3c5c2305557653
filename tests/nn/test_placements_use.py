"""Placements in use: what an encoding says of itself, what is refused, hooks of users, and what PyTorch does to it."""

import copy
import itertools
import pickle
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch.utils._python_dispatch import TorchDispatchMode

import ropewalk as rw
from nn.test_placements import (
    AFTER,
    BATCH,
    DIM,
    EXACT,
    HEADS,
    IDS,
    KINDS,
    LAYERS,
    LENGTH,
    PLACEMENTS,
    REQUIRED,
    SEQ,
    WIDTH,
    DoubledRope,
    X,
    layer_of,
    made,
    named,
)
from ropewalk import reference
from ropewalk.nn.encodings import base
from ropewalk.nn.encodings.absolute import LearnedEncoding, SinusoidalEncoding
from slow import slow
from strategies import vector


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_what_it_says_of_itself(kind, placement, monkeypatch):
    monkeypatch.setattr(base, "_EMBEDDED", set())
    encoding, q = made(kind, placement), vector(0, BATCH, HEADS, SEQ, WIDTH)
    assert (encoding.placement, encoding.relative, encoding.linear) == (placement, False, True)
    assert encoding.only_embeds == (placement == "input")
    assert encoding.dim == (DIM if placement == "input" else WIDTH)
    assert encoding.length == (LENGTH if kind == "learned" else None)
    assert ("placement" in repr(encoding)) == (placement != "input")
    assert repr(made(kind, "input")) == repr(rw.encoding(kind, dim=DIM, num_heads=HEADS, **REQUIRED.get(kind, {})))
    if placement == "input":
        assert all(a is b for a, b in zip(encoding.encode_heads(q, q, q), (q, q, q), strict=True))
        return
    assert f"placement={placement!r}" in repr(encoding)
    # Models call embed of any encoding. No layer warns that it was not called, nor that it was.
    assert encoding.embed(X) is X
    assert encoding.embed(X, IDS["ids"] + LENGTH) is X
    for layer in LAYERS:
        layer_of(encoding, layer)(X)
    assert not base._EMBEDDED
    assert (encoding.encode_heads(q, q, q)[2] is q) == (placement == "scores")


@pytest.mark.parametrize("placement", AFTER)
def test_it_is_absolute(placement):
    for kind, layer in itertools.product(KINDS, LAYERS):
        attention, ids = layer_of(made(kind, placement), layer), torch.arange(SEQ)
        assert (attention(X, ids) - attention(X, ids + 7)).abs().max() > 1e-2


@pytest.mark.usefixtures("as_a_user")
@pytest.mark.parametrize("ids", [[0, 1, 2, 3, LENGTH], [0, -1, 2, 3, 4], [2**40, 1, 2, 3, 4]])
@pytest.mark.parametrize("placement", AFTER)
@named("layer", LAYERS)
@pytest.mark.filterwarnings("ignore::ropewalk.errors.RopewalkWarning")
def test_a_table_ends(layer, placement, ids):
    attention, positions = layer_of(made("learned", placement), layer), torch.tensor(ids)
    with pytest.raises(rw.RopewalkError, match=r"from 0 to 15, the rows of the table\ngot: +positions from") as error:
        attention(X, positions)
    assert error.value.asked == "LearnedEncoding.encode_heads(positions)"
    with pytest.raises(rw.RopewalkError, match="positions from 0 to 16"):
        attention(vector(0, 1, LENGTH + 1, DIM))
    with pytest.raises(rw.RopewalkError, match="of whole numbers"):
        attention(X, torch.arange(SEQ) + 0.5)
    # What the host does not look at, the device refuses: negative ids are not counted from the end.
    torch._dynamo.reset()
    q = vector(0, BATCH, HEADS, SEQ, WIDTH)
    compiled = torch.compile(attention.encoding.encode_heads, fullgraph=True, backend="eager")
    for numbers in (positions, torch.stack((positions, positions))):
        with pytest.raises(IndexError):
            compiled(q, q, q, numbers)


@torch.no_grad()
def test_a_table_ends_in_a_cache_and_in_a_state():
    attention, linear = (layer_of(made("learned", "scores"), layer) for layer in LAYERS)
    cache, x = attention.make_cache(1, 20), vector(0, 1, LENGTH, DIM)
    attention(x, cache=cache)
    _, state = linear.step(x)
    for call in (lambda: attention(x[:, :1], cache=cache), lambda: linear.step(x[:, :1], state)):
        with pytest.raises(rw.RopewalkError, match="got:      positions from 16 to 16"):
            call()
    assert cache.lengths.tolist() == [LENGTH]


BAD_POSITIONS = {
    "a list": [0, 1, 2, 3, 4],
    "bool": torch.ones(SEQ, dtype=torch.bool),
    "half precision": torch.arange(SEQ).half(),
    "too few": torch.arange(SEQ - 1),
    "another batch": torch.zeros(3, SEQ).long(),
    "another device": torch.arange(SEQ, device="meta"),
    "NaN": torch.full((SEQ,), float("nan")),
}


@pytest.mark.usefixtures("as_a_user")
@pytest.mark.parametrize("case", BAD_POSITIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_bad_positions(kind, case):
    encoding, q, ids = made(kind, "projection"), vector(0, BATCH, HEADS, SEQ, WIDTH), BAD_POSITIONS[case]
    name = type(encoding).__name__
    with pytest.raises(rw.RopewalkError) as error:
        encoding.encode_heads(q, q, q, ids)
    assert error.value.asked == f"{name}.encode_heads(positions)"
    with pytest.raises(rw.RopewalkError) as error:
        encoding.encode_heads(q, q, q, torch.arange(SEQ), k_positions=ids)
    assert error.value.asked == f"{name}.encode_heads(k_positions)"
    with pytest.raises(rw.RopewalkError) as error:
        encoding.encode_heads(q[:, :, :3], q, q, torch.arange(3))
    assert error.value.asked == f"{name}.encode_heads(positions)"


@pytest.mark.usefixtures("as_a_user")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("number", range(3))
def test_bad_heads(kind, number):
    encoding, q = made(kind, "projection"), vector(0, BATCH, HEADS, SEQ, WIDTH)
    for bad in (q[..., :3], q[0], q.long(), q.to(torch.complex128), [1.0]):
        heads: list[Any] = [q, q, q]
        heads[number] = bad
        with pytest.raises(rw.RopewalkError, match=r"heads \[batch, heads, seq, 4\] in float32") as error:
            encoding.encode_heads(*heads)
        assert error.value.asked == f"{type(encoding).__name__}.encode_heads({'qkv'[number]})"
    if kind == "learned":
        with pytest.raises(rw.RopewalkError, match="heads on meta, the device of its parameters"):
            encoding.to("meta").encode_heads(q, q, q)


@pytest.mark.usefixtures("as_a_user")
@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("rope", {"placement": "scores"}, "no placement: it rotates queries and keys"),
        ("xpos", {"placement": "input"}, "no placement: it rotates queries and keys"),
        ("t5", {"placement": "input"}, "no placement: it adds a bias to the scores"),
        ("alibi", {"placement": "scores"}, "'learned', 'sinusoidal' can have 'input', 'projection', 'scores'"),
        ("multiplicative", {"placement": "projection", "length": 4}, "no placement: it changes the tokens"),
        ("recurrent", {"placement": "input"}, "no placement: it changes the tokens before the first layer"),
        ("none", {"placement": "scores"}, "no placement: it adds no position"),
        ("rope", {"placement": "anywhere"}, "no placement"),
        ("learned", {"placement": "score", "length": 4}, "did you mean 'scores'?"),
        ("sinusoidal", {"placement": None}, "'input' or 'projection' or 'scores'"),
        ("learned", {"placement": "output", "length": 4}, "'input' or 'projection' or 'scores'"),
        ("learned", {"placement": "scores"}, "length=, which is required"),
        ("learned", {"head_dim": 4, "length": 4}, 'head_dim only with placement="projection" or "scores"'),
        ("sinusoidal", {"head_dim": 4}, "omit head_dim"),
        ("learned", {"placement": "scores", "length": 4, "dim": 13}, "pass the width of one head as head_dim="),
        ("sinusoidal", {"placement": "scores", "head_dim": 0}, "an integer of at least 1"),
        ("sinusoidal", {"placement": "scores", "num_heads": 4}, "an even integer of at least 2"),
        ("sinusoidal", {"place": "scores"}, "did you mean placement=?"),
    ],
)
def test_what_the_factory_refuses(name, options, said):
    with pytest.raises(rw.RopewalkError) as error:
        rw.encoding(name, **{"dim": DIM, "num_heads": HEADS} | options)
    assert said in str(error.value)


@pytest.mark.usefixtures("as_a_user")
def test_what_the_classes_refuse():
    for kind, options in ((LearnedEncoding, {"length": 4}), (SinusoidalEncoding, {})):
        with pytest.raises(rw.RopewalkError, match="'input' or 'projection' or 'scores'") as error:
            kind(4, placement="values", **options)
        assert error.value.asked == f"{kind.__name__}(placement=...)"


@pytest.mark.usefixtures("as_a_user")
@pytest.mark.parametrize("placement", AFTER)
@named("layer", LAYERS)
def test_heads_of_another_width(layer, placement):
    encoding = made("learned", placement)
    for options in ({"num_heads": 2}, {"num_heads": 3, "head_dim": 6}, {"num_heads": 3, "head_dim": 2}):
        with pytest.raises(rw.RopewalkError, match=r"an encoding for heads of \d features\ngot: +LearnedEncoding\(4"):
            layer(DIM, encoding=encoding, **options)
    # One for the input fits any heads.
    layer(DIM, 2, encoding=made("learned", "input"))
    q = vector(0, 1, 2, SEQ, 6)
    with pytest.raises(rw.RopewalkError, match="heads of 6 features"):
        rw.attention(q, q, q, encoding=encoding)
    with pytest.raises(rw.RopewalkError, match=r"seq, 4\]"):
        rw.linear_attention(q, q, q, rope=encoding)


@pytest.mark.usefixtures("as_a_user")
def test_functions_still_refuse_what_only_embeds():
    q = vector(0, 1, HEADS, SEQ, WIDTH)
    for kind in KINDS:
        with pytest.raises(rw.RopewalkError, match="which changes tokens before they are projected"):
            rw.attention(q, q, q, encoding=made(kind, "input"))
        with pytest.raises(rw.RopewalkError, match="which changes tokens before they are projected"):
            rw.linear_attention(q, q, q, rope=made(kind, "input"))


# An encoding of a user.


class Shifted(rw.Encoding):
    """Adds its position to every value, in float64."""

    name = "shifted"
    relative = False

    def encode_heads(self, q, k, v, positions=None, *, k_positions=None):
        ids = torch.arange(k.shape[2]) if positions is None else positions if k_positions is None else k_positions
        return q, k, v + ids.double().reshape(-1, 1, ids.shape[-1], 1)


@named("layer", LAYERS)
def test_the_hook_of_a_user(layer):
    plain, shifted = layer_of(None, layer), layer_of(Shifted(), layer)
    q, k, v = plain.heads_of(X)
    attention = rw.attention if layer is rw.Attention else rw.linear_attention
    truth = plain.joined(attention(q, k, v + IDS["ids"].double()[:, None]))
    assert torch.allclose(shifted(X, IDS["ids"]), truth, **EXACT)
    low = copy.deepcopy(shifted).bfloat16()
    assert low(X.bfloat16()).dtype == torch.bfloat16


def test_a_hook_and_a_rotation_of_one_encoding():
    """encode_heads is before rotate, and in linear attention before the feature map."""
    rope, layer = rw.RotaryEmbedding(WIDTH), layer_of(DoubledRope(rw.RotaryEmbedding(WIDTH)))
    q, k, v = layer.heads_of(X)
    truth = layer.joined(rw.attention(q, 2 * k, v, encoding=rope))
    assert torch.allclose(layer(X), truth, **EXACT)
    linear = layer_of(DoubledRope(rw.RotaryEmbedding(WIDTH)), rw.LinearAttention)
    truth = linear.joined(rw.linear_attention(q, 2 * k, v, rope=rope))
    assert torch.allclose(linear(X), truth, **EXACT)


# What PyTorch does to modules.


QUICK = [(rw.Attention, "learned", "projection", "ids")]
COMPILED = [
    case if case in QUICK else slow(*case) for case in itertools.product(LAYERS, KINDS, AFTER, ("range", "ids"))
]


@named(("layer", "kind", "placement", "positions"), COMPILED)
def test_compiled_in_one_graph(layer, kind, placement, positions):
    torch._dynamo.reset()
    attention, ids = layer_of(made(kind, placement), layer), IDS[positions]
    counter = CompileCounter()
    compiled = torch.compile(attention, fullgraph=True, backend=counter, dynamic=True)
    for seq in (5, 3):
        numbers = None if ids is None else ids[..., :seq]
        assert torch.allclose(compiled(X[:, :seq], numbers), attention(X[:, :seq], numbers), **EXACT)
    # As many graphs as a layer without an encoding: the first is for the first length.
    assert counter.frame_count <= 2


@pytest.mark.parametrize("placement", [slow(placement) for placement in AFTER])
@torch.no_grad()
def test_compiled_steps(placement):
    torch._dynamo.reset()
    attention, linear = (layer_of(made("learned", placement), layer) for layer in LAYERS)
    cache, state, x = attention.make_cache(BATCH, 8), linear.make_state(BATCH), X
    step = torch.compile(lambda x, cache: attention(x, cache=cache), fullgraph=True, backend="eager")
    linear_step = torch.compile(linear.step, fullgraph=True, backend="eager")
    outputs, linear_outputs = [], []
    for token in x.split(1, dim=1):
        outputs.append(step(token, cache))
        y, state = linear_step(token, state)
        linear_outputs.append(y)
    assert torch.allclose(torch.cat(outputs, dim=1), attention(x), **EXACT)
    assert torch.allclose(torch.cat(linear_outputs, dim=1), linear(x), **EXACT)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "placement"), [("learned", "projection"), ("sinusoidal", "scores")])
def test_compiled_by_inductor(kind, placement):
    torch._dynamo.reset()
    attention = layer_of(made(kind, placement))
    x = X.clone().requires_grad_()
    compiled = torch.compile(attention, fullgraph=True)
    y = compiled(x, IDS["ids of a batch"])
    truth = attention(x, IDS["ids of a batch"])
    assert torch.allclose(y, truth, rtol=0, atol=1e-11)
    parameters = [x, *attention.parameters()]
    cotangent = vector(3, *y.shape)
    grads, right = (torch.autograd.grad(z, parameters, cotangent) for z in (y, truth))
    assert all(torch.allclose(a, b, rtol=0, atol=1e-11) for a, b in zip(grads, right, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("placement", AFTER)
def test_where_sums_are_rounded(placement, dtype):
    """Sines are computed in float64 and rounded to float32. Rows have the dtype of the table. Sums are rounded once."""
    q, k, v = (vector(seed, BATCH, HEADS, SEQ, WIDTH).to(dtype) for seed in range(3))
    ids = IDS["ids of a batch"]
    sines = made("sinusoidal", placement).to(dtype)
    rows = made("learned", placement).float()
    waves = reference.sinusoidal_table(ids, WIDTH)[:, None]
    for encoding, p in ((sines, waves.float()), (rows, rows.weight[ids][:, None])):
        results = encoding.encode_heads(q, k, v, ids)
        for x, y in zip((q, k, v), results, strict=True):
            expected = x if x is v and placement == "scores" else (x.to(p.dtype) + p).to(dtype)
            assert torch.equal(y, expected)
    low = made("learned", placement).to(dtype)
    assert all(y.dtype == dtype for y in low.encode_heads(q, k, v, ids))
    # At the input the sum is in float64 too.
    x = X.to(dtype)
    assert torch.equal(
        made("sinusoidal", "input").embed(x, ids), (x.double() + reference.sinusoidal_table(ids, DIM)).to(dtype)
    )


@pytest.mark.parametrize("placement", AFTER)
@pytest.mark.parametrize("exact", range(3))
def test_heads_of_several_dtypes(placement, exact):
    """If one of q, k and v is float64, sines are not rounded."""
    heads = [vector(seed, BATCH, HEADS, SEQ, WIDTH) for seed in range(3)]
    heads = [x if number == exact else x.float() for number, x in enumerate(heads)]
    waves = reference.sinusoidal_table(torch.arange(SEQ), WIDTH)
    results = made("sinusoidal", placement).encode_heads(*heads)
    for number, (x, y) in enumerate(zip(heads, results, strict=True)):
        if placement == "projection" or number < 2:
            assert y.dtype == x.dtype
            p = waves if placement == "projection" or exact < 2 else waves.float()
            assert torch.equal(y, (x.double() + p).to(x.dtype) if x.dtype != p.dtype else x + p)


class Largest(TorchDispatchMode):
    """Records the number of elements of the largest float64 result."""

    def __init__(self) -> None:
        super().__init__()
        self.elements: int = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, tuple | list) else [result]:
            if isinstance(x, torch.Tensor) and x.dtype == torch.float64:
                self.elements = max(self.elements, x.numel())
        return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("placement", AFTER)
@pytest.mark.parametrize("kind", KINDS)
def test_heads_are_not_converted_to_float64(kind, placement, dtype):
    """They are in every layer. Only sines are float64, one set for all heads."""
    encoding = made(kind, placement).to(dtype)
    q = vector(0, BATCH, HEADS, SEQ, WIDTH).to(dtype).requires_grad_()
    for ids, elements in ((None, SEQ * WIDTH), (IDS["ids"], SEQ * WIDTH), (IDS["ids of a batch"], BATCH * SEQ * WIDTH)):
        with Largest() as largest:
            torch.cat(encoding.encode_heads(q, q, q, ids)).sum().backward()
        assert largest.elements == (elements if kind == "sinusoidal" else 0)


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
@pytest.mark.parametrize("placement", AFTER)
@pytest.mark.parametrize("kind", KINDS)
@named("layer", LAYERS)
def test_half_precision_and_autocast(layer, kind, placement):
    exact = layer_of(made(kind, placement), layer)
    low, single = copy.deepcopy(exact).bfloat16(), copy.deepcopy(exact).float()
    plain = copy.deepcopy(low)
    truth, y = exact(X), low(X.bfloat16())
    assert y.dtype == torch.bfloat16
    # At most twice the error of a layer without an encoding, and of the size of a rounding of each of its parts.
    plain.encoding = exact_none = None
    bare = copy.deepcopy(exact)
    bare.encoding = exact_none
    bound = 2 * (plain(X.bfloat16()).double() - bare(X)).abs().max() + 2**-8 * 4 * truth.abs().max()
    assert (y.double() - truth).abs().max() <= bound
    with torch.autocast("cpu", torch.bfloat16):
        assert (single(X.float()).double() - truth).abs().max() <= bound


def reloaded(encoding: Any) -> Any:
    fresh = made(encoding.name, encoding.placement, seed=70)
    fresh.load_state_dict(encoding.state_dict(), strict=True)
    return fresh


def emptied(encoding: Any) -> Any:
    with torch.device("meta"):
        fresh = rw.encoding(
            encoding.name, dim=DIM, num_heads=HEADS, placement=encoding.placement, **REQUIRED.get(encoding.name, {})
        )
    fresh = fresh.to_empty(device="cpu").double()
    fresh.load_state_dict(encoding.state_dict(), strict=True)
    return fresh


TREATMENTS = {
    "state_dict": reloaded,
    "deepcopy": copy.deepcopy,
    "pickle": lambda encoding: pickle.loads(pickle.dumps(encoding)),
    "made on meta": emptied,
    "in a model": lambda encoding: torch.nn.Sequential(encoding).double().eval()[0],
}


@pytest.mark.parametrize("treatment", TREATMENTS)
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("kind", KINDS)
def test_bit_identical_after(kind, placement, treatment):
    encoding, q = made(kind, placement), vector(0, BATCH, HEADS, SEQ, WIDTH)
    treated, ids = TREATMENTS[treatment](encoding), IDS["ids of a batch"]
    assert (repr(treated), treated.only_embeds) == (repr(encoding), encoding.only_embeds)
    both = ((found.embed(X, ids), *found.encode_heads(q, q, q, ids)) for found in (encoding, treated))
    assert all(torch.equal(a, b) for a, b in zip(*both, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_an_encoding_that_an_earlier_version_pickled(kind):
    """It has neither a placement nor an attribute of its own that says that it only embeds."""
    old = made(kind, "input")
    state = old.__getstate__() if hasattr(old, "__getstate__") else vars(old)
    kept = {name: value for name, value in dict(state).items() if name not in ("placement", "only_embeds")}
    assert len(kept) == len(state) - 2
    loaded = type(old).__new__(type(old))
    loaded.__setstate__(kept)
    assert (loaded.placement, loaded.only_embeds, loaded.head_dim) == ("input", True, None)
    assert torch.equal(loaded.embed(X), old.embed(X))


@pytest.mark.parametrize("placement", AFTER)
def test_gradients_of_fractional_positions(placement):
    encoding, q = made("sinusoidal", placement), vector(0, BATCH, HEADS, SEQ, WIDTH).requires_grad_()
    ids = (IDS["ids of a batch"] + 0.25).double().requires_grad_()

    def call(q, ids):
        return [x * 1.0 for x in encoding.encode_heads(q, q, q, ids)]

    assert torch.autograd.gradcheck(call, (q, ids))
