"""Which modules of a model rotate, by which of their methods, and the subclass that each of them is to have.

A subclass has the methods of the class that call the rotation, with the same code, in which the name of the rotation
function stands for the fused one. Where QK-norm goes into the same pass, the code is compiled anew.
"""

import inspect
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from ropewalk.hub.accelerate.fused_rotation import fused_norm_rotation, fused_rotation
from ropewalk.hub.accelerate.norm_fusion import FUSED, FusedMethod, NormKind, fused_method, norm_kind
from ropewalk.hub.accelerate.rotation_probe import Rotation, Table, is_candidate, rotation_of
from ropewalk.hub.accelerate.source import Sources
from ropewalk.hub.accelerate.table_probe import table_widths, why_not_doubled
from ropewalk.kernels.torch_internals import own_tensors

__all__ = ["PLAIN", "Part", "bound_methods", "plain_state", "planned"]

# The attribute of our subclasses that holds the class they were made from.
PLAIN = "_ropewalk_plain"


@dataclass(frozen=True)
class Part:
    """A module by its name in the model and its class, and what became of it: its rotation, or the reason for none.

    >>> print(Part("model.layers.0.self_attn", "Qwen3Attention", "half pairs", "fused"))
    Qwen3Attention: half pairs; QK-norm: fused
    """

    name: str
    kind: str
    rotation: str
    norm: str | None = None

    def __str__(self) -> str:
        return f"{self.kind}: {self.rotation}" + ("" if self.norm is None else f"; QK-norm: {self.norm}")


@dataclass(frozen=True)
class _Method:
    """A method, and the functions of cos and sin that it calls, each with its name there and what it computes."""

    name: str
    function: Any
    decorated: bool
    rotations: dict[str, tuple[Callable[..., Any], Rotation | str]]

    def known(self) -> dict[str, tuple[Callable[..., Any], Rotation]]:
        return {name: (call, kind) for name, (call, kind) in self.rotations.items() if isinstance(kind, Rotation)}


def planned(model: nn.Module) -> tuple[list[tuple[nn.Module, type, Part]], list[Part]]:
    """Modules with the subclass that each is to have, and those that are left alone, with the reason.

    >>> planned(nn.Linear(2, 2))
    ([], [])
    """
    plans: list[tuple[nn.Module, type, Part]] = []
    left: list[Part] = []
    seen = _Seen(model)
    subclasses: dict[tuple[Any, ...], type] = {}
    for name, module in model.named_modules():
        kind = type(module)
        methods = seen.methods_of(kind)
        if not methods:
            hidden = seen.hidden(kind)
            left += (
                [Part(name, kind.__name__, f"its {hidden} calls one that rotates, of its base class")] if hidden else []
            )
            continue
        reason = _why_not(module, methods)
        known = [method for method in methods if method.known()]
        widths = _widths(name, known, seen) if reason is None else None
        if reason is not None or isinstance(widths, str):
            left.append(Part(name, kind.__name__, reason or str(widths)))
            continue
        fusions = {method.name: _fusion(module, method, seen) for method in known}
        key = kind, widths, tuple(fusions.items())
        if key not in subclasses:
            subclasses[key] = _subclass(kind, known, widths, fusions)
        said = dict.fromkeys(f"{one}, {what}" for method in known for one, (_, what) in method.known().items())
        plans.append((module, subclasses[key], Part(name, kind.__name__, "; ".join(said), _said_norm(module, fusions))))
    return plans, left


