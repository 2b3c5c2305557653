"""Factors between rows of linear attention on a GPU: decay, a bias within a band, or only which rows are visible.

DECAY is 0 for no decay, 1 for one per head, 2 for one per token. BAND is the window of a bias, or 0. SIDE is which rows
are read: -1 for those up to a row, 1 for those from it on, 0 for all.
"""

# pyright: reportAssignmentType=false, reportGeneralTypeIssues=false, reportArgumentType=false
# pyright: reportPossiblyUnboundVariable=false, reportOperatorIssue=false
# In Triton's language a tl.constexpr is its value, which type checkers do not know.

import triton
import triton.language as tl

from ropewalk.kernels.linear.triton_features import exponential

# exp of this is 0 in float32. Smaller logarithms would make sums of logarithms imprecise, or infinite.
LEAST = tl.constexpr(-1000.0)


@triton.jit
def bounded(g):
    """Return a logarithm that is at least LEAST. Not by maximum, which would replace NaN by a number."""
    return tl.where(g < LEAST, LEAST, g)


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
        g = bounded(tl.load(decay[0]).to(tl.float32))
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
def pair_weights(
    x_index, y_index, local, decay, band, head, SIDE: tl.constexpr, DECAY: tl.constexpr, BAND: tl.constexpr,
    KEYS: tl.constexpr,
):  # fmt: skip
    """Return the factors between rows x and y [x, y], 0 if y is not visible.

    KEYS is whether x are keys: `band` has one factor per query head and difference key - query = -BAND .. BAND. With a
    decay per token, x and y are the same chunk, and `local` is its decay.
    """
    ahead = y_index[None, :] - x_index[:, None]
    if SIDE < 0:
        seen = ahead <= 0
    elif SIDE > 0:
        seen = ahead >= 0
    if DECAY == 1:
        g = bounded(tl.load(decay[0]).to(tl.float32))
        logs = g * (ahead if SIDE > 0 else -ahead if SIDE < 0 else tl.abs(ahead))
        weights = exponential(tl.where(seen, logs, -float("inf")) if SIDE != 0 else logs)
    elif DECAY == 2:
        logs = local[:, None] - local[None, :] if SIDE < 0 else local[None, :] - local[:, None]
        weights = exponential(tl.where(seen, logs.to(tl.float32), -float("inf")))
    elif BAND:
        difference = -ahead if KEYS else ahead
        source = band + head * (2 * BAND + 1) + BAND
        weights = tl.load(source + tl.minimum(tl.maximum(difference, -BAND), BAND))
        if SIDE != 0:
            weights = tl.where(seen, weights, 0.0)
    else:
        weights = tl.where(seen, 1.0, 0.0)
    return weights


@triton.jit
def weighted(scores, weights, DECAY: tl.constexpr, BAND: tl.constexpr):
    """Return scores times their factors. Without decay and band, scores that are not visible may be infinite."""
    return scores * weights if DECAY or BAND else tl.where(weights > 0, scores, 0.0)


@triton.jit
def far_weights(band, head, before, BAND: tl.constexpr, KEYS: tl.constexpr):
    """Return the factor of rows y beyond the band, before x or after it, of a query head."""
    # The first number is that of keys before the query: y before x, unless x are keys.
    return tl.load(band + head * (2 * BAND + 1) + (0 if before != KEYS else 2 * BAND))


@triton.jit
def later_weights(
    decay, band, head, index, size, DECAY: tl.constexpr, BAND: tl.constexpr, KEYS: tl.constexpr
):  # fmt: skip
    """Return the factors of the sums after a segment of `size` tokens, for each row of it, if SIDE is 0."""
    weights = tl.zeros(index.shape, tl.float32) + 1.0
    if DECAY:
        g = bounded(tl.load(decay[0]).to(tl.float32))
        weights = exponential(g * tl.maximum(size - 1 - index, 0))
    elif BAND and not KEYS:
        weights *= far_weights(band, head, False, BAND, KEYS)
    return weights


@triton.jit
def added_weights(
    local, whole, band, head, SIDE: tl.constexpr, DECAY: tl.constexpr, BAND: tl.constexpr, KEYS: tl.constexpr
):  # fmt: skip
    """Return the factors with which the rows y of a chunk are added to the sums that the next chunk reads."""
    weights = tl.zeros(local.shape, tl.float32) + 1.0
    if DECAY:
        weights = carried_decay(local, whole, -SIDE if SIDE != 0 else 1)
    elif BAND and KEYS:
        # The factor belongs to the query head.
        weights *= far_weights(band, head, SIDE <= 0, BAND, KEYS)
    return weights
