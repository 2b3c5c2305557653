"""The layers of a model: the rope parameters of each layer type, the type of each layer, and the attention windows."""

from collections.abc import Callable, Mapping
from typing import Any

from ropewalk.errors import as_int, shown
from ropewalk.hub.configs.keys import Keys
from ropewalk.hub.configs.limits import LAYERS, MOST_COUNT, MOST_KINDS, MOST_LENGTH
from ropewalk.hub.families.family import BASE_KEYS, Family, LayerPattern, Sharing
from ropewalk.spec.rope import RopeSpec

__all__ = [
    "has_window",
    "kinds_by_number",
    "layer_count",
    "layer_kinds",
    "parameters_by_layer",
    "specs_by_number",
    "window_of",
]

# Per layer type: its rope parameters (None for no rotation), and whether they are nested in the config.
Layers = dict[str, tuple[Keys | None, bool]]
_FULL, _SLIDING = "full_attention", "sliding_attention"


def parameters_by_layer(model_keys: Keys, family: Family) -> Layers:
    """Return the rope parameters of each layer type, and whether they are nested in the config.

    Args:
        model_keys: The config of the language model.
        family: Its family.

    Returns:
        One (parameters, nested) per layer type. The parameters are None for layers that do not rotate. The key is "" if
        all layers have the same rotation.

    Raises:
        RopewalkError: If the parameters are invalid or missing.
    """
    layers = _by_layer(model_keys, family)
    if len(layers) > MOST_KINDS:
        expected, do = f"at most {MOST_KINDS} layer types with different rotations", model_keys.caller.pass_config
        raise model_keys.error("layer_types", expected, f"{len(layers)}", do)
    return layers


def _by_layer(model_keys: Keys, family: Family) -> Layers:
    parameters, types = _parameters(model_keys), _layer_types(model_keys)
    names = types | set(family.labels) | {"full_attention", "sliding_attention", "chunked_attention"}
    nested = {key: value for key, value in parameters.items() if key in names}
    # "rule" contains a whole rule: `RopeSpec.to_config("ropewalk")`.
    unknown = [key for key, value in parameters.items() if isinstance(value, dict) and key not in names | {"rule"}]
    if unknown:
        raise model_keys.error(
            f"rope_parameters.{unknown[0]}",
            f"the name of a layer type of this model: {', '.join(sorted(types)[:8]) or 'layer_types is missing'}",
            "an object under another name",
            "rename the key, or add it to layer_types",
        )
    if family.needs_parameters and not nested and (family.labels or not parameters):
        raise model_keys.error(
            "rope_parameters",
            "rope parameters" + (" per layer type" if family.labels else "") + "; the defaults of this family are not"
            " plain RoPE, and are only in its config class",
            "no such key" if not parameters else "one set for all layers",
            model_keys.caller.pass_whole_config,
        )
    if not nested:
        shared = _with_base(model_keys, family, parameters, strict=True)
        split = _SPLITS[family.layers](model_keys, shared, types)
        place = "rope_scaling" if model_keys.part("rope_scaling") else "rope_parameters"
        return {name: (None if part is None else model_keys.of(part, place), False) for name, part in split.items()}
    loose = [key for key in parameters if key not in nested]
    # transformers also writes the base of the model next to the layer types, which have their own.
    if set(loose) - {"rope_theta", "rope_type", "partial_rotary_factor"}:
        raise model_keys.error(
            f"rope_parameters.{loose[0]}",
            "only layer types at this level, since rope_parameters contains some",
            shown(parameters[loose[0]]),
            "move the key into the layer types that it applies to",
        )
    layers: Layers = {}
    for name, value in nested.items():
        place = f"rope_parameters.{name}"
        if value is not None and not isinstance(value, dict):
            do = "set it to an object, or to null for layers that do not rotate"
            raise model_keys.error(place, "an object or null", shown(value), do)
        with_base = None if value is None else _with_base(model_keys, family, value, strict=False)
        layers[name] = (None if with_base is None else model_keys.of(with_base, place), True)
    return layers


def _layer_types(model_keys: Keys) -> set[str]:
    types = _listed_values(model_keys, "layer_types")
    if not all(isinstance(name, str) for name in types):
        raise model_keys.error("layer_types", "a list of strings", shown(types), "write one layer type per layer")
    return {model_keys.as_name(name, "layer_types") for name in types}


