"""The numbers behind the pictures of notes 000 to 004: what a note or a paper states, and what is computed here."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ropewalk.spec.frequencies import AcrossHeads, Plain
from ropewalk.spec.rope import Pairing, RopeSpec
from ropewalk.theory import decay_curve, periods, score_sum
from ropewalk.theory.encodings import t5_buckets
from ropewalk.tools.plot.curves import Curve, Decay, decay_of

__all__ = [
    "FIGURE_2_LONGEST",
    "NOTE_SCORES",
    "NOTE_THETA",
    "Bound",
    "Heads",
    "Mark",
    "Matrix",
    "Plane",
    "Score",
    "T5Bias",
    "bound_of",
    "heads_of",
    "lowest_band",
    "matrix_of",
    "planes",
    "score_of_note",
    "t5_bias",
]

# The x axis of RoFormer's figure 2 (2104.09864) ends here.
FIGURE_2_LONGEST = 250
# The three frequencies of note 002 (line 315), and the sums that it states (lines 319 and 321), by distance.
NOTE_THETA = (1.0, 0.3, 0.05)
NOTE_SCORES = {0: 3.0, 2: 1.4, 20: 1.4, 50: -0.6}


@dataclass(frozen=True)
class Bound:
    """The mean of |S_j| at distances 0 to 250, as in RoFormer's figure 2, and the same up to a longer distance."""

    distance: NDArray[np.int64]
    bound: NDArray[np.float64]
    decay: Decay


def bound_of(curve: Curve, length: int) -> Bound:
    """The bound of RoFormer's figure 2 on the axes of the paper, and at distances below `length`."""
    distance = np.arange(FIGURE_2_LONGEST + 1)
    return Bound(distance, decay_curve(distance, curve.inv_freq(length)), decay_of(curve, length))


def lowest_band(edges: list[int], means: NDArray[np.float64]) -> tuple[int, int, float]:
    """The first and last edge of the band with the lowest mean, and this mean.

    >>> lowest_band([1, 32, 64, 128], np.array([9.0, 4.0, 5.0]))
    (32, 64, 4.0)
    """
    lowest = int(np.argmin(means))
    return edges[lowest], edges[lowest + 1], float(means[lowest])


@dataclass(frozen=True)
class Mark:
    """A sum that note 002 states for a distance, and the sum that is computed."""

    distance: int
    stated: float
    computed: float


@dataclass(frozen=True)
class Score:
    """S(Δ) of note 002, line 317, and its marks."""

    inv_freq: tuple[float, ...]
    distance: NDArray[np.float64]
    score: NDArray[np.float64]
    marks: list[Mark]


def score_of_note() -> Score:
    """S(Δ) = cos Δ + cos 0.3Δ + cos 0.05Δ from 0 to 60 in steps of 0.1, with the note's four distances as marks."""
    distance = np.arange(601) / 10
    marks = [Mark(at, stated, float(score_sum(at, NOTE_THETA))) for at, stated in NOTE_SCORES.items()]
    return Score(NOTE_THETA, distance, score_sum(distance, NOTE_THETA), marks)


@dataclass(frozen=True)
class Matrix:
    """The block-diagonal matrix R_m [dim, dim], and where it differs from 0.

    Attributes:
        position: The position m.
        inv_freq: The frequencies [pairs].
        features: The two features of every pair.
        matrix: R_m. It multiplies column vectors.
    """

    position: int
    inv_freq: NDArray[np.float64]
    features: list[tuple[int, int]]
    matrix: NDArray[np.float64]


