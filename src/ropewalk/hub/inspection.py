"""The RoPE of a model in numbers: frequencies, bands, lengths and pitfalls. The content of `ropewalk inspect`."""

import json
import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ropewalk.errors import RopewalkError
from ropewalk.hub.configs.keys import Caller, ConfigSource
from ropewalk.hub.configs.layers import has_window
from ropewalk.hub.configs.model import Lengths, Model, model_for
from ropewalk.hub.configs.pitfalls import ADVICE
from ropewalk.spec.frequencies import Plain
from ropewalk.spec.rope import Pairing, RopeSpec
from ropewalk.theory import (
    Band,
    TunedContext,
    bands,
    context_after_tuning,
    critical_dimension,
    first_negative_distance,
    periods,
    plain_inv_freq,
    rotations,
)

__all__ = ["Inspection", "Layer", "View", "inspect_model", "inspection_of", "kind_of"]

# The largest distance at which the score sum is computed, and the largest number of its terms: a third of a second. The
# layer types of a model share twice that number of terms.
FARTHEST, TERMS = 1 << 20, 1 << 27
# The largest number of frequencies over all layer types. Each is one row of the output.
MOST_PAIRS = 1 << 16


@dataclass(frozen=True)
class View:
    """The frequencies of a layer at one length.

    Attributes:
        length: The length. None if the frequencies do not depend on it.
        inv_freq: The frequency of each pair.
        plain: The frequencies without the rule.
        bands: Runs of pairs that the rule changes in the same way.
        amplitude: The factor on cos and sin.
        score_length: The score sum is not negative at distances below this one. None if it is not negative up to
            `looked_to`.
        looked_to: The largest distance at which the score sum was computed.
    """

    length: int | None
    inv_freq: tuple[float, ...]
    plain: tuple[float, ...]
    bands: tuple[Band, ...]
    amplitude: float
    score_length: int | None
    looked_to: int

    @property
    def wavelengths(self) -> NDArray[np.float64]:
        """The wavelength of each pair, in positions."""
        return periods(self.inv_freq)

    @property
    def kinds(self) -> list[str]:
        """How the rule changes each pair, such as "unchanged" or "interpolated"."""
        return [band.kind for band in self.bands for _ in range(band.first, band.last + 1)]

    def counted(self) -> dict[str, int]:
        """Return the number of pairs of each kind, in the order of their first pair."""
        counts: dict[str, int] = {}
        for kind in self.kinds:
            counts[kind] = counts.get(kind, 0) + 1
        return counts


@dataclass(frozen=True)
class Layer:
    """A layer type of a model.

    Attributes:
        name: The name of the layer type. "" if all layers have the same rotation.
        spec: Its rotation. None if it does not rotate.
        kind: The kind of RoPE, in a few words.
        critical_dimension: The number of features whose pairs completed a rotation in training. None if unknown.
        new_base: What the scaling law states about tuning with a new base at the trained length: its critical base is
            the base of training. None for layers that the law is not stated for: it needs plain frequencies, a trained
            length, and attention to the whole context.
        reach: The length that the rule is made for: the factor times the trained length. None if unknown.
        views: Its frequencies: at one length, or at two if they depend on the length. Empty if it does not rotate.
    """

    name: str
    spec: RopeSpec | None
    kind: str
    critical_dimension: int | None
    new_base: TunedContext | None
    reach: int | None
    views: tuple[View, ...]

    @property
    def title(self) -> str:
        """The name, or "all layers"."""
        return self.name or "all layers"


@dataclass(frozen=True)
class Inspection:
    """The RoPE of a model in numbers.

    Attributes:
        model: The model.
        layers: One entry per layer type.

    >>> inspection = inspect_model({"model_type": "llama", "head_dim": 64})
    >>> [layer.kind for layer in inspection.layers], inspection.model.model_type
    (['plain RoPE'], 'llama')
    """

    model: Model
    layers: tuple[Layer, ...]

    def as_json(self) -> dict[str, object]:
        """Return the inspection as JSON-serializable data, with one entry per pair.

        >>> inspect_model({"model_type": "llama", "head_dim": 4}).as_json()["layers"][0]["views"][0]["bands"]
        [{'kind': 'unchanged', 'first': 0, 'last': 1}]
        """
        model = self.model
        return {
            "name": model.name,
            "path": None if model.path is None else str(model.path),
            "model_type": model.model_type,
            "trained_length": model.lengths.trained,
            "configured_length": model.lengths.configured,
            "sliding_window": model.window,
            "layer_kinds": None if model.kinds is None else list(model.kinds),
            "layers": [_layer_json(layer, model.lengths) for layer in self.layers],
            "warnings": [{"name": name, "text": text, "do": ADVICE[name]} for name, text in model.warnings],
        }


