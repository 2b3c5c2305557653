"""The rotation in d dimensions: invariants, composition, its three forms, frequencies, and cost."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from ropewalk.claims.claim import Chapter, Finding
from ropewalk.claims.samples import EXACT, drift, largest, normal, rotate_to, theta
from ropewalk.claims.sources import NOTE_000, NOTE_001, NOTE_002, NOTE_003, NOTE_004
from ropewalk.errors import RopewalkError
from ropewalk.reference import rotate, rotate_complex, rotate_matrix, softmax_attention
from ropewalk.reference.pairs import join_pairs, split_pairs
from ropewalk.reference.rotation_matrix import rotation_matrix
from ropewalk.spec import RopeSpec

__all__ = ["chapter"]

chapter: Chapter = Chapter("Rotation: relative positions from absolute ones")

DIM = 64
Q, K = normal(2, DIM)
MATRICES = normal(2, DIM, DIM, seed=1) / DIM**0.5


def _elements(*inputs: object, out_shape: Sequence[int], **options: object) -> int:
    """Number of scalar operations of an elementwise op, for torch's operation counter."""
    return math.prod(out_shape)


ELEMENTWISE = dict.fromkeys((torch.ops.aten.mul, torch.ops.aten.add, torch.ops.aten.sub), _elements)


def _matrix(position: float, dim: int = DIM, inv_freq: Tensor | None = None) -> Tensor:
    """R_m, column by column: the rotation of each unit vector."""
    return rotate_to(torch.eye(dim, dtype=torch.float64), position, theta(dim) if inv_freq is None else inv_freq).T


@chapter.claim(
    "rotation.relative-2d",
    "In two dimensions the product of a rotated query and a rotated key depends only on m − n.",
    NOTE_000.at(22, r"\left<f_q(x_n, n), f_k(x_m, m)\right> = g(x_n, x_m, m - n)"),
    NOTE_001.at(23, r"f_q(\mathbf{x}_m, m) \cdot f_k(\mathbf{x}_n, n) = g(\mathbf{x}_m, \mathbf{x}_n, m - n)"),
    NOTE_002.at(199, r"\langle f_q(x_m, m), f_k(x_n, n) \rangle = g(x_m, x_n, m - n)"),
    NOTE_004.at(43, r"\langle f(q,m),f(k,n)\rangle=g(q,k,m-n)"),
    method="drift of the score if both positions shift by up to 1000",
    expected="none",
)
def _() -> Finding:
    moved = drift(lambda m, n: rotate_to(Q[:2], m) @ rotate_to(K[:2], n))
    return Finding(f"drift {moved:.1e}", stated=moved < EXACT)


@chapter.claim(
    "rotation.relative",
    "In d dimensions the score is relative too: (R_m q)ᵀ(R_n k) = qᵀ R_{n−m} k.",
    NOTE_002.at(261, r"= x_m^\top W_q^\top R_{\Theta,n-m}^d W_k x_n"),
    NOTE_003.at(
        15,
        "RoPE는 절대 위치보다 상대적 위치 정보를 더 잘 반영하며, 특히 어텐션 "
        "메커니즘에서 쿼리와 키의 [[dot product]] 에 위치 정보를 통합합니다.",
    ),
    NOTE_004.at(
        75, r"(\mathcal{R}_mq)^\top(\mathcal{R}_nk)=q^\top\mathcal{R}_m^\top\mathcal{R}_nk=q^\top\mathcal{R}_{n-m}k"
    ),
    method="drift of the score for d = 64, and the score against qᵀ R_{n−m} k",
    expected="no drift; equal",
)
def _() -> Finding:
    moved = drift(lambda m, n: rotate_to(Q, m) @ rotate_to(K, n))
    error = max(
        largest(rotate_to(Q, m) @ rotate_to(K, n) - Q @ _matrix(n - m) @ K) for m, n in ((3, 1), (17, 40), (0, 999))
    )
    return Finding(f"drift {moved:.1e}, error {error:.1e}", stated=max(moved, error) < EXACT)


