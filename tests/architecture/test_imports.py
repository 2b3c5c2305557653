"""Imports run one way, without circles, and `import ropewalk` loads no torch."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from architecture.import_graph import circles, import_graph
from architecture.sources import PACKAGE, SOURCES, package_of, parsed, shown

# From the ground up: a package imports from those before it and from itself. Some do not exist yet.
ORDER = [
    "names",
    "errors",
    "signatures",
    "deprecation",
    "shapes",
    "spec",
    "theory",
    "reference",
    "kernels",
    "ops",
    "nn",
    "positions",
    "parallel",
    "hub",
    "claims",
    "lab",
    "tools",
]
# An oracle shares no code with what it checks.
APART = {("reference", "kernels"), ("kernels", "reference")}


def imported_packages(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            # Through the public face every package could be reached from every other.
            assert "ropewalk" not in {alias.name for alias in node.names}, f"{path}: imports the public face"
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            # "from ropewalk import x" imports the package or the public name x.
            base = node.module or ""
            names |= {f"{base}.{alias.name}" for alias in node.names} if base == "ropewalk" else {base}
    return {name.split(".")[1] for name in names if name.startswith("ropewalk.")}


def test_imports_run_one_way():
    wrong = []
    for path in SOURCES:
        if path == PACKAGE / "__init__.py" or path.stem == "__main__":
            continue  # the public face names every package, for type checkers alone; the others call the command line
        package = package_of(path)
        assert package in ORDER, f"{package} is no package of DESIGN.md"
        for imported in imported_packages(path) - {"__version__"}:
            if ORDER.index(imported) > ORDER.index(package) or (package, imported) in APART:
                wrong.append(f"{shown(path)} of {package} imports {imported}")
    assert wrong == []


def test_no_modules_import_each_other():
    # Imports for type checkers alone, and those inside functions, count.
    assert circles(import_graph(PACKAGE)) == []


@pytest.fixture
def package(tmp_path):
    """Makes a package of source texts by their paths."""

    def make(**sources: str) -> Path:
        for name, text in {"__init__": "", **sources}.items():
            path = tmp_path / "made" / f"{name.replace('__in__', '/')}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return tmp_path / "made"

    return make


def test_circles_are_found(package):
    straight = package(a="from made.b import x", b="import made.c", c="")
    assert import_graph(straight) == {"made.a": {"made.b"}, "made.b": {"made.c"}, "made.c": set()}
    assert circles(import_graph(straight)) == []
    for closing in (
        "from made.a import y",
        "from made import a",
        "if TYPE_CHECKING:\n    from made.a import y",
        "def f():\n    import made.a",
        "importlib.import_module('made.a')",
    ):
        assert circles(import_graph(package(c=closing))) == [["made.a", "made.b", "made.c"]], closing


def test_a_packages_init_is_a_module_of_a_circle(package):
    made = package(sub__in____init__="from made.sub.a import y", sub__in__a="from made.sub import b", sub__in__b="")
    # What Python runs anyway, the __init__ above a module, makes no circle; a name that it re-exports does.
    assert circles(import_graph(made)) == []
    made = package(sub__in__a="from made.sub import z")
    assert circles(import_graph(made)) == [["made.sub", "made.sub.a"]]


def test_import_loads_no_torch():
    timed = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", "import ropewalk"], capture_output=True, text=True, check=True
    ).stderr
    assert "ropewalk" in timed
    assert "torch" not in timed
