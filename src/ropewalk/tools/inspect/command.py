"""`ropewalk inspect`: what a config says of a model's RoPE, in words and figures. Needs neither torch nor weights."""

import importlib
import itertools
from collections.abc import Sequence

from rich import box
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ropewalk.errors import RopewalkError
from ropewalk.hub.configs.lengths import Lengths
from ropewalk.hub.configs.model import Model
from ropewalk.spec import RopeSpec
from ropewalk.theory import Band, turns
from ropewalk.tools.command_config import read_named_config
from ropewalk.tools.inspect.compare import comparison
from ropewalk.tools.inspect.facts import Layer, View, as_json, layers_of
from ropewalk.tools.inspect.words import (
    ADVICE,
    KIND_STYLES,
    count_of,
    features_of,
    number,
    pairing_of,
    parameters_of,
    window_of,
)
from ropewalk.tools.output import require_writable_file, write_json
from ropewalk.tools.trimmed import trimmed

__all__ = ["inspect", "pairs_to_show", "sheet"]

# As many rows as a screen takes; --json has every pair.
MOST_ROWS = 16


def inspect(
    configs: Sequence[str], json_file: str | None = None, plot: str | None = None, pairing: str | None = None
) -> int:
    """Shows one config in full, or several side by side; 0. A config that cannot be read is an error.

    A place that cannot be written is refused before anything is read.
    """
    command = f"ropewalk inspect {' '.join(configs)}"
    if json_file is not None:
        require_writable_file(json_file, asked=f"{command} --json {json_file}")
    if plot is not None:
        # A missing matplotlib is told now. Not imported above: it takes longer than all the rest.
        style = importlib.import_module("ropewalk.tools.plot.style")
        style.require_picture(plot, asked=f"{command} --plot {plot}")
    models = [(model, layers_of(model)) for model in (_read(config, pairing) for config in configs)]
    if json_file is not None:
        write_json([as_json(model, layers) for model, layers in models], json_file)
    if plot is not None:
        from ropewalk.tools.inspect.plot import draw

        draw(models, plot)
    # With the JSON on standard output, all that is for people goes to the other stream.
    console = Console(stderr=json_file == "-", highlight=False, markup=False)
    with trimmed(console):
        if len(models) == 1:
            console.print(sheet(*models[0]))
        else:
            console.print(comparison(models, console.width))
            for model, _ in models:
                if model.warnings:
                    console.print(_warnings(model, f"{model.name}: beware"))
    if plot is not None:
        console.print(f"picture: {plot}", soft_wrap=True)
    return 0


def _read(config: str, pairing: str | None) -> Model:
    asked = f"ropewalk inspect {config}"
    model = read_named_config(config, pairing, asked)
    if all(spec is None for _, spec in model.layers):
        raise RopewalkError(
            asked=asked,
            expected="a model that rotates queries and keys",
            got=f"{model.model_type}, of which no layer does",
            do="nothing: there is no RoPE to look at",
        )
    return model


def sheet(model: Model, layers: list[Layer]) -> RenderableType:
    """One model in full: a block for each kind of layer, then the warnings."""
    parts: list[RenderableType] = [Text(_title(model), style="bold")]
    for layer in layers:
        parts += ["", Text(f"{layer.title}: {layer.kind}", style="bold")]
        if layer.spec is None:
            parts.append(Padding(_without(model, layer), (0, 2)))
            continue
        parts.append(Padding(_figures(layer, layer.spec, model), (0, 2)))
        parts += [_frequencies(layer, view, model.lengths) for view in layer.views]
    if model.warnings:
        parts += ["", _warnings(model, "beware")]
    return Group(*parts)


def _title(model: Model) -> str:
    return model.name if model.model_type in (None, model.name) else f"{model.name} (model_type {model.model_type})"


def _without(model: Model, layer: Layer) -> str:
    """What is to be said of layers that do not rotate."""
    count = f"{counted}\n" if (counted := count_of(model, layer.name)) else ""
    if any(name == "temperature-without-rotation" for name, _ in model.warnings):
        return f"{count}Queries and keys do not turn, but queries are multiplied by a temperature of their position."
    return f"{count}Scores of these layers do not depend on where tokens stand."


def _figures(layer: Layer, spec: RopeSpec, model: Model) -> Table:
    """What is one number or one sentence."""
    lengths = model.lengths
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    rows = {
        "layers": count_of(model, layer.name),
        "window": window_of(model, layer.name),
        "rule": parameters_of(spec),
        "pairing": pairing_of(spec) + ("; turns the other way" if spec.sign < 0 else ""),
        "features": features_of(spec),
        "axes": "" if spec.axes is None else _axes(spec.axes.names),
        "query temperature": "" if spec.query_temperature is None else repr(spec.query_temperature),
        "trained length": _said(lengths.trained),
        "configured length": _said(lengths.configured) + _reach(layer, lengths),
        "critical dimension": _critical(layer, spec, lengths),
        "score sum ≥ 0": _each(layer, [_score(view) for view in layer.views]) + _part(spec),
        "amplitude": _each(layer, [number(view.amplitude) for view in layer.views]),
        "softmax scale": number(spec.softmax_scale),
    }
    for name, value in rows.items():
        if value:
            table.add_row(name, value)
    return table