@chapter.claim(
    "rotation.before-w",
    "The rotation is applied to the embedding x_m of a token.",
    NOTE_003.at(
        17,
        "위치 $m$ 에 있는 토큰의 임베딩 $x_m$ 에 대해, 위치 정보를 "
        "회전 행렬로 변환하여 새로운 임베딩 $x'_m$ 를 생성하는 것입니다.",
    ),
    method="drift of the score for q = W_q R_m x, rotated before the projection, and for q = R_m W_q x",
    expected="drift if rotated before W, none after",
    only_if="x_m is the projected query or key; a rotation before W loses the relative property",
)
def _() -> Finding:
    w_q, w_k = MATRICES
    before = drift(lambda m, n: (w_q @ rotate_to(Q, m)) @ (w_k @ rotate_to(K, n)))
    after = drift(lambda m, n: rotate_to(w_q @ Q, m) @ rotate_to(w_k @ K, n))
    return Finding(f"drift {before:.3g} before W, {after:.1e} after", stated=before < EXACT, amended=after < EXACT)


@chapter.claim(
    "rotation.q-and-v",
    "The product of the projections q and v should depend only on the relative position.",
    NOTE_000.at(
        21,
        "Давайте придумаем такой способ кодирования, чтобы скалярное произведений "
        "проекций $q$ и $v$ зависело только от входных векторов и их относительной позиции:",
    ),
    method="drift of ⟨R_m q, R_n k⟩, and of ⟨R_m q, v_n⟩ with v not rotated, as in attention",
    expected="none for q·k; q·v drifts, and attention never computes it",
    misprint="q and k, as the formula below the sentence has it; v is averaged, never multiplied by q",
)
def _() -> Finding:
    v = normal(DIM, seed=2)
    q_v, q_k = drift(lambda m, n: rotate_to(Q, m) @ v), drift(lambda m, n: rotate_to(Q, m) @ rotate_to(K, n))
    return Finding(f"drift of q·v {q_v:.3g}, of q·k {q_k:.1e}", stated=q_v < EXACT, amended=q_k < EXACT)


@chapter.claim(
    "rotation.values-need-none",
    "Positions are used in q and k, whose product weights the values.",
    NOTE_000.at(
        20,
        "информация о позиция используется по большей части в $q$ и $k$ векторах, потому что "
        "именно их мы скалярно перемножаем, чтобы посчитать веса для усреднения $v$ значений.",
    ),
    method="change of the output of attention with rotated q and k if positions shift by 100; also with rotated v",
    expected="no change; with rotated v the output changes",
)
def _() -> Finding:
    q, k, v = normal(3, 1, 2, 6, DIM, seed=3)

    def outputs(start: int, values: bool) -> Tensor:
        ids = torch.arange(6) + start
        rotated = [rotate(x, ids, theta(DIM)) for x in (q, k, v)]
        return softmax_attention(rotated[0], rotated[1], rotated[2] if values else v)

    plain, with_v = (largest(outputs(100, values) - outputs(0, values)) for values in (False, True))
    return Finding(f"change {plain:.1e}; with rotated v {with_v:.3g}", stated=plain < EXACT and with_v > 0.1)


@chapter.claim(
    "rotation.needs-m",
    "The rotated projection is R_Θ W x_m, without an index m on the matrix.",
    NOTE_000.at(46, r"= R_{\Theta}^{q, k}W^{q,k}x_m"),
    method="scores with the same R for every position, against scores without R",
    expected="equal: such an R has no effect on the scores",
    misprint="R_{Θ,m}: the entries in the same formula have m; one R for all positions has no effect",
)
def _() -> Finding:
    q, k = normal(2, 5, DIM, seed=4)
    plain = q @ k.T
    constant = largest(rotate_to(q, 7) @ rotate_to(k, 7).T - plain)
    by_position = rotate(q, torch.arange(5), theta(DIM)) @ rotate(k, torch.arange(5), theta(DIM)).T
    varying = largest(by_position - plain)
    return Finding(
        f"scores change by {constant:.1e} with one R, by {varying:.3g} with R_m",
        stated=constant > EXACT,
        amended=constant < EXACT < varying,
    )


@chapter.claim(
    "rotation.group",
    "R_mᵀ = R_{−m} and R_a R_b = R_{a+b}.",
    NOTE_002.at(
        191, r"$\mathcal{R}_m^T = \mathcal{R}_{-m}$ 、 $\mathcal{R}_a \cdot \mathcal{R}_b = \mathcal{R}_{a+b}$"
    ),
    method="64×64 matrices at 3, 17, −40 and 1000",
    expected="equal",
)
def _() -> Finding:
    ids = (3, 17, -40, 1000)
    transpose = max(largest(_matrix(m).T - _matrix(-m)) for m in ids)
    product = max(largest(_matrix(a) @ _matrix(b) - _matrix(a + b)) for a in ids for b in ids)
    return Finding(f"errors {transpose:.1e} and {product:.1e}", stated=max(transpose, product) < EXACT)


