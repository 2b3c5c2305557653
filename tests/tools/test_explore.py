"""`ropewalk explore`: the file, what is embedded in it, and bad input."""

import dataclasses
import html.parser
import json
import re
import webbrowser
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from ropewalk.hub import read_model
from ropewalk.hub.bundled import bundled_names
from ropewalk.spec import Axes, Explicit, Frequencies, LogTemperature, Plain, RopeSpec, XPos, Yarn
from ropewalk.tools.explore import presets
from ropewalk.tools.explore.lab_curves import installed_curves
from ropewalk.tools.explore.page import SCRIPTS, page_data, page_html
from ropewalk.tools.explore.presets import Preset, in_page, presets_of
from ropewalk.tools.plot.bias import Bias
from tools.command import ropewalk

CONFIGS = Path(__file__).parents[1] / "data" / "configs"
HOSTILE = "</script><script>alert(1)</script><!-- \"'&\u2028\ud800"


class Elements(html.parser.HTMLParser):
    """The elements of a page: names, attributes, and the text of scripts."""

    def __init__(self, page):
        super().__init__()
        self.names: list[str] = []
        self.links: list[str | None] = []
        self.scripts: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.names.append(tag)
        self.links += [value for name, value in attrs if name in ("src", "href", "action")]
        self.links += [name for name, _ in attrs if name.startswith("on") or name == "style"]

    def handle_data(self, data):
        if self.names and self.names[-1] == "script" and data.strip():
            self.scripts.append(data)


@pytest.fixture(scope="module")
def page():
    return page_html(page_data())


def test_the_command_writes_one_file_and_opens_it(tmp_path, monkeypatch):
    opened = []
    monkeypatch.setattr(webbrowser, "open", lambda address: opened.append(address) or False)
    out = tmp_path / "a page.html"
    result = ropewalk("explore", CONFIGS / "qwen3-8b.json", CONFIGS / "gemma-3-4b.json", "--out", out)
    assert result.returncode == 0
    assert result.stdout == f"page: {out}\n"
    assert opened == [out.as_uri()]
    assert f"open {out.as_uri()} in one" in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["a page.html"]
    assert out.stat().st_size < 6e6
    result = ropewalk("explore", "--no-open", "--out", out, "--json", "-")
    data = json.loads(result.stdout)
    assert result.stderr == f"page: {out}\n"
    assert len(opened) == 1
    assert {preset["name"].split(",")[0] for preset in data["presets"]} == set(bundled_names())
    assert data["presets"][data["first"]]["name"] == "llama-3.1-8b"


def test_files_of_the_working_folder_do_not_replace_bundled_configs(tmp_path, monkeypatch):
    expected = page_data()
    monkeypatch.chdir(tmp_path)
    Path("llama-2-7b").mkdir()
    Path("qwen3-8b").write_text('{"model_type": "llama", "head_dim": 8}')
    assert page_data() == expected


def test_the_configs_that_are_passed_come_first(tmp_path):
    out = tmp_path / "page.json"
    config = CONFIGS / "gemma-3-4b.json"
    arguments = ("--no-open", "--out", tmp_path / "p.html", "--json", out)
    assert ropewalk("explore", config, config, *arguments).returncode == 0
    data = json.loads(out.read_text())
    names = [preset["name"] for preset in data["presets"]]
    assert data["first"] == 0
    assert names[:2] == ["gemma-3-4b, sliding_attention", "gemma-3-4b, full_attention"]
    # The bundled config has the same name.
    assert "gemma-3-4b, full_attention (2)" in names
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--out", "missing/page.html"), "existing folder"),
        (("--out", "."), "ends in .html"),
        (("--out", "config.json"), "ends in .html"),
        (("--json", "missing/data.json"), "existing folder"),
        (("no-such-config",), "no-such-config"),
        (("t5.json",), "without learned numbers"),
        (("--out", "link.html"), "existing folder"),
        (("--out", "page.html", "--json", "./page.html"), "two different files"),
        (("new.json",), "--pairing"),
        (("broken.json",), "broken.json"),
        (("nan.json",), "nan.json"),
        (("long.json",), "at most 2147483647"),
    ],
)
def test_bad_input(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    llama = {"model_type": "llama", "head_dim": 8}
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 10**18}
    for name, text in {
        "config.json": "{}",
        "t5.json": '{"model_type": "t5", "relative_attention_num_buckets": 32, "num_heads": 2}',
        "new.json": '{"model_type": "brand-new", "head_dim": 8}',
        "broken.json": "{",
        "nan.json": json.dumps(llama | {"rope_theta": float("nan")}),
        "long.json": json.dumps(llama | {"rope_scaling": yarn}),
    }.items():
        Path(name).write_text(text)
    Path("link.html").symlink_to("missing/page.html")
    before = sorted(tmp_path.iterdir())
    result = ropewalk("explore", "--no-open", *arguments)
    assert result.returncode == 2
    assert message in result.stderr
    assert "asked:" in result.stderr
    assert sorted(tmp_path.iterdir()) == before
    assert Path("config.json").read_text() == "{}"


def test_the_page_loads_and_links_nothing(page):
    elements = Elements(page)
    assert elements.links == []
    assert not {"link", "iframe", "object", "img"} & set(elements.names)
    assert len(elements.scripts) == len(SCRIPTS) + 1
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page)
    assert policy is not None
    assert policy[1].startswith("default-src 'none'; script-src 'sha256-")
    assert not re.search("unsafe|https?:|data:|\\*", policy[1])
    # innerHTML and its relatives would make markup of text.
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\b|new Function", page)


