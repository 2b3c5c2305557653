"""Launches of the kernels that store rotated features: segments, and the order of the passes."""

# pyright: reportArgumentType=false, reportCallIssue=false
# Type checkers do not know that a tl.constexpr argument accepts plain values.

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ropewalk.kernels.constructors import empty, empty_like, new_empty, zeros
from ropewalk.kernels.linear import segments as linear_segments
from ropewalk.kernels.linear.feature_maps import row_shift
from ropewalk.kernels.linear.segments import OPERANDS, Plan, count_segments
from ropewalk.kernels.linear.stored.tiles import Block, tile_of
from ropewalk.kernels.linear.stored.triton_backward import divide_rows, read_features
from ropewalk.kernels.linear.stored.triton_read import read_below, read_values
from ropewalk.kernels.linear.stored.triton_scan import scan_segments
from ropewalk.kernels.linear.stored.triton_sums import rotate_rows, run_totals, sum_segments
from ropewalk.kernels.linear.triton_features import KINDS
from ropewalk.kernels.triton_launch import table_strides
from ropewalk.kernels.types import NO_WEIGHTING, FeatureMap, Layout, Side, Tables, Weighting

__all__ = ["Totals", "empty_saved", "linear_attention", "linear_attention_backward"]

# Numbers of programs that keep a large GPU busy: of short programs, and of programs that scan a sequence.
_ENOUGH_PROGRAMS, _ENOUGH_SCANS = 1024, 96


class Totals(NamedTuple):
    """Sums that the passes of a call compute.

    Args:
        running: Sum of (R k) v^T before each segment, in the dtype of operands.
        plain: Sum of k before each segment.
        total: Both sums over all segments.

    >>> Totals(*torch.zeros(3, 1)).total.tolist()
    [0.0]
    """

    running: Tensor
    plain: Tensor
    total: Tensor


class _Rotated(NamedTuple):
    """Results of `rotate_rows`: rotated features, and sums of unrotated features over blocks of rows."""

    features: Tensor
    low: Tensor


