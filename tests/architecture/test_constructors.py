"""Tensors are made by `ropewalk.kernels.constructors`, which no wrapper around torch's names can reach.

Parameters are made by torch's public names: they follow what the user has set up.
"""

import ast
from collections.abc import Iterator

import pytest

from architecture.sources import PACKAGE, SOURCES, parsed, shown

HOME = PACKAGE / "kernels" / "constructors.py"
CHECKED = [
    path
    for path in SOURCES
    if path.relative_to(PACKAGE).parts[0] in ("kernels", "ops", "nn") and path.name != "torch_internals.py"
]
CONSTRUCTORS = {
    *("tensor", "as_tensor", "asarray", "from_numpy", "frombuffer", "scalar_tensor"),
    *("empty", "zeros", "ones", "full", "eye", "arange", "range", "linspace", "logspace"),
    *("rand", "randn", "randint", "randperm", "normal", "empty_strided", "empty_permuted"),
    *("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like"),
}


def made_by_torch(tree: ast.Module) -> Iterator[str]:
    """Every call of a constructor by its public name, except for the numbers of a parameter."""
    for_parameters = {
        id(argument)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "nn.Parameter"
        for argument in node.args
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and id(node) in for_parameters:
            for_parameters.add(id(node.func))
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute) or id(node) in for_parameters:
            continue
        of_torch = isinstance(node.value, ast.Name) and node.value.id == "torch"
        if (of_torch and node.attr in CONSTRUCTORS) or node.attr.startswith("new_"):
            yield f"{ast.unparse(node)}, line {node.lineno}"


def test_tensors_are_made_by_the_constructors_that_nobody_replaces():
    made = {shown(path): list(made_by_torch(parsed(path))) for path in CHECKED if path != HOME}
    assert {path: calls for path, calls in made.items() if calls} == {}


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("torch.zeros(3)", 1),
        ("make = torch.empty", 1),
        ("x.new_zeros(3)", 1),
        ("torch.randn_like(x)", 1),
        ("nn.Parameter(torch.empty(3))", 0),
        ("nn.Parameter(torch.empty(3).uniform_())", 1),
        ("arange(3)", 0),
        ("def f(x: torch.Tensor): ...", 0),
    ],
)
def test_a_constructor_is_found(source, count):
    assert len(list(made_by_torch(ast.parse(source)))) == count
