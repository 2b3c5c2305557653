"""Launches of the kernels of linear attention: what is decided once per signature of a call, and the memory of a call.

Forward: `sum_segments`, `run_totals`, `read_values`. Backward: the first two for queries and cotangents, then
`read_keys` and `read_queries`. The gradient of a band needs `read_factors` too.
"""

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ropewalk.kernels.constructors import empty, empty_like, zeros, zeros_like
from ropewalk.kernels.linear import segments as linear_segments
from ropewalk.kernels.linear.arena import Arena
from ropewalk.kernels.linear.band_gradient import band_gradient
from ropewalk.kernels.linear.segments import OPERANDS, Plan, count_segments
from ropewalk.kernels.linear.tiles import Block, Tile, tile_of
from ropewalk.kernels.linear.triton_features import KINDS
from ropewalk.kernels.linear.triton_kernels import read_factors, read_keys, read_queries, read_values
from ropewalk.kernels.linear.triton_step import SMALLEST
from ropewalk.kernels.linear.triton_sums import run_totals, sum_segments
from ropewalk.kernels.torch_internals import current_stream
from ropewalk.kernels.triton_launch import INTERPRETED, Launch, table_strides
from ropewalk.kernels.types import FeatureMap, Layout, Weighting

__all__ = ["Call", "Sizes", "Tensors"]

# Arrays that all passes have: none, the inputs, their first rows in the tables, and the segments of packed sequences.
_INPUTS = (
    "none", "q", "k", "v", "q_shift", "k_shift", "q_cos", "q_sin", "k_cos", "k_sin", "decay", "band", "before", "q_row",
    "k_row", "begins", "starts",
)  # fmt: skip
_TABLES = "q_shift k_shift q_cos q_sin k_cos k_sin"
_SUMS = "running inner plain low"
# What the kernels of each launch get, before the numbers that are the same in all calls.
_ARGUMENTS = {
    "sum_keys": "k k_shift k_cos k_sin v none none none decay band begins sums inner low fade factors "
    "rotated_k mapped_k k_row",
    "sum_queries": "q q_shift q_cos q_sin cotangent out inverse weight decay band begins sums behind_inner behind_low "
    "fade factors rotated_q mapped_q q_row",
    "scan_keys": "sums fade before after running plain starts",
    "scan_queries": "sums fade last after behind_running behind_plain starts",
    "values": f"q k v {_TABLES} decay band factors begins {_SUMS} rotated_k mapped_k out inverse q_row k_row",
    "queries": f"q k v cotangent {_TABLES} inverse weight decay band factors begins {_SUMS} "
    "rotated_k mapped_k of_q of_far q_row k_row",
    "keys": "k q v cotangent k_shift q_shift k_cos k_sin q_cos q_sin inverse weight decay band factors begins "
    "behind_running behind_inner behind_plain behind_low rotated_k mapped_k rotated_q mapped_q of_k of_v k_row q_row",
    "factors": "q v cotangent q_shift q_cos q_sin inverse weight factors begins rotated_k mapped_k of_factors q_row",
}

