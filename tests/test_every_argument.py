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
from ropewalk import reference, theory
from ropewalk.nn import RotaryEmbedding
from ropewalk.reference import Projections, elu_plus_one
from ropewalk.spec import Explicit, Plain, WholeModel
from strategies import theta, vector

X, IDS = vector(0, 2, 3, 5, 8), torch.arange(5)
TABLE, WEIGHT = vector(1, 16, 8), vector(2, 8, 8)
COS, SIN = rw.build_rotary_frequencies(8, 5)
SHORT = vector(3, 2, 5, 8)
ROTATION = {"x": X, "positions": IDS, "inv_freq": theta(8)}
ROTATION_CHANGES = {
    "x": X + 1,
    "positions": IDS + 1,
    "inv_freq": theta(8, 500.0),
    "pairing": "half",
    "conjugate": True,
    "amplitude": 2.0,
}
LINEAR = {"q": X, "k": X + 1, "v": X - 1, "inv_freq": theta(8)}
LINEAR_CHANGES = {
    "q": X * 2,
    "k": X,
    "v": X,
    "inv_freq": theta(8, 500.0),
    "positions": IDS * 2,
    "q_positions": IDS + 1,
    "pairing": "half",
    "causal": True,
    "q_map": torch.exp,
    "k_map": torch.exp,
}
H = np.array([1.0, 2.0, -1.0], dtype=np.complex128)
# function -> (arguments, {argument: another value}); a list of such pairs where one call cannot show them all.
CASES: dict[Callable[..., Any], list[tuple[dict[str, Any], dict[str, Any]]]] = {
    **{
        form: [(ROTATION, ROTATION_CHANGES), (ROTATION | {"inv_freq": theta(4)}, {"rotary_slice": "trailing"})]
        for form in (reference.rotate, reference.rotate_complex, reference.rotate_matrix)
    },
    rw.build_rotary_frequencies: [
        ({"dim_head": 8, "max_seq_len": 4}, {"dim_head": 16, "max_seq_len": 5, "base": 50.0, "device": "meta"})
    ],
    rw.apply_rope: [({"x": X, "cos": COS, "sin": SIN}, {"x": X + 1, "cos": SIN, "sin": COS, "pairing": "half"})],
    reference.learned: [
        ({"x": SHORT, "positions": IDS, "table": TABLE}, {"x": SHORT + 1, "positions": IDS + 1, "table": TABLE + 1})
    ],
    reference.multiplicative: [
        ({"x": SHORT, "positions": IDS, "table": TABLE}, {"x": SHORT + 1, "positions": IDS + 1, "table": TABLE + 1})
    ],
    reference.concatenated: [
        (
            {"x": SHORT, "positions": IDS, "table": TABLE},
            {"x": SHORT + 1, "positions": IDS + 1, "table": TABLE + 1, "projection": vector(4, 8, 16)},
        )
    ],
    reference.sinusoidal: [({"x": SHORT, "positions": IDS}, {"x": SHORT + 1, "positions": IDS + 1, "base": 50.0})],
    reference.sinusoidal_table: [({"positions": IDS, "dim": 8}, {"positions": IDS + 1, "dim": 6, "base": 50.0})],
    reference.recurrent: [
        (
            {"x": SHORT, "positions": IDS, "input_weight": WEIGHT, "state_weight": WEIGHT + 1, "bias": WEIGHT[0]},
            {
                "x": SHORT + 1,
                "positions": -IDS,
                "input_weight": WEIGHT * 2,
                "state_weight": WEIGHT,
                "bias": WEIGHT[1],
            },
        )
    ],
    reference.project: [
        (
            {"x": SHORT, "positions": IDS, "weight": WEIGHT, "encode": reference.sinusoidal},
            {
                "x": SHORT + 1,
                "positions": IDS + 1,
                "weight": WEIGHT + 1,
                "encode": lambda x, m: x,
                "placement": "projection",
            },
        )
    ],
    reference.t5_bucket: [
        (
            {"relative": torch.arange(-200, 200), "causal": True},
            {"relative": torch.arange(-300, 100), "causal": False, "num_buckets": 16, "max_distance": 64},
        )
    ],
    reference.t5_bias: [
        (
            {
                "q_positions": torch.arange(90),
                "k_positions": torch.arange(90),
                "weight": vector(5, 32, 2),
                "causal": True,
            },
            {
                "q_positions": torch.arange(90) + 1,
                "k_positions": torch.arange(90) + 1,
                "weight": vector(6, 32, 2),
                "causal": False,
                "max_distance": 64,
            },
        )
    ],
    reference.alibi_slopes: [({"num_heads": 4}, {"num_heads": 8})],
    reference.alibi_bias: [
        (
            {"q_positions": IDS, "k_positions": IDS, "num_heads": 4},
            {"q_positions": IDS + 1, "k_positions": IDS + 1, "num_heads": 8},
        )
    ],
    reference.softmax_attention: [
        (
            {"q": X, "k": X + 1, "v": X},
            {"q": X * 2, "k": X, "v": X + 1, "causal": True, "bias": vector(7, 5, 5), "scale": 1.0},
        )
    ],
    reference.multi_head_attention: [
        (
            {"x": SHORT, "weights": Projections(*[WEIGHT] * 4), "num_heads": 2, "embed": reference.sinusoidal},
            {
                "x": SHORT + 1,
                "weights": Projections(*[WEIGHT + 1] * 4),
                "num_heads": 4,
                "num_kv_heads": 4,
                "positions": IDS + 1,
                "causal": True,
                "embed": None,
                "rotate": lambda q, k, m: (2 * q, k),
                "bias": lambda m, n: vector(8, 5, 5),
            },
        )
    ],
    elu_plus_one: [({"x": X}, {"x": X + 1})],
    reference.linear_attention_by_sum: [(LINEAR, LINEAR_CHANGES)],
    reference.linear_attention_by_recurrence: [(LINEAR, LINEAR_CHANGES)],
    reference.rotation_budget: [
        (
            {"reference": X, "dtype": torch.float64, "rotary_dim": 4},
            {
                "reference": X + 1,
                "dtype": torch.float32,
                "rotary_dim": 8,
                "pairing": "half",
                "rotary_slice": "trailing",
                "farthest": 1e9,
            },
        )
    ],
    reference.assert_within_budget: [
        (
            {"fast": X * (1 + 2.0**-45), "reference": X, "rotary_dim": 8},
            {"fast": X, "reference": X * (1 + 2.0**-46), "rotary_dim": 4, "pairing": "half", "farthest": 1e9},
        ),
        (
            {"fast": torch.cat((X[..., :4] * (1 + 2.0**-45), X[..., 4:]), -1), "reference": X, "rotary_dim": 4},
            {"rotary_slice": "trailing"},
        ),
    ],
    theory.score_sum: [({"distance": 3, "inv_freq": [1.0, 0.1]}, {"distance": 4, "inv_freq": [1.0, 0.2]})],
    theory.partial_sums: [({"distance": 3, "inv_freq": [1.0, 0.1]}, {"distance": 4, "inv_freq": [1.0, 0.2]})],
    theory.decay_curve: [({"distance": 3, "inv_freq": [1.0, 0.1]}, {"distance": 4, "inv_freq": [1.0, 0.2]})],
    theory.band_means: [({"curve": np.arange(4.0), "edges": [0, 2]}, {"curve": np.ones(4), "edges": [0, 3]})],
    theory.abel_transform: [
        (
            {"products": H, "distance": 3, "inv_freq": [1.0, 0.1, 0.2]},
            {"products": H + 1, "distance": 4, "inv_freq": [1.0, 0.2, 0.3]},
        )
    ],
    theory.abel_bound: [
        (
            {"products": H, "distance": 3, "inv_freq": [1.0, 0.1, 0.2]},
            {"products": 2 * H, "distance": 4, "inv_freq": [1.0, 0.2, 0.3]},
        )
    ],
    theory.periods: [({"inv_freq": [1.0]}, {"inv_freq": [2.0]})],
    theory.critical_dimension: [
        (
            {"rotary_dim": 128, "base": 1e4, "trained_length": 4096},
            {"rotary_dim": 64, "base": 5e5, "trained_length": 8192},
        )
    ],
    theory.critical_base: [
        ({"trained_length": 4096, "tuned_length": 8192}, {"trained_length": 2048, "tuned_length": 9000, "base": 5e5})
    ],
    theory.extrapolation_limit: [
        ({"base": 1e6, "rotary_dim": 128, "critical_dim": 92}, {"base": 1e5, "rotary_dim": 256, "critical_dim": 100})
    ],
    theory.first_negative_distance: [
        ({"inv_freq": Plain(1e4).evaluate(128), "limit": 4096}, {"inv_freq": Plain(1e3).evaluate(128), "limit": 1000})
    ],
    theory.admissible_bases: [
        (
            {"bases": range(4290, 4300), "rotary_dim": 128, "length": 1024},
            {"bases": range(4296, 4300), "rotary_dim": 32, "length": 2048},
        )
    ],
    theory.lowest_admissible_base: [
        (
            {"bases": range(4290, 4300), "rotary_dim": 128, "length": 1024},
            {"bases": range(4296, 4300), "rotary_dim": 32, "length": 2048},
        )
    ],
}
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
