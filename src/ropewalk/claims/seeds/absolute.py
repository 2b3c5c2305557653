"""Absolute encodings: formulas, positions at which they are defined, and the effect of a projection."""

import itertools
import math

import torch
from torch import Tensor

from ropewalk.claims.claim import Chapter, Finding
from ropewalk.claims.layers import WIDTH, layer, order_effect
from ropewalk.claims.samples import EXACT, drift, largest, normal, rotate_to, theta
from ropewalk.claims.sources import CHINESE_1, CHINESE_2, KOREAN, RUSSIAN_1, RUSSIAN_2
from ropewalk.errors import RopewalkError
from ropewalk.nn.attention.layer import Attention
from ropewalk.reference import absolute, alibi_bias, softmax_attention
from ropewalk.theory import periods

__all__ = ["chapter"]

chapter: Chapter = Chapter("Absolute encodings: formulas and supported lengths")

DIM = 8
X = normal(1, 5, DIM)
IDS = torch.arange(5)
TABLE = normal(5, DIM, seed=1)
WEIGHT = normal(DIM, DIM, seed=2) / DIM**0.5


def _sinusoid(position: int, dim: int) -> Tensor:
    """The formula, one number at a time, with the math module."""
    row = [f(position / 10_000 ** (2 * t / dim)) for t in range(dim // 2) for f in (math.sin, math.cos)]
    return torch.tensor(row, dtype=torch.float64)


@chapter.claim(
    "absolute.added",
    "An absolute encoding is W x_i + p_i.",
    RUSSIAN_1,
    method="|W(x+p) − (Wx+p)| for random W, and for W = 1",
    expected="a difference of Wp − p, which is 0 only for W = 1",
    only_if="p is added after the projection; transformers add it before: W(x+p) = Wx + Wp",
)
def _() -> Finding:
    def gap(weight: Tensor) -> Tensor:
        before, after = (
            absolute.project(X, IDS, weight, lambda x, m: absolute.learned(x, m, TABLE), placement)
            for placement in ("input", "projection")
        )
        return before - after

    difference = largest(gap(WEIGHT))
    error = largest(gap(WEIGHT) - (TABLE @ WEIGHT.T - TABLE))
    identity = largest(gap(torch.eye(DIM, dtype=torch.float64)))
    return Finding(
        f"difference {difference:.3g}, equal to Wp − p within {error:.1e}; W = 1: {identity:.1e}",
        stated=difference < EXACT,
        amended=error < EXACT and identity < EXACT,
    )


@chapter.claim(
    "absolute.learned",
    "A learned encoding is a trained matrix with one row per position, for instance 512 × 768, added to x.",
    CHINESE_2,
    method="learned(x, positions, table) against x plus each row",
    expected="equal; 512 × 768 has 393216 parameters",
)
def _() -> Finding:
    table = normal(512, 768, seed=3)
    x = normal(1, 3, 768)
    expected = torch.stack([x[0, 0] + table[511], x[0, 1] + table[0], x[0, 2] + table[77]])
    error = largest(absolute.learned(x, torch.tensor([511, 0, 77]), table)[0] - expected)
    return Finding(f"error {error:g}; {table.numel()} parameters", stated=error == 0 and table.numel() == 393_216)


@chapter.claim(
    "absolute.learned-reach",
    "A learned encoding cannot be extended to longer sequences than it was trained on.",
    f"{RUSSIAN_2}, {CHINESE_2}",
    method="positions 510 to 513 of a table of 512 rows, one at a time",
    expected="511 is the last position with a row",
)
def _() -> Finding:
    x, table, accepted = normal(1, 1, 4), normal(512, 4), []
    for position in range(510, 514):
        try:
            absolute.learned(x, torch.tensor([position]), table)
        except RopewalkError:
            continue
        accepted.append(position)
    return Finding(f"accepted: {accepted}; the others are rejected", stated=accepted == [510, 511])


@chapter.claim(
    "absolute.sinusoid",
    "The sinusoidal encoding has sin(k/10000^(2i/d)) at 2i and cos(k/10000^(2i/d)) at 2i+1.",
    f"{RUSSIAN_1}, {RUSSIAN_2}, {CHINESE_2}",
    method="the table against the formula, element by element",
    expected="equal",
)
def _() -> Finding:
    ids = (0, 1, 7, 511, 100_000)
    error = max(
        largest(absolute.sinusoidal_table(torch.tensor([m]), dim)[0] - _sinusoid(m, dim))
        for m in ids
        for dim in (2, 64, 768)
    )
    return Finding(f"largest error {error:.1e}", stated=error < 1e-10)


@chapter.claim(
    "absolute.sinusoid-product",
    "The product of two sinusoidal vectors depends on their distance: p_t · p_s = Σ cos ω(t − s).",
    RUSSIAN_2,
    method="p_t · p_s for t, s < 64 against Σ cos ω(t−s)",
    expected="equal",
)
def _() -> Finding:
    table = absolute.sinusoidal_table(torch.arange(64), 32)
    gaps = (torch.arange(64)[:, None] - torch.arange(64)).double()
    error = largest(table @ table.T - torch.cos(gaps[..., None] * theta(32)).sum(-1))
    return Finding(f"largest error {error:.1e}", stated=error < EXACT)


@chapter.claim(
    "absolute.sinusoid-nearer",
    "The closer two positions are, the larger is the product of their sinusoidal vectors.",
    RUSSIAN_2,
    method="Σ cos ω D for D = 0..255, d = 512: the D of the maximum, and the number of steps at which it increases",
    expected="maximum at 0; increases at many steps",
    only_if="it is compared with distance 0, or over bands; the maximum is at 0, but not every step decreases",
)
def _() -> Finding:
    product = torch.cos(torch.arange(256)[:, None] * theta(512)).sum(-1)
    rises = int((product.diff() > 0).sum())
    bands = [float(band.mean()) for band in product.split(64)]
    decreasing = all(a > b for a, b in itertools.pairwise(bands))
    return Finding(
        f"{rises} of 255 steps increase; band means {', '.join(f'{b:.0f}' for b in bands)}",
        stated=rises == 0,
        amended=decreasing and int(product.argmax()) == 0,
    )


@chapter.claim(
    "absolute.sinusoid-behind-w",
    "With sinusoidal vectors attention depends on the distance of two tokens.",
    RUSSIAN_2,
    method="drift of (W_q p_t) · (W_k p_s) if t and s shift together, with and without W",
    expected="no drift without W; drift with it",
    only_if="there is no projection; with W_q and W_k, p_tᵀW_qᵀW_k p_s depends on t and s, not only on t − s",
)
def _() -> Finding:
    weights = normal(2, 32, 32, seed=4) / 32**0.5

    def score(w_q: Tensor, w_k: Tensor) -> float:
        def product(t: int, s: int) -> Tensor:
            p_t, p_s = absolute.sinusoidal_table(torch.tensor([t, s]), 32)
            return (w_q @ p_t) @ (w_k @ p_s)

        return drift(product)

    eye = torch.eye(32, dtype=torch.float64)
    plain, projected = score(eye, eye), score(weights[0], weights[1])
    return Finding(
        f"drift {plain:.1e} without W, {projected:.3g} with W", stated=projected < EXACT, amended=plain < EXACT
    )


@chapter.claim(
    "absolute.four-terms",
    "With added positions the score is (q_m + p_m)ᵀ(k_n + p_n).",
    CHINESE_1,
    method="the score against q·k + q·p + p·k + p·p, and the drift of each term if m and n shift",
    expected="equal; no drift of q·k, drift of the other three",
)
def _() -> Finding:
    q, k = normal(2, 32, seed=5)
    p = absolute.sinusoidal_table(torch.arange(1100), 32) @ (normal(32, 32, seed=6) / 32**0.5)
    error = largest((q + p[3]) @ (k + p[1]) - (q @ k + q @ p[1] + p[3] @ k + p[3] @ p[1]))
    terms = (lambda m, n: q @ p[n], lambda m, n: p[m] @ k, lambda m, n: p[m] @ p[n])
    drifts = [drift(term) for term in terms]
    shown = ", ".join(f"{d:.2g}" for d in drifts)
    return Finding(f"error {error:.1e}; drift of q·p, p·k, p·p: {shown}", stated=error < EXACT and min(drifts) > 0.1)


@chapter.claim(
    "absolute.relative-is-absolute",
    "Relative encoding adds the absolute position of a token to the token.",
    RUSSIAN_1,
    method="drift of the score if both positions shift: p added to tokens, and ALiBi's bias on the distance",
    expected="the first drifts, the second does not",
    fails="that is absolute encoding; a relative encoding depends only on the distance",
)
def _() -> Finding:
    q, k = normal(2, 32, seed=5)
    p = absolute.sinusoidal_table(torch.arange(1100), 32)
    added = drift(lambda m, n: (q + p[m]) @ (k + p[n]))
    relative = drift(lambda m, n: q @ k + alibi_bias(torch.tensor([m]), torch.tensor([n]), 1).sum())
    return Finding(
        f"drift {added:.3g} with p in the token, {relative:.1e} with ALiBi",
        stated=added < EXACT,
        amended=added > 0.1 and relative < EXACT,
    )


@chapter.claim(
    "absolute.recurrent",
    "With an RNN before the transformer no position encoding is needed.",
    CHINESE_2,
    method="full attention over tokens and over RNN states, for two orders of the same tokens; Attention without and "
    "with the recurrent encoding",
    expected="equal up to order without the RNN, different with it",
)
def _() -> Finding:
    a, b = normal(2, DIM, DIM, seed=7) / DIM**0.5
    swap = [4, 1, 2, 3, 0]

    def attend(x: Tensor) -> Tensor:
        return softmax_attention(x[None], x[None], x[None])[0, 0]

    def with_rnn(x: Tensor) -> Tensor:
        return attend(absolute.recurrent(x, IDS, a, b, torch.zeros(DIM, dtype=torch.float64)))

    without = largest(attend(X[:, swap]) - attend(X)[swap])
    with_states = largest(with_rnn(X[:, swap]) - with_rnn(X)[swap])
    tokens = normal(1, 5, WIDTH)
    plain, recurrent = (
        order_effect(layer(Attention, name, causal=False), tokens, swap) for name in ("none", "recurrent")
    )
    return Finding(
        f"difference {without:.1e} without, {with_states:.3g} with the RNN; Attention {plain:.1e} and {recurrent:.3g}",
        stated=max(without, plain) < EXACT and min(with_states, recurrent) > 1e-3,
    )


@chapter.claim(
    "absolute.recurrent-reach",
    "An RNN can be extended beyond the trained length to some degree.",
    CHINESE_2,
    method="4096 tokens in a network of 8 units: the first 512 states against a run of 512; spread of the others",
    expected="equal; the other states are defined and not constant",
)
def _() -> Finding:
    a, b = normal(2, DIM, DIM, seed=7) / DIM**0.5
    x, zero = normal(1, 4096, DIM), torch.zeros(DIM, dtype=torch.float64)
    long, short = (absolute.recurrent(x[:, :n], torch.arange(n), a, b, zero) for n in (4096, 512))
    same, spread = largest(long[:, :512] - short), float(long[:, 512:].std())
    return Finding(f"difference {same:g}; spread {spread:.2f}", stated=same == 0 and spread > 0.1)


def _depth(tensor: Tensor) -> int:
    """Number of sequential operations that compute `tensor`: the longest path in its autograd graph."""
    depths: dict[object, int] = {}
    stack = [tensor.grad_fn]
    while stack:
        node = stack[-1]
        before = [parent for parent, _ in node.next_functions if parent is not None] if node is not None else []
        missing = [parent for parent in before if parent not in depths]
        if missing:
            stack.extend(missing)
        else:
            depths[stack.pop()] = 1 + max((depths[parent] for parent in before), default=0)
    return depths[tensor.grad_fn]


@chapter.claim(
    "absolute.recurrent-depth",
    "An RNN before the transformer costs parallelism.",
    CHINESE_2,
    method="number of sequential operations for 32 and for 64 tokens: RNN, and sinusoid",
    expected="grows with the length for the RNN, constant for the sinusoid",
)
def _() -> Finding:
    eye, zero = torch.eye(4, dtype=torch.float64), torch.zeros(4, dtype=torch.float64)
    rnn, sinusoid = [], []
    for length in (32, 64):
        x, ids = normal(1, length, 4).requires_grad_(), torch.arange(length)
        rnn.append(_depth(absolute.recurrent(x, ids, eye, eye, zero)))
        sinusoid.append(_depth(absolute.sinusoidal(x, ids)))
    return Finding(
        f"RNN {rnn[0]} and {rnn[1]}, sinusoid {sinusoid[0]} and {sinusoid[1]}",
        stated=rnn[1] - rnn[0] >= 32 and sinusoid[0] == sinusoid[1],
    )


@chapter.claim(
    "absolute.multiplied",
    "Positions can be multiplied instead of added: x_k ⊗ p_k.",
    CHINESE_2,
    method="the formula element by element; p = 1; drift of the score if both positions shift",
    expected="p = 1 changes nothing; the score is not relative",
)
def _() -> Finding:
    p = normal(1100, DIM, seed=8)
    y = absolute.multiplicative(X, IDS, p)
    error = max(abs(float(y[0, m, i] - X[0, m, i] * p[m, i])) for m in range(5) for i in range(DIM))
    identity = largest(absolute.multiplicative(X, IDS, torch.ones(5, DIM, dtype=torch.float64)) - X)
    moved = drift(lambda m, n: (X[0, 0] * p[m]) @ (X[0, 1] * p[n]))
    return Finding(
        f"error {error:g}; p = 1: {identity:g}; drift {moved:.3g}", stated=error == identity == 0 and moved > 0.1
    )


@chapter.claim(
    "absolute.concatenated",
    "Positions can be concatenated to x instead of added.",
    CHINESE_2,
    method="W[x; p] against W_x x + W_p p, and the score of [x; p] without a projection",
    expected="equal: concatenation and projection is an addition with a separate matrix; q·k + p·p without projection",
)
def _() -> Finding:
    projection = normal(DIM, DIM + 3, seed=9)
    p = normal(5, 3, seed=10)
    joined = absolute.concatenated(X, IDS, p, projection)
    error = largest(joined - (X @ projection[:, :DIM].T + p @ projection[:, DIM:].T))
    unprojected = absolute.concatenated(X, IDS, p)[0]
    score = largest(unprojected @ unprojected.T - (X[0] @ X[0].T + p @ p.T))
    return Finding(f"errors {error:.1e} and {score:.1e}", stated=max(error, score) < EXACT)


@chapter.claim(
    "absolute.sinusoid-reach",
    "The sinusoidal encoding can be extended beyond the trained length.",
    CHINESE_2,
    method="d = 768, trained to 512: whether it is defined at 8191, and the number of pairs with unseen angles",
    expected="defined everywhere; every pair with a period above 512 has unseen angles",
    only_if="it means 'is defined'; pairs that do not complete a rotation in training get unseen values",
)
def _() -> Finding:
    defined = bool(absolute.sinusoidal_table(torch.tensor([8191]), 768).isfinite().all())
    unseen = int((periods(theta(768).numpy()) > 512).sum())
    return Finding(
        f"defined: {defined}; {unseen} of 384 pairs with unseen angles",
        stated=unseen == 0,
        amended=defined and unseen > 0,
    )


@chapter.claim(
    "absolute.rope-reach",
    "RoPE generalises well to other lengths, because sine and cosine are periodic.",
    KOREAN,
    method="d = 128, base 10000, trained to 4096: the number of pairs with a period above 4096",
    expected="defined everywhere; 18 of 64 pairs (36 features) have unseen angles",
    only_if="it means 'is defined'; slow pairs do not complete a period in training, so periodicity does not help",
)
def _() -> Finding:
    unseen = int((periods(theta(128).numpy()) > 4096).sum())
    defined = bool(rotate_to(normal(128), 1 << 20).isfinite().all())
    return Finding(
        f"defined: {defined}; {unseen} of 64 pairs with unseen angles",
        stated=unseen == 0,
        amended=defined and unseen == 18,
    )
