"""Compiled calls: one graph, the results and the collectives of eager calls.

A compiler omits or moves what no result depends on. A collective that one rank omits makes the others wait for it.
"""

import functools

import pytest
import torch

import ropewalk as rw
from parallel.cases import SHARDINGS, case_of, encoding_of, inputs
from parallel.ranks import failures_on_ranks
from ropewalk import parallel

pytestmark = pytest.mark.xdist_group("ranks")


def results(call, parts):
    out = call(*parts)
    return [out, *torch.autograd.grad(out, parts, torch.ones_like(out))]


def compare(shards, call, backend, batch, kv_heads):
    parts = [shards.cut(x.detach(), 2).requires_grad_() for x in inputs(batch, kv_heads=kv_heads)]
    torch._dynamo.reset()
    compiled = torch.compile(call, backend=backend, fullgraph=True)
    # Twice, so that the second call is one of a compiled function only.
    for _ in range(2):
        for x, y in zip(results(compiled, parts), results(call, parts), strict=True):
            torch.testing.assert_close(x, y, rtol=0, atol=1e-12)


def linear_case(sharding, kind, backend, mesh):
    batch, shards = SHARDINGS[sharding].batch, SHARDINGS[sharding].shards(mesh)
    options = case_of(kind, batch)[0]
    if kind == "per token":
        options["decay"] = shards.cut(options["decay"].detach(), 2)
    call = functools.partial(parallel.linear_attention, shards=shards, **options)
    compare(shards, call, backend, batch, kv_heads=2)


def softmax_case(sharding, name, method, mesh):
    shards = SHARDINGS[sharding].shards(mesh)
    call = functools.partial(parallel.attention, shards=shards, encoding=encoding_of(name), method=method)
    compare(shards, call, "aot_eager", SHARDINGS[sharding].batch, kv_heads=4)


def a_rank_without_tokens(mesh):
    shards = parallel.Shards(mesh, [4] + [0] * (mesh.size() - 1))
    x = torch.ones(1, 1, shards.lengths[shards.rank], 4)
    for function in (parallel.linear_attention, parallel.attention):
        compiled = torch.compile(functools.partial(function, shards=shards), backend="eager")
        with pytest.raises(rw.RopewalkError, match="tokens on every rank"):
            compiled(x, x, x)


def few(world):
    return {
        "a rank without tokens": a_rank_without_tokens,
        "linear": functools.partial(linear_case, "contiguous", "rope", "aot_eager"),
        "gather": functools.partial(softmax_case, "contiguous", "alibi", "gather"),
    }


def more(world):
    kinds = {"contiguous": ("per token", "t5"), "zigzag": ("alibi",), "packed": ("per query head", "t5")}
    cases = {
        f"linear, {sharding}, {kind}": functools.partial(linear_case, sharding, kind, "aot_eager")
        for sharding, names in kinds.items()
        for kind in names
    }
    cases["gather"] = functools.partial(softmax_case, "zigzag", "rope", "gather")
    cases["ulysses"] = functools.partial(softmax_case, "packed", "t5", "ulysses")
    return cases | {"inductor": functools.partial(linear_case, "contiguous", "rope", "inductor")}


@pytest.mark.parametrize("cases", [few, pytest.param(more, marks=pytest.mark.slow)])
def test_one_graph_with_the_results_of_eager_calls(cases, tmp_path):
    failures = failures_on_ranks(2, "parallel.test_compiled", cases.__name__, tmp_path)
    assert failures.keys() == cases(2).keys()
    assert {name: texts[0] for name, texts in failures.items() if texts} == {}
