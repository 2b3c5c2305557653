"""Rows of queries and keys on a GPU: features as pairs, their rotation, and where they are stored.

Features are loaded as first and second members of pairs, so that the rotation is arithmetic between two tiles.
Unrotated features are paired with each other. In operands of matrix products, and in sums, both members alternate,
whatever the pairing, because joining them then moves no data between threads.
"""

# pyright: reportAssignmentType=false, reportGeneralTypeIssues=false, reportArgumentType=false
# pyright: reportPossiblyUnboundVariable=false, reportOperatorIssue=false
# In Triton's language a tl.constexpr is its value, which type checkers do not know.

import triton
import triton.language as tl

from ropewalk.kernels.linear.triton_features import EXP, NOTHING, mapped


@triton.jit
def members(lane, FEATURES: tl.constexpr):
    """Return the indices of both features of a lane, and whether these features exist.

    FEATURES is (width, rotated pairs, first rotated feature, whether pairs are interleaved, whether operands are kept
    in registers).
    """
    WIDTH: tl.constexpr = FEATURES[0]
    PAIRS: tl.constexpr = FEATURES[1]
    START: tl.constexpr = FEATURES[2]
    if FEATURES[3]:
        first, second = 2 * lane, 2 * lane + 1
        has_first = first < WIDTH
        has_second = second < WIDTH
    else:
        REST: tl.constexpr = WIDTH - 2 * PAIRS
        HALF: tl.constexpr = (REST + 1) // 2
        BASE: tl.constexpr = 0 if START > 0 else 2 * PAIRS
        is_rotated = lane < PAIRS
        rest = lane - PAIRS
        first = tl.where(is_rotated, START + lane, BASE + rest)
        second = tl.where(is_rotated, START + PAIRS + lane, BASE + HALF + rest)
        has_first = is_rotated | (rest < HALF)
        has_second = is_rotated | (HALF + rest < REST)
    return first, second, has_first, has_second


@triton.jit
def load_pairs(source, valid, offset, LANES: tl.constexpr, FEATURES: tl.constexpr, FILL: tl.constexpr):
    """Load first and second members of rows at `source`, padded with FILL."""
    if FEATURES[3]:
        feature = 2 * offset + tl.arange(0, 2 * LANES)
        mask = valid[:, None] & (feature < FEATURES[0])[None, :]
        both = tl.load(source[:, None] + feature[None, :], mask=mask, other=FILL)
        a, b = tl.split(tl.reshape(both, (both.shape[0], LANES, 2)))
    else:
        first, second, has_first, has_second = members(offset + tl.arange(0, LANES), FEATURES)
        a = tl.load(source[:, None] + first[None, :], mask=valid[:, None] & has_first[None, :], other=FILL)
        b = tl.load(source[:, None] + second[None, :], mask=valid[:, None] & has_second[None, :], other=FILL)
    return a, b


@triton.jit
def store_pairs(target, valid, offset, a, b, LANES: tl.constexpr, FEATURES: tl.constexpr):
    """Store first and second members to rows at `target`."""
    kind = target.dtype.element_ty
    if FEATURES[3]:
        ROWS: tl.constexpr = a.shape[0]
        feature = 2 * offset + tl.arange(0, 2 * LANES)
        mask = valid[:, None] & (feature < FEATURES[0])[None, :]
        both = tl.reshape(tl.join(a.to(kind), b.to(kind)), (ROWS, 2 * LANES))
        tl.store(target[:, None] + feature[None, :], both, mask=mask)
    else:
        first, second, has_first, has_second = members(offset + tl.arange(0, LANES), FEATURES)
        tl.store(target[:, None] + first[None, :], a.to(kind), mask=valid[:, None] & has_first[None, :])
        tl.store(target[:, None] + second[None, :], b.to(kind), mask=valid[:, None] & has_second[None, :])


