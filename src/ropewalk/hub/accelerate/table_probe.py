"""Checks that both features of a pair have the same angle in the tables of cos and sin that a module computes.

The fused rotation reads one angle per pair, which is only correct if the table has the same angle for both. The module
is called for positions on one axis and on several, small and large. Its source is also analyzed: the tables must be
duplicated at the end, so that no position, length or mode leads to different angles.
"""

import ast
import copy
import inspect
import types
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from ropewalk.hub.accelerate.rotation_probe import Table, parameters_of
from ropewalk.hub.accelerate.source import Sources
from ropewalk.kernels.torch_internals import own_tensors

__all__ = ["table_widths", "why_not_doubled"]

# Operations allowed after the duplication. Each changes every element separately.
_ELEMENTWISE = frozenset(
    ["bfloat16", "clone", "contiguous", "cos", "double", "float", "half", "sin", "to", "type", "type_as"]
)
# Packages whose decorators are accepted: torch.no_grad, and those that update frequencies before the call.
_KNOWN_PACKAGES = ("torch", "transformers")


def table_widths(module: nn.Module, table: Table) -> frozenset[int] | str:
    """Return the widths of the cos and sin of a module, if both features of each pair have the same angle.

    A copy of the module is called, so that its state does not change.

    Args:
        module: A module that computes cos and sin from positions.
        table: Where the two angles of a pair are stored.

    Returns:
        The widths, or the reason why the tables are not supported.

    >>> from transformers import LlamaConfig
    >>> from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
    >>> small = LlamaRotaryEmbedding(LlamaConfig(hidden_size=64, num_attention_heads=4))
    >>> table_widths(small, "halves"), table_widths(small, "neighbours")
    (frozenset({16}), 'LlamaRotaryEmbedding has different angles for the two features of a pair')
    """
    name, widths = type(module).__name__, set()
    for cos, sin in _computed_tables(module):
        for values in (cos, sin):
            pairs = values.shape[-1] // 2
            first, second = (
                (values[..., :pairs], values[..., pairs:])
                if table == "halves"
                else (values[..., ::2], values[..., 1::2])
            )
            # torch computes the tail of a row by another function than its vectors: the same angle may differ by 2 ulp.
            rounding = 4 * torch.finfo(values.dtype).eps
            if first.shape != second.shape or not torch.allclose(first, second, rtol=rounding, atol=rounding**2):
                return f"{name} has different angles for the two features of a pair"
        widths.add(cos.shape[-1])
    return frozenset(widths) if widths else f"the cos and sin of {name} could not be computed"


