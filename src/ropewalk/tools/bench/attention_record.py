"""The record of `ropewalk bench attention`: the growth of time with N, tables, and reading a record from a file."""

import json
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ropewalk.errors import RopewalkError
from ropewalk.hub.files import read_text
from ropewalk.tools.bench.records import digest

__all__ = [
    "FIT_FROM",
    "exponent",
    "faster_from",
    "growth",
    "measured_cases",
    "read_record",
    "shown_case",
    "shown_crossing",
    "shown_growth",
    "titled",
]

OURS, SOFTMAX = "ropewalk linear + RoPE", "softmax (SDPA)"
# What the paths of a group have in common.
TITLES = {"lengths": "causal", "weights": "RoPE and weights", "peers": "decay, no denominator"}

# The length from which on growth is fitted. Below it, the constant cost of a call dominates.
FIT_FROM = {"cpu": 1024, "cuda": 16_384}
# The maximum size of a record. The command writes some tens of kilobytes.
MOST_BYTES = 16 << 20


def exponent(lengths: Sequence[int], times: Sequence[float]) -> float | None:
    """The exponent p of time = c N^p, by least squares of log time on log N.

    Args:
        lengths: The lengths N.
        times: The time at each length.

    Returns:
        The exponent. None for fewer than two distinct lengths.

    >>> round(exponent([1024, 2048, 4096], [3.0, 12.0, 48.0]), 6)
    2.0
    """
    if len(set(lengths)) < 2:
        return None
    x, y = np.log(np.asarray(lengths, float)), np.log(np.asarray(times, float))
    x = x - x.mean()
    return float((x * y).sum() / (x * x).sum())


