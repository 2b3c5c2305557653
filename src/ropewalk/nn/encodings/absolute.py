"""Absolute encodings: they change each token alone, by a vector that depends on its position.

Most implement the `embed` hook, before the first layer: x is [batch, seq, dim], or [..., seq, dim] with the batch
first. The vector of a position is computed in float64 or in the dtype of the parameters, and the result is rounded once
to the dtype of x.

An added vector can be placed after the projections instead, by the hook `encode_heads`. Every layer adds it then, so
sines and cosines are rounded to float32 first, unless the heads are float64: a sum in float64 is several times slower.
"""

from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional

from ropewalk.errors import RopewalkError, require_choice, require_count, require_even
from ropewalk.kernels.angles.torch import angles_at
from ropewalk.kernels.constructors import arange, constant, placed
from ropewalk.nn.encodings.base import (
    Encoding,
    EncodingCache,
    check_heads,
    check_token_positions,
    check_tokens,
    head_dim_of_model,
)
from ropewalk.nn.position_checks import can_read_values
from ropewalk.nn.rotary.spec_numbers import plain_frequencies
from ropewalk.spec.frequencies import Plain

__all__ = [
    "ConcatenatedEncoding",
    "LearnedEncoding",
    "MultiplicativeEncoding",
    "PlacementName",
    "SinusoidalEncoding",
    "learned_for_model",
    "sinusoidal_for_model",
]

# What a vector p is added to: tokens before the first layer; q, k and v of every layer; q and k of every layer.
PlacementName = Literal["input", "projection", "scores"]

# Standard deviation of the initial table, as in BERT and GPT-2.
STD = 0.02


