"""Writes the measured figures of README.md and docs/ from the records in this folder.

`python benchmarks/render.py` rewrites the text between `<!-- figures: NAME -->` and `<!-- /figures -->` on every page.
`--check` changes nothing and exits with 1 if a page differs. A record that was edited by hand, misses a floor or was
measured with `--quick` is an error.
"""

import argparse
import re
import sys
import textwrap
from collections import Counter
from collections.abc import Callable, Sequence
from difflib import unified_diff
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from ropewalk.claims import CHAPTERS, Verdict
from ropewalk.claims.sources import NOTES, PRACTICE, Place
from ropewalk.claims.trained import SEED_SETS, lab_record
from ropewalk.errors import RopewalkError
from ropewalk.lab.experiments import EXPERIMENTS
from ropewalk.tools.bench.attention_record import faster_from
from ropewalk.tools.bench.records import read_sealed

RECORDS = Path(__file__).parent
BLOCK = re.compile(r"(<!-- figures: (?P<name>[\w-]+) -->)(?P<content>.*?)(<!-- /figures -->)", re.DOTALL)
# Names of processors for which `processor` returns only a part number.
PROCESSORS = {"0xd0c": "Neoverse-N1"}
FORMULA = "transformers' formula"
BLOCKS: dict[str, Callable[[str], str]] = {}

Case = dict[str, Any]


def block(name: str) -> Callable[[Callable[[str], str]], Callable[[str], str]]:
    """Register a function from the text of a page to the content of its block `name`."""

    def register(function: Callable[[str], str]) -> Callable[[str], str]:
        BLOCKS[name] = function
        return function

    return register


@cache
def record(name: str) -> dict[str, Any]:
    """The record benchmarks/NAME.json."""
    return read_sealed(RECORDS / f"{name}.json")


def case_of(name: str, **fields: object) -> Case:
    """The only case of a record with these fields. Without a group, a case of attention is one over N."""
    usual = {"group": "lengths"}
    (case,) = (case for case in record(name)["cases"] if (usual | fields).items() <= (usual | case).items())
    return case


def times_of(case: Case, unit: str) -> dict[str, float]:
    """The time of each path that has one."""
    return {line["path"]: line[unit] for line in case["lines"] if line[unit] is not None}


def table(*rows: list[str]) -> str:
    """A Markdown table. The first row is the header."""
    lines = [f"| {' | '.join(row)} |".replace("|  |", "| |") for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])


def paragraph(text: str) -> str:
    return textwrap.fill(text, 118, break_long_words=False, break_on_hyphens=False)


def own_lines(*parts: str) -> str:
    """The content of a block that is not inline: paragraphs and tables with an empty line between them."""
    return "\n" + "\n\n".join(parts) + "\n"


def cores(name: str) -> str:
    hardware = record(name)["hardware"]
    count = {1: "one", 2: "two", 4: "four", 8: "eight"}.get(hardware["threads"], str(hardware["threads"]))
    return f"{count} {PROCESSORS.get(hardware['processor'], hardware['processor'])} cores"


