"""JSON as text: parsed within limits, and changed member by member, with every other byte as it was.

A config that is parsed and written anew has other spaces, other escapes and other spellings of its numbers: 1e-5 for
0.00001. Here the text is cut at the members that change and nowhere else.

A text to be changed may be UTF-8 that was decoded as Latin-1, a character per byte, which takes a quarter of the memory
where there is an emoji: what JSON is made of is ASCII, and so are the keys that are looked for.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ropewalk.spec.value import without_repeats

__all__ = ["parse", "with_member", "without_member"]

# Values in a text. The index of a model with a trillion parameters has 140,000; this many fill some 50 MB.
_MOST_VALUES = 1 << 18
_DECODER = json.JSONDecoder()
_SPACE = re.compile(r"[ \t\n\r]*")


def parse(data: bytes) -> Any:
    """What a text in UTF-8 says. One with a key twice, or with more values than memory should hold, is a ValueError.

    >>> parse(b'{"a": [1, 2]}')
    {'a': [1, 2]}
    """
    # Every value but the first follows one of these. Commas in strings count too, and are few.
    values = sum(data.count(mark) for mark in (b",", b"[", b"{"))
    if values > _MOST_VALUES:
        raise ValueError(f"about {values} values, where at most {_MOST_VALUES} are read")
    try:
        return json.loads(data.decode("utf-8"), object_pairs_hook=without_repeats)
    except RecursionError:
        raise ValueError("values in values without end") from None
    except ValueError as error:
        # A key that is there twice is shown, and may be long.
        raise ValueError(str(error)[:200]) from None


@dataclass(frozen=True)
class _Member:
    """A key and its value: where the key begins and ends, and the value likewise."""

    key: str
    start: int
    colon: int
    value: int
    end: int


def _after_space(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    return at if match is None else match.end()


def _members(text: str, at: int) -> list[_Member]:
    """The members of the object that begins at `at`."""
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
    """Where the object under the keys of `place` begins, and its members."""
    at = _after_space(text, 0)
    members = _members(text, at)
    for key in place:
        at = next(member.value for member in members if member.key == key)
        members = _members(text, at)
    return at, members


def with_member(text: str, place: Sequence[str], key: str, value: object) -> str:
    """A JSON text in which the object under the keys of `place` has this member, with every other byte as it was.

    A member that is there keeps its place. A new one is the last, and is written as the one before it is.

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
    """A JSON text in which the object under the keys of `place` lacks this member: the inverse of adding it.

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
    """What is between a key and its value, and between the key and what is before it."""
    before = text[at + 1 : member.start]
    return text[member.colon : member.value], before[len(before.rstrip(" \t\n\r")) :]


def _written(value: object, colon: str, gap: str) -> str:
    """A value; the members of an object in lines of their own where `gap`, which is before its key, has a new line."""
    if not isinstance(value, dict) or not value:
        return json.dumps(value)
    indent = gap[gap.rfind("\n") + 1 :]
    inner, end = (gap + indent, gap) if "\n" in gap else ("", "")
    between = "," + (inner or ("" if colon == ":" else " "))
    return "{" + inner + between.join(f"{json.dumps(k)}{colon}{json.dumps(v)}" for k, v in value.items()) + end + "}"
