"""`ropewalk verify`: one screen, statements in full, sources and records."""

import io
import json
import unicodedata

import pytest
from rich.console import Console

from ropewalk.claims import CHAPTERS, Entry, Finding, run
from ropewalk.claims.sources import NOTE_002
from ropewalk.tools.verify import verify
from ropewalk.tools.verify.screen import full_entries, one_screen, summary

CLAIMS = [claim for chapter in CHAPTERS for claim in chapter.claims]


def width(line: str) -> int:
    """Columns of a terminal: an ideograph has two."""
    return sum(2 if unicodedata.east_asian_width(c) in "WF" else 0 if unicodedata.combining(c) else 1 for c in line)


def shown(renderable: object, columns: int = 80) -> list[str]:
    console = Console(file=io.StringIO(), width=columns, highlight=False, markup=False)
    console.print(renderable)
    assert isinstance(console.file, io.StringIO)
    return [line.rstrip() for line in console.file.getvalue().split("\n")]


@pytest.fixture(scope="module")
def entries() -> list[Entry]:
    """Every claim, as if its measurement agreed with its verdict."""
    fake = Finding("as expected", stated=False, amended=True)
    return [Entry(claim, fake) for claim in CLAIMS]


def test_the_screen_has_a_count_per_source_and_one_line_per_false_statement():
    entries = list(run([claim for claim in CLAIMS if claim.long], anew=False))
    entries += [Entry(claim, Finding("", *_agreeing(claim))) for claim in CLAIMS if not claim.long]
    lines = shown(one_screen(entries))
    assert len(lines) <= 45
    assert max(map(width, lines)) <= 80
    false = [claim for claim in CLAIMS if claim.verdict == "does not hold"]
    for claim in false:
        (line,) = (line for line in lines if line.startswith(f"{claim.id} "))
        assert line.split()[1] == claim.places[0].label
        assert line.endswith(claim.amendment)
    (row,) = (line for line in lines if line.startswith("note 002"))
    counted = [sum(c.is_from(NOTE_002) and c.verdict == v for c in CLAIMS) for v in type(CLAIMS[0].verdict)]
    assert [int(cell) if cell != "·" else 0 for cell in row.split()[-5:]] == [counted[i] for i in (0, 1, 2, 3, 4)]
    assert "Every measurement agrees with its recorded verdict." in shown(summary(entries))


def _agreeing(claim):
    stated = {"holds": True, "not measurable here": None}.get(str(claim.verdict), False)
    return stated, True


@pytest.mark.parametrize("columns", [80, 120])
def test_a_statement_in_full_shows_everything(columns, entries):
    lines = shown(full_entries(entries, []), columns)
    assert max(map(width, lines)) <= columns
    joined = "".join("".join(lines).split())
    for entry in entries:
        claim = entry.claim
        for text in (
            claim.id,
            claim.statement,
            claim.amendment,
            claim.method,
            claim.expected,
            str(claim.verdict),
            *(place.label for place in claim.places),
            *(place.quotation for place in claim.places),
        ):
            # A wrapped line starts with the label of its row, or with spaces.
            assert "".join(text.split()) in joined, (claim.id, text)


def test_one_source_is_in_the_order_of_its_lines(entries):
    chosen = [entry for entry in entries if entry.claim.is_from(NOTE_002)]
    lines = shown(full_entries(chosen[::-1], [NOTE_002]))
    assert lines[0] == NOTE_002.title
    ids = [line.split()[0] for line in lines[1:] if line[:1].strip()]
    first = {e.claim.id: min(p.line or 0 for p in e.claim.places if p.source == NOTE_002) for e in chosen}
    assert len(ids) == len(first)
    assert [first[id] for id in ids] == sorted(first.values())


def test_sources_are_found_by_number_or_title(capsys):
    assert verify(sources=["2305.19466"]) == 0
    by_number = capsys.readouterr().out
    assert verify(sources=["length generalization"]) == 0
    assert capsys.readouterr().out == by_number
    assert "alibi.slopes" in by_number


def test_records_are_cited_unless_the_claim_is_asked_for(capsys, monkeypatch, tmp_path):
    (claim,) = (claim for claim in CLAIMS if claim.id == "men.islands")
    measured: list[str] = []

    def measure() -> Finding:
        measured.append("now")
        return Finding("measured now", stated=False, amended=True)

    from dataclasses import replace

    from ropewalk import claims

    chapter = claims.Chapter("one")
    chapter.claims.append(replace(claim, measure=measure))
    monkeypatch.setattr(claims, "CHAPTERS", (chapter,))
    file = tmp_path / "claims.json"
    assert verify(json_file=str(file), long=True) == 0
    assert not measured
    assert json.loads(file.read_text(encoding="utf-8"))[0]["record"]["date"]
    out = capsys.readouterr().out
    assert "(recorded " in out
    assert "1 takes long: cited from records" in out
    assert verify(json_file=str(file), only=["men.islands"]) == 0
    assert measured == ["now"]
    assert json.loads(file.read_text(encoding="utf-8"))[0]["record"] is None
    assert "measured now" in capsys.readouterr().out
