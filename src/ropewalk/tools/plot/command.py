"""`ropewalk plot`: pictures of configs, or of rotations that options describe, and their numbers as JSON.

Nothing here needs torch. The numbers do not need matplotlib.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console

from ropewalk.errors import RopewalkError, require_count
from ropewalk.theory import periods
from ropewalk.theory.encodings import alibi_slopes, sinusoidal_table, t5_buckets
from ropewalk.tools.output import require_writable_file, write_json
from ropewalk.tools.plot.bias import Bias, bias_of
from ropewalk.tools.plot.curves import Curve, Flags, as_lists, as_text, decay_of, either, rotations

if TYPE_CHECKING:
    from ropewalk.tools.pictures import Figure

__all__ = ["Flags", "Target", "plot_bias", "plot_decay", "plot_frequencies", "plot_rotation", "plot_sinusoidal"]

# The limit of the default length, the longest trained one: plotting takes seconds, not minutes.
DEFAULT_LONGEST = 1 << 17
# The longest distance: more cosines would take minutes.
LONGEST = 1 << 20
# The number of rows and columns that remain readable in one picture.
MOST_ROWS, PANELS = 4, 6
MOST_HEADS = 1024
# The maximum number of elements of the sinusoidal table.
MOST_CELLS = 1 << 24


@dataclass(frozen=True)
class Target:
    """The outputs of a plot.

    Attributes:
        out: The path of the picture.
        json_file: The path of the numbers as JSON; "-" for standard output.
        title: The title of the picture. None for the default title.
        dpi: Dots per inch of a PNG. None for the default.
    """

    out: str | None = None
    json_file: str | None = None
    title: str | None = None
    dpi: int | None = None

    def check(self, asked: str) -> None:
        """Raise `RopewalkError` if an output cannot be written or matplotlib is missing, before any work is done."""
        if self.out is None and self.json_file is None:
            raise RopewalkError(
                asked=asked,
                expected="--out FILE.png or --out FILE.svg for a picture, or --json FILE for the numbers",
                got="neither",
                do="add the file name of the picture: --out picture.svg",
            )
        if self.json_file is not None:
            require_writable_file(self.json_file, asked=f"{asked} --json {self.json_file}")
        if self.out is not None:
            from ropewalk.tools.pictures import require_picture, require_text

            require_picture(self.out, asked=f"{asked} --out {self.out}")
            require_text(self.title or "", asked=f"{asked} --title {self.title!r}")
        if self.dpi is not None and (Path(self.out or "").suffix.lower() != ".png" or not 20 <= self.dpi <= 1200):
            raise RopewalkError(
                asked=f"{asked} --dpi {self.dpi}",
                expected="20 to 1200 dots per inch, with an --out that ends in .png",
                got=f"{self.dpi} for {self.out}",
                do="leave --dpi out: the other formats have no resolution",
            )

    def heading(self, default: str) -> str:
        """The requested title, or `default`."""
        return default if self.title is None else self.title

    def write(self, numbers: Any, draw: Callable[[], "Figure"]) -> int:
        """Write the picture and the numbers, print their paths, and return the exit code 0."""
        # If JSON is written to standard output, everything else goes to standard error.
        console = Console(stderr=self.json_file == "-", highlight=False, markup=False)
        if self.out is not None:
            from ropewalk.tools.pictures import DPI, save

            save(draw(), self.out, self.dpi or DPI)
        if self.json_file is not None:
            write_json(as_lists(numbers), self.json_file)
        for content, path in (("picture", self.out), ("numbers", self.json_file)):
            if path not in (None, "-"):
                console.print(f"{content}: {path}", markup=False, soft_wrap=True)
        return 0


def _figures() -> Any:
    """The module with the drawing functions, which needs matplotlib."""
    from ropewalk.tools.plot import figures

    return figures


def plot_decay(
    configs: Sequence[str], target: Target, flags: Flags, length: int | None = None, pairing: str | None = None
) -> int:
    """Plot RoFormer's bound and the score of parallel pairs of norm 1 over the distance, with means over bands.

    Args:
        configs: Paths of configs or model folders. Empty if `flags` describes the rotation.
        target: The outputs.
        flags: A rotation without a config.
        length: Distances below this are plotted. Default: the longest trained length, at most 131072.
        pairing: The pairing, if the model family is unknown.

    Returns:
        The exit code 0.

    Raises:
        RopewalkError: If an argument is invalid, a config cannot be read or an output cannot be written.
    """
    asked = "ropewalk plot decay"
    target.check(asked)
    length = _length(length, asked, at_least=3)
    curves = rotations(configs, flags, pairing, asked)
    if length is None:
        length = min(max((curve.trained for curve in curves if curve.trained), default=4096), DEFAULT_LONGEST)
    with Console(stderr=True).status("summing cosines"):
        decays = [(curve, decay_of(curve, length)) for curve in curves]
    numbers = [_named(curve) | asdict(decay) for curve, decay in decays]
    heading = target.heading("Long-term decay" + _single_name(curves))
    return target.write(numbers, lambda: _figures().decay(decays, heading))


def plot_frequencies(
    configs: Sequence[str], target: Target, flags: Flags, length: int | None = None, pairing: str | None = None
) -> int:
    """Plot the period of every pair, and which pairs complete a full rotation within the trained length.

    `length` is marked, and rules that depend on the length are evaluated at it. For the other arguments, the result and
    the errors see `plot_decay`.
    """
    asked = "ropewalk plot frequencies"
    target.check(asked)
    length = _length(length, asked)
    curves = rotations(configs, flags, pairing, asked)
    numbers = [_named(curve) | _frequencies(curve, length) for curve in curves]
    heading = target.heading("Positions per full rotation of a pair" + _single_name(curves))
    return target.write(numbers, lambda: _figures().frequencies(curves, length, heading))


def _frequencies(curve: Curve, length: int | None) -> dict[str, Any]:
    theta = curve.inv_freq(length)
    return {"length": length, "inv_freq": theta, "period": periods(theta)}


def plot_rotation(
    configs: Sequence[str],
    target: Target,
    flags: Flags,
    length: int | None = None,
    pairing: str | None = None,
    pairs: Sequence[int] = (),
) -> int:
    """Plot pairs as points that rotate with the position. Positions beyond the trained length have another colour.

    `length` is the number of positions, and `pairs` are the pairs to draw, by default six from the fastest to the
    slowest. For the other arguments, the result and the errors see `plot_decay`.
    """
    asked = "ropewalk plot rotation"
    target.check(asked)
    length = _length(length, asked, at_least=2)
    curves = rotations(configs, flags, pairing, asked, most=MOST_ROWS, paired=True)
    if length is None:
        lengths = [curve.configured or curve.trained for curve in curves]
        length = max((each for each in lengths if each), default=4096)
    for curve in curves:
        for pair in pairs:
            if not 0 <= pair < curve.spec.rotated_dim // 2:
                raise RopewalkError(
                    asked=f"{asked} --pair {pair}",
                    expected=f"a pair of {curve.name}: from 0 to {curve.spec.rotated_dim // 2 - 1}",
                    got=f"{pair}",
                    do="use 0 for the fastest pair, the largest index for the slowest",
                )
    if len(pairs) > PANELS:
        raise RopewalkError(
            asked=f"{asked} --pair ...",
            expected=f"at most {PANELS} pairs in a picture",
            got=f"{len(pairs)}",
            do="draw more than one picture",
        )
    drawn_pairs = [list(pairs) or _spread(curve.spec.rotated_dim // 2) for curve in curves]
    numbers = [
        _named(curve) | {"length": length, "pairs": [_pair(curve, pair, length) for pair in pairs_of_curve]}
        for curve, pairs_of_curve in zip(curves, drawn_pairs, strict=True)
    ]
    heading = target.heading(f"Pairs at {length:,} positions, which increase outwards" + _single_name(curves))
    return target.write(numbers, lambda: _figures().rotation(curves, drawn_pairs, length, heading))


def _spread(pairs: int) -> list[int]:
    """At most `PANELS` pairs, evenly spaced from the fastest to the slowest."""
    return np.unique(np.linspace(0, pairs - 1, PANELS).round().astype(int)).tolist()


def _pair(curve: Curve, pair: int, length: int) -> dict[str, Any]:
    theta = curve.inv_freq(length)[pair]
    rotations_of_pair = {"rotations": length * theta / (2 * np.pi)}
    rotations_of_pair |= {} if curve.trained is None else {"rotations_in_training": curve.trained * theta / (2 * np.pi)}
    return {"pair": pair, "features": curve.features(pair), "inv_freq": theta} | rotations_of_pair


def plot_bias(
    config: str | None,
    target: Target,
    num_heads: int | None = None,
    buckets: int | None = None,
    max_distance: int | None = None,
    length: int | None = None,
) -> int:
    """Plot ALiBi's bias per head and T5's bias or buckets over the distance.

    T5 learns its biases. They are plotted if `config` is a folder with the weights, and otherwise the buckets are.

    Args:
        config: The path of a config or of a model folder. Only the bias of this model is plotted. None for both.
        target: The outputs.
        num_heads: The number of ALiBi heads. Default: 8.
        buckets: The number of T5 buckets. Default: 32.
        max_distance: The distance from which on T5 uses the last bucket. Default: 128.
        length: Distances below this are plotted. Default: 256.

    Returns:
        The exit code 0.

    Raises:
        RopewalkError: If an argument is invalid, the config has neither bias, or an output cannot be written.
    """
    asked = "ropewalk plot bias"
    target.check(asked)
    length = _length(length, asked, at_least=2) or 256
    alibi, t5, bias = True, True, Bias(num_heads, buckets, max_distance)
    if config is not None:
        if (num_heads, buckets, max_distance) != (None, None, None):
            raise either(asked, "--num-heads, --buckets and --max-distance")
        bias = bias_of(config, asked)
        alibi, t5 = bias.num_heads is not None, bias.num_buckets is not None
        num_heads, buckets, max_distance = bias.num_heads, bias.num_buckets, bias.max_distance
    for option, value, most in (
        ("--num-heads", num_heads, MOST_HEADS),
        ("--buckets", buckets, MOST_HEADS),
        ("--max-distance", max_distance, LONGEST),
    ):
        if value is not None and value > most:
            raise RopewalkError(
                asked=f"{asked} {option} {value}",
                expected=f"at most {most}",
                got=f"{value}",
                do=f"reduce {option}: no model has such a large value",
            )
    slopes = alibi_slopes(8 if num_heads is None else num_heads) if alibi else None
    t5_options = {
        "num_buckets": 32 if buckets is None else buckets,
        "max_distance": 128 if max_distance is None else max_distance,
    }
    distance, steps = np.arange(length), {}
    if t5:
        for name, causal in (("decoder", True), ("encoder", False)):
            steps[name] = t5_buckets(-distance, causal=causal, **t5_options)
    numbers: dict[str, Any] = (
        {} if slopes is None else {"alibi": {"slopes": slopes, "bias": -slopes[:, None] * distance}}
    )
    numbers |= {"t5": t5_options | {"bucket": steps}} if t5 else {}
    learned = {name: table[steps[name]].T for name, table in bias.learned.items()}
    if learned:
        numbers["t5"]["bias"] = learned
    elif t5 and config is not None:
        note = (
            "note: T5's biases are weights; pass the folder of a model with safetensors to plot them instead of buckets"
        )
        Console(stderr=True, highlight=False, markup=False).print(note, soft_wrap=True)
    heading = target.heading("Position biases" if config is None else as_text(Path(config).stem))
    return target.write(
        {"distance": distance} | numbers, lambda: _figures().bias(distance, slopes, steps, learned, heading)
    )


def plot_sinusoidal(target: Target, dim: int = 64, base: float = 10_000.0, length: int = 128) -> int:
    """Plot the sinusoidal table of Vaswani et al. as an image.

    Args:
        target: The outputs.
        dim: The number of features.
        base: The base of the frequencies.
        length: The number of positions.

    Returns:
        The exit code 0.

    Raises:
        RopewalkError: If an argument is invalid or an output cannot be written.
    """
    asked = "ropewalk plot sinusoidal"
    target.check(asked)
    require_count(length, asked=f"{asked} --length", do="specify the number of positions of the table", at_least=2)
    if length * dim > MOST_CELLS:
        raise RopewalkError(
            asked=f"{asked} --dim {dim} --length {length}",
            expected=f"a table of at most {MOST_CELLS} numbers",
            got=f"{length * dim}",
            do="reduce --dim or --length: a picture has fewer pixels",
        )
    table = sinusoidal_table(np.arange(length), dim, base)
    heading = target.heading(f"Sinusoidal encoding, d = {dim}, base {base:,.12g}")
    return target.write({"dim": dim, "base": base, "table": table}, lambda: _figures().sinusoidal(table, heading))


def _named(curve: Curve) -> dict[str, Any]:
    return {"name": curve.name, "trained_length": curve.trained, "configured_length": curve.configured}


def _single_name(curves: Sequence[Curve]) -> str:
    """The name of a single rotation for the title, because its picture has no legend."""
    if len(curves) > 1:
        return ""
    # No line break inside "d = 128".
    return f": {as_text(curves[0].name)}, d\N{NO-BREAK SPACE}=\N{NO-BREAK SPACE}{curves[0].spec.rotated_dim}"


def _length(length: int | None, asked: str, at_least: int = 1) -> int | None:
    if length is None:
        return None
    do = "specify the number of positions to plot"
    length = require_count(length, asked=f"{asked} --length", do=do, at_least=at_least)
    if length > LONGEST:
        raise RopewalkError(
            asked=f"{asked} --length {length}", expected=f"at most {LONGEST}", got=f"{length}", do="reduce --length"
        )
    return length
