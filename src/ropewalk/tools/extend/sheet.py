"""The output of `ropewalk extend`: the verdict, all rules side by side, or one rule pair by pair."""

import json

from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ropewalk.hub.extend.effects import Effect
from ropewalk.hub.extend.extension import ModelExtension
from ropewalk.hub.extend.measured import measured
from ropewalk.hub.extend.offers import Offer
from ropewalk.hub.extend.stacks import Stack
from ropewalk.hub.extend.verdict import Recommendation
from ropewalk.theory import classify, rotations
from ropewalk.tools.inspect.sheet import KIND_STYLES, number

__all__ = ["all_rules", "one_rule", "verdict"]

# The titles of the columns. The legend explains each.
_COLUMNS = (
    "\n\nrule",
    "\npairs\nunchanged",
    "\npairs\nslowed",
    "slowest\nslowed\nby",
    "\nscores\ntimes",
    "trained\nangles\nto",
    "similar\nkey wins\nto",
    "limit\nif\ntuned",
)
# The width of the names on the left of a block of text.
_NARROW, _WIDE = 10, 19


def verdict(console: Console, extended: ModelExtension, stack: Stack | None, *, all_follow: bool) -> None:
    """Print which rule to use without and with fine-tuning, why, and the config keys or flags."""
    _title(console, extended)
    if extended.verdict is None:
        return
    for use, recommended in extended.verdict.by_use.items():
        _recommendation(console, use, recommended, stack)
    console.print()
    _start(console, extended)
    console.print(_memory(extended))
    if not all_follow:
        console.print("Every rule, with figures and sources: --all. One rule pair by pair: --rule RULE.")
        console.print("The whole config: --rule RULE --write OUT.json.")


def _recommendation(console: Console, use: str, recommended: Recommendation, stack: Stack | None) -> None:
    style = "bold green" if recommended.proven else "bold yellow"
    console.print(Text.assemble("\n", (f"{use}: ", "bold"), (recommended.choice, style)))
    _row(console, "why", recommended.why, width=4)
    setting = recommended.setting(stack)
    if setting is None:
        _row(console, "use", recommended.use(stack), width=4)
    else:
        # One line of any length, to be pasted.
        console.print(f"  use  {setting}", soft_wrap=True)


def all_rules(console: Console, extended: ModelExtension, stack: Stack | None) -> None:
    """Print all rules: a table of figures, then per rule the published results and its config keys or flags."""
    console.print(Text("\nall rules", style="bold"))
    console.print()
    console.print(_table([offer for offer in extended.offers if offer.effect is not None]))
    console.print()
    _legend(console, extended)
    for offer in extended.offers:
        if offer.effect is not None:
            _section(console, offer, stack)
    not_applicable = [offer for offer in extended.offers if offer.effect is None]
    if not_applicable:
        console.print(Text("\nrules that do not apply", style="bold"))
        for offer in not_applicable:
            _row(console, offer.extension.rule, f"{offer.extension.why_not}")
    _limitations(console)


def one_rule(console: Console, extended: ModelExtension, stack: Stack | None) -> None:
    """Print the only rule of `extended`: its figures, every pair, published results, and config keys or flags."""
    (offer,) = extended.offers
    _title(console, extended)
    _start(console, extended)
    console.print(_memory(extended))
    console.print()
    console.print(_table([offer]))
    console.print()
    _legend(console, extended)
    console.print()
    if offer.effect is not None:
        console.print(_pairs(extended, offer.effect))
    _section(console, offer, stack)
    _limitations(console)


def _title(console: Console, extended: ModelExtension) -> None:
    start, length = extended.start, extended.length
    first = start.reach if start.scaled else start.trained
    lengths = f"{number(first)} → {number(length)} positions, {length / first:.4g} ×"
    if first != start.trained:
        lengths += f" ({length / start.trained:.4g} × the original length)"
    console.print(Text(f"{extended.model.name}: {lengths}", style="bold"))


