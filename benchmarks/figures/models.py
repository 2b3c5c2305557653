"""What `accelerate` does to whole models, and which families are known."""

import re
from pathlib import Path

from figures.pages import block, milliseconds, own_lines, paragraph, table
from figures.records import case_of, cores, record, short_version, times_of

DOCS = Path(__file__).parent.parent.parent / "docs"


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


@block("adapter-of-diffusers")
def adapter_of_diffusers(page: str) -> str:
    return adapted(("Flux.1", "LTX", "Wan 2.1"), ("diffusers",))


@block("kernel-layer")
def kernel_layer(page: str) -> str:
    return adapted(("Llama", "Qwen3"), ("transformers", "kernels"))


def adapted(models: tuple[str, ...], packages: tuple[str, ...]) -> str:
    """Times of models of other packages, plain and adapted."""
    measured = record("adapters")
    gpu, versions = measured["hardware"]["gpu"].removeprefix("NVIDIA "), measured["versions"]
    text = (
        f"By the clock on one {gpu}, bfloat16, torch {short_version(versions['torch'])},"
        f" {', '.join(f'{name} {versions[name]}' for name in packages)}, medians of {measured['rounds']} interleaved"
        f" rounds, {measured['date']}, `{measured['command']}` ([record](../benchmarks/adapters.json)), times as fast:"
    )
    rows: list[list[str]] = []
    for model in models:
        times = [(ms["plain"], ms["adapted"]) for ms in case_of("adapters", model=model)["ms"].values()]
        rows.append([model, *(f"{x / y:.2f} × ({milliseconds(x)} to {milliseconds(y)} ms)" for x, y in times)])
    return own_lines(paragraph(text), table(["", "forward", "forward and backward"], *rows))


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
            f" `accelerate` on a CPU, {measured['date']}, torch {short_version(versions['torch'])}, transformers"
            f" {versions['transformers']}, `{measured['command']}` ([record](../benchmarks/transformers_tests.json)):"
            f" {count('without', 'passed')} pass without and {count('with', 'passed')} with, which accelerated"
            f" {models} models. {count('without', 'failed')} fail without and {count('with', 'failed')} with"
            + (f" ({', '.join(f'`{name}`' for name in failed)})" if failed else "")
            + f", and {count('with', 'skipped')} are skipped."
            + (" No test has another result with it." if alike else "")
        )
    )


@block("families")
def families(page: str) -> str:
    """How many families the tables of docs/conformance.md have. `python -m hub.conformance` in tests/ writes them."""
    text = (DOCS / "conformance.md").read_text(encoding="utf-8")
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
    text = (DOCS / "accelerate.md").read_text(encoding="utf-8")
    listed = text.partition("\n## Families\n")[2].partition("\n## ")[0]
    return f"{len(re.findall('`[^`]+`', listed))} families"
