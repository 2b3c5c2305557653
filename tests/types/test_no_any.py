"""No public signature contains Any: an editor that sees it can neither complete nor warn.

Signatures are read from the source, so that an Any inside `dict[str, Any]`, in a string or behind an alias is found.
"""

import ast
import functools
import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest

import ropewalk
from ropewalk import hub

PACKAGE = Path(ropewalk.__file__).parent
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
# Methods that are called without their name.
CALLED = {"__init__", "__new__", "__call__", "__iter__", "__getitem__", "__enter__", "__exit__"}
# "module.Class.method": why its signature has to contain Any.
EXEMPT: dict[str, str] = {
    "ropewalk.hub.adapters.arrays.to_jax": "JAX is imported by the call, so its arrays have no type",
}


@functools.cache
def tree_of(module: str) -> ast.Module:
    path = PACKAGE.parent.joinpath(*module.split("."))
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(path.read_text(encoding="utf-8"))


def statements(module: str) -> Iterator[ast.stmt]:
    """The top level of a module, with what is imported for type checkers alone."""
    for node in tree_of(module).body:
        yield from node.body if isinstance(node, ast.If) else [node]


@functools.cache
def means_any(module: str, name: str) -> bool:
    """Whether `name` in `module` is Any, or an alias that contains it."""
    for node in statements(module):
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    source = node.module or ""
                    if source in ("typing", "typing_extensions"):
                        return alias.name == "Any"
                    return source.startswith("ropewalk.") and means_any(source, alias.name)
        elif isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == name for t in node.targets):
            return is_type(node.value) and contains_any(module, node.value)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id == name:
            alias_of = node.annotation
            named = isinstance(alias_of, ast.Name) and alias_of.id == "TypeAlias"
            return named and node.value is not None and contains_any(module, node.value)
    return False


def is_type(value: ast.expr) -> bool:
    """Whether an assigned value can be an alias: X, X[...], X | Y; a call or a literal makes a value."""
    if isinstance(value, ast.BinOp):
        return is_type(value.left) and is_type(value.right)
    return isinstance(value, ast.Name | ast.Subscript | ast.Attribute | ast.Constant)


def contains_any(module: str, annotation: ast.expr | None) -> bool:
    """Whether an annotation is, has inside or names Any; without one it is Any."""
    if annotation is None:
        return True
    for node in ast.walk(annotation):
        if isinstance(node, ast.Attribute) and node.attr == "Any":
            return True
        if isinstance(node, ast.Name) and means_any(module, node.id):
            return True
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            try:
                inner = ast.parse(node.value, mode="eval").body
            except SyntaxError:
                continue  # jaxtyping's shapes are no expressions
            if contains_any(module, inner):
                return True
    return False


def in_function(module: str, node: ast.FunctionDef | ast.AsyncFunctionDef, method: bool) -> Iterator[str]:
    """The parameters of a function that may be anything, and "return"."""
    given = node.args
    parameters = [*given.posonlyargs, *given.args]
    static = any(isinstance(d, ast.Name) and d.id == "staticmethod" for d in node.decorator_list)
    parameters = parameters[1:] if method and not static else parameters
    parameters += [*given.kwonlyargs, *(extra for extra in (given.vararg, given.kwarg) if extra is not None)]
    yield from (parameter.arg for parameter in parameters if contains_any(module, parameter.annotation))
    if contains_any(module, node.returns):
        yield "return"


def found_in(module: str, names: set[str]) -> Iterator[str]:
    """Where the public functions and classes of these names, defined in `module`, have Any."""
    for node in statements(module):
        if isinstance(node, FUNCTIONS) and node.name in names:
            yield from (f"{module}.{node.name}: {where}" for where in in_function(module, node, method=False))
        elif isinstance(node, ast.ClassDef) and node.name in names:
            for part in node.body:
                if isinstance(part, FUNCTIONS) and (not part.name.startswith("_") or part.name in CALLED):
                    for where in in_function(module, part, method=True):
                        yield f"{module}.{node.name}.{part.name}: {where}"
                elif isinstance(part, ast.AnnAssign) and contains_any(module, part.annotation):
                    field = ast.unparse(part.target)
                    if not field.startswith("_"):
                        yield f"{module}.{node.name}.{field}"


def public() -> dict[str, set[str]]:
    """Modules and the public names that each defines."""
    homes: dict[str, set[str]] = {}
    for value in (getattr(package, name) for package in (ropewalk, hub) for name in package.__all__):
        # A class has the methods of its bases too.
        for part in getattr(value, "__mro__", (value,)):
            homes.setdefault(getattr(part, "__module__", ""), set()).add(getattr(part, "__name__", ""))
    rooms = [path for room in ("spec", "theory", "reference") for path in (PACKAGE / room).glob("*.py")]
    for path in [*rooms, PACKAGE / "errors.py", PACKAGE / "nn" / "positions.py"]:
        if path.stem != "__init__":
            module = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
            names = {getattr(node, "name", "_") for node in statements(module)}
            homes.setdefault(module, set()).update(name for name in names if not name.startswith("_"))
    return {module: names for module, names in homes.items() if module.startswith("ropewalk.")}


@pytest.mark.parametrize(
    ("module", "names"), sorted(public().items()), ids=lambda part: part if isinstance(part, str) else ""
)
def test_no_public_signature_contains_any(module, names):
    found = [where for where in found_in(module, names) if where.split(":")[0] not in EXEMPT]
    assert not found, "\n".join(found)


def test_exemptions_are_needed():
    needed = {where.split(":")[0] for module, names in public().items() for where in found_in(module, names)}
    assert set(EXEMPT) <= needed


WRONG = """
from typing import Any, Callable
import typing
Rows = dict[str, Any]
def plain(x: Any) -> int: ...
def nested(x: dict[str, Any]) -> int: ...
def aliased(x: Rows | None) -> int: ...
def text(x: "list[Any]") -> int: ...
def dotted(x: int) -> typing.Any: ...
def bare(x) -> int: ...
def silent(x: int): ...
def options(**options: Any) -> None: ...
class Value:
    field: Any
    def method(self, x: Any) -> None: ...
    def _private(self, x: Any) -> None: ...
def right(x: "int | None", *rest: Callable[..., int]) -> None: ...
"""


def test_every_way_to_write_any_is_found(monkeypatch):
    monkeypatch.setattr(importlib.import_module(__name__), "tree_of", lambda module: ast.parse(WRONG))
    means_any.cache_clear()
    names = {node.name for node in ast.parse(WRONG).body if isinstance(node, (*FUNCTIONS, ast.ClassDef))}
    found = {where.split(":")[0].removeprefix("wrong.") for where in found_in("wrong", names)}
    means_any.cache_clear()
    assert found == names - {"Value", "right"} | {"Value.field", "Value.method"}
