"""Linear attention: associativity, cost, and feature maps, by formula and in the layers of this library."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from ropewalk.claims.claim import Chapter, Finding, NotAvailable
from ropewalk.claims.layers import one_head, operations
from ropewalk.claims.samples import EXACT, largest, normal, rank
from ropewalk.claims.sources import LINEAR, NOTE_002
from ropewalk.kernels.torch_internals import TorchDispatchMode
from ropewalk.nn.attention.scores import attend
from ropewalk.nn.attention.visibility import Visibility
from ropewalk.nn.linear.feature_maps import FavorFeatures, FeatureMap
from ropewalk.nn.linear.function import linear_attention
from ropewalk.nn.rotary.embedding import RotaryEmbedding
from ropewalk.reference import elu_plus_one

__all__ = ["chapter"]

chapter: Chapter = Chapter("Linear attention: associativity and cost")

DIM = 16


def _quadratic(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.T) @ v


def _associated(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return q @ (k.T @ v)


def _softmax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The attention of `Attention`, for one head."""
    return attend(q[None, None], k[None, None], v[None, None], Visibility(), scale=q.shape[-1] ** -0.5)[0, 0]


def _rotated(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return one_head(q, k, v, rope=RotaryEmbedding(q.shape[-1]), causal=True)


def _full(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return one_head(q, k, v, causal=False)


def _operations(form: Callable[[Tensor, Tensor, Tensor], Tensor], length: int, dim: int = 64) -> int:
    # Only shapes matter, so the tensors have no memory.
    return operations(lambda: form(*torch.empty(3, length, dim, dtype=torch.float64, device="meta")))


def _seconds(length: int) -> tuple[float, float]:
    """Median times of both forms at one length, measured alternately, so that load affects both."""
    q, k, v = normal(3, length, 64).float()
    times: tuple[list[float], list[float]] = ([], [])
    # On one thread: starting the others takes longer than the faster form.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for _ in range(9):
        for form, function in enumerate((_quadratic, _associated)):
            start = time.perf_counter()
            function(q, k, v)
            times[form].append(time.perf_counter() - start)
    torch.set_num_threads(threads)
    return statistics.median(times[0]), statistics.median(times[1])


@chapter.claim(
    "linear.association",
    "Without softmax, (QKᵀ)V = Q(KᵀV).",
    NOTE_002.at(
        48, r"先算后面两个矩阵 $\mathbf{K}^T\mathbf{V}$ ： $\text{Result} = \mathbf{Q}(\mathbf{K}^T\mathbf{V})$"
    ),
    method="both for N = 256, d = 16, relative to the largest element; linear_attention with φ(x) = x, times its "
    "denominator, against (QKᵀ)V",
    expected="equal",
)
def _() -> Finding:
    q, k, v = normal(3, 256, DIM)
    truth = _quadratic(q, k, v)
    error = largest(truth - _associated(q, k, v)) / largest(truth)
    denominator = q @ k.sum(0)[:, None]
    ours = largest(truth - one_head(q, k, v, feature_map="identity", causal=False) * denominator) / largest(truth)
    return Finding(f"largest differences {error:.1e} and {ours:.1e}", stated=max(error, ours) < EXACT)


@chapter.claim(
    "linear.cost",
    "(QKᵀ)V costs O(N²), Q(KᵀV) costs O(N).",
    NOTE_002.at(61, "如果能做到这样, 那么时间复杂度就会从 $O(N^2)$ 变为 $O(N)$ 。"),
    method="operations counted by torch at N = 1024 and 2048, d = 64, for both forms, for the softmax of Attention, "
    "and for linear_attention, full and causal with RoPE; times of both forms at N = 2048",
    expected="4 times the operations for softmax and (QKᵀ)V, 2 times for the others",
)
def _() -> Finding:
    forms = _quadratic, _softmax, _associated, _full, _rotated
    growth = [_operations(form, 2048) / _operations(form, 1024) for form in forms]
    slow, fast = _seconds(2048)
    fewer = _operations(_softmax, 131_072) / _operations(_rotated, 131_072)
    return Finding(
        f"operations for twice N: {growth[0]:g}× and {growth[2]:g}×; layers: softmax {growth[1]:g}×, "
        f"linear {growth[3]:g}×, causal with RoPE {growth[4]:g}×; softmax / linear: {fewer:.0f}× at N = 131072; "
        f"time of (QKᵀ)V / Q(KᵀV) at N = 2048: {slow / fast:.0f}×",
        stated=growth == [4, 4, 2, 2, 2],
    )


class _Largest(TorchDispatchMode):
    """Records the bytes of the largest tensor that an operation returns."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [x for x in (result if isinstance(result, tuple | list) else (result,)) if isinstance(x, Tensor)]
        self.largest = max([self.largest, *(x.numel() * x.element_size() for x in tensors)])
        return result


def _largest_tensor(form: Callable[[Tensor, Tensor, Tensor], Tensor], length: int) -> int:
    """Bytes of the largest tensor while `form` runs, for one head of 64 features in float32."""
    inputs = normal(3, 1, 1, length, 64).float()
    with _Largest() as mode:
        form(*inputs.unbind())
    return mode.largest


def _materialized(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1) @ v


def _fused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        try:
            return functional.scaled_dot_product_attention(q, k, v)
        except RuntimeError:
            raise NotAvailable("this PyTorch has no fused attention on the CPU") from None


@chapter.claim(
    "linear.memory",
    "Attention generates a matrix of N × N scores.",
    NOTE_002.at(33, r"需要计算所有 Query 和 Key 的两两内积，生成一个 $N \times N$ 的注意力矩阵"),
    method="the largest tensor in bytes at N = 1024 and 2048, one head of 64, float32, CPU: softmax(QKᵀ/√d)V as "
    "written, PyTorch's fused kernel, linear_attention",
    expected="4N² bytes as written, four times as many at 2N; twice as many for the fused kernel and linear_attention",
    only_if="the scores are stored, as the formula does; a fused kernel stores one block of them at a time",
)
def _() -> Finding:
    sizes = {
        name: [_largest_tensor(form, n) for n in (1024, 2048)]
        for name, form in (
            ("as written", _materialized),
            ("fused", _fused),
            ("linear", lambda q, k, v: linear_attention(q, k, v)),
        )
    }
    written, fused, linear = sizes.values()
    return Finding(
        "; ".join(f"{name} {a / 2**20:.2f} and {b / 2**20:.2f} MiB" for name, (a, b) in sizes.items()),
        # Not every way of computing attention generates the matrix.
        stated=fused[1] >= 4 * 2048**2,
        amended=written == [4 * 1024**2, 4 * 2048**2] and fused[1] == 2 * fused[0] and linear[1] == 2 * linear[0],
    )


@chapter.claim(
    "linear.cost-in-d",
    "The total cost of linear attention is O(L d²).",
    NOTE_002.at(142, "总时间复杂度为: $O(Ld^2) + O(Ld^2) = O(Ld^2)$"),
    method="operations counted by torch for d = 64 and 128, and at L = 32 and L = 128 for d = 64; operations of "
    "linear_attention without a mask, minus the 4Ld² of the two products in the numerator",
    expected="4 times the operations for twice d; fewer than L² d only if L > d; at most 2Ld for the denominator",
)
def _() -> Finding:
    growth = _operations(_associated, 1024, 128) / _operations(_associated, 1024, 64)
    short, long = (_operations(_quadratic, n) / _operations(_associated, n) for n in (32, 128))
    rest = [(_operations(_full, n, d) - 4 * n * d**2) / (n * d) for n, d in ((1024, 64), (1024, 128), (4096, 64))]
    return Finding(
        f"twice d: {growth:g}×; quadratic / linear: {short:g} at L = 32, {long:g} at L = 128; "
        f"linear_attention: 4Ld² + {max(rest):g}Ld",
        stated=growth == 4 and short < 1 < long and min(rest) >= 0 and max(rest) <= 2,
    )


@chapter.claim(
    "linear.softmax-blocks",
    "Softmax prevents the use of associativity.",
    NOTE_002.at(63, "原始的 attention 中存在非线性变换 softmax 使得无法进行上述结合律变换:"),
    method="numerical rank of QKᵀ and of exp(QKᵀ/√d), N = 256, d = 16, and of the weights of linear_attention and of "
    "Attention, which are their outputs for the identity matrix as values",
    expected="16 for QKᵀ, far more for exp: no map to 16 features gives exp",
)
def _() -> Finding:
    q, k = normal(2, 256, DIM)
    eye = torch.eye(256, dtype=torch.float64)
    plain, exponential = rank(q @ k.T), rank(torch.exp(q @ k.T / DIM**0.5))
    linear, softmax = rank(_full(q, k, eye)), rank(_softmax(q, k, eye))
    return Finding(
        f"rank {plain} and {exponential}; layers {linear} and {softmax}",
        stated=plain == linear == DIM and min(exponential, softmax) > 4 * DIM,
    )


@chapter.claim(
    "linear.kernel",
    "A feature map approximates exp, sim(q, k) ≈ φ(q)·φ(k), or replaces it, as φ = elu + 1 does.",
    NOTE_002.at(
        87,
        r"假设存在一个特征映射函数 $\phi: \mathbb{R}^d \rightarrow "
        r"\mathbb{R}^D$, 使得我们可以用内积来近似 (或替代) exp 函数:",
    ),
    method="weights of linear_attention against softmax, median relative error: elu + 1, and FavorFeatures with "
    "16384 positive random features (FAVOR+), d = 16",
    expected="random features approximate exp: a small error; elu + 1 replaces it: a large one",
    long=True,
)
def _() -> Finding:
    q, k = normal(2, 256, DIM)
    truth = torch.softmax(q @ k.T / DIM**0.5, dim=-1)
    eye = torch.eye(256, dtype=torch.float64)

    def error(phi: FeatureMap) -> float:
        weights = one_head(q, k, eye, feature_map=phi, causal=False)
        return float(((weights - truth).abs() / truth).median())

    elu, favor = error("elu"), error(FavorFeatures(DIM, 16_384))
    return Finding(f"error of elu + 1 {elu:.0%}, of FAVOR+ {favor:.0%}", stated=favor < 0.2 < elu)


@chapter.claim(
    "linear.elu",
    "φ(x) = elu(x) + 1 keeps attention scores positive.",
    NOTE_002.at(91, r"$\phi(x) = \text{elu}(x) + 1$"),
    LINEAR,
    method="F.elu(x) + 1 and exp(x) in float32 for 10001 x from −80 to 0; linear_attention with each, over one key x "
    "with value 1, whose result is 1 unless the weight is 0",
    expected="elu(x) + 1 rounds to 0 below −24 ln 2 = −16.6 or −25 ln 2 = −17.3; exp(x) is positive",
    only_if="it is computed as exp(x) for x ≤ 0; in float32 elu(x) + 1 is exactly 0 below about −17",
)
def _() -> Finding:
    x = torch.linspace(-80, 0, 10_001)
    literal, stable = functional.elu(x) + 1, elu_plus_one(x)
    zero_below = float(x[literal == 0].max())
    key = x.view(-1, 1, 1, 1)
    query, value = torch.zeros_like(key), torch.ones_like(key)
    ours = linear_attention(query, key, value, feature_map="elu").flatten()
    cancelled = linear_attention(query, key, value, feature_map=lambda x: functional.elu(x) + 1).flatten()
    return Finding(
        f"elu + 1 is 0 up to x = {zero_below:.2f}; exp(x) is {stable[0].item():.1e} at −80; keys of weight 0 in "
        f"linear_attention: {int((ours == 0).sum())} of 10001, {int((cancelled == 0).sum())} with F.elu(x) + 1",
        stated=bool((literal > 0).all()),
        amended=bool((stable > 0).all() and (ours == 1).all() and torch.equal(cancelled == 0, literal == 0))
        and -17.35 < zero_below < -16.6,
    )


@chapter.claim(
    "linear.nonnegative",
    "φ should be non-negative, so that attention scores are positive.",
    NOTE_002.at(91, r"注: 为了保证注意力分数为正, $\phi(\cdot)$ 的值通常要求是非负的"),
    method="relu of 256 random q and k, d = 4, causal: the number of zero scores, and of queries with a zero "
    "denominator; the quotient and linear_attention for these queries; the same with elu + 1",
    expected="many zero scores and some zero denominators; 0/0 by the formula, 0 here; none with elu + 1",
    only_if="φ is positive; with non-negative features scores can be 0, even all scores of a query",
)
def _() -> Finding:
    q, k, v = normal(3, 256, 4)

    def scores(phi: Callable[[Tensor], Tensor]) -> Tensor:
        return (phi(q) @ phi(k).T).tril()

    relu, positive = scores(torch.relu), scores(elu_plus_one)
    pairs = torch.ones(256, 256, dtype=torch.bool).tril()
    zero, zero_positive = (int((x[pairs] <= 0).sum()) for x in (relu, positive))
    empty = relu.sum(-1) == 0
    by_formula, ours = (relu @ v / relu.sum(-1, keepdim=True))[empty], one_head(q, k, v, feature_map="relu")[empty]
    defined = bool(by_formula.isnan().all() and (ours == 0).all())
    return Finding(
        f"relu: {zero} of {int(pairs.sum())} scores are 0; {int(empty.sum())} of 256 queries have only zero scores "
        f"and output {float(ours.abs().max()):g} here; elu + 1: {zero_positive}",
        stated=zero == 0,
        amended=zero_positive == 0 and bool(empty.any()) and defined,
    )
