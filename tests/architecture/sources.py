"""The files of the repository that the tests of the source look at."""

import ast
from functools import cache
from pathlib import Path

__all__ = ["PACKAGE", "ROOT", "SOURCES", "package_of", "parsed", "shown"]

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "ropewalk"
SOURCES = sorted(PACKAGE.rglob("*.py"))


def package_of(path: Path) -> str:
    """The package, or the single module, at the top of ropewalk that a file belongs to."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


@cache
def parsed(path: Path) -> ast.Module:
    """The syntax tree of a file."""
    return ast.parse(path.read_text(encoding="utf-8"))


def shown(path: Path) -> str:
    """The path as the id of a test shows it."""
    return str(path.relative_to(ROOT))