def _said(length: int | None) -> str:
    return "not in the config" if length is None else number(length)


def _reach(layer: Layer, lengths: Lengths) -> str:
    """A factor that is not the ratio of the two lengths."""
    if layer.reach is None or layer.reach == lengths.configured:
        return ""
    return f"; the factor times the trained length is {number(layer.reach)}"


def _critical(layer: Layer, spec: RopeSpec, lengths: Lengths) -> str:
    if lengths.trained is None:
        return "unknown without the trained length"
    if layer.critical_dimension is None:
        return ""
    # The formula is that of the base; what a rule makes of it is in the table.
    kinds = {band.kind for view in layer.views for band in view.bands}
    scaled = "" if kinds <= {"unchanged", "still"} else ", by the base, before scaling"
    found = f"{layer.critical_dimension} of {spec.turning} features"
    return f"{found} saw a whole turn within {number(lengths.trained)}{scaled}"


def _score(view: View) -> str:
    if view.score_length is None:
        return f"up to length {number(view.looked_to)} at least; it was not looked farther"
    return f"up to length {number(view.score_length)}: a similar key leads a random one"


def _part(spec: RopeSpec) -> str:
    return "" if spec.turning == spec.head_dim else ", by the features that turn"


def _each(layer: Layer, values: list[str]) -> str:
    """The value, or one a view where they differ."""
    if len(set(values)) == 1:
        return values[0]
    return "\n".join(f"{value} ({_sequences(layer, view)})" for value, view in zip(values, layer.views, strict=True))


def _sequences(layer: Layer, view: View) -> str:
    return f"sequences {'up to' if view is layer.views[0] else 'of'} {_said(view.length)}"


def _axes(names: str) -> str:
    """The axis of each pair, in runs where those are long."""
    runs = [(name, len(list(run))) for name, run in itertools.groupby(names)]
    return ", ".join(f"{count} {name}" for name, count in runs) if len(runs) <= 8 else names


def pairs_to_show(bands: Sequence[Band], most: int = MOST_ROWS) -> list[int]:
    """At most that many pairs: the edges of the bands, and what divides the gaps between them evenly.

    >>> pairs_to_show([Band("unchanged", 0, 28), Band("interpolated", 29, 63)], most=7)
    [0, 14, 28, 29, 40, 51, 63]
    """
    edges = sorted({edge for band in bands for edge in (band.first, band.last)})
    if len(edges) > most:
        return [edges[round(i * (len(edges) - 1) / (most - 1))] for i in range(most)]
    gaps = list(itertools.pairwise(edges))
    parts = [1] * len(gaps)
    for _ in range(most - len(edges)):
        width, i = max((((b - a) / parts[i], i) for i, (a, b) in enumerate(gaps)), default=(0, 0))
        if width <= 1:
            break
        parts[i] += 1
    within = (a + j * (b - a) // n for (a, b), n in zip(gaps, parts, strict=True) for j in range(n))
    return [*within, edges[-1]]


def _frequencies(layer: Layer, view: View, lengths: Lengths) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), title_justify="left", title_style="")
    if view.length is not None:
        table.title = f"  {_sequences(layer, view)}"
    counted = list(dict.fromkeys(n for n in (lengths.trained, lengths.configured) if n is not None))
    for name in ("pair", "wavelength", "× plain", *(f"turns in\n{number(length)}" for length in counted)):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("change", no_wrap=True)
    shown, kinds, wavelengths = pairs_to_show(view.bands), view.kinds, view.wavelengths
    columns = [turns(view.inv_freq, length) for length in counted]
    for pair, following in zip(shown, [*shown[1:], None], strict=True):
        kind = kinds[pair]
        table.add_row(
            str(pair),
            number(wavelengths[pair]),
            "" if kind == "still" else number(abs(view.plain[pair] / view.inv_freq[pair])),
            *(number(column[pair]) for column in columns),
            Text(kind, style=KIND_STYLES[kind]),
            end_section=following is not None and kinds[following] != kind,
        )
    return table


def _warnings(model: Model, title: str) -> RenderableType:
    parts: list[RenderableType] = [Text(title, style="bold")]
    for name, text in model.warnings:
        parts.append(Text(f"  {name}", style="yellow"))
        parts.append(Padding(f"{text}\ndo this: {ADVICE[name]}", (0, 0, 0, 4)))
    return Group(*parts)
