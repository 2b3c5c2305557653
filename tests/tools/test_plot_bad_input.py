"""`ropewalk plot` rejects invalid input before any work, with the reason."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from ropewalk.errors import RopewalkError
from ropewalk.tools.plot.command import (
    Flags,
    Target,
    plot_bias,
    plot_decay,
    plot_frequencies,
    plot_rotation,
    plot_sinusoidal,
)

LLAMA2 = str(Path(__file__).parent.parent / "data" / "configs" / "llama-2-7b.json")


def error_of(call: Any) -> str:
    with pytest.raises(RopewalkError) as caught:
        call()
    return str(caught.value)


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        (Target(), "got:      neither"),
        (Target("picture"), "use one of .png, .svg, .pdf"),
        (Target("picture.gif"), "use one of .png, .svg, .pdf"),
        (Target("."), "the suffix of a picture format"),
        (Target("-"), "the suffix of a picture format"),
        (Target("folder.png"), "a file name in an existing folder"),
        (Target("nowhere/picture.png"), "create the folder first"),
        (Target("/proc/picture.png"), "a folder that can be written"),
        (Target("a.png", "nowhere/a.json"), "create the folder first"),
        (Target("a.svg", dpi=100), "the other formats have no resolution"),
        (Target("a.png", dpi=100_000), "20 to 1200"),
        (Target("a.png", title=r"$\frac{1$"), r"write \$ for a dollar sign"),
        (Target(json_file="a.json", dpi=100), "the other formats have no resolution"),
    ],
)
def test_invalid_targets_are_rejected_before_any_work(outputs, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("folder.png").mkdir()
    commands = (
        lambda: plot_decay(["no-such-config"], outputs, Flags()),
        lambda: plot_frequencies(["no-such-config"], outputs, Flags()),
        lambda: plot_rotation(["no-such-config"], outputs, Flags()),
        lambda: plot_bias("no-such-config", outputs),
        lambda: plot_sinusoidal(outputs, dim=3),
    )
    assert all(message in error_of(command) for command in commands)
    assert [entry.name for entry in tmp_path.iterdir()] == ["folder.png"]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda to: plot_decay(["nowhere"], to, Flags()), "the name of one of the bundled configs"),
        (lambda to: plot_decay([LLAMA2], to, Flags(dim=64)), "a config defines these itself"),
        (lambda to: plot_decay([LLAMA2], to, Flags(), length=2), "at least 3"),
        (lambda to: plot_decay([LLAMA2], to, Flags(), length=1 << 40), "at most 1048576"),
        (lambda to: plot_decay([LLAMA2], to, Flags(), pairing="both"), "'interleaved' or 'half'"),
        (lambda to: plot_decay([], to, Flags(), pairing="half"), "the same for both"),
        (lambda to: plot_decay([], to, Flags(dim=7)), "an even head_dim"),
        (lambda to: plot_decay([], to, Flags(bases=(math.nan,))), "got:      nan"),
        (lambda to: plot_decay([], to, Flags(rules=("yarm",))), "did you mean 'yarn'?"),
        (lambda to: plot_decay([], to, Flags(rules=("yarn",), trained=4096)), "add --factor"),
        (lambda to: plot_decay([], to, Flags(rules=("yarn",), factor=4)), "add --trained-length"),
        (lambda to: plot_decay([], to, Flags(factor=4)), "--rule plain, which has none"),
        (lambda to: plot_decay([], to, Flags(bases=tuple(range(2, 9)))), "at most 6 rotations"),
        (lambda to: plot_frequencies([], to, Flags(), length=0), "at least 1"),
        (lambda to: plot_rotation([], to, Flags(), pairs=(64,)), "from 0 to 63"),
        (lambda to: plot_rotation([], to, Flags(), pairs=(-1,)), "from 0 to 63"),
        (lambda to: plot_rotation([], to, Flags(), pairs=range(7)), "at most 6 pairs"),
        (lambda to: plot_rotation([], to, Flags(bases=(2, 3, 4, 5, 6))), "at most 4 rotations"),
        (lambda to: plot_bias(LLAMA2, to), "model_type 'llama' with neither"),
        (lambda to: plot_bias(LLAMA2, to, num_heads=8), "got:      both"),
        (lambda to: plot_bias(None, to, num_heads=0), "at least 1"),
        (lambda to: plot_bias(None, to, buckets=3), "at least 4"),
        (lambda to: plot_bias(None, to, num_heads=10**9), "at most 1024"),
        (lambda to: plot_bias(None, to, buckets=10**9), "at most 1024"),
        (lambda to: plot_bias(None, to, max_distance=10**9), "at most 1048576"),
        (lambda to: plot_bias(None, to, max_distance=0), "at least 17"),
        (lambda to: plot_sinusoidal(to, dim=3), "an even width"),
        (lambda to: plot_sinusoidal(to, dim=1 << 20, length=1 << 20), "a table of at most"),
        (lambda to: plot_sinusoidal(to, base=-1.0), "got:      -1.0"),
        (lambda to: plot_sinusoidal(to, length=0), "at least 2"),
    ],
)
@pytest.mark.usefixtures("as_a_user")
def test_bad_input_is_rejected_and_nothing_is_written(call, message, tmp_path):
    target = Target(str(tmp_path / "picture.png"), str(tmp_path / "numbers.json"))
    assert message in error_of(lambda: call(target))
    assert not list(tmp_path.iterdir())


def test_the_error_names_the_invalid_config(tmp_path):
    wrong = tmp_path / "config.json"
    wrong.write_text(json.dumps({"model_type": "llama", "head_dim": 7}))
    assert f"ropewalk plot decay {wrong}: " in error_of(
        lambda: plot_decay([LLAMA2, str(wrong)], Target(json_file="-"), Flags())
    )