class _Added(Encoding):
    """An encoding that adds a vector p_m to each token, at one of three placements. `dim` is the width of p_m.

    Attributes:
        placement: What p_m is added to.
    """

    relative = False
    only_embeds: bool = True
    # A class attribute too: encodings that an earlier version pickled have none.
    placement: PlacementName = "input"
    dim: int

    def _place(self, placement: PlacementName, option: str) -> None:
        name = type(self).__name__
        self.placement = require_choice(placement, get_args(PlacementName), asked=f"{name}(placement=...)")
        self.only_embeds = placement == "input"
        # Not in the property: a compiled call would have to format numbers.
        self._identity: str = f"{name}({self.dim}, {option}, placement={self.placement!r})"

    @property
    def state_identity(self) -> str:
        return self._identity

    @property
    def head_dim(self) -> int | None:
        """Width of the heads that p_m is added to; None if it is added to the tokens."""
        return None if self.placement == "input" else self.dim

    def embed(self, x: Tensor, positions: Tensor | None = None, *, cache: EncodingCache | None = None) -> Tensor:
        if self.placement != "input":
            return x
        asked = f"{type(self).__name__}.embed"
        check_tokens(x, self.dim, asked=asked, parameter=self._parameter)
        self.note_embedded()
        return (x + self._vectors(x, positions, f"{asked}(positions)", exact=True)).to(x.dtype)

    def encode_heads(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        positions: Tensor | None = None,
        *,
        k_positions: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        if self.placement == "input":
            return q, k, v
        asked, values = f"{type(self).__name__}.encode_heads", self.placement == "projection"
        heads = {"q": q, "k": k, "v": v} if values else {"q": q, "k": k}
        for name, x in heads.items():
            check_heads(x, self.dim, asked=f"{asked}({name})", parameter=self._parameter)
        exact = any(x.dtype == torch.float64 for x in heads.values())
        p = p_of_keys = self._vectors(q, positions, f"{asked}(positions)", exact=exact)
        if k_positions is not None or q.shape[-2] != k.shape[-2]:
            keys, name = (positions, "positions") if k_positions is None else (k_positions, "k_positions")
            p_of_keys = self._vectors(k, keys, f"{asked}({name})", exact=exact)
        return (q + p).to(q.dtype), (k + p_of_keys).to(k.dtype), (v + p_of_keys).to(v.dtype) if values else v

    @property
    def _parameter(self) -> Tensor | None:
        """The parameter whose device the tokens must be on; None if there is none."""
        return None

    def _vectors(self, x: Tensor, positions: Tensor | None, asked: str, *, exact: bool) -> Tensor:
        """Return p_m for the positions of x, shaped to broadcast. `asked` names the argument, for errors.

        With `exact`, p_m is not rounded after it is computed. Without, it is at most float32, or as the parameters are.
        """
        raise NotImplementedError

    def _placement_repr(self) -> str:
        return "" if self.placement == "input" else f", placement={self.placement!r}"


class _Table(Encoding):
    """An encoding with a parameter `weight` [length, dim]: one row per position."""

    relative = False
    only_embeds = True

    def __init__(self, dim: int, *, length: int) -> None:
        super().__init__()
        self.dim: int = _width(dim, f"{type(self).__name__}(dim)")
        self._length: int = _rows_of(length, type(self).__name__)
        self.weight: nn.Parameter = nn.Parameter(torch.empty(self._length, self.dim))
        self.reset_parameters()

    @property
    def length(self) -> int:
        return self._length

    def reset_parameters(self) -> None:
        """Initialise the table, as required after `to_empty`."""
        nn.init.normal_(self.weight, std=STD)

    def extra_repr(self) -> str:
        return f"{self.dim}, length={self._length}"


class LearnedEncoding(_Added, _Table):
    """x_m + p_m, where p_m is row m of a learned table (Gehring et al., 1705.03122, section 3.1; BERT, GPT-2).

    Absolute. Positions from `length` on and negative positions raise an error. Ids on a GPU or under torch.compile are
    not checked; the device raises an index error instead. The table is initialised with a standard deviation of 0.02.

    p_m is added at one of three placements. "input": x_m + p_m before the first layer, by `embed`. "projection":
    W x_m + p_m for q, k and v, by `encode_heads`. "scores": (q_m + p_m) . (k_n + p_n), by `encode_heads`, without a
    change of the values. For the last two, p_m has the width of a head. All heads share it, key heads too.

    Args:
        dim: Width of p_m: that of the model for "input", that of a head for "projection" and "scores".
        length: Number of positions, which is the number of rows of the table.
        placement: What p_m is added to: "input", "projection" or "scores".

    Raises:
        RopewalkError: If a size is not an integer of at least 1, or if the placement is unknown.

    >>> learned = LearnedEncoding(2, length=3)
    >>> learned.load_state_dict({"weight": torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])})
    <All keys matched successfully>
    >>> learned.embed(torch.full((1, 1, 2), 0.5), torch.tensor([1])).tolist()
    [[[3.5, 4.5]]]
    >>> scores = LearnedEncoding(2, length=3, placement="scores")
    >>> _ = scores.load_state_dict(learned.state_dict())
    >>> q = k = v = torch.full((1, 1, 1, 2), 0.5)
    >>> [x.flatten().tolist() for x in scores.encode_heads(q, k, v, torch.tensor([1]))]
    [[3.5, 4.5], [3.5, 4.5], [0.5, 0.5]]
    """

    name = "learned"

    def __init__(self, dim: int, *, length: int, placement: PlacementName = "input") -> None:
        super().__init__(dim, length=length)
        self._place(placement, f"length={self._length}")

    @property
    def _parameter(self) -> Tensor:
        return self.weight

    def _vectors(self, x: Tensor, positions: Tensor | None, asked: str, *, exact: bool) -> Tensor:
        return _rows(self.weight, self._length, x, positions, asked)

    def extra_repr(self) -> str:
        return super().extra_repr() + self._placement_repr()


class MultiplicativeEncoding(_Table):
    """x_m * p_m per feature, where p_m is row m of a learned table that is initialised to 1.

    A product instead of the sum of `LearnedEncoding`. With the initial table it is the identity. Absolute. Positions
    from `length` on and negative positions raise an error, as in `LearnedEncoding`.

    Args:
        dim: Width of the model.
        length: Number of positions, which is the number of rows of the table.

    Raises:
        RopewalkError: If an argument is not an integer of at least 1.

    >>> gate = MultiplicativeEncoding(2, length=3)
    >>> gate.load_state_dict({"weight": torch.tensor([[1.0, 1.0], [2.0, 0.5], [1.0, 1.0]])})
    <All keys matched successfully>
    >>> gate.embed(torch.full((1, 2, 2), 3.0)).tolist()
    [[[3.0, 3.0], [6.0, 1.5]]]
    """

    name = "multiplicative"

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)

    def embed(self, x: Tensor, positions: Tensor | None = None, *, cache: EncodingCache | None = None) -> Tensor:
        asked = f"{type(self).__name__}.embed"
        check_tokens(x, self.dim, asked=asked, parameter=self.weight)
        self.note_embedded()
        return (x * _rows(self.weight, self._length, x, positions, f"{asked}(positions)")).to(x.dtype)


