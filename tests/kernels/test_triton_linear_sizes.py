"""The kernels of linear attention in bfloat16 on a GPU: tiles with and without padding, grouped heads, weights.

The compiler of a GPU pads, splits and schedules what the interpreter computes as a whole.
"""

import pytest
import torch

import ropewalk as rw
from nn.weighted_cases import t5

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
