"""Finds the modules of a model that rotate, and builds a subclass with the fused rotation for each of them.

The subclass overrides the methods that call the rotation. They have the same code, but the name of the rotation
function refers to the fused one. A rotation that is a static method of the class is overridden itself. If QK-norm is
fused as well, the code is compiled again.
"""

import ast
import inspect
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from ropewalk.hub.accelerate.fused_rotation import fused_norm_rotation, fused_rotation
from ropewalk.hub.accelerate.norm_fusion import FUSED, FusedMethod, NormKind, fused_method, norm_kind
from ropewalk.hub.accelerate.part import Part
from ropewalk.hub.accelerate.rotation_probe import Rotation, Table, is_candidate, rotation_of
from ropewalk.hub.accelerate.source import Sources, function_behind
from ropewalk.hub.accelerate.table_probe import table_widths, why_not_doubled
from ropewalk.kernels.torch_internals import own_tensors

__all__ = ["PLAIN", "bound_methods", "plain_state", "planned"]

# The attribute of the subclasses that refers to the original class.
PLAIN = "_ropewalk_plain"


@dataclass(frozen=True)
class _Method:
    """A method, and the functions of cos and sin that it calls: per name, the function and what it computes.

    The names in `static` are static methods of the class. The others are names of the module of the method.
    """

    name: str
    function: Any
    decorated: bool
    rotations: dict[str, tuple[Callable[..., Any], Rotation | str]]
    static: frozenset[str]

    def known(self) -> dict[str, tuple[Callable[..., Any], Rotation]]:
        return {name: (call, kind) for name, (call, kind) in self.rotations.items() if isinstance(kind, Rotation)}


def planned(model: nn.Module) -> tuple[list[tuple[nn.Module, type, Part]], list[Part]]:
    """Plan the acceleration of a model.

    Args:
        model: The model.

    Returns:
        One (module, subclass, part) per module to change, and the modules that are not changed, with the reasons.

    >>> planned(nn.Linear(2, 2))
    ([], [])
    """
    plans: list[tuple[nn.Module, type, Part]] = []
    left: list[Part] = []
    analysis = _Analysis(model)
    subclasses: dict[tuple[Any, ...], type] = {}
    for name, module in model.named_modules():
        kind = type(module)
        methods = analysis.methods_of(kind)
        if not methods:
            hidden = analysis.hidden(kind)
            reason = f"its {hidden} may call the method of its base class, which rotates"
            left += [Part(name, kind.__name__, reason)] if hidden else []
            continue
        reason = _why_not(module, methods)
        known = [method for method in methods if method.known()]
        widths = _widths(name, known, analysis) if reason is None else None
        if reason is not None or isinstance(widths, str):
            left.append(Part(name, kind.__name__, reason or str(widths)))
            continue
        fusions = {method.name: _fusion(module, method, analysis) for method in known}
        key = kind, widths, tuple(fusions.items())
        if key not in subclasses:
            subclasses[key] = _subclass(kind, known, widths, fusions)
        rotations = dict.fromkeys(
            f"{function}, {rotation}" for method in known for function, (_, rotation) in method.known().items()
        )
        part = Part(name, kind.__name__, "; ".join(rotations), _norm_summary(module, fusions))
        plans.append((module, subclasses[key], part))
    return plans, left


