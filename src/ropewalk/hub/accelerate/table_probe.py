"""The tables of cos and sin that reach a rotation: whether both features of a pair have one angle in them.

A function may read a wide table as if they had, and only the module that makes the table can say that they do. It is
called, for positions on one axis and on several, near and far; and its code is read, which has to end in the tables
being doubled: no position, length or mode leads to others then.
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

# What may come after the doubling: each changes a number alone, wherever it stands.
_ELEMENTWISE = frozenset(
    ["bfloat16", "clone", "contiguous", "cos", "double", "float", "half", "sin", "to", "type", "type_as"]
)
# Whose decorators are known: torch.no_grad, and those that update frequencies before the tables are made.
_KNOWN_PACKAGES = ("torch", "transformers")


def table_widths(module: nn.Module, table: Table) -> frozenset[int] | str:
    """How wide the cos and sin are that the module makes, if both features of each pair have one angle in them.

    It is asked for positions on one axis and on several, in a copy, so that nothing it remembers changes.

    >>> from transformers import LlamaConfig
    >>> from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
    >>> small = LlamaRotaryEmbedding(LlamaConfig(hidden_size=64, num_attention_heads=4))
    >>> table_widths(small, "halves"), table_widths(small, "neighbours")
    (frozenset({16}), 'LlamaRotaryEmbedding gives the features of a pair different angles')
    """
    name, widths = type(module).__name__, set()
    for cos, sin in _made(module):
        for made in (cos, sin):
            pairs = made.shape[-1] // 2
            first, second = (
                (made[..., :pairs], made[..., pairs:]) if table == "halves" else (made[..., ::2], made[..., 1::2])
            )
            if first.shape != second.shape or not torch.equal(first, second):
                return f"{name} gives the features of a pair different angles"
        widths.add(cos.shape[-1])
    return frozenset(widths) if widths else f"the cos and sin of {name} could not be looked at"


def _made(module: nn.Module) -> Iterator[tuple[Tensor, Tensor]]:
    """The cos and sin, [1, seq, width], that the module makes of positions: one axis, then 2, 3 and 4 that differ."""
    names = parameters_of(module.forward)
    if len(names) < 2 or any(buffer.is_meta for buffer in module.buffers()):
        return
    config = getattr(module, "config", None)
    kinds = sorted(set(getattr(config, "layer_types", None) or [])) if "layer_type" in names else []
    with torch.inference_mode(False), torch.no_grad(), torch.autocast("cpu", enabled=False):
        asked = copy.deepcopy(module).cpu()
        # Axes that differ everywhere but at the start, as an image among words has them.
        numbers = torch.tensor([[0, 1, 2, 5, 9], [0, 3, 1, 4, 8], [0, 2, 7, 6, 3], [0, 4, 3, 1, 6]], device="cpu")
        trained = getattr(config, "max_position_embeddings", None)
        # One step far from the start, many tokens, and tokens past the length that the model was trained for.
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
                more = {} if kind is None else {"layer_type": kind}
                seq = positions.shape[-1]
                try:
                    result = asked(torch.zeros(1, seq, 4, device="cpu"), positions, **more)
                except Exception:
                    # It knows no such number of axes, or no such kind of layer.
                    continue
                tables = isinstance(result, tuple) and len(result) == 2 and all(isinstance(x, Tensor) for x in result)
                if tables and result[0].shape == result[1].shape and tuple(result[0].shape[:2]) == (1, seq):
                    yield result


def why_not_doubled(module: nn.Module, table: Table, sources: Sources) -> str | None:
    """Why the two features of a pair may have different angles in some of the module's tables; None if they cannot.

    Each table has to be cat((x, x), dim=-1), or repeat_interleave(x, 2, dim=-1) for a table of neighbours, of any x.
    After that it may be multiplied by single numbers and be put through functions of one number.

    >>> from transformers import LlamaConfig
    >>> from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
    >>> small = LlamaRotaryEmbedding(LlamaConfig(hidden_size=64, num_attention_heads=4))
    >>> why_not_doubled(small, "halves", Sources())
    >>> why_not_doubled(small, "neighbours", Sources())
    'the code of LlamaRotaryEmbedding does not show that the features of a pair have one angle'
    """
    forward = inspect.getattr_static(type(module), "forward", None)
    # Packages that replace forward in an instance keep the method, and call it.
    kept = [value for value in vars(module).values() if getattr(value, "__func__", None) is forward]
    called = type(module).__call__ is nn.Module.__call__ and ("forward" not in vars(module) or kept)
    if called and _Tables(module, table, sources).returned(forward) == [True, True]:
        return None
    return f"the code of {type(module).__name__} does not show that the features of a pair have one angle"


class _Tables:
    """Follows the tables through the code of a module: which names hold one that is doubled, which hold numbers."""

    def __init__(self, module: nn.Module, table: Table, sources: Sources) -> None:
        self.module, self.table, self.sources = module, table, sources
        self.depth = 0
        # Not what a property or an inner module holds: a tensor there may differ within a pair, now or later.
        attributes = {**vars(module), **own_tensors(module)}
        self.numbers = {name for name, value in attributes.items() if _is_one_number(value)}
        self.others = {*attributes, *dir(type(module))} - self.numbers

    def returned(self, function: object) -> list[bool]:
        """Of each item of what a function returns, whether it is doubled by each return."""
        while isinstance(function, types.FunctionType) and "__wrapped__" in vars(function):
            # By where the code of a decorator is: the module that it names is that of what it wraps.
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
        same = len({len(result) for result in results}) == 1
        return [all(items) for items in zip(*results, strict=True)] if same else []

    def _block(self, statements: list[ast.stmt], names: "_Names") -> list[list[bool]]:
        """What the returns in these statements give; `names` are followed."""
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
                    found = [(item is not None and self._doubled(item, names), number) for item in items]
                    for target, one in zip(targets, found, strict=False):
                        names.set(_name_of(target), *one)
                case ast.With(body=body):
                    results += self._block(body, names)
                case ast.If(body=body, orelse=otherwise):
                    branch = names.copy()
                    results += self._block(body, branch) + self._block(otherwise, names)
                    names.join(branch)
                case ast.Expr(value=ast.Constant()):
                    pass
                case _:
                    # Loops, writes into a tensor and calls for their own sake: a table may be one that they change.
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
        """Whether a statement calls what may change a table in place."""
        for node in ast.walk(statement):
            if not isinstance(node, ast.Call):
                continue
            match node.func:
                case ast.Name(id="getattr"):
                    continue
                case ast.Attribute(value=value, attr=name) if not name.endswith("_"):
                    mine = isinstance(value, ast.Name) and value.id == names.owner
                    tables = {one.id for one in ast.walk(node) if isinstance(one, ast.Name)} & names.doubled
                    if not (mine and tables) and all(word.arg not in (None, "out") for word in node.keywords):
                        continue
            return True
        return False

    def _doubles(self, name: str, args: list[ast.expr], words: list[ast.keyword]) -> bool:
        """Whether this operation makes a table of pairs from any tensor."""
        along = [word.value for word in words if word.arg == "dim"]
        match (self.table, name, args):
            case ("halves", "cat", [ast.Tuple(elts=[one, two]) | ast.List(elts=[one, two]), *rest]):
                return isinstance(one, ast.Name) and ast.dump(one) == ast.dump(two) and _is_last([*rest, *along])
            case ("neighbours", "repeat_interleave", [_, ast.Constant(value=2), *rest]):
                return _is_last([*rest, *along])
        return False

    def _number(self, node: ast.expr, names: "_Names") -> bool:
        """Whether this is one number, whichever feature it is for: a constant, or an attribute of the module."""
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
                # Part of the name may come from the call, as f"{layer_type}_attention_scaling" has it.
                parts = [node.value for node in ast.walk(called) if isinstance(node, ast.Constant)]
                fit = [name for name in (*self.numbers, *self.others) if all(str(part) in name for part in parts)]
                return owner == names.owner and bool(fit) and self.numbers.issuperset(fit)
            case ast.Call(func=ast.Attribute(value=ast.Name(id=owner), attr=name), args=[arg], keywords=[]):
                # transformers' functions of a config return frequencies and the one factor of the tables.
                module = getattr(getattr(self.module, name, None), "__module__", None) or ""
                return owner == names.owner and module.startswith("transformers.") and self._in_config(arg, names)
        return False

    def _in_config(self, node: ast.expr, names: "_Names") -> bool:
        """Whether this is the module's config, or what stands in it: words and numbers, as a file has them."""
        match node:
            case ast.Attribute(value=ast.Name(id=owner), attr=name) if owner == names.owner:
                return _is_config(vars(self.module).get(name))
            case ast.Attribute(value=value) | ast.Subscript(value=value, slice=ast.Constant()):
                return self._in_config(value, names)
        return False


