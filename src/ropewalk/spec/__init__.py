"""What an encoding IS: frozen, hashable values in NumPy float64, without torch."""

from ropewalk.spec.frequencies import Explicit as Explicit
from ropewalk.spec.frequencies import Frequencies as Frequencies
from ropewalk.spec.frequencies import Plain as Plain
from ropewalk.spec.frequencies import WholeModel as WholeModel
from ropewalk.spec.rope import RopeSpec as RopeSpec

__all__ = ["Explicit", "Frequencies", "Plain", "RopeSpec", "WholeModel"]
