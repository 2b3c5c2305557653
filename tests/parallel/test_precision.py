"""Results in float32 and bfloat16: errors are at most twice those of the plain formula in the same dtype."""

import functools

import pytest
import torch
import torch.distributed as dist

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


def gradients(compute, tensors, cotangent, weight):
    """Outputs, and the gradients of tensors and of a parameter, unless it is None."""
    leaves = [x.detach().requires_grad_() for x in tensors]
    out = compute(*leaves)
    leaves += [] if weight is None else [weight]
    return [out, *torch.autograd.grad(out, leaves, cotangent.to(out.dtype))]


def compare(shards, tensors, formula, compute, weight=None, seed=0):
    """Return the errors of this rank over those of the formula. A parameter is the last argument of the formula."""
    cotangent = torch.randn(*tensors[0].shape[:3], V_DIM, generator=torch.Generator().manual_seed(1 + seed))
    results = []
    for dtype in (torch.float64, tensors[0].dtype):
        numbers = None if weight is None else weight.detach().to(dtype).requires_grad_()
        whole = formula if weight is None else functools.partial(formula, weight=numbers)
        results.append(gradients(whole, [x.to(dtype) for x in tensors], cotangent, numbers))
    ours = gradients(compute, [shards.cut(x, 2) for x in tensors], shards.cut(cotangent, 2), weight)
    if weight is not None:
        # A rank has its share of the gradient of a parameter. Before anything is raised: all ranks take part.
        ours[-1] = ours[-1].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(ours[-1])
    ratios: list[float] = []
    for i, (a, c, b) in enumerate(zip(ours, *results, strict=True)):
        local = i < 4
        assert a.dtype == (tensors[0].dtype if local else torch.float32)
        error, allowed = (a.double() - (shards.cut(c, 2) if local else c)).abs().max(), (b.double() - c).abs().max()
        ratios.append((error / allowed).item())
    return ratios


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

    ratios = compare(shards, tensors, formula, lambda *x: parallel.linear_attention(*x, shards=shards, **options))
    assert all(ratio <= 2 for ratio in ratios), ratios


def softmax_case(sharding, name, method, dtype, seeds, mesh):
    shards, encoding = SHARDINGS[sharding].shards(mesh), encoding_of(name)
    weight = encoding.float().weight if name == "t5" else None
    ratios = [
        compare(
            shards,
            drawn(2, HEADS, HEADS, LENGTH, DIM, V_DIM, dtype, seed=seed),
            lambda *x, weight=None: softmax_formula(*x, name, weight),
            lambda *x: parallel.attention(*x, shards=shards, encoding=encoding, method=method),
            weight,
            seed,
        )
        for seed in seeds
    ]
    # After the last exchange: a rank that failed before would leave the others waiting.
    assert all(ratio <= 2 for each in ratios for ratio in each), ratios


def precision_cases(world):
    cases = {}
    for dtype in (torch.float32, torch.bfloat16):
        for sharding in ("contiguous", "zigzag"):
            for kind in ("plain", "alibi", "t5", "per query head", "per token"):
                cases[f"linear, {sharding}, {kind}, {dtype}"] = functools.partial(linear_case, sharding, kind, dtype)
            for name in ("none", "rope", "alibi", "t5"):
                for method in ("gather", "ulysses", "ring"):
                    # The others compute everything by SDPA of torch.
                    seeds = range(8) if method == "ring" else range(1)
                    case = functools.partial(softmax_case, sharding, name, method, dtype, seeds)
                    cases[f"{method}, {sharding}, {name}, {dtype}"] = case
    return cases


@pytest.mark.slow
def test_the_two_times_rule(tmp_path):
    failures = failures_on_ranks(2, "parallel.test_precision", "precision_cases", tmp_path)
    assert failures.keys() == precision_cases(2).keys()
    assert [name for name, failed in failures.items() if failed] == [], next(filter(None, failures.values()))[0]
