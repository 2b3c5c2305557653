"""`ropewalk verify`: measures the ledger, shows it as a table, writes it as JSON, draws the pictures."""

import importlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from ropewalk.errors import RopewalkError
from ropewalk.tools.output import require_writable_file, require_writable_folder, write_json

if TYPE_CHECKING:
    from ropewalk.claims import Entry

__all__ = ["verify"]

# How a verdict is shown in the narrow column, and in which colour.
_SHOWN = {
    "holds": ("holds", "green"),
    "holds under a stated condition": ("only if", "yellow"),
    "does not hold": ("no", "red"),
}
# The verdicts in the last line: how many there are of each.
_COUNTED = {
    "holds": "hold",
    "holds under a stated condition": "hold under a stated condition",
    "does not hold": "do not hold",
}


def verify(json_file: str | None = None, plots: Path | None = None, only: Sequence[str] = ()) -> int:
    """Measures every claim, or those with one of `only` in their ids; 0 if all verdicts stand, 1 if one does not.

    A place that cannot be written is refused before anything is measured.
    """
    # With the JSON on standard output, all that is for people goes to the other stream.
    console = Console(stderr=json_file == "-", highlight=False, markup=False)
    if json_file is not None:
        require_writable_file(json_file, asked=f"ropewalk verify --json {json_file}")
    if plots is not None:
        require_writable_folder(plots, asked=f"ropewalk verify --plots {plots}")
        # A missing matplotlib is told now, and not after the measurements.
        importlib.import_module("ropewalk.tools.plot.figures")
    with console.status("loading PyTorch"):
        from ropewalk.claims import CHAPTERS, run

    texts = [text.lower() for text in only]
    chosen = [
        (chapter.title, [c for c in chapter.claims if not texts or any(text in c.id for text in texts)])
        for chapter in CHAPTERS
    ]
    chosen = [(title, claims) for title, claims in chosen if claims]
    if not chosen:
        subjects = sorted({claim.id.split(".")[0] for chapter in CHAPTERS for claim in chapter.claims})
        raise RopewalkError(
            asked=f"ropewalk verify --only {' --only '.join(only)}",
            expected="a text that stands in the id of a statement",
            got="one that stands in none",
            do=f"try a subject: {', '.join(subjects)}",
        )
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("measuring", total=sum(len(claims) for _, claims in chosen))
        measured: list[tuple[str, list[Entry]]] = []
        for title, claims in chosen:
            entries: list[Entry] = []
            for entry in run(claims):
                entries.append(entry)
                progress.update(task, advance=1, description=title.split(":")[0].lower())
            measured.append((title, entries))
    for title, entries in measured:
        console.print(_table(title, entries))
        console.print()
    everything = [entry for _, entries in measured for entry in entries]
    if json_file is not None:
        write_json([entry.as_dict() for entry in everything], json_file)
    _summary(console, everything)
    if plots is not None:
        from ropewalk.tools.plot.figures import draw_all

        for path in draw_all(plots):
            console.print(f"picture: {path}", soft_wrap=True)
    return int(any(entry.contradicted for entry in everything))


def _table(title: str, entries: "list[Entry]") -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", show_header=False, box=None)
    table.add_column("verdict", width=8, no_wrap=True)
    table.add_column("statement")
    for entry in entries:
        claim = entry.claim
        shown, style = _SHOWN[claim.verdict]
        if entry.contradicted:
            shown, style = "WRONG", "bold white on red"
        body = Text(claim.statement)
        if claim.amendment:
            body.append(f"\n{'only if' if shown == 'only if' else 'rather'}: {claim.amendment}", style=style)
        body.append(f"\n{claim.id}: {entry.finding.measured}\n[{claim.source}]", style="dim")
        if entry.contradicted:
            body.append(f"\nrecorded: {claim.verdict}; expected: {claim.expected}", style="red")
        table.add_row(Text(shown, style=style), body)
    return table


def _summary(console: Console, entries: "list[Entry]") -> None:
    counts = Counter(str(entry.claim.verdict) for entry in entries)
    parts = ", ".join(f"{counts[verdict]} {shown}" for verdict, shown in _COUNTED.items())
    noun = "statement" if len(entries) == 1 else "statements"
    console.print(f"{len(entries)} {noun}: {parts}.")
    wrong = [entry for entry in entries if entry.contradicted]
    if wrong:
        console.print(f"{len(wrong)} contradict the ledger: {', '.join(e.claim.id for e in wrong)}", style="bold red")
    else:
        console.print("Every measurement agrees with its recorded verdict.")
