"""Whether code computes one formula, whatever the sizes, dtypes, values and modes of a call: read, not run.

A probe calls a function with a few inputs. It cannot see a branch on a length, a mode or the environment, a clamp of
large values, a cache or a random number. So the source is read as well. Code is straight if it has no branch that a
call decides, and if each operation in it is one of those below, which move, add and multiply numbers. A size that is
cut in half again and again, or a tensor that is doubled again and again, makes a branch on a size. So tensors are cut
along the last dimension, twice in a row and no more, and joined three times; the only arithmetic on sizes is one half.
What is left are comparisons of sizes with each other, within small factors. What straight code computes for random
numbers of a few sizes, in which each is the largest once, it computes for all: without a constraint on the call, and
inside a compiled graph too.
"""

import ast
import inspect
import types
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import nn

from ropewalk.hub.accelerate.source import Sources
from ropewalk.kernels.torch_internals import own_tensors

__all__ = ["why_norm_not_straight", "why_not_straight"]

# Operations that keep numbers as they are or change their place; those of rotations; those of norms. None of them
# depends on a value, on the mode of autograd or on the length. squeeze depends on a size, and is not here.
_MOVES = {
    *("cat", "concat", "concatenate", "stack", "repeat_interleave", "expand", "expand_as"),
    *("flatten", "unflatten", "reshape", "view", "view_as", "unsqueeze"),
    *("movedim", "permute", "swapaxes", "transpose"),
    *("clone", "contiguous", "double", "float", "to", "type", "type_as"),
}
_PIECES = {"chunk", "split", "tensor_split"}
_SCALES = {"add", "mul", "multiply", "sub", "subtract"}
_SUMS = _SCALES | {"addcmul", "neg", "negative"}
_NORMS = {"mean", "pow", "reciprocal", "rsqrt", "sqrt", "square"}
_LINEAR = (ast.Add, ast.Sub, ast.Mult)
# Factors that no dtype overflows by. Large ones would clamp, or round, in float16 alone.
_FACTORS = (0, 0.5, 1, 2)
# Whole numbers that name a dimension, a number of pieces or of copies. A larger one would be a size to compare with.
_SMALL = 4
# How often in a row features are cut, and tensors joined or repeated: a part of the features, half of that; then the
# halves, and the part with the rest. Each cut or copy more would be a step towards a size that no probe has.
_CUTS, _JOINS = 2, 3
_JOINING = {"cat", "concat", "concatenate", "stack", "repeat_interleave", "expand", "expand_as"}
# Whoever calls itself is not read to the end.
_DEEPEST = 8


class _Kind(Enum):
    """What a value is, where the call decides which one it is."""

    NUMBER = "a number of the call"
    DTYPE = "a dtype or a device"
    EPSILON = "the epsilon of a norm"


@dataclass(frozen=True)
class _Made:
    """A value that was made of tensors, and the longest row of cuts and of joins that led to it."""

    cuts: int = 0
    joins: int = 0


class _Tensor(_Made):
    """A tensor."""


class _Pieces(_Made):
    """Tensors that one was cut into."""


class _Shape(_Made):
    """The sizes of a tensor."""


class _Size(_Made):
    """One size of a tensor."""


class _Half(_Made):
    """Half a size."""


class _Known(NamedTuple):
    """A value that is the same in every call."""

    value: Any


class _Method(NamedTuple):
    """A method of a value."""

    owner: Any
    name: str


_Value = Any  # _Kind, _Made, _Known, _Method, or a tuple of these


class _NotStraightError(Exception):
    """Code that is not straight; its text is the reason."""


def why_not_straight(function: object, tensors: Iterable[str], sources: Sources) -> str | None:
    """Why a function of these tensors may compute something else in another call; None where it cannot.

    All other arguments have their defaults in a call, but for unsqueeze_dim.

    >>> def apply_rotary_pos_emb(q, cos, sin):
    ...     return q * 2 if q.shape[-2] > 16 else q
    >>> why_not_straight(apply_rotary_pos_emb, ["q"], Sources())
    'its code may depend on the call: line 2, q.shape[-2] > 16'
    """
    # Some packages make a module of a function. Its forward is what runs, if nothing else does.
    if isinstance(function, nn.Module):
        function = _forward_of(function)
    reader = _Reader(sources)
    given = dict.fromkeys([*tensors, "cos", "sin"], _Tensor())
    return reader.why_not(function, given)