@chapter.claim(
    "rotation.orthogonal",
    "R_m is orthogonal, so it preserves the norm of a vector.",
    NOTE_002.at(253, "那么可以设计正交阵："),
    NOTE_004.at(76, r"这里的 $\mathcal{R}_{m}$ 是一个单位正交矩阵，因此不会改变向量的模长。"),
    method="R_mᵀR_m against 1, and |R_m q| against |q|, at positions up to 2^20",
    expected="equal",
)
def _() -> Finding:
    ids = (1, 4095, 1 << 20)
    eye = torch.eye(DIM, dtype=torch.float64)
    product = max(largest(_matrix(m).T @ _matrix(m) - eye) for m in ids)
    length = max(largest(rotate_to(Q, m).norm() - Q.norm()) for m in ids)
    return Finding(f"errors {product:.1e} and {length:.1e}", stated=max(product, length) < EXACT)


@chapter.claim(
    "rotation.formula-2d",
    "The rotation of (x, y) is (x cos θ − y sin θ, x sin θ + y cos θ), counter-clockwise.",
    NOTE_000.at(24, "В двумерном случае решение следующее:"),
    NOTE_001.at(27, "Так выглядит преобразование для 2мерного вектора."),
    NOTE_002.at(
        235,
        r"\mathbf{h}' = \begin{pmatrix} h^{(1)} \cos m\theta - h^{(2)} \sin "
        r"m\theta \\ h^{(1)} \sin m\theta + h^{(2)} \cos m\theta \end{pmatrix}",
    ),
    NOTE_003.at(131, r"x'_{2i} = x_{2i}\cos(m\theta_i) - x_{2i+1}\sin(m\theta_i)"),
    NOTE_004.at(71, r"\left(\begin{array}{rr}\cos m\theta&-\sin m\theta\\\sin m\theta&\cos m\theta\end{array}\right."),
    method="(1, 0) rotated by π/2; the formula written out for a random vector",
    expected="(0, 1); equal",
)
def _() -> Finding:
    unit = rotate_to(
        torch.tensor([1.0, 0.0], dtype=torch.float64), 1, torch.tensor([torch.pi / 2], dtype=torch.float64)
    )
    x, y = Q[:2]
    angle = torch.tensor(0.7, dtype=torch.float64)
    written = torch.stack((x * angle.cos() - y * angle.sin(), x * angle.sin() + y * angle.cos()))
    error = largest(rotate_to(Q[:2], 1, angle[None]) - written)
    shown = f"({abs(float(unit[0])):.0f}, {float(unit[1]):.0f})"
    return Finding(f"{shown}; error {error:.1e}", stated=shown == "(0, 1)" and error < EXACT)


@chapter.claim(
    "rotation.three-forms",
    "Block-diagonal matrix, complex product and element-wise formula are the same map.",
    NOTE_000.at(32, "В матричном виде это можно записать следующим образом:"),
    NOTE_001.at(31, "Обобщение для пространства размерности d:"),
    NOTE_002.at(233, "我们将这个结果还原回二维向量形式"),
    NOTE_003.at(127, "이를 풀면"),
    method="all three forms for d = 64 at positions up to 2^20, and rw.rotation_matrix times x",
    expected="equal",
)
def _() -> Finding:
    x, ids = normal(4, DIM, seed=5), torch.tensor([0, 1, 4095, 1 << 20])
    truth = rotate(x, ids, theta(DIM))
    error = max(largest(form(x, ids, theta(DIM)) - truth) for form in (rotate_complex, rotate_matrix))
    # The angles of rotation_matrix are rounded once, those of `rotate` are products in float64.
    matrix = largest((rotation_matrix(RopeSpec(DIM), ids) @ x[..., None])[..., 0] - truth)
    return Finding(
        f"largest difference {error:.1e}, of rw.rotation_matrix {matrix:.1e}", stated=error < EXACT and matrix < 1e-9
    )


