"""Why a transformer needs positions."""

import torch
from torch import Tensor

from ropewalk.claims.claim import Chapter, Finding
from ropewalk.claims.layers import HEADS, WEIGHTS, WIDTH, layer, order_effect, outputs
from ropewalk.claims.samples import EXACT, largest, normal
from ropewalk.claims.sources import NOTE_002, NOTE_004
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
    NOTE_002.at(25, r"虽然 \mathbf{q}_A 跑到了第二行，但它的数值内容是由 x_A 和 W_Q 决定的。"),
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
    "The order of the input does not change the values of QKᵀ; they only move to other rows and columns.",
    NOTE_002.at(27, "同理计算 attention 中的 K 时也会是同样的结果，因而输入句子的顺序不会改变 QK^T 的值。"),
    method="QKᵀ of three tokens and of the same tokens permuted by P",
    expected="P QKᵀ Pᵀ: the same numbers at other places",
)
def _() -> Finding:
    before, after = _scores(TOKENS), _scores(TOKENS[:, SWAP])
    moved, permuted = largest(after - before), largest(after - before[SWAP][:, SWAP])
    return Finding(
        f"|after − P·before·Pᵀ| {permuted:.1e}; |after − before| {moved:.3g}",
        stated=permuted < EXACT < moved,
    )


@chapter.claim(
    "order.indistinguishable",
    "Without positions a transformer cannot distinguish a sentence from the same words in another order.",
    NOTE_002.at(27, "不加入位置信息的话，transformer 将无法识别类似于“我爱你”与“你爱我”这样的句子的差异。"),
    method="full attention: outputs for permuted tokens against permuted outputs, by formula and for Attention and "
    "LinearAttention without an encoding; causal: outputs for ABC against all outputs for CBA after one layer; the "
    "last output for ABC and for BAC after one layer and after two",
    expected="full: equal; causal: ABC and CBA differ after one layer; the last output of BAC is that of ABC after one "
    "layer, and another after two",
    only_if="there is no causal mask; with one, outputs depend on the order, through the tokens that each output sees",
)
def _() -> Finding:
    full = largest(_outputs(False, TOKENS[:, SWAP]) - _outputs(False, TOKENS)[SWAP])
    softmax, linear = (
        order_effect(layer(kind, None, causal=False), TOKENS, SWAP) for kind in (Attention, LinearAttention)
    )

    def causal(kind: type[Attention] | type[LinearAttention], order: list[int], layers: int) -> Tensor:
        module, tokens = layer(kind, None, causal=True), TOKENS[:, order]
        for _ in range(layers):
            tokens = tokens + outputs(module, tokens)
        return tokens[0]

    abc, bac = [0, 1, 2], [1, 0, 2]
    kinds = Attention, LinearAttention
    reversed_order = min(float(torch.cdist(causal(kind, abc, 1), causal(kind, SWAP, 1)).min()) for kind in kinds)
    one, two = ([largest(causal(kind, abc, n)[-1] - causal(kind, bac, n)[-1]) for kind in kinds] for n in (1, 2))
    return Finding(
        f"full attention {full:.1e}, Attention {softmax:.1e}, LinearAttention {linear:.1e}; causal: CBA after one "
        f"layer at least {reversed_order:.3g}; last output of BAC {max(one):.1e} after one layer, {min(two):.3g} "
        "after two",
        stated=max(full, softmax, linear, reversed_order, *two) < EXACT,
        amended=max(full, softmax, linear, *one) < EXACT and min(reversed_order, *two) > 1e-3,
    )


@chapter.claim(
    "order.captures",
    "Attention captures the positions of its input, that is, it cannot distinguish tokens at other positions.",
    NOTE_004.at(2, "attention 模块捕获输入序列的位置信息，即无法区分不同位置的 token"),
    method="outputs for permuted tokens against permuted outputs",
    expected="equal: positions are not captured",
    misprint="a negation is missing: attention does not capture positions, so it cannot distinguish them",
)
def _() -> Finding:
    difference = largest(_outputs(False, TOKENS[:, SWAP]) - _outputs(False, TOKENS)[SWAP])
    return Finding(f"difference {difference:.1e}", stated=difference > EXACT, amended=difference < EXACT)


@chapter.claim(
    "order.rope-tells",
    "With rotated queries and keys the order of the words matters.",
    NOTE_002.at(186, "而 RoPE 则是通过旋转位置编码来加入位置信息，它能够体现句子中词语的“相对位置”"),
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
