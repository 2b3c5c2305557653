"""Temporaries of the Triton kernels for linear attention, from the sizes of their arrays: no test allocates them."""

import pytest
import torch

from ropewalk.kernels.linear.triton_call import Call, Tensors
from ropewalk.kernels.types import Layout, Weighting

# Allocated in a forward pass, in sizes of q, k and v. Both directions store sums before and after each chunk.
TEMPORARIES = [
    (64, "", False, False, 0.1),
    (64, "alibi", True, False, 0.1),
    (64, "t5", False, False, 0.8),
    (64, "t5", True, False, 1.1),
    (64, "t5", True, True, 1.5),
    (128, "t5", False, False, 0.9),
]


@pytest.mark.parametrize(("width", "bias", "rotated", "two_way", "most"), TEMPORARIES)
def test_temporaries_of_a_million_tokens(width, bias, rotated, two_way, most):
    shape = 1, 4, 1 << 20, width
    x = torch.empty(shape, dtype=torch.bfloat16, device="meta")
    table = torch.empty(shape[2], width // 2, device="meta") if rotated else None
    decay = torch.empty(1, 4, 1, device="meta") if bias == "alibi" else None
    band = torch.empty(4, 2 * 113 + 1, device="meta") if bias == "t5" else None
    tensors = Tensors(x, x, x, None, None, table, table, table, table, decay, band, None, 0, 0)
    maps, weighting = ("elu", "elu"), Weighting(decay, band)
    call = Call(tensors, Layout(True, 0, -2), maps, not two_way, weighting, None, True)
    assert 4 * (call.kept.length + call.forward_scratch.length) <= most * 3 * x.nbytes
