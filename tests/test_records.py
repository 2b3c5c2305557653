"""The measured figures on pages come from records: rendering changes nothing, and an edited record is an error."""

import html
import json
import re
import runpy
import shutil
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from ropewalk.claims import CHAPTERS
from ropewalk.errors import RopewalkError
from ropewalk.tools.bench.floors import accelerate_floors, attention_floors, cpu_floors, gpu_floors, host_floors
from ropewalk.tools.bench.records import digest, read_sealed, shown_missed, write_record

ROOT = Path(__file__).parent.parent
RECORDS = sorted((ROOT / "benchmarks").glob("*.json"))


@pytest.fixture
def render(capsys, monkeypatch) -> Any:
    """A function that runs the script with arguments. It returns the exit code, standard output and standard error."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    main = runpy.run_path(str(ROOT / "benchmarks" / "render.py"))["main"]

    def run(*arguments: str) -> tuple[object, str, str]:
        try:
            main(arguments)
            code = 0
        except SystemExit as stop:
            code = stop.code
        out, err = capsys.readouterr()
        return code, out, err

    return run


def record(name: str) -> dict[str, Any]:
    return json.loads((ROOT / "benchmarks" / f"{name}.json").read_text(encoding="utf-8"))


def floors(name: str, content: dict[str, Any]) -> list[str]:
    if name.startswith("attention"):
        return attention_floors(content["device"], content["cases"], content["growth"])
    if name.startswith("host"):
        return host_floors(content["device"], content["cases"])
    if name == "lab_pairing":
        return runpy.run_path(str(ROOT / "benchmarks" / "lab_pairing.py"))["missed"](content)
    if name in ("adapters", "context_parallel", "explore"):
        return runpy.run_path(str(ROOT / "benchmarks" / f"{name}.py"))["missed"](content["cases"])
    if name == "transformers_tests":
        return runpy.run_path(str(ROOT / "benchmarks" / "transformers_tests.py"))["regressions"](content)
    if name in ("kernel_times", "lab_speed", "torch_versions"):
        return []  # without floors: the page shows what failed
    if name == "gpu_tests":
        return [f"{file}: {test} failed" for file, x in content["files"].items() for test in x["failed"]]
    if name == "lab_kills":
        return runpy.run_path(str(ROOT / "benchmarks" / "record_kills.py"))["missed"](content)
    return {"accelerate_gpu": accelerate_floors, "cpu": cpu_floors, "gpu": gpu_floors}[name](content["cases"])


def test_rendering_again_changes_nothing(render):
    code, out, err = render("--check")
    assert code == 0, out + err


def test_the_site_shows_the_texts_of_the_claims_as_they_are():
    text = (ROOT / "docs" / "claims.md").read_text(encoding="utf-8").partition("<!-- figures: claims-list -->")[2]
    # What the Markdown of the site unescapes. It shows the backslash before any other character.
    shown = " ".join(html.unescape(re.sub(r"\\([\\`*_{}\[\]()>#+\-.!|])", r"\1", text)).split())
    for claim in (claim for chapter in CHAPTERS for claim in chapter.claims):
        for part in (claim.statement, claim.amendment, claim.method, claim.expected):
            assert " ".join((part or "").split()) in shown, claim.id
        for place in claim.places:
            note = place.line is not None
            assert (
                f"- Note {place.source.key}, line {place.line}: " in shown if note else place.source.title[1:] in shown
            )
    assert "\\<" not in shown


def test_an_edited_figure_is_found_and_rendered_away(tmp_path, render):
    shutil.copy(ROOT / "README.md", tmp_path)
    shutil.copytree(ROOT / "docs", tmp_path / "docs", ignore=shutil.ignore_patterns("*.png"))
    page = tmp_path / "docs" / "gpu.md"
    right = page.read_text(encoding="utf-8")
    page.write_text(right.replace("| 1.00, 1.01 |", "| 1.00, 1.11 |"), encoding="utf-8")
    code, out, err = render("--check", "--root", str(tmp_path))
    assert code == 1
    assert "-| (4, 8192, 32, 8, 128), forward | 1.00, 1.11 |" in out
    assert "make records" in err
    assert render("--root", str(tmp_path)) == (0, "rendered docs/gpu.md\n", "")
    assert page.read_text(encoding="utf-8") == right
    page.write_text("<!-- figures: nothing --><!-- /figures -->", encoding="utf-8")
    code, _, err = render("--root", str(tmp_path))
    assert code == 2
    assert "the block 'nothing'" in err


def test_an_edited_record_is_an_error(tmp_path, render):
    for path in RECORDS:
        shutil.copy(path, tmp_path)
    content = record("gpu")
    # A digit that no page shows.
    content["cases"][-1]["lines"][-1]["us"] += 1e-6
    (tmp_path / "gpu.json").write_text(json.dumps(content), encoding="utf-8")
    code, _, err = render("--check", "--records", str(tmp_path))
    assert code == 2
    assert "the record gpu.json" in err
    assert "a digest that does not match the content" in err


@pytest.mark.parametrize("name", ["host_cpu", "host_gpu"])
def test_records_of_host_times_are_rendered(tmp_path, render, name):
    (tmp_path / "docs").mkdir()
    block = name.replace("_", "-")
    page = tmp_path / "README.md"
    page.write_text(f"<!-- figures: {block} --><!-- /figures -->", encoding="utf-8")
    bare = {"path": "copy", "us": 10.04, "floor": None, "floor_us": None, "ratio": None}
    call = {"path": "rope(q, k, offset=n)", "us": 11.5, "floor": "copy", "floor_us": 10.04, "ratio": 1.145}
    content = {
        "command": "ropewalk bench host --device cpu",
        "date": "2026-11-20",
        "hardware": {"gpu": "NVIDIA H200", "processor": "0xd0c", "threads": 2},
        "versions": {"torch": "2.11.0+cu130"},
        "rounds": 31,
        "calls": 200,
        "cases": [{"dtype": "float32", "pairing": "half", "lines": [bare, call]}],
    }
    write_record(content, str(tmp_path / f"{name}.json"), missed=[])
    assert render("--root", str(tmp_path), "--records", str(tmp_path))[0] == 0
    text = page.read_text(encoding="utf-8")
    assert ("One H200" if name == "host_gpu" else "Two Neoverse-N1 cores") in text
    assert "| `rope(q, k, offset=n)` | 11.5 | 10.0 (copy) | 1.15 × |" in text
    assert "In the same run: copy 10.0." in text


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_committed_records_are_as_written_and_state_the_floors_of_today(path):
    content = read_sealed(path)
    if path.stem != "accelerate_cpu":
        assert floors(path.stem, content) == content["missed"]


def test_a_record_that_misses_a_floor_or_leaves_cases_out_is_not_published(tmp_path):
    target = tmp_path / "a.json"
    write_record({"command": "bench", "cases": []}, str(target), missed=[])
    assert read_sealed(target)["missed"] == []
    write_record({"command": "bench", "cases": []}, str(target), missed=["one: 2 µs, above 1"])
    with pytest.raises(RopewalkError, match="one: 2 µs, above 1"):
        read_sealed(target)
    write_record({"command": "bench --quick", "cases": []}, str(target), missed=[])
    with pytest.raises(RopewalkError, match="measure without --quick"):
        read_sealed(target)
    write_record({"command": "bench --only generate", "cases": []}, str(target), missed=[])
    with pytest.raises(RopewalkError, match="measure without --only"):
        read_sealed(target)
    target.write_text("{}")
    with pytest.raises(RopewalkError, match="a digest that does not match"):
        read_sealed(target)
    assert digest({"a": [1, 2]}) == digest({"a": (1, 2), "digest": "b"})


def slower(content: dict[str, Any], factor: float, *units: str) -> dict[str, Any]:
    """The record with every time of ropewalk multiplied by `factor`."""
    content = deepcopy(content)
    for case in content["cases"]:
        for line in case["lines"]:
            for unit in units:
                if line["path"].startswith("ropewalk") and line.get(unit) is not None:
                    line[unit] *= factor
    return content


@pytest.mark.parametrize(
    ("name", "unit", "words"),
    [
        ("cpu", "ms", {"less than ropewalk's", "times copy_", "µs, above 25", "transformers' formula, below"}),
        ("gpu", "us", {"of copy_'s speed", "times copy_", "µs, above 6", "times as fast as"}),
        ("gpu", "host_us", {"of host time, a bare launch"}),
        ("attention_cpu", "ms", {"is not faster than softmax"}),
        ("attention_gpu", "ms", {"ms, above 0.58", "fla linear takes", "fla linear + RoPE takes", "than softmax"}),
        ("attention_gpu", "temporaries_over_qkv", {"times q, k and v, above 1"}),
    ],
)
def test_a_slower_kernel_misses_every_kind_of_floor(name, unit, words):
    assert floors(name, record(name)) == []
    missed = " ".join(floors(name, slower(record(name), 10.0, unit)))
    assert not [word for word in words if word not in missed]


def test_errors_partial_rotation_and_growth_have_floors():
    for name in ("cpu", "gpu"):
        content = record(name)
        next(line for line in content["cases"][0]["lines"] if line["path"] == "ropewalk")["error_over_budget"] = 1.5
        (missed,) = floors(name, content)
        assert "the error of ropewalk is 1.50 budgets" in missed
        content = record(name)
        for line in content["cases"][0]["lines"]:
            line["us" if name == "gpu" else "ms"] = None
        assert any("ropewalk has no time" in text for text in floors(name, content))
    content = record("gpu")
    content["cases"] = [case for case in content["cases"] if case["shape"] == [4, 8192, 32, 8, 128]]
    for case in content["cases"]:
        for line in case["lines"]:
            if case["rotary_dim"] == 64 and line["path"] == "ropewalk":
                line["us"] *= 1.04
    assert any("rotary_dim 64, half" in text for text in floors("gpu", content))
    content = record("attention_cpu")
    for fit in content["growth"]:
        fit["exponent"] += 0.5
    missed = floors("attention_cpu", content)
    assert [text.split(":")[0] for text in missed] == [
        f"ropewalk linear{kind}" for kind in ("", " + RoPE", " + ALiBi", " + T5")
    ]
    content = record("attention_cpu")
    content["cases"][-1]["lines"][0]["temporaries_over_qkv"] = 2.1
    assert ["temporaries of 2.10 times" in text for text in floors("attention_cpu", content)] == [True]


def test_missed_floors_are_shown_within_80_columns():
    text = shown_missed(
        ["(4, 8192, 32, 8, 128), bfloat16, half, transposed, forward: 0.931 of copy_'s speed, below 0.96"]
    )
    assert "that this run misses" in text
    assert max(map(len, text.splitlines())) <= 80
    assert shown_missed([]) == "Floors of the committed records (benchmarks/): none missed."
