"""The public names of ropewalk, the directives that document them, and what the built API reference lacks."""

import enum
import html
import importlib
import inspect
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Protocol

# A name that several packages export is documented once.
PACKAGES = (
    "ropewalk",
    "ropewalk.positions",
    "ropewalk.spec",
    "ropewalk.hub",
    "ropewalk.parallel",
    "ropewalk.reference",
    "ropewalk.theory",
    "ropewalk.claims",
)
DIRECTIVE = re.compile(r"^::: (\S+)$", re.MULTILINE)
HEADING = re.compile(r'<h[1-6] id="([^"]+)"')


def resolved(name: str) -> object:
    """The object that a dotted name refers to: a module, or what is in one."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        path, _, attribute = name.rpartition(".")
        return getattr(resolved(path), attribute)


def public_names() -> dict[str, object]:
    """Every public name that is not a module, each object once."""
    names: dict[str, object] = {}
    for package in PACKAGES:
        module = resolved(package)
        for name in getattr(module, "__all__", ()):
            value = getattr(module, name)
            if not isinstance(value, ModuleType) and not any(value is known for known in names.values()):
                names[f"{package}.{name}"] = value
    return names


def parameters_of(value: object) -> list[str]:
    """The parameters of a function, or of a class that defines how its instances are made; [] for other objects."""
    if inspect.isclass(value):
        ours = [base for base in value.__mro__ if base.__module__.startswith("ropewalk")]
        made = any("__init__" in vars(base) or "__new__" in vars(base) for base in ours)
        if not made or issubclass(value, enum.Enum) or Protocol in value.__bases__:
            return []
    elif not inspect.isroutine(value):
        return []
    return list(inspect.signature(value).parameters)


def documented_names(folder: Path) -> dict[str, object]:
    """The names in the directives of the pages in a folder, with the objects that they refer to."""
    names: dict[str, object] = {}
    for page in sorted(folder.glob("*.md")):
        for name in DIRECTIVE.findall(page.read_text(encoding="utf-8")):
            if name in names:
                raise ValueError(f"{page.name} documents {name} again")
            names[name] = resolved(name)
    return names


def without_directive(public: Mapping[str, object], documented: Mapping[str, object]) -> list[str]:
    """The public names whose objects no directive documents."""
    return [name for name, value in public.items() if not any(value is known for known in documented.values())]


def missing_from_pages(pages: Mapping[str, str], documented: Mapping[str, object]) -> list[str]:
    """What built pages lack: a name without a heading, or a parameter that its section does not contain."""
    sections = {name: text for page in pages.values() for name, text in _sections(page)}
    missing: list[str] = []
    for name, value in documented.items():
        if name not in sections:
            missing.append(name)
            continue
        words = set(re.findall(r"\w+", sections[name]))
        missing += [f"{name}: {parameter}" for parameter in parameters_of(value) if parameter not in words]
    return missing


def _sections(page: str) -> Iterator[tuple[str, str]]:
    """The text from each heading to the next one."""
    headings = list(HEADING.finditer(page))
    for heading, following in zip(headings, [*headings[1:], None], strict=False):
        end = len(page) if following is None else following.start()
        yield heading[1], html.unescape(re.sub(r"<[^>]+>", " ", page[heading.end() : end]))
