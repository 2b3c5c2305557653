"""Errors for arguments that a function does not have, and for names that a module does not have.

They name what ropewalk calls the same thing, by the tables of `ropewalk.names`.
"""

import difflib
import functools
import inspect
import sys
import types
from collections.abc import Callable, Collection, Mapping
from typing import NoReturn, TypeVar, cast

from ropewalk.errors import RopewalkError, shown
from ropewalk.names import ARGUMENTS, MOVED, OF_SHARDS

__all__ = [
    "ArgumentError",
    "MovedError",
    "advice_on_argument",
    "checks_names",
    "no_attribute",
    "refuse_arguments",
    "with_globals_of",
]

Checked = TypeVar("Checked", bound=Callable[..., object])

# The name of the parameter that collects unknown names, in a function that checks them itself.
_UNKNOWN = "unknown"
# More positional arguments than any call has.
_MANY = 1 << 30


class ArgumentError(RopewalkError, TypeError):
    """An argument that a function does not have. It is also a `TypeError`, as in any Python function.

    >>> issubclass(ArgumentError, TypeError)
    True
    """


class MovedError(RopewalkError, AttributeError):
    """A name that moved. It is also an `AttributeError`, so `hasattr` returns False.

    >>> import ropewalk
    >>> hasattr(ropewalk, "Linear")
    False
    """