class _Analysis:
    """The analysis of one model. Layers share classes, functions and tables, and each of these is analyzed once."""

    def __init__(self, model: nn.Module) -> None:
        self.sources = Sources()
        self._modules = dict(model.named_modules(remove_duplicate=False))
        self._rotations: dict[Any, Rotation | str] = {}
        self._methods: dict[type, list[_Method]] = {}
        self._hidden: dict[type, str | None] = {}
        self._widths: dict[tuple[nn.Module, Table], frozenset[int] | str] = {}
        self._fused: dict[tuple[Any, str], FusedMethod | str] = {}
        self._norms: dict[tuple[Any, ...], NormKind | str] = {}
        # The modules that compute tables in each part of the model, by the name of the part.
        self._makers: dict[str, list[nn.Module]] = {}
        for name, module in self._modules.items():
            if _makes_tables(module):
                path = name.split(".") if name else []
                for depth in range(len(path) + 1):
                    makers = self._makers.setdefault(".".join(path[:depth]), [])
                    makers += [] if any(module is maker for maker in makers) else [module]

    def methods_of(self, kind: type) -> list[_Method]:
        """Return the methods of a class that call functions of cos and sin."""
        if kind not in self._methods:
            self._methods[kind] = list(self._calling(kind))
        return self._methods[kind]

    def _calling(self, kind: type) -> Iterator[_Method]:
        attributes = {name: value for base in reversed(kind.__mro__) for name, value in vars(base).items()}
        static_methods = {
            name: value.__func__
            for name, value in attributes.items()
            if isinstance(value, staticmethod) and is_candidate(value.__func__)
        }
        for name, value in attributes.items():
            if not isinstance(value, types.FunctionType) or value.__module__ == nn.Module.__module__:
                continue
            function: Any = inspect.unwrap(value)
            if not isinstance(function, types.FunctionType):
                continue
            names = [key for key in _names(function.__code__) if key in function.__globals__]
            used: dict[str, Any] = {key: function_behind(function.__globals__[key]) for key in names}
            called = {key: item for key, item in used.items() if is_candidate(item)}
            # Most classes have none, and then the source is not parsed.
            of_self = self._of_self(function) if static_methods else set[str]()
            static = {key: item for key, item in static_methods.items() if key in of_self and key not in called}
            if called or static:
                rotations = {key: (item, self.rotation_of(item)) for key, item in (called | static).items()}
                yield _Method(name, function, function is not value, rotations, frozenset(static))

    def _of_self(self, function: types.FunctionType) -> set[str]:
        """Return the attributes of its first argument that the code of a method reads, as in self.name."""
        definition = self.sources.definition(function) if function.__code__.co_argcount else None
        if definition is None:
            return set()
        owner = function.__code__.co_varnames[0]
        nodes = [node for node in ast.walk(definition) if isinstance(node, ast.Attribute)]
        return {node.attr for node in nodes if isinstance(node.value, ast.Name) and node.value.id == owner}

    def rotation_of(self, function: Any) -> Rotation | str:
        if function not in self._rotations:
            self._rotations[function] = rotation_of(function, self.sources)
        return self._rotations[function]

    def hidden(self, kind: type) -> str | None:
        """Return the name of a method that overrides one that rotates, and may call it."""
        if kind not in self._hidden:
            overriding = [
                method.name
                for base in kind.__mro__[1:]
                for method in self.methods_of(base)
                if method.known() and getattr(kind, method.name, None) is not getattr(base, method.name)
            ]
            self._hidden[kind] = overriding[0] if overriding else None
        return self._hidden[kind]

    def makers(self, name: str) -> list[nn.Module]:
        """Return the modules that compute cos and sin in the smallest part of the model around `name` that has any."""
        path = name.split(".") if name else []
        parts = (".".join(path[:depth]) for depth in range(len(path), -1, -1))
        return next((self._makers[part] for part in parts if part in self._makers), [])

    def widths_of(self, maker: nn.Module, table: Table) -> frozenset[int] | str:
        if (maker, table) not in self._widths:
            widths = table_widths(maker, table)
            reason = None if isinstance(widths, str) else why_not_doubled(maker, table, self.sources)
            self._widths[maker, table] = reason or widths
        return self._widths[maker, table]

    def fused_method(self, method: types.FunctionType, name: str) -> FusedMethod | str:
        if (method, name) not in self._fused:
            self._fused[method, name] = fused_method(method, name, self.sources)
        return self._fused[method, name]

    def norm_kind(self, module: nn.Module) -> NormKind | str:
        """Return what a norm computes. Norms of one class with equal plain attributes and shapes compute the same.

        The values of tensors do not matter: a norm is only accepted if it reads no tensor except its weight, and the
        weight is replaced when the norm is probed.
        """
        plain = [
            (key, value) for key, value in vars(module).items() if isinstance(value, bool | int | float | str | None)
        ]
        tensors = [(key, None if x is None else (tuple(x.shape), x.is_meta)) for key, x in own_tensors(module).items()]
        key = type(module), tuple(plain), tuple(tensors)
        callables = [value for value in vars(module).values() if callable(value)]
        if callables or list(module.children()):
            return norm_kind(module, self.sources)
        if key not in self._norms:
            self._norms[key] = norm_kind(module, self.sources)
        return self._norms[key]


