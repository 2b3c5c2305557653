"""The statements of notes and papers, and their verdicts."""

import re
import textwrap
from collections import Counter

from figures.pages import block, own_lines, table
from ropewalk.claims import CHAPTERS, Verdict
from ropewalk.claims.sources import NOTES, PRACTICE, Place


@block("claims")
def claims(page: str) -> str:
    everything = [claim for chapter in CHAPTERS for claim in chapter.claims]
    verdicts = Counter(claim.verdict for claim in everything)
    papers = {place.source for claim in everything for place in claim.places} - {*NOTES, PRACTICE}
    return (
        f"Of {verdicts.total()} statements of five notes and {len(papers)} papers {verdicts[Verdict.HOLDS]} hold,"
        f" {verdicts[Verdict.CONDITIONAL]} only under a condition left out, {verdicts[Verdict.FAILS]} are false,"
        f" {verdicts[Verdict.MISPRINT]} are misprints, and {verdicts[Verdict.UNMEASURABLE]} cannot be measured here"
    )


AMENDMENTS = {
    Verdict.CONDITIONAL: "Only if",
    Verdict.FAILS: "Instead",
    Verdict.MISPRINT: "Meant",
    Verdict.UNMEASURABLE: "Needs",
}


def literal(text: str) -> str:
    """Text that Markdown shows as it is. The longest run of backticks in it is shorter than the fence."""
    fence = "`" * (max((len(run) for run in re.findall("`+", text)), default=0) + 1)
    return f"{fence} {text} {fence}" if "`" in text else f"{fence}{text}{fence}"


def escaped(text: str) -> str:
    """Text without Markdown. The site's Markdown shows the backslash of an escaped <, so it is an entity."""
    return re.sub(r"([\\`*_\[\]>|])", r"\\\1", text.replace("&", "&amp;")).replace("<", "&lt;")


def cited(place: Place) -> str:
    """The title of a source as a whole, or the line of a note and the quotation in the language of the note."""
    if place.line is None:
        title = escaped(place.source.title)
        return title[:1].upper() + title[1:]
    language = re.search(r"\((\w\w)\)", place.source.title)
    text = literal(place.quotation)
    text = text if language is None else f'<span lang="{language[1]}">{text}</span>'
    return f"Note {place.source.key}, line {place.line}: {text}"


def item_of(text: str) -> str:
    """An item of a list, wrapped."""
    return textwrap.fill(f"- {text}", 118, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


@block("claims-counts")
def claims_counts(page: str) -> str:
    everything = [claim for chapter in CHAPTERS for claim in chapter.claims]
    rows = [["source", *map(str, Verdict)]]
    groups = [(source.title, [claim for claim in everything if claim.is_from(source)]) for source in NOTES]
    others = [claim for claim in everything if any(place.source not in NOTES for place in claim.places)]
    for title, claims in (*groups, ("papers and common practice", others), ("all", everything)):
        verdicts = Counter(claim.verdict for claim in claims)
        rows.append([title, *(str(verdicts[verdict]) for verdict in Verdict)])
    return own_lines(table(*rows))


@block("claims-list")
def claims_list(page: str) -> str:
    """Every statement: its verdict, its quotations, our reading, and how it is measured."""
    parts: list[str] = []
    for chapter in CHAPTERS:
        parts.append(f"### {escaped(chapter.title)}")
        for claim in chapter.claims:
            places = [cited(place) for place in claim.places]
            amended = f"*{AMENDMENTS[claim.verdict]}*: {escaped(claim.amendment)}" if claim.amendment else ""
            texts = [f"*Reading*: {escaped(claim.statement)}", amended, f"*Method*: {escaped(claim.method)}"]
            texts.append(f"*Expected*: {escaped(claim.expected)}")
            items = [f"- {item}" for item in places] + [item_of(text) for text in texts if text]
            parts.append("\n".join([f"**`{claim.id}`**: {claim.verdict}", "", *items]))
    return own_lines(*parts)
