"""What the documents say is run: doctests of the package, and every Python block of README.md and docs/."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from slow import slow

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def test_doctests():
    # In a process without jaxtyping's import hook, whose wrappers doctest does not look behind.
    command = [sys.executable, "-m", "pytest", "-q", "--doctest-modules", "src/ropewalk", "-p", "no:cacheprovider"]
    result = subprocess.run(
        [*command, "--override-ini", "addopts="], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout
    passed = re.search(r"(\d+) passed", result.stdout)
    assert passed
    assert int(passed[1]) >= 60


# README.md alone in `make test`; docs/ in two groups, one per worker.
@pytest.mark.parametrize("pages", [PAGES[:1], slow(PAGES[1::2]), slow(PAGES[2::2])], ids=["README", "odd", "even"])
def test_python_blocks_run(pages):
    command = [sys.executable, ROOT / "tests" / "run_pages.py", *pages]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_a_page_that_fails_is_named_with_its_line(tmp_path):
    wrong, right, stops = tmp_path / "wrong.md", tmp_path / "right.md", tmp_path / "stops.md"
    wrong.write_text("# Title\n\n```python\nx = 1\n```\n\nText.\n\n```python\nassert x == 2\n```\n")
    right.write_text("- in a list:\n\n  ```python\n  assert 'x' not in globals()\n  ```\n")
    stops.write_text("```python\nraise SystemExit(0)\n```\n")
    command = [sys.executable, ROOT / "tests" / "run_pages.py", wrong, right, stops]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert "pages that fail: wrong.md, stops.md" in result.stderr
    assert f'File "{wrong}", line 10, in <module>' in result.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_to_files_lead_somewhere(page):
    # What stands in backticks is code, and may look like a link.
    text = re.sub(r"`[^`\n]*`", "", page.read_text(encoding="utf-8"))
    for target in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (page.parent / target).exists(), target


def test_the_site_names_every_page_once():
    settings = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    _, _, nav = settings.partition("\nnav:\n")
    named = re.findall(r"^ +- [^:\n]+: (\S+)$", nav, re.MULTILINE)
    pages = (page.relative_to(ROOT / "docs").as_posix() for page in PAGES[1:])
    assert sorted(named) == sorted(pages)