def test_hostile_names_stay_text():
    preset = Preset(HOSTILE, RopeSpec(8), 16, 16, (HOSTILE,))
    page = page_html(page_data([preset]))
    elements = Elements(page)
    assert elements.names == Elements(page_html(page_data())).names
    assert "alert(1)</script>" not in page
    data = json.loads(elements.scripts[0])
    assert data["presets"][0]["name"] == HOSTILE
    # A name cannot be one of the places of the page.
    assert (
        Elements(page_html(page_data([dataclasses.replace(preset, name="<!-- scripts -->")]))).names == elements.names
    )


def test_a_rule_that_the_page_does_not_know_is_embedded_as_numbers(monkeypatch):
    known = dict(Frequencies.known)
    monkeypatch.setattr(Frequencies, "known", known)

    @dataclasses.dataclass(frozen=True)
    class Halved(Frequencies):
        label = "halved"
        varies = True

        def evaluate(  # pyright: ignore[reportIncompatibleMethodOverride]
            self, rotary_dim, length=None, arithmetic=None
        ):
            return Plain().evaluate(rotary_dim) / (2 if length is None else 4)

        def amplitude(self, length=None, arithmetic=None):
            return 1.5

    spec, notes = in_page(RopeSpec(8, Halved(), sign=-1), 100)
    assert spec.inv_freq().tolist() == RopeSpec(8, Halved(), sign=-1).inv_freq(100).tolist()
    assert isinstance(spec.frequencies, Explicit)
    assert "does not know the rule halved" in notes[0]
    assert "for a length of 100" in notes[0]
    assert "1.5" in notes[1]


def test_what_is_left_out_of_a_spec_is_said():
    spec, notes = in_page(RopeSpec(8, xpos=XPos(64), query_temperature=LogTemperature(64)), 64)
    assert spec == RopeSpec(8)
    assert len(notes) == 2
    chunked, notes = in_page(RopeSpec(8, axes=Axes.chunked([2, 1, 1])), 64)
    assert chunked == RopeSpec(8)
    assert len(notes) == 1
    repeated, notes = in_page(RopeSpec(8, axes=Axes.repeated(2, 8), sign=-1), 64)
    assert repeated.inv_freq().tolist() == [-1.0, -0.01, -1.0, -0.01]
    assert len(notes) == 2


def test_lengths_of_a_preset():
    (qwen,) = presets_of(read_model(CONFIGS / "qwen2.5-7b-instruct-yarn.json"))
    assert (qwen.trained, qwen.context) == (32768, 131072)
    assert any("max_position_embeddings" in note for note in qwen.notes)
    (bare,) = presets_of(read_model({"model_type": "llama", "head_dim": 8}))
    assert (bare.trained, bare.context) == (4096, 4096)
    assert bare.notes == ("the trained length is not in the config; 4,096 is used",)
    sliding, _ = presets_of(read_model(CONFIGS / "gemma-3-4b.json"))
    assert "the trained length is not in the config; 131,072 is used" in sliding.notes
    assert "the attention of some layers has a window of 1,024 tokens" in sliding.notes
    assert isinstance(qwen.spec.frequencies, Yarn)


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.json")), ids=lambda path: path.stem)
def test_every_config_has_presets(path):
    read, bias = presets.read_config(str(path), None)
    assert read
    assert bias is None
    json.dumps([preset.as_json() for preset in read], allow_nan=False)


def test_the_learned_bias_of_t5(tmp_path):
    config = {"model_type": "t5", "relative_attention_num_buckets": 32, "num_heads": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    learned = np.arange(64, dtype=np.float32).reshape(32, 2)
    name = "decoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    save_file({name: learned}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    read, bias = presets.read_config(str(tmp_path), None)
    assert read == []
    assert bias is not None
    assert bias["heads"] == learned.T.tolist()
    assert (bias["num_buckets"], bias["max_distance"]) == (32, 128)


def test_alibi_does_not_stop_the_command(tmp_path):
    config = tmp_path / "bloom.json"
    config.write_text('{"model_type": "bloom", "n_head": 112}')
    assert presets.read_config(str(config), None) == ([], {"name": "bloom.json", "num_heads": 112})


def test_an_encoder_alone_has_numbers_of_another_kind(tmp_path):
    bias = Bias(num_buckets=32, max_distance=128, learned={"encoder": np.zeros((32, 2))})
    assert presets.describe_bias("t5", bias) is None


def test_the_lab_appears_where_records_are(tmp_path):
    assert installed_curves(tmp_path) == []
    runs = [{"curves": {"loss by length": [[64, y], [128, None if y == 1 else y]]}} for y in (1.0, 3.0)]
    record = {
        "experiment": "length",
        "size": "micro",
        "seeds": [0, 1],
        "hardware": "a CPU",
        "arms": [{"label": "rope", "results": runs}],
    }
    (tmp_path / "length.json").write_text(json.dumps(record))
    (tmp_path / "rates.json").write_text('{"rates": {}}')
    (curve,) = installed_curves(tmp_path)
    assert curve["lines"] == [{"name": "rope", "xs": [64], "ys": [2.0]}]
    assert curve["log"]
