"""Conversion of dataclass values to and from JSON: the name of the class, and its fields."""

import dataclasses
from collections import Counter
from collections.abc import Mapping
from typing import ClassVar, Protocol, TypeVar, cast, runtime_checkable

from ropewalk.errors import RopewalkError, require_choice, shown

__all__ = [
    "DataclassValue",
    "Parts",
    "construct",
    "from_dict",
    "from_parts",
    "register",
    "to_dict",
    "to_parts",
    "without_repeats",
]

T = TypeVar("T")

# A class, and its fields by name: numbers, strings, tuples of them, and nested Parts.
Parts = tuple[type[object], tuple[tuple[str, object], ...]]


@runtime_checkable
class DataclassValue(Protocol):
    """Any dataclass.

    >>> from ropewalk.spec import Plain
    >>> isinstance(Plain(), DataclassValue)
    True
    """

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[object]]]


def to_dict(value: DataclassValue, key: str) -> dict[str, object]:
    """Return the fields of a frozen dataclass, and the name of its class under `key`.

    >>> @dataclasses.dataclass(frozen=True)
    ... class Step:
    ...     by: int
    >>> to_dict(Step(2), "kind")
    {'kind': 'Step', 'by': 2}
    """
    fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return {key: type(value).__name__, **fields}


def to_parts(value: DataclassValue) -> Parts:
    """Return the class and the named fields of a dataclass value, recursively.

    >>> @dataclasses.dataclass(frozen=True)
    ... class Step:
    ...     by: int
    >>> to_parts(Step(2))[1]
    (('by', 2),)
    """
    fields: list[tuple[str, object]] = [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)]
    parts = [(name, to_parts(cast("DataclassValue", x)) if dataclasses.is_dataclass(x) else x) for name, x in fields]
    return type(value), tuple(parts)


def from_parts(parts: Parts, expected: type[T]) -> T:
    """Return the value from which `to_parts` made `parts`, without running its checks again.

    >>> @dataclasses.dataclass(frozen=True)
    ... class Step:
    ...     by: int
    >>> from_parts(to_parts(Step(2)), Step)
    Step(by=2)
    """
    kind, fields = parts
    value = object.__new__(kind)
    for name, x in fields:
        is_value = isinstance(x, tuple) and isinstance(next(iter(cast("tuple[object, ...]", x)), None), type)
        object.__setattr__(value, name, from_parts(cast("Parts", x), object) if is_value else x)
    if not isinstance(value, expected):
        raise TypeError(f"parts of {kind.__name__}, not of {expected.__name__}")
    return value


def register(kind: type[T], known: dict[str, type[T]]) -> None:
    """Add a class to `known`, the classes that JSON can name.

    Raises:
        RopewalkError: If another class has the same name, because JSON identifies classes by name.

    >>> known = {}
    >>> register(int, known)
    >>> known
    {'int': <class 'int'>}
    """
    other = known.get(kind.__name__, kind)
    # A notebook may define the same class again. That is not an error.
    if (other.__module__, other.__qualname__) != (kind.__module__, kind.__qualname__):
        raise RopewalkError(
            asked=f"a class {kind.__module__}.{kind.__qualname__}",
            expected="a name that no other rule has, because JSON identifies rules by name",
            got=f"the name of {other.__module__}.{other.__qualname__}",
            do="rename the class",
        )
    known[kind.__name__] = kind


def from_dict(data: object, key: str, known: Mapping[str, type[T]], *, owner: str) -> T:
    """Return the value that `to_dict` wrote.

    Args:
        data: The object that was read from JSON.
        key: The key that contains the name of the class.
        known: The classes that are accepted, by name.
        owner: What the value is, for error messages.

    Raises:
        RopewalkError: If `data` is not such an object, or names an unknown class or field.

    >>> @dataclasses.dataclass(frozen=True)
    ... class Step:
    ...     by: int
    >>> from_dict({"kind": "Step", "by": 2}, "kind", {"Step": Step}, owner="the stride")
    Step(by=2)
    """
    fields = dict(cast("dict[str, object]", data)) if isinstance(data, dict) else {}
    if key not in fields:
        raise RopewalkError(
            asked=f"{owner} of a RopeSpec from JSON",
            expected=f'an object with a "{key}"',
            got=shown(cast("object", data)),
            do=f'write for example {{"{key}": "{next(iter(known))}", ...}}',
        )
    asked = f'"{key}" of {owner} (import the module of a custom rule first)'
    kind = known[require_choice(fields.pop(key), known, asked=asked)]
    for name in fields:
        require_choice(name, _field_names(kind), asked=f"the fields of {kind.__name__} in JSON")
    return construct(kind, fields, source="JSON")


def construct(kind: type[T], fields: Mapping[str, object], *, source: str) -> T:
    """Return kind(**fields). Raise an error that names `source` if a field without a default is missing.

    >>> @dataclasses.dataclass(frozen=True)
    ... class Step:
    ...     by: int
    >>> construct(Step, {"by": 2}, source="JSON")
    Step(by=2)
    """
    try:
        return kind(**fields)
    except TypeError:
        raise RopewalkError(
            asked=f"{kind.__name__} from {source}",
            expected=f"the fields {', '.join(_field_names(kind))}",
            got=", ".join(fields) or "no field",
            do="add the fields that are missing",
        ) from None


def _field_names(kind: type[object]) -> list[str]:
    return [field.name for field in dataclasses.fields(cast("type[DataclassValue]", kind))]


def without_repeats(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Return a JSON object as a dict. Raise if a key occurs twice: Python's reader would keep the last value silently.

    >>> without_repeats([("a", 1), ("b", 2)])
    {'a': 1, 'b': 2}
    """
    fields = dict(pairs)
    if len(fields) != len(pairs):
        repeated = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"the key {repeated[:200]!r} occurs twice, and JSON readers differ in which one they use")
    return fields
