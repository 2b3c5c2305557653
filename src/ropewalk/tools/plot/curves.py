"""The numbers behind `ropewalk plot`: rotations of configs or options, with their names and curves."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from ropewalk.errors import RopewalkError, require_choice
from ropewalk.spec import Frequencies
from ropewalk.spec.rope import PAIRINGS, RopeSpec
from ropewalk.theory import band_means, decay_curve, score_sum
from ropewalk.tools.command_config import read_named_config

__all__ = ["RULES", "Curve", "Decay", "Flags", "as_lists", "as_text", "decay_of", "either", "octaves", "rotations"]

# Rules that are defined by a base, a factor and a trained length, by their names on the command line.
RULES: dict[str, type[Frequencies]] = {
    rule.option: rule for rule in Frequencies.known.values() if rule.option is not None
}
# The number of curves that remain readable in one picture.
MOST_CURVES = 6
# The first band contains the steep start. Every other band is an octave.
_FIRST_EDGE = 32
# The number of distances whose angles are in memory at the same time.
_BLOCK = 4096
# The maximum number of distances that are drawn: more are not distinguishable on paper.
_DRAWN = 4096


@dataclass(frozen=True)
class Flags:
    """Rotations without a config: the values of --dim, --base, --rule, --factor and --trained-length."""

    dim: int | None = None
    bases: tuple[float, ...] = ()
    rules: tuple[str, ...] = ()
    factor: float | None = None
    trained: int | None = None


@dataclass(frozen=True)
class Curve:
    """A rotation, its name in a legend, and its trained and configured lengths, if known."""

    name: str
    spec: RopeSpec
    trained: int | None = None
    configured: int | None = None

    def inv_freq(self, length: int | None = None) -> NDArray[np.float64]:
        """The magnitudes of the frequencies, [pairs], for text, where a token has the same position on every axis."""
        theta = self.spec.inv_freq(length)
        return np.abs(theta if self.spec.axes is None else self.spec.axes.matrix(theta).sum(axis=0))

    def features(self, pair: int) -> tuple[int, int]:
        """The indices of the two features of a head that form a pair.

        >>> Curve("", RopeSpec(8, rotary_dim=4, pairing="half", rotary_slice="trailing")).features(1)
        (5, 7)
        """
        start = self.spec.head_dim - self.spec.rotated_dim if self.spec.rotary_slice == "trailing" else 0
        if self.spec.pairing == "half":
            return start + pair, start + pair + self.spec.rotated_dim // 2
        return start + 2 * pair, start + 2 * pair + 1


@dataclass(frozen=True)
class Decay:
    """The bound of RoFormer's figure 2 and the score of parallel pairs of norm 1, single distances and band means."""

    distance: NDArray[np.int64]
    bound: NDArray[np.float64]
    score: NDArray[np.float64]
    edges: list[int]
    bound_means: NDArray[np.float64]
    score_means: NDArray[np.float64]


def as_text(name: str) -> str:
    """Escape a name for matplotlib: $ starts no formula, and a leading _ does not hide the name from a legend.

    >>> as_text("_a$b")
    './_a\\\\$b'
    """
    return ("./" if name.startswith("_") else "") + name.replace("$", r"\$")


def either(asked: str, flags: str) -> RopewalkError:
    """The error for a config together with options that the config defines."""
    return RopewalkError(
        asked=asked,
        expected=f"a config, or {flags} instead of one",
        got="both",
        do="leave out one of them: a config defines these itself",
    )


def rotations(
    configs: Sequence[str], flags: Flags, pairing: str | None, asked: str, most: int = MOST_CURVES, paired: bool = False
) -> list[Curve]:
    """The rotations of configs or options, with distinct names. Notes are printed to standard error.

    Args:
        configs: Paths of configs or model folders.
        flags: Rotations without a config.
        pairing: The pairing, if the model family is unknown, or without a config if `paired`.
        asked: The request, for error messages.
        most: The maximum number of rotations in one picture.
        paired: Whether the picture depends on the pairing.

    Returns:
        One curve per rotation.

    Raises:
        RopewalkError: If the arguments contradict each other, a config cannot be read, or there are too many rotations.
    """
    configs = list(dict.fromkeys(configs))
    if pairing is not None and not configs and not paired:
        raise RopewalkError(
            asked=f"{asked} --pairing {pairing}",
            expected="a config of an unknown model family, to which --pairing applies",
            got="no config",
            do="leave --pairing out: this picture is the same for both pairings",
        )
    if configs and flags != Flags():
        raise either(asked, "--dim, --base, --rule, --factor and --trained-length")
    if configs:
        curves = [curve for config in configs for curve in _of_config(config, pairing, asked)]
        names = [curve.name for curve in curves]
        if len(set(names)) < len(names):
            curves = [curve for config in configs for curve in _of_config(config, pairing, asked, whole_path=True)]
    else:
        curves = _of_flags(flags, pairing, asked)
    if len(curves) > most:
        raise RopewalkError(
            asked=asked,
            expected=f"at most {most} rotations in one picture",
            got=f"{len(curves)}: {', '.join(curve.name for curve in curves)}",
            do="draw more than one picture",
        )
    return curves


