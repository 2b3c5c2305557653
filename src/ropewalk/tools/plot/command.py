"""`ropewalk plot`: pictures of configs, or of rotations that flags say, for papers and slides; their numbers as JSON.

None of them needs torch, and the numbers alone need no matplotlib.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console

from ropewalk.errors import RopewalkError, require_count
from ropewalk.hub.configs.keys import Keys, read_config
from ropewalk.theory import periods
from ropewalk.theory.encodings import alibi_slopes, sinusoidal_table, t5_buckets
from ropewalk.tools.command_config import refuse_other_files
from ropewalk.tools.output import require_writable_file, write_json
from ropewalk.tools.plot.curves import Curve, Flags, as_lists, as_text, decay_of, either, rotations

if TYPE_CHECKING:
    from ropewalk.tools.pictures import Figure

__all__ = ["Flags", "Target", "plot_bias", "plot_decay", "plot_frequencies", "plot_rotation", "plot_sinusoidal"]

# A length that nobody gave is the longest trained one, but no longer than this: seconds, not minutes.
USUAL_LONGEST = 1 << 17
# Distances farther than this are not drawn: their cosines would take minutes.
LONGEST = 1 << 20
# What a person can tell apart in one picture.
MOST_ROWS, PANELS = 4, 6
MOST_HEADS = 1024
# Cells of the sinusoidal table.
MOST_CELLS = 1 << 24


@dataclass(frozen=True)
class Target:
    """Where a picture and its numbers go; its heading and its dots an inch, if not the usual ones."""

    out: str | None = None
    json_file: str | None = None
    title: str | None = None
    dpi: int | None = None

    def check(self, asked: str) -> None:
        """Refuses what cannot be written before any work is done; a missing matplotlib too."""
        if self.out is None and self.json_file is None:
            raise RopewalkError(
                asked=asked,
                expected="--out FILE.png or --out FILE.svg for a picture, or --json FILE for the numbers",
                got="neither",
                do="say where the picture goes: --out picture.svg",
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
                expected="20 to 1200 dots an inch, of an --out that ends in .png",
                got=f"{self.dpi} for {self.out}",
                do="leave --dpi out: other kinds of pictures have no dots",
            )

    def heading(self, usual: str) -> str:
        """The heading that was asked for, else the usual one."""
        return usual if self.title is None else self.title

    def write(self, numbers: Any, draw: Callable[[], "Figure"]) -> int:
        """Draws, writes, says what was written, and returns 0."""
        # With the JSON on standard output, all that is for people goes to the other stream.
        console = Console(stderr=self.json_file == "-", highlight=False, markup=False)
        if self.out is not None:
            from ropewalk.tools.pictures import DPI, save

            save(draw(), self.out, self.dpi or DPI)
        if self.json_file is not None:
            write_json(as_lists(numbers), self.json_file)
        for what, where in (("picture", self.out), ("numbers", self.json_file)):
            if where not in (None, "-"):
                console.print(f"{what}: {where}", markup=False, soft_wrap=True)
        return 0


def _figures() -> Any:
    """The drawing, which needs matplotlib."""
    from ropewalk.tools.plot import figures

    return figures


def plot_decay(
    configs: Sequence[str], target: Target, flags: Flags, length: int | None = None, pairing: str | None = None
) -> int:
    """RoFormer's bound and the score of parallel vectors over the distance, with the means of bands."""
    asked = "ropewalk plot decay"
    target.check(asked)
    length = _length(length, asked, at_least=3)
    curves = rotations(configs, flags, pairing, asked)
    if length is None:
        length = min(max((curve.trained for curve in curves if curve.trained), default=4096), USUAL_LONGEST)
    with Console(stderr=True).status("summing cosines"):
        found = [(curve, decay_of(curve, length)) for curve in curves]
    numbers = [_named(curve) | asdict(one) for curve, one in found]
    heading = target.heading("Long-term decay" + _alone(curves))
    return target.write(numbers, lambda: _figures().decay(found, heading))


