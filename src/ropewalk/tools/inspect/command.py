"""`ropewalk inspect`: shows the RoPE of one config, or compares several. Needs neither torch nor weights."""

import importlib
from collections.abc import Callable, Sequence

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from ropewalk.hub.configs.model import Model
from ropewalk.hub.inspection import Inspection, Layer, View, inspection_of
from ropewalk.spec.rope import RopeSpec
from ropewalk.tools.command_config import read_named_config
from ropewalk.tools.inspect.sheet import features_of, number, sheet, warnings_of
from ropewalk.tools.output import require_writable_file, trimmed, write_json

__all__ = ["inspect", "rows_of"]

Show = Callable[[Layer, RopeSpec, View], str]
Row = tuple[str, list[str] | None]
# The widths of the first column, and of the column of one config.
NAMES, COLUMN = 23, 18
MISSING = "–"


def inspect(
    configs: Sequence[str], json_file: str | None = None, plot: str | None = None, pairing: str | None = None
) -> int:
    """Print one config in full, or several side by side.

    Args:
        configs: Paths of config.json files or model folders.
        json_file: Write every pair to this file as JSON; "-" for standard output.
        plot: Write a picture of the wavelengths to this file.
        pairing: The pairing, if the model family is unknown.

    Returns:
        The exit code 0.

    Raises:
        RopewalkError: If an output cannot be written, which is checked first, or if a config cannot be read.
    """
    command = f"ropewalk inspect {' '.join(configs)}"
    if json_file is not None:
        require_writable_file(json_file, asked=f"{command} --json {json_file}")
    if plot is not None:
        # Raises now if matplotlib is missing. Imported only here, because the import is slow.
        pictures = importlib.import_module("ropewalk.tools.pictures")
        pictures.require_picture(plot, asked=f"{command} --plot {plot}")
    inspections = [
        inspection_of(read_named_config(config, pairing, f"ropewalk inspect {config}")) for config in configs
    ]
    if json_file is not None:
        write_json([inspection.as_json() for inspection in inspections], json_file)
    if plot is not None:
        from ropewalk.tools.inspect.plot import draw

        draw(inspections, plot)
    # If JSON is written to standard output, everything else goes to standard error.
    console = Console(stderr=json_file == "-", highlight=False, markup=False)
    with trimmed(console):
        if len(inspections) == 1:
            console.print(sheet(inspections[0]))
        else:
            console.print(comparison(inspections, console.width))
            for model in (inspection.model for inspection in inspections):
                if model.warnings:
                    console.print(warnings_of(model, f"{model.name}: warnings"))
    if plot is not None:
        console.print(f"picture: {plot}", soft_wrap=True)
    return 0


def comparison(inspections: Sequence[Inspection], width: int) -> RenderableType:
    """The configs side by side, in as many tables as needed to fit `width`."""
    rows, heads = rows_of(inspections), _heads([inspection.model for inspection in inspections])
    fit = max(1, (width - NAMES) // COLUMN)
    tables: list[RenderableType] = []
    for start in range(0, len(inspections), fit):
        shown = range(start, min(start + fit, len(inspections)))
        table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1))
        table.add_column("", width=1)
        table.add_column("", no_wrap=True)
        for i in shown:
            table.add_column(heads[i], overflow="fold")
        for name, values in rows:
            if values is None:
                table.add_section()
                if name:
                    table.add_row("", Text(name, style="bold"))
                continue
            differs = len(set(values)) > 1
            style = "bold" if differs else "dim"
            table.add_row("≠" if differs else "", name, *(Text(values[i], style=style) for i in shown))
        tables += [table, ""]
    return Group(*tables, "≠ marks rows that differ.")


def rows_of(inspections: Sequence[Inspection]) -> list[Row]:
    """The rows of the comparison.

    A config whose layers are all alike is compared with every layer type of the others. Layers without rotation have
    only a row that states this.

    Args:
        inspections: The figures of the models.

    Returns:
        Name and values, one value per config. None instead of values marks a heading: the layer type that follows.
    """
    models = [inspection.model for inspection in inspections]
    rows: list[Row] = [
        ("model_type", [str(model.model_type or MISSING) for model in models]),
        ("trained length", [_length(model.lengths.trained) for model in models]),
        ("configured length", [_length(model.lengths.configured) for model in models]),
    ]
    layers = [layer for inspection in inspections for layer in inspection.layers]
    names = list(dict.fromkeys(layer.name for layer in layers))
    for name in [name for name in names if name] or [""]:
        chosen = [_find(inspection.layers, name) for inspection in inspections]
        rows.append((name or "all layers", None))
        rotating = any(layer.spec is not None for layer in layers if layer.name == name)
        shown = _ROWS if rotating else {"kind": _ROWS["kind"]}
        rows += [(label, [_cell(layer, show) for layer in chosen]) for label, show in shown.items()]
        rows += _wavelengths(chosen) if rotating else []
    rows.append(("", None))
    rows.append(("warnings", ["\n".join(dict.fromkeys(n for n, _ in model.warnings)) or MISSING for model in models]))
    return rows


def _heads(models: list[Model]) -> list[str]:
    """The column titles: the names of the models, or their paths if two names are equal."""
    names = [model.name for model in models]
    return names if len(set(names)) == len(names) else [str(model.path or model.name) for model in models]


def _find(layers: Sequence[Layer], name: str) -> Layer | None:
    by_name = {layer.name: layer for layer in layers}
    return by_name.get(name, by_name.get(""))


def _cell(layer: Layer | None, show: Show) -> str:
    if layer is None:
        return MISSING
    if layer.spec is None:
        return layer.kind if show is _ROWS["kind"] else MISSING
    # If a rule depends on the length, show it for long sequences, for which it is made.
    return show(layer, layer.spec, layer.views[-1])


def _length(length: int | None) -> str:
    return "not in the config" if length is None else number(length)


def _of_rule(name: str) -> Show:
    def show(layer: Layer, spec: RopeSpec, view: View) -> str:
        value = getattr(spec.frequencies, name, None)
        return MISSING if value is None else number(value)

    return show


def _score(layer: Layer, spec: RopeSpec, view: View) -> str:
    return f"> {number(view.looked_to)}" if view.score_length is None else number(view.score_length)


def _wavelengths(chosen: list[Layer | None]) -> list[Row]:
    """The wavelengths of five pairs, if all layers have the same number of pairs."""
    views = [layer.views[-1] for layer in chosen if layer is not None and layer.views]
    counts = {len(view.inv_freq) for view in views}
    if len(counts) != 1 or len(views) < 2:
        return []
    (pairs,) = counts
    return [
        (
            f"λ of pair {pair}",
            [_cell(layer, lambda _, __, view, p=pair: number(view.wavelengths[p])) for layer in chosen],
        )
        for pair in sorted({round(i * (pairs - 1) / 4) for i in range(5)})
    ]


_ROWS: dict[str, Show] = {
    "kind": lambda layer, spec, view: layer.kind,
    "base": _of_rule("base"),
    "factor": _of_rule("factor"),
    "pairing": lambda layer, spec, view: spec.pairing,
    "head_dim": lambda layer, spec, view: str(spec.head_dim),
    "rotated features": lambda layer, spec, view: features_of(spec),
    "amplitude": lambda layer, spec, view: number(view.amplitude),
    "softmax scale": lambda layer, spec, view: number(spec.softmax_scale),
    "critical dimension": lambda layer, spec, view: str(layer.critical_dimension or MISSING),
    "score sum ≥ 0 to": _score,
    "pairs": lambda layer, spec, view: "\n".join(f"{count} {kind}" for kind, count in view.counted().items()),
}
