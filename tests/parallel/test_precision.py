"""Errors over ranks in float32 and bfloat16: at most twice those of the plain formula in the same dtype.

The largest of some thousand rounding errors varies: random inputs exceed twice another largest one now and then, also
on one rank. So each case compares the norm of the error, and the largest one is that of all cases of a method. In
bfloat16 the formula rounds every step, and its errors hide a sum over ranks that is rounded too. One rank rounds less,
so errors of a kind of cases are at most twice those of one rank as well.
"""

import functools
from collections import defaultdict
from unittest import mock

import pytest
import torch

from parallel.precision_cases import DTYPES, Errors, Kind, measure
from parallel.ranks import failures_on_ranks
from ropewalk.parallel import exchange, ring
from slow import slow

pytestmark = pytest.mark.xdist_group("ranks")

LAYOUTS = ("contiguous", "uneven", "zigzag", "packed")
METHODS = ("gather", "ulysses", "ring", "linear")
ENCODINGS = ("none", "rope", "xpos", "learned", "alibi", "t5")
DECAYS = ("per head", "per token")
WINDOWS = (None, 17)
# Gradients of four parameters are few numbers: more inputs.
SEEDS = {"learned": 4, "per head": 4, "t5": 2}
FEW = 100


def at_most_twice(errors, other):
    # Not `errors > 2 * other`, which is False for NaN.
    return bool(errors <= 2 * other)


def run_cases(kinds, layouts, mesh, pool=None):
    """Compare all cases of some kinds, and raise what exceeds the rules.

    Args:
        kinds: Kinds that have the same formula.
        layouts: How tokens are cut.
        mesh: The mesh.
        pool: Where the largest errors are kept, by method, dtype and tensor.
    """
    exceeded: list[str] = []
    squares: dict = defaultdict(lambda: torch.zeros(3, dtype=torch.float64))
    windows = (None,) if kinds[0].method == "linear" else WINDOWS
    for window, seed in [(window, seed) for window in windows for seed in range(SEEDS.get(kinds[0].name, 1))]:
        for layout, kind in [(layout, kind) for layout in layouts for kind in kinds]:
            for errors in measure(kind, layout, window, seed, mesh):
                case = f"{errors.tensor}, {kind.method}, {layout}, window {window}, seed {seed}"
                squares[kind.method, errors.tensor] += errors.norm.square()
                if errors.numbers < FEW:
                    continue
                if not at_most_twice(errors.norm[0], errors.norm[1]):
                    exceeded.append(f"{case}: {errors.norm[0] / errors.norm[1]:.2f} times the formula")
                if pool is not None:
                    keep_largest(pool, kind, errors)
    for (method, tensor), total in squares.items():
        for i, what in ((1, "formula"), (2, "one rank")):
            if not at_most_twice(total[0].sqrt(), total[i].sqrt()):
                exceeded.append(f"{tensor}, {method}, all cases: {(total[0] / total[i]).sqrt():.2f} times {what}")
    assert not exceeded, exceeded


def keep_largest(pool, kind: Kind, errors: Errors):
    # In units of the formula's norm, so that the largest is not always that of one encoding.
    place = kind.method, kind.dtype, errors.tensor
    pool[place] = torch.maximum(pool.get(place, torch.zeros(3)), errors.largest / errors.norm[1])


def largest_case(pool, method, dtype, mesh):
    found = {place[2]: largest for place, largest in pool.items() if place[:2] == (method, dtype)}
    assert {"output", "gradient of q", "gradient of k", "gradient of v"} <= found.keys()
    assert all(at_most_twice(x[0], x[1]) for x in found.values()), found


def rounded_merge(out, lse, y, new, real=ring._merged):
    merged, total = real(out, lse, y, new)
    return merged.bfloat16().to(merged.dtype), total


def rounded_gather(x, mesh, real=exchange.gather):
    return real(x.bfloat16(), mesh).to(x.dtype)


# What is replaced, by what, and a kind that must fail.
MUTANTS = {
    "a ring sums in bfloat16": (ring, "working_dtype", lambda x: x.dtype, Kind("ring", "none", torch.bfloat16)),
    "a ring rounds its blocks": (ring, "_exact", lambda *x: x, Kind("ring", "t5", torch.bfloat16)),
    "a ring merges in bfloat16": (ring, "_merged", rounded_merge, Kind("ring", "rope", torch.float32)),
    "states are sent in bfloat16": (exchange, "gather", rounded_gather, Kind("linear", "learned", torch.bfloat16)),
    "states of float32 are sent in bfloat16": (
        exchange, "gather", rounded_gather, Kind("linear", "per token", torch.float32)
    ),
}  # fmt: skip


def mutant_case(name, mesh):
    owner, attribute, wrong, kind = MUTANTS[name]
    run_cases([kind], ("contiguous", "zigzag"), mesh)
    # All ranks have the same numbers, and raise together.
    with mock.patch.object(owner, attribute, wrong), pytest.raises(AssertionError, match="times"):
        run_cases([kind], ("contiguous", "zigzag"), mesh)


def precision_cases(world):
    cases, pool = {}, {}
    for dtype in DTYPES:
        for name in ENCODINGS:
            kinds = [Kind(method, name, dtype) for method in METHODS if method != "linear"]
            cases[f"softmax, {name}, {dtype}"] = functools.partial(run_cases, kinds, LAYOUTS, pool=pool)
        for name in ENCODINGS + DECAYS:
            kinds = [Kind("linear", name, dtype)]
            cases[f"linear, {name}, {dtype}"] = functools.partial(run_cases, kinds, LAYOUTS, pool=pool)
    # After those that find them.
    for method in METHODS:
        for dtype in DTYPES:
            cases[f"largest errors, {method}, {dtype}"] = functools.partial(largest_case, pool, method, dtype)
    # Sums over four ranks are rounded more often than those over two.
    return cases | ({name: functools.partial(mutant_case, name) for name in MUTANTS} if world == 4 else {})


@pytest.mark.parametrize("world", [slow(2), slow(4)])
def test_the_two_times_rule(world, tmp_path):
    failures = failures_on_ranks(world, "parallel.test_precision", "precision_cases", tmp_path)
    assert failures.keys() == precision_cases(world).keys()
    assert [name for name, failed in failures.items() if failed] == [], next(filter(None, failures.values()))[0]
