"""The output of `ropewalk extend`: all rules side by side, or one rule pair by pair."""

import json

from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ropewalk.hub.extend.effects import Effect
from ropewalk.hub.extend.extension import ModelExtension, Offer
from ropewalk.hub.extend.measured import measured
from ropewalk.hub.extend.stacks import Stack
from ropewalk.theory import classify, rotations
from ropewalk.tools.inspect.sheet import KIND_STYLES, number

__all__ = ["one_rule", "side_by_side"]

_COLUMNS = (
    *("\nrule", "pairs\nkept", "\npartly", "\nfully", "\nby", "rota-\ntions", "ampl."),
    *("sum < 0\nfrom", "seen\nup to", "law\nup to"),
)


def side_by_side(console: Console, extended: ModelExtension, stack: Stack | None) -> None:
    """Print all rules: a table of figures, then per rule the published measurements and its config keys or flags."""
    _head(console, extended)
    console.print()
    console.print(_table([offer for offer in extended.offers if offer.effect is not None]))
    console.print()
    _legend(console, extended)
    for offer in extended.offers:
        if offer.effect is not None:
            _section(console, extended, offer, stack)
    not_applicable = [offer for offer in extended.offers if offer.effect is None]
    if not_applicable:
        console.print(Text("\nrules that do not apply", style="bold"))
        for offer in not_applicable:
            _row(console, offer.extension.rule, f"{offer.extension.why_not}")
    _limitations(console, extended)


def one_rule(console: Console, extended: ModelExtension, stack: Stack | None) -> None:
    """Print the only rule of `extended`: its figures, every pair, published measurements, and config keys or flags."""
    (offer,) = extended.offers
    _head(console, extended)
    console.print()
    console.print(_table([offer]))
    console.print()
    _legend(console, extended)
    console.print()
    if offer.effect is not None:
        console.print(_pairs(extended, offer.effect))
    _section(console, extended, offer, stack)
    _limitations(console, extended)


def _head(console: Console, extended: ModelExtension) -> None:
    start, model = extended.start, extended.model
    factor = extended.length / start.trained
    title = f"{model.name}: {number(start.trained)} → {number(extended.length)} positions, {factor:.4g} ×"
    console.print(Text(title, style="bold"))
    in_config = model.lengths.trained
    source = "from the config"
    if start.trained_by_caller:
        source = "from --trained" + ("" if in_config is None else f"; {number(in_config)} in the config")
    console.print(
        f"Trained length {number(start.trained)} ({source}), base {number(start.base)}. The slowest of"
        f" {len(start.spec.inv_freq())} pairs completes {number(extended.rotations)} rotations in training."
    )
    if start.scaled:
        rule = type(start.rule).__name__
        console.print(
            f"The model is already scaled by {rule} to {number(start.reach)} positions. Every rule below replaces it"
            " and starts from the length and base before scaling."
        )
    if start.layer:
        console.print(f"Extended: layers of type {start.layer}.")
    for name, why in start.left:
        console.print(f"Not changed: layers of type {name}, which {_plural(why)}.")
    if extended.window is not None:
        console.print(_windows(extended.window, extended.windowed), style="yellow")


def _windows(window: int, windowed: tuple[int, int] | None) -> str:
    if windowed is None:
        return f"Some layers may have a window of {number(window)}. No rule extends that window."
    with_window, layers = windowed
    if with_window == layers:
        return f"Every layer has a window of {number(window)}. No rule extends that window."
    return (
        f"{with_window} of {layers} layers have a window of {number(window)}. No rule extends that window. The other"
        f" {layers - with_window} attend to the whole context. All layers share one rotation, so a rule changes all."
    )


def _plural(why: str) -> str:
    return {"does not rotate": "do not rotate", "attends to a window only": "attend to a window only"}.get(why, why)


