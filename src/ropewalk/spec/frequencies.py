"""Frequency rules: how fast each pair of features is rotated.

A rule is a frozen, hashable, final value whose `evaluate(rotary_dim)` returns the frequencies. Its names and its config
keys are class attributes, so no other file needs a list of rules. Rules for longer contexts are in stretched.py and
by_parts.py.
"""

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar, NotRequired, TypedDict, TypeVar, cast, final

from ropewalk.errors import RopewalkError, as_float, require_count, require_even, shown
from ropewalk.signatures import checks_names
from ropewalk.spec.arithmetic import FLOAT64, Arithmetic, ArrayT
from ropewalk.spec.fields import SupportsToList, as_row, as_rows, check_base, check_factor
from ropewalk.spec.value import DataclassValue, construct, from_dict, register, to_dict

__all__ = ["AcrossHeads", "ConfigValue", "Explicit", "Frequencies", "Plain", "Proportional", "RopeConfig"]

Rule = TypeVar("Rule", bound="Frequencies")

# A value in the rope parameters of a config: also a whole rule, as `Frequencies.to_dict` writes it.
ConfigValue = str | float | Sequence[float] | Mapping[str, object]
# The rope types of configs that contain a whole rule, for rules that are constant, and for those that depend on the
# length. transformers computes the frequencies of a type again for long sequences if its name contains "dynamic".
STATED, STATED_DYNAMIC = "ropewalk", "ropewalk_dynamic"


class RopeConfig(TypedDict):
    """Keys of a config.json that specify a rotation to transformers.

    >>> RopeConfig(rope_parameters=Plain().to_config(4)["rope_parameters"])
    {'rope_parameters': {'rope_type': 'default', 'rope_theta': 10000.0}}
    """

    rope_parameters: dict[str, ConfigValue]
    max_position_embeddings: NotRequired[int]


def no_rope_type(rule: "Frequencies") -> RopewalkError:
    """Return the error for a rule that has no rope_type in transformers."""
    return RopewalkError(
        asked=f'to_config("transformers") of {type(rule).__name__}',
        expected="a rule that transformers has a rope_type for",
        got=shown(rule),
        do="keep the spec as JSON: RopeSpec.to_json",
    )


def stated_in_config(rule: "Frequencies", rotary_dim: int) -> RopeConfig:
    """Return config keys that contain the whole rule. `ropewalk.hub.register_rope_types` adds their rope types.

    >>> stated_in_config(Plain(100), 4)["rope_parameters"]
    {'rope_type': 'ropewalk', 'rope_theta': 100.0, 'rule': {'rule': 'Plain', 'base': 100.0}}
    """
    if rule.evaluate(rotary_dim).ndim != 1:
        raise RopewalkError(
            asked=f'to_config("ropewalk") of {type(rule).__name__}',
            expected="one row of frequencies, which the heads of a model in transformers share",
            got=shown(rule),
            do="keep the spec as JSON: RopeSpec.to_json",
        )
    base: float | None = getattr(rule, "base", None)
    keys: dict[str, ConfigValue] = {"rope_type": STATED_DYNAMIC if rule.varies else STATED}
    keys |= ({} if base is None else {"rope_theta": base}) | {"rule": rule.to_dict()}
    trained: int | None = getattr(rule, "trained_length", None) if rule.varies else None
    # Below this length transformers does not compute the frequencies again.
    return (
        {"rope_parameters": keys} if trained is None else {"rope_parameters": keys, "max_position_embeddings": trained}
    )


