"""Factors between rows of linear attention on a GPU: decay, a bias within a band, or only which rows are visible.

DECAY is 0 for no decay, 1 for one per head, 2 for one per token. BAND is the window of a bias, or 0: `band` has one
logarithm per query head and difference key - query = -BAND .. BAND. SIDE is which rows are read: -1 for those up to a
row, 1 for those from it on, 0 for all.
"""

# pyright: reportAssignmentType=false, reportGeneralTypeIssues=false, reportArgumentType=false
# pyright: reportPossiblyUnboundVariable=false, reportOperatorIssue=false
# In Triton's language a tl.constexpr is its value, which type checkers do not know.

import torch
import triton
import triton.language as tl

from ropewalk.kernels.linear.triton_features import exponential
from ropewalk.kernels.triton_launch import INTERPRETED

# The interpreter has no assembly, and GPUs of AMD have another one.
ASSEMBLY = tl.constexpr(not INTERPRETED and torch.version.hip is None)

# exp of this is 0 in float32. Smaller logarithms would make sums of logarithms imprecise, or infinite.
LEAST = tl.constexpr(-1000.0)


@triton.jit
def bounded(g):
    """Return a logarithm that is at least LEAST. Not by maximum, which would replace NaN by a number."""
    return tl.where(g < LEAST, LEAST, g)


@triton.jit
def head_decay(decay):
    """Return the logarithm of a decay per head, from its address."""
    return bounded(tl.load(decay).to(tl.float32))


@triton.jit
def distance_weights(g, x_index, y_index):
    """Return the factors between rows x and y [x, y] by the decay of their head, whichever of them is later."""
    # One product per pair: the factor of `exponential` is part of the logarithm.
    return tl.exp2((g * 1.4426950408889634) * tl.abs(y_index[None, :] - x_index[:, None]))


@triton.jit
def chunk_decay(decay, begin, start, tokens, DECAY: tl.constexpr, CHUNK: tl.constexpr):
    """Return the logarithm of the decay from the start of a chunk to each of its tokens, and to its last one.

    Args:
        decay: Address of the decay of the first token of the sequence, and the stride of tokens.
        begin: First token of the segment.
        start: Index of the chunk's first token in the segment.
        tokens: Number of tokens in the chunk. Rows after them do not decay.
    """
    row = tl.arange(0, CHUNK)
    if DECAY == 1:
        g = head_decay(decay[0])
        local, last = g * tl.minimum(row + 1, tokens), g * tokens
    elif DECAY == 2:
        # In float64, because differences of large sums are needed.
        source = decay[0] + (begin + start) * decay[1] + row * decay[1]
        g = bounded(tl.load(source, mask=row < tokens, other=0.0).to(tl.float64))
        local, last = tl.cumsum(g, axis=0), tl.sum(g, axis=0)
    else:
        local = tl.zeros((CHUNK,), tl.float32)
        last = tl.sum(local, axis=0)
    return local, last


@triton.jit
def carried_decay(local, last, SIDE: tl.constexpr):
    """Return the decay between each token of a chunk and the sums: of the rows before the chunk, or after it."""
    return exponential((local if SIDE <= 0 else last - local).to(tl.float32))


@triton.jit
def pair_weights(x_index, y_index, local, decay, SIDE: tl.constexpr, DECAY: tl.constexpr):
    """Return the factors between rows x and y [x, y] of the same chunk, 0 if y is not visible.

    `local` is the decay of the chunk, as `chunk_decay` returns it. SIDE is not 0.
    """
    ahead = y_index[None, :] - x_index[:, None]
    seen = ahead <= 0 if SIDE < 0 else ahead >= 0
    if DECAY == 1:
        weights = exponential(tl.where(seen, head_decay(decay[0]) * tl.abs(ahead), -float("inf")))
    elif DECAY == 2:
        logs = local[:, None] - local[None, :] if SIDE < 0 else local[None, :] - local[:, None]
        weights = exponential(tl.where(seen, logs.to(tl.float32), -float("inf")))
    else:
        weights = tl.where(seen, 1.0, 0.0)
    return weights


@triton.jit
def weighted(scores, weights, WEIGHTED: tl.constexpr):
    """Return scores times their factors. If factors are only 0 or 1, scores that are not visible may be infinite."""
    return scores * weights if WEIGHTED else tl.where(weights > 0, scores, 0.0)


@triton.jit
def far_weight(band, head, BAND: tl.constexpr, AFTER: tl.constexpr):
    """Return the factor of keys beyond the band of a query head: before the query, or after it if AFTER."""
    return tl.exp(tl.load(band + head * (2 * BAND + 1) + (2 * BAND if AFTER else 0))).to(tl.float32)


# The factors of a band are stored as a line per query head, by the difference key - query, which the cache of a
# multiprocessor keeps. Tiles of factors would be as large as the rows that are read.


@triton.jit
def store_factors(factors, band, head, block, BAND: tl.constexpr, SIDE: tl.constexpr, CHUNK: tl.constexpr):
    """Store a block of CHUNK elements of the line of a query head. There are 2 * (1 + NEAR) blocks.

    SIDE is which keys are read: -1 for those up to the query, 0 for all.
    """
    NEAR: tl.constexpr = (BAND + CHUNK - 2) // CHUNK
    LINE: tl.constexpr = 2 * (1 + NEAR) * CHUNK
    place = block * CHUNK + tl.arange(0, CHUNK)
    ahead = place - LINE // 2
    known = tl.minimum(tl.maximum(ahead, -BAND), BAND)
    weights = tl.exp(tl.load(band + head * (2 * BAND + 1) + BAND + known)).to(tl.float32)
    if SIDE < 0:
        weights = tl.where(ahead <= 0, weights, 0.0)
    tl.store(factors + head * LINE + place, weights)


@triton.jit
def load_factors(factors, head, ahead, BAND: tl.constexpr, KEYS: tl.constexpr, CHUNK: tl.constexpr, STEP: tl.constexpr):
    """Load the factors [x, y] between a chunk and STEP rows, `ahead` steps after its first row.

    KEYS: x are keys, and y their queries.
    """
    NEAR: tl.constexpr = (BAND + CHUNK - 2) // CHUNK
    LINE: tl.constexpr = 2 * (1 + NEAR) * CHUNK
    x, y = tl.arange(0, CHUNK).to(tl.int64)[:, None], tl.arange(0, STEP).to(tl.int64)[None, :]
    # First what is the same for all elements.
    if KEYS:
        source = (factors + head * LINE + LINE // 2 - ahead * STEP) + (x - y)
    else:
        source = (factors + head * LINE + LINE // 2 + ahead * STEP) + (y - x)
    if not ASSEMBLY:
        return tl.load(source)
    # `tl.load` would load other elements in each thread than those of the scores, and exchange them through shared
    # memory, which takes longer than the products of a visit.
    return tl.inline_asm_elementwise(
        "ld.global.nc.f32 $0, [$1];", "=f,l", [source.to(tl.int64)], dtype=tl.float32, is_pure=True, pack=1
    )
