"""Frequency rules: how fast each pair of features is rotated.

A rule is a frozen, hashable, final value that answers `evaluate(rotary_dim)`. What it is called and which keys of a
config specify it are attributes of its class, so that nothing else has a list of rules. Rules for longer contexts are
in stretched.py and by_parts.py.
"""

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar, NotRequired, TypedDict, TypeVar, cast, final

from ropewalk.errors import RopewalkError, as_float, require_count, require_even, shown
from ropewalk.spec.arithmetic import FLOAT64, Arithmetic, ArrayT
from ropewalk.spec.fields import SupportsToList, as_row, as_rows, check_base, check_factor
from ropewalk.spec.value import DataclassValue, construct, from_dict, register, to_dict

__all__ = ["AcrossHeads", "ConfigValue", "Explicit", "Frequencies", "Plain", "Proportional", "RopeConfig"]

Rule = TypeVar("Rule", bound="Frequencies")

# What the rope parameters of a config hold under a key.
ConfigValue = str | float | Sequence[float]


class RopeConfig(TypedDict):
    """Keys of a config.json that specify a rotation to transformers.

    >>> RopeConfig(rope_parameters=Plain().to_config(4)["rope_parameters"])
    {'rope_parameters': {'rope_type': 'default', 'rope_theta': 10000.0}}
    """

    rope_parameters: dict[str, ConfigValue]
    max_position_embeddings: NotRequired[int]


def no_rope_type(rule: "Frequencies") -> RopewalkError:
    """The error of a rule that no config of transformers specifies."""
    return RopewalkError(
        asked=f'to_config("transformers") of {type(rule).__name__}',
        expected="a rule that transformers has a rope_type for",
        got=shown(rule),
        do="keep the spec as JSON: RopeSpec.to_json",
    )


class Frequencies(ABC):
    """A rule that gives each pair i of a rotation its inverse frequency theta_i, in radians per position.

    Subclass it as a frozen dataclass and implement `evaluate`, with `varies = True` if it reads the length: a spec, its
    JSON and everything made from a spec then take the new rule without another change. The other class attributes are
    optional.

    Attributes:
        varies: whether the frequencies or the amplitude depend on how long the sequence is.
        label: what people call the rule. Default: the name of the class.
        option: its name in a command line, for a rule that a base, a factor and a trained length specify.
        rope_type: its name in a config of transformers, if it has one there.
        config_keys: the key of the rope parameters in which a config has each field, in the order of writing.

    >>> isinstance(Plain(), Frequencies)
    True
    >>> Plain.label, Plain.rope_type
    ('plain RoPE', 'default')
    """

    known: ClassVar[dict[str, type["Frequencies"]]] = {}

    varies: ClassVar[bool] = False
    label: ClassVar[str]
    option: ClassVar[str | None] = None
    rope_type: ClassVar[str | None] = None
    config_keys: ClassVar[Mapping[str, str]] = {}

    def __init_subclass__(cls) -> None:
        if "label" not in cls.__dict__:
            cls.label = cls.__name__
        register(cls, Frequencies.known)

    @abstractmethod
    def evaluate(
        self, rotary_dim: int, length: ArrayT | float | None = None, arithmetic: Arithmetic[ArrayT] = FLOAT64
    ) -> ArrayT:
        """theta_i for the `rotary_dim / 2` pairs, [pairs]; [heads, pairs] where heads differ.

        `length` is how many positions the sequence has: a number, or an array [batch, 1] of `arithmetic` that gives
        [batch, pairs]. Only rules that vary read it; None is a sequence no longer than the model was trained on.
        """

    def amplitude(
        self, length: ArrayT | float | None = None, arithmetic: Arithmetic[ArrayT] = FLOAT64
    ) -> ArrayT | float:
        """What cos and sin are multiplied by. 1 for a pure rotation."""
        return 1.0

    @property
    def softmax_scale(self) -> float:
        """What the scale of the attention scores is multiplied by."""
        return 1.0

    def to_config(self, rotary_dim: int) -> RopeConfig:
        """The keys of a config with which transformers computes this rule; an error where it has no such type.

        >>> Plain(500_000).to_config(128)
        {'rope_parameters': {'rope_type': 'default', 'rope_theta': 500000.0}}
        """
        if self.rope_type is None:
            raise no_rope_type(self)
        keys: dict[str, ConfigValue] = {"rope_type": self.rope_type}
        for field, key in self.config_keys.items():
            value: ConfigValue | None = getattr(self, field)
            if value is not None:
                keys[key] = list(value) if isinstance(value, tuple) else value
        return {"rope_parameters": keys}

    @classmethod
    def from_parameters(cls: type[Rule], parameters: Mapping[str, object]) -> Rule:
        """The rule of this class that rope parameters specify; a field whose key is missing or null has its default.

        It reads what `to_config` wrote, and checks it as the class does.

        >>> Plain.from_parameters({"rope_type": "default", "rope_theta": 500_000})
        Plain(base=500000.0)
        """
        fields = {field: parameters[key] for field, key in cls.config_keys.items() if parameters.get(key) is not None}
        return construct(cls, fields, source="rope parameters")

    @staticmethod
    def rope_types() -> dict[str, type["Frequencies"]]:
        """The rules that transformers has a rope type for, by its name.

        >>> Frequencies.rope_types()["default"].__name__
        'Plain'
        """
        return {rule.rope_type: rule for rule in Frequencies.known.values() if rule.rope_type is not None}

    def to_dict(self) -> dict[str, object]:
        """The rule as JSON holds it: its class name under "rule", and its fields.

        >>> Plain(500_000).to_dict()
        {'rule': 'Plain', 'base': 500000.0}
        """
        return to_dict(cast("DataclassValue", self), "rule")

    @staticmethod
    def from_dict(data: object) -> "Frequencies":
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

    label: ClassVar[str] = "plain RoPE"
    option: ClassVar[str | None] = "plain"
    rope_type: ClassVar[str | None] = "default"
    config_keys: ClassVar[Mapping[str, str]] = {"base": "rope_theta"}

    base: float = 10_000.0

    def __post_init__(self) -> None:
        check_base(self)

    def evaluate(
        self, rotary_dim: int, length: ArrayT | float | None = None, arithmetic: Arithmetic[ArrayT] = FLOAT64
    ) -> ArrayT:
        return 1.0 / arithmetic.powers(self.base, rotary_dim)


