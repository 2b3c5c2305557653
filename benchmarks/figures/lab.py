"""The verdicts of the lab's experiments."""

from collections import Counter
from importlib.resources import files

from figures.pages import block, own_lines, paragraph, table
from ropewalk.claims.trained import SEED_SETS, lab_record
from ropewalk.lab.experiments import EXPERIMENTS


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