@triton.jit
def segment_of(begins, number, count, length, SEGMENT: tl.constexpr, PACKED: tl.constexpr):
    """Return the first token and the end of a segment, and those of its sequence."""
    if PACKED:
        begin, end = tl.load(begins + 2 * number), tl.load(begins + 2 * number + 1)
        first, last = tl.load(begins + 3 * count + 2 * number), tl.load(begins + 3 * count + 2 * number + 1)
    else:
        begin = number.to(tl.int64) * SEGMENT
        last = length.to(tl.int64)
        end = tl.minimum(begin + SEGMENT, last)
        first = begin * 0
    return begin, end, first, last


@triton.jit
def sequence_of(begins, number, count, batch, PACKED: tl.constexpr):
    """Return the sequence of a segment: a row of the state."""
    return tl.load(begins + 2 * count + number) if PACKED else batch


@triton.jit
def place_of(owners, HEADS: tl.constexpr):
    """Return batch, head and segment of a program. Neighbouring programs differ in heads and share tables."""
    owner = (tl.program_id(0) % owners).to(tl.int64)
    return owner // HEADS, owner % HEADS, tl.program_id(0) // owners


@triton.jit
def load_features(
    side, batch, head, begin, index, valid, offset, length, LANES: tl.constexpr, FEATURES: tl.constexpr,
    MAP: tl.constexpr, ZEROS: tl.constexpr,
):  # fmt: skip
    """Load first and second members of rows, and what is subtracted from them before an exponential.

    `side` is the tensor and its shift, the strides of batch, head and token, and the number of heads. Rows are the
    tokens `begin + index`. Lanes start at `offset`. ZEROS: features of padding are 0. Otherwise they are any numbers,
    which is faster if all features of a row exist.
    """
    source = side[0] + batch * side[2] + head * side[3] + begin * side[4] + index * side[4]
    # Without a mask in the lanes, no lane needs a number that the map maps to 0.
    FULL: tl.constexpr = FEATURES[0] % 2 == 0 and 2 * FEATURES[1] == FEATURES[0] and FEATURES[0] % (2 * LANES) == 0
    FILL: tl.constexpr = 0.0 if FULL and not ZEROS else NOTHING[MAP]
    a, b = load_pairs(source, valid, offset, LANES, FEATURES, FILL)
    shifts = tl.zeros(index.shape, tl.float32)
    if MAP == EXP:
        shifts = tl.load(side[1] + (batch * side[5] + head) * length + begin + index, mask=valid, other=0.0)
    return a, b, shifts


@triton.jit
def load_tables(table, batch, head, begin, index, valid, offset, LANES: tl.constexpr, FEATURES: tl.constexpr):
    """Load cos and sin of tokens, 1 and 0 for unrotated features.

    `table` is cos and sin, the row of the first token, and the strides of batch and head.
    """
    PAIRS: tl.constexpr = FEATURES[1]
    lane = offset + tl.arange(0, LANES)
    pair = lane - FEATURES[2] // 2 if FEATURES[3] else lane
    known = valid[:, None] & ((pair >= 0) & (pair < PAIRS))[None, :]
    start = (table[2] + batch * table[3] + head * table[4] + begin) * PAIRS
    at = start + (index[:, None] * PAIRS + pair[None, :])
    return tl.load(table[0] + at, mask=known, other=1.0), tl.load(table[1] + at, mask=known, other=0.0)


@triton.jit
def rotate_pairs(a, b, c, s, FEATURES: tl.constexpr):
    """Rotate pairs, if there are rotated pairs."""
    if FEATURES[1]:
        a, b = a * c - b * s, a * s + b * c
    return a, b


@triton.jit
def load_values(values, batch, head, begin, index, valid, column, V_DIM: tl.constexpr, KIND: tl.constexpr):
    """Load rows of values as operands of dtype KIND. `values` is the tensor and its strides."""
    source = values[0] + batch * values[1] + head * values[2] + begin * values[3] + index * values[3]
    mask = valid[:, None] & (column < V_DIM)[None, :]
    return tl.load(source[:, None] + column[None, :], mask=mask, other=0.0).to(KIND)