def _listed_values(model_keys: Keys, key: str) -> list[Any]:
    """Return a list with one entry per layer, of any type. It is empty if the key is missing."""
    values = model_keys.raw(key)
    if values is None:
        return []
    if not isinstance(values, list) or len(values) > MOST_COUNT:
        got = f"{len(values)} entries" if isinstance(values, list) else shown(values)
        entries = "strings" if key == "layer_types" else "0 and 1"
        expected = f"a list of {entries}, with at most {MOST_COUNT} entries"
        raise model_keys.error(key, expected, got, "write one entry per layer")
    return values


def _parameters(model_keys: Keys) -> dict[str, Any]:
    """Return rope_parameters of transformers 5 or rope_scaling of transformers 4. Raise if they differ."""
    new, old = model_keys.part("rope_parameters"), model_keys.part("rope_scaling")
    if new and old and new != old:
        raise model_keys.error(
            "rope_scaling",
            "the same value as rope_parameters, or no such key",
            f"rope_scaling {shown(old)} and rope_parameters {shown(new)}",
            "remove the wrong one; transformers would use rope_scaling",
        )
    return new or old


def _with_base(model_keys: Keys, family: Family, parameters: dict[str, Any], *, strict: bool) -> dict[str, Any]:
    """Return the parameters with the base that is outside of them, if there is one. `strict`: raise if two differ."""
    merged = dict(parameters)
    for key in BASE_KEYS:
        if not model_keys.has(key):
            continue
        if key not in family.base_keys:
            model_keys.warn("key-ignored", f"{key!r} is not read for this family; rope_theta is")
            continue
        base, inside = model_keys.number(key), merged.get("rope_theta")
        if strict and inside is not None and inside != base:
            raise model_keys.error(
                key,
                "the same base as in the rope parameters",
                f"{base:g}, and {shown(inside)} in the rope parameters",
                "remove the wrong one",
            )
        merged.setdefault("rope_theta", base)
    # DBRX stores the base in attn_config.
    inner = model_keys.under("attn_config")
    if inner.has("rope_theta"):
        base = inner.number("rope_theta")
        if merged.setdefault("rope_theta", base) != base or len(merged) == 1:
            model_keys.warn(
                "key-ignored",
                f"'attn_config.rope_theta' is not read by transformers 5. {merged['rope_theta']} is used",
            )
    return merged


def _alike(model_keys: Keys, shared: dict[str, Any], types: set[str]) -> dict[str, Any]:
    return {"": shared}


def _none(model_keys: Keys, shared: dict[str, Any], types: set[str]) -> dict[str, Any]:
    return {"": None}


def _gemma(model_keys: Keys, shared: dict[str, Any], types: set[str]) -> dict[str, Any]:
    """Gemma 3 as written by transformers 4: the scaling and rope_theta are for full attention only."""
    local = {"rope_theta": model_keys.number("rope_local_base_freq")} if model_keys.has("rope_local_base_freq") else {}
    return {"sliding_attention": local, "full_attention": shared}


def _modernbert(model_keys: Keys, shared: dict[str, Any], types: set[str]) -> dict[str, Any]:
    """Two bases, with the same scaling."""
    keys = {"sliding_attention": "local_rope_theta", "full_attention": "global_rope_theta"}
    bases = {name: {"rope_theta": model_keys.number(key)} if model_keys.has(key) else {} for name, key in keys.items()}
    return {name: shared | base for name, base in bases.items()}


def _olmo(model_keys: Keys, shared: dict[str, Any], types: set[str]) -> dict[str, Any]:
    """One base. The scaling is for full attention only."""
    plain = {"rope_theta": shared["rope_theta"]} if "rope_theta" in shared else {}
    return {"sliding_attention": plain, "full_attention": shared}


def _sliding(model_keys: Keys, shared: dict[str, Any], types: set[str]) -> dict[str, Any]:
    """Only layers with a window rotate. If there is no window, all layers rotate."""
    if not model_keys.has("sliding_window") and "sliding_attention" not in types:
        return {"": shared}
    return {"sliding_attention": shared, "full_attention": None}


def _listed(model_keys: Keys, shared: dict[str, Any], types: set[str]) -> dict[str, Any]:
    """no_rope_layers contains 1 for layers that rotate, in spite of its name. Without it, every n-th layer does not."""
    listed = _listed_values(model_keys, "no_rope_layers")
    if any(flag not in (0, 1) for flag in listed):
        do = "write 1 for each layer that rotates and 0 for each that does not"
        raise model_keys.error("no_rope_layers", "a list of 0 and 1", shown(listed), do)
    flags = set(listed or (1, 0))
    return {name: part for flag, name, part in ((1, "rope", shared), (0, "no_rope", None)) if flag in flags}


