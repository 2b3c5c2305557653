"""MPS, which has no float64: shapes, devices and dtypes on fake tensors. No test runs on such a device.

Attention is not here: torch without MPS rejects its softmax, its indices and its gradients even on fake tensors.
"""

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import ropewalk as rw


class NoFloat64(TorchDispatchMode):
    """Rejects what a device without float64 cannot store."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            assert not (isinstance(x, torch.Tensor) and x.device.type == "mps" and x.dtype == torch.float64), func
        return result


def rotation(x):
    q, k = x.view(1, 2, 3, 8), x.view(1, 2, 3, 8)
    return rw.RotaryEmbedding(8)(q, k)[0].view(1, 3, 16)


def norm(x):
    q = x.view(1, 2, 3, 8)
    return rw.qk_norm_rope(q, q, rw.RotaryEmbedding(8))[1].view(1, 3, 16)


def sinusoidal(x):
    return rw.encoding("sinusoidal", dim=16, num_heads=2).embed(x)


@pytest.mark.parametrize("call", [rotation, norm, sinusoidal])
def test_fake_tensors_on_mps(call):
    with FakeTensorMode(), NoFloat64(), torch.device("mps"):
        y = call(torch.empty(1, 3, 16, device="mps"))
    assert (y.device.type, y.dtype, y.shape) == ("mps", torch.float32, (1, 3, 16))


def test_float64_on_mps_would_be_seen():
    with FakeTensorMode(), NoFloat64(), pytest.raises(AssertionError):
        torch.empty(1, device="mps", dtype=torch.float64)
