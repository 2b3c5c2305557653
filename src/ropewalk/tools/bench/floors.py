"""The speed that ropewalk must reach: checked when a benchmark writes its record.

A floor applies to the machine of the committed records (benchmarks/*.json). On other machines a missed floor is only
information.
"""

from collections.abc import Iterator, Sequence
from typing import Any

__all__ = [
    "accelerate_floors",
    "attention_floors",
    "cpu_floors",
    "generate_floors",
    "gpu_floors",
    "host_floors",
    "host_limit",
    "host_limit_us",
]

Case = dict[str, Any]

# (batch, seq, q heads, k heads, head_dim): a training step, one long sequence, and a step in which the host decides.
TRAINING, LONG, SMALL = [4, 8192, 32, 8, 128], [1, 131_072, 32, 8, 128], [8, 2048, 16, 16, 64]
# The time of a prefill on a CPU in [B, S, H, D] memory, at most so many times that of copy_.
PREFILL = {
    ("float32", "half"): 1.15,
    ("float32", "interleaved"): 1.35,
    ("bfloat16", "half"): 2.8,
    ("bfloat16", "interleaved"): 3.1,
}
# The share of copy_'s speed for LONG, contiguous. docs/gpu.md explains why 0.96 is not reached there.
LONG_CONTIGUOUS = 0.935
# `rope(q, k)` for LONG, transposed, in times of copy_. cos and sin are 2.5 % of the bytes.
LONG_RANGE = 1.03
# The share of copy_'s speed of QK-norm and rotation, contiguous, forward.
NORM_CONTIGUOUS = 0.88
# QK-norm and rotation for TRAINING, forward and backward, in times of two copies. The bytes that it needs are 1.25.
NORM = {"transposed": 1.35, "contiguous": 1.4}
# Two measurements of the same kernel differ by this share of copy_'s speed.
NOISE = 0.03
# Milliseconds of linear attention with RoPE on a GPU, also with a decay or a bias: forward, forward+backward. The aims
# for 128 features and for T5 in both directions were lower, and are not reached: docs/linear.md says why.
ATTENTION_MS = {
    (1, 16, 65536, 64): {
        "ropewalk linear + RoPE": (0.43, 1.6),
        "ropewalk decay": (0.495, 1.84),
        "ropewalk ALiBi": (0.495, 1.84),
        "ropewalk T5": (0.86, 3.2),
        "ropewalk ALiBi, two-way": (0.86, 3.2),
        "ropewalk T5, two-way": (0.98, 3.4),
    },
    (4, 16, 8192, 128): {
        "ropewalk linear + RoPE": (0.58, 2.25),
        "ropewalk decay": (1.2, 2.4),
        "ropewalk ALiBi": (1.2, 2.4),
        "ropewalk T5": (1.2, 3.3),
        "ropewalk ALiBi, two-way": (1.3, 3.75),
        "ropewalk T5, two-way": (1.5, 5.0),
    },
}
# The relative difference between the outputs of ropewalk and of fla in bfloat16.
AGREEMENT = 1e-2
# How many times faster accelerate must make a whole model by wall clock: (family, kind of work, compiled).
WHOLE_MODELS = {
    ("llama", "forward", False): 1.06,
    ("llama", "training step", False): 1.05,
    ("qwen3", "forward", False): 1.25,
    ("qwen3", "training step", False): 1.22,
    ("qwen3", "forward", True): 1.0,
    ("qwen3", "training step", True): 1.0,
}
# The same for `generate`, when it is measured. The committed record is older than this floor.
GENERATE = {"llama": 1.0, "qwen3": 1.1}
# The range of the exponent p in time ~ N^p of linear attention on a CPU; with a bias, the largest one.
GROWTH = 0.9, 1.15
GROWTH_WITH_BIAS = 1.05
# Temporaries of linear attention on a CPU, in sizes of q, k and v, from LONG_ENOUGH tokens on.
TEMPORARIES, LONG_ENOUGH = 2.0, 1024
# The host time of a call for one token, at most so many times what it cannot go below: `ropewalk bench host`.
HOST: dict[str, dict[str, float]] = {
    "cpu": {
        "rope(q, k, offset=n)": 1.15,
        "rope(q, k, angles=a)": 1.45,
        "rope(q, k, positions=[S])": 1.9,
        "rope(q, k, positions=[B, S])": 1.9,
        "rope.rotate_(q, k, offset=n)": 1.15,
        "rope(q, k, offset=n), grad": 1.3,
        "rope(q, k, angles=a), grad": 1.3,
    },
    "cuda": {
        "rope(q, k, offset=n)": 2.0,
        "rope(q, k, angles=a)": 2.0,
        "rope(q, k, positions=[S])": 2.0,
        "rope(q, k, positions=[B, S])": 2.0,
        "qk_norm_rope(q, k, offset=n)": 2.0,
        "qk_norm_rope(q, k, angles=a)": 2.0,
        "rope(q, k, offset=n), grad": 1.6,
        "rope(q, k, angles=a), grad": 1.6,
        "qk_norm_rope(q, k), grad": 1.6,
        "rope(q, k, offset=n), fwd+bwd": 1.5,
        "rope(q, k, angles=a), fwd+bwd": 1.5,
        "qk_norm_rope(q, k), fwd+bwd": 1.8,
    },
}
# The host time of linear attention with RoPE: at most so many microseconds, and times the yardstick.
HOST_LINEAR_US: dict[str, dict[str, float]] = {
    "cpu": {"linear step": 40.0},
    "cuda": {"linear, N=4096": 100.0, "linear step": 40.0},
}
HOST_LINEAR: dict[str, dict[str, float]] = {"cpu": {}, "cuda": {"linear, N=4096, fwd+bwd": 2.0}}