def growth(device: str, cases: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The exponent of each path and kind of work, fitted over the lengths of the sweep from `FIT_FROM` on."""
    times: dict[tuple[str, str], dict[int, float]] = {}
    for case in cases:
        for line in case["lines"] if case["sweep"] else ():
            seq = case["shape"][2]
            if line["ms"] is not None and seq >= FIT_FROM[device]:
                times.setdefault((case["work"], line["path"]), {})[seq] = line["ms"]
    return [
        {
            "work": work,
            "path": path,
            "from": min(by_length),
            "to": max(by_length),
            "exponent": exponent(list(by_length), list(by_length.values())),
        }
        for (work, path), by_length in times.items()
    ]


def titled(case: dict[str, Any]) -> str:
    """A case in one line."""
    return f"{tuple(case['shape'])}, {case['dtype']}, {TITLES[case.get('group', 'lengths')]}: {case['work']}"


def shown_case(case: dict[str, Any]) -> str:
    """The table of one case, at most 80 columns wide."""

    def number(value: float | None, form: str) -> str:
        return "" if value is None else format(value, form)

    peers = case.get("group") == "peers"
    text = [f"{titled(case)}; {case['rounds']} rounds"]
    text.append(
        f"  {'path':<24}{'ms':>10}{'clock':>9}{'differs' if peers else 'x RoPE':>8}"
        f"{'peak MiB':>10}{'of q,k,v':>9}{'error':>8}"
    )
    ours = next((line["ms"] for line in case["lines"] if line["path"] == OURS), None)
    for line in case["lines"]:
        ms, peak, note = line["ms"], line["peak_bytes"], line["note"]
        missing = "wrong" if note is None else "-"
        compared = number(None if None in (ms, ours) else ms / ours, ".2f")
        text.append(
            f"  {line['path']:<24}{number(ms, '.3f') or missing:>10}{number(line.get('wall_ms'), '.3f'):>9}"
            f"{number(line.get('difference'), '.1e') if peers else compared:>8}"
            f"{number(None if peak is None else peak / 2**20, '.1f'):>10}"
            f"{number(line['temporaries_over_qkv'], '.2f'):>9}{number(line['error'], '.1e'):>8}"
        )
        if note is not None:
            text += textwrap.wrap(note, 76, initial_indent="    ", subsequent_indent="    ")
    return "\n".join(line.rstrip() for line in text) + "\n"


def shown_growth(record: dict[str, Any]) -> str:
    """The table of exponents, one column per kind of work."""
    exponents = {(fit["path"], fit["work"]): fit["exponent"] for fit in record["growth"]}
    works = list(dict.fromkeys(work for _, work in exponents))
    text = [f"Growth: time ~ N^p with these exponents p, fitted from N = {FIT_FROM[record['device']]} on"]
    text.append(f"  {'path':<24}" + "".join(f"{work:>18}" for work in works))
    for path in dict.fromkeys(path for path, _ in exponents):
        powers = (exponents.get((path, work)) for work in works)
        text.append(f"  {path:<24}" + "".join(f"{'' if p is None else f'{p:.2f}':>18}" for p in powers))
    return "\n".join(line.rstrip() for line in text) + "\n"


def faster_from(cases: Sequence[dict[str, Any]], work: str, unit: str) -> int | None:
    """The length of the sweep from which on linear attention with RoPE is faster than softmax attention.

    Args:
        cases: The cases of a record.
        work: The kind of work.
        unit: "ms", or "wall_ms" for the time by the clock on a GPU.

    Returns:
        The length. 0 if no length has both times. None if linear attention is not faster at the longest of them.

    >>> def case(seq, ours, softmax):
    ...     lines = [{"path": OURS, "ms": ours}, {"path": SOFTMAX, "ms": softmax}]
    ...     return {"work": "forward", "sweep": True, "shape": [1, 1, seq, 8], "lines": lines}
    >>> cases = [case(64, 2.0, 1.0), case(128, 3.0, 4.0)]
    >>> faster_from(cases, "forward", "ms"), faster_from(cases[:1], "forward", "ms")
    (128, None)
    >>> faster_from(cases, "forward", "wall_ms")
    0
    """
    faster: dict[int, bool] = {}
    for case in cases:
        times = {line["path"]: line.get(unit) for line in case["lines"]}
        ours, softmax = times.get(OURS), times.get(SOFTMAX)
        if case["sweep"] and case["work"] == work and ours is not None and softmax is not None:
            faster[case["shape"][2]] = ours < softmax
    if not faster:
        return 0
    slower = [seq for seq, wins in faster.items() if not wins]
    return min((seq for seq in faster if seq > max(slower, default=0)), default=None)


def shown_crossing(record: dict[str, Any]) -> str:
    """The lengths from which on linear attention with RoPE is faster than softmax, one line per unit."""
    units = {"on the device": "ms", "by the clock": "wall_ms"} if record["device"] == "cuda" else {"by the clock": "ms"}
    works = list(dict.fromkeys(case["work"] for case in record["cases"] if case["sweep"]))
    text: list[str] = []
    for name, unit in units.items():
        starts = [faster_from(record["cases"], work, unit) for work in works]
        shown = ["never" if start is None else str(start or "not measured") for start in starts]
        text.append(f"Faster than softmax from N on, {name}:")
        text += [f"  {work:<24}{start:>18}" for work, start in zip(works, shown, strict=True)]
    return "\n".join(text) + "\n"


def read_record(name: str, asked: str) -> dict[str, Any]:
    """Read a record from a file.

    Args:
        name: The path of the file.
        asked: The request, for error messages.

    Returns:
        The record.

    Raises:
        RopewalkError: If the file is not a record of `ropewalk bench attention`.
    """
    expected, do = "a record that `ropewalk bench attention --json FILE` wrote", "specify a file that --json wrote"
    text = read_text(Path(name), most=MOST_BYTES, asked=asked, expected=expected, do=do)
    try:
        record = json.loads(text)
        # Format all tables here, so that a wrong file is rejected before anything is drawn.
        for case in record["cases"]:
            shown_case(case)
        shown_growth(record)
        shown_crossing(record)
        if not any(case["sweep"] for case in record["cases"]):
            raise ValueError("no case of a sweep over N")
    except (ValueError, KeyError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        got = f"{name}: {type(error).__name__}: {error}"
        raise RopewalkError(asked=asked, expected=expected, got=got, do=do) from None
    return record


def measured_cases(record: dict[str, Any], name: str, asked: str) -> list[dict[str, Any]]:
    """The cases of a run that was interrupted.

    Args:
        record: The record of the run that continues it, still without cases.
        name: The path of the file that `--json` wrote. It need not exist.
        asked: The request, for error messages.

    Returns:
        The cases in the file; none if there is no file.

    Raises:
        RopewalkError: If the file is not a record of the same command on the same hardware, with the same versions.
    """
    if not Path(name).exists():
        return []
    same = ("command", "hardware", "versions", "rounds")
    expected = "a record of the same command, hardware and versions"
    do = "specify that file, a new one, or leave --resume out"
    text = read_text(Path(name), most=MOST_BYTES, asked=asked, expected=expected, do=do)
    try:
        earlier = json.loads(text)
        differing = [field for field in same if earlier.get(field) != record[field]]
        if differing or earlier["digest"] != digest(earlier):
            raise ValueError(f"another {' and '.join(differing) or 'digest'}")
        return list(earlier["cases"])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        got = f"{name}: {type(error).__name__}: {error}"
        raise RopewalkError(asked=asked, expected=expected, got=got, do=do) from None
