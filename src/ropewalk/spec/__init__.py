"""What an encoding IS: frozen, hashable values in NumPy float64, without torch."""

from ropewalk.spec.arithmetic import FLOAT64 as FLOAT64
from ropewalk.spec.axes import Axes as Axes
from ropewalk.spec.by_parts import Llama3 as Llama3
from ropewalk.spec.by_parts import NTKByParts as NTKByParts
from ropewalk.spec.by_parts import Yarn as Yarn
from ropewalk.spec.frequencies import AcrossHeads as AcrossHeads
from ropewalk.spec.frequencies import Explicit as Explicit
from ropewalk.spec.frequencies import Frequencies as Frequencies
from ropewalk.spec.frequencies import Plain as Plain
from ropewalk.spec.frequencies import Proportional as Proportional
from ropewalk.spec.rope import RopeSpec as RopeSpec
from ropewalk.spec.stretched import NTK as NTK
from ropewalk.spec.stretched import DynamicNTK as DynamicNTK
from ropewalk.spec.stretched import LongRope as LongRope
from ropewalk.spec.stretched import NTKFixed as NTKFixed
from ropewalk.spec.stretched import NTKMixed as NTKMixed
from ropewalk.spec.stretched import PositionInterpolation as PositionInterpolation
from ropewalk.spec.temperature import LogTemperature as LogTemperature
from ropewalk.spec.temperature import QueryTemperature as QueryTemperature
from ropewalk.spec.temperature import StepTemperature as StepTemperature
from ropewalk.spec.xpos import XPos as XPos

__all__ = [
    "FLOAT64",
    "NTK",
    "AcrossHeads",
    "Axes",
    "DynamicNTK",
    "Explicit",
    "Frequencies",
    "Llama3",
    "LogTemperature",
    "LongRope",
    "NTKByParts",
    "NTKFixed",
    "NTKMixed",
    "Plain",
    "PositionInterpolation",
    "Proportional",
    "QueryTemperature",
    "RopeSpec",
    "StepTemperature",
    "XPos",
    "Yarn",
]