def cpu_floors(cases: Sequence[Case]) -> list[str]:
    """The missed floors of `ropewalk bench cpu`, one sentence each."""
    return list(_cpu(cases))


def gpu_floors(cases: Sequence[Case]) -> list[str]:
    """The missed floors of `ropewalk bench gpu`, one sentence each."""
    return [*_gpu(cases), *_partial_rotation(cases)]


def attention_floors(device: str, cases: Sequence[Case], growth: Sequence[dict[str, Any]]) -> list[str]:
    """The missed floors of `ropewalk bench attention` on `device`, one sentence each."""
    return list(_attention_gpu(cases) if device == "cuda" else _attention_cpu(cases, growth))


def generate_floors(cases: Sequence[Case]) -> list[str]:
    """The missed floors of `generate` in `ropewalk bench accelerate --device cuda`, one sentence each."""
    missed: list[str] = []
    for case in cases:
        times, floor = _times(case, "wall_ms"), GENERATE.get(case["family"])
        ratio = times["transformers"] / times["ropewalk"]
        if case["kind"] == "generate" and floor is not None and ratio < floor:
            missed.append(f"{case['model']}, generate: {ratio:.3f} times as fast, below {floor}")
    return missed


def accelerate_floors(cases: Sequence[Case]) -> list[str]:
    """The missed floors of `ropewalk bench accelerate --device cuda`, one sentence each."""
    missed: list[str] = []
    for case in cases:
        floor = WHOLE_MODELS.get((case["family"], case["kind"], case["compiled"]))
        times = _times(case, "wall_ms")
        ratio = times["transformers"] / times["ropewalk"]
        if floor is not None and ratio < floor:
            mode = "compiled" if case["compiled"] else "eager"
            missed.append(f"{case['model']}, {case['kind']}, {mode}: {ratio:.3f} times as fast, below {floor}")
    return missed


def host_limit(device: str, path: str) -> float | None:
    """The largest ratio of a call of `ropewalk bench host`, or None.

    >>> host_limit("cuda", "rope(q, k, offset=n)")
    2.0
    """
    return (HOST[device] | HOST_LINEAR[device]).get(path)


