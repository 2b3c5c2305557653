"""The config of an extended model: the keys that change, in the forms of transformers 5 and 4, and the whole of it."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from ropewalk.errors import RopewalkError
from ropewalk.hub.configs.language import language_model
from ropewalk.hub.configs.model import read_model
from ropewalk.hub.extend.rules import Start
from ropewalk.hub.families.table import BASE_KEYS
from ropewalk.spec.rope import RopeSpec

__all__ = ["FIXED", "Form", "extended_config", "forms_of", "path_of"]

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

    `name` is "transformers 5" or "transformers 4".
    """

    name: str
    set: dict[str, Any]
    drop: tuple[str, ...]


def path_of(data: Mapping[str, Any], part: Mapping[str, Any]) -> tuple[str, ...]:
    """Where the config of the language model stands in the whole: () if it is the whole.

    >>> path_of({"text_config": {"hidden_size": 8}}, {"hidden_size": 8, "model_type": "gemma3_text"})
    ('text_config',)
    """
    for key, inner in data.items():
        if isinstance(inner, dict) and {**inner, "model_type": part.get("model_type")} == part:
            return (key,)
        if isinstance(inner, dict) and (deeper := path_of(inner, part)):
            return key, *deeper
    return ()


def forms_of(data: dict[str, Any], start: Start, spec: RopeSpec, length: int, pairing: str | None = None) -> list[Form]:
    """The forms in which a config can say `spec` for `start.layer` and leave all other layers as they are.

    Each was read back, and gives the same rotation. transformers 5 comes first. An error where there is none.

    >>> config = {"model_type": "llama", "head_dim": 4, "max_position_embeddings": 64, "rope_theta": 100.0}
    >>> from ropewalk.spec.stretched import PositionInterpolation
    >>> start = Start("", RopeSpec(4, pairing="half"), 100.0, 64, 64)
    >>> new = RopeSpec(4, PositionInterpolation(100.0, 2.0), pairing="half", angles="float32")
    >>> [(form.name, form.drop) for form in forms_of(config, start, new, 128)]
    [('transformers 5', ('rope_theta',)), ('transformers 4', ())]
    """
    part, family = language_model(data, pairing)
    if part.get("model_type") is None:
        raise RopewalkError(
            asked="a config of an extended model",
            expected="a config.json with a model_type",
            got="Mistral's params.json, which has keys for YaRN alone",
            do="use the config.json of the model",
        )
    if part["model_type"] in FIXED:
        raise RopewalkError(
            asked="a config of an extended model",
            expected=f"code that reads rope parameters; that of {part['model_type']} {FIXED[part['model_type']]}",
            got="keys that would change nothing",
            do="change the model's code, or use a model whose family reads them",
        )
    written = spec.to_config("transformers")
    keys = written.pop("rope_parameters")
    if str(part.get("model_type")).removesuffix("_text") in _ONLY_DEFAULT and keys["rope_type"] != "default":
        raise RopewalkError(
            asked="a config of an extended model",
            expected=f"a rope_type that transformers takes for {part['model_type']}: default or longrope",
            got=repr(keys["rope_type"]),
            do="use ntk, base-bound or base-law, which change the base alone",
        )
    longest = next((key for key in family.longest if key in part), family.longest[0])
    lengths = {longest: written.get("max_position_embeddings", length)}
    if part["model_type"] in _NEED_HEAD_DIM and part.get("head_dim") is None:
        lengths["head_dim"] = spec.head_dim
    model = read_model(data, pairing=pairing)
    expected = {name: spec if name == start.layer else other for name, other in model.layers}
    found = [
        form
        for form in _candidates(part, start.layer, expected, keys, lengths)
        if _says(extended_config(data, form, pairing), expected, length, pairing)
    ]
    if not found:
        raise RopewalkError(
            asked="a config of an extended model",
            expected="keys that change the layers that see everything and leave the others",
            got=f"a {part['model_type']} config, in which no form says that",
            do="keep the spec as JSON: RopeSpec.to_json",
        )
    return found


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


def extended_config(data: dict[str, Any], form: Form, pairing: str | None = None) -> dict[str, Any]:
    """The whole config with the keys of `form`, and everything else as it was, in its order.

    >>> config = {"model_type": "llama", "rope_theta": 10000.0, "head_dim": 8}
    >>> extended_config(config, Form("transformers 4", {"rope_theta": 20000.0}, ()))
    {'model_type': 'llama', 'rope_theta': 20000.0, 'head_dim': 8}
    """
    part, _ = language_model(data, pairing)
    path = path_of(data, part)

    def changed(inner: dict[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
        if path:
            return {key: changed(value, path[1:]) if key == path[0] else value for key, value in inner.items()}
        return {key: value for key, value in inner.items() if key not in form.drop} | form.set

    return changed(data, path)


def _says(config: dict[str, Any], expected: dict[str, RopeSpec | None], length: int, pairing: str | None) -> bool:
    """Whether a config is read as the rotations that are meant."""
    try:
        layers = dict(read_model(config, pairing=pairing).layers)
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
