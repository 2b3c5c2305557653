"""`ropewalk plot`: the numbers are correct, the pictures show them, and files are written completely or not at all."""

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text
from safetensors.numpy import save_file

from formulas import frequencies, plain_frequencies, score_sums
from ropewalk.errors import RopewalkError
from ropewalk.hub.extend.rules import RULE_NAMES
from ropewalk.spec import Frequencies, RopeSpec, Yarn
from ropewalk.theory import BAND_EDGES
from ropewalk.tools.plot import figures
from ropewalk.tools.plot.command import Target, plot_bias, plot_decay, plot_frequencies, plot_rotation, plot_sinusoidal
from ropewalk.tools.plot.curves import RULES, Curve, Flags, decay_of, octaves

CONFIGS = Path(__file__).parent.parent / "data" / "configs"
LLAMA2, LLAMA31, GEMMA3 = (str(CONFIGS / f"{name}.json") for name in ("llama-2-7b", "llama-3.1-8b", "gemma-3-4b"))
# The config of a model of an unknown family.
NEW_FAMILY = {"model_type": "brand-new", "hidden_size": 64, "num_attention_heads": 4, "rope_theta": 10000.0}


@pytest.fixture
def target(tmp_path):
    return Target(str(tmp_path / "picture.png"), str(tmp_path / "numbers.json"))


def numbers(target: Target) -> Any:
    assert target.json_file is not None
    return json.loads(Path(target.json_file).read_text(encoding="utf-8"))


def legend(figure: Figure) -> list[str]:
    boxes = [*figure.legends, *(box for axes in figure.axes if (box := axes.get_legend()) is not None)]
    return [text.get_text() for box in boxes for text in box.texts]


def config(folder: Path, **keys: Any) -> str:
    path = folder / "config.json"
    path.write_text(json.dumps(keys))
    return str(path)


def test_decay_has_the_sums_and_the_means_over_all_integer_distances(target, drawn):
    assert plot_decay([LLAMA2], target, Flags()) == 0
    (curve,) = numbers(target)
    assert (curve["name"], curve["trained_length"]) == ("llama-2-7b", 4096)
    # At distance 0 all 64 cosines are 1, and (1 + 2 + .. + 64) / 64 is 32.5.
    assert (curve["score"][0], curve["bound"][0]) == (64.0, 32.5)
    assert curve["edges"] == [1, 32, 64, 128, 256, 512, 1024, 2048, 4096]
    assert curve["distance"] == list(range(4096))
    sums = score_sums(plain_frequencies(128), 4096)
    assert curve["score"] == pytest.approx(sums.tolist(), abs=1e-9)
    assert curve["score_means"][-1] == pytest.approx(sums[2048:].mean())
    (figure,) = drawn
    assert all(axes.get_xscale() == "log" and axes.get_xlim() == (1, 4096) for axes in figure.axes)
    assert legend(figure) == ["single distances", "mean over a band"]
    # For pairs of other norms Σ cos is not the score.
    assert figure.axes[1].get_title(loc="left").startswith("score, pairs parallel and of norm 1: ")
    for axes, key in zip(figure.axes, ("bound", "score"), strict=True):
        assert axes.lines[0].get_ydata().tolist() == curve[key][1:]
        assert axes.patches[0].get_data().values.tolist() == curve[f"{key}_means"]


def test_a_long_decay_is_sampled_and_its_means_are_not():
    curve = Curve("", RopeSpec(128))
    far = decay_of(curve, 20_000)
    assert len(far.distance) < 4200
    assert far.distance[-1] == 19_999
    all_scores = score_sums(plain_frequencies(128), 20_000)
    assert far.score.tolist() == pytest.approx(all_scores[far.distance.astype(int)].tolist(), abs=1e-9)
    assert far.score_means[-1] == pytest.approx(all_scores[16_384:].mean(), rel=1e-12)


def test_several_configs_share_one_picture_with_a_legend(target, drawn):
    assert plot_decay([LLAMA2, LLAMA31], target, Flags(), length=100) == 0
    assert [curve["name"] for curve in numbers(target)] == ["llama-2-7b", "llama-3.1-8b"]
    assert legend(drawn[0]) == ["llama-2-7b", "llama-3.1-8b"]
    assert len({line.get_color() for line in drawn[0].axes[0].lines}) == 2
    assert numbers(target)[0]["edges"] == [1, 32, 64, 100]


