"""xPos: factors on queries and keys that depend on position, so that scores decrease with distance."""

import dataclasses
import math
from typing import final

from ropewalk.errors import RopewalkError, as_float, require_count, require_positive, shown
from ropewalk.signatures import checks_names
from ropewalk.spec.arithmetic import FLOAT64, Arithmetic, ArrayT, as_array

__all__ = ["XPos"]

# The largest factor on a query or key: products of two stay finite in float32 and bfloat16.
MOST = 2.0**60


@final
@checks_names
@dataclasses.dataclass(frozen=True)
class XPos:
    """Factors zeta_i^((m - length/2) / scale_base) on queries at m, and their inverses on keys (2212.10554, eq. 17).

    zeta_i = (2i/d + gamma) / (1 + gamma), so the score of a query at m and a key at n is multiplied by
    zeta_i^((m - n) / scale_base). It decreases with the distance, fastest in the pairs of high frequency.

    Differs from the paper: its exponent is m, and its factors leave the range of float32 within a hundred tokens. Here
    exponents are divided by scale_base, as in the authors' code, and centred at length/2. The authors' code centres at
    half the length of its input, so decoding does not continue a prefill. Here the centre is part of the value.

    Args:
        length: Longest context that the model uses. Factors of up to 2^60 are accepted: float32 and bfloat16 can
            represent them, float16 cannot represent all of them.
        scale_base: Divisor of the exponents.
        gamma: Offset in zeta_i. Above 1e-6.

    Raises:
        RopewalkError: If a field is invalid, or if a factor within `length` exceeds 2^60.

    >>> import numpy as np
    >>> [round(x, 6) for x in XPos(length=1024).log_scale(4, np.array([[0.0]]))[0].tolist()]  # ln(0.4/1.4), ln(0.9/1.4)
    [1.252763, 0.441833]
    """

    length: int
    scale_base: float = 512.0
    gamma: float = 0.4

    def __post_init__(self) -> None:
        do = "pass the longest context that the model uses"
        object.__setattr__(self, "length", require_count(self.length, asked="XPos(length=...)", do=do))
        if self.length > 1 << 53 or not (as_float(self.gamma) or 0.0) > 1e-6:
            raise RopewalkError(
                asked="XPos(length=..., gamma=...)",
                expected="at most 2^53 positions, and a gamma above 1e-6",
                got=f"length {shown(self.length)}, gamma {shown(self.gamma)}",
                do="use gamma=0.4, as the authors do",
            )
        for name, usual in (("scale_base", "512"), ("gamma", "0.4")):
            number = require_positive(
                getattr(self, name), asked=f"XPos({name}=...)", do=f"use {usual}, as the authors do"
            )
            object.__setattr__(self, name, number)
        largest = self.length / 2 / self.scale_base * math.log((1 + self.gamma) / self.gamma)
        if largest > math.log(MOST):
            needed = self.length / 2 * math.log((1 + self.gamma) / self.gamma) / math.log(MOST)
            raise RopewalkError(
                asked=f"XPos(length={self.length}, scale_base={self.scale_base:g})",
                expected="factors of at most 2^60 at both ends of the context",
                got=f"2^{largest / math.log(2):.0f}",
                do=f"raise scale_base to at least {math.ceil(needed)}",
            )

    def log_scale(self, rotary_dim: int, positions: ArrayT | float, arithmetic: Arithmetic[ArrayT] = FLOAT64) -> ArrayT:
        """Return the logarithm of the factor on queries. The factor on keys has the negative logarithm.

        Args:
            rotary_dim: Number of rotated features.
            positions: A number, or an array [..., 1] of `arithmetic`.
            arithmetic: Array library and dtype to compute in.

        Returns:
            Logarithms [..., pairs].
        """
        pairs = range(rotary_dim // 2)
        zeta = [math.log((2 * i / rotary_dim + self.gamma) / (1 + self.gamma)) for i in pairs]
        return (as_array(positions, arithmetic) - self.length / 2) / self.scale_base * arithmetic.array(zeta)
