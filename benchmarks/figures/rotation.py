"""Times of the rotation on a GPU and a CPU, of the host per call, and the table of README.md."""

from collections.abc import Callable

from figures.pages import block, milliseconds, own_lines, paragraph, table
from figures.records import FORMULA, Case, case_of, cores, record, short_version, times_of


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
            f"One H200, torch {short_version(versions['torch'])}, Triton {short_version(versions['triton'])}, bfloat16,"
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
            f"{machine}, torch {short_version(versions['torch'])}, one token, {case['dtype']}, {case['pairing']},"
            f" medians of {whole['rounds']} rounds of {whole['calls']} calls, {whole['date']}, `{whole['command']}`"
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
