"""Linear attention by torch operations: for any device and any derivative.

Blocks of tokens are processed one after the other, so that temporaries do not grow with the length. A compiled graph,
which is for every length, has one block.
"""

import itertools
from collections.abc import Callable, Iterator
from typing import NamedTuple, cast

import torch
from torch import Tensor

from ropewalk.kernels.constructors import arange, new_zeros
from ropewalk.kernels.linear.chunks import CHUNK, Parts, attend_parts, join_parts, sum_keys
from ropewalk.kernels.linear.feature_maps import map_features, row_shift
from ropewalk.kernels.linear.packed import attend_packed
from ropewalk.kernels.linear.weights import lead_of, reversed_weighting
from ropewalk.kernels.precision import working_dtype
from ropewalk.kernels.rotate.torch import rotate_traceable
from ropewalk.kernels.torch_internals import is_plain
from ropewalk.kernels.types import NO_WEIGHTING, Features, Layout, Side, Sums, Tables, Weighting

__all__ = ["BLOCK", "divide", "linear_attention"]

# Most chunks per block: large blocks need fewer operations, small ones less memory.
BLOCK = 16

# Rotates features: (features, tables, layout) -> rotated features.
Rotate = Callable[[Tensor, Tables, Layout], Tensor]


def _by_formula(x: Tensor, tables: Tables, layout: Layout) -> Tensor:
    return rotate_traceable(x, *tables[:2], layout, tables.row)


def linear_attention(
    q: Side,
    k: Side,
    v: Tensor,
    before: Sums | None,
    layout: Layout,
    causal: bool,
    cu_seqlens: Tensor | None = None,
    rotate: Rotate = _by_formula,
    weighting: Weighting = NO_WEIGHTING,
) -> tuple[Tensor, Sums]:
    """Return the output of linear attention, and the sums after the last key.

    Everything is computed in float32 (float64 for float64) and rounded once. Packed sequences are computed one after
    the other if the host can read their ends, and otherwise by `attend_packed`.

    Args:
        q: Queries, their feature map and tables.
        k: Keys, their feature map and tables.
        v: Values [batch, kv_heads, seq, v_dim].
        before: Sums over earlier keys, or None.
        layout: Layout of the rotation.
        causal: Whether a query reads only keys up to its own index.
        cu_seqlens: Ends of packed sequences [sequences + 1], starting with 0.
        rotate: Function that rotates features.
        weighting: Factors on the terms of both sums.

    Returns:
        The output [batch, heads, seq, v_dim] in the dtype of v, and the sums, with one row per packed sequence. With a
        band, the sums after a call with queries have no meaning: sum the keys by a call without queries.

    >>> x, v = torch.zeros(1, 1, 2, 2), torch.tensor([[[[1.0], [3.0]]]])
    >>> linear_attention(Side(x, "elu"), Side(x, "elu"), v, None, Layout(True, 0, -2), False)[0].flatten().tolist()
    [2.0, 2.0]
    """
    # There is no autocast for meta tensors.
    with torch.autocast("cpu" if v.is_meta else v.device.type, enabled=False):
        tokens = _Tokens(q, k, v, layout, rotate, weighting)
        if cu_seqlens is None:
            return _attend_sequence(tokens, before, causal=causal)
        if is_plain(cu_seqlens) and cu_seqlens.device.type == "cpu":
            return _attend_each(tokens, before, cu_seqlens.tolist(), causal=causal)
        # Excluded, because features of padding after the last sequence may have no finite derivative.
        queries, total = q.x.shape[2], v.shape[2]
        padding = (arange(total, device=v.device) >= cu_seqlens[-1])[:, None]
        q, k = (side._replace(x=side.x.masked_fill(padding[: side.x.shape[2]], 0.0)) for side in (q, k))
        tokens = tokens._replace(q=q, k=k)
        sides = tokens.queries(0, queries), tokens.keys(0, total), tokens.values(0, total)
        parts, after = attend_packed(*sides, before, cu_seqlens, weighting, causal=causal, chunk=CHUNK)
        return _finished(parts, weighting, v.dtype), after


