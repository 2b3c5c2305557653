"""Linear attention with positions: bias, decay, rotation, and RoFormer's eq. 19, by formula and in layers."""

import importlib
import math
from collections.abc import Callable
from fractions import Fraction

import torch
from torch import Tensor

from ropewalk.claims.claim import Chapter, Finding, NotAvailable
from ropewalk.claims.layers import one_head, operations, token_by_token
from ropewalk.claims.samples import EXACT, largest, normal, rank, theta
from ropewalk.claims.sources import NOTE_002, PRACTICE, RETNET, ROFORMER
from ropewalk.nn.attention.function import attention
from ropewalk.nn.attention.scores import ScoreBias, attend
from ropewalk.nn.attention.visibility import Visibility
from ropewalk.nn.encodings.bias import AlibiBias, T5Bias
from ropewalk.nn.linear.function import linear_attention
from ropewalk.nn.linear.state import LinearState
from ropewalk.nn.rotary.embedding import RotaryEmbedding
from ropewalk.reference import (
    elu_plus_one,
    linear_attention_by_recurrence,
    linear_attention_by_sum,
    rotate,
    t5_bias,
)
from ropewalk.spec import Explicit, RopeSpec

__all__ = ["chapter"]

chapter: Chapter = Chapter("Linear attention with positions")

DIM, LENGTH = 16, 256
IDS = torch.arange(LENGTH)
Q, K, V = normal(3, LENGTH, DIM)
PHI_Q, PHI_K = elu_plus_one(Q), elu_plus_one(K)
EYE = torch.eye(LENGTH, dtype=torch.float64)
# Queries and keys before the feature map, with the head_dim of models.
RAW_Q, RAW_K = normal(2, LENGTH, 64, seed=7)


def _t5(seed: int = 3, *, causal: bool = False) -> T5Bias:
    """T5's bias for one head, with random numbers in its 32 buckets."""
    module = T5Bias(1, causal=causal).double().requires_grad_(False)
    module.weight.copy_(normal(32, 1, seed=seed))
    return module


def _state_rank(factors: Tensor) -> int:
    """Rank between later queries and earlier keys: the state size that a recurrence needs for these factors."""
    half = LENGTH // 2
    return rank(factors[half:, :half])


@chapter.claim(
    "linear.bias-factor",
    "With an added bias the weight is exp(q·k) exp(B): exp(B_ij) multiplies each φ(q_i)·φ(k_j).",
    NOTE_002.at(
        158,
        r"\exp(\mathbf{q}_i \cdot \mathbf{k}_j + \mathbf{B}_{i,j}) \\ &= "
        r"\exp(\mathbf{q}_i \cdot \mathbf{k}_j) \cdot \exp(\mathbf{B}_{i,j})",
    ),
    method="exp(q·k + B) against exp(q·k) exp(B), with B of T5 and random weights; the weights of softmax "
    "attention with T5Bias against exp(q·k) exp(B) divided by its sum",
    expected="equal",
)
def _() -> Finding:
    bias = t5_bias(IDS, IDS, normal(32, 1), causal=False)[0]
    scores = Q @ K.T / DIM**0.5
    product = torch.exp(scores) * torch.exp(bias)
    error = largest(torch.exp(scores + bias) / product - 1)
    q, k, v = (x[None, None] for x in (Q, K, EYE))
    weights = attend(q, k, v, Visibility(), scale=DIM**-0.5, score_bias=ScoreBias(_t5(seed=0), IDS, IDS))[0, 0]
    ours = largest(weights / (product / product.sum(-1, keepdim=True)) - 1)
    return Finding(f"relative errors {error:.1e} and {ours:.1e}", stated=max(error, ours) < EXACT)


@chapter.claim(
    "linear.bias-denominator",
    "With a bias, o_i = Σ_j φ(q_i)·φ(k_j) P_ij v_j.",
    NOTE_002.at(
        170, r"\mathbf{o}_i = \sum_{j=1}^L (\phi(\mathbf{q}_i) \cdot \phi(\mathbf{k}_j)^T \cdot P_{i,j}) \mathbf{v}_j"
    ),
    method="row sums of these weights, as printed, and divided by Σ_j φ(q_i)·φ(k_j) P_ij",
    expected="not 1 as printed; 1 with the division",
    misprint="divided by Σ_j φ(q_i)·φ(k_j) P_ij, as in line 95 of the note without a bias",
)
def _() -> Finding:
    factors = torch.exp(_t5().bias(IDS, IDS)[0])
    weights = (PHI_Q @ PHI_K.T) * factors
    printed = largest(weights.sum(-1) - 1)
    divided = largest((weights / weights.sum(-1, keepdim=True)).sum(-1) - 1)
    return Finding(
        f"row sums differ from 1 by {printed:.0f} as printed, by {divided:.1e} with the division",
        stated=printed < EXACT,
        amended=divided < EXACT,
    )