# The launches of a backward pass, by whether the sums after the last key have a cotangent, and the band a gradient.
_BACKWARD = {
    (sums, band): f"sum_queries,scan_queries{':sums' * sums},keys,queries{':band,factors' * band}"
    for sums in (False, True)
    for band in (False, True)
}

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

    batch: int
    heads: int
    queries: int
    width: int
    kv_heads: int
    keys: int
    v_dim: int
    states: int
    group: int
    share: int
    causal: bool
    packed: bool
    normalize: bool
    scale: float
    weighted: bool
    decay: int
    band: int
    all: bool
    apart: bool
    directions: int
    memory: torch.dtype
    segment: int
    tile: Tile
    chunk: int
    chunks: int
    near: int
    step: int
    tiles: int
    line: int
    half: int
    sequences: int
    query_count: int
    key_count: int
    total_shape: tuple[int, int]

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
        # Packed sequences may be short, and sums are stored for all chunks of their last segments.
        rows = 0 if self.apart and self.packed else self.batch * self.heads * self.queries
        self.segment = linear_segments.segment_length(self.width, self.v_dim, rows)
        self.tile = tile_of(self.width, self.v_dim, v.dtype, apart=self.apart)
        self.chunk = min(self.tile.chunk, self.segment)
        self.chunks = self.segment // self.chunk
        # Visited chunks before a chunk, the keys of a tile of factors, and the number of tiles that a chunk visits.
        self.near = (self.band + self.chunk - 2) // self.chunk if self.band else 0
        self.step = min(self.chunk, self.tile.values.step)
        self.tiles = (1 + self.near * self.directions) * self.chunk // self.step
        # Length of the line of factors of a head, as `store_factors` stores it.
        self.line = 2 * (1 + self.near) * self.chunk
        self.half = (self.width + 1) // 2
        self.sequences = self.batch if sequences is None else sequences
        self.query_count = count_segments(self.queries, sequences, self.segment)
        self.key_count = count_segments(self.keys, sequences, self.segment)
        self.total_shape = self.sequences * self.states, self.width * (self.v_dim + 1)

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

    def operands(self, role: str, pairs: int) -> list[tuple[str, Sequence[int], torch.dtype]]:
        """Return the arrays of rotated and of other features, which chunks that are computed apart visit.

        Keys without rotated pairs are stored once.
        """
        rows = self.heads * self.queries if role == "q" else self.kv_heads * self.keys
        rows *= self.batch * self.apart
        twice = self.normalize and (role == "q" or pairs > 0)
        return [
            (f"rotated_{role}", (rows, 2 * self.half), self.memory),
            (f"mapped_{role}", (rows * twice, 2 * self.half), self.memory),
        ]

    def scratch(self, count: int) -> list[tuple[str, Sequence[int], torch.dtype]]:
        """Return the arrays that only the kernels of one pass need.

        The last one has the sums after all rows, if the call does not return them.
        """
        owners = self.batch * self.states
        size = 2 * self.half * (self.v_dim + 1)
        return [
            ("sums", (self.directions * owners * count, size), torch.float32),
            ("fade", (owners * count if self.decay else 0,), torch.float32),
            ("factors", (self.heads if self.band else 0, self.line), torch.float32),
            ("after", self.total_shape, torch.float32),
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

    has_before: bool
    dtype: torch.dtype
    kind: Any
    precision: str
    device: torch.device
    least: float
    maps: tuple[int, int]
    features: tuple[int, int, int, bool, bool]
    strides: dict[str, tuple[int, ...]]
    decay_strides: tuple[int, ...]
    tables: list[tuple[int, int]]
    same: bool
    kept: Arena
    forward_scratch: Arena
    backward_scratch: Arena
    out_shape: tuple[int, ...]
    like_q: bool
    forward_names: tuple[str, ...]
    backward_names: tuple[str, ...]
    direct: bool
    launches: dict[str, list[tuple[Launch, Callable[[Sequence[Any]], tuple[Any, ...]]]]]

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
        self.has_before = x.before is not None
        self.dtype, (self.kind, self.precision), self.device = x.v.dtype, KINDS[x.v.dtype], x.v.device
        self.least = SMALLEST if self.weighted else 0.0
        self.maps = FeatureMap[maps[0]].value, FeatureMap[maps[1]].value
        pairs = 0 if x.q_cos is None else x.q_cos.shape[-1]
        # Without rotation, neighbours are paired, because they are read without gaps.
        interleaved = layout.interleaved or not pairs
        # The interpreter has no registers, and no assembly.
        keeps = self.tile.keeps and not INTERPRETED
        self.features = (self.width, pairs, layout.start if pairs else 0, interleaved, keeps)
        self.strides = {name: tuple(getattr(x, name).stride()[:3]) for name in "qkv"}
        self.decay_strides = (0, 0, 0)
        if x.decay is not None:
            steps = x.decay.stride()
            self.decay_strides = tuple(0 if n == 1 else step for n, step in zip(x.decay.shape, steps, strict=True))
        self.tables = [(0, 0) if cos is None else table_strides(cos) for cos in (x.q_cos, x.k_cos)]
        # Whether a row of queries has the cos and sin of the keys that it reads.
        self.same = same and causal and self.tables[0][1] == 0
        self.kept = self.saved()
        self.forward_scratch = Arena([*self.operands("k", pairs), *self.scratch(self.key_count)])
        rows = self.batch * self.heads * self.queries if self.normalize else 0
        sums = [(f"behind_{name}", shape, dtype) for name, shape, dtype in self.sums(self.query_count)]
        arrays = *sums, *self.operands("q", pairs), *self.operands("k", pairs), *self.scratch(self.query_count)
        self.backward_scratch = Arena([("weight", (rows,), torch.float32), *arrays])
        self.out_shape = self.batch, self.heads, self.queries, self.v_dim
        # `empty_like` takes less time than `empty`.
        self.like_q = x.q.is_contiguous() and x.q.shape == self.out_shape and x.q.dtype == self.dtype
        arrays = *_INPUTS, *self.kept.offsets
        self.forward_names = *arrays, *self.forward_scratch.offsets, "out"
        self.backward_names = (
            *arrays, *self.backward_scratch.offsets, "cotangent", "out", "last", "of_q", "of_k", "of_v",
            "of_far", "of_factors",
        )  # fmt: skip
        # Whether the kernels can read all tensors of a call as they are.
        self.direct = False
        self.launches = {}

    def plan(self, x: Tensor, cu_seqlens: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        """Return where the segments of packed sequences begin, and the first segment of each sequence."""
        if cu_seqlens is None:
            return None, None
        plan = Plan.of(x, cu_seqlens, self.segment)
        return plan.begins, plan.starts

    def launch(self, kernels: str, names: Sequence[str], addresses: Sequence[int], tensors: Callable[[], Any]) -> None:
        """Launch kernels on the current stream of the device, which is the current one.

        Args:
            kernels: Names of the launches, keys of `_ARGUMENTS`, separated by commas. What follows a colon
                distinguishes launches of the same kernel.
            names: Names of all arrays of the pass.
            addresses: Their addresses, and the numbers among them.
            tensors: Returns the same as tensors, for first launches.
        """
        launches = self.launches.get(kernels)
        if launches is None:
            places, arrays = {name: i for i, name in enumerate(names)}, dict(zip(names, tensors(), strict=True))
            launches = []
            for kernel, _, variant in (name.partition(":") for name in kernels.split(",")):
                make: Callable[..., Launch] = getattr(self, f"_{kernel}")
                pick = itemgetter(*(places[name] for name in _ARGUMENTS[kernel].split()))
                launches.append((make(arrays, variant), pick))
            # Stored when it is complete: other threads read it, and an interruption leaves nothing behind.
            self.launches[kernels] = launches
        stream = current_stream(self.device)
        for launch, pick in launches:
            if not launch.by_address(stream, pick(addresses)):
                launch(self.device, *pick(tensors()))

    def forward(
        self, x: Tensors, at: Sequence[int], cu_seqlens: Tensor | None, *, sums: bool = True
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Return the outputs, the sums after the last key in flat form if `sums`, and what the backward needs."""
        device = self.device
        begins, starts = self.plan(x.k, cu_seqlens)
        saved = empty(self.kept.length, dtype=torch.float32, device=device)
        scratch = empty(self.forward_scratch.length, dtype=torch.float32, device=device)
        total = empty(self.total_shape, dtype=torch.float32, device=device) if sums else None
        if self.packed:
            # No kernel writes the outputs of tokens after the last packed sequence.
            out = zeros(self.out_shape, dtype=self.dtype, device=device)
        else:
            out = empty_like(x.q) if self.like_q else empty(self.out_shape, dtype=self.dtype, device=device)
        addresses = [
            0, *at, x.q_row, x.k_row, *_addresses(begins, starts), *self.kept.addresses(saved),
            *self.forward_scratch.addresses(scratch, total), out.data_ptr(),
        ]  # fmt: skip

        def tensors() -> list[Any]:
            arrays = *self.kept.views(saved), *self.forward_scratch.views(scratch, total)
            return _filled([None, *x, begins, starts, *arrays, out], out)

        self.launch("sum_keys,scan_keys,values", self.forward_names, addresses, tensors)
        return out, total, saved

    def backward(
        self, x: Tensors, at: Sequence[int], cu_seqlens: Tensor | None, cotangent: Tensor, out: Tensor, saved: Tensor,
        last: Tensor | None, *, learned: bool = False, sums: bool = True,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:  # fmt: skip
        """Return the gradients of q, k, v, of the initial sums if `sums`, and of the band's logarithms if `learned`."""
        device = self.device
        begins, starts = self.plan(x.k, cu_seqlens)
        scratch = empty(self.backward_scratch.length, dtype=torch.float32, device=device)
        of_before = empty(self.total_shape, dtype=torch.float32, device=device) if sums else None
        of_q = _like(x.q, self.packed)
        if self.share == 1:
            of_k, of_v = _like(x.k, self.packed), _like(x.v, self.packed)
        else:
            # Each query head has sums of its own, and so a gradient of its key head.
            make, shape = zeros if self.packed else empty, (self.batch, self.states, self.keys)
            of_k = make((*shape, self.width), dtype=torch.float32, device=device)
            of_v = make((*shape, self.v_dim), dtype=torch.float32, device=device)
        of_far = of_factors = None
        if learned and self.band:
            # The kernel stores nothing for keys after causal queries.
            of_far = zeros((*self._far_shape, 2), dtype=torch.float32, device=device)
            of_factors = empty(self._factors_shape, dtype=torch.float32, device=device)
        addresses = [
            0, *at, x.q_row, x.k_row, *_addresses(begins, starts), *self.kept.addresses(saved),
            *self.backward_scratch.addresses(scratch, of_before), cotangent.data_ptr(), out.data_ptr(),
            0 if last is None else last.data_ptr(), of_q.data_ptr(), of_k.data_ptr(), of_v.data_ptr(),
            *_addresses(of_far, of_factors),
        ]  # fmt: skip

        def tensors() -> list[Any]:
            arrays = *self.kept.views(saved), *self.backward_scratch.views(scratch, of_before)
            gradients = of_q, of_k, of_v, of_far, of_factors
            return _filled([None, *x, begins, starts, *arrays, cotangent, out, last, *gradients], out)

        self.launch(_BACKWARD[last is not None, of_far is not None], self.backward_names, addresses, tensors)
        of_band = None
        if of_far is not None and of_factors is not None:
            of_band = band_gradient(of_factors, of_far.sum((0, 1)), self.band)
        if self.share > 1:
            grouped = (y.unflatten(1, (self.kv_heads, self.share)).sum(2) for y in (of_k, of_v))
            of_k, of_v = (y.to(self.dtype) for y in grouped)
        return of_q, of_k, of_v, of_before, of_band

    @property
    def _far_shape(self) -> tuple[int, ...]:
        """Lane blocks and chunks, then batch, then heads: the order of the programs of `read_queries`."""
        blocks = -(-self.half // self.tile.features.lanes)
        return blocks * self.query_count * self.chunks, self.batch, self.heads

    @property
    def _factors_shape(self) -> tuple[int, ...]:
        """Parts into which chunks are summed, batch, heads, tiles, queries and keys."""
        programs = self.batch * self.heads * self.tiles
        parts = max(1, min(_ENOUGH_PROGRAMS // programs, self.query_count * self.chunks))
        return parts, self.batch, self.heads, self.tiles, self.chunk, self.step

    def _sum_keys(self, arrays: dict[str, Any], variant: str) -> Launch:
        return self._summing("k", arrays["v"], (0, 0, 0), self.key_count)

    def _sum_queries(self, arrays: dict[str, Any], variant: str) -> Launch:
        return self._summing("q", arrays["cotangent"], arrays["out"].stride()[:3], self.query_count)

    def _summing(self, role: str, z: Tensor, out_strides: Sequence[int], count: int) -> Launch:
        block, queries, owners = self.tile.sums, role == "q", self.batch * self.states
        lane_blocks, column_blocks = -(-self.half // block.lanes), -(-self.v_dim // block.columns)
        heads, share, group = (self.heads, 1, self.group) if queries else (self.kv_heads, self.share, 1)
        numbers = (
            *self.strides[role], *z.stride()[:3], *out_strides, *self.decay_strides, *self.tables[not queries],
            (self.queries if queries else self.keys), owners, count, heads, self.scale,
        )  # fmt: skip
        constants = {
            "HEADS": self.states, "GROUP": group, "SHARE": share, "FEATURES": self.features, "V_DIM": self.v_dim,
            "MAP": self.maps[not queries], "QUERIES": queries, "NORMALIZED": self.normalize, "DECAY": self.decay,
            "DIRECTIONS": self.directions, "APART": self.apart, "BAND": self.band, "READERS": self.group,
            "PACKED": self.packed, "SEGMENT": self.segment, **block.constants(self.chunk),
            "LANE_BLOCKS": lane_blocks, "KIND": self.kind, "PRECISION": self.precision,
        }  # fmt: skip
        grid = owners * count, lane_blocks * column_blocks, 1
        return Launch(sum_segments, grid, numbers, constants, *block.options())

    def _scan_keys(self, arrays: dict[str, Any], variant: str) -> Launch:
        return self._scanning("k", self.key_count, given=self.has_before)

    def _scan_queries(self, arrays: dict[str, Any], variant: str) -> Launch:
        return self._scanning("q", self.query_count, given=variant != "")

    def _scanning(self, role: str, count: int, *, given: bool) -> Launch:
        size = 2 * self.half * (self.v_dim + 1)
        # Small programs if there are few sums, so that there are more programs.
        wide = 1024 if size > 8192 else 256
        constants = {
            "FEATURES": self.features, "V_DIM": self.v_dim, "HAS_BEFORE": given, "DECAYS": self.decay != 0,
            "PACKED": self.packed, "DIRECTIONS": self.directions, "REVERSE": int(role == "q"), "ALL": self.all,
            "WIDTH": wide,
        }  # fmt: skip
        grid = self.sequences * self.states, -(-size // wide), self.directions
        return Launch(run_totals, grid, (self.states, count), constants, 4 if wide > 256 else 2)

    def _reading(self, role: str, tile: Block) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the numbers from the strides of the decay on, and the constants after the heads, of reading kernels.

        Rows x have this role, and rows y are the other side.
        """
        x_side, queries = 0 if role == "q" else 1, role == "q"
        heads = (self.heads, self.kv_heads) if queries else (self.kv_heads, self.heads)
        count = self.query_count if queries else self.key_count
        numbers = (
            *self.decay_strides, *self.tables[x_side], *self.tables[1 - x_side], self.queries if queries else self.keys,
            self.batch * (self.heads if queries else self.states), count, self.batch * self.states * count, *heads,
        )  # fmt: skip
        side = 0 if not self.causal else -1 if queries else 1
        constants = {
            "FEATURES": self.features, "V_DIM": self.v_dim, "X_MAP": self.maps[x_side], "Y_MAP": self.maps[1 - x_side],
            "NORMALIZED": self.normalize, "APART": self.apart, "SIDE": side, "DECAY": self.decay, "BAND": self.band,
            "PACKED": self.packed, "SEGMENT": self.segment, **tile.constants(self.chunk), "KIND": self.kind,
            "PRECISION": self.precision,
        }  # fmt: skip
        return numbers, constants

    def programs(self, heads: int, count: int) -> int:
        """Return the number of programs that compute all rows of `count` segments."""
        return self.batch * heads * count * (self.chunks if self.apart else 1)

    def _values(self, arrays: dict[str, Any], variant: str) -> Launch:
        block = self.tile.values
        numbers, constants = self._reading("q", block)
        strides = *self.strides["q"], *self.strides["k"], *self.strides["v"], *arrays["out"].stride()[:3]
        heads = {"X_HEADS": self.heads, "X_GROUP": self.group, "Y_SHARE": self.share}
        grid = self.programs(self.heads, self.query_count), -(-self.v_dim // block.columns), 1
        numbers = *strides, *numbers, self.scale, self.least
        return Launch(read_values, grid, numbers, heads | constants | {"SAME": self.same}, *block.options())

    def _queries(self, arrays: dict[str, Any], variant: str) -> Launch:
        block = self.tile.features
        numbers, constants = self._reading("q", block)
        strides = (
            *self.strides["q"], *self.strides["k"], *self.strides["v"], *arrays["cotangent"].stride()[:3],
            *arrays["of_q"].stride()[:3],
        )  # fmt: skip
        heads = {"X_HEADS": self.heads, "X_GROUP": self.group, "Y_SHARE": self.share}
        grid = self.programs(self.heads, self.query_count), -(-self.half // block.lanes), 1
        constants = heads | constants | {"LEARNED": variant != ""}
        return Launch(read_queries, grid, (*strides, *numbers, self.scale), constants, *block.options())

    def _keys(self, arrays: dict[str, Any], variant: str) -> Launch:
        block, narrow = self.tile.keys, self.tile.values
        lane_blocks, column_blocks = -(-self.half // block.lanes), -(-self.v_dim // narrow.columns)
        if self.apart and self.tile.together:
            lane_blocks = 0
        numbers, constants = self._reading("k", block)
        strides = (
            *self.strides["k"], *self.strides["q"], *self.strides["v"], *arrays["cotangent"].stride()[:3],
            *arrays["of_k"].stride()[:3], *arrays["of_v"].stride()[:3],
        )  # fmt: skip
        heads = {"X_HEADS": self.states, "Y_GROUP": self.group, "X_SHARE": self.share}
        constants = heads | constants | {
            "SAME": self.same, "LANE_BLOCKS": lane_blocks, "ALL_LANES": narrow.lanes, "FEW_COLUMNS": narrow.columns,
        }  # fmt: skip
        grid = self.programs(self.states, self.key_count), lane_blocks + column_blocks, 1
        return Launch(read_keys, grid, (*strides, *numbers, self.scale), constants, *block.options())

    def _factors(self, arrays: dict[str, Any], variant: str) -> Launch:
        block, owners = self.tile.values, self.batch * self.heads
        numbers = (
            *self.strides["q"], *self.strides["v"], *arrays["cotangent"].stride()[:3], *self.tables[0], self.queries,
            owners, self.query_count, self.heads, self.kv_heads, self.scale,
        )  # fmt: skip
        constants = {
            "X_HEADS": self.heads, "X_GROUP": self.group * self.share, "FEATURES": self.features, "V_DIM": self.v_dim,
            "X_MAP": self.maps[0], "NORMALIZED": self.normalize, "BAND": self.band, "PACKED": self.packed,
            "SEGMENT": self.segment, **block.constants(self.chunk), "COLUMNS": self.tile.features.columns,
            "KIND": self.kind, "PRECISION": self.precision,
        }  # fmt: skip
        grid = owners, self.tiles, self._factors_shape[0]
        # All rows are loaded in its loop: those of more than one stage would not fit into shared memory.
        return Launch(read_factors, grid, numbers, constants, block.warps, 1)


def _addresses(*tensors: Tensor | None) -> list[int]:
    return [0 if tensor is None else tensor.data_ptr() for tensor in tensors]


def _filled(tensors: Sequence[Any], other: Tensor) -> list[Any]:
    """Return the tensors, and another one for each that is None, which the kernels then do not read."""
    return [other if tensor is None else tensor for tensor in tensors]


def _like(x: Tensor, clear: bool) -> Tensor:
    """Return memory for a gradient of x, with its strides if features are adjacent; zeros if `clear`."""
    out = zeros_like(x) if clear else empty_like(x)
    # The strides of overlapping rows are not kept.
    return out if out.stride(3) == 1 else out.contiguous()
