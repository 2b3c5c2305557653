"""Query temperatures: a factor on queries that grows with their position, so that far queries attend sharply."""

import dataclasses
import math
from abc import ABC, abstractmethod
from typing import ClassVar, final

from ropewalk.errors import RopewalkError, require_count, require_positive, shown
from ropewalk.spec.arithmetic import FLOAT64, Arithmetic, ArrayT, as_array
from ropewalk.spec.frequencies import ConfigValue
from ropewalk.spec.value import register

__all__ = ["LogTemperature", "QueryTemperature", "StepTemperature"]


class QueryTemperature(ABC):
    """A rule that gives each position m the factor by which its whole query is multiplied, rotated or not.

    Subclass it as a frozen dataclass and implement `evaluate`.

    >>> isinstance(LogTemperature(512), QueryTemperature)
    True
    """

    known: ClassVar[dict[str, type["QueryTemperature"]]] = {}

    def __init_subclass__(cls) -> None:
        register(cls, QueryTemperature.known)

    @abstractmethod
    def evaluate(self, positions: ArrayT | float, arithmetic: Arithmetic[ArrayT] = FLOAT64) -> ArrayT:
        """The factor at each position; positions are a number or an array of `arithmetic`."""

    def to_config(self) -> dict[str, ConfigValue]:
        """The rope parameters that say this to transformers; an error where none do."""
        raise RopewalkError(
            asked=f'to_config("transformers") of {type(self).__name__}',
            expected="a temperature that transformers has a key for",
            got=shown(self),
            do="keep the spec as JSON: RopeSpec.to_json",
        )


@final
@dataclasses.dataclass(frozen=True)
class StepTemperature(QueryTemperature):
    """1 + scale * ln(1 + floor((m + first) / step)): grows a little at every `step` positions.

    Llama 4 has it in its layers without rotation with scale 0.1, step 8192 and first 1; Ministral 3 everywhere with its
    llama_4_scaling_beta, the trained length and first 0 (both as in transformers).

    >>> rule = StepTemperature(scale=0.1, step=8192, first=1)
    >>> [round(float(rule.evaluate(m)), 7) for m in (8190, 8191, 131071)]
    [1.0, 1.0693147, 1.2833213]
    """

    scale: float
    step: int
    first: int = 0

    def __post_init__(self) -> None:
        name = "StepTemperature"
        scale = require_positive(self.scale, asked=f"{name}(scale=...)", do="Llama 4 and Ministral 3 have 0.1")
        step = require_count(self.step, asked=f"{name}(step=...)", do="pass the positions from step to step")
        first = require_count(self.first, asked=f"{name}(first=...)", do="0, or 1 as in Llama 4", at_least=0)
        for field, value in (("scale", scale), ("step", step), ("first", first)):
            object.__setattr__(self, field, value)

    def evaluate(self, positions: ArrayT | float, arithmetic: Arithmetic[ArrayT] = FLOAT64) -> ArrayT:
        steps = arithmetic.floor((as_array(positions, arithmetic) + self.first) / self.step)
        # Positions before 0 have taken no step.
        return 1 + self.scale * arithmetic.log(1 + arithmetic.clip(steps, low=0.0))

    def to_config(self) -> dict[str, ConfigValue]:
        if self.first:
            return super().to_config()
        return {"llama_4_scaling_beta": self.scale, "original_max_position_embeddings": self.step}


@final
@dataclasses.dataclass(frozen=True)
class LogTemperature(QueryTemperature):
    """max(1, ln(m + 1) / ln(trained_length)): log-n scaling, for contexts longer than the trained one.

    kexue.fm 9708 (Qwen 1 has it too); its n counts the keys that a causal query sees, m + 1.

    >>> [round(float(LogTemperature(512).evaluate(m)), 6) for m in (100, 511, 512**2 - 1)]
    [1.0, 1.0, 2.0]
    """

    trained_length: int

    def __post_init__(self) -> None:
        do = "pass the length that the model was trained on"
        length = require_count(self.trained_length, asked="LogTemperature(trained_length=...)", do=do, at_least=2)
        object.__setattr__(self, "trained_length", length)

    def evaluate(self, positions: ArrayT | float, arithmetic: Arithmetic[ArrayT] = FLOAT64) -> ArrayT:
        seen = arithmetic.clip(as_array(positions, arithmetic) + 1, low=float(self.trained_length))
        return arithmetic.log(seen) / math.log(self.trained_length)
