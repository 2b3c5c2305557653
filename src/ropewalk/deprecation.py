"""What still works but will be removed: each with its replacement, and the versions that warn and that remove it.

docs/releasing.md has the rules. A test fails once the version of ropewalk is the one that removes something listed here
or in a decorator.
"""

import functools
import importlib
import types
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar, cast

from ropewalk.errors import depth_of_caller
from ropewalk.signatures import ArgumentError, no_attribute, with_globals_of

__all__ = ["NAMES", "Deprecation", "renamed_argument", "renamed_name"]

Renamed = TypeVar("Renamed", bound=Callable[..., object])


@dataclass(frozen=True)
class Deprecation:
    """Something deprecated. For a changed behaviour, call `warn` where the old one happens.

    Attributes:
        instead: What to use. For a name of a module, its new name with its module.
        since: The first version that warns.
        removed_in: The version that removes it: the next minor version.

    >>> with warnings.catch_warnings(record=True) as caught:
    ...     warnings.simplefilter("always")
    ...     Deprecation("new()", since="0.3", removed_in="0.4").warn("old()")
    >>> print(caught[0].category.__name__, caught[0].message)
    DeprecationWarning old() is deprecated since ropewalk 0.3, and 0.4 removes it: use new()
    """

    instead: str
    since: str
    removed_in: str

    def warn(self, what: str) -> None:
        """Emit a `DeprecationWarning` at the first line of code outside of ropewalk and torch."""
        message = (
            f"{what} is deprecated since ropewalk {self.since}, and {self.removed_in} removes it: use {self.instead}"
        )
        warnings.warn(message, DeprecationWarning, stacklevel=depth_of_caller())


# Deprecated names, with their modules. "ropewalk.Old": Deprecation("ropewalk.New", since="0.3", removed_in="0.4")
NAMES: dict[str, Deprecation] = {}


def renamed_name(module: str, name: str) -> object:
    """Return the object that a deprecated name of a module is now, and warn. The `__getattr__` of the module calls it.

    Args:
        module: The module.
        name: A name that it does not have.

    Raises:
        AttributeError: If the name is not deprecated.

    >>> NAMES["ropewalk.Rope"] = Deprecation("ropewalk.RopeSpec", since="0.3", removed_in="0.4")
    >>> with warnings.catch_warnings(record=True) as caught:
    ...     warnings.simplefilter("always")
    ...     print(renamed_name("ropewalk", "Rope").__name__, len(caught))
    RopeSpec 1
    >>> del NAMES["ropewalk.Rope"]
    """
    deprecation = NAMES.get(f"{module}.{name}")
    if deprecation is None:
        raise no_attribute(name, module)
    deprecation.warn(f"{module}.{name}")
    home, _, new = deprecation.instead.rpartition(".")
    return getattr(importlib.import_module(home), new)


def renamed_argument(old: str, new: str, *, since: str, removed_in: str) -> Callable[[Renamed], Renamed]:
    """Decorate a function or a constructor, outside of `checks_names`: an argument keeps its old name for one version.

    Args:
        old: The name that warns.
        new: The name of the parameter.
        since: The first version that warns.
        removed_in: The version that removes it.

    Returns:
        The decorator. It raises an `ArgumentError` if both names are passed.

    >>> @renamed_argument("width", "dim", since="0.3", removed_in="0.4")
    ... def doubled(dim):
    ...     return 2 * dim
    >>> with warnings.catch_warnings(record=True) as caught:
    ...     warnings.simplefilter("always")
    ...     print(doubled(width=2), doubled(dim=2), len(caught))
    4 4 1
    """
    deprecation = Deprecation(f"{new}=", since, removed_in)

    def decorate(function: Renamed) -> Renamed:
        original = cast("types.FunctionType", function)
        call = original.__qualname__.removesuffix(".__init__")

        def accept(options: dict[str, object]) -> None:
            if new in options:
                raise ArgumentError(
                    asked=f"{call}({old}=..., {new}=...)",
                    expected=f"one of them: {old} is the old name of {new}",
                    got="both",
                    do=f"omit {old}=",
                )
            deprecation.warn(f"{call}({old}=...)")
            options[new] = options.pop(old)

        def renamed(*arguments: object, **options: object) -> object:
            if old in options:
                accept(options)
            return function(*arguments, **options)

        return cast("Renamed", functools.update_wrapper(with_globals_of(original, renamed), function))

    return decorate