class Frequencies(ABC):
    """Base class of frequency rules, which map each pair i to its inverse frequency theta_i in radians per position.

    Subclass it as a frozen dataclass and implement `evaluate`. Set `varies = True` if it uses the length. Specs, their
    JSON and everything made from a spec then support the new rule without another change. The other class attributes
    are optional.

    Attributes:
        known: All rules by class name. Subclasses are added automatically.
        varies: Whether the frequencies or the amplitude depend on the sequence length.
        label: Name for readers. Default: the name of the class.
        option: Name on the command line, for rules that a base, a factor and a trained length specify completely.
        rope_type: Name in configs of transformers, or None.
        config_keys: The key in the rope parameters for each field, in the order of writing.

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
        """Return theta_i for the `rotary_dim / 2` pairs.

        Args:
            rotary_dim: Number of rotated features. Even.
            length: Number of positions in the sequence: a number, or an array [batch, 1] of `arithmetic`. Only rules
                with `varies = True` use it. None means a sequence that is not longer than the trained length.
            arithmetic: Array library and dtype to compute in. Default: NumPy float64.

        Returns:
            Frequencies [pairs]; [heads, pairs] if each head has its own; [batch, pairs] for an array of lengths.
        """

    def amplitude(
        self, length: ArrayT | float | None = None, arithmetic: Arithmetic[ArrayT] = FLOAT64
    ) -> ArrayT | float:
        """Return the factor by which cos and sin are multiplied. It is 1 for a pure rotation.

        Args:
            length: Number of positions in the sequence, as in `evaluate`.
            arithmetic: Array library and dtype to compute in.

        Returns:
            A number, or an array of `arithmetic` if the amplitude depends on the length.
        """
        return 1.0

    @property
    def softmax_scale(self) -> float:
        """Factor by which the scale of the attention scores is multiplied."""
        return 1.0

    def to_config(self, rotary_dim: int) -> RopeConfig:
        """Return the config keys with which transformers computes this rule.

        Args:
            rotary_dim: Number of rotated features.

        Raises:
            RopewalkError: If transformers has no rope type for the rule.

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
        """Return the rule of this class that rope parameters specify. It reads what `to_config` wrote.

        Args:
            parameters: Rope parameters of a config. A field whose key is missing or null gets its default.

        Raises:
            RopewalkError: If a field without a default is missing, or a value is invalid.

        >>> Plain.from_parameters({"rope_type": "default", "rope_theta": 500_000})
        Plain(base=500000.0)
        """
        fields = {field: parameters[key] for field, key in cls.config_keys.items() if parameters.get(key) is not None}
        return construct(cls, fields, source="rope parameters")

    @staticmethod
    def rope_types() -> dict[str, type["Frequencies"]]:
        """Return the rules that transformers supports, by rope type.

        >>> Frequencies.rope_types()["default"].__name__
        'Plain'
        """
        return {rule.rope_type: rule for rule in Frequencies.known.values() if rule.rope_type is not None}

    @staticmethod
    def option_for(name: str) -> str:
        """Return the name on the command line of the rule with this rope type, or `name` itself.

        Commands accept both names.

        >>> Frequencies.option_for("linear"), Frequencies.option_for("pi")
        ('pi', 'pi')
        """
        named = (rule.option for rule in Frequencies.known.values() if rule.rope_type == name)
        return next(named, None) or name

    def to_dict(self) -> dict[str, object]:
        """Return the fields of the rule, and the name of its class under "rule", for JSON.

        >>> Plain(500_000).to_dict()
        {'rule': 'Plain', 'base': 500000.0}
        """
        return to_dict(cast("DataclassValue", self), "rule")

    @staticmethod
    def from_dict(data: object) -> "Frequencies":
        """Return the rule that `to_dict` wrote.

        >>> Frequencies.from_dict({"rule": "Plain", "base": 10_000.0})
        Plain(base=10000.0)
        """
        return from_dict(data, "rule", Frequencies.known, owner="the frequencies")


@final
@checks_names
@dataclasses.dataclass(frozen=True)
class Plain(Frequencies):
    """RoFormer's frequencies: theta_i = base^(-2i/d) for i = 0 .. d/2-1 (2104.09864, eq. 15).

    The paper counts i from 1 and writes -2(i-1)/d. The numbers are the same.

    Args:
        base: Base of the geometric sequence. Above 0.

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
@checks_names
@dataclasses.dataclass(frozen=True, init=False)
class Explicit(Frequencies):
    """Frequencies from a list: d/2 numbers, or one row of d/2 numbers per head. 0 leaves a pair unrotated.

    Args:
        inv_freq: Frequencies [pairs] or [heads, pairs]: a sequence, an array or a tensor. Stored as tuples.

    Raises:
        RopewalkError: If a frequency is not finite, or the rows differ in length.

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
                do=f"pass {rotary_dim // 2} frequencies, or set rotary_dim={2 * count}",
            )
        return arithmetic.array(self.inv_freq)


@final
@checks_names
@dataclasses.dataclass(frozen=True)
class AcrossHeads(Frequencies):
    """One rotation over the width of the model, applied before it is split into heads.

    theta_i = base^(-2i/d) for i = 0 .. d/2-1 with d = num_heads * rotary_dim, the width of the model. Head h contains
    i = h*rotary_dim/2 .. (h+1)*rotary_dim/2-1. Each head therefore has its own band of frequencies, and head 0 has the
    highest. In the usual rotation, every head has the same full range.

    Args:
        base: Base of the geometric sequence. Above 0.
        num_heads: Number of heads.

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
@checks_names
@dataclasses.dataclass(frozen=True)
class Proportional(Frequencies):
    """p-RoPE: the first `fraction` of the pairs rotate as in Plain, divided by `factor`; the others do not rotate.

    theta_i = base^(-2i/d) / factor for i < int(fraction * d / 2), else 0 (2410.06205, section 6). Exponents and pairs
    are those of the whole head. Partial rotation differs: it reduces rotary_dim, and so rotates a narrower head.

    Args:
        base: Base of the geometric sequence. Above 0.
        fraction: Fraction of the pairs that rotate, from 0 to 1.
        factor: Divisor of all frequencies. At least 1.

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
                do="pass the fraction of pairs that rotate",
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
