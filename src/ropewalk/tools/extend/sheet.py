"""What `ropewalk extend` shows: the rules side by side, or one of them pair by pair."""

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
from ropewalk.theory import classify, turns
from ropewalk.tools.inspect.sheet import KIND_STYLES, number

__all__ = ["one_rule", "side_by_side"]

_COLUMNS = (
    *("\nrule", "pairs\nkept", "\nbetw.", "\ndiv.", "\nby", "turns,\nslow", "ampl."),
    *("sum < 0\nfrom", "seen\nup to", "law\nup to"),
)


def side_by_side(console: Console, extended: ModelExtension, stack: Stack | None) -> None:
    """Every rule: figures in one table, then what was measured of each and the keys or flags that say it."""
    _head(console, extended)
    console.print()
    console.print(_table([offer for offer in extended.offers if offer.effect is not None]))
    console.print()
    _legend(console, extended)
    for offer in extended.offers:
        if offer.effect is not None:
            _section(console, extended, offer, stack)
    refused = [offer for offer in extended.offers if offer.effect is None]
    if refused:
        console.print(Text("\nrules that do not apply", style="bold"))
        for offer in refused:
            _row(console, offer.extension.rule, f"{offer.extension.why_not}")
    _unknown(console, extended)


def one_rule(console: Console, extended: ModelExtension, stack: Stack | None) -> None:
    """The only rule of `extended`: its figures, every pair, what was measured, and the keys or flags that say it."""
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
    _unknown(console, extended)


def _head(console: Console, extended: ModelExtension) -> None:
    start, model = extended.start, extended.model
    factor = extended.length / start.trained
    title = f"{model.name}: {number(start.trained)} → {number(extended.length)} positions, {factor:.4g} ×"
    console.print(Text(title, style="bold"))
    known = model.lengths.trained
    source = "by the config"
    if start.trained_by_caller:
        source = "given" if known is None else f"given; the config says {number(known)}"
    console.print(
        f"Trained at {number(start.trained)} ({source}) with base {number(start.base)}; the slowest of"
        f" {len(start.spec.inv_freq())} pairs turns {number(extended.turns)} times in it."
    )
    if start.scaled:
        rule = type(start.rule).__name__
        console.print(
            f"The model is already scaled, by {rule}, for {number(start.reach)} positions. Every rule here starts from"
            " the length and base before that, and takes its place."
        )
    if start.layer:
        console.print(f"Extended: layers of {start.layer}.")
    for name, why in start.left:
        console.print(f"Left as they are: layers of {name}, which {_does(why)}.")
    if extended.window is not None:
        console.print(_windows(extended.window, extended.windowed), style="yellow")


def _windows(window: int, windowed: tuple[int, int] | None) -> str:
    if windowed is None:
        return f"Some layers may have a window of {number(window)}: no rule makes those see farther at a step."
    some, layers = windowed
    if some == layers:
        return f"Every layer has a window of {number(window)}: no rule makes one see farther at a step."
    return (
        f"{some} of {layers} layers have a window of {number(window)}, and no rule makes those see farther at a step;"
        f" {layers - some} see everything. All have one rotation, and a rule changes it for all."
    )


def _does(why: str) -> str:
    return {"does not rotate": "do not rotate", "sees a window of the context only": "see only a window"}.get(why, why)


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
    """A number in at most seven letters: 1048576 is 1.05M."""
    if value < 1000:
        return f"{value:.3g}"
    return f"{value:.0f}" if value < 1e6 else f"{value / 1e6:.4g}M" if value < 1e10 else f"{value:.2g}"


def _legend(console: Console, extended: ModelExtension) -> None:
    lines = {
        "pairs": "how many keep their frequency, how many are divided by this, and how many lie between",
        "turns": f"of the slowest pair within {number(extended.length)}; {extended.turns:.2g} in training",
        "ampl.": "amplitude: what cos and sin are multiplied by; scores by its square",
        "sum < 0": "the first distance at which a similar key no longer leads a random one, by the features"
        " that turn (2405.14591); – is none",
        "seen": "the length to which pairs that never finished a turn stay within the angles of training",
        "law": "the limit of the scaling law for a new base, after tuning (2310.05209, eq. 16b)",
    }
    for name, text in lines.items():
        _row(console, name, text, style="dim")


def _pairs(extended: ModelExtension, effect: Effect) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    counted, plain = (extended.start.trained, extended.length), effect.plain
    headings = ("pair", "inv_freq", "divided by", *(f"turns in\n{number(n)}" for n in counted), "")
    for name in headings:
        table.add_column(name, justify="right" if name else "left", no_wrap=True)
    now = [abs(value) for value in effect.inv_freq]
    for i, kind in enumerate(classify(now, plain)):
        table.add_row(
            f"{i}",
            f"{effect.inv_freq[i]:.8g}",
            f"{plain[i] / now[i]:.4g}" if now[i] else "",
            *(
                number(float(turns([value], length)[0]))
                for value, length in zip((plain[i], now[i]), counted, strict=True)
            ),
            Text(kind, style=KIND_STYLES[kind]),
        )
    return table


def _section(console: Console, extended: ModelExtension, offer: Offer, stack: Stack | None) -> None:
    extension = offer.extension
    console.print(Text.assemble("\n", (extension.rule, "bold"), f": {extension.does}"))
    for note in extension.notes:
        _row(console, "note", note)
    for label, tuned in (("as it is", False), ("tuned", True)):
        figures = measured(extension.rule, tuned=tuned)
        for one in figures:
            _row(console, label, f"{one.model}: {one.found} [{one.source}]")
        if not figures:
            _row(console, label, "no figure known")
    if stack is not None:
        flags = offer.flags[stack]
        if flags.flags is None:
            _row(console, stack, "cannot do it")
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


def _unknown(console: Console, extended: ModelExtension) -> None:
    console.print(Text("\nwhat this cannot know", style="bold"))
    lines = [
        "How good answers are at the new length: no figure here is of this model. Measure it, on retrieval and not on"
        " perplexity alone.",
        "Whether training will follow. Without it, figures marked `tuned` do not hold.",
        "Whether short texts suffer: a static rule changes them too.",
    ]
    cache = extended.cache
    if cache is None:
        lines.append("How much memory keys and values take: the config does not say enough.")
    else:
        lines.append(
            f"Whether memory lasts: keys and values of one sequence of {number(extended.length)} take"
            f" {'at most ' if extended.cache_is_bound else ''}{cache / 2**30:.3g} GiB in bfloat16."
        )
    for line in lines:
        console.print(Padding(Text(f"– {line}"), (0, 0, 0, 2)))
