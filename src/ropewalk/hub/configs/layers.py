"""The layers of a model: which rope parameters each kind has, which layer is of which kind, which see a window only."""

from collections.abc import Callable, Mapping
from typing import Any

from ropewalk.errors import as_int, shown
from ropewalk.hub.configs.keys import Keys
from ropewalk.hub.configs.limits import LAYERS, MOST_COUNT, MOST_KINDS, MOST_LENGTH
from ropewalk.hub.families.family import BASE_KEYS, Family, LayerPattern, Sharing
from ropewalk.spec.rope import RopeSpec

__all__ = ["kinds_by_number", "layer_count", "layer_kinds", "parameters_by_layer", "specs_by_number", "window_of"]

# The rope parameters of each kind of layer, and whether they are nested in the config; None for no rotation.
Layers = dict[str, tuple[Keys | None, bool]]
_FULL, _SLIDING = "full_attention", "sliding_attention"


def parameters_by_layer(whole: Keys, family: Family) -> Layers:
    """Rope parameters for each layer type, and whether they are nested in the config; None for no rotation.

    The key is "" where all layers are alike.
    """
    layers = _by_layer(whole, family)
    if len(layers) > MOST_KINDS:
        kinds, do = f"at most {MOST_KINDS} kinds of layers", whole.caller.pass_config
        raise whole.error("layer_types", kinds, f"{len(layers)} that rotate in ways of their own", do)
    return layers


def _by_layer(whole: Keys, family: Family) -> Layers:
    parameters, types = _parameters(whole), _layer_types(whole)
    names = types | set(family.labels) | {"full_attention", "sliding_attention", "chunked_attention"}
    nested = {key: value for key, value in parameters.items() if key in names}
    strange = [key for key, value in parameters.items() if isinstance(value, dict) and key not in names]
    if strange:
        raise whole.error(
            f"rope_parameters.{strange[0]}",
            f"a layer type of this model: {', '.join(sorted(types)[:8]) or 'it has none'}",
            "an object under another name",
            "rename it, or add the type to layer_types",
        )
    if family.needs_parameters and not nested and (family.labels or not parameters):
        raise whole.error(
            "rope_parameters",
            "rope parameters: those of this family are not plain, and a file that leaves them out means its class's",
            "nothing" if not parameters else "one set for all layers",
            whole.caller.pass_whole_config,
        )
    if not nested:
        shared = _with_base(whole, family, parameters, strict=True)
        split = _SPLITS[family.layers](whole, shared, types)
        place = "rope_scaling" if whole.part("rope_scaling") else "rope_parameters"
        return {name: (None if part is None else whole.of(part, place), False) for name, part in split.items()}
    loose = [key for key in parameters if key not in nested]
    # transformers writes the base of the model beside the layer types, which have their own.
    if set(loose) - {"rope_theta", "rope_type", "partial_rotary_factor"}:
        raise whole.error(
            f"rope_parameters.{loose[0]}",
            "nothing beside the layer types",
            shown(parameters[loose[0]]),
            "move it into the layer types that it is for",
        )
    layers: Layers = {}
    for name, value in nested.items():
        place = f"rope_parameters.{name}"
        if value is not None and not isinstance(value, dict):
            raise whole.error(place, "an object or null", shown(value), "make it an object")
        with_base = None if value is None else _with_base(whole, family, value, strict=False)
        layers[name] = (None if with_base is None else whole.of(with_base, place), True)
    return layers


def _layer_types(whole: Keys) -> set[str]:
    types = _listed_values(whole, "layer_types")
    if not all(isinstance(name, str) for name in types):
        raise whole.error("layer_types", "a list of strings", shown(types), "name the type of each layer")
    return {whole.as_name(name, "layer_types") for name in types}


def _listed_values(whole: Keys, key: str) -> list[Any]:
    """A list with an entry per layer, of whatever type; an empty one where there is none."""
    values = whole.raw(key)
    if values is None:
        return []
    if not isinstance(values, list) or len(values) > MOST_COUNT:
        got = f"{len(values)} entries" if isinstance(values, list) else shown(values)
        expected = f"a list of {'strings' if key == 'layer_types' else '0 and 1'}, at most {MOST_COUNT}"
        raise whole.error(key, expected, got, "write one entry for each layer")
    return values


def _parameters(whole: Keys) -> dict[str, Any]:
    """rope_parameters of transformers 5, or rope_scaling of 4; both, if they say the same."""
    new, old = whole.part("rope_parameters"), whole.part("rope_scaling")
    if new and old and new != old:
        raise whole.error(
            "rope_scaling",
            "what rope_parameters says, or nothing",
            f"{shown(old)} beside {shown(new)}",
            "remove one; transformers would take rope_scaling",
        )
    return new or old