class _Names:
    """Names that hold a doubled table, and names that hold numbers; `owner` is the name of the module itself."""

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
        """What holds whichever of two branches was run."""
        self.doubled, self.numbers = self.doubled & other.doubled, self.numbers & other.numbers


def _is_one_number(value: object) -> bool:
    return value.numel() == 1 if isinstance(value, Tensor) else isinstance(value, int | float)


def _is_config(value: object) -> bool:
    """Whether this is a config of transformers, with no tensor in it."""
    bases = [base for base in type(value).__mro__ if _is_known(base.__module__)]
    if not any(base.__name__ in ("PreTrainedConfig", "PretrainedConfig") for base in bases):
        return False
    held = list(vars(value).values())
    held += [item for inner in held if isinstance(inner, dict) for item in inner.values()]
    return not any(isinstance(item, Tensor) for item in held)


def _is_known(module: str | None) -> bool:
    return module is not None and module.partition(".")[0] in _KNOWN_PACKAGES


def _is_last(nodes: list[ast.expr]) -> bool:
    """Whether the one dimension that is named is the last."""
    return [ast.unparse(node) for node in nodes] == ["-1"]


def _name_of(target: ast.expr) -> str:
    """The name of what is written to; that of nothing where it is no name."""
    return target.id if isinstance(target, ast.Name) else ""
