"""Definitions of ropewalk's source, with all that they need, as one text that imports nothing of ropewalk."""

import ast
import graphlib
import importlib.util
from pathlib import Path

from ropewalk.errors import RopewalkError

__all__ = ["Definitions"]

_PACKAGE = "ropewalk"
# What a definition of another module becomes. `constructors` protects torch's functions from libraries that replace
# them while a model is built, and needs NumPy for the constants of a model; a call of a kernel is later.
_INSTEAD = {
    ("ropewalk.kernels.constructors", "empty_like"): "empty_like = torch.empty_like",
    ("ropewalk.kernels.constructors", "new_empty_strided"): "new_empty_strided = torch.Tensor.new_empty_strided",
}


class Definitions:
    """Functions, classes and constants of the package, collected by name.

    >>> part = Definitions()
    >>> part.add("ropewalk.kernels.triton_launch", "heads_are_adjacent")
    >>> sorted(part.names)
    ['Rows', 'heads_are_adjacent']
    """

    def __init__(self) -> None:
        self.names: dict[str, str] = {}
        self._modules: dict[str, _Module] = {}
        # The modules that the definitions of each module need.
        self._needed: dict[str, set[str]] = {}
        self._imports: set[str] = {"import torch"}
        self._replaced: set[str] = set()

    def add(self, module: str, name: str) -> None:
        """Add a definition of a module, and everything that it refers to.

        Args:
            module: Name of the module.
            name: Name of the function, class or constant.

        Raises:
            RopewalkError: If the module has no such name, or if two modules define it differently.
        """
        if (module, name) in _INSTEAD:
            self._replaced.add(_INSTEAD[module, name])
            return
        if self.names.get(name) == module:
            return
        source = self._modules.setdefault(module, _Module(module))
        if name in source.imports:
            origin, statement = source.imports[name]
            if origin is None:
                self._imports.add(statement)
            else:
                self.add(origin, name)
            return
        if name in self.names or name not in source.nodes:
            raise RopewalkError(
                asked=f"a kernel layer with {name} of {module}",
                expected="a definition whose name no other module has",
                got=f"{self.names.get(name, 'no definition')}",
                do="rename it in the source",
            )
        self.names[name] = module
        others = self._needed.setdefault(module, set())
        for needed in sorted(source.needs(name)):
            self.add(module, needed)
            others |= {self.names[needed]} - {module} if needed in self.names else set()

    def text(self) -> str:
        """Return the source text: imports, then definitions, each module after those that it needs."""
        parts = [*sorted(self._imports), *sorted(self._replaced)]
        written: set[int] = set()
        for module in graphlib.TopologicalSorter(self._needed).static_order():
            source = self._modules[module]
            chosen = {id(source.nodes[name]): source.nodes[name] for name, home in self.names.items() if home == module}
            for node in sorted(chosen.values(), key=lambda node: node.lineno):
                if id(node) not in written:
                    written.add(id(node))
                    parts.append(("\n\n" if isinstance(node, ast.FunctionDef | ast.ClassDef) else "") + source.of(node))
        return "\n".join(parts) + "\n"


class _Module:
    """The top-level names of a source file."""

    def __init__(self, name: str) -> None:
        spec = importlib.util.find_spec(name)
        path = None if spec is None else spec.origin
        if path is None:
            raise RopewalkError(
                asked=f"the source of {name}",
                expected="an installed package with its source files",
                got="no file",
                do="install ropewalk from a wheel or a checkout",
            )
        text = Path(path).read_text(encoding="utf-8")
        self._lines = text.splitlines()
        self.imports: dict[str, tuple[str | None, str]] = {}
        self.nodes: dict[str, ast.stmt] = {}
        for node in ast.parse(text).body:
            self._read(node)

    def _read(self, node: ast.stmt) -> None:
        if isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                name = alias.asname or alias.name
                if isinstance(node, ast.ImportFrom) and f"{node.module}".split(".")[0] == _PACKAGE:
                    self.imports[name] = f"{node.module}", ""
                else:
                    alone: ast.stmt = (
                        ast.Import([alias]) if isinstance(node, ast.Import) else ast.ImportFrom(node.module, [alias], 0)
                    )
                    self.imports[name.split(".")[0]] = None, ast.unparse(alone)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            self.nodes[node.name] = node
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            self.nodes |= {target.id: node for target in targets if isinstance(target, ast.Name)}

    def needs(self, name: str) -> set[str]:
        """Return the top-level names that a definition refers to."""
        known = self.nodes.keys() | self.imports.keys()
        inside = [node for node in ast.walk(self.nodes[name]) if isinstance(node, ast.Name)]
        return {node.id for node in inside if node.id in known} - {name}

    def of(self, node: ast.stmt) -> str:
        """Return the text of a definition, without the examples in its docstrings."""
        decorators = node.decorator_list if isinstance(node, ast.FunctionDef | ast.ClassDef) else []
        first = min([node.lineno, *(decorator.lineno for decorator in decorators)]) - 1
        dropped: set[int] = set()
        for inner in ast.walk(node):
            body = getattr(inner, "body", None)
            head = body[0] if isinstance(body, list) and body else None
            if not isinstance(head, ast.Expr) or not isinstance(head.value, ast.Constant):
                continue
            examples = [at for at in range(head.lineno, head.end_lineno or 0) if ">>>" in self._lines[at]]
            if examples:
                # The blank line before the first one, up to the line with the closing quotes.
                dropped |= set(range(examples[0] - 1, (head.end_lineno or 0) - 1))
        lines = [self._lines[at] for at in range(first, node.end_lineno or 0) if at not in dropped]
        return "\n".join(lines)