def _names(code: types.CodeType) -> Iterator[str]:
    """Yield every name that code looks up, including the code of inner functions."""
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _names(inner)


def _why_not(module: nn.Module, methods: list[_Method]) -> str | None:
    """Return why a module that calls functions of cos and sin cannot be changed, or None if it can."""
    if not any(method.known() for method in methods):
        reasons = {key: kind for method in methods for key, (_, kind) in method.rotations.items()}
        return "; ".join(f"{key}: {reason}" for key, reason in reasons.items())
    decorated = [method.name for method in methods if method.decorated]
    if decorated:
        return f"its {decorated[0]} is decorated"
    replaced = [name for method in methods for name in (method.name, *method.static) if name in module.__dict__]
    # The device hooks of the accelerate package store the method that they wrap. That method can be replaced.
    if replaced and not set(replaced) <= set(bound_methods(module, [method.function for method in methods]).values()):
        return f"its {replaced[0]} was replaced in this instance"
    return None


def bound_methods(module: nn.Module, functions: list[types.FunctionType]) -> dict[str, str]:
    """Return the attributes of an instance that are one of `functions`, bound to it, with the names of the methods.

    >>> layer = nn.Linear(2, 2)
    >>> layer._old_forward = layer.forward
    >>> bound_methods(layer, [nn.Linear.forward])
    {'_old_forward': 'forward'}
    """
    methods = {name: value for name, value in module.__dict__.items() if isinstance(value, types.MethodType)}
    return {name: value.__name__ for name, value in methods.items() if value.__func__ in functions}


def _widths(name: str, methods: list[_Method], analysis: _Analysis) -> frozenset[int] | str | None:
    """Return the widths of the tables that reach a module, None if any width is valid, or why they are not known."""
    tables: set[Table] = {kind.table for method in methods for _, kind in method.known().values() if kind.reads_all}
    if not tables:
        return None
    makers = analysis.makers(name)
    if not makers:
        return "the module that computes its cos and sin was not found"
    widths: frozenset[int] = frozenset()
    for maker in makers:
        for table in tables:
            maker_widths = analysis.widths_of(maker, table)
            if isinstance(maker_widths, str):
                return maker_widths
            widths |= maker_widths
    return widths


def _makes_tables(module: nn.Module) -> bool:
    named = any(word in type(module).__name__ for word in ("Rotary", "RoPE", "Rope"))
    return named or any("inv_freq" in name for name, _ in module.named_buffers(recurse=False))


Fusion = tuple[FusedMethod, str, Rotation, type, NormKind]


def _fusion(module: nn.Module, method: _Method, analysis: _Analysis) -> Fusion | str:
    """Return how QK-norm is fused with the rotation of a method, or why it is not."""
    pairs = [(name, kind) for name, (_, kind) in method.known().items() if kind.both and kind.packing is None]
    supported = len(pairs) == len(method.rotations) == 1 and not method.static
    if not supported or pairs[0][1].conjugate or pairs[0][1].reorders:
        return "a norm cannot be fused with its rotation"
    name, rotation = pairs[0]
    fused = analysis.fused_method(method.function, name)
    if isinstance(fused, str):
        return fused
    norms = [getattr(module, attribute, None) for attribute in (fused.q_norm, fused.k_norm)]
    if not all(isinstance(norm, nn.Module) for norm in norms) or type(norms[0]) is not type(norms[1]):
        return "its norms of q and k differ"
    q_kind, k_kind = (analysis.norm_kind(norm) for norm in norms if isinstance(norm, nn.Module))
    if isinstance(q_kind, str) or isinstance(k_kind, str):
        return q_kind if isinstance(q_kind, str) else str(k_kind)
    return (fused, name, rotation, type(norms[0]), q_kind) if q_kind == k_kind else "its norms of q and k differ"