@triton.jit
def load_sums(sums, slot, column, offset, LANES: tl.constexpr, FEATURES: tl.constexpr, V_DIM: tl.constexpr):
    """Load a tile [columns, 2 * lanes] of the sum of v (R k)^T."""
    HALF: tl.constexpr = (FEATURES[0] + 1) // 2
    place = 2 * offset + tl.arange(0, 2 * LANES)
    mask = (column < V_DIM)[:, None] & (place < 2 * HALF)[None, :]
    source = sums + slot * (2 * HALF * V_DIM) + (column[:, None] * (2 * HALF) + place[None, :])
    return tl.load(source, mask=mask, other=0.0)


@triton.jit
def load_plain(plain, slot, offset, LANES: tl.constexpr, FEATURES: tl.constexpr):
    """Load first and second members [lanes] of the sum of k."""
    HALF: tl.constexpr = (FEATURES[0] + 1) // 2
    lane = offset + tl.arange(0, LANES)
    source = plain + slot * (2 * HALF) + 2 * lane
    mask = lane < HALF
    return tl.load(source, mask=mask, other=0.0), tl.load(source + 1, mask=mask, other=0.0)


@triton.jit
def joined(a, b, FEATURES: tl.constexpr, KIND: tl.constexpr):
    """Return both members as one operand [rows, 2 * lanes] of dtype KIND."""
    x = tl.reshape(tl.join(a.to(KIND), b.to(KIND)), (a.shape[0], 2 * a.shape[1]))
    if FEATURES[4]:
        # Computed once: the compiler would compute it again for each product that it is an operand of.
        x = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=2)
    return x


@triton.jit
def parted(x):
    """Return first and second members of an operand, or of a result."""
    return tl.split(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)))


@triton.jit
def mapped_pairs(a, b, shifts, MAP: tl.constexpr):
    """Return the feature map of both members."""
    return mapped(a, shifts, MAP), mapped(b, shifts, MAP)


@triton.jit
def load_rotated(
    side, table, batch, head, begin, index, valid, offset, length, LANES: tl.constexpr, FEATURES: tl.constexpr,
    MAP: tl.constexpr,
):  # fmt: skip
    """Load rows and map them. Arguments are those of `load_features` and `load_tables`.

    Returns:
        First and second members, the same rotated, and cos and sin. Without rotated pairs, the latter have no meaning.
    """
    a, b, shifts = load_features(side, batch, head, begin, index, valid, offset, length, LANES, FEATURES, MAP, False)
    a, b = mapped_pairs(a, b, shifts, MAP)
    c, s = a, b
    if FEATURES[1]:
        c, s = load_tables(table, batch, head, begin, index, valid, offset, LANES, FEATURES)
    u, w = rotate_pairs(a, b, c, s, FEATURES)
    return a, b, u, w, c, s


@triton.jit
def stored_rows(
    stored, batch, head, begin, index, valid, offset, heads, length, LANES: tl.constexpr, FEATURES: tl.constexpr
):
    """Return the addresses and the mask [rows, 2 * lanes] of rows that `store_operand` stores."""
    HALF: tl.constexpr = (FEATURES[0] + 1) // 2
    place = 2 * offset + tl.arange(0, 2 * LANES)
    at = ((batch * heads + head) * length + begin + index) * (2 * HALF)
    return stored + at[:, None] + place[None, :], valid[:, None] & (place < 2 * HALF)[None, :]


@triton.jit
def store_operand(
    stored, x, batch, head, begin, index, valid, offset, heads, length, LANES: tl.constexpr, FEATURES: tl.constexpr
):
    """Store rows of features as `joined` returns them, for `load_operand`."""
    target, mask = stored_rows(stored, batch, head, begin, index, valid, offset, heads, length, LANES, FEATURES)
    tl.store(target, x.to(stored.dtype.element_ty), mask=mask)


@triton.jit
def load_operand(
    stored, batch, head, begin, index, valid, offset, heads, length, LANES: tl.constexpr, FEATURES: tl.constexpr,
    KIND: tl.constexpr,
):  # fmt: skip
    """Load rows that `store_operand` stored, 0 where they are not valid."""
    source, mask = stored_rows(stored, batch, head, begin, index, valid, offset, heads, length, LANES, FEATURES)
    return tl.load(source, mask=mask, other=0.0).to(KIND)
