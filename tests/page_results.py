"""The Python blocks of a page as one program, and which of its results no assert reads.

A result is what a statement binds or changes. It is checked if an assert reads it, or if a later statement computes a
checked result from it. So a page shows no result that nothing compares.

- A check is an assert, a call of a function whose name starts with `assert`, or a call of a function of the page that
  contains a check. A loop, an `if` or a `try` that contains a check is a check.
- An assignment binds names. Each must be checked; a name that starts with `_` is not a result.
- A call that is a statement changes what it reads. At least one of these names must be checked. The name of a file in a
  string is one of them: what one statement writes there, another one reads.
- Imports, definitions of functions and classes, and assignments of literals compute nothing.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

BLOCK = re.compile(r"^( *)```python\n(.*?)^\1```", re.DOTALL | re.MULTILINE)
FILE_NAME = re.compile(r"[\w/-]+\.\w+")
DEFINITIONS = ast.FunctionDef | ast.ClassDef | ast.Import | ast.ImportFrom


def program(page: Path) -> str:
    """The blocks of a page on the lines that they have there, so that a traceback names these lines."""
    text = page.read_text(encoding="utf-8")
    lines = [""] * (text.count("\n") + 1)
    for match in BLOCK.finditer(text):
        first = text.count("\n", 0, match.start(2))
        for number, line in enumerate(match[2].splitlines(), first):
            lines[number] = line.removeprefix(match[1])
    return "\n".join(lines) + "\n"


def unchecked_results(source: str) -> list[str]:
    """One line per statement whose result no assert reads: its line number and the names."""
    statements = list(_flat(ast.parse(source).body))
    checks = _checking_functions(statements)
    # Backwards: the names that a check further down reads, directly or through what is computed from them.
    checked: set[str] = set()
    unchecked: list[str] = []
    for statement in reversed(statements):
        bound, read = _bound(statement), _read(statement)
        results = bound or read
        if not isinstance(statement, DEFINITIONS) and not _has_check(statement, checks):
            lost = {name for name in results - checked if not name.startswith("_")}
            if _computes(statement) and lost and (bound or lost == results):
                unchecked.append(f"line {statement.lineno}: {', '.join(sorted(lost))}")
            if not results & checked:
                continue
        elif isinstance(statement, DEFINITIONS) and not bound & checked:
            continue
        checked = (checked - _replaced(statement)) | read
    return unchecked[::-1]


def _flat(statements: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements, with the body of a `with` after an assignment per target."""
    for statement in statements:
        if not isinstance(statement, ast.With):
            yield statement
            continue
        for item in statement.items:
            if item.optional_vars is not None:
                yield ast.copy_location(ast.Assign([item.optional_vars], item.context_expr), statement)
        yield from _flat(statement.body)


def _checking_functions(statements: list[ast.stmt]) -> set[str]:
    """The functions of a page that contain a check. One that calls another is defined after it."""
    names: set[str] = set()
    for statement in statements:
        if isinstance(statement, ast.FunctionDef) and _has_check(statement, names):
            names.add(statement.name)
    return names


def _has_check(statement: ast.stmt, checks: set[str]) -> bool:
    for node in ast.walk(statement):
        if isinstance(node, ast.Assert):
            return True
        if isinstance(node, ast.Call):
            function = node.func
            name = function.attr if isinstance(function, ast.Attribute) else _root(function)
            if name.startswith("assert") or name in checks:
                return True
    return False


def _computes(statement: ast.stmt) -> bool:
    computing = ast.Call | ast.BinOp | ast.Compare | ast.Subscript | ast.Attribute
    return any(isinstance(node, computing) for node in ast.walk(statement))


def _bound(statement: ast.stmt) -> set[str]:
    """The names that a statement binds, or whose elements or attributes it assigns, without loop variables."""
    if isinstance(statement, ast.FunctionDef | ast.ClassDef):
        return {statement.name}
    if isinstance(statement, ast.Import | ast.ImportFrom):
        return {(alias.asname or alias.name).partition(".")[0] for alias in statement.names}
    names = {_root(node) for node in ast.walk(statement) if _is_stored(node)}
    loops = [node.target for node in ast.walk(statement) if isinstance(node, ast.For | ast.comprehension)]
    return names - {_root(node) for loop in loops for node in ast.walk(loop) if _is_stored(node)} - {""}


def _is_stored(node: ast.AST) -> bool:
    return isinstance(node, ast.Name | ast.Attribute | ast.Subscript) and isinstance(node.ctx, ast.Store)


def _replaced(statement: ast.stmt) -> set[str]:
    """The names whose earlier values a statement replaces."""
    if not isinstance(statement, ast.Assign):
        return set()
    targets = [node for target in statement.targets for node in ast.walk(target)]
    return {node.id for node in targets if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}


def _read(statement: ast.stmt) -> set[str]:
    names = {node.id for node in ast.walk(statement) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    texts = [node.value for node in ast.walk(statement) if isinstance(node, ast.Constant)]
    names |= {text for text in texts if isinstance(text, str) and FILE_NAME.fullmatch(text)}
    return names | ({_root(statement.target)} if isinstance(statement, ast.AugAssign) else set())


def _root(node: ast.AST) -> str:
    """The name before the attributes and indices of an expression; "" for any other expression."""
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Starred):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""