def _bases(model_keys: Keys, shared: dict[str, Any], types: set[str]) -> dict[str, Any]:
    """One base per layer; 0 for no rotation."""
    if not model_keys.has("layer_rope_theta"):
        return {"": shared}
    bases = dict.fromkeys(model_keys.numbers("layer_rope_theta"))
    if len(bases) == 1 and 0 not in bases:
        return {"": shared | {"rope_theta": next(iter(bases))}}
    if any(base < 0 for base in bases):
        expected, do = "bases above 0, or 0 for no rotation", "set them as the model was trained"
        raise model_keys.error("layer_rope_theta", expected, shown(list(bases)), do)
    return {
        "no_rope" if base == 0 else f"rope_theta={base:g}": None if base == 0 else shared | {"rope_theta": base}
        for base in bases
    }


def _required_bases(model_keys: Keys, shared: dict[str, Any], types: set[str]) -> dict[str, Any]:
    """One base per layer. Files may omit the list, since the class in transformers has a default pattern."""
    if not model_keys.has("layer_rope_theta"):
        do = model_keys.caller.pass_whole_config
        raise model_keys.error("layer_rope_theta", "one base per layer, 0 for no rotation", "no such key", do)
    return _bases(model_keys, shared, types)


def _optional(model_keys: Keys, shared: dict[str, Any], types: set[str]) -> dict[str, Any]:
    """Families in which some models have another encoding."""
    kinds = [model_keys.text(key) for key in ("position_embedding_type", "position_embeddings_type")]
    other = any(kind is not None and kind not in ("rope", "rotary") for kind in kinds)
    other = other or model_keys.flag("alibi", False)
    return {"": None if other else shared}


def _opt_in(model_keys: Keys, shared: dict[str, Any], types: set[str]) -> dict[str, Any]:
    """Families that have another encoding unless a key selects RoPE."""
    kinds = [model_keys.text(key) for key in ("position_embedding_type", "position_embeddings_type")]
    selected = any(kind in ("rope", "rotary") for kind in kinds) or model_keys.flag("use_mem_rope", False)
    return {"": shared if selected else None}


_SPLITS: dict[Sharing, Callable[[Keys, dict[str, Any], set[str]], dict[str, Any]]] = {
    "alike": _alike,
    "none": _none,
    "gemma": _gemma,
    "modernbert": _modernbert,
    "olmo": _olmo,
    "sliding": _sliding,
    "listed": _listed,
    "bases": _bases,
    "required bases": _required_bases,
    "optional": _optional,
    "opt-in": _opt_in,
}


def layer_count(part: Mapping[str, Any]) -> int | None:
    """Return the number of layers of a language model, or None if its config does not specify it.

    >>> layer_count({"n_layer": 28}), layer_count({})
    (28, None)
    """
    return next((n for key in LAYERS if (n := as_int(part.get(key))) and n > 0), None)


def window_of(part: Mapping[str, Any]) -> int | None:
    """Return the size of the attention window, or None if the config has no window or does not use it.

    A window that is larger than any supported length counts as no window.

    >>> window_of({"sliding_window": 4096}), window_of({"sliding_window": 4096, "use_sliding_window": False})
    (4096, None)
    """
    window = as_int(part.get("sliding_window")) if part.get("use_sliding_window", True) else None
    return window if window is not None and 0 < window <= MOST_LENGTH else None


def has_window(layer: str, part: Mapping[str, Any]) -> bool:
    """Return whether the name of a layer type means that its layers attend to a window or a chunk only.

    >>> has_window("sliding_attention", {}), has_window("", {"sliding_window": 4096})
    (True, False)
    """
    # The layers of Llama 4 that rotate attend to a chunk, even if the config does not contain its length.
    chunked = "attention_chunk_size" in part or str(part.get("model_type")).startswith("llama4")
    return "sliding" in layer or "chunked" in layer or (layer == "rope" and chunked)


def layer_kinds(part: Mapping[str, Any], family: Family) -> list[str] | None:
    """Return the layer type of each layer, or None if neither the config nor its family specifies it.

    layer_types of the config takes precedence over the windows of the family.

    Args:
        part: The config of the language model.
        family: Its family.

    Returns:
        One layer type per layer, such as "full_attention".

    >>> config = {"num_hidden_layers": 4, "sliding_window": 4096}
    >>> layer_kinds(config, Family(windows=LayerPattern(2)))
    ['sliding_attention', 'full_attention', 'sliding_attention', 'full_attention']
    >>> layer_kinds(config, Family(windows=None)) is None
    True
    """
    count, types, windows = layer_count(part), part.get("layer_types"), family.windows
    if count is None:
        return None
    if types is not None:
        return list(types) if isinstance(types, list) and len(types) == count else None
    # Vision towers have a function for their axes. The types of their layers are not known.
    if windows is None or callable(family.axes):
        return None
    if isinstance(windows, LayerPattern):
        return _by_pattern(part, count, windows)
    if windows == "from a layer on":
        first = as_int(part.get("max_window_layers")) if part.get("use_sliding_window") else count
        return None if first is None else [_FULL if i < first else _SLIDING for i in range(count)]
    if windows != "none" and "sliding_window" in part:
        return [_FULL if window_of(part) is None else _SLIDING] * count
    return None if windows == "all by default" or window_of(part) is not None else [_FULL] * count


