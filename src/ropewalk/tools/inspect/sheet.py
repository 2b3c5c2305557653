"""The output of `ropewalk inspect` for one model."""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ropewalk.hub.configs.model import Lengths, Model
from ropewalk.hub.configs.pitfalls import ADVICE
from ropewalk.hub.inspection import Inspection, Layer, View
from ropewalk.spec.rope import RopeSpec
from ropewalk.theory.bands import Band, rotations
from ropewalk.theory.context import context_after_tuning

__all__ = ["KIND_STYLES", "features_of", "number", "pairs_to_show", "sheet", "warnings_of"]

# The number of rows that fit on a screen. --json contains every pair.
MOST_ROWS = 16
# Kinds of bands whose pairs are all changed by the same factor. Only the ends of such a band are shown.
_UNIFORM = ("unchanged", "interpolated", "still")
# The colour of each kind of change to a pair's frequency.
KIND_STYLES = {"unchanged": "green", "between": "yellow", "interpolated": "cyan", "still": "dim", "faster": "red"}


def sheet(inspection: Inspection) -> RenderableType:
    """Show one model: one block per layer type, then the warnings.

    Args:
        inspection: The figures of the model.

    Returns:
        A renderable for rich.
    """
    model = inspection.model
    parts: list[RenderableType] = [Text(_title(model), style="bold")]
    for layer in inspection.layers:
        parts += ["", Text(f"{layer.title}: {layer.kind}", style="bold")]
        if layer.spec is None:
            parts.append(Padding(_unrotated(model, layer), (0, 2)))
            continue
        parts.append(Padding(_figures(layer, layer.spec, model), (0, 2)))
        parts += [_frequencies(layer, view, model.lengths) for view in layer.views]
    if model.warnings:
        parts += ["", warnings_of(model, "warnings")]
    return Group(*parts)


def _title(model: Model) -> str:
    return model.name if model.model_type in (None, model.name) else f"{model.name} (model_type {model.model_type})"


def _unrotated(model: Model, layer: Layer) -> str:
    """The text for layers without rotation."""
    count = f"{text}\n" if (text := count_of(model, layer.name)) else ""
    if any(name == "temperature-without-rotation" for name, _ in model.warnings):
        return f"{count}Queries and keys are not rotated. Queries are multiplied by a temperature per position."
    return f"{count}Scores in these layers do not depend on positions."


def _figures(layer: Layer, spec: RopeSpec, model: Model) -> Table:
    """The properties that are one number or one sentence."""
    lengths = model.lengths
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    rows = {
        "layers": count_of(model, layer.name),
        "window": window_of(model, layer.name),
        "rule": parameters_of(spec),
        "pairing": pairing_of(spec) + ("; rotated in the opposite direction" if spec.sign < 0 else ""),
        "features": features_of(spec),
        "axes": "" if spec.axes is None else _axes(spec.axes.names),
        "query temperature": "" if spec.query_temperature is None else repr(spec.query_temperature),
        **_lengths(layer, lengths),
        "critical dimension": _critical(layer, spec, lengths),
        **_new_base(layer, spec, lengths),
        "score sum ≥ 0": _per_view(layer, [_score(view) for view in layer.views]) + _rotated_part(spec),
        "amplitude": _per_view(layer, [number(view.amplitude) for view in layer.views]),
        # Only DeepSeek's YaRN has another scale.
        "softmax scale": "" if spec.softmax_scale == 1 else number(spec.softmax_scale),
    }
    for name, value in rows.items():
        if value:
            table.add_row(name, value)
    return table


def _length_text(length: int | None) -> str:
    return "not in the config" if length is None else number(length)


def _lengths(layer: Layer, lengths: Lengths) -> dict[str, str]:
    """The lengths of the model. The trained length is called original if the context was extended later."""
    if lengths.trained == lengths.configured and layer.reach in (None, lengths.trained):
        return {"trained length": _length_text(lengths.trained)}
    context = _length_text(lengths.configured) + _reach(layer, lengths)
    return {"original length": _length_text(lengths.trained), "context length": context}


def _reach(layer: Layer, lengths: Lengths) -> str:
    """The length that the factor implies, if it is not the configured length."""
    if layer.reach is None or layer.reach == lengths.configured:
        return ""
    return f"; factor × original length is {number(layer.reach)}"


def _critical(layer: Layer, spec: RopeSpec, lengths: Lengths) -> str:
    if lengths.trained is None:
        return "unknown without the trained length"
    if layer.critical_dimension is None:
        return ""
    # The critical dimension is defined by the base. The table shows the effect of a rule.
    kinds = {band.kind for view in layer.views for band in view.bands}
    scaled = "" if kinds <= {"unchanged", "still"} else ", before scaling"
    features = f"{layer.critical_dimension} of {spec.rotated_dim} features"
    return f"{features} complete a rotation within {number(lengths.trained)}{scaled}"