def host_limit_us(device: str, path: str) -> float | None:
    """The largest time of a call of `ropewalk bench host` in microseconds, or None.

    >>> host_limit_us("cuda", "linear step")
    40.0
    """
    return HOST_LINEAR_US[device].get(path)


def host_floors(device: str, cases: Sequence[Case]) -> list[str]:
    """The missed floors of `ropewalk bench host` on `device`, one sentence each."""
    missed: list[str] = []
    for case in cases:
        lines = {line["path"]: line for line in case["lines"]}
        linear = case.get("kind") == "linear"
        for path, most in (HOST_LINEAR_US[device] if linear else {}).items():
            us = lines[path]["us"] if path in lines else None
            if us is None:
                missed.append(f"{path}: has no time")
            elif us > most:
                missed.append(f"{path}: {us:.1f} µs, above {most:g}")
        for path, most in (HOST_LINEAR if linear else HOST)[device].items():
            ratio = lines[path]["ratio"] if path in lines else None
            if ratio is None:
                missed.append(f"{path}: has no time")
            elif ratio > most:
                missed.append(f"{path}: {ratio:.2f} times {lines[path]['floor']}, above {most}")
    return missed


def _times(case: Case, unit: str) -> dict[str, float]:
    return {line["path"]: line[unit] for line in case["lines"] if line.get(unit) is not None}


def _title(case: Case) -> str:
    names = ("shape", "seq", "dtype", "pairing", "memory", "group", "work", "rotary_dim")
    # A shape is a list in a record that was read.
    values = (tuple(case[name]) if name == "shape" else case[name] for name in names if case.get(name))
    return ", ".join([*map(str, values), *["QK-norm"] * bool(case.get("norm"))])


def _over_budget(case: Case) -> Iterator[str]:
    """Both rotation benchmarks: every path of ropewalk is within its error budget."""
    for line in case["lines"]:
        if line["path"].startswith("ropewalk") and not line["error_over_budget"] <= 1:
            yield f"{_title(case)}: the error of {line['path']} is {line['error_over_budget']:.2f} budgets, above 1"


def _cpu(cases: Sequence[Case]) -> Iterator[str]:
    for case in cases:
        yield from _over_budget(case)
        times = _times(case, "ms")
        if "ropewalk" not in times:
            yield f"{_title(case)}: ropewalk has no time"
            continue
        ours, copy, formula = times["ropewalk"], times["copy"], times["transformers' formula"]
        for path, ms in times.items():
            if not path.startswith(("ropewalk", "copy")) and ms < ours:
                yield f"{_title(case)}: {path} takes {ms:.4g} ms, less than ropewalk's {ours:.4g}"
        float32, backward = case["dtype"] == "float32", case["work"] == "forward+backward"
        if case["seq"] == 1:
            speedup = 4 if case["work"] == "forward" else 2
            if case["work"] == "forward" and ours > 0.025:
                yield f"{_title(case)}: {ours * 1000:.1f} µs, above 25"
        else:
            most = 1.8 if float32 else 4
            if case["memory"] == "transposed":
                most = PREFILL[case["dtype"], case["pairing"]]
            if not backward and ours > most * copy:
                yield f"{_title(case)}: {ours / copy:.2f} times copy_, above {most}"
            speedup = 5 if backward else (6 if float32 else 8) if case["memory"] == "transposed" else 0
        if formula < speedup * ours:
            yield f"{_title(case)}: {formula / ours:.1f} times as fast as transformers' formula, below {speedup}"