def test_layer_types_with_different_rotations_are_separate_curves(target, drawn):
    assert plot_frequencies([GEMMA3], target, Flags()) == 0
    local, full = numbers(target)
    assert [local["name"], full["name"]] == ["gemma-3-4b, sliding_attention", "gemma-3-4b, full_attention"]
    # Local layers have base 10,000; the others 1,000,000 and positions divided by 8.
    assert local["period"][0] == pytest.approx(2 * math.pi)
    assert full["period"][0] == pytest.approx(16 * math.pi)
    assert full["period"][-1] / local["period"][-1] == pytest.approx(8 * 100 ** (1 - 2 / 256))


def test_frequencies_count_the_pairs_that_complete_a_rotation_within_the_trained_length(target, drawn):
    flags = Flags(bases=(10_000, 500_000), trained=4096)
    assert plot_frequencies([], target, flags, length=8192) == 0
    # Llama 2's critical dimension is 92: 46 pairs.
    assert legend(drawn[0]) == [
        "base 10,000: 46 of 64 periods within 4,096",
        "base 500,000: 32 of 64 periods within 4,096",
    ]
    texts = [text.get_text() for text in drawn[0].axes[0].texts]
    assert texts == ["trained length 4,096", "length 8,192"]
    assert drawn[0].axes[0].get_yscale() == "log"


def test_rules_from_options_are_those_of_the_spec(target, drawn):
    flags = Flags(dim=64, rules=("plain", "yarn"), factor=4, trained=2048)
    assert plot_frequencies([], target, flags) == 0
    plain, yarn = numbers(target)
    assert [plain["name"], yarn["name"]] == ["plain", "yarn ×4"]
    assert plain["inv_freq"] == pytest.approx(plain_frequencies(64).tolist(), rel=1e-13)
    assert yarn["inv_freq"] == pytest.approx(frequencies(Yarn(10_000, 4, 2048), 64).tolist(), rel=1e-13)


@pytest.mark.slow
def test_a_rule_has_one_name_and_the_name_of_configs_as_well(target, drawn):
    for rules in (("pi",), ("linear",), ("linear", "pi")):
        assert plot_frequencies([], target, Flags(rules=rules, factor=4)) == 0
        (curve,) = numbers(target)
        assert curve["name"] == "base 10,000, pi ×4"
        assert curve["inv_freq"][0] == 0.25
    # Every name of a rule here that `extend` has too means the same rule there.
    assert {"pi", "ntk", "dynamic", "yarn", "llama3"} <= set(RULES) & set(RULE_NAMES)
    assert not set(RULES) & set(Frequencies.rope_types()) - set(RULE_NAMES)


def test_a_rule_that_depends_on_the_length_is_evaluated_at_it(target, drawn):
    flags = Flags(rules=("dynamic",), factor=2, trained=2048)
    slowest = []
    for length in (2048, 8192):
        plot_frequencies([], target, flags, length=length)
        slowest.append(numbers(target)[0]["inv_freq"][-1])
    assert slowest[1] < slowest[0]


def test_a_pair_that_is_not_rotated_has_no_period(target, drawn, tmp_path):
    path = config(
        tmp_path,
        model_type="gemma4_text",
        head_dim=8,
        layer_types=["full_attention"],
        rope_parameters={
            "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.5}
        },
    )
    assert plot_frequencies([path], Target(json_file=target.json_file), Flags()) == 0
    assert numbers(target)[0]["period"][-1] is None


@pytest.mark.parametrize(("pairing", "features"), [("half", [[0, 64], [3, 67]]), ("interleaved", [[0, 1], [6, 7]])])
def test_rotation_shows_the_features_of_a_pair_and_their_rotations(target, drawn, pairing, features):
    flags = Flags(trained=1000)
    assert plot_rotation([], target, flags, length=4000, pairing=pairing, pairs=(0, 3)) == 0
    pairs = numbers(target)[0]["pairs"]
    assert [pair["features"] for pair in pairs] == features
    assert pairs[0]["rotations"] == pytest.approx(4000 / (2 * math.pi))
    assert pairs[0]["rotations_in_training"] == pytest.approx(1000 / (2 * math.pi))
    (figure,) = drawn
    assert figure.axes[0].get_title() == f"pair 0: ({features[0][0]}, {features[0][1]})\n637 rotations"
    seen, unseen = figure.axes[1].collections
    theta = 10_000 ** (-6 / 128)
    for dots, low, high in ((seen, 0, 1000), (unseen, 1000, 4000)):
        angle, position = np.asarray(dots.get_offsets()).T
        assert low <= position.min() <= position.max() < high
        assert len(position) > 100
        assert angle == pytest.approx(position * theta)
    assert legend(figure) == ["within the trained length", "beyond it"]


