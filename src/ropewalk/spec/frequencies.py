"""Frequency rules: how fast each pair of features turns.

A rule is a frozen, hashable, final value that answers `evaluate(rotary_dim)`. Nothing outside this file asks
which rule it holds.
"""

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, cast, final

import numpy as np
from jaxtyping import Float, Float64
from numpy.typing import NDArray

from ropewalk.errors import (
    RopewalkError,
    as_float,
    require_choice,
    require_count,
    require_even,
    require_positive,
    shown,
)

__all__ = ["Explicit", "Frequencies", "Plain", "Powers", "WholeModel", "float64_powers"]

# base^(-2i/d) for i = 0 .. d/2-1, in some precision. A rule computes in the precision of what this gives, so that
# float32 frequencies can be made by the very operations with which a model was trained.
Powers = Callable[[float, int], NDArray[Any]]


def float64_powers(base: float, dim: int) -> Float64[np.ndarray, "pairs"]:
    """base^(-2i/dim) for i = 0 .. dim/2-1: RoFormer (2104.09864) eq. 15, with i counted from 0.

    >>> float64_powers(10_000.0, 4).tolist()
    [1.0, 0.01]
    """
    dim = require_even(dim, asked="the frequencies of a rotary_dim", do="features rotate in pairs")
    return base ** (-np.arange(0, dim, 2, dtype=np.float64) / dim)


class Frequencies(ABC):
    """A rule that gives each pair i of a rotation its inverse frequency theta_i, in radians per position.

    Subclass it as a frozen dataclass and implement `evaluate`: a spec, its JSON and everything made from a spec
    then take the new rule without another change.

    >>> isinstance(Plain(), Frequencies)
    True
    """

    known: ClassVar[dict[str, type["Frequencies"]]] = {}

    def __init_subclass__(cls) -> None:
        Frequencies.known[cls.__name__] = cls

    @abstractmethod
    def evaluate(
        self, rotary_dim: int, length: int | None = None, powers: Powers = float64_powers
    ) -> Float[np.ndarray, "*heads pairs"]:
        """theta_i for the `rotary_dim / 2` pairs; one row a head where heads differ.

        `length` is how many positions the sequence has; only rules that depend on it read it. `powers` gives
        base^(-2i/d), and with it the precision.
        """

    def amplitude(self, length: int | None = None) -> float:
        """What cos and sin are multiplied by. 1 for a pure rotation."""
        return 1.0

    @property
    def softmax_scale(self) -> float:
        """What the scale of the attention scores is multiplied by."""
        return 1.0

    def to_dict(self) -> dict[str, Any]:
        """The rule as JSON holds it: its class name under "rule", and its fields.

        >>> Plain(500_000).to_dict()
        {'rule': 'Plain', 'base': 500000.0}
        """
        fields = dataclasses.fields(self)  # pyright: ignore[reportArgumentType]  # every rule is a dataclass
        return {"rule": type(self).__name__} | {field.name: getattr(self, field.name) for field in fields}

    @staticmethod
    def from_dict(data: Any) -> "Frequencies":
        """The rule that `to_dict` wrote.

        >>> Frequencies.from_dict({"rule": "Plain", "base": 10_000.0})
        Plain(base=10000.0)
        """
        fields = cast("dict[str, Any]", data) if isinstance(data, dict) else {}
        if "rule" not in fields:
            raise RopewalkError(
                asked="the frequencies of a RopeSpec from JSON",
                expected='an object with a "rule"',
                got=shown(cast("object", data)),
                do='write for example {"rule": "Plain", "base": 10000.0}',
            )
        fields = dict(fields)
        rule = Frequencies.known[
            require_choice(fields.pop("rule"), Frequencies.known, asked='"rule" of the frequencies')
        ]
        names = [field.name for field in dataclasses.fields(rule)]  # pyright: ignore[reportArgumentType]
        for name in fields:
            require_choice(name, names, asked=f"the fields of {rule.__name__} in JSON")
        try:
            return rule(**fields)
        except TypeError:
            raise RopewalkError(
                asked=f"{rule.__name__} from JSON",
                expected=f"the fields {', '.join(names)}",
                got=", ".join(fields) or "no field",
                do="add the fields that are missing",
            ) from None


