"""The config of an extended model: the keys that change, for transformers 5 and 4, and the complete config."""

import dataclasses
from collections.abc import Iterator
from typing import Any, Literal

import numpy as np

from ropewalk.errors import RopewalkError
from ropewalk.hub.configs.parse import Config, parse_config
from ropewalk.hub.extend.rules import Start
from ropewalk.hub.families.family import BASE_KEYS
from ropewalk.spec.by_parts import Yarn
from ropewalk.spec.rope import RopeSpec
from ropewalk.spec.stretched import NTK

__all__ = ["FIXED", "Form", "extended_config", "forms_of", "has_no_rope_type"]

_LAYER_BASES = ("rope_local_base_freq", "global_rope_theta", "local_rope_theta")
# Keys among the rope parameters that do not belong to a frequency rule.
_NOT_OF_RULE = (
    "partial_rotary_factor",
    "mrope_section",
    "mrope_interleaved",
    "xdrope_section",
    "llama_4_scaling_beta",
    "rope_dim",
)
# The name of the form whose rope types `ropewalk.hub.register_rope_types` adds.
_REGISTERED = "transformers 5 with ropewalk"
# Families whose config classes in transformers 5 set head_dim to None by default, which their scaled rope types do not
# support.
_NEED_HEAD_DIM = ("hunyuan_v1_dense", "hunyuan_v1_moe", "hunyuan_vl_text", "minimax", "ministral", "mixtral")
# Families whose config classes in transformers reject every rope type except default and longrope.
_ONLY_DEFAULT = ("phi3", "phi4_multimodal")
# Families whose code in transformers does not read rope parameters from the config.
FIXED = {
    **dict.fromkeys(("clvp_encoder", "codegen", "gptj", "roformer"), "has a hard-coded base of 10000"),
    **dict.fromkeys(("seamless_m4t", "wav2vec2-bert", "wav2vec2-conformer"), "only reads rotary_embedding_base"),
}


@dataclasses.dataclass(frozen=True)
class Form:
    """Config keys that extend a model.

    Attributes:
        name: The version of transformers that reads these keys. "with ropewalk" means after a call of
            `ropewalk.hub.register_rope_types`.
        set: The keys to set in the config of the language model.
        drop: The keys to remove there.
    """

    name: Literal["transformers 5", "transformers 4", "transformers 5 with ropewalk"]
    set: dict[str, Any]
    drop: tuple[str, ...]


def forms_of(config: Config, start: Start, spec: RopeSpec, length: int) -> list[Form]:
    """The config keys that set `spec` for the layers of `start` and do not change any other layer.

    Every form is parsed again and compared with `spec`.

    Args:
        config: The config of the model.
        start: The starting point of the extension.
        spec: The new rotation.
        length: The number of positions to extend to.

    Returns:
        The forms, transformers 5 first.

    Raises:
        RopewalkError: If transformers cannot load `spec` for this model.

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
            expected=f"model code that reads rope parameters; the code of {model_type} {FIXED[model_type]}",
            got="keys without effect",
            do="change the model code, or use a model of a family that reads them",
        )
    registered = has_no_rope_type(spec)
    written = spec.to_config("ropewalk" if registered else "transformers")
    keys: dict[str, Any] = dict(written["rope_parameters"])
    if str(model_type).removesuffix("_text") in _ONLY_DEFAULT and keys["rope_type"] != "default":
        raise RopewalkError(
            asked=asked,
            expected=f"a rope_type that transformers accepts for {model_type}: default or longrope",
            got=repr(keys["rope_type"]),
            do="use ntk, base-bound or base-law, which change only the base",
        )
    longest = next((key for key in family.longest if key in part), family.longest[0])
    lengths = {longest: written.get("max_position_embeddings", length)}
    if model_type in _NEED_HEAD_DIM and part.get("head_dim") is None:
        lengths["head_dim"] = spec.head_dim
    expected = {name: spec if name == start.layer else other for name, other in config.layers.items()}
    forms = [
        form
        for form in _candidates(part, start.layer, expected, keys, lengths)
        if _is_read_as(config, form, expected, length)
    ]
    if not forms:
        raise RopewalkError(
            asked=asked,
            expected="keys that change the layers with full attention and no others",
            got=f"a {model_type} config, which has no such keys",
            do="store the spec as JSON: RopeSpec.to_json",
        )
    if registered:
        return [dataclasses.replace(form, name=_REGISTERED) for form in forms if form.name == "transformers 5"]
    return forms


def has_no_rope_type(spec: RopeSpec) -> bool:
    """Whether transformers itself has no rope type for the rule, but `ropewalk.hub.register_rope_types` adds one.

    >>> has_no_rope_type(RopeSpec(8)), has_no_rope_type(RopeSpec(8, Yarn(1e4, 4, 64, ramp="ratio")))
    (False, True)
    """
    rule = spec.frequencies
    by_ratio = isinstance(rule, Yarn) and rule.ramp != "index"
    # NTK is written as another base.
    return by_ratio or (rule.rope_type is None and not isinstance(rule, NTK))


def _candidates(
    part: dict[str, Any],
    layer: str,
    expected: dict[str, RopeSpec | None],
    keys: dict[str, Any],
    lengths: dict[str, int],
) -> Iterator[Form]:
    old: dict[str, Any] = part.get("rope_parameters") or part.get("rope_scaling") or {}
    inner: dict[str, Any] = old[layer] if isinstance(old.get(layer), dict) else old
    # Keys that do not belong to the rule stay where they are and are not written a second time.
    kept = {key: inner[key] for key in _NOT_OF_RULE if key in inner}
    keys = {key: value for key, value in keys.items() if key not in _NOT_OF_RULE} | kept
    dropped = tuple(key for key in (*BASE_KEYS, *_LAYER_BASES, "rope_scaling") if key in part)
    if layer == "" or layer == "rope":
        yield Form("transformers 5", lengths | {"rope_parameters": keys}, dropped)
    else:
        nested = {name: keys if name == layer else _unchanged(old, name, other) for name, other in expected.items()}
        yield Form("transformers 5", lengths | {"rope_parameters": nested}, dropped)
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
    return {key: value for key, value in keys.items() if key not in _NOT_OF_RULE}


def extended_config(config: Config, form: Form) -> dict[str, Any]:
    """The complete config with the keys of `form`. All other keys and their order are unchanged.

    >>> from ropewalk.hub.configs.keys import Caller
    >>> config = parse_config({"model_type": "llama", "rope_theta": 10000.0, "head_dim": 8}, Caller("doctest"))
    >>> extended_config(config, Form("transformers 4", {"rope_theta": 20000.0}, ()))
    {'model_type': 'llama', 'rope_theta': 20000.0, 'head_dim': 8}
    """
    return config.with_language(form.set, form.drop)


def _is_read_as(config: Config, form: Form, expected: dict[str, RopeSpec | None], length: int) -> bool:
    """Whether the config with the keys of `form` is parsed as the expected rotations."""
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
    without_rule = [dataclasses.replace(spec, frequencies=other.frequencies) for spec in (one, other)]
    return without_rule[0] == without_rule[1] and np.allclose(*numbers, rtol=1e-13, atol=0)
