"""Every argument matters: changing any argument of any public function changes its result, or is an error.

The table is held against the signatures, so an argument that is added and forgotten fails the test.
"""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import ropewalk as rw
from argument_cases import CASES, IDS
from ropewalk import reference, spec, theory
from ropewalk.nn import RotaryEmbedding
from ropewalk.spec import (
    NTK,
    AcrossHeads,
    Axes,
    DynamicNTK,
    Explicit,
    Llama3,
    LogTemperature,
    LongRope,
    NTKByParts,
    NTKFixed,
    NTKMixed,
    Plain,
    PositionInterpolation,
    Proportional,
    StepTemperature,
    XPos,
    Yarn,
)
from strategies import vector

# Harnesses and containers, whose arguments are not data: check_rotation takes a function, accelerate a model.
NOT_FUNCTIONS = {"BAND_EDGES", "BudgetError", "Projections", "accelerate", "check_rotation"}
# Values, whose fields are changed below, and the module.
# The arguments of the other modules, and of the factory of encodings, are changed one by one in tests/nn.
VALUES = {
    *spec.__all__,
    "RopeConfigWarning",
    "RopewalkError",
    "RopewalkWarning",
    "RotaryEmbedding",
    "Encoding",
    "LinearState",
}
VALUES |= {"Attention", "KVCache", "LinearAttention", "FavorFeatures", "encoding"}
VALUES |= {"Cache", "CachedTokens", "RollingKVCache", "Visibility"}


def flat(result: Any) -> list[Any]:
    if isinstance(result, tuple | list):
        return [leaf for part in result for leaf in flat(part)]
    if isinstance(result, rw.LinearState):
        return flat([getattr(result, field.name) for field in dataclasses.fields(result)])
    if isinstance(result, torch.Tensor):
        kind = [result.device.type, str(result.dtype), str(result.layout), list(result.shape)]
        return [*kind, None if result.is_meta else result.to_dense().tolist()]
    return [result.tolist() if isinstance(result, np.ndarray) else result]


def outcome(call: Callable[[], Any]) -> Any:
    try:
        return flat(call())
    except (rw.RopewalkError, AssertionError) as error:
        return str(error)


def changes():
    for function, cases in CASES.items():
        for number, (arguments, others) in enumerate(cases):
            for name, other in others.items():
                label = f"{function.__name__}-{name}" + (f"-{number}" if number else "")
                yield pytest.param(function, arguments, name, other, id=label)


@pytest.mark.parametrize(("function", "arguments", "name", "other"), list(changes()))
@pytest.mark.usefixtures("as_a_user")
def test_the_argument_matters(function, arguments, name, other):
    before = outcome(lambda: function(**arguments))
    assert before == outcome(lambda: function(**arguments)), "the function is not a function"
    assert not isinstance(before, str), f"the case itself fails: {before}"
    assert outcome(lambda: function(**arguments | {name: other})) != before


@pytest.mark.parametrize("function", CASES, ids=lambda function: function.__name__)
def test_the_table_has_every_argument(function):
    named = {name for _, others in CASES[function] for name in others}
    assert named == set(inspect.signature(inspect.unwrap(function)).parameters)


def test_the_table_has_every_function():
    public = {
        getattr(module, name)
        for module in (rw, reference, theory)
        for name in module.__all__
        if callable(getattr(module, name))
    }
    tabled = {inspect.unwrap(function) for function in CASES}
    missing = {f.__name__ for f in public if inspect.unwrap(f) not in tabled} - NOT_FUNCTIONS - VALUES
    assert not missing


SPEC_CHANGES = {
    "head_dim": 10,
    "frequencies": Plain(50.0),
    "rotary_dim": 4,
    "pairing": "half",
    "rotary_slice": "trailing",
    "axes": Axes.chunked([2, 1]),
    "sign": -1,
    "xpos": XPos(200_000, 4096.0),
    "query_temperature": LogTemperature(64),
    "angles": "float32",
}


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(rw.RopeSpec)])
@pytest.mark.usefixtures("as_a_user")
def test_every_field_of_a_spec_matters(name):
    # rotary_slice says something only where not all features rotate.
    arguments: dict[str, Any] = {"head_dim": 8, "rotary_dim": 6}
    q = vector(9, 1, 2, 300, 8).float()

    def rotated(**fields: Any) -> Any:
        return RotaryEmbedding(rw.RopeSpec(**fields))(q, offset=100_000, role="q")

    before = outcome(lambda: rotated(**arguments))
    assert not isinstance(before, str)
    assert outcome(lambda: rotated(**arguments | {name: SPEC_CHANGES[name]})) != before


