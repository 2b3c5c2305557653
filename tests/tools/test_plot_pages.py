"""The pictures in docs/ are those of the commands on the pages, and what is quoted from a note is in the note."""

import io
import itertools
import re
import shlex
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest
from typer.testing import CliRunner

from formulas import plain_frequencies, score_sums
from ropewalk.theory import decay_curve
from ropewalk.tools.cli import app
from slow import slow_except

ROOT = Path(__file__).parent.parent.parent
DOCS = ROOT / "docs"
PAGE = DOCS / "notes_illustrated.md"
# The notes are not part of the repository. Where they are, beside it, quotations are looked up in them.
NOTES = ROOT.parent / "shared" / "seeds"
LANGUAGES = {"000": ("Russian", "ru"), "001": ("Russian", "ru"), "002": ("Chinese", "zh"), "003": ("Korean", "ko")}
LANGUAGES |= {"004": ("Chinese", "zh")}


def commands(page: Path) -> dict[str, str]:
    """The commands of a page that draw a picture, by the name of the picture."""
    blocks = re.findall(r"^```sh\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines() if line.startswith("ropewalk plot ")]
    return {shlex.split(line)[-1]: line for line in lines}


def pictures(page: Path) -> list[str]:
    """The pictures that a page shows, in their order."""
    return re.findall(r"!\[[^]]+\]\((?:\.\./)?pictures/([\w.]+)\)", page.read_text(encoding="utf-8"))


COMMANDS = commands(DOCS / "commands.md") | commands(PAGE)
# The other pictures take up to three seconds.
QUICK = ("score.png", "plane.png")


def test_every_picture_is_drawn_by_a_command_and_shown():
    stored = {path.name for path in (DOCS / "pictures").iterdir()}
    # Drawn by `ropewalk lab run NAME --plot`, after minutes of training, or from its record.
    trained = {f"lab_{name}.png" for name in ("convergence", "convergence_tiny", "extension", "extrapolation")}
    assert stored == {*COMMANDS, *trained} == {name for page in DOCS.rglob("*.md") for name in pictures(page)}
    assert pictures(PAGE) == list(commands(PAGE))
    # A click opens the picture in its full size.
    assert len(re.findall(r"^\[!\[.*\]\((.*)\)\]\(\1\)$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)) == 8


@pytest.mark.parametrize("name", slow_except(QUICK, COMMANDS))
def test_a_picture_is_that_of_its_command(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, shlex.split(COMMANDS[name])[1:])
    assert result.exit_code == 0, f"{result.output}\n{result.exception}"
    stored, drawn = (folder.joinpath(name).read_bytes() for folder in (DOCS / "pictures", tmp_path))
    assert len(stored) < 100_000
    # The header of a PNG contains width and height.
    assert stored[:24] == drawn[:24]
    # Other versions of matplotlib draw text otherwise. PNG files contain the version.
    versions = [re.findall(rb"Matplotlib version[\d.]+", file) for file in (stored, drawn)]
    if versions[0] == versions[1]:
        before, now = (matplotlib.image.imread(io.BytesIO(file), format="png") for file in (stored, drawn))
        # One digit of the smallest text has more pixels than this.
        assert (np.abs(before - now).max(axis=-1) > 0.25).sum() < 8


def test_the_page_states_up_to_which_distance_the_means_fall():
    text = re.sub(r"\s+", " ", PAGE.read_text(encoding="utf-8"))
    (stated,) = re.findall(r"means over octaves fall up to a distance of (\d+)", text)
    edges = [1 << exponent for exponent in range(10, 16)]
    theta = plain_frequencies(128)
    for curve in (decay_curve(range(edges[-1]), theta), score_sums(theta, edges[-1])):
        means = [curve[low:high].mean() for low, high in itertools.pairwise(edges)]
        lowest = int(np.argmin(means))
        assert means[: lowest + 1] == sorted(means[: lowest + 1], reverse=True)
        assert int(stated) == edges[lowest + 1]


def test_a_text_that_calls_the_sum_of_cosines_a_score_names_both_conditions():
    texts = [*DOCS.glob("*.md"), *(ROOT / "src" / "ropewalk" / "tools").rglob("*.py")]
    for path in texts:
        assert not re.search(r"score\s+of\s+(two\s+)?parallel\s+vectors", path.read_text(encoding="utf-8")), path.name
    score = PAGE.read_text(encoding="utf-8").partition("The bound is not the score.")[2]
    assert "equal norm" in score.partition("```")[0]


def plain(text: str) -> str:
    """Text without LaTeX and without line breaks, as the page quotes it."""
    text = re.sub(r"\\mathbf\{(\w)\}", r"\1", text).replace(r"\mathcal{R}_{m}", "R_m")
    text = text.replace(r"\Delta", "Δ").replace(r"\times", "×").replace("$", "")
    return re.sub(r"\s+", " ", text)


def quotations() -> list[tuple[str, str, str, int, str]]:
    """Language code, quotation, note, line and our reading of every quotation on the page."""
    text = re.sub(r"^> ?", "> ", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    form = r'^> <span lang="(\w\w)">(.+?)</span>\n> \n> \*Note (\d{3}) \((\w+)\), line (\d+): (.+?)\*$'
    matches = re.findall(form, text, re.MULTILINE | re.DOTALL)
    assert len(matches) == len(re.findall(r"<span", text))
    return [
        (f"{language} {code}", plain(quoted.replace("\n> ", " ")), note, int(line), reading)
        for code, quoted, note, language, line, reading in matches
    ]


def test_every_note_is_quoted_in_its_own_language_with_our_reading():
    quoted = quotations()
    assert {note for _, _, note, _, _ in quoted} == set(LANGUAGES)
    for language, quotation, note, _, reading in quoted:
        assert language == " ".join(LANGUAGES[note])
        assert not quotation.isascii()
        assert reading.replace("−", "-").encode("latin-1")


def test_quotations_are_in_the_notes_at_their_lines():
    for _, quotation, note, line, _ in quotations():
        for path in NOTES.glob(f"{note}_*.txt"):
            assert quotation in plain(path.read_text(encoding="utf-8").split("\n")[line - 1]), (note, line)


def test_lines_that_a_picture_names_exist_in_the_notes():
    source = (ROOT / "src" / "ropewalk" / "tools" / "plot" / "note_figures.py").read_text(encoding="utf-8")
    named = re.findall(r"[Nn]ote (\d{3}), lines? (\d+)", source)
    assert len(named) >= 8
    for note, line in named:
        for path in NOTES.glob(f"{note}_*.txt"):
            assert path.read_text(encoding="utf-8").split("\n")[int(line) - 1].strip(), (note, line)
