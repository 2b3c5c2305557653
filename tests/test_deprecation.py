"""What is deprecated works, warns at the line of the user, and is gone in the version that promised it."""

import ast
import importlib
import inspect
import re
import subprocess
import sys
from typing import Any

import pytest

import ropewalk as rw
from architecture.sources import SOURCES
from ropewalk.deprecation import NAMES, Deprecation, renamed_argument
from ropewalk.signatures import ArgumentError, checks_names

VERSION = tuple(map(int, rw.__version__.split(".")[:2]))
OLD = Deprecation("ropewalk.RopeSpec", since="0.3", removed_in="0.4")


def promises(tree: ast.AST) -> list[tuple[str, str]]:
    """The versions (since, removed_in) of every deprecation in a source."""
    calls = [{k.arg: k.value for k in node.keywords} for node in ast.walk(tree) if isinstance(node, ast.Call)]
    # Inside deprecation.py the versions are variables.
    said = [call for call in calls if isinstance(call.get("removed_in"), ast.Constant)]
    return [(ast.literal_eval(call["since"]), ast.literal_eval(call["removed_in"])) for call in said]


def broken(since: str, removed_in: str, version: tuple[int, ...]) -> str:
    """Why a deprecation breaks the rules of docs/releasing.md, or an empty text."""
    first, last = (tuple(map(int, text.split("."))) for text in (since, removed_in))
    if last not in {(first[0], first[1] + 1), (first[0] + 1, 0)}:
        return f"what {since} deprecates, the next minor version removes, not {removed_in}"
    if version >= last:
        return f"{removed_in} removes it: delete the old name and its deprecation"
    return "" if version >= first else f"{since} is to come: the version that warns is this one"


def test_every_deprecation_keeps_its_promise_in_this_version():
    for path in SOURCES:
        text = path.read_text(encoding="utf-8")
        for versions in promises(ast.parse(text)) if "removed_in=" in text else ():
            assert broken(*versions, VERSION) == "", path


def test_every_deprecated_name_is_its_replacement():
    for name, deprecation in NAMES.items():
        module, _, old = name.rpartition(".")
        home, _, new = deprecation.instead.rpartition(".")
        with pytest.warns(DeprecationWarning, match=re.escape(name)):
            assert getattr(importlib.import_module(module), old) is getattr(importlib.import_module(home), new)


def test_a_promise_that_is_due_is_found():
    source = 'A = Deprecation("ropewalk.B", since="0.3", removed_in="0.4")\n\n@renamed_argument("a", "b", since="1.9", '
    source += 'removed_in="2.0")\ndef f(b): Deprecation("c", since=since, removed_in=removed_in)\n'
    assert promises(ast.parse(source)) == [("0.3", "0.4"), ("1.9", "2.0")]
    assert broken("0.3", "0.4", (0, 3)) == broken("1.9", "2.0", (1, 9)) == broken("0.3", "0.4", (0, 3, 7)) == ""
    assert "removes it" in broken("0.3", "0.4", (0, 4))
    assert "removes it" in broken("0.9", "0.10", (0, 10))
    assert "the next minor version" in broken("0.3", "0.5", (0, 3))
    assert "is to come" in broken("0.4", "0.5", (0, 3))


@pytest.mark.parametrize("module", ["ropewalk", "ropewalk.hub"])
def test_a_deprecated_name_warns_where_it_is_used(module, monkeypatch):
    monkeypatch.setitem(NAMES, f"{module}.Old", OLD)
    with pytest.warns(DeprecationWarning, match=f"{module}.Old is deprecated since ropewalk 0.3, and 0.4") as caught:
        assert importlib.import_module(module).Old is rw.RopeSpec
    assert [warning.filename for warning in caught] == [__file__]
    with pytest.warns(DeprecationWarning, match="use ropewalk.RopeSpec") as caught:
        exec(compile(f"from {module} import Old", "user.py", "exec"), {"__name__": "user"})
    assert {warning.filename for warning in caught} == {"user.py"}
    monkeypatch.delitem(NAMES, f"{module}.Old")
    assert not hasattr(importlib.import_module(module), "Old")


def test_a_program_shows_the_warning():
    source = (
        "import ropewalk.deprecation as d\nd.NAMES['ropewalk.Old'] = d.Deprecation('ropewalk.RopeSpec', '0.3', '0.4')"
    )
    source += "\nimport ropewalk, sys\nropewalk.Old\nassert 'torch' not in sys.modules\n"
    result = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True)
    assert result.stderr.startswith("<string>:4: DeprecationWarning: ropewalk.Old is deprecated since ropewalk 0.3")


def test_a_renamed_argument_works_for_one_version():
    library: dict[str, Any] = {"__name__": "ropewalk.made"}
    exec("def plain(x, *, size=1):\n    return x * size\n", library)
    plain = checks_names(library["plain"])
    renamed = renamed_argument("width", "size", since="0.3", removed_in="0.4")(plain)
    with pytest.warns(DeprecationWarning, match=r"plain\(width=\.\.\.\) is deprecated .* use size=") as caught:
        assert renamed(3, width=2) == 6
    assert [warning.filename for warning in caught] == [__file__]
    assert renamed(3, size=2) == 6  # warnings are errors in these tests
    assert inspect.signature(renamed) == inspect.signature(plain)
    with pytest.raises(ArgumentError, match="width is the old name of size"):
        renamed(3, width=2, size=2)
    with pytest.raises(ArgumentError, match=r"plain\(height=\.\.\.\)"):
        renamed(3, height=2)
