"""ropewalk: position in transformers.

Names are loaded on first use (PEP 562), so `import ropewalk` takes milliseconds and does not import torch.
Type checkers read the imports below.

>>> import ropewalk as rw
>>> rw.RopeSpec(head_dim=4).inv_freq().tolist()
[1.0, 0.01]
"""

import importlib
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ropewalk import hub as hub
    from ropewalk import parallel as parallel
    from ropewalk import positions as positions
    from ropewalk import reference as reference
    from ropewalk import spec as spec
    from ropewalk import theory as theory
    from ropewalk.errors import RopewalkError as RopewalkError
    from ropewalk.errors import RopewalkWarning as RopewalkWarning
    from ropewalk.hub.accelerate.acceleration import accelerate as accelerate
    from ropewalk.hub.configs.parse import load_spec as load_spec
    from ropewalk.hub.configs.pitfalls import RopeConfigWarning as RopeConfigWarning
    from ropewalk.nn.attention.cache import KVCache as KVCache
    from ropewalk.nn.attention.cache_interface import Cache as Cache
    from ropewalk.nn.attention.cache_interface import CachedTokens as CachedTokens
    from ropewalk.nn.attention.function import attention as attention
    from ropewalk.nn.attention.layer import Attention as Attention
    from ropewalk.nn.attention.rolling_cache import RollingKVCache as RollingKVCache
    from ropewalk.nn.attention.visibility import Visibility as Visibility
    from ropewalk.nn.encodings.base import DistanceBias as DistanceBias
    from ropewalk.nn.encodings.by_name import Encoding as Encoding
    from ropewalk.nn.encodings.by_name import encoding as encoding
    from ropewalk.nn.linear.feature_maps import FavorFeatures as FavorFeatures
    from ropewalk.nn.linear.function import linear_attention as linear_attention
    from ropewalk.nn.linear.keys_alone import linear_state as linear_state
    from ropewalk.nn.linear.layer import LinearAttention as LinearAttention
    from ropewalk.nn.linear.state import LinearState as LinearState
    from ropewalk.nn.rotary.embedding import RotaryEmbedding as RotaryEmbedding
    from ropewalk.nn.rotary.functions import apply_rope as apply_rope
    from ropewalk.nn.rotary.functions import build_rotary_frequencies as build_rotary_frequencies
    from ropewalk.nn.rotary.qk_norm import qk_norm_rope as qk_norm_rope
    from ropewalk.reference.rotation_matrix import rotation_matrix as rotation_matrix
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
    from ropewalk.spec.stretched import PositionInterpolation as PositionInterpolation
    from ropewalk.spec.temperature import LogTemperature as LogTemperature
    from ropewalk.spec.temperature import QueryTemperature as QueryTemperature
    from ropewalk.spec.temperature import StepTemperature as StepTemperature
    from ropewalk.spec.xpos import XPos as XPos

__version__ = "0.2.0"

# The module that defines each public name. A test in tests/architecture compares it with the imports above.
_HOME = {
    "AcrossHeads": "ropewalk.spec.frequencies",
    "Attention": "ropewalk.nn.attention.layer",
    "Axes": "ropewalk.spec.axes",
    "Cache": "ropewalk.nn.attention.cache_interface",
    "CachedTokens": "ropewalk.nn.attention.cache_interface",
    "DistanceBias": "ropewalk.nn.encodings.base",
    "DynamicNTK": "ropewalk.spec.stretched",
    "Encoding": "ropewalk.nn.encodings.by_name",
    "Explicit": "ropewalk.spec.frequencies",
    "FavorFeatures": "ropewalk.nn.linear.feature_maps",
    "Frequencies": "ropewalk.spec.frequencies",
    "KVCache": "ropewalk.nn.attention.cache",
    "LinearAttention": "ropewalk.nn.linear.layer",
    "LinearState": "ropewalk.nn.linear.state",
    "Llama3": "ropewalk.spec.by_parts",
    "LogTemperature": "ropewalk.spec.temperature",
    "LongRope": "ropewalk.spec.stretched",
    "NTK": "ropewalk.spec.stretched",
    "NTKByParts": "ropewalk.spec.by_parts",
    "Plain": "ropewalk.spec.frequencies",
    "PositionInterpolation": "ropewalk.spec.stretched",
    "Proportional": "ropewalk.spec.frequencies",
    "QueryTemperature": "ropewalk.spec.temperature",
    "RollingKVCache": "ropewalk.nn.attention.rolling_cache",
    "RopeConfigWarning": "ropewalk.hub.configs.pitfalls",
    "RopeSpec": "ropewalk.spec.rope",
    "RopewalkError": "ropewalk.errors",
    "RopewalkWarning": "ropewalk.errors",
    "RotaryEmbedding": "ropewalk.nn.rotary.embedding",
    "StepTemperature": "ropewalk.spec.temperature",
    "Visibility": "ropewalk.nn.attention.visibility",
    "XPos": "ropewalk.spec.xpos",
    "Yarn": "ropewalk.spec.by_parts",
    "accelerate": "ropewalk.hub.accelerate.acceleration",
    "apply_rope": "ropewalk.nn.rotary.functions",
    "attention": "ropewalk.nn.attention.function",
    "build_rotary_frequencies": "ropewalk.nn.rotary.functions",
    "encoding": "ropewalk.nn.encodings.by_name",
    "linear_attention": "ropewalk.nn.linear.function",
    "linear_state": "ropewalk.nn.linear.keys_alone",
    "load_spec": "ropewalk.hub.configs.parse",
    "qk_norm_rope": "ropewalk.nn.rotary.qk_norm",
    "rotation_matrix": "ropewalk.reference.rotation_matrix",
}

# Packages and modules with their own public names: rw.hub.inspect_model works without importing ropewalk.hub.
_PACKAGES = ("hub", "parallel", "positions", "reference", "spec", "theory")

__all__ = [
    "NTK",
    "AcrossHeads",
    "Attention",
    "Axes",
    "Cache",
    "CachedTokens",
    "DistanceBias",
    "DynamicNTK",
    "Encoding",
    "Explicit",
    "FavorFeatures",
    "Frequencies",
    "KVCache",
    "LinearAttention",
    "LinearState",
    "Llama3",
    "LogTemperature",
    "LongRope",
    "NTKByParts",
    "Plain",
    "PositionInterpolation",
    "Proportional",
    "QueryTemperature",
    "RollingKVCache",
    "RopeConfigWarning",
    "RopeSpec",
    "RopewalkError",
    "RopewalkWarning",
    "RotaryEmbedding",
    "StepTemperature",
    "Visibility",
    "XPos",
    "Yarn",
    "accelerate",
    "apply_rope",
    "attention",
    "build_rotary_frequencies",
    "encoding",
    "linear_attention",
    "linear_state",
    "load_spec",
    "positions",
    "qk_norm_rope",
    "rotation_matrix",
]


if not TYPE_CHECKING:
    # Hidden from type checkers: with a module-level __getattr__ they would accept any name.

    def __getattr__(name: str) -> object:
        if name in _PACKAGES:
            return importlib.import_module(f"ropewalk.{name}")
        if name not in _HOME:
            try:
                return importlib.import_module("ropewalk.deprecation").renamed_name("ropewalk", name)
            except AttributeError as error:
                if type(error) is not AttributeError and sys._getframe(1).f_code.co_name == "_handle_fromlist":
                    # `from ropewalk import Linear`: Python replaces an AttributeError by an error without the new name.
                    raise ImportError(str(error), name="ropewalk") from None
                raise
        value = getattr(importlib.import_module(_HOME[name]), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
