"""The config of an extended model: the keys that change, in the forms of transformers 5 and 4, and the whole of it."""

import dataclasses
from collections.abc import Iterator
from typing import Any, Literal

import numpy as np

from ropewalk.errors import RopewalkError
from ropewalk.hub.configs.parse import Config, parse_config
from ropewalk.hub.extend.rules import Start
from ropewalk.hub.families.family import BASE_KEYS
from ropewalk.spec.rope import RopeSpec

__all__ = ["FIXED", "Form", "extended_config", "forms_of"]

_LAYER_BASES = ("rope_local_base_freq", "global_rope_theta", "local_rope_theta")
# What stands among the rope parameters and is no part of a rule.
_BESIDES = (
    "partial_rotary_factor",
    "mrope_section",
    "mrope_interleaved",
    "xdrope_section",
    "llama_4_scaling_beta",
    "rope_dim",
)
# Families whose classes in transformers 5 leave head_dim null where a config has none, which their scaled rope types
# cannot read.
_NEED_HEAD_DIM = ("hunyuan_v1_dense", "hunyuan_v1_moe", "hunyuan_vl_text", "minimax", "ministral", "mixtral")
# Families whose classes in transformers refuse every other type.
_ONLY_DEFAULT = ("phi3", "phi4_multimodal")
# Families whose code in transformers reads no rope parameters, whatever a config says.
FIXED = {
    **dict.fromkeys(("clvp_encoder", "codegen", "gptj", "roformer"), "has its base of 10000 written in"),
    **dict.fromkeys(("seamless_m4t", "wav2vec2-bert", "wav2vec2-conformer"), "reads rotary_embedding_base alone"),
}


@dataclasses.dataclass(frozen=True)
class Form:
    """Keys that extend a model: what to `set` in the config of its language model, and which keys to `drop` there.

    `name` is the version of transformers whose keys they are.
    """

    name: Literal["transformers 5", "transformers 4"]
    set: dict[str, Any]
    drop: tuple[str, ...]


def forms_of(config: Config, start: Start, spec: RopeSpec, length: int) -> list[Form]:
    """The forms in which a config can say `spec` for `start.layer` and leave all other layers as they are.

    Each was read back, and gives the same rotation. transformers 5 comes first. An error where there is none.

    >>> from ropewalk.hub.configs.keys import Caller
    >>> from ropewalk.spec.stretched import PositionInterpolation
    >>> data = {"model_type": "llama", "head_dim": 4, "max_position_embeddings": 64, "rope_theta": 100.0}
    >>> start = Start("", RopeSpec(4, pairing="half"), 100.0, 64, 64)
    >>> new = RopeSpec(4, PositionInterpolation(100.0, 2.0), pairing="half", angles="float32")
    >>> [(form.name, form.drop) for form in forms_of(parse_config(data, Caller("doctest")), start, new, 128)]
    [('transformers 5', ('rope_theta',)), ('transformers 4', ())]
    """
    part, family = config.language.data, config.language.family
    asked, model_type = config.caller.asked("a config of an extended model"), part.get("model_type")
    if model_type is None:
        raise RopewalkError(
            asked=asked,
            expected="a config.json with a model_type",
            got="a params.json, which has keys for one rule at most",
            do="use the config.json of the model",
        )
    if model_type in FIXED:
        raise RopewalkError(
            asked=asked,
            expected=f"code that reads rope parameters; that of {model_type} {FIXED[model_type]}",
            got="keys that would change nothing",
            do="change the model's code, or use a model whose family reads them",
        )
    written = spec.to_config("transformers")
    keys: dict[str, Any] = dict(written["rope_parameters"])
    if str(model_type).removesuffix("_text") in _ONLY_DEFAULT and keys["rope_type"] != "default":
        raise RopewalkError(
            asked=asked,
            expected=f"a rope_type that transformers takes for {model_type}: default or longrope",
            got=repr(keys["rope_type"]),
            do="use ntk, base-bound or base-law, which change the base alone",
        )
    longest = next((key for key in family.longest if key in part), family.longest[0])
    lengths = {longest: written.get("max_position_embeddings", length)}
    if model_type in _NEED_HEAD_DIM and part.get("head_dim") is None:
        lengths["head_dim"] = spec.head_dim
    expected = {name: spec if name == start.layer else other for name, other in config.layers.items()}
    forms = [
        form
        for form in _candidates(part, start.layer, expected, keys, lengths)
        if _says(config, form, expected, length)
    ]
    if not forms:
        raise RopewalkError(
            asked=asked,
            expected="keys that change the layers that see everything and leave the others",
            got=f"a {model_type} config, in which no form says that",
            do="keep the spec as JSON: RopeSpec.to_json",
        )
    return forms


