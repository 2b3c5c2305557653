"""`ropewalk inspect`: the right kind and figures for well-known models, without torch; comparison, picture, mistakes.

tests/data/configs has the keys that matter of published configs. tests/data/expected_ropes.json has what follows from
them, worked out apart from this package: from the formulas of the papers and of the models' own code, in plain Python.
"""

import io
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.figure import Figure
from matplotlib.text import Text
from rich.console import Console

from ropewalk import RopewalkError
from ropewalk.hub import inspect_model
from ropewalk.hub.configs.pitfalls import ADVICE, PITFALLS
from ropewalk.hub.families.table import FAMILIES
from ropewalk.theory import Band
from ropewalk.tools.cli import main
from ropewalk.tools.inspect.command import inspect
from ropewalk.tools.inspect.comparison import rows_of
from ropewalk.tools.inspect.plot import draw
from ropewalk.tools.inspect.sheet import number, pairs_to_show, sheet
from slow import slow_except

DATA = Path(__file__).parent.parent / "data"
CONFIGS = DATA / "configs"
EXPECTED: dict[str, Any] = json.loads((DATA / "expected_ropes.json").read_text(encoding="utf-8"))
OF_SPEC = ("head_dim", "rotary_dim", "rotary_slice", "pairing")
OF_LAYER = ("kind", "softmax_scale", "critical_dimension")
OF_VIEW = ("amplitude", "score_sum_not_negative_to")


def config(name: str) -> str:
    return str(CONFIGS / f"{name}.json")


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


def test_every_config_has_its_figures():
    assert {path.stem for path in CONFIGS.glob("*.json")} == set(EXPECTED)
    assert len(EXPECTED) >= 24


@pytest.mark.usefixtures("narrow")
@pytest.mark.parametrize("name", EXPECTED)
def test_well_known_models(name, capsys):
    assert inspect([config(name)], json_file="-") == 0
    written = capsys.readouterr()
    (found,) = json.loads(written.out)
    expected = EXPECTED[name]
    assert {key: found[key] for key in ("trained_length", "configured_length")} == {
        key: expected[key] for key in ("trained_length", "configured_length")
    }
    assert [warning["name"] for warning in found["warnings"]] == expected["warnings"]
    assert [layer["name"] for layer in found["layers"]] == list(expected["layers"])
    for layer, wanted in zip(found["layers"], expected["layers"].values(), strict=True):
        if wanted is None:
            assert layer["spec"] is None
            assert f"{layer['name']}: no rotation" in written.err
            continue
        spec, view = layer["spec"], layer["views"][-1]
        rule = spec["frequencies"]
        shown = {"rule": rule["rule"], "base": rule["base"], "factor": rule.get("factor")}
        shown |= {key: spec[key] for key in OF_SPEC}
        shown |= {key: layer[key] for key in OF_LAYER} | {key: view[key] for key in OF_VIEW}
        shown["longest_wavelength"] = max(pair["wavelength"] for pair in view["pairs"])
        shown["unchanged"] = sum(pair["change"] == "unchanged" for pair in view["pairs"])
        approximate = {key: pytest.approx(x, rel=1e-12) if isinstance(x, float) else x for key, x in wanted.items()}
        assert shown == approximate
        assert f"{layer['name'] or 'all layers'}: {wanted['kind']}" in written.err
    assert max(map(len, written.err.splitlines())) <= 80
    assert "…" not in written.err


