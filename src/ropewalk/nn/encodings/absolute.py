"""Absolute encodings, which implement the `embed` hook: they change each token by its position, before the first layer.

x is [batch, seq, dim], or [..., seq, dim] with the batch first. The vector of a position is computed in float64 or in
the dtype of the parameters, and the result is rounded once to the dtype of x.
"""

from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from ropewalk.errors import RopewalkError, require_count, require_even
from ropewalk.kernels.angles.torch import angles_at
from ropewalk.kernels.constructors import arange, constant, placed
from ropewalk.nn.encodings.base import Encoding, EncodingCache, check_token_positions, check_tokens
from ropewalk.nn.position_checks import can_read_values
from ropewalk.nn.rotary.spec_numbers import plain_frequencies
from ropewalk.spec.frequencies import Plain

__all__ = ["ConcatenatedEncoding", "LearnedEncoding", "MultiplicativeEncoding", "SinusoidalEncoding"]

# Standard deviation of the initial table, as in BERT and GPT-2.
STD = 0.02


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

    def _rows(self, x: Tensor, positions: Tensor | None) -> Tensor:
        asked = f"{type(self).__name__}.embed"
        check_tokens(x, self.dim, asked=asked, parameter=self.weight)
        self.note_embedded()
        return _rows(self.weight, self._length, x, positions, asked)

    def extra_repr(self) -> str:
        return f"{self.dim}, length={self._length}"


class LearnedEncoding(_Table):
    """x_m + p_m, where p_m is row m of a learned table (Gehring et al., 1705.03122, section 3.1; BERT, GPT-2).

    Absolute. Positions from `length` on and negative positions raise an error. Ids on a GPU or under torch.compile are
    not checked; the device raises an index error instead. The table is initialised with a standard deviation of 0.02.

    Args:
        dim: Width of the model.
        length: Number of positions, which is the number of rows of the table.

    Raises:
        RopewalkError: If an argument is not an integer of at least 1.

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
        return (x * self._rows(x, positions)).to(x.dtype)


class SinusoidalEncoding(Encoding):
    """x_m + p_m with p_{m,2i} = sin(m base^(-2i/d)), p_{m,2i+1} = cos(m base^(-2i/d)) (1706.03762, section 3.5).

    Absolute. Defined at every position: fractional, negative and large ones too. No table is stored, and casting the
    module does not change the frequencies. Sines and cosines alternate, as in the paper; some code puts all sines
    before all cosines.

    Args:
        dim: Width of the model. It must be even.
        base: Base of the frequencies.

    Raises:
        RopewalkError: If `dim` is not even, or if `base` is invalid.

    >>> y = SinusoidalEncoding(2).embed(torch.zeros(1, 2, 2))
    >>> [round(wave, 4) for wave in y.flatten().tolist()]  # sin 0, cos 0; sin 1, cos 1
    [0.0, 1.0, 0.8415, 0.5403]
    """

    name = "sinusoidal"
    relative = False
    only_embeds = True
    held: ClassVar[tuple[str, ...]] = ("_theta",)

    def __init__(self, dim: int, *, base: float = 10_000.0) -> None:
        super().__init__()
        self.dim: int = _even(dim, "SinusoidalEncoding(dim)")
        self.base: float = Plain(base).base
        self._theta: Tensor = plain_frequencies(self.base, self.dim)

    def embed(self, x: Tensor, positions: Tensor | None = None, *, cache: EncodingCache | None = None) -> Tensor:
        check_tokens(x, self.dim, asked="SinusoidalEncoding.embed")
        self.note_embedded()
        return (x + _waves(self._theta, x, positions, "SinusoidalEncoding.embed")).to(x.dtype)

    def extra_repr(self) -> str:
        return f"{self.dim}, base={self.base:g}"


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
        asked=f"{asked}(positions)",
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
