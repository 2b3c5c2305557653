"""Results are bit-identical when torch's constructors or defaults are changed while a layer is constructed or used."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import ropewalk as rw
from nn.surroundings import SURROUNDINGS
from ropewalk.nn.encodings.by_name import ENCODINGS
from ropewalk.spec.frequencies import Frequencies
from ropewalk.spec.stretched import NTKFixed, NTKMixed

BATCH, HEADS, SEQ, WIDTH = 2, 4, 7, 16
DIM = HEADS * WIDTH


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


Q, K, V = (drawn(BATCH, HEADS, SEQ, WIDTH, seed=seed) for seed in range(3))
X = drawn(BATCH, SEQ, DIM)
IDS = torch.tensor([[3, 1, 40, 500, 2, 7, 6_000], [0, 9, 8, 7, 6, 5, 4]])
PLACES = IDS.double() / 3
ENDS, ONE, OFFSETS, SHIFTS = torch.tensor([0, 3, 7]), torch.ones(WIDTH), torch.tensor([2, 5]), torch.tensor([1, -4])
AXES = rw.Axes([[0.3, 0.0, 0.7, 1.0, 0.1, 0.9, 0.5, 0.2], [0.7, 1.0, 0.3, 0.0, 0.9, 0.1, 0.5, 0.8]], range(8), 16)
LISTS = [1.0 + i / 7 for i in range(8)], [2.0 + i / 3 for i in range(8)]

RULES: dict[str, Frequencies] = {
    "Plain": rw.Plain(500_000),
    "Explicit": rw.Explicit([1.0, 0.3, 0.05, 0.01, 0.003, 0.001, 0.0001, 0.0]),
    "AcrossHeads": rw.AcrossHeads(10_000, num_heads=HEADS),
    "Proportional": rw.Proportional(10_000, 0.5),
    "NTKByParts": rw.NTKByParts(10_000, 4.0, 32),
    "Llama3": rw.Llama3(500_000, 8.0, 64),
    "Yarn": rw.Yarn(10_000, 4.0, 64),
    "PositionInterpolation": rw.PositionInterpolation(10_000, 3.0),
    "NTK": rw.NTK(10_000, 3.0),
    "DynamicNTK": rw.DynamicNTK(10_000, 3.0, 4),
    "NTKFixed": NTKFixed(10_000, 3.0),
    "NTKMixed": NTKMixed(10_000, 3.0),
    "LongRope": rw.LongRope(10_000, *LISTS, trained_length=4, factor=2.0),
}
SPECS: dict[str, rw.RopeSpec] = {
    **{name: rw.RopeSpec(WIDTH, rule) for name, rule in RULES.items()},
    **{f"{name} in float32": rw.RopeSpec(WIDTH, rule, angles="float32") for name, rule in RULES.items()},
    "half of the features": rw.RopeSpec(WIDTH, rotary_dim=8, pairing="half", rotary_slice="trailing", sign=-1),
    "axes": rw.RopeSpec(WIDTH, axes=rw.Axes.interleaved([4, 4])),
    "axes with real weights": rw.RopeSpec(WIDTH, axes=AXES),
    "axes with real weights in float32": rw.RopeSpec(WIDTH, axes=AXES, angles="float32"),
    "xpos": rw.RopeSpec(WIDTH, xpos=rw.XPos(6_001)),
    "step temperature": rw.RopeSpec(WIDTH, rotary_dim=8, query_temperature=rw.StepTemperature(0.1, 3)),
    "log temperature": rw.RopeSpec(WIDTH, query_temperature=rw.LogTemperature(4)),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "learned": {"learned": True},
    "the sequence before the heads": {"seq_dim": -3},
    "the torch backend": {"backend": "torch"},
    "a context length": {"context_length": 70_000},
}
ENCODING_OPTIONS: dict[str, dict[str, Any]] = {
    "learned": {"length": 100},
    "multiplicative": {"length": 100},
    "concatenated": {"width": 6},
    "xpos": {"spec": rw.RopeSpec(WIDTH, xpos=rw.XPos(1024))},
    "t5": {"causal": True},
}


class Case(NamedTuple):
    """How something is made, and what is computed with it."""

    make: Callable[[], Any]
    use: Callable[[Any], list[Any]]


def rotations(rope: rw.RotaryEmbedding) -> list[Any]:
    """Every kind of call of a rope, and gradients."""
    spec = rope.spec
    more: dict[str, Any] = {"length": 9} if spec.varies else {}
    role: dict[str, Any] = {} if spec.same_for_both else {"role": "k"}
    q, k = (x.transpose(1, 2) if rope.seq_dim == -3 else x for x in (Q, K))
    if spec.axes is not None:
        ids = IDS.expand(2, BATCH, SEQ)
        return [*rope(q, k, positions=ids), *rope.at(ids), rope.shift(q, 5) if spec.angles == "exact" else 0]
    results = [*rope(q, k), *rope(q, k, positions=IDS, **more), *rope(q.double(), k.double(), positions=IDS, **more)]
    results += [*rope(q.bfloat16(), k.bfloat16(), offset=9, **more), *rope(q, k, offset=OFFSETS, **more)]
    packed = [x[:1] for x in (q, k)]
    results += [*rope(*packed, cu_seqlens=ENDS, **more)]
    results += [*rope.at(PLACES, **more, **role), rope.unrotate(q, offset=3, **more, **role)]
    results += [rope.retune(q, rope, positions=IDS, **more, **({"to_length": 11} if spec.varies else {}))]
    if spec.angles == "exact":
        results.append(rope.shift(q, SHIFTS, **more))
    if spec.same_for_both:
        x, places = q.clone().requires_grad_(), PLACES.clone().requires_grad_()
        rope(x, positions=places, **more).square().sum().backward()
        results += [x.grad, places.grad]
        results += [None if rope.log_scale is None else rope.log_scale.grad]
        rope.rotate_(mine := q.clone(), **more)
        results += [mine, *rw.qk_norm_rope(q, k, rope, q_weight=ONE, positions=IDS, **more)]
    return results


def encoded(encoding: rw.Encoding) -> list[Any]:
    """What the hooks of an encoding return."""
    ids = IDS % 100
    rotated = encoding.rotate(Q, K, ids)
    bias = encoding.bias(ids, ids)
    return [encoding.embed(X), encoding.embed(X, None if encoding.name == "recurrent" else ids), *rotated, bias]


def attended(layer: rw.Attention) -> list[Any]:
    """A layer over a batch, over packed sequences, and token by token."""
    if layer.encoding is not None:
        layer.encoding.embed(X)
    results: list[Any] = [layer(X), layer(X[:1], cu_seqlens=ENDS), layer(X, key_mask=IDS < 600)]
    with torch.no_grad():
        cache = rw.KVCache(BATCH, HEADS, SEQ, WIDTH, dtype=torch.float32, device="cpu")
        results += [layer(X[:, :4], cache=cache), layer(X[:, 4:5], cache=cache)]
    return [*results, cache.keys, cache.positions]


def linear(layer: rw.LinearAttention) -> list[Any]:
    """A linear layer over a batch, over packed sequences, in pieces, and its gradients."""
    if layer.encoding is not None:
        layer.encoding.embed(X)
    results: list[Any] = [layer(X), layer(X[:1], cu_seqlens=ENDS), layer(X, key_mask=IDS < 600)]
    y, state = layer(X[:, :4], return_state=True)
    results += [y, state.above, state.below, layer(X[:, 4:], state=state)]
    x = X.clone().requires_grad_()
    layer(x).square().sum().backward()
    return [*results, x.grad]


def positions(_: None) -> list[Any]:
    """Everything in ropewalk.positions, on the CPU."""
    p, there = rw.positions, {"device": torch.device("cpu")}
    return [
        p.range_positions(5, 3, "cpu"),
        p.packed_positions(ENDS, SEQ),
        p.positions_of_lengths(OFFSETS, 8),
        p.text_positions(4, 3, **there),
        p.grid_positions(2, 3, **there),
        p.centred_positions(3, 5, **there),
        p.mrope_positions([3, (1, 2, 2), 2, (1, 2, 2, 0.5)], **there)[0],
    ]


def functions(_: None) -> list[Any]:
    """The functions that make and apply tables, and linear attention with a rope."""
    cos, sin = rw.build_rotary_frequencies(WIDTH, SEQ, device="cpu")
    rotated = rw.apply_rope(Q, cos, sin)
    rope = rw.RotaryEmbedding(WIDTH)
    return [cos, sin, rotated, rw.linear_attention(Q, K, V, rope=rope), rw.linear_attention(Q, K, V, causal=False)]


def made_encoding(name: Any) -> rw.Encoding:
    return rw.encoding(name, dim=DIM, num_heads=HEADS, **ENCODING_OPTIONS.get(name, {}))


CASES: dict[str, Case] = {
    **{name: Case(lambda spec=spec: rw.RotaryEmbedding(spec), rotations) for name, spec in SPECS.items()},
    **{
        name: Case(lambda options=options: rw.RotaryEmbedding(WIDTH, **options), rotations)
        for name, options in OPTIONS.items()
    },
    **{f"encoding {name}": Case(lambda name=name: made_encoding(name), encoded) for name in ENCODINGS},
    **{
        f"attention with {name}": Case(
            lambda name=name: rw.Attention(DIM, HEADS, encoding=made_encoding(name)), attended
        )
        for name in ENCODINGS
    },
    **{
        f"linear attention of {name}": Case(
            lambda name=name: rw.LinearAttention(
                DIM,
                HEADS,
                encoding=made_encoding("rope"),
                feature_map=name,
                num_features=WIDTH if name == "favor" else None,
            ),
            linear,
        )
        for name in ("elu", "relu", "squared_relu", "exp", "identity", "favor")
    },
    "a spec made there": Case(lambda: rw.RotaryEmbedding(rw.RopeSpec(WIDTH, rw.Yarn(10_000, 4.0, 64))), rotations),
    "favor features": Case(lambda: rw.FavorFeatures(WIDTH, 24), lambda features: [features(Q)]),
    "positions": Case(lambda: None, positions),
    "functions": Case(lambda: None, functions),
}


def settled(made: Any) -> Any:
    """The module with random float32 parameters on the CPU, as a user loads them."""
    if isinstance(made, nn.Module):
        if any(tensor.is_meta for tensor in (*made.parameters(), *made.buffers())):
            made = made.to_empty(device="cpu")
        numbers = {
            key: drawn(*parameter.shape, seed=100 + seed) * (0.1 if key == "log_scale" else 0.2)
            for seed, (key, parameter) in enumerate(made.named_parameters())
        }
        # In place of what is there: what was made in inference mode could not be written to, nor could fake tensors.
        made.load_state_dict(numbers, strict=False, assign=True)
        made = made.float()
    return made


def results(name: str, around: Callable[[], contextlib.AbstractContextManager[object]], phase: str) -> list[Any]:
    """Results of a case whose object is constructed (phase "made"), used, or both inside the context `around()`."""
    case, usual = CASES[name], contextlib.nullcontext
    with around() if phase in ("made", "both") else usual():
        made = case.make()
    made = settled(made)
    with around() if phase in ("used", "both") else usual():
        return case.use(made)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """The cases are small: threads would wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def truth(one_thread: None) -> dict[str, list[Any]]:
    return {name: results(name, contextlib.nullcontext, "made") for name in CASES}


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.dtype == other.dtype and one.device == other.device and torch.equal(one, other)
    return one == other


