"""Which spec each single layer of a model has, by number."""

from typing import Any

from ropewalk.errors import shown
from ropewalk.hub.configs.read import Keys, config_error
from ropewalk.hub.families.table import Family
from ropewalk.spec.rope import RopeSpec

__all__ = ["specs_by_number"]


def specs_by_number(
    part: dict[str, Any], family: Family, layers: dict[str, RopeSpec | None], count: int
) -> list[RopeSpec | None]:
    """The spec of each of `count` layers, None for one that does not rotate.

    `part` is the config of the language model, `layers` what `load_spec` found by kind. A config that does not say
    which layers rotate is an error, unless all do and the kinds differ in their frequencies alone.

    >>> spec = RopeSpec(8)
    >>> part = {"no_rope_layers": [1, 0, 1]}
    >>> [s is spec for s in specs_by_number(part, Family(layers="listed"), {"rope": spec, "no_rope": None}, 3)]
    [True, False, True]
    """
    if set(layers) == {""}:
        return [layers[""]] * count
    kinds = _kinds(Keys(part), family, count)
    if kinds is not None:
        if len(kinds) < count:
            raise config_error("layer_types", f"one entry for each of {count} layers", f"{len(kinds)}", "complete it")
        # A kind without rope parameters, such as a convolution, does not rotate.
        return [layers.get(kind) for kind in kinds[:count]]
    found = list(layers.values())
    shapes = {None if spec is None else (spec.head_dim, spec.turning, spec.rotary_slice) for spec in found}
    if len(shapes) == 1 and None not in shapes:
        return [found[0]] * count
    raise config_error(
        "layer_types",
        f"the kind of each layer, since they differ: {', '.join(layers)}",
        "nothing",
        "add layer_types, as transformers writes it: AutoConfig.from_pretrained(...).layer_types",
    )


def _kinds(whole: Keys, family: Family, count: int) -> list[str] | None:
    """The kind of each layer, by the name that `load_spec` gives it; None where the config does not say."""
    if family.layers == "listed":
        every = whole.whole("no_rope_layer_interval", 4)
        flags = whole.raw("no_rope_layers") or [int((i + 1) % every != 0) for i in range(count)]
        return ["rope" if flag else "no_rope" for flag in flags]
    types = whole.raw("layer_types")
    if types is not None:
        return list(types)
    every = whole.raw("sliding_window_pattern")
    if family.layers != "sliding" or every is None:
        return None
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise config_error("sliding_window_pattern", "a whole number", shown(every), "write layer_types instead")
    return ["full_attention" if (i + 1) % every == 0 else "sliding_attention" for i in range(count)]
