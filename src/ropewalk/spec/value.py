"""Values as JSON holds them: the class by name, and its fields."""

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

# A class, and its fields by name: numbers, texts, tuples of them, and Parts.
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
    """The name of a frozen dataclass under `key`, and its fields.

    >>> @dataclasses.dataclass(frozen=True)
    ... class Step:
    ...     by: int
    >>> to_dict(Step(2), "kind")
    {'kind': 'Step', 'by': 2}
    """
    fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return {key: type(value).__name__, **fields}


def to_parts(value: DataclassValue) -> Parts:
    """A value as its class and its fields by name; a field that is a value too in the same way.

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
    """The value of which `to_parts` made parts. It was checked when it was made, and is not checked again.

    >>> @dataclasses.dataclass(frozen=True)
    ... class Step:
    ...     by: int
    >>> from_parts(to_parts(Step(2)), Step)
    Step(by=2)
    """
    made, fields = parts
    value = object.__new__(made)
    for name, x in fields:
        is_value = isinstance(x, tuple) and isinstance(next(iter(cast("tuple[object, ...]", x)), None), type)
        object.__setattr__(value, name, from_parts(cast("Parts", x), object) if is_value else x)
    if not isinstance(value, expected):
        raise TypeError(f"parts of {made.__name__}, not of {expected.__name__}")
    return value


def register(made: type[T], known: dict[str, type[T]]) -> None:
    """Lets JSON name a class. One that has the name of another is refused: JSON could not tell them apart.

    >>> known = {}
    >>> register(int, known)
    >>> known
    {'int': <class 'int'>}
    """
    other = known.get(made.__name__, made)
    # The same class, defined again, as a notebook does it.
    if (other.__module__, other.__qualname__) != (made.__module__, made.__qualname__):
        raise RopewalkError(
            asked=f"a class {made.__module__}.{made.__qualname__}",
            expected="a name that no rule has yet, since JSON tells rules apart by their names",
            got=f"the name of {other.__module__}.{other.__qualname__}",
            do="give it another name",
        )
    known[made.__name__] = made


def from_dict(data: object, key: str, known: Mapping[str, type[T]], *, what: str) -> T:
    """The value that `to_dict` wrote, of one of the classes in `known`.

    >>> @dataclasses.dataclass(frozen=True)
    ... class Step:
    ...     by: int
    >>> from_dict({"kind": "Step", "by": 2}, "kind", {"Step": Step}, what="the stride")
    Step(by=2)
    """
    fields = dict(cast("dict[str, object]", data)) if isinstance(data, dict) else {}
    if key not in fields:
        raise RopewalkError(
            asked=f"{what} of a RopeSpec from JSON",
            expected=f'an object with a "{key}"',
            got=shown(cast("object", data)),
            do=f'write for example {{"{key}": "{next(iter(known))}", ...}}',
        )
    asked = f'"{key}" of {what}; a rule of your own is known once its module is imported'
    made = known[require_choice(fields.pop(key), known, asked=asked)]
    for name in fields:
        require_choice(name, _fields_of(made), asked=f"the fields of {made.__name__} in JSON")
    return construct(made, fields, source="JSON")


def construct(made: type[T], fields: Mapping[str, object], *, source: str) -> T:
    """A value of the class `made`; fields without a default that are missing are an error that names `source`.

    >>> @dataclasses.dataclass(frozen=True)
    ... class Step:
    ...     by: int
    >>> construct(Step, {"by": 2}, source="JSON")
    Step(by=2)
    """
    try:
        return made(**fields)
    except TypeError:
        raise RopewalkError(
            asked=f"{made.__name__} from {source}",
            expected=f"the fields {', '.join(_fields_of(made))}",
            got=", ".join(fields) or "no field",
            do="add the fields that are missing",
        ) from None


def _fields_of(made: type[object]) -> list[str]:
    return [field.name for field in dataclasses.fields(cast("type[DataclassValue]", made))]


def without_repeats(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """A JSON object as a dict; Python's own reader would let the last of two equal keys win.

    >>> without_repeats([("a", 1), ("b", 2)])
    {'a': 1, 'b': 2}
    """
    fields = dict(pairs)
    if len(fields) != len(pairs):
        twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"the key {twice[:200]!r} stands twice, and readers differ in which they take")
    return fields
