"""Rules that scale each frequency by a function of its index or of the length: PI, NTK variants, LongRoPE."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import ClassVar, final

from ropewalk.errors import RopewalkError, require_positive, shown
from ropewalk.signatures import checks_names
from ropewalk.spec.arithmetic import FLOAT64, Arithmetic, ArrayT, as_array
from ropewalk.spec.fields import REQUIRED, as_row, check_base, check_factor, check_trained_length
from ropewalk.spec.frequencies import Frequencies, Plain, RopeConfig

__all__ = ["NTK", "DynamicNTK", "LongRope", "NTKFixed", "NTKMixed", "PositionInterpolation"]


@final
@checks_names
@dataclasses.dataclass(frozen=True)
class PositionInterpolation(Frequencies):
    """Position Interpolation: theta_i = base^(-2i/d) / factor, as if positions were m / factor (2306.15595, eq. 4).

    With factor 1 it is Plain.

    Args:
        base: Base of the geometric sequence. Above 0.
        factor: Ratio of the extended context length to the trained one. At least 1.

    >>> PositionInterpolation(10_000, factor=4).evaluate(4).tolist()
    [0.25, 0.0025]
    """

    label: ClassVar[str] = "position interpolation (PI)"
    option: ClassVar[str | None] = "pi"
    rope_type: ClassVar[str | None] = "linear"
    config_keys: ClassVar[Mapping[str, str]] = {"base": "rope_theta", "factor": "factor"}

    base: float = 10_000.0
    factor: float = REQUIRED

    def __post_init__(self) -> None:
        check_base(self)
        check_factor(self)

    def evaluate(
        self, rotary_dim: int, length: ArrayT | float | None = None, arithmetic: Arithmetic[ArrayT] = FLOAT64
    ) -> ArrayT:
        return 1.0 / arithmetic.powers(self.base, rotary_dim) / self.factor


@final
@checks_names
@dataclasses.dataclass(frozen=True)
class NTK(Frequencies):
    """NTK-aware scaling: theta_i = b^(-2i/d) with b = base * factor^(d/(d-2)) (2309.00071, section 3.1).

    The highest frequency does not change, and the lowest is divided by the factor. With factor 1 it is Plain. HunYuan's
    configs call the factor alpha. rotary_dim is at least 4, because a single pair has no lowest frequency apart from
    the highest.

    Args:
        base: Base of the geometric sequence. Above 0.
        factor: Ratio of the extended context length to the trained one. At least 1.

    >>> NTK(10_000, factor=4).evaluate(4).tolist()  # b = 10000 * 4^2
    [1.0, 0.0025]
    """

    label: ClassVar[str] = "NTK-aware scaling"
    option: ClassVar[str | None] = "ntk"

    base: float = 10_000.0
    factor: float = REQUIRED

    def __post_init__(self) -> None:
        check_base(self)
        check_factor(self)

    def evaluate(
        self, rotary_dim: int, length: ArrayT | float | None = None, arithmetic: Arithmetic[ArrayT] = FLOAT64
    ) -> ArrayT:
        base = self.base * self.factor ** _stretch_exponent(self, rotary_dim)
        return 1.0 / arithmetic.powers(base, rotary_dim)

    def to_config(self, rotary_dim: int) -> RopeConfig:
        # Every family reads the base; only HunYuan reads alpha.
        return Plain(self.base * self.factor ** _stretch_exponent(self, rotary_dim)).to_config(rotary_dim)


@final
@checks_names
@dataclasses.dataclass(frozen=True)
class DynamicNTK(Frequencies):
    """NTK whose factor grows with the length n: factor * n / trained_length - (factor - 1) for n > trained_length.

    Up to trained_length it is Plain (2309.00071, section 3.3, in the form that transformers computes). With factor 1
    the factor of NTK is n / trained_length.

    Args:
        base: Base of the geometric sequence. Above 0.
        factor: How fast the factor of NTK grows with the length. At least 1.
        trained_length: Context length that the model was trained on.

    >>> DynamicNTK(10_000, factor=2, trained_length=2048).evaluate(4).tolist()
    [1.0, 0.01]
    >>> DynamicNTK(10_000, factor=2, trained_length=2048).evaluate(4, length=4096).tolist()  # as NTK with factor 3
    [1.0, 0.0033333333333333335]
    """

    label: ClassVar[str] = "dynamic NTK"
    option: ClassVar[str | None] = "dynamic"
    rope_type: ClassVar[str | None] = "dynamic"
    config_keys: ClassVar[Mapping[str, str]] = {"base": "rope_theta", "factor": "factor"}
    varies: ClassVar[bool] = True

    base: float = 10_000.0
    factor: float = 1.0
    trained_length: int = 2048

    def __post_init__(self) -> None:
        check_base(self)
        check_factor(self)
        check_trained_length(self)

    def evaluate(
        self, rotary_dim: int, length: ArrayT | float | None = None, arithmetic: Arithmetic[ArrayT] = FLOAT64
    ) -> ArrayT:
        exponent = _stretch_exponent(self, rotary_dim)
        plain = 1.0 / arithmetic.powers(self.base, rotary_dim)
        if length is None:
            return plain
        n = as_array(length, arithmetic)
        growth = self.factor * arithmetic.clip(n, low=self.trained_length) / self.trained_length - (self.factor - 1)
        grown = 1.0 / arithmetic.powers(self.base * growth**exponent, rotary_dim)
        return arithmetic.where(n > self.trained_length, grown, plain)

    def to_config(self, rotary_dim: int) -> RopeConfig:
        # transformers reads the trained length from a key outside of the rope parameters.
        return {**super().to_config(rotary_dim), "max_position_embeddings": self.trained_length}


@final
@checks_names
@dataclasses.dataclass(frozen=True)
class NTKFixed(Frequencies):
    """NTK that also divides the highest frequency: theta_i = base^(-2i/d) * factor^(-2(i+1)/d).

    The lowest frequency is divided by the factor, as in PI and in NTK, but the exponent differs from NTK's
    (kexue.fm 9706, "NTK-RoPE-fixed"; vLLM's rope type "ntk"). With factor 1 it is Plain.

    Args:
        base: Base of the geometric sequence. Above 0.
        factor: Ratio of the extended context length to the trained one. At least 1.

    >>> NTKFixed(10_000, factor=4).evaluate(4).tolist()
    [0.5, 0.0025]
    """

    label: ClassVar[str] = "NTK-aware scaling, fixed form"

    base: float = 10_000.0
    factor: float = REQUIRED

    def __post_init__(self) -> None:
        check_base(self)
        check_factor(self)

    def evaluate(
        self, rotary_dim: int, length: ArrayT | float | None = None, arithmetic: Arithmetic[ArrayT] = FLOAT64
    ) -> ArrayT:
        stretched = arithmetic.powers(self.base * self.factor, rotary_dim)
        return 1.0 / stretched / self.factor ** (2 / rotary_dim)


@final
@checks_names
@dataclasses.dataclass(frozen=True)
class NTKMixed(Frequencies):
    """NTK with a power law: theta_i = base^(-2i/d) / exp(a (i+1)^bend) with a (d/2)^bend = ln factor.

    Source: kexue.fm 9706, "NTK-RoPE-mixed". The lowest frequency is divided by the factor. With factor 1 it is Plain.

    Args:
        base: Base of the geometric sequence. Above 0.
        factor: Ratio of the extended context length to the trained one. At least 1.
        bend: Exponent of the power law. Default: 0.625, as in the source. vLLM's key is mixed_b.

    >>> [round(x, 6) for x in NTKMixed(10_000, factor=4, bend=1).evaluate(4).tolist()]  # 1/4^(1/2), 0.01/4
    [0.5, 0.0025]
    """

    label: ClassVar[str] = "NTK-aware scaling, mixed form"

    base: float = 10_000.0
    factor: float = REQUIRED
    bend: float = 0.625

    def __post_init__(self) -> None:
        check_base(self)
        check_factor(self)
        bend = require_positive(self.bend, asked="NTKMixed(bend=...)", do="use 0.625, as in the source")
        object.__setattr__(self, "bend", bend)

    def evaluate(
        self, rotary_dim: int, length: ArrayT | float | None = None, arithmetic: Arithmetic[ArrayT] = FLOAT64
    ) -> ArrayT:
        pairs = rotary_dim // 2
        # In the order of vLLM's operations. Another order differs in the last bits of float32.
        rate = arithmetic.log(as_array(self.factor, arithmetic)) / pairs**self.bend
        stretch = arithmetic.exp(rate * arithmetic.array(range(1, pairs + 1)) ** self.bend)
        return 1.0 / arithmetic.powers(self.base, rotary_dim) / stretch


@final
@checks_names
@dataclasses.dataclass(frozen=True)
class LongRope(Frequencies):
    """LongRoPE: one divisor per frequency, with one set of divisors for short and one for long sequences (2402.13753).

    theta_i = base^(-2i/d) / long_factor_i for sequences longer than trained_length, and base^(-2i/d) / short_factor_i
    for others. The amplitude is `attention_factor`. If that is None, it is sqrt(1 + ln(factor) / ln(trained_length)),
    or 1 without a factor. It is the same for both sets, as in Phi-3. `short_amplitude` and `long_amplitude` set one
    amplitude per set instead, as in Phi-3.5-MoE.

    Differs from the paper: the paper leaves the first tokens unscaled, which no released model does.

    Args:
        base: Base of the geometric sequence. Above 0.
        short_factor: Divisors up to trained_length [pairs].
        long_factor: Divisors beyond trained_length [pairs].
        trained_length: Context length that the model was trained on.
        factor: Ratio of the extended context length to the trained one, from which the amplitude is computed.
        attention_factor: Amplitude of both sets.
        short_amplitude: Amplitude up to trained_length. Requires long_amplitude.
        long_amplitude: Amplitude beyond trained_length. Requires short_amplitude.

    >>> rule = LongRope(10_000, short_factor=[1, 2], long_factor=[1, 4], trained_length=4096, factor=32)
    >>> rule.evaluate(4).tolist(), rule.evaluate(4, length=4097).tolist()
    ([1.0, 0.005], [1.0, 0.0025])
    >>> round(rule.amplitude(), 6)
    1.190238
    """

    label: ClassVar[str] = "LongRoPE"
    rope_type: ClassVar[str | None] = "longrope"
    config_keys: ClassVar[Mapping[str, str]] = {
        "base": "rope_theta",
        "short_factor": "short_factor",
        "long_factor": "long_factor",
        "trained_length": "original_max_position_embeddings",
        "factor": "factor",
        "attention_factor": "attention_factor",
        "short_amplitude": "short_mscale",
        "long_amplitude": "long_mscale",
    }
    varies: ClassVar[bool] = True

    base: float
    short_factor: Sequence[float]
    long_factor: Sequence[float]
    trained_length: int
    factor: float | None = None
    attention_factor: float | None = None
    short_amplitude: float | None = None
    long_amplitude: float | None = None

    def __post_init__(self) -> None:
        check_base(self)
        check_trained_length(self)
        if self.factor is not None:
            check_factor(self)
        for name in ("attention_factor", "short_amplitude", "long_amplitude"):
            if getattr(self, name) is not None:
                asked = f"LongRope({name}=...)"
                number = require_positive(getattr(self, name), asked=asked, do="leave it out to use the default")
                object.__setattr__(self, name, number)
        amplitudes = [name for name in ("short_amplitude", "long_amplitude") if getattr(self, name) is not None]
        if len(amplitudes) == 1 or (amplitudes and self.attention_factor is not None):
            raise RopewalkError(
                asked="LongRope(...)",
                expected="short_amplitude and long_amplitude together, or attention_factor, or none of them",
                got=" and ".join([*amplitudes, *(["attention_factor"] if self.attention_factor is not None else [])]),
                do="pass both amplitudes, or one attention_factor for both sets",
            )
        for name in ("short_factor", "long_factor"):
            object.__setattr__(self, name, _divisors(getattr(self, name), f"LongRope({name}=...)"))

    def evaluate(
        self, rotary_dim: int, length: ArrayT | float | None = None, arithmetic: Arithmetic[ArrayT] = FLOAT64
    ) -> ArrayT:
        for name in ("short_factor", "long_factor"):
            count = len(getattr(self, name))
            if 2 * count != rotary_dim:
                raise RopewalkError(
                    asked=f"LongRope frequencies for rotary_dim={rotary_dim}",
                    expected=f"{rotary_dim // 2} numbers in {name}, one per pair",
                    got=f"{count}",
                    do=f"pass {rotary_dim // 2} divisors, or set rotary_dim={2 * count}",
                )
        powers = arithmetic.powers(self.base, rotary_dim)
        short = 1.0 / (arithmetic.array(self.short_factor) * powers)
        if length is None:
            return short
        long = 1.0 / (arithmetic.array(self.long_factor) * powers)
        return arithmetic.where(as_array(length, arithmetic) > self.trained_length, long, short)

    def amplitude(
        self, length: ArrayT | float | None = None, arithmetic: Arithmetic[ArrayT] = FLOAT64
    ) -> ArrayT | float:
        if self.attention_factor is not None:
            return self.attention_factor
        if self.short_amplitude is not None and self.long_amplitude is not None:
            if length is None:
                return self.short_amplitude
            both = arithmetic.array([self.short_amplitude, self.long_amplitude])
            return arithmetic.where(as_array(length, arithmetic) > self.trained_length, both[1], both[0])
        if self.factor is None:
            return 1.0
        return math.sqrt(1 + math.log(self.factor) / math.log(self.trained_length))


def _stretch_exponent(rule: Frequencies, rotary_dim: int) -> float:
    if rotary_dim < 4:
        raise RopewalkError(
            asked=f"{type(rule).__name__} for rotary_dim={rotary_dim}",
            expected="a rotary_dim of at least 4: the exponent is d/(d-2)",
            got=f"{rotary_dim}",
            do="use PositionInterpolation for a single pair",
        )
    return rotary_dim / (rotary_dim - 2)


def _divisors(values: object, asked: str) -> tuple[float, ...]:
    divisors = as_row(values)
    if divisors is None or min(divisors) <= 0:
        raise RopewalkError(
            asked=asked,
            expected="finite numbers above 0, one per pair",
            got=shown(values),
            do="copy the list from the config of the model",
        )
    return divisors