def _start(console: Console, extended: ModelExtension) -> None:
    start, in_config = extended.start, extended.model.lengths.trained
    source = (
        "from the config" if start.trained == in_config else f"by its makers; {number(in_config or 0)} in the config"
    )
    if start.trained_by_caller:
        source = "from --trained" + ("" if in_config is None else f"; {number(in_config)} in the config")
    name = "Original" if start.scaled else "Trained"
    console.print(
        f"{name} length {number(start.trained)} ({source}), base {number(start.base)}. The slowest of"
        f" {len(start.spec.inv_freq())} pairs completes {number(extended.rotations)} rotations in it."
    )
    if start.scaled:
        rule = type(start.rule).__name__
        console.print(
            f"The model is already scaled by {rule} to {number(start.reach)} positions. Every rule replaces it and"
            " starts from the length and base before scaling."
        )
    if start.layer:
        console.print(f"Extended: layers of type {start.layer}.")
    for name, why in start.left:
        console.print(f"Not changed: layers of type {name}, which {_plural(why)}.")
    # A verdict without a rule names the window of every layer.
    if extended.window is not None and not (extended.verdict and len(extended.verdict.by_use) == 1):
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
        table.add_column(name, justify="left" if name == _COLUMNS[0] else "right", no_wrap=True)
    for offer in offers:
        if offer.effect is not None:
            table.add_row(offer.extension.rule, *_cells(offer.effect))
    return table


def _cells(effect: Effect) -> list[str]:
    counts = effect.counts
    return [
        f"{counts['unchanged']}",
        f"{counts['between'] + counts['interpolated']}",
        _short(effect.divided),
        f"{effect.amplitude**2:.3g}",
        "all" if effect.seen is None else _short(effect.seen),
        "all" if effect.negative is None else _short(effect.negative - 1),
        "" if effect.limit is None else _short(effect.limit),
    ]


def _short(value: float) -> str:
    """Format a number in at most seven characters: 1048576 is shown as 1.049M."""
    if value < 1000:
        return f"{value:.3g}"
    return f"{value:.0f}" if value < 1e6 else f"{value / 1e6:.4g}M" if value < 1e10 else f"{value:.2g}"


def _legend(console: Console, extended: ModelExtension) -> None:
    pairs = len(extended.start.spec.inv_freq())
    lines = {
        "pairs unchanged": f"of {pairs} pairs of features, those that rotate as before any scaling",
        "pairs slowed": "those that rotate slower",
        "slowest slowed by": "the factor by which the slowest pair rotates slower",
        "scores times": "attention scores are multiplied by this, the square of the amplitude of cos and sin",
        "trained angles to": "the length up to which pairs that completed no rotation in training reach only angles"
        " that occurred there",
        "similar key wins to": "the distance up to which a key that is similar to the query scores above a random key,"
        " in theory (2405.14591)",
        "limit if tuned": "the limit of a model that is tuned with the new base at its trained length, by a scaling law"
        " (2310.05209); tuned at a longer length, the limit is at least that length",
    }
    for name, text in lines.items():
        _row(console, name, text, style="dim", width=_WIDE)


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


def _section(console: Console, offer: Offer, stack: Stack | None) -> None:
    extension = offer.extension
    console.print(Text.assemble("\n", (extension.rule, "bold"), f": {extension.does}"))
    for note in extension.notes:
        _row(console, "note", note)
    for label, tuned in (("not tuned", False), ("tuned", True)):
        figures = measured(extension.rule, tuned=tuned)
        for figure in figures:
            _row(console, label, f"{figure.model}: {figure.text(extension.rule)} [{figure.source}]")
        if not figures:
            _row(console, label, "no published result")
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


def _row(console: Console, name: str, text: str, style: str = "", width: int = _NARROW) -> None:
    table = Table(show_header=False, box=None, padding=(0, 1, 0, 0))
    table.add_column(width=width, no_wrap=True)
    table.add_column()
    table.add_row(name, Text(text), style=style)
    console.print(Padding(table, (0, 0, 0, 2)))


def _memory(extended: ModelExtension) -> str:
    cache = extended.cache
    if cache is None:
        return "The memory for keys and values is unknown: the config does not contain enough information."
    return (
        f"Keys and values of one sequence of {number(extended.length)} tokens need"
        f" {'at most ' if extended.cache_is_bound else ''}{cache / 2**30:.3g} GiB in bfloat16."
    )


def _limitations(console: Console) -> None:
    console.print(Text("\nlimitations", style="bold"))
    for line in (
        "The quality at the new length is unknown: no figure above was measured on this model. Measure retrieval, not"
        " only perplexity.",
        "Figures marked `tuned` apply only if the model is tuned with the rule.",
        "A static rule also changes the results on short texts.",
    ):
        console.print(Padding(Text(f"– {line}"), (0, 0, 0, 2)))
