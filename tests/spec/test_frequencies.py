"""Frequency rules as values: what they compute, that they are frozen and hashable, and that JSON keeps them."""

import copy
import dataclasses
import math
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ropewalk import RopewalkError
from ropewalk.spec import AcrossHeads, Explicit, Frequencies, Plain
from strategies import bases, even_dims

finite = st.floats(allow_nan=False, allow_infinity=False)
# A class and its arguments: the check of annotations samples lists at random, which no strategy may do.
rules = st.one_of(
    st.tuples(st.just(Plain), st.tuples(bases)),
    st.tuples(st.just(Explicit), st.tuples(st.lists(finite, min_size=1, max_size=8))),
    st.tuples(st.just(AcrossHeads), st.tuples(bases, st.integers(1, 64))),
)


@given(bases, even_dims)
def test_plain_is_a_falling_geometric_sequence_from_one(base, dim):
    theta = Plain(base).evaluate(dim)
    assert theta.dtype == np.float64
    assert theta[0] == 1
    np.testing.assert_allclose(theta, [base ** (-2 * i / dim) for i in range(dim // 2)], rtol=1e-15)


@given(bases, st.integers(1, 16), even_dims)
def test_across_heads_is_plain_over_the_model_cut_into_heads(base, heads, dim):
    rows = AcrossHeads(base, heads).evaluate(dim)
    assert rows.shape == (heads, dim // 2)
    np.testing.assert_array_equal(rows.ravel(), Plain(base).evaluate(heads * dim))


@given(rules)
def test_a_rule_survives_dict_copy_and_pickle_and_can_be_a_key(made):
    rule = made[0](*made[1])
    for other in (Frequencies.from_dict(rule.to_dict()), copy.deepcopy(rule), pickle.loads(pickle.dumps(rule))):
        assert other == rule
        assert hash(other) == hash(rule)


@pytest.mark.parametrize("values", [[1, 2], (1.0, 2.0), np.array([1, 2]), torch.tensor([1.0, 2.0]), range(1, 3)])
def test_explicit_takes_any_sequence(values):
    assert Explicit(values) == Explicit(inv_freq=(1.0, 2.0))


def test_explicit_takes_a_row_a_head():
    rule = Explicit(np.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]))
    assert rule.evaluate(4).tolist() == [[1, 2], [3, 4], [5, 6]]


@pytest.mark.usefixtures("as_a_user")
def test_rules_that_say_the_same_are_equal_and_others_are_not():
    assert Plain(10_000) == Plain(10_000.0) == Plain(np.float32(10_000))
    assert Plain(10_000) != Plain(10_001)
    assert Plain() != AcrossHeads()


def test_rules_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Plain().base = 3.0  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.usefixtures("as_a_user")
@pytest.mark.parametrize("base", [0, -1, math.nan, math.inf, "10000", None, True, 10**400, 1j])
def test_a_base_that_is_no_positive_finite_number_is_refused(base):
    for rule in (Plain, AcrossHeads):
        with pytest.raises(RopewalkError, match=rf"{rule.__name__}\(base=...\)\nexpected: a finite number above 0"):
            rule(base)


@pytest.mark.usefixtures("as_a_user")
@pytest.mark.parametrize("heads", [0, -2, 1.5, "8", True, None])
def test_a_number_of_heads_that_is_none_is_refused(heads):
    with pytest.raises(RopewalkError, match=r"AcrossHeads\(num_heads"):
        AcrossHeads(num_heads=heads)


@pytest.mark.usefixtures("as_a_user")
@pytest.mark.parametrize(
    "values",
    [[], [[]], [1, math.nan], [math.inf], "1.0", 3.0, None, [[1, 2], [3]], [[1], 2], [[1, "x"]], {}, [[[1.0]]]],
)
def test_explicit_frequencies_that_are_no_table_of_numbers_are_refused(values):
    with pytest.raises(RopewalkError, match="finite numbers, one per pair"):
        Explicit(values)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"rule": "Plian", "base": 1.0}, "did you mean 'Plain'"),
        ({"base": 1.0}, 'an object with a "rule"'),
        ([], 'an object with a "rule"'),
        ({"rule": ["Plain"]}, "'Plain' or 'Explicit' or 'AcrossHeads'"),
        ({"rule": "Plain", "bass": 1.0}, "did you mean 'base'"),
        ({"rule": "Explicit"}, "the fields inv_freq"),
        ({"rule": "Plain", "base": "x"}, "a finite number above 0"),
    ],
)
@pytest.mark.usefixtures("as_a_user")
def test_a_dict_that_is_no_rule_is_refused(data, message):
    with pytest.raises(RopewalkError, match=message):
        Frequencies.from_dict(data)
