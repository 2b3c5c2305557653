"""Frequency rules: how fast each pair of features turns.

A rule is a frozen, hashable, final value that answers `evaluate(rotary_dim)`. Nothing outside this room asks which
rule it holds. Rules for longer contexts are in stretched.py and by_parts.py.
"""

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, cast, final

from ropewalk.errors import RopewalkError, as_float, require_count, require_even, shown
from ropewalk.spec.arithmetic import FLOAT64, Arithmetic
from ropewalk.spec.fields import check_base, check_factor
from ropewalk.spec.value import from_dict, register, to_dict

__all__ = ["AcrossHeads", "Explicit", "Frequencies", "Plain", "Proportional"]


class Frequencies(ABC):
    """A rule that gives each pair i of a rotation its inverse frequency theta_i, in radians per position.

    Subclass it as a frozen dataclass and implement `evaluate`, with `varies = True` if it reads the length: a spec, its
    JSON and everything made from a spec then take the new rule without another change.

    >>> isinstance(Plain(), Frequencies)
    True
    """

    known: ClassVar[dict[str, type["Frequencies"]]] = {}

    def __init_subclass__(cls) -> None:
        register(cls, Frequencies.known)

    # Whether the frequencies or the amplitude depend on how long the sequence is.
    varies: ClassVar[bool] = False

    @abstractmethod
    def evaluate(self, rotary_dim: int, length: Any = None, arithmetic: Arithmetic = FLOAT64) -> Any:
        """theta_i for the `rotary_dim / 2` pairs, [pairs]; [heads, pairs] where heads differ.

        `length` is how many positions the sequence has: a number, or an array [batch, 1] of `arithmetic` that gives
        [batch, pairs]. Only rules that vary read it; None is a sequence no longer than the model was trained on.
        """

    def amplitude(self, length: Any = None, arithmetic: Arithmetic = FLOAT64) -> Any:
        """What cos and sin are multiplied by. 1 for a pure rotation."""
        return 1.0

    @property
    def softmax_scale(self) -> float:
        """What the scale of the attention scores is multiplied by."""
        return 1.0

    def to_config(self, rotary_dim: int) -> dict[str, Any]:
        """The keys of a config with which transformers computes this rule; an error where it has no such type."""
        raise RopewalkError(
            asked=f'to_config("transformers") of {type(self).__name__}',
            expected="a rule that transformers has a rope_type for",
            got=shown(self),
            do="keep the spec as JSON: RopeSpec.to_json",
        )

    def to_dict(self) -> dict[str, Any]:
        """The rule as JSON holds it: its class name under "rule", and its fields.

        >>> Plain(500_000).to_dict()
        {'rule': 'Plain', 'base': 500000.0}
        """
        return to_dict(self, "rule")

    @staticmethod
    def from_dict(data: Any) -> "Frequencies":
        """The rule that `to_dict` wrote.

        >>> Frequencies.from_dict({"rule": "Plain", "base": 10_000.0})
        Plain(base=10000.0)
        """
        return from_dict(data, "rule", Frequencies.known, what="the frequencies")


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
        check_base(self)

    def evaluate(self, rotary_dim: int, length: Any = None, arithmetic: Arithmetic = FLOAT64) -> Any:
        return 1.0 / arithmetic.powers(self.base, rotary_dim)

    def to_config(self, rotary_dim: int) -> dict[str, Any]:
        return {"rope_parameters": {"rope_type": "default", "rope_theta": self.base}}


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

    def evaluate(self, rotary_dim: int, length: Any = None, arithmetic: Arithmetic = FLOAT64) -> Any:
        dim = require_even(rotary_dim, asked="the frequencies of a rotary_dim", do="features rotate in pairs")
        array = arithmetic.array(self.inv_freq)
        if array.shape[-1] != dim // 2:
            raise RopewalkError(
                asked=f"Explicit frequencies for rotary_dim={rotary_dim}",
                expected=f"{rotary_dim // 2} numbers{' a head' if array.ndim == 2 else ''}, one a pair",
                got=f"{array.shape[-1]}",
                do=f"give {rotary_dim // 2} frequencies, or set rotary_dim={2 * array.shape[-1]}",
            )
        return array


@final
@dataclasses.dataclass(frozen=True)
class AcrossHeads(Frequencies):
    """One rotation over the whole model width, made before the heads are split.

    theta_i = base^(-2i/d) for i = 0 .. d/2-1 with d = num_heads * rotary_dim, the width of the model; head h holds
    i = h*rotary_dim/2 .. (h+1)*rotary_dim/2-1, so each head turns in its own band of frequencies, head 0 fastest.
    The usual rotation gives every head the same, whole range.

    >>> AcrossHeads(10_000, num_heads=2).evaluate(2).tolist()  # d_model = 4
    [[1.0], [0.01]]
    """

    base: float = 10_000.0
    num_heads: int = 1

    def __post_init__(self) -> None:
        check_base(self)
        heads = require_count(self.num_heads, asked="AcrossHeads(num_heads=...)", do="pass the number of heads")
        object.__setattr__(self, "num_heads", heads)

    def evaluate(self, rotary_dim: int, length: Any = None, arithmetic: Arithmetic = FLOAT64) -> Any:
        dim = require_even(rotary_dim, asked="the frequencies of a rotary_dim", do="features rotate in pairs")
        return (1.0 / arithmetic.powers(self.base, self.num_heads * dim)).reshape(self.num_heads, dim // 2)


@final
@dataclasses.dataclass(frozen=True)
class Proportional(Frequencies):
    """p-RoPE: the first `fraction` of the pairs turn as in Plain, divided by `factor`; the others stand still.

    theta_i = base^(-2i/d) / factor for i < int(fraction * d / 2), else 0 (2410.06205, section 6). Exponents and pairs
    are those of the whole head, unlike partial rotation, which turns a narrower head: there rotary_dim is what is cut.

    >>> Proportional(10_000, fraction=0.5).evaluate(8).tolist()
    [1.0, 0.1, 0.0, 0.0]
    """

    base: float = 10_000.0
    fraction: float = 1.0
    factor: float = 1.0

    def __post_init__(self) -> None:
        check_base(self)
        check_factor(self)
        fraction = as_float(self.fraction)
        if fraction is None or not 0.0 <= fraction <= 1.0:
            raise RopewalkError(
                asked="Proportional(fraction=...)",
                expected="a number from 0 to 1",
                got=shown(self.fraction),
                do="pass the share of pairs that turn",
            )
        object.__setattr__(self, "fraction", fraction)

    def evaluate(self, rotary_dim: int, length: Any = None, arithmetic: Arithmetic = FLOAT64) -> Any:
        turning = int(self.fraction * rotary_dim // 2)
        theta = 1.0 / arithmetic.powers(self.base, rotary_dim, turning) / self.factor
        return arithmetic.join(theta, arithmetic.array([0.0] * (rotary_dim // 2 - turning)))

    def to_config(self, rotary_dim: int) -> dict[str, Any]:
        keys = {"rope_type": "proportional", "rope_theta": self.base, "partial_rotary_factor": self.fraction}
        return {"rope_parameters": keys if self.factor == 1 else keys | {"factor": self.factor}}


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
