"""Measures the structure of a checkout: files and lines, functions per call, import cycles, duplicates.

python benchmarks/structure.py SRC_DIR [--json FILE]

SRC_DIR is the `src` folder of a checkout. Calls are traced with sys.setprofile in a separate process, only from public
names and the command line, so that checkouts with other module paths can be compared. A function counts once, for any
number of calls. Module bodies do not count. GPU figures require a CUDA device.

A duplicate is a pair of places with the same 40 (or 60) consecutive tokens. A longer run is one pair. 60 tokens are
about six lines. Comments do not count.
"""

import argparse
import importlib
import inspect
import io
import json
import os
import runpy
import statistics
import subprocess
import sys
import tempfile
import tokenize
from collections import defaultdict
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from architecture.import_graph import circles, import_graph  # pyright: ignore[reportMissingImports]

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 32,
    "max_position_embeddings": 131_072,
    "rope_theta": 500_000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}

# The number of consecutive tokens of a duplicate.
RUNS = (40, 60)


# ---------------------------------------------------------------------------------------------------------------------
# Figures from the source text.


def sizes(package: Path) -> dict[str, Any]:
    """The number of files and lines of Python, without `__init__.py`, and of C."""
    paths = list(package.rglob("*.py"))
    lines = sorted(len(path.read_text(encoding="utf-8").splitlines()) for path in paths if path.name != "__init__.py")
    native = [path.read_text(encoding="utf-8").splitlines() for path in package.rglob("*.[ch]")]
    return {
        "files": len(lines),
        "lines": sum(lines),
        "median": statistics.median(lines),
        "p90": lines[round(0.9 * (len(lines) - 1))],
        "max": lines[-1],
        "files_of_70_or_fewer": sum(count <= 70 for count in lines),
        "packages": len(paths) - len(lines),
        "c_files": len(native),
        "c_lines": sum(map(len, native)),
    }


def duplicates(package: Path) -> dict[str, int]:
    """The number of pairs of places with the same consecutive tokens, by the length of the run."""
    files = [_tokens(path) for path in sorted(package.rglob("*.py"))]
    return {str(run): _repeated(files, run) for run in RUNS}


def _tokens(path: Path) -> list[str]:
    skipped = {tokenize.COMMENT, tokenize.NL, tokenize.ENCODING}
    layout = {tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
    read = tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline)
    return [
        tokenize.tok_name[token.type] if token.type in layout else token.string
        for token in read
        if token.type not in skipped
    ]


def _repeated(files: list[list[str]], run: int) -> int:
    places: defaultdict[tuple[str, ...], list[tuple[int, int]]] = defaultdict(list)
    for number, tokens in enumerate(files):
        for start in range(len(tokens) - run + 1):
            places[tuple(tokens[start : start + run])].append((number, start))
    pairs = 0
    for same in places.values():
        for index, (file, start) in enumerate(same):
            for other_file, other in same[:index]:
                overlap = file == other_file and abs(start - other) < run
                # If the preceding tokens are equal too, the pair was counted at the start of the run.
                longer = start and other and files[file][start - 1] == files[other_file][other - 1]
                pairs += not overlap and not longer
    return pairs


# ---------------------------------------------------------------------------------------------------------------------
# Functions per call. These run in a separate process, with the checkout on its path.


