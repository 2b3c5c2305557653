"""What an extension does to the frequencies of a model, and how far theory says that it carries."""

import dataclasses

import numpy as np

from ropewalk.hub.extend.rules import Start
from ropewalk.spec.frequencies import Plain, Proportional
from ropewalk.spec.rope import RopeSpec
from ropewalk.theory.bands import KINDS, Kind, classify, turns
from ropewalk.theory.context import critical_dimension, extrapolation_limit, first_negative_distance

__all__ = ["Effect", "effect_of", "trained_turns"]


@dataclasses.dataclass(frozen=True)
class Effect:
    """What became of the pairs, against the plain frequencies of training, at the length that was asked for.

    `inv_freq` are the frequencies of the spec, `plain` those of training, without a sign. `counts` are the pairs of
    each kind and `divided` is what the slowest frequency is divided by. `slowest` is how often the slowest pair turns
    within the length. `negative` is the first distance with a negative score sum, None if there is none up to the
    length, by the features that turn. `seen` is the length up to which no pair that never finished a turn in training
    passes the angles it saw there, None if all finished one. `limit` is the scaling law's, for rules that change the
    base alone.
    """

    inv_freq: tuple[float, ...]
    plain: tuple[float, ...]
    counts: dict[Kind, int]
    divided: float
    slowest: float
    amplitude: float
    softmax_scale: float
    negative: int | None
    seen: float | None
    limit: float | None


def effect_of(start: Start, spec: RopeSpec, length: int, base: float | None = None) -> Effect:
    """The effect of the spec that an extension gives; `base` is its new base, where it changes that alone.

    >>> from ropewalk.hub.extend.rules import extensions
    >>> start = Start("", RopeSpec(128), 10_000.0, 4096, 4096)
    >>> pi = effect_of(start, extensions(start, 16384)[0].spec, 16384)
    >>> pi.counts["interpolated"], pi.divided, pi.seen
    (64, 4.0, 16384.0)
    """
    plain = _plain(start)
    now = np.abs(spec.inv_freq(length))
    moving = now > 0
    # What never turned is still, and has no ratio.
    kinds = classify(now, np.where(plain > 0, plain, 1.0))
    unfinished = moving & (turns(plain, start.trained) < 1)
    seen = start.trained * (plain[unfinished] / now[unfinished]).min() if unfinished.any() else None
    limit = None
    if base is not None and start.trained >= 7:
        limit = extrapolation_limit(base, start.dim, critical_dimension(start.dim, start.base, start.trained))
    return Effect(
        inv_freq=tuple(spec.inv_freq(length).tolist()),
        plain=tuple(plain.tolist()),
        counts={kind: kinds.count(kind) for kind in KINDS},
        divided=float((plain[moving] / now[moving]).max()),
        slowest=float(turns(now[moving], length).min()),
        amplitude=spec.amplitude(length),
        softmax_scale=spec.softmax_scale,
        negative=first_negative_distance(now, length + 1),
        seen=None if seen is None else float(seen),
        limit=limit,
    )


def trained_turns(start: Start) -> float:
    """How often the slowest pair turned in training.

    >>> round(trained_turns(Start("", RopeSpec(128), 10_000.0, 4096, 4096)), 4)
    0.0753
    """
    plain = _plain(start)
    return float(turns(plain[plain > 0], start.trained).min())


def _plain(start: Start) -> "np.ndarray[tuple[int], np.dtype[np.float64]]":
    own = start.spec.frequencies
    # Pairs that stand still by p-RoPE did so in training.
    rule = dataclasses.replace(own, factor=1.0) if isinstance(own, Proportional) else Plain(start.base)
    return np.abs(dataclasses.replace(start.spec, frequencies=rule).inv_freq())
