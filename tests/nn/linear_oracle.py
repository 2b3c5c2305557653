"""Linear attention as direct sums over pairs of tokens, in float64 NumPy, with a bound for the error of any evaluation.

This shares no code with ropewalk: features, rotation, visibility and sums are written again here. Each quantity has
its value, its size (the same sum with the absolute value of every term) and its steps: an evaluation with unit
roundoff u, in any order of additions, is within about steps * u * size of the value (Higham, Accuracy and Stability of
Numerical Algorithms, section 3.1).
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

ELU, RELU, SQUARED_RELU, IDENTITY, EXP, TWO_SIDED = "elu", "relu", "squared_relu", "identity", "exp", "two_sided"


class Rounding(NamedTuple):
    """How a computation rounds: its unit roundoff, and the smallest number that it does not flush."""

    unit: float
    tiny: float


@dataclass(frozen=True)
class Quantity:
    """Values, their sizes, and how many roundings a term passes through."""

    value: np.ndarray
    size: np.ndarray
    steps: float = 0.0

    @classmethod
    def exact(cls, value: np.ndarray) -> "Quantity":
        return cls(value, np.abs(value))

    def __add__(self, other: "Quantity") -> "Quantity":
        return Quantity(self.value + other.value, self.size + other.size, max(self.steps, other.steps) + 1)

    def __mul__(self, other: "Quantity") -> "Quantity":
        return Quantity(self.value * other.value, self.size * other.size, self.steps + other.steps + 1)

    def __getitem__(self, index: object) -> "Quantity":
        return Quantity(self.value[index], self.size[index], self.steps)

    def reshaped(self, *shape: int) -> "Quantity":
        return Quantity(self.value.reshape(shape), self.size.reshape(shape), self.steps)

    def masked(self, mask: np.ndarray) -> "Quantity":
        """0 outside the mask, whatever is there."""
        return Quantity(np.where(mask, self.value, 0.0), np.where(mask, self.size, 0.0), self.steps)

    def negative(self) -> "Quantity":
        return Quantity(-self.value, self.size, self.steps)

    def bound(self, rounding: Rounding) -> np.ndarray:
        """How far an evaluation may be from the value."""
        return 1.1 * self.steps * rounding.unit * self.size


def contract(spec: str, a: Quantity, b: Quantity, rounding: Rounding, terms: int) -> Quantity:
    """An einsum of two quantities in which each result has at most so many terms."""
    value, size = np.einsum(spec, a.value, b.value), np.einsum(spec, a.size, b.size)
    # Each product may be flushed.
    flushed = np.where(size > 0, terms * rounding.tiny / rounding.unit, 0.0)
    return Quantity(value, size + flushed, a.steps + b.steps + terms + 1)


def quotient(a: Quantity, b: Quantity, rounding: Rounding) -> Quantity:
    """a / b; 0 where b has no term but 0; of infinite size where the bound of b reaches half of b."""
    nothing = b.size == 0
    unknown = ~nothing & (b.bound(rounding) * 2 >= np.abs(b.value))
    divisor = np.where(nothing | unknown, 1.0, b.value)
    share = b.size / np.abs(divisor)
    value = np.where(nothing, 0.0, a.value / divisor)
    size = np.where(nothing, 0.0, a.size / np.abs(divisor) * (1 + 2 * share))
    return Quantity(value, np.where(unknown, np.inf, size), a.steps + b.steps + 2)


def features(x: np.ndarray, name: str, rounding: Rounding, steps: float, *, query: bool) -> tuple[Quantity, np.ndarray]:
    """The features of x and their derivatives. A factor on all features of a query cancels, of which exp makes use."""
    shift = x.max(-1, keepdims=True) if query and name == EXP and x.size else 0.0
    with np.errstate(over="ignore", invalid="ignore"):
        low = np.exp(np.minimum(x, 0.0))
        match name:
            case "elu":
                value, slope = np.where(x > 0, x + 1, low), np.where(x > 0, 1.0, low)
            case "relu":
                value, slope = np.maximum(x, 0.0), (x > 0) * 1.0
            case "squared_relu":
                value, slope = np.maximum(x, 0.0) ** 2, 2 * np.maximum(x, 0.0)
            case "identity":
                value, slope = x, np.ones_like(x)
            case "exp":
                value = slope = np.exp(x - shift)
            case _:
                value = np.concatenate([np.exp(x), np.exp(-x)], -1)
                slope = np.concatenate([np.exp(x), -np.exp(-x)], -1)
    size = (
        np.abs(value) + np.where((value != 0) & (np.abs(value) < 4 * rounding.tiny), rounding.tiny, 0) / rounding.unit
    )
    # The argument of an exponential is rounded too, where a shift was taken off it.
    steps += 4 + (float(np.abs(x - shift).max()) if name == EXP and x.size else 0.0)
    return Quantity(value, size, steps), slope


class Rotation(NamedTuple):
    """Pairs of features, the frequency of each pair, and the sign of the angle."""

    pairs: np.ndarray
    inv_freq: np.ndarray

    def angles(self, positions: np.ndarray) -> np.ndarray:
        return positions[..., None] * self.inv_freq

    def rotated(self, x: Quantity, positions: np.ndarray, rounding: Rounding, *, back: bool = False) -> Quantity:
        """x [batch, heads, seq, width], rotated by its positions [batch, seq]."""
        angles = self.angles(positions)[:, None] * (-1 if back else 1)
        cos, sin = np.cos(angles), np.sin(angles)
        first, second = self.pairs[:, 0], self.pairs[:, 1]
        value, size = x.value.copy(), x.size.copy()
        a, b = x.value[..., first], x.value[..., second]
        value[..., first], value[..., second] = a * cos - b * sin, a * sin + b * cos
        size[..., first] = size[..., second] = x.size[..., first] + x.size[..., second]
        # cos and sin are off by a rounding, and by what float64 does to the angle.
        float64 = 8 * 2.0**-53 * float(np.abs(angles).max(initial=0.0)) / rounding.unit
        return Quantity(value, size, x.steps + 4 + float64)


def rotation_of(width: int, base: float, pairing: str, rotary_dim: int, trailing: bool, sign: int) -> Rotation:
    """theta_i = base^(-2i / rotary_dim) on the first or the last `rotary_dim` features."""
    half, start = rotary_dim // 2, width - rotary_dim if trailing else 0
    index = np.arange(half)
    pairs = np.stack([2 * index, 2 * index + 1] if pairing == "interleaved" else [index, index + half], -1)
    return Rotation(pairs + start, sign * base ** (-2.0 * index / rotary_dim))


class Inputs(NamedTuple):
    """One call: q [batch, heads, queries, dim], k, v; who sees whom [batch, queries, keys]; the row of sums of each.

    `q_owner` [batch, queries] and `k_owner` [batch, keys] are rows of the sums, -1 for tokens that belong to none.
    `seen` [batch, keys] is False for hidden keys.
    """

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    q_owner: np.ndarray
    k_owner: np.ndarray
    seen: np.ndarray
    q_positions: np.ndarray
    k_positions: np.ndarray
    causal: bool

    def visible(self) -> np.ndarray:
        queries, keys = self.q.shape[2], self.k.shape[2]
        together = (self.q_owner[:, :, None] == self.k_owner[:, None]) & (self.q_owner[:, :, None] >= 0)
        together = together & self.seen[:, None]
        if self.causal:
            together = together & (np.arange(keys)[None] <= np.arange(queries)[:, None] + keys - queries)
        return together


class Maps(NamedTuple):
    """The feature maps of queries and keys, and how many roundings each adds because it works in the dtype of x."""

    q: str
    k: str
    q_steps: float = 0.0
    k_steps: float = 0.0


class Answer(NamedTuple):
    """The outputs, the sums per row after the call, and a function from cotangents to gradients."""

    out: Quantity
    above: Quantity
    below: Quantity
    gradients: object


def answer(
    inputs: Inputs, maps: Maps, rotation: Rotation | None, above: Quantity, below: Quantity, rounding: Rounding
) -> Answer:
    """What the call gives behind sums `above` [rows, kv_heads, width, v_dim] and `below` [rows, kv_heads, width]."""
    (batch, heads, queries, _), (_, kv_heads, keys, _) = inputs.q.shape, inputs.k.shape
    visible, group, rows = inputs.visible(), heads // kv_heads, len(above.value)
    live = (inputs.k_owner >= 0) & inputs.seen
    # Hidden keys and padding may hold anything.
    k, v = (np.where(live[:, None, :, None], x, 0.0) for x in (inputs.k, inputs.v))
    q = np.where((inputs.q_owner >= 0)[:, None, :, None], inputs.q, 0.0)
    fq, q_slope = features(q, maps.q, rounding, maps.q_steps, query=True)
    fk, k_slope = features(k, maps.k, rounding, maps.k_steps, query=False)
    fk = fk.masked(live[:, None, :, None])
    width, terms = fq.value.shape[-1], fq.value.shape[-1] + keys + 4

    def rotated_at(x: Quantity, positions: np.ndarray, *, back: bool = False) -> Quantity:
        return x if rotation is None else rotation.rotated(x, positions, rounding, back=back)

    rq, rk, values = rotated_at(fq, inputs.q_positions), rotated_at(fk, inputs.k_positions), Quantity.exact(v)
    # With query heads by their key heads.
    gq, grq = (x.reshaped(batch, kv_heads, group, queries, width) for x in (fq, rq))
    # A row of zeros for tokens that belong to no row.
    behind = [_with_zero_row(x)[inputs.q_owner] for x in (above, below)]
    sees = visible[:, None, None]
    scores = contract("bkgmd,bknd->bkgmn", grq, rk, rounding, width).masked(sees)
    plain = contract("bkgmd,bknd->bkgmn", gq, fk, rounding, width).masked(sees)
    ones = Quantity.exact(np.ones((batch, keys)))
    numerator = contract("bkgmn,bknv->bkgmv", scores, values, rounding, terms)
    numerator += contract("bkgmd,bmkdv->bkgmv", grq, behind[0], rounding, terms)
    denominator = contract("bkgmn,bn->bkgm", plain, ones, rounding, terms)
    denominator += contract("bkgmd,bmkd->bkgm", gq, behind[1], rounding, terms)
    belongs = (inputs.q_owner >= 0)[:, None, None]
    denominator = denominator.masked(belongs)
    out = quotient(numerator, denominator[..., None], rounding).masked(belongs[..., None])
    member = Quantity.exact((inputs.k_owner == np.arange(rows)[:, None, None]) * 1.0)  # [rows, batch, keys]
    products = _outer(rk, values)
    after = above + contract("rbn,bkndv->rkdv", member, products, rounding, terms)
    after_below = below + contract("rbn,bknd->rkd", member, fk, rounding, terms)

    def gradients(
        of_out: np.ndarray, of_above: np.ndarray, of_below: np.ndarray, stored: float = 0.0
    ) -> dict[str, Quantity]:
        """The gradients of q, k, v and of the sums before, from those of the outputs and of the sums after.

        `stored` is how many roundings more the outputs went through before the backward read them.
        """
        read = Quantity(out.value, out.size, out.steps + stored)
        g = Quantity.exact(of_out.reshape(out.value.shape)).masked(belongs[..., None])
        one = Quantity.exact(np.ones_like(denominator.value))
        inverse = quotient(one, denominator, rounding)
        inverse = inverse.masked(denominator.size > 0)
        dn = g * inverse[..., None]
        weight = contract("bkgmv,bkgmv->bkgm", dn, read, rounding, of_out.shape[-1]).negative()
        g_above, g_below = (_with_zero_row(Quantity.exact(x))[inputs.k_owner] for x in (of_above, of_below))
        seen_by = Quantity.exact(visible * 1.0)
        dv = contract("bkgmn,bkgmv->bknv", scores, dn, rounding, terms * group)
        dv += contract("bnkdv,bknd->bknv", g_above, rk, rounding, width)
        met = contract("bkgmv,bknv->bkgmn", dn, values, rounding, of_out.shape[-1]).masked(sees)
        drq = contract("bkgmn,bknd->bkgmd", met, rk, rounding, terms)
        drq += contract("bkgmv,bmkdv->bkgmd", dn, behind[0], rounding, of_out.shape[-1])
        reach = contract("bmn,bknd->bkmd", seen_by, fk, rounding, terms) + _swapped(behind[1])
        dfq = rotated_at(drq.reshaped(batch, heads, queries, width), inputs.q_positions, back=True)
        dfq += (weight[..., None] * reach[:, :, None]).reshaped(batch, heads, queries, width)
        drk = contract("bkgmn,bkgmd->bknd", met, grq, rounding, terms * group)
        drk += contract("bnkdv,bknv->bknd", g_above, values, rounding, of_out.shape[-1])
        weighed = weight[..., None] * gq
        dfk = rotated_at(drk, inputs.k_positions, back=True)
        dfk += contract("bmn,bkgmd->bknd", seen_by, weighed, rounding, terms * group) + _swapped(g_below)
        of_row = Quantity.exact((inputs.q_owner == np.arange(rows)[:, None, None]) * 1.0)
        d_above = contract("rbm,bkmdv->rkdv", of_row, _grouped_outer(grq, dn), rounding, terms * group)
        d_below = contract("rbm,bkgmd->rkd", of_row, weighed, rounding, terms * group)
        q_mask, k_mask = belongs[:, 0, :, :, None], live[:, None, :, None]
        return {
            "q": _through(dfq, q_slope, maps.q, maps.q_steps).masked(q_mask),
            "k": _through(dfk, k_slope, maps.k, maps.k_steps).masked(k_mask),
            "v": dv.masked(k_mask),
            "above": d_above + Quantity.exact(of_above),
            "below": d_below + Quantity.exact(of_below),
        }

    flat = Quantity(out.value, out.size, out.steps).reshaped(batch, heads, queries, inputs.v.shape[-1])
    return Answer(flat, after, after_below, gradients)


def _with_zero_row(x: Quantity) -> Quantity:
    """One more row of zeros, which the row -1 is."""
    zero = np.zeros((1, *x.value.shape[1:]))
    return Quantity(np.concatenate([x.value, zero]), np.concatenate([x.size, zero]), x.steps)


def _swapped(x: Quantity) -> Quantity:
    return Quantity(x.value.swapaxes(1, 2), x.size.swapaxes(1, 2), x.steps)


def _outer(a: Quantity, b: Quantity) -> Quantity:
    return Quantity(*(y[..., None] * z[..., None, :] for y, z in ((a.value, b.value), (a.size, b.size))), a.steps + 1)


def _grouped_outer(a: Quantity, b: Quantity) -> Quantity:
    """Outer products summed over the query heads of a key head."""
    spec, steps = "bkgmd,bkgmv->bkmdv", a.steps + b.steps + 2
    return Quantity(np.einsum(spec, a.value, b.value), np.einsum(spec, a.size, b.size), steps)


def _through(gradient: Quantity, slope: np.ndarray, name: str, steps: float) -> Quantity:
    """The gradient of x from that of its features."""
    made = gradient * Quantity.exact(slope)
    made = Quantity(made.value, made.size, made.steps + steps + 4)
    if name != TWO_SIDED:
        return made
    half = slope.shape[-1] // 2
    return made[..., :half] + made[..., half:]
