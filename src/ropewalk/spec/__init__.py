"""Position encodings as values: frozen, hashable, computed by NumPy in float64, without torch.

The public names of the modules with frequency rules are re-exported here, so a new rule changes one file only.
"""

from ropewalk.spec import by_parts, frequencies, stretched
from ropewalk.spec.arithmetic import FLOAT64 as FLOAT64
from ropewalk.spec.arithmetic import Arithmetic as Arithmetic
from ropewalk.spec.arithmetic import Array as Array
from ropewalk.spec.arithmetic import ArrayT as ArrayT
from ropewalk.spec.arithmetic import as_array as as_array
from ropewalk.spec.axes import Axes as Axes
from ropewalk.spec.by_parts import *  # noqa: F403
from ropewalk.spec.frequencies import *  # noqa: F403
from ropewalk.spec.rope import AnglePrecision as AnglePrecision
from ropewalk.spec.rope import Pairing as Pairing
from ropewalk.spec.rope import RopeSpec as RopeSpec
from ropewalk.spec.rope import RotarySlice as RotarySlice
from ropewalk.spec.rope import Sign as Sign
from ropewalk.spec.stretched import *  # noqa: F403
from ropewalk.spec.temperature import LogTemperature as LogTemperature
from ropewalk.spec.temperature import QueryTemperature as QueryTemperature
from ropewalk.spec.temperature import StepTemperature as StepTemperature
from ropewalk.spec.xpos import XPos as XPos

__all__ = [
    "FLOAT64",
    "AnglePrecision",
    "Arithmetic",
    "Array",
    "ArrayT",
    "Axes",
    "LogTemperature",
    "Pairing",
    "QueryTemperature",
    "RopeSpec",
    "RotarySlice",
    "Sign",
    "StepTemperature",
    "XPos",
    "as_array",
]
__all__ += by_parts.__all__
__all__ += frequencies.__all__
__all__ += stretched.__all__
