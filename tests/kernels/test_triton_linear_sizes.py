"""The kernels of linear attention in bfloat16 on a GPU: tiles with and without padding, grouped heads, weights.

The compiler of a GPU pads, splits and schedules what the interpreter computes as a whole.
"""

import copy

import pytest
import torch

import ropewalk as rw
from nn.weighted_cases import t5
from ropewalk.kernels.linear.stored import triton as stored

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SIZES = [(8, 5), (16, 8), (24, 40), (32, 32), (48, 64), (64, 48), (64, 64), (72, 70), (128, 128)]
KINDS = ["plain", "decay", "alibi", "t5"]
CASES = [(size, (2, 1), kind) for size in SIZES for kind in KINDS]
CASES += [(size, heads, "plain") for size in SIZES for heads in ((1, 1), (6, 2))]


def options_of(kind, heads, dtype):
    if kind == "decay":
        return {
            "decay": -torch.linspace(0.01, 0.3, heads, device="cuda", dtype=torch.promote_types(dtype, torch.float))
        }
    if kind == "alibi":
        return {"bias": rw.encoding("alibi", dim=8 * heads, num_heads=heads).cuda(), "causal": False}
    if kind == "t5":
        encoding = t5(heads, (8, 20), causal=True).cuda()
        torch.nn.init.normal_(encoding.weight, generator=torch.Generator("cuda").manual_seed(0))
        return {"bias": encoding.to(dtype)}
    return {}


@pytest.mark.parametrize("tokens", [20, 333])
@pytest.mark.parametrize(("size", "heads", "kind"), CASES)
def test_sizes_in_bfloat16(size, heads, kind, tokens):
    random, (width, v_dim), (q_heads, kv_heads) = torch.Generator("cuda").manual_seed(0), size, heads
    shapes = (q_heads, width), (kv_heads, width), (kv_heads, v_dim), (q_heads, v_dim)
    *inputs, cotangent = (
        torch.randn(2, n, tokens, dim, generator=random, device="cuda").to(torch.bfloat16) for n, dim in shapes
    )
    rope = rw.RotaryEmbedding(width).cuda()

    def results(dtype, backend):
        leaves = [x.to(dtype).requires_grad_() for x in inputs]
        options = options_of(kind, q_heads, dtype)
        out = rw.linear_attention(*leaves, rope=rope, backend=backend, **options)
        return [out, *torch.autograd.grad(out, leaves, cotangent.to(dtype))]

    truth = results(torch.float64, "torch")
    for name, x, y in zip(("out", "dq", "dk", "dv"), results(torch.bfloat16, "triton"), truth, strict=True):
        assert torch.linalg.vector_norm(x - y) < 0.012 * torch.linalg.vector_norm(y), name


# Width and values, query and key heads, whether attention is causal, T5's buckets and farthest distance, and sequences.
BANDS = [
    ((64, 64), (2, 1), False, (32, 128), None),
    ((64, 64), (2, 2), True, (32, 128), None),
    ((64, 64), (2, 1), False, (8, 20), (0, 1, 200, 333)),
    ((48, 40), (2, 1), False, (32, 400), None),
    ((128, 128), (2, 1), False, (32, 128), None),
    ((128, 128), (2, 2), True, (32, 400), None),
    ((96, 72), (2, 1), False, (32, 128), (0, 1, 200, 333)),
]


@pytest.mark.parametrize(("size", "heads", "causal", "buckets", "ends"), BANDS)
def test_bands_and_their_gradient_in_bfloat16(size, heads, causal, buckets, ends):
    tokens, (width, v_dim), (q_heads, kv_heads) = 333, size, heads
    batch, random = 1 if ends else 2, torch.Generator("cuda").manual_seed(0)
    shapes = (q_heads, width), (kv_heads, width), (kv_heads, v_dim), (q_heads, v_dim)
    *inputs, cotangent = (
        torch.randn(batch, n, tokens, dim, generator=random, device="cuda").to(torch.bfloat16) for n, dim in shapes
    )
    encoding = t5(q_heads, buckets, causal=causal).cuda()
    torch.nn.init.normal_(encoding.weight, generator=random)
    rope = rw.RotaryEmbedding(width).cuda()
    packed = {} if ends is None else {"cu_seqlens": torch.tensor(ends, device="cuda")}

    def results(dtype, backend):
        leaves = [x.to(dtype).requires_grad_() for x in inputs]
        # The numbers of a bfloat16 model are float32 here, so that their rounding is not the error.
        bias = copy.deepcopy(encoding).to(torch.promote_types(dtype, torch.float32))
        out = rw.linear_attention(*leaves, rope=rope, backend=backend, causal=causal, bias=bias, **packed)
        return [out, *torch.autograd.grad(out, [*leaves, bias.weight], cotangent.to(dtype))]

    truth = results(torch.float64, "torch")
    names = "out", "dq", "dk", "dv", "dw"
    for name, x, y in zip(names, results(torch.bfloat16, "triton"), truth, strict=True):
        assert torch.linalg.vector_norm(x - y) < 0.012 * torch.linalg.vector_norm(y), name


