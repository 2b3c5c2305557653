"""`ropewalk verify`: measures the claims, prints them as a table, writes them as JSON, draws pictures."""

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

# The text and the colour of each verdict in the first column.
_SHOWN = {
    "holds": ("holds", "green"),
    "holds under a stated condition": ("only if", "yellow"),
    "does not hold": ("no", "red"),
}


def verify(json_file: str | None = None, plots: Path | None = None, only: Sequence[str] = ()) -> int:
    """Measure the claims of notes and papers, and print them with their verdicts.

    Args:
        json_file: Write the claims to this file as JSON; "-" for standard output.
        plots: Write pictures to this folder.
        only: Measure only claims whose id contains one of these texts. Default: all claims.

    Returns:
        The exit code: 0 if every measurement agrees with its recorded verdict, otherwise 1.

    Raises:
        RopewalkError: If an output cannot be written, which is checked before anything is measured, or if no id
            contains one of `only`.
    """
    # If JSON is written to standard output, everything else goes to standard error.
    console = Console(stderr=json_file == "-", highlight=False, markup=False)
    if json_file is not None:
        require_writable_file(json_file, asked=f"ropewalk verify --json {json_file}")
    if plots is not None:
        require_writable_folder(plots, asked=f"ropewalk verify --plots {plots}")
        # Fails now, not after the measurements, if matplotlib is not installed.
        importlib.import_module("ropewalk.tools.plot.figures")
    with console.status("loading PyTorch"):
        from ropewalk.claims import CHAPTERS, run

    texts = [text.lower() for text in only]
    selected = [
        (chapter.title, [c for c in chapter.claims if not texts or any(text in c.id for text in texts)])
        for chapter in CHAPTERS
    ]
    selected = [(title, claims) for title, claims in selected if claims]
    if not selected:
        subjects = sorted({claim.id.split(".")[0] for chapter in CHAPTERS for claim in chapter.claims})
        raise RopewalkError(
            asked=f"ropewalk verify --only {' --only '.join(only)}",
            expected="a text that occurs in the id of a claim",
            got="no claim with such an id",
            do=f"try a subject: {', '.join(subjects)}",
        )
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("measuring", total=sum(len(claims) for _, claims in selected))
        measured: list[tuple[str, list[Entry]]] = []
        for title, claims in selected:
            entries: list[Entry] = []
            for entry in run(claims):
                entries.append(entry)
                progress.update(task, advance=1, description=title.split(":")[0].lower())
            measured.append((title, entries))
    for title, entries in measured:
        console.print(_table(title, entries))
        console.print()
    all_entries = [entry for _, entries in measured for entry in entries]
    if json_file is not None:
        write_json([entry.as_dict() for entry in all_entries], json_file)
    _summary(console, all_entries)
    if plots is not None:
        from ropewalk.tools.plot.figures import draw_all

        for path in draw_all(plots):
            console.print(f"picture: {path}", soft_wrap=True)
    return int(any(entry.contradicted for entry in all_entries))


def _table(title: str, entries: "list[Entry]") -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", show_header=False, box=None)
    table.add_column("verdict", width=8, no_wrap=True)
    table.add_column("statement")
    for entry in entries:
        claim = entry.claim
        label, style = _SHOWN[claim.verdict]
        if entry.contradicted:
            label, style = "WRONG", "bold white on red"
        body = Text(claim.statement)
        if claim.amendment:
            body.append(f"\n{'only if' if label == 'only if' else 'instead'}: {claim.amendment}", style=style)
        body.append(f"\n{claim.id}: {entry.finding.measured}\n[{claim.source}]", style="dim")
        if entry.contradicted:
            body.append(f"\nrecorded: {claim.verdict}; expected: {claim.expected}", style="red")
        table.add_row(Text(label, style=style), body)
    return table


def _summary(console: Console, entries: "list[Entry]") -> None:
    counts = Counter(str(entry.claim.verdict) for entry in entries)
    parts = "; ".join(f"{verdict}: {counts[verdict]}" for verdict in _SHOWN)
    console.print(f"Claims: {len(entries)}; {parts}.")
    wrong = [entry for entry in entries if entry.contradicted]
    if wrong:
        ids = ", ".join(entry.claim.id for entry in wrong)
        console.print(f"{len(wrong)} of the measurements contradict the recorded verdict: {ids}", style="bold red")
    else:
        console.print("Every measurement agrees with its recorded verdict.")