def _new_base(layer: Layer, spec: RopeSpec, lengths: Lengths) -> dict[str, str]:
    """The two halves of the scaling law, for tuning at the trained length."""
    law = layer.new_base
    if law is None or lengths.trained is None:
        return {}
    length, example = number(lengths.trained), 10 * law.critical_base
    tuned = context_after_tuning(lengths.trained, lengths.trained, example, spec.rotated_dim, law.critical_base)
    larger = f"no limit; every pair completes a rotation within {length}"
    if tuned.limit is not None:
        formula = f"2π·base^({law.trained_critical_dim}/{spec.rotated_dim})"
        larger = f"the limit is {formula}, {number(tuned.limit)} for base {number(example)}"
    # The others are not below the base of training.
    parts = zip(law.thresholds, ("1/4", "1/2", "1"), strict=True)
    left = [(number(round(base)), part) for base, part in parts if base < law.critical_base]
    smaller = f"the limit is {length}"
    if left:
        bases, rotation = (_listed(column) for column in zip(*left, strict=True))
        smaller += (
            f". Beyond it, the loss is expected to rise more slowly below base {bases} ({rotation} rotation of every"
            " pair)"
        )
    return {"larger base": f"tuned at {length}: {larger}", "smaller base": f"tuned at {length}: {smaller}"}


def _listed(values: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(values[:-1]), values[-1])))


def _score(view: View) -> str:
    if view.score_length is None:
        return f"at least up to length {number(view.looked_to)}, the longest that was tested"
    return f"up to length {number(view.score_length)}: a similar key scores above a random one"


def _rotated_part(spec: RopeSpec) -> str:
    return "" if spec.rotated_dim == spec.head_dim else ", counting only rotated features"


def _per_view(layer: Layer, values: list[str]) -> str:
    """The value, or one value per view if they differ."""
    if len(set(values)) == 1:
        return values[0]
    return "\n".join(f"{value} ({_sequences(layer, view)})" for value, view in zip(values, layer.views, strict=True))


def _sequences(layer: Layer, view: View) -> str:
    return f"sequences {'up to' if view is layer.views[0] else 'of'} {_length_text(view.length)}"


def _axes(names: str) -> str:
    """The axis of each pair, as runs if there are few of them."""
    runs = [(name, len(list(run))) for name, run in itertools.groupby(names)]
    return ", ".join(f"{count} {name}" for name, count in runs) if len(runs) <= 8 else names


def pairs_to_show(bands: Sequence[Band], most: int = MOST_ROWS) -> list[int]:
    """Choose the pairs to show: the edges of the bands, and evenly spaced pairs inside bands whose pairs differ.

    Args:
        bands: The bands, in order.
        most: The maximum number of pairs.

    Returns:
        The indices of the pairs, in order.

    >>> pairs_to_show([Band("unchanged", 0, 28), Band("between", 29, 34), Band("interpolated", 35, 63)], most=7)
    [0, 28, 29, 31, 34, 35, 63]
    """
    edges = sorted({edge for band in bands for edge in (band.first, band.last)})
    if len(edges) > most:
        return [edges[round(i * (len(edges) - 1) / (most - 1))] for i in range(most)]
    gaps = list(itertools.pairwise(edges))
    folded = {(band.first, band.last) for band in bands if band.kind in _UNIFORM}
    parts = [1] * len(gaps)
    for _ in range(most - len(edges)):
        widths = ((0 if gap in folded else (gap[1] - gap[0]) / parts[i], i) for i, gap in enumerate(gaps))
        width, i = max(widths, default=(0, 0))
        if width <= 1:
            break
        parts[i] += 1
    within = (a + j * (b - a) // n for (a, b), n in zip(gaps, parts, strict=True) for j in range(n))
    return [*within, edges[-1]]


def _frequencies(layer: Layer, view: View, lengths: Lengths) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), title_justify="left", title_style="")
    if view.length is not None:
        table.title = f"  {_sequences(layer, view)}"
    lengths_shown = list(dict.fromkeys(n for n in (lengths.trained, lengths.configured) if n is not None))
    # Without a rule every pair is unchanged, and the two columns on changes would be the same in every row.
    changes = set(view.kinds) != {"unchanged"}
    columns = ("pair", "wavelength", *(["× plain"] if changes else []))
    for name in (*columns, *(f"rotations in\n{number(length)}" for length in lengths_shown)):
        table.add_column(name, justify="right", no_wrap=True)
    if changes:
        table.add_column("change", no_wrap=True)
    shown, kinds, wavelengths = pairs_to_show(view.bands), view.kinds, view.wavelengths
    rotations_shown = [rotations(view.inv_freq, length) for length in lengths_shown]
    for pair, following in zip(shown, [*shown[1:], None], strict=True):
        kind = kinds[pair]
        ratio = "" if kind == "still" else number(abs(view.plain[pair] / view.inv_freq[pair]))
        table.add_row(
            str(pair),
            number(wavelengths[pair]),
            *([ratio] if changes else []),
            *(number(column[pair]) for column in rotations_shown),
            *([Text(kind, style=KIND_STYLES[kind])] if changes else []),
            end_section=following is not None and kinds[following] != kind,
        )
        if following is not None and following > pair + 1 and kinds[following] == kind:
            table.add_row("⋮")
    return table


