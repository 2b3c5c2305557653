"""Parses JSON within limits, and edits single members of a JSON text without changing any other byte.

Parsing a config and writing it again would change spaces, escapes and the notation of numbers: 1e-5 for 0.00001. Here
only the text of the edited members changes.

The text to edit may be UTF-8 decoded as Latin-1: one character per byte, which needs a quarter of the memory if the
text contains an emoji. This is safe because JSON's syntax and the edited keys are ASCII.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ropewalk.spec.value import without_repeats

__all__ = ["parse", "with_member", "without_member"]

# The limit on values in a text. The index of a model with a trillion parameters has 140,000. This many need 50 MB.
_MOST_VALUES = 1 << 18
_DECODER = json.JSONDecoder()
_SPACE = re.compile(r"[ \t\n\r]*")


def parse(data: bytes) -> Any:
    """Parse JSON in UTF-8. Raise a ValueError if it is invalid, has a duplicate key, or has too many values.

    >>> parse(b'{"a": [1, 2]}')
    {'a': [1, 2]}
    """
    # Every value except the first follows one of these. Commas in strings are counted too, which is harmless.
    values = sum(data.count(mark) for mark in (b",", b"[", b"{"))
    if values > _MOST_VALUES:
        raise ValueError(f"about {values} values; the limit is {_MOST_VALUES}")
    try:
        return json.loads(data.decode("utf-8"), object_pairs_hook=without_repeats)
    except RecursionError:
        raise ValueError("values are nested too deeply") from None
    except ValueError as error:
        # The message contains a duplicate key, which may be long.
        raise ValueError(str(error)[:200]) from None


@dataclass(frozen=True)
class _Member:
    """A key, where it starts and ends in the text (`start`, `colon`), and where its value does (`value`, `end`)."""

    key: str
    start: int
    colon: int
    value: int
    end: int


def _after_space(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    return at if match is None else match.end()


def _members(text: str, at: int) -> list[_Member]:
    """Return the members of the object that starts at `at`."""
    members: list[_Member] = []
    at = _after_space(text, at + 1)
    while text[at] != "}":
        key, colon = _DECODER.raw_decode(text, at)
        value = _after_space(text, _after_space(text, colon) + 1)
        end = _DECODER.raw_decode(text, value)[1]
        members.append(_Member(key, at, colon, value, end))
        at = _after_space(text, end)
        if text[at] == ",":
            at = _after_space(text, at + 1)
    return members


def _object(text: str, place: Sequence[str]) -> tuple[int, list[_Member]]:
    """Return where the object under the keys of `place` starts, and its members."""
    at = _after_space(text, 0)
    members = _members(text, at)
    for key in place:
        at = next(member.value for member in members if member.key == key)
        members = _members(text, at)
    return at, members


def with_member(text: str, place: Sequence[str], key: str, value: object) -> str:
    """Set a member of the object under the keys of `place`. All other text is unchanged.

    An existing member stays in its place. A new one is added at the end, with the spacing of the member before it.

    >>> with_member('{"a": 1.0, "b":{"c" : 1e5}}', ["b"], "c", True)
    '{"a": 1.0, "b":{"c" : true}}'
    >>> with_member('{"a":1}', [], "b", None)
    '{"a":1,"b":null}'
    """
    at, members = _object(text, place)
    old = next((member for member in members if member.key == key), None)
    if old is not None:
        return text[: old.value] + _written(value, *_style(text, at, old)) + text[old.end :]
    if not members:
        return f"{text[: at + 1]}{json.dumps(key)}: {_written(value, ': ', '')}{text[at + 1 :]}"
    last = members[-1]
    colon, gap = _style(text, at, last)
    return f"{text[: last.end]},{gap}{json.dumps(key)}{colon}{_written(value, colon, gap)}{text[last.end :]}"


def without_member(text: str, place: Sequence[str], key: str) -> str:
    """Remove a member of the object under the keys of `place`: the inverse of adding it.

    >>> without_member('{"a":1,"b":null}', [], "b")
    '{"a":1}'
    """
    _, members = _object(text, place)
    number = next((number for number, member in enumerate(members) if member.key == key), None)
    if number is None:
        return text
    start, end = members[number].start, members[number].end
    if number:
        start = members[number - 1].end
    elif len(members) > 1:
        end = members[1].start
    return text[:start] + text[end:]


def _style(text: str, at: int, member: _Member) -> tuple[str, str]:
    """Return the text between a key and its value, and the space before the key."""
    before = text[at + 1 : member.start]
    return text[member.colon : member.value], before[len(before.rstrip(" \t\n\r")) :]


def _written(value: object, colon: str, gap: str) -> str:
    """Format a value. Members of an object are on separate lines if `gap`, the space before its key, has a newline."""
    if not isinstance(value, dict) or not value:
        return json.dumps(value)
    indent = gap[gap.rfind("\n") + 1 :]
    inner, end = (gap + indent, gap) if "\n" in gap else ("", "")
    between = "," + (inner or ("" if colon == ":" else " "))
    return "{" + inner + between.join(f"{json.dumps(k)}{colon}{json.dumps(v)}" for k, v in value.items()) + end + "}"