def test_the_sheet_of_llama_3_1(capsys, narrow):
    assert inspect([config("llama-3.1-8b")]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    for line in (
        "pairing half: features i and i + 64",
        "original length 8,192",
        "context length 131,072; factor × original length is 65,536",
        "critical dimension 70 of 128 features complete a rotation within 8,192,",
        "before scaling",
        "score sum ≥ 0 up to length 85,133: a similar key scores above a",
        "amplitude 1",
        # 8192 / 2pi rotations, and 16 times as many.
        "0 6.283 1 1,304 20,861 unchanged",
        "28 1,956 1 4.187 66.99 unchanged",
        "29 2,900 1.207 2.825 45.2 between",
        "35 65,750 8 0.1246 1.993 interpolated",
        "63 20,473,564 8 0.0004001 0.006402 interpolated",
    ):
        assert line in lines
    # Both ends of the bands whose pairs are changed alike, and every pair of the ramp.
    assert sum(line.endswith(("unchanged", "between", "interpolated")) for line in lines) == 2 + 6 + 2


def shown_rows(out: str) -> dict[str, str]:
    """The figures of a sheet by name. A line without a name continues the one before."""
    rows: dict[str, str] = {}
    for line in out.split("rotations in")[0].splitlines():
        name, text = line[2:22].strip(), " ".join(line[22:].split())
        rows[name or list(rows)[-1]] = text if name else f"{rows[list(rows)[-1]]} {text}"
    return rows


@pytest.mark.usefixtures("narrow")
@pytest.mark.parametrize(
    ("data", "larger", "smaller"),
    [
        # LLaMA 2: eq. 16b with d_extra = 92, and the three bases of eq. 16d.
        (
            {},
            "tuned at 4,096: the limit is 2π·base^(92/128), 24,656 for base 100,000",
            "tuned at 4,096: the limit is 4,096. Beyond it, the loss is expected to rise more slowly below base 2,608,"
            " 1,304 and 652 (1/4, 1/2 and 1 rotation of every pair)",
        ),
        # The base is below two of the three: the next one is left.
        (
            {"rope_theta": 1000.0},
            "tuned at 4,096: the limit is 2π·base^(122/128), 40,802 for base 10,000",
            "tuned at 4,096: the limit is 4,096. Beyond it, the loss is expected to rise more slowly below base 652"
            " (1 rotation of every pair)",
        ),
        # No pair is left that completes no rotation in training.
        (
            {"rope_theta": 500.0},
            "tuned at 4,096: no limit; every pair completes a rotation within 4,096",
            "tuned at 4,096: the limit is 4,096",
        ),
        # Of 256 features 64 are rotated: the law counts those.
        (
            {"head_dim": 256, "partial_rotary_factor": 0.25, "model_type": "glm"},
            "tuned at 4,096: the limit is 2π·base^(46/64), 24,656 for base 100,000",
            "tuned at 4,096: the limit is 4,096. Beyond it, the loss is expected to rise more slowly below base 2,608,"
            " 1,304 and 652 (1/4, 1/2 and 1 rotation of every pair)",
        ),
    ],
)
def test_the_sheet_has_both_halves_of_the_scaling_law(data, larger, smaller, tmp_path, capsys):
    path = tmp_path / "a.json"
    whole = {"model_type": "llama", "head_dim": 128, "max_position_embeddings": 4096, "rope_theta": 10_000.0}
    path.write_text(json.dumps(whole | data))
    assert inspect([str(path)]) == 0
    rows = shown_rows(capsys.readouterr().out)
    assert (rows["larger base"], rows["smaller base"]) == (larger, smaller)


def law(data: dict[str, Any]) -> Any:
    layers: Any = inspect_model(data).as_json()["layers"]
    return layers[0]["new_base"]


def test_the_scaling_law_in_json():
    data = json.loads(Path(config("llama-2-7b")).read_text())
    assert law(data) == {
        "tuned_length": 4096,
        "critical_base": 10_000.0,
        "larger_base_exponent": 92 / 128,
        "smaller_base_limit": 4096.0,
        "smaller_base_thresholds": pytest.approx([2607.5946, 1303.7973, 651.8986], abs=1e-4),
        "slowest_rotation": pytest.approx(4096 / (2 * math.pi * 10_000 ** (126 / 128)), rel=1e-12),
    }
    assert law(data | {"rope_theta": 500.0})["larger_base_exponent"] is None
    assert law(data | {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}) is None


@pytest.mark.parametrize(
    ("name", "has_law"),
    [
        ("llama-2-7b", {"": True}),
        ("llama-3.1-8b", {"": False}),  # a rule other than a base
        ("gemma-2-9b", {"": True}),  # every second layer attends to the whole context
        ("mistral-7b-v0.1", {"": False}),  # a window in layers that the config does not name
        ("modernbert-base", {"sliding_attention": False, "full_attention": True}),
        ("qwen2-vl-7b", {"": False}),  # three axes
        ("mistral-7b-v0.3-params", {"": False}),  # no trained length
        ("gpt-neox-20b", {"": True}),
    ],
)
def test_the_scaling_law_is_shown_only_for_layers_that_it_is_stated_for(name, has_law, capsys):
    layers = inspect_model(config(name)).layers
    assert {layer.name: layer.new_base is not None for layer in layers} == has_law
    assert inspect([config(name)]) == 0
    assert capsys.readouterr().out.count("larger base") == sum(has_law.values())


@pytest.mark.usefixtures("narrow")
@pytest.mark.parametrize(
    ("name", "lines"),
    [
        ("llama-2-7b", ["trained length 4,096"]),
        ("phi-2", ["trained length 2,048"]),
        ("llama-3.2-1b", ["original length 8,192", "context length 131,072; factor × original length is"]),
        ("deepseek-v3", ["original length 4,096", "context length 163,840"]),
        (
            "qwen2.5-7b-instruct-yarn",
            ["original length 32,768", "context length 32,768; factor × original"],
        ),
        ("gemma-3-4b", ["original length not in the config", "context length 131,072"] * 2),
        ("mistral-7b-v0.3-params", ["trained length not in the config"]),
    ],
)
def test_the_length_before_an_extension_is_called_original(name, lines, capsys):
    assert inspect([config(name)]) == 0
    shown = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    named = [line for line in shown if line.split(" length")[0] in ("trained", "original", "context", "configured")]
    assert len(named) == len(lines)
    assert all(line.startswith(start) for line, start in zip(named, lines, strict=True))


def test_pairs_that_are_all_unchanged_are_folded(capsys, narrow):
    assert inspect([config("llama-2-7b")]) == 0
    out = capsys.readouterr().out
    rows = [line.split() for line in out.splitlines()]
    assert ["0", "6.283", "651.9"] in rows
    assert ["63", "54,410", "0.07528"] in rows
    assert "unchanged" not in out
    assert "× plain" not in out
    assert sum(row[0].isdigit() for row in rows if row) == 2


def test_lengths_at_which_frequencies_change_have_a_table_each(capsys, narrow):
    assert inspect([config("phi-3-mini-128k")]) == 0
    out = capsys.readouterr().out
    assert out.index("sequences up to 4,096") < out.index("sequences of 131,072")
    assert inspect([config("internlm2-chat-7b")], json_file="-") == 0
    (layer,) = json.loads(capsys.readouterr().out)[0]["layers"]
    # Beyond the trained length, which is the configured one: as far as the factor was meant for.
    assert [view["length"] for view in layer["views"]] == [32_768, 65_536]
    assert [view["bands"][0]["last"] for view in layer["views"]] == [63, 0]


ANY = {"hidden_size": 256, "num_attention_heads": 2, "head_dim": 128, "qk_nope_head_dim": 64, "qk_rope_head_dim": 64}
ROPES: dict[str, dict[str, Any]] = {
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    "still": {"rope_type": "proportional", "partial_rotary_factor": 0.0},
    "dynamic": {"rope_type": "dynamic", "factor": 1.0},
}


@pytest.mark.slow
@pytest.mark.parametrize("rope", ROPES)
def test_every_family_fits_on_a_sheet(rope, monkeypatch):
    monkeypatch.setattr("ropewalk.hub.inspection.FARTHEST", 64)
    shown = 0
    # One of each: most families are as Llama is.
    for family in {repr(family): name for name, family in FAMILIES.items()}.values():
        data = {"model_type": family, "vocab_size": 9, "max_position_embeddings": 256, "rope_parameters": ROPES[rope]}
        try:
            inspection = inspect_model(ANY | data)
        except RopewalkError:
            continue
        console = Console(width=80, file=io.StringIO(), highlight=False)
        json.dumps(inspection.as_json(), allow_nan=False)
        console.print(sheet(inspection))
        assert isinstance(console.file, io.StringIO)
        text = console.file.getvalue()
        assert max(map(len, text.splitlines())) <= 80, text
        assert "…" not in text, text
        shown += 1
    assert shown > 40


def test_it_says_how_far_it_looked(tmp_path, capsys, narrow):
    path = tmp_path / "slow.json"
    path.write_text('{"model_type": "llama", "head_dim": 128, "rope_theta": 1e12}')
    assert inspect([str(path)]) == 0
    assert "at least up to length 1,048,576, the longest that was tested" in " ".join(capsys.readouterr().out.split())
    assert inspect([str(path), config("llama-2-7b")]) == 0
    assert "≠ score sum ≥ 0 to > 1,048,576 1,707" in " ".join(capsys.readouterr().out.split())


def test_warnings_say_what_to_do(capsys, narrow):
    assert inspect([config("llama-4-scout")]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "no-ramp low_freq_factor and high_freq_factor are both 1" in out
    assert f"do this: {ADVICE['no-ramp']}" in out
    assert set(ADVICE) == set(PITFALLS)


def test_unknown_families_need_a_pairing_and_then_show_what_is_guessed(tmp_path, capsys):
    path = tmp_path / "config.json"
    path.write_text('{"model_type": "brandnew", "head_dim": 64, "rope_theta": 5e5}')
    with pytest.raises(RopewalkError, match="add --pairing half or --pairing interleaved"):
        inspect([str(tmp_path)])
    assert inspect([str(tmp_path)], pairing="interleaved") == 0
    out = capsys.readouterr().out
    assert out.startswith(f"{tmp_path.name} (model_type brandnew)")
    assert "unknown-family" in out
    assert "interleaved: features 2i and 2i + 1" in out
    with pytest.raises(RopewalkError, match="leave --pairing out"):
        inspect([config("llama-2-7b")], pairing="interleaved")


@pytest.mark.parametrize("wide", [80, 100, 140])
def test_configs_side_by_side(wide, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(wide))
    names = ["llama-2-7b", "llama-3.1-8b", "gemma-3-4b"]
    assert inspect([config(name) for name in names]) == 0
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert max(map(len, lines)) <= wide
    assert lines[0].split() == names
    rows = {" ".join(line.split()[:3]): line for line in lines}
    assert "≠ base 10,000" in rows
    assert any(line.split() == ["pairing", "half", "half", "half"] for line in lines)
    assert sum(line.strip() in ("sliding_attention", "full_attention") for line in lines) == 2
    assert lines[-1] == "≠ marks rows in which the configs differ."


FOUR = [
    ["llama-2-7b", "yi-34b", "mixtral-8x7b", "qwen3-8b"],
    ["llama-3.1-8b", "qwen2.5-7b-instruct-yarn", "deepseek-v3", "gemma-3-4b"],
    ["mistral-7b-v0.3-params", "phi-3-mini-128k", "internlm2-chat-7b", "llama-4-scout"],
    ["vicuna-7b-v1.5-16k", "qwen2-vl-7b", "gpt-neox-20b", "stablelm-3b-4e1t"],
]


@pytest.mark.parametrize("names", FOUR, ids="-".join)
def test_four_configs_fit_into_one_table_of_80_columns(names, capsys, narrow):
    assert inspect([config(name) for name in names]) == 0
    lines = capsys.readouterr().out.splitlines()
    table = lines[: lines.index("≠ marks rows in which the configs differ.")]
    assert max(map(len, lines)) <= 80
    assert sum("model_type" in line for line in table) == 1
    assert "…" not in "".join(lines)
    # No word is broken: each is one of a value, a name or a heading. Names are broken at hyphens.
    rows = rows_of([inspect_model(config(name)) for name in names])
    words = {word for label, values in rows for text in (label, *(values or ())) for word in text.split()}
    body = table[table.index(next(line for line in table if "─" in line)) + 1 :]
    assert {word for line in body for word in line.split()} - {"≠"} <= words | {"─" * 80, *("─" * n for n in range(81))}


def test_more_configs_than_fit_go_into_more_tables(capsys, narrow):
    names = ["llama-2-7b", "yi-34b", "mixtral-8x7b", "qwen3-8b", "phi-2"]
    assert inspect([config(name) for name in names]) == 0
    lines = capsys.readouterr().out.splitlines()
    heads = [line.split() for line in lines if set(line.split()) & set(names)]
    assert heads == [names[:4], names[4:]]
    # The mark is for all of them: the last differs from those in the table above.
    assert sum(line.split()[:3] == ["≠", "base", "10,000"] for line in lines) == 2


def test_rows_mark_what_differs():
    names = ("mistral-7b-v0.3", "mistral-7b-v0.3-params", "smollm3-3b")
    rows = rows_of([inspect_model(config(name)) for name in names])
    headings = [name for name, values in rows if values is None]
    assert headings == ["rope", "no_rope", ""]
    first = dict(rows[3 : rows.index(("no_rope", None))])
    assert first["pairing"] == ["half", "interleaved", "half"]
    assert first["base"] == ["1,000,000", "1,000,000", "5,000,000"]
    assert first["λ of pair 0"] == ["6.283"] * 3
    # A config whose layers are alike stands beside each kind of the other; layers without rotation have one row.
    assert rows[rows.index(("no_rope", None)) + 1 :] == [
        ("kind", ["plain RoPE", "plain RoPE", "no rotation"]),
        ("", None),
        ("warnings", ["–"] * 3),
    ]


def test_models_of_one_name_are_told_apart_by_their_places(tmp_path, capsys, narrow, monkeypatch):
    for place in ("a", "b"):
        (tmp_path / place / "model").mkdir(parents=True)
        (tmp_path / place / "model" / "config.json").write_text(Path(config("yi-34b")).read_text())
    monkeypatch.chdir(tmp_path)
    assert inspect(["a/model", "b/model"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["a/model", "b/model"]
    assert not any(line.strip().startswith("≠") for line in lines[:-1])


def test_no_colour_is_needed(capsys, monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    assert inspect([config("llama-4-scout"), config("llama-3.1-8b")]) == 0
    assert "\x1b" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("names", "ending", "start"),
    [(["llama-3.1-8b"], "png", b"\x89PNG"), (["gemma-3-4b", "phi-3-mini-128k", "llama-4-scout"], "svg", b"<?xml")],
)
def test_the_picture(names, ending, start, tmp_path, capsys):
    target = tmp_path / f"picture.{ending}"
    assert inspect([config(name) for name in names], plot=str(target)) == 0
    assert target.read_bytes().startswith(start)
    assert target.stat().st_size > 10_000
    assert capsys.readouterr().out.splitlines()[-1] == f"picture: {target}"


@pytest.mark.slow
def test_the_picture_names_what_it_shows(tmp_path, capsys):
    target = tmp_path / "picture.svg"
    gemma = {"model_type": "gemma4_text", "head_dim": 256, "max_position_embeddings": 131_072}
    full = {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6}
    path = tmp_path / "gemma-4.json"
    path.write_text(json.dumps(gemma | {"rope_parameters": {"full_attention": full}}))
    assert inspect([str(path), config("llama-3.1-8b"), config("qwen3-8b")], plot=str(target)) == 0
    text = target.read_text(encoding="utf-8")
    for words in (
        "original length 8,192",
        "context length 131,072",
        "trained length 40,960",
        "interpolated",
        "between",
    ):
        assert words in text
    assert "192 pairs with frequency 0" in text


def drawn(monkeypatch: pytest.MonkeyPatch, *names: str) -> Figure:
    """The figure of these configs, drawn once."""
    saved: list[Figure] = []
    monkeypatch.setattr("ropewalk.tools.inspect.plot.save", lambda figure, target: saved.append(figure))
    draw([inspect_model(config(name)) for name in names], "picture.png")
    (figure,) = saved
    figure.draw_without_rendering()
    return figure


@pytest.mark.parametrize(
    "names",
    slow_except(
        [("llama-3.1-8b",)],
        [
            ("llama-3.1-8b",),
            ("internlm2-chat-7b",),
            ("deepseek-v3",),
            ("gemma-3-4b", "phi-3-mini-128k", "llama-4-scout"),
        ],
    ),
)
def test_nothing_of_the_picture_is_clipped(names, monkeypatch):
    figure = drawn(monkeypatch, *names)
    (legend,) = figure.legends
    titles = {axes.get_title(loc="left") for axes in figure.axes} - {""}
    texts = [text for text in figure.findobj(Text) if isinstance(text, Text) and text.get_text() in titles]
    assert len(texts) == len(titles) > 0
    for artist in (legend, *legend.texts, *texts):
        box = artist.get_window_extent()
        assert 0 <= box.x0 <= box.x1 <= figure.bbox.width
        assert 0 <= box.y0 <= box.y1 <= figure.bbox.height


def ropewalk(*arguments: str, before: str = "") -> subprocess.CompletedProcess[str]:
    code = f"import sys; {before}\nfrom ropewalk.tools.cli import main\nsys.argv[1:] = {list(arguments)!r}\n"
    code += "try:\n    main()\nfinally:\n    print(*{'torch', 'matplotlib', 'transformers'} & set(sys.modules))"
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "COLUMNS": "80", "PYTHONIOENCODING": "utf-8"},
    )


def test_it_needs_no_torch():
    result = ropewalk("inspect", config("llama-3.1-8b"), config("deepseek-v3"))
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1] == "", "the last line names what was imported and need not be"
    assert result.stderr == ""


BAD = {
    "missing": ("no-such/config.json", "No such file"),
    "folder": (".", "a folder without config.json or params.json"),
    "json": ("broken.json", "not JSON"),
    "list": ("list.json", "a JSON object"),
    "empty": ("empty.json", "model_type None"),
    "family": ("unknown.json", "--pairing half or --pairing interleaved"),
    "no rope": ("alibi.json", "in which no layer rotates"),
    "key": ("key.json", "the key 'rope_parameters.rope_theta'"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_message_and_exit_code_2(case, tmp_path, monkeypatch, capsys):
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / "empty.json").write_text("{}")
    (tmp_path / "unknown.json").write_text('{"model_type": "brandnew", "head_dim": 64}')
    (tmp_path / "alibi.json").write_text('{"model_type": "falcon", "head_dim": 64, "alibi": true}')
    (tmp_path / "key.json").write_text('{"model_type": "llama", "head_dim": 64, "rope_theta": -1}')
    name, message = BAD[case]
    # A good one before it: nothing of it is shown, or half of the answer would be.
    monkeypatch.setattr(sys, "argv", ["ropewalk", "inspect", config("llama-2-7b"), str(tmp_path / name)])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 2
    written = capsys.readouterr()
    assert message in written.err
    assert [line.split(":")[0] for line in written.err.splitlines()] == ["asked", "expected", "got", "do this"]
    assert written.out == ""


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"plot": "picture.bmp"}, "the suffix of a picture format"),
        ({"plot": "/proc/nowhere/picture.png"}, "in an existing folder"),
        ({"json_file": "/proc/nowhere/ropes.json"}, "in an existing folder"),
        ({"pairing": "neox"}, "'interleaved' or 'half'"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(RopewalkError, match=message):
        inspect([config("llama-2-7b")], **options)


def test_without_matplotlib_the_extra_is_named(tmp_path):
    arguments = ("inspect", config("llama-2-7b"), "--plot", str(tmp_path / "picture.png"))
    result = ropewalk(*arguments, before="sys.modules['matplotlib'] = None")
    assert result.returncode == 2
    assert "pip install 'ropewalk[plots]'" in result.stderr
    assert "Traceback" not in result.stderr
    assert not list(tmp_path.iterdir())


@given(st.lists(st.integers(1, 40), min_size=1, max_size=20), st.integers(2, 20))
def test_pairs_to_show(widths, most):
    starts = [sum(widths[:i]) for i in range(len(widths))]
    found = [Band("between", start, start + width - 1) for start, width in zip(starts, widths, strict=True)]
    shown = pairs_to_show(found, most)
    edges = {edge for band in found for edge in (band.first, band.last)}
    assert shown == sorted(set(shown))
    assert (shown[0], shown[-1]) == (0, sum(widths) - 1)
    assert len(shown) == min(most, sum(widths))
    assert edges <= set(shown) if len(edges) <= most else set(shown) <= edges


def test_bands_of_pairs_that_are_changed_alike_show_their_ends():
    bands = [Band("unchanged", 0, 20), Band("between", 21, 45), Band("interpolated", 46, 62), Band("still", 63, 63)]
    shown = pairs_to_show(bands, 16)
    assert [pair for pair in shown if pair <= 20] == [0, 20]
    assert [pair for pair in shown if pair >= 46] == [46, 62, 63]
    assert len(shown) == 16
    assert pairs_to_show([Band("unchanged", 0, 63)]) == [0, 63]


@given(st.floats(1e-9, 1e15))
def test_numbers_keep_four_digits(value):
    assert float(number(value).replace(",", "")) == pytest.approx(value, rel=6e-4)
    assert len(number(value)) <= 13


def test_pairs_without_a_frequency_have_no_rotations(tmp_path, capsys):
    parameters = {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25}
    config = {"model_type": "llama", "head_dim": 512, "max_position_embeddings": 131_072, "rope_parameters": parameters}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    assert inspect([str(tmp_path)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "128 of 512 are rotated; the other pairs have frequency 0" in shown
    assert "128 of 512 features complete a rotation within 131,072" in shown
