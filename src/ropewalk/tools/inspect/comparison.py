"""Several configs side by side: the output of `ropewalk inspect` for more than one config."""

import textwrap
from collections.abc import Callable, Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ropewalk.hub.configs.model import Model
from ropewalk.hub.inspection import Inspection, Layer, View
from ropewalk.spec.rope import RopeSpec
from ropewalk.theory.bands import KINDS
from ropewalk.tools.inspect.sheet import number

__all__ = ["comparison", "rows_of"]

Show = Callable[[Layer, RopeSpec, View], str]
Row = tuple[str, list[str] | None]
# The width of the mark and the names of the rows with the spaces after them, and the least width of a config's column:
# that of the longest word in a cell. Four configs fit into 80 columns.
NAMES, COLUMN = 21, 13
MISSING = "–"
# Rows that are left out if no config has another value.
_NEUTRAL = {"factor": MISSING, "amplitude": "1", "softmax scale": "1"}


def comparison(inspections: Sequence[Inspection], width: int) -> RenderableType:
    """The configs side by side, in one table, or in as many as are needed to fit `width`."""
    rows, heads = rows_of(inspections), _heads([inspection.model for inspection in inspections])
    fit = max(1, (width - NAMES + 1) // (COLUMN + 1))
    tables: list[RenderableType] = []
    for start in range(0, len(inspections), fit):
        shown = range(start, min(start + fit, len(inspections)))
        # A second space between columns, if there is room.
        space = int(len(shown) < fit)
        wrap = max(COLUMN, (width - NAMES + 1 - 2 * space) // len(shown) - 1 - space)
        table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, space, 0, 0))
        table.add_column("", width=1)
        table.add_column("", max_width=NAMES - 3, overflow="fold")
        for i in shown:
            table.add_column(textwrap.fill(heads[i], wrap), overflow="fold")
        for name, values in rows:
            if values is None:
                table.add_section()
                if name:
                    table.add_row("", Text(name, style="bold"))
                continue
            differs = len(set(values)) > 1
            style = "bold" if differs else "dim"
            cells = (Text(textwrap.fill(values[i], wrap), style=style) for i in shown)
            table.add_row("≠" if differs else "", name, *cells)
        tables += [table, ""]
    return Group(*tables, "≠ marks rows in which the configs differ.")


def rows_of(inspections: Sequence[Inspection]) -> list[Row]:
    """The rows of the comparison.

    A config whose layers are all alike is compared with every layer type of the others. Layers without rotation have
    only a row that states this. Rows that would contain no information are left out.

    Args:
        inspections: The figures of the models.

    Returns:
        Name and values, one value per config. None instead of values marks a heading: the layer type that follows.
    """
    models = [inspection.model for inspection in inspections]
    rows: list[Row] = [
        ("model_type", [str(model.model_type or MISSING) for model in models]),
        ("original length", [_length(model.lengths.trained) for model in models]),
        ("context length", [_length(model.lengths.configured) for model in models]),
    ]
    layers = [layer for inspection in inspections for layer in inspection.layers]
    names = list(dict.fromkeys(layer.name for layer in layers))
    for name in [name for name in names if name] or [""]:
        chosen = [_find(inspection.layers, name) for inspection in inspections]
        rows.append((name or "all layers", None))
        rotating = any(layer.spec is not None for layer in layers if layer.name == name)
        shown = _ROWS if rotating else {"kind": _ROWS["kind"]}
        cells = {label: [_cell(layer, show) for layer in chosen] for label, show in shown.items()}
        rows += [(label, values) for label, values in cells.items() if not _is_neutral(label, values)]
        rows += [*_pairs(chosen), *_wavelengths(chosen)] if rotating else []
    rows.append(("", None))
    counts = [len({name for name, _ in model.warnings}) for model in models]
    rows.append(("warnings", [str(count) if count else MISSING for count in counts]))
    return rows


def _is_neutral(label: str, values: list[str]) -> bool:
    return label in _NEUTRAL and set(values) <= {_NEUTRAL[label], MISSING}


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
    return MISSING if length is None else number(length)


def _of_rule(name: str) -> Show:
    def show(layer: Layer, spec: RopeSpec, view: View) -> str:
        value = getattr(spec.frequencies, name, None)
        return MISSING if value is None else number(value)

    return show


def _score(layer: Layer, spec: RopeSpec, view: View) -> str:
    return f"> {number(view.looked_to)}" if view.score_length is None else number(view.score_length)


def _rotated(layer: Layer, spec: RopeSpec, view: View) -> str:
    return f"{2 * sum(value != 0 for value in view.inv_freq)} of {spec.head_dim}"


def _pairs(chosen: list[Layer | None]) -> list[Row]:
    """The number of pairs of each kind, unless every pair of every config is unchanged."""
    kinds = {kind for layer in chosen if layer is not None and layer.views for kind in layer.views[-1].kinds}
    if kinds <= {"unchanged"}:
        return []
    return [
        (
            f"pairs {kind}",
            [_cell(layer, lambda _, __, view, kind=kind: str(view.counted().get(kind, 0))) for layer in chosen],
        )
        for kind in KINDS
        if kind in kinds
    ]


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
    "rotated features": _rotated,
    "amplitude": lambda layer, spec, view: number(view.amplitude),
    "softmax scale": lambda layer, spec, view: number(spec.softmax_scale),
    "critical dimension": lambda layer, spec, view: str(layer.critical_dimension or MISSING),
    "score sum ≥ 0 to": _score,
}