@final
@dataclasses.dataclass(frozen=True)
class Plain(Frequencies):
    """RoFormer's frequencies: theta_i = base^(-2i/d) for i = 0 .. d/2-1 (2104.09864, eq. 15).

    Differs from the paper: it counts i from 1 and writes -2(i-1)/d, which is the same numbers.

    >>> Plain(base=10_000).evaluate(4).tolist()
    [1.0, 0.01]
    """

    base: float = 10_000.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "base", _base(self))

    def evaluate(
        self, rotary_dim: int, length: int | None = None, powers: Powers = float64_powers
    ) -> Float[np.ndarray, "pairs"]:
        return powers(self.base, rotary_dim)


@final
@dataclasses.dataclass(frozen=True)
class Explicit(Frequencies):
    """Frequencies given one by one: d/2 numbers, or one row of d/2 numbers a head. 0 leaves a pair unrotated.

    >>> Explicit([1.0, 0.3, 0.05]).evaluate(6).tolist()
    [1.0, 0.3, 0.05]
    >>> Explicit([[1.0], [0.5]]).evaluate(2).shape  # two heads, one pair each
    (2, 1)
    """

    # Any sequence of numbers, or of rows, is taken; tuples are what is kept, so that the value can be hashed.
    inv_freq: Any

    def __post_init__(self) -> None:
        object.__setattr__(self, "inv_freq", _nested_tuple(self.inv_freq))

    def evaluate(
        self, rotary_dim: int, length: int | None = None, powers: Powers = float64_powers
    ) -> Float[np.ndarray, "*heads pairs"]:
        dim = require_even(rotary_dim, asked="the frequencies of a rotary_dim", do="features rotate in pairs")
        array = np.array(self.inv_freq, dtype=powers(1.0, dim).dtype)
        if array.shape[-1] != rotary_dim // 2:
            raise RopewalkError(
                asked=f"Explicit frequencies for rotary_dim={rotary_dim}",
                expected=f"{rotary_dim // 2} numbers{' a head' if array.ndim == 2 else ''}, one a pair",
                got=f"{array.shape[-1]}",
                do=f"give {rotary_dim // 2} frequencies, or set rotary_dim={2 * array.shape[-1]}",
            )
        return array


@final
@dataclasses.dataclass(frozen=True)
class WholeModel(Frequencies):
    """One rotation over the whole model width, made before the heads are split.

    theta_i = base^(-2i/d) for i = 0 .. d/2-1 with d = num_heads * rotary_dim, the width of the model; head h holds
    i = h*rotary_dim/2 .. (h+1)*rotary_dim/2-1, so each head turns in its own band of frequencies, head 0 fastest.
    The usual rotation gives every head the same, whole range.

    >>> WholeModel(10_000, num_heads=2).evaluate(2).tolist()  # d_model = 4
    [[1.0], [0.01]]
    """

    base: float = 10_000.0
    num_heads: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "base", _base(self))
        heads = require_count(self.num_heads, asked="WholeModel(num_heads=...)", do="pass the number of heads")
        object.__setattr__(self, "num_heads", heads)

    def evaluate(
        self, rotary_dim: int, length: int | None = None, powers: Powers = float64_powers
    ) -> Float[np.ndarray, "heads pairs"]:
        dim = require_even(rotary_dim, asked="the frequencies of a rotary_dim", do="features rotate in pairs")
        return powers(self.base, self.num_heads * dim).reshape(self.num_heads, dim // 2)


def _base(rule: Plain | WholeModel) -> float:
    do = "pass the base of the geometric sequence, for example 10_000"
    return require_positive(rule.base, asked=f"{type(rule).__name__}(base=...)", do=do)


def _nested_tuple(given: object) -> tuple[Any, ...]:
    """Rows of finite floats as tuples: (1.0, 0.3) or ((1.0, 0.3), (1.0, 0.2))."""
    # NumPy arrays and torch tensors become lists here, so that torch need not be imported to recognise one.
    values: object = getattr(given, "tolist", lambda: given)()
    if isinstance(values, Sequence) and not isinstance(values, str | bytes):
        entries: list[Any] = list(cast("Sequence[Any]", values))
        numbers = [as_float(entry) for entry in entries]
        if entries and None not in numbers:
            return tuple(numbers)
        if entries and all(isinstance(entry, Sequence) for entry in entries):
            rows = [tuple(as_float(number) for number in row) for row in entries]
            if rows[0] and all(len(row) == len(rows[0]) and None not in row for row in rows):
                return tuple(rows)
    raise RopewalkError(
        asked="Explicit(inv_freq)",
        expected="finite numbers, one a pair, or rows of them of equal length, one a head",
        got=shown(given),
        do="pass a list such as [1.0, 0.3, 0.05]",
    )
