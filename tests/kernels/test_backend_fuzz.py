"""The rotation of every backend against the truth, over random calls; a wrong one is found by them too."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.present import PRESENT, SLOW, mover, with_dtypes
from kernels.random_calls import DTYPES, one_call
from ropewalk.kernels.backend import Operation, registered
from ropewalk.reference.budget import BudgetError

CALLS = 100
ROTATING = [name for name in PRESENT if "rotate" in registered(name).operations]


def run_calls(name: str, dtype: torch.dtype, operation: Operation, seed: int) -> None:
    """A hundred random calls that the backend supports, a few where it is slow; of all calls it supports most."""
    random, calls = np.random.default_rng(seed), 8 if name in SLOW else CALLS
    tried = (one_call(random, dtype, operation, mover(name)) for _ in range(4 * calls))
    assert sum(itertools.islice(filter(None, tried), calls)) == calls


def check_with_random_calls(name: str, dtype: torch.dtype, examples: int) -> None:
    @settings(max_examples=examples)
    @given(seed=st.integers(0, 2**63))
    def check(seed):
        run_calls(name, dtype, registered(name).operations["rotate"], seed)

    check()


@pytest.mark.parametrize(("name", "dtype"), with_dtypes(ROTATING, DTYPES), ids=str)
def test_random_calls(name, dtype):
    check_with_random_calls(name, dtype, 2 if name in SLOW else 5)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ROTATING)
def test_thousands_of_calls(name, dtype):
    # 4 dtypes x 50 seeds x 100 calls of a kernel that reads memory itself; fewer of what torch operations compute.
    opaque = registered(name).operations["rotate"].opaque
    check_with_random_calls(name, dtype, 4 if name in SLOW else 50 if opaque else 20)


def tampered(run, mistake):
    """`run` called with what a wrong kernel would use."""

    def call(q, k, cos, sin, layout, row=0, conjugate=False, **options):
        return mistake(run, q, k, cos, sin, layout, row, conjugate, options)

    return call


def ignores_the_row(run, q, k, cos, sin, layout, row, conjugate, options):
    return run(q, k, cos, sin, layout, 0, conjugate, **options)


def ignores_the_conjugate(run, q, k, cos, sin, layout, row, conjugate, options):
    return run(q, k, cos, sin, layout, row, False, **options)


def starts_at_the_first_feature(run, q, k, cos, sin, layout, row, conjugate, options):
    return run(q, k, cos, sin, layout._replace(start=0), row, conjugate, **options)


def has_the_other_pairing(run, q, k, cos, sin, layout, row, conjugate, options):
    other = layout._replace(interleaved=not layout.interleaved, start=layout.start & ~1)
    return run(q, k, cos, sin, other, row, conjugate, **options)


def uses_one_table_for_all_batches(run, q, k, cos, sin, layout, row, conjugate, options):
    shared = [table[:1].expand_as(table) if table.dim() > 2 else table for table in (cos, sin)]
    return run(q, k, *shared, layout, row, conjugate, **options)


def leaves_the_keys(run, q, k, cos, sin, layout, row, conjugate, options):
    kept = None if k is None else k.clone()
    result = run(q, k, cos, sin, layout, row, conjugate, **options)
    return result if kept is None else (result[0], result[1].copy_(kept))


def always_writes_in_place(run, q, k, cos, sin, layout, row, conjugate, options):
    result = run(q, k, cos, sin, layout, row, conjugate, **options)
    q.copy_(result[0])
    return result


def never_writes_in_place(run, q, k, cos, sin, layout, row, conjugate, options):
    return run(q, k, cos, sin, layout, row, conjugate)


MISTAKES = [
    ignores_the_row,
    ignores_the_conjugate,
    starts_at_the_first_feature,
    has_the_other_pairing,
    uses_one_table_for_all_batches,
    leaves_the_keys,
    always_writes_in_place,
    never_writes_in_place,
]


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.__name__)
@pytest.mark.parametrize("name", ROTATING)
def test_random_calls_reject_a_wrong_rotation(name, mistake):
    right = registered(name).operations["rotate"]
    if mistake is never_writes_in_place and not right.in_place:
        right = replace(right, in_place=True, run=lambda *call, in_place=False, run=right.run: run(*call))
    wrong = replace(right, run=tampered(right.run, mistake))
    random = np.random.default_rng(0)
    with pytest.raises(BudgetError):
        _ = [one_call(random, torch.float32, wrong, mover(name)) for _ in range(CALLS)]