class _Seen:
    """What was found in one model. Its layers share classes, functions and tables: each is looked at once."""

    def __init__(self, model: nn.Module) -> None:
        self.sources = Sources()
        self._modules = dict(model.named_modules(remove_duplicate=False))
        self._rotations: dict[Any, Rotation | str] = {}
        self._methods: dict[type, list[_Method]] = {}
        self._hidden: dict[type, str | None] = {}
        self._widths: dict[tuple[nn.Module, Table], frozenset[int] | str] = {}
        self._fused: dict[tuple[Any, str], FusedMethod | str] = {}
        self._norms: dict[tuple[Any, ...], NormKind | str] = {}
        # The modules that make tables in each part of the model, by the name of the part.
        self._makers: dict[str, list[nn.Module]] = {}
        for name, module in self._modules.items():
            if _makes_tables(module):
                path = name.split(".") if name else []
                for depth in range(len(path) + 1):
                    inside = self._makers.setdefault(".".join(path[:depth]), [])
                    inside += [] if any(module is one for one in inside) else [module]

    def methods_of(self, kind: type) -> list[_Method]:
        """The methods of a class that call functions of cos and sin."""
        if kind not in self._methods:
            self._methods[kind] = list(self._calling(kind))
        return self._methods[kind]

    def _calling(self, kind: type) -> Iterator[_Method]:
        attributes = {name: value for base in reversed(kind.__mro__) for name, value in vars(base).items()}
        for name, value in attributes.items():
            if not isinstance(value, types.FunctionType) or value.__module__ == nn.Module.__module__:
                continue
            function: Any = inspect.unwrap(value)
            if not isinstance(function, types.FunctionType):
                continue
            own = {key: function.__globals__[key] for key in _names(function.__code__) if key in function.__globals__}
            called = {key: item for key, item in own.items() if is_candidate(item)}
            if called:
                rotations = {key: (item, self.rotation_of(item)) for key, item in called.items()}
                yield _Method(name, function, function is not value, rotations)

    def rotation_of(self, function: Any) -> Rotation | str:
        if function not in self._rotations:
            self._rotations[function] = rotation_of(function, self.sources)
        return self._rotations[function]

    def hidden(self, kind: type) -> str | None:
        """A method of a class that stands before one of a base class which rotates, and may call it."""
        if kind not in self._hidden:
            before = [
                method.name
                for base in kind.__mro__[1:]
                for method in self.methods_of(base)
                if method.known() and getattr(kind, method.name, None) is not getattr(base, method.name)
            ]
            self._hidden[kind] = before[0] if before else None
        return self._hidden[kind]

    def makers(self, name: str) -> list[nn.Module]:
        """The modules that make cos and sin, of the smallest part of the model around a module that has any."""
        path = name.split(".") if name else []
        parts = (".".join(path[:depth]) for depth in range(len(path), -1, -1))
        return next((self._makers[part] for part in parts if part in self._makers), [])

    def widths_of(self, maker: nn.Module, table: Table) -> frozenset[int] | str:
        if (maker, table) not in self._widths:
            found = table_widths(maker, table)
            reason = None if isinstance(found, str) else why_not_doubled(maker, table, self.sources)
            self._widths[maker, table] = reason or found
        return self._widths[maker, table]

    def fused_method(self, method: types.FunctionType, name: str) -> FusedMethod | str:
        if (method, name) not in self._fused:
            self._fused[method, name] = fused_method(method, name, self.sources)
        return self._fused[method, name]

    def norm_kind(self, module: nn.Module) -> NormKind | str:
        """What a norm computes; norms of one class with the same numbers, words and sizes compute the same.

        The values of tensors do not matter: one that reads more than its weight, in place of which another is probed,
        is refused.
        """
        plain = [
            (key, value) for key, value in vars(module).items() if isinstance(value, bool | int | float | str | None)
        ]
        held = own_tensors(module).items()
        tensors = [(key, None if x is None else (tuple(x.shape), x.is_meta)) for key, x in held]
        key = type(module), tuple(plain), tuple(tensors)
        changed = [value for value in vars(module).values() if callable(value)]
        if changed or list(module.children()):
            return norm_kind(module, self.sources)
        if key not in self._norms:
            self._norms[key] = norm_kind(module, self.sources)
        return self._norms[key]


def _names(code: types.CodeType) -> Iterator[str]:
    """Every name that code looks up, that of functions inside it too."""
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _names(inner)


def _why_not(module: nn.Module, methods: list[_Method]) -> str | None:
    """Why a module that calls functions of cos and sin is left alone; None if there is no reason."""
    if not any(method.known() for method in methods):
        reasons = {key: kind for method in methods for key, (_, kind) in method.rotations.items()}
        return "; ".join(f"{key}: {reason}" for key, reason in reasons.items())
    decorated = [method.name for method in methods if method.decorated]
    if decorated:
        return f"its {decorated[0]} is decorated"
    replaced = [method.name for method in methods if method.name in module.__dict__]
    # accelerate's hooks, which move tensors between devices, keep the method that they wrap; ours takes its place.
    if replaced and not set(replaced) <= set(bound_methods(module, [method.function for method in methods]).values()):
        return f"its {replaced[0]} was replaced in this instance"
    return None


def bound_methods(module: nn.Module, functions: list[types.FunctionType]) -> dict[str, str]:
    """The attributes of an instance that hold one of these functions as its own method, with the method's name.

    >>> layer = nn.Linear(2, 2)
    >>> layer._old_forward = layer.forward
    >>> bound_methods(layer, [nn.Linear.forward])
    {'_old_forward': 'forward'}
    """
    held = {name: value for name, value in module.__dict__.items() if isinstance(value, types.MethodType)}
    return {name: value.__name__ for name, value in held.items() if value.__func__ in functions}


def _widths(name: str, methods: list[_Method], seen: _Seen) -> frozenset[int] | str | None:
    """The widths of the tables that reach a module; None where any will do; a reason where they cannot be known."""
    tables: set[Table] = {kind.table for method in methods for _, kind in method.known().values() if kind.reads_all}
    if not tables:
        return None
    makers = seen.makers(name)
    if not makers:
        return "the module that makes its cos and sin was not found"
    widths: frozenset[int] = frozenset()
    for maker in makers:
        for table in tables:
            here = seen.widths_of(maker, table)
            if isinstance(here, str):
                return here
            widths |= here
    return widths