class SinusoidalEncoding(_Added):
    """x_m + p_m with p_{m,2i} = sin(m base^(-2i/d)), p_{m,2i+1} = cos(m base^(-2i/d)) (1706.03762, section 3.5).

    Absolute. Defined at every position: fractional, negative and large ones too. No table is stored, and casting the
    module does not change the frequencies. Sines and cosines alternate, as in the paper; some code puts all sines
    before all cosines. d is `dim`, the width of p_m.

    p_m is added at one of the three placements of `LearnedEncoding`. It is computed in float64. "input" adds it in
    float64 too. "projection" and "scores" round it to float32 and add it in float32, unless the heads are float64. The
    sum is rounded once to the dtype of the tokens or heads.

    Args:
        dim: Width of p_m: that of the model for "input", that of a head for "projection" and "scores". It must be even.
        base: Base of the frequencies.
        placement: What p_m is added to: "input", "projection" or "scores".

    Raises:
        RopewalkError: If `dim` is not even, if `base` is invalid, or if the placement is unknown.

    >>> y = SinusoidalEncoding(2).embed(torch.zeros(1, 2, 2))
    >>> [round(wave, 4) for wave in y.flatten().tolist()]  # sin 0, cos 0; sin 1, cos 1
    [0.0, 1.0, 0.8415, 0.5403]
    >>> q = k = v = torch.zeros(1, 1, 1, 2)
    >>> [x.flatten().tolist() for x in SinusoidalEncoding(2, placement="projection").encode_heads(q, k, v)]
    [[0.0, 1.0], [0.0, 1.0], [0.0, 1.0]]
    """

    name = "sinusoidal"
    held: ClassVar[tuple[str, ...]] = ("_theta",)

    def __init__(self, dim: int, *, base: float = 10_000.0, placement: PlacementName = "input") -> None:
        super().__init__()
        self.dim: int = _even(dim, "SinusoidalEncoding(dim)")
        self.base: float = Plain(base).base
        self._theta: Tensor = plain_frequencies(self.base, self.dim)
        self._place(placement, f"base={self.base!r}")

    def _vectors(self, x: Tensor, positions: Tensor | None, asked: str, *, exact: bool) -> Tensor:
        waves = _waves(self._theta, x, positions, asked)
        return waves if exact else waves.to(torch.float32)

    def extra_repr(self) -> str:
        return f"{self.dim}, base={self.base:g}" + self._placement_repr()


