"""Why a transformer needs positions."""

import torch
from torch import Tensor

from ropewalk.claims.claim import Chapter, Finding
from ropewalk.claims.layers import HEADS, WEIGHTS, WIDTH, layer, order_effect, outputs
from ropewalk.claims.samples import EXACT, largest, normal
from ropewalk.claims.sources import CHINESE_1, CHINESE_2
from ropewalk.nn.attention.layer import Attention
from ropewalk.nn.linear.layer import LinearAttention
from ropewalk.reference import multi_head_attention, rotate

__all__ = ["chapter"]

chapter: Chapter = Chapter("Order: attention without positions")

TOKENS = normal(1, 3, WIDTH)
SWAP = [2, 1, 0]


def _outputs(causal: bool, tokens: Tensor) -> Tensor:
    return multi_head_attention(tokens, WEIGHTS, num_heads=HEADS, causal=causal)[0]


def _scores(tokens: Tensor) -> Tensor:
    return (tokens[0] @ WEIGHTS.query.T) @ (tokens[0] @ WEIGHTS.key.T).T


@chapter.claim(
    "order.same-query",
    "The query of a token has the same values at every position; only its row changes.",
    CHINESE_1,
    method="queries of [A, B, C] and of [C, B, A], compared bit by bit",
    expected="difference 0",
)
def _() -> Finding:
    before = torch.stack([WEIGHTS.query @ token for token in TOKENS[0]])
    after = torch.stack([WEIGHTS.query @ token for token in TOKENS[0, SWAP]])
    difference = largest(after - before[SWAP])
    return Finding(f"difference {difference:g}", stated=difference == 0)


@chapter.claim(
    "order.qk-unchanged",
    "The order of the input does not change QKᵀ.",
    CHINESE_1,
    method="QKᵀ of three tokens and of the same tokens permuted by P",
    expected="P QKᵀ Pᵀ, which is a different matrix",
    fails="QKᵀ becomes P QKᵀ Pᵀ: the same numbers, permuted",
)
def _() -> Finding:
    before, after = _scores(TOKENS), _scores(TOKENS[:, SWAP])
    moved, permuted = largest(after - before), largest(after - before[SWAP][:, SWAP])
    return Finding(
        f"|after − before| {moved:.3g}; |after − P·before·Pᵀ| {permuted:.1e}",
        stated=moved < EXACT,
        amended=permuted < EXACT,
    )


@chapter.claim(
    "order.indistinguishable",
    "Without positions a transformer cannot distinguish a sentence from the same words in another order.",
    CHINESE_1,
    method="outputs of full and of causal attention for permuted tokens, against permuted outputs; the same for "
    "Attention and LinearAttention without an encoding",
    expected="equal for full attention, not for causal",
    only_if="there is no causal mask; outputs of a causal layer depend on the order without any encoding",
)
def _() -> Finding:
    full, causal = (
        largest(_outputs(masked, TOKENS[:, SWAP]) - _outputs(masked, TOKENS)[SWAP]) for masked in (False, True)
    )
    softmax, softmax_causal, linear, linear_causal = (
        order_effect(layer(kind, None, causal=masked), TOKENS, SWAP)
        for kind in (Attention, LinearAttention)
        for masked in (False, True)
    )
    return Finding(
        f"full attention {full:.1e}, causal {causal:.3g}; Attention {softmax:.1e} and {softmax_causal:.3g}, "
        f"LinearAttention {linear:.1e} and {linear_causal:.3g}",
        stated=max(full, causal, softmax_causal, linear_causal) < EXACT,
        amended=max(full, softmax, linear) < EXACT < min(causal, softmax_causal, linear_causal),
    )


@chapter.claim(
    "order.captures",
    "The attention module captures the positions of its input, that is, it cannot distinguish them.",
    CHINESE_2,
    method="outputs for permuted tokens against permuted outputs",
    expected="equal: positions are not captured",
    fails="a negation is missing: attention does NOT capture positions, so it cannot distinguish them",
)
def _() -> Finding:
    difference = largest(_outputs(False, TOKENS[:, SWAP]) - _outputs(False, TOKENS)[SWAP])
    return Finding(f"difference {difference:.1e}", stated=difference > EXACT, amended=difference < EXACT)


@chapter.claim(
    "order.rope-tells",
    "With rotated queries and keys the order of the words matters.",
    CHINESE_1,
    method="outputs of full attention with RoPE for permuted tokens, against permuted outputs; Attention with rope "
    "against the formula",
    expected="permuted tokens give other outputs; the layer equals the formula",
)
def _() -> Finding:
    inv_freq = torch.tensor([1.0, 0.1, 0.01, 0.001], dtype=torch.float64)

    def by_formula(tokens: Tensor) -> Tensor:
        return multi_head_attention(
            tokens, WEIGHTS, num_heads=HEADS, rotate=lambda q, k, m: (rotate(q, m, inv_freq), rotate(k, m, inv_freq))
        )[0]

    difference = largest(by_formula(TOKENS[:, SWAP]) - by_formula(TOKENS)[SWAP])
    ours = layer(Attention, "rope", causal=False)
    error = largest(outputs(ours, TOKENS)[0] - by_formula(TOKENS))
    in_layer = order_effect(ours, TOKENS, SWAP)
    return Finding(
        f"difference {difference:.3g}, in Attention {in_layer:.3g}; Attention against the formula {error:.1e}",
        stated=min(difference, in_layer) > 1e-3 and error < EXACT,
    )
