"""Annotations of dtypes and shapes: `Float64[Tensor, "seq dim"]`.

They are the names of jaxtyping if it is imported before ropewalk, as its import hook is: the tests use that hook to
check every shape. Otherwise they are names for `typing.Annotated`, which keeps dtype and shape in signatures and checks
nothing, so that ropewalk needs no jaxtyping.

>>> import numpy as np
>>> "4" in str(Float64[np.ndarray, "4"])
True
"""

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING or "jaxtyping" not in sys.modules:
    from typing import Annotated as Complex128
    from typing import Annotated as Float
    from typing import Annotated as Float64
    from typing import Annotated as Int
    from typing import Annotated as Int64
    from typing import Annotated as Shaped
else:
    from jaxtyping import Complex128, Float, Float64, Int, Int64, Shaped

__all__ = ["Complex128", "Float", "Float64", "Int", "Int64", "Shaped"]
