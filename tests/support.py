"""Writes docs/support.md from the marks of the tests and the records of benchmarks/: `python tests/support.py`."""

import ast
import json
import re
import sys
import textwrap
import tomllib
from collections import Counter
from pathlib import Path

from ropewalk.tools.bench.records import read_sealed

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "support.md"

# Operations, and the test files that call them (patterns relative to tests/).
OPERATIONS = {
    "rotation: `RotaryEmbedding`, `apply_rope`": "nn/test_rotary_*.py kernels/test_triton_gpu.py",
    "RMSNorm and rotation: `qk_norm_rope`": "nn/test_qk_norm.py kernels/test_triton_gpu.py",
    "encodings: `encoding`": "nn/test_encoding*.py",
    "softmax attention: `Attention`, `KVCache`": "nn/test_attention*.py nn/test_*cache.py",
    "linear attention: `LinearAttention`": "nn/test_linear_*.py kernels/test_triton_linear*.py",
    "across ranks: `rw.parallel`": "parallel/test_*.py",
    "loaded models: `accelerate`": "hub/test_patch*.py",
    "configs and checkpoints: `load_spec`, `convert`": "hub/test_load_spec*.py hub/test_convert*.py",
    "float64 reference": "reference/test_*.py",
}
# Adapters for other stacks: the package in constraints.txt, the test files, what the names of their tests contain, and
# whether torch computes them.
ADAPTERS = {
    "`accelerate` for diffusers": ("diffusers", "hub/test_adapter_diffusers.py", "", True),
    "kernel layer for transformers": ("transformers", "hub/test_kernel_layer.py", "", True),
    "rope types for transformers": ("transformers", "hub/test_rope_types.py", "", True),
    "`apply_rot_embed_cat` for timm": ("timm", "hub/test_adapter_timm.py", "", True),
    "overrides for torchtitan": ("torchtitan", "hub/test_adapter_torchtitan.py", "", True),
    "`onnx_rotary_nodes` for ONNX": ("onnxruntime", "hub/test_adapter_onnx.py", "", False),
    "`to_jax`": ("jax", "hub/test_adapter_arrays.py", "jax", False),
    "`to_mlx`": ("mlx", "hub/test_adapter_arrays.py", "mlx", False),
}
# Operations that involve no tensor of a device.
HOST_ONLY = {"configs and checkpoints: `load_spec`, `convert`"}
# Operations, their names in tests/nn/test_mps.py, and what the table says of them.
FAKED = {
    "rotation: `RotaryEmbedding`, `apply_rope`": ("rotation", "fake tensors"),
    "RMSNorm and rotation: `qk_norm_rope`": ("norm", "fake tensors"),
    "encodings: `encoding`": ("sinusoidal", "fake tensors: sinusoidal"),
}


def faked_calls() -> list[str]:
    """What tests/nn/test_mps.py calls."""
    source = (ROOT / "tests" / "nn" / "test_mps.py").read_text(encoding="utf-8")
    listed = re.search(r'parametrize\("call", \[(.*?)\]\)', source)
    assert listed
    return listed[1].split(", ")