def _norm_summary(module: nn.Module, fusions: dict[str, Fusion | str]) -> str | None:
    """Describe what was done with QK-norm, or return None if the module has no norm."""
    fused = [fusion for fusion in fusions.values() if not isinstance(fusion, str)]
    if fused:
        return "fused, times 1 + weight" if fused[0][-1].norm.plus_one else "fused"
    has_norm = any("norm" in name for name, _ in module.named_children())
    return f"not fused, {'; '.join(map(str, fusions.values()))}" if has_norm else None


def _subclass(
    kind: type, methods: list[_Method], widths: frozenset[int] | None, fusions: dict[str, Fusion | str]
) -> type:
    """Create a subclass of `kind` whose methods use the fused rotation."""
    namespace: dict[str, Any] = {
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__doc__": kind.__doc__,
        "__reduce_ex__": _reduce_to_plain,
        PLAIN: kind,
    }
    for method in methods:
        names = {
            name: fused_rotation(original, rotation, widths) for name, (original, rotation) in method.known().items()
        }
        namespace |= {name: staticmethod(names.pop(name)) for name in method.static & names.keys()}
        code, fusion = method.function.__code__, fusions[method.name]
        if not isinstance(fusion, str):
            fused, name, rotation, norms, norm = fusion
            code = fused.code
            names[FUSED] = fused_norm_rotation(names[name], rotation, widths, norms, *norm)
        namespace[method.name] = _with_names(method.function, code, names)
    return type(kind)(kind.__name__, (kind,), namespace)


def _with_names(function: types.FunctionType, code: types.CodeType, names: dict[str, Any]) -> types.FunctionType:
    """Return a copy of a function with this code, in whose globals `names` are replaced."""
    # Without __name__: torch.compile would look up the names in the module of that name, and find the original ones.
    needed = {*_names(code), "__builtins__", "__package__"}
    kept = {name: value for name, value in function.__globals__.items() if name in needed and name != "__name__"}
    # A separate code object: what torch.compile caches per code object must not be used for the original class.
    copied = types.FunctionType(
        code.replace(), kept | names, function.__name__, function.__defaults__, function.__closure__
    )
    copied.__kwdefaults__, copied.__annotations__ = function.__kwdefaults__, function.__annotations__
    copied.__module__, copied.__qualname__, copied.__doc__ = (
        function.__module__,
        function.__qualname__,
        function.__doc__,
    )
    return copied


def plain_state(module: nn.Module) -> dict[str, Any]:
    """Return the attributes of an instance that are methods of the subclass, bound to the original class instead.

    >>> plain_state(nn.Linear(2, 2))
    {}
    """
    subclass = _accelerated_class(type(module))
    plain = getattr(subclass, PLAIN, subclass)
    functions = [value for value in vars(subclass).values() if isinstance(value, types.FunctionType)]
    bound = bound_methods(module, functions if plain is not subclass else [])
    return {name: types.MethodType(getattr(plain, method), module) for name, method in bound.items()}


def _accelerated_class(kind: type) -> type:
    """Return the class created by `accelerate` that `kind` is or derives from, or `kind` if there is none."""
    return next((base for base in kind.__mro__ if PLAIN in vars(base)), kind)


def _reduce_to_plain(self: Any, protocol: int) -> tuple[Any, ...]:
    """Implement copy and pickle: the result has the original class."""
    subclass = _accelerated_class(type(self))
    plain = getattr(subclass, PLAIN)
    # Newer protocols require the class of the object itself.
    make, arguments, *rest = super(subclass, self).__reduce_ex__(min(protocol, 1))
    state = rest[0] if rest else None
    if isinstance(state, dict):
        rest[0] = state | plain_state(self)
    return make, tuple(plain if argument is subclass else argument for argument in arguments), *rest
