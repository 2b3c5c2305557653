"""Running sums by programs that scan a whole sequence, if there are enough heads to keep a GPU busy.

The sums of single segments, which `sum_segments` stores and `run_totals` loads, stay in registers here.
"""

# pyright: reportAssignmentType=false, reportGeneralTypeIssues=false, reportArgumentType=false
# pyright: reportPossiblyUnboundVariable=false, reportOperatorIssue=false
# In Triton's language a tl.constexpr is its value, which type checkers do not know.

import triton
import triton.language as tl

from ropewalk.kernels.linear.stored.triton_sums import decayed_rows, load_rotated, load_values, low_sums, slots
from ropewalk.kernels.linear.triton_features import exponential
from ropewalk.kernels.linear.triton_weights import head_decay


@triton.jit
def scan_plain(
    low, before, after, plain, g, length, owner, owners, count, LANES: tl.constexpr, FEATURES: tl.constexpr,
    SEGMENT: tl.constexpr, BLOCKS: tl.constexpr, GROUP: tl.constexpr, HAS_BEFORE: tl.constexpr, DECAY: tl.constexpr,
    REVERSE: tl.constexpr,
):  # fmt: skip
    """Store the sum of unrotated features before each segment, from sums of blocks, and the sum of all in `after`."""
    HALF: tl.constexpr = (FEATURES[0] + 1) // 2
    feature, has, place, _known = slots(tl.arange(0, 2 * LANES), 0, LANES, FEATURES)
    total = tl.zeros((2 * LANES,), tl.float32)
    if HAS_BEFORE:
        total = tl.load(before + feature, mask=has, other=0.0)
    for step in tl.range(0, count, num_stages=3):
        number = count - 1 - step if REVERSE else step
        size = tl.minimum(length - number * SEGMENT, SEGMENT)
        segment_sum = low_sums(
            low, place, has, 0, BLOCKS, g, size, number, owners * GROUP, owner, HALF, BLOCKS, SEGMENT // BLOCKS, GROUP,
            DECAY, REVERSE,
        )  # fmt: skip
        tl.store(plain + (owner * count + number) * FEATURES[0] + feature, total, mask=has)
        if DECAY:
            total = total * exponential(g * size)
        total += segment_sum
    tl.store(after + feature, total, mask=has)


@triton.jit(do_not_specialize=["length", "owners", "count", "decay_b", "decay_h"])
def scan_segments(
    rotated, v, low, decay, before, after, running, plain, v_b, v_h, v_n, decay_b, decay_h, length, owners, count,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, FEATURES: tl.constexpr, V_DIM: tl.constexpr, DECAY: tl.constexpr,
    SEGMENT: tl.constexpr, BLOCKS: tl.constexpr, CHUNK: tl.constexpr, LANES: tl.constexpr, COLUMNS: tl.constexpr,
    LANE_BLOCKS: tl.constexpr, TILES: tl.constexpr, HAS_BEFORE: tl.constexpr, REVERSE: tl.constexpr,
    KIND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Store the sums of (R x) v^T and of x before each segment, or after it if REVERSE, and of all in `after`.

    Each program computes a tile of the sums. The last program of each sequence and head computes the sums of x. A DECAY
    is that of `sum_segments` and `run_totals`.
    """
    WIDTH: tl.constexpr = FEATURES[0]
    HALF: tl.constexpr = (WIDTH + 1) // 2
    owner, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    batch, head = owner // KV_HEADS, owner % KV_HEADS
    before += owner * (WIDTH * (V_DIM + 1))
    after += owner * (WIDTH * (V_DIM + 1))
    g = 0.0
    if DECAY:
        g = head_decay(decay + batch * decay_b + head * decay_h)
    if tile == TILES:
        above: tl.constexpr = WIDTH * V_DIM
        scan_plain(
            low, before + above, after + above, plain, g, length, owner, owners, count, LANE_BLOCKS * LANES, FEATURES,
            SEGMENT, BLOCKS, GROUP, HAS_BEFORE, DECAY, REVERSE,
        )  # fmt: skip
    else:
        feature, has, place, known = slots(tl.arange(0, 2 * LANES), (tile % LANE_BLOCKS) * LANES, LANES, FEATURES)
        column = (tile // LANE_BLOCKS) * COLUMNS + tl.arange(0, COLUMNS)
        inside = has[:, None] & (column < V_DIM)[None, :]
        at = feature[:, None] * V_DIM + column[None, :]
        total = tl.zeros((2 * LANES, COLUMNS), tl.float32)
        if HAS_BEFORE:
            total = tl.load(before + at, mask=inside, other=0.0)
        part = tl.zeros((2 * LANES, COLUMNS), tl.float32)
        kept = 1.0  # the decay over the previous segment
        STEPS: tl.constexpr = GROUP * (SEGMENT // CHUNK)
        for step in range(0, count * STEPS):
            number = owner * 0 + (count - 1 - step // STEPS if REVERSE else step // STEPS)  # 64 bits, for offsets
            size = tl.minimum(length - number * SEGMENT, SEGMENT).to(tl.int32)
            if step % STEPS == 0:
                # Each segment is summed separately and then added: products added to a large total lose digits.
                if DECAY:
                    total = total * kept
                    kept = exponential(g * size)
                total += part
                part = tl.zeros((2 * LANES, COLUMNS), tl.float32)
                target = running + (owner * count + number) * (WIDTH * V_DIM)
                tl.store(target + at, total.to(running.dtype.element_ty), mask=inside)
            member = head * GROUP + step % GROUP
            index = (step % STEPS // GROUP) * CHUNK + tl.arange(0, CHUNK)
            token = number * SEGMENT + index
            valid = token < length
            base = (batch * (KV_HEADS * GROUP) + member) * length + number * SEGMENT
            t = load_rotated(rotated, base, index, valid, place, known, HALF)
            y = load_values(v, batch * v_b + member * v_h + token * v_n, valid, column, V_DIM, KIND)
            if DECAY:
                y = decayed_rows(y, g, index, size, REVERSE)
            part = tl.dot(tl.trans(t), y, part, input_precision=PRECISION)
        if DECAY:
            total = total * kept
        tl.store(after + at, total + part, mask=inside)
