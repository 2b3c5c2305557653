"""Query temperatures: a factor on queries that grows with position, so that attention of far queries stays sharp."""

import dataclasses
import math
from abc import ABC, abstractmethod
from typing import ClassVar, final

from ropewalk.errors import RopewalkError, require_count, require_positive, shown
from ropewalk.signatures import checks_names
from ropewalk.spec.arithmetic import FLOAT64, Arithmetic, ArrayT, as_array
from ropewalk.spec.frequencies import ConfigValue
from ropewalk.spec.value import register

__all__ = ["LogTemperature", "QueryTemperature", "StepTemperature"]


class QueryTemperature(ABC):
    """Base class of rules that map each position m to the factor on its query.

    The whole query is multiplied, including features that are not rotated. Subclass it as a frozen dataclass and
    implement `evaluate`.

    Attributes:
        known: All rules by class name. Subclasses are added automatically.

    >>> isinstance(LogTemperature(512), QueryTemperature)
    True
    """

    known: ClassVar[dict[str, type["QueryTemperature"]]] = {}

    def __init_subclass__(cls) -> None:
        register(cls, QueryTemperature.known)

    @abstractmethod
    def evaluate(self, positions: ArrayT | float, arithmetic: Arithmetic[ArrayT] = FLOAT64) -> ArrayT:
        """Return the factor at each position.

        Args:
            positions: A number, or an array of `arithmetic`.
            arithmetic: Array library and dtype to compute in. Default: NumPy float64.

        Returns:
            Factors, in the shape of `positions`.
        """

    def to_config(self) -> dict[str, ConfigValue]:
        """Return the rope parameters that specify this rule in transformers.

        Raises:
            RopewalkError: If transformers has no key for the rule.
        """
        raise RopewalkError(
            asked=f'to_config("transformers") of {type(self).__name__}',
            expected="a temperature that transformers has a key for",
            got=shown(self),
            do="keep the spec as JSON: RopeSpec.to_json",
        )


@final
@checks_names
@dataclasses.dataclass(frozen=True)
class StepTemperature(QueryTemperature):
    """Factor 1 + scale * ln(1 + floor((m + first) / step)), which grows every `step` positions.

    Llama 4 uses it in its layers without rotation, with scale 0.1, step 8192 and first 1. Ministral 3 uses it in all
    layers, with scale llama_4_scaling_beta, the trained length as step, and first 0. Both are as in transformers.

    Args:
        scale: Factor of the logarithm.
        step: Number of positions between two steps.
        first: Number added to each position.

    >>> rule = StepTemperature(scale=0.1, step=8192, first=1)
    >>> [round(float(rule.evaluate(m)), 7) for m in (8190, 8191, 131071)]
    [1.0, 1.0693147, 1.2833213]
    """

    scale: float
    step: int
    first: int = 0

    def __post_init__(self) -> None:
        name = "StepTemperature"
        scale = require_positive(self.scale, asked=f"{name}(scale=...)", do="use 0.1, as in Llama 4 and Ministral 3")
        step = require_count(self.step, asked=f"{name}(step=...)", do="pass the number of positions between two steps")
        first = require_count(self.first, asked=f"{name}(first=...)", do="use 0, or 1 as in Llama 4", at_least=0)
        for field, value in (("scale", scale), ("step", step), ("first", first)):
            object.__setattr__(self, field, value)

    def evaluate(self, positions: ArrayT | float, arithmetic: Arithmetic[ArrayT] = FLOAT64) -> ArrayT:
        steps = arithmetic.floor((as_array(positions, arithmetic) + self.first) / self.step)
        # Negative positions get the factor 1.
        return 1 + self.scale * arithmetic.log(1 + arithmetic.clip(steps, low=0.0))

    def to_config(self) -> dict[str, ConfigValue]:
        if self.first:
            return super().to_config()
        return {"llama_4_scaling_beta": self.scale, "original_max_position_embeddings": self.step}


@final
@checks_names
@dataclasses.dataclass(frozen=True)
class LogTemperature(QueryTemperature):
    """Log-n scaling: factor max(1, ln(m + 1) / ln(trained_length)), for contexts longer than the trained one.

    Source: kexue.fm 9708; Qwen 1 uses it too. Its n = m + 1 is the number of keys to which a causal query attends.

    Args:
        trained_length: Context length that the model was trained on.

    >>> [round(float(LogTemperature(512).evaluate(m)), 6) for m in (100, 511, 512**2 - 1)]
    [1.0, 1.0, 2.0]
    """

    trained_length: int

    def __post_init__(self) -> None:
        do = "pass the context length that the model was trained on"
        length = require_count(self.trained_length, asked="LogTemperature(trained_length=...)", do=do, at_least=2)
        object.__setattr__(self, "trained_length", length)

    def evaluate(self, positions: ArrayT | float, arithmetic: Arithmetic[ArrayT] = FLOAT64) -> ArrayT:
        seen = arithmetic.clip(as_array(positions, arithmetic) + 1, low=float(self.trained_length))
        return arithmetic.log(seen) / math.log(self.trained_length)
