"""Which rope parameters each kind of layer has."""

from collections.abc import Callable
from typing import Any

from ropewalk.errors import shown
from ropewalk.hub.configs.pitfalls import warn
from ropewalk.hub.configs.read import Keys, config_error
from ropewalk.hub.families.table import BASE_KEYS, Family

__all__ = ["parameters_by_layer"]

Layers = dict[str, tuple[Keys | None, bool]]


def parameters_by_layer(whole: Keys, family: Family) -> Layers:
    """Rope parameters for each layer type, and whether they are nested in the config; None for no rotation.

    The key is "" where all layers are alike.
    """
    found, types = _parameters(whole), _layer_types(whole)
    names = types | set(family.labels) | {"full_attention", "sliding_attention", "chunked_attention"}
    nested = {key: value for key, value in found.items() if key in names}
    strange = [key for key, value in found.items() if isinstance(value, dict) and key not in names]
    if strange:
        raise config_error(
            f"rope_parameters.{strange[0]}",
            f"a layer type of this model: {', '.join(sorted(types)) or 'it has none'}",
            "an object under another name",
            "rename it, or add the type to layer_types",
        )
    if family.needs_parameters and not nested and (family.labels or not found):
        raise config_error(
            "rope_parameters",
            "rope parameters: those of this family are not plain, and a file that leaves them out means its class's",
            "nothing" if not found else "one set for all layers",
            "pass the config object: AutoConfig.from_pretrained(...)",
        )
    if not nested:
        shared = _with_base(whole, family, found, strict=True)
        split = _SPLITS[family.layers](whole, shared, types)
        where = "rope_scaling" if whole.part("rope_scaling") else "rope_parameters"
        return {name: (None if part is None else Keys(part, where), False) for name, part in split.items()}
    loose = [key for key in found if key not in nested]
    # transformers writes the base of the model beside the layer types, which have their own.
    if set(loose) - {"rope_theta", "rope_type", "partial_rotary_factor"}:
        raise config_error(
            f"rope_parameters.{loose[0]}",
            "nothing beside the layer types",
            shown(found[loose[0]]),
            "move it into the layer types that it is for",
        )
    layers: Layers = {}
    for name, value in nested.items():
        where = f"rope_parameters.{name}"
        if value is not None and not isinstance(value, dict):
            raise config_error(where, "an object or null", shown(value), "make it an object")
        layers[name] = (None if value is None else Keys(_with_base(whole, family, value, strict=False), where), True)
    return layers


def _layer_types(whole: Keys) -> set[str]:
    types = whole.raw("layer_types")
    if types is None:
        return set()
    if not isinstance(types, list) or not all(isinstance(name, str) for name in types):
        raise config_error("layer_types", "a list of strings", shown(types), "name the type of each layer")
    return set(types)


def _parameters(whole: Keys) -> dict[str, Any]:
    """rope_parameters of transformers 5, or rope_scaling of 4; both, if they say the same."""
    new, old = whole.part("rope_parameters"), whole.part("rope_scaling")
    if new and old and new != old:
        raise config_error(
            "rope_scaling",
            "what rope_parameters says, or nothing",
            f"{shown(old)} beside {shown(new)}",
            "remove one; transformers would take rope_scaling",
        )
    return new or old


def _with_base(whole: Keys, family: Family, parameters: dict[str, Any], *, strict: bool) -> dict[str, Any]:
    """The parameters with the base of the config, if it stands outside of them; strict refuses two different ones."""
    merged = dict(parameters)
    for key in BASE_KEYS:
        if not whole.has(key):
            continue
        if key not in family.base_keys:
            warn("key-ignored", f"{key!r} is not read by this family, whose base is rope_theta")
            continue
        base, inside = whole.number(key), merged.get("rope_theta")
        if strict and inside is not None and inside != base:
            raise config_error(
                key, "the base that rope_parameters has", f"{base:g} beside {shown(inside)}", "remove one of them"
            )
        merged.setdefault("rope_theta", base)
    # DBRX keeps it among the settings of its attention.
    inner = Keys(whole.part("attn_config"), "attn_config")
    if inner.has("rope_theta"):
        base = inner.number("rope_theta")
        if merged.setdefault("rope_theta", base) != base or len(merged) == 1:
            warn("key-ignored", f"'attn_config.rope_theta' is not read by transformers 5; here {merged['rope_theta']}")
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
    listed = whole.raw("no_rope_layers")
    if listed is not None and (not isinstance(listed, list) or any(flag not in (0, 1) for flag in listed)):
        raise config_error("no_rope_layers", "a list of 0 and 1", shown(listed), "1 is a layer that rotates")
    flags = set(listed or (1, 0))
    return {name: part for flag, name, part in ((1, "rope", shared), (0, "no_rope", None)) if flag in flags}


def _bases(whole: Keys, shared: dict[str, Any], types: set[str]) -> dict[str, Any]:
    """A base a layer, 0 for none."""
    if not whole.has("layer_rope_theta"):
        return {"": shared}
    bases = dict.fromkeys(whole.numbers("layer_rope_theta"))
    if len(bases) == 1 and 0 not in bases:
        return {"": shared | {"rope_theta": next(iter(bases))}}
    if any(base < 0 for base in bases):
        raise config_error("layer_rope_theta", "bases above 0, or 0 for none", shown(list(bases)), "set them")
    return {
        "no_rope" if base == 0 else f"rope_theta={base:g}": None if base == 0 else shared | {"rope_theta": base}
        for base in bases
    }


def _own_bases(whole: Keys, shared: dict[str, Any], types: set[str]) -> dict[str, Any]:
    """A base a layer, of which the class in transformers has a pattern that a file may leave out."""
    if not whole.has("layer_rope_theta"):
        do = "pass the config object: AutoConfig.from_pretrained(...)"
        raise config_error("layer_rope_theta", "a base a layer, 0 for none", "nothing", do)
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


_SPLITS: dict[str, Callable[[Keys, dict[str, Any], set[str]], dict[str, Any]]] = {
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
