"""What Dynamo of older versions of torch can trace."""

import ast
from collections.abc import Iterator

from architecture.sources import PACKAGE, SOURCES, parsed

# ops: what is below its functions is not traced.
TRACED = [path for path in SOURCES if path.relative_to(PACKAGE).parts[0] in ("nn", "kernels")]


def properties(tree: ast.Module) -> Iterator[str]:
    """Every property of a NamedTuple."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and any(ast.unparse(base) == "NamedTuple" for base in node.bases):
            for member in ast.walk(node):
                if isinstance(member, ast.FunctionDef) and "property" in map(ast.unparse, member.decorator_list):
                    yield f"{node.name}.{member.name}"


def test_a_named_tuple_has_methods_instead_of_properties():
    # Dynamo of torch 2.10 traces methods of a NamedTuple. A branch on a property it takes for one on a tensor's values.
    assert [name for path in TRACED for name in properties(parsed(path))] == []


def test_a_property_is_found():
    source = "class A(NamedTuple):\n    a: int\n\n    @property\n    def b(self): ...\n\n    def c(self): ...\n"
    assert list(properties(ast.parse(source))) == ["A.b"]