def why_norm_not_straight(module: nn.Module, sources: Sources, eps: str = "eps") -> str | None:
    """Why a norm may compute something else in another call; None where it cannot.

    It may read its weight and the number that is its attribute `eps`: other tensors and numbers may be others later.

    >>> class Norm(nn.Module):
    ...     def forward(self, x):
    ...         return x * 2 if self.training else x
    >>> why_norm_not_straight(nn.RMSNorm(4), Sources()), why_norm_not_straight(Norm(), Sources())
    (None, 'Norm: its code may depend on the call: line 3, self.training')
    """
    if type(module) is nn.RMSNorm:
        return None
    reason = _Reader(sources, eps).why_not(_forward_of(module), {}, module)
    return reason and f"{type(module).__name__}: {reason}"


def _forward_of(module: nn.Module) -> object:
    """What runs when a module is called; None where its class has a way of its own."""
    forward = inspect.getattr_static(module, "forward", None)
    return forward if type(module).__call__ is nn.Module.__call__ else None


class _Reader:
    """Reads functions, and those that they call, statement by statement."""

    def __init__(self, sources: Sources, eps: str | None = None) -> None:
        self.sources, self.eps = sources, eps
        self.norm = eps is not None
        self.operations = _MOVES | _SUMS | (_NORMS if self.norm else set())
        self.depth = 0

    def why_not(self, function: object, given: dict[str, _Value], module: nn.Module | None = None) -> str | None:
        try:
            first = [] if module is None else [_Known(module), _Tensor()]
            self.call(function, first, given)
        except _NotStraightError as error:
            return str(error)
        return None

    def call(self, function: object, args: list[_Value], given: dict[str, _Value]) -> _Value:
        """The result of a function, as a value."""
        if not isinstance(function, types.FunctionType):
            raise _NotStraightError("its code cannot be read")
        definition = self.sources.definition(function)
        if definition is None:
            raise _NotStraightError("its source is not there, or is not what runs")
        if self.depth >= _DEEPEST:
            raise _NotStraightError("its code calls itself")
        names: dict[str, _Value] = {}
        try:
            bound = inspect.signature(function, follow_wrapped=False).bind(*args, **given)
        except TypeError:
            raise _NotStraightError(f"its code calls {function.__name__} in a way that cannot be read") from None
        bound.apply_defaults()
        for name, value in bound.arguments.items():
            passed = name in given or name in list(bound.arguments)[: len(args)]
            names[name] = value if passed else _Kind.NUMBER if name == "unsqueeze_dim" else _Known(value)
        self.depth += 1
        try:
            return self.body(definition.body, names, function)
        finally:
            self.depth -= 1

    def body(self, statements: list[ast.stmt], names: dict[str, _Value], function: types.FunctionType) -> _Value:
        """What the statements return; None where they do not."""
        scope = _Scope(names, function)
        for statement in statements:
            match statement:
                case ast.Expr(value=ast.Constant()) | ast.Pass():
                    continue
                case ast.Return(value=None):
                    return _Known(None)
                case ast.Return(value=ast.expr() as value):
                    return self.value(value, scope)
                case ast.Assign(targets=[target], value=value):
                    self.assign(target, self.value(value, scope), scope)
                case ast.AnnAssign(target=ast.Name() as target, value=ast.expr() as value):
                    self.assign(target, self.value(value, scope), scope)
                case ast.If(test=test, body=then, orelse=otherwise):
                    result = self.body(then if self.decided(test, scope) else otherwise, names, function)
                    if result is not None:
                        return result
                case _:
                    raise _refused(statement)
        return None

    def assign(self, target: ast.expr, value: _Value, scope: "_Scope") -> None:
        match target:
            case ast.Name(id=name):
                scope.names[name] = value
            case ast.Tuple(elts=targets) | ast.List(elts=targets):
                if isinstance(value, _Pieces):
                    values: tuple[_Value, ...] = (_made(_Tensor, value),) * len(targets)
                elif isinstance(value, _Shape):
                    values = (_made(_Size, value),) * len(targets)
                else:
                    values = value if isinstance(value, tuple) and not isinstance(value, _Known | _Method) else ()
                if len(values) != len(targets):
                    raise _refused(target)
                for one, item in zip(targets, values, strict=True):
                    self.assign(one, item, scope)
            case _:
                # A tensor or an object that is written to lives on after the call.
                raise _refused(target)

    def decided(self, test: ast.expr, scope: "_Scope") -> bool:
        """A condition that is the same in every call."""
        match test:
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                return not self.decided(operand, scope)
            case ast.Compare(left=left, ops=[ast.Is() | ast.IsNot() as op], comparators=[ast.Constant(value=None)]):
                value = self.value(left, scope)
                return (isinstance(value, _Known) and value.value is None) == isinstance(op, ast.Is)
            case _:
                value = self.value(test, scope)
                if isinstance(value, _Known) and isinstance(value.value, bool | None):
                    return bool(value.value)
        raise _refused(test)

    def value(self, node: ast.expr, scope: "_Scope") -> _Value:
        match node:
            case ast.Constant(value=value):
                return _Known(value)
            case ast.Name(id=name):
                return scope.look_up(name, node)
            case ast.Tuple(elts=items) | ast.List(elts=items):
                return self.items(items, scope)
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return self.negative(self.value(operand, scope), node)
            case ast.BinOp(left=left, op=op, right=right):
                return self.arithmetic(self.value(left, scope), op, self.value(right, scope), node)
            case ast.IfExp(test=test, body=then, orelse=otherwise):
                return self.value(then if self.decided(test, scope) else otherwise, scope)
            case ast.Attribute(value=owner, attr=name):
                return self.attribute(self.value(owner, scope), name, node)
            case ast.Subscript(value=owner, slice=index):
                return self.item(self.value(owner, scope), index, scope)
            case ast.Call():
                return self.called(node, scope)
            case _:
                raise _refused(node)

    def items(self, nodes: list[ast.expr], scope: "_Scope") -> tuple[_Value, ...]:
        values: list[_Value] = []
        for node in nodes:
            if isinstance(node, ast.Starred):
                spread = self.value(node.value, scope)
                if not isinstance(spread, _Shape):
                    raise _refused(node)
                values.append(spread)
            else:
                values.append(self.value(node, scope))
        return tuple(values)

    def negative(self, value: _Value, node: ast.expr) -> _Value:
        if isinstance(value, _Known) and _is_number(value.value):
            return _Known(-value.value)
        if isinstance(value, _Tensor | _Size | _Half):
            return value
        raise _refused(node)

    def arithmetic(self, left: _Value, op: ast.operator, right: _Value, node: ast.expr) -> _Value:
        both = (left, right)
        tensors = [isinstance(value, _Tensor) for value in both]
        allowed = (*_LINEAR, ast.Div, ast.Pow) if self.norm else _LINEAR
        if any(tensors) and isinstance(op, allowed):
            if all(tensor or self.is_factor(value) for tensor, value in zip(tensors, both, strict=True)):
                return _made(_Tensor, *both)
            if _Kind.EPSILON in both and isinstance(op, ast.Add):
                return _made(_Tensor, *both)
            self.check_factors(both, node)
        # No other arithmetic on sizes: length // 17 is 0 for short inputs alone.
        if isinstance(left, _Size) and isinstance(op, ast.FloorDiv) and right == _Known(2):
            return self.cut(_Half, node, left)
        raise _refused(node)

    def is_factor(self, value: _Value) -> bool:
        return isinstance(value, _Known) and _is_number(value.value) and abs(value.value) in _FACTORS

    def check_factors(self, values: Iterable[_Value], node: ast.expr) -> None:
        numbers = [value for value in values if isinstance(value, _Known) and _is_number(value.value)]
        if not all(map(self.is_factor, numbers)):
            raise _refused(node, "its code has a constant other than 0, 0.5, 1 and 2")

    def cut(self, kind: type[_Made], node: ast.expr, *values: _Value) -> Any:
        """What comes of one more cut."""
        made = _made(kind, *values)
        if made.cuts == _CUTS:
            raise _refused(node, "its code cuts features again and again")
        return kind(made.cuts + 1, made.joins)

    def attribute(self, owner: _Value, name: str, node: ast.expr) -> _Value:
        if isinstance(owner, _Tensor):
            if name in ("dtype", "device"):
                return _Kind.DTYPE
            return _made(_Shape, owner) if name == "shape" else _Method(owner, name)
        if isinstance(owner, _Known) and owner.value is torch:
            return _Kind.DTYPE if isinstance(getattr(torch, name, None), torch.dtype) else _Method(owner, name)
        if isinstance(owner, _Known) and isinstance(owner.value, nn.Module) and name != "training":
            return self.attribute_of_module(owner, owner.value, name, node)
        raise _refused(node)

    def attribute_of_module(self, owner: _Known, module: nn.Module, name: str, node: ast.expr) -> _Value:
        # Not what a property or __getattr__ computes.
        tensors = own_tensors(module)
        found = tensors[name] if name in tensors else inspect.getattr_static(module, name, module)
        if isinstance(found, types.FunctionType):
            return _Method(owner, name)
        if isinstance(found, torch.Tensor) and name == "weight":
            return _Tensor()
        if isinstance(found, float) and name == self.eps:
            return _Kind.EPSILON
        if isinstance(found, torch.Tensor) or _is_number(found):
            raise _refused(node, "its code reads more than its weight and its epsilon")
        if found is None or isinstance(found, bool):
            return _Known(found)
        raise _refused(node)

    def item(self, owner: _Value, index: ast.expr, scope: "_Scope") -> _Value:
        if isinstance(owner, _Tensor):
            entries = index.elts if isinstance(index, ast.Tuple) else [index]
            bounds = [bound for one in entries for bound in self.bounds(one, scope)]
            # The features are the last dimension: after an ellipsis, or the last of four.
            of_features = len(entries) == 4 or _constant(entries[0]) is ...
            for one in entries[:-1] if of_features else entries:
                self.check_whole(one)
            made = _made(_Tensor, owner, *bounds)
            cuts = owner.cuts + any(isinstance(one, ast.Slice) and ast.unparse(one) != ":" for one in entries)
            if cuts > _CUTS:
                raise _refused(index, "its code cuts features again and again")
            return _Tensor(max(made.cuts, cuts), made.joins)
        if isinstance(owner, _Shape) and isinstance(index, ast.Slice):
            bounds = [index.lower, index.upper, index.step]
            if not all(bound is None or _is_number(_constant(bound)) for bound in bounds):
                raise _refused(index)
            return owner
        if isinstance(owner, _Shape | _Pieces) and isinstance(_constant(index), int):
            return _made(_Size if isinstance(owner, _Shape) else _Tensor, owner)
        raise _refused(index)

    def bounds(self, index: ast.expr, scope: "_Scope") -> list[_Value]:
        """The sizes in an index of a tensor. Its numbers are so small that every size in a probe is larger."""
        if not isinstance(index, ast.Slice):
            number = _constant(index)
            if number in (None, ..., 0, 1) and isinstance(index, ast.Constant):
                return []
            raise _refused(index)
        found: list[_Value] = []
        small = {"lower": (None, 0, 1), "upper": (None,), "step": (None, 1, 2)}
        for side, numbers in small.items():
            bound: ast.expr | None = getattr(index, side)
            if bound is None or (_constant(bound) in numbers and isinstance(bound, ast.Constant)):
                continue
            found.append(self.value(bound, scope))
            if side == "step" or not isinstance(found[-1], _Size | _Half):
                raise _refused(index)
        return found

    def check_whole(self, index: ast.expr) -> None:
        """An index of a dimension that calls have more or less of: all, one, or as many of the last as another has."""
        match index:
            case ast.Slice(lower=None | ast.UnaryOp(op=ast.USub()), upper=None, step=None):
                return
            case ast.Slice():
                raise _refused(index)

    def called(self, node: ast.Call, scope: "_Scope") -> _Value:
        function = self.value(node.func, scope)
        args = self.items(node.args, scope)
        named = {word.arg: self.value(word.value, scope) for word in node.keywords if word.arg is not None}
        if len(named) != len(node.keywords):
            raise _refused(node)
        if isinstance(function, _Known):
            return self.call(function.value, list(args), named)
        if not isinstance(function, _Method):
            raise _refused(node)
        owner, name = function
        if isinstance(owner, _Known) and isinstance(owner.value, nn.Module):
            return self.call(inspect.getattr_static(owner.value, name), [owner, *args], named)
        if isinstance(owner, _Tensor) and name == "size":
            return _made(_Size if args or named else _Shape, owner)
        values = list(_flat((*args, *named.values())))
        constants = [value.value for value in values if isinstance(value, _Known)]
        # Words name devices, whose numbers are another matter.
        if any(isinstance(value, str) for value in constants):
            raise _refused(node)
        # A size may shape a tensor, and not scale one; dtypes change numbers, and not how their bits are read.
        computes = name in _SUMS | _NORMS
        if computes and any(isinstance(value, _Size | _Half) or value is _Kind.NUMBER for value in values):
            raise _refused(node)
        if (name == "view" and _Kind.DTYPE in values) or (_Kind.EPSILON in values and name != "add"):
            raise _refused(node)
        if name in _SCALES:
            self.check_factors(values, node)
        elif any(_is_number(value) and abs(value) > _SMALL for value in constants) and name != "sum":
            raise _refused(node)
        made = _made(_Tensor, owner, *values)
        # A sum over the features, or over what they were unflattened into.
        if name == "sum" and not named and args in [(_Known(-1),), (_Known(5),)]:
            return made
        if name in self.operations and "out" not in named:
            if name in _JOINING and made.joins == _JOINS:
                raise _refused(node, "its code joins tensors again and again")
            return _Tensor(made.cuts, made.joins + (name in _JOINING))
        if name == "narrow" and args[:2].count(_Known(-1)):
            return self.cut(_Tensor, node, made)
        # As many pieces as a size says: another number of them does not fit what they are given to.
        if name == "unbind" and "out" not in named:
            return self.cut(_Pieces, node, made)
        if name in _PIECES and _Known(-1) in (*args[-1:], named.get("dim")):
            return self.cut(_Pieces, node, made)
        raise _refused(node)