# Each value with, for each field, another that must be seen in what it computes.
VALUE_CHANGES: list[tuple[Any, dict[str, Any]]] = [
    (Plain(), {"base": 50.0}),
    (AcrossHeads(1e4, 2), {"base": 50.0, "num_heads": 3}),
    (Explicit([1.0, 0.4, 0.2, 0.1]), {"inv_freq": [1.0, 0.5, 0.2, 0.1]}),
    (PositionInterpolation(1e4, 2), {"base": 50.0, "factor": 3.0}),
    (NTK(1e4, 2), {"base": 50.0, "factor": 3.0}),
    (NTKFixed(1e4, 2), {"base": 50.0, "factor": 3.0}),
    (NTKMixed(1e4, 2), {"base": 50.0, "factor": 3.0, "bend": 1.0}),
    (DynamicNTK(1e4, 2, 64), {"base": 50.0, "factor": 3.0, "trained_length": 128}),
    (NTKByParts(1e4, 4, 200), {"base": 50.0, "factor": 3.0, "trained_length": 100, "alpha": 0.5, "beta": 16.0}),
    (
        Llama3(1e4, 4, 200),
        {"base": 50.0, "factor": 3.0, "trained_length": 100, "low_freq_factor": 0.2, "high_freq_factor": 8.0},
    ),
    (
        Yarn(1e4, 4, 1000, beta_fast=16.0),
        {
            "base": 50.0,
            "factor": 3.0,
            "trained_length": 4000,
            "beta_fast": 4.0,
            "beta_slow": 0.1,
            "truncate": False,
            "ramp": "ratio",
            "attention_factor": 2.0,
        },
    ),
    (
        Yarn(1e4, 4, 400, mscale=1.0, mscale_all_dim=0.5, policy="deepseek"),
        {"mscale": 2.0, "mscale_all_dim": 1.0, "policy": "vllm"},
    ),
    (
        LongRope(1e4, [1.0] * 4, [2.0] * 4, 64, 4),
        {
            "base": 50.0,
            "short_factor": [1.5] * 4,
            "long_factor": [3.0] * 4,
            "trained_length": 128,
            "factor": 8.0,
            "attention_factor": 2.0,
        },
    ),
    (
        LongRope(1e4, [1.0] * 4, [2.0] * 4, 64, short_amplitude=1.1, long_amplitude=1.2),
        {"short_amplitude": 1.5, "long_amplitude": 1.5},
    ),
    (Proportional(1e4, 0.5, 2), {"base": 50.0, "fraction": 0.25, "factor": 3.0}),
    (StepTemperature(0.1, 64), {"scale": 0.2, "step": 32, "first": 1}),
    (LogTemperature(32), {"trained_length": 16}),
    (XPos(256), {"length": 128, "scale_base": 256.0, "gamma": 0.5}),
    (
        Axes([[1.0, 0.0], [0.0, 1.0]], [0, 1], 4),
        {"weights": [[0.0, 1.0], [1.0, 0.0]], "index": [1, 0], "dim": 8},
    ),
]


def computed(value: Any) -> list[Any]:
    """Everything that a value computes."""
    if hasattr(value, "softmax_scale"):
        lengths = (None, 100)
        return [*flat([[value.evaluate(8, n), value.amplitude(n)] for n in lengths]), value.softmax_scale]
    if isinstance(value, XPos):
        return flat(value.log_scale(8, np.array([[3.0]])))
    if isinstance(value, Axes):
        made = rw.RopeSpec(2 * value.pairs, axes=value)
        return flat(value.matrix(made.inv_freq()))
    return flat([value.evaluate(float(m)) for m in (31, 63, 200)])


@pytest.mark.parametrize(("value", "others"), VALUE_CHANGES, ids=lambda part: type(part).__name__)
@pytest.mark.usefixtures("as_a_user")
def test_every_field_of_a_value_matters(value, others):
    before = computed(value)
    for name, other in others.items():
        assert computed(dataclasses.replace(value, **{name: other})) != before, name


def test_every_field_of_every_value_has_a_case():
    tabled: dict[str, set[str]] = {}
    for value, others in VALUE_CHANGES:
        tabled.setdefault(type(value).__name__, set()).update(others)
    # The fields of a RopeSpec are changed above.
    values = {name for name in spec.__all__ if dataclasses.is_dataclass(getattr(spec, name))} - {"RopeSpec"}
    registered = {**spec.Frequencies.known, **spec.QueryTemperature.known}
    # Other tests register rules of their own.
    assert {name for name, rule in registered.items() if rule.__module__.startswith("ropewalk.")} <= values
    for name in values:
        assert tabled[name] == {field.name for field in dataclasses.fields(getattr(spec, name))}, name