def milliseconds(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"


def fastest_other(times: dict[str, float], ours: float, left_out: tuple[str, ...], form: Callable[[float], str]) -> str:
    others = {path: time for path, time in times.items() if not path.startswith(left_out)}
    if not others:
        return "–"
    best = min(others, key=lambda path: others[path])
    return f"{form(others[best] / ours)} ({best})"


def gpu_ratio(value: float) -> str:
    return f"{value:.1f} ×" if value >= 10 else f"{value:.2f} ×"


def gpu_rows() -> list[list[str]]:
    """Rows of the README: our time over that of copy_, and others' times over ours."""
    usual = {"rotary_dim": 0, "dtype": "bfloat16", "memory": "transposed", "norm": False, "work": "forward"}
    training, long, token = [4, 8192, 32, 8, 128], [1, 131_072, 32, 8, 128], [64, 1, 32, 8, 128]
    rows: list[tuple[str, Case]] = [
        ("{}, forward, half", {"shape": training, "pairing": "half"}),
        ("{}, forward, interleaved", {"shape": training, "pairing": "interleaved"}),
        ("{}, forward+backward, half", {"shape": training, "pairing": "half", "work": "forward+backward"}),
        ("{}, forward, half", {"shape": long, "pairing": "half"}),
        ("{}, one token, {us:.1f} µs, half", {"shape": token, "pairing": "half", "memory": "contiguous"}),
        (
            "{}, QK-norm, forward+backward, half",
            {"shape": training, "pairing": "half", "norm": True, "work": "forward+backward"},
        ),
    ]
    result: list[list[str]] = []
    for name, fields in rows:
        times = times_of(case_of("gpu", **usual | fields), "us")
        ours, compiled = times["ropewalk"], times.get("transformers, compiled")
        result.append(
            [
                name.format(f"({', '.join(map(str, fields['shape']))})", us=ours),
                gpu_ratio(ours / times["copy"]),
                gpu_ratio(times["transformers"] / ours),
                "–" if compiled is None else gpu_ratio(compiled / ours),
                fastest_other(times, ours, ("ropewalk", "copy", "transformers", "bare"), gpu_ratio),
            ]
        )
    return result


def cpu_rows() -> list[list[str]]:
    """Rows of the README, as for the GPU."""
    transposed = {"seq": 2048, "memory": "transposed"}
    rows = [
        ("forward, float32, half", transposed | {"dtype": "float32", "pairing": "half", "work": "forward"}),
        (
            "forward+backward, bfloat16, interleaved",
            transposed | {"dtype": "bfloat16", "pairing": "interleaved", "work": "forward+backward"},
        ),
        (
            "one token, float32, interleaved: {us:.0f} µs",
            {"seq": 1, "dtype": "float32", "pairing": "interleaved", "work": "forward"},
        ),
    ]
    result: list[list[str]] = []
    for name, fields in rows:
        times = times_of(case_of("cpu", **fields), "ms")
        ours = times["ropewalk"]
        result.append(
            [
                name.format(us=ours * 1000),
                f"{ours / times['copy']:.1f} ×",
                f"{times[FORMULA] / ours:.1f} ×",
                f"{times[FORMULA + ', compiled'] / ours:.1f} ×",
                fastest_other(times, ours, ("ropewalk", "copy", "transformers"), "{:.1f} ×".format),
            ]
        )
    return result


@block("speed")
def speed(page: str) -> str:
    gpu, cpu = record("gpu"), record("cpu")
    shape = cpu["shape"]
    on_gpu = (
        "GPU (Triton). First column: our device time over that of `copy_`. Others: their device time over ours. Liger"
        f" rotates in place. bfloat16, transposed views, one {gpu['hardware']['gpu'].removeprefix('NVIDIA ')}, medians"
        f" of {gpu['rounds']} rounds from an empty cache, {gpu['date']}, `{gpu['command']}`"
        " ([kernels on a GPU](docs/gpu.md), [record](benchmarks/gpu.json))."
    )
    on_cpu = (
        f"CPU (C). The same columns, ({shape['batch']}, 2048, {shape['q_heads']} and {shape['k_heads']} heads,"
        f" {shape['head_dim']}), {cores('cpu')}, {cpu['date']}, `{cpu['command']}` ([kernels on a CPU](docs/cpu.md),"
        " [record](benchmarks/cpu.json))."
    )
    header = ["`copy_`", "transformers", "the same, compiled", "best other"]
    return own_lines(
        paragraph(on_gpu),
        table(["batch, length, heads of q and k, dim", *header], *gpu_rows()),
        paragraph(on_cpu),
        table(["", header[0], FORMULA, *header[2:]], *cpu_rows()),
        paragraph(linear_summary()),
    )


def linear_summary() -> str:
    ours, softmax, fla = "ropewalk linear + RoPE", "softmax (SDPA)", "fla linear + RoPE"
    longest = times_of(case_of("attention_cpu", shape=[1, 8, 16384, 64]), "ms")
    (power,) = (fit["exponent"] for fit in record("attention_cpu")["growth"] if fit["path"] == ours)
    passes = [
        times_of(case_of("attention_gpu", shape=[4, 16, 8192, 128], work=work), "ms")
        for work in ("forward", "forward+backward")
    ]
    mine, theirs = ([milliseconds(times[path]) for times in passes] for path in (ours, fla))
    return (
        f"Linear attention with RoPE grows as N^{power:.2f} there: {longest[ours]:.0f} ms for 16384 tokens (softmax:"
        f" {longest[softmax]:.0f} ms). On an H200, (4, 16, 8192, 128) bfloat16: {mine[0]} ms, {mine[1]} with backward"
        f" (fla: {theirs[0]} and {theirs[1]}). See [RoPE with linear attention](docs/linear.md#speed)."
    )


def speedup(model: str, kind: str, compiled: bool) -> float:
    """How many times faster `accelerate` makes a whole model by wall clock on a GPU."""
    times = times_of(case_of("accelerate_gpu", model=model, kind=kind, compiled=compiled), "wall_ms")
    return times["transformers"] / times["ropewalk"]


@block("whole-models")
def whole_models(page: str) -> str:
    kinds, models = ("forward", "training step", "generate"), ("Qwen3 1.7B", "Llama 1.2B")
    eager = {model: [f"{speedup(model, kind, False):.2f} ×" for kind in kinds] for model in models}
    compiled = [speedup(model, kind, True) for model in models for kind in kinds[:2]]
    named = ", ".join(f"{ratio} ({kind})" for ratio, kind in zip(eager[models[0]], kinds, strict=True))
    return (
        f"{models[0]} {named}, {models[1]} {', '.join(eager[models[1]])}; compiled, where the compiler fuses too,"
        f" {min(compiled):.2f} to {max(compiled):.2f} ×"
    )


@block("accelerate-gpu")
def accelerate_gpu(page: str) -> str:
    whole = record("accelerate_gpu")
    gpu, versions = whole["hardware"]["gpu"].removeprefix("NVIDIA "), whole["versions"]
    text = (
        f"bfloat16, random weights, one {gpu}, torch {versions['torch']}, transformers {versions['transformers']},"
        f" Liger {versions['liger-kernel']}, medians of {whole['rounds']} interleaved rounds, {whole['date']},"
        f" `{whole['command']}` ([record](../benchmarks/accelerate_gpu.json)). Milliseconds by wall clock, and the"
        " sum of all kernels in parentheses:"
    )
    rows: list[list[str]] = []
    for case in whole["cases"]:
        wall, device = times_of(case, "wall_ms"), times_of(case, "device_ms")
        mode = "compiled" if case["compiled"] else "eager"
        rows.append(
            [f"{case['model']}, {case['kind']}, {mode}, {case['batch']} × {case['tokens']}"]
            + [f"{milliseconds(wall[path])} ({milliseconds(device[path])})" for path in wall]
            + [f"{speedup(case['model'], case['kind'], case['compiled']):.2f} ×"]
        )
    paths = [line["path"] for line in whole["cases"][0]["lines"]]
    return own_lines(paragraph(text), table(["model, work, batch × tokens", *paths, "`accelerate`"], *rows))


@block("gpu-shares")
def gpu_shares(page: str) -> str:
    gpu = record("gpu")
    training, long, short = [4, 8192, 32, 8, 128], [1, 131_072, 32, 8, 128], [8, 2048, 16, 16, 64]
    rows: list[tuple[str, list[Case]]] = [
        ("(4, 8192, 32, 8, 128), forward", [{"shape": training}]),
        ("the same, 64 of 128 features rotated", [{"shape": training, "rotary_dim": 64}]),
        ("dim 96; dim 80", [{"shape": [*training[:4], dim]} for dim in (96, 80)]),
        ("(1, 131072, 32, 8, 128), forward", [{"shape": long}]),
        ("(8, 2048, 16, 16, 64), forward", [{"shape": short}]),
        ("(4, 8192, 32, 8, 128), forward+backward", [{"shape": training, "work": "forward+backward"}]),
        ("QK-norm + RoPE, forward", [{"shape": training, "norm": True}]),
        ("QK-norm + RoPE, forward+backward", [{"shape": training, "norm": True, "work": "forward+backward"}]),
    ]

    def shares(memory: str, cases: list[Case]) -> str:
        usual = {"work": "forward", "norm": False, "rotary_dim": 0, "dtype": "bfloat16", "memory": memory}
        cells: list[str] = []
        for fields in cases:
            wanted = usual | fields
            if not any(wanted.items() <= case.items() for case in gpu["cases"]):
                return ""
            both = [times_of(case_of("gpu", **wanted, pairing=p), "us") for p in ("half", "interleaved")]
            cells.append(", ".join(f"{times['copy'] / times['ropewalk']:.2f}" for times in both))
        return "; ".join(cells)

    token = [case_of("gpu", shape=[64, 1, 32, 8, 128], pairing=p) for p in ("half", "interleaved")]
    device = [times_of(case, "us")["ropewalk"] for case in token]

    def host(path: str) -> str:
        return " and ".join(f"{times_of(case, 'host_us')[path]:.0f}" for case in token)

    versions = gpu["versions"]
    return own_lines(
        paragraph(
            f"One H200, torch {_short(versions['torch'])}, Triton {_short(versions['triton'])}, bfloat16,"
            f" {gpu['date']}, one run ([record](../benchmarks/gpu.json))."
            " Speed as a share of the speed of `copy_`, for pairing half and interleaved:"
        ),
        table(
            ["(batch, seq, q heads, k heads, dim)", "[B, S, H, D], seen as [B, H, S, D]", "contiguous [B, H, S, D]"],
            *([name, shares("transposed", cases), shares("contiguous", cases)] for name, cases in rows),
        ),
        paragraph(
            f"One token, (64, 1, 32, 8, 128): {device[0]:.1f} and {device[1]:.1f} µs on the device, and"
            f" {host('ropewalk')} µs of host time. A bare launch with two `empty_like` takes"
            f" {host('bare Triton launch')} µs of host time. Explicit positions take {host('ropewalk, from positions')}"
            " µs of it."
        ),
    )


def _short(version: str) -> str:
    return ".".join(version.split("+")[0].split(".")[:2])


def host_table(name: str, machine: str) -> str:
    """The host time of every call of a record of `ropewalk bench host`."""
    whole = record(name)
    case = whole["cases"][0]
    lines = {line["path"]: line for part in whole["cases"] for line in part["lines"]}
    versions = whole["versions"]
    bare = ", ".join(f"{path} {line['us']:.1f}" for path, line in lines.items() if line["floor"] is None)
    rows = [
        [f"`{path}`", f"{line['us']:.1f}", f"{line['floor_us']:.1f} ({line['floor']})", f"{line['ratio']:.2f} ×"]
        for path, line in lines.items()
        if line["floor"] is not None
    ]
    return own_lines(
        paragraph(
            f"{machine}, torch {_short(versions['torch'])}, one token, {case['dtype']}, {case['pairing']}, medians of"
            f" {whole['rounds']} rounds of {whole['calls']} calls, {whole['date']}, `{whole['command']}`"
            f" ([record](../benchmarks/{name}.json)). Microseconds of the host per call:"
        ),
        table(["call", "µs", "yardstick", "ratio"], *rows),
        paragraph(f"In the same run: {bare}."),
    )


@block("host-cpu")
def host_cpu(page: str) -> str:
    machine = cores("host_cpu")
    return host_table("host_cpu", machine[0].upper() + machine[1:])


@block("host-gpu")
def host_gpu(page: str) -> str:
    return host_table("host_gpu", f"One {record('host_gpu')['hardware']['gpu'].removeprefix('NVIDIA ')}")


@block("gpu-others")
def gpu_others(page: str) -> str:
    usual = {"norm": False, "rotary_dim": 0, "memory": "transposed", "dtype": "bfloat16"}
    training, short = [4, 8192, 32, 8, 128], [8, 2048, 16, 16, 64]
    half, interleaved, backward, half_short, backward_short = (
        times_of(case_of("gpu", **usual, shape=shape, pairing=pairing, work=work), "us")
        for shape, pairing, work in (
            (training, "half", "forward"),
            (training, "interleaved", "forward"),
            (training, "half", "forward+backward"),
            (short, "half", "forward"),
            (short, "half", "forward+backward"),
        )
    )
    compiled = "transformers, compiled"
    return own_lines(
        paragraph(
            "Others in the same run, as shares of the speed of `copy_` at (4, 8192, 32, 8, 128): transformers' formula"
            f" compiled {half['copy'] / half[compiled]:.2f} forward (half;"
            f" {interleaved['copy'] / interleaved[compiled]:.2f} interleaved), Liger {half['copy'] / half['Liger']:.2f}"
            f" forward and {backward['copy'] / backward['Liger']:.2f} forward+backward. Liger rotates its argument in"
            " place, so that nothing can be much faster than it on the device. At (8, 2048, 16, 16, 64) its time is"
            f" {half_short['Liger'] / half_short['ropewalk']:.2f} of ours forward and"
            f" {backward_short['Liger'] / backward_short['ropewalk']:.2f} forward+backward."
        )
    )


@block("linear-cpu")
def linear_cpu(page: str) -> str:
    kinds = "linear", "linear + RoPE", "linear + ALiBi", "linear + T5"
    paths = "softmax (SDPA)", *(f"ropewalk {kind}" for kind in kinds)
    cpu = record("attention_cpu")
    times = {seq: times_of(case_of("attention_cpu", shape=[1, 8, seq, 64]), "ms") for seq in (1024, 4096, 16384)}
    fits = {fit["path"]: fit for fit in cpu["growth"]}
    faster = [
        case["shape"][2]
        for case in cpu["cases"]
        if max(times_of(case, "ms")[path] for path in paths[1:]) < times_of(case, "ms")[paths[0]]
    ]
    return own_lines(
        paragraph(
            f"float32, causal, forward, (1, 8, N, 64), on {cores('attention_cpu')}, {cpu['date']}, in ms"
            " ([record](../benchmarks/attention_cpu.json)):"
        ),
        table(
            ["N", "softmax (SDPA)", *kinds],
            *([str(seq), *(milliseconds(by_path[path]) for path in paths)] for seq, by_path in times.items()),
            ["grows as", *(f"N^{fits[path]['exponent']:.2f}" for path in paths)],
        ),
        paragraph(
            f"The exponents are fitted from {fits[paths[2]]['from']} to {fits[paths[2]]['to']} tokens. Linear attention"
            f" is faster than SDPA from {min(faster)} tokens on."
        ),
    )


@block("linear-gpu")
def linear_gpu(page: str) -> str:
    gpu = record("attention_gpu")
    paths = "ropewalk linear + RoPE", "ropewalk linear", "fla linear + RoPE", "fla linear", "softmax (SDPA)"
    rows: list[list[str]] = []
    for shape, work in (
        ((4, 16, 8192, 128), "forward"),
        ((4, 16, 8192, 128), "forward+backward"),
        ((1, 16, 65536, 64), "forward"),
        ((1, 16, 65536, 64), "forward+backward"),
        ((1, 4, 1_048_576, 64), "forward"),
    ):
        # The longest sequence is measured last, and a run with a limit may end before it.
        if not any(case["shape"] == list(shape) for case in gpu["cases"]):
            continue
        times = times_of(case_of("attention_gpu", shape=list(shape), work=work), "ms")
        rows.append([f"{shape}, {work}", *(milliseconds(times[path]) for path in paths)])
    powers = {(fit["path"], fit["work"]): f"N^{fit['exponent']:.2f}" for fit in gpu["growth"]}
    ours, softmax = ([powers[path, work] for work in ("forward", "forward+backward")] for path in (paths[0], paths[-1]))
    start = next(fit["from"] for fit in gpu["growth"] if fit["path"] == paths[0])
    versions = gpu["versions"]
    return own_lines(
        paragraph(
            f"One H200 (torch {_short(versions['torch'])}, Triton {_short(versions['triton'])}, fla"
            f" {_short(versions['flash-linear-attention'])}, {gpu['date']}), bfloat16, causal, in ms: medians of"
            " interleaved rounds, with the cache overwritten before each call"
            " ([record](../benchmarks/attention_gpu.json)):"
        ),
        table(["batch, heads, N, dim", "+ RoPE", "no RoPE", "fla + RoPE", "fla", "SDPA"], *rows),
        paragraph(
            f"From {start} tokens on, time grows as {ours[0]} forward and {ours[1]} with the backward pass (SDPA:"
            f" {softmax[0]} and {softmax[1]})."
        ),
    )


def attention_rows(group: str, cells: Callable[[dict[str, float]], list[str]]) -> list[list[str]]:
    """A row per case of a group of benchmarks/attention_gpu.json, from the times of its paths."""
    cases = [case for case in record("attention_gpu")["cases"] if case.get("group") == group]
    return [[f"{tuple(case['shape'])}, {case['work']}", *cells(times_of(case, "ms"))] for case in cases]


@block("linear-weights")
def linear_weights(page: str) -> str:
    names = ["decay", "ALiBi", "T5", "ALiBi, two-way", "T5, two-way"]

    def cells(times: dict[str, float]) -> list[str]:
        plain = times["ropewalk linear + RoPE"]
        return [milliseconds(plain), *(f"{times[f'ropewalk {name}'] / plain:.2f} ×" for name in names)]

    text = "The same on the device with a decay per head or a bias: ms with RoPE alone, and times as long with more:"
    cases = [case for case in record("attention_gpu")["cases"] if case.get("group") == "weights"]
    sizes = [
        max(line["temporaries_over_qkv"] for case in cases for line in case["lines"] if wide == ("way" in line["path"]))
        for wide in (False, True)
    ]
    return own_lines(
        paragraph(text),
        table(["batch, heads, N, dim", "+ RoPE", *names], *attention_rows("weights", cells)),
        paragraph(f"Temporaries are at most {sizes[0]:.2f} times q, k and v; in both directions {sizes[1]:.2f} times."),
    )


@block("linear-peers")
def linear_peers(page: str) -> str:
    pairs = {"retention": "retention", "lightning": "lightning", "token decay": "simple GLA"}

    def cells(times: dict[str, float]) -> list[str]:
        theirs = (times.get(f"fla {name}") for name in pairs.values())
        ours = (milliseconds(times[f"ropewalk {name}"]) for name in pairs)
        return [
            f"{mine} (fla: {'–' if other is None else milliseconds(other)})"
            for mine, other in zip(ours, theirs, strict=True)
        ]

    lines = (line for case in record("attention_gpu")["cases"] for line in case["lines"])
    differences = [line["difference"] for line in lines if line.get("difference") is not None]
    text = "Decay without a denominator, in ms on the device, next to the functions of fla that compute the same."
    text += f" The outputs differ by at most {max(differences, default=0.0):.1e} in norm:"
    header = ["batch, heads, N, dim", "retention", "lightning", "a decay per token (simple GLA)"]
    return own_lines(paragraph(text), table(header, *attention_rows("peers", cells)))


@block("linear-clock")
def linear_clock(page: str) -> str:
    paths, works = ("ropewalk linear + RoPE", "softmax (SDPA)"), ("forward", "forward+backward")
    cases = [case for case in record("attention_gpu")["cases"] if case["sweep"]]
    times = {(case["shape"][2], case["work"]): {line["path"]: line for line in case["lines"]} for case in cases}
    rows: list[list[str]] = []
    for seq in sorted({seq for seq, _ in times}):
        walls = [times[seq, work].get(path, {}).get("wall_ms") for work in works for path in paths]
        if walls[0] is not None:
            rows.append([str(seq), *("–" if wall is None else milliseconds(wall) for wall in walls)])
    header = ["N", "forward", "SDPA", "forward+backward", "SDPA"]
    starts = [faster_from(cases, work, "wall_ms") for work in works]
    return own_lines(
        paragraph("By the clock, in ms, (1, 16, N, 64): one eager call that is waited for, launches included:"),
        table(header, *rows),
        paragraph(f"Linear attention is faster from {starts[0]} tokens on, and from {starts[1]} with backward."),
    )


@block("context-parallel")
def context_parallel(page: str) -> str:
    measured = record("context_parallel")
    errors: dict[str, list[str]] = {}
    for case in measured["cases"]:
        errors.setdefault(case["path"], []).append(f"{case['error']:.1e}")
    rows = [
        [f"`{path.removeprefix('torch, ')}`" if "score - " in path else path.removeprefix("torch, "), *errors[path]]
        for path in errors
    ]
    return own_lines(
        paragraph(
            f"torch {measured['versions']['torch'].split('+')[0]}, {measured['ranks']} ranks, float32,"
            f" {tuple(measured['shape'])}, causal:"
            f" the largest error against one rank, {measured['date']} ([record](../benchmarks/context_parallel.json)):"
        ),
        table(["torch with a score_mod, and ropewalk", "contiguous", "head and tail, or zigzag"], *rows),
    )


@block("explore")
def explore(page: str) -> str:
    measured = record("explore")
    values = {case["what"]: case["value"] for case in measured["cases"]}
    start, size = values.pop("command to page"), values.pop("file")
    hardware = measured["hardware"]
    return own_lines(
        paragraph(
            f"{hardware['threads']} threads of {hardware['processor'].replace('(R)', '')},"
            f" {measured['date']}, Chromium"
            f" {measured['versions']['chromium'].split('.')[0]}, `{measured['command']}`"
            f" ([record](../benchmarks/explore.json)): {start} s from the command to a page with its first picture, and"
            f" {min(values.values())} to {max(values.values())} ms from a step of a slider to the end of the next frame"
            " with the visible panel drawn, for 128 pairs and 2048 distances (medians of 5 and 50)."
            f" The file has {size} MB."
        )
    )


@block("accelerate")
def accelerate(page: str) -> str:
    cpu = record("accelerate_cpu")
    first = cpu["cases"][0]
    names = {"llama": "llama", "qwen3": "qwen3, with the norms of q and k"}
    rows: list[list[str]] = []
    for case in cpu["cases"]:
        lines = {line["path"]: line for line in case["lines"]}
        both = lines["transformers"], lines["ropewalk"]
        times = [f"{line['rotation_ms']:.1f}" for line in both]
        shares = [f"{100 * line['rotation_share']:.1f} %" for line in both]
        rows.append([names[case["family"]], *times, *shares])
    return own_lines(
        paragraph(
            f"{first['dtype']}, {first['tokens']} tokens, {first['layers']} layers of width {first['hidden']},"
            f" {cores('accelerate_cpu')}, medians of {cpu['rounds']} rounds, {cpu['date']}"
            " ([record](../benchmarks/accelerate_cpu.json)):"
        ),
        table(["model", "rotation before, ms", "after, ms", "share of the pass before", "after"], *rows),
    )


@block("transformers-tests")
def transformers_tests(page: str) -> str:
    measured = record("transformers_tests")
    families, versions = measured["families"], measured["versions"]

    def count(side: str, outcome: str) -> int:
        return sum(line[side].get(outcome, 0) for line in families)

    alike = not any(line["differ"] for line in families)
    failed = sorted({name.partition("::")[2] for line in families for name in line["failed without"]})
    models = sum(line["models"].get("accelerated", 0) for line in families)
    return own_lines(
        paragraph(
            f"transformers' own tests of {', '.join(line['family'] for line in families)}, each run without and with"
            f" `accelerate` on a CPU, {measured['date']}, torch {_short(versions['torch'])}, transformers"
            f" {versions['transformers']}, `{measured['command']}` ([record](../benchmarks/transformers_tests.json)):"
            f" {count('without', 'passed')} pass without and {count('with', 'passed')} with, which accelerated"
            f" {models} models. {count('without', 'failed')} fail without and {count('with', 'failed')} with"
            + (f" ({', '.join(f'`{name}`' for name in failed)})" if failed else "")
            + f", and {count('with', 'skipped')} are skipped."
            + (" No test has another result with it." if alike else "")
        )
    )


@block("lab-verdicts")
def lab_verdicts(page: str) -> str:
    header = ["experiment", "statement", "seeds 0 to 2", "seeds 3 to 5"]
    names = {path.name for path in files("ropewalk").joinpath("data/lab").iterdir()}
    rows: list[list[str]] = []
    pairs: Counter[str] = Counter()
    for experiment in EXPERIMENTS:
        records = [f"{experiment}_{kind}" for kind in SEED_SETS]
        judged = [lab_record(x)["statements"] if f"{x}.json" in names else [] for x in records]
        by_text = [{x["text"]: x["verdict"] for x in statements} for statements in judged]
        for text in dict.fromkeys(text for verdicts in by_text for text in verdicts):
            first, second = (verdicts.get(text, "-") for verdicts in by_text)
            rows.append([f"`{experiment}`", text, first, second])
            if "-" not in (first, second):
                pairs[
                    "the same" if first == second else "undecided" if "undecided" in (first, second) else "contrary"
                ] += 1
    same, undecided, contrary = (pairs[x] for x in ("the same", "undecided", "contrary"))
    return own_lines(
        table(header, *rows),
        paragraph(
            f"With other seeds, {same} of {pairs.total()} verdicts are the same, {undecided} are undecided"
            f" with one of both, and {contrary} are contrary."
        ),
    )


@block("claims")
def claims(page: str) -> str:
    everything = [claim for chapter in CHAPTERS for claim in chapter.claims]
    verdicts = Counter(claim.verdict for claim in everything)
    papers = {place.source for claim in everything for place in claim.places} - {*NOTES, PRACTICE}
    return (
        f"Of {verdicts.total()} statements of five notes and {len(papers)} papers {verdicts[Verdict.HOLDS]} hold,"
        f" {verdicts[Verdict.CONDITIONAL]} only under a condition left out, {verdicts[Verdict.FAILS]} are false,"
        f" {verdicts[Verdict.MISPRINT]} are misprints, and {verdicts[Verdict.UNMEASURABLE]} cannot be measured here"
    )


AMENDMENTS = {
    Verdict.CONDITIONAL: "Only if",
    Verdict.FAILS: "Instead",
    Verdict.MISPRINT: "Meant",
    Verdict.UNMEASURABLE: "Needs",
}


def literal(text: str) -> str:
    """Text that Markdown shows as it is. The longest run of backticks in it is shorter than the fence."""
    fence = "`" * (max((len(run) for run in re.findall("`+", text)), default=0) + 1)
    return f"{fence} {text} {fence}" if "`" in text else f"{fence}{text}{fence}"


def escaped(text: str) -> str:
    """Text without Markdown. The site's Markdown shows the backslash of an escaped <, so it is an entity."""
    return re.sub(r"([\\`*_\[\]>|])", r"\\\1", text.replace("&", "&amp;")).replace("<", "&lt;")


def cited(place: Place) -> str:
    """The title of a source as a whole, or the line of a note and the quotation in the language of the note."""
    if place.line is None:
        title = escaped(place.source.title)
        return title[:1].upper() + title[1:]
    language = re.search(r"\((\w\w)\)", place.source.title)
    text = literal(place.quotation)
    text = text if language is None else f'<span lang="{language[1]}">{text}</span>'
    return f"Note {place.source.key}, line {place.line}: {text}"


def item_of(text: str) -> str:
    """An item of a list, wrapped."""
    return textwrap.fill(f"- {text}", 118, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


@block("claims-counts")
def claims_counts(page: str) -> str:
    everything = [claim for chapter in CHAPTERS for claim in chapter.claims]
    rows = [["source", *map(str, Verdict)]]
    groups = [(source.title, [claim for claim in everything if claim.is_from(source)]) for source in NOTES]
    others = [claim for claim in everything if any(place.source not in NOTES for place in claim.places)]
    for title, claims in (*groups, ("papers and common practice", others), ("all", everything)):
        verdicts = Counter(claim.verdict for claim in claims)
        rows.append([title, *(str(verdicts[verdict]) for verdict in Verdict)])
    return own_lines(table(*rows))


@block("claims-list")
def claims_list(page: str) -> str:
    """Every statement: its verdict, its quotations, our reading, and how it is measured."""
    parts: list[str] = []
    for chapter in CHAPTERS:
        parts.append(f"### {escaped(chapter.title)}")
        for claim in chapter.claims:
            places = [cited(place) for place in claim.places]
            amended = f"*{AMENDMENTS[claim.verdict]}*: {escaped(claim.amendment)}" if claim.amendment else ""
            texts = [f"*Reading*: {escaped(claim.statement)}", amended, f"*Method*: {escaped(claim.method)}"]
            texts.append(f"*Expected*: {escaped(claim.expected)}")
            items = [f"- {item}" for item in places] + [item_of(text) for text in texts if text]
            parts.append("\n".join([f"**`{claim.id}`**: {claim.verdict}", "", *items]))
    return own_lines(*parts)


@block("families")
def families(page: str) -> str:
    """How many families the tables of docs/conformance.md have. `python -m hub.conformance` in tests/ writes them."""
    text = (RECORDS.parent / "docs" / "conformance.md").read_text(encoding="utf-8")
    names: dict[str, set[str]] = {}
    for section in text.split("\n## ")[1:]:
        title, _, content = section.partition("\n")
        names[title] = set(re.findall(r"^\| ([^ |]+) \|", content, re.MULTILINE)) - {"family"}
    # Some families have several rotations, of which not all agree.
    agreeing = names.pop("Families that agree")
    others = set().union(*names.values())
    return f"{len(agreeing - others)} of transformers' {len(agreeing | others)} families agree"


@block("accelerated")
def accelerated(page: str) -> str:
    """How many families docs/accelerate.md lists. tests/hub/test_patch_families.py compares it with transformers."""
    text = (RECORDS.parent / "docs" / "accelerate.md").read_text(encoding="utf-8")
    listed = text.partition("\n## Families\n")[2].partition("\n## ")[0]
    return f"{len(re.findall('`[^`]+`', listed))} families"


@block("precision")
def precision(page: str) -> str:
    """A table of what the code on the page asserts. The code is run with the page."""
    names = [
        "ropewalk",
        "float32 angles, as in transformers",
        "exact angles, cos and sin rounded to bfloat16",
        "frequencies cast to bfloat16 with the model",
        "position ids in bfloat16",
    ]
    asserted = re.findall(r'^assert errors\(.*\) == "(.*)"$', page, re.MULTILINE)
    rows = ([name, *errors.split(" | ")] for name, errors in zip(names, asserted, strict=True))
    return own_lines(table(["how cos is computed", "4k", "32k", "128k", "1M"], *rows))


def rendered(page: str) -> str:
    """A page with new content in each block."""

    def content(match: re.Match[str]) -> str:
        name = match["name"]
        if name not in BLOCKS:
            raise RopewalkError(
                asked=f"the block {name!r}",
                expected=" or ".join(sorted(BLOCKS)),
                got=name,
                do="use one of these names, or add a function to benchmarks/render.py",
            )
        return match[1] + BLOCKS[name](page) + match[4]

    return BLOCK.sub(content, page)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing; exit with 1 if a page would change")
    parser.add_argument("--root", type=Path, default=RECORDS.parent, help="the folder with README.md and docs/")
    options = parser.parse_args(arguments)
    changed = False
    try:
        for path in (options.root / "README.md", *sorted((options.root / "docs").rglob("*.md"))):
            old = path.read_text(encoding="utf-8")
            new = rendered(old)
            if new == old:
                continue
            changed = True
            if options.check:
                lines = (text.splitlines(keepends=True) for text in (old, new))
                sys.stdout.writelines(unified_diff(*lines, str(path), f"{path}, rendered"))
            else:
                path.write_text(new, encoding="utf-8")
                print(f"rendered {path.relative_to(options.root)}")
    except RopewalkError as error:
        sys.stderr.write(f"{error}\n")
        raise SystemExit(2) from None
    if options.check and changed:
        sys.stderr.write("run `make records`\n")
        raise SystemExit(1)


if __name__ == "__main__":
    main()
