"""A model as its config tells it, in one value: the rotation of each kind of layer, the lengths, what to beware of."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from ropewalk.hub.configs.keys import NAMES, Caller, ConfigSource, Keys
from ropewalk.hub.configs.layers import kinds_by_number, window_of
from ropewalk.hub.configs.parse import Config, parse_config
from ropewalk.hub.families.family import Family
from ropewalk.spec.rope import Pairing, RopeSpec
from ropewalk.theory.bands import classify, plain_inv_freq

__all__ = ["Lengths", "Model", "lengths_of", "model_for", "read_model"]

_ORIGINAL = "original_max_position_embeddings"


@dataclass(frozen=True)
class Lengths:
    """How many positions a model was trained on before its context was extended, and how many its config allows.

    None is what the config does not say.

    >>> Lengths(trained=8192, configured=131_072).trained
    8192
    """

    trained: int | None
    configured: int | None


@dataclass(frozen=True)
class Model:
    """What a config says of a model's rotation.

    `name` is what to call it: the folder or file that it was read from, else its model_type. `layers` has a name and a
    spec for each kind of layer, None where it does not rotate; the name is "" where all layers are alike. `warnings`
    are the pitfalls that `load_spec` warns of, as name and text. `path` is the file or folder as it was passed. `kinds`
    has the kind of each single layer, None where that is not known, and `window` is that of layers which have one.
    `config` is the parsed config, of which all of this is made.

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


def read_model(config: ConfigSource, *, pairing: Pairing | None = None) -> Model:
    """The model of a config: its rotation, its lengths and the pitfalls of its config, in one value.

    Args:
        config: A path, a dict or a config object, as `load_spec` accepts them.
        pairing: Which features form a pair, for a family that is not known.

    Returns:
        The model. Its warnings are kept in it, and not emitted.

    Raises:
        RopewalkError: What `load_spec` raises, and a family that is known to have no RoPE.

    >>> model = read_model({"model_type": "llama", "head_dim": 128, "max_position_embeddings": 4096})
    >>> [(name, spec.frequencies) for name, spec in model.layers], model.lengths.trained, model.warnings
    ([('', Plain(base=10000.0))], 4096, ())
    """
    return model_for(Caller("read_model"), config, pairing)


def model_for(caller: Caller, config: ConfigSource, pairing: str | None) -> Model:
    """`read_model` for a caller, in whose words errors are written.

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
    """The folder of a config.json, else the name of the file without its ending."""
    if path is None:
        return None
    if path.is_dir() or path.name in NAMES:
        return (path if path.is_dir() else path.parent).resolve().name
    return path.stem


def lengths_of(whole: Keys, family: Family, specs: Iterable[RopeSpec | None]) -> Lengths:
    """The lengths of a language model whose config is `whole` and whose kinds of layers rotate by `specs`.

    The trained length is that of the rule, else original_max_position_embeddings; where no frequency is scaled it is
    the configured one. Rules that know of no length, such as PI, leave it unsaid: configs differ in whether
    max_position_embeddings is then the length before or after.

    >>> lengths_of(Keys({"max_position_embeddings": 4096}), Family(), [RopeSpec(128)])
    Lengths(trained=4096, configured=4096)
    """
    rotating = [spec for spec in specs if spec is not None]
    nested = [whole.under(key) for key in ("rope_parameters", "rope_scaling")]
    places = [*((whole, key) for key in family.longest), *((inner, "max_position_embeddings") for inner in nested)]
    configured = next((keys.whole(key) for keys, key in places if keys.has(key)), None)
    rules = (getattr(spec.frequencies, "trained_length", None) for spec in rotating)
    trained = max((length for length in rules if length is not None), default=None)
    if trained is None:
        trained = next((keys.whole(_ORIGINAL) for keys in (whole, *nested) if keys.has(_ORIGINAL)), None)
    if trained is None and rotating and not any(_is_scaled(spec) for spec in rotating):
        trained = configured
    return Lengths(trained, configured)


def _is_scaled(spec: RopeSpec) -> bool:
    return not set(classify(spec.inv_freq(), plain_inv_freq(spec))) <= {"unchanged", "still"}