class CallTrace:
    """Records the functions of the package that are called inside the `with` block."""

    def __init__(self, package: Path) -> None:
        self.root = f"{package.resolve()}{os.sep}"
        self.codes: list[CodeType] = []

    def __enter__(self) -> "CallTrace":
        sys.setprofile(self._event)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _event(self, frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        # Bodies of modules and classes are not functions. A comprehension belongs to its function.
        is_function = code.co_flags & inspect.CO_OPTIMIZED and not code.co_name.startswith("<")
        if event == "call" and is_function and code.co_filename.startswith(self.root):
            self.codes.append(code)

    def summary(self) -> dict[str, Any]:
        """The number of functions, files and calls, and the names."""
        functions = dict.fromkeys((code.co_filename.removeprefix(self.root), code.co_qualname) for code in self.codes)
        files = list(dict.fromkeys(file for file, _ in functions))
        return {
            "functions": len(functions),
            "files": len(files),
            "calls": len(self.codes),
            "file_names": files,
            "function_names": [f"{file}: {name}" for file, name in functions],
        }


def follow(package: Path, call: Callable[[], object]) -> dict[str, Any]:
    """The functions that one call passes through."""
    with CallTrace(package) as trace:
        call()
    return trace.summary()


def _rotation(package: Path, device: str) -> dict[str, Any]:
    """rope(q, k): of a new module, warm, with an autograd graph, and compiled."""
    torch: Any = importlib.import_module("torch")
    rw: Any = importlib.import_module("ropewalk")
    q, k = torch.randn(1, 4, 16, 64, device=device), torch.randn(1, 2, 16, 64, device=device)

    def rope() -> Any:
        return rw.RotaryEmbedding(64, pairing="half").to(device)

    measured: dict[str, Any] = {}
    with torch.no_grad():
        # Call another module first, because kernels are built and loaded once per process.
        rope()(q, k)
        new = rope()
        measured["cold"] = follow(package, lambda: new(q, k))
        for _ in range(3):
            new(q, k)
        measured["warm"] = follow(package, lambda: new(q, k))
        angles = new.at(torch.arange(16, device=device))
        new(q, k, angles=angles)
        measured["warm, angles="] = follow(package, lambda: new(q, k, angles=angles))
        ids = torch.arange(16, device=device)
        new(q, k, positions=ids)
        measured["warm, positions="] = follow(package, lambda: new(q, k, positions=ids))
        compiled = torch.compile(lambda q, k: new(q, k))
        for _ in range(3):
            compiled(q, k)
        # Only the Python functions that still run in a warm call of the compiled graph.
        measured["compiled"] = follow(package, lambda: compiled(q, k))
    leaves = [x.clone().requires_grad_() for x in (q, k)]
    for _ in range(3):
        new(*leaves)
    measured["warm, with grad"] = follow(package, lambda: new(*leaves))
    return measured


def _linear(package: Path, device: str) -> dict[str, Any]:
    """linear_attention with a rope, warm, without and with an autograd graph."""
    torch: Any = importlib.import_module("torch")
    rw: Any = importlib.import_module("ropewalk")
    q, k, v = (torch.randn(1, 2, 64, 32, device=device) for _ in range(3))
    rope = rw.RotaryEmbedding(32).to(device)
    measured: dict[str, Any] = {}
    with torch.no_grad():
        for _ in range(2):
            rw.linear_attention(q, k, v, rope=rope)
        measured["forward"] = follow(package, lambda: rw.linear_attention(q, k, v, rope=rope))
    leaves = [x.requires_grad_() for x in (q, k, v)]

    def backward() -> None:
        torch.autograd.grad(rw.linear_attention(*leaves, rope=rope).sum(), leaves)

    backward()
    measured["forward+backward"] = follow(package, backward)
    return measured


def _load_spec(package: Path, path: str) -> dict[str, Any]:
    rw: Any = importlib.import_module("ropewalk")
    rw.load_spec(path)
    parses = Parses(path)
    measured = follow(package, lambda: rw.load_spec(path))
    return measured | parses.counts()


def _inspect(package: Path, path: str) -> dict[str, Any]:
    """`ropewalk inspect CONFIG`, after another config was inspected, so that imports do not count."""
    other = Path(path).with_name("other.json")
    other.write_text(json.dumps(CONFIG | {"rope_theta": 10_000.0}), encoding="utf-8")
    parses = Parses(path)
    output = io.StringIO()

    def command(config: str) -> None:
        sys.argv = ["ropewalk", "inspect", config]
        try:
            runpy.run_module("ropewalk", run_name="__main__")
        except SystemExit as stop:
            if stop.code:
                raise RuntimeError(output.getvalue()) from stop

    with redirect_stdout(output), redirect_stderr(output):
        command(str(other))
        measured = follow(package, lambda: command(path))
    return measured | parses.counts()


class Parses:
    """Counts how often a file is opened and its text is parsed as JSON."""

    def __init__(self, path: str) -> None:
        self.path, self.opened, self.parsed = str(Path(path).resolve()), 0, 0
        text = Path(path).read_text(encoding="utf-8")
        loads = json.loads

        def counted(source: Any, *args: Any, **kwargs: Any) -> Any:
            self.parsed += source == text or source == text.encode()
            return loads(source, *args, **kwargs)

        # json.load calls json.loads by this name too.
        json.loads = counted
        sys.addaudithook(self._audit)

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(arguments[0], str | os.PathLike):
            self.opened += os.path.abspath(os.fspath(arguments[0])) == self.path

    def counts(self) -> dict[str, int]:
        """The current counts."""
        return {"opened": self.opened, "parsed": self.parsed}


def probe(name: str, package: Path) -> dict[str, Any]:
    """Run a probe by name."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder).resolve() / "config.json"
        path.write_text(json.dumps(CONFIG, indent=2), encoding="utf-8")
        return {
            "rotation": lambda: _rotation(package, "cpu"),
            "rotation, gpu": lambda: _rotation(package, "cuda"),
            "linear": lambda: _linear(package, "cpu"),
            "linear, gpu": lambda: _linear(package, "cuda"),
            "load_spec": lambda: _load_spec(package, str(path)),
            "inspect": lambda: _inspect(package, str(path)),
        }[name]()


def run_probe(name: str, source: Path) -> dict[str, Any]:
    """Run a probe in a separate process."""
    environment = os.environ | {"PYTHONPATH": str(source.resolve())}
    command = [sys.executable, str(Path(__file__).resolve()), "--probe", name, str(source)]
    finished = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if finished.returncode:
        return {"error": finished.stderr.strip().splitlines()[-1] if finished.stderr.strip() else "failed"}
    return json.loads(finished.stdout.splitlines()[-1])


# ---------------------------------------------------------------------------------------------------------------------
# The table.


def structure(source: Path, gpu: bool) -> dict[str, Any]:
    """All figures of one checkout."""
    package = source / "ropewalk"
    names = ["rotation", "linear", "load_spec", "inspect"] + (["rotation, gpu", "linear, gpu"] if gpu else [])
    return {
        "sizes": sizes(package),
        "circles": circles(import_graph(package)),
        "duplicates": duplicates(package),
        "calls": {name: run_probe(name, source) for name in names},
    }


def table(measured: dict[str, Any]) -> str:
    """The figures as text."""
    size, copies = measured["sizes"], measured["duplicates"]
    lines = [
        f"files                {size['files']} Python of {size['lines']} lines in {size['packages']} packages;"
        f" {size['c_files']} C of {size['c_lines']} lines",
        f"lines per file       median {size['median']:g}, p90 {size['p90']}, max {size['max']};"
        f" {size['files_of_70_or_fewer']} files of 70 or fewer",
        f"import cycles        {len(measured['circles'])}",
        *(f"                     {' - '.join(circle)}" for circle in measured["circles"]),
        f"duplicate pairs      {', '.join(f'{pairs} of {run} tokens' for run, pairs in copies.items())}",
        "",
        f"{'one call':<36}{'functions':>10}{'files':>7}",
    ]
    for name, call in measured["calls"].items():
        if "error" in call:
            lines.append(f"{name:<36}  {call['error']}")
            continue
        cases = {name: call} if "functions" in call else {f"{name}: {case}": trace for case, trace in call.items()}
        for case, trace in cases.items():
            command_files = sum(file.startswith(("hub/", "tools/")) for file in trace["file_names"])
            notes = f"  {command_files} in hub and tools" if command_files else ""
            notes += f"; config opened {trace['opened']}, parsed {trace['parsed']} times" if "parsed" in trace else ""
            lines.append(f"{case:<36}{trace['functions']:>10}{trace['files']:>7}{notes}")
    return "\n".join(lines)


def has_gpu() -> bool:
    """Whether torch has a CUDA device."""
    code = "import torch; raise SystemExit(not torch.cuda.is_available())"
    return subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def main() -> None:
    """The command line."""
    if sys.argv[1:2] == ["--probe"]:
        result = probe(sys.argv[2], Path(sys.argv[3]).resolve() / "ropewalk")
        print(json.dumps(result))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, metavar="SRC_DIR", help="the src folder of a checkout")
    parser.add_argument(
        "--json", metavar="FILE", help="write everything as JSON, with the names of files and functions"
    )
    parser.add_argument("--names", action="store_true", help="list the functions of every call")
    options = parser.parse_args()
    measured = structure(options.source, has_gpu())
    print(table(measured))
    if options.names:
        for name, call in measured["calls"].items():
            for case, trace in ({name: call} if "functions" in call else call).items():
                print(f"\n{name}: {case}", *trace["function_names"], sep="\n  ")
    if options.json is not None:
        Path(options.json).write_text(json.dumps(measured, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
