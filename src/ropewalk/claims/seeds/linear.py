"""Linear attention: association, feature maps, and what a position encoding does to them."""

import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from ropewalk.claims.ledger import Chapter, Finding
from ropewalk.claims.samples import EXACT, largest, normal, rank
from ropewalk.claims.sources import CHINESE_1, LINEAR
from ropewalk.reference import elu_plus_one, linear_attention_by_recurrence, linear_attention_by_sum

__all__ = ["chapter"]

chapter = Chapter("Linear attention: association and its cost")

DIM = 16


def _quadratic(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.T) @ v


def _associated(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return q @ (k.T @ v)


def _operations(function: Callable[[Tensor, Tensor, Tensor], Tensor], length: int, dim: int = 64) -> int:
    with FlopCounterMode(display=False) as counter:
        function(*normal(3, length, dim))
    return counter.get_total_flops()


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
    method="both for N = 256, d = 16, relative to the largest element",
    expected="equal",
)
def _() -> Finding:
    q, k, v = normal(3, 256, DIM)
    error = largest(_quadratic(q, k, v) - _associated(q, k, v)) / largest(_quadratic(q, k, v))
    return Finding(f"largest difference {error:.1e}", stated=error < EXACT)


@chapter.claim(
    "linear.cost",
    "(QKᵀ)V costs O(N²), Q(KᵀV) costs O(N).",
    CHINESE_1,
    method="operations counted by torch at N = 1024 and 2048, d = 64; times at N = 2048 taken in turns",
    expected="4 times as many against twice as many",
)
def _() -> Finding:
    square, line = (_operations(way, 2048) / _operations(way, 1024) for way in (_quadratic, _associated))
    slow, fast = _seconds(2048)
    return Finding(
        f"doubling N: {square:g}× and {line:g}× the operations; at N = 2048 {slow / fast:.0f}× the time",
        stated=square == 4 and line == 2,
    )


@chapter.claim(
    "linear.cost-in-d",
    "Linear attention costs O(L d²) in all.",
    CHINESE_1,
    method="operations counted by torch, doubling d, and at L = 32 and L = 128 for d = 64",
    expected="4 times as many for twice d; fewer than L² d only where L > d",
)
def _() -> Finding:
    growth = _operations(_associated, 1024, 128) / _operations(_associated, 1024, 64)
    short, long = (_operations(_quadratic, n) / _operations(_associated, n) for n in (32, 128))
    return Finding(
        f"doubling d: {growth:g}×; quadratic / linear: {short:g} at L = 32, {long:g} at L = 128",
        stated=growth == 4 and short < 1 < long,
    )


@chapter.claim(
    "linear.softmax-blocks",
    "Softmax stands in the way of association.",
    CHINESE_1,
    method="numerical rank of QKᵀ and of exp(QKᵀ/√d), N = 256, d = 16",
    expected="16, and far more: no 16 features give exp",
)
def _() -> Finding:
    q, k = normal(2, 256, DIM)
    plain, exponential = rank(q @ k.T), rank(torch.exp(q @ k.T / DIM**0.5))
    return Finding(f"rank {plain} and {exponential}", stated=plain == DIM and exponential > 4 * DIM)


@chapter.claim(
    "linear.kernel",
    "A feature map approximates (or replaces) exp: sim(q, k) ≈ φ(q)·φ(k), for instance with φ = elu + 1.",
    CHINESE_1,
    method="attention weights against softmax, median relative error: elu + 1, and 16384 positive random features "
    "(FAVOR+), d = 16",
    expected="elu + 1 is far off; random features are near",
    only_if="for elu + 1 'replaces' is meant; it is no approximation of exp, random features are",
)
def _() -> Finding:
    q, k = normal(2, 256, DIM) / DIM**0.25
    truth = torch.softmax(q @ k.T, dim=-1)
    omega = normal(DIM, 16_384, seed=1)

    def favor(x: Tensor) -> Tensor:
        return torch.exp(x @ omega - (x**2).sum(-1, keepdim=True) / 2) / 128

    def error(phi: Callable[[Tensor], Tensor]) -> float:
        weights = phi(q) @ phi(k).T
        weights = weights / weights.sum(-1, keepdim=True)
        return float(((weights - truth).abs() / truth).median())

    off, near = error(elu_plus_one), error(favor)
    return Finding(f"elu + 1 off by {off:.0%}, FAVOR+ by {near:.0%}", stated=off < 0.2, amended=near < 0.2)


@chapter.claim(
    "linear.elu",
    "φ(x) = elu(x) + 1 keeps attention scores positive.",
    f"{CHINESE_1}, {LINEAR}",
    method="F.elu(x) + 1 and exp(x) in float32 for 10001 x from −80 to 0",
    expected="exactly 0 the first way from −24 ln 2 = −16.6 or −25 ln 2 = −17.3 down, by rounding; positive the second",
    only_if="it is computed as exp(x) for x ≤ 0; elu(x) + 1 cancels to exactly 0 in float32 from about −17 down",
)
def _() -> Finding:
    x = torch.linspace(-80, 0, 10_001)
    literal, stable = functional.elu(x) + 1, elu_plus_one(x)
    zero_below = float(x[literal == 0].max())
    return Finding(
        f"elu + 1 is 0 up to x = {zero_below:.2f}; exp(x) is {stable[0].item():.1e} at −80",
        stated=bool((literal > 0).all()),
        amended=bool((stable > 0).all()) and -17.35 < zero_below < -16.6,
    )


@chapter.claim(
    "linear.state",
    "o_i = φ(q_i) S / φ(q_i) z with S = Σ φ(k_j)ᵀv_j and z = Σ φ(k_j)ᵀ gives the double sum.",
    CHINESE_1,
    method="the double sum and the recurrence for 3 heads, 40 tokens, causal and not",
    expected="equal",
)
def _() -> Finding:
    q, k, v = normal(3, 1, 3, 40, DIM)
    error = max(
        largest(
            linear_attention_by_sum(q, k, v, causal=causal) - linear_attention_by_recurrence(q, k, v, causal=causal)
        )
        for causal in (False, True)
    )
    return Finding(f"largest difference {error:.1e}", stated=error < EXACT)


@chapter.claim(
    "linear.state-size",
    "The state S is a d×d matrix.",
    CHINESE_1,
    method="S for φ(x) = (relu(x), relu(−x)), which maps d = 16 features to D = 32; operations counted by torch",
    expected="32×16, twice the operations",
    only_if="φ keeps the number of features; in general S is D×d, and the cost O(L D d)",
)
def _() -> Finding:
    k, v = normal(2, 256, DIM)

    def counted(features: Tensor) -> tuple[tuple[int, ...], int]:
        with FlopCounterMode(display=False) as counter:
            state = features.T @ v
        return tuple(state.shape), counter.get_total_flops()

    wide, wide_cost = counted(torch.cat((k.relu(), (-k).relu()), dim=-1))
    same, same_cost = counted(elu_plus_one(k))
    return Finding(
        f"{wide[0]}×{wide[1]} at {wide_cost / same_cost:g}× the cost; {same[0]}×{same[1]} for elu + 1",
        stated=wide == (DIM, DIM),
        amended=wide == (2 * DIM, DIM) and same == (DIM, DIM) and wide_cost == 2 * same_cost,
    )
