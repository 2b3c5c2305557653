"""Released models: functions that read, inspect and extend their configs and convert their checkpoints.

Names are imported on first use. Those that read, inspect and extend configs and convert checkpoints need no torch.

>>> from ropewalk import hub
>>> hub.read_model({"model_type": "llama", "head_dim": 64}).layers[0][1].pairing
'half'
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ropewalk.hub.adapters.arrays import to_jax as to_jax
    from ropewalk.hub.adapters.arrays import to_mlx as to_mlx
    from ropewalk.hub.adapters.kernel_layer.folder import kernel_layer_for as kernel_layer_for
    from ropewalk.hub.adapters.kernel_layer.folder import write_kernel_layer as write_kernel_layer
    from ropewalk.hub.adapters.onnx import onnx_rotary_nodes as onnx_rotary_nodes
    from ropewalk.hub.adapters.rope_types import register_rope_types as register_rope_types
    from ropewalk.hub.configs.learned import HeadTemperature as HeadTemperature
    from ropewalk.hub.configs.learned import LearnedRope as LearnedRope
    from ropewalk.hub.configs.learned import load_learned as load_learned
    from ropewalk.hub.configs.model import Lengths as Lengths
    from ropewalk.hub.configs.model import Model as Model
    from ropewalk.hub.configs.model import read_model as read_model
    from ropewalk.hub.configs.parse import load_spec as load_spec
    from ropewalk.hub.configs.pitfalls import RopeConfigWarning as RopeConfigWarning
    from ropewalk.hub.convert.conversion import Conversion as Conversion
    from ropewalk.hub.convert.conversion import UnprovenError as UnprovenError
    from ropewalk.hub.convert.conversion import convert_checkpoint as convert_checkpoint
    from ropewalk.hub.convert.conversion import verify_conversion as verify_conversion
    from ropewalk.hub.convert.proof import Proof as Proof
    from ropewalk.hub.extend.extension import ModelExtension as ModelExtension
    from ropewalk.hub.extend.extension import extend_model as extend_model
    from ropewalk.hub.inspection import Inspection as Inspection
    from ropewalk.hub.inspection import inspect_model as inspect_model

_HOME = {
    "Conversion": "ropewalk.hub.convert.conversion",
    "HeadTemperature": "ropewalk.hub.configs.learned",
    "Inspection": "ropewalk.hub.inspection",
    "LearnedRope": "ropewalk.hub.configs.learned",
    "Lengths": "ropewalk.hub.configs.model",
    "Model": "ropewalk.hub.configs.model",
    "ModelExtension": "ropewalk.hub.extend.extension",
    "Proof": "ropewalk.hub.convert.proof",
    "RopeConfigWarning": "ropewalk.hub.configs.pitfalls",
    "UnprovenError": "ropewalk.hub.convert.conversion",
    "convert_checkpoint": "ropewalk.hub.convert.conversion",
    "extend_model": "ropewalk.hub.extend.extension",
    "inspect_model": "ropewalk.hub.inspection",
    "kernel_layer_for": "ropewalk.hub.adapters.kernel_layer.folder",
    "load_learned": "ropewalk.hub.configs.learned",
    "load_spec": "ropewalk.hub.configs.parse",
    "onnx_rotary_nodes": "ropewalk.hub.adapters.onnx",
    "read_model": "ropewalk.hub.configs.model",
    "register_rope_types": "ropewalk.hub.adapters.rope_types",
    "to_jax": "ropewalk.hub.adapters.arrays",
    "to_mlx": "ropewalk.hub.adapters.arrays",
    "verify_conversion": "ropewalk.hub.convert.conversion",
    "write_kernel_layer": "ropewalk.hub.adapters.kernel_layer.folder",
}

__all__ = [
    "Conversion",
    "HeadTemperature",
    "Inspection",
    "LearnedRope",
    "Lengths",
    "Model",
    "ModelExtension",
    "Proof",
    "RopeConfigWarning",
    "UnprovenError",
    "convert_checkpoint",
    "extend_model",
    "inspect_model",
    "kernel_layer_for",
    "load_learned",
    "load_spec",
    "onnx_rotary_nodes",
    "read_model",
    "register_rope_types",
    "to_jax",
    "to_mlx",
    "verify_conversion",
    "write_kernel_layer",
]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        return importlib.import_module("ropewalk.deprecation").renamed_name("ropewalk.hub", name)
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
