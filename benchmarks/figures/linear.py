"""Times of linear attention."""

from collections.abc import Callable

from figures.pages import block, milliseconds, own_lines, paragraph, table
from figures.records import case_of, cores, record, short_version, times_of
from ropewalk.tools.bench.attention_record import faster_from


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
            f"The exponents are fitted from {fits[paths[2]]['from']} to {fits[paths[2]]['to']} tokens. All four are"
            f" faster than SDPA from {min(faster)} tokens on."
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
            f"One H200 (torch {short_version(versions['torch'])}, Triton {short_version(versions['triton'])}, fla"
            f" {short_version(versions['flash-linear-attention'])}, {gpu['date']}), bfloat16, causal, in ms: medians of"
            " interleaved rounds, with the cache overwritten before each call"
            " ([record](../benchmarks/attention_gpu.json)):"
        ),
        table(["batch, heads, N, dim", "+ RoPE", "no RoPE", "fla + RoPE", "fla", "SDPA"], *rows),
        paragraph(
            f"From {start} tokens on, time grows as {ours[0]} forward and {ours[1]} with the backward pass (SDPA:"
            f" {softmax[0]} and {softmax[1]}). Shorter sequences do not fill the device, which makes exponents smaller."
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
        paragraph(
            f"Temporaries of these calls are at most {sizes[0]:.2f} times q, k and v; in both directions"
            f" {sizes[1]:.2f} times."
        ),
    )


@block("linear-kernels")
def linear_kernels(page: str) -> str:
    measured = record("kernel_times")
    text = (
        f"Forward and backward by torch's profiler, kernels summed, in microseconds per call ({measured['date']},"
        f" `{measured['command']}`, [record](../benchmarks/kernel_times.json)):"
    )
    shapes = ([1, 16, 65_536, 64], [4, 16, 8192, 128])
    paths = dict.fromkeys(x["path"] for x in measured["cases"])
    sums = {(tuple(x["shape"]), x["path"]): x["us"] for x in measured["cases"]}
    rows = [[f"{tuple(shape)}", *(f"{sums[tuple(shape), path]:.0f}" for path in paths)] for shape in shapes]
    parts = [table(["batch, heads, N, dim", *(path.removeprefix("ropewalk ") for path in paths)], *rows)]
    by_kernel = [x for x in measured["cases"] if x["kernels"]]
    names = dict.fromkeys(name for x in by_kernel for name in x["kernels"])
    header = [f"{x['path'].removeprefix('ropewalk ')}, {tuple(x['shape'])}" for x in by_kernel]
    times = ([f"{x['kernels'][name][0]:.0f}" if name in x["kernels"] else "–" for x in by_kernel] for name in names)
    parts.append(paragraph("By kernel; a kernel of several launches is their sum:"))
    parts.append(table(["", *header], *([f"`{name}`", *cells] for name, cells in zip(names, times, strict=True))))
    return own_lines(paragraph(text), *parts)


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
    text = (
        "Decay without a denominator, without a feature map and without RoPE, in ms on the device, next to the"
        " functions of fla that compute the same."
    )
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
        paragraph(
            f"Linear attention is faster from {starts[0]} tokens on forward, and from {starts[1]} with the backward"
            " pass."
        ),
    )