def _computed_tables(module: nn.Module) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the cos and sin [1, seq, width] of a module for positions on one axis, and on 2, 3 and 4 different axes."""
    names = parameters_of(module.forward)
    if len(names) < 2 or any(buffer.is_meta for buffer in module.buffers()):
        return
    config = getattr(module, "config", None)
    kinds = sorted(set(getattr(config, "layer_types", None) or [])) if "layer_type" in names else []
    with torch.inference_mode(False), torch.no_grad(), torch.autocast("cpu", enabled=False):
        copied = copy.deepcopy(module).cpu()
        # Axes that differ after the start, as for an image within text.
        numbers = torch.tensor([[0, 1, 2, 5, 9], [0, 3, 1, 4, 8], [0, 2, 7, 6, 3], [0, 4, 3, 1, 6]], device="cpu")
        trained = getattr(config, "max_position_embeddings", None)
        # One token at a large position, many tokens, and tokens beyond the trained length.
        far = (2 * trained if isinstance(trained, int) else 2**17) + torch.arange(3, device="cpu")[None]
        rows = (
            numbers[:1],
            *(numbers[:axes, None] for axes in (2, 3, 4)),
            far[:, :1],
            torch.arange(40, device="cpu")[None],
            far,
        )
        for positions in rows:
            for kind in kinds or [None]:
                kwargs = {} if kind is None else {"layer_type": kind}
                seq = positions.shape[-1]
                try:
                    result = copied(torch.zeros(1, seq, 4, device="cpu"), positions, **kwargs)
                except Exception:
                    # The module does not support this number of axes or this layer type.
                    continue
                floats = isinstance(result, tuple) and [isinstance(x, Tensor) and x.is_floating_point() for x in result]
                if floats == [True, True] and result[0].shape == result[1].shape and result[0].shape[:2] == (1, seq):
                    yield result


def why_not_doubled(module: nn.Module, table: Table, sources: Sources) -> str | None:
    """Return why the two features of a pair may have different angles in a module's tables, or None if they cannot.

    Each table must be cat((x, x), dim=-1), or repeat_interleave(x, 2, dim=-1) for "neighbours", of any x. After that
    only products with scalars and elementwise functions are allowed.

    Args:
        module: A module that computes cos and sin.
        table: Where the two angles of a pair are stored.
        sources: Parsed source files.

    Returns:
        The reason, or None.

    >>> from transformers import LlamaConfig
    >>> from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
    >>> small = LlamaRotaryEmbedding(LlamaConfig(hidden_size=64, num_attention_heads=4))
    >>> why_not_doubled(small, "halves", Sources())
    >>> why_not_doubled(small, "neighbours", Sources())
    'the code of LlamaRotaryEmbedding does not guarantee the same angle for both features of a pair'
    """
    forward = inspect.getattr_static(type(module), "forward", None)
    # Packages that replace forward in an instance store the original method, and call it.
    stored = [value for value in vars(module).values() if getattr(value, "__func__", None) is forward]
    is_called = type(module).__call__ is nn.Module.__call__ and ("forward" not in vars(module) or stored)
    if is_called and _Tables(module, table, sources).returned(forward) == [True, True]:
        return None
    return f"the code of {type(module).__name__} does not guarantee the same angle for both features of a pair"


class _Tables:
    """Tracks which names in the code of a module are duplicated tables, and which are scalars."""

    def __init__(self, module: nn.Module, table: Table, sources: Sources) -> None:
        self.module, self.table, self.sources = module, table, sources
        self.depth = 0
        # Without properties and submodules: a tensor there may differ within a pair, now or later.
        attributes = {**vars(module), **own_tensors(module)}
        self.numbers = {name for name, value in attributes.items() if _is_one_number(value)}
        self.others = {*attributes, *dir(type(module))} - self.numbers

    def returned(self, function: object) -> list[bool]:
        """Return, per item of the result of a function, whether every return statement returns a duplicated table."""
        while isinstance(function, types.FunctionType) and "__wrapped__" in vars(function):
            # __globals__ and not __module__: a wrapper has the __module__ of the function that it wraps.
            if not _is_known(function.__globals__.get("__name__")):
                return []
            function = vars(function)["__wrapped__"]
        definition = self.sources.definition(function) if isinstance(function, types.FunctionType) else None
        if (
            definition is None
            or self.depth > 3
            or any(isinstance(node, ast.NamedExpr) for node in ast.walk(definition))
        ):
            return []
        self.depth += 1
        try:
            results = self._block(definition.body, _Names(definition.args.args[0].arg))
        finally:
            self.depth -= 1
        same_length = len({len(result) for result in results}) == 1
        return [all(items) for items in zip(*results, strict=True)] if same_length else []

    def _block(self, statements: list[ast.stmt], names: "_Names") -> list[list[bool]]:
        """Return, per return statement, which items are duplicated tables. Update `names`."""
        results: list[list[bool]] = []
        for statement in statements:
            if isinstance(statement, ast.Assign | ast.Return) and self._writes(statement, names):
                names.doubled = frozenset()
            match statement:
                case ast.Return(value=ast.Tuple(elts=items)):
                    results.append([self._doubled(item, names) for item in items])
                case ast.Return(value=ast.expr() as value):
                    results.append([self._doubled(value, names)])
                case ast.Return():
                    results.append([False])
                case ast.Assign(targets=[ast.Name(id=name)], value=value):
                    names.set(name, self._doubled(value, names), self._number(value, names))
                case ast.Assign(targets=[ast.Tuple(elts=targets)], value=value) if all(map(_name_of, targets)):
                    items = value.elts if isinstance(value, ast.Tuple) else [None] * len(targets)
                    number = self._number(value, names)
                    flags = [(item is not None and self._doubled(item, names), number) for item in items]
                    for target, pair in zip(targets, flags, strict=False):
                        names.set(_name_of(target), *pair)
                case ast.With(body=body):
                    results += self._block(body, names)
                case ast.If(body=body, orelse=otherwise):
                    branch = names.copy()
                    results += self._block(body, branch) + self._block(otherwise, names)
                    names.join(branch)
                case ast.Expr(value=ast.Constant()):
                    pass
                case _:
                    # Loops, in-place writes and calls without a result: they may change a table.
                    names.doubled = frozenset()
                    for node in ast.walk(statement):
                        if isinstance(node, ast.Name):
                            names.set(node.id, False, False)
                        elif isinstance(node, ast.Return):
                            results.append([])
        return results

    def _doubled(self, node: ast.expr, names: "_Names") -> bool:
        match node:
            case ast.Name(id=name):
                return name in names.doubled
            case ast.BinOp(left=left, op=ast.Mult(), right=right):
                return any(
                    self._doubled(one, names) and self._number(other, names)
                    for one, other in ((left, right), (right, left))
                )
            case ast.Call(func=ast.Attribute(value=ast.Name(id="torch"), attr=name), args=args):
                return self._doubles(name, args, node.keywords) or (
                    name in ("cos", "sin") and len(args) == 1 and self._doubled(args[0], names)
                )
            case ast.Call(func=ast.Attribute(value=ast.Name(id=owner), attr=name)) if owner == names.owner:
                return self.returned(inspect.getattr_static(type(self.module), name, None)) == [True]
            case ast.Call(func=ast.Attribute(value=value, attr=name), args=args):
                return self._doubles(name, [value, *args], node.keywords) or (
                    name in _ELEMENTWISE and self._doubled(value, names)
                )
        return False

    def _writes(self, statement: ast.stmt, names: "_Names") -> bool:
        """Return whether a statement contains a call that may change a table in place."""
        for node in ast.walk(statement):
            if not isinstance(node, ast.Call):
                continue
            match node.func:
                case ast.Name(id="getattr"):
                    continue
                case ast.Attribute(value=value, attr=name) if not name.endswith("_"):
                    of_owner = isinstance(value, ast.Name) and value.id == names.owner
                    tables = {one.id for one in ast.walk(node) if isinstance(one, ast.Name)} & names.doubled
                    if not (of_owner and tables) and all(word.arg not in (None, "out") for word in node.keywords):
                        continue
            return True
        return False

    def _doubles(self, name: str, args: list[ast.expr], words: list[ast.keyword]) -> bool:
        """Return whether this operation duplicates its input as a table of pairs."""
        dims = [word.value for word in words if word.arg == "dim"]
        match (self.table, name, args):
            case ("halves", "cat", [ast.Tuple(elts=[one, two]) | ast.List(elts=[one, two]), *rest]):
                return isinstance(one, ast.Name) and ast.dump(one) == ast.dump(two) and _is_last([*rest, *dims])
            case ("neighbours", "repeat_interleave", [_, ast.Constant(value=2), *rest]):
                return _is_last([*rest, *dims])
        return False

    def _number(self, node: ast.expr, names: "_Names") -> bool:
        """Return whether this is a scalar, the same for all features: a constant, or an attribute of the module."""
        match node:
            case ast.Constant():
                return True
            case ast.Name(id=name):
                return name in names.numbers
            case ast.Attribute(value=ast.Name(id=owner), attr=name) if owner == names.owner:
                return name in self.numbers
            case ast.Attribute() | ast.Subscript():
                return self._in_config(node, names)
            case ast.IfExp(body=one, orelse=two):
                return self._number(one, names) and self._number(two, names)
            case ast.Call(func=ast.Name(id="getattr"), args=[ast.Name(id=owner), called]):
                # Part of the name may depend on the call, as in f"{layer_type}_attention_scaling".
                parts = [node.value for node in ast.walk(called) if isinstance(node, ast.Constant)]
                fit = [name for name in (*self.numbers, *self.others) if all(str(part) in name for part in parts)]
                return owner == names.owner and bool(fit) and self.numbers.issuperset(fit)
            case ast.Call(func=ast.Attribute(value=ast.Name(id=owner), attr=name), args=[arg], keywords=[]):
                # The functions of a config in transformers return frequencies and a scalar factor.
                module = getattr(getattr(self.module, name, None), "__module__", None) or ""
                return owner == names.owner and module.startswith("transformers.") and self._in_config(arg, names)
        return False

    def _in_config(self, node: ast.expr, names: "_Names") -> bool:
        """Return whether this is the module's config or a value in it: strings and numbers, as in a file."""
        match node:
            case ast.Attribute(value=ast.Name(id=owner), attr=name) if owner == names.owner:
                return _is_config(vars(self.module).get(name))
            case ast.Attribute(value=value) | ast.Subscript(value=value, slice=ast.Constant()):
                return self._in_config(value, names)
        return False