# Heads that store rotated features: width and values, query and key heads, what decays, and what else is special.
STORED = [
    ((65, 65), (2, 1), "per key head", "packed"),
    ((72, 70), (4, 2), "per query head", "no denominator"),
    ((96, 80), (4, 2), "per key head", "state"),
    ((96, 128), (2, 2), "alibi", ""),
    ((127, 33), (4, 2), "per query head", "packed"),
    ((24, 80), (2, 1), "per key head", ""),
    ((64, 128), (2, 1), "per key head", "state"),
    ((128, 64), (2, 1), "per query head", "no denominator"),
    ((128, 128), (4, 4), "strong", ""),
    ((128, 128), (2, 1), "per key head", "scan"),
    ((128, 128), (4, 2), "per query head", "scan and state"),
    ((256, 256), (2, 1), "per key head", "state"),
]


def decays_of(kind, q_heads, kv_heads):
    if kind == "alibi":
        return {"bias": rw.encoding("alibi", dim=8 * q_heads, num_heads=q_heads).cuda()}
    if kind == "strong":
        return {"decay": torch.tensor([0.0, -0.01, -50.0, -torch.inf], device="cuda")}
    return {"decay": -torch.linspace(0.003, 0.1, q_heads if "query" in kind else kv_heads, device="cuda")}


@pytest.mark.filterwarnings(r"ignore:asked.\s+[\w.]+\(cu_seqlens=:ropewalk.errors.RopewalkWarning")
@pytest.mark.parametrize(("size", "heads", "kind", "special"), STORED)
def test_stored_features_with_a_decay_in_bfloat16(size, heads, kind, special, monkeypatch):
    # Two segments and a part of one, which the narrowest tile of rows does not fill.
    tokens, (width, v_dim), (q_heads, kv_heads) = 600 if max(size) <= 128 else 1100, size, heads
    batch, random = 1 if special == "packed" else 2, torch.Generator("cuda").manual_seed(0)
    shapes = (q_heads, width), (kv_heads, width), (kv_heads, v_dim), (q_heads, v_dim)
    *inputs, cotangent = (
        torch.randn(batch, n, tokens, dim, generator=random, device="cuda").to(torch.bfloat16) for n, dim in shapes
    )
    calls, real = [], stored.linear_attention
    monkeypatch.setattr(stored, "linear_attention", lambda *call: calls.append(call) or real(*call))
    monkeypatch.setattr(stored, "_ENOUGH_SCANS", 1 if "scan" in special else 10**6)
    options = decays_of(kind, q_heads, kv_heads) | {"normalize": special != "no denominator"}
    options["rope"] = None if width % 2 else rw.RotaryEmbedding(width).cuda()
    if special == "packed":
        options["cu_seqlens"] = torch.tensor([0, 1, 1, 300, 590], device="cuda")

    def results(dtype, backend):
        leaves = [x.to(dtype).requires_grad_() for x in inputs]
        if "state" not in special:
            out = rw.linear_attention(*leaves, backend=backend, **options)
        else:
            state, parts = None, []
            for part in (slice(0, 30), slice(30, None)):
                one = [x[:, :, part] for x in leaves]
                y, state = rw.linear_attention(*one, state=state, return_state=True, backend=backend, **options)
                parts.append(y)
            out = torch.cat(parts, dim=2)
        return [out, *torch.autograd.grad(out, leaves, cotangent.to(dtype))]

    truth = results(torch.float64, "torch")
    assert not calls
    # Gradients of queries that read one token are differences of equal numbers.
    limit = 0.05 if kind == "strong" else 0.012
    for name, x, y in zip(("out", "dq", "dk", "dv"), results(torch.bfloat16, "triton"), truth, strict=True):
        assert torch.linalg.vector_norm(x - y) < limit * torch.linalg.vector_norm(y), name
    assert calls
