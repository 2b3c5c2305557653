"""The record of `ropewalk bench attention`: the growth of time with N, tables, and reading a record from a file."""

import json
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ropewalk.errors import RopewalkError
from ropewalk.hub.files import read_text

__all__ = ["FIT_FROM", "exponent", "growth", "read_record", "shown_case", "shown_growth"]

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


def shown_case(case: dict[str, Any]) -> str:
    """The table of one case, at most 80 columns wide."""

    def number(value: float | None, form: str) -> str:
        return "" if value is None else format(value, form)

    text = [f"{tuple(case['shape'])}, {case['dtype']}, causal: {case['work']}; {case['rounds']} rounds"]
    text.append(f"  {'path':<24}{'ms':>12}{'x RoPE':>9}{'peak MiB':>11}{'of q,k,v':>10}{'error':>10}")
    ours = next((line["ms"] for line in case["lines"] if line["path"] == "ropewalk linear + RoPE"), None)
    for line in case["lines"]:
        ms, peak, note = line["ms"], line["peak_bytes"], line["note"]
        missing = "wrong" if note is None else "-"
        text.append(
            f"  {line['path']:<24}{number(ms, '.3f') or missing:>12}"
            f"{number(None if None in (ms, ours) else ms / ours, '.2f'):>9}"
            f"{number(None if peak is None else peak / 2**20, '.1f'):>11}"
            f"{number(line['temporaries_over_qkv'], '.2f'):>10}{number(line['error'], '.1e'):>10}"
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
        if not any(case["sweep"] for case in record["cases"]):
            raise ValueError("no case of a sweep over N")
    except (ValueError, KeyError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        got = f"{name}: {type(error).__name__}: {error}"
        raise RopewalkError(asked=asked, expected=expected, got=got, do=do) from None
    return record