# The most different ones; with the slow tests, all.
SAMPLE = (
    "zero.Init in bfloat16",
    "every constructor casts to bfloat16",
    "default dtype float16",
    "default device meta",
    "fake tensors",
)
PHASES = [
    pytest.param(
        name, phase, marks=[] if name in SAMPLE and phase != "both" else pytest.mark.slow, id=f"{name}, {phase}"
    )
    for name in SURROUNDINGS
    for phase in ("made", "used", "both")
    # There are no gradients in inference mode, and no numbers in fake tensors.
    if phase == "made" or name not in ("inference mode", "fake tensors")
]


@pytest.mark.parametrize(("name", "phase"), PHASES)
def test_no_bit_depends_on_the_surroundings(name, phase, truth):
    differ = []
    for case in CASES:
        try:
            found = results(case, SURROUNDINGS[name], phase)
        except Exception as error:  # whatever a case raises is a difference, and fails the test below
            differ.append(f"{case}: {type(error).__name__}: {str(error)[:200]}")
            continue
        wrong = [i for i, (one, other) in enumerate(zip(found, truth[case], strict=True)) if not same(one, other)]
        if wrong:
            differ.append(f"{case}: {wrong}")
    assert differ == []


def test_every_rule_is_among_the_cases():
    assert {name for name, rule in Frequencies.known.items() if rule.__module__.startswith("ropewalk.")} == set(RULES)
