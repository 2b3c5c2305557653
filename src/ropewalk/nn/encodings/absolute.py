"""Absolute encodings, by the `embed` hook: a token is changed by where it stands, at the bottom of a model.

x is [batch, seq, dim], or [.., seq, dim] with the batch first. What a position adds is formed in float64 or in the
dtype of the parameters, and the result is rounded once to the dtype of x.
"""

from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from ropewalk.errors import RopewalkError, require_count, require_even
from ropewalk.kernels.angles.torch import angles_at
from ropewalk.kernels.constructors import arange, constant, placed
from ropewalk.nn.encodings.base import Encoding, EncodingCache, check_token_positions, check_tokens
from ropewalk.nn.position_checks import may_look
from ropewalk.nn.rotary.spec_numbers import plain_frequencies
from ropewalk.spec.frequencies import Plain

__all__ = ["ConcatenatedEncoding", "LearnedEncoding", "MultiplicativeEncoding", "SinusoidalEncoding"]

# What a learned table is drawn with at first, as in BERT and GPT-2.
STD = 0.02


class _Table(Encoding):
    """A parameter `weight` [length, dim]: one row per position, and nothing past its length."""

    relative = False

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
        """Draws the table anew, as initialisation after `to_empty` wants it."""
        nn.init.normal_(self.weight, std=STD)

    def _rows(self, x: Tensor, positions: Tensor | None) -> Tensor:
        asked = f"{type(self).__name__}.embed"
        check_tokens(x, self.dim, asked=asked, parameter=self.weight)
        return _rows(self.weight, self._length, x, positions, asked)

    def extra_repr(self) -> str:
        return f"{self.dim}, length={self._length}"


class LearnedEncoding(_Table):
    """x_m + p_m with p_m row m of a trained table (Gehring et al., 1705.03122, section 3.1; BERT and GPT-2 have it).

    Absolute. Not defined past `length`: such positions, and negative ones, are an error. Ids on a GPU or under a
    compiler are not looked at, and there it is the device's index error. The table is drawn with a deviation of 0.02.

    >>> learned = LearnedEncoding(2, length=3)
    >>> learned.load_state_dict({"weight": torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])})
    <All keys matched successfully>
    >>> learned.embed(torch.full((1, 1, 2), 0.5), torch.tensor([1])).tolist()
    [[[3.5, 4.5]]]
    """

    name = "learned"

    def embed(self, x: Tensor, positions: Tensor | None = None, *, cache: EncodingCache | None = None) -> Tensor:
        return (x + self._rows(x, positions)).to(x.dtype)


