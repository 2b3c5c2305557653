"""Wheels in an environment with torch and numpy alone: one built without a C compiler, and the one for any machine.

`tests/kernels/test_native_build.py` builds with a compiler.
"""

import importlib.metadata
import json
import os
import subprocess
import sys
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

from kernels.test_native_build import project
from test_requirements import distribution_names

ROOT = Path(__file__).parent.parent
EXTRAS = {"beartype", "jaxtyping", "matplotlib", "rich", "safetensors", "transformers", "typer"}


def wheel_of(folder: Path, **environment: str) -> Path:
    """A wheel of the working tree, built without a network."""
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    source = project(folder / "source")
    subprocess.run([*command, "-w", str(folder), str(source)], env=os.environ | environment, check=True)
    (wheel,) = folder.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def torch_alone(tmp_path_factory) -> Path:
    """A folder with links to torch, numpy and what they require, and to nothing else that is installed here."""
    folder = tmp_path_factory.mktemp("torch")
    for name in distribution_names("torch") | distribution_names("numpy"):
        try:
            distribution = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # for another platform or Python
        for top in {file.parts[0] for file in distribution.files or []} - {"..", "__pycache__"}:
            link = folder / top
            if not link.exists():
                link.symlink_to(Path(str(distribution.locate_file(top))))
    assert not [extra for extra in EXTRAS if (folder / extra).exists()]
    return folder


def environment_with(wheel: Path, folder: Path, *paths: Path) -> Path:
    """A new virtual environment with the wheel, which sees these folders too. Returns its folder of programs."""
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    command = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*command, str(wheel)], check=True)
    (site,) = (folder / "lib").glob("python*/site-packages")
    (site / "more.pth").write_text("".join(f"{path}\n" for path in paths))
    return python.parent


@pytest.mark.slow
def test_the_wheel_needs_torch_and_numpy_alone(torch_alone, tmp_path):
    (tmp_path / "empty").mkdir()
    # Without CC, setuptools looks for the compiler with which Python was built.
    without = {"PATH": str(tmp_path / "empty"), "CC": "no-compiler-here"}
    wheel = wheel_of(tmp_path, **without)
    programs = environment_with(wheel, tmp_path / "environment", torch_alone)
    clean = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")} | without

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(arguments, env=clean, cwd=tmp_path, capture_output=True, text=True, check=False)

    result = run(str(programs / "python"), str(ROOT / "tests" / "installed.py"))
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    assert Path(report["place"]).is_relative_to(tmp_path / "environment")
    assert not EXTRAS & set(report["loaded"])
    assert "the C kernel was not built" in report["no C kernel"]
    assert "with gcc or clang available" in report["no C kernel"]
    command = run(str(programs / "ropewalk"), "demo")
    assert command.returncode == 2
    assert "got:      no typer and no rich" in command.stderr


@pytest.mark.slow
def test_the_wheel_for_any_machine(tmp_path):
    wheel = wheel_of(tmp_path, ROPEWALK_PURE="1", CC="no-compiler-here")
    assert wheel.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert "ropewalk/py.typed" in names
    assert not [name for name in names if name.endswith((".so", ".pyd"))]


def test_versions_agree():
    import ropewalk

    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    assert ropewalk.__version__ == version
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\n## {version}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
