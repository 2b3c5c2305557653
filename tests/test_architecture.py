"""The house: imports run one way, files stay small, the README's tree is true, public names are documented."""

import ast
import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import ropewalk

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "ropewalk"
SOURCES = sorted(PACKAGE.rglob("*.py"))
# From the ground up: a room imports from rooms before it and from itself.
ROOMS = ["errors", "spec", "theory", "reference", "kernels", "ops", "nn", "claims", "hub", "tools"]
NEIGHBOURS = {("reference", "kernels"), ("kernels", "reference")}
DOCUMENTED = ["ropewalk", "ropewalk.spec", "ropewalk.theory", "ropewalk.reference", "ropewalk.claims"]


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_rooms(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            # Through the public face every room could be reached from every other.
            assert "ropewalk" not in {alias.name for alias in node.names}, f"{path}: imports the public face"
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            # "from ropewalk import x" imports the room or the public name x.
            base = node.module or ""
            names |= {f"{base}.{alias.name}" for alias in node.names} if base == "ropewalk" else {base}
    return {name.split(".")[1] for name in names if name.startswith("ropewalk.")}


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_run_one_way(path):
    if path.parent == PACKAGE and path.stem in ("__init__", "__main__"):
        return  # the public face names every room, for type checkers alone; the other calls the command line
    here = room_of(path)
    assert here in ROOMS, f"{here} is no room of DESIGN.md"
    for room in imported_rooms(path) - {"__version__"}:
        assert ROOMS.index(room) <= ROOMS.index(here), f"{here} imports {room}, which stands below it"
        assert (here, room) not in NEIGHBOURS


@pytest.mark.parametrize(
    "path",
    [*SOURCES, *sorted(PACKAGE.rglob("*.[ch]")), *sorted((ROOT / "tests").rglob("*.py"))],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_no_file_passes_400_lines(path):
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 400


@pytest.mark.parametrize("path", sorted((PACKAGE / "claims").rglob("*.py")), ids=lambda path: path.stem)
def test_every_measurement_belongs_to_a_claim(path):
    # They are all called _, so one that lost its decorator would go unnoticed.
    functions = [node for node in ast.parse(path.read_text(encoding="utf-8")).body if isinstance(node, ast.FunctionDef)]
    assert all(function.decorator_list for function in functions if function.name == "_")


def test_the_readmes_tree_is_the_tree():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    tree = re.search(r"```\nsrc/ropewalk/\n(.*?)```", readme, re.DOTALL)
    assert tree, "README.md has no tree"
    listed, folders = set(), {2: ""}
    for line in tree[1].splitlines():
        indent = len(line) - len(line.lstrip())
        for name in re.findall(r"[\w/]+(?:\.\w+|/)(?=\s|$)", line.split("  —  ")[0]):
            if name.endswith("/"):
                folders[indent + 2] = folders[indent] + name
            else:
                listed.add(folders[indent] + name)
    kinds = {".py", ".c", ".h", ".typed"}
    there = {str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*") if path.suffix in kinds}
    there = {path for path in there if path == "__init__.py" or not path.endswith("__init__.py")}
    assert listed == there


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150


def test_type_checkers_see_the_names_that_load():
    source = ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8"))
    guarded = next(node for node in source.body if isinstance(node, ast.If))
    seen = {node.names[0].asname: node.module for node in ast.walk(guarded) if isinstance(node, ast.ImportFrom)}
    assert seen == ropewalk._HOME
    assert set(seen) == set(ropewalk.__all__)
    for name in ropewalk.__all__:
        assert getattr(ropewalk, name) is not None
        assert name in dir(ropewalk)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = ropewalk.nothing  # pyright: ignore[reportAttributeAccessIssue]


def public_names():
    modules = [importlib.import_module(name) for name in DOCUMENTED]
    modules += [
        importlib.import_module(".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts))
        for path in SOURCES
        if room_of(path) in {"spec", "theory", "reference", "kernels", "ops", "nn"} and path.name != "__init__.py"
    ]
    for module in modules:
        for name in getattr(module, "__all__", ()):
            value = getattr(module, name)
            if callable(value) and getattr(value, "__module__", "").startswith("ropewalk"):
                yield f"{module.__name__}.{name}", value


@pytest.mark.parametrize(
    ("name", "value"), list(public_names()), ids=lambda value: value if isinstance(value, str) else ""
)
def test_every_public_name_has_a_docstring_with_a_doctest(name, value):
    assert ">>>" in (inspect.getdoc(value) or ""), name


def test_import_loads_no_torch():
    timed = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", "import ropewalk"], capture_output=True, text=True, check=True
    ).stderr
    assert "ropewalk" in timed
    assert "torch" not in timed