Q, KEYS = vector(10, 2, 3, 5, 8).float(), vector(11, 2, 3, 5, 8).float()
MODULE_CHANGES = {
    "head_dim": 16,
    "base": 50.0,
    "pairing": "half",
    "seq_dim": -3,
    "context_length": 4,
    "learned": True,
}
FORWARD_CHANGES: dict[str, Any] = {
    "q": Q + 1,
    "k": None,
    "positions": IDS + 1,
    "k_positions": IDS + 1,
    "offset": 3,
    "cu_seqlens": torch.tensor([0, 2, 5]),
    "angles": RotaryEmbedding(8).at(IDS + 7),
    "length": 64,
    "role": "k",
}


def test_every_argument_of_the_module_matters():
    def made(**arguments: Any) -> Any:
        rope = RotaryEmbedding(**{"head_dim": 8} | arguments)
        return [rope(Q), len(list(rope.parameters()))]

    parameters = set(inspect.signature(RotaryEmbedding).parameters)
    # Which backend computes is not to be seen in what is computed; a name that is none is an error. check_ids looks at
    # ids of a GPU, as ids of the CPU are looked at anyway: tests/kernels/test_triton_gpu.py has it.
    assert set(MODULE_CHANGES) == parameters - {"backend", "check_ids"}
    before = outcome(made)
    for name, other in MODULE_CHANGES.items():
        assert outcome(lambda name=name, other=other: made(**{name: other})) != before, name


def test_every_argument_of_its_methods_matters():
    rope = RotaryEmbedding(rw.RopeSpec(8, DynamicNTK(1e4, 2, 4)))
    assert set(FORWARD_CHANGES) == set(inspect.signature(rope.forward).parameters)
    # These say where tokens stand, and then a length is asked for.
    places = {"positions", "k_positions", "offset", "cu_seqlens"}
    before = outcome(lambda: rope(Q, KEYS))
    for name, other in FORWARD_CHANGES.items():
        arguments: dict[str, Any] = {"q": Q, "k": KEYS} | {name: other} | ({"length": 5} if name in places else {})
        assert outcome(lambda arguments=arguments: rope(**arguments)) != before, name
        in_place = {
            key: value.clone() if key in "qk" and value is not None else value for key, value in arguments.items()
        }
        assert outcome(lambda arguments=in_place: rope.rotate_(**arguments)) != before, name
    one = {name: other for name, other in FORWARD_CHANGES.items() if not name.startswith("k")} | {"q": None}
    back = outcome(lambda: rope.unrotate(Q))
    assert set(inspect.signature(rope.unrotate).parameters) == {"x", *one} - {"q"}
    assert outcome(lambda: rope.unrotate(Q + 1)) != back
    for name in ("positions", "offset", "cu_seqlens", "angles", "length"):
        extra = {"length": 5} if name in places else {}
        assert (
            outcome(lambda name=name, extra=extra: rope.unrotate(Q, **{name: FORWARD_CHANGES[name]}, **extra)) != back
        ), name
    plain, xpos = RotaryEmbedding(8), RotaryEmbedding(rw.RopeSpec(8, xpos=XPos(64)))
    for call in (xpos, xpos.unrotate, lambda x, role: xpos.at(IDS, role=role)):
        assert outcome(lambda call=call: call(Q, role="q")) != outcome(lambda call=call: call(Q, role="k"))
    assert (
        outcome(lambda: plain.shift(Q, 1))
        != outcome(lambda: plain.shift(Q, 2))
        != outcome(lambda: plain.shift(KEYS, 2))
    )
    assert outcome(lambda: rope.shift(Q, 1, length=4)) != outcome(lambda: rope.shift(Q, 1, length=9))
    assert outcome(lambda: plain.at(IDS)) != outcome(lambda: plain.at(IDS + 1))
    assert outcome(lambda: plain.at(IDS)) != outcome(lambda: plain.at(IDS, dtype=torch.float64))
    assert outcome(lambda: rope.at(IDS, length=4)) != outcome(lambda: rope.at(IDS, length=9))


def test_every_argument_of_retune_matters():
    rope = RotaryEmbedding(rw.RopeSpec(8, DynamicNTK(1e4, 2, 4)))
    given = {"x": Q, "to": RotaryEmbedding(8, base=500.0), "length": 9, "to_length": 9}
    changes = {
        "x": Q + 1,
        "to": rope,
        "positions": IDS + 3,
        "offset": 7,
        "cu_seqlens": torch.tensor([0, 2, 5]),
        "length": 30,
    }
    assert {*changes, "to_length"} == set(inspect.signature(rope.retune).parameters)
    before = outcome(lambda: rope.retune(**given))
    for name, other in changes.items():
        assert outcome(lambda name=name, other=other: rope.retune(**given | {name: other})) != before, name
    same = given | {"to": rope}
    assert outcome(lambda: rope.retune(**same)) != outcome(lambda: rope.retune(**same | {"to_length": 30}))
