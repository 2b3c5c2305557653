"""What the documents say is run: doctests of the package, and every Python block of README.md and docs/."""

import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from ropewalk.claims import CHAPTERS, Verdict

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def test_doctests():
    # In a process without jaxtyping's import hook, whose wrappers doctest does not look behind.
    command = [sys.executable, "-m", "pytest", "-q", "--doctest-modules", "src/ropewalk", "-p", "no:cacheprovider"]
    result = subprocess.run(
        [*command, "--override-ini", "addopts="], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout
    passed = re.search(r"(\d+) passed", result.stdout)
    assert passed
    assert int(passed[1]) >= 60


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_blocks_run(page, tmp_path):
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    script = tmp_path / "page.py"
    script.write_text("\n".join(blocks), encoding="utf-8")
    result = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_the_readme_counts_the_ledger():
    verdicts = Counter(claim.verdict for chapter in CHAPTERS for claim in chapter.claims)
    readme = (ROOT / "README.md").read_text(encoding="utf-8").replace("\n", " ")
    said = re.search(
        r"Of (\d+) statements (\d+) hold, (\d+) hold only under a condition .*?, (\d+) do not hold", readme
    )
    assert said
    assert [int(number) for number in said.groups()] == [
        verdicts.total(),
        *(verdicts[verdict] for verdict in (Verdict.HOLDS, Verdict.CONDITIONAL, Verdict.FAILS)),
    ]


def test_the_readmes_ratios_are_the_measured_ones():
    record = json.loads((ROOT / "benchmarks" / "torch_path.json").read_text(encoding="utf-8"))
    measured = {
        (row["layout"], row["path"]): row["times_faster_than_transformers"]
        for row in record["results"]
        if row["dtype"] == "float32"
    }
    readme = (ROOT / "README.md").read_text(encoding="utf-8").replace("\n", " ")
    said = re.search(r"prefill (\S+) \(half\) +and (\S+) \(interleaved\).*?make, (\S+) +and (\S+) times", readme)
    assert said
    layouts = [
        (layout, f"ropewalk torch, {p}") for layout in ("transposed", "contiguous") for p in ("half", "interleaved")
    ]
    for number, key in zip(said.groups(), layouts, strict=True):
        assert abs(float(number) - measured[key]) <= 0.06, key


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_to_files_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), target
