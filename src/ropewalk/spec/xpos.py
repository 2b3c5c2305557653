"""xPos: queries grow and keys shrink with position, so that scores fall with distance."""

import dataclasses
import math
from typing import final

from ropewalk.errors import RopewalkError, as_float, require_count, require_positive, shown
from ropewalk.spec.arithmetic import FLOAT64, Arithmetic, ArrayT, as_array

__all__ = ["XPos"]

# The largest factor on a query or key: far from what float32 and bfloat16 hold, so that products of two stay finite.
MOST = 2.0**60


@final
@dataclasses.dataclass(frozen=True)
class XPos:
    """Queries at m are multiplied by zeta_i^((m - length/2) / scale_base), keys by its inverse (2212.10554, eq. 17).

    zeta_i = (2i/d + gamma) / (1 + gamma), so a score is multiplied by zeta_i^((m - n) / scale_base): it falls with the
    distance, fast pairs first.

    Differs from the paper, whose exponent is m itself and leaves float32 within a hundred tokens: exponents are divided
    by scale_base, as in the authors' code, and are centred at length/2. The authors' code centres at half of what it is
    given, so that decoding does not continue a prefill; here the centre is part of the value. A length whose factors
    would pass 2^60 is refused: float32 and bfloat16 hold them, float16 does not hold all.

    >>> import numpy as np
    >>> [round(x, 6) for x in XPos(length=1024).log_scale(4, np.array([[0.0]]))[0].tolist()]  # ln(0.4/1.4), ln(0.9/1.4)
    [1.252763, 0.441833]
    """

    length: int
    scale_base: float = 512.0
    gamma: float = 0.4

    def __post_init__(self) -> None:
        do = "pass the longest context that the model is to see"
        object.__setattr__(self, "length", require_count(self.length, asked="XPos(length=...)", do=do))
        if self.length > 1 << 53 or not (as_float(self.gamma) or 0.0) > 1e-6:
            raise RopewalkError(
                asked="XPos(length=..., gamma=...)",
                expected="at most 2^53 positions, and a gamma above 1e-6",
                got=f"length {shown(self.length)}, gamma {shown(self.gamma)}",
                do="0.4 is the authors' gamma",
            )
        for name, usual in (("scale_base", "512"), ("gamma", "0.4")):
            number = require_positive(getattr(self, name), asked=f"XPos({name}=...)", do=f"{usual} is the authors'")
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
        """The logarithm of a query's factor, [.., pairs] for positions [.., 1]; of a key's it is the negative."""
        pairs = range(rotary_dim // 2)
        zeta = [math.log((2 * i / rotary_dim + self.gamma) / (1 + self.gamma)) for i in pairs]
        return (as_array(positions, arithmetic) - self.length / 2) / self.scale_base * arithmetic.array(zeta)
