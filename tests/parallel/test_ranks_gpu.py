"""Two ranks on one GPU: values and gradients in bfloat16 next to those of one rank, and the kernels that run.

What is exchanged is copied through the memory of the host: gloo does not connect GPUs.
"""

import functools

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import ropewalk as rw
from parallel.ranks import failures_on_ranks
from ropewalk import parallel

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.xdist_group("ranks"),
]

BATCH, HEADS, LENGTH, DIM = 1, 4, 1024, 64
# The names of the kernels of linear attention, forward and backward.
KERNELS = ("sum_segments", "run_totals", "read_values", "read_queries", "read_keys")


def inputs():
    random = torch.Generator().manual_seed(0)
    return [torch.randn(BATCH, HEADS, LENGTH, DIM, generator=random).to("cuda", torch.bfloat16) for _ in range(4)]


def encoding_of(name):
    if name == "rope":
        return rw.RotaryEmbedding(DIM).cuda()
    causal = {"causal": True} if name == "t5" else {}
    encoding = rw.encoding(name, dim=HEADS * DIM, num_heads=HEADS, **causal).cuda()
    if name == "t5":
        torch.nn.init.normal_(encoding.weight, generator=torch.Generator("cuda").manual_seed(0))
    return encoding


def linear_options(kind, dtype):
    if kind in ("alibi", "t5"):
        return {"bias": encoding_of(kind).to(dtype), "rope": encoding_of("rope")}
    decay = -torch.linspace(0.01, 0.2, HEADS, device="cuda", dtype=torch.promote_types(dtype, torch.float32))
    return {"rope": encoding_of("rope")} | ({"decay": decay} if kind == "decay" else {})


def results(compute, tensors, cotangent):
    leaves = [x.detach().requires_grad_() for x in tensors]
    out = compute(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, cotangent.to(out.dtype))]


def check(mesh, layout, ends, alone, together):
    """Raise unless the errors of this rank are at most twice those of one rank."""
    shards, (*tensors, cotangent) = parallel.Shards(mesh, LENGTH, layout, ends), inputs()
    packed = {} if ends is None else {"cu_seqlens": torch.tensor(ends, device="cuda")}
    truth = results(lambda *x: alone(*x, **packed), [x.double() for x in tensors], cotangent)
    plain = results(lambda *x: alone(*x, **packed), tensors, cotangent)
    parts = [shards.cut(x, 2) for x in tensors]
    ours = results(lambda *x: together(*x, shards=shards), parts, shards.cut(cotangent, 2))
    errors = [
        (torch.linalg.vector_norm(x - shards.cut(z, 2)), torch.linalg.vector_norm(shards.cut(y - z, 2)))
        for x, y, z in zip(ours, plain, truth, strict=True)
    ]
    assert all(error <= 2 * allowed for error, allowed in errors), errors


def linear_case(layout, ends, kind, mesh):
    def alone(q, k, v, **packed):
        return rw.linear_attention(q, k, v, **packed, **linear_options(kind, q.dtype))

    options = linear_options(kind, torch.bfloat16)
    check(mesh, layout, ends, alone, functools.partial(parallel.linear_attention, **options))


def softmax_case(layout, ends, name, method, mesh):
    encoding = encoding_of(name)

    def alone(q, k, v, **packed):
        return rw.attention(q, k, v, encoding=encoding, causal=True, **packed)

    check(mesh, layout, ends, alone, functools.partial(parallel.attention, encoding=encoding, method=method))


def profiled_case(mesh):
    """The kernels of linear attention compute the outputs of a rank."""
    shards, (*tensors, cotangent) = parallel.Shards(mesh, LENGTH), inputs()
    parts, part = [shards.cut(x, 2) for x in tensors], shards.cut(cotangent, 2)
    call = functools.partial(parallel.linear_attention, shards=shards, **linear_options("decay", torch.bfloat16))
    results(call, parts, part)
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiled:
        results(call, parts, part)
        torch.cuda.synchronize()
    names = [event.key for event in profiled.key_averages()]
    assert [kernel for kernel in KERNELS if not any(kernel in name for name in names)] == [], names


def cases(world):
    shardings = {"contiguous": ("contiguous", None), "zigzag": ("zigzag", None)}
    shardings["packed"] = ("contiguous", (0, 100, 700, LENGTH))
    found = {"profile": profiled_case}
    for sharding, (layout, ends) in shardings.items():
        for kind in ("rope", "decay", "alibi", "t5"):
            found[f"linear, {sharding}, {kind}"] = functools.partial(linear_case, layout, ends, kind)
    # Few, because most of them compile FlexAttention anew.
    for method, name, sharding in (
        ("gather", "rope", "contiguous"),
        ("gather", "alibi", "packed"),
        ("ulysses", "rope", "zigzag"),
        ("ulysses", "t5", "contiguous"),
        ("ring", "rope", "zigzag"),
        ("ring", "alibi", "contiguous"),
    ):
        found[f"{method}, {sharding}, {name}"] = functools.partial(softmax_case, *shardings[sharding], name, method)
    return found


def test_two_ranks_on_one_gpu(tmp_path):
    failures = failures_on_ranks(2, "parallel.test_ranks_gpu", "cases", tmp_path)
    assert failures.keys() == cases(2).keys()
    failed = {name: texts[0] for name, texts in failures.items() if texts}
    assert not failed, "\n".join(f"{name}: {text}" for name, text in failed.items())