def _with_base(whole: Keys, family: Family, parameters: dict[str, Any], *, strict: bool) -> dict[str, Any]:
    """The parameters with the base of the config, if it is stored outside of them; strict rejects two."""
    merged = dict(parameters)
    for key in BASE_KEYS:
        if not whole.has(key):
            continue
        if key not in family.base_keys:
            whole.warn("key-ignored", f"{key!r} is not read by this family, whose base is rope_theta")
            continue
        base, inside = whole.number(key), merged.get("rope_theta")
        if strict and inside is not None and inside != base:
            raise whole.error(
                key, "the base that rope_parameters has", f"{base:g} beside {shown(inside)}", "remove one of them"
            )
        merged.setdefault("rope_theta", base)
    # DBRX keeps it among the settings of its attention.
    inner = whole.under("attn_config")
    if inner.has("rope_theta"):
        base = inner.number("rope_theta")
        if merged.setdefault("rope_theta", base) != base or len(merged) == 1:
            whole.warn(
                "key-ignored", f"'attn_config.rope_theta' is not read by transformers 5; here {merged['rope_theta']}"
            )
    return merged


def _alike(whole: Keys, shared: dict[str, Any], types: set[str]) -> dict[str, Any]:
    return {"": shared}


def _none(whole: Keys, shared: dict[str, Any], types: set[str]) -> dict[str, Any]:
    return {"": None}


def _gemma(whole: Keys, shared: dict[str, Any], types: set[str]) -> dict[str, Any]:
    """Gemma 3 as transformers 4 wrote it: the scaling and rope_theta are for full attention alone."""
    local = {"rope_theta": whole.number("rope_local_base_freq")} if whole.has("rope_local_base_freq") else {}
    return {"sliding_attention": local, "full_attention": shared}


def _modernbert(whole: Keys, shared: dict[str, Any], types: set[str]) -> dict[str, Any]:
    """Two bases, and one scaling for both."""
    keys = {"sliding_attention": "local_rope_theta", "full_attention": "global_rope_theta"}
    bases = {name: {"rope_theta": whole.number(key)} if whole.has(key) else {} for name, key in keys.items()}
    return {name: shared | base for name, base in bases.items()}


def _olmo(whole: Keys, shared: dict[str, Any], types: set[str]) -> dict[str, Any]:
    """One base; the scaling is for full attention alone."""
    plain = {"rope_theta": shared["rope_theta"]} if "rope_theta" in shared else {}
    return {"sliding_attention": plain, "full_attention": shared}


def _sliding(whole: Keys, shared: dict[str, Any], types: set[str]) -> dict[str, Any]:
    """Only layers with a window rotate; without any window, all do."""
    if not whole.has("sliding_window") and "sliding_attention" not in types:
        return {"": shared}
    return {"sliding_attention": shared, "full_attention": None}


def _listed(whole: Keys, shared: dict[str, Any], types: set[str]) -> dict[str, Any]:
    """no_rope_layers has a 1 for each layer that rotates, whatever its name says; or every n-th does not."""
    listed = _listed_values(whole, "no_rope_layers")
    if any(flag not in (0, 1) for flag in listed):
        raise whole.error("no_rope_layers", "a list of 0 and 1", shown(listed), "1 is a layer that rotates")
    flags = set(listed or (1, 0))
    return {name: part for flag, name, part in ((1, "rope", shared), (0, "no_rope", None)) if flag in flags}


def _bases(whole: Keys, shared: dict[str, Any], types: set[str]) -> dict[str, Any]:
    """One base per layer, 0 for none."""
    if not whole.has("layer_rope_theta"):
        return {"": shared}
    bases = dict.fromkeys(whole.numbers("layer_rope_theta"))
    if len(bases) == 1 and 0 not in bases:
        return {"": shared | {"rope_theta": next(iter(bases))}}
    if any(base < 0 for base in bases):
        raise whole.error("layer_rope_theta", "bases above 0, or 0 for none", shown(list(bases)), "set them")
    return {
        "no_rope" if base == 0 else f"rope_theta={base:g}": None if base == 0 else shared | {"rope_theta": base}
        for base in bases
    }


def _own_bases(whole: Keys, shared: dict[str, Any], types: set[str]) -> dict[str, Any]:
    """One base per layer, of which the class in transformers has a pattern that a file may leave out."""
    if not whole.has("layer_rope_theta"):
        do = whole.caller.pass_whole_config
        raise whole.error("layer_rope_theta", "one base per layer, 0 for none", "nothing", do)
    return _bases(whole, shared, types)


def _optional(whole: Keys, shared: dict[str, Any], types: set[str]) -> dict[str, Any]:
    """Families of which some models have another encoding."""
    kinds = [whole.text(key) for key in ("position_embedding_type", "position_embeddings_type")]
    other = any(kind is not None and kind not in ("rope", "rotary") for kind in kinds)
    other = other or whole.flag("alibi", False)
    return {"": None if other else shared}


def _asked(whole: Keys, shared: dict[str, Any], types: set[str]) -> dict[str, Any]:
    """Families that have another encoding unless a key asks for this one."""
    kinds = [whole.text(key) for key in ("position_embedding_type", "position_embeddings_type")]
    wanted = any(kind in ("rope", "rotary") for kind in kinds) or whole.flag("use_mem_rope", False)
    return {"": shared if wanted else None}