@chapter.claim(
    "linear.bias-score",
    "Score is softmax(QKᵀ + B), and Score_ij is q_i·k_j + B_ij.",
    NOTE_002.at(148, r"\text{Score}(Q, K) = \text{Softmax}(QK^T + \mathbf{B})"),
    NOTE_002.at(152, "在 T5 或其他使用加法相对位置编码的模型中, Attention 分数 (Score) 的计算公式是:"),
    method="the difference of the two; exp of the second, divided by its sum over j, against the first",
    expected="the two differ; after exp and division they are equal",
    misprint="two meanings of one word: the second is the score, the first the softmax of the scores",
)
def _() -> Finding:
    scores = Q @ K.T + t5_bias(IDS, IDS, normal(32, 1, seed=3), causal=False)[0]
    weights = torch.softmax(scores, dim=-1)
    difference = largest(weights - scores)
    error = largest(weights - scores.exp() / scores.exp().sum(-1, keepdim=True))
    return Finding(
        f"difference {difference:.3g}; after exp / sum {error:.1e}", stated=difference < EXACT, amended=error < EXACT
    )


@chapter.claim(
    "linear.t5-scale",
    "T5 adds its bias to QKᵀ without dividing by √d: Softmax(QKᵀ + B).",
    NOTE_002.at(148, r"\text{Score}(Q, K) = \text{Softmax}(QK^T + \mathbf{B})"),
    method="T5Attention of transformers with random weights, 2 heads of 8, 12 tokens: its output against "
    "softmax(QKᵀ + B)V and softmax(QKᵀ/√d + B)V, with our t5_bias; rw.attention with T5Bias against the first",
    expected="equal to the first, not to the second",
    long=True,
)
def _() -> Finding:
    try:
        config = importlib.import_module("transformers.models.t5.configuration_t5")
        model = importlib.import_module("transformers.models.t5.modeling_t5")
    except ImportError:
        raise NotAvailable("transformers is missing; pip install transformers") from None
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        options = config.T5Config(d_model=16, d_kv=8, num_heads=2, dropout_rate=0.0, attn_implementation="eager")
        theirs = model.T5Attention(options, has_relative_attention_bias=True, layer_idx=0)
        theirs.double().eval().requires_grad_(False)
        for parameter in theirs.parameters():
            parameter.copy_(normal(*parameter.shape, seed=parameter.numel()))
    x, ids = normal(1, 12, 16, seed=8) / 4, torch.arange(12)
    q, k, v = (projection(x).unflatten(-1, (2, 8)).transpose(1, 2) for projection in (theirs.q, theirs.k, theirs.v))
    bias = t5_bias(ids, ids, theirs.relative_attention_bias.weight, causal=False)

    def attended(scale: float) -> Tensor:
        return theirs.o((torch.softmax(q @ k.mT * scale + bias, -1) @ v).transpose(1, 2).flatten(2))

    out = theirs(x)[0]
    plain, divided = (largest(attended(scale) - out) for scale in (1.0, 8**-0.5))
    module = T5Bias(2).double().requires_grad_(False)
    module.weight.copy_(theirs.relative_attention_bias.weight)
    ours = theirs.o(attention(q, k, v, encoding=module, causal=False).transpose(1, 2).flatten(2))
    own = largest(ours - attended(1.0))
    return Finding(
        f"difference {plain:.1e} without, {divided:.2g} with the division; rw.attention {own:.1e}",
        stated=max(plain, own) < EXACT < 1e-2 < divided,
    )