def test_rotation_draws_one_row_per_config_and_six_pairs_from_the_first_to_the_last(target, drawn):
    assert plot_rotation([LLAMA31, GEMMA3], target, Flags(), length=64) == 0
    rows = numbers(target)
    assert [[pair["pair"] for pair in row["pairs"]] for row in rows] == [
        [0, 13, 25, 38, 50, 63],
        *[[0, 25, 51, 76, 102, 127]] * 2,
    ]
    assert len(drawn[0].axes) == 18
    assert rows[0]["pairs"][-1]["features"] == [63, 127]


def test_bias_has_alibis_slopes_and_t5s_buckets(target, drawn):
    assert plot_bias(None, target, num_heads=4, length=200) == 0
    written = numbers(target)
    assert written["alibi"]["slopes"] == [0.25, 0.0625, 0.015625, 0.00390625]
    assert written["alibi"]["bias"][0][10] == -2.5
    decoder, encoder = written["t5"]["bucket"].values()
    assert [decoder[n] for n in (0, 15, 16, 64, 199)] == [0, 15, 16, 26, 31]
    assert [encoder[n] for n in (0, 7, 16, 199)] == [0, 7, 10, 15]
    alibi, t5 = drawn[0].axes
    assert [line.get_ydata()[-1] for line in alibi.lines] == [199 / 4**n for n in range(1, 5)]
    assert t5.lines[0].get_ydata().tolist() == decoder[1:]
    assert "1: slope $2^{-2}$" in legend(drawn[0])


@pytest.mark.parametrize(
    ("keys", "parts"),
    [
        ({"model_type": "bloom", "n_head": 16}, {"distance", "alibi"}),
        ({"model_type": "falcon", "alibi": True, "num_attention_heads": 16}, {"distance", "alibi"}),
        ({"model_type": "mpt", "n_heads": 16, "attn_config": {"alibi": True}}, {"distance", "alibi"}),
        ({"model_type": "t5", "relative_attention_num_buckets": 16, "num_heads": 8}, {"distance", "t5"}),
    ],
)
def test_bias_of_a_config_is_that_of_the_model(target, drawn, tmp_path, keys, parts):
    assert plot_bias(config(tmp_path, **keys), target) == 0
    written = numbers(target)
    assert set(written) == parts
    assert len(drawn[0].axes) == 1
    if "alibi" in parts:
        assert written["alibi"]["slopes"][-1] == 2.0**-8
    else:
        assert (written["t5"]["num_buckets"], written["t5"]["max_distance"]) == (16, 128)


STACKS = ("decoder", "encoder")


def t5_folder(folder: Path, *, buckets: int = 8, heads: int = 3, **tensors: Any) -> dict[str, np.ndarray]:
    """A folder with the config of a T5 model and its learned biases, which are returned."""
    config(folder, model_type="t5", relative_attention_num_buckets=buckets, relative_attention_max_distance=16)
    random = np.random.default_rng(0)
    name = "{}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    learned = {stack: random.normal(size=(buckets, heads)).astype(np.float32) for stack in STACKS}
    save_file({name.format(stack): learned[stack] for stack in STACKS} | tensors, folder / "model.safetensors")
    return learned


def test_t5s_bias_is_in_score_units_if_the_weights_are_there(target, drawn, tmp_path, capsys):
    folder = tmp_path / "t5"
    folder.mkdir()
    learned = t5_folder(folder)
    assert plot_bias(str(folder), target, length=20) == 0
    written = numbers(target)["t5"]
    for stack in STACKS:
        assert np.shape(written["bias"][stack]) == (3, 20)
        for distance in (0, 1, 3, 9, 19):
            bucket = written["bucket"][stack][distance]
            added = [row[distance] for row in written["bias"][stack]]
            assert added == pytest.approx(learned[stack][bucket].tolist(), rel=1e-7)
    decoder, encoder = drawn[0].axes
    assert [axes.get_ylabel() for axes in (decoder, encoder)] == ["added to q·k (no 1/√d)"] * 2
    assert decoder.lines[2].get_ydata().tolist() == written["bias"]["decoder"][2][1:]
    assert "T5, encoder" in encoder.get_title(loc="left")
    assert capsys.readouterr().err == ""


