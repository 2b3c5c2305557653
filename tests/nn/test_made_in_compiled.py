"""Modules that are made inside a compiled function: one graph, and the numbers of eager mode."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "made_in_compiled.py"
SAMPLE = ["options", "Yarn", "a factory with a cache"]

# The first use of the library, which loads it, is in the compiled function.
FIRST_USE = """
import torch
import ropewalk as rw
x = torch.ones(1, 1, 5, 16)
y = torch.compile(lambda x: rw.RotaryEmbedding(16)(x), fullgraph=True, backend="eager")(x)
assert torch.equal(y, rw.RotaryEmbedding(16)(x))
"""


def run(*arguments: str) -> None:
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_modules_are_made_in_one_graph():
    run(str(SCRIPT), *SAMPLE)


@pytest.mark.slow
def test_all_modules_are_made_in_one_graph():
    run(str(SCRIPT))


@pytest.mark.slow
def test_the_first_use_of_the_library_may_be_in_a_compiled_function():
    run("-c", FIRST_USE)