class _Tokens(NamedTuple):
    """Queries, keys and values, whose features are computed when they are needed. Causal queries are the last keys."""

    q: Side
    k: Side
    v: Tensor
    layout: Layout
    rotate: Rotate
    weighting: Weighting
    reverse: bool = False

    def queries(self, start: int, stop: int) -> Features:
        return _features(self.q, start, stop, self, "q")

    def keys(self, start: int, stop: int) -> Features:
        return _features(self.k, start, stop, self, "k")

    def values(self, start: int, stop: int) -> Tensor:
        return self.flipped(self.v[:, :, self.bounds(start, stop, self.v.shape[2])]).to(working_dtype(self.v))

    def bounds(self, start: int, stop: int, length: int) -> slice:
        return slice(length - stop, length - start) if self.reverse else slice(start, stop)

    def flipped(self, x: Tensor) -> Tensor:
        return x.flip(2) if self.reverse else x

    def part(self, start: int, stop: int) -> "_Tokens":
        """Return one of several packed sequences."""
        q, k, v = self.q, self.k.part(start, stop), self.v[:, :, start:stop]
        # Keys can be without queries.
        q = q.part(start, stop) if q.x.shape[2] else q
        return self._replace(q=q, k=k, v=v, weighting=self.weighting.part(start, stop))

    def reversed(self) -> "_Tokens":
        """Return the tokens from the last to the first, with the factors of keys after a query."""
        return self._replace(reverse=True, weighting=reversed_weighting(self.weighting))


def _features(side: Side, start: int, stop: int, tokens: _Tokens, role: str) -> Features:
    length = side.x.shape[2]
    if start != 0 or stop != length:
        bounds = tokens.bounds(start, stop, length)
        side = side.part(bounds.start, bounds.stop)
    x = side.x.to(working_dtype(tokens.v))
    # What is subtracted from a query cancels only in a quotient.
    shift = row_shift(x, side.map) if role == "q" and tokens.weighting.normalize else None
    plain = map_features(x, side.map, shift)
    rotated = plain if side.tables is None else tokens.rotate(plain, side.tables, tokens.layout)
    return Features(*([tokens.flipped(plain)] * 2 if rotated is plain else map(tokens.flipped, (plain, rotated))))


def _attend_each(tokens: _Tokens, before: Sums | None, ends: list[int], *, causal: bool) -> tuple[Tensor, Sums]:
    """Compute packed sequences one after the other. NaN in one sequence cannot reach another."""
    outputs: list[Tensor] = []
    sums: list[Sums] = []
    for sequence, (start, stop) in enumerate(itertools.pairwise(ends)):
        earlier = None if before is None else Sums(*(x[sequence : sequence + 1] for x in before))
        out, after = _attend_sequence(tokens.part(start, stop), earlier, causal=causal)
        outputs.append(out)
        sums.append(after)
    (batch, heads, total, _), v = tokens.q.x.shape, tokens.v
    outputs.append(new_zeros(v, batch, heads, max(0, total - ends[-1]), v.shape[-1]))
    return torch.cat(outputs, dim=2), Sums(*(torch.cat(parts) for parts in zip(*sums, strict=True)))


def _attend_sequence(tokens: _Tokens, before: Sums | None, *, causal: bool) -> tuple[Tensor, Sums]:
    weighting, dtype = tokens.weighting, tokens.v.dtype
    weighted = weighting.decay is not None or weighting.band is not None
    if tokens.q.x.shape[2] == 0 or not (causal or weighted):
        parts, after = _attend_all(tokens, before)
    else:
        parts, after = _scan(tokens, before)
    if not causal and weighted and tokens.q.x.shape[2]:
        later, _ = _scan(tokens.reversed(), None)
        forward, backward = join_parts(parts), join_parts(later)
        below = None if forward.below is None or backward.below is None else forward.below + backward.below.flip(2)
        parts = [Parts(forward.above + backward.above.flip(2), below)]
    outputs = [_finished(part, weighting, dtype) for part in parts]
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2), after


