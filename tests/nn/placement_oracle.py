"""Attention with an added position at three placements, as sums over pairs of tokens in float64 NumPy.

This shares no code with ropewalk. Every operation accepts complex numbers, so that a derivative is the imaginary part
of a step along the imaginary axis (Squire and Trapp, SIAM Review 40, 1998): exact to rounding, without a difference.
"""

from dataclasses import dataclass, replace

import numpy as np

STEP = 1e-40


@dataclass(frozen=True)
class Layer:
    """The weights of a layer, the tokens and the table; and what is computed with them."""

    x: np.ndarray
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    o: np.ndarray
    # [length, width] of a learned encoding; None for sines and cosines.
    table: np.ndarray | None
    ids: np.ndarray
    placement: str
    heads: int
    kv_heads: int
    causal: bool = True
    linear: bool = False
    window: int | None = None
    base: float = 10_000.0


def vectors(layer: Layer, width: int) -> np.ndarray:
    """p [batch, seq, width]."""
    if layer.table is not None:
        assert layer.table.shape[1] == width
        return layer.table[layer.ids]
    p = np.zeros((*layer.ids.shape, width))
    for i in range(width // 2):
        angle = layer.ids.astype(np.float64) * layer.base ** (-2 * i / width)
        p[..., 2 * i], p[..., 2 * i + 1] = np.sin(angle), np.cos(angle)
    return p


def output(layer: Layer) -> np.ndarray:
    """y [batch, seq, dim]: one head, one query and one key after the other."""
    batch, seq, dim = layer.x.shape
    width, group = len(layer.q) // layer.heads, layer.heads // layer.kv_heads
    x = layer.x + vectors(layer, dim) if layer.placement == "input" else layer.x
    after = np.zeros((batch, seq, width)) if layer.placement == "input" else vectors(layer, width)
    added = {"q": after, "k": after, "v": after if layer.placement == "projection" else 0 * after}

    def head(name: str, number: int) -> np.ndarray:
        rows = getattr(layer, name)[number * width : (number + 1) * width]
        return np.einsum("bsd,wd->bsw", x, rows) + added[name]

    m, n = np.arange(seq)[:, None], np.arange(seq)[None, :]
    visible = (n <= m) if layer.causal else np.ones((seq, seq), dtype=bool)
    if layer.window is not None:
        visible = visible & (np.abs(m - n) < layer.window)
    y = np.zeros((batch, seq, dim), dtype=np.result_type(x, layer.q, layer.k, layer.v, layer.o, after))
    for number in range(layer.heads):
        q, k, v = head("q", number), head("k", number // group), head("v", number // group)
        if layer.linear:
            weights = np.einsum("bmw,bnw->bmn", elu_plus_one(q), elu_plus_one(k)) * visible
        else:
            scores = np.einsum("bmw,bnw->bmn", q, k) / np.sqrt(width)
            weights = np.exp(scores - np.real(scores).max(-1, keepdims=True)) * visible
        out = np.einsum("bmn,bnw->bmw", weights / weights.sum(-1, keepdims=True), v)
        y = y + np.einsum("bmw,dw->bmd", out, layer.o[:, number * width : (number + 1) * width])
    return y


def elu_plus_one(x: np.ndarray) -> np.ndarray:
    positive = np.real(x) > 0
    return np.where(positive, x + 1, np.exp(np.where(positive, 0, x)))


def derivative(layer: Layer, name: str, direction: np.ndarray, cotangent: np.ndarray) -> float:
    """The derivative of sum(cotangent * output) by a field of the layer, in a direction."""
    moved = replace(layer, **{name: getattr(layer, name) + 1j * STEP * direction})
    return float((cotangent * np.imag(output(moved))).sum() / STEP)
