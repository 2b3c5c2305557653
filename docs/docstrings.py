"""A griffe extension: the docstrings of ropewalk as the Markdown that mkdocstrings expects.

Docstrings are plain text with backticks. Doctests follow the last section without a heading, `a, b: text` describes
several parameters at once, [i] and * are indices and products, and a colon in `Returns:` separates no type.
"""

import re
from collections.abc import Callable, Iterator
from typing import Any

import griffe

SECTION = re.compile(r"^(Args|Attributes|Returns|Raises|Warns|Yields):$")
SEVERAL = re.compile(r"^( +)(\w+(?:, \w+)+): (.+)$")
# The stars of a parameter such as *sizes are part of its name.
STARRED = re.compile(r"^ +\*{1,2}\w+: ")


class Docstrings(griffe.Extension):
    """Changes the docstring of every object that griffe loads, and hides parameters that no call can pass."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called by griffe for each object."""
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)
        if isinstance(obj, griffe.Function):
            # They only exist to raise an error that names the right argument.
            for parameter in [parameter for parameter in obj.parameters if str(parameter.annotation) == "Never"]:
                del obj.parameters[parameter.name]


def as_markdown(docstring: str) -> str:
    """Fence doctests, repeat a description for each of its parameters, and escape what Markdown would interpret."""
    lines = docstring.split("\n")
    result: list[str] = []
    section = ""
    while lines:
        if lines[0].startswith(">>>"):
            result += ["```pycon", *_taken(lines, lambda line: line != ""), "```"]
            continue
        line = lines.pop(0)
        if line and not line.startswith(" "):
            section = line if SECTION.match(line) else ""
        several = SEVERAL.match(line) if section in ("Args:", "Attributes:") else None
        if several is not None:
            indent, names, text = several.groups()
            more = list(_taken(lines, lambda line, deeper=indent + " ": line.startswith(deeper)))
            for name in names.split(", "):
                result += [f"{indent}{name}: {_escaped(text)}", *map(_escaped, more)]
        elif line.startswith(" ") and not section:
            result.append(line)  # an indented formula, which is code
        else:
            result.append(line if line == section else _escaped(line, colons=section == "Returns:"))
    return "\n".join(result)


def _escaped(line: str, *, colons: bool = False) -> str:
    """The line with a backslash before * and [ outside of code, and with colons as entities if requested."""
    starred = STARRED.match(line)
    start = starred.end() if starred else 0
    parts = line[start:].split("`")
    parts[::2] = [re.sub(r"[*\[\]]", r"\\\g<0>", part) for part in parts[::2]]
    if colons:
        parts[::2] = [part.replace(":", "&#58;") for part in parts[::2]]
    return line[:start] + "`".join(parts)


def _taken(lines: list[str], wanted: Callable[[str], bool]) -> Iterator[str]:
    """Remove the leading lines that are wanted, one by one."""
    while lines and wanted(lines[0]):
        yield lines.pop(0)