def inspect_model(config: ConfigSource, *, pairing: Pairing | None = None) -> Inspection:
    """Inspect the RoPE of a model: the content of `ropewalk inspect`.

    Args:
        config: A path, a dict or a config object, as in `load_spec`.
        pairing: Which features form a pair. Required for an unknown family.

    Returns:
        The model and, per layer type, its rule, frequencies, bands, and the distance up to which its score sum is not
        negative.

    Raises:
        RopewalkError: If `load_spec` would raise, or if no layer of the model rotates.

    >>> scaling = {"rope_type": "linear", "factor": 4.0}
    >>> (layer,) = inspect_model({"model_type": "llama", "head_dim": 8, "rope_scaling": scaling}).layers
    >>> layer.kind, layer.views[0].inv_freq[0], layer.views[0].counted()
    ('position interpolation (PI)', 0.25, {'interpolated': 4})
    """
    return inspection_of(model_for(Caller("inspect_model"), config, pairing))


def inspection_of(model: Model) -> Inspection:
    """Inspect a model that was already read.

    Raises:
        RopewalkError: If no layer rotates, or if there are too many frequencies.
    """
    if all(spec is None for _, spec in model.layers):
        raise RopewalkError(
            asked=model.config.caller.asked("the RoPE of a model"),
            expected="a model that rotates queries and keys",
            got=f"{model.model_type}, in which no layer rotates",
            do="use a model with RoPE",
        )
    lengths = model.lengths
    viewed = {name: [] if spec is None else _lengths_to_view(spec, lengths) for name, spec in model.layers}
    pairs = sum(len(viewed[name]) * spec.rotated_dim // 2 for name, spec in model.layers if spec is not None)
    if pairs > MOST_PAIRS:
        raise RopewalkError(
            asked=model.config.caller.asked("the frequencies of a model"),
            expected=f"at most {MOST_PAIRS} frequencies over all layer types",
            got=f"{pairs}",
            do="inspect the layer types one by one: load_spec(...) returns one spec per layer type",
        )
    terms = min(TERMS, 2 * TERMS // sum(map(len, viewed.values())))
    return Inspection(model, tuple(_layer(name, spec, model, viewed[name], terms) for name, spec in model.layers))


def _reach(spec: RopeSpec) -> int | None:
    rule = spec.frequencies
    factor, trained = getattr(rule, "factor", None), getattr(rule, "trained_length", None)
    return None if factor is None or trained is None or factor == 1 else round(factor * trained)


def _lengths_to_view(spec: RopeSpec, lengths: Lengths) -> list[int | None]:
    """Return two lengths if the frequencies depend on the length, and [None] otherwise."""
    trained = getattr(spec.frequencies, "trained_length", None)
    if not spec.varies or trained is None:
        return [None]
    longer = [length for length in (lengths.configured, _reach(spec), 2 * trained) if length and length > trained]
    return [trained, longer[0]]


def _layer(name: str, spec: RopeSpec | None, model: Model, viewed: list[int | None], terms: int) -> Layer:
    if spec is None:
        return Layer(name, None, "no rotation", None, None, None, ())
    trained = model.lengths.trained
    return Layer(
        name=name,
        spec=spec,
        kind=kind_of(spec),
        critical_dimension=_critical(spec, trained),
        new_base=_new_base(spec, trained) if _sees_whole_context(name, model) else None,
        reach=_reach(spec),
        views=tuple(_view(spec, length, terms) for length in viewed),
    )


def _view(spec: RopeSpec, length: int | None, terms: int) -> View:
    inv_freq, plain = spec.inv_freq(length), plain_inv_freq(spec)
    looked_to = max(1, min(FARTHEST, terms // inv_freq.size))
    return View(
        length=length,
        inv_freq=tuple(inv_freq.tolist()),
        plain=tuple(plain.tolist()),
        bands=tuple(bands(inv_freq, plain)),
        amplitude=spec.amplitude(length),
        # A sequence of n tokens has distances below n, so the first negative distance is the length.
        score_length=first_negative_distance(inv_freq, looked_to),
        looked_to=looked_to,
    )


def _critical(spec: RopeSpec, trained: int | None) -> int | None:
    """Return the critical dimension, or None if its formula does not apply: it needs one base above 1."""
    base = getattr(spec.frequencies, "base", 0.0)
    shared = spec.axes is None or spec.axes.dim == spec.rotated_dim
    if trained is None or trained < 7 or base <= 1 or not shared:
        return None
    # Pairs that are not rotated completed no rotation.
    return min(critical_dimension(spec.rotated_dim, base, trained), 2 * int(np.count_nonzero(spec.inv_freq())))


def _new_base(spec: RopeSpec, trained: int | None) -> TunedContext | None:
    """Return the scaling law for tuning at the trained length, or None if it is not stated for the frequencies."""
    rule = spec.frequencies
    if not isinstance(rule, Plain) or rule.base <= 1 or spec.axes is not None or trained is None or trained < 7:
        return None
    return context_after_tuning(trained, trained, rule.base, spec.rotated_dim, rule.base)


def _sees_whole_context(name: str, model: Model) -> bool:
    """Return whether some layers of the type are known to attend to more than a window."""
    if name or model.window is None:
        return not has_window(name, model.config.language.data)
    return model.kinds is not None and "full_attention" in model.kinds


def kind_of(spec: RopeSpec) -> str:
    """Describe the kind of RoPE in a few words.

    >>> kind_of(RopeSpec(128, rotary_dim=32))
    'plain RoPE, partial'
    """
    words = [spec.frequencies.label]
    if spec.rotated_dim < spec.head_dim:
        words.append("partial" if spec.rotary_slice == "leading" else "on the last part of a head")
    if spec.axes is not None:
        words.append(f"{spec.axes.count} axes")
    if spec.query_temperature is not None:
        words.append("query temperature")
    return ", ".join(words)


def _layer_json(layer: Layer, lengths: Lengths) -> dict[str, object]:
    if layer.spec is None:
        return {"name": layer.name, "kind": layer.kind, "spec": None}
    return {
        "name": layer.name,
        "kind": layer.kind,
        "spec": json.loads(layer.spec.to_json()),
        "critical_dimension": layer.critical_dimension,
        "new_base": None if layer.new_base is None else _new_base_json(layer.new_base, layer.spec, lengths),
        "reach": layer.reach,
        "softmax_scale": layer.spec.softmax_scale,
        "views": [_view_json(view, lengths) for view in layer.views],
    }


def _new_base_json(law: TunedContext, spec: RopeSpec, lengths: Lengths) -> dict[str, object]:
    """The limit is 2 pi base^exponent above the critical base (no limit if null), and the tuned length otherwise."""
    has_limit = law.trained_critical_dim < spec.rotated_dim
    return {
        "tuned_length": lengths.trained,
        "critical_base": law.critical_base,
        "larger_base_exponent": law.trained_critical_dim / spec.rotated_dim if has_limit else None,
        "smaller_base_limit": law.limit,
        "smaller_base_thresholds": list(law.thresholds),
        "slowest_rotation": law.slowest_rotation,
    }


def _view_json(view: View, lengths: Lengths) -> dict[str, object]:
    pairs = len(view.inv_freq)
    columns: dict[str, list[object]] = {
        "pair": list(range(pairs)),
        "inv_freq": list(view.inv_freq),
        "wavelength": [None if math.isinf(length) else length for length in view.wavelengths.tolist()],
        "ratio": np.abs(np.array(view.inv_freq) / np.array(view.plain)).tolist(),
        "change": list(view.kinds),
    }
    for name, length in (("rotations_trained", lengths.trained), ("rotations_configured", lengths.configured)):
        columns[name] = [None] * pairs if length is None else rotations(view.inv_freq, length).tolist()
    return {
        "length": view.length,
        "amplitude": view.amplitude,
        "score_sum_not_negative_to": view.score_length,
        "score_sum_looked_to": view.looked_to,
        "bands": [{"kind": band.kind, "first": band.first, "last": band.last} for band in view.bands],
        "pairs": [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)],
    }