def _by_pattern(part: Mapping[str, Any], count: int, pattern: LayerPattern) -> list[str] | None:
    if pattern.other == _SLIDING and "sliding_window" in part and part["sliding_window"] is None:
        return [_FULL] * count
    key = pattern.key
    every = as_int(part[key]) if key is not None and part.get(key) is not None else pattern.every
    if every is None or every < 1:
        return None
    full = every - 1 if pattern.sees_everything == "last" else 0
    return [_FULL if i % every == full else pattern.other for i in range(count)]


def kinds_by_number(model_keys: Keys, family: Family) -> tuple[str, ...] | None:
    """Return the layer type of each layer, with the names used for rope parameters, or None if it is not known.

    >>> kinds_by_number(Keys({"num_hidden_layers": 4}), Family(layers="listed"))
    ('rope', 'rope', 'rope', 'no_rope')
    """
    count = layer_count(model_keys.data)
    if family.layers != "listed" or count is None:
        kinds = layer_kinds(model_keys.data, family)
    else:
        kinds = _listed_kinds(model_keys, count)
        kinds = kinds if len(kinds) == count else None
    return None if kinds is None else tuple(kinds)


def _listed_kinds(model_keys: Keys, count: int) -> list[str]:
    """Return "rope" or "no_rope" per layer, from no_rope_layers or no_rope_layer_interval."""
    every = model_keys.integer("no_rope_layer_interval", 4)
    flags = model_keys.raw("no_rope_layers") or [int((i + 1) % every != 0) for i in range(count)]
    return ["rope" if flag else "no_rope" for flag in flags]


def specs_by_number(
    model_keys: Keys, family: Family, layers: Mapping[str, RopeSpec | None], count: int
) -> list[RopeSpec | None]:
    """Return the spec of each layer, or None for a layer that does not rotate.

    Args:
        model_keys: The config of the language model.
        family: Its family.
        layers: One spec per layer type.
        count: The number of layers.

    Returns:
        `count` specs. If the layer types are not known and differ only in their frequencies, the first spec for all.

    Raises:
        RopewalkError: If the config does not specify which layers rotate, or has too few entries in layer_types.

    >>> spec, model_keys = RopeSpec(8), Keys({"no_rope_layers": [1, 0, 1]})
    >>> [s is spec for s in specs_by_number(model_keys, Family(layers="listed"), {"rope": spec, "no_rope": None}, 3)]
    [True, False, True]
    """
    if set(layers) == {""}:
        return [layers[""]] * count
    kinds = _configured_kinds(model_keys, family, count)
    if kinds is not None:
        if len(kinds) < count:
            expected, got = f"one entry for each of {count} layers", f"{len(kinds)} entries"
            raise model_keys.error("layer_types", expected, got, "add the missing entries")
        # A layer type without rope parameters, such as a convolution, does not rotate.
        return [layers.get(kind) for kind in kinds[:count]]
    specs = list(layers.values())
    shapes = {None if spec is None else (spec.head_dim, spec.rotated_dim, spec.rotary_slice) for spec in specs}
    if len(shapes) == 1 and None not in shapes:
        return [specs[0]] * count
    raise model_keys.error(
        "layer_types",
        f"one layer type per layer, since these differ: {', '.join(layers)}",
        "no such key",
        "add layer_types from transformers: AutoConfig.from_pretrained(...).layer_types",
    )


def _configured_kinds(model_keys: Keys, family: Family, count: int) -> list[str] | None:
    """Return the layer type of each layer according to the config alone, or None if it does not specify it."""
    if family.layers == "listed":
        return _listed_kinds(model_keys, count)
    types = model_keys.raw("layer_types")
    if types is not None:
        return list(types)
    every = model_keys.raw("sliding_window_pattern")
    if family.layers != "sliding" or every is None:
        return None
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        do = "write layer_types instead"
        raise model_keys.error("sliding_window_pattern", "an integer of at least 1", shown(every), do)
    return [_FULL if (i + 1) % every == 0 else _SLIDING for i in range(count)]
