"""The imports of a package, read from its source: every module, what it imports, and circles among them.

Imports under TYPE_CHECKING and inside functions count. The public face, the `__init__.py` at the top, is left out: it
names every package, for type checkers alone. Used by tests and by benchmarks/structure.py, on any checkout.
"""

import ast
from pathlib import Path

__all__ = ["circles", "import_graph", "module_name"]


def module_name(path: Path, package: Path) -> str:
    """The dotted name of a file: ropewalk.spec for ropewalk/spec/__init__.py."""
    parts = [*path.relative_to(package.parent).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def import_graph(package: Path) -> dict[str, set[str]]:
    """Per module of the package, the modules of the package that it imports.

    The packages above a module that is imported are not counted: Python runs their `__init__` whoever imports it.
    """
    files = {module_name(path, package): path for path in sorted(package.rglob("*.py"))}
    files.pop(package.name, None)
    graph: dict[str, set[str]] = {}
    for module, path in files.items():
        nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        graph[module] = {name for node in nodes for name in _imported(node, set(files))} - {module}
    return graph


def _imported(node: ast.AST, modules: set[str]) -> set[str]:
    """The modules that a statement imports. `from a.b import c` is a.b.c where that is a module, else a.b."""
    if isinstance(node, ast.Import):
        return {alias.name for alias in node.names} & modules
    if isinstance(node, ast.ImportFrom) and node.module is not None:
        members = {f"{node.module}.{alias.name}" for alias in node.names}
        return members & modules | ({node.module} & modules if members - modules else set())
    if isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
        # importlib.import_module("a.b"), with a name that is written out.
        function = node.func
        name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
        return {str(node.args[0].value)} & modules if name in ("import_module", "__import__") else set()
    return set()


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """The sets of modules that import each other, directly or not: strongly connected components of two or more."""
    order: list[str] = []
    seen: set[str] = set()

    def finish(start: str, edges: dict[str, set[str]], into: list[str]) -> None:
        """Depth first from `start`; modules are added to `into` as they are left."""
        stack = [(start, iter(sorted(edges[start])))]
        seen.add(start)
        while stack:
            module, rest = stack[-1]
            following = next((name for name in rest if name not in seen), None)
            if following is None:
                into.append(module)
                stack.pop()
            else:
                seen.add(following)
                stack.append((following, iter(sorted(edges[following]))))

    for module in sorted(graph):
        if module not in seen:
            finish(module, graph, order)
    reverse: dict[str, set[str]] = {module: set() for module in graph}
    for module, imported in graph.items():
        for name in imported:
            reverse[name].add(module)
    seen.clear()
    components: list[list[str]] = []
    for module in reversed(order):
        if module not in seen:
            component: list[str] = []
            finish(module, reverse, component)
            components.append(sorted(component))
    return sorted(component for component in components if len(component) > 1)
