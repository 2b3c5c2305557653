"""Axes: which position rotates which pair, for tokens with several positions, such as time, height and width."""

import dataclasses
from collections.abc import Sequence
from itertools import groupby
from typing import final

import numpy as np

from ropewalk.errors import RopewalkError, as_int, require_count, shown
from ropewalk.shapes import Float64
from ropewalk.signatures import checks_names
from ropewalk.spec.fields import SupportsToList, as_list, as_rows
from ropewalk.spec.frequencies import ConfigValue

__all__ = ["Axes"]


@final
@checks_names
@dataclasses.dataclass(frozen=True, init=False, repr=False)
class Axes:
    """RoPE over A position axes, as the matrix F[a, i] = weights[a][i] * theta[index[i]] with angles p @ F.

    Pair i of a token at positions p_0 .. p_(A-1) is rotated by the sum over a of p_a * F[a, i]. A column of `weights`
    has a single 1, at the axis of that pair, except in models with learned mixtures of axes.

    Usually one of the static methods constructs the value. There is one for each layout that models use.

    Args:
        weights: Weight of each axis in each pair [axes, pairs]: sequences, an array or a tensor. Two axes or more.
        index: Index of each pair's frequency in the rule's frequencies [pairs].
        dim: The rotary_dim for which the rule is evaluated: the whole rotary_dim if the axes share one sequence of
            frequencies (M-RoPE), a part of it if each axis has its own sequence (vision). Even.

    Raises:
        RopewalkError: If the arguments do not fit each other.

    >>> axes = Axes.chunked([1, 1])  # axis 0 rotates pair 0, axis 1 rotates pair 1
    >>> axes.matrix(np.array([1.0, 0.01])).tolist()
    [[1.0, 0.0], [0.0, 0.01]]
    """

    weights: tuple[tuple[float, ...], ...]
    index: tuple[int, ...]
    dim: int

    def __init__(
        self, weights: Sequence[Sequence[float]] | SupportsToList, index: Sequence[int] | SupportsToList, dim: int
    ) -> None:
        rows = as_rows(weights) or ()
        features = require_count(dim, asked="Axes(dim=...)", do="pass the rotary_dim for which the rule is evaluated")
        indices = [as_int(i) for i in as_list(index)]
        inside = tuple(i for i in indices if i is not None and 0 <= i < features // 2)
        if len(rows) < 2 or not len(rows[0]) == len(indices) == len(inside) or features % 2:
            raise RopewalkError(
                asked="Axes(weights, index, dim)",
                expected="two axes or more, one row of finite numbers per axis, one index below dim / 2 per pair",
                got=f"weights {shown(weights)}, index {shown(index)}, dim {dim}",
                do="use Axes.chunked, Axes.interleaved, Axes.repeated, ...",
            )
        object.__setattr__(self, "weights", rows)
        object.__setattr__(self, "index", inside)
        object.__setattr__(self, "dim", features)

    def __repr__(self) -> str:
        runs = "".join(f" {name}" + (f"x{n}" if (n := len(list(run))) > 1 else "") for name, run in groupby(self.names))
        return f"Axes({self.count} axes, pairs{runs}, of {self.dim} features)"

    @property
    def count(self) -> int:
        """Number of axes: positions per token.

        >>> Axes.chunked([16, 24, 24]).count
        3
        """
        return len(self.weights)

    @property
    def pairs(self) -> int:
        """Number of rotated pairs: half of rotary_dim.

        >>> Axes.chunked([16, 24, 24]).pairs
        64
        """
        return len(self.index)

    def matrix(self, inv_freq: Float64[np.ndarray, "*heads pairs"]) -> Float64[np.ndarray, "*heads axes pairs"]:
        """Return the matrix F.

        Args:
            inv_freq: Frequencies of the pairs [*heads, pairs].

        Returns:
            F [*heads, axes, pairs].

        >>> Axes.repeated(2, 4).matrix(np.array([1.0, 1.0])).tolist()
        [[1.0, 0.0], [0.0, 1.0]]
        """
        return np.array(self.weights) * inv_freq[..., None, :]

    @property
    def names(self) -> str:
        """The axis of each pair as one character: T, H or W if there are three axes, else a digit; ? for a mixture.

        >>> Axes.interleaved([2, 1, 1]).names
        'THWT'
        """
        letters = "THW" if self.count == 3 else "0123456789"
        columns = zip(*self.weights, strict=True)
        alone = (sum(weight != 0 for weight in column) == 1 for column in zip(*self.weights, strict=True))
        return "".join(
            letters[[weight != 0 for weight in column].index(True)] if one else "?"
            for column, one in zip(columns, alone, strict=True)
        )

    def to_config(self) -> dict[str, ConfigValue]:
        """Return the rope parameters that specify these axes in transformers.

        Returns:
            The sections, or {} for vision towers, whose axes are fixed by the model family.

        Raises:
            RopewalkError: If transformers does not support these axes.

        >>> Axes.interleaved([2, 1, 1]).to_config()
        {'mrope_section': [2, 1, 1], 'mrope_interleaved': True}
        """
        sections = [int(sum(row)) for row in self.weights]
        if any(sections) and self == Axes.chunked(sections):
            return {"mrope_section": sections}
        if any(sections) and self == Axes.interleaved(sections, self.pairs):
            return {"mrope_section": sections, "mrope_interleaved": True}
        if self.count == 3 and sections[1] == sections[2] and any(sections):
            ernie = [sections[1], sections[2], sections[0]]
            if self == Axes.ernie(ernie):
                return {"mrope_section": ernie}
        strided = self.dim % (2 * self.count) == 0 and self == Axes.strided(self.count, self.dim)
        if self.dim < 2 * self.pairs or strided:
            # The axes of vision towers are fixed by the model family.
            return {}
        raise RopewalkError(
            asked='to_config("transformers") of Axes',
            expected="axes that a model family of transformers uses",
            got=repr(self),
            do="keep the spec as JSON: RopeSpec.to_json",
        )

    @staticmethod
    def chunked(sections: Sequence[int]) -> "Axes":
        """One sequence of frequencies, split into one section per axis, highest first: Qwen2-VL, HunYuan-VL.

        Args:
            sections: Number of pairs per axis.

        >>> Axes.chunked([2, 3, 3]).names
        'TTHHHWWW'
        """
        sections = _sections(sections)
        return _shared([axis for axis, size in enumerate(sections) for _ in range(size)], len(sections))

    @staticmethod
    def interleaved(sections: Sequence[int], pairs: int | None = None) -> "Axes":
        """One sequence of frequencies, assigned to the axes alternately, the rest to axis 0: Qwen3-VL.

        Args:
            sections: Number of pairs per axis.
            pairs: Number of all pairs. Default: the sum of the sections.

        >>> Axes.interleaved([4, 2, 2]).names
        'THWTHWTT'
        """
        sections = _sections(sections)
        count = len(sections)
        do = "leave it out to use the sum of the sections"
        pairs = sum(sections) if pairs is None else require_count(pairs, asked="Axes.interleaved(pairs=...)", do=do)
        axes = [i % count if i % count and i < count * sections[i % count] else 0 for i in range(pairs)]
        return _shared(axes, count)

    @staticmethod
    def ernie(sections: Sequence[int]) -> "Axes":
        """Height and width alternate on the high frequencies, time has the low ones: ERNIE 4.5 VL.

        Positions are in the order t, h, w, as for all other axes.

        Args:
            sections: Number of pairs per axis in the order [h, w, t], with h equal to w.

        >>> Axes.ernie([2, 2, 1]).names
        'HWHWT'
        """
        sections = _sections(sections)
        if len(sections) != 3 or sections[0] != sections[1]:
            raise RopewalkError(
                asked="Axes.ernie(sections)",
                expected="three sections [h, w, t] with h equal to w",
                got=shown(sections),
                do="copy mrope_section from the config",
            )
        return _shared([1 + i % 2 for i in range(2 * sections[0])] + [0] * sections[2], 3)

    @staticmethod
    def rarest_first(sections: Sequence[int]) -> "Axes":
        """Each axis is spread evenly over the frequencies, and axis 0 has the last pair: openPangu (as in vLLM).

        Each pair is assigned to the axis that has received the smallest fraction of its section so far. The axis of the
        previous pair is skipped if another one is available.

        Args:
            sections: Number of pairs per axis.

        >>> Axes.rarest_first([2, 2, 2]).names
        'THWHWT'
        """
        sections = _sections(sections)
        if not sections[0]:
            raise RopewalkError(
                asked="Axes.rarest_first(sections)",
                expected="at least one pair for axis 0, which has the last pair",
                got=shown(sections),
                do="copy mrope_section from the config",
            )
        return _shared(_spread(sections), len(sections))

    @staticmethod
    def repeated(count: int, rotary_dim: int) -> "Axes":
        """Each axis has all frequencies of rotary_dim / count features, one axis after the other: vision, 3-D video.

        Args:
            count: Number of axes.
            rotary_dim: Number of rotated features, a multiple of 2 * count.

        >>> axes = Axes.repeated(2, 8)
        >>> axes.names, axes.index, axes.dim
        ('0011', (0, 1, 0, 1), 4)
        """
        pairs = _pairs_per_axis(count, rotary_dim, "Axes.repeated")
        axes = [axis for axis in range(count) for _ in range(pairs)]
        return Axes(_one_hot(axes, count), tuple(range(pairs)) * count, 2 * pairs)

    @staticmethod
    def alternating(count: int, rotary_dim: int) -> "Axes":
        """As `repeated`, but the axes alternate: Kimi's vision tower.

        Args:
            count: Number of axes.
            rotary_dim: Number of rotated features, a multiple of 2 * count.

        >>> axes = Axes.alternating(2, 8)
        >>> axes.names, axes.index
        ('0101', (0, 0, 1, 1))
        """
        pairs = _pairs_per_axis(count, rotary_dim, "Axes.alternating")
        index = tuple(i for i in range(pairs) for _ in range(count))
        return Axes(_one_hot(list(range(count)) * pairs, count), index, 2 * pairs)

    @staticmethod
    def strided(count: int, rotary_dim: int) -> "Axes":
        """One sequence of frequencies, of which axis a has every count-th, starting with index a: Pixtral.

        The pairs of axis 0 come first, then those of axis 1, and so on.

        Args:
            count: Number of axes.
            rotary_dim: Number of rotated features, a multiple of 2 * count.

        >>> axes = Axes.strided(2, 8)
        >>> axes.names, axes.index
        ('0011', (0, 2, 1, 3))
        """
        pairs = _pairs_per_axis(count, rotary_dim, "Axes.strided")
        axes = [axis for axis in range(count) for _ in range(pairs)]
        index = tuple(axis + count * i for axis in range(count) for i in range(pairs))
        return Axes(_one_hot(axes, count), index, rotary_dim)


def _shared(axes: list[int], count: int) -> Axes:
    return Axes(_one_hot(axes, count), tuple(range(len(axes))), 2 * len(axes))


def _one_hot(axes: list[int], count: int) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(float(axis == a) for axis in axes) for a in range(count))


