"""Public names load, are seen by type checkers, and are documented with an example that runs."""

import ast
import importlib
import inspect

import pytest

import ropewalk
from architecture.import_graph import module_name
from architecture.sources import PACKAGE, SOURCES, package_of, parsed

DOCUMENTED = [
    "ropewalk",
    "ropewalk.spec",
    "ropewalk.theory",
    "ropewalk.reference",
    "ropewalk.parallel",
    "ropewalk.claims",
]
# Packages whose modules document every name in their __all__.
WHOLE = {"spec", "theory", "reference", "kernels", "ops", "nn", "parallel"}


def test_type_checkers_see_the_names_that_load():
    guarded = next(node for node in parsed(PACKAGE / "__init__.py").body if isinstance(node, ast.If))
    imports = [node for node in ast.walk(guarded) if isinstance(node, ast.ImportFrom)]
    packages = [alias.name for node in imports if node.module == "ropewalk" for alias in node.names]
    assert tuple(packages) == ropewalk._PACKAGES
    for name in packages:
        assert getattr(ropewalk, name) is importlib.import_module(f"ropewalk.{name}")
    seen = {node.names[0].asname: node.module for node in imports if node.module != "ropewalk"}
    assert seen == ropewalk._HOME
    assert {*seen, "positions"} == set(ropewalk.__all__)
    for name in ropewalk.__all__:
        assert getattr(ropewalk, name) is not None
        assert name in dir(ropewalk)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = ropewalk.nothing  # pyright: ignore[reportAttributeAccessIssue]


def test_positions_is_the_module_of_helpers():
    helpers = importlib.import_module("ropewalk.nn.positions")
    assert ropewalk.positions is importlib.import_module("ropewalk.positions")
    assert ropewalk.positions.__all__ == helpers.__all__
    assert all(getattr(ropewalk.positions, name) is getattr(helpers, name) for name in helpers.__all__)


def public_names():
    modules = [importlib.import_module(name) for name in DOCUMENTED]
    modules += [
        importlib.import_module(module_name(path, PACKAGE))
        for path in SOURCES
        if package_of(path) in WHOLE and path.name != "__init__.py"
    ]
    for module in modules:
        for name in getattr(module, "__all__", ()):
            value = getattr(module, name)
            if callable(value) and getattr(value, "__module__", "").startswith("ropewalk"):
                yield f"{module.__name__}.{name}", value


def test_every_public_name_has_a_docstring_with_a_doctest():
    names = dict(public_names())
    assert len(names) > 100
    assert [name for name, value in names.items() if ">>>" not in (inspect.getdoc(value) or "")] == []