def _makes_tables(module: nn.Module) -> bool:
    named = any(word in type(module).__name__ for word in ("Rotary", "RoPE", "Rope"))
    return named or any("inv_freq" in name for name, _ in module.named_buffers(recurse=False))


Fusion = tuple[FusedMethod, str, Rotation, type, NormKind]


def _fusion(module: nn.Module, method: _Method, seen: _Seen) -> Fusion | str:
    """How QK-norm goes into the rotation of a method; a reason where it does not."""
    pairs = [(name, kind) for name, (_, kind) in method.known().items() if kind.both]
    if len(pairs) != 1 or len(method.rotations) != 1 or pairs[0][1].conjugate or pairs[0][1].reorders:
        return "its rotation takes no norm"
    name, rotation = pairs[0]
    fused = seen.fused_method(method.function, name)
    if isinstance(fused, str):
        return fused
    norms = [getattr(module, attribute, None) for attribute in (fused.q_norm, fused.k_norm)]
    if not all(isinstance(norm, nn.Module) for norm in norms) or type(norms[0]) is not type(norms[1]):
        return "its norms of q and k differ"
    q_kind, k_kind = (seen.norm_kind(norm) for norm in norms if isinstance(norm, nn.Module))
    if isinstance(q_kind, str) or isinstance(k_kind, str):
        return q_kind if isinstance(q_kind, str) else str(k_kind)
    return (fused, name, rotation, type(norms[0]), q_kind) if q_kind == k_kind else "its norms of q and k differ"


def _said_norm(module: nn.Module, fusions: dict[str, Fusion | str]) -> str | None:
    """What became of QK-norm, in words; None where a module has no norm."""
    fused = [fusion for fusion in fusions.values() if not isinstance(fusion, str)]
    if fused:
        return "fused, times 1 + weight" if fused[0][-1].norm.plus_one else "fused"
    has_norm = any("norm" in name for name, _ in module.named_children())
    return f"not fused, {'; '.join(map(str, fusions.values()))}" if has_norm else None


def _subclass(
    kind: type, methods: list[_Method], widths: frozenset[int] | None, fusions: dict[str, Fusion | str]
) -> type:
    """A class like `kind`, whose methods rotate by the fused rotation."""
    namespace: dict[str, Any] = {
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__doc__": kind.__doc__,
        "__reduce_ex__": _reduce_to_plain,
        PLAIN: kind,
    }
    for method in methods:
        names = {name: fused_rotation(original, what, widths) for name, (original, what) in method.known().items()}
        code, fusion = method.function.__code__, fusions[method.name]
        if not isinstance(fusion, str):
            fused, name, rotation, norms, norm = fusion
            code = fused.code
            names[FUSED] = fused_norm_rotation(names[name], rotation, widths, norms, *norm)
        namespace[method.name] = _with_names(method.function, code, names)
    return type(kind)(kind.__name__, (kind,), namespace)


def _with_names(function: types.FunctionType, code: types.CodeType, names: dict[str, Any]) -> types.FunctionType:
    """The function with this code, which finds these under their names, and all else where it did."""
    # Without __name__: a compiler would look for the names in the module of that name, and find the model's own.
    needed = {*_names(code), "__builtins__", "__package__"}
    found = {name: value for name, value in function.__globals__.items() if name in needed and name != "__name__"}
    # Code of its own: what a compiler keeps for code must not serve the class it came from.
    made = types.FunctionType(
        code.replace(), found | names, function.__name__, function.__defaults__, function.__closure__
    )
    made.__kwdefaults__, made.__annotations__ = function.__kwdefaults__, function.__annotations__
    made.__module__, made.__qualname__, made.__doc__ = function.__module__, function.__qualname__, function.__doc__
    return made


def plain_state(module: nn.Module) -> dict[str, Any]:
    """The attributes of an instance that hold a method of our subclass, as they are in the plain class.

    >>> plain_state(nn.Linear(2, 2))
    {}
    """
    made = _ours(type(module))
    plain = getattr(made, PLAIN, made)
    ours = (
        [value for value in vars(made).values() if isinstance(value, types.FunctionType)] if plain is not made else []
    )
    bound = bound_methods(module, ours)
    return {name: types.MethodType(getattr(plain, method), module) for name, method in bound.items()}


def _ours(kind: type) -> type:
    """The class that accelerate made, where this is it or comes from it; else the class itself."""
    return next((base for base in kind.__mro__ if PLAIN in vars(base)), kind)


def _reduce_to_plain(self: Any, protocol: int) -> tuple[Any, ...]:
    """What copy and pickle ask for: the plain class in place of ours."""
    made = _ours(type(self))
    plain = getattr(made, PLAIN)
    # The newer protocols insist on the class that an object has.
    make, arguments, *rest = super(made, self).__reduce_ex__(min(protocol, 1))
    state = rest[0] if rest else None
    if isinstance(state, dict):
        rest[0] = state | plain_state(self)
    return make, tuple(plain if argument is made else argument for argument in arguments), *rest
