"""Linear attention: association, what it costs, and feature maps, by formula and in the library's layers."""

import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from ropewalk.claims.layers import one_head, operations
from ropewalk.claims.ledger import Chapter, Finding
from ropewalk.claims.samples import EXACT, largest, normal, rank
from ropewalk.claims.sources import CHINESE_1, LINEAR
from ropewalk.nn.attention.scores import Sight, attend
from ropewalk.nn.linear.feature_maps import FavorFeatures, FeatureMap
from ropewalk.nn.linear.function import linear_attention
from ropewalk.nn.rotary.embedding import RotaryEmbedding
from ropewalk.reference import elu_plus_one

__all__ = ["chapter"]

chapter: Chapter = Chapter("Linear attention: association and its cost")

DIM = 16


def _quadratic(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.T) @ v


def _associated(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return q @ (k.T @ v)


def _softmax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The attention of `Attention`, one head."""
    return attend(q[None, None], k[None, None], v[None, None], Sight(), scale=q.shape[-1] ** -0.5)[0, 0]


def _rotated(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return one_head(q, k, v, rope=RotaryEmbedding(q.shape[-1]), causal=True)


def _full(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return one_head(q, k, v, causal=False)


def _operations(way: Callable[[Tensor, Tensor, Tensor], Tensor], length: int, dim: int = 64) -> int:
    # Shapes are all that counts: tensors without memory.
    return operations(lambda: way(*torch.empty(3, length, dim, dtype=torch.float64, device="meta")))


def _seconds(length: int) -> tuple[float, float]:
    """Medians of both ways at one length, taken in turns so that a busy machine slows both."""
    q, k, v = normal(3, length, 64).float()
    times: tuple[list[float], list[float]] = ([], [])
    # On one thread: waking the others takes longer than the shorter way.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for _ in range(9):
        for way, function in enumerate((_quadratic, _associated)):
            start = time.perf_counter()
            function(q, k, v)
            times[way].append(time.perf_counter() - start)
    torch.set_num_threads(threads)
    return statistics.median(times[0]), statistics.median(times[1])


@chapter.claim(
    "linear.association",
    "Without softmax, (QKᵀ)V = Q(KᵀV).",
    CHINESE_1,
    method="both for N = 256, d = 16, relative to the largest element; linear_attention with φ(x) = x, times its "
    "denominator, against (QKᵀ)V",
    expected="equal",
)
def _() -> Finding:
    q, k, v = normal(3, 256, DIM)
    truth = _quadratic(q, k, v)
    error = largest(truth - _associated(q, k, v)) / largest(truth)
    below = q @ k.sum(0)[:, None]
    ours = largest(truth - one_head(q, k, v, feature_map="identity", causal=False) * below) / largest(truth)
    return Finding(f"largest differences {error:.1e} and {ours:.1e}", stated=max(error, ours) < EXACT)


@chapter.claim(
    "linear.cost",
    "(QKᵀ)V costs O(N²), Q(KᵀV) costs O(N).",
    CHINESE_1,
    method="operations counted by torch at N = 1024 and 2048, d = 64, of both; of the softmax of Attention and of "
    "linear_attention, full and causal with RoPE; times of both at N = 2048 taken in turns",
    expected="4 times as many against twice as many, in each",
)
def _() -> Finding:
    ways = _quadratic, _softmax, _associated, _full, _rotated
    growth = [_operations(way, 2048) / _operations(way, 1024) for way in ways]
    slow, fast = _seconds(2048)
    fewer = _operations(_softmax, 131_072) / _operations(_rotated, 131_072)
    return Finding(
        f"doubling N: {growth[0]:g}× and {growth[2]:g}× the operations; in the layers {growth[1]:g}×, {growth[3]:g}× "
        f"and, causal with RoPE, {growth[4]:g}×, which is {fewer:.0f}× fewer at N = 131072; "
        f"at N = 2048 {slow / fast:.0f}× the time",
        stated=growth == [4, 4, 2, 2, 2],
    )


@chapter.claim(
    "linear.cost-in-d",
    "Linear attention costs O(L d²) in all.",
    CHINESE_1,
    method="operations counted by torch, doubling d, and at L = 32 and L = 128 for d = 64; those of linear_attention "
    "without a mask less 4Ld², the two products above the line",
    expected="4 times as many for twice d; fewer than L² d only where L > d; at most 2Ld are left, the line below",
)
def _() -> Finding:
    growth = _operations(_associated, 1024, 128) / _operations(_associated, 1024, 64)
    short, long = (_operations(_quadratic, n) / _operations(_associated, n) for n in (32, 128))
    left = [(_operations(_full, n, d) - 4 * n * d**2) / (n * d) for n, d in ((1024, 64), (1024, 128), (4096, 64))]
    return Finding(
        f"doubling d: {growth:g}×; quadratic / linear: {short:g} at L = 32, {long:g} at L = 128; "
        f"linear_attention: 4Ld² + {max(left):g}Ld",
        stated=growth == 4 and short < 1 < long and min(left) >= 0 and max(left) <= 2,
    )


@chapter.claim(
    "linear.softmax-blocks",
    "Softmax stands in the way of association.",
    CHINESE_1,
    method="numerical rank of QKᵀ and of exp(QKᵀ/√d), N = 256, d = 16; of the weights of linear_attention and of "
    "Attention, which are what they make of the identity as values",
    expected="16, and far more: no 16 features give exp",
)
def _() -> Finding:
    q, k = normal(2, 256, DIM)
    eye = torch.eye(256, dtype=torch.float64)
    plain, exponential = rank(q @ k.T), rank(torch.exp(q @ k.T / DIM**0.5))
    linear, softmax = rank(_full(q, k, eye)), rank(_softmax(q, k, eye))
    return Finding(
        f"rank {plain} and {exponential}; in the layers {linear} and {softmax}",
        stated=plain == linear == DIM and min(exponential, softmax) > 4 * DIM,
    )


@chapter.claim(
    "linear.kernel",
    "A feature map approximates (or replaces) exp: sim(q, k) ≈ φ(q)·φ(k), for instance with φ = elu + 1.",
    CHINESE_1,
    method="weights of linear_attention against softmax, median relative error: elu + 1, and FavorFeatures with "
    "16384 positive random features (FAVOR+), d = 16",
    expected="elu + 1 is far off; random features are near",
    only_if="for elu + 1 'replaces' is meant; it is no approximation of exp, random features are",
)
def _() -> Finding:
    q, k = normal(2, 256, DIM)
    truth = torch.softmax(q @ k.T / DIM**0.5, dim=-1)
    eye = torch.eye(256, dtype=torch.float64)

    def error(phi: FeatureMap) -> float:
        weights = one_head(q, k, eye, feature_map=phi, causal=False)
        return float(((weights - truth).abs() / truth).median())

    off, near = error("elu"), error(FavorFeatures(DIM, 16_384))
    return Finding(f"elu + 1 off by {off:.0%}, FAVOR+ by {near:.0%}", stated=off < 0.2, amended=near < 0.2)


@chapter.claim(
    "linear.elu",
    "φ(x) = elu(x) + 1 keeps attention scores positive.",
    f"{CHINESE_1}, {LINEAR}",
    method="F.elu(x) + 1 and exp(x) in float32 for 10001 x from −80 to 0; linear_attention over one key x of value 1 "
    "with each, which gives 1 unless its weight is 0",
    expected="exactly 0 the first way from −24 ln 2 = −16.6 or −25 ln 2 = −17.3 down, by rounding; positive the second",
    only_if="it is computed as exp(x) for x ≤ 0; elu(x) + 1 cancels to exactly 0 in float32 from about −17 down",
)
def _() -> Finding:
    x = torch.linspace(-80, 0, 10_001)
    literal, stable = functional.elu(x) + 1, elu_plus_one(x)
    zero_below = float(x[literal == 0].max())
    key = x.view(-1, 1, 1, 1)
    query, value = torch.zeros_like(key), torch.ones_like(key)
    ours = linear_attention(query, key, value, feature_map="elu").flatten()
    lost = linear_attention(query, key, value, feature_map=lambda x: functional.elu(x) + 1).flatten()
    return Finding(
        f"elu + 1 is 0 up to x = {zero_below:.2f}; exp(x) is {stable[0].item():.1e} at −80; "
        f"linear_attention loses {int((ours == 0).sum())} of 10001 keys, {int((lost == 0).sum())} with F.elu(x) + 1",
        stated=bool((literal > 0).all()),
        amended=bool((stable > 0).all() and (ours == 1).all() and torch.equal(lost == 0, literal == 0))
        and -17.35 < zero_below < -16.6,
    )


@chapter.claim(
    "linear.nonnegative",
    "φ is to be non-negative, so that attention scores are positive.",
    CHINESE_1,
    method="relu of 256 random q and k, d = 4, causal: scores that are 0, and queries whose denominator is 0; what "
    "the quotient gives there, and what linear_attention does; the same with elu + 1",
    expected="many, and some: 0/0 by the formula, 0 here; none with elu + 1",
    only_if="φ is above 0: non-negative features leave scores of 0, and a query may see nothing but those",
)
def _() -> Finding:
    q, k, v = normal(3, 256, 4)

    def scores(phi: Callable[[Tensor], Tensor]) -> Tensor:
        return (phi(q) @ phi(k).T).tril()

    kept, positive = scores(torch.relu), scores(elu_plus_one)
    pairs = torch.ones(256, 256, dtype=torch.bool).tril()
    zero, zero_positive = (int((x[pairs] <= 0).sum()) for x in (kept, positive))
    blind = kept.sum(-1) == 0
    by_formula, here = (kept @ v / kept.sum(-1, keepdim=True))[blind], one_head(q, k, v, feature_map="relu")[blind]
    defined = bool(by_formula.isnan().all() and (here == 0).all())
    return Finding(
        f"relu: {zero} of {int(pairs.sum())} scores are 0, {int(blind.sum())} of 256 queries see nothing and get "
        f"{float(here.abs().max()):g} here; elu + 1: {zero_positive}",
        stated=zero == 0,
        amended=zero_positive == 0 and bool(blind.any()) and defined,
    )