def _of_config(config: str, pairing: str | None, asked: str, whole_path: bool = False) -> list[Curve]:
    """The distinct rotations of the layers of a model."""
    # The error message contains the config, because there may be more than one.
    model = read_named_config(config, pairing, f"{asked} {config}")
    name = str(Path(config)) if whole_path else model.name
    kinds: dict[RopeSpec, list[str]] = {}
    for layer, spec in model.layers:
        if spec is not None:
            kinds.setdefault(spec, []).append(layer)
    if not kinds:
        raise RopewalkError(
            asked=f"{asked} {config}",
            expected="a model that rotates queries and keys",
            got=f"{model.name}, which does not",
            do="use `ropewalk plot bias` for ALiBi and T5's buckets",
        )
    if not whole_path:
        notes = Console(stderr=True, highlight=False, markup=False)
        for _, text in model.warnings:
            notes.print(f"note: {name}: {text}", markup=False, soft_wrap=True)
        for layer in [layer for layer, spec in model.layers if spec is None]:
            notes.print(f"note: {name}: layers of type {layer} do not rotate", markup=False, soft_wrap=True)
    names = [name if len(kinds) == 1 else f"{name}, {' and '.join(layers)}" for layers in kinds.values()]
    lengths = model.lengths
    return [Curve(name, spec, lengths.trained, lengths.configured) for name, spec in zip(names, kinds, strict=True)]


def _of_flags(flags: Flags, pairing: str | None, asked: str) -> list[Curve]:
    """One curve per base and rule, named by what differs. Raises if a rule lacks its factor or trained length."""
    bases = dict.fromkeys(flags.bases or (10_000.0,))
    # A rule may also be named by its rope type in configs: linear is pi.
    rules = dict.fromkeys(Frequencies.option_for(rule) for rule in flags.rules or ("plain",))
    options = (("factor", "--factor", flags.factor, 4), ("trained_length", "--trained-length", flags.trained, 4096))
    drawn_pairing = require_choice(pairing or PAIRINGS[0], PAIRINGS, asked=f"{asked} --pairing")
    curves: list[Curve] = []
    for base, name in itertools.product(bases, rules):
        kind = RULES[require_choice(name, RULES, asked=f"{asked} --rule")]
        parameters = {field.name for field in fields(kind)}  # pyright: ignore[reportArgumentType]
        arguments: dict[str, Any] = {"base": base}
        for field, option, value, example in options:
            if field in parameters and value is None:
                raise RopewalkError(
                    asked=f"{asked} --rule {name}",
                    expected=f"also {option}",
                    got=f"no {option}",
                    do=f"add {option}, for example {option} {example}",
                )
            arguments |= {field: value} if field in parameters else {}
        name_parts = [f"base {base:,.12g}"] if len(bases) > 1 or len(rules) == 1 else []
        if len(rules) > 1 or name != "plain":
            name_parts.append(f"{name} ×{flags.factor:g}" if "factor" in parameters else name)
        spec = RopeSpec(128 if flags.dim is None else flags.dim, kind(**arguments), pairing=drawn_pairing)
        curves.append(Curve(", ".join(name_parts), spec, flags.trained))
    if flags.factor is not None and set(rules) == {"plain"}:
        raise RopewalkError(
            asked=f"{asked} --factor {flags.factor:g}",
            expected="a rule that has a factor",
            got="--rule plain, which has none",
            do="add --rule yarn, or leave --factor out",
        )
    return curves


def octaves(length: int) -> list[int]:
    """The edges of the bands up to `length`: 1, 32, 64, 128, ..., and `length` itself.

    >>> octaves(100), octaves(32), octaves(20)
    ([1, 32, 64, 100], [1, 32], [1, 20])
    """
    edges, edge = [1], _FIRST_EDGE
    while edge < length:
        edges.append(edge)
        edge *= 2
    return [*edges, length]


def decay_of(curve: Curve, length: int) -> Decay:
    """The decay at distances 0 to length - 1 in a text of `length` tokens. Means are over all integer distances."""
    theta = curve.inv_freq(length)
    bound, score = (
        np.concatenate([f(np.arange(start, min(start + _BLOCK, length)), theta) for start in range(0, length, _BLOCK)])
        for f in (decay_curve, score_sum)
    )
    edges = octaves(length)
    drawn = np.unique(np.geomspace(1, length - 1, _DRAWN).astype(np.int64)) if length > _DRAWN else np.arange(1, length)
    distance = np.concatenate(([0], drawn))
    return Decay(distance, bound[distance], score[distance], edges, band_means(bound, edges), band_means(score, edges))


def as_lists(value: Any) -> Any:
    """Convert arrays in nested dicts and lists to lists for JSON. Infinite values, such as a period, become None."""
    if isinstance(value, dict):
        return {key: as_lists(entry) for key, entry in value.items()}
    if isinstance(value, np.ndarray | list | tuple):
        return [as_lists(entry) for entry in (value.tolist() if isinstance(value, np.ndarray) else value)]
    return None if isinstance(value, float) and not np.isfinite(value) else value
