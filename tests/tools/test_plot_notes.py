"""The pictures of the notes: their numbers against formulas written out here, and that the pictures show them."""

import itertools
import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Arc
from matplotlib.text import Annotation
from typer.testing import CliRunner

from formulas import plain_frequencies, score_sums
from ropewalk.errors import RopewalkError
from ropewalk.tools.cli import app
from ropewalk.tools.plot import figures
from ropewalk.tools.plot.command import Target
from ropewalk.tools.plot.note_command import plot_bound, plot_heads, plot_matrix, plot_plane, plot_score, plot_t5

COMMANDS = {"bound": plot_bound, "score": plot_score, "matrix": plot_matrix, "heads": plot_heads, "plane": plot_plane}
COMMANDS |= {"t5": plot_t5}


@pytest.fixture
def target(tmp_path):
    return Target(str(tmp_path / "picture.png"), str(tmp_path / "numbers.json"), dpi=50)


def numbers(target: Target) -> Any:
    assert target.json_file is not None
    return json.loads(Path(target.json_file).read_text(encoding="utf-8"))


def bounds(dim: int, length: int) -> np.ndarray:
    """The mean of |S_1| .. |S_{d/2}| at distances 0 to length - 1 for base 10000, from its definition."""
    theta = [10_000 ** (-2 * i / dim) for i in range(dim // 2)]
    sums = [abs(sum(np.exp(1j * np.arange(length) * each) for each in theta[: j + 1])) for j in range(dim // 2)]
    return np.asarray(sum(sums)) / (dim // 2)


def texts(axes: Axes) -> list[str]:
    return [text.get_text() for text in axes.texts]


def vectors(axes: Axes) -> dict[str, tuple[float, float]]:
    """The end of each vector that starts at the origin, by its label, which is the text after its arrow."""
    labelled = itertools.pairwise(text for text in axes.texts if isinstance(text, Annotation))
    return {label.get_text().strip("$"): arrow.xy for arrow, label in labelled if arrow.arrow_patch is not None}


def source(figure: Figure) -> str:
    """The line below a picture that states its source."""
    return figure.get_supxlabel().replace("\n", " ")


def test_figure_2_is_on_the_axes_of_the_paper(target, drawn):
    assert plot_bound(target, length=8192) == 0
    expected = bounds(128, 251)
    # From the curve in the PDF of the paper: 19.8174 at 8, 10.2273 at 100, and the minimum at 236.
    assert expected[[8, 100, 236]].round(4).tolist() == [19.8174, 10.2273, 6.415]
    paper, farther = drawn[0].axes
    assert (paper.get_xscale(), paper.get_yscale(), paper.get_xlim()) == ("linear", "linear", (0, 250))
    assert paper.get_ylabel() == farther.get_ylabel() == "relative upper bound"
    assert "in positions" in paper.get_xlabel()
    (line,) = paper.lines
    assert line.get_xdata().tolist() == list(range(251))
    assert line.get_ydata() == pytest.approx(expected, abs=1e-12)
    assert numbers(target)["bound"] == line.get_ydata().tolist()
    assert "32.5 at distance 0" in texts(paper)[0]
    assert "2104.09864" in source(drawn[0])
    assert "figure 2" in source(drawn[0])
    assert "note 002" in source(drawn[0])


def test_the_bound_is_log_log_beside_it_with_means_over_all_distances(target, drawn):
    assert plot_bound(target, length=8192) == 0
    _, farther = drawn[0].axes
    assert (farther.get_xscale(), farther.get_yscale(), farther.get_xlim()) == ("log", "log", (1, 8192))
    expected = bounds(128, 8192)
    at = farther.lines[0].get_xdata().astype(int)
    # An angle of 8192 has an error of 1e-12, and 64 of them are summed.
    assert farther.lines[0].get_ydata() == pytest.approx(expected[at], abs=1e-11)
    means, edges, _ = farther.patches[0].get_data()
    assert edges.tolist() == [1, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192]
    assert means == pytest.approx([expected[a:b].mean() for a, b in itertools.pairwise(edges)], abs=1e-12)
    assert drawn[0].get_suptitle().endswith("the band mean is lowest (4.67) at distances of 4k to 8k")
    (inset,) = farther.child_axes
    assert texts(inset) == [f"{mean:.2f}" for mean in means[-3:]] == ["5.30", "4.88", "4.67"]


@pytest.mark.slow
def test_the_band_means_are_lowest_at_8k_to_16k_and_rise_beyond(target, drawn):
    assert plot_bound(target) == 0
    decay = numbers(target)["decay"]
    assert decay["edges"][-5:] == [8192, 16_384, 32_768, 65_536, 131_072]
    assert np.round(decay["bound_means"][-4:], 2).tolist() == [4.66, 4.70, 4.72, 4.78]
    assert min(decay["bound_means"]) == decay["bound_means"][-4]
    # The score of parallel vectors is lowest there too.
    scores = score_sums(plain_frequencies(128), 131_072)
    means = [scores[a:b].mean() for a, b in itertools.pairwise(decay["edges"])]
    assert int(np.argmin(means)) == len(means) - 4
    assert drawn[0].get_suptitle().endswith("the band mean is lowest (4.66) at distances of 8k to 16k")
    title = figures.FIGURES["decay"]().get_suptitle()
    assert title.endswith("the means are lowest at distances of 8k to 16k")
    assert "fall" not in title


def test_another_width_is_not_cut_off(target, drawn):
    assert plot_bound(target, dim=8, length=300) == 0
    paper, farther = drawn[0].axes
    assert paper.get_ylim()[1] > 2.5  # (1 + 2 + 3 + 4) / 4 at distance 0
    assert texts(paper) == []
    assert farther.child_axes == []


def test_the_sums_of_note_002_are_marked_as_stated_and_as_computed(target, drawn):
    assert plot_score(target) == 0
    computed = [sum(math.cos(theta * at) for theta in (1.0, 0.3, 0.05)) for at in (0, 2, 20, 50)]
    marks = numbers(target)["marks"]
    assert [mark["distance"] for mark in marks] == [0, 2, 20, 50]
    assert [mark["stated"] for mark in marks] == [3.0, 1.4, 1.4, -0.6]
    assert [mark["computed"] for mark in marks] == pytest.approx(computed, abs=1e-12)
    (axes,) = drawn[0].axes
    curve, _, ours, note, *_ = axes.lines
    every = [sum(math.cos(theta * at) for theta in (1.0, 0.3, 0.05)) for at in curve.get_xdata()]
    assert curve.get_ydata() == pytest.approx(every, abs=1e-12)
    assert (list(ours.get_ydata()), list(note.get_ydata())) == (
        [mark["computed"] for mark in marks],
        [mark["stated"] for mark in marks],
    )
    labels = [text for text in texts(axes) if text]
    assert [label.splitlines()[2] for label in labels] == [
        "computed: 3.000",
        "computed: 1.404",
        "computed: 1.909",
        "computed: −0.596",
    ]
    assert [label.splitlines()[1] for label in labels] == ["note: 3.0", "note: 1.4", "note: 1.4", "note: −0.6"]
    assert [label for label in labels if "difference: 0.509" in label] == [labels[2]]
    assert axes.get_xlabel() == "distance Δ = m − n, in positions"
    assert axes.get_ylabel()
    assert "Note 002, line 317" in source(drawn[0])


@pytest.mark.parametrize("pairing", ["interleaved", "half"])
def test_the_matrix_rotates_every_pair(target, drawn, pairing):
    assert plot_matrix(target, dim=6, position=7, pairing=pairing) == 0
    written = np.array(numbers(target)["matrix"])
    vector, theta = np.array([1.0, -2.0, 0.5, 3.0, -1.0, 0.25]), plain_frequencies(6)
    order = [0, 1, 2, 3, 4, 5] if pairing == "interleaved" else [0, 3, 1, 4, 2, 5]
    pairs = vector[order].reshape(3, 2) @ np.array([1, 1j]) * np.exp(7j * theta)
    expected = np.zeros(6)
    expected[order] = np.stack((np.real(pairs), np.imag(pairs)), axis=-1).ravel()
    assert written @ vector == pytest.approx(expected, abs=1e-12)
    assert written @ written.T == pytest.approx(np.eye(6), abs=1e-12)
    axes = drawn[0].axes[0]
    assert axes.images[0].get_array().tolist() == written.tolist()
    assert axes.images[0].get_clim() == (-1, 1)
    shown = np.array(texts(axes), dtype=object).reshape(6, 6)
    assert (shown == "0").sum() == 36 - 12
    first, second = order[2], order[3]
    assert shown[first, second].startswith(r"$-\sin\,m\theta_{1}$")
    assert shown[second, first].startswith(r"$\sin\,m\theta_{1}$")
    assert shown[first, first].endswith(f"{math.cos(7 * theta[1]):.2f}")
    assert "" not in (axes.get_xlabel(), axes.get_ylabel(), drawn[0].axes[1].get_ylabel())
    assert "Note 004, lines 72 to 74" in source(drawn[0])


def test_every_head_has_a_band_of_periods_if_d_model_is_rotated(target, drawn):
    assert plot_heads(target) == 0
    written = numbers(target)
    whole = 2 * np.pi * 10_000 ** (np.arange(256) / 256)
    each = 2 * np.pi * 10_000 ** (np.arange(32) / 32)
    assert np.array(written["before_split"]) == pytest.approx(whole.reshape(8, 32), rel=1e-12)
    assert np.array(written["per_head"]) == pytest.approx(np.tile(each, (8, 1)), rel=1e-12)
    left, right = drawn[0].axes
    for axes, key in ((left, "before_split"), (right, "per_head")):
        assert [line.get_ydata().tolist() for line in axes.lines] == written[key]
        assert axes.get_yscale() == "log"
        assert axes.get_xlabel().startswith("head")
    assert texts(left)[:2] == ["6.3", "19"]
    assert texts(left)[-2:] == ["19,869", "60,611"]
    assert texts(right) == ["6.3", "47,117"] * 8
    assert left.get_ylabel() == "period 2π/θ of a pair, in positions"
    assert "note 000, line 52" in source(drawn[0])


def test_the_rotation_shows_the_vector_before_and_after_and_the_arc_of_the_angle(target, drawn):
    assert plot_plane(target) == 0
    near, far = numbers(target)
    assert (near["m"] - near["n"], far["m"] - far["n"]) == (2, 2)
    assert near["score"] == pytest.approx(far["score"], abs=1e-12)
    assert near["score"] == pytest.approx(np.dot(near["rotated_query"], near["rotated_key"]), abs=1e-12)
    alone, first, second = drawn[0].axes
    assert texts(alone) == ["", "q", "", r"$\mathcal{R}_m\,q$", "mθ = 1.75 rad"]
    for axes, plane in ((first, near), (second, far)):
        assert {"q", "k", "mθ", "nθ"} <= set(texts(axes))
        ends = [text.xy for text in axes.texts if text.arrow_patch is not None]
        keys = ("query", "rotated_query", "key", "rotated_key")
        assert np.array(ends) == pytest.approx(np.array([plane[key] for key in keys]), abs=1e-12)
        arcs = [patch for patch in axes.patches if isinstance(patch, Arc)]
        angles = [math.radians(arc.theta2 - arc.theta1) for arc in arcs]
        assert angles == pytest.approx([plane["m"] * 0.35, plane["n"] * 0.35], abs=1e-12)
        assert math.radians(arcs[0].theta1) == pytest.approx(math.atan2(*plane["query"][::-1]), abs=1e-12)
        # The number in the title is the product of the vectors that it names, as they are drawn.
        ends = vectors(axes)
        product, _, value = axes.get_title().splitlines()[1].partition(" = ")
        left, right = re.findall(r"\((.+?)\)", product)
        assert float(value) == round(float(np.dot(ends[left], ends[right])), 3) == 0.209
        assert round(float(np.dot(ends["q"], ends["k"])), 3) == 0.021
    assert "figure 1" in source(drawn[0])


def test_t5s_bias_is_that_of_the_stated_table_in_units_of_the_product(target, drawn):
    assert plot_t5(target) == 0
    written = numbers(target)
    decoder, bias = written["bucket"]["decoder"], written["bias"]
    assert [decoder[n] for n in (0, 15, 16, 64, 255)] == [0, 15, 16, 26, 31]
    assert len(written["table"]) == 32
    for distance in range(256):
        least = decoder.index(decoder[distance])
        assert bias[distance] == pytest.approx(-math.log(1 + least), abs=1e-12)
    left, right = drawn[0].axes
    assert [line.get_ydata().tolist() for line in left.lines] == [
        written["bucket"][name][1:] for name in ("decoder", "encoder")
    ]
    assert left.get_ylabel() == "index of the bucket, not a score"
    assert right.lines[1].get_ydata().tolist() == bias[1:]
    assert right.get_ylabel() == "bias B, added to q·k (no 1/√d)"
    assert "not a learned one" in right.get_title(loc="left")
    assert "−ln(1 + n)" in source(drawn[0])
    assert "Note 002, lines 148 to 160" in source(drawn[0])


def test_the_sinusoidal_table_states_its_source_and_its_axes():
    figure = figures.FIGURES["sinusoid"]()
    table, bar = figure.axes
    assert (table.get_ylabel(), bar.get_ylabel()) == ("position", "value, no unit")
    assert "1706.03762" in source(figure)


@pytest.mark.parametrize("name", COMMANDS)
def test_a_title_replaces_the_heading(name, tmp_path, drawn):
    arguments = {"length": 300} if name == "bound" else {}
    assert COMMANDS[name](Target(str(tmp_path / "a.png"), title="Another", dpi=30), **arguments) == 0
    headings = [drawn[0].get_suptitle(), *(axes.get_title(loc="left") for axes in drawn[0].axes)]
    assert headings.count("Another") == 1


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda to: plot_bound(to, length=250), "at least 251"),
        (lambda to: plot_bound(to, length=1 << 40), "at most 1048576"),
        (lambda to: plot_bound(to, dim=7), "an even head_dim"),
        (lambda to: plot_bound(to, base=-1.0), "got:      -1.0"),
        (lambda to: plot_matrix(to, dim=3), "an even head_dim"),
        (lambda to: plot_matrix(to, dim=14), "at most 12"),
        (lambda to: plot_matrix(to, position=-1), "at least 0"),
        (lambda to: plot_matrix(to, pairing="both"), "'interleaved' or 'half'"),
        (lambda to: plot_heads(to, num_heads=0), "at least 1"),
        (lambda to: plot_heads(to, num_heads=17), "at most 16"),
        (lambda to: plot_heads(to, head_dim=5), "an even head_dim"),
        (lambda to: plot_heads(to, head_dim=1 << 20), "at most 1024"),
        (lambda to: plot_t5(to, buckets=3), "at least 4"),
        (lambda to: plot_t5(to, max_distance=16), "at least 17"),
        (lambda to: plot_t5(to, max_distance=1 << 40), "at most 1048576"),
        (lambda to: plot_t5(to, length=1), "at least 2"),
        *((lambda to, call=call: call(Target()), "got:      neither") for call in COMMANDS.values()),
    ],
)
@pytest.mark.usefixtures("as_a_user")
def test_bad_input_is_rejected_and_nothing_is_written(call, message, tmp_path):
    with pytest.raises(RopewalkError) as caught:
        call(Target(str(tmp_path / "picture.png"), str(tmp_path / "numbers.json")))
    assert message in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_an_unknown_picture_lists_the_known_ones():
    result = CliRunner().invoke(app, ["plot", "portrait", "--out", "a.png"])
    assert isinstance(result.exception, RopewalkError)
    assert "got:      'portrait'" in str(result.exception)
    known = ("decay", "frequencies", "rotation", "bias", "sinusoidal", *COMMANDS)
    assert all(f"'{name}'" in str(result.exception) for name in known)