class ConcatenatedEncoding(Encoding):
    """W [x_m ; p_m]: concatenates x and a vector p_m for its position, and projects back to dim features.

    With `length`, p_m is row m of a learned table, and positions past it raise an error. Without, p_m is sinusoidal.
    Absolute. W is `projection.weight` [dim, dim + width], with the features of x first, and has no bias. An added
    encoding is the special case W = [1 1] with width = dim.

    Args:
        dim: Width of the model.
        width: Number of features of p_m. It must be even without `length`.
        length: Number of positions of a learned table; None for sines and cosines.
        base: Base of the frequencies of sines and cosines, over `width`. Defaults to 10000. Not allowed with `length`.

    Raises:
        RopewalkError: If a size is invalid, or if both `length` and `base` are passed.

    >>> joined = ConcatenatedEncoding(1, width=2)  # sin and cos of the position
    >>> _ = joined.projection.load_state_dict({"weight": torch.tensor([[1.0, 10.0, 100.0]])})
    >>> [round(y, 4) for y in joined.embed(torch.ones(1, 2, 1)).flatten().tolist()]  # 1 + 100; 1 + 8.4147 + 54.0302
    [101.0, 63.4449]
    """

    name = "concatenated"
    relative = False
    only_embeds = True
    held: ClassVar[tuple[str, ...]] = ("_theta",)

    def __init__(self, dim: int, *, width: int, length: int | None = None, base: float | None = None) -> None:
        super().__init__()
        asked = "ConcatenatedEncoding"
        self.dim: int = _width(dim, f"{asked}(dim)")
        if length is not None and base is not None:
            raise RopewalkError(
                asked=f"{asked}(length=..., base=...)",
                expected="a length for a learned table, or a base for sines and cosines",
                got=f"length={length!r} and base={base!r}",
                do="omit one of them",
            )
        self._length: int | None = None if length is None else _rows_of(length, asked)
        self.width: int = (_even if length is None else _width)(width, f"{asked}(width=...)")
        rule = Plain() if base is None else Plain(base)
        # A learned table has no frequencies: the attribute is empty.
        has_waves = self._length is None
        self._theta: Tensor = plain_frequencies(rule.base, self.width) if has_waves else constant([], torch.float64)
        self.base: float | None = None if self._length is not None else rule.base
        table = None if self._length is None else nn.Parameter(torch.empty(self._length, self.width))
        self.weight: nn.Parameter | None = table
        self.projection: nn.Linear = nn.Linear(self.dim + self.width, self.dim, bias=False)
        self.reset_parameters()

    @property
    def length(self) -> int | None:
        return self._length

    def reset_parameters(self) -> None:
        """Initialise the table and the matrix, as required after `to_empty`."""
        self.projection.reset_parameters()
        if self.weight is not None:
            nn.init.normal_(self.weight, std=STD)

    def embed(self, x: Tensor, positions: Tensor | None = None, *, cache: EncodingCache | None = None) -> Tensor:
        asked, matrix = "ConcatenatedEncoding.embed", self.projection.weight
        check_tokens(x, self.dim, asked=asked, parameter=matrix)
        self.note_embedded()
        asked = f"{asked}(positions)"
        if self.weight is None or self._length is None:
            vector = _waves(self._theta, x, positions, asked)
        else:
            vector = _rows(self.weight, self._length, x, positions, asked)
        # Sines and cosines are rounded to the dtype of the product.
        dtype = torch.promote_types(x.dtype, matrix.dtype)
        vector = vector.to(dtype).expand(*x.shape[:-1], self.width)
        return functional.linear(torch.cat((x.to(dtype), vector), dim=-1), matrix.to(dtype)).to(x.dtype)

    def extra_repr(self) -> str:
        kind = f"base={self.base:g}" if self._length is None else f"length={self._length}"
        return f"{self.dim}, width={self.width}, {kind}"


def learned_for_model(
    dim: int, num_heads: int, *, length: int, head_dim: int | None = None, placement: PlacementName = "input"
) -> LearnedEncoding:
    """Create `encoding("learned")` for a model of width `dim`.

    Args:
        dim: Width of the model.
        num_heads: Number of query heads.
        length: As in `LearnedEncoding`.
        head_dim: Width of a head, for the placements after the projections; None for dim / num_heads.
        placement: As in `LearnedEncoding`.

    Returns:
        The encoding.

    Raises:
        RopewalkError: If the sizes or the options are invalid.

    >>> learned_for_model(8, 2, length=64), learned_for_model(8, 2, length=64, placement="scores")
    (LearnedEncoding(8, length=64), LearnedEncoding(4, length=64, placement='scores'))
    """
    return LearnedEncoding(
        _width_at("learned", placement, dim, num_heads, head_dim), length=length, placement=placement
    )