@chapter.claim(
    "linear.encodings",
    "A relative bias such as T5's makes linear attention impossible to use.",
    NOTE_002.at(150, "但这样会直接导致无法使用线性注意力, 从而没法优化时间复杂度。"),
    method="linear_attention with T5Bias and with AlibiBias, causal and not, with and without RoPE, L = 400, against "
    "the double sum with exp(B) in numerator and denominator; the same for the last 8 tokens, one per call; from which "
    "distance on T5's B is constant",
    expected="equal to rounding; constant from 91 on, from 113 on if causal",
    fails="exact for T5 and ALiBi, in O(L)",
)
def _() -> Finding:
    (q, k, v), ids = normal(3, 1, 1, 400, DIM), torch.arange(400)
    errors, windows = {"t5": 0.0, "alibi": 0.0, "token by token": 0.0}, list[int]()
    for causal in (False, True):
        t5 = _t5(causal=causal)
        by_distance = t5.bias(ids[-1:], ids)[0, 0].flip(0)
        windows.append(400 - int(torch.unique_consecutive(by_distance, return_counts=True)[1][-1]))
        for encoding in (t5, AlibiBias(1).double()):
            for rope in (None, RotaryEmbedding(DIM)):
                inv_freq, bias = None if rope is None else theta(DIM), encoding.bias(ids, ids)
                truth = linear_attention_by_sum(q, k, v, inv_freq=inv_freq, bias=bias, causal=causal)
                ours = linear_attention(q, k, v, rope=rope, bias=encoding, causal=causal)
                errors[encoding.name] = max(errors[encoding.name], largest(ours - truth))
                if causal:
                    stepped, _ = token_by_token(q, k, v, rope=rope, bias=encoding, first=392)
                    errors["token by token"] = max(errors["token by token"], largest(stepped - truth))
    return Finding(
        f"largest differences {', '.join(f'{name} {error:.1e}' for name, error in errors.items())}; T5 constant from "
        f"{windows[0]} on, from {windows[1]} on if causal",
        stated=max(errors.values()) > 1e-9,
        amended=max(errors.values()) < EXACT and windows == [91, 113],
    )