def _gpu(cases: Sequence[Case]) -> Iterator[str]:
    for case in cases:
        yield from _over_budget(case)
        times = _times(case, "us")
        if "ropewalk" not in times:
            yield f"{_title(case)}: ropewalk has no time"
            continue
        ours, copy, shape, work, norm = (
            times["ropewalk"],
            times["copy"],
            list(case["shape"]),
            case["work"],
            case["norm"],
        )
        if shape[1] == 1:
            host = _times(case, "host_us")
            if ours > 6:
                yield f"{_title(case)}: {ours:.1f} µs, above 6"
            # A bare launch that was not timed allows nothing.
            bare = host.get("bare Triton launch", 0.0)
            if host["ropewalk"] > 2 * bare:
                yield f"{_title(case)}: {host['ropewalk']:.1f} µs of host time, a bare launch {bare:.1f}, above 2 times"
        elif work == "forward":
            least = 0.96 if not norm and shape in (TRAINING, LONG) else 0.9
            if case["memory"] == "contiguous" and (norm or shape == LONG):
                # Each head reads cos and sin again, from the cache.
                least = NORM_CONTIGUOUS if norm else LONG_CONTIGUOUS
            if copy / ours < least:
                yield f"{_title(case)}: {copy / ours:.3f} of copy_'s speed, below {least}"
            if shape == LONG:
                yield from _long(case, times)
        elif shape == SMALL:
            yield from _by_the_clock(case)
        elif shape == TRAINING:
            most = NORM[case["memory"]] if norm else 1.25
            if ours > most * copy:
                yield f"{_title(case)}: {ours / copy:.2f} times copy_, above {most}"
            for path, us in times.items():
                # Liger rotates in place at 0.95 of copy_, so that nothing can be 1.3 times as fast.
                speedup = 1.0 if path == "Liger" else 1.3
                if not path.startswith(("ropewalk", "copy")) and us < speedup * ours:
                    yield f"{_title(case)}: {us / ours:.2f} times as fast as {path}, below {speedup}"


def _long(case: Case, times: dict[str, float]) -> Iterator[str]:
    """`rope(q, k)` of a long sequence is as fast as with tables that are given."""
    path, copy = "ropewalk, rope(q, k)", times["copy"]
    most = 1 / LONG_CONTIGUOUS if case["memory"] == "contiguous" else LONG_RANGE
    if path not in times:
        yield f"{_title(case)}: {path} has no time"
    elif times[path] > most * copy:
        yield f"{_title(case)}: {path} takes {times[path] / copy:.3f} times as long as copy_, above {most:.3g}"


def _by_the_clock(case: Case) -> Iterator[str]:
    """Forward and backward by wall clock, next to an autograd.Function that copies."""
    times, copying = _times(case, "wall_us"), "copy, autograd.Function"
    if not {"ropewalk", copying} <= times.keys():
        yield f"{_title(case)}: ropewalk or {copying} has no time by wall clock"
    elif times["ropewalk"] > 1.3 * times[copying]:
        yield f"{_title(case)}: {times['ropewalk'] / times[copying]:.2f} times {copying} by wall clock, above 1.3"


def _partial_rotation(cases: Sequence[Case]) -> Iterator[str]:
    """Rotating some features of a head is as fast as rotating all of them, as shares of copy_'s speed."""
    shares: dict[tuple[str, int], float] = {}
    for case in cases:
        kind = [list(case["shape"]), *(case[name] for name in ("memory", "work", "norm", "dtype"))]
        times = _times(case, "us")
        if kind == [TRAINING, "transposed", "forward", False, "bfloat16"] and "ropewalk" in times:
            shares[case["pairing"], case["rotary_dim"]] = times["copy"] / times["ropewalk"]
    for (pairing, rotary_dim), share in shares.items():
        whole = shares.get((pairing, 0), 0.0)
        if share < whole - NOISE:
            yield f"rotary_dim {rotary_dim}, {pairing}: {share:.2f} of copy_'s speed, {whole:.2f} for all features"


