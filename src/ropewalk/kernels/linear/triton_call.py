"""Launches of the kernels of linear attention: what is decided once per signature of a call, and the memory of a call.

Forward: `sum_segments`, `run_totals`, `read_values`. Backward: the first two for queries and cotangents, then
`read_keys` and `read_queries`. The gradient of a band needs `read_factors` too.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ropewalk.kernels.constructors import empty, empty_like, zeros, zeros_like
from ropewalk.kernels.linear import segments as linear_segments
from ropewalk.kernels.linear.arena import Arena
from ropewalk.kernels.linear.band_gradient import band_gradient
from ropewalk.kernels.linear.segments import OPERANDS, Plan, count_segments
from ropewalk.kernels.linear.tiles import tile_of
from ropewalk.kernels.linear.triton_features import KINDS
from ropewalk.kernels.linear.triton_kernels import read_factors, read_keys, read_queries, read_values
from ropewalk.kernels.linear.triton_step import SMALLEST
from ropewalk.kernels.linear.triton_sums import run_totals, sum_segments
from ropewalk.kernels.torch_internals import current_stream
from ropewalk.kernels.triton_launch import Launch, table_strides
from ropewalk.kernels.types import FeatureMap, Layout, Weighting

__all__ = ["Call", "Sizes", "Tensors"]

# Number of programs of `read_factors` that keeps a large GPU busy.
_ENOUGH_PROGRAMS = 1024


class Tensors(NamedTuple):
    """The tensors of a call, as the kernels need them, and the rows of the first tokens in the tables.

    >>> Tensors(*torch.zeros(3, 1), *[None] * 9, 0, 5).k_row
    5
    """

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


class Sizes:
    """Sizes of a call, from the shapes of its tensors.

    Queries and keys are two sides. A side has `heads` heads in memory. Keys are read by one virtual head per head of
    the sums. If there is one decay per query head, `share` of them share a head in memory.

    Args:
        q: Queries [batch, heads, seq, width].
        k: Keys [batch, kv_heads, seq, width].
        v: Values [batch, kv_heads, seq, v_dim].
        causal: Whether attention is causal.
        weighting: Factors on the terms.
        sequences: Number of packed sequences, or None.

    >>> x = torch.ones(1, 2, 300, 4, device="meta", dtype=torch.bfloat16)
    >>> sizes = Sizes(x, x, x, True, Weighting(), None)
    >>> sizes.segment, sizes.chunks, sizes.key_count
    (256, 4, 2)
    """

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, weighting: Weighting, sequences: int | None
    ) -> None:
        self.batch, self.heads, self.queries, self.width = q.shape
        self.kv_heads, self.keys, self.v_dim = k.shape[1], k.shape[2], v.shape[3]
        self.states = weighting.state_heads(self.kv_heads)
        self.group, self.share = self.heads // self.states, self.states // self.kv_heads
        self.causal, self.packed, self.normalize, self.scale = causal, sequences is not None, *weighting[3:]
        decay, band = weighting.decay, weighting.band
        self.weighted = decay is not None or band is not None
        self.decay = 0 if decay is None else 1 if decay.shape[2] == 1 else 2
        self.band = 0 if band is None else band.shape[1] // 2
        # Whether rows read the sums over all keys, whether chunks are computed apart, and the directions of sums.
        self.all = not causal and not self.weighted
        self.apart = band is not None or (self.weighted and not causal)
        self.directions = 2 if self.weighted and not causal else 1
        self.memory = OPERANDS[v.dtype]
        self.segment = linear_segments.segment_length(self.width, self.v_dim, self.batch * self.heads * self.queries)
        self.tile = tile_of(self.width, self.v_dim, v.dtype, apart=self.apart)
        self.chunk = min(self.tile.chunk, self.segment)
        self.chunks = self.segment // self.chunk
        # Visited chunks before a chunk, and all of them.
        self.near = (self.band + self.chunk - 2) // self.chunk if self.band else 0
        self.tiles = 1 + self.near * self.directions
        self.half = (self.width + 1) // 2
        self.sequences = self.batch if sequences is None else sequences
        self.query_count = count_segments(self.queries, sequences, self.segment)
        self.key_count = count_segments(self.keys, sequences, self.segment)

    def sums(self, count: int) -> list[tuple[str, Sequence[int], torch.dtype]]:
        """Return the arrays of the sums that rows read, for `count` segments."""
        number = self.directions * self.batch * self.states * count
        slots = self.sequences * self.states if self.all else number
        above, below = 2 * self.half * self.v_dim, 2 * self.half
        return [
            ("running", (slots, above), self.memory),
            ("inner", (number * self.chunks if self.apart else 0, above), self.memory),
            ("plain", (slots, below), torch.float32),
            ("low", (number * self.chunks, below), torch.float32),
        ]

    def scratch(self, count: int) -> list[tuple[str, Sequence[int], torch.dtype]]:
        """Return the arrays that only the kernels of one pass need."""
        owners = self.batch * self.states
        size = 2 * self.half * (self.v_dim + 1)
        return [
            ("sums", (self.directions * owners * count, size), torch.float32),
            ("fade", (owners * count if self.decay else 0,), torch.float32),
            ("factors", (self.heads * self.tiles if self.band else 0, self.chunk**2), torch.float32),
        ]

    def saved(self) -> Arena:
        """Return the arrays of a forward pass that its backward pass needs."""
        rows = self.batch * self.heads * self.queries if self.normalize else 0
        return Arena([("inverse", (rows,), torch.float32), *self.sums(self.key_count)])


class Call(Sizes):
    """What is decided once for all calls with the same shapes, strides, dtypes and options. `direct` is set later.

    Args:
        x: Tensors of the call.
        layout: Layout of the rotation.
        maps: Feature maps of queries and keys.
        causal: Whether attention is causal.
        weighting: Factors on the terms.
        sequences: Number of packed sequences, or None.
        same: Whether queries and keys have the same tables.

    >>> x = torch.ones(1, 2, 300, 4)
    >>> tensors = Tensors(x, x, x, *[None] * 9, 0, 0)
    >>> Call(tensors, Layout(True, 0, -2), ("elu", "elu"), True, Weighting(), None, True).programs(2, 2)
    4
    """

    def __init__(
        self,
        x: Tensors,
        layout: Layout,
        maps: tuple[str, str],
        causal: bool,
        weighting: Weighting,
        sequences: int | None,
        same: bool,
    ) -> None:
        super().__init__(x.q, x.k, x.v, causal, weighting, sequences)
        self.dtype, (self.kind, self.precision), self.device = x.v.dtype, KINDS[x.v.dtype], x.v.device
        self.least = SMALLEST if self.weighted else 0.0
        self.maps = FeatureMap[maps[0]].value, FeatureMap[maps[1]].value
        pairs = 0 if x.q_cos is None else x.q_cos.shape[-1]
        # Without rotation, neighbours are paired, because they are read without gaps.
        self.features = (self.width, pairs, layout.start if pairs else 0, layout.interleaved or not pairs)
        self.strides = {name: tuple(getattr(x, name).stride()[:3]) for name in "qkv"}
        self.decay_strides = (0, 0, 0)
        if x.decay is not None:
            steps = x.decay.stride()
            self.decay_strides = tuple(0 if n == 1 else step for n, step in zip(x.decay.shape, steps, strict=True))
        self.tables = [(0, 0) if cos is None else table_strides(cos) for cos in (x.q_cos, x.k_cos)]
        # Whether a row of queries has the cos and sin of the keys that it reads.
        self.same = same and causal and self.tables[0][1] == 0
        self.kept = self.saved()
        self.forward_scratch = Arena(self.scratch(self.key_count))
        rows = self.batch * self.heads * self.queries if self.normalize else 0
        arrays = [("weight", (rows,), torch.float32), *self.sums(self.query_count), *self.scratch(self.query_count)]
        self.backward_scratch = Arena(arrays)
        self.key_plan = self.query_plan = None
        if sequences is None:
            self.key_plan, self.query_plan = (Plan.of(y, None, self.segment) for y in (x.k, x.q))
        # Whether the kernels can read all tensors of a call as they are.
        self.direct = False
        self.launches: dict[Any, Launch] = {}

    def plans(self, x: Tensors, cu_seqlens: Tensor | None) -> tuple[Plan, Plan]:
        """Return the segments of the keys, and those of the queries."""
        if self.key_plan is not None and self.query_plan is not None:
            return self.key_plan, self.query_plan
        plan = Plan.of(x.k, cu_seqlens, self.segment)
        return plan, plan

    def launch(
        self, name: str, make: Callable[[], Launch], addresses: Sequence[int], tensors: Callable[[], list[Any]]
    ) -> None:
        """Launch a kernel. `make` creates the launch of the first call, `tensors` what `addresses` are for."""
        found = self.launches.get(name)
        if found is None:
            found = self.launches[name] = make()
        if not found.by_address(current_stream(self.device), *addresses):
            found(self.device, *tensors())

    def common(self, side: int) -> dict[str, Any]:
        """Return the constants of all kernels that read sums, from NORMALIZED to PACKED."""
        return {
            "NORMALIZED": self.normalize, "APART": self.apart, "SIDE": side, "DECAY": self.decay, "BAND": self.band,
            "PACKED": self.packed, "SEGMENT": self.segment,
        }  # fmt: skip

    def reading(self, role: str, count: int) -> tuple[Any, ...]:
        """Return the numbers that all kernels have that read sums: rows x of a role, and the other side y."""
        x_side = 0 if role == "q" else 1
        heads = (self.heads, self.kv_heads) if role == "q" else (self.kv_heads, self.heads)
        owners = self.batch * (self.heads if role == "q" else self.states)
        slots = self.batch * self.states * count
        return (
            *self.decay_strides, *self.tables[x_side], *self.tables[1 - x_side],
            self.queries if role == "q" else self.keys, owners, count, slots, *heads,
        )  # fmt: skip

    def programs(self, heads: int, count: int) -> int:
        """Return the number of programs that compute all rows of `count` segments."""
        return self.batch * heads * count * (self.chunks if self.apart else 1)

    def sum(
        self, x: Tensors, at: Sequence[int], plan: Plan, role: str, places: "_Places", before: Tensor | None,
        more: Sequence[Tensor] = (),
    ) -> Tensor:  # fmt: skip
        """Store the sums of keys and values, or of queries and cotangents, and return the total in flat form.

        Args:
            x: Tensors of the call.
            at: Their addresses.
            plan: Segments of the tokens.
            role: "k" for keys and their values, "q" for queries.
            places: Where the sums are stored.
            before: Initial sums, or None.
            more: For queries: cotangents and outputs.
        """
        queries, count = role == "q", plan.number
        owners, size = self.batch * self.states, 2 * self.half * (self.v_dim + 1)
        total = empty(
            (plan.sequences * self.states, self.width * (self.v_dim + 1)), dtype=torch.float32, device=self.device
        )
        z, out = more if queries else (x.v, None)

        def summing() -> Launch:
            block = self.tile.sums
            lane_blocks, column_blocks = -(-self.half // block.lanes), -(-self.v_dim // block.columns)
            heads, share, group = (self.heads, 1, self.group) if queries else (self.kv_heads, self.share, 1)
            numbers = (
                *self.strides[role], *z.stride()[:3], *((0, 0, 0) if out is None else out.stride()[:3]),
                *self.decay_strides, *self.tables[not queries], (self.queries if queries else self.keys), owners, count,
                heads, self.scale,
            )  # fmt: skip
            constants = {
                "HEADS": self.states, "GROUP": group, "SHARE": share, "FEATURES": self.features, "V_DIM": self.v_dim,
                "MAP": self.maps[not queries], "QUERIES": queries, "NORMALIZED": self.normalize, "DECAY": self.decay,
                "DIRECTIONS": self.directions, "APART": self.apart, "BAND": self.band, "READERS": self.group,
                "PACKED": self.packed, "SEGMENT": self.segment, **block.constants(self.chunk),
                "LANE_BLOCKS": lane_blocks, "KIND": self.kind, "PRECISION": self.precision,
            }  # fmt: skip
            grid = owners * count, lane_blocks * column_blocks, self.directions
            return Launch(sum_segments, grid, numbers, constants, *block.options())

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

        q, k, v, q_shift, k_shift, q_cos, q_sin, k_cos, k_sin, decay, band, *_ = at
        begins, starts = (0, 0) if plan.begins is None else (plan.begins.data_ptr(), plan.starts.data_ptr())  # pyright: ignore[reportOptionalMemberAccess]
        where = places.addresses
        if queries:
            side = q, q_shift, q_cos, q_sin, z.data_ptr(), out.data_ptr(), places.inverse, where["weight"]  # pyright: ignore[reportOptionalMemberAccess]
        else:
            side = k, k_shift, k_cos, k_sin, v, 0, 0, 0
        sums, inner, low, fade, factors = (where[name] for name in ("sums", "inner", "low", "fade", "factors"))
        row = x.q_row if queries else x.k_row

        def summed() -> list[Any]:
            y, shift, cos, sin = (
                (x.q, x.q_shift, x.q_cos, x.q_sin) if queries else (x.k, x.k_shift, x.k_cos, x.k_sin)
            )  # fmt: skip
            rows = (out, places.view("inverse"), places.view("weight")) if queries else (z, z, z)
            given = (shift, cos, sin, z, *rows, x.decay, x.band, plan.begins)
            names = "sums", "inner", "low", "fade", "factors"
            return [y, *_filled(given, z), *(places.view(name) for name in names), row]

        def scanned() -> list[Any]:
            names = "sums", "fade", "running", "plain"
            sums, fade, running, plain = (places.view(name) for name in names)
            return [sums, fade, *_filled([before], sums), total, running, plain, *_filled([plan.starts], sums)]

        self.launch(
            f"sum {role}", summing, (*side, decay, band, begins, sums, inner, low, fade, factors, row), summed
        )  # fmt: skip
        given = 0 if before is None else before.data_ptr()
        self.launch(
            f"scan {role} {before is not None}",
            scanning,
            (sums, fade, given, total.data_ptr(), where["running"], where["plain"], starts),
            scanned,
        )
        return total

    def forward(self, x: Tensors, at: Sequence[int], cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return the outputs, the sums after the last key in flat form, and what the backward needs."""
        key_plan, plan = self.plans(x, cu_seqlens)
        saved = empty((self.kept.length,), dtype=torch.float32, device=self.device)
        scratch = empty((self.forward_scratch.length,), dtype=torch.float32, device=self.device)
        places = _Places((self.kept, saved), (self.forward_scratch, scratch))
        total = self.sum(x, at, key_plan, "k", places, x.before)
        # No kernel writes the outputs of tokens after the last packed sequence.
        make = zeros if self.packed else empty
        out = make((self.batch, self.heads, self.queries, self.v_dim), dtype=self.dtype, device=self.device)
        if self.packed:
            places.view("inverse").zero_()

        def reading() -> Launch:
            block = self.tile.values
            strides = *self.strides["q"], *self.strides["k"], *self.strides["v"], *out.stride()[:3]
            constants = {
                "X_HEADS": self.heads, "X_GROUP": self.group, "Y_SHARE": self.share, "FEATURES": self.features,
                "V_DIM": self.v_dim, "X_MAP": self.maps[0], "Y_MAP": self.maps[1],
                **self.common(-1 if self.causal else 0), **block.constants(self.chunk), "KIND": self.kind,
                "PRECISION": self.precision, "SAME": self.same,
            }  # fmt: skip
            grid = self.programs(self.heads, plan.number), -(-self.v_dim // block.columns), 1
            numbers = (*strides, *self.reading("q", plan.number), self.scale, self.least)
            return Launch(read_values, grid, numbers, constants, *block.options())

        def tensors() -> list[Any]:
            return [
                *_filled(x[:11], out), *_filled([places.view("factors"), plan.begins], out), *places.sums(), out,
                places.view("inverse"), x.q_row, x.k_row,
            ]  # fmt: skip

        where, begins = places.addresses, 0 if plan.begins is None else plan.begins.data_ptr()
        addresses = (
            *at[:11], where["factors"], begins, where["running"], where["inner"], where["plain"], where["low"],
            out.data_ptr(), where["inverse"], x.q_row, x.k_row,
        )  # fmt: skip
        self.launch("values", reading, addresses, tensors)
        return out, total, saved

    def backward(
        self, x: Tensors, at: Sequence[int], cu_seqlens: Tensor | None, cotangent: Tensor, out: Tensor, saved: Tensor,
        last: Tensor | None, *, learned: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
        """Return the gradients of q, k, v, of the initial sums, and of the logarithms of the band if `learned`."""
        key_plan, plan = self.plans(x, cu_seqlens)
        before = _Places((self.kept, saved))
        scratch = empty((self.backward_scratch.length,), dtype=torch.float32, device=self.device)
        behind = _Places((self.backward_scratch, scratch), inverse=before)
        of_before = self.sum(x, at, plan, "q", behind, last, (cotangent, out))
        of_k, of_v = self.of_keys(x, at, key_plan, behind, cotangent)
        learned = learned and self.band != 0
        of_q, of_far = self.of_queries(x, at, plan, before, behind, cotangent, learned=learned)
        of_band = None
        if of_far is not None:
            of_band = band_gradient(self.of_factors(x, at, plan, behind, cotangent), of_far, self.band)
        return of_q, of_k, of_v, of_before, of_band

    def of_queries(
        self, x: Tensors, at: Sequence[int], plan: Plan, before: "_Places", behind: "_Places", cotangent: Tensor, *,
        learned: bool,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """Return the gradients of the queries, and of the factors beyond the band if `learned`."""
        block = self.tile.features
        blocks, programs = -(-self.half // block.lanes), self.programs(self.heads, plan.number)
        out = _like(x.q, self.packed)
        # The kernel stores nothing for keys after causal queries.
        of_far = zeros((blocks * programs, 2), dtype=torch.float32, device=self.device) if learned else None

        def reading() -> Launch:
            strides = (
                *self.strides["q"], *self.strides["k"], *self.strides["v"], *cotangent.stride()[:3], *out.stride()[:3]
            )  # fmt: skip
            constants = {
                "X_HEADS": self.heads, "X_GROUP": self.group, "Y_SHARE": self.share, "FEATURES": self.features,
                "V_DIM": self.v_dim, "X_MAP": self.maps[0], "Y_MAP": self.maps[1],
                **self.common(-1 if self.causal else 0), **block.constants(self.chunk), "KIND": self.kind,
                "PRECISION": self.precision, "LEARNED": learned,
            }  # fmt: skip
            numbers = (*strides, *self.reading("q", plan.number), self.scale)
            return Launch(read_queries, (programs, blocks, 1), numbers, constants, *block.options())

        def tensors() -> list[Any]:
            rows = behind.view("inverse"), behind.view("weight"), x.decay, x.band, behind.view("factors"), plan.begins
            far = _filled([of_far], out)
            return [
                *x[:3], cotangent, *_filled(x[3:9], out), *_filled(rows, out), *before.sums(), out, *far, x.q_row,
                x.k_row,
            ]  # fmt: skip

        q, k, v, q_shift, k_shift, q_cos, q_sin, k_cos, k_sin, decay, band, *_ = at
        where, stored = behind.addresses, before.addresses
        addresses = (
            q, k, v, cotangent.data_ptr(), q_shift, k_shift, q_cos, q_sin, k_cos, k_sin, behind.inverse,
            where["weight"], decay, band, where["factors"], 0 if plan.begins is None else plan.begins.data_ptr(),
            stored["running"], stored["inner"], stored["plain"], stored["low"], out.data_ptr(),
            0 if of_far is None else of_far.data_ptr(), x.q_row, x.k_row,
        )  # fmt: skip
        self.launch(f"queries {learned}", reading, addresses, tensors)
        if of_far is not None:
            # Programs are ordered by chunk, then batch and head.
            of_far = of_far.view(-1, self.heads, 2)
        return out, of_far

    def of_keys(
        self, x: Tensors, at: Sequence[int], plan: Plan, behind: "_Places", cotangent: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the gradients of keys and values."""
        block, narrow = self.tile.keys, self.tile.values
        lane_blocks, column_blocks = -(-self.half // block.lanes), -(-self.v_dim // narrow.columns)
        if self.apart and self.tile.together:
            lane_blocks = 0
        if self.share == 1:
            out, values = _like(x.k, self.packed), _like(x.v, self.packed)
        else:
            make = zeros if self.packed else empty
            options = {"dtype": torch.float32, "device": self.device}
            shape = self.batch, self.states, self.keys
            out, values = make((*shape, self.width), **options), make((*shape, self.v_dim), **options)

        def reading() -> Launch:
            strides = (
                *self.strides["k"], *self.strides["q"], *self.strides["v"], *cotangent.stride()[:3], *out.stride()[:3],
                *values.stride()[:3],
            )  # fmt: skip
            constants = {
                "X_HEADS": self.states, "Y_GROUP": self.group, "X_SHARE": self.share, "FEATURES": self.features,
                "V_DIM": self.v_dim, "X_MAP": self.maps[1], "Y_MAP": self.maps[0],
                **self.common(1 if self.causal else 0), **block.constants(self.chunk), "KIND": self.kind,
                "PRECISION": self.precision, "SAME": self.same, "LANE_BLOCKS": lane_blocks, "ALL_LANES": narrow.lanes,
                "FEW_COLUMNS": narrow.columns,
            }  # fmt: skip
            grid = self.programs(self.states, plan.number), lane_blocks + column_blocks, 1
            numbers = (*strides, *self.reading("k", plan.number), self.scale)
            return Launch(read_keys, grid, numbers, constants, *block.options())

        def tensors() -> list[Any]:
            sides = x.k_shift, x.q_shift, x.k_cos, x.k_sin, x.q_cos, x.q_sin
            rows = behind.view("inverse"), behind.view("weight"), x.decay, x.band, behind.view("factors"), plan.begins
            return [
                x.k, x.q, x.v, cotangent, *_filled(sides, out), *_filled(rows, out), *behind.sums(), out, values,
                x.k_row, x.q_row,
            ]  # fmt: skip

        q, k, v, q_shift, k_shift, q_cos, q_sin, k_cos, k_sin, decay, band, *_ = at
        where = behind.addresses
        addresses = (
            k, q, v, cotangent.data_ptr(), k_shift, q_shift, k_cos, k_sin, q_cos, q_sin, behind.inverse,
            where["weight"], decay, band, where["factors"], 0 if plan.begins is None else plan.begins.data_ptr(),
            where["running"], where["inner"], where["plain"], where["low"], out.data_ptr(), values.data_ptr(), x.k_row,
            x.q_row,
        )  # fmt: skip
        self.launch("keys", reading, addresses, tensors)
        if self.share > 1:
            # Each query head has sums of its own, and so a gradient of its key head.
            grouped = (y.unflatten(1, (self.kv_heads, self.share)).sum(2) for y in (out, values))
            out, values = (y.to(self.dtype) for y in grouped)
        return out, values

    def of_factors(
        self, x: Tensors, at: Sequence[int], plan: Plan, behind: "_Places", cotangent: Tensor
    ) -> Tensor:  # fmt: skip
        """Return the gradients of the tiles of factors [parts, batch, heads, tiles, queries, keys]."""
        owners, block = self.batch * self.heads, self.tile.values
        parts = max(1, min(_ENOUGH_PROGRAMS // (owners * self.tiles), plan.number * self.chunks))
        shape = parts, self.batch, self.heads, self.tiles, self.chunk, self.chunk
        out = empty(shape, dtype=torch.float32, device=self.device)

        def reading() -> Launch:
            numbers = (
                *self.strides["q"], *self.strides["k"], *self.strides["v"], *cotangent.stride()[:3], *self.tables[0],
                *self.tables[1], self.queries, owners, plan.number, self.heads, self.kv_heads, self.scale,
            )  # fmt: skip
            constants = {
                "X_HEADS": self.heads, "X_GROUP": self.group * self.share, "FEATURES": self.features,
                "V_DIM": self.v_dim, "X_MAP": self.maps[0], "Y_MAP": self.maps[1], "NORMALIZED": self.normalize,
                "SIDE": -1 if self.causal else 0, "BAND": self.band, "PACKED": self.packed, "SEGMENT": self.segment,
                "CHUNK": self.chunk, "LANES": block.lanes, "COLUMNS": self.tile.features.columns, "KIND": self.kind,
                "PRECISION": self.precision,
            }  # fmt: skip
            grid = owners, self.tiles, parts
            return Launch(read_factors, grid, numbers, constants, block.warps, block.stages)

        def tensors() -> list[Any]:
            rows = behind.view("inverse"), behind.view("weight"), behind.view("factors"), plan.begins
            return [*x[:3], cotangent, *_filled(x[3:9], out), *_filled(rows, out), out, x.q_row, x.k_row]

        q, k, v, q_shift, k_shift, q_cos, q_sin, k_cos, k_sin, *_ = at
        where = behind.addresses
        addresses = (
            q, k, v, cotangent.data_ptr(), q_shift, k_shift, q_cos, q_sin, k_cos, k_sin, behind.inverse,
            where["weight"], where["factors"], 0 if plan.begins is None else plan.begins.data_ptr(), out.data_ptr(),
            x.q_row, x.k_row,
        )  # fmt: skip
        self.launch("factors", reading, addresses, tensors)
        return out


class _Places:
    """Where the arrays of a pass are: their addresses, and views of them for first launches.

    Args:
        arenas: Arenas with their allocations.
        inverse: Places of the forward pass, which has the inverse denominators of a backward pass.
    """

    def __init__(self, *arenas: tuple[Arena, Tensor], inverse: "_Places | None" = None) -> None:
        self._arenas, self._forward = arenas, inverse
        self.addresses: dict[str, int] = {}
        for arena, memory in arenas:
            start = memory.data_ptr()
            for name, offset in arena.offsets.items():
                self.addresses[name] = start + offset
        self.inverse: int = self.addresses["inverse"] if inverse is None else inverse.addresses["inverse"]

    def view(self, name: str) -> Tensor:
        """Return one of the arrays."""
        for arena, memory in self._arenas:
            if name in arena.offsets:
                return arena.view(memory, name)
        if self._forward is None:
            raise KeyError(name)
        return self._forward.view(name)

    def sums(self) -> list[Tensor]:
        """Return the sums that rows read."""
        return [self.view(name) for name in ("running", "inner", "plain", "low")]


def _filled(tensors: Sequence[Tensor | None], other: Tensor) -> list[Tensor]:
    """Return the tensors, and another one for each that is None, which the kernels then do not read."""
    return [other if tensor is None else tensor for tensor in tensors]


def _like(x: Tensor, clear: bool) -> Tensor:
    """Return memory for a gradient of x, with its strides if features are adjacent; zeros if `clear`."""
    out = zeros_like(x) if clear else empty_like(x)
    # The strides of overlapping rows are not kept.
    return out if out.stride(3) == 1 else out.contiguous()
