"""Compiled calls: one graph, the results and the collectives of eager calls.

A compiler omits or moves what no result depends on. A collective that one rank omits makes the others wait for it.
"""

import contextlib
import functools
from typing import Any

import pytest
import torch
from packaging.version import Version
from torch._dynamo.exc import Unsupported
from torch.utils.checkpoint import checkpoint

import ropewalk as rw
from parallel.cases import LENGTH, SHARDINGS, case_of, encoding_of, inputs
from parallel.ranks import failures_on_ranks
from ropewalk import parallel

pytestmark = pytest.mark.xdist_group("ranks")


def results(call, parts, parameters):
    out = call(*parts)
    return [out, *torch.autograd.grad(out, [*parts, *parameters], torch.ones_like(out))]


def compare(shards, call, backend, batch, kv_heads, parameters=(), wrap=lambda call: call, dynamic=None):
    parts = [shards.cut(x.detach(), 2).requires_grad_() for x in inputs(batch, kv_heads=kv_heads)]
    torch._dynamo.reset()
    compiled = torch.compile(wrap(call), backend=backend, fullgraph=True, dynamic=dynamic)
    # Twice, so that the second call is one of a compiled function only.
    truth = results(call, parts, parameters)
    for _ in range(2):
        for x, y in zip(results(compiled, parts, parameters), truth, strict=True):
            torch.testing.assert_close(x, y, rtol=0, atol=1e-12)
    return compiled, parts, truth[0]


def checkpointed(call):
    return lambda *x: checkpoint(call, *x, use_reentrant=False)


def linear_case(sharding, kind, backend, mesh, wrap=lambda call: call, dynamic=None):
    batch, shards = SHARDINGS[sharding].batch, SHARDINGS[sharding].shards(mesh)
    options, parameters = case_of(kind, batch)
    if kind == "per token":
        options["decay"] = shards.cut(options["decay"].detach(), 2)
    call = functools.partial(parallel.linear_attention, shards=shards, **options)
    return compare(shards, call, backend, batch, 2, parameters, wrap, dynamic)


def without_gradients(mesh):
    compiled, parts, expected = linear_case("contiguous", "rope", "aot_eager", mesh)
    with torch.no_grad():
        torch.testing.assert_close(compiled(*parts), expected, rtol=0, atol=1e-12)


def softmax_case(sharding, name, method, mesh, wrap=lambda call: call):
    shards, encoding = SHARDINGS[sharding].shards(mesh), encoding_of(name)
    call = functools.partial(parallel.attention, shards=shards, encoding=encoding, method=method)
    compare(shards, call, "aot_eager", SHARDINGS[sharding].batch, 4, list(encoding.parameters()), wrap)


def recomputed_without_tokens(mesh):
    """Eager, with activation checkpointing: a rank without tokens takes part in the exchanges of the recomputation."""
    shards = SHARDINGS["uneven"].shards(mesh) if mesh.size() > 2 else parallel.Shards(mesh, [LENGTH, 0])
    parts = [shards.cut(x.detach(), 2).requires_grad_() for x in inputs(2)]
    for options in ({"rope": encoding_of("rope")}, {"bias": encoding_of("t5")}):
        call = functools.partial(parallel.linear_attention, shards=shards, **options)
        for x, y in zip(results(checkpointed(call), parts, ()), results(call, parts, ()), strict=True):
            torch.testing.assert_close(x, y, rtol=0, atol=1e-12)


def a_rank_without_tokens(mesh):
    shards = parallel.Shards(mesh, [4] + [0] * (mesh.size() - 1))
    x = torch.ones(1, 1, shards.lengths[shards.rank], 4)
    for function in (parallel.linear_attention, parallel.attention):
        call = functools.partial(function, shards=shards)
        torch._dynamo.reset()
        refusal: Any = pytest.raises(rw.RopewalkError, match="tokens on every rank")
        if Version(torch.__version__) < Version("2.12"):
            # A function that raises while it is compiled is called without the compiler there, on all ranks.
            refusal = contextlib.nullcontext()
        with refusal:
            torch.testing.assert_close(torch.compile(call, backend="eager")(x, x, x), call(x, x, x), rtol=0, atol=0)
        # The compiler raises its own error if it must not leave the graph.
        torch._dynamo.reset()
        with pytest.raises(Unsupported):
            torch.compile(call, backend="eager", fullgraph=True)(x, x, x)


def few(world):
    return {
        "a rank without tokens": a_rank_without_tokens,
        "linear": without_gradients,
        "linear, recomputed": functools.partial(linear_case, "contiguous", "none", "aot_eager", wrap=checkpointed),
        "recomputed without tokens": recomputed_without_tokens,
        "gather": functools.partial(softmax_case, "contiguous", "alibi", "gather"),
    }


def more(world):
    kinds = {"contiguous": "t5 learned", "zigzag": "per token"}
    cases: dict[str, Any] = {
        f"linear, {sharding}, {kind}": functools.partial(linear_case, sharding, kind, "aot_eager")
        for sharding, kind in kinds.items()
    }
    # Numbers of the shards are symbols of the graph then.
    cases["linear, dynamic"] = functools.partial(linear_case, "contiguous", "none", "eager", dynamic=True)
    cases["gather, recomputed"] = functools.partial(softmax_case, "zigzag", "t5", "gather", wrap=checkpointed)
    cases["ulysses"] = functools.partial(softmax_case, "packed", "t5", "ulysses")
    return cases | {"inductor": functools.partial(linear_case, "contiguous", "rope", "inductor")}


@pytest.mark.slow
@pytest.mark.parametrize("cases", [few, more])
def test_one_graph_with_the_results_of_eager_calls(cases, tmp_path):
    failures = failures_on_ranks(2, "parallel.test_compiled", cases.__name__, tmp_path)
    assert failures.keys() == cases(2).keys()
    assert {name: texts[0] for name, texts in failures.items() if texts} == {}
