"""Words that the project does not use: "turn" for rotate, and "a" for "per" ("an offset a sequence")."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "mkdocs.yml")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted(path for folder in ("src", "tests", "benchmarks", "examples") for path in (ROOT / folder).rglob("*.py")),
    *sorted((ROOT / "src").rglob("*.[ch]")),
]
TURN = re.compile(r"(?<![a-z])(un)?turn(s|ed|ing|ers?)?(?![a-z])", re.IGNORECASE)
# Counted things in front of the article, and what they are counted by behind it.
COUNTED = (
    r"one|two|three|four|\d[\d,.]*|once|twice|offsets?|positions?|rows?|factors?|numbers?|angles?|temperatures?|"
    r"frequenc(?:y|ies)|ids?|ind(?:ex|ices)|slopes?|bias(?:es)?|weights?|norms?|lengths?|tables?|bytes?|bits?|lines?|"
    r"entr(?:y|ies)|scales?|blocks?|specs?|launch(?:es)?|graphs?|programs?|calls?|tensors?|tokens?|keys?|values?|"
    r"cop(?:y|ies)|sums?|ax[ei]s|coordinates?|pairs?|errors?|folders?|files?|functions?|tests?|threads?|warps?|lanes?|"
    r"µs|us|ms|seconds?|minutes?|GB|MB|words?|sequences?|sections?|cases?|buckets?|gains?|decays?|masks?|steps?|"
    r"samples?|columns?|heads?"
)
UNIT = (
    r"tokens?|sequence|head|pair|row|batch|layer|feature|axis|document|step|call|element|key|query|program|rank|side|"
    r"dimension|word|block|segment|chunk|value|position|vector|lane|model|file|family|group|kind|second|page|thread|"
    r"worker|test|case|length|dtype|column|bucket|tensor|backend|rule|section|map|launch|warp|load|round|pass"
)
# "How many rows a block has" has a verb behind it.
PER = re.compile(rf"(?<!many )\b({COUNTED}) an? ({UNIT})\b(?! (has|have|is|takes?|computes?|sees|needs?)\b)")


@pytest.mark.parametrize("pattern", [TURN, PER], ids=["turn", "a for per"])
def test_words_that_are_not_used(pattern):
    hits = []
    for path in FILES:
        if path == Path(__file__):
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            hits += [f"{path.relative_to(ROOT)}:{number}: {match[0]}" for match in pattern.finditer(line)]
    assert hits == []


@pytest.mark.parametrize("text", ["it turns", "turned_q", "in turn", "unturned", "Turn", "a quarter turn"])
def test_turns_are_found(text):
    assert TURN.search(text)


@pytest.mark.parametrize("text", ["return", "returns x", "NoReturn", "saturn", "returned", "reportReturnType"])
def test_other_words_are_not(text):
    assert not TURN.search(text)


@pytest.mark.parametrize("text", ["one offset a sequence", "an int or one a sequence", "a row a batch", "3 µs a call"])
def test_articles_for_per_are_found(text):
    assert PER.search(text)


@pytest.mark.parametrize("text", ["the norm of a head", "how many rows a block has", "one offset per sequence"])
def test_other_articles_are_not(text):
    assert not PER.search(text)
