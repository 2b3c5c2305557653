"""Rules for Triton kernels that its interpreter, which runs them as Python, does not check."""

import ast

from architecture.sources import SOURCES, parsed, shown


def is_kernel(node: ast.AST) -> bool:
    if not isinstance(node, ast.FunctionDef):
        return False
    decorators = (x.func if isinstance(x, ast.Call) else x for x in node.decorator_list)
    return any(ast.unparse(x) == "triton.jit" for x in decorators)


def throwaways(kernel: ast.AST) -> list[int]:
    """The lines of a kernel that assign `_`."""
    stored = (x for x in ast.walk(kernel) if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Store))
    return [x.lineno for x in stored if x.id == "_"]


def test_no_kernel_assigns_an_underscore():
    # It is a variable like any other there: a loop that assigns it with another shape does not compile.
    kernels = [(path, node) for path in SOURCES for node in ast.walk(parsed(path)) if is_kernel(node)]
    assert {"read_values", "load_rotated"} <= {getattr(node, "name", "") for _, node in kernels}
    assert [f"{shown(path)}:{line}" for path, node in kernels for line in throwaways(node)] == []


def test_an_underscore_is_found():
    kernel = ast.parse(
        "@triton.jit(do_not_specialize=['x'])\ndef kernel(x):\n    for i in range(3):\n        a, _ = both(x)"
    ).body[0]
    assert is_kernel(kernel)
    assert throwaways(kernel) == [4]