def test_t5s_buckets_are_not_called_a_score(target, drawn, tmp_path, capsys):
    assert plot_bias(config(tmp_path, model_type="t5", relative_attention_num_buckets=32), target) == 0
    (axes,) = drawn[0].axes
    assert axes.get_ylabel() == "index of the bucket, not a score"
    assert "bias" not in numbers(target)["t5"]
    assert "pass the folder of a model with safetensors" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("buckets", "dtype", "message"),
    [(16, np.float32, "with 16 rows, as in the config"), (8, np.int64, "in F64, F32, F16, BF16")],
)
def test_weights_that_contradict_the_config_are_rejected(target, tmp_path, buckets, dtype, message):
    t5_folder(tmp_path, **{"a.relative_attention_bias.weight": np.ones((8, 3), dtype)})
    config(tmp_path, model_type="t5", relative_attention_num_buckets=buckets)
    with pytest.raises(RopewalkError, match=message):
        plot_bias(str(tmp_path), target)
    assert target.out is not None
    assert not Path(target.out).exists()


@pytest.mark.slow
def test_legends_and_titles_stay_inside_the_picture(drawn, tmp_path):
    names = [f"a-model-with-quite-a-long-name-{letter}" for letter in "abcdef"]
    for name in names:
        (tmp_path / name).mkdir()
        config(tmp_path / name, model_type="llama", head_dim=8, max_position_embeddings=64)
    folders = [str(tmp_path / name) for name in names]
    target = Target(str(tmp_path / "picture.png"), dpi=50)
    for plot, shown in ((plot_decay, folders), (plot_frequencies, folders), (plot_rotation, folders[:4])):
        assert plot(shown, target, Flags(), length=128) == 0
    assert plot_bias(None, target) == 0
    t5_folder(tmp_path)
    assert plot_bias(str(tmp_path), target) == 0
    for figure in drawn:
        figure.draw_without_rendering()
        titles = {axes.get_title(loc="left") for axes in figure.axes} - {""}
        texts = [text for text in figure.findobj(Text) if isinstance(text, Text) and text.get_text() in titles]
        for artist in (*figure.legends, *texts):
            box = artist.get_window_extent()
            assert 0 <= box.x0 <= box.x1 <= figure.bbox.width
            assert 0 <= box.y0 <= box.y1 <= figure.bbox.height
    assert len([legend for figure in drawn for legend in figure.legends]) == 3


def test_sinusoidal_is_the_table(target, drawn):
    assert plot_sinusoidal(target, dim=4, base=100.0, length=3) == 0
    table = numbers(target)["table"]
    assert table[2] == pytest.approx([math.sin(2), math.cos(2), math.sin(0.2), math.cos(0.2)])
    assert drawn[0].axes[0].images[0].get_array().tolist() == table


def test_the_bands_are_those_of_the_theory():
    assert octaves(BAND_EDGES[-1]) == list(BAND_EDGES)


def test_the_pictures_of_verify_are_drawn_by_the_same_functions():
    labels = legend(figures.FIGURES["wavelengths"]())
    assert labels[0] == "base 10,000: 46 of 64 periods within 4,096"
    product = r"$(\mathcal{R}_m\,q)\cdot(\mathcal{R}_n\,k)$ = 0.209"
    assert [axes.get_title() for axes in figures.FIGURES["rotation"]().axes][1:] == [
        "m = 5, n = 3, m − n = 2:\n" + product,
        "m = 10, n = 8, m − n = 2:\n" + product,
    ]


@pytest.mark.slow
def test_text_in_svg_is_text_and_the_same_command_gives_the_same_bytes(tmp_path):
    for kind, start in ((".svg", b"<?xml"), (".png", b"\x89PNG"), (".pdf", b"%PDF")):
        first, second = tmp_path / f"a{kind}", tmp_path / f"b{kind.upper()}"
        for path in (first, second):
            assert plot_sinusoidal(Target(str(path), title="A heading"), dim=8) == 0
        assert first.read_bytes() == second.read_bytes()
        assert first.read_bytes().startswith(start)
    text = (tmp_path / "a.svg").read_text()
    assert re.search(r"<text[^>]*>A heading</text>", text)
    assert "feature: sine at 2i, cosine at 2i + 1" in text


