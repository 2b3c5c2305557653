"""A model as described by its config: the rotation of each layer type, the lengths, and the pitfalls of the config."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from ropewalk.hub.configs.keys import NAMES, Caller, ConfigSource, Keys
from ropewalk.hub.configs.layers import kinds_by_number, window_of
from ropewalk.hub.configs.parse import Config, parse_config
from ropewalk.hub.families.family import Family
from ropewalk.signatures import checks_names
from ropewalk.spec.rope import Pairing, RopeSpec
from ropewalk.theory.bands import classify, plain_inv_freq

__all__ = ["Lengths", "Model", "lengths_of", "model_for", "read_model"]

_ORIGINAL = "original_max_position_embeddings"


@dataclass(frozen=True)
class Lengths:
    """The number of positions of a model.

    Attributes:
        trained: The trained length, before the context was extended. None if the config does not specify it.
        configured: The longest sequence according to the config. None if the config does not specify it.

    >>> Lengths(trained=8192, configured=131_072).trained
    8192
    """

    trained: int | None
    configured: int | None


@dataclass(frozen=True)
class Model:
    """The rotation of a model, as described by its config.

    Attributes:
        name: The name of the folder or file that the config was read from, or the model_type for a dict.
        model_type: The model_type of the config.
        layers: One (name, spec) per layer type. The spec is None for layers that do not rotate. The name is "" if all
            layers have the same rotation.
        lengths: The trained and the configured length.
        warnings: One (name, text) per pitfall that `load_spec` warns about.
        path: The file or folder as passed by the caller. None for a config that was passed as data.
        kinds: The layer type of each single layer. None if it is not known.
        window: The size of the attention window of layers that have one. None if no layer has one.
        config: The parsed config.

    >>> model = read_model({"model_type": "llama", "head_dim": 128, "max_position_embeddings": 4096})
    >>> model.name, model.lengths.configured, model.kinds
    ('llama', 4096, None)
    """

    name: str
    model_type: str | None
    layers: tuple[tuple[str, RopeSpec | None], ...]
    lengths: Lengths
    warnings: tuple[tuple[str, str], ...]
    path: Path | None
    kinds: tuple[str, ...] | None
    window: int | None
    config: Config = field(repr=False, compare=False)


@checks_names
def read_model(config: ConfigSource, *, pairing: Pairing | None = None) -> Model:
    """Read the rotation, the lengths and the pitfalls of a model from its config.

    Args:
        config: A path, a dict or a config object, as in `load_spec`.
        pairing: Which features form a pair. Required for an unknown family.

    Returns:
        The model. Warnings are stored in `Model.warnings` and not emitted.

    Raises:
        RopewalkError: If `load_spec` would raise, or if the family is known to have no RoPE.

    >>> model = read_model({"model_type": "llama", "head_dim": 128, "max_position_embeddings": 4096})
    >>> [(name, spec.frequencies) for name, spec in model.layers], model.lengths.trained, model.warnings
    ([('', Plain(base=10000.0))], 4096, ())
    """
    return model_for(Caller("read_model"), config, pairing)


def model_for(caller: Caller, config: ConfigSource, pairing: str | None) -> Model:
    """`read_model` with errors that name `caller` and its options.

    >>> model_for(Caller("inspect_model"), {"model_type": "llama", "head_dim": 128}, None).name
    'llama'
    """
    parsed = parse_config(config, caller, pairing=pairing)
    language = parsed.language
    return Model(
        name=_name(parsed.path) or parsed.model_type or "model",
        model_type=parsed.model_type,
        layers=tuple(parsed.layers.items()),
        lengths=lengths_of(parsed.keys(), language.family, parsed.layers.values()),
        warnings=tuple(dict.fromkeys(parsed.pitfalls)),
        path=parsed.path,
        kinds=kinds_by_number(parsed.keys(), language.family),
        window=window_of(language.data),
        config=parsed,
    )


def _name(path: Path | None) -> str | None:
    """Return the folder name of a config.json, or the file name without its suffix for other files."""
    if path is None:
        return None
    if path.is_dir() or path.name in NAMES:
        return (path if path.is_dir() else path.parent).resolve().name
    return path.stem


def lengths_of(model_keys: Keys, family: Family, specs: Iterable[RopeSpec | None]) -> Lengths:
    """Return the trained and the configured length of a language model.

    The trained length is that of the frequency rule, or else original_max_position_embeddings. If no frequency is
    scaled, it is the configured length. For rules without a length, such as PI, it is None: configs differ in whether
    max_position_embeddings is then the length before or after the extension.

    Args:
        model_keys: The config of the language model.
        family: Its family.
        specs: The spec of each layer type.

    Returns:
        The lengths.

    >>> lengths_of(Keys({"max_position_embeddings": 4096}), Family(), [RopeSpec(128)])
    Lengths(trained=4096, configured=4096)
    """
    rotating = [spec for spec in specs if spec is not None]
    nested = [model_keys.under(key) for key in ("rope_parameters", "rope_scaling")]
    places = [*((model_keys, key) for key in family.longest), *((inner, "max_position_embeddings") for inner in nested)]
    configured = next((keys.integer(key) for keys, key in places if keys.has(key)), None)
    rules = (getattr(spec.frequencies, "trained_length", None) for spec in rotating)
    trained = max((length for length in rules if length is not None), default=None)
    if trained is None:
        trained = next((keys.integer(_ORIGINAL) for keys in (model_keys, *nested) if keys.has(_ORIGINAL)), None)
    if trained is None and rotating and not any(_is_scaled(spec) for spec in rotating):
        trained = configured
    return Lengths(trained, configured)


def _is_scaled(spec: RopeSpec) -> bool:
    return not set(classify(spec.inv_freq(), plain_inv_freq(spec))) <= {"unchanged", "still"}
