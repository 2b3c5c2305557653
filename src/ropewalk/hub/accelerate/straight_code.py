"""Checks by static analysis that code computes one formula for all sizes, dtypes, values and modes of a call.

A probe calls a function with a few inputs. It cannot detect a branch on a length, a mode or the environment, a clamp of
large values, a cache, or a random number. So the source is analyzed as well. Code is straight if no branch depends on
the call, and if each operation is one of those below, which move, add and multiply numbers.

Repeatedly halving a size, or repeatedly doubling a tensor, is equivalent to a branch on a size. So tensors may only be
split along the last dimension, at most twice in a row, and joined at most three times, and the only arithmetic on sizes
is one half. What remains are comparisons of sizes with each other, within small factors. If straight code computes a
formula for random numbers of a few sizes, each of which is the largest once, it computes the formula for all inputs.
This holds without constraints on the call, and inside a compiled graph.
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

from ropewalk.hub.accelerate.source import Sources, function_behind
from ropewalk.kernels.torch_internals import own_tensors

__all__ = ["why_norm_not_straight", "why_not_straight"]

# Operations that move numbers; those of rotations; those of norms. None of them depends on a value, on the mode of
# autograd or on the length. squeeze depends on a size, so it is not included.
_MOVES = {
    *("cat", "concat", "concatenate", "stack", "repeat_interleave", "expand", "expand_as"),
    *("flatten", "unflatten", "reshape", "reshape_as", "view", "view_as", "unsqueeze"),
    *("movedim", "permute", "swapaxes", "transpose"),
    *("clone", "contiguous", "double", "float", "to", "type", "type_as"),
}
_PIECES = {"chunk", "split", "tensor_split"}
_SCALES = {"add", "mul", "multiply", "sub", "subtract"}
_SUMS = _SCALES | {"addcmul", "neg", "negative"}
_NORMS = {"mean", "pow", "reciprocal", "rsqrt", "sqrt", "square"}
_LINEAR = (ast.Add, ast.Sub, ast.Mult)
# Factors that cause no overflow in any dtype. Larger ones would overflow or round in float16 only.
_FACTORS = (0, 0.5, 1, 2)
# The largest integer for a dimension, a number of pieces or of copies. A larger one could be compared with a size.
_SMALL = 4
# The largest number of successive splits, and of joins or repetitions: first a part of the features and half of it,
# then the two halves and the part with the rest. More of them could depend on a size that no probe has.
_SPLITS, _JOINS = 2, 3
_JOINING = {"cat", "concat", "concatenate", "stack", "repeat_interleave", "expand", "expand_as"}
# The limit on nested calls. It stops recursion.
_DEEPEST = 8


class _Kind(Enum):
    """The kind of a value that depends on the call."""

    NUMBER = "a number of the call"
    DTYPE = "a dtype or a device"
    EPSILON = "the epsilon of a norm"


@dataclass(frozen=True)
class _Derived:
    """A value computed from tensors, and the largest number of successive splits and joins that led to it."""

    splits: int = 0
    joins: int = 0


class _Tensor(_Derived):
    """A tensor."""


class _Pieces(_Derived):
    """The tensors that one was split into."""


class _Shape(_Derived):
    """The sizes of a tensor."""


class _Size(_Derived):
    """One size of a tensor."""


class _Half(_Derived):
    """Half of a size."""


class _Known(NamedTuple):
    """A value that is the same in every call."""

    value: Any


class _Method(NamedTuple):
    """A method of a value."""

    owner: Any
    name: str


_Value = Any  # _Kind, _Derived, _Known, _Method, or a tuple of these


class _NotStraightError(Exception):
    """The code is not straight. The message is the reason."""


def why_not_straight(function: object, tensors: Iterable[str], sources: Sources) -> str | None:
    """Return why the formula of a function may depend on the call, or None if it cannot.

    Args:
        function: The function.
        tensors: The names of its arguments that are tensors. All other arguments are assumed to have their defaults,
            except unsqueeze_dim.
        sources: Parsed source files.

    Returns:
        The reason, or None.

    >>> def apply_rotary_pos_emb(q, cos, sin):
    ...     return q * 2 if q.shape[-2] > 16 else q
    >>> why_not_straight(apply_rotary_pos_emb, ["q", "cos", "sin"], Sources())
    'its code may depend on the call: line 2, q.shape[-2] > 16'
    """
    # Some packages replace a function by a module. Its forward is analyzed if nothing else runs.
    if isinstance(function, nn.Module):
        function = _forward_of(function)
    reader = _Reader(sources)
    kwargs = dict.fromkeys(tensors, _Tensor())
    return reader.why_not(function, kwargs)


def why_norm_not_straight(module: nn.Module, sources: Sources, eps: str = "eps") -> str | None:
    """Return why the formula of a norm may depend on the call, or None if it cannot.

    The norm may only read its weight and its epsilon. Other tensors and numbers may change later.

    Args:
        module: The norm.
        sources: Parsed source files.
        eps: The name of its attribute with the epsilon.

    Returns:
        The reason, or None.

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
    """Return the function that runs when a module is called, or None if its class overrides __call__."""
    forward = inspect.getattr_static(module, "forward", None)
    return forward if type(module).__call__ is nn.Module.__call__ else None


