"""Finds and parses the source of a function, and checks that it matches the running code."""

import ast
import linecache
import types
from collections.abc import Iterator
from typing import Any

from torch import nn

from ropewalk.kernels.torch_internals import has_hooks

__all__ = ["Sources", "function_behind"]


def function_behind(value: object) -> object:
    """Return the function behind a module that the kernels package made of it, and any other value unchanged.

    If that package is installed, the rotation functions of transformers are modules whose forward calls the function,
    so that `use_kernels` can replace it. A module whose forward was replaced is returned as it is: it computes what a
    kernel of the Hub does.

    >>> function_behind(len) is len
    True
    """
    kind: Any = type(value)
    if not isinstance(value, nn.Module) or not hasattr(kind, "kernel_layer_name") or has_hooks(value):
        return value
    forward = vars(value).get("forward", kind.forward)
    forward = getattr(forward, "__func__", forward)
    cells = dict(zip(forward.__code__.co_freevars, forward.__closure__ or (), strict=True))
    if forward is not kind.forward or forward.__code__.co_names or list(cells) != ["func"]:
        return value
    return cells["func"].cell_contents


class Sources:
    """Parsed source files. Each is parsed once: a modeling file has many functions and thousands of lines.

    >>> import textwrap
    >>> Sources().definition(textwrap.dedent).name
    'dedent'
    """

    def __init__(self) -> None:
        self._files: dict[str, _File | None] = {}

    def definition(self, function: types.FunctionType) -> ast.FunctionDef | None:
        """Return the parsed function, or None if there is no source or it differs from the running code."""
        code, file = function.__code__, self._file(function)
        place = _place(code)
        if file is None or len(file.definitions.get(place, ())) != 1 or len(file.codes.get(place, ())) != 1:
            return None
        # The file may have changed since it was loaded.
        return file.definitions[place][0] if _parts(file.codes[place][0]) == _parts(code) else None

    def recompiled(self, function: types.FunctionType, body: list[ast.stmt]) -> types.CodeType:
        """Compile a function with another body. Raise a LookupError if `definition` returns None."""
        definition, file, original = self.definition(function), self._file(function), function.__code__
        if definition is None or file is None:
            raise LookupError(f"{function.__name__} has no source")
        before, definition.body = definition.body, body
        try:
            ast.fix_missing_locations(definition)
            compiled = compile(file.tree, original.co_filename, "exec", dont_inherit=True)
        finally:
            definition.body = before
        return next(code for code in _codes(compiled) if _place(code) == _place(original))

    def _file(self, function: types.FunctionType) -> "_File | None":
        name = function.__code__.co_filename
        if name not in self._files:
            try:
                self._files[name] = _File(name, "".join(linecache.getlines(name, function.__globals__)))
            except (SyntaxError, ValueError):
                self._files[name] = None
        return self._files[name]


# A function, by its name and its first line. With decorators, the line of the first one.
_Place = tuple[str, int]


class _File:
    """A parsed and compiled file, with all its functions."""

    def __init__(self, name: str, text: str) -> None:
        # The whole file, since the compilation of a call depends on the imports of the file.
        self.tree = ast.parse(text)
        self.definitions: dict[_Place, list[ast.FunctionDef]] = {}
        for node in _definitions(self.tree):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            self.definitions.setdefault((node.name, first), []).append(node)
        self.codes: dict[_Place, list[types.CodeType]] = {}
        for code in _codes(compile(self.tree, name, "exec", dont_inherit=True)):
            self.codes.setdefault(_place(code), []).append(code)


def _definitions(node: ast.AST) -> Iterator[ast.FunctionDef]:
    """Yield every function defined by a statement inside `node`."""
    for field in ("body", "orelse", "handlers", "finalbody", "cases"):
        inside = getattr(node, field, None)
        for statement in inside if isinstance(inside, list) else []:
            if isinstance(statement, ast.FunctionDef):
                yield statement
            yield from _definitions(statement)


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield inner
            yield from _codes(inner)


def _place(code: types.CodeType) -> _Place:
    return code.co_name, code.co_firstlineno


def _parts(code: types.CodeType) -> list[Any]:
    """Return what must be equal for two code objects to be the same, apart from their location."""
    return [code.co_code, code.co_names, code.co_varnames, code.co_freevars, _constants(code)]


def _constants(code: types.CodeType) -> list[Any]:
    """Return the constants of code with their types, since 1 == 1.0, including those of inner functions."""
    return [
        _constants(value) if isinstance(value, types.CodeType) else (type(value), value) for value in code.co_consts
    ]
