"""The API reference documents every public name with all its parameters."""

import inspect
import re
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

DOCS = Path(__file__).parent.parent / "docs"
NAMES = runpy.run_path(str(DOCS / "api_names.py"))
PUBLIC: dict[str, object] = NAMES["public_names"]()
parameters_of, missing_from_pages = NAMES["parameters_of"], NAMES["missing_from_pages"]


def undescribed(value: object) -> list[str]:
    """The parameters that the docstring of a function or class does not describe.

    Fields of a value are described as arguments or as attributes. A docstring that refers to another function for its
    arguments describes those of that function.
    """
    text = inspect.getdoc(value) or ""
    if re.search(r"\bArguments[^.]* are those of `", text):
        return []
    described = {
        name.lstrip("*")
        for section in re.findall(r"^(?:Args|Attributes):\n((?:    .*\n|\n)+)", text + "\n", re.MULTILINE)
        for names in re.findall(r"^    ([\w*, ]+): ", section, re.MULTILINE)
        for name in names.split(", ")
    }
    return [name for name in parameters_of(value) if name not in described]


def test_every_public_name_is_in_the_reference():
    documented = NAMES["documented_names"](DOCS / "api")
    assert NAMES["without_directive"](PUBLIC, documented) == []
    assert NAMES["without_directive"]({"ropewalk.new": object()}, documented) == ["ropewalk.new"]


@pytest.mark.parametrize("name", [name for name, value in PUBLIC.items() if parameters_of(value)])
def test_every_parameter_of_a_public_name_is_described(name):
    assert undescribed(PUBLIC[name]) == []


def test_a_parameter_without_a_description_is_named():
    def partly(a, b, *rest, **options):
        """Summary.

        Args:
            a, rest: First.
        """

    def like_another(a):
        """Summary. Arguments and
        result are those of `partly`."""

    assert undescribed(partly) == ["b", "options"]
    assert undescribed(like_another) == []


def test_a_name_or_a_parameter_that_a_built_page_lacks_is_named():
    def function(x, scale=1): ...

    names = {"ropewalk.function": function, "ropewalk.CONSTANT": 3}
    whole = (
        '<h3 id="ropewalk.function">function</h3><code>function(<span>x</span>, <span>scale</span>=1)</code>'
        '<h3 id="ropewalk.CONSTANT">CONSTANT</h3>'
    )
    assert missing_from_pages({"a": whole}, names) == []
    assert missing_from_pages({"a": whole.replace("scale", "s")}, names) == ["ropewalk.function: scale"]
    assert missing_from_pages({"a": ""}, names) == ["ropewalk.function", "ropewalk.CONSTANT"]


@pytest.fixture
def as_markdown(monkeypatch):
    # The extension is loaded by griffe, which only the docs need.
    monkeypatch.setitem(sys.modules, "griffe", SimpleNamespace(Extension=object, Object=object))
    return runpy.run_path(str(DOCS / "docstrings.py"))["as_markdown"]


def test_docstrings_become_markdown(as_markdown):
    docstring = (
        "F[a][i] is `x[0]` * 2.\n\n    y = a * b\n\nArgs:\n    a, b: As in [f],\n        or * 2.\n    *rest: More.\n\n"
        "Returns:\n    int64 [n]: one per row.\n\n>>> f(1)\n[1]\n>>> g * h\n2"
    )
    assert as_markdown(docstring).split("\n") == [
        r"F\[a\]\[i\] is `x[0]` \* 2.",
        "",
        "    y = a * b",
        "",
        "Args:",
        r"    a: As in \[f\],",
        r"        or \* 2.",
        r"    b: As in \[f\],",
        r"        or \* 2.",
        "    *rest: More.",
        "",
        "Returns:",
        r"    int64 \[n\]&#58; one per row.",
        "",
        "```pycon",
        ">>> f(1)",
        "[1]",
        ">>> g * h",
        "2",
        "```",
    ]
