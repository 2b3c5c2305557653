"""The words of `ropewalk inspect`: what rules are called, how numbers are written, what to do about a warning."""

import dataclasses
import math
from typing import Any

import numpy as np

from ropewalk.hub.configs.model import Model
from ropewalk.spec import RopeSpec

__all__ = [
    "ADVICE",
    "KIND_STYLES",
    "count_of",
    "features_of",
    "kind_of",
    "number",
    "pairing_of",
    "parameters_of",
    "window_of",
]

# How what became of a pair is coloured, where there are colours.
KIND_STYLES = {"unchanged": "green", "between": "yellow", "interpolated": "cyan", "still": "dim", "faster": "red"}

# What a rule is called outside of this package.
_RULES = {
    "Plain": "plain RoPE",
    "PositionInterpolation": "position interpolation (PI)",
    "NTK": "NTK-aware scaling",
    "NTKFixed": "NTK-aware scaling, fixed form",
    "NTKMixed": "NTK-aware scaling, mixed form",
    "NTKByParts": "NTK by parts",
    "DynamicNTK": "dynamic NTK",
    "Yarn": "YaRN",
    "Llama3": "Llama 3's rule (by parts)",
    "LongRope": "LongRoPE",
    "Proportional": "p-RoPE",
}

# What to do about each pitfall; hub/pitfalls.py says what they are.
ADVICE = {
    "amplitude-differs": "compare the amplitude above with that of the stack you serve with; load_spec(policy=...)",
    "dynamic-batch": "give each sequence its own length: rope(q, k, length=...)",
    "factor-differs": "set the factor that the model was tuned with; nothing, if it is the one in the config",
    "head-dim-null": "write the number, or remove the key",
    "int-for-float": "write the number with a point, such as 4.0",
    "key-ignored": "remove the key, or say the same by one that is read",
    "legacy-type": 'write "longrope"',
    "nested-truncate": "expect other frequencies from transformers than from stacks that read the key",
    "no-ramp": "nothing, if the model was trained so, as Llama 4 Scout was",
    "original-is-extended": "set original_max_position_embeddings to the length before the extension",
    "partial-truncated": "nothing, if the model was trained with transformers",
    "temperature-without-rotation": "multiply the queries of those layers yourself",
    "unknown-family": "hold what is shown here against the model's own code",
    "vllm-mrope-yarn": "expect other frequencies from vLLM than from transformers",
    "zero-is-unset": "remove the key, or write the number that is meant",
}


def kind_of(spec: RopeSpec) -> str:
    """The kind of RoPE in a few words.

    >>> kind_of(RopeSpec(128, rotary_dim=32))
    'plain RoPE, partial'
    """
    rule = type(spec.frequencies).__name__
    words = [_RULES.get(rule, rule)]
    if spec.turning < spec.head_dim:
        words.append("partial" if spec.rotary_slice == "leading" else "on the last part of a head")
    if spec.axes is not None:
        words.append(f"{spec.axes.count} axes")
    if spec.query_temperature is not None:
        words.append("query temperature")
    return ", ".join(words)


def parameters_of(spec: RopeSpec) -> str:
    """The parameters of the rule that are set.

    >>> from ropewalk.spec import PositionInterpolation
    >>> parameters_of(RopeSpec(8, PositionInterpolation(10_000, factor=4)))
    'base 10,000, factor 4'
    """
    rule: Any = spec.frequencies
    shown: list[str] = []
    for field in dataclasses.fields(rule):
        value = getattr(rule, field.name)
        if isinstance(value, tuple):
            shown.append(f"{field.name} {len(value)} numbers, {number(min(value))} to {number(max(value))}")
        elif value is not None and not isinstance(value, str):
            shown.append(f"{field.name} {str(value).lower() if isinstance(value, bool) else number(value)}")
        elif value is not None and value != field.default:
            shown.append(f"{field.name} {value}")
    return ", ".join(shown)


def pairing_of(spec: RopeSpec) -> str:
    """Which features form a pair.

    >>> pairing_of(RopeSpec(128, pairing="half"))
    'half: features i and i + 64'
    """
    if spec.pairing == "interleaved":
        return "interleaved: features 2i and 2i + 1"
    return f"half: features i and i + {spec.turning // 2}"


def features_of(spec: RopeSpec) -> str:
    """Which features of a head turn.

    >>> features_of(RopeSpec(192, rotary_dim=64, rotary_slice="trailing"))
    'the last 64 of 192 turn'
    >>> from ropewalk.spec import Proportional
    >>> features_of(RopeSpec(8, Proportional(1e4, 0.25)))
    '2 of 8 turn: other pairs stand still'
    """
    still = int((np.atleast_2d(spec.inv_freq())[0] == 0).sum())
    if still:
        return f"{spec.turning - 2 * still} of {spec.head_dim} turn: other pairs stand still"
    if spec.turning == spec.head_dim:
        return f"all {spec.head_dim} turn"
    where = "first" if spec.rotary_slice == "leading" else "last"
    return f"the {where} {spec.turning} of {spec.head_dim} turn"


def count_of(model: Model, layer: str) -> str:
    """How many layers are of a kind, or of which kinds they are where all rotate alike; "" where that is not known.

    >>> from ropewalk.hub.configs.model import read_model
    >>> config = {"model_type": "gpt_oss", "num_hidden_layers": 24, "rope_parameters": {"rope_theta": 150000.0}}
    >>> count_of(read_model(config), "")
    '24: 12 sliding_attention, 12 full_attention'
    """
    if model.kinds is None or (layer and layer not in model.kinds):
        return ""
    if layer:
        return f"{model.kinds.count(layer)} of {len(model.kinds)} layers"
    each = {kind: model.kinds.count(kind) for kind in model.kinds}
    kinds = ", ".join(f"{count} {kind}" for kind, count in each.items())
    return f"{len(model.kinds)}" + (f": {kinds}" if len(each) > 1 else "")


def window_of(model: Model, layer: str) -> str:
    """The window of a kind of layer, as far as the config says it; "" where there is none.

    >>> from ropewalk.hub.configs.model import read_model
    >>> config = {"model_type": "mistral", "head_dim": 8, "num_hidden_layers": 2, "sliding_window": 4096}
    >>> window_of(read_model(config), "")
    '4,096'
    """
    if model.window is None or (layer and "sliding" not in layer):
        return ""
    if layer:
        return number(model.window)
    if model.kinds is None:
        return f"{number(model.window)}, in layers that the config does not name"
    some = model.kinds.count("sliding_attention")
    return "" if not some else number(model.window) + ("" if some == len(model.kinds) else ", of sliding_attention")


def number(value: float) -> str:
    """A number as a person reads it: four digits, or whole with commas.

    >>> number(6.283185), number(2559196.3), number(0.0032009), number(8.0), number(1e12)
    ('6.283', '2,559,196', '0.003201', '8', '1e+12')
    """
    if math.isinf(value):
        return "∞"
    if abs(value) >= 1e10:
        return f"{value:.4g}"
    if abs(value) >= 1000 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.4g}"
