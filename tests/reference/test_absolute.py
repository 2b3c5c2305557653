"""Absolute encodings: formulas, batches of positions, both placements, and errors."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ropewalk import RopewalkError
from ropewalk.reference import (
    concatenated,
    learned,
    multiplicative,
    project,
    recurrent,
    sinusoidal,
    sinusoidal_table,
)
from strategies import seeds, vector

ZERO = torch.zeros(4, dtype=torch.float64)


def encoders(seed: int):
    """All absolute encodings as functions of (x, positions), for 4 features and 32 positions."""
    table, (a, b) = vector(seed + 1, 32, 4), vector(seed + 2, 2, 4, 4)
    return {
        "learned": lambda x, m: learned(x, m, table),
        "multiplicative": lambda x, m: multiplicative(x, m, table),
        "concatenated": lambda x, m: concatenated(x, m, table),
        "projected back": lambda x, m: concatenated(x, m, table, vector(seed + 3, 4, 8)),
        "sinusoidal": sinusoidal,
        "recurrent": lambda x, m: recurrent(x, m, a, b, ZERO),
    }


@given(seeds, st.sampled_from(sorted(encoders(0))))
def test_positions_per_sequence(seed, name):
    encode = encoders(seed)[name]
    x = vector(seed, 2, 5, 4)
    ids = torch.stack([torch.randperm(32, generator=torch.Generator().manual_seed(seed + i))[:5] for i in range(2)])
    together = encode(x, ids)
    assert torch.allclose(together, torch.stack([encode(x[b], ids[b]) for b in range(2)]), rtol=1e-14, atol=1e-14)
    with_heads = encode(x[:, None].expand(2, 2, 5, 4), ids)
    assert torch.allclose(with_heads, together[:, None].expand_as(with_heads), rtol=1e-14, atol=1e-14)


@given(seeds, st.sampled_from(sorted(encoders(0))))
def test_positions_matter(seed, name):
    encode = encoders(seed)[name]
    x = vector(seed, 5, 4)
    assert not torch.allclose(encode(x, torch.arange(5)), encode(x, torch.tensor([4, 3, 2, 1, 0])))


@given(seeds, st.sampled_from(["learned", "multiplicative", "sinusoidal"]))
def test_placements(seed, name):
    encode = encoders(seed)[name]
    x, weight, ids = vector(seed, 5, 4), vector(seed + 9, 4, 4), torch.arange(5)
    assert torch.equal(project(x, ids, weight, encode, "input"), encode(x, ids) @ weight.T)
    assert torch.equal(project(x, ids, weight, encode, "projection"), encode(x @ weight.T, ids))
    assert not torch.allclose(project(x, ids, weight, encode), project(x, ids, weight, encode, "projection"))
    for role in "qk":
        for placement in ("projection", "scores"):
            assert torch.equal(project(x, ids, weight, encode, placement, role), encode(x @ weight.T, ids))
    assert torch.equal(project(x, ids, weight, encode, "projection", "v"), encode(x @ weight.T, ids))
    assert torch.equal(project(x, ids, weight, encode, "scores", "v"), x @ weight.T)
    assert torch.equal(project(x, ids, weight, encode, "input", "v"), encode(x, ids) @ weight.T)


@given(st.integers(-(10**6), 10**6), st.integers(1, 32), st.floats(2.0, 1e6))
def test_sinusoid(position, pairs, base):
    row = sinusoidal_table(torch.tensor([position]), 2 * pairs, base)[0].tolist()
    for i in range(pairs):
        angle = position * base ** (-2 * i / (2 * pairs))
        assert row[2 * i : 2 * i + 2] == pytest.approx([math.sin(angle), math.cos(angle)], abs=1e-9)


def test_multiplication_by_one_changes_nothing():
    x = vector(0, 5, 4)
    assert torch.equal(multiplicative(x, torch.arange(5), torch.ones(5, 4, dtype=torch.float64)), x)


@given(seeds, st.permutations(range(6)))
def test_the_rnn_processes_tokens_in_the_order_of_positions(seed, order):
    # Permuting tokens together with their positions does not change the sequence.
    a, b = vector(seed, 2, 4, 4)
    x, ids = vector(seed + 1, 6, 4), torch.arange(6)
    plain = recurrent(x, ids, a, b, ZERO)
    assert torch.equal(recurrent(x[order], ids[order], a, b, ZERO), plain[order])
    assert torch.equal(recurrent(x, 10 * ids - 3, a, b, ZERO), plain)


def test_the_rnn_equals_torch_nn_rnn():
    network = torch.nn.RNN(4, 4, dtype=torch.float64, batch_first=True)
    x = vector(3, 2, 7, 4)
    with torch.no_grad():
        expected, _ = network(x)
        weights = dict(network.named_parameters())
        bias = weights["bias_ih_l0"] + weights["bias_hh_l0"]
        y = recurrent(x, torch.arange(7), weights["weight_ih_l0"], weights["weight_hh_l0"], bias)
    assert torch.allclose(y, expected, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", sorted(encoders(0)))
def test_the_result_is_the_float64_result_rounded_once(name, dtype):
    encode, x = encoders(0)[name], vector(0, 5, 4).to(dtype)
    assert torch.equal(encode(x, torch.arange(5)), encode(x.double(), torch.arange(5)).to(dtype))


@pytest.mark.usefixtures("as_a_user")
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: learned(torch.ones(1, 2), torch.tensor([3]), torch.ones(3, 2)), "positions from 0 to 2"),
        (lambda: learned(torch.ones(1, 2), torch.tensor([-1]), torch.ones(3, 2)), "positions from 0 to 2"),
        (lambda: learned(torch.ones(1, 2), torch.tensor([0.5]), torch.ones(3, 2)), "integer positions"),
        (lambda: multiplicative(torch.ones(1, 2), torch.tensor([0]), torch.ones(3, 4)), r"a table \[rows, 2\]"),
        (lambda: learned(torch.ones(2, 2), torch.tensor([0]), torch.ones(3, 2)), r"shape \[2\]"),
        (lambda: learned(torch.ones(2, 3, 2), torch.zeros(3, 3).long(), torch.ones(3, 2)), r"\[3\] or \[2, 3\]"),
        (lambda: sinusoidal(torch.ones(1, 2), torch.tensor([math.nan])), "finite positions"),
        (lambda: sinusoidal(torch.ones(1, 3), torch.tensor([0])), "even integer"),
        (lambda: sinusoidal(torch.ones(1, 2).int(), torch.tensor([0])), "floating-point"),
        (lambda: sinusoidal(torch.ones(2), torch.tensor([0])), "2 or more dimensions"),
        (lambda: sinusoidal(torch.ones(1, 2), torch.tensor([True])), "integers, float32 or float64"),
        (
            lambda: concatenated(torch.ones(1, 2), torch.tensor([0]), torch.ones(1, 1), torch.ones(2, 2)),
            r"a matrix \[dim, 3\]",
        ),
        (lambda: project(torch.ones(1, 2), torch.tensor([0]), torch.eye(2), sinusoidal, "output"), "'input' or"),
        (lambda: project(torch.ones(1, 2), torch.tensor([0]), torch.eye(2), sinusoidal, role="o"), "'q' or 'k' or 'v'"),
        (lambda: project(torch.ones(1, 2), torch.tensor([0]), torch.eye(3), sinusoidal), r"a matrix \[out, 2\]"),
        (lambda: recurrent(torch.ones(1, 2), torch.tensor([0]), *torch.ones(2, 2, 3), torch.ones(2)), "two matrices"),
        (lambda: learned(torch.ones(1, 2), [0], torch.ones(3, 2)), "a torch.Tensor"),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(RopewalkError, match=message):
        call()