class _Scope:
    """The names of one function."""

    def __init__(self, names: dict[str, _Value], function: types.FunctionType) -> None:
        self.names, self.function = names, function

    def look_up(self, name: str, node: ast.expr) -> _Value:
        code = self.function.__code__
        if name in self.names:
            return self.names[name]
        # Neither what a closure holds nor what a file keeps: either may change between calls. Functions are the code.
        found = None if name in code.co_varnames + code.co_freevars else self.function.__globals__.get(name)
        if found is torch or isinstance(found, types.FunctionType):
            return _Known(found)
        raise _refused(node)


def _made(kind: type[_Made], *values: _Value) -> Any:
    """A value of this kind that was made of those."""
    made = [value for value in _flat(values) if isinstance(value, _Made)]
    return kind(max((one.cuts for one in made), default=0), max((one.joins for one in made), default=0))


def _flat(values: Iterable[_Value]) -> Iterable[_Value]:
    for value in values:
        if isinstance(value, tuple) and not isinstance(value, _Known | _Method):
            yield from _flat(value)
        else:
            yield value


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _constant(node: ast.expr) -> object:
    """The number that stands in the code, with its sign; the node itself where none does."""
    match node:
        case ast.Constant(value=value):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() as value)):
            return -value
    return node


def _refused(node: ast.stmt | ast.expr, reason: str = "its code may depend on the call") -> _NotStraightError:
    kind = type(node).__name__.lower() if isinstance(node, ast.Try | ast.With | ast.For | ast.While) else None
    text = kind or ast.unparse(node).splitlines()[0]
    text = text if len(text) <= 60 else text[:57] + "..."
    return _NotStraightError(f"{reason}: line {node.lineno}, {text}")