def checks_names(function: Checked) -> Checked:
    """Decorate a function, a constructor or a dataclass: an argument that it does not have raises an `ArgumentError`.

    The error names the argument here that other libraries call so. The signature stays the same for `inspect`, editors
    and type checkers, and doctests are still collected from the module of the function.

    A function that is called for every token cannot afford a wrapper. It declares `*unnamed: Never` and
    `**unknown: Never` and calls `refuse_arguments` itself; only its signature is changed here, which hides the two.

    Args:
        function: The function, or a dataclass, whose constructor is then checked.

    Returns:
        The checked function, or the same class.

    >>> @checks_names
    ... def rotated(q, *, base=10_000.0):
    ...     return base
    >>> try:
    ...     rotated(1, theta=5e5)
    ... except TypeError as error:
    ...     print(error.do)
    pass base=500000.0: theta is called base here
    """
    if isinstance(function, type):
        kind = cast("type[object]", function)
        kind.__init__ = checks_names(kind.__init__)
        return cast("Checked", kind)
    original = cast("types.FunctionType", function)
    signature = inspect.signature(function)
    named = [p for p in signature.parameters.values() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if _UNKNOWN in signature.parameters:
        original.__signature__ = signature.replace(parameters=named)  # pyright: ignore[reportAttributeAccessIssue]
        return function
    names, kinds = tuple(p.name for p in named), {p.kind for p in signature.parameters.values()}
    most = _MANY if inspect.Parameter.VAR_POSITIONAL in kinds else len(_by_position(signature))
    # With **options any name is accepted, except another library's name of a parameter that is not in the options.
    refused = (
        tuple(name for name in ARGUMENTS if _ours(name, names)) if inspect.Parameter.VAR_KEYWORD in kinds else None
    )
    call, refuse = original.__qualname__.removesuffix(".__init__"), refuse_arguments

    known = frozenset(names)

    def checked(*arguments: object, **options: object) -> object:
        if len(arguments) > most:
            refuse(call, function, arguments[most:], {})
        if not known.issuperset(options):
            for name in options:
                if name not in known and (refused is None or name in refused):
                    refuse(call, function, (), {name: options[name]})
        return function(*arguments, **options)

    return cast("Checked", functools.update_wrapper(with_globals_of(original, checked), function))


def with_globals_of(original: types.FunctionType, wrapper: Callable[..., object]) -> types.FunctionType:
    """Return a wrapper, which uses no globals of its own, with the globals and the name of the function that it wraps.

    doctest recognizes by the globals to which module a function belongs.

    >>> with_globals_of(no_attribute, lambda: 7)()
    7
    """
    function = cast("types.FunctionType", wrapper)
    return types.FunctionType(
        function.__code__, original.__globals__, original.__name__, function.__defaults__, function.__closure__
    )


def refuse_arguments(
    call: str, function: Callable[..., object], extra: tuple[object, ...], unknown: Mapping[str, object]
) -> NoReturn:
    """Raise the `ArgumentError` for arguments that a function does not have.

    Args:
        call: The function, as the error names it.
        function: The function.
        extra: Positional arguments past the last one that it accepts.
        unknown: Arguments that it does not have, by name. Only the first one is reported.

    Raises:
        ArgumentError: Always.

    >>> try:
    ...     refuse_arguments("shifted", lambda x, *, by: x, (7,), {})
    ... except RopewalkError as error:
    ...     print(error.do)
    pass it by name: by=
    """
    signature = inspect.signature(function)
    positional = [name for name in _by_position(signature) if name != "self"]
    names = [name for name in signature.parameters if name != "self"]
    if extra:
        others = ", ".join(f"{name}=" for name in names if name not in positional)
        them = "it" if len(extra) == 1 else "them"
        raise ArgumentError(
            asked=f"{call}(...) with {len(positional) + len(extra)} arguments without a name",
            expected=f"at most {len(positional)}: {', '.join(positional)}" if positional else "none",
            got=f"also {', '.join(map(_brief, extra))}",
            do=f"pass {them} by name: {others}" if others else f"omit {them}",
        )
    name, value = next(iter(unknown.items()))
    raise ArgumentError(
        asked=f"{call}({name}=...)",
        expected=f"arguments of {call}: {', '.join(names)}" if names else f"no arguments of {call}",
        got=f"{name}={_brief(value)}",
        do=advice_on_argument(name, value, names),
    )


def advice_on_argument(name: str, value: object, ours: Collection[str]) -> str:
    """Return what to do about an argument that a function with the parameters `ours` does not have.

    >>> advice_on_argument("interleaved", True, ("head_dim", "pairing"))
    'pass pairing="interleaved": interleaved is called pairing here'
    >>> advice_on_argument("positions", None, ("q", "k", "v", "shards"))
    'omit it: shards has the positions of the tokens'
    """
    if "shards" in ours and name in OF_SHARDS:
        return OF_SHARDS[name]
    foreign = ARGUMENTS.get(name)
    if foreign is None:
        near = difflib.get_close_matches(name, ours, n=1)
        return f"did you mean {near[0]}=?" if near else "omit it, or check its name"
    own = _ours(name, ours)
    if own is None:
        return foreign.otherwise
    if foreign.note:
        return f"pass {own}= instead: {foreign.note}"
    if foreign.values:
        text = foreign.values[value] if isinstance(value, bool) else " or ".join(foreign.values.values())
    else:
        text = repr(value) if type(value) in (int, float, str, bool) else "..."
    return f"pass {own}={text}: {name} is called {own} here"


def _ours(name: str, names: Collection[str]) -> str | None:
    """Return which of `names` other libraries call `name`, or None."""
    return next((own for own in ARGUMENTS[name].ours if own in names), None) if name in ARGUMENTS else None


def _by_position(signature: inspect.Signature) -> list[str]:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [p.name for p in signature.parameters.values() if p.kind in kinds]


def _brief(value: object) -> str:
    """Format a value in one line: dtype and shape of a tensor or an array, else as `shown`."""
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    return " ".join(shown(value).split()) if shape is None or dtype is None else f"{dtype} {list(shape)}"


def no_attribute(name: str, module: str = "ropewalk") -> AttributeError:
    """Return the error for a name that a module does not have. For `ropewalk`, it contains the new name of a moved one.

    >>> print(no_attribute("Linear").do)
    use ropewalk.PositionInterpolation
    """
    if module != "ropewalk" or name not in MOVED:
        # With the name and the module, Python suggests similar names.
        return AttributeError(f"module {module!r} has no attribute {name!r}", name=name, obj=sys.modules[module])
    return MovedError(
        asked=f"ropewalk.{name}",
        expected="a name that ropewalk has",
        got=f"no attribute {name!r}",
        do=f"use {MOVED[name]}",
    )
