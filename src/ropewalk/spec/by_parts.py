"""Rules that scale high and low frequencies differently: NTK-by-parts, YaRN, Llama 3.

Pairs that complete many rotations within the trained length keep their frequency. The frequencies of pairs that do not
complete one rotation are divided by the factor. A ramp connects the two.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import ClassVar, Literal, final, get_args

from ropewalk.errors import RopewalkError, as_float, require_choice, require_flag, require_positive
from ropewalk.signatures import checks_names
from ropewalk.spec.arithmetic import FLOAT64, Arithmetic, ArrayT
from ropewalk.spec.fields import REQUIRED, check_base, check_factor, check_trained_length
from ropewalk.spec.frequencies import Frequencies, RopeConfig, no_rope_type

__all__ = ["Llama3", "NTKByParts", "Policy", "Ramp", "Yarn"]

# What YaRN's ramp is linear in: the index of the pair, as in the published code, or its number of rotations.
Ramp = Literal["index", "ratio"]
RAMPS: tuple[Ramp, ...] = get_args(Ramp)
# Which library's interpretation of the keys for YaRN's amplitude is used.
Policy = Literal["transformers", "deepseek", "vllm"]
POLICIES: tuple[Policy, ...] = get_args(Policy)


@final
@checks_names
@dataclasses.dataclass(frozen=True)
class NTKByParts(Frequencies):
    """NTK-by-parts: theta_i is kept where r > beta, divided by the factor where r < alpha, and linear in r between.

    r = trained_length * theta_i / 2π is the number of rotations of pair i within the trained length. With
    γ = (r - alpha) / (beta - alpha), theta'_i = (1 - γ) theta_i / factor + γ theta_i (2309.00071, section 3.2, eq. 18).
    With factor 1 it is Plain.

    Args:
        base: Base of the geometric sequence. Above 1.
        factor: Ratio of the extended context length to the trained one. At least 1.
        trained_length: Context length that the model was trained on.
        alpha: Number of rotations below which the frequency is divided by the factor.
        beta: Number of rotations above which the frequency is kept. At least alpha.

    >>> rule = NTKByParts(10_000, factor=2, trained_length=628)  # 100 rotations, and slightly less than 1
    >>> [round(x, 4) for x in rule.evaluate(4).tolist()]
    [1.0, 0.005]
    """

    label: ClassVar[str] = "NTK by parts"
    option: ClassVar[str | None] = "by-parts"

    base: float = 10_000.0
    factor: float = REQUIRED
    trained_length: int = 2048
    alpha: float = 1.0
    beta: float = 32.0

    def __post_init__(self) -> None:
        _check(self, low="alpha", high="beta")

    def evaluate(
        self, rotary_dim: int, length: ArrayT | float | None = None, arithmetic: Arithmetic[ArrayT] = FLOAT64
    ) -> ArrayT:
        return _by_rotations(self, rotary_dim, self.alpha, self.beta, arithmetic)


@final
@checks_names
@dataclasses.dataclass(frozen=True)
class Llama3(Frequencies):
    """Llama 3.1's rule: NTKByParts with alpha = low_freq_factor and beta = high_freq_factor, and no amplitude.

    Wavelengths above trained_length / low_freq_factor are multiplied by the factor. Wavelengths below
    trained_length / high_freq_factor do not change (Meta's model code; transformers' rope type "llama3"). With factor 1
    it is Plain.

    Args:
        base: Base of the geometric sequence. Above 1.
        factor: Ratio of the extended context length to the trained one. At least 1.
        trained_length: Context length that the model was trained on.
        low_freq_factor: Number of rotations below which the frequency is divided by the factor.
        high_freq_factor: Number of rotations above which the frequency is kept. At least low_freq_factor.

    >>> rule = Llama3(10_000, factor=8, trained_length=628)
    >>> [round(x, 5) for x in rule.evaluate(4).tolist()]
    [1.0, 0.00125]
    """

    label: ClassVar[str] = "Llama 3's rule (by parts)"
    option: ClassVar[str | None] = "llama3"
    rope_type: ClassVar[str | None] = "llama3"
    config_keys: ClassVar[Mapping[str, str]] = {
        "base": "rope_theta",
        "factor": "factor",
        "low_freq_factor": "low_freq_factor",
        "high_freq_factor": "high_freq_factor",
        "trained_length": "original_max_position_embeddings",
    }

    base: float = 500_000.0
    factor: float = 8.0
    trained_length: int = 8192
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0

    def __post_init__(self) -> None:
        _check(self, low="low_freq_factor", high="high_freq_factor")

    def evaluate(
        self, rotary_dim: int, length: ArrayT | float | None = None, arithmetic: Arithmetic[ArrayT] = FLOAT64
    ) -> ArrayT:
        return _by_rotations(self, rotary_dim, self.low_freq_factor, self.high_freq_factor, arithmetic)


@final
@checks_names
@dataclasses.dataclass(frozen=True)
class Yarn(Frequencies):
    """YaRN: frequencies by parts, and an amplitude that makes attention sharper (2309.00071, section 3.4).

    There are two forms of the ramp:

    - ramp="ratio", as in the paper: NTKByParts with alpha = beta_slow and beta = beta_fast.
    - ramp="index", as in the published code, which every model uses: linear in the index i, between the indices at
      which a pair completes beta_fast and beta_slow rotations. `truncate` rounds these indices outwards to integers.

    For Llama 2 and factor 16, frequencies of "ratio" are up to 67 % below those of "index".

    Libraries compute the amplitude differently. With g(m) = 0.1 m ln(factor) + 1:

    - policy="transformers": `attention_factor` if it is set; else g(mscale) / g(mscale_all_dim) if both are set and not
      0; else g(1).
    - policy="deepseek": `attention_factor` if it is set; else g(mscale) / g(mscale_all_dim), with defaults 1 and 0. The
      softmax scale is multiplied by g(mscale_all_dim)^2.
    - policy="vllm": g(1), times `attention_factor` if it is set. mscale and mscale_all_dim are ignored.

    With factor 1 it is Plain, with amplitude 1 unless attention_factor is set.

    Args:
        base: Base of the geometric sequence. Above 1.
        factor: Ratio of the extended context length to the trained one. At least 1.
        trained_length: Context length that the model was trained on.
        beta_fast: Number of rotations above which the frequency is kept.
        beta_slow: Number of rotations below which the frequency is divided by the factor. At most beta_fast.
        truncate: Whether the ends of the index ramp are rounded outwards to integers.
        ramp: "index" or "ratio".
        attention_factor: Amplitude, or a factor of it with policy="vllm".
        mscale: Argument of g in the numerator of the amplitude.
        mscale_all_dim: Argument of g in the denominator of the amplitude, and in the softmax scale of DeepSeek.
        policy: "transformers", "deepseek" or "vllm".

    >>> from ropewalk.spec import Plain
    >>> rule = Yarn(10_000, factor=16, trained_length=4096)
    >>> theta = rule.evaluate(128)
    >>> bool((theta[:21] == Plain(10_000).evaluate(128)[:21]).all()), round(rule.amplitude(), 6)
    (True, 1.277259)
    >>> Yarn(10_000, 40, 4096, mscale=1, mscale_all_dim=1, policy="deepseek").softmax_scale  # g(1)^2
    1.8738542070926265
    """

    label: ClassVar[str] = "YaRN"
    option: ClassVar[str | None] = "yarn"
    rope_type: ClassVar[str | None] = "yarn"
    config_keys: ClassVar[Mapping[str, str]] = {
        "base": "rope_theta",
        "factor": "factor",
        "trained_length": "original_max_position_embeddings",
        "beta_fast": "beta_fast",
        "beta_slow": "beta_slow",
        "truncate": "truncate",
        "attention_factor": "attention_factor",
        "mscale": "mscale",
        "mscale_all_dim": "mscale_all_dim",
    }

    base: float = 10_000.0
    factor: float = REQUIRED
    trained_length: int = 4096
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    ramp: Ramp = "index"
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    policy: Policy = "transformers"

    def __post_init__(self) -> None:
        _check(self, low="beta_slow", high="beta_fast")
        require_flag(self.truncate, asked="Yarn(truncate=...)")
        require_choice(self.ramp, RAMPS, asked="Yarn(ramp=...)")
        require_choice(self.policy, POLICIES, asked="Yarn(policy=...)")
        for name in ("attention_factor", "mscale", "mscale_all_dim"):
            value = getattr(self, name)
            if value is None:
                continue
            # DeepSeek's configs have 0 for "no mscale".
            if name == "attention_factor" or as_float(value) != 0:
                value = require_positive(value, asked=f"Yarn({name}=...)", do="leave it out to use the default")
            if value > 1e30:
                # The limit of `factor` too: the square of a larger number overflows in the softmax scale.
                expected, do = "a number of at most 1e30", "leave it out to use the default"
                raise RopewalkError(asked=f"Yarn({name}=...)", expected=expected, got=f"{value:g}", do=do)
            object.__setattr__(self, name, float(value))

    def evaluate(
        self, rotary_dim: int, length: ArrayT | float | None = None, arithmetic: Arithmetic[ArrayT] = FLOAT64
    ) -> ArrayT:
        if self.ramp == "ratio":
            return _by_rotations(self, rotary_dim, self.beta_slow, self.beta_fast, arithmetic)
        low, high = self.correction_range(rotary_dim)
        powers = arithmetic.powers(self.base, rotary_dim)
        index = arithmetic.array(range(rotary_dim // 2))
        # In the order of transformers' operations, so that float32 results are bit-identical to it.
        kept = 1 - arithmetic.clip((index - low) / (high - low), low=0.0, high=1.0)
        return 1.0 / (self.factor * powers) * (1 - kept) + 1.0 / powers * kept

    def correction_range(self, rotary_dim: int) -> tuple[float, float]:
        """Return the pair indices at which the ramp of ramp="index" starts and ends.

        Args:
            rotary_dim: Number of rotated features.

        >>> Yarn(10_000, factor=16, trained_length=4096).correction_range(128)
        (20, 46)
        """
        low, high = (
            rotary_dim * math.log(self.trained_length / (rotations * 2 * math.pi)) / (2 * math.log(self.base))
            for rotations in (self.beta_fast, self.beta_slow)
        )
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        # The published code clamps to d-1, although the last index is d/2-1. Models were trained with this.
        low, high = max(low, 0), min(high, rotary_dim - 1)
        return (low, high + 0.001) if low == high else (low, high)

    def amplitude(self, length: ArrayT | float | None = None, arithmetic: Arithmetic[ArrayT] = FLOAT64) -> float:
        if self.policy == "vllm":
            return self._g(1.0) * (1.0 if self.attention_factor is None else self.attention_factor)
        if self.attention_factor is not None:
            return self.attention_factor
        if self.policy == "deepseek":
            return self._g(1.0 if self.mscale is None else self.mscale) / self._g(self.mscale_all_dim or 0.0)
        return (
            self._g(self.mscale) / self._g(self.mscale_all_dim) if self.mscale and self.mscale_all_dim else self._g(1.0)
        )

    def to_config(self, rotary_dim: int) -> RopeConfig:
        if self.ramp != "index":
            raise no_rope_type(self)
        # transformers interprets the keys by its own policy. If that changes the amplitude, write the amplitude itself.
        if dataclasses.replace(self, policy="transformers").amplitude() == self.amplitude():
            return super().to_config(rotary_dim)
        explicit = dataclasses.replace(self, policy="transformers", attention_factor=self.amplitude())
        return explicit.to_config(rotary_dim)

    @property
    def softmax_scale(self) -> float:
        return self._g(self.mscale_all_dim or 0.0) ** 2 if self.policy == "deepseek" else 1.0

    def _g(self, mscale: float) -> float:
        return 0.1 * mscale * math.log(self.factor) + 1.0


def _check(rule: "NTKByParts | Llama3 | Yarn", *, low: str, high: str) -> None:
    """Check the fields that these rules share, and the two bounds on the number of rotations, which may be equal."""
    check_base(rule, above=1.0)
    check_factor(rule)
    check_trained_length(rule)
    name = type(rule).__name__
    for bound in (low, high):
        do = "pass a number of rotations within the trained length"
        rotations = require_positive(getattr(rule, bound), asked=f"{name}({bound}=...)", do=do)
        if not 1e-9 < rotations < 1e9:
            expected = "a number of rotations from 1e-9 to 1e9"
            raise RopewalkError(asked=f"{name}({bound}=...)", expected=expected, got=f"{rotations:g}", do=do)
        object.__setattr__(rule, bound, rotations)
    if getattr(rule, high) < getattr(rule, low):
        raise RopewalkError(
            asked=f"{name}({low}=..., {high}=...)",
            expected=f"{high} not below {low}",
            got=f"{low}={getattr(rule, low):g}, {high}={getattr(rule, high):g}",
            do="swap the two values if they are in the wrong order",
        )


def _by_rotations(
    rule: "NTKByParts | Llama3 | Yarn", rotary_dim: int, low: float, high: float, arithmetic: Arithmetic[ArrayT]
) -> ArrayT:
    """Return theta above `high` rotations within the trained length, theta / factor below `low`, and a ramp between.

    Operations are in the order of transformers, so that float32 results are bit-identical to it.
    """
    theta = 1.0 / arithmetic.powers(rule.base, rotary_dim)
    wavelength = 2 * math.pi / theta
    # Equal bounds, as in Llama 4 Scout, leave no ramp but a step from theta to theta / factor.
    gamma = (rule.trained_length / wavelength - low) / (high - low or 1.0)
    between = (1 - gamma) * theta / rule.factor + gamma * theta
    kept_or_between = arithmetic.where(wavelength < rule.trained_length / high, theta, between)
    return arithmetic.where(wavelength > rule.trained_length / low, theta / rule.factor, kept_or_between)
