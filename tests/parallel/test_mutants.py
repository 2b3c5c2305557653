"""Wrong implementations are noticed by the cases of test_values.py."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist

from parallel.cases import SHARDINGS, linear_case, softmax_case
from parallel.ranks import failures_on_ranks
from ropewalk.nn.linear.near_keys import NearKeys
from ropewalk.parallel import exchange, linear, ring, softmax

pytestmark = pytest.mark.xdist_group("ranks")


def local_positions(self, starts):
    return torch.arange(len(self._positions) // len(self._runs))


def without_near(self, chosen, start, count=0, real=exchange.Exchange._keys):
    keys, values, ids = real(self, chosen, start, count)
    return NearKeys(torch.full_like(keys, float("-inf")), values * 0, ids)


def indices_of_the_rank(causal, starts=None, **options):
    return VISIBILITY(causal, None, **options)


VISIBILITY, SOME_HEADS = softmax.Visibility, softmax.SomeHeads

# What is replaced, by what, and the case that must fail: a sharding, an encoding, and a method of softmax attention.
MUTANTS = {
    "keys of linear attention at positions of the rank": (
        (linear._Rows, "positions", local_positions), ("zigzag", "rope", None)
    ),
    "no decay of the states before": (
        (exchange.Exchange, "_weights", lambda self, sources: (None, None)), ("zigzag", "alibi", None)
    ),
    "no decay of the states before, zigzag": (
        (exchange.Exchange, "_weights", lambda self, sources: (None, None)), ("zigzag", "per query head", None)
    ),
    "no keys across a border": ((exchange.Exchange, "_keys", without_near), ("contiguous", "t5", None)),
    "blocks of a ring without their weights": (
        (ring, "part_weight", lambda part, _: torch.full_like(part, 0.5).unsqueeze(-1)), ("contiguous", "rope", "ring")
    ),
    "rotation at positions of the rank": (
        (softmax, "encode", lambda added, q, k, v, *ids: (*added.rotate(q, k), v)), ("contiguous", "rope", "gather")
    ),
    "bias of the first heads": (
        (softmax, "SomeHeads", lambda bias, _, count: SOME_HEADS(bias, 0, count)), ("contiguous", "alibi", "ulysses")
    ),
    "causality by the index on the rank": (
        (softmax, "Visibility", indices_of_the_rank), ("contiguous", "none", "gather")
    ),
}  # fmt: skip


def mutant_cases(world):
    def case(name, mesh):
        (owner, attribute, wrong), (sharding, kind, method) = MUTANTS[name]
        run = linear_case if method is None else softmax_case
        arguments = (SHARDINGS[sharding], kind) if method is None else (SHARDINGS[sharding], kind, method)
        run(*arguments, mesh)
        noticed = torch.zeros(())
        with mock.patch.object(owner, attribute, wrong):
            try:
                run(*arguments, mesh)
            except AssertionError:
                noticed += 1
        dist.all_reduce(noticed)
        assert noticed > 0

    return {name: lambda mesh, name=name: case(name, mesh) for name in MUTANTS}


def test_mutants_are_noticed(tmp_path):
    failures = failures_on_ranks(2, "parallel.test_mutants", "mutant_cases", tmp_path)
    assert failures.keys() == MUTANTS.keys()
    assert [name for name, failed in failures.items() if failed] == [], next(filter(None, failures.values()))[0]