@final
@dataclasses.dataclass(frozen=True, init=False)
class Explicit(Frequencies):
    """Frequencies given one by one: d/2 numbers, or one row of d/2 numbers per head. 0 leaves a pair unrotated.

    >>> Explicit([1.0, 0.3, 0.05]).evaluate(6).tolist()
    [1.0, 0.3, 0.05]
    >>> Explicit([[1.0], [0.5]]).evaluate(2).shape  # two heads, one pair each
    (2, 1)
    """

    label: ClassVar[str] = "explicit frequencies"

    # Tuples, so that the value can be hashed.
    inv_freq: tuple[float, ...] | tuple[tuple[float, ...], ...]

    def __init__(self, inv_freq: Sequence[float] | Sequence[Sequence[float]] | SupportsToList) -> None:
        numbers = as_row(inv_freq) or as_rows(inv_freq)
        if numbers is None:
            raise RopewalkError(
                asked="Explicit(inv_freq)",
                expected="finite numbers, one per pair, or rows of them of equal length, one per head",
                got=shown(inv_freq),
                do="pass a list such as [1.0, 0.3, 0.05]",
            )
        object.__setattr__(self, "inv_freq", numbers)

    def evaluate(
        self, rotary_dim: int, length: ArrayT | float | None = None, arithmetic: Arithmetic[ArrayT] = FLOAT64
    ) -> ArrayT:
        dim = require_even(rotary_dim, asked="the frequencies of a rotary_dim", do="features rotate in pairs")
        first = self.inv_freq[0]
        per_head, count = (True, len(first)) if isinstance(first, tuple) else (False, len(self.inv_freq))
        if count != dim // 2:
            raise RopewalkError(
                asked=f"Explicit frequencies for rotary_dim={rotary_dim}",
                expected=f"{rotary_dim // 2} numbers{' per head' if per_head else ''}, one per pair",
                got=f"{count}",
                do=f"give {rotary_dim // 2} frequencies, or set rotary_dim={2 * count}",
            )
        return arithmetic.array(self.inv_freq)


@final
@dataclasses.dataclass(frozen=True)
class AcrossHeads(Frequencies):
    """One rotation over the whole model width, made before the heads are split.

    theta_i = base^(-2i/d) for i = 0 .. d/2-1 with d = num_heads * rotary_dim, the width of the model; head h holds
    i = h*rotary_dim/2 .. (h+1)*rotary_dim/2-1, so each head is rotated in its own band of frequencies, head 0 fastest.
    The usual rotation gives every head the same, whole range.

    >>> AcrossHeads(10_000, num_heads=2).evaluate(2).tolist()  # d_model = 4
    [[1.0], [0.01]]
    """

    label: ClassVar[str] = "plain RoPE across heads"

    base: float = 10_000.0
    num_heads: int = 1

    def __post_init__(self) -> None:
        check_base(self)
        heads = require_count(self.num_heads, asked="AcrossHeads(num_heads=...)", do="pass the number of heads")
        object.__setattr__(self, "num_heads", heads)

    def evaluate(
        self, rotary_dim: int, length: ArrayT | float | None = None, arithmetic: Arithmetic[ArrayT] = FLOAT64
    ) -> ArrayT:
        dim = require_even(rotary_dim, asked="the frequencies of a rotary_dim", do="features rotate in pairs")
        return (1.0 / arithmetic.powers(self.base, self.num_heads * dim)).reshape(self.num_heads, dim // 2)


@final
@dataclasses.dataclass(frozen=True)
class Proportional(Frequencies):
    """p-RoPE: the first `fraction` of the pairs rotate as in Plain, divided by `factor`; the others do not rotate.

    theta_i = base^(-2i/d) / factor for i < int(fraction * d / 2), else 0 (2410.06205, section 6). Exponents and pairs
    are those of the whole head, unlike partial rotation, which rotates a narrower head: there rotary_dim is cut.

    >>> Proportional(10_000, fraction=0.5).evaluate(8).tolist()
    [1.0, 0.1, 0.0, 0.0]
    """

    label: ClassVar[str] = "p-RoPE"
    rope_type: ClassVar[str | None] = "proportional"
    config_keys: ClassVar[Mapping[str, str]] = {
        "base": "rope_theta",
        "fraction": "partial_rotary_factor",
        "factor": "factor",
    }

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
                do="pass the share of pairs that rotate",
            )
        object.__setattr__(self, "fraction", fraction)

    def evaluate(
        self, rotary_dim: int, length: ArrayT | float | None = None, arithmetic: Arithmetic[ArrayT] = FLOAT64
    ) -> ArrayT:
        rotated = int(self.fraction * rotary_dim // 2)
        theta = 1.0 / arithmetic.powers(self.base, rotary_dim, rotated) / self.factor
        return arithmetic.join(theta, arithmetic.array([0.0] * (rotary_dim // 2 - rotated)))

    def to_config(self, rotary_dim: int) -> RopeConfig:
        config = super().to_config(rotary_dim)
        if self.factor == 1:
            # Gemma's configs have no factor.
            del config["rope_parameters"]["factor"]
        return config