def _attention_cpu(cases: Sequence[Case], growth: Sequence[dict[str, Any]]) -> Iterator[str]:
    for fit in growth:
        power = fit["exponent"]
        low, high = (0.0, GROWTH_WITH_BIAS) if fit["path"].endswith(("ALiBi", "T5")) else GROWTH
        if fit["path"].startswith("ropewalk") and power is not None and not low <= power <= high:
            yield f"{fit['path']}: grows as N^{power:.2f}, outside {low} to {high}"
    for case in cases:
        for line in case["lines"]:
            size, path = line["temporaries_over_qkv"] or 0.0, line["path"]
            if path.startswith("ropewalk") and case["shape"][2] >= LONG_ENOUGH and size > TEMPORARIES:
                yield f"{_title(case)}: {path} has temporaries of {size:.2f} times q, k and v, above {TEMPORARIES}"
    yield from _beats_softmax(cases)


def _attention_gpu(cases: Sequence[Case]) -> Iterator[str]:
    """A record without cases of a group, or without times by the clock, misses none of their floors."""
    groups: dict[str, list[Case]] = {"lengths": [], "weights": [], "peers": []}
    for case in cases:
        groups[case.get("group", "lengths")].append(case)
    yield from _attention_lengths(groups["lengths"])
    yield from _attention_weights(groups["weights"])
    yield from _attention_peers(groups["peers"])


def _attention_weights(cases: Sequence[Case]) -> Iterator[str]:
    """The plain call, decays and biases."""
    for case in cases:
        times = _times(case, "ms")
        for path, limits in ATTENTION_MS.get(tuple(case["shape"]), {}).items():
            limit = limits[case["work"] != "forward"]
            if path not in times:
                yield f"{_title(case)}: {path} has no time"
            elif times[path] > limit:
                yield f"{_title(case)}: {path} takes {times[path]:.3g} ms, above {limit}"


def _attention_peers(cases: Sequence[Case]) -> Iterator[str]:
    """Functions of fla that compute the same agree with ours."""
    for case in cases:
        for line in case["lines"]:
            difference = line["difference"]
            if line["path"].startswith("ropewalk") and line["ms"] is None:
                yield f"{_title(case)}: {line['path']} has no time"
            elif difference is not None and not difference <= AGREEMENT:
                yield f"{_title(case)}: {line['path']} differs from ropewalk by {difference:.2g}, above {AGREEMENT}"


def _attention_lengths(cases: Sequence[Case]) -> Iterator[str]:
    ours = "ropewalk linear + RoPE"
    for case in cases:
        times, line = _times(case, "ms"), next((line for line in case["lines"] if line["path"] == ours), None)
        if line is None or ours not in times:
            yield f"{_title(case)}: {ours} has no time"
            continue
        if line["temporaries_over_qkv"] > 1:
            yield f"{_title(case)}: temporaries of {line['temporaries_over_qkv']:.2f} times q, k and v, above 1"
        limits = ATTENTION_MS.get(tuple(case["shape"]), {}).get(ours)
        if limits is not None and times[ours] > limits[case["work"] != "forward"]:
            yield f"{_title(case)}: {times[ours]:.3g} ms, above {limits[case['work'] != 'forward']}"
        for path in ("fla linear + RoPE", "fla linear"):
            if times.get(path, float("inf")) <= times[ours]:
                yield f"{_title(case)}: {path} takes {times[path]:.3g} ms, not more than ropewalk's {times[ours]:.3g}"
    yield from _beats_softmax(cases, (ours,))
    clocked = [case for case in cases if case["sweep"] and _times(case, "wall_ms")]
    yield from _beats_softmax(clocked, (ours,), "wall_ms")


def _beats_softmax(
    cases: Sequence[Case], paths: Sequence[str] = ("ropewalk linear", "ropewalk linear + RoPE"), unit: str = "ms"
) -> Iterator[str]:
    """Linear attention is faster than softmax attention from 4096 tokens on."""
    for case in cases:
        times = _times(case, unit)
        # Softmax without a time was left out, because it takes too long.
        softmax = times.get("softmax (SDPA)", float("inf"))
        for path in paths if case["shape"][2] >= 4096 else ():
            if path not in times or times[path] >= softmax:
                yield f"{_title(case)}: {path} is not faster than softmax" + " by the clock" * (unit == "wall_ms")
