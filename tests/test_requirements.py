"""What ropewalk needs: torch and numpy to build and call modules, typer and rich for the command line."""

import importlib.metadata
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import jaxtyping
import numpy as np
import pytest
import torch

from ropewalk import reference, theory
from ropewalk.shapes import Float64

ROOT = Path(__file__).parent.parent

# Loads every public name, and calls a module, an encoding with attention, linear attention and the reference.
MODEL = """
import torch, ropewalk as rw
for name in rw.__all__ + ["hub", "parallel", "reference", "spec", "theory"]:
    getattr(rw, name)
rope = rw.RotaryEmbedding(rw.load_spec({"model_type": "llama", "head_dim": 8, "rope_theta": 1e4}))
q = torch.randn(1, 2, 3, 8, requires_grad=True)
sum(x.sum() for x in rope(q, q)).backward()
for kind in (rw.Attention, rw.LinearAttention):
    kind(16, num_heads=2, encoding=rw.encoding("rope", dim=16, num_heads=2))(torch.randn(1, 4, 16))
rw.theory.score_sum(2, [1.0]), rw.reference.rotate_by_spec(q, rw.RopeSpec(8), torch.arange(3))
"""
THIRD_PARTY = """
import json, sys
names = {name.partition(".")[0] for name, module in sys.modules.items() if getattr(module, "__file__", None)}
print(json.dumps(sorted(names - sys.stdlib_module_names - {"ropewalk"})))
"""


def python(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True, check=False)


def distribution_names(package: str, known: frozenset[str] = frozenset()) -> frozenset[str]:
    """The names of a distribution and of what it requires, without extras, those of its requirements included."""
    if package in known:
        return known
    known |= {package}
    try:
        required = importlib.metadata.requires(package) or []
    except importlib.metadata.PackageNotFoundError:
        return known  # for another platform or Python
    for requirement in required:
        if "extra ==" not in requirement:
            known |= distribution_names(re.split(r"[^\w.-]", requirement, maxsplit=1)[0].lower(), known)
    return known


def loaded(script: str) -> set[str]:
    """The modules of third parties that a script imports."""
    result = python(script + THIRD_PARTY)
    assert result.returncode == 0, result.stderr
    return set(json.loads(result.stdout))


def test_a_model_imports_torch_and_numpy_alone():
    assert loaded("import ropewalk") <= loaded("")
    # `import torch` tries some packages that it does not require, and uses them if they are installed.
    ours = loaded(MODEL) - loaded("import numpy, torch")
    required = {
        name
        for name, distributions in importlib.metadata.packages_distributions().items()
        if {distribution.lower() for distribution in distributions} & distribution_names("torch")
    }
    assert ours <= required


def test_the_requirements_are_torch_and_numpy():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert [re.split(r"\W", line, maxsplit=1)[0] for line in project["dependencies"]] == ["torch", "numpy"]


@pytest.mark.parametrize("missing", [["typer"], ["rich"], ["typer", "rich"]], ids="+".join)
def test_the_command_line_says_what_is_missing(missing):
    hide = f"import sys; sys.modules.update(dict.fromkeys({missing}))"
    result = python(f"{hide}; from ropewalk.__main__ import main; main()", "demo")
    assert (result.returncode, result.stdout) == (2, "")
    assert f"got:      no {' and no '.join(missing)}\n" in result.stderr
    assert "pip install 'ropewalk[cli]'" in result.stderr


def test_these_tests_check_shapes():
    # Without the import hook of jaxtyping, as for users, the same names annotate and check nothing.
    assert Float64 is jaxtyping.Float64
    with pytest.raises(jaxtyping.TypeCheckError):
        theory.band_means(np.ones(4), "edges")
    with pytest.raises(jaxtyping.TypeCheckError):
        reference.softmax_attention(torch.ones(3), torch.ones(3), torch.ones(3))
