"""What ranks send: the number of collectives, and the memory of a ring."""

import pytest
import torch
from torch.distributed.tensor.debug import CommDebugMode

from nn.linear_cases import drawn
from parallel.cases import SHARDINGS, case_of, encoding_of, inputs
from parallel.ranks import failures_on_ranks, on_ranks
from ropewalk import parallel
from ropewalk.tools.bench.attention import _peak_bytes

pytestmark = pytest.mark.xdist_group("ranks")


def counted(compute, parts):
    """The number of collectives by name: forward, and backward."""
    with CommDebugMode() as forward:
        out = compute(*parts)
    with CommDebugMode() as backward:
        out.sum().backward()
    counts = (mode.get_comm_counts().items() for mode in (forward, backward))
    return [{str(name).rsplit(".", 1)[-1]: n for name, n in each if n} for each in counts]


def counts_case(sharding, kind, method, expected, mesh):
    shards = sharding.shards(mesh, check_calls=False)
    tensors = inputs(sharding.batch, kv_heads=2 if method is None else 4)
    parts = [shards.cut(x.detach(), 2).requires_grad_() for x in tensors]
    if method is None:
        options, _ = case_of(kind, sharding.batch)
        if kind == "per token":
            options["decay"] = shards.cut(options["decay"], 2)

        def compute(*x):
            return parallel.linear_attention(*x, shards=shards, **options)
    else:
        encoding = encoding_of(kind)

        def compute(*x):
            return parallel.attention(*x, shards=shards, encoding=encoding, method=method)

    assert counted(compute, parts) == expected


def count_cases(world):
    one = [{"all_gather_into_tensor": 1}, {"reduce_scatter_tensor": 1}]
    swaps = [{"alltoall_base_": 3}, {"alltoall_base_": 3}]
    cases = {}
    for name, sharding in SHARDINGS.items():
        for kind in ("none", "rope", "alibi", "t5", "per token"):
            cases[f"linear, {name}, {kind}"] = lambda mesh, x=(sharding, kind): counts_case(*x, None, one, mesh)
        for encoding in ("none", "rope", "t5"):
            for method, expected in (("gather", one), ("ulysses", swaps)):
                arguments = sharding, encoding, method, expected
                cases[f"{method}, {name}, {encoding}"] = lambda mesh, x=arguments: counts_case(*x, mesh)
    return cases


@pytest.mark.slow
def test_number_of_collectives(tmp_path):
    failures = failures_on_ranks(2, "parallel.test_collectives", "count_cases", tmp_path)
    assert [name for name, failed in failures.items() if failed] == [], next(filter(None, failures.values()))[0]


PASSES = 3


def peaks_of(world):
    """The peak memory of one pass with 64 tokens per rank, by method and encoding.

    It is the least of several passes: a thread of gloo may keep a tensor that it has sent for a moment longer, at times
    that differ from pass to pass.
    """

    def case(name, method, mesh):
        shards = parallel.Shards(mesh, 64 * world, check_calls=False)
        encoding = encoding_of(name)
        parts = [x.requires_grad_() for x in drawn(1, 4, 4, 64, 8, 8)]

        def both():
            out = parallel.attention(*parts, shards=shards, encoding=encoding, method=method)
            return torch.autograd.grad(out.sum(), parts)

        both()
        raise PeakError(min(_peak_bytes(both, "cpu") for _ in range(PASSES)))

    return {
        f"{name}, {method}": lambda mesh, x=(name, method): case(*x, mesh)
        for name in ("rope", "t5")
        for method in ("ring", "gather")
    }


class PeakError(Exception):
    """Carries a number out of a rank."""


@pytest.mark.slow
def test_a_ring_needs_the_same_memory_on_more_ranks(tmp_path):
    peaks = {}
    for world in (3, 5):
        folder = tmp_path / str(world)
        folder.mkdir()
        for result in on_ranks(world, "parallel.test_collectives", "peaks_of", folder):
            for name, text in result.items():
                number = int(text.strip().rsplit("PeakError: ", 1)[1])
                peaks[name, world] = max(number, peaks.get((name, world), 0))
    of_a_rank = sum(x.nbytes for x in drawn(1, 4, 4, 64, 8, 8)[1:])
    for name in ("rope", "t5"):
        assert peaks[f"{name}, ring", 5] <= 1.01 * peaks[f"{name}, ring", 3]
        # Keys and values of two more ranks.
        assert peaks[f"{name}, gather", 5] >= peaks[f"{name}, gather", 3] + 2 * of_a_rank
