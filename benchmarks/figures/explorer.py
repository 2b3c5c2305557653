"""Times of the explorer."""

from figures.pages import block, own_lines, paragraph
from figures.records import record


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