def sinusoidal_for_model(
    dim: int,
    num_heads: int,
    *,
    base: float = 10_000.0,
    head_dim: int | None = None,
    placement: PlacementName = "input",
) -> SinusoidalEncoding:
    """Create `encoding("sinusoidal")` for a model of width `dim`. Arguments are those of `learned_for_model`.

    >>> sinusoidal_for_model(8, 2, head_dim=6, placement="projection")
    SinusoidalEncoding(6, base=10000, placement='projection')
    """
    return SinusoidalEncoding(
        _width_at("sinusoidal", placement, dim, num_heads, head_dim), base=base, placement=placement
    )


def _width_at(name: str, placement: PlacementName, dim: int, num_heads: int, head_dim: int | None) -> int:
    """Return the width of a vector at a placement: that of the model, or that of a head."""
    require_choice(placement, get_args(PlacementName), asked=f"encoding({name!r}, placement=...)")
    if placement != "input":
        return head_dim_of_model(name, dim, num_heads, head_dim)
    if head_dim is not None:
        raise RopewalkError(
            asked=f"encoding({name!r}, head_dim=...)",
            expected='head_dim only with placement="projection" or "scores"',
            got=f"head_dim={head_dim!r} and placement='input'",
            do="omit head_dim: the vectors have the width of the model",
        )
    return dim


def _rows(table: Tensor, length: int, x: Tensor, positions: Tensor | None, asked: str) -> Tensor:
    """Return the rows of `table` at the positions of x, shaped to broadcast. Raise if a position has no row."""
    if positions is None:
        if x.shape[-2] > length:
            raise _past(length, 0, x.shape[-2] - 1, asked)
        return table[: x.shape[-2]]
    check_token_positions(positions, x, asked=asked, whole=True)
    ids = positions.to(torch.int64)
    if not can_read_values(ids):
        # An exported graph can index negative ids from the end, as ONNX does. An id past the table raises there too.
        ids = torch.where(ids < 0, length, ids)
    elif ids.numel():
        first, last = (int(end) for end in ids.aminmax())
        if first < 0 or last >= length:
            raise _past(length, first, last, asked)
    return _lined_up(functional.embedding(ids, table), x)


def _past(length: int, first: int, last: int, asked: str) -> RopewalkError:
    return RopewalkError(
        asked=asked,
        expected=f"positions from 0 to {length - 1}, the rows of the table",
        got=f"positions from {first} to {last}",
        do="a learned table has no rows past its length: train a longer table, or use an encoding with a formula",
    )


def _waves(theta: Tensor, x: Tensor, positions: Tensor | None, asked: str) -> Tensor:
    """Return alternating sin and cos of positions times theta, shaped to broadcast: float64, or float32 on MPS."""
    if positions is not None:
        check_token_positions(positions, x, asked=asked)
    all_positions: Tensor = arange(x.shape[-2], device=x.device) if positions is None else positions
    no_float64 = x.device.type == "mps"
    ids = all_positions.cpu() if no_float64 else all_positions
    angles = angles_at(ids, placed(theta, ids.device))
    waves = torch.stack((torch.sin(angles), torch.cos(angles)), dim=-1).flatten(-2)
    return _lined_up(waves.to(torch.float32).to(x.device) if no_float64 else waves, x)


def _lined_up(rows: Tensor, x: Tensor) -> Tensor:
    """Reshape [seq, width] or [batch, seq, width] to broadcast with x, whose first dimension is the batch."""
    if rows.dim() == 2:
        return rows
    return rows.view(rows.shape[0], *[1] * (x.dim() - 3), *rows.shape[1:])


def _width(dim: object, asked: str) -> int:
    return require_count(dim, asked=asked, do="pass the number of features")


def _even(dim: object, asked: str) -> int:
    return require_even(dim, asked=asked, do="pass an even width; sines and cosines alternate")


def _rows_of(length: object, name: str) -> int:
    return require_count(length, asked=f"{name}(length=...)", do="pass the number of positions of the table")