def plot_frequencies(
    configs: Sequence[str], target: Target, flags: Flags, length: int | None = None, pairing: str | None = None
) -> int:
    """The period of every pair, and which pairs finish a turn within the trained length."""
    asked = "ropewalk plot frequencies"
    target.check(asked)
    length = _length(length, asked)
    curves = rotations(configs, flags, pairing, asked)
    numbers = [_named(curve) | _frequencies(curve, length) for curve in curves]
    heading = target.heading("Positions that a pair needs for one turn" + _alone(curves))
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
    """Pairs as points that turn with the position; places that training never saw in another colour."""
    asked = "ropewalk plot rotation"
    target.check(asked)
    length = _length(length, asked, at_least=2)
    curves = rotations(configs, flags, pairing, asked, most=MOST_ROWS, paired=True)
    if length is None:
        known = [curve.configured or curve.trained for curve in curves]
        length = max((each for each in known if each), default=4096)
    for curve in curves:
        for pair in pairs:
            if not 0 <= pair < curve.spec.turning // 2:
                raise RopewalkError(
                    asked=f"{asked} --pair {pair}",
                    expected=f"a pair from 0 to {curve.spec.turning // 2 - 1}, those of {curve.name}",
                    got=f"{pair}",
                    do="0 is the fastest, the last the slowest",
                )
    if len(pairs) > PANELS:
        raise RopewalkError(
            asked=f"{asked} --pair ...",
            expected=f"at most {PANELS} pairs in a picture",
            got=f"{len(pairs)}",
            do="draw several pictures",
        )
    chosen = [list(pairs) or _spread(curve.spec.turning // 2) for curve in curves]
    numbers = [
        _named(curve) | {"length": length, "pairs": [_pair(curve, pair, length) for pair in own]}
        for curve, own in zip(curves, chosen, strict=True)
    ]
    heading = target.heading(f"Pairs over {length:,} positions, which grow outwards" + _alone(curves))
    return target.write(numbers, lambda: _figures().rotation(curves, chosen, length, heading))


def _spread(pairs: int) -> list[int]:
    """As many pairs as there is room for, from the fastest to the slowest in even steps."""
    return np.unique(np.linspace(0, pairs - 1, PANELS).round().astype(int)).tolist()


def _pair(curve: Curve, pair: int, length: int) -> dict[str, Any]:
    theta = curve.inv_freq(length)[pair]
    turns = {"turns": length * theta / (2 * np.pi)}
    turns |= {} if curve.trained is None else {"turns_in_training": curve.trained * theta / (2 * np.pi)}
    return {"pair": pair, "features": curve.features(pair), "inv_freq": theta} | turns


def plot_bias(
    config: str | None,
    target: Target,
    num_heads: int | None = None,
    buckets: int | None = None,
    max_distance: int | None = None,
    length: int | None = None,
) -> int:
    """ALiBi's bias of every head and T5's buckets over the distance; of a config, the one that the model has."""
    asked = "ropewalk plot bias"
    target.check(asked)
    length = _length(length, asked, at_least=2) or 256
    alibi = t5 = True
    if config is not None:
        if (num_heads, buckets, max_distance) != (None, None, None):
            raise either(asked, "--num-heads, --buckets and --max-distance")
        alibi, t5, num_heads, buckets, max_distance = _bias_of(config, asked)
    for option, given, most in (
        ("--num-heads", num_heads, MOST_HEADS),
        ("--buckets", buckets, MOST_HEADS),
        ("--max-distance", max_distance, LONGEST),
    ):
        if given is not None and given > most:
            raise RopewalkError(
                asked=f"{asked} {option} {given}",
                expected=f"at most {most}",
                got=f"{given}",
                do=f"lower {option}: no model has so many",
            )
    slopes = alibi_slopes(8 if num_heads is None else num_heads) if alibi else None
    how = {
        "num_buckets": 32 if buckets is None else buckets,
        "max_distance": 128 if max_distance is None else max_distance,
    }
    distance, steps = np.arange(length), {}
    if t5:
        for name, causal in (("decoder", True), ("encoder", False)):
            steps[name] = t5_buckets(-distance, causal=causal, **how)
    found = {} if slopes is None else {"alibi": {"slopes": slopes, "bias": -slopes[:, None] * distance}}
    found |= {"t5": how | {"bucket": steps}} if t5 else {}
    heading = target.heading("What is added to a score" if config is None else as_text(Path(config).stem))
    return target.write({"distance": distance} | found, lambda: _figures().bias(distance, slopes, steps, heading))


def _bias_of(config: str, asked: str) -> tuple[bool, bool, int | None, int | None, int | None]:
    """Whether the model has ALiBi, whether T5's buckets; its heads, buckets and farthest distance."""
    refuse_other_files(config, f"{asked} {config}")
    keys = Keys(read_config(config))
    name, buckets = keys.text("model_type"), "relative_attention_num_buckets"
    if keys.has(buckets):
        far = keys.whole("relative_attention_max_distance", 128)
        return False, True, None, keys.whole(buckets), far
    inner = Keys(keys.part("attn_config"), "attn_config")
    if name == "bloom" or keys.flag("alibi", False) or inner.flag("alibi", False):
        if inner.number("alibi_bias_max", 8.0) != 8.0:
            raise RopewalkError(
                asked=f"{asked} {config}",
                expected="the slopes of ALiBi's paper: alibi_bias_max 8",
                got=f"{inner.raw('alibi_bias_max')}",
                do="no other slopes are drawn",
            )
        heads = next((key for key in ("n_head", "n_heads", "num_attention_heads") if keys.has(key)), "n_head")
        return True, False, keys.whole(heads), None, None
    raise RopewalkError(
        asked=f"{asked} {config}",
        expected="the config of a model with ALiBi (bloom, mpt, falcon with alibi) or T5's buckets",
        got=f"model_type {name!r} with neither",
        do="leave the config out and give --num-heads; `ropewalk plot decay` draws a RoPE",
    )


def plot_sinusoidal(target: Target, dim: int = 64, base: float = 10_000.0, length: int = 128) -> int:
    """The sinusoidal table of Vaswani et al. as an image."""
    asked = "ropewalk plot sinusoidal"
    target.check(asked)
    require_count(length, asked=f"{asked} --length", do="give how many positions the table has", at_least=2)
    if length * dim > MOST_CELLS:
        raise RopewalkError(
            asked=f"{asked} --dim {dim} --length {length}",
            expected=f"a table of at most {MOST_CELLS} numbers",
            got=f"{length * dim}",
            do="lower --dim or --length: a picture has fewer dots than that",
        )
    table = sinusoidal_table(np.arange(length), dim, base)
    heading = target.heading(f"Sinusoidal encoding, d = {dim}, base {base:,.12g}")
    return target.write({"dim": dim, "base": base, "table": table}, lambda: _figures().sinusoidal(table, heading))


def _named(curve: Curve) -> dict[str, Any]:
    return {"name": curve.name, "trained_length": curve.trained, "configured_length": curve.configured}


def _alone(curves: Sequence[Curve]) -> str:
    """What a heading says of a picture with a single rotation, whose name no legend shows."""
    if len(curves) > 1:
        return ""
    # "d = 128" stays in one line.
    return f": {as_text(curves[0].name)}, d\N{NO-BREAK SPACE}=\N{NO-BREAK SPACE}{curves[0].spec.turning}"


def _length(length: int | None, asked: str, at_least: int = 1) -> int | None:
    if length is None:
        return None
    do = "give how many positions to look at"
    length = require_count(length, asked=f"{asked} --length", do=do, at_least=at_least)
    if length > LONGEST:
        raise RopewalkError(
            asked=f"{asked} --length {length}", expected=f"at most {LONGEST}", got=f"{length}", do="lower --length"
        )
    return length
