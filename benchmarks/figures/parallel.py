"""Errors of torch's context parallelism and ours."""

from figures.pages import block, own_lines, paragraph, table
from figures.records import record


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
