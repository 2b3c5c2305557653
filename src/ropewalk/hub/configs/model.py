"""A model as its config tells it, in one value: the rotation of each kind of layer, the lengths, what to beware of."""

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ropewalk.hub.configs.language import language_model
from ropewalk.hub.configs.layer_kinds import layer_count, layer_kinds, window_of
from ropewalk.hub.configs.lengths import Lengths, lengths_of
from ropewalk.hub.configs.load import load_spec
from ropewalk.hub.configs.pitfalls import RopeConfigWarning
from ropewalk.hub.configs.read import NAMES, Keys, read_config
from ropewalk.hub.families.no_rope import refuse_without_rope
from ropewalk.hub.families.table import Family
from ropewalk.spec.rope import RopeSpec

__all__ = ["Model", "read_model"]


@dataclass(frozen=True)
class Model:
    """What a config says of a model's rotation.

    `name` is what to call it: the folder or file that it was read from, else its model_type. `layers` has a name and a
    spec for each kind of layer, None where it does not rotate; the name is "" where all layers are alike. `warnings`
    are the pitfalls that `load_spec` warned of, as name and text. `path` is the file or folder as it was given. `kinds`
    has the kind of each single layer, None where that is not known, and `window` is that of layers which have one.
    """

    name: str
    model_type: str | None
    layers: tuple[tuple[str, RopeSpec | None], ...]
    lengths: Lengths
    warnings: tuple[tuple[str, str], ...]
    path: Path | None
    kinds: tuple[str, ...] | None = None
    window: int | None = None


def read_model(config: str | Path | dict[str, Any] | Any, *, pairing: str | None = None) -> Model:
    """The model of a config, given and read as `load_spec` does it; its warnings are kept, and not shown.

    A family that is known to have no RoPE is an error that says what it has.

    >>> model = read_model({"model_type": "llama", "head_dim": 128, "max_position_embeddings": 4096})
    >>> [(name, spec.frequencies) for name, spec in model.layers], model.lengths.trained, model.warnings
    ([('', Plain(base=10000.0))], 4096, ())
    """
    data = read_config(config)
    refuse_without_rope(data)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = load_spec(config, pairing=pairing)
        part, family = language_model(data, pairing)
    layers: dict[str, RopeSpec | None] = found if isinstance(found, dict) else {"": found}
    notes: dict[tuple[str, str], None] = {}
    for warning in caught:
        if isinstance(warning.message, RopeConfigWarning):
            notes[warning.message.name, warning.message.text] = None
        else:
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
    path = Path(config) if isinstance(config, str | Path) else None
    model_type = Keys(data).text("model_type") or Keys(part).text("model_type")
    return Model(
        name=_name(path) or model_type or "model",
        model_type=model_type,
        layers=tuple(layers.items()),
        lengths=lengths_of(part, family, layers.values()),
        warnings=tuple(notes),
        path=path,
        kinds=_kinds(part, family),
        window=window_of(part),
    )


def _kinds(part: dict[str, Any], family: Family) -> tuple[str, ...] | None:
    """The kind of each layer, by the names that `load_spec` gives them where it does."""
    count, kinds = layer_count(part), layer_kinds(part)
    if family.layers != "listed" or count is None:
        return None if kinds is None else tuple(kinds)
    # As `load_spec` has it: every n-th layer does not rotate, or those that are listed with a 0.
    every = Keys(part).whole("no_rope_layer_interval", 4)
    flags = part.get("no_rope_layers") or [int((i + 1) % every != 0) for i in range(count)]
    return tuple("rope" if flag else "no_rope" for flag in flags) if len(flags) == count else None


def _name(path: Path | None) -> str | None:
    """The folder of a config.json, else the name of the file without its ending."""
    if path is None:
        return None
    if path.is_dir() or path.name in NAMES:
        return (path if path.is_dir() else path.parent).resolve().name
    return path.stem
