"""Which rope parameters each kind of layer has."""

from typing import Any

from ropewalk.errors import shown
from ropewalk.hub.families import Family
from ropewalk.hub.read import Keys, config_error

__all__ = ["NO_ROPE", "parameters_by_layer"]

# The key of layers that do not rotate, where the config has no layer type for them.
NO_ROPE = "no_rope"


def parameters_by_layer(whole: Keys, family: Family) -> dict[str, tuple[Keys, bool] | tuple[None, bool]]:
    """Rope parameters for each layer type, and whether they are nested in the config; None for no rotation.

    The key is "" where all layers are alike.
    """
    found = _parameters(whole)
    types = _layer_types(whole)
    nested = {key: value for key, value in found.items() if key in types or key in family.labels}
    strange = {key for key, value in found.items() if isinstance(value, dict) and key not in nested}
    if strange:
        raise config_error(
            f"rope_parameters.{min(strange)}",
            f"a layer type of this model: {', '.join(sorted(types | set(family.labels))) or 'it has none'}",
            "an object under another name",
            "rename it, or add the type to layer_types",
        )
    layers: dict[str, Any] = {}
    if nested:
        loose = [key for key in found if key not in nested]
        if loose:
            raise config_error(
                f"rope_parameters.{loose[0]}",
                "nothing beside the layer types",
                shown(found[loose[0]]),
                "move it into the layer types that it is for",
            )
        for name, value in nested.items():
            if value is not None and not isinstance(value, dict):
                raise config_error(f"rope_parameters.{name}", "an object or null", shown(value), "make it an object")
            merged = None if value is None else _with_base(whole, value, f"rope_parameters.{name}")
            layers[name] = (None if merged is None else Keys(merged, f"rope_parameters.{name}"), True)
    else:
        layers = {
            name: (None if value is None else Keys(value, "rope_parameters" if found else ""), False)
            for name, value in family.split(whole, _with_base(whole, found, "rope_parameters"), types).items()
        }
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


def _with_base(whole: Keys, parameters: dict[str, Any], where: str) -> dict[str, Any]:
    """The parameters with the base of the config, if it stands outside of them."""
    merged = dict(parameters)
    for key in ("rope_theta", "rotary_emb_base", "rotary_base", "rotary_embedding_base", "rope_base"):
        if not whole.has(key):
            continue
        base = whole.number(key)
        inside = merged.get("rope_theta")
        if inside is not None and inside != base:
            raise config_error(
                key, f"the base that {where} has", f"{base:g} beside {shown(inside)}", "remove one of them"
            )
        merged["rope_theta"] = base
    return merged
