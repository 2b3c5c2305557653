"""Private APIs of torch are used in one file, and private attributes of RotaryEmbedding in its own folder."""

import ast
import re
from collections.abc import Iterator
from functools import cache

import pytest
import torch

from architecture.sources import PACKAGE, SOURCES, parsed, shown

INTERNALS = PACKAGE / "kernels" / "torch_internals.py"
ROTARY = PACKAGE / "nn" / "rotary"
# Public by their names, and not by torch's word.
EXPERIMENTAL = ("torch.fx.experimental",)
# What a RotaryEmbedding is called elsewhere.
ROPE = re.compile(r"rope|rotary|rotation|embedding", re.IGNORECASE)


def is_private(name: str) -> bool:
    """Whether a name has a leading underscore, and is no __dunder__."""
    return name.startswith("_") and not (name.startswith("__") and name.endswith("__"))


def is_private_torch(dotted: str) -> bool:
    """Whether a dotted name is a private API of torch. Operations of torch.ops belong to who registered them."""
    parts = dotted.split(".")
    if parts[0] != "torch" or parts[1:2] == ["ops"]:
        return False
    return any(map(is_private, parts)) or any(f"{dotted}.".startswith(f"{name}.") for name in EXPERIMENTAL)


def bound_names(tree: ast.Module) -> dict[str, str]:
    """The names that imports of torch bind, and what they are: {"nn": "torch.nn"}."""
    bound: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "torch":
                    bound[alias.asname or "torch"] = alias.name if alias.asname else "torch"
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            bound |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return bound


def dotted_name(node: ast.expr, bound: dict[str, str]) -> str | None:
    """An expression as a dotted name that begins with torch, or None."""
    if isinstance(node, ast.Name):
        return bound.get(node.id)
    if isinstance(node, ast.Attribute):
        base = dotted_name(node.value, bound)
        return None if base is None else f"{base}.{node.attr}"
    return None


def named_by_string(node: ast.Call, bound: dict[str, str]) -> str | None:
    """What import_module("torch._x") and getattr(torch, "_x") name."""
    texts = [arg.value for arg in node.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]
    function = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    if not texts:
        return None
    if function in ("import_module", "__import__", "find_spec"):
        return texts[0]
    if function in ("getattr", "hasattr", "setattr") and len(node.args) > 1:
        base = dotted_name(node.args[0], bound)
        return None if base is None else f"{base}.{texts[0]}"
    return None


# Private attributes that tensors and modules have.
OF_INSTANCES = {
    name
    for kind in (torch.Tensor, torch.nn.Module)
    for name in (*dir(kind), *vars(torch.nn.Module()))
    if is_private(name)
}


def attributes_of_classes(tree: ast.Module) -> set[str]:
    """The methods and attributes that the classes of a module define."""
    names: set[str] = set()
    for kind in (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
        for node in ast.walk(kind):
            if isinstance(node, ast.FunctionDef):
                names.add(node.name)
            elif isinstance(node, ast.Attribute) and is_own(node.value) and isinstance(node.ctx, ast.Store):
                names.add(node.attr)
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                names.add(node.target.id)
    return names


def private_torch(tree: ast.Module) -> Iterator[str]:
    """Every use of a private API of torch in a module."""
    bound, own = bound_names(tree), attributes_of_classes(tree)
    for node in ast.walk(tree):
        names: list[str | None] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute):
            names = [dotted_name(node, bound)]
            # Of a tensor or a module that somebody else made; a subclass may override what its base calls.
            if names == [None] and node.attr in OF_INSTANCES - own and not is_own(node.value):
                yield f"{ast.unparse(node)}, line {node.lineno}"
        elif isinstance(node, ast.Call):
            names = [named_by_string(node, bound)]
        line = getattr(node, "lineno", 0)
        yield from (f"{name}, line {line}" for name in names if name and is_private_torch(name))