class _Reader:
    """Analyzes functions, and those that they call, statement by statement."""

    def __init__(self, sources: Sources, eps: str | None = None) -> None:
        self.sources, self.eps = sources, eps
        self.norm = eps is not None
        self.operations = _MOVES | _SUMS | (_NORMS if self.norm else set())
        self.depth = 0

    def why_not(self, function: object, kwargs: dict[str, _Value], module: nn.Module | None = None) -> str | None:
        try:
            args = [] if module is None else [_Known(module), _Tensor()]
            self.call(function, args, kwargs)
        except _NotStraightError as error:
            return str(error)
        return None

    def call(self, function: object, args: list[_Value], kwargs: dict[str, _Value]) -> _Value:
        """Return the result of a function."""
        function = function_behind(function)
        if not isinstance(function, types.FunctionType):
            raise _NotStraightError("its code is not available")
        definition = self.sources.definition(function)
        if definition is None:
            raise _NotStraightError("its source is not available, or differs from the running code")
        if self.depth >= _DEEPEST:
            raise _NotStraightError("its calls are nested too deeply")
        names: dict[str, _Value] = {}
        try:
            bound = inspect.signature(function, follow_wrapped=False).bind(*args, **kwargs)
        except TypeError:
            raise _NotStraightError(f"its call of {function.__name__} cannot be analyzed") from None
        bound.apply_defaults()
        for name, value in bound.arguments.items():
            passed = name in kwargs or name in list(bound.arguments)[: len(args)]
            names[name] = value if passed else _Kind.NUMBER if name == "unsqueeze_dim" else _Known(value)
        self.depth += 1
        try:
            return self.body(definition.body, names, function)
        finally:
            self.depth -= 1

    def body(self, statements: list[ast.stmt], names: dict[str, _Value], function: types.FunctionType) -> _Value:
        """Return the result of the statements, or None if they do not return."""
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
                    raise _not_straight(statement)
        return None

    def assign(self, target: ast.expr, value: _Value, scope: "_Scope") -> None:
        match target:
            case ast.Name(id=name):
                scope.names[name] = value
            case ast.Tuple(elts=targets) | ast.List(elts=targets):
                if isinstance(value, _Pieces):
                    values: tuple[_Value, ...] = (_derived(_Tensor, value),) * len(targets)
                elif isinstance(value, _Shape):
                    values = (_derived(_Size, value),) * len(targets)
                else:
                    values = value if isinstance(value, tuple) and not isinstance(value, _Known | _Method) else ()
                if len(values) != len(targets):
                    raise _not_straight(target)
                for element, item in zip(targets, values, strict=True):
                    self.assign(element, item, scope)
            case _:
                # Writing to a tensor or an object changes state that outlives the call.
                raise _not_straight(target)

    def decided(self, test: ast.expr, scope: "_Scope") -> bool:
        """Return the value of a condition. Raise if it is not the same in every call."""
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
        raise _not_straight(test)

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
                raise _not_straight(node)

    def items(self, nodes: list[ast.expr], scope: "_Scope") -> tuple[_Value, ...]:
        values: list[_Value] = []
        for node in nodes:
            if isinstance(node, ast.Starred):
                spread = self.value(node.value, scope)
                if not isinstance(spread, _Shape):
                    raise _not_straight(node)
                values.append(spread)
            else:
                values.append(self.value(node, scope))
        return tuple(values)

    def negative(self, value: _Value, node: ast.expr) -> _Value:
        if isinstance(value, _Known) and _is_number(value.value):
            return _Known(-value.value)
        if isinstance(value, _Tensor | _Size | _Half):
            return value
        raise _not_straight(node)

    def arithmetic(self, left: _Value, op: ast.operator, right: _Value, node: ast.expr) -> _Value:
        both = (left, right)
        tensors = [isinstance(value, _Tensor) for value in both]
        allowed = (*_LINEAR, ast.Div, ast.Pow) if self.norm else _LINEAR
        if any(tensors) and isinstance(op, allowed):
            if all(tensor or self.is_factor(value) for tensor, value in zip(tensors, both, strict=True)):
                return _derived(_Tensor, *both)
            if _Kind.EPSILON in both and isinstance(op, ast.Add):
                return _derived(_Tensor, *both)
            self.check_factors(both, node)
        # No other arithmetic on sizes: length // 17 is 0 for short inputs only.
        if isinstance(left, _Size) and isinstance(op, ast.FloorDiv) and right == _Known(2):
            return self.split(_Half, node, left)
        raise _not_straight(node)

    def is_factor(self, value: _Value) -> bool:
        return isinstance(value, _Known) and _is_number(value.value) and abs(value.value) in _FACTORS

    def check_factors(self, values: Iterable[_Value], node: ast.expr) -> None:
        numbers = [value for value in values if isinstance(value, _Known) and _is_number(value.value)]
        if not all(map(self.is_factor, numbers)):
            raise _not_straight(node, "its code has a constant other than 0, 0.5, 1 and 2")

    def split(self, kind: type[_Derived], node: ast.expr, *values: _Value) -> Any:
        """Return the result of one more split."""
        derived = _derived(kind, *values)
        if derived.splits == _SPLITS:
            raise _not_straight(node, "its code splits features too often")
        return kind(derived.splits + 1, derived.joins)

    def attribute(self, owner: _Value, name: str, node: ast.expr) -> _Value:
        if isinstance(owner, _Tensor):
            if name in ("dtype", "device"):
                return _Kind.DTYPE
            return _derived(_Shape, owner) if name == "shape" else _Method(owner, name)
        if isinstance(owner, _Known) and owner.value is torch:
            return _Kind.DTYPE if isinstance(getattr(torch, name, None), torch.dtype) else _Method(owner, name)
        if isinstance(owner, _Known) and isinstance(owner.value, nn.Module) and name != "training":
            return self.attribute_of_module(owner, owner.value, name, node)
        raise _not_straight(node)

    def attribute_of_module(self, owner: _Known, module: nn.Module, name: str, node: ast.expr) -> _Value:
        # Static lookup: the results of properties and __getattr__ are not accepted.
        tensors = own_tensors(module)
        value = tensors[name] if name in tensors else inspect.getattr_static(module, name, module)
        if isinstance(value, types.FunctionType):
            return _Method(owner, name)
        if isinstance(value, torch.Tensor) and name == "weight":
            return _Tensor()
        if isinstance(value, float) and name == self.eps:
            return _Kind.EPSILON
        if isinstance(value, torch.Tensor) or _is_number(value):
            raise _not_straight(node, "its code reads more than its weight and its epsilon")
        if value is None or isinstance(value, bool):
            return _Known(value)
        raise _not_straight(node)

    def item(self, owner: _Value, index: ast.expr, scope: "_Scope") -> _Value:
        if isinstance(owner, _Tensor):
            entries = index.elts if isinstance(index, ast.Tuple) else [index]
            bounds = [bound for entry in entries for bound in self.bounds(entry, scope)]
            # The features are the last dimension: after an ellipsis, or the last of four entries.
            of_features = len(entries) == 4 or _constant(entries[0]) is ...
            for entry in entries[:-1] if of_features else entries:
                self.check_whole(entry)
            derived = _derived(_Tensor, owner, *bounds)
            splits = owner.splits + any(isinstance(entry, ast.Slice) and ast.unparse(entry) != ":" for entry in entries)
            if splits > _SPLITS:
                raise _not_straight(index, "its code splits features too often")
            return _Tensor(max(derived.splits, splits), derived.joins)
        if isinstance(owner, _Shape) and isinstance(index, ast.Slice):
            bounds = [index.lower, index.upper, index.step]
            if not all(bound is None or _is_number(_constant(bound)) for bound in bounds):
                raise _not_straight(index)
            return owner
        if isinstance(owner, _Shape | _Pieces) and isinstance(_constant(index), int):
            return _derived(_Size if isinstance(owner, _Shape) else _Tensor, owner)
        raise _not_straight(index)

    def bounds(self, index: ast.expr, scope: "_Scope") -> list[_Value]:
        """Return the sizes in an index of a tensor. Only numbers below every size of a probe are accepted."""
        if not isinstance(index, ast.Slice):
            number = _constant(index)
            if number in (None, ..., 0, 1) and isinstance(index, ast.Constant):
                return []
            raise _not_straight(index)
        sizes: list[_Value] = []
        small = {"lower": (None, 0, 1), "upper": (None,), "step": (None, 1, 2)}
        for side, numbers in small.items():
            bound: ast.expr | None = getattr(index, side)
            if bound is None or (_constant(bound) in numbers and isinstance(bound, ast.Constant)):
                continue
            sizes.append(self.value(bound, scope))
            if side == "step" or not isinstance(sizes[-1], _Size | _Half):
                raise _not_straight(index)
        return sizes

    def check_whole(self, index: ast.expr) -> None:
        """Raise unless an index of a dimension other than the features is full, a single entry, or [-size:]."""
        match index:
            case ast.Slice(lower=None | ast.UnaryOp(op=ast.USub()), upper=None, step=None):
                return
            case ast.Slice():
                raise _not_straight(index)

    def called(self, node: ast.Call, scope: "_Scope") -> _Value:
        function = self.value(node.func, scope)
        args = self.items(node.args, scope)
        kwargs = {word.arg: self.value(word.value, scope) for word in node.keywords if word.arg is not None}
        if len(kwargs) != len(node.keywords):
            raise _not_straight(node)
        if isinstance(function, _Known):
            return self.call(function.value, list(args), kwargs)
        if not isinstance(function, _Method):
            raise _not_straight(node)
        owner, name = function
        if isinstance(owner, _Known) and isinstance(owner.value, nn.Module):
            return self.call(inspect.getattr_static(owner.value, name), [owner, *args], kwargs)
        if isinstance(owner, _Tensor) and name == "size":
            return _derived(_Size if args or kwargs else _Shape, owner)
        values = list(_flat((*args, *kwargs.values())))
        constants = [value.value for value in values if isinstance(value, _Known)]
        # Strings are names of devices, which are not accepted.
        if any(isinstance(value, str) for value in constants):
            raise _not_straight(node)
        # A size may shape a tensor, but not scale one. A dtype may convert numbers, but not reinterpret their bits.
        computes = name in _SUMS | _NORMS
        if computes and any(isinstance(value, _Size | _Half) or value is _Kind.NUMBER for value in values):
            raise _not_straight(node)
        if (name == "view" and _Kind.DTYPE in values) or (_Kind.EPSILON in values and name != "add"):
            raise _not_straight(node)
        if name in _SCALES:
            self.check_factors(values, node)
        elif any(_is_number(value) and abs(value) > _SMALL for value in constants) and name != "sum":
            raise _not_straight(node)
        derived = _derived(_Tensor, owner, *values)
        # A sum over the features, or over a dimension that they were unflattened to.
        if name == "sum" and not kwargs and args in [(_Known(-1),), (_Known(5),)]:
            return derived
        if name in self.operations and "out" not in kwargs:
            if name in _JOINING and derived.joins == _JOINS:
                raise _not_straight(node, "its code joins tensors too often")
            return _Tensor(derived.splits, derived.joins + (name in _JOINING))
        if name == "narrow" and args[:2].count(_Known(-1)):
            return self.split(_Tensor, node, derived)
        # The number of pieces is a size. A different number of them would raise an error where they are used.
        if name == "unbind" and "out" not in kwargs:
            return self.split(_Pieces, node, derived)
        if name in _PIECES and _Known(-1) in (*args[-1:], kwargs.get("dim")):
            return self.split(_Pieces, node, derived)
        raise _not_straight(node)