def marks_of(path: Path, about: str = "") -> list[set[str]]:
    """The names of the marks of every test of a file whose name contains `about`, those of its module included."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    module = [n for n in tree.body if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "pytestmark"]
    everywhere = {name for node in module for name in _marks(ast.unparse(node))}
    tests: list[set[str]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_") and about in node.name:
            tests.append(everywhere | {name for line in node.decorator_list for name in _marks(ast.unparse(line))})
    return tests


def _marks(source: str) -> set[str]:
    return set(re.findall(r"pytest\.mark\.(\w+)", source))


def marks(patterns: str, about: str = "") -> list[set[str]]:
    """The marks of the tests in the files that match."""
    files = {path for pattern in patterns.split() for path in (ROOT / "tests").glob(pattern)}
    tests = [marks for path in sorted(files) for marks in marks_of(path, about)]
    assert tests, patterns
    return tests


def pinned(package: str) -> str:
    """The version of a package that the tests use."""
    line = re.search(rf"^{package}==(\S+)$", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE)
    assert line, package
    return line[1]


def operations() -> list[str]:
    """The rows of the first table."""
    rows: list[str] = []
    for name, patterns in OPERATIONS.items():
        tests = marks(patterns)
        cpu = "tested" if any("gpu" not in test for test in tests) else "not run"
        if name in HOST_ONLY:
            rows.append(f"| {name} | {cpu} | no device | no device | no device |")
            continue
        cuda = "tested" if any("gpu" in test for test in tests) else "expected"
        call, said = FAKED.get(name, ("", ""))
        mps = said if call in faked_calls() else "not run"
        rows.append(f"| {name} | {cpu} | {cuda} | not run | {mps} |")
    return rows


def ran_on_gpu(patterns: str) -> bool:
    """Whether tests of some of these files passed on a GPU, and none failed, in the record of them."""
    files = json.loads((ROOT / "benchmarks/gpu_tests.json").read_text(encoding="utf-8"))["files"]
    names = {str(path.relative_to(ROOT)) for pattern in patterns.split() for path in (ROOT / "tests").glob(pattern)}
    counts = [files[name] for name in names & files.keys()]
    return any(x["passed"] for x in counts) and not any(x["failed"] for x in counts)


def adapters() -> list[str]:
    """The rows of the table of other stacks."""
    rows: list[str] = []
    for name, (package, files, about, in_torch) in ADAPTERS.items():
        tests = marks(files, about)
        cpu = "tested" if any("gpu" not in test for test in tests) else "not run"
        without = "expected" if in_torch else "not run"
        cuda = without
        if any("gpu" in test for test in tests):
            cuda = "tested" if ran_on_gpu(files) else "has tests, not run"
        rows.append(f"| {name} | {package} {pinned(package)} | {cpu} | {cuda} | not run |")
    return rows


def machines() -> list[str]:
    """The rows of the second table: what the records of benchmarks/ were measured on."""
    seen: dict[tuple[str, ...], list[str]] = {}
    for path in sorted((ROOT / "benchmarks").glob("*.json")):
        record = json.loads(path.read_text(encoding="utf-8"))
        versions, hardware = record.get("versions", {}), record.get("hardware", {})
        if "torch" in versions and "machine" in hardware:
            key = (
                hardware["machine"],
                hardware.get("gpu") or "CPU",
                versions["torch"].partition("+")[0],
                versions["python"],
            )
            seen.setdefault(key, []).append(f"[{path.stem}](../benchmarks/{path.name})")
    return [f"| Linux | {' | '.join(key)} | {', '.join(records)} |" for key, records in sorted(seen.items())]


def paragraph(text: str) -> str:
    return textwrap.fill(text, 118, break_long_words=False, break_on_hyphens=False)


def other_versions() -> list[str]:
    """Lines on the versions of torch on which the tests ran: counts, and what failed."""
    cases = read_sealed(ROOT / "benchmarks" / "torch_versions.json")["cases"]
    rows: list[str] = []
    remarks: list[str] = []
    for case in cases:
        versions, outcomes = case["versions"], case["outcomes"]
        name = versions["torch"].partition("+")[0]
        counts = [str(outcomes.get(outcome, 0)) for outcome in ("passed", "failed", "skipped")]
        counts.append(str(case["not run"]))
        rows.append(f"| {name} | {versions['triton']} | {versions['numpy']} | {case['date']} | {' | '.join(counts)} |")
        remarks += [f"- {name}: {note}" for note in case["notes"]]
        # Tests with parameters that fail in the same way are one line.
        failures = Counter((test.partition("[")[0], error) for test, error in case["failures"].items())
        for (test, error), count in failures.items():
            cases_of = f", {count} cases" if count > 1 else ""
            remarks.append(f"- {name}: `{test}`{cases_of}: `{error.replace('`', chr(39))}`")
    return [
        paragraph(
            "`make test`'s tests ran on other versions of torch too, on the CPU, by `python"
            " benchmarks/torch_versions.py` ([record](../benchmarks/torch_versions.json)). Nothing on a GPU was run"
            " for this table:"
        ),
        "",
        "| torch | Triton | NumPy | date | passed | failed | skipped | not run |",
        "|---|---|---|---|---|---|---|---|",
        *rows,
        "",
        *(textwrap.fill(line, 118, subsequent_indent="  ", break_on_hyphens=False) for line in remarks),
    ]


def page() -> str:
    """The text of docs/support.md."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    torch = next(line for line in project["dependencies"] if line.startswith("torch")).removeprefix("torch>=")
    return "\n".join(
        [
            "# What is supported, and what was run",
            "",
            "Written by `python tests/support.py` from the marks of the tests and the records in benchmarks/.",
            "*tested*: tests call the operation there. *fake tensors*: they do, without values. *expected*: torch",
            "operations compute it there, and no test runs it. *not run*: nobody has tried.",
            "",
            "## Operations",
            "",
            "| operation | CPU | NVIDIA GPU | AMD GPU | Apple GPU (MPS) |",
            "|---|---|---|---|---|",
            *operations(),
            "",
            "Tests for an NVIDIA GPU are marked `gpu`, and `make test-gpu` runs them. CI has no GPU, so *tested* means",
            "there that the tests exist; the records below show what was measured on one. MPS has no float64: angles",
            "are computed on the CPU there, and `tests/nn/test_mps.py` checks devices and dtypes, not values. It has",
            "no attention: torch without MPS rejects that even on fake tensors.",
            "",
            "## Other stacks",
            "",
            "Each adapter is compared with the package itself, at the version that constraints.txt pins.",
            "",
            "| adapter | package | CPU | NVIDIA GPU | AMD or Apple GPU |",
            "|---|---|---|---|---|",
            *adapters(),
            "",
            "*tested* on an NVIDIA GPU: tests passed on an H200 ([record](../benchmarks/gpu_tests.json)). [In other",
            "stacks](adapters.md) says what is compared. `tests/hub/hub_kernels.py` loads the kernel layer through the",
            "kernels package, in an environment of its own. MLX runs on the CPU, on Linux x86-64; Metal was not run.",
            "",
            "## Machines",
            "",
            "| system | processor | device | torch | Python | record |",
            "|---|---|---|---|---|---|",
            *machines(),
            "",
            "## Versions",
            "",
            "| | oldest required | pinned for the tests |",
            "|---|---|---|",
            f"| torch | {torch} | {pinned('torch')} |",
            f"| Python | {project['requires-python'].removeprefix('>=')} | any of these |",
            "",
            *other_versions(),
            "",
            "| system | processor | C kernel | status |",
            "|---|---|---|---|",
            "| Linux, glibc | x86-64 (AVX2), ARM (NEON) | compiled at installation, by gcc or clang | tested |",
            "| macOS | ARM | the same; wheels are configured | not run |",
            "| Windows, Linux with musl | any | none: torch operations | not run |",
            "",
        ]
    )


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    sys.stdout.write(f"wrote {PAGE.relative_to(ROOT)}\n")
