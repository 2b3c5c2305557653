"""What `ropewalk inspect` knows of a model: the figures of each kind of layer, which it shows and writes."""

import json
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ropewalk.hub.configs.lengths import Lengths
from ropewalk.hub.configs.model import Model
from ropewalk.spec import RopeSpec
from ropewalk.theory import Band, bands, critical_dimension, first_negative_distance, periods, plain_inv_freq, turns
from ropewalk.tools.inspect.words import ADVICE, kind_of

__all__ = ["Layer", "View", "as_json", "layers_of"]

# How far the score sum is looked at, and how many terms that may have: a third of a second.
FARTHEST, TERMS = 1 << 20, 1 << 27


@dataclass(frozen=True)
class View:
    """The frequencies of a layer at one length. `length` is None where they are the same at any length."""

    length: int | None
    inv_freq: NDArray[np.float64]
    plain: NDArray[np.float64]
    bands: list[Band]
    amplitude: float
    # Up to this length the score sum is not negative; None where that holds as far as `looked_to`.
    score_length: int | None
    looked_to: int

    @property
    def wavelengths(self) -> NDArray[np.float64]:
        return periods(self.inv_freq)

    @property
    def kinds(self) -> list[str]:
        """What became of each pair."""
        return [band.kind for band in self.bands for _ in range(band.first, band.last + 1)]

    def counted(self) -> dict[str, int]:
        """How many pairs there are of each kind, in the order in which they come."""
        counts: dict[str, int] = {}
        for kind in self.kinds:
            counts[kind] = counts.get(kind, 0) + 1
        return counts


@dataclass(frozen=True)
class Layer:
    """A kind of layer that rotates, or, where `spec` is None, one that does not; `views` has one or two lengths."""

    name: str
    spec: RopeSpec | None
    kind: str
    critical_dimension: int | None
    # What the rule was made for: its factor times the trained length.
    reach: int | None
    views: tuple[View, ...]

    @property
    def title(self) -> str:
        return self.name or "all layers"


def layers_of(model: Model) -> list[Layer]:
    """The figures of each kind of layer."""
    return [_layer(name, spec, model.lengths) for name, spec in model.layers]


def _layer(name: str, spec: RopeSpec | None, lengths: Lengths) -> Layer:
    if spec is None:
        return Layer(name, None, "no rotation", None, None, ())
    rule = spec.frequencies
    factor, trained = getattr(rule, "factor", None), getattr(rule, "trained_length", None)
    reach = None if factor is None or trained is None or factor == 1 else round(factor * trained)
    at: list[int | None] = [None]
    if spec.varies and trained is not None:
        longer = [length for length in (lengths.configured, reach, 2 * trained) if length and length > trained]
        at = [trained, longer[0]]
    views = tuple(_view(spec, length) for length in at)
    return Layer(name, spec, kind_of(spec), _critical(spec, lengths.trained), reach, views)


def _view(spec: RopeSpec, length: int | None) -> View:
    inv_freq, plain = spec.inv_freq(length), plain_inv_freq(spec)
    looked_to = max(1, min(FARTHEST, TERMS // inv_freq.size))
    return View(
        length=length,
        inv_freq=inv_freq,
        plain=plain,
        bands=bands(inv_freq, plain),
        amplitude=spec.amplitude(length),
        # Distances below this one are fine, and they are those of a sequence of that many tokens.
        score_length=first_negative_distance(inv_freq, looked_to),
        looked_to=looked_to,
    )


def _critical(spec: RopeSpec, trained: int | None) -> int | None:
    """The critical dimension, where its formula has a meaning: one sequence of frequencies, by a base above 1."""
    base = getattr(spec.frequencies, "base", 0.0)
    shared = spec.axes is None or spec.axes.dim == spec.turning
    if trained is None or trained < 7 or base <= 1 or not shared:
        return None
    # Pairs that stand still saw no turn, whatever the base says of them.
    return min(critical_dimension(spec.turning, base, trained), 2 * int(np.count_nonzero(spec.inv_freq())))


def as_json(model: Model, layers: list[Layer]) -> dict[str, Any]:
    """All that is known, pair by pair."""
    return {
        "name": model.name,
        "path": None if model.path is None else str(model.path),
        "model_type": model.model_type,
        "trained_length": model.lengths.trained,
        "configured_length": model.lengths.configured,
        "sliding_window": model.window,
        "layer_kinds": None if model.kinds is None else list(model.kinds),
        "layers": [_layer_json(layer, model.lengths) for layer in layers],
        "warnings": [{"name": name, "text": text, "do": ADVICE[name]} for name, text in model.warnings],
    }


def _layer_json(layer: Layer, lengths: Lengths) -> dict[str, Any]:
    if layer.spec is None:
        return {"name": layer.name, "kind": layer.kind, "spec": None}
    return {
        "name": layer.name,
        "kind": layer.kind,
        "spec": json.loads(layer.spec.to_json()),
        "critical_dimension": layer.critical_dimension,
        "reach": layer.reach,
        "softmax_scale": layer.spec.softmax_scale,
        "views": [_view_json(view, lengths) for view in layer.views],
    }


def _view_json(view: View, lengths: Lengths) -> dict[str, Any]:
    columns: dict[str, list[Any]] = {
        "pair": list(range(view.inv_freq.size)),
        "inv_freq": view.inv_freq.tolist(),
        "wavelength": [None if math.isinf(length) else length for length in view.wavelengths.tolist()],
        "ratio": np.abs(view.inv_freq / view.plain).tolist(),
        "change": view.kinds,
    }
    for name, length in (("turns_trained", lengths.trained), ("turns_configured", lengths.configured)):
        columns[name] = [None] * view.inv_freq.size if length is None else turns(view.inv_freq, length).tolist()
    return {
        "length": view.length,
        "amplitude": view.amplitude,
        "score_sum_not_negative_to": view.score_length,
        "score_sum_looked_to": view.looked_to,
        "bands": [{"kind": band.kind, "first": band.first, "last": band.last} for band in view.bands],
        "pairs": [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)],
    }
