"""Relative encodings, which implement the `bias` hook: they add one number per query, key and head to the score.

Positions of queries and keys are [q] and [k], or [batch, q] and [batch, k]. `score_mod` adds the same numbers inside
FlexAttention, one score at a time.
"""

from collections.abc import Callable
from typing import ClassVar, cast

import torch
from torch import Tensor, nn

from ropewalk.errors import RopewalkError, require_count, require_flag, warn
from ropewalk.kernels.constructors import constant, empty, placed
from ropewalk.kernels.torch_internals import constant_to_compiler
from ropewalk.nn.encodings.base import DistanceBias, Encoding, ScoreMod
from ropewalk.nn.position_checks import can_read_values, check_finite, check_ids
from ropewalk.theory import alibi_slopes, t5_buckets

__all__ = ["AlibiBias", "T5Bias", "check_causal"]

# The largest max_distance, longer than any context. The buckets of all distances are stored.
FARTHEST = 1 << 20

# Number of copies of T5's weights in `score_mod_once`, and the largest number of elements of all copies of one head.
COPIES, MOST_NUMBERS = 64, 1 << 16


class T5Bias(Encoding):
    """One learned number per bucket of distances and head, added to the scores (T5, 1910.10683, section 2.1).

    Each small distance has its own bucket. Larger distances share buckets whose width grows logarithmically, and all
    distances from `max_distance` on share the last bucket. Causal models use all buckets for the keys before a query.
    Other models, such as T5's encoder, use half of them per side. Scores are not divided by sqrt(head_dim), as in T5:
    `scale` is 1.

    Relative. Defined at every whole position. Linear attention multiplies its terms by the exponential of the bias,
    which is constant from the first distance of the last bucket on. The parameter is `weight` [num_buckets, num_heads],
    as in T5's checkpoints, and is initialised to 0. Differs from T5's code, which computes a float32 logarithm: buckets
    are those of `reference.t5_bucket`, whose edges are exact integers.

    Args:
        num_heads: Number of query heads.
        causal: Whether keys after a query are hidden.
        num_buckets: Number of buckets.
        max_distance: Distance at which the last bucket starts, at the latest.

    Attributes:
        window: First distance of the last bucket: 113 with the defaults and causal=True, 91 with causal=False.

    Raises:
        RopewalkError: If an argument is invalid.

    >>> t5 = T5Bias(1, causal=True)
    >>> _ = t5.load_state_dict({"weight": torch.arange(32.0)[:, None]})  # bucket b gives b
    >>> t5.bias(torch.tensor([200]), torch.tensor([200, 185, 184, 136, 0, 201])).tolist()
    [[[0.0, 15.0, 16.0, 26.0, 31.0, 0.0]]]
    """

    name = "t5"
    held: ClassVar[tuple[str, ...]] = ("_buckets",)
    # More stages prefetch the lookups of later scores into shared memory, where they may not fit.
    flex_options: ClassVar[dict[str, object] | None] = {"num_stages": 1}

    def __init__(self, num_heads: int, *, causal: bool = False, num_buckets: int = 32, max_distance: int = 128) -> None:
        super().__init__()
        self.num_heads: int = _heads(num_heads, "T5Bias")
        self.causal: bool = require_flag(causal, asked="T5Bias(causal=...)")
        self.max_distance: int = require_count(max_distance, asked="T5Bias(max_distance=...)", do="T5 uses 128")
        if self.max_distance > FARTHEST:
            raise RopewalkError(
                asked="T5Bias(max_distance=...)",
                expected=f"at most {FARTHEST}",
                got=f"{max_distance}",
                do="T5 uses 128; all distances from max_distance on share the last bucket",
            )
        distances = range(-self.max_distance, self.max_distance + 1)
        # The bucket of key - query, from -max_distance to max_distance.
        buckets = t5_buckets(distances, causal=causal, num_buckets=num_buckets, max_distance=self.max_distance)
        self._buckets: Tensor = constant(buckets)
        sides = buckets[self.max_distance :: -1].tolist(), buckets[self.max_distance :].tolist()
        # The first distance from which no key has another bucket, in both directions.
        self.window: int = max(side.index(side[-1]) for side in sides)
        self.num_buckets: int = int(num_buckets)
        self.weight: nn.Parameter = nn.Parameter(torch.empty(self.num_buckets, self.num_heads))
        self.reset_parameters()

    @property
    def scale(self) -> float:
        return 1.0

    def reset_parameters(self) -> None:
        """Set all numbers to 0, as required after `to_empty`."""
        nn.init.zeros_(self.weight)

    def bias(self, q_positions: Tensor | None, k_positions: Tensor | None) -> Tensor:
        q, k = _pair(q_positions, k_positions, "T5Bias.bias", whole=True, parameter=self.weight)
        distance = (k.unsqueeze(-2) - q.unsqueeze(-1)).clamp(-self.max_distance, self.max_distance)
        bucket = placed(self._buckets, q.device)[distance + self.max_distance]
        *batch, queries, keys = bucket.shape
        # One copy of the numbers per query: gradients are summed per query first, and then over queries. With a single
        # copy a GPU adds them one after the other, most of them to the last bucket: 45 times slower for 4096 tokens.
        numbers = self.weight.t().unsqueeze(1).expand(*batch, self.num_heads, queries, self.num_buckets)
        return numbers.gather(-1, bucket.unsqueeze(-3).expand(*batch, self.num_heads, queries, keys))

    def distance_bias(self) -> DistanceBias:
        near = slice(self.max_distance - self.window, self.max_distance + self.window + 1)
        return DistanceBias(numbers=self.weight[placed(self._buckets, self.weight.device)[near]].t())

    def score_mod(self, q_positions: Tensor, k_positions: Tensor) -> ScoreMod:
        q, k = _pair(q_positions, k_positions, "T5Bias.score_mod", whole=True, parameter=self.weight)
        q_at, k_at, farthest = _reader(q), _reader(k), self.max_distance
        weight, buckets = self.weight, placed(self._buckets, q.device)

        def add(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, k_idx: Tensor) -> Tensor:
            distance = (k_at(b, k_idx) - q_at(b, q_idx)).clamp(-farthest, farthest) + farthest
            return score + weight[buckets[distance], h].to(score.dtype)

        return add

    def score_mod_once(self, q_positions: Tensor, k_positions: Tensor) -> ScoreMod:
        if len(self._buckets) > MOST_NUMBERS:
            return self.score_mod(q_positions, k_positions)
        q, k = _pair(q_positions, k_positions, "T5Bias.score_mod", whole=True, parameter=self.weight)
        q_at, k_at, farthest = _reader(q), _reader(k), self.max_distance
        # Indexed by distance instead of bucket, for one lookup per score. With gradients there are several copies, and
        # query i uses copy i % copies: a GPU adds gradients to one address one after the other.
        numbers = self.weight[placed(self._buckets, q.device)].t()
        learns = torch.is_grad_enabled() and self.weight.requires_grad
        copies = min(COPIES, MOST_NUMBERS // numbers.shape[1]) if learns else 1
        numbers = numbers.unsqueeze(1).expand(-1, copies, -1).contiguous()

        def add(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, k_idx: Tensor) -> Tensor:
            distance = (k_at(b, k_idx) - q_at(b, q_idx)).clamp(-farthest, farthest) + farthest
            return score + numbers[h, q_idx % copies, distance].to(score.dtype)

        return add

    def extra_repr(self) -> str:
        buckets = f"num_buckets={self.num_buckets}, max_distance={self.max_distance}"
        return f"{self.num_heads}, causal={self.causal}, {buckets}"


class AlibiBias(Encoding):
    """-slope_h |m - n|, added to the score of query m and key n (ALiBi, 2108.12409, section 3).

    Slopes are 2^(-8h/n) for heads h = 1 .. n if n is a power of 2. Otherwise they are the slopes of the next lower
    power of 2, followed by every other slope of the next higher one. They are fixed: there are no parameters.

    Relative. Defined at every position, also fractional ones. In linear attention it is a decay of the sums.
    Differs from the paper: |m - n| also gives future keys a distance, for attention that is not causal. The bias is
    float32, or float64 after the module is cast to float64. Other casts do not change it.

    Args:
        num_heads: Number of query heads.

    Raises:
        RopewalkError: If `num_heads` is not an integer of at least 1.

    >>> AlibiBias(2).bias(torch.tensor([2]), torch.arange(4)).tolist()  # slopes 1/16 and 1/256
    [[[-0.125, -0.0625, -0.0, -0.0625]], [[-0.0078125, -0.00390625, -0.0, -0.00390625]]]
    """

    name = "alibi"
    held: ClassVar[tuple[str, ...]] = ("_slopes",)

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self.num_heads: int = _heads(num_heads, "AlibiBias")
        self._slopes: Tensor = constant(_slopes(self.num_heads), torch.float64)
        self._dtype: torch.dtype = torch.float64 if torch.get_default_dtype() == torch.float64 else torch.float32

    def bias(self, q_positions: Tensor | None, k_positions: Tensor | None) -> Tensor:
        q, k = _pair(q_positions, k_positions, "AlibiBias.bias")
        distance = (k.unsqueeze(-2) - q.unsqueeze(-1)).abs().to(self._dtype)
        return distance.unsqueeze(-3) * self._falling(q.device)[:, None, None]

    def distance_bias(self) -> DistanceBias:
        return DistanceBias(slopes=placed(self._slopes, self._slopes.device))

    def score_mod(self, q_positions: Tensor, k_positions: Tensor) -> ScoreMod:
        q, k = _pair(q_positions, k_positions, "AlibiBias.score_mod")
        q_at, k_at, falling = _reader(q), _reader(k), self._falling(q.device)

        def add(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, k_idx: Tensor) -> Tensor:
            distance = (k_at(b, k_idx) - q_at(b, q_idx)).abs().to(falling.dtype)
            return score + (distance * falling[h]).to(score.dtype)

        return add

    def _falling(self, device: torch.device) -> Tensor:
        """Return -slope_h [heads] in the dtype of the bias. Casts before it moves, for devices without float64."""
        return -placed(self._slopes, self._slopes.device).to(self._dtype).to(device)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "AlibiBias":
        super()._apply(fn, recurse)
        cast = fn(empty(0, dtype=self._dtype, device="cpu")).dtype
        self._dtype = torch.float64 if cast == torch.float64 else torch.float32
        return self

    def extra_repr(self) -> str:
        return f"{self.num_heads}"


def check_causal(encoding: object, causal: bool, *, layer: str) -> None:
    """Raise or warn if T5's bias contradicts its layer. Other encodings do not distinguish causal models.

    Args:
        encoding: The encoding of the layer.
        causal: Whether the layer hides the keys after a query.
        layer: Name of the layer, for the error.

    Raises:
        RopewalkError: If the encoding is causal and the layer is not: all keys after a query would share one bucket.

    Warns:
        RopewalkWarning: If the layer is causal and the encoding is not: half of the buckets would never be used.

    >>> check_causal(T5Bias(1, causal=True), True, layer="a doctest")
    """
    if not isinstance(encoding, T5Bias) or encoding.causal == causal:
        return
    name = f"{type(encoding).__name__}(causal={encoding.causal})"
    asked, expected = f"{layer}(causal={causal}, encoding={name})", "the same causal in both"
    do = f'create the encoding with causal={causal}: encoding("t5", dim=..., num_heads=..., causal={causal})'
    if encoding.causal:
        got = "a bias with one number for all keys after a query, in a layer in which these keys are visible"
        raise RopewalkError(asked=asked, expected=expected, got=got, do=do)
    got = "a bias with half of its buckets for keys after a query, which the layer hides"
    warn(asked=asked, expected=expected, got=got, do=do)


@constant_to_compiler
def _slopes(num_heads: int) -> tuple[float, ...]:
    return tuple(alibi_slopes(num_heads).tolist())


def _heads(num_heads: object, name: str) -> int:
    return require_count(num_heads, asked=f"{name}(num_heads)", do="pass the number of query heads")


def _pair(
    q_positions: Tensor | None,
    k_positions: Tensor | None,
    asked: str,
    *,
    whole: bool = False,
    parameter: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Check the positions of queries and keys, and convert integers to int64: unsigned distances would wrap."""
    q_positions = _checked(q_positions, f"{asked}(q_positions)", whole)
    k_positions = _checked(k_positions, f"{asked}(k_positions)", whole)
    devices = {x.device for x in (q_positions, k_positions, parameter) if x is not None}
    if len(devices) > 1:
        raise RopewalkError(
            asked=f"{asked}(q_positions, k_positions)",
            expected="positions on one device, which is that of the parameters if there are any",
            got=f"q_positions on {q_positions.device}, k_positions on {k_positions.device}"
            + ("" if parameter is None else f", parameters on {parameter.device}"),
            do="create them on that device, or move them once",
        )
    rows = [ids.shape[0] for ids in (q_positions, k_positions) if ids.dim() == 2]
    if len(rows) == 2 and rows[0] != rows[1] and 1 not in rows:
        raise RopewalkError(
            asked=f"{asked}(q_positions, k_positions)",
            expected="[q] and [k], or [batch, q] and [batch, k] with the same batch",
            got=f"{list(q_positions.shape)} and {list(k_positions.shape)}",
            do="pass positions for each sequence of the batch",
        )
    q, k = (ids if ids.is_floating_point() else ids.to(torch.int64) for ids in (q_positions, k_positions))
    return q, k


def _checked(ids: Tensor | None, asked: str, whole: bool) -> Tensor:
    # check_ids rejects None, like any object that is not a tensor.
    positions = cast(Tensor, ids)
    check_ids(positions, asked=asked, whole=whole)
    if can_read_values(positions):
        check_finite(positions, asked=asked)
    return positions


def _reader(ids: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a function of indices (b, i), as FlexAttention passes them, to the position of token i of sequence b."""
    if ids.dim() == 2 and ids.shape[0] > 1:
        return lambda b, i: ids[b, i]
    row = ids.reshape(-1)
    return lambda b, i: row[i]
