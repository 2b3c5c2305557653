"""A sample of the random calls of `linear_fuzz`, and what they must find."""

from unittest import mock

import pytest
import torch

from meant import meant
from nn.linear_fuzz import check_many
from ropewalk.kernels.linear import chunks
from ropewalk.kernels.linear import torch as linear_torch
from ropewalk.kernels.triton_launch import INTERPRETED
from ropewalk.nn.linear import function
from ropewalk.nn.linear.state import LinearState

# Of torch, on a CPU that has no bfloat16.
pytestmark = pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")


@pytest.mark.slow
@meant("cu_seqlens")
@meant("key_mask")
def test_a_sample_agrees_with_the_direct_sums():
    tally, failures = check_many(seed=1, first=0, count=200)
    assert not failures, "\n".join(failures)
    assert tally["numbers"] > 50_000
    assert tally["unknown"] < 0.02 * tally["numbers"]
    assert min(tally[mode] for mode in ("default", "torch", "chunks", "device", "gradients")) > 20


@pytest.mark.slow
@meant("cu_seqlens")
@meant("key_mask")
def test_a_larger_sample_agrees_with_the_direct_sums():
    _, failures = check_many(seed=2, first=0, count=400)
    assert not failures, "\n".join(failures)


@pytest.mark.slow
@pytest.mark.skipif(not INTERPRETED, reason="needs Triton's interpreter")
@meant("cu_seqlens")
@meant("key_mask")
def test_kernels_for_a_gpu_agree_with_the_direct_sums():
    _, failures = check_many(seed=3, first=0, count=3, triton=1.0)
    assert not failures, "\n".join(failures)


next_position, features, attend_each = function.next_position, linear_torch._features, linear_torch._attend_each


def counts_an_empty_first_sequence(start, key_ids, cu_seqlens, key_mask, k):
    position = next_position(start, key_ids, cu_seqlens, key_mask, k)
    if cu_seqlens is None or k.shape[2] == 0 or (key_ids is None and key_mask is None):
        return position
    return position + (cu_seqlens[1:] == 0)


def forgets_where_rows_are(state, index):
    first = state.position if isinstance(state.position, int) else state.position.flatten()[:1].expand(len(index))
    return LinearState(state.above[index], state.below[index], first, state.spec, state.feature_map, state.learned)


def swaps_sums(*arguments, **options):
    out, sums = attend_each(*arguments, **options)
    return out, sums._replace(below=sums.below.flip(0))


def rounds_features(*arguments):
    return type(made := features(*arguments))(*(x.bfloat16().to(x.dtype) for x in made))


@pytest.mark.parametrize(
    ("owner", "name", "wrong"),
    [
        (function, "next_position", counts_an_empty_first_sequence),
        (LinearState, "reorder", forgets_where_rows_are),
        (linear_torch, "_attend_each", swaps_sums),
        (linear_torch, "_features", rounds_features),
        (linear_torch, "divide", lambda above, below, smallest: above / (below + 1e-6)),
        (chunks, "_lower_triangle", lambda scores: torch.tril(scores, -1)),
    ],
    ids=["next", "reorder", "sums", "features", "divide", "triangle"],
)
def test_the_sample_finds_what_is_wrong(owner, name, wrong):
    with mock.patch.object(owner, name, wrong):
        _, failures = check_many(seed=5, first=0, count=40)
    assert failures