class _Call:
    """State that all passes of one call share: shapes, segments, tiles, and arguments of the kernels."""

    def __init__(
        self, q: Side, k: Side, v: Tensor, layout: Layout, causal: bool, cu_seqlens: Tensor | None,
        weighting: Weighting,
    ) -> None:  # fmt: skip
        # With one decay per query head, each head of the sums has keys and values of its own.
        share = weighting.state_heads(k.x.shape[1]) // k.x.shape[1]
        k, v = _repeated(k, share), v if share == 1 else v.repeat_interleave(share, 1)
        self.q, self.k, self.v, self.causal, self.share = q, k, v, causal, share
        # Gradients of the same key are summed before they are rounded.
        self.gradient_dtype = None if share == 1 else torch.float32
        self.decay, self.normalize, self.scale = weighting.decay, weighting.normalize, weighting.scale
        self.batch, self.heads, self.length, self.width = q.x.shape
        self.kv_heads, self.keys, self.v_dim = k.x.shape[1], k.x.shape[2], v.shape[-1]
        self.tile = tile_of(self.width, self.v_dim, v.dtype, decays=weighting.decay is not None)
        segment = linear_segments.stored_length(self.width, self.v_dim)
        self.key_plan = Plan.of(k.x, cu_seqlens, segment)
        # If queries and keys are the same tokens, they share one plan.
        same = causal or cu_seqlens is not None
        self.query_plan = self.key_plan if same else Plan.of(q.x, cu_seqlens, segment)
        # No kernel writes the outputs of tokens after the last packed sequence.
        self.make = empty if cu_seqlens is None else zeros
        pairs = 0 if q.tables is None else q.tables[0].shape[-1]
        (self.kind, self.precision), self.memory = KINDS[v.dtype], OPERANDS[v.dtype]
        # Without rotation, neighbours are paired, because they are read without gaps.
        self.features = (self.width, pairs, layout.start if pairs else 0, layout.interleaved or not pairs, False)
        self.packed = cu_seqlens is not None
        self.size = self.width * (self.v_dim + 1)

    def rotated(self, side: Side, plan: Plan, scale_and_weight: tuple[Tensor, Tensor] | None) -> _Rotated:
        """Return rotated features of a side, and sums of blocks. The optional scale and weight are one per row."""
        batch, heads, length, width = side.x.shape
        device, places = side.x.device, width + width % 2
        low = self.low(plan)
        out = empty((batch, heads, length, places), dtype=self.memory, device=device)
        blocks = plan.number * (plan.segment // low)
        block_sums = empty((blocks, batch * heads, places), dtype=torch.float32, device=device)
        scale, weight = (block_sums, block_sums) if scale_and_weight is None else scale_and_weight
        scaled = scale_and_weight is not None
        heads_per_program = 1 if scaled else _heads_per_program(side, blocks)
        rotate_rows[(batch * heads // heads_per_program * blocks,)](
            x=side.x, shift=_or_unused(side.shift, block_sums), scale=scale, weight=weight, **_tables(side),
            **self.decaying(), begins=_or_unused(plan.begins, block_sums), rotated=out, low=block_sums,
            **_strides("x", side.x), length=length, owners=batch * heads, factor=self.scale, HEADS=heads,
            GROUP=heads // self.kv_heads, HEADS_PER_PROGRAM=heads_per_program, FEATURES=self.features,
            MAP=FeatureMap[side.map].value, SCALED=scaled, NORMALIZED=self.normalize, PACKED=self.packed,
            SEGMENT=plan.segment, LOW=low, LANES=self.tile.lanes, num_warps=self.tile.rotation_warps,
        )  # fmt: skip
        return _Rotated(out, block_sums)

    def decaying(self) -> dict[str, Any]:
        """Return the decay and its strides, as arguments of all kernels."""
        decay = self.decay
        if decay is None:
            return {"decay": self.v, "decay_b": 0, "decay_h": 0, "DECAY": 0}
        batch_stride = decay.stride(0) if len(decay) > 1 else 0
        return {"decay": decay, "decay_b": batch_stride, "decay_h": decay.stride(1), "DECAY": 1}

    def low(self, plan: Plan) -> int:
        """Return the number of rows per block of sums."""
        return min(self.tile.low, plan.segment)

    def sums(self, rotated: _Rotated, plan: Plan, v: Tensor, before: Tensor | None, *, reverse: bool) -> Totals:
        """Return the running sums of the segments, and the sums of all; from the last segment on if `reverse`."""
        owners, block = self.batch * self.kv_heads, self.tile.sums
        options = {"dtype": torch.float32, "device": v.device}
        after = empty((plan.sequences * self.kv_heads, self.size), **options)
        running = empty((owners, plan.number, self.width * self.v_dim), dtype=self.memory, device=v.device)
        plain = empty((owners, plan.number, self.width), **options)
        into, scan_block = Totals(running, plain, after), self.scan_block(plan)
        if scan_block is not None:
            self.scan(scan_block, rotated, plan, v, before, into, reverse=reverse)
            return into
        sums = empty((owners, plan.number, self.size), **options)
        fade = sums if self.decay is None else empty((owners * plan.number,), **options)
        lane_blocks, column_blocks = self.blocks_of(block)
        sum_segments[(owners * plan.number, lane_blocks * column_blocks)](
            rotated=rotated.features, v=v, low=rotated.low, **self.decaying(), begins=_or_unused(plan.begins, v),
            sums=sums, fade=fade, **_strides("v", v), length=v.shape[2], owners=owners, count=plan.number,
            KV_HEADS=self.kv_heads, GROUP=v.shape[1] // self.kv_heads, SEGMENT=plan.segment,
            BLOCKS=plan.segment // self.low(plan), LANE_BLOCKS=lane_blocks, FEATURES=self.features, V_DIM=self.v_dim,
            REVERSE=reverse, PACKED=self.packed, KIND=self.kind, PRECISION=self.precision, **block.options(),
        )  # fmt: skip
        # Small programs if there are few sums, so that there are more programs.
        wide = 1024 if self.size > 8192 else 256
        run_totals[(plan.sequences * self.kv_heads, -(-self.size // wide))](
            sums=sums, fade=fade, before=_or_unused(before, sums), after=after, running=running, plain=plain,
            starts=_or_unused(plan.starts, sums), heads=self.kv_heads, count=plan.number, ABOVE=self.width * self.v_dim,
            SIZE=self.size, HAS_BEFORE=before is not None, DECAY=self.decay is not None, PACKED=plan.starts is not None,
            REVERSE=reverse, WIDTH=wide, num_warps=4 if wide > 256 else 2,
        )  # fmt: skip
        return into

    def scan_block(self, plan: Plan) -> Block | None:
        """Return the block of `scan_segments`, or None if sequences are packed or there are too few programs."""
        block = self.tile.scan
        if plan.begins is not None or block is None:
            return None
        return block if self.batch * self.kv_heads * math.prod(self.blocks_of(block)) >= _ENOUGH_SCANS else None

    def scan(
        self, block: Block, rotated: _Rotated, plan: Plan, v: Tensor, before: Tensor | None, into: Totals, *,
        reverse: bool,
    ) -> None:  # fmt: skip
        """Compute the sums by `scan_segments`, and store them in `into`."""
        owners = self.batch * self.kv_heads
        lane_blocks, column_blocks = self.blocks_of(block)
        tiles = lane_blocks * column_blocks
        scan_segments[(owners, tiles + 1)](
            rotated=rotated.features, v=v, low=rotated.low, **self.decaying(),
            before=_or_unused(before, into.total), after=into.total, running=into.running, plain=into.plain,
            **_strides("v", v), length=v.shape[2], owners=owners, count=plan.number, KV_HEADS=self.kv_heads,
            GROUP=v.shape[1] // self.kv_heads, FEATURES=self.features, V_DIM=self.v_dim, SEGMENT=plan.segment,
            BLOCKS=plan.segment // self.low(plan), LANE_BLOCKS=lane_blocks, TILES=tiles,
            HAS_BEFORE=before is not None, REVERSE=reverse, KIND=self.kind, PRECISION=self.precision,
            **block.options(),
        )  # fmt: skip

    def blocks_of(self, block: Block) -> tuple[int, int]:
        """Return the numbers of blocks of lanes and of columns."""
        return -(-self.tile.lanes // block.lanes), -(-self.v_dim // block.columns)

    def reading(self, own_side: Tensor, plan: Plan) -> dict[str, Any]:
        """Return the arguments of all kernels that read sums."""
        batch, heads, length, _ = own_side.shape
        return self.decaying() | {
            "begins": _or_unused(plan.begins, self.v), "owners": batch * heads, "length": length, "count": plan.number,
            "X_HEADS": heads, "X_GROUP": heads // self.kv_heads, "CAUSAL": self.causal, "SEGMENT": plan.segment,
            "FEATURES": self.features, "V_DIM": self.v_dim, "PACKED": self.packed,
        }  # fmt: skip

    def above(self, sums: Totals) -> dict[str, Any]:
        """Return the arguments for the sum of (R k) v^T, for matrix products, and for a result without denominator."""
        read = sums.running if self.causal else sums.total
        return {
            "sums": read, "KIND": self.kind, "PRECISION": self.precision, "factor": self.scale,
            "NORMALIZED": self.normalize,
        }  # fmt: skip

    def below(self, sums: Totals) -> dict[str, Any]:
        """Return the argument for the sum of k."""
        return {"plain": sums.plain if self.causal else sums.total[:, self.width * self.v_dim :]}

    def sides(self, own_side: Side, other: Side, plan: Plan) -> dict[str, Any]:
        """Return the arguments of kernels that map features: their own side x, and the other side y."""
        return {
            "x": own_side.x, "y": other.x, "x_shift": _or_unused(own_side.shift, self.v),
            "y_shift": _or_unused(other.shift, self.v), **_tables(own_side), **_strides("x", own_side.x),
            **_strides("y", other.x), "X_MAP": FeatureMap[own_side.map].value,
            "Y_MAP": FeatureMap[other.map].value, "LOW": self.low(plan),
        }  # fmt: skip

    def read_below(self, sums: Totals, keys: _Rotated) -> tuple[Tensor, Tensor]:
        """Return rotated features of the queries, and their denominators."""
        q, plan = self.q, self.query_plan
        batch, heads, length, width = q.x.shape
        rotated = empty((batch, heads, length, width + width % 2), dtype=self.memory, device=q.x.device)
        below = self.make((batch, heads, length), dtype=torch.float32, device=q.x.device)
        blocks = plan.number * (plan.segment // self.low(plan))
        read_below[(batch * heads * blocks,)](
            **self.sides(q, self.k, plan), **self.reading(q.x, plan), **self.below(sums), low=keys.low,
            rotated=rotated, below=below, LANES=self.tile.lanes, KIND=self.kind, PRECISION=self.precision,
            num_warps=self.tile.rotation_warps,
        )  # fmt: skip
        return rotated, below

    def read_values(
        self, own_side: Tensor, plan: Plan, v: Tensor, sums: Totals, rotated: Tensor, below: Tensor | None, *,
        reverse: bool,
    ) -> Tensor:  # fmt: skip
        """Return the output of each row, or, if `reverse`, the gradient of the values of each row."""
        batch, heads, length, _ = own_side.shape
        block = self.tile.values._replace(rows=min(self.tile.values.rows, plan.segment))
        dtype = self.gradient_dtype if reverse else None
        out = self.make((batch, heads, length, self.v_dim), dtype=dtype or v.dtype, device=v.device)
        blocks = plan.number * (plan.segment // block.rows)
        read_values[(batch * heads * blocks, -(-self.v_dim // block.columns))](
            **self.reading(own_side, plan), **self.above(sums), rows=own_side, rotated=rotated, v=v, out=out,
            below=_or_unused(below, out), REVERSE=reverse, Y_GROUP=v.shape[1] // self.kv_heads,
            **_strides("v", v), **_strides("o", out), **block.options(),
        )  # fmt: skip
        return out

    def read_features(
        self, own_side: Side, other: Side, plan: Plan, p: Tensor, v: Tensor, sums: Totals, rotated: _Rotated,
        rows: tuple[Tensor, Tensor], *, reverse: bool,
    ) -> Tensor:  # fmt: skip
        """Return the gradient of `own_side`, with the strides of its tensor."""
        block = self.tile.features._replace(rows=min(self.tile.features.rows, plan.segment))
        out = empty_like(own_side.x, dtype=self.gradient_dtype if reverse else None)
        # The strides of overlapping rows are not kept.
        out = out if out.stride(3) == 1 else out.contiguous()
        if plan.begins is not None:
            out.zero_()
        scale, weight = rows
        batch, heads = own_side.x.shape[:2]
        blocks = plan.number * (plan.segment // block.rows)
        read_features[(batch * heads * blocks, -(-self.tile.lanes // block.lanes))](
            **self.sides(own_side, other, plan), **self.reading(own_side.x, plan), **self.above(sums),
            **self.below(sums), rotated=rotated.features, low=rotated.low, p=p, v=v, scale=scale, weight=weight,
            out=out, REVERSE=reverse, Y_GROUP=v.shape[1] // self.kv_heads,
            **_strides("p", p), **_strides("v", v), **_strides("d", out), **block.options(),
        )  # fmt: skip
        return out


def linear_attention(
    q: Side,
    k: Side,
    v: Tensor,
    before: Tensor | None,
    layout: Layout,
    causal: bool,
    cu_seqlens: Tensor | None = None,
    weighting: Weighting = NO_WEIGHTING,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the outputs, the sums after the last key, and tensors for the backward.

    Sums are float32 [sequences * state_heads, width * (v_dim + 1)], as in `Sums.flat`. The tensors for the backward are
    the denominators [batch, heads, seq], of which there may be none, and the running sums. Arguments are those of
    `linear.torch.linear_attention`, except that `before`, the sums over earlier keys, is flat. A decay must be one per
    head, and causal.

    >>> from ropewalk.kernels.triton_launch import INTERPRETED
    >>> device = "cpu" if INTERPRETED else "cuda"
    >>> x, v = torch.zeros(1, 1, 2, 2, device=device), torch.tensor([[[[1.0], [3.0]]]], device=device)
    >>> side, layout = Side(x, "elu"), Layout(False, 0, -2)
    >>> linear_attention(side, side, v, None, layout, causal=True)[0].flatten().tolist()
    [1.0, 2.0]
    """
    q, k = _prepared(q, "q" if weighting.normalize else "k"), _prepared(k, "k")
    call = _Call(q, k, _with_adjacent_features(v), layout, causal, cu_seqlens, weighting)
    keys = call.rotated(call.k, call.key_plan, None)
    sums = call.sums(keys, call.key_plan, call.v, before, reverse=False)
    if weighting.normalize:
        queries, below = call.read_below(sums, keys)
    else:
        queries, below = call.rotated(q, call.query_plan, None).features, None
    out = call.read_values(queries, call.query_plan, call.v, sums, keys.features, below, reverse=False)
    below = empty((0,), dtype=torch.float32, device=v.device) if below is None else below
    return out, sums.total, below, sums.running, sums.plain


def empty_saved(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, weighting: Weighting) -> tuple[Tensor, ...]:
    """Return tensors shaped as those that `linear_attention` returns for its backward, for fake tensors.

    >>> x = torch.ones(1, 2, 300, 4, device="meta")
    >>> [list(tensor.shape) for tensor in empty_saved(x, x, x, None, NO_WEIGHTING)]
    [[1, 2, 300], [2, 2, 16], [2, 2, 4]]
    """
    sequences = None if cu_seqlens is None else len(cu_seqlens) - 1
    width, v_dim, owners = q.shape[-1], v.shape[-1], len(v) * weighting.state_heads(k.shape[1])
    count = count_segments(k.shape[2], sequences, linear_segments.stored_length(width, v_dim))
    return (
        new_empty(v, q.shape[:3] if weighting.normalize else (0,), dtype=torch.float32),
        new_empty(v, (owners, count, width * v_dim), dtype=OPERANDS[v.dtype]),
        new_empty(v, (owners, count, width), dtype=torch.float32),
    )


def linear_attention_backward(
    cotangent: Tensor,
    total_cotangent: Tensor | None,
    q: Side,
    k: Side,
    v: Tensor,
    results: Sequence[Tensor],
    layout: Layout,
    causal: bool,
    cu_seqlens: Tensor | None = None,
    weighting: Weighting = NO_WEIGHTING,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of q, k, v and of the initial sums.

    With dn = do / den and dden = -(do . o) / den: dq_i is computed from S_i dn_i and dden_i z_i; dk_j from T_j v_j and
    the sum of dden_i q_i; dv_j = T_j^T R k_j, where T_j is the sum of (R q_i) dn_i^T over i >= j.

    Args:
        cotangent: Cotangent of the outputs.
        total_cotangent: Cotangent of the sums after the last key, or None.
        q: Queries, as in `linear_attention`; the other arguments too.
        k: Keys.
        v: Values.
        results: Results of `linear_attention`.
        layout: Layout of the rotation.
        causal: Whether attention was causal.
        cu_seqlens: Ends of packed sequences.
        weighting: Factors on the terms, as in `linear_attention`.

    >>> from ropewalk.kernels.triton_launch import INTERPRETED
    >>> device = "cpu" if INTERPRETED else "cuda"
    >>> x, v = torch.zeros(1, 1, 2, 2, device=device), torch.tensor([[[[1.0], [3.0]]]], device=device)
    >>> side, layout = Side(x, "elu"), Layout(False, 0, -2)
    >>> results = linear_attention(side, side, v, None, layout, causal=True)
    >>> dv = linear_attention_backward(torch.ones_like(v), None, side, side, v, results, layout, causal=True)[2]
    >>> dv.flatten().tolist()  # the first value has weight 1 in the first output and 1/2 in the second
    [1.5, 0.5]
    """
    q, k = _prepared(q, "q" if weighting.normalize else "k"), _prepared(k, "k")
    v, cotangent = _with_adjacent_features(v), _with_adjacent_features(cotangent)
    # Hooks of saved tensors may return them with other strides.
    out = _with_adjacent_features(results[0])
    total, below, running, plain = (x.contiguous() for x in results[1:])
    sums = Totals(running, plain, total)
    call = _Call(q, k, v, layout, causal, cu_seqlens, weighting)
    k, v = call.k, call.v
    scale, weight = empty_like(below), empty_like(below)
    rows = below.numel()
    if weighting.normalize:
        divide_rows[(-(-rows // 16),)](
            out=out, cotangent=cotangent, below=below, scale=scale, weight=weight, **_strides("o", out),
            **_strides("g", cotangent), length=call.length, rows=rows, HEADS=call.heads, V_DIM=call.v_dim, ROWS=16,
            COLUMNS=call.tile.features.columns,
        )  # fmt: skip
    both = scale, weight
    queries = call.rotated(q, call.query_plan, both)
    last = None if total_cotangent is None else total_cotangent.contiguous()
    behind = call.sums(queries, call.query_plan, cotangent, last, reverse=True)
    dk = call.read_features(k, q, call.key_plan, v, cotangent, behind, queries, both, reverse=True)
    keys = call.rotated(k, call.key_plan, None)
    dv = call.read_values(keys.features, call.key_plan, cotangent, behind, queries.features, None, reverse=True)
    del queries
    dq = call.read_features(q, k, call.query_plan, cotangent, v, sums, keys, both, reverse=False)
    if call.share > 1:
        grouped = (x.unflatten(1, (-1, call.share)).sum(2) for x in (dk, dv))
        dk, dv = (x.to(like.dtype) for x, like in zip(grouped, (k.x, v), strict=True))
    return dq, dk, dv, behind.total


def _repeated(side: Side, share: int) -> Side:
    """Return a side with each head `share` times."""
    if share == 1:
        return side
    tables, shift = side.tables, side.shift
    if tables is not None and table_strides(tables.cos)[1]:
        tables = Tables(*(table.repeat_interleave(share, 1) for table in tables[:2]), tables.row)
    shift = None if shift is None else shift.repeat_interleave(share, 1)
    return Side(side.x.repeat_interleave(share, 1), side.map, shift, tables)


def _prepared(side: Side, role: str) -> Side:
    """Return a side with adjacent features, contiguous tables, and a shift if its map is an exponential."""
    tables, shift = side.tables, side.shift
    if tables is not None:
        tables = Tables(tables.cos.contiguous(), tables.sin.contiguous(), tables.row)
    if shift is None and side.map == "exp":
        largest = row_shift(side.x, side.map) if role == "q" else None
        shift = (
            zeros(side.x.shape[:3], dtype=torch.float32, device=side.x.device)
            if largest is None
            else largest.squeeze(-1).float().contiguous()
        )
    return Side(_with_adjacent_features(side.x), side.map, shift, tables)


def _with_adjacent_features(x: Tensor) -> Tensor:
    """Return x with stride 1 in its last dimension, which the kernels require."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _heads_per_program(side: Side, blocks: int) -> int:
    """Return the number of heads per program of `rotate_rows`.

    Up to four heads that share their tables, so that loads overlap with arithmetic, unless too few programs remain.
    """
    heads = side.x.shape[1]
    if side.tables is not None and table_strides(side.tables[0])[1]:
        return 1
    fitting = (n for n in (4, 2) if heads % n == 0 and side.x.shape[0] * heads // n * blocks >= _ENOUGH_PROGRAMS)
    return next(fitting, 1)


def _or_unused(tensor: Tensor | None, other: Tensor) -> Tensor:
    """Return the tensor, or if it is None another one, which the kernel does not read."""
    return other if tensor is None else tensor


def _strides(name: str, x: Tensor) -> dict[str, int]:
    return {f"{name}_{dim}": x.stride(i) for i, dim in enumerate("bhn")}


def _tables(side: Side) -> dict[str, Any]:
    cos, sin, row = (side.x, side.x, 0) if side.tables is None else side.tables
    batch, head = (0, 0) if side.tables is None else table_strides(cos)
    return {"cos": cos, "sin": sin, "row": row, "table_b": batch, "table_h": head}
