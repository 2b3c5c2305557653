"""Files stay small, packages say what they hold, and the maps lead to every folder."""

import ast
import re
from pathlib import Path

import pytest

from architecture.sources import PACKAGE, ROOT, SOURCES, parsed, shown

LONGEST, README_LINES = 600, 120
# A path on the map: a folder, which ends in /, or a file.
PATH = r"(?:\w+/)*(?:\w+/|\w+\.(?:py|c|h|typed))"


def test_no_file_is_longer_than_600_lines():
    paths = *SOURCES, *PACKAGE.rglob("*.[ch]"), *(ROOT / "tests").rglob("*.py")
    lines = {shown(path): len(path.read_text(encoding="utf-8").splitlines()) for path in paths}
    assert {path: count for path, count in lines.items() if count > LONGEST} == {}


@pytest.mark.parametrize("path", [path for path in SOURCES if path.name == "__init__.py"], ids=shown)
def test_every_package_says_what_it_holds(path):
    assert ast.get_docstring(parsed(path)), "an __init__.py begins with a docstring"


@pytest.mark.parametrize("path", sorted((PACKAGE / "claims").rglob("*.py")), ids=lambda path: path.stem)
def test_every_measurement_belongs_to_a_claim(path):
    # They are all called _, so one that lost its decorator would go unnoticed.
    functions = [node for node in parsed(path).body if isinstance(node, ast.FunctionDef)]
    assert all(function.decorator_list for function in functions if function.name == "_")


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= README_LINES


def read_map(readme: str) -> tuple[set[str], list[tuple[str, str]]]:
    """The paths at the beginnings of the map's lines, relative to src/ropewalk; and, with the folder of their line,
    the paths that descriptions mention.

    A line is indented by two spaces per level: one or more names, two spaces, and what they hold.
    """
    block = re.search(r"^```\w*\nsrc/ropewalk/\n(.*?)^```", readme, re.DOTALL | re.MULTILINE)
    assert block, "no map: a fenced block that begins with src/ropewalk/"
    listed: set[str] = set()
    mentioned: list[tuple[str, str]] = []
    folders = {2: ""}
    for line in block[1].splitlines():
        indent = len(line) - len(line.lstrip())
        names = re.match(rf"{PATH}(?:  +{PATH})*(?=  |$)", line.strip())
        if names is None:
            # A description that goes on in a line of its own.
            mentioned += [(folders[max(folders)], path) for path in re.findall(rf"(?<![\w/.]){PATH}", line)]
            continue
        assert indent in folders, f"indented by {indent} spaces, below no folder: {line}"
        folders = {level: folder for level, folder in folders.items() if level <= indent}
        here = folders[indent]
        for name in names[0].split():
            listed.add(here + name)
            if name.endswith("/"):
                folders[indent + 2] = here + name
        rest = line.strip()[names.end() :]
        mentioned += [(folders[max(folders)], path) for path in re.findall(rf"(?<![\w/.]){PATH}", rest)]
    return listed, mentioned


def folders_with_code() -> set[str]:
    """Folders of src/ropewalk with an __init__.py or C sources, with / at the end."""
    found = {path.parent for path in [*PACKAGE.rglob("__init__.py"), *PACKAGE.rglob("*.[ch]")]}
    return {f"{path.relative_to(PACKAGE)}/" for path in found - {PACKAGE}}


def is_there(path: str, folder: str) -> bool:
    """Whether a path that a description mentions is there: in the folder of its line, in one above, or in the root."""
    places = [PACKAGE / folder, *(PACKAGE / folder).parents]
    return any((place / path).exists() for place in places if place == ROOT or ROOT in place.parents)


def read_and_check(name: str) -> set[str]:
    """The paths on the map of a document, all of which exist."""
    listed, mentioned = read_map((ROOT / name).read_text(encoding="utf-8"))
    assert sorted(path for path in listed if not (PACKAGE / path).exists()) == [], "on the map, but not there"
    assert sorted(path for folder, path in mentioned if not is_there(path, folder)) == [], "mentioned, but not there"
    return listed


def test_the_map_leads_to_every_folder():
    listed = read_and_check("CONTRIBUTING.md")
    assert sorted(folders_with_code() - listed) == [], "not on the map"
    single = {path.name for path in PACKAGE.iterdir() if path.suffix in (".py", ".typed")}
    assert sorted(single - listed) == [], "single files at the top that are not on the map"


def test_the_readmes_map_leads_to_every_package():
    packages = {folder for folder in folders_with_code() if folder.count("/") == 1}
    assert sorted(packages - read_and_check("README.md")) == [], "not on the map"


def test_a_map_is_read_line_by_line():
    readme = "text\n```\nsrc/ropewalk/\n  a.py  b.py  what they are\n  one/  first; see b.py\n    two/  second\n"
    readme += "         and spec/rope.py too\n    c.py\n  three/  a/b is no path\n```\n"
    listed, mentioned = read_map(readme)
    assert listed == {"a.py", "b.py", "one/", "one/two/", "one/c.py", "three/"}
    assert mentioned == [("one/", "b.py"), ("one/two/", "spec/rope.py"), ("three/", "a/")]
    assert is_there("rope.py", "spec/")
    assert is_there("spec/rope.py", "nn/rotary/")
    assert not is_there("nothing.py", "spec/")
    for wrong in ("```\nsrc/\n```\n", "```\nsrc/ropewalk/\n      a/  too deep\n```\n"):
        with pytest.raises(AssertionError):
            read_map(wrong)


def test_folders_with_code_are_found():
    assert {"spec/", "kernels/native/", "nn/rotary/", "tools/bench/"} <= folders_with_code()
    assert not any("__pycache__" in Path(folder).parts for folder in folders_with_code())