def _blocks(length: int, weighting: Weighting) -> Iterator[tuple[int, int]]:
    """Yield the first token and the end of each block. Less than a chunk at the end is a block of its own.

    There are several blocks, so that temporaries are at most twice q, k and v: more with factors, which need more.
    """
    if torch.compiler.is_compiling() or length == 0:
        yield 0, length
        return
    whole = length - length % CHUNK
    least = 6 if weighting.band is not None else 3 if weighting.decay is not None else 2
    size = CHUNK * max(1, min(BLOCK, whole // CHUNK // least))
    yield from itertools.pairwise(sorted({*range(0, whole, size), 0, whole, length}))


def _sum_all(tokens: _Tokens, before: Sums | None, stop: int) -> Sums:
    """Return the sums over the keys 0 .. stop-1."""
    for start, end in _blocks(stop, tokens.weighting):
        part = tokens.weighting.part(start, end)
        before = sum_keys(tokens.keys(start, end), tokens.values(start, end), before, part)
    return cast(Sums, before)


def _attend_all(tokens: _Tokens, before: Sums | None) -> tuple[list[Parts], Sums]:
    """Read the sums over all keys, without factors."""
    after = _sum_all(tokens, before, tokens.k.x.shape[2])
    heads = after.below.shape[1]
    group = tokens.q.x.shape[1] // heads
    parts: list[Parts] = []
    for start, end in _blocks(tokens.q.x.shape[2], tokens.weighting):
        q = Features(*(x.unflatten(1, (heads, group)).flatten(2, 3) for x in tokens.queries(start, end)))
        below = (q.plain @ after.below.unsqueeze(-1)).squeeze(-1) if tokens.weighting.normalize else None
        above, below = (
            None if x is None else x.unflatten(2, (group, end - start)).flatten(1, 2)
            for x in (q.rotated @ after.above, below)
        )
        parts.append(Parts(cast(Tensor, above), below))
    return parts, after


def _scan(tokens: _Tokens, before: Sums | None) -> tuple[list[Parts], Sums]:
    """Attend to the keys up to each query; if reversed, to the keys after it."""
    weighting, queries, keys = tokens.weighting, tokens.q.x.shape[2], tokens.k.x.shape[2]
    lead = keys - queries
    near = 0 if weighting.band is None else lead_of(weighting.band, CHUNK)
    first = max(0, lead - near)
    sums = _sum_all(tokens, before, first) if first else before
    parts: list[Parts] = []
    for start, end in _blocks(queries, weighting):
        first = max(0, lead + start - near)
        sides = tokens.queries(start, end), tokens.keys(first, lead + end), tokens.values(first, lead + end)
        part = weighting.part(first, lead + end)
        each, sums = attend_parts(*sides, sums, part, strict=tokens.reverse, chunk=CHUNK)
        parts.append(each)
    return parts, cast(Sums, sums)


def _finished(parts: Parts, weighting: Weighting, dtype: torch.dtype) -> Tensor:
    if parts.below is None:
        return (parts.above if weighting.scale == 1.0 else parts.above * weighting.scale).to(dtype)
    smallest = 0.0
    if weighting.decay is not None or weighting.band is not None:
        smallest = torch.finfo(parts.below.dtype).tiny / torch.finfo(parts.below.dtype).eps
    return divide(parts.above, parts.below.unsqueeze(-1), smallest).to(dtype)


def divide(numerator: Tensor, denominator: Tensor, smallest: float = 0.0) -> Tensor:
    """Return the quotient, and 0 with zero gradients if the denominator is at most `smallest`.

    It is 0 if all features of visible keys are 0. With a decay or a bias, small denominators are those of keys whose
    weights underflow, or would in the derivative of the quotient.

    >>> divide(torch.tensor([6.0, 0.0]), torch.tensor([2.0, 0.0])).tolist()
    [3.0, 0.0]
    """
    return numerator / torch.where(denominator.abs() <= smallest, torch.inf, denominator)