@chapter.claim(
    "rotation.columns",
    "The element-wise formula multiplies x by a column of cosines and a column of sines, as printed.",
    NOTE_001.at(
        33,
        r"\vdots \\ \cos m\theta_{\frac{d}{2}} \\ \cos "
        r"m\theta_{\frac{d}{2}} \\ \cos m\theta_{\frac{d}{2}} \end{pmatrix}",
    ),
    method="number of entries in the printed columns for d = 6, where nothing is omitted",
    expected="6 entries are needed; printed are 7 cosines (θ_{d/2} three times) and 7 sines (one θ_2 too many)",
    misprint="each frequency occurs twice in each column: θ_1, θ_1, θ_2, θ_2, …, θ_{d/2}, θ_{d/2}",
)
def _() -> Finding:
    x, m, f = normal(6, seed=6), 5, theta(6)
    cos_printed = torch.cos(m * f[[0, 0, 1, 1, 2, 2, 2]])
    sin_printed = torch.sin(m * f[[0, 0, 1, 1, 1, 2, 2]])
    try:
        multiplied = bool((x * cos_printed + x * sin_printed).numel())
    except RuntimeError:
        multiplied = False
    swapped = torch.stack((-x[1::2], x[0::2]), -1).flatten()
    right = x * torch.cos(m * f).repeat_interleave(2) + swapped * torch.sin(m * f).repeat_interleave(2)
    error = largest(right - rotate_to(x, m))
    return Finding(
        f"{len(x)} features, {len(cos_printed)} cosines, {len(sin_printed)} sines; corrected: error {error:.1e}",
        stated=multiplied,
        amended=error < EXACT,
    )


