"""The source of a function that runs: found, parsed, and compared with the code that was compiled from it."""

import ast
import linecache
import types
from collections.abc import Iterator
from typing import Any

__all__ = ["Sources"]


class Sources:
    """Files that were parsed, each once: a modeling file has many functions, and thousands of lines.

    >>> import textwrap
    >>> Sources().definition(textwrap.dedent).name
    'dedent'
    """

    def __init__(self) -> None:
        self._files: dict[str, _File | None] = {}

    def definition(self, function: types.FunctionType) -> ast.FunctionDef | None:
        """The function in its parsed file; None where there is no source, or it is not what runs."""
        own, file = function.__code__, self._file(function)
        place = own.co_name, own.co_firstlineno
        if file is None or len(file.definitions.get(place, ())) != 1 or len(file.codes.get(place, ())) != 1:
            return None
        # A file may have changed since it was loaded.
        return file.definitions[place][0] if _parts(file.codes[place][0]) == _parts(own) else None

    def recompiled(self, function: types.FunctionType, body: list[ast.stmt]) -> types.CodeType:
        """The code of a function that has a definition, with another body."""
        definition, file, own = self.definition(function), self._file(function), function.__code__
        if definition is None or file is None:
            raise LookupError(f"{function.__name__} has no source")
        before, definition.body = definition.body, body
        try:
            ast.fix_missing_locations(definition)
            made = compile(file.tree, own.co_filename, "exec", dont_inherit=True)
        finally:
            definition.body = before
        return next(code for code in _codes(made) if _place(code) == _place(own))

    def _file(self, function: types.FunctionType) -> "_File | None":
        name = function.__code__.co_filename
        if name not in self._files:
            try:
                self._files[name] = _File(name, "".join(linecache.getlines(name, function.__globals__)))
            except (SyntaxError, ValueError):
                self._files[name] = None
        return self._files[name]


# A function by its name and its first line, which is that of its first decorator.
_Place = tuple[str, int]


class _File:
    """A file that was parsed and compiled, with all of its functions."""

    def __init__(self, name: str, text: str) -> None:
        # The whole file: how a call is compiled depends on what the file imports.
        self.tree = ast.parse(text)
        self.definitions: dict[_Place, list[ast.FunctionDef]] = {}
        for node in _definitions(self.tree):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            self.definitions.setdefault((node.name, first), []).append(node)
        self.codes: dict[_Place, list[types.CodeType]] = {}
        for code in _codes(compile(self.tree, name, "exec", dont_inherit=True)):
            self.codes.setdefault(_place(code), []).append(code)


def _definitions(node: ast.AST) -> Iterator[ast.FunctionDef]:
    """Every function inside, found among statements."""
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
    """What makes two pieces of code one: all but where they stand."""
    return [code.co_code, code.co_names, code.co_varnames, code.co_freevars, _constants(code)]


def _constants(code: types.CodeType) -> list[Any]:
    """What stands in code besides its names, with the types that make 1 and 1.0 differ; of inner functions theirs."""
    return [
        _constants(value) if isinstance(value, types.CodeType) else (type(value), value) for value in code.co_consts
    ]
