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
from ropewalk import reference, theory
from ropewalk.nn import RotaryEmbedding
from ropewalk.spec import Explicit, Plain, WholeModel
from strategies import vector

# Harnesses and containers, whose arguments are not data: check_rotation takes the function under test.
NOT_FUNCTIONS = {"BAND_EDGES", "BudgetError", "Projections", "check_rotation"}
# A rule alone reads `length` and `powers` where it depends on them.
VALUES = {"RopeSpec", "Plain", "Explicit", "WholeModel", "RopewalkError", "RotaryEmbedding"}


def flat(result: Any) -> list[Any]:
    if isinstance(result, tuple | list):
        return [leaf for part in result for leaf in flat(part)]
    if isinstance(result, torch.Tensor):
        return [result.device.type, str(result.dtype), list(result.shape), *([] if result.is_meta else result.tolist())]
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
    "axes": 1,
    "sign": -1,
    "xpos": 1,
    "query_temperature": 1,
    "angles": "float32",
}


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(rw.RopeSpec)])
@pytest.mark.usefixtures("as_a_user")
def test_every_field_of_a_spec_matters(name):
    # rotary_slice says something only where not all features turn.
    arguments: dict[str, Any] = {"head_dim": 8, "rotary_dim": 6}
    q = vector(9, 1, 2, 300, 8).float()

    def rotated(**fields: Any) -> Any:
        return RotaryEmbedding(rw.RopeSpec(**fields))(q, offset=100_000)

    before = outcome(lambda: rotated(**arguments))
    assert not isinstance(before, str)
    assert outcome(lambda: rotated(**arguments | {name: SPEC_CHANGES[name]})) != before


@pytest.mark.parametrize("rule", [Plain(50.0), WholeModel(50.0, 2), WholeModel(1e4, 3), Explicit([1.0, 0.5])])
def test_every_field_of_a_rule_matters(rule):
    plain = {Plain: Plain(), WholeModel: WholeModel(1e4, 2), Explicit: Explicit([1.0, 0.4])}[type(rule)]
    assert rule != plain
    assert flat(rule.evaluate(4)) != flat(plain.evaluate(4))


Q, KEYS = vector(10, 2, 3, 5, 8).float(), vector(11, 2, 3, 5, 8).float()
MODULE_CHANGES = {
    "dim": 16,
    "base": 50.0,
    "pairing": "half",
    "seq_dim": -3,
    "context_length": 4,
    "learned": True,
}
FORWARD_CHANGES = {
    "q": Q + 1,
    "k": None,
    "positions": IDS + 1,
    "k_positions": IDS + 1,
    "offset": 3,
    "cu_seqlens": torch.tensor([0, 2, 5]),
    "angles": RotaryEmbedding(8).at(IDS + 7),
}


def test_every_argument_of_the_module_matters():
    def made(**arguments: Any) -> Any:
        rope = RotaryEmbedding(**{"dim": 8} | arguments)
        return [rope(Q), len(list(rope.parameters()))]

    parameters = set(inspect.signature(RotaryEmbedding).parameters)
    # Which backend computes is not to be seen in what is computed; a name that is none is an error.
    assert set(MODULE_CHANGES) == parameters - {"backend"}
    before = outcome(made)
    for name, other in MODULE_CHANGES.items():
        assert outcome(lambda name=name, other=other: made(**{name: other})) != before, name


def test_every_argument_of_its_methods_matters():
    rope = RotaryEmbedding(8)
    assert set(FORWARD_CHANGES) == set(inspect.signature(rope.forward).parameters)
    before = outcome(lambda: rope(Q, KEYS))
    for name, other in FORWARD_CHANGES.items():
        arguments = {"q": Q, "k": KEYS} | {name: other}
        assert outcome(lambda arguments=arguments: rope(**arguments)) != before, name
        in_place = {
            key: value.clone() if key in "qk" and value is not None else value for key, value in arguments.items()
        }
        assert outcome(lambda arguments=in_place: rope.rotate_(**arguments)) != before, name
    one = {name: other for name, other in FORWARD_CHANGES.items() if not name.startswith("k")} | {"q": None}
    back = outcome(lambda: rope.unrotate(Q))
    assert set(inspect.signature(rope.unrotate).parameters) == {"x", *one} - {"q"}
    assert outcome(lambda: rope.unrotate(Q + 1)) != back
    for name in ("positions", "offset", "cu_seqlens", "angles"):
        assert outcome(lambda name=name: rope.unrotate(Q, **{name: FORWARD_CHANGES[name]})) != back, name
    assert (
        outcome(lambda: rope.shift(Q, 1)) != outcome(lambda: rope.shift(Q, 2)) != outcome(lambda: rope.shift(KEYS, 2))
    )
    assert outcome(lambda: rope.at(IDS)) != outcome(lambda: rope.at(IDS + 1))
    assert outcome(lambda: rope.at(IDS)) != outcome(lambda: rope.at(IDS, dtype=torch.float64))
