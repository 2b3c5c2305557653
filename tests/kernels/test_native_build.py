"""How the C kernel comes to be: sanitizers, an installation without a compiler, a stale build, sdist and wheel."""

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
NATIVE = ROOT / "src" / "ropewalk" / "kernels" / "native"

# Puts a build of its own, guarded, in the place of the installed one, before anything imports it.
SWAP = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("ropewalk.kernels._native", {path!r})
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
sys.path.insert(0, {tests!r})
from kernels.guarded import Guarded
sys.modules["ropewalk.kernels._native"] = Guarded(module)
from ropewalk.kernels.native import extension
assert extension.MISSING is None, extension.MISSING
assert extension.NATIVE is sys.modules["ropewalk.kernels._native"]
"""

# The whole parity list, backward included, and random calls.
EXERCISE = """
import numpy as np, torch
from functools import partial
from kernels.random_calls import DTYPES, one_call
from nn.module import by_module, with_heads_last
from ropewalk.kernels.backend import registered
from ropewalk.reference import check_rotation
four = list(DTYPES)
print(check_rotation(partial(by_module, backend="native"), four))
deep = lambda case: case.x.dim() >= 3 and case.name.count("[batch, seq") == 0
print(check_rotation(partial(with_heads_last, backend="native"), four, where=deep))
random = np.random.default_rng()
for dtype in four:
    for _ in range(300):
        one_call(random, dtype, registered("native").operations["rotate"])
from ropewalk import RotaryEmbedding, qk_norm_rope
for dtype in four:
    for dim in (2, 6, 64, 98):
        rope, x = RotaryEmbedding(dim), torch.randn(1, 3, 2000, dim).to(dtype)
        rope(x, x), rope.rotate_(x), rope(x, positions=torch.arange(2000) * 20_000)
        qk_norm_rope(x, x[:, :1], rope, q_weight=torch.ones(dim), round_norm=True)
from ropewalk import linear_attention
for dtype in four:
    for dim, v_dim, feature_map in ((2, 3, "elu"), (6, 40, "exp"), (64, 64, "relu"), (98, 33, "squared_relu")):
        rope, decay = RotaryEmbedding(dim), -torch.rand(2)
        parts = [torch.randn(2, heads, 9, width).to(dtype) for heads, width in ((4, dim), (2, dim), (2, v_dim))]
        state = None
        for token in zip(*(x.split(1, dim=2) for x in parts)):
            options = {"rope": rope, "decay": decay, "feature_map": feature_map, "return_state": True}
            _, state = linear_attention(*token, state=state, **options)
