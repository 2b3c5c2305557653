"""Results in float32 and bfloat16: errors are at most twice those of the plain formula in the same dtype."""

import functools

import pytest
import torch

import ropewalk as rw
from formulas import rotate_by_spec
from nn.linear_cases import drawn
from nn.weighted_cases import alibi_bias, expected, rule_of, t5_bias
from parallel.cases import BUCKETS, DIM, HEADS, LENGTH, SHARDINGS, V_DIM, encoding_of
from parallel.ranks import failures_on_ranks
from ropewalk import parallel

pytestmark = pytest.mark.xdist_group("ranks")


def softmax_formula(q, k, v, name, weight):
    """Causal softmax attention, everything in the dtype of q."""
    ids = torch.arange(LENGTH)
    scale = 1.0 if name == "t5" else DIM**-0.5
    if name == "rope":
        q, k = (rotate_by_spec(x, rw.RopeSpec(DIM), ids[None], role=role) for x, role in ((q, "q"), (k, "k")))
    scores = (q @ k.transpose(-1, -2)) * scale
    if name == "alibi":
        scores = scores + alibi_bias(HEADS, ids[None], ids[None], q.dtype)
    elif name == "t5":
        scores = scores + t5_bias(weight.to(q.dtype), ids[None], ids[None], BUCKETS, causal=True)
    hidden = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
    return torch.softmax(scores.masked_fill(hidden, float("-inf")), dim=-1) @ v


def gradients(compute, tensors, cotangent):
    leaves = [x.detach().requires_grad_() for x in tensors]
    out = compute(*leaves)
    return [out, *torch.autograd.grad(out, leaves, cotangent.to(out.dtype))]


def compare(shards, tensors, formula, compute):
    """Raise unless the errors of this rank are within the rule."""
    cotangent = torch.randn(*tensors[0].shape[:3], V_DIM, generator=torch.Generator().manual_seed(1))
    truth = gradients(formula, [x.double() for x in tensors], cotangent)
    plain = gradients(formula, tensors, cotangent)
    ours = gradients(compute, [shards.cut(x, 2) for x in tensors], shards.cut(cotangent, 2))
    for a, b, c in zip(ours, plain, truth, strict=True):
        assert a.dtype == tensors[0].dtype
        allowed = 2 * (b.double() - c).abs().max()
        assert (a.double() - shards.cut(c, 2)).abs().max() <= allowed


def linear_case(sharding, kind, dtype, mesh):
    shards = SHARDINGS[sharding].shards(mesh)
    tensors, rope = drawn(2, HEADS, 2, LENGTH, DIM, V_DIM, dtype), rw.RotaryEmbedding(DIM)
    rule = rule_of(kind, 2, HEADS, 2, LENGTH, torch.float32, buckets=BUCKETS)
    options = rule.options(HEADS) | {"rope": rope}
    if kind == "per token":
        options["decay"] = shards.cut(options["decay"], 2)

    def formula(q, k, v):
        numbers = None if rule.tensor is None else rule.tensor.to(q.dtype)
        return expected(q, k, v, rule._replace(tensor=numbers), rope)

    compare(shards, tensors, formula, lambda *x: parallel.linear_attention(*x, shards=shards, **options))


def softmax_case(sharding, name, method, dtype, mesh):
    shards, encoding = SHARDINGS[sharding].shards(mesh), encoding_of(name)
    weight = encoding.weight.detach() if name == "t5" else None
    tensors = drawn(2, HEADS, HEADS, LENGTH, DIM, V_DIM, dtype)
    compare(
        shards,
        tensors,
        lambda *x: softmax_formula(*x, name, weight),
        lambda *x: parallel.attention(*x, shards=shards, encoding=encoding, method=method),
    )


def precision_cases(world):
    cases = {}
    for dtype in (torch.float32, torch.bfloat16):
        for sharding in ("contiguous", "zigzag"):
            for kind in ("plain", "alibi", "t5", "per query head", "per token"):
                cases[f"linear, {sharding}, {kind}, {dtype}"] = functools.partial(linear_case, sharding, kind, dtype)
            for name in ("none", "rope", "alibi", "t5"):
                for method in ("gather", "ulysses", "ring"):
                    case = functools.partial(softmax_case, sharding, name, method, dtype)
                    cases[f"{method}, {sharding}, {name}, {dtype}"] = case
    return cases


@pytest.mark.slow
def test_the_two_times_rule(tmp_path):
    failures = failures_on_ranks(2, "parallel.test_precision", "precision_cases", tmp_path)
    assert failures.keys() == precision_cases(2).keys()
    assert [name for name, failed in failures.items() if failed] == [], next(filter(None, failures.values()))[0]