def _table(offers: list[Offer]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    for name in _COLUMNS:
        table.add_column(name, justify="left" if name == "\nrule" else "right", no_wrap=True)
    for offer in offers:
        if offer.effect is not None:
            table.add_row(offer.extension.rule, *_cells(offer.effect))
    return table


def _cells(effect: Effect) -> list[str]:
    counts = effect.counts
    return [
        f"{counts['unchanged']}",
        f"{counts['between']}",
        f"{counts['interpolated']}",
        _short(effect.divided),
        f"{effect.slowest:.2g}" if effect.slowest >= 1e-3 else f"{effect.slowest:.0e}",
        f"{effect.amplitude:.3g}",
        "–" if effect.negative is None else _short(effect.negative),
        "any" if effect.seen is None else _short(effect.seen),
        "" if effect.limit is None else _short(effect.limit),
    ]


def _short(value: float) -> str:
    """Format a number in at most seven characters: 1048576 is shown as 1.049M."""
    if value < 1000:
        return f"{value:.3g}"
    return f"{value:.0f}" if value < 1e6 else f"{value / 1e6:.4g}M" if value < 1e10 else f"{value:.2g}"


def _legend(console: Console, extended: ModelExtension) -> None:
    lines = {
        "pairs": "kept: unchanged frequencies; fully: divided by the factor in the column “by”; partly: by less",
        "rotations": f"full rotations of the slowest pair within {number(extended.length)}; {extended.rotations:.2g} in"
        " training",
        "ampl.": "amplitude: the factor on cos and sin; scores are multiplied by its square",
        "sum < 0": "the first distance at which the rotated features no longer score a similar key above a random one"
        " (2405.14591); – if there is none",
        "seen": "the length up to which pairs that completed no rotation in training stay within the angles seen there",
        "law": "the limit of the scaling law for a new base, after tuning (2310.05209, eq. 16b)",
    }
    for name, text in lines.items():
        _row(console, name, text, style="dim")


def _pairs(extended: ModelExtension, effect: Effect) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    lengths, plain = (extended.start.trained, extended.length), effect.plain
    headings = ("pair", "inv_freq", "divided by", *(f"rotations in\n{number(length)}" for length in lengths), "")
    for name in headings:
        table.add_column(name, justify="right" if name else "left", no_wrap=True)
    new = [abs(value) for value in effect.inv_freq]
    for i, kind in enumerate(classify(new, plain)):
        table.add_row(
            f"{i}",
            f"{effect.inv_freq[i]:.8g}",
            f"{plain[i] / new[i]:.4g}" if new[i] else "",
            *(
                number(float(rotations([value], length)[0]))
                for value, length in zip((plain[i], new[i]), lengths, strict=True)
            ),
            Text(kind, style=KIND_STYLES[kind]),
        )
    return table


def _section(console: Console, extended: ModelExtension, offer: Offer, stack: Stack | None) -> None:
    extension = offer.extension
    console.print(Text.assemble("\n", (extension.rule, "bold"), f": {extension.does}"))
    for note in extension.notes:
        _row(console, "note", note)
    for label, tuned in (("not tuned", False), ("tuned", True)):
        figures = measured(extension.rule, tuned=tuned)
        for figure in figures:
            _row(console, label, f"{figure.model}: {figure.found} [{figure.source}]")
        if not figures:
            _row(console, label, "no published figure")
    if stack is not None:
        flags = offer.flags[stack]
        if flags.flags is None:
            _row(console, stack, "not supported")
        else:
            console.print(f"  {stack}:")
            console.print(f"{flags.flags}", soft_wrap=True, markup=False)
        for note in flags.notes:
            _row(console, "note", note)
        return
    for form in offer.forms:
        console.print(f"  {form.name}{_drops(form.drop)}:")
        console.print(json.dumps(form.set)[1:-1], soft_wrap=True, markup=False)
    if offer.no_keys:
        _row(console, "keys", offer.no_keys)


def _drops(keys: tuple[str, ...]) -> str:
    return f", without {', '.join(keys)}" if keys else ""


def _row(console: Console, name: str, text: str, style: str = "") -> None:
    table = Table(show_header=False, box=None, padding=(0, 1, 0, 0))
    table.add_column(width=10, no_wrap=True)
    table.add_column()
    table.add_row(name, Text(text), style=style)
    console.print(Padding(table, (0, 0, 0, 2)))


def _limitations(console: Console, extended: ModelExtension) -> None:
    console.print(Text("\nlimitations", style="bold"))
    lines = [
        "The quality at the new length is unknown: no figure above was measured on this model. Measure retrieval, not"
        " only perplexity.",
        "Figures marked `tuned` apply only if the model is tuned with the rule.",
        "A static rule also changes the results on short texts.",
    ]
    cache = extended.cache
    if cache is None:
        lines.append("The memory for keys and values is unknown: the config does not contain enough information.")
    else:
        lines.append(
            f"Keys and values of one sequence of {number(extended.length)} tokens need"
            f" {'at most ' if extended.cache_is_bound else ''}{cache / 2**30:.3g} GiB in bfloat16."
        )
    for line in lines:
        console.print(Padding(Text(f"– {line}"), (0, 0, 0, 2)))