def test_dots_per_inch(tmp_path):
    widths = {}
    for dpi in (None, 100):
        path = tmp_path / f"{dpi}.png"
        plot_sinusoidal(Target(str(path), dpi=dpi), dim=4)
        widths[dpi] = int.from_bytes(path.read_bytes()[16:20], "big")
    assert widths == {None: 1420, 100: 710}


@pytest.mark.parametrize("broken", ["savefig", "replace"])
def test_a_failure_leaves_the_old_file_and_no_other(tmp_path, monkeypatch, broken):
    path = tmp_path / "picture.svg"
    path.write_text("old")

    def full(*arguments: object, **keywords: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Figure if broken == "savefig" else os, broken, full)
    with pytest.raises(OSError, match="No space"):
        plot_bias(None, Target(str(path)))
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["picture.svg"]


def test_a_model_without_rotation_and_one_of_a_new_family(target, drawn, tmp_path):
    (tmp_path / "a").mkdir()
    unknown = config(tmp_path / "a", **NEW_FAMILY)
    with pytest.raises(RopewalkError, match="pairing"):
        plot_decay([unknown], target, Flags())
    assert plot_decay([unknown], target, Flags(), pairing="half", length=64) == 0
    # Two folders with the same name are shown with their paths.
    (tmp_path / "b" / "a").mkdir(parents=True)
    other = config(tmp_path / "b" / "a", **NEW_FAMILY)
    assert plot_decay([unknown, other], target, Flags(), pairing="half", length=64) == 0
    assert [curve["name"] for curve in numbers(target)] == [unknown, other]


def test_special_characters_in_names_are_escaped(target, drawn, tmp_path):
    for name in ("_a$x_{$", "b$"):
        (tmp_path / name).mkdir()
        config(tmp_path / name, model_type="llama", head_dim=4, max_position_embeddings=64)
    folders = [str(tmp_path / name) for name in ("_a$x_{$", "b$")]
    assert plot_frequencies(folders, target, Flags()) == 0
    assert [label.split(":")[0] for label in legend(drawn[0])] == [r"./_a\$x_{\$", r"b\$"]
    assert plot_decay(folders[:1], target, Flags()) == 0


def test_notes_of_a_config_go_to_standard_error(target, drawn, capsys):
    assert plot_decay([str(CONFIGS / "smollm3-3b.json")], Target(json_file="-"), Flags(), length=64) == 0
    out, err = capsys.readouterr()
    json.loads(out)
    assert "do not rotate" in err


# Runs one command per line in one process in which a package is missing.
WITHOUT = """
import sys
from ropewalk.tools.cli import main
sys.modules[sys.argv[1]] = None
for line in sys.argv[2:]:
    sys.argv[1:] = ["plot", *line.split()]
    try:
        main()
    except SystemExit as stop:
        print(stop.code)
"""


def without(package: str, *commands: str, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", WITHOUT, package, *commands]
    return subprocess.run(command, capture_output=True, text=True, check=True, cwd=folder)


@pytest.mark.slow
def test_no_picture_needs_torch(tmp_path):
    names = (
        "decay",
        "frequencies",
        "rotation",
        "bias",
        "sinusoidal",
        "bound",
        "score",
        "matrix",
        "heads",
        "plane",
        "t5",
    )
    result = without("torch", *(f"{name} --out {name}.png --dpi 50" for name in names), folder=tmp_path)
    assert result.stderr == ""
    assert result.stdout.splitlines() == [line for name in names for line in (f"picture: {name}.png", "0")]


def test_numbers_need_no_matplotlib_and_a_picture_names_the_extra(tmp_path):
    result = without("matplotlib", "bias --num-heads 2 --length 2 --json -", "bias --out a.png", folder=tmp_path)
    *text, fine, refused = result.stdout.splitlines()
    assert json.loads("\n".join(text))["alibi"]["bias"] == [[0, -(2**-4)], [0, -(2**-8)]]
    assert (fine, refused) == ("0", "2")
    assert "pip install 'ropewalk[plots]'" in result.stderr
    assert not list(tmp_path.iterdir())
