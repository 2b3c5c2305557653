"""The verdicts of the lab's experiments."""

from collections import Counter
from importlib.resources import files

from figures.pages import block, own_lines, paragraph, table
from ropewalk.claims.trained import MICRO, SMALL, TINY, lab_record
from ropewalk.lab.experiments import EXPERIMENTS


@block("lab-verdicts")
def lab_verdicts(page: str) -> str:
    header = ["experiment", "statement", "`micro`", "`micro`, seeds 3 to 5", "`tiny`", "`small`"]
    names = {path.name for path in files("ropewalk").joinpath("data/lab").iterdir()}
    rows: list[list[str]] = []
    other_seeds: Counter[str] = Counter()
    sizes: dict[str, Counter[str]] = {"tiny": Counter(), "small": Counter()}
    for experiment in EXPERIMENTS:
        records = [f"{experiment}_{kind}" for kind in MICRO + TINY + SMALL]
        judged = [lab_record(x)["statements"] if f"{x}.json" in names else [] for x in records]
        by_text = [{x["text"]: x["verdict"] for x in statements} for statements in judged]
        for text in dict.fromkeys(text for verdicts in by_text for text in verdicts):
            first, second, *larger = (verdicts.get(text, "-") for verdicts in by_text)
            rows.append([f"`{experiment}`", text, first, second, *larger])
            other_seeds[compared(first, second)] += 1
            for counts, verdict in zip(sizes.values(), larger, strict=True):
                counts[compared(first, verdict)] += 1
    others = (f"With `{size}` instead of `micro`, {counted(counts)}." for size, counts in sizes.items())
    return own_lines(table(header, *rows), paragraph(f"With other seeds, {counted(other_seeds)}. {' '.join(others)}"))


def compared(first: str, second: str) -> str:
    """How two verdicts on a statement differ."""
    if "-" in (first, second):
        return "missing"
    if first == second:
        return "the same"
    return "undecided" if "undecided" in (first, second) else "contrary"


def counted(pairs: Counter[str]) -> str:
    """How many verdicts differ, and how."""
    same, undecided, contrary = (pairs[x] for x in ("the same", "undecided", "contrary"))
    total = same + undecided + contrary
    return f"{same} of {total} verdicts are the same, {undecided} are undecided with one of both, {contrary} contrary"