class _Scope:
    """The names of one function."""

    def __init__(self, names: dict[str, _Value], function: types.FunctionType) -> None:
        self.names, self.function = names, function

    def look_up(self, name: str, node: ast.expr) -> _Value:
        code = self.function.__code__
        if name in self.names:
            return self.names[name]
        # Variables of a closure or of the module may change between calls, so only torch and functions are accepted.
        value = None if name in code.co_varnames + code.co_freevars else self.function.__globals__.get(name)
        if value is torch or isinstance(value, types.FunctionType):
            return _Known(value)
        raise _not_straight(node)


def _derived(kind: type[_Derived], *values: _Value) -> Any:
    """Return a value of this kind that is computed from `values`."""
    inputs = [value for value in _flat(values) if isinstance(value, _Derived)]
    return kind(max((value.splits for value in inputs), default=0), max((value.joins for value in inputs), default=0))


def _flat(values: Iterable[_Value]) -> Iterable[_Value]:
    for value in values:
        if isinstance(value, tuple) and not isinstance(value, _Known | _Method):
            yield from _flat(value)
        else:
            yield value


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _constant(node: ast.expr) -> object:
    """Return a constant in the code, with its sign, or the node itself if it is not a constant."""
    match node:
        case ast.Constant(value=value):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() as value)):
            return -value
    return node


def _not_straight(node: ast.stmt | ast.expr, reason: str = "its code may depend on the call") -> _NotStraightError:
    kind = type(node).__name__.lower() if isinstance(node, ast.Try | ast.With | ast.For | ast.While) else None
    text = kind or ast.unparse(node).splitlines()[0]
    text = text if len(text) <= 60 else text[:57] + "..."
    return _NotStraightError(f"{reason}: line {node.lineno}, {text}")
