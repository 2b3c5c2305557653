"""Launches the kernels of linear attention: how a sequence is cut into segments, and the passes in their order."""

# pyright: reportArgumentType=false, reportCallIssue=false
# Kernels take for a constexpr whatever they are given.

from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from ropewalk.kernels.feature_maps import FEATURE_MAPS
from ropewalk.kernels.launch_triton import table_strides
from ropewalk.kernels.layout import Layout
from ropewalk.kernels.linear_backward_triton import divide_rows, read_features
from ropewalk.kernels.linear_segments import SEGMENT, Plan
from ropewalk.kernels.linear_torch import Side
from ropewalk.kernels.linear_triton import read_values, run_totals, sum_segments

__all__ = ["Totals", "linear_attention", "linear_attention_backward"]

# How operands enter products, and to which precision: float16 has too little range for sums.
_KINDS = {
    torch.bfloat16: (tl.bfloat16, "ieee"),
    torch.float16: (tl.float32, "tf32"),
    torch.float32: (tl.float32, "tf32x3"),
}


class Totals(NamedTuple):
    """Sums before each segment, and sums of all.

    >>> Totals(*torch.zeros(2, 1)).total.tolist()
    [0.0]
    """

    running: Tensor
    total: Tensor


class _Block(NamedTuple):
    """What a program of one kernel takes: lanes, columns, tokens at a time, warps, and loads that are under way."""

    lanes: int
    columns: int
    chunk: int
    warps: int
    stages: int = 2

    def options(self) -> dict[str, int]:
        sizes = {"LANES": self.lanes, "COLUMNS": self.columns, "CHUNK": self.chunk}
        return sizes | {"num_warps": self.warps, "num_stages": self.stages}


class _Tile(NamedTuple):
    """Lanes in all, and the blocks of the three kernels. `read_values` has all lanes, `read_features` all columns."""

    lanes: int
    sums: _Block
    values: _Block
    features: _Block


