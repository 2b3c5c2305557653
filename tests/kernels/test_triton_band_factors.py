"""Lines of the factors of a band, and the tiles that are read from them."""

# pyright: reportArgumentType=false, reportOperatorIssue=false
# In Triton's language a tl.constexpr is its value, which type checkers do not know.

import pytest
import torch
import triton
import triton.language as tl

from kernels.triton_device import DEVICE
from ropewalk.kernels.linear.triton_weights import COPIES, load_factors, store_factors

HEADS = 2


@triton.jit
def store_lines(band, lines, window: tl.constexpr, side: tl.constexpr, chunk: tl.constexpr):
    store_factors(lines, band, tl.program_id(0), tl.program_id(1), window, side, chunk)


@triton.jit
def load_tiles(lines, out, first, window: tl.constexpr, keys: tl.constexpr, chunk: tl.constexpr):
    tile = load_factors(lines, tl.program_id(0), tl.program_id(1) + first, window, keys, chunk)
    row = tl.arange(0, chunk)
    target = out + (tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)) * (chunk * chunk)
    tl.store(target + row[:, None] * chunk + row[None, :], tile)


@pytest.mark.parametrize("keys", [False, True])
@pytest.mark.parametrize("side", [-1, 0])
@pytest.mark.parametrize(("window", "chunk"), [(1, 16), (17, 16), (18, 16), (33, 16), (91, 64)])
def test_tiles_have_the_factor_of_every_difference(window, chunk, side, keys):
    near = (window + chunk - 2) // chunk
    band = torch.randn(HEADS, 2 * window + 1, device=DEVICE)
    lines = torch.full((HEADS, 2 * COPIES.value, 2 * (1 + near) * chunk), float("nan"), device=DEVICE)
    store_lines[(HEADS, 2 * (1 + near))](band, lines, window=window, side=side, chunk=chunk)
    # Visited chunks: causal queries read keys before them, and keys are read by queries after them.
    visited = range(0 if keys and side < 0 else -near, 1 if not keys and side < 0 else near + 1)
    out = torch.empty(HEADS, len(visited), chunk, chunk, device=DEVICE)
    load_tiles[(HEADS, len(visited))](lines, out, visited[0], window=window, keys=keys, chunk=chunk)
    row = torch.arange(chunk, device=DEVICE)
    for i, ahead in enumerate(visited):
        difference = (ahead * chunk + row - row[:, None]) * (-1 if keys else 1)
        expected = band[:, difference.clamp(-window, window) + window].exp()
        if side < 0:
            expected = expected.masked_fill(difference > 0, 0.0)
        torch.testing.assert_close(out[:, i], expected, rtol=1e-6, atol=0.0)