def _by_fft(factors: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Σ_j t(i−j) (q_i·k_j) v_j for any t, as a convolution of k_j v_jᵀ with t. `factors` are t(−(N−1)) … t(N−1)."""
    length = len(q)
    moments = (k[:, :, None] * v[:, None, :]).flatten(1)
    spectrum = torch.fft.rfft(moments, n=3 * length, dim=0) * torch.fft.rfft(factors, n=3 * length)[:, None]
    summed = torch.fft.irfft(spectrum, n=3 * length, dim=0)[length - 1 : 2 * length - 1]
    return torch.einsum("id,ide->ie", q, summed.view(length, q.shape[1], v.shape[1]))


@chapter.claim(
    "linear.bias-quadratic",
    "With an added relative bias the sum must be computed again for every i, so the cost is O(L²) again.",
    NOTE_002.at(172, "因而必须针对每一个 i , 都重新去遍历一遍所有的 j , 这导致复杂度又回到了 $O(L^2)$ 。"),
    method="operations of linear_attention with T5Bias and with AlibiBias, causal and not, at L = 8192 and 16384, "
    "counted by torch; the sum with 511 random values of B(i−j), L = 256, as a convolution by FFT, against the double "
    "sum",
    expected="at most 2 times the operations; equal: a bias of the distance is a convolution",
    fails="O(L) for T5 and ALiBi, else O(L log L)",
)
def _() -> Finding:
    def growth(encoding: T5Bias | AlibiBias, causal: bool) -> float:
        # Only shapes matter, so the tensors have no memory.
        tokens = (torch.empty(1, 1, n, DIM, dtype=torch.float64, device="meta") for n in (8192, 16_384))
        short, long = (operations(lambda x=x: linear_attention(x, x, x, bias=encoding, causal=causal)) for x in tokens)
        return long / short

    growths = [
        growth(encoding, causal)
        for causal in (False, True)
        for encoding in (T5Bias(1, causal=causal).to("meta"), AlibiBias(1))
    ]
    factors = torch.exp(normal(2 * LENGTH - 1, seed=4))
    by_distance = factors[IDS[:, None] - IDS + LENGTH - 1]
    direct = ((PHI_Q @ PHI_K.T) * by_distance) @ V
    error = largest(_by_fft(factors, PHI_Q, PHI_K, V) - direct) / largest(direct)
    return Finding(
        f"operations for twice L: {min(growths):.2f} to {max(growths):.2f}×; FFT against the double sum: relative "
        f"error {error:.1e}",
        stated=max(growths) > 3,
        amended=max(growths) <= 2 and error < EXACT,
    )


@chapter.claim(
    "linear.bias-alibi",
    "With causal ALiBi linear attention is a recurrence with decay: S_i = e^(−s) S_{i−1} + φ(k_i)v_iᵀ.",
    PRACTICE,
    method="rank of exp(B) between later queries and earlier keys, with AlibiBias for 8 heads; the causal sum with "
    "these factors against the recurrence, against linear_attention with bias=AlibiBias(8), and with decay=−s; "
    "normalize=False; its state against S",
    expected="rank 1 in each head, 91 for T5; the sums are equal, with a state of constant size",
)
def _() -> Finding:
    alibi = AlibiBias(8).double()
    factors = torch.exp(alibi.bias(IDS, IDS))
    ranks, t5 = [_state_rank(head) for head in factors], _state_rank(torch.exp(_t5().bias(IDS, IDS)[0]))
    direct = ((PHI_Q @ PHI_K.T) * factors).tril() @ V
    decay = factors[:, 1, 0, None, None]
    state, rows = torch.zeros(8, DIM, DIM, dtype=torch.float64), []
    for q, k, v in zip(PHI_Q, PHI_K, V, strict=True):
        state = decay * state + torch.outer(k, v)
        rows.append(q @ state)
    recurrence = torch.stack(rows, dim=1)
    heads = Q.expand(1, 8, -1, -1), K[None, None], V[None, None]
    ours, final = linear_attention(*heads, bias=alibi, normalize=False, return_state=True)
    decayed = linear_attention(*heads, decay=factors[:, 1, 0].log(), normalize=False)
    errors = [largest(x - direct) / largest(direct) for x in (recurrence, ours[0], decayed[0])]
    same_state = largest(final.above[0] - state) / largest(state)
    return Finding(
        f"largest difference {errors[0]:.1e}, of linear_attention {max(errors[1:]):.1e}, of its state "
        f"{same_state:.1e}; rank {max(ranks)} in {len(ranks)} heads, {t5} for T5",
        stated=max(*errors, same_state) < EXACT and set(ranks) == {1} and t5 > DIM,
    )


def _exact_rank(weight: Callable[[int], Fraction], size: int) -> int:
    """Rank of weight(m − n) between the queries m = size … 2 size − 1 and the keys n = 0 … size − 1, in fractions."""
    rows = [[weight(m - n) for n in range(size)] for m in range(size, 2 * size)]
    found = 0
    for column in range(size):
        pivot = next((row for row in range(found, size) if rows[row][column]), None)
        if pivot is None:
            continue
        rows[found], rows[pivot] = rows[pivot], rows[found]
        for row in range(found + 1, size):
            factor = rows[row][column] / rows[found][column]
            rows[row] = [x - factor * y for x, y in zip(rows[row], rows[found], strict=True)]
        found += 1
    return found


@chapter.claim(
    "linear.bias-state",
    "A bias of −log(1 + distance) needs a state that grows with the length; a sum of exponentials does not.",
    PRACTICE,
    method="rank of exp(B) between N later queries and N earlier keys, N = 6, 12 and 24, in exact fractions: a decay "
    "of 1/2, the sum of decays of 1/2 and 1/3, numbers that are constant from distance 5 on, 1/(1 + distance)",
    expected="1, 2 and at most 5 for every N; N for 1/(1 + distance)",
)
def _() -> Finding:
    sizes = (6, 12, 24)
    near = [Fraction(n) for n in (3, 1, 4, 1, 5)]
    forms: dict[str, Callable[[int], Fraction]] = {
        "decay": lambda d: Fraction(1, 2) ** d,
        "two decays": lambda d: Fraction(1, 2) ** d + Fraction(1, 3) ** d,
        "window": lambda d: near[d] if d < len(near) else Fraction(2),
        "logarithm": lambda d: Fraction(1, 1 + d),
    }
    ranks = {name: [_exact_rank(weight, size) for size in sizes] for name, weight in forms.items()}
    return Finding(
        "; ".join(f"{name} {', '.join(map(str, found))}" for name, found in ranks.items()),
        stated=ranks["decay"] == [1] * 3
        and ranks["two decays"] == [2] * 3
        and len({*ranks["window"]}) == 1
        and max(ranks["window"]) <= len(near)
        and ranks["logarithm"] == [*sizes],
    )


@chapter.claim(
    "linear.retention",
    "Retention is linear attention with RoPE, a decay γ per head, and no denominator.",
    RETNET,
    method="(QKᵀ ⊙ D)V with rotated Q and K, D_mn = γ^(m−n), γ = 1 − 2^(−5−h) for 4 heads, 300 tokens, against "
    "linear_attention with decay=log γ, normalize=False, φ(x) = x and a RotaryEmbedding, at once and from a state",
    expected="equal",
)
def _() -> Finding:
    q, k, v = normal(3, 1, 4, 300, DIM, seed=9)
    ids, gamma = torch.arange(300), 1 - 2.0 ** (-5 - torch.arange(4, dtype=torch.float64))
    kept = (gamma[:, None, None] ** (ids[:, None] - ids).clamp_min(0)).tril()
    truth = ((rotate(q, ids, theta(DIM)) @ rotate(k, ids, theta(DIM)).mT) * kept) @ v

    def retained(part: slice, state: LinearState | None) -> tuple[Tensor, LinearState]:
        return linear_attention(
            *(x[:, :, part] for x in (q, k, v)),
            rope=RotaryEmbedding(DIM),
            decay=gamma.log(),
            normalize=False,
            feature_map="identity",
            state=state,
            return_state=True,
        )

    whole, _ = retained(slice(None), None)
    first, state = retained(slice(290), None)
    last, _ = retained(slice(290, None), state)
    errors = [largest(ours - truth) / largest(truth) for ours in (whole, torch.cat((first, last), dim=2))]
    return Finding(
        f"relative differences {errors[0]:.1e}, and {errors[1]:.1e} from a state", stated=max(errors) < EXACT
    )


@chapter.claim(
    "linear.rotation-factors",
    "With RoPE linear attention stays linear: the rotation is applied to φ(q) and φ(k) separately.",
    NOTE_002.at(
        336,
        r"由于 RoPE 是通过旋转矩阵 R 来实现的，作者选择将旋转操作直接作用于特征映射后的向量 "
        r"$\phi(q)$ 和 $\varphi(k)$ 上。",
    ),
    method="rank of the rotated weights; the double sum against the recurrence, positions up to 2^20; the same for "
    "linear_attention with a RotaryEmbedding, all tokens at once and one token per call",
    expected="rank at most d = 16; equal",
)
def _() -> Finding:
    ids = IDS * 4096
    weight_rank = rank(rotate(PHI_Q, ids, theta(DIM)) @ rotate(PHI_K, ids, theta(DIM)).T)
    q, k, v = (x[None, None] for x in (Q, K, V))
    by_sum = linear_attention_by_sum(q, k, v, inv_freq=theta(DIM), positions=ids, causal=True)
    by_state = linear_attention_by_recurrence(q, k, v, inv_freq=theta(DIM), positions=ids, causal=True)
    error = largest(by_sum - by_state)
    rope = RotaryEmbedding(DIM)
    ours = largest(linear_attention(q, k, v, rope=rope, positions=ids) - by_sum)
    from_zero = linear_attention_by_sum(q, k, v, inv_freq=theta(DIM), causal=True)
    stepped = largest(token_by_token(q, k, v, rope=rope)[0] - from_zero)
    weights = one_head(Q, K, EYE, rope=rope, positions=ids, causal=False)
    return Finding(
        f"rank {weight_rank}; difference {error:.1e}; linear_attention: rank {rank(weights)}, difference {ours:.1e}, "
        f"token by token {stepped:.1e}",
        stated=max(weight_rank, rank(weights)) <= DIM and max(error, ours, stepped) < EXACT,
    )


@chapter.claim(
    "linear.denominator",
    "The denominator is not rotated, because a rotated denominator can be 0 or negative.",
    NOTE_002.at(340, "不在分母上加旋转是因为如果加上旋转，分母的求和结果可能会变成 0 甚至负数。"),
    ROFORMER,
    method="φ = elu + 1 of (3, −40), θ = π/2: rotated and plain sums over keys at distances {2}, then {0, 2}; "
    "linear_attention with values 1 and 3 there, and the same with both sums rotated",
    expected="rotated: negative, then 0; plain: 16 and 32; (16·3 − 16·1)/32 = 1, far from 1 if both are rotated",
)
def _() -> Finding:
    f = torch.tensor([math.pi / 2], dtype=torch.float64)
    one = elu_plus_one(torch.tensor([[3.0, -40.0]], dtype=torch.float64))

    def sums(*distances: int) -> tuple[float, float]:
        keys = one.expand(len(distances), 2)
        query = rotate(one, torch.tensor([2]), f)
        rotated = rotate(keys, 2 - torch.tensor(distances), f)
        return float((query @ rotated.T).sum()), float((one @ keys.T).sum())

    (below, plain), (zero, plain_two) = sums(2), sums(0, 2)
    ids, values = torch.tensor([0, 2]), torch.tensor([[1.0], [3.0]], dtype=torch.float64)
    raw = torch.tensor([[3.0, -40.0]] * 2, dtype=torch.float64)
    rope = RotaryEmbedding(RopeSpec(2, Explicit([math.pi / 2])))
    ours = float(one_head(raw, raw, values, rope=rope, positions=ids)[1])
    rotated = rotate(elu_plus_one(raw), ids, f)
    both = float(one_head(rotated, rotated, values, feature_map="identity")[1])
    return Finding(
        f"rotated {below:.3g} and {zero:.1e}; plain {plain:.3g} and {plain_two:.3g}; linear_attention: "
        f"{ours:.3g}, and {both:.1e} with a rotated denominator",
        stated=below < -1
        and abs(zero) < 1e-12
        and plain > 0
        and plain_two > 0
        and abs(ours - 1) < EXACT
        and not abs(both - 1) < 0.5,
    )


def _denominators(length: int, dim: int) -> tuple[Tensor, Tensor]:
    """Rotated and plain denominators of causal linear attention for random q and k, elu + 1, in O(N d)."""
    q, k = (elu_plus_one(x) for x in normal(2, length, dim, seed=7))
    ids = torch.arange(length)
    rotated = (rotate(q, ids, theta(dim)) * rotate(k, ids, theta(dim)).cumsum(0)).sum(-1)
    return rotated, (q * k.cumsum(0)).sum(-1)


@chapter.claim(
    "linear.denominator-random",
    "With a rotated denominator the computation is extremely unstable, or impossible.",
    NOTE_002.at(340, "这会导致数值极其不稳定，甚至无法计算。"),
    method="rotated denominators of random q and k, elu + 1, causal, d = 16, 64, 128, N = 256, 4096, 16384 and 65536: "
    "the share that is 0 or negative; smallest rotated / plain at N = 256, d = 64, which is also the smallest output "
    "of linear_attention for values of 1",
    expected="none up to N = 256; from N = 16384 on a part, and at N = 65536 a third to a half for every d",
    long=True,
)
def _() -> Finding:
    lengths, dims = (256, 4096, 16_384, 65_536), (16, 64, 128)
    shares: list[list[float]] = []
    for dim in dims:
        rotated, _ = _denominators(lengths[-1], dim)
        shares.append([float((rotated[:n] <= 0).double().mean()) for n in lengths])
    rotated, plain = _denominators(LENGTH, 64)
    ours = one_head(RAW_Q, RAW_K, torch.ones_like(RAW_Q[:, :1]), rope=RotaryEmbedding(64))[:, 0]
    error, smallest = largest(ours - rotated / plain), float(ours.min())
    shown = "; ".join(f"d = {dim}: {', '.join(f'{x:.1%}' for x in row)}" for dim, row in zip(dims, shares, strict=True))
    return Finding(
        f"{shown}; smallest ratio at N = 256: {smallest:.2f}, difference {error:.1e}",
        stated=all(row[0] == 0 and row[-1] > 0.25 for row in shares) and smallest > 0.2 and error < EXACT,
    )


@chapter.claim(
    "linear.weights",
    "In eq. 19 the weights of the values can be negative and do not sum to 1.",
    ROFORMER,
    method="weights for random q and k, elu + 1, d = 64, 256 causal tokens, by the formula and of linear_attention, "
    "as its outputs for the identity matrix as values",
    expected="some negative; row sums decrease from 1 to about 0.4; equal",
)
def _() -> Finding:
    q, k = elu_plus_one(RAW_Q), elu_plus_one(RAW_K)
    rotated = (rotate(q, IDS, theta(64)) @ rotate(k, IDS, theta(64)).T).tril()
    weights = one_head(RAW_Q, RAW_K, EYE, rope=RotaryEmbedding(64))
    error = largest(weights - rotated / (q @ k.T).tril().sum(-1, keepdim=True))
    negative = float((weights < 0).double().sum() / (LENGTH * (LENGTH + 1) / 2))
    first, last = float(weights[0].sum()), float(weights[-1].sum())
    return Finding(
        f"{negative:.1%} negative; row sums from {first:.3f} to {last:.3f}; difference {error:.1e}",
        stated=negative > 0 and abs(first - 1) < EXACT and last < 0.6 and error < EXACT,
    )
