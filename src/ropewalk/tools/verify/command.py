"""The command `ropewalk verify`: which claims are measured, what is written, and the exit code."""

import importlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from ropewalk.errors import RopewalkError
from ropewalk.tools.output import require_writable_file, require_writable_folder, trimmed, write_json
from ropewalk.tools.verify.screen import full_entries, one_screen, summary

if TYPE_CHECKING:
    from ropewalk.claims import Claim, Entry, Source

__all__ = ["verify"]


def verify(
    json_file: str | None = None,
    plots: Path | None = None,
    only: Sequence[str] = (),
    sources: Sequence[str] = (),
    long: bool = False,
) -> int:
    """Measure the claims of notes and papers, and print them with their verdicts.

    Args:
        json_file: Write the claims to this file as JSON; "-" for standard output.
        plots: Write pictures to this folder.
        only: Measure only claims whose id contains one of these texts, and print them in full. Claims that take long
            are measured too, instead of citing their records.
        sources: Measure only claims of these sources, and print them in full.
        long: Print every claim in full: quotations, reading, method, expectation and measurement.

    Returns:
        The exit code: 0 if every measurement agrees with its recorded verdict, otherwise 1.

    Raises:
        RopewalkError: If an output cannot be written, which is checked before anything is measured, or if no id
            contains one of `only`, or if one of `sources` is unknown.
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

    claims = [claim for chapter in CHAPTERS for claim in chapter.claims]
    chosen = [_source(text, claims) for text in sources]
    selected = _by_id(only, claims)
    selected = [claim for claim in selected if not chosen or any(claim.is_from(source) for source in chosen)]
    if not selected:
        raise RopewalkError(
            asked=f"ropewalk verify --only {' --only '.join(only)} --source {' --source '.join(sources)}",
            expected="a claim that both options select",
            got="none: the claims with such ids are from other sources",
            do="omit one of the options",
        )
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("measuring", total=len(selected))
        entries: list[Entry] = []
        for entry in run(selected, anew=bool(only)):
            entries.append(entry)
            progress.update(task, advance=1, description=entry.claim.id.split(".")[0])
    if json_file is not None:
        write_json([entry.as_dict() for entry in entries], json_file)
    with trimmed(console):
        console.print(full_entries(entries, chosen) if long or only or sources else one_screen(entries))
        console.print(summary(entries))
    if plots is not None:
        from ropewalk.tools.plot.figures import draw_all

        for path in draw_all(plots):
            console.print(f"picture: {path}", soft_wrap=True)
    return int(any(entry.contradicted for entry in entries))


def _by_id(only: Sequence[str], claims: "list[Claim]") -> "list[Claim]":
    """The claims with one of these ids, or whose id contains one of the texts. Each text must select at least one."""
    names = {claim.id for claim in claims}
    selected: set[str] = set()
    for text in map(str.lower, only):
        matching = {text} if text in names else {name for name in names if text.strip() and text in name}
        selected |= matching
        if not matching:
            raise RopewalkError(
                asked=f"ropewalk verify --only {text}",
                expected="a text that occurs in the id of a claim",
                got="no claim with such an id",
                do=f"the ids are: {_listed(claim.id for claim in claims)}",
            )
    return [claim for claim in claims if not only or claim.id in selected]


def _source(text: str, claims: "list[Claim]") -> "Source":
    """The source with this key, or the only one whose title contains the text."""
    known = {place.source.key: place.source for claim in claims for place in claim.places}
    if text in known:
        return known[text]
    titled = [source for source in known.values() if text.strip() and text.lower() in source.title.lower()]
    if len(titled) != 1:
        raise RopewalkError(
            asked=f"ropewalk verify --source {text}",
            expected="the number of a note, the arXiv number of a paper, or a part of the title of one source",
            got=f"{len(titled)} sources with such a title",
            do="\n".join(["the sources are:", *(f"  {key}: {known[key].title}" for key in sorted(known))]),
        )
    return titled[0]


def _listed(ids: Iterable[str]) -> str:
    """All ids, one line per subject."""
    names: dict[str, list[str]] = {}
    for id in ids:
        subject, _, name = id.partition(".")
        names.setdefault(subject, []).append(name)
    return "".join(f"\n  {subject}.: {', '.join(listed)}" for subject, listed in sorted(names.items()))