class _Names:
    """The names of duplicated tables and of scalars. `owner` is the name of the module itself, usually self."""

    def __init__(
        self, owner: str, doubled: frozenset[str] = frozenset(), numbers: frozenset[str] = frozenset()
    ) -> None:
        self.owner, self.doubled, self.numbers = owner, doubled, numbers

    def set(self, name: str, doubled: bool, number: bool) -> None:
        self.doubled = self.doubled | {name} if doubled else self.doubled - {name}
        self.numbers = self.numbers | {name} if number else self.numbers - {name}

    def copy(self) -> "_Names":
        return _Names(self.owner, self.doubled, self.numbers)

    def join(self, other: "_Names") -> None:
        """Keep what is true after both of two branches."""
        self.doubled, self.numbers = self.doubled & other.doubled, self.numbers & other.numbers


def _is_one_number(value: object) -> bool:
    return value.numel() == 1 if isinstance(value, Tensor) else isinstance(value, int | float)


def _is_config(value: object) -> bool:
    """Return whether this is a config of transformers that contains no tensor."""
    bases = [base for base in type(value).__mro__ if _is_known(base.__module__)]
    if not any(base.__name__ in ("PreTrainedConfig", "PretrainedConfig") for base in bases):
        return False
    values = list(vars(value).values())
    values += [item for inner in values if isinstance(inner, dict) for item in inner.values()]
    return not any(isinstance(item, Tensor) for item in values)


def _is_known(module: str | None) -> bool:
    return module is not None and module.partition(".")[0] in _KNOWN_PACKAGES


def _is_last(nodes: list[ast.expr]) -> bool:
    """Return whether there is exactly one dimension argument, and it is -1."""
    return [ast.unparse(node) for node in nodes] == ["-1"]


def _name_of(target: ast.expr) -> str:
    """Return the name of an assignment target, or "" if it is not a name."""
    return target.id if isinstance(target, ast.Name) else ""