assert extension.NATIVE.calls > 2000
print("done")
"""


def source_hash() -> str:
    # What setup.py puts in, by its own function.
    script = "import setuptools; setuptools.setup = lambda **_: None; import setup; print(setup.source_hash())"
    return subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()


def compiler() -> str:
    return os.environ.get("CC") or shutil.which("gcc") or shutil.which("cc") or "cc"


def compile_native(target: Path, *flags: str, sources: Path = NATIVE) -> None:
    include = sysconfig.get_paths()["include"]
    define = f'-DSOURCE_HASH="{source_hash()}"'
    command = [compiler(), "-shared", "-fPIC", "-std=c11", "-ffp-contract=off", define, f"-I{include}", *flags]
    subprocess.run([*command, str(sources / "module.c"), "-o", str(target), "-lm"], check=True)


def run_sanitized(target: Path, sanitizer: str, script: str) -> subprocess.CompletedProcess[str]:
    # libstdc++ too: the sanitizer looks for its exceptions when it starts, and torch brings it in later.
    libraries = [{"address": "libasan.so", "undefined": "libubsan.so"}[sanitizer], "libstdc++.so"]
    finds = [[compiler(), f"-print-file-name={library}"] for library in libraries]
    runtimes = [subprocess.run(find, capture_output=True, text=True, check=True).stdout.strip() for find in finds]
    # Python and torch keep what they allocate, which is no business of these tests.
    environment = os.environ | {"LD_PRELOAD": " ".join(runtimes), "ASAN_OPTIONS": "detect_leaks=0"}
    command = [sys.executable, "-c", SWAP.format(path=str(target), tests=str(ROOT / "tests")) + script]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_the_compiler_has_nothing_to_say(tmp_path):
    strict = ["-O3", "-Wall", "-Wextra", "-Wshadow", "-Wconversion", "-Wno-sign-conversion", "-Wno-psabi", "-Werror"]
    compile_native(tmp_path / "_native.so", *strict)


@pytest.mark.slow
@pytest.mark.parametrize("sanitizer", ["address", "undefined"])
def test_sanitizers_run_the_parity_list_clean(sanitizer, tmp_path):
    target = tmp_path / "_native.so"
    compile_native(target, "-O1", "-g", f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all")
    result = run_sanitized(target, sanitizer, EXERCISE)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-6000:]
    assert result.stdout.endswith("done\n")


@pytest.mark.slow
def test_the_loops_for_machines_without_neon_or_avx2(tmp_path):
    target = tmp_path / "_native.so"
    compile_native(target, "-O3", "-DBASELINE=1")
    script = SWAP.format(path=str(target), tests=str(ROOT / "tests")) + "print(module.instructions)\n" + EXERCISE
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-4000:]
    assert result.stdout.startswith(("sse2", "portable"))


@pytest.mark.slow
def test_the_sanitizer_would_see_a_step_too_far(tmp_path):
    # The same way of running, on a file with a defect: the last row is read one row too far.
    broken = tmp_path / "native"
    shutil.copytree(NATIVE, broken)
    rows = (broken / "rows.h").read_text(encoding="utf-8")
    assert rows.count("left > 0") == 1
    (broken / "rows.h").write_text(rows.replace("left > 0", "left >= 0"), encoding="utf-8")
    target = tmp_path / "_native.so"
    compile_native(target, "-O1", "-g", "-fsanitize=address", sources=broken)
    script = "import torch; from ropewalk import RotaryEmbedding; RotaryEmbedding(64)(torch.ones(1, 2, 3, 64))"
    result = run_sanitized(target, "address", script)
    assert result.returncode != 0
    assert "heap-buffer-overflow" in result.stderr


def project(target: Path) -> Path:
    """A copy of what a release is built from."""
    for name in ("src", "setup.py", "pyproject.toml", "README.md", "LICENSE", "MANIFEST.in"):
        source = ROOT / name
        if source.is_dir():
            ignore = shutil.ignore_patterns("*.so", "__pycache__", "*.egg-info")
            shutil.copytree(source, target / name, ignore=ignore)
        elif source.exists():
            target.mkdir(exist_ok=True)
            shutil.copy(source, target / name)
    return target


def said(path: Path) -> str:
    """What an installation at `path` says of the C kernel, and whether a rotation works without it."""
    script = (
        "import torch, ropewalk as rw; from ropewalk.ops import backend_reasons; print(backend_reasons()['native'])\n"
        "rope = rw.RotaryEmbedding(4); assert torch.allclose(rope.unrotate(rope(torch.ones(3, 4))), torch.ones(3, 4))\n"
        "try: rw.RotaryEmbedding(4, backend='native')\n"
        "except rw.RopewalkError as error: print(error)\n"
    )
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | {"PYTHONPATH": str(path)}
    return subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True, cwd=path
    ).stdout


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    """An sdist, the folder it was unpacked into, and the wheel that was built there, as `python -m build` does."""
    folder = tmp_path_factory.mktemp("packed")

    def build(kind: str, source: Path) -> None:
        script = f"import sys; from setuptools import build_meta; build_meta.build_{kind}(sys.argv[1])"
        subprocess.run([sys.executable, "-c", script, str(folder)], cwd=source, capture_output=True, check=True)

    build("sdist", project(folder / "source"))
    (sdist,) = folder.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.split("/", 1)[-1] for name in archive.getnames()}
        archive.extractall(folder / "from_sdist", filter="data")
    (unpacked,) = (folder / "from_sdist").iterdir()
    build("wheel", unpacked)
    (wheel,) = folder.glob("*.whl")
    return names, unpacked, wheel


@pytest.mark.slow
@pytest.mark.xdist_group("packed")
def test_sdist_and_wheel(packed, tmp_path):
    names, _, wheel = packed
    assert {f"src/ropewalk/kernels/native/{path.name}" for path in NATIVE.glob("*.[ch]")} <= names
    bundled = {f"ropewalk/data/configs/{path.name}" for path in (ROOT / "src/ropewalk/data/configs").iterdir()}
    assert bundled
    assert {f"src/{name}" for name in bundled} <= names
    with zipfile.ZipFile(wheel) as archive:
        assert any("kernels/_native." in name for name in archive.namelist())
        assert bundled <= set(archive.namelist())
        archive.extractall(tmp_path / "wheel")
    assert said(tmp_path / "wheel") == "None\n"


@pytest.mark.slow
@pytest.mark.xdist_group("packed")
def test_an_edited_c_file_is_noticed(packed):
    _, source, wheel = packed
    # The build of the wheel, where an installation that can be edited has its own.
    with zipfile.ZipFile(wheel) as archive:
        (built,) = (name for name in archive.namelist() if "kernels/_native." in name)
        archive.extract(built, source / "src")
    header = source / "src" / "ropewalk" / "kernels" / "native" / "rows.h"
    header.write_text(header.read_text(encoding="utf-8") + "/* edited */\n", encoding="utf-8")
    told = said(source / "src")
    assert "built from other sources" in told
    assert "install ropewalk again" in told
    # setuptools sees it too, and builds anew.
    subprocess.run([sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"], cwd=source, check=True)
    assert said(source / "src") == "None\n"