def matrix_of(dim: int, position: int, base: float, pairing: Pairing) -> Matrix:
    """R_m, with one 2 x 2 rotation by m theta_i per pair.

    >>> matrix_of(2, 1, 10_000.0, "interleaved").matrix.round(3).tolist()
    [[0.54, -0.841], [0.841, 0.54]]
    """
    curve = Curve("", RopeSpec(dim, Plain(base), pairing=pairing))
    theta, features = curve.inv_freq(), [curve.features(pair) for pair in range(dim // 2)]
    matrix = np.zeros((dim, dim))
    for angle, (first, second) in zip(position * theta, features, strict=True):
        matrix[first, first] = matrix[second, second] = np.cos(angle)
        matrix[first, second], matrix[second, first] = -np.sin(angle), np.sin(angle)
    return Matrix(position, theta, features, matrix)


@dataclass(frozen=True)
class Heads:
    """The periods of all pairs [heads, pairs], if d_model is rotated before the split and if every head is rotated."""

    num_heads: int
    head_dim: int
    base: float
    before_split: NDArray[np.float64]
    per_head: NDArray[np.float64]


def heads_of(num_heads: int, head_dim: int, base: float) -> Heads:
    """The periods of both rotations.

    >>> heads_of(2, 2, 10_000.0).before_split.round(2).tolist()  # d_model = 4: frequencies 1 and 0.01
    [[6.28], [628.32]]
    >>> heads_of(2, 2, 10_000.0).per_head.round(2).tolist()
    [[6.28], [6.28]]
    """
    across = RopeSpec(head_dim, AcrossHeads(base, num_heads=num_heads)).inv_freq()
    each = periods(RopeSpec(head_dim, Plain(base)).inv_freq())
    before_split = np.stack([periods(row) for row in np.atleast_2d(across)])
    return Heads(num_heads, head_dim, base, before_split, np.tile(each, (num_heads, 1)))


@dataclass(frozen=True)
class Plane:
    """A query and a key in the plane as complex numbers, before and after they are rotated by mθ and nθ."""

    theta: float
    m: int
    n: int
    query: complex
    key: complex

    @property
    def rotated(self) -> tuple[complex, complex]:
        """The rotated query and the rotated key."""
        vectors = ((self.query, self.m), (self.key, self.n))
        query, key = (complex(vector * np.exp(1j * position * self.theta)) for vector, position in vectors)
        return query, key

    @property
    def score(self) -> float:
        """The scalar product of the rotated vectors."""
        query, key = self.rotated
        return (query * key.conjugate()).real


def planes() -> list[Plane]:
    """The same two vectors at positions (5, 3) and (10, 8): the distance is 2 in both.

    >>> [round(plane.score, 6) for plane in planes()]
    [0.209012, 0.209012]
    """
    query, key = complex(0.6 * np.exp(0.4j)), complex(0.5 * np.exp(1.9j))
    return [Plane(0.35, m, n, query, key) for m, n in ((5, 3), (10, 8))]


@dataclass(frozen=True)
class T5Bias:
    """T5's buckets in a decoder and in an encoder, and a table of biases that is stated, not learned.

    Attributes:
        distance: Distances Δ of keys before the query.
        bucket: The bucket of each distance, for "decoder" and "encoder".
        table: The bias of each bucket of the decoder: -ln(1 + the least distance of the bucket).
        bias: The bias of each distance in the decoder. It is added to q·k.
    """

    distance: NDArray[np.int64]
    bucket: dict[str, NDArray[np.int64]]
    table: NDArray[np.float64]
    bias: NDArray[np.float64]


def t5_bias(length: int, num_buckets: int, max_distance: int) -> T5Bias:
    """The buckets of distances below `length`, and the bias of the stated table.

    >>> t5_bias(3, 32, 128).bias.round(3).tolist()
    [0.0, -0.693, -1.099]
    """
    distance = np.arange(length)
    bucket = {
        name: t5_buckets(-distance, causal=causal, num_buckets=num_buckets, max_distance=max_distance)
        for name, causal in (("decoder", True), ("encoder", False))
    }
    # Every bucket has a distance up to max_distance.
    everything = t5_buckets(
        -np.arange(max_distance + 1), causal=True, num_buckets=num_buckets, max_distance=max_distance
    )
    table = np.log(1 / (1 + np.searchsorted(everything, np.arange(num_buckets))))
    return T5Bias(distance, bucket, table, table[bucket["decoder"]])