class MultiplicativeEncoding(_Table):
    """x_m * p_m, feature by feature, with p_m row m of a trained table that starts at 1.

    The product instead of the sum, as the notes on absolute encodings propose it; at first it changes nothing.
    Absolute, and not defined past `length`, as `LearnedEncoding`.

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
        return (x * self._rows(x, positions)).to(x.dtype)


class SinusoidalEncoding(Encoding):
    """x_m + p_m with p_{m,2i} = sin(m base^(-2i/d)), p_{m,2i+1} = cos(m base^(-2i/d)) (1706.03762, section 3.5).

    Absolute. Defined at every position, whole or not, negative or large; no table is kept, and no cast of the module
    touches its frequencies. Differs from code that puts all sines before all cosines: they alternate, as in the paper.

    >>> y = SinusoidalEncoding(2).embed(torch.zeros(1, 2, 2))
    >>> [round(wave, 4) for wave in y.flatten().tolist()]  # sin 0, cos 0; sin 1, cos 1
    [0.0, 1.0, 0.8415, 0.5403]
    """

    name = "sinusoidal"
    relative = False
    held: ClassVar[tuple[str, ...]] = ("_theta",)

    def __init__(self, dim: int, *, base: float = 10_000.0) -> None:
        super().__init__()
        self.dim: int = _even(dim, "SinusoidalEncoding(dim)")
        self.base: float = Plain(base).base
        self._theta: Tensor = plain_frequencies(self.base, self.dim)

    def embed(self, x: Tensor, positions: Tensor | None = None, *, cache: EncodingCache | None = None) -> Tensor:
        check_tokens(x, self.dim, asked="SinusoidalEncoding.embed")
        return (x + _waves(self._theta, x, positions, "SinusoidalEncoding.embed")).to(x.dtype)

    def extra_repr(self) -> str:
        return f"{self.dim}, base={self.base:g}"


class ConcatenatedEncoding(Encoding):
    """W [x_m ; p_m]: x and a vector of `width` for its position, side by side, taken back to dim features by a matrix.

    With `length`, p_m is row m of a trained table, and nothing is defined past it; without, p_m is sinusoidal, with
    the frequencies of `base` over `width`. Absolute. W is [dim, dim + width], the features of x first, without a bias;
    `projection.weight` of the state holds it. Differs from an added encoding, which is W = [1 1] with width = dim.

    >>> joined = ConcatenatedEncoding(1, width=2)  # sin and cos of the position
    >>> _ = joined.projection.load_state_dict({"weight": torch.tensor([[1.0, 10.0, 100.0]])})
    >>> [round(y, 4) for y in joined.embed(torch.ones(1, 2, 1)).flatten().tolist()]  # 1 + 100; 1 + 8.4147 + 54.0302
    [101.0, 63.4449]
    """

    name = "concatenated"
    relative = False
    held: ClassVar[tuple[str, ...]] = ("_theta",)

    def __init__(self, dim: int, *, width: int, length: int | None = None, base: float | None = None) -> None:
        super().__init__()
        asked = "ConcatenatedEncoding"
        self.dim: int = _width(dim, f"{asked}(dim)")
        if length is not None and base is not None:
            raise RopewalkError(
                asked=f"{asked}(length=..., base=...)",
                expected="a length, for a learned table, or a base, for sines and cosines",
                got=f"length={length!r} and base={base!r}",
                do="leave one of them out",
            )
        self._length: int | None = None if length is None else _rows_of(length, asked)
        self.width: int = (_even if length is None else _width)(width, f"{asked}(width=...)")
        rule = Plain() if base is None else Plain(base)
        # Without sines there are no frequencies to hold, and no others to be mistaken for them.
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
        """Draws the table and the matrix anew, as initialisation after `to_empty` wants it."""
        self.projection.reset_parameters()
        if self.weight is not None:
            nn.init.normal_(self.weight, std=STD)

    def embed(self, x: Tensor, positions: Tensor | None = None, *, cache: EncodingCache | None = None) -> Tensor:
        asked, matrix = "ConcatenatedEncoding.embed", self.projection.weight
        check_tokens(x, self.dim, asked=asked, parameter=matrix)
        if self.weight is None or self._length is None:
            vector = _waves(self._theta, x, positions, asked)
        else:
            vector = _rows(self.weight, self._length, x, positions, asked)
        # Sines and cosines are rounded to what the product is worked in.
        dtype = torch.promote_types(x.dtype, matrix.dtype)
        vector = vector.to(dtype).expand(*x.shape[:-1], self.width)
        return functional.linear(torch.cat((x.to(dtype), vector), dim=-1), matrix.to(dtype)).to(x.dtype)

    def extra_repr(self) -> str:
        kind = f"base={self.base:g}" if self._length is None else f"length={self._length}"
        return f"{self.dim}, width={self.width}, {kind}"


def _rows(table: Tensor, length: int, x: Tensor, positions: Tensor | None, asked: str) -> Tensor:
    """The rows of `table` at the positions of x, shaped to broadcast. A position without a row is an error."""
    if positions is None:
        if x.shape[-2] > length:
            raise _past(length, 0, x.shape[-2] - 1, asked)
        return table[: x.shape[-2]]
    check_token_positions(positions, x, asked=asked, whole=True)
    ids = positions.to(torch.int64)
    if not may_look(ids):
        # An exported graph may count negative ids from the end, as ONNX does: past the table they are errors there too.
        ids = torch.where(ids < 0, length, ids)
    elif ids.numel():
        first, last = (int(end) for end in ids.aminmax())
        if first < 0 or last >= length:
            raise _past(length, first, last, asked)
    return _lined_up(functional.embedding(ids, table), x)


def _past(length: int, first: int, last: int, asked: str) -> RopewalkError:
    return RopewalkError(
        asked=f"{asked}(positions)",
        expected=f"positions from 0 to {length - 1}, the rows of the table",
        got=f"positions from {first} to {last}",
        do="a trained table is not defined past its length: train a longer one, or use an encoding by formula",
    )


def _waves(theta: Tensor, x: Tensor, positions: Tensor | None, asked: str) -> Tensor:
    """sin and cos, alternating, of positions times theta, shaped to broadcast: float64, or float32 on MPS."""
    if positions is not None:
        check_token_positions(positions, x, asked=asked)
    places: Tensor = arange(x.shape[-2], device=x.device) if positions is None else positions
    no_float64 = x.device.type == "mps"
    ids = places.cpu() if no_float64 else places
    angles = angles_at(ids, placed(theta, ids.device))
    waves = torch.stack((torch.sin(angles), torch.cos(angles)), dim=-1).flatten(-2)
    return _lined_up(waves.to(torch.float32).to(x.device) if no_float64 else waves, x)


def _lined_up(rows: Tensor, x: Tensor) -> Tensor:
    """[seq, width], or [batch, seq, width] with the batch at the first dimension of x."""
    if rows.dim() == 2:
        return rows
    return rows.view(rows.shape[0], *[1] * (x.dim() - 3), *rows.shape[1:])


def _width(dim: object, asked: str) -> int:
    return require_count(dim, asked=asked, do="pass how many features there are")


def _even(dim: object, asked: str) -> int:
    return require_even(dim, asked=asked, do="pass an even width; sines and cosines alternate")


def _rows_of(length: object, name: str) -> int:
    return require_count(length, asked=f"{name}(length=...)", do="pass how many positions the table is to have")