@chapter.claim(
    "rotation.subspaces",
    "R splits the space into d/2 planes, each with its own rotation.",
    NOTE_000.at(
        48,
        "делим входной вектор размерности $d$ на $d/2$ пар ($(x_1, x_2), (x_3, "
        "x_4)$ и так далее), к каждой паре применяем поворот со своим углом.",
    ),
    NOTE_001.at(35, r"Вектор разбивается на пары  $(x_1, x_2), (x_3, x_4), \dots (x_{d-1}, x_d)$"),
    NOTE_002.at(257, "它是一个块对角矩阵，将 d 维空间切分为 $d/2$ 个子空间，每个子空间独立旋转。"),
    NOTE_003.at(108, r"회전 행렬 $R(m, \theta)$ 는 블록 대각 행렬 형태로 구성됩니다."),
    NOTE_004.at(72, "对于任意偶数维度的 RoPE，都可以表示为二维情况的拼接"),
    method="the entries of R_m outside its 2×2 blocks; the score against the sum of the scores of the planes",
    expected="0; equal",
)
def _() -> Finding:
    blocks = torch.block_diag(*[torch.ones(2, 2, dtype=torch.float64)] * (DIM // 2))
    outside = largest(_matrix(17) * (1 - blocks))
    planes = sum(
        rotate_to(Q[2 * i : 2 * i + 2], 17, f[None]) @ rotate_to(K[2 * i : 2 * i + 2], 4, f[None])
        for i, f in enumerate(theta(DIM))
    )
    error = largest(rotate_to(Q, 17) @ rotate_to(K, 4) - planes)
    return Finding(f"outside {outside:g}; error {error:.1e}", stated=outside == 0 and error < EXACT)


@chapter.claim(
    "rotation.theta",
    "θ_i = 10000^(−2i/d), i = 0 … d/2−1.",
    NOTE_002.at(315, r"原文中设置 $\theta_i = 10000^{-2i/d}$ ，它是一个递减的序列"),
    NOTE_003.at(81, r"\theta_i = \text{base}^{-\frac{2i}{d}}, i = 0,1,...,\frac{d}{2}-1"),
    method="the frequencies of a spec against the formula, d = 128",
    expected="equal, decreasing from 1",
)
def _() -> Finding:
    frequencies = RopeSpec(128).inv_freq()
    error = max(abs(float(frequencies[i]) - 10_000.0 ** (-2 * i / 128)) for i in range(64))
    decreasing = bool((frequencies[1:] < frequencies[:-1]).all())
    return Finding(
        f"error {error:.1e}, first {frequencies[0]:g}, {'decreasing' if decreasing else 'not decreasing'}",
        stated=error < 1e-15 and decreasing and frequencies[0] == 1,
    )


@chapter.claim(
    "rotation.theta-from-one",
    "θ_i = 10000^(−2(i−1)/d), i = 1 … d/2.",
    NOTE_000.at(49, r"$\theta_i = 10000^{-2(i-1)/d}$"),
    method="the frequencies of a spec against the formula, d = 128",
    expected="equal to the frequencies numbered from 0",
)
def _() -> Finding:
    error = max(abs(float(RopeSpec(128).inv_freq()[i - 1]) - 10_000.0 ** (-2 * (i - 1) / 128)) for i in range(1, 65))
    return Finding(f"error {error:.1e}", stated=error < 1e-15)


@chapter.claim(
    "rotation.theta-mixed",
    "The matrix has θ_1 … θ_{d/2} and q the pairs 1 … d/2, but θ_i = 10000^(−2i/d), and sums start at j = 0.",
    NOTE_002.at(255, r"\cos m\theta_{d/2} & -\sin m\theta_{d/2}"),
    NOTE_002.at(315, r"原文中设置 $\theta_i = 10000^{-2i/d}$"),
    NOTE_002.at(299, r"$q_m = (q_{m,1} \cdots q_{m,128})$"),
    NOTE_002.at(313, r"\text{Total Score} = \sum_{j=0}^{d/2-1} \text{Score}_j"),
    method="10000^(−2i/d) at i = 1 … d/2 against the frequencies of RoFormer, d = 128",
    expected="each is too small by the factor 10000^(−2/d) = 0.866",
    misprint="indices from 1 and from 0 are mixed: −2i/d needs i from 0, with i from 1 it is −2(i−1)/d",
)
def _() -> Finding:
    mixed = torch.tensor([10_000.0 ** (-2 * i / 128) for i in range(1, 65)], dtype=torch.float64)
    ratio = mixed / theta(128)
    return Finding(
        f"ratio {float(ratio[0]):.4f}",
        stated=largest(ratio - 1) < EXACT,
        amended=largest(ratio - 10_000.0 ** (-2 / 128)) < EXACT,
    )


@chapter.claim(
    "rotation.even",
    "The dimension must be even.",
    NOTE_003.at(11, "즉 차원 $d$ 가 짝수여야 하며"),
    method="7 features rotated in pairs: the change of the last one at 100 positions; a spec of 7 features",
    expected="0: a feature without a partner does not depend on its position; RopeSpec raises an error",
)
def _() -> Finding:
    x = normal(1, 7).expand(100, 7)
    change = largest((rotate(x, torch.arange(100), theta(6)) - x)[:, 6])
    try:
        rejected = bool(RopeSpec(7)) and False
    except RopewalkError:
        rejected = True
    return Finding(
        f"change {change:g}; RopeSpec(7) is {'rejected' if rejected else 'accepted'}", stated=change == 0 and rejected
    )


@chapter.claim(
    "rotation.sparse",
    "Multiplying by the whole matrix wastes memory and time.",
    NOTE_002.at(
        346, "由于 R_Θ^d 是一个巨大且稀疏的矩阵（绝大部分元素都是 0），直接应用矩阵乘法不仅浪费显存，而且计算效率低下。"
    ),
    method="operations and stored numbers for one vector of d = 128: R_m x and the element-wise form, counted by torch",
    expected="2d² = 32768 operations on 16384 numbers, against 3d = 384 on 128 cosines and sines",
)
def _() -> Finding:
    matrix = _matrix(5, 128)
    with FlopCounterMode(display=False) as counter:
        torch.mm(matrix, normal(128, 1))
    dense = counter.get_total_flops()
    cos, sin = torch.cos(5 * theta(128)), torch.sin(5 * theta(128))
    a, b = split_pairs(normal(128, seed=1), "interleaved")
    with FlopCounterMode(display=False, custom_mapping=ELEMENTWISE) as elements:
        rotated = a * cos - b * sin, a * sin + b * cos
    sparse, tables = elements.get_total_flops(), cos.numel() + sin.numel()
    error = largest(join_pairs(*rotated, "interleaved") - rotate_to(normal(128, seed=1), 5))
    used = int((matrix != 0).sum())
    return Finding(
        f"{dense} against {sparse} operations ({dense / sparse:.0f}×), {matrix.numel()} against {tables} numbers; "
        f"{used} entries are not 0",
        stated=(dense, sparse, used) == (2 * 128**2, 3 * 128, 256) and error < EXACT,
    )
