"""Linear attention on a GPU: the launches of a call, its memory, and the gradients of decay and band.

Forward: `sum_segments`, `run_totals`, `read_values`. Backward: the first two for queries and cotangents, then
`read_queries` and `read_keys`. Everything except the tensors is decided once per signature of a call.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from ropewalk.kernels.constructors import empty, empty_like, new_empty, zeros, zeros_like
from ropewalk.kernels.linear import segments as linear_segments
from ropewalk.kernels.linear.band_gradient import band_gradient
from ropewalk.kernels.linear.feature_maps import row_shift
from ropewalk.kernels.linear.segments import OPERANDS, Plan, count_segments
from ropewalk.kernels.linear.stored import triton as stored
from ropewalk.kernels.linear.tiles import tile_of
from ropewalk.kernels.linear.triton_backward import read_keys, read_queries
from ropewalk.kernels.linear.triton_read import read_values
from ropewalk.kernels.linear.triton_step import SMALLEST
from ropewalk.kernels.linear.triton_sums import run_totals, sum_segments
from ropewalk.kernels.signature import signature
from ropewalk.kernels.triton_launch import LAUNCHES, Launch, table_strides
from ropewalk.kernels.types import NO_WEIGHTING, FeatureMap, Layout, Side, Weighting

__all__ = ["empty_saved", "linear_attention", "linear_attention_backward"]

# Dtype of operands of matrix products, and the precision of the products.
_KINDS = {
    torch.bfloat16: (tl.bfloat16, "ieee"),
    torch.float16: (tl.float32, "tf32"),
    torch.float32: (tl.float32, "tf32x3"),
}

# Largest stride of tokens with which offsets within a segment and its band have 32 bits.
_WIDEST_STRIDE = 1 << 19


class _Tensors(NamedTuple):
    """The tensors of a call, as the kernels need them, and the rows of the first tokens in the tables."""

    q: Tensor
    k: Tensor
    v: Tensor
    q_shift: Tensor | None
    k_shift: Tensor | None
    q_cos: Tensor | None
    q_sin: Tensor | None
    k_cos: Tensor | None
    k_sin: Tensor | None
    decay: Tensor | None
    band: Tensor | None
    before: Tensor | None
    q_row: int
    k_row: int


class _Sums(NamedTuple):
    """Sums of (R k) v^T and of k, before each segment or of all keys, and of k over each chunk."""

    running: Tensor
    plain: Tensor
    low: Tensor


class _Call:
    """What is decided once for all calls with the same shapes, strides, dtypes and options.

    Queries and keys are two sides. A side has `heads` heads in memory. Keys are read by one virtual head per head of
    the sums. If there is one decay per query head, `share` of them share a head in memory.
    """

    def __init__(
        self,
        x: _Tensors,
        layout: Layout,
        maps: tuple[str, str],
        causal: bool,
        weighting: Weighting,
        packed: bool,
        same: bool,
    ) -> None:
        self.batch, self.heads, self.queries, self.width = x.q.shape
        self.kv_heads, self.keys, self.v_dim = x.k.shape[1], x.k.shape[2], x.v.shape[3]
        self.states = weighting.state_heads(self.kv_heads)
        self.group, self.share = self.heads // self.states, self.states // self.kv_heads
        self.causal, self.packed, self.normalize, self.scale = causal, packed, weighting.normalize, weighting.scale
        self.dtype, self.memory, (self.kind, self.precision) = x.v.dtype, OPERANDS[x.v.dtype], _KINDS[x.v.dtype]
        decay, band = weighting.decay, weighting.band
        weighted = decay is not None or band is not None
        # Whether rows read the sums over all keys, and the number of directions in which sums run.
        self.all, self.directions = not causal and not weighted, 2 if weighted and not causal else 1
        rows = self.batch * self.heads * self.queries
        self.segment = linear_segments.segment_length(self.width, self.v_dim, rows, self.directions)
        self.tile = tile_of(self.width, self.v_dim, x.v.dtype)
        self.chunk = min(self.tile.chunk, self.segment)
        self.decay = 0 if decay is None else 1 if decay.shape[2] == 1 else 2
        self.band = 0 if band is None else band.shape[1] // 2
        # Tokens between a segment and the sums of the keys that have the bias of all farther ones.
        self.lead = -(-max(0, self.band - 1) // self.chunk) * self.chunk
        self.least = SMALLEST if weighted else 0.0
        self.maps = FeatureMap[maps[0]].value, FeatureMap[maps[1]].value
        pairs = 0 if x.q_cos is None else x.q_cos.shape[-1]
        # Without rotation, neighbours are paired, because they are read without gaps.
        self.features = (self.width, pairs, layout.start if pairs else 0, layout.interleaved or not pairs)
        self.half = (self.width + 1) // 2
        self.strides = {name: tuple(getattr(x, name).stride()[:3]) for name in "qkv"}
        self.decay_strides = (0, 0, 0)
        if decay is not None:
            steps = decay.stride()
            self.decay_strides = tuple(0 if n == 1 else step for n, step in zip(decay.shape, steps, strict=True))
        self.tables = [(0, 0) if cos is None else table_strides(cos) for cos in (x.q_cos, x.k_cos)]
        # Whether a row of queries has the cos and sin of the keys that it reads.
        self.same = same and not self.lead and causal and self.tables[0][1] == 0
        self.device = x.v.device
        # Whether the kernels can read all tensors of a call as they are.
        self.direct = False
        self.launches: dict[Any, Launch] = {}

    def plan(self, x: Tensor, cu_seqlens: Tensor | None) -> Plan:
        """Return the segments of the tokens of x."""
        return Plan.of(x, cu_seqlens, self.segment)

    def launch(self, name: str, make: Any) -> Launch:
        """Return a launch, which `make` creates for the first call."""
        found = self.launches.get(name)
        if found is None:
            found = self.launches[name] = make()
        return found

    def common(self, side: int) -> dict[str, Any]:
        """Return the constants that all kernels have that read sums, from SIDE on."""
        return {"SIDE": side, "ALL": self.all, "DECAY": self.decay, "BAND": self.band, "LEAD": self.lead}

    def sums(
        self, x: _Tensors, plan: Plan, role: str, z: Tensor, rows: tuple[Tensor, Tensor, Tensor] | None,
        before: Tensor | None,
    ) -> tuple[_Sums, Tensor]:  # fmt: skip
        """Return the running sums of keys and values, or of queries and cotangents, and the total in flat form.

        Args:
            x: Tensors of the call.
            plan: Segments of the tokens.
            role: "k" for keys and their values, "q" for queries.
            z: Values, or cotangents.
            rows: For queries: outputs, inverse denominators, and the tensor for the cotangents of denominators.
            before: Initial sums, or None.
        """
        queries, count, device = role == "q", plan.number, z.device
        owners, size = self.batch * self.states, 2 * self.half * (self.v_dim + 1)
        sums = empty((self.directions, owners, count, size), dtype=torch.float32, device=device)
        fade = empty((owners, count), dtype=torch.float32, device=device) if self.decay else sums
        slots = plan.sequences * self.states if self.all else self.directions * owners * count
        running = empty((slots, 2 * self.half * self.v_dim), dtype=self.memory, device=device)
        plain = empty((slots, 2 * self.half), dtype=torch.float32, device=device)
        shape = plan.sequences * self.states, self.width * (self.v_dim + 1)
        total = empty(shape, dtype=torch.float32, device=device)
        chunks = self.segment // self.chunk
        low = empty((self.directions * owners * count * chunks, 2 * self.half), dtype=torch.float32, device=device)
        out, inverse, weight = (sums, sums, sums) if rows is None else rows
        begins, starts = (sums, sums) if plan.begins is None or plan.starts is None else (plan.begins, plan.starts)

        def summing() -> Launch:
            block = self.tile.sums
            lane_blocks, column_blocks = -(-self.half // block.lanes), -(-self.v_dim // block.columns)
            heads, share, group = (self.heads, 1, self.group) if queries else (self.kv_heads, self.share, 1)
            numbers = (
                *self.strides[role], *z.stride()[:3], *(out.stride()[:3] if queries else (0, 0, 0)),
                *self.decay_strides, *self.tables[not queries], (self.queries if queries else self.keys), owners, count,
                heads, self.scale,
            )  # fmt: skip
            constants = {
                "HEADS": self.states, "GROUP": group, "SHARE": share, "FEATURES": self.features, "V_DIM": self.v_dim,
                "MAP": self.maps[not queries], "QUERIES": queries, "NORMALIZED": self.normalize, "DECAY": self.decay,
                "DIRECTIONS": self.directions, "BAND": self.band, "LEAD": self.lead, "PACKED": self.packed,
                "SEGMENT": self.segment, **block.constants(self.chunk), "LANE_BLOCKS": lane_blocks, "KIND": self.kind,
                "PRECISION": self.precision,
            }  # fmt: skip
            grid = owners * count, lane_blocks * column_blocks, self.directions
            return Launch(sum_segments, grid, numbers, constants, block.warps, block.stages)

        def scanning() -> Launch:
            # Small programs if there are few sums, so that there are more programs.
            wide = 1024 if size > 8192 else 256
            constants = {
                "FEATURES": self.features, "V_DIM": self.v_dim, "HAS_BEFORE": before is not None,
                "DECAYS": self.decay != 0, "PACKED": self.packed,
                "DIRECTIONS": self.directions, "REVERSE": int(queries), "ALL": self.all, "WIDTH": wide,
            }  # fmt: skip
            grid = plan.sequences * self.states, -(-size // wide), self.directions
            return Launch(run_totals, grid, (self.states, count), constants, 4 if wide > 256 else 2)

        side = (x.q, x.q_shift, x.q_cos, x.q_sin) if queries else (x.k, x.k_shift, x.k_cos, x.k_sin)
        spare = (z if tensor is None else tensor for tensor in (*side, x.decay, x.band))
        y, shift, cos, sin, decay, band = spare
        row = x.q_row if queries else x.k_row
        self.launch(f"sum {role}", summing)(
            device, y, shift, cos, sin, z, out, inverse, weight, decay, band, begins, sums, low, fade, row
        )
        given = sums if before is None else before
        self.launch(f"scan {role} {before is not None}", scanning)(
            device, sums, fade, given, total, running, plain, starts
        )
        return _Sums(running, plain, low), total

    def reading(self, role: str, plan: Plan) -> tuple[Any, ...]:
        """Return the numbers that all kernels have that read sums: rows x of a role, and the other side y."""
        x_side = 0 if role == "q" else 1
        heads = (self.heads, self.kv_heads) if role == "q" else (self.kv_heads, self.heads)
        owners = self.batch * (self.heads if role == "q" else self.states)
        slots = self.batch * self.states * plan.number
        return (
            *self.decay_strides, *self.tables[x_side], *self.tables[1 - x_side],
            self.queries if role == "q" else self.keys, owners, plan.number, slots, *heads,
        )  # fmt: skip

    def outputs(self, x: _Tensors, plan: Plan, sums: _Sums) -> tuple[Tensor, Tensor]:
        """Return the outputs, and the inverse of each denominator."""
        # No kernel writes the outputs of tokens after the last packed sequence.
        make = zeros if self.packed else empty
        out = make((self.batch, self.heads, self.queries, self.v_dim), dtype=self.dtype, device=self.device)
        shape = (self.batch, self.heads, self.queries) if self.normalize else (0,)
        inverse = make(shape, dtype=torch.float32, device=self.device)

        def reading() -> Launch:
            block = self.tile.values
            strides = *self.strides["q"], *self.strides["k"], *self.strides["v"], *out.stride()[:3]
            constants = {
                "X_HEADS": self.heads, "X_GROUP": self.group, "Y_SHARE": self.share, "FEATURES": self.features,
                "V_DIM": self.v_dim, "X_MAP": self.maps[0], "Y_MAP": self.maps[1], "NORMALIZED": self.normalize,
                **self.common(-1 if self.causal else 0), "SAME": self.same,
                "PACKED": self.packed, "SEGMENT": self.segment, **block.constants(self.chunk), "KIND": self.kind,
                "PRECISION": self.precision,
            }  # fmt: skip
            grid = self.batch * self.heads * plan.number, -(-self.v_dim // block.columns), 1
            numbers = (*strides, *self.reading("q", plan), self.scale, self.least)
            return Launch(read_values, grid, numbers, constants, block.warps, block.stages)

        optional = x.q_shift, x.k_shift, x.q_cos, x.q_sin, x.k_cos, x.k_sin, x.decay, x.band, plan.begins
        spare = [out if tensor is None else tensor for tensor in optional]
        self.launch("values", reading)(
            self.device, x.q, x.k, x.v, *spare, *sums, out, inverse if self.normalize else out, x.q_row, x.k_row
        )
        return out, inverse

    def of_queries(
        self, x: _Tensors, plan: Plan, sums: _Sums, cotangent: Tensor, rows: tuple[Tensor, Tensor], *, learned: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Return the gradients of the queries, and of the logarithms of the band if `learned`."""
        block = self.tile.features
        blocks, chunks, near = -(-self.half // block.lanes), self.segment // self.chunk, self.lead // self.chunk
        out = _like(x.q, self.packed)
        visits = 1 + near if self.causal else chunks + 2 * near
        shape = blocks, self.batch, self.heads, plan.number
        of_band = (
            zeros((*shape, chunks, visits, 2 * self.chunk), dtype=torch.float32, device=self.device) if learned else out
        )
        of_far = empty((*shape, 2), dtype=torch.float32, device=self.device) if learned else out

        def reading() -> Launch:
            strides = (
                *self.strides["q"], *self.strides["k"], *self.strides["v"], *cotangent.stride()[:3], *out.stride()[:3]
            )  # fmt: skip
            constants = {
                "X_HEADS": self.heads, "X_GROUP": self.group, "Y_SHARE": self.share, "FEATURES": self.features,
                "V_DIM": self.v_dim, "X_MAP": self.maps[0], "Y_MAP": self.maps[1], "NORMALIZED": self.normalize,
                **self.common(-1 if self.causal else 0), "LEARNED": learned,
                "PACKED": self.packed, "SEGMENT": self.segment, **block.constants(self.chunk),
                "KIND": self.kind, "PRECISION": self.precision,
            }  # fmt: skip
            grid = self.batch * self.heads * plan.number, blocks, 1
            numbers = (*strides, *self.reading("q", plan), self.scale)
            return Launch(read_queries, grid, numbers, constants, block.warps, block.stages)

        optional = x.q_shift, x.k_shift, x.q_cos, x.q_sin, x.k_cos, x.k_sin
        spare = [out if tensor is None else tensor for tensor in optional]
        more = [out if tensor is None else tensor for tensor in (x.decay, x.band, plan.begins)]
        self.launch(f"queries {learned}", reading)(
            self.device, x.q, x.k, x.v, cotangent, *spare, *rows, *more, *sums, out, of_band, of_far, x.q_row, x.k_row
        )
        if not learned:
            return out, None
        return out, band_gradient(of_band, of_far, self.band, self.lead)

    def of_keys(
        self, x: _Tensors, plan: Plan, sums: _Sums, cotangent: Tensor, rows: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Return the gradients of keys and values."""
        block, narrow = self.tile.features, self.tile.values
        lane_blocks, column_blocks = -(-self.half // block.lanes), -(-self.v_dim // narrow.columns)
        if self.share == 1:
            out, values = _like(x.k, self.packed), _like(x.v, self.packed)
        else:
            make = zeros if self.packed else empty
            options = {"dtype": torch.float32, "device": self.device}
            shape = self.batch, self.states, self.keys
            out, values = make((*shape, self.width), **options), make((*shape, self.v_dim), **options)
        owners = self.batch * self.states

        def reading() -> Launch:
            strides = (
                *self.strides["k"], *self.strides["q"], *self.strides["v"], *cotangent.stride()[:3], *out.stride()[:3],
                *values.stride()[:3],
            )  # fmt: skip
            constants = {
                "X_HEADS": self.states, "Y_GROUP": self.group, "X_SHARE": self.share, "FEATURES": self.features,
                "V_DIM": self.v_dim, "X_MAP": self.maps[1], "Y_MAP": self.maps[0], "NORMALIZED": self.normalize,
                **self.common(1 if self.causal else 0), "SAME": self.same,
                "PACKED": self.packed, "SEGMENT": self.segment, **block.constants(self.chunk),
                "LANE_BLOCKS": lane_blocks, "ALL_LANES": narrow.lanes, "FEW_COLUMNS": narrow.columns,
                "KIND": self.kind, "PRECISION": self.precision,
            }  # fmt: skip
            grid = owners * plan.number, lane_blocks + column_blocks, 1
            numbers = (*strides, *self.reading("k", plan), self.scale)
            return Launch(read_keys, grid, numbers, constants, block.warps, block.stages)

        optional = x.k_shift, x.q_shift, x.k_cos, x.k_sin, x.q_cos, x.q_sin
        spare = [out if tensor is None else tensor for tensor in optional]
        more = [out if tensor is None else tensor for tensor in (x.decay, x.band, plan.begins)]
        self.launch("keys", reading)(
            self.device, x.k, x.q, x.v, cotangent, *spare, *rows, *more, *sums, out, values, x.k_row, x.q_row,
        )  # fmt: skip
        if self.share > 1:
            # Each query head has sums of its own, and so a gradient of its key head.
            grouped = (y.unflatten(1, (self.kv_heads, self.share)).sum(2) for y in (out, values))
            out, values = (y.to(self.dtype) for y in grouped)
        return out, values


def linear_attention(
    q: Side,
    k: Side,
    v: Tensor,
    before: Tensor | None,
    layout: Layout,
    causal: bool,
    cu_seqlens: Tensor | None = None,
    weighting: Weighting = NO_WEIGHTING,
) -> tuple[Tensor, ...]:
    """Return the outputs, the sums after the last key, and tensors for the backward.

    Sums are float32 [sequences * state_heads, width * (v_dim + 1)], as in `Sums.flat`. The tensors for the backward are
    the inverse denominators [batch, heads, seq] and the running sums. Arguments are those of
    `linear.torch.linear_attention`, except that `before`, the sums over earlier keys, is flat.

    >>> from ropewalk.kernels.triton_launch import INTERPRETED
    >>> device = "cpu" if INTERPRETED else "cuda"
    >>> x, v = torch.zeros(1, 1, 2, 2, device=device), torch.tensor([[[[1.0], [3.0]]]], device=device)
    >>> side, layout = Side(x, "elu"), Layout(False, 0, -2)
    >>> linear_attention(side, side, v, None, layout, causal=True)[0].flatten().tolist()
    [1.0, 2.0]
    """
    if _stores(q.x, v, weighting):
        return stored.linear_attention(q, k, v, before, layout, causal, cu_seqlens)
    x, call = _prepare(q, k, v, before, layout, causal, cu_seqlens, weighting, None)
    plan = call.plan(x.k, cu_seqlens)
    sums, total = call.sums(x, plan, "k", x.v, None, x.before)
    query_plan = plan if causal or cu_seqlens is not None else call.plan(x.q, None)
    out, inverse = call.outputs(x, query_plan, sums)
    return out, total, inverse, *sums


def empty_saved(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, causal: bool, weighting: Weighting
) -> tuple[Tensor, ...]:
    """Return tensors shaped as those that `linear_attention` returns for its backward, for fake tensors.

    >>> x = torch.ones(1, 2, 300, 4, device="meta", dtype=torch.bfloat16)
    >>> [list(tensor.shape) for tensor in empty_saved(x, x, x, None, True, NO_WEIGHTING)]
    [[1, 2, 300], [4, 16], [4, 4], [16, 4]]
    """
    if _stores(q, v, weighting):
        return stored.empty_saved(q, k, v, cu_seqlens)
    sequences = None if cu_seqlens is None else len(cu_seqlens) - 1
    width, v_dim, states = q.shape[-1] + q.shape[-1] % 2, v.shape[-1], weighting.state_heads(k.shape[1])
    weighted = weighting.decay is not None or weighting.band is not None
    directions, rows = 2 if weighted and not causal else 1, len(q) * q.shape[1] * q.shape[2]
    segment = linear_segments.segment_length(q.shape[-1], v_dim, rows, directions)
    chunks = segment // min(segment, tile_of(q.shape[-1], v_dim, v.dtype).chunk)
    segments = directions * len(v) * states * count_segments(k.shape[2], sequences, segment)
    all_keys = (len(v) if sequences is None else sequences) * states
    slots = segments if causal or weighted else all_keys
    return (
        new_empty(v, q.shape[:3] if weighting.normalize else (0,), dtype=torch.float32),
        new_empty(v, (slots, width * v_dim), dtype=OPERANDS[v.dtype]),
        new_empty(v, (slots, width), dtype=torch.float32),
        new_empty(v, (segments * chunks, width), dtype=torch.float32),
    )


def _stores(q: Tensor, v: Tensor, weighting: Weighting) -> bool:
    """Whether the kernels are used that store rotated features: tiles of wide heads, and of 32 bits, are too large."""
    wide = max(q.shape[-1], v.shape[-1]) > 64 or v.dtype != torch.bfloat16
    return wide and weighting.plain


class Gradients(NamedTuple):
    """Gradients of linear attention. That of the band is None unless it was asked for.

    >>> Gradients(*torch.zeros(4, 1)).band is None
    True
    """

    q: Tensor
    k: Tensor
    v: Tensor
    before: Tensor
    band: Tensor | None = None


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
    learned: bool = False,
) -> Gradients:
    """Return the gradients of q, k, v and of the initial sums, and if `learned` that of the band.

    There is no gradient of a decay: from rows it would be a difference of large sums, in which few digits are left.

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
        weighting: Factors on the terms.
        learned: Whether the gradient of the band is needed.

    >>> from ropewalk.kernels.triton_launch import INTERPRETED
    >>> device = "cpu" if INTERPRETED else "cuda"
    >>> x, v = torch.zeros(1, 1, 2, 2, device=device), torch.tensor([[[[1.0], [3.0]]]], device=device)
    >>> side, layout = Side(x, "elu"), Layout(False, 0, -2)
    >>> results = linear_attention(side, side, v, None, layout, causal=True)
    >>> dv = linear_attention_backward(torch.ones_like(v), None, side, side, v, results, layout, causal=True).v
    >>> dv.flatten().tolist()  # the first value has weight 1 in the first output and 1/2 in the second
    [1.5, 0.5]
    """
    if _stores(q.x, v, weighting):
        arguments = cotangent, total_cotangent, q, k, v, results, layout, causal, cu_seqlens
        return Gradients(*stored.linear_attention_backward(*arguments))
    out, _, inverse, *saved = results
    cotangent = _readable(cotangent)
    last = None if total_cotangent is None else total_cotangent.contiguous()
    x, call = _prepare(q, k, v, None, layout, causal, cu_seqlens, weighting, cotangent)
    plan = call.plan(x.k, cu_seqlens)
    query_plan = plan if causal or cu_seqlens is not None else call.plan(x.q, None)
    weight = empty_like(inverse)
    if not call.normalize:
        inverse = weight = out
    behind, of_before = call.sums(x, query_plan, "q", cotangent, (out, inverse, weight), last)
    rows, before = (inverse, weight), _Sums(*saved)
    dk, dv = call.of_keys(x, plan, behind, cotangent, rows)
    of_band = learned and call.band != 0
    dq, d_band = call.of_queries(x, query_plan, before, cotangent, rows, learned=of_band)
    return Gradients(dq, dk, dv, of_before, d_band)


def _prepare(
    q: Side,
    k: Side,
    v: Tensor,
    before: Tensor | None,
    layout: Layout,
    causal: bool,
    cu_seqlens: Tensor | None,
    weighting: Weighting,
    cotangent: Tensor | None,
) -> tuple[_Tensors, _Call]:
    """Return the tensors as the kernels need them, and what is decided for their signature."""
    q_cos, q_sin, q_row = q.tables or _NO_TABLES
    k_cos, k_sin, k_row = k.tables or _NO_TABLES
    decay, band, _, normalize, scale = weighting
    signed = signature(q.x, k.x, v, q_cos, q_sin, k_cos, k_sin, decay, band, before, cotangent)
    same = q_cos is k_cos and q_sin is k_sin and q_row == k_row
    sequences = None if cu_seqlens is None else len(cu_seqlens)
    key = None
    if signed is not None:
        key = "linear_attention", signed[0], layout, q.map, k.map, causal, sequences, normalize, scale, same
        call = LAUNCHES.get(key)
        if call is not None and call.direct:
            tables = q_cos, q_sin, k_cos, k_sin
            return _Tensors(q.x, k.x, v, None, None, *tables, decay, None, before, q_row, k_row), call
    if q_cos is not None and q_sin is not None and k_cos is not None and k_sin is not None:
        q_cos, q_sin, k_cos, k_sin = (table.contiguous() for table in (q_cos, q_sin, k_cos, k_sin))
    if band is not None:
        band = torch.exp(band.detach()).float().contiguous()
    shifts = _shift(q, "q" if normalize else "k"), _shift(k, "k")
    x = _Tensors(
        _readable(q.x), _readable(k.x), _readable(v), *shifts, q_cos, q_sin, k_cos, k_sin, decay, band, before, q_row,
        k_row,
    )  # fmt: skip
    call = None if key is None else LAUNCHES.get(key)
    if call is None:
        call = _Call(x, layout, (q.map, k.map), causal, weighting, cu_seqlens is not None, same)
        unchanged = x.q is q.x and x.k is k.x and x.v is v and x.q_shift is None and x.k_shift is None and band is None
        tables = *(q.tables or _NO_TABLES)[:2], *(k.tables or _NO_TABLES)[:2]
        unchanged = unchanged and all(a is b for a, b in zip((q_cos, q_sin, k_cos, k_sin), tables, strict=True))
        call.direct = unchanged
        LAUNCHES.keep(key, call)
    return x, call


_NO_TABLES = None, None, 0


def _shift(side: Side, role: str) -> Tensor | None:
    """Return what is subtracted from each row before an exponential, or None for other maps."""
    if side.map != "exp":
        return None
    largest = row_shift(side.x, side.map) if role == "q" else None
    if largest is None:
        return zeros(side.x.shape[:3], dtype=torch.float32, device=side.x.device)
    return largest.squeeze(-1).float().contiguous()


def _readable(x: Tensor) -> Tensor:
    """Return x with adjacent features, and with rows that are near enough for offsets of 32 bits."""
    return x if x.stride(3) == 1 and x.stride(2) < _WIDEST_STRIDE else x.contiguous()


def _like(x: Tensor, clear: bool) -> Tensor:
    """Return memory for a gradient of x, with its strides if features are adjacent; zeros if `clear`."""
    out = zeros_like(x) if clear else empty_like(x)
    # The strides of overlapping rows are not kept.
    return out if out.stride(3) == 1 else out.contiguous()
