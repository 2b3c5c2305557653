"""How `ropewalk verify` looks: one screen of counts and false statements, or statements in full."""

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ropewalk.claims.sources import NOTES

if TYPE_CHECKING:
    from ropewalk.claims import Claim, Entry, Place, Source

__all__ = ["full_entries", "one_screen", "summary"]

# Per verdict: the heading of its column, its colour, and what its amendment is.
_VERDICTS = {
    "holds": ("holds", "green", ""),
    "holds under a condition that the source leaves out": ("only if", "yellow", "only if"),
    "does not hold": ("false", "red", "instead"),
    "misprint or notation": ("misprint", "cyan", "meant"),
    "not measurable here": ("open", "magenta", "needs"),
}
_LEGEND = (
    "only if: under a condition that the source leaves out; false: does not hold;\n"
    "misprint: or notation; open: not measurable here. A statement of several\n"
    "sources counts in each."
)
_WRONG = "bold white on red"


def one_screen(entries: "Sequence[Entry]") -> RenderableType:
    """Counts per source, then one line per statement that does not hold."""
    counts = Table(box=None, pad_edge=False)
    counts.add_column("source")
    for heading, style, _ in _VERDICTS.values():
        counts.add_column(heading, justify="right", style=style)
    claims = [entry.claim for entry in entries]
    for source in NOTES:
        counts.add_row(source.title, *_counted([claim for claim in claims if claim.is_from(source)]))
    others = [claim for claim in claims if any(place.source not in NOTES for place in claim.places)]
    counts.add_row("papers and common practice", *_counted(others))
    counts.add_row("all", *_counted(claims), style="bold")
    failing = [claim for claim in claims if claim.verdict == "does not hold"]
    false = Table.grid(padding=(0, 2))
    # Ids are typed after --only, so they are never shortened.
    false.add_column(no_wrap=True, style="red", min_width=max((len(claim.id) for claim in failing), default=1))
    false.add_column(no_wrap=True, style="dim", min_width=len("2104.09864"))
    false.add_column(overflow="fold")
    for claim in failing:
        false.add_row(claim.id, claim.places[0].label, claim.amendment)
    heading = Text("\nDoes not hold, and what holds instead:", style="bold")
    wrong = [entry for entry in entries if entry.contradicted]
    return Group(counts, Text(_LEGEND, style="dim"), heading, false, Text(""), *map(_in_full, wrong))


def full_entries(entries: "Sequence[Entry]", sources: "Sequence[Source]") -> RenderableType:
    """Every statement in full. The statements of one source are in the order of its lines."""
    if len(sources) != 1:
        return Group(*map(_in_full, entries))
    (source,) = sources

    def line(entry: "Entry") -> int:
        return min(place.line or 0 for place in entry.claim.places if place.source == source)

    return Group(Text(source.title, style="bold"), Text(""), *map(_in_full, sorted(entries, key=line)))


def summary(entries: "Sequence[Entry]") -> RenderableType:
    """How many statements were measured, and whether the measurements agree with the verdicts."""
    recorded = [entry.record for entry in entries if entry.record is not None]
    missing = [entry for entry in entries if not entry.available]
    lines = [f"{len(entries)} {'statement' if len(entries) == 1 else 'statements'}: {_spelled(entries)}."]
    if recorded:
        dates = ", ".join(sorted({record.date for record in recorded}))
        verb = "takes" if len(recorded) == 1 else "take"
        lines.append(f"{len(recorded)} {verb} long: cited from records ({dates}). --only ID measures them anew.")
    for reason in sorted({entry.finding.measured for entry in missing}):
        count = sum(entry.finding.measured == reason for entry in missing)
        lines.append(f"{count} {reason}.")
    wrong = [entry.claim.id for entry in entries if entry.contradicted]
    text = Text("\n".join(lines) + "\n")
    if wrong:
        text.append(
            f"The measurement contradicts the recorded verdict of {len(wrong)}: {', '.join(wrong)}", style="bold red"
        )
    else:
        text.append("Every measurement agrees with its recorded verdict.")
    return text


def _counted(claims: "Sequence[Claim]") -> list[str]:
    counts = Counter(str(claim.verdict) for claim in claims)
    return [str(counts[verdict]) if counts[verdict] else "·" for verdict in _VERDICTS]


def _spelled(entries: "Sequence[Entry]") -> str:
    counts = Counter(str(entry.claim.verdict) for entry in entries)
    return ", ".join(
        f"{heading} {counts[verdict]}" for verdict, (heading, _, _) in _VERDICTS.items() if counts[verdict]
    )


def _in_full(entry: "Entry") -> RenderableType:
    claim = entry.claim
    _, style, amendment = _VERDICTS[claim.verdict]
    title = Table.grid(expand=True)
    title.add_column(overflow="fold")
    title.add_column(justify="right", style=style)
    title.add_row(Text(claim.id, style="bold"), str(claim.verdict))
    body = Table.grid(padding=(0, 2))
    body.add_column(no_wrap=True, style="dim")
    # Formulas in quotations have no spaces to break at.
    body.add_column(overflow="fold")
    for place in claim.places:
        body.add_row(place.label, Text(_quoted(place), style="italic"))
    body.add_row("reading", claim.statement)
    if claim.amendment:
        body.add_row(amendment, Text(claim.amendment, style=style))
    body.add_row("method", claim.method)
    body.add_row("expected", claim.expected)
    body.add_row("measured", _measured(entry))
    if entry.contradicted:
        body.add_row("", Text("WRONG: the measurement contradicts the verdict", style=_WRONG))
    return Group(title, Padding(body, (0, 0, 1, 2)))


def _quoted(place: "Place") -> str:
    return place.quotation or place.source.title


def _measured(entry: "Entry") -> Text:
    text = Text(entry.finding.measured)
    if entry.record is not None:
        record = entry.record
        text.append(f" (recorded {record.date}, {record.hardware}, {record.seconds:.0f} s)", style="dim")
    return text