def warnings_of(model: Model, title: str) -> RenderableType:
    """The warnings of a model, each with its advice, under a title."""
    parts: list[RenderableType] = [Text(title, style="bold")]
    for name, text in model.warnings:
        parts.append(Text(f"  {name}", style="yellow"))
        parts.append(Padding(f"{text}\ndo this: {ADVICE[name]}", (0, 0, 0, 4)))
    return Group(*parts)


def parameters_of(spec: RopeSpec) -> str:
    """The parameters of the rule, as text. Strings that have their default are left out.

    >>> from ropewalk.spec.stretched import PositionInterpolation
    >>> parameters_of(RopeSpec(8, PositionInterpolation(10_000, factor=4)))
    'base 10,000, factor 4'
    """
    rule: Any = spec.frequencies
    shown: list[str] = []
    for field in dataclasses.fields(rule):
        value = getattr(rule, field.name)
        if isinstance(value, tuple):
            shown.append(f"{field.name} {len(value)} numbers, {number(min(value))} to {number(max(value))}")
        elif value is not None and not isinstance(value, str):
            shown.append(f"{field.name} {str(value).lower() if isinstance(value, bool) else number(value)}")
        elif value is not None and value != field.default:
            shown.append(f"{field.name} {value}")
    return ", ".join(shown)


def pairing_of(spec: RopeSpec) -> str:
    """Which features form a pair, as text.

    >>> pairing_of(RopeSpec(128, pairing="half"))
    'half: features i and i + 64'
    """
    if spec.pairing == "interleaved":
        return "interleaved: features 2i and 2i + 1"
    return f"half: features i and i + {spec.rotated_dim // 2}"


def features_of(spec: RopeSpec) -> str:
    """Which features of a head are rotated, as text.

    >>> features_of(RopeSpec(192, rotary_dim=64, rotary_slice="trailing"))
    'the last 64 of 192 are rotated'
    >>> from ropewalk.spec.frequencies import Proportional
    >>> features_of(RopeSpec(8, Proportional(1e4, 0.25)))
    '2 of 8 are rotated; the other pairs have frequency 0'
    """
    still = int((np.atleast_2d(spec.inv_freq())[0] == 0).sum())
    if still:
        return f"{spec.rotated_dim - 2 * still} of {spec.head_dim} are rotated; the other pairs have frequency 0"
    if spec.rotated_dim == spec.head_dim:
        return f"all {spec.head_dim} are rotated"
    part = "first" if spec.rotary_slice == "leading" else "last"
    return f"the {part} {spec.rotated_dim} of {spec.head_dim} are rotated"


def count_of(model: Model, layer: str) -> str:
    """The number of layers of a type, or of every type if all rotate alike; "" if unknown.

    >>> from ropewalk.hub.configs.model import read_model
    >>> config = {"model_type": "gpt_oss", "num_hidden_layers": 24, "rope_parameters": {"rope_theta": 150000.0}}
    >>> count_of(read_model(config), "")
    '24: 12 sliding_attention, 12 full_attention'
    """
    if model.kinds is None or (layer and layer not in model.kinds):
        return ""
    if layer:
        return f"{model.kinds.count(layer)} of {len(model.kinds)} layers"
    counts = {kind: model.kinds.count(kind) for kind in model.kinds}
    kinds = ", ".join(f"{count} {kind}" for kind, count in counts.items())
    return f"{len(model.kinds)}" + (f": {kinds}" if len(counts) > 1 else "")


def window_of(model: Model, layer: str) -> str:
    """The window of a layer type, if the config contains it; "" without a window.

    >>> from ropewalk.hub.configs.model import read_model
    >>> config = {"model_type": "mistral", "head_dim": 8, "num_hidden_layers": 2, "sliding_window": 4096}
    >>> window_of(read_model(config), "")
    '4,096'
    """
    if model.window is None or (layer and "sliding" not in layer):
        return ""
    if layer:
        return number(model.window)
    if model.kinds is None:
        return f"{number(model.window)}, in layers that the config does not name"
    windowed = model.kinds.count("sliding_attention")
    return (
        ""
        if not windowed
        else number(model.window) + ("" if windowed == len(model.kinds) else ", of sliding_attention")
    )


def number(value: float) -> str:
    """Format a number: four digits, or an integer with commas.

    >>> number(6.283185), number(2559196.3), number(0.0032009), number(8.0), number(1e12)
    ('6.283', '2,559,196', '0.003201', '8', '1e+12')
    """
    if math.isinf(value):
        return "∞"
    if abs(value) >= 1e10:
        return f"{value:.4g}"
    if abs(value) >= 1000 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.4g}"
