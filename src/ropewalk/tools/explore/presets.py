"""What the page starts with: the rotations of configs, and a description of every rule for its fields."""

import dataclasses
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np

from ropewalk.errors import RopewalkError
from ropewalk.hub.configs.model import Model
from ropewalk.spec import Explicit, Frequencies, RopeSpec
from ropewalk.spec.by_parts import POLICIES, RAMPS
from ropewalk.spec.fields import REQUIRED
from ropewalk.tools.command_config import read_named_config
from ropewalk.tools.plot.bias import Bias, bias_of

__all__ = [
    "PAGE_RULES",
    "Preset",
    "describe_bias",
    "describe_rules",
    "in_page",
    "presets_of",
    "read_config",
    "with_distinct_names",
]

# The rules that browser/rules.js computes. Any other rule is embedded as numbers.
PAGE_RULES = (
    "Plain",
    "PositionInterpolation",
    "NTK",
    "NTKByParts",
    "DynamicNTK",
    "Yarn",
    "Llama3",
    "LongRope",
    "Proportional",
    "NTKFixed",
    "NTKMixed",
    "AcrossHeads",
    "Explicit",
)
# Values of fields without a default: what a field shows when its rule is chosen.
_START = {"factor": 4.0, "base": 10_000.0, "trained_length": 4096}
_CHOICES = {"ramp": RAMPS, "policy": POLICIES}
_LISTS = ("inv_freq", "short_factor", "long_factor")
# A name is a line in a list. Longer names of files are shortened.
_LONGEST_NAME = 80
# The context that the page shows if a config has no length.
_CONTEXT = 4096
_MOST_BUCKETS = 1024


@dataclass(frozen=True)
class Preset:
    """A rotation that the page offers.

    Attributes:
        name: The name of the model, and of the layers if they differ.
        spec: The spec, with a rule that the page computes.
        trained: The trained length.
        context: The context to show.
        notes: The pitfalls of its config.
        left_out: What the page neither shows nor copies of the model.
    """

    name: str
    spec: RopeSpec
    trained: int
    context: int
    notes: tuple[str, ...]
    left_out: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """The preset as the page reads it."""
        texts = {"notes": list(self.notes), "left_out": list(self.left_out)}
        return {**dataclasses.asdict(self), "spec": json.loads(self.spec.to_json()), **texts}


def read_config(config: str, pairing: str | None) -> tuple[list[Preset], dict[str, Any] | None]:
    """Read the rotations of a config, or the bias of a model that has ALiBi's or T5's.

    Args:
        config: The path of a config or of a model folder, or the name of a bundled config.
        pairing: The pairing, if the model family is unknown.

    Returns:
        The presets, and the bias as the page reads it: ALiBi's number of heads, or what T5 learned.

    Raises:
        RopewalkError: If the config cannot be read, or if it has neither a rotation nor such a bias.
    """
    asked = f"ropewalk explore {config}"
    try:
        model = read_named_config(config, pairing, asked)
    except RopewalkError as error:
        # Models with a bias have no rotation. Any other config keeps its error.
        try:
            bias = bias_of(config, asked)
        except RopewalkError:
            raise error from None
        described = describe_bias(Path(config).name, bias)
        if described is None:
            learned = " and ".join(bias.learned)
            got = f"the numbers of its {learned} only" if learned else "a bias without learned numbers"
            raise _nothing_to_show(asked, got) from None
        return [], described
    presets = presets_of(model)
    if not presets:
        raise _nothing_to_show(asked, f"{model.name}, which does not rotate")
    return presets, None


def _nothing_to_show(asked: str, got: str) -> RopewalkError:
    return RopewalkError(
        asked=asked,
        expected="a model that rotates queries and keys, one with ALiBi, or a folder with the weights of a T5 decoder",
        got=got,
        do="leave it out: the page shows T5's buckets without a config",
    )


def presets_of(model: Model) -> list[Preset]:
    """The distinct rotations of a model.

    >>> from ropewalk.hub import read_model
    >>> [preset.name for preset in presets_of(read_model({"model_type": "llama", "head_dim": 64}))]
    ['llama']
    """
    layers_of: dict[RopeSpec, list[str]] = {}
    for layer, spec in model.layers:
        if spec is not None:
            layers_of.setdefault(spec, []).append(layer)
    still = [layer for layer, spec in model.layers if spec is None]
    pitfalls = [text for _, text in model.warnings]
    pitfalls += [f"layers of type {', '.join(still)} do not rotate"] if still and layers_of else []
    presets: list[Preset] = []
    for spec, layers in layers_of.items():
        name = model.name if len(layers_of) == 1 else f"{model.name}, {' and '.join(layers)}"
        trained = _number(getattr(spec.frequencies, "trained_length", None)) or model.lengths.trained
        configured = model.lengths.configured
        factor = getattr(spec.frequencies, "factor", None) or 1.0
        reach = int(factor * trained) if trained is not None else None
        context = max(configured or 0, reach or 0) or _CONTEXT
        known, left_out = in_page(spec, context)
        shown = trained or configured or _CONTEXT
        notes = [] if trained else [f"the trained length is not in the config; {shown:,} is used"]
        if model.window is not None:
            notes.append(f"the attention of some layers has a window of {model.window:,} tokens")
        presets.append(Preset(_short(name), known, shown, context, (*notes, *pitfalls), left_out))
    return presets