_SPLITS: dict[Sharing, Callable[[Keys, dict[str, Any], set[str]], dict[str, Any]]] = {
    "alike": _alike,
    "none": _none,
    "gemma": _gemma,
    "modernbert": _modernbert,
    "olmo": _olmo,
    "sliding": _sliding,
    "listed": _listed,
    "bases": _bases,
    "own bases": _own_bases,
    "optional": _optional,
    "asked": _asked,
}


def layer_count(part: Mapping[str, Any]) -> int | None:
    """How many layers a language model has; None where its config does not say it.

    >>> layer_count({"n_layer": 28}), layer_count({})
    (28, None)
    """
    return next((n for key in LAYERS if (n := as_int(part.get(key))) and n > 0), None)


def window_of(part: Mapping[str, Any]) -> int | None:
    """How many positions a layer with a window sees; None where the config has no window, or does not use it.

    A window of more positions than there can be is none.

    >>> window_of({"sliding_window": 4096}), window_of({"sliding_window": 4096, "use_sliding_window": False})
    (4096, None)
    """
    window = as_int(part.get("sliding_window")) if part.get("use_sliding_window", True) else None
    return window if window is not None and 0 < window <= MOST_LENGTH else None


def layer_kinds(part: Mapping[str, Any], family: Family) -> list[str] | None:
    """The kind of attention of each layer; None where neither the config nor its family says it.

    `part` is the config of the language model. layer_types says it, else the windows of the family.

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
    # Towers that see have axes by a rule, and layers that nobody counts here.
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
    seeing = every - 1 if pattern.sees_everything == "last" else 0
    return [_FULL if i % every == seeing else pattern.other for i in range(count)]


def kinds_by_number(whole: Keys, family: Family) -> tuple[str, ...] | None:
    """The kind of each layer, by the names that rope parameters have where these differ; None where it is not known.

    >>> kinds_by_number(Keys({"num_hidden_layers": 4}), Family(layers="listed"))
    ('rope', 'rope', 'rope', 'no_rope')
    """
    count = layer_count(whole.data)
    if family.layers != "listed" or count is None:
        kinds = layer_kinds(whole.data, family)
    else:
        kinds = _listed_kinds(whole, count)
        kinds = kinds if len(kinds) == count else None
    return None if kinds is None else tuple(kinds)


def _listed_kinds(whole: Keys, count: int) -> list[str]:
    """Every n-th layer does not rotate, or those that are listed with a 0."""
    every = whole.whole("no_rope_layer_interval", 4)
    flags = whole.raw("no_rope_layers") or [int((i + 1) % every != 0) for i in range(count)]
    return ["rope" if flag else "no_rope" for flag in flags]


def specs_by_number(
    whole: Keys, family: Family, layers: Mapping[str, RopeSpec | None], count: int
) -> list[RopeSpec | None]:
    """The spec of each of `count` layers, None for one that does not rotate.

    `whole` is the config of the language model, `layers` has its specs by kind. A config that does not say which layers
    rotate is an error, unless all do and the kinds differ in their frequencies alone.

    >>> spec, whole = RopeSpec(8), Keys({"no_rope_layers": [1, 0, 1]})
    >>> [s is spec for s in specs_by_number(whole, Family(layers="listed"), {"rope": spec, "no_rope": None}, 3)]
    [True, False, True]
    """
    if set(layers) == {""}:
        return [layers[""]] * count
    kinds = _stated_kinds(whole, family, count)
    if kinds is not None:
        if len(kinds) < count:
            raise whole.error("layer_types", f"one entry for each of {count} layers", f"{len(kinds)}", "complete it")
        # A kind without rope parameters, such as a convolution, does not rotate.
        return [layers.get(kind) for kind in kinds[:count]]
    specs = list(layers.values())
    shapes = {None if spec is None else (spec.head_dim, spec.rotated_dim, spec.rotary_slice) for spec in specs}
    if len(shapes) == 1 and None not in shapes:
        return [specs[0]] * count
    raise whole.error(
        "layer_types",
        f"the kind of each layer, since they differ: {', '.join(layers)}",
        "nothing",
        "add layer_types, as transformers writes it: AutoConfig.from_pretrained(...).layer_types",
    )


def _stated_kinds(whole: Keys, family: Family, count: int) -> list[str] | None:
    """The kind of each layer as the config itself says it; None where it does not."""
    if family.layers == "listed":
        return _listed_kinds(whole, count)
    types = whole.raw("layer_types")
    if types is not None:
        return list(types)
    every = whole.raw("sliding_window_pattern")
    if family.layers != "sliding" or every is None:
        return None
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise whole.error("sliding_window_pattern", "a whole number", shown(every), "write layer_types instead")
    return [_FULL if (i + 1) % every == 0 else _SLIDING for i in range(count)]
