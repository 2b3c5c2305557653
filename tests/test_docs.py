"""What the documents state is run: doctests of the package, and every Python block of README.md and docs/."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from page_results import program, unchecked_results
from ropewalk.tools.cli import app
from slow import slow

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
# What is in backticks or in a block is code, and may look like a link.
CODE = re.compile(r"^```.*?^```|`[^`\n]*`", re.DOTALL | re.MULTILINE)
FILE_NAME = re.compile(r"[\w./-]+\.(md|json|png|py|yml)")


def shown(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.mark.slow
def test_doctests():
    # In a process without jaxtyping's import hook, whose wrappers doctest does not look behind.
    command = [sys.executable, "-m", "pytest", "-q", "--doctest-modules", "src/ropewalk", "-p", "no:cacheprovider"]
    # torchtitan is installed for its own tests only (tests/hub/alone.py).
    command += ["--ignore", "src/ropewalk/hub/adapters/torchtitan.py"]
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


@pytest.mark.slow
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


@pytest.mark.parametrize("page", PAGES, ids=shown)
def test_every_result_on_a_page_is_asserted(page):
    assert unchecked_results(program(page)) == []


@pytest.mark.parametrize(
    ("source", "unchecked"),
    [
        ("y = f(x)", ["line 1: y"]),
        ("y = f(x)\nassert y == 1", []),
        ("a, b = f(x)\nassert a == 1", ["line 1: b"]),
        ("a, _ = f(x)\nassert a == 1", []),
        ("y = f(x)\nz = g(y)\nassert z == 1", []),
        ("y = f(x)\ny = g(x)\nassert y == 1", ["line 1: y"]),
        ("y = f(x)\ny += g(x)\nassert y == 1", []),
        ("assert y == 1\ny = f(x)", ["line 2: y"]),
        ("print(y)", ["line 1: print, y"]),
        ("cache.reset()\nassert cache.length == 0", []),
        ("rope.rotate_(q)\nassert q[0] == 1", []),
        ("x.data[0] = f(y)", ["line 1: x"]),
        ('save(y, "y.pt")\nz = load("y.pt")\nassert z == 1', []),
        ('save(y, "y.pt")\nz = load("z.pt")\nassert z == 1', ["line 1: save, y, y.pt"]),
        ("with open(path) as file:\n    text = file.read()", ["line 1: file", "line 2: text"]),
        ("with mode():\n    y = f(x)\nassert y == 1", []),
        ("for x in xs:\n    y = f(x)", ["line 1: y"]),
        ("for x in xs:\n    assert f(x)", []),
        ("import torch\nd = 64\n\n\ndef f(x):\n    return g(x)\n", []),
        ("def same(a, b):\n    assert a == b\n\n\ny = f(x)\nsame(y, 1)", []),
        ("scale = f(x)\n\n\ndef g(x):\n    return scale * x\n\n\nassert g(1) == 2", []),
        ("y = f(x)\ntorch.testing.assert_close(y, x)", []),
    ],
)
def test_a_result_that_no_assert_reads_is_named(source, unchecked):
    assert unchecked_results(source) == unchecked


@pytest.mark.parametrize("page", PAGES, ids=shown)
def test_links_to_files_lead_somewhere(page):
    text = CODE.sub("", page.read_text(encoding="utf-8"))
    # The site has files that a hook writes.
    hooks = (ROOT / "docs" / "hooks.py").read_text(encoding="utf-8")
    generated = [ROOT / "docs" / name for name in re.findall(r'File\.generated\(config, "([^"]+)"', hooks)]
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
        assert (page.parent / target).exists() or page.parent / target in generated, target


@pytest.mark.parametrize("page", PAGES, ids=shown)
def test_links_have_titles_as_texts(page):
    texts = re.findall(r"(?<!!)\[([^\]]+)\]\([^)]+\)", page.read_text(encoding="utf-8"))
    assert [text for text in texts if FILE_NAME.fullmatch(text.strip("`"))] == []


def test_the_site_names_every_page_once():
    settings = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    _, _, nav = settings.partition("\nnav:\n")
    named = re.findall(r"^ +- (?:[^:\n]+: )?(\S+\.md)$", nav, re.MULTILINE)
    pages = [page.relative_to(ROOT / "docs").as_posix() for page in PAGES[1:]]
    # A hook of the build adds the changelog, which is not in docs/.
    assert sorted(named) == sorted([*pages, "CHANGELOG.md"])


# Pages with the output of a command, the command, and its config.
OUTPUTS = [
    ("README.md", ["inspect"], "llama-3.1-8b"),
    ("docs/inspect.md", ["inspect"], "llama-3.1-8b"),
    ("docs/extending.md", ["extend", "--to", "16384"], "llama-2-7b"),
]


@pytest.mark.parametrize(("page", "command", "name"), OUTPUTS, ids=lambda value: str(value))
def test_output_on_a_page_is_that_of_the_command(page, command, name, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    config = ROOT / "src" / "ropewalk" / "data" / "configs" / f"{name}.json"
    app([command[0], str(config), *command[1:]], standalone_mode=False)
    printed = "\n".join(line.rstrip() for line in capsys.readouterr().out.splitlines())
    text = (ROOT / page).read_text(encoding="utf-8")
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    (block,) = [part for language, part in fenced if not language and name in part]
    assert printed.startswith(block.removeprefix("$ ropewalk inspect config.json\n").rstrip())