def _candidates(
    part: dict[str, Any],
    layer: str,
    expected: dict[str, RopeSpec | None],
    keys: dict[str, Any],
    lengths: dict[str, int],
) -> Iterator[Form]:
    old: dict[str, Any] = part.get("rope_parameters") or part.get("rope_scaling") or {}
    inner: dict[str, Any] = old[layer] if isinstance(old.get(layer), dict) else old
    # What belongs to the model and not to the rule stays where it was, and is not said twice.
    kept = {key: inner[key] for key in _BESIDES if key in inner}
    keys = {key: value for key, value in keys.items() if key not in _BESIDES} | kept
    gone = tuple(key for key in (*BASE_KEYS, *_LAYER_BASES, "rope_scaling") if key in part)
    if layer == "" or layer == "rope":
        yield Form("transformers 5", lengths | {"rope_parameters": keys}, gone)
    else:
        nested = {name: keys if name == layer else _unchanged(old, name, other) for name, other in expected.items()}
        yield Form("transformers 5", lengths | {"rope_parameters": nested}, gone)
    base = next((key for key in (*BASE_KEYS, "global_rope_theta") if key in part), "rope_theta")
    scaling = {key: value for key, value in keys.items() if key != "rope_theta"}
    plain = scaling == {"rope_type": "default"}
    outer: dict[str, Any] = {base: keys["rope_theta"]}
    outer |= {"rope_scaling": None} if plain and "rope_scaling" in part else {} if plain else {"rope_scaling": scaling}
    yield Form("transformers 4", lengths | outer, tuple(key for key in ("rope_parameters",) if key in part))


def _unchanged(old: dict[str, Any], name: str, spec: RopeSpec | None) -> Any:
    if name in old or spec is None:
        return old.get(name)
    keys = spec.to_config("transformers")["rope_parameters"]
    return {key: value for key, value in keys.items() if key not in _BESIDES}


def extended_config(config: Config, form: Form) -> dict[str, Any]:
    """The whole config with the keys of `form`, and everything else as it was, in its order.

    >>> from ropewalk.hub.configs.keys import Caller
    >>> config = parse_config({"model_type": "llama", "rope_theta": 10000.0, "head_dim": 8}, Caller("doctest"))
    >>> extended_config(config, Form("transformers 4", {"rope_theta": 20000.0}, ()))
    {'model_type': 'llama', 'rope_theta': 20000.0, 'head_dim': 8}
    """
    return config.with_language(form.set, form.drop)


def _says(config: Config, form: Form, expected: dict[str, RopeSpec | None], length: int) -> bool:
    """Whether the config with this form is read as the rotations that are meant."""
    try:
        layers = parse_config(extended_config(config, form), config.caller, pairing=config.pairing).layers
    except RopewalkError:
        return False
    return layers.keys() == expected.keys() and all(_same(layers[name], expected[name], length) for name in expected)


def _same(one: RopeSpec | None, other: RopeSpec | None, length: int) -> bool:
    if one is None or other is None:
        return one is other
    numbers = [
        [*spec.inv_freq(length), *spec.inv_freq(), spec.amplitude(length), spec.softmax_scale] for spec in (one, other)
    ]
    rest = [dataclasses.replace(spec, frequencies=other.frequencies) for spec in (one, other)]
    return rest[0] == rest[1] and np.allclose(*numbers, rtol=1e-13, atol=0)