def in_page(spec: RopeSpec, length: int) -> tuple[RopeSpec, tuple[str, ...]]:
    """The spec as the page computes it, and what is left out of it."""
    notes: list[str] = []
    rule, sign = spec.frequencies, spec.sign
    if spec.axes is not None:
        notes.append("positions on several axes are not shown: the page has one position per token, as in text")
        index = list(spec.axes.index)
        one_sequence = (
            index == list(range(len(index))) and 2 * len(index) == spec.axes.dim and "?" not in spec.axes.names
        )
        if not one_sequence:
            numbers = spec.axes.matrix(spec.inv_freq(length)).sum(axis=0) * sign
            rule = Explicit(np.asarray(numbers))
            notes.append("the axes repeat frequencies; the numbers are from Python and do not change with the fields")
    for name, words in (("xpos", "the factors of xPos are"), ("query_temperature", "the query temperature is")):
        if getattr(spec, name) is not None:
            notes.append(f"{words} not shown")
    if type(rule).__name__ not in PAGE_RULES:
        numbers = np.asarray(spec.frequencies.evaluate(spec.rotated_dim, length if spec.varies else None))
        notes.append(
            f"the page does not know the rule {rule.label}: it shows numbers from Python"
            + (f", for a length of {length:,}" if spec.varies else "")
        )
        if spec.amplitude(length) != 1 or spec.softmax_scale != 1:
            notes.append(
                f"its amplitude {spec.amplitude(length):.6g} and softmax scale {spec.softmax_scale:.6g} are not shown"
            )
        rule = Explicit(numbers)
    plain = dataclasses.replace(spec, frequencies=rule, axes=None, xpos=None, query_temperature=None)
    return plain, tuple(notes)


def describe_rules() -> dict[str, Any]:
    """Every rule of the page: its label, its names in configs, and its fields with their kinds and start values.

    >>> describe_rules()["Plain"]["fields"]
    [{'name': 'base', 'kind': 'number', 'default': 10000.0}]
    """
    return {name: _describe(Frequencies.known[name]) for name in PAGE_RULES}


def _describe(rule: type[Frequencies]) -> dict[str, Any]:
    fields = [_field(field) for field in dataclasses.fields(rule)]  # pyright: ignore[reportArgumentType]
    keys = dict(rule.config_keys)
    return {"label": rule.label, "rope_type": rule.rope_type, "config_keys": keys, "fields": fields}


def _field(field: "dataclasses.Field[Any]") -> dict[str, Any]:
    if field.name in _LISTS:
        return {"name": field.name, "kind": "list", "default": None}
    missing = field.default is dataclasses.MISSING or field.default is REQUIRED
    default = _START[field.name] if missing else field.default
    if field.name in _CHOICES:
        return {"name": field.name, "kind": "choice", "default": default, "choices": list(_CHOICES[field.name])}
    kind = "flag" if isinstance(default, bool) else "optional" if type(None) in get_args(field.type) else "number"
    return {"name": field.name, "kind": kind, "default": default}


def describe_bias(name: str, bias: Bias) -> dict[str, Any] | None:
    """A bias as the page reads it: ALiBi's number of heads, or T5's numbers per head and bucket of the decoder.

    >>> describe_bias("bloom", Bias(num_heads=4))
    {'name': 'bloom', 'num_heads': 4}

    Returns None for T5's bias without the numbers of a decoder.
    """
    if bias.num_heads is not None:
        return {"name": _short(name), "num_heads": bias.num_heads}
    for stack, numbers in bias.learned.items():
        if bias.num_buckets is not None and stack == "decoder" and len(numbers) <= _MOST_BUCKETS:
            heads = np.asarray(numbers, dtype=np.float64).T
            if np.isfinite(heads).all():
                lengths = {"num_buckets": bias.num_buckets, "max_distance": bias.max_distance}
                return {"name": _short(name), **lengths, "heads": heads.tolist()}
    return None


def with_distinct_names(presets: Iterable[Preset]) -> list[Preset]:
    """The presets, with a number behind every name that another preset has already.

    >>> one = Preset("a", RopeSpec(4), 16, 16, ())
    >>> [preset.name for preset in with_distinct_names([one, one])]
    ['a', 'a (2)']
    """
    taken: set[str] = set()
    distinct: list[Preset] = []
    for preset in presets:
        name, count = preset.name, 1
        while name in taken:
            count += 1
            name = f"{preset.name} ({count})"
        taken.add(name)
        distinct.append(dataclasses.replace(preset, name=name))
    return distinct


def _short(name: str) -> str:
    return name if len(name) <= _LONGEST_NAME else f"{name[: _LONGEST_NAME - 1]}…"


def _number(value: object) -> int | None:
    return value if isinstance(value, int) else None
