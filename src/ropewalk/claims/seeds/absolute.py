"""Absolute encodings: formulas, positions at which they are defined, and the effect of a projection."""

import itertools
import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from ropewalk.claims.claim import Chapter, Finding
from ropewalk.claims.layers import HEADS, WIDTH, layer, order_effect
from ropewalk.claims.samples import EXACT, drift, largest, normal, rotate_to, theta
from ropewalk.claims.sources import NOTE_000, NOTE_001, NOTE_002, NOTE_003, NOTE_004, PRACTICE, SINUSOIDS
from ropewalk.claims.trained import MICRO, TINY, trained
from ropewalk.errors import RopewalkError
from ropewalk.nn.attention.function import attention
from ropewalk.nn.attention.layer import Attention
from ropewalk.nn.encodings.absolute import LearnedEncoding, SinusoidalEncoding
from ropewalk.reference import absolute, alibi_bias, softmax_attention
from ropewalk.spec import Plain
from ropewalk.theory import periods, sinusoidal_table

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


def _layer_error() -> float:
    """Difference of Attention with p added to q, k and v from the formula of note 000."""
    encoding = SinusoidalEncoding(WIDTH // HEADS, placement="projection")
    ours = Attention(WIDTH, HEADS, encoding=encoding).double().requires_grad_(False)
    tokens, p = normal(1, 5, WIDTH, seed=11), absolute.sinusoidal_table(IDS, WIDTH // HEADS)
    q, k, v = (
        proj(tokens).unflatten(-1, (HEADS, -1)).transpose(1, 2) + p for proj in (ours.q_proj, ours.k_proj, ours.v_proj)
    )
    by_formula = ours.o_proj(softmax_attention(q, k, v, causal=True).transpose(1, 2).flatten(2))
    return largest(ours(tokens) - by_formula)


@chapter.claim(
    "absolute.added",
    "An absolute encoding usually is W x_i + p_i.",
    NOTE_000.at(14, "f_{q, k, v}(x_i, i) = W_{k, q, v}x_i + p_i"),
    method="|W(x+p) − (Wx+p)| for random W, and for W = 1; Attention with placement='projection' against attention "
    "over W_q x + p, W_k x + p and W_v x + p",
    expected="a difference of Wp − p, which is 0 only for W = 1; the layer equals the formula",
    only_if="p_i stands for W p_i: transformers usually add p before the projection, W(x+p) = Wx + Wp",
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
    in_layer = _layer_error()
    return Finding(
        f"difference {difference:.3g}, equal to Wp − p within {error:.1e}; W = 1: {identity:.1e}; Attention "
        f"{in_layer:.1e}",
        stated=difference < EXACT,
        amended=max(error, identity, in_layer) < EXACT,
    )


@chapter.claim(
    "absolute.input",
    "An absolute encoding adds p_k to the k-th vector of the input: x_k + p_k, where p_k depends on k alone.",
    NOTE_004.at(
        6,
        "在输入的第 $k$ 个向量 $x_k$ 中加入位置向量 $p_k$ 得到 $x_k+p_k$，且 $p_k$ 只依赖于位置的编号 $k$。",
    ),
    method="encoding.embed(x) − x for two sequences of random tokens, learned and sinusoidal: against each other, and "
    "against the row of the table and the formula",
    expected="equal for all tokens; the rows",
)
def _() -> Finding:
    learned = LearnedEncoding(WIDTH, length=8).double().requires_grad_(False)
    formula = torch.stack([_sinusoid(m, WIDTH) for m in range(5)])
    between, error = 0.0, 0.0
    for encoding, rows in ((learned, learned.weight[:5]), (SinusoidalEncoding(WIDTH), formula)):
        added = [encoding.embed(x, IDS) - x for x in normal(2, 1, 5, WIDTH, seed=13)]
        between, error = max(between, largest(added[0] - added[1])), max(error, largest(added[0][0] - rows))
    return Finding(f"difference {between:.1e} between tokens, {error:.1e} from p", stated=max(between, error) < EXACT)


@chapter.claim(
    "absolute.learned",
    "A learned encoding is a trained matrix with one row per position, for instance 512 × 768, added to x.",
    NOTE_000.at(17, "Под каждую позицию выделить свой обучаемый вектор"),
    NOTE_001.at(15, "Также существует подход, когда создают отдельный обучаемый слой позиционных эмбеддингов."),
    NOTE_004.at(
        11, "比如最大长度为512，编码维度为768，那么就初始化一个 512×768 的矩阵作为位置向量，让它随着训练过程更新。"
    ),
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
    NOTE_001.at(15, "после обучения невозможно экстраполировать эти данные на последовательности большей длины"),
    NOTE_004.at(13, "优缺点：没有外推性。"),
    method="rows 510 to 513 of a table of 512 rows, looked up by torch's embedding; the same in LearnedEncoding",
    expected="511 is the last position with a row, in both",
)
def _() -> Finding:
    table, module = normal(512, 4), LearnedEncoding(4, length=512).double()

    def supported(look_up: Callable[[Tensor], Tensor]) -> list[int]:
        accepted: list[int] = []
        for position in range(510, 514):
            try:
                look_up(torch.tensor([position]))
            except (IndexError, RopewalkError):
                continue
            accepted.append(position)
        return accepted

    by_torch = supported(lambda ids: torch.nn.functional.embedding(ids, table))
    ours = supported(lambda ids: module.embed(normal(1, 1, 4), ids))
    return Finding(f"last rows: {by_torch[-1]}, ours {ours[-1]}", stated=by_torch == ours == [510, 511])


@chapter.claim(
    "absolute.sinusoid",
    "The sinusoidal encoding has sin(k/10000^(2i/d)) at 2i and cos(k/10000^(2i/d)) at 2i+1.",
    NOTE_000.at(18, "p_{i, 2t} = sin(i/10000^{2t/d}), p_{i, 2t + 1} = cos(i/10000^{2t/d})"),
    NOTE_001.at(
        11,
        r"p_t^{(i)} = f(t)^{(i)} := \begin{cases} \sin(\omega_k \cdot t), & \text{if "
        r"} i = 2k \\ \cos(\omega_k \cdot t), & \text{if } i = 2k + 1 \end{cases}",
    ),
    NOTE_004.at(
        18,
        r"\begin{cases}p_{k,2i}=\sin\left(k/10000^{2i/d}\right)\\"
        r"p_{k,2i+1}=\cos\left(k/10000^{2i/d}\right)&\end{cases}",
    ),
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
    NOTE_001.at(13, "Why? So the dot product between two embeddings becomes higher relatively."),
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
    NOTE_001.at(13, "Why? So the dot product between two embeddings becomes higher relatively."),
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


def _shift_matrix(k: int, dim: int) -> np.ndarray:
    """The block matrix M_k with p_{t+k} = M_k p_t, for the table with (sin, cos) in features (2i, 2i+1)."""
    matrix = np.zeros((dim, dim))
    for i, angle in enumerate(k * Plain().evaluate(dim)):
        cos, sin = np.cos(angle), np.sin(angle)
        matrix[2 * i : 2 * i + 2, 2 * i : 2 * i + 2] = [[cos, sin], [-sin, cos]]
    return matrix


@chapter.claim(
    "absolute.shift-matrix",
    "p_{t+k} = M_k p_t for the sinusoidal table, with one matrix M_k for every t: a rotation of each pair.",
    SINUSOIDS,
    method="M_k in blocks (cos kω, sin kω; −sin kω, cos kω), d = 128, k = 1, 5, 100, t < 4096; the best single matrix "
    "(least squares) for a random table",
    expected="equal, to the rounding of the angles: (t + k)·2⁻⁵², 2e-15 for t < 16; M_k orthogonal; no such matrix for "
    "a random table",
)
def _() -> Finding:
    t, ratio, small, orthogonal = np.arange(4096), 0.0, 0.0, 0.0
    for k in (1, 5, 100):
        matrix = _shift_matrix(k, 128)
        error = np.abs(sinusoidal_table(t, 128) @ matrix.T - sinusoidal_table(t + k, 128)).max(axis=-1)
        ratio = max(ratio, float((error / ((t + k) * 2.0**-52)).max()))
        small = max(small, float(error[:16].max())) if k < 100 else small
        orthogonal = max(orthogonal, float(np.abs(matrix @ matrix.T - np.eye(128)).max()))
    table = np.random.default_rng(0).standard_normal((4097, 128))
    fit = np.linalg.lstsq(table[:-1], table[1:], rcond=None)[0]
    rest = float(np.sqrt(((table[:-1] @ fit - table[1:]) ** 2).mean()))
    return Finding(
        f"at most {ratio:.2f}·(t + k)·2⁻⁵²; {small:.1e} for t < 16; M Mᵀ − I {orthogonal:.0e}; random table {rest:.2f}",
        stated=ratio <= 1 and small < 2e-15 and orthogonal < 1e-15 and rest > 0.9,
    )


@chapter.claim(
    "absolute.sinusoid-behind-w",
    "With sinusoidal vectors attention depends on the distance of two tokens.",
    PRACTICE,
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
    NOTE_002.at(184, r"\text{AttentionScore} = (\mathbf{q}_m + \mathbf{p}_m)^T \cdot (\mathbf{k}_n + \mathbf{p}_n)"),
    method="the score against q·k + q·p + p·k + p·p, and the drift of each term if m and n shift; the weights of "
    "attention with placement='scores' against softmax((q + p)(k + p)ᵀ/√d)",
    expected="equal; no drift of q·k, drift of the other three; the weights are equal",
)
def _() -> Finding:
    q, k = normal(2, 32, seed=5)
    p = absolute.sinusoidal_table(torch.arange(1100), 32) @ (normal(32, 32, seed=6) / 32**0.5)
    error = largest((q + p[3]) @ (k + p[1]) - (q @ k + q @ p[1] + p[3] @ k + p[3] @ p[1]))
    terms = (lambda m, n: q @ p[n], lambda m, n: p[m] @ k, lambda m, n: p[m] @ p[n])
    drifts = [drift(term) for term in terms]
    shown = ", ".join(f"{d:.2g}" for d in drifts)
    queries, keys = normal(2, 1, 1, 5, 32, seed=12)
    eye, table = torch.eye(5, dtype=torch.float64)[None, None], absolute.sinusoidal_table(IDS, 32)
    weights = attention(queries, keys, eye, encoding=SinusoidalEncoding(32, placement="scores"), causal=False)
    in_layer = largest(weights - torch.softmax((queries + table) @ (keys + table).mT / 32**0.5, -1))
    return Finding(
        f"error {error:.1e}; drift of q·p, p·k, p·p: {shown}; attention {in_layer:.1e}",
        stated=max(error, in_layer) < EXACT and min(drifts) > 0.1,
    )


@chapter.claim(
    "absolute.relative-is-absolute",
    "Relative encoding adds the absolute position of a token to the token.",
    NOTE_000.at(10, "С относительным все более-менее понятно: кодируем в токене его абсолютную позицию в тексте."),
    method="drift of the score if both positions shift: p added to tokens, and ALiBi's bias on the distance",
    expected="the first drifts, the second does not",
    misprint="the sentence describes absolute encoding; the note goes on to describe the relative one as such",
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
    NOTE_004.at(25, "因此在输入后接一层 RNN 再接 transformer，理论上就可以不用再加位置编码了。"),
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
    NOTE_004.at(27, "有一定的外推性"),
    method="4096 tokens in a network of 8 units: the first 512 states against a run of 512; spread of the others; a "
    "recorded run of `ropewalk lab run extrapolation`: the rise of the loss of the same bytes at 4 times the length",
    expected="equal; the other states are defined and not constant; less than 0.05 nats with 0.13 million parameters, "
    "more with 1.1 million",
    only_if="0.05 nats are the limit, for 0.13 million parameters trained at 64 bytes: with 1.1 million at 256 bytes "
    "the loss rises by 0.09, with sinusoids by 3.2",
)
def _() -> Finding:
    a, b = normal(2, DIM, DIM, seed=7) / DIM**0.5
    x, zero = normal(1, 4096, DIM), torch.zeros(DIM, dtype=torch.float64)
    long, short = (absolute.recurrent(x[:, :n], torch.arange(n), a, b, zero) for n in (4096, 512))
    same, spread = largest(long[:, :512] - short), float(long[:, 512:].std())
    beginning = "the loss of recurrent rises by less"
    smaller, larger = (trained("extrapolation", beginning, records=records) for records in (MICRO, TINY))
    defined = same == 0 and spread > 0.1
    return Finding(
        f"difference {same:g}; spread {spread:.2f}; rise {smaller.measured}; {larger.measured}",
        stated=defined and bool(smaller.stated and larger.stated),
        amended=defined and bool(smaller.stated) and larger.amended,
    )


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
    NOTE_004.at(27, "但是牺牲了并行性。"),
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
    NOTE_004.at(31, r"似乎可以考虑相乘的？即 $x_k\otimes p_k$。"),
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
    NOTE_004.at(32, "甚至也可以考虑拼接的做法。"),
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
    NOTE_004.at(21, "优缺点：有外推性。"),
    method="d = 768, trained to 512: whether it is defined at 8191, and the number of pairs with unseen angles; a "
    "recorded run of `ropewalk lab run extrapolation`: the rise of the loss of the same bytes at 4 times the length",
    expected="defined everywhere; the 200 of 384 pairs with a period above 512 have unseen angles; more than 0.05 nats",
    fails="it is defined, but the loss rises",
)
def _() -> Finding:
    defined = bool(absolute.sinusoidal_table(torch.tensor([8191]), 768).isfinite().all())
    unseen = int((periods(theta(768).numpy()) > 512).sum())
    rise = trained("extrapolation", "the loss of sinusoidal rises by less")
    return Finding(
        f"{'defined' if defined else 'not defined'}; {unseen} of 384 pairs with unseen angles; rise {rise.measured}",
        stated=rise.stated,
        amended=defined and unseen == 200 and rise.amended,
    )


@chapter.claim(
    "absolute.rope-reach",
    "RoPE generalises well to every (or: every long) sequence, because sine and cosine are periodic.",
    NOTE_003.at(
        13, "RoPE는 주기적인 사인/코사인 함수를 사용해 위치를 인코딩하므로, 각 시퀀스에서도 일반화가 잘 됩니다."
    ),
    method="d = 128, base 10000, trained to 4096: the number of pairs with a period above 4096; a recorded run of "
    "`ropewalk lab run extrapolation`: the rise of the loss of the same bytes at 4 times the trained length",
    expected="defined everywhere; 18 of 64 pairs (36 features) have unseen angles; more than 0.05 nats",
    fails="at 4 times the length the loss rises",
)
def _() -> Finding:
    unseen = int((periods(theta(128).numpy()) > 4096).sum())
    defined = bool(rotate_to(normal(128), 1 << 20).isfinite().all())
    rise = trained("extrapolation", "the loss of rope rises by less")
    return Finding(
        f"{'defined' if defined else 'not defined'}; {unseen} of 64 pairs with unseen angles; rise {rise.measured}",
        stated=rise.stated,
        amended=defined and unseen == 18 and rise.amended,
    )