def _tile(width: int, v_dim: int, dtype: torch.dtype) -> _Tile:
    """What was fastest on an H200.

    Two warps multiply by instructions of their own. Four or more take 64 rows at once where there are as many, and
    then Triton 3.6 gives wrong numbers for fewer than 64 columns: no block asks for that.
    """
    lanes, columns = (max(16, 1 << max(0, n - 1).bit_length()) for n in ((width + 1) // 2, v_dim))
    half = dtype == torch.bfloat16
    if not half or lanes <= 32:
        slim = lanes <= 32 and columns <= 64
        return _Tile(
            lanes,
            _Block(min(lanes, 32), min(columns, 64), 64 if half else 32, 2),
            _Block(lanes, min(columns, 64 if lanes <= 32 else 32), 32, 2, 2 if half else 1),
            _Block(min(lanes, 32 if slim else 16), columns, 32, 2, 2 if half and slim else 1),
        )
    if columns < 64:
        return _Tile(lanes, _Block(32, columns, 64, 2), _Block(lanes, columns, 32, 2, 1), _Block(32, columns, 32, 2, 1))
    return _Tile(
        lanes,
        _Block(64, min(columns, 128), 32, 4),
        _Block(lanes, 64, 64 if lanes == 64 else 32, 4, 1),
        _Block(64, columns, 32, 4) if columns <= 128 else _Block(32, columns, 32, 4, 1),
    )


class _Call:
    """What all passes of one call have in common: shapes, segments, tiles, and the arguments that follow from them."""

    def __init__(
        self, q: Side, k: Side, v: Tensor, layout: Layout, causal: bool, cu_seqlens: Tensor | None, segment: int
    ) -> None:
        self.q, self.k, self.v, self.causal = q, k, v, causal
        self.batch, self.heads, self.length, self.width = q.x.shape
        self.kv_heads, self.keys, self.v_dim = k.x.shape[1], k.x.shape[2], v.shape[-1]
        self.tile = _tile(self.width, self.v_dim, v.dtype)
        self.key_plan = Plan.of(k.x, cu_seqlens, segment)
        self.query_plan = self.key_plan if causal or cu_seqlens is not None else Plan.of(q.x, cu_seqlens, segment)
        # Tokens behind the last packed sequence belong to none, and nobody writes to them.
        self.make = torch.empty if cu_seqlens is None else torch.zeros
        pairs = 0 if q.tables is None else q.tables[0].shape[-1]
        kind, precision = _KINDS[v.dtype]
        self.shared = {
            "FEATURES": (self.width, pairs, layout.start if pairs else 0, layout.interleaved and pairs > 0),
            "V_DIM": self.v_dim,
            "PACKED": cu_seqlens is not None,
            "KIND": kind,
            "PRECISION": precision,
        }
        self.size = self.width * (self.v_dim + 1)

    def sums(
        self, side: Side, plan: Plan, v: Tensor, rows: tuple[Tensor, Tensor] | None, before: Tensor | None
    ) -> Totals:
        """Running sums of the segments, and the sums of all; with `rows`, scale and weight, from behind."""
        group = side.x.shape[1] // self.kv_heads
        made = {"dtype": torch.float32, "device": v.device}
        sums = torch.empty((self.batch * self.kv_heads, plan.number, self.size), **made)
        after = torch.empty((plan.sequences * self.kv_heads, self.size), **made)
        block = self.tile.sums
        lane_blocks, column_blocks = -(-self.tile.lanes // block.lanes), -(-self.v_dim // block.columns)
        scale, weight = (v, v) if rows is None else rows
        sum_segments[(self.batch * self.kv_heads, plan.number, lane_blocks * column_blocks)](
            x=side.x, v=v, shift=_or(side.shift, v), scale=scale, weight=weight, **_tables("", side),
            begins=_or(plan.begins, v), sums=sums, **_strides("x", side.x), **_strides("v", v),
            length=side.x.shape[2], count=plan.number, KV_HEADS=self.kv_heads, GROUP=group,
            MAP=FEATURE_MAPS[side.map], SCALED=rows is not None, SEGMENT=plan.segment, LANE_BLOCKS=lane_blocks,
            **self.shared, **block.options(),
        )  # fmt: skip
        run_totals[(plan.sequences * self.kv_heads, -(-self.size // 1024))](
            sums=sums, before=_or(before, sums), after=after, starts=_or(plan.starts, sums), width=self.size,
            heads=self.kv_heads, count=plan.number, GIVEN=before is not None, PACKED=plan.starts is not None,
            REVERSE=rows is not None, WIDTH=1024,
        )  # fmt: skip
        return Totals(sums, after)

    def reading(self, mine: Side, other: Side, plan: Plan, sums: Totals, reverse: bool) -> dict[str, Any]:
        """What kernels that read sums are given: their own side, the other side, and where the sums lie."""
        heads, others = mine.x.shape[1], other.x.shape[1]
        return {
            "x": mine.x, "y": other.x, "x_shift": _or(mine.shift, self.v), "y_shift": _or(other.shift, self.v),
            **_tables("", mine), **_tables("y_", other), "begins": _or(plan.begins, self.v),
            "sums": sums.running if self.causal else sums.total,
            "owner_step": self.size * (plan.number if self.causal else 1),
            **_strides("x", mine.x), **_strides("y", other.x), "length": mine.x.shape[2], "count": plan.number,
            "X_HEADS": heads, "X_GROUP": heads // self.kv_heads, "Y_GROUP": others // self.kv_heads,
            "X_MAP": FEATURE_MAPS[mine.map], "Y_MAP": FEATURE_MAPS[other.map], "CAUSAL": self.causal,
            "REVERSE": reverse, "SEGMENT": plan.segment, **self.shared,
        }  # fmt: skip

    def read_values(
        self, mine: Side, other: Side, plan: Plan, v: Tensor, sums: Totals, scale: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """What each row of `mine` reads, and its denominator; from behind and without one where `v` has a scale."""
        shape, block = mine.x.shape[:3], self.tile.values
        out = self.make((*shape, self.v_dim), dtype=v.dtype, device=v.device)
        below = self.make(shape, dtype=torch.float32, device=v.device) if scale is None else out
        read_values[(shape[0] * shape[1], plan.number, -(-self.v_dim // block.columns))](
            **self.reading(mine, other, plan, sums, scale is not None), v=v, scale=_or(scale, v), out=out,
            below=below, **_strides("v", v), **_strides("o", out), **block.options(),
        )  # fmt: skip
        return out, below

    def read_features(
        self, mine: Side, other: Side, plan: Plan, p: Tensor, v: Tensor, sums: Totals,
        rows: tuple[Tensor, Tensor], reverse: bool,
    ) -> Tensor:  # fmt: skip
        """The gradient of the rows of `mine`, which lies in memory as they do."""
        block, out = self.tile.features, torch.empty_like(mine.x)
        if plan.begins is not None:
            out.zero_()
        scale, weight = rows
        read_features[(mine.x.shape[0] * mine.x.shape[1], plan.number, -(-self.tile.lanes // block.lanes))](
            **self.reading(mine, other, plan, sums, reverse), p=p, v=v, scale=scale, weight=weight, out=out,
            **_strides("p", p), **_strides("v", v), **_strides("d", out), **block.options(),
        )  # fmt: skip
        return out


def linear_attention(
    q: Side,
    k: Side,
    v: Tensor,
    before: Tensor | None,
    layout: Layout,
    *,
    causal: bool,
    cu_seqlens: Tensor | None = None,
    segment: int = SEGMENT,
) -> tuple[Tensor, Tensor, Totals]:
    """Outputs, denominators [batch, heads, seq], the sums at the end, and the running sums of the segments.

    Sums are float32 [sequences * kv_heads, width * (v_dim + 1)]: sum (R k) v^T, and behind it sum k. `before` is what
    earlier tokens left.

    >>> from ropewalk.kernels import gpu
    >>> device = "cpu" if gpu.INTERPRETED else "cuda"
    >>> x, v = torch.zeros(1, 1, 2, 2, device=device), torch.tensor([[[[1.0], [3.0]]]], device=device)
    >>> side, layout = Side(x, "elu"), Layout(False, 0, -2)
    >>> linear_attention(side, side, v, None, layout, causal=True)[0].flatten().tolist()
    [1.0, 2.0]
    """
    q, k, v = _rows(q), _rows(k), _last_together(v)
    call = _Call(q, k, v, layout, causal, cu_seqlens, segment)
    sums = call.sums(k, call.key_plan, v, None, before)
    out, below = call.read_values(q, k, call.query_plan, v, sums, None)
    return out, below, sums


def linear_attention_backward(
    cotangent: Tensor,
    after_cotangent: Tensor | None,
    q: Side,
    k: Side,
    v: Tensor,
    saved: tuple[Tensor, Tensor, Totals],
    layout: Layout,
    *,
    causal: bool,
    cu_seqlens: Tensor | None = None,
    segment: int = SEGMENT,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of q, k, v and of the sums before, from those of the outputs and of the sums at the end.

    `saved` is what `linear_attention` gave. With dn = do / den and dden = -(do . o) / den: dq_i from S_i dn_i and
    dden_i z_i; dk_j from T_j v_j and sum dden_i q_i; dv_j = T_j^T R k_j, where T_j sums (R q_i) dn_i^T over i >= j.

    >>> from ropewalk.kernels import gpu
    >>> device = "cpu" if gpu.INTERPRETED else "cuda"
    >>> x, v = torch.zeros(1, 1, 2, 2, device=device), torch.tensor([[[[1.0], [3.0]]]], device=device)
    >>> side, layout = Side(x, "elu"), Layout(False, 0, -2)
    >>> saved = linear_attention(side, side, v, None, layout, causal=True)
    >>> dv = linear_attention_backward(torch.ones_like(v), None, side, side, v, saved, layout, causal=True)[2]
    >>> dv.flatten().tolist()  # the first value counts whole for the first output and half for the second
    [1.5, 0.5]
    """
    q, k, v, cotangent = _rows(q), _rows(k), _last_together(v), _last_together(cotangent)
    out, below, sums = saved[0], saved[1], Totals(*saved[2])
    call = _Call(q, k, v, layout, causal, cu_seqlens, segment)
    scale, weight = torch.empty_like(below), torch.empty_like(below)
    rows = below.numel()
    divide_rows[(-(-rows // 16),)](
        out=out, cotangent=cotangent, below=below, scale=scale, weight=weight, **_strides("o", out),
        **_strides("g", cotangent), length=call.length, rows=rows, HEADS=call.heads, V_DIM=call.v_dim, ROWS=16,
        COLUMNS=call.tile.features.columns,
    )  # fmt: skip
    both = scale, weight
    behind = call.sums(
        q, call.query_plan, cotangent, both, None if after_cotangent is None else after_cotangent.contiguous()
    )
    dq = call.read_features(q, k, call.query_plan, cotangent, v, sums, both, reverse=False)
    dk = call.read_features(k, q, call.key_plan, v, cotangent, behind, both, reverse=True)
    dv, _ = call.read_values(k, q, call.key_plan, cotangent, behind, scale)
    return dq, dk, dv, behind.total


def _rows(side: Side) -> Side:
    return side._replace(x=_last_together(side.x))


def _last_together(x: Tensor) -> Tensor:
    """x with its last dimension side by side, which is what the kernels read."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _or(tensor: Tensor | None, other: Tensor) -> Tensor:
    """The tensor, or another in its place that the kernel does not look at."""
    return other if tensor is None else tensor


def _strides(name: str, x: Tensor) -> dict[str, int]:
    return {f"{name}_{dim}": x.stride(i) for i, dim in enumerate("bhn")}


def _tables(name: str, side: Side) -> dict[str, Any]:
    cos, sin, row = (side.x, side.x, 0) if side.tables is None else side.tables
    batch, head = (0, 0) if side.tables is None else table_strides(cos)
    return {f"{name}cos": cos, f"{name}sin": sin, f"{name}row": row, f"{name}table_b": batch, f"{name}table_h": head}