def is_own(node: ast.expr) -> bool:
    """Whether an attribute is read from self, cls or super()."""
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id == "super"
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def test_private_apis_of_torch_are_used_in_one_file():
    uses = {shown(path): list(private_torch(parsed(path))) for path in SOURCES if path != INTERNALS}
    assert {path: names for path, names in uses.items() if names} == {}


def test_that_file_uses_them():
    assert list(private_torch(parsed(INTERNALS)))


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ntorch._C._len_torch_dispatch_stack()",
        "import torch\ntorch._is_zerotensor(x)",
        "import torch._dynamo",
        "import torch._guards as guards",
        "from torch import _C",
        "from torch._C._functorch import is_legacy_batchedtensor",
        "from torch.fx.experimental.symbolic_shapes import guard_or_false",
        "import torch.fx.experimental.proxy_tensor as proxies",
        "import torch\ntorch.compiler._is_compiling_flag",
        "from torch import compiler\ncompiler._x()",
        "from torch.autograd import forward_ad\nforward_ad._current_level",
        "import torch\ntorch.cuda._sleep(1)",
        "import torch\ngetattr(torch, '_is_functional_tensor')",
        "import importlib\nimportlib.import_module('torch._inductor')",
        "def f(x):\n    return x._base",
        "def f(model):\n    return model._parameters",
    ],
)
def test_a_private_api_of_torch_is_found(source):
    assert list(private_torch(ast.parse(source)))


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ntorch.compiler.is_compiling()\ntorch.__version__",
        "import torch\ntorch.ops.ropewalk._rotate(x)",
        "class A:\n    def f(self):\n        return self._parameters, super()._apply(1)",
        "from ropewalk.ops import _x\n_x._y",
        "class A:\n    _modules: list\n\n\ndef f(a):\n    return a._modules",
    ],
)
def test_what_is_not_private_to_torch_passes(source):
    assert list(private_torch(ast.parse(source))) == []


@cache
def private_names_of_rotary() -> set[str]:
    """The private methods and attributes that classes in nn/rotary define."""
    names = (attributes_of_classes(parsed(path)) for path in sorted(ROTARY.rglob("*.py")))
    return {name for name in set().union(*names) if is_private(name)}


def private_rope(tree: ast.Module, names: set[str]) -> Iterator[str]:
    """Every private attribute of a rope: any of something called one, or a name of nn/rotary of anything but self."""
    for node in ast.walk(tree):
        base, attribute = None, ""
        if isinstance(node, ast.Attribute):
            base, attribute = node.value, node.attr
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "setattr", "hasattr"):
            texts = [arg.value for arg in node.args[1:2] if isinstance(arg, ast.Constant)]
            base, attribute = (node.args[0], str(texts[0])) if texts else (None, "")
        if base is None or not is_private(attribute):
            continue
        last = base.attr if isinstance(base, ast.Attribute) else getattr(base, "id", "")
        if ROPE.search(last) or (attribute in names and not is_own(base)):
            yield f"{ast.unparse(base)}.{attribute}, line {base.lineno}"


def test_no_other_module_uses_what_is_private_to_a_rope():
    private, others = private_names_of_rotary(), [path for path in SOURCES if ROTARY not in path.parents]
    uses = {shown(path): list(private_rope(parsed(path), private)) for path in others}
    assert {path: names for path, names in uses.items() if names} == {}


def test_a_private_attribute_of_a_rope_is_found():
    names = private_names_of_rotary()
    assert names, "RotaryEmbedding has private names"
    some = sorted(names)[0]
    sources = ["rope._place(q)", "self.rope._x", "rotation._x", f"other.{some}", f"a.b.{some}()", "getattr(rope, '_x')"]
    for source in sources:
        assert list(private_rope(ast.parse(source), names)), source
    for source in ("rope.spec", "rope.__class__", "self._x", f"self.{some}", "other._unknown"):
        assert not list(private_rope(ast.parse(source), names)), source


def test_both_places_are_there():
    assert INTERNALS.is_file()
    assert (ROTARY / "embedding.py").is_file()
