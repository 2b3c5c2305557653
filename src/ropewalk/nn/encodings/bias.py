"""Relative encodings, by the `bias` hook: a number for each query, key and head is added to their score.

Queries and keys stand at [q] and [k], or at [batch, q] and [batch, k]. `score_mod` adds the same numbers inside
FlexAttention, one score at a time.
"""

from collections.abc import Callable
from typing import ClassVar, cast

import torch
from torch import Tensor, nn

from ropewalk.errors import RopewalkError, require_count, require_flag
from ropewalk.kernels.constructors import constant, empty, placed
from ropewalk.kernels.torch_internals import constant_to_compiler
from ropewalk.nn.encodings.base import Encoding, ScoreMod
from ropewalk.nn.position_checks import check_finite, check_ids, may_look
from ropewalk.theory import alibi_slopes, t5_buckets

__all__ = ["AlibiBias", "T5Bias"]

# No context is this long, and the buckets of all distances are kept.
FARTHEST = 1 << 20

# Copies of T5's numbers in `score_mod_once`, and how many numbers of a head all copies may have.
COPIES, MOST_NUMBERS = 64, 1 << 16


class T5Bias(Encoding):
    """One learned number per bucket of distances and head, added to the scores (T5, 1910.10683, section 2.1).

    Near distances have a bucket each, farther ones share buckets that widen with the logarithm, and everything from
    `max_distance` on is in the last. Causal models have num_buckets for the keys before a query; others, like T5's
    encoder, have half of them for each side. Relative; defined at every whole position; not for linear attention, which
    has no scores. Scores are not divided by sqrt(head_dim), which T5 leaves out: `scale` is 1.

    The parameter is `weight` [num_buckets, num_heads], as T5's checkpoints hold it, and starts at 0. Differs from T5's
    code, which takes a float32 logarithm: buckets are `reference.t5_bucket`'s, whose edges are found in whole numbers.

    >>> t5 = T5Bias(1, causal=True)
    >>> _ = t5.load_state_dict({"weight": torch.arange(32.0)[:, None]})  # bucket b gives b
    >>> t5.bias(torch.tensor([200]), torch.tensor([200, 185, 184, 136, 0, 201])).tolist()
    [[[0.0, 15.0, 16.0, 26.0, 31.0, 0.0]]]
    """

    name = "t5"
    linear = False
    held: ClassVar[tuple[str, ...]] = ("_buckets",)
    # Else what is looked up for each score is kept in shared memory for scores to come, and may not fit there.
    flex_options: ClassVar[dict[str, object] | None] = {"num_stages": 1}

    def __init__(self, num_heads: int, *, causal: bool = False, num_buckets: int = 32, max_distance: int = 128) -> None:
        super().__init__()
        self.num_heads: int = _heads(num_heads, "T5Bias")
        self.causal: bool = require_flag(causal, asked="T5Bias(causal=...)")
        self.max_distance: int = require_count(max_distance, asked="T5Bias(max_distance=...)", do="T5 has 128")
        if self.max_distance > FARTHEST:
            raise RopewalkError(
                asked="T5Bias(max_distance=...)",
                expected=f"at most {FARTHEST}",
                got=f"{max_distance}",
                do="T5 has 128; every distance from there on shares the last bucket",
            )
        distances = range(-self.max_distance, self.max_distance + 1)
        # The bucket of key - query, from -max_distance to max_distance.
        self._buckets: Tensor = constant(
            t5_buckets(distances, causal=causal, num_buckets=num_buckets, max_distance=self.max_distance)
        )
        self.num_buckets: int = int(num_buckets)
        self.weight: nn.Parameter = nn.Parameter(torch.empty(self.num_buckets, self.num_heads))
        self.reset_parameters()

    @property
    def scale(self) -> float:
        return 1.0

    def reset_parameters(self) -> None:
        """Puts all numbers to 0, as initialisation after `to_empty` wants it."""
        nn.init.zeros_(self.weight)

    def bias(self, q_positions: Tensor | None, k_positions: Tensor | None) -> Tensor:
        q, k = _pair(q_positions, k_positions, "T5Bias.bias", whole=True, parameter=self.weight)
        distance = (k.unsqueeze(-2) - q.unsqueeze(-1)).clamp(-self.max_distance, self.max_distance)
        bucket = placed(self._buckets, q.device)[distance + self.max_distance]
        *batch, queries, keys = bucket.shape
        # A copy of the numbers per query: gradients are summed per query, and then over the queries. Into one copy
        # a GPU adds them one after the other, most of them to the last bucket: 45 times as long for 4096 tokens.
        numbers = self.weight.t().unsqueeze(1).expand(*batch, self.num_heads, queries, self.num_buckets)
        return numbers.gather(-1, bucket.unsqueeze(-3).expand(*batch, self.num_heads, queries, keys))

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
        # By distance, not by bucket: one lookup per score. And copies of it, which the queries take in turns,
        # where there are gradients: into one place a GPU adds them one after the other.
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

    Slopes are 2^(-8h/n) for heads h = 1 .. n, with n a power of 2; else those of the power of 2 below, then every other
    of the one above. They are fixed: no parameters. Relative; defined at every position, whole or not; not for linear
    attention, which has no scores. Differs from the paper: |m - n| gives future keys a distance too, for attention that
    is not causal.

    The bias is float32, or float64 once the module is made float64; no other cast touches it.

    >>> AlibiBias(2).bias(torch.tensor([2]), torch.arange(4)).tolist()  # slopes 1/16 and 1/256
    [[[-0.125, -0.0625, -0.0, -0.0625]], [[-0.0078125, -0.00390625, -0.0, -0.00390625]]]
    """

    name = "alibi"
    linear = False
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

    def score_mod(self, q_positions: Tensor, k_positions: Tensor) -> ScoreMod:
        q, k = _pair(q_positions, k_positions, "AlibiBias.score_mod")
        q_at, k_at, falling = _reader(q), _reader(k), self._falling(q.device)

        def add(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, k_idx: Tensor) -> Tensor:
            distance = (k_at(b, k_idx) - q_at(b, q_idx)).abs().to(falling.dtype)
            return score + (distance * falling[h]).to(score.dtype)

        return add

    def _falling(self, device: torch.device) -> Tensor:
        """-slope_h, [heads], in the dtype of the bias; cast before it is moved, for devices without float64."""
        return -placed(self._slopes, self._slopes.device).to(self._dtype).to(device)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "AlibiBias":
        super()._apply(fn, recurse)
        cast = fn(empty(0, dtype=self._dtype, device="cpu")).dtype
        self._dtype = torch.float64 if cast == torch.float64 else torch.float32
        return self

    def extra_repr(self) -> str:
        return f"{self.num_heads}"


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
    """The positions of queries and keys, checked; whole numbers as int64, which distances of unsigned ids need."""
    q_positions = _checked(q_positions, f"{asked}(q_positions)", whole)
    k_positions = _checked(k_positions, f"{asked}(k_positions)", whole)
    devices = {x.device for x in (q_positions, k_positions, parameter) if x is not None}
    if len(devices) > 1:
        raise RopewalkError(
            asked=f"{asked}(q_positions, k_positions)",
            expected="positions on one device, that of the parameters if there are any",
            got=f"q_positions on {q_positions.device}, k_positions on {k_positions.device}"
            + ("" if parameter is None else f", parameters on {parameter.device}"),
            do="make them there, or move them once",
        )
    rows = [ids.shape[0] for ids in (q_positions, k_positions) if ids.dim() == 2]
    if len(rows) == 2 and rows[0] != rows[1] and 1 not in rows:
        raise RopewalkError(
            asked=f"{asked}(q_positions, k_positions)",
            expected="[q] and [k], or [batch, q] and [batch, k] of one batch",
            got=f"{list(q_positions.shape)} and {list(k_positions.shape)}",
            do="give each sequence of the batch its positions",
        )
    q, k = (ids if ids.is_floating_point() else ids.to(torch.int64) for ids in (q_positions, k_positions))
    return q, k


def _checked(ids: Tensor | None, asked: str, whole: bool) -> Tensor:
    # None is rejected by the check, as everything that is no tensor.
    positions = cast(Tensor, ids)
    check_ids(positions, asked=asked, whole=whole)
    if may_look(positions):
        check_finite(positions, asked=asked)
    return positions


def _reader(ids: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    """The position of token i of sequence b, as a function of the indices that FlexAttention passes."""
    if ids.dim() == 2 and ids.shape[0] > 1:
        return lambda b, i: ids[b, i]
    row = ids.reshape(-1)
    return lambda b, i: row[i]
