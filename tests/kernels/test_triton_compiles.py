"""Triton translates every kernel for a GPU, also on a machine that has none: its interpreter accepts more."""

import ast
import json
import os
import pathlib
import subprocess
import sys

import pytest

import ropewalk.kernels

TESTS = pathlib.Path(__file__).parents[1]


def names_of_kernels():
    """The jitted functions that no other jitted function of the package calls: those that are launched."""
    jitted, called = set(), set()
    folder = pathlib.Path(ropewalk.kernels.__file__).parent
    for path in folder.rglob("*.py"):
        module = ".".join(("ropewalk", "kernels", *path.relative_to(folder).with_suffix("").parts))
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.FunctionDef) and any("triton.jit" in ast.unparse(x) for x in node.decorator_list):
                jitted.add((module, node.name))
                called |= {
                    x.func.id for x in ast.walk(node) if isinstance(x, ast.Call) and isinstance(x.func, ast.Name)
                }
    return sorted(f"{module}.{name}" for module, name in jitted if name not in called)


@pytest.mark.slow
def test_every_kernel_compiles(tmp_path):
    environment = os.environ | {"PYTHONPATH": str(TESTS), "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "kernels.compile_for_gpu"]
    result = subprocess.run(command, cwd=TESTS, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    assert json.loads(result.stdout.splitlines()[-1]) == names_of_kernels()
