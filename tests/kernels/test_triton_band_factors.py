"""Lines of the factors of a band, and the tiles that are read from them."""

# pyright: reportArgumentType=false, reportOperatorIssue=false
# In Triton's language a tl.constexpr is its value, which type checkers do not know.

import pytest
import torch
import triton
import triton.language as tl

from kernels.triton_device import DEVICE
from ropewalk.kernels.linear.triton_weights import load_factors, store_factors

HEADS = 2


@triton.jit
def store_lines(band, lines, window: tl.constexpr, side: tl.constexpr, chunk: tl.constexpr):
    store_factors(lines, band, tl.program_id(0), tl.program_id(1), window, side, chunk)


@triton.jit
def load_tiles(lines, out, first, window: tl.constexpr, keys: tl.constexpr, chunk: tl.constexpr, step: tl.constexpr):
    tile = load_factors(lines, tl.program_id(0), tl.program_id(1) + first, window, keys, chunk, step)
    target = out + (tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)) * (chunk * step)
    tl.store(target + tl.arange(0, chunk)[:, None] * step + tl.arange(0, step)[None, :], tile)


@pytest.mark.parametrize("keys", [False, True])
@pytest.mark.parametrize("side", [-1, 0])
@pytest.mark.parametrize(
    ("window", "chunk", "step"),
    [(1, 16, 16), (17, 16, 16), (18, 16, 8), (33, 16, 16), (33, 16, 4), (91, 64, 64), (91, 64, 32)],
)
def test_tiles_have_the_factor_of_every_difference(window, chunk, step, side, keys):
    near = (window + chunk - 2) // chunk
    band = torch.randn(HEADS, 2 * window + 1, device=DEVICE)
    lines = torch.full((HEADS, 2 * (1 + near) * chunk), float("nan"), device=DEVICE)
    store_lines[(HEADS, 2 * (1 + near))](band, lines, window=window, side=side, chunk=chunk)
    # Visited steps: causal queries read keys before them, and keys are read by queries after them.
    first, end = 0 if keys and side < 0 else -near, 1 if not keys and side < 0 else near + 1
    visited = range(first * chunk // step, end * chunk // step)
    out = torch.empty(HEADS, len(visited), chunk, step, device=DEVICE)
    load_tiles[(HEADS, len(visited))](lines, out, visited[0], window=window, keys=keys, chunk=chunk, step=step)
    x, y = torch.arange(chunk, device=DEVICE), torch.arange(step, device=DEVICE)
    for i, ahead in enumerate(visited):
        difference = (ahead * step + y - x[:, None]) * (-1 if keys else 1)
        expected = band[:, difference.clamp(-window, window) + window].exp()
        if side < 0:
            expected = expected.masked_fill(difference > 0, 0.0)
        torch.testing.assert_close(out[:, i], expected, rtol=1e-6, atol=0.0)
