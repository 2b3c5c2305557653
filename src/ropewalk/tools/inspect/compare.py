"""`ropewalk inspect A B`: one column a config, a mark on every row in which they differ."""

from collections.abc import Callable, Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ropewalk.hub.configs.model import Model
from ropewalk.spec import RopeSpec
from ropewalk.tools.inspect.facts import Layer, View
from ropewalk.tools.inspect.words import features_of, number

__all__ = ["comparison", "rows_of"]

Inspected = tuple[Model, list[Layer]]
Show = Callable[[Layer, RopeSpec, View], str]
Row = tuple[str, list[str] | None]
# The first column, and what a config needs to be readable beside others.
NAMES, COLUMN = 23, 18
MISSING = "–"


def comparison(models: Sequence[Inspected], width: int) -> RenderableType:
    """The configs side by side, in as many tables as the width needs."""
    rows, heads = rows_of(models), _heads([model for model, _ in models])
    fit = max(1, (width - NAMES) // COLUMN)
    tables: list[RenderableType] = []
    for start in range(0, len(models), fit):
        shown = range(start, min(start + fit, len(models)))
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


def rows_of(models: Sequence[Inspected]) -> list[Row]:
    """Names and a value a config; None instead of values is a heading: the kind of layer that follows.

    A config whose layers are all alike stands beside each kind of layer of the others. Of layers that do not rotate
    only that is said.
    """
    rows: list[Row] = [
        ("model_type", [str(model.model_type or MISSING) for model, _ in models]),
        ("trained length", [_length(model.lengths.trained) for model, _ in models]),
        ("configured length", [_length(model.lengths.configured) for model, _ in models]),
    ]
    names = list(dict.fromkeys(layer.name for _, layers in models for layer in layers))
    for name in [name for name in names if name] or [""]:
        chosen = [_find(layers, name) for _, layers in models]
        rows.append((name or "all layers", None))
        turning = any(layer.spec is not None for _, layers in models for layer in layers if layer.name == name)
        shown = _ROWS if turning else {"kind": _ROWS["kind"]}
        rows += [(label, [_cell(layer, show) for layer in chosen]) for label, show in shown.items()]
        rows += _wavelengths(chosen) if turning else []
    rows.append(("", None))
    rows.append(
        ("warnings", ["\n".join(dict.fromkeys(n for n, _ in model.warnings)) or MISSING for model, _ in models])
    )
    return rows


def _heads(models: list[Model]) -> list[str]:
    """What the columns are called: the names of the models, or their places where two have the same name."""
    names = [model.name for model in models]
    return names if len(set(names)) == len(names) else [str(model.path or model.name) for model in models]


def _find(layers: list[Layer], name: str) -> Layer | None:
    by_name = {layer.name: layer for layer in layers}
    return by_name.get(name, by_name.get(""))


def _cell(layer: Layer | None, show: Show) -> str:
    if layer is None:
        return MISSING
    if layer.spec is None:
        return layer.kind if show is _ROWS["kind"] else MISSING
    # Where a rule varies with the length the longer sequences are what it is for.
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
    """The wavelengths at five pairs, where all have as many pairs."""
    views = [layer.views[-1] for layer in chosen if layer is not None and layer.views]
    counts = {view.inv_freq.size for view in views}
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
    "features that turn": lambda layer, spec, view: features_of(spec),
    "amplitude": lambda layer, spec, view: number(view.amplitude),
    "softmax scale": lambda layer, spec, view: number(spec.softmax_scale),
    "critical dimension": lambda layer, spec, view: str(layer.critical_dimension or MISSING),
    "score sum ≥ 0 to": _score,
    "pairs": lambda layer, spec, view: "\n".join(f"{count} {kind}" for kind, count in view.counted().items()),
}