def _sections(sections: object) -> list[int]:
    sizes = [as_int(size) for size in as_list(sections)]
    counted = [size for size in sizes if size is not None and size >= 0]
    if len(counted) != len(sizes) or not any(counted):
        raise RopewalkError(
            asked="Axes of sections",
            expected="a list of integers: the number of pairs per axis",
            got=shown(sections),
            do="copy mrope_section from the config, for example [16, 24, 24]",
        )
    return counted


def _pairs_per_axis(count: object, rotary_dim: object, asked: str) -> int:
    axes = require_count(count, asked=f"{asked}(count, ...)", do="pass the number of axes")
    dim = require_count(rotary_dim, asked=f"{asked}(..., rotary_dim)", do="pass the number of rotated features")
    if dim % (2 * axes):
        raise RopewalkError(
            asked=f"{asked}({axes}, {dim})",
            expected=f"a rotary_dim that {axes} axes of whole pairs divide: a multiple of {2 * axes}",
            got=f"{dim}",
            do=f"rotate {dim - dim % (2 * axes)} features: RopeSpec(rotary_dim={dim - dim % (2 * axes)})",
        )
    return dim // (2 * axes)


def _spread(sections: list[int]) -> list[int]:
    # One pair of axis 0 is reserved for the end.
    sizes = [sections[0] - 1, *sections[1:]]
    assigned, order = [0] * len(sizes), list[int]()
    for _ in range(sum(sizes)):
        free = [axis for axis, size in enumerate(sizes) if assigned[axis] < size]
        others = [axis for axis in free if order[-1:] != [axis]]
        axis = min(others or free, key=lambda axis: (assigned[axis] / sizes[axis], axis))
        assigned[axis] += 1
        order.append(axis)
    return [*order, 0]
