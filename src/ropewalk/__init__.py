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
    from ropewalk.hub.config import load_spec as load_spec
    from ropewalk.hub.patch import accelerate as accelerate
    from ropewalk.hub.pitfalls import RopeConfigWarning as RopeConfigWarning
    from ropewalk.nn.attention import Attention as Attention
    from ropewalk.nn.cache import KVCache as KVCache
    from ropewalk.nn.encoding import Encoding as Encoding
    from ropewalk.nn.encoding import encoding as encoding
    from ropewalk.nn.feature_maps import FavorFeatures as FavorFeatures
    from ropewalk.nn.linear_attention import linear_attention as linear_attention
    from ropewalk.nn.linear_layer import LinearAttention as LinearAttention
    from ropewalk.nn.linear_state import LinearState as LinearState
    from ropewalk.nn.qk_norm import qk_norm_rope as qk_norm_rope
    from ropewalk.nn.rotary import RotaryEmbedding as RotaryEmbedding
    from ropewalk.reference.rotate import apply_rope as apply_rope
    from ropewalk.reference.rotate import build_rotary_frequencies as build_rotary_frequencies
    from ropewalk.spec.arithmetic import FLOAT64 as FLOAT64
    from ropewalk.spec.axes import Axes as Axes
    from ropewalk.spec.by_parts import Llama3 as Llama3
    from ropewalk.spec.by_parts import NTKByParts as NTKByParts
    from ropewalk.spec.by_parts import Yarn as Yarn
    from ropewalk.spec.frequencies import Explicit as Explicit
    from ropewalk.spec.frequencies import Frequencies as Frequencies
    from ropewalk.spec.frequencies import Plain as Plain
    from ropewalk.spec.frequencies import Proportional as Proportional
    from ropewalk.spec.frequencies import WholeModel as WholeModel
    from ropewalk.spec.rope import RopeSpec as RopeSpec
    from ropewalk.spec.stretched import NTK as NTK
    from ropewalk.spec.stretched import DynamicNTK as DynamicNTK
    from ropewalk.spec.stretched import Linear as Linear
    from ropewalk.spec.stretched import LongRope as LongRope
    from ropewalk.spec.stretched import NTKFixed as NTKFixed
    from ropewalk.spec.stretched import NTKMixed as NTKMixed
    from ropewalk.spec.temperature import LogTemperature as LogTemperature
    from ropewalk.spec.temperature import QueryTemperature as QueryTemperature
    from ropewalk.spec.temperature import StepTemperature as StepTemperature
    from ropewalk.spec.xpos import XPos as XPos

__version__ = "0.1.0"

# Where each public name lives. tests/test_architecture.py holds it against the imports above.
_HOME = {
    "Attention": "ropewalk.nn.attention",
    "Axes": "ropewalk.spec.axes",
    "DynamicNTK": "ropewalk.spec.stretched",
    "Encoding": "ropewalk.nn.encoding",
    "Explicit": "ropewalk.spec.frequencies",
    "FLOAT64": "ropewalk.spec.arithmetic",
    "FavorFeatures": "ropewalk.nn.feature_maps",
    "Frequencies": "ropewalk.spec.frequencies",
    "KVCache": "ropewalk.nn.cache",
    "Linear": "ropewalk.spec.stretched",
    "LinearAttention": "ropewalk.nn.linear_layer",
    "LinearState": "ropewalk.nn.linear_state",
    "Llama3": "ropewalk.spec.by_parts",
    "LogTemperature": "ropewalk.spec.temperature",
    "LongRope": "ropewalk.spec.stretched",
    "NTK": "ropewalk.spec.stretched",
    "NTKByParts": "ropewalk.spec.by_parts",
    "NTKFixed": "ropewalk.spec.stretched",
    "NTKMixed": "ropewalk.spec.stretched",
    "Plain": "ropewalk.spec.frequencies",
    "Proportional": "ropewalk.spec.frequencies",
    "QueryTemperature": "ropewalk.spec.temperature",
    "RopeConfigWarning": "ropewalk.hub.pitfalls",
    "RopeSpec": "ropewalk.spec.rope",
    "RopewalkError": "ropewalk.errors",
    "RotaryEmbedding": "ropewalk.nn.rotary",
    "StepTemperature": "ropewalk.spec.temperature",
    "WholeModel": "ropewalk.spec.frequencies",
    "XPos": "ropewalk.spec.xpos",
    "Yarn": "ropewalk.spec.by_parts",
    "accelerate": "ropewalk.hub.patch",
    "apply_rope": "ropewalk.reference.rotate",
    "build_rotary_frequencies": "ropewalk.reference.rotate",
    "encoding": "ropewalk.nn.encoding",
    "linear_attention": "ropewalk.nn.linear_attention",
    "load_spec": "ropewalk.hub.config",
    "qk_norm_rope": "ropewalk.nn.qk_norm",
}

__all__ = [
    "FLOAT64",
    "NTK",
    "Attention",
    "Axes",
    "DynamicNTK",
    "Encoding",
    "Explicit",
    "FavorFeatures",
    "Frequencies",
    "KVCache",
    "Linear",
    "LinearAttention",
    "LinearState",
    "Llama3",
    "LogTemperature",
    "LongRope",
    "NTKByParts",
    "NTKFixed",
    "NTKMixed",
    "Plain",
    "Proportional",
    "QueryTemperature",
    "RopeConfigWarning",
    "RopeSpec",
    "RopewalkError",
    "RotaryEmbedding",
    "StepTemperature",
    "WholeModel",
    "XPos",
    "Yarn",
    "accelerate",
    "apply_rope",
    "build_rotary_frequencies",
    "encoding",
    "linear_attention",
    "load_spec",
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
