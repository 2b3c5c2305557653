"""Encodings on a CUDA device: the same numbers, no waiting, FlexAttention compiled, and ids that have no row."""

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

from nn.test_encoding import IDS, LENGTH, NAMES, K, Q, X, hooks, made
from ropewalk.nn.encodings.by_name import encoding

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning")
def test_the_same_numbers_without_waiting_for_the_device(name):
    found = made(name)
    expected = hooks(found, positions=IDS)
    found.to("cuda")
    assert all(getattr(found, held).is_cuda for held in found.held)
    x, q, k, ids = (part.to("cuda") for part in (X, Q, K, IDS))
    hooks(found, x, q, k, ids)
    torch.cuda.set_sync_debug_mode("error")
    try:
        results = hooks(found, x, q, k, ids)
        found.embed(x)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for result, truth in zip(results, expected, strict=True):
        assert result is truth is None or torch.allclose(result.cpu(), truth, rtol=0, atol=1e-10)


WITHOUT_A_ROW = """
import torch
from ropewalk.nn.encodings.by_name import encoding
found = encoding("learned", dim=8, num_heads=2, length={length}).to("cuda")
embed = torch.compile(found.embed, fullgraph=True) if {compiled} else found.embed
for ids in ([[0, 5]], [[0, {bad}]]):
    embed(torch.zeros(2, 2, 8, device="cuda"), torch.tensor(ids).expand(2, 2).to("cuda"))
    torch.cuda.synchronize()
    print("served", ids[0][1], flush=True)
"""


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("bad", [-1, LENGTH])
def test_a_position_without_a_row_is_an_error_of_the_device(compiled, bad):
    # In a process of its own, whose device is lost to it from then on.
    code = WITHOUT_A_ROW.format(length=LENGTH, compiled=compiled, bad=bad)
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.stdout == "served 5\n", result.stderr
    assert result.returncode != 0
    assert "assert" in result.stderr


@pytest.mark.parametrize("name", ["t5", "alibi"])
# Of torch's compiler, which asks what T5's numbers by distance are, a result and no parameter.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_inside_compiled_flex_attention(name):
    found: Any = encoding(name, dim=256, num_heads=4).to("cuda")
    for parameter in found.parameters():
        torch.nn.init.normal_(parameter)
    # Small enough that no key takes all the weight, which would leave gradients of nothing but rounding.
    q, k, v = (0.3 * torch.randn(2, 4, 256, 64, device="cuda") for _ in range(3))
    inputs = [q.requires_grad_(), *found.parameters()]
    for places in (torch.arange(256, device="cuda"), torch.randint(0, 4000, (2, 256), device="cuda")):
        scale = found.scale or 0.125
        how = {"score_mod": found.score_mod(places, places), "kernel_options": found.flex_options}
        out = torch.compile(flex_attention)(q, k, v, scale=scale, **how)
        bias = found.bias(places, places)
        bias = bias if bias.dim() == 4 else bias[None]
        scores = q.double() @ k.double().mT * scale + bias.double()
        truth = torch.softmax(scores, dim=-1) @ v.double()
        pairs = zip(*(torch.autograd.grad(y.square().sum(), inputs) for y in (out, truth)), strict=True)
        for result, right in [(out, truth), *pairs]:
            # FlexAttention multiplies in TF32.
            assert (result - right).abs().max() <= 0.01 * right.abs().max()
