"""One token after a state by the Triton kernel: in Triton's interpreter, or on a GPU where there is one."""

import pytest
import torch

import ropewalk as rw
from kernels.triton_device import DEVICE
from nn.linear_cases import NAMES
from ropewalk.kernels.linear.torch import linear_attention
from ropewalk.kernels.linear.triton_step import linear_step
from ropewalk.kernels.types import NO_WEIGHTING, FeatureMap, Layout, Side, Sums, Tables, Weighting

PAIRS = Layout(True, 0, -2)


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.5 + 0.75


def both(q, k, v, sums, maps=("elu", "elu"), tables=None, layout=PAIRS, weighting=NO_WEIGHTING):
    """Results of the kernel, and those of the formula in float64."""
    on_device = [x.to(DEVICE) for x in (q, k, v, *sums)]
    cos, sin, row = (None, None, 0) if tables is None else tables
    decay = None if weighting.decay is None else weighting.decay[0, :, 0].to(DEVICE)
    moved = (None, None) if cos is None or sin is None else (cos.to(DEVICE), sin.to(DEVICE))
    numbers = FeatureMap[maps[0]].value, FeatureMap[maps[1]].value
    options = decay, layout, numbers, weighting.normalize, weighting.scale
    result = linear_step(*on_device, *moved, row, *options)
    wide = None if cos is None or sin is None else Tables(cos.double(), sin.double(), row)
    sides = (Side(x.double(), name, None, wide) for x, name in zip((q, k), maps, strict=True))
    decay = None if weighting.decay is None else weighting.decay.double()
    before = Sums(*(x.double() for x in sums))
    out, after = linear_attention(
        *sides, v.double(), before, layout, True, weighting=weighting._replace(decay=decay)
    )  # fmt: skip
    return result, (out, *after)


def assert_close(result, truth):
    assert result is not None
    for a, b in zip(result, truth, strict=True):
        torch.testing.assert_close(a.cpu().double(), b, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize(("heads", "kv_heads", "states"), [(2, 2, 2), (4, 2, 2), (4, 2, 4)])
@pytest.mark.parametrize(("width", "v_dim"), [(8, 8), (16, 5), (6, 20)])
@pytest.mark.parametrize("pairing", ["half", "interleaved", None])
def test_every_shape(heads, kv_heads, states, width, v_dim, pairing):
    q, k, v = random(2, heads, 1, width), random(2, kv_heads, 1, width, seed=1), random(2, kv_heads, 1, v_dim, seed=2)
    sums = random(2, states, width, v_dim, seed=3), random(2, states, width, seed=4)
    weighting = Weighting() if states == kv_heads else Weighting(decay=-random(1, states, 1, seed=5).abs())
    tables, layout = None, Layout(True, 0, -2)
    if pairing is not None:
        rope = rw.RotaryEmbedding(width, pairing=pairing)
        tables, layout = Tables(*rope.at(torch.arange(9)), 7), rope.layout
    assert_close(*both(q, k, v, sums, tables=tables, layout=layout, weighting=weighting))


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_every_feature_map(name, normalize):
    q, k, v = (random(1, 2, 1, 8, seed=seed) for seed in range(3))
    sums = random(1, 2, 8, 8), random(1, 2, 8)
    weighting = Weighting(decay=torch.full((1, 2, 1), -0.3), normalize=normalize, scale=1.0 if normalize else 0.5)
    assert_close(*both(q, k, v, sums, maps=(name, name), weighting=weighting))


def test_values_of_one_feature_are_read_where_they_are():
    q, k, wide = random(1, 1, 1, 1), random(1, 1, 1, 1, seed=1), random(1, 1, 1, 8).to(DEVICE)
    sums = random(1, 1, 1, 4, seed=3), random(1, 1, 1, seed=4)
    # Strided values use the general path.
    on_device = [x.to(DEVICE) for x in (q, k, *sums)]
    options = None, None, 0, None, Layout(True, 0, -2), (0, 0), True, 1.0
    assert linear_step(*on_device[:2], wide[..., ::2], *on_device[2:], *options) is None
    assert_close(*both(q, k, wide[..., ::2].contiguous().cpu(), sums))
