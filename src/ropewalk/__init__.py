"""ropewalk: position in transformers.

Names load on first use (PEP 562), so that `import ropewalk` costs milliseconds and imports no torch;
type checkers read the imports below and see every name.

>>> import ropewalk as rw
>>> rw.RopeSpec(head_dim=4).inv_freq().tolist()
[1.0, 0.01]
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ropewalk.errors import RopewalkError as RopewalkError
    from ropewalk.nn.qk_norm import qk_norm_rope as qk_norm_rope
    from ropewalk.nn.rotary import RotaryEmbedding as RotaryEmbedding
    from ropewalk.reference.rotate import apply_rope as apply_rope
    from ropewalk.reference.rotate import build_rotary_frequencies as build_rotary_frequencies
    from ropewalk.spec.frequencies import Explicit as Explicit
    from ropewalk.spec.frequencies import Plain as Plain
    from ropewalk.spec.frequencies import WholeModel as WholeModel
    from ropewalk.spec.rope import RopeSpec as RopeSpec

__version__ = "0.1.0"

# Where each public name lives. tests/test_architecture.py holds it against the imports above.
_HOME = {
    "Explicit": "ropewalk.spec.frequencies",
    "Plain": "ropewalk.spec.frequencies",
    "RopeSpec": "ropewalk.spec.rope",
    "RopewalkError": "ropewalk.errors",
    "RotaryEmbedding": "ropewalk.nn.rotary",
    "WholeModel": "ropewalk.spec.frequencies",
    "apply_rope": "ropewalk.reference.rotate",
    "build_rotary_frequencies": "ropewalk.reference.rotate",
    "qk_norm_rope": "ropewalk.nn.qk_norm",
}

__all__ = [
    "Explicit",
    "Plain",
    "RopeSpec",
    "RopewalkError",
    "RotaryEmbedding",
    "WholeModel",
    "apply_rope",
    "build_rotary_frequencies",
    "qk_norm_rope",
]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'ropewalk' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
