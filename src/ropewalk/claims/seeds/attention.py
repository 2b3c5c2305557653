"""Attention layers with each encoding: shifted positions, reversed tokens, and linear attention."""

import torch

from ropewalk.claims.claim import Chapter, Finding
from ropewalk.claims.layers import NAMES, WIDTH, layer, operations, order_effect, outputs
from ropewalk.claims.samples import EXACT, largest, normal
from ropewalk.claims.sources import NOTE_001, NOTE_002, NOTE_003, PRACTICE
from ropewalk.nn.attention.layer import Attention
from ropewalk.nn.linear.layer import LinearAttention
from ropewalk.nn.rotary.embedding import RotaryEmbedding

__all__ = ["chapter"]

chapter: Chapter = Chapter("Layers: every encoding in attention")

TOKENS = normal(1, 12, WIDTH)
# Encodings that add the position to the token. The others depend only on distances, or on the order of the tokens.
ABSOLUTE = ["learned", "sinusoidal", "multiplicative", "concatenated"]


def _shift_effect(module: Attention | LinearAttention) -> float:
    """Largest change of the outputs if all positions are shifted by 1, 7 and 40."""
    unshifted = outputs(module, TOKENS)
    return max(largest(outputs(module, TOKENS, start=shift) - unshifted) for shift in (1, 7, 40))


def _listed(figures: dict[str, float], names: list[str]) -> str:
    return ", ".join(f"{name} {figures[name]:.2g}" for name in names)


@chapter.claim(
    "attention.shift",
    "With RoPE attention depends only on m − n; with an absolute p_m in the token it does not.",
    NOTE_001.at(
        25,
        "их dot-product содержит информацию об **относительных** "
        "позициях токенов, но не содеражит информацию об абсолютных.",
    ),
    NOTE_002.at(195, "无论 m 和 n 怎么变，只要它们的相对位置 $m - n$ 不变，那么注意力分数就不会改变。"),
    NOTE_003.at(9, "이를 통해 위치 간 상대적 거리가 자연스럽게 모델에 반영됩니다."),
    method="change of the outputs of Attention, float64, if all positions shift by 1, 7 and 40; 11 encodings",
    expected="learned, sinusoidal, multiplicative and concatenated change; none, recurrent, t5, alibi, rope, "
    "rope-across-heads and xpos do not",
)
def _() -> Finding:
    layers = {name: layer(Attention, name) for name in NAMES}
    effects = {name: _shift_effect(module) for name, module in layers.items()}
    changed = [name for name in NAMES if effects[name] > EXACT]
    others = max(effects[name] for name in NAMES if name not in ABSOLUTE)
    encodings = {name: module.encoding for name, module in layers.items()}
    declared = [name for name, encoding in encodings.items() if encoding is not None and not encoding.relative]
    return Finding(
        f"{_listed(effects, ABSOLUTE)}; the other {len(NAMES) - len(ABSOLUTE)}: {others:.1e} at most",
        stated=changed == declared == ABSOLUTE and min(effects[name] for name in ABSOLUTE) > 0.1 and others < EXACT,
    )


@chapter.claim(
    "attention.reverse",
    "With positions a transformer distinguishes 'I love you' from 'you love I', the same words in reverse.",
    PRACTICE,
    method="outputs of Attention without a mask for three reversed tokens, against reversed outputs, for each of "
    "11 encodings; for ALiBi also with two neighbours swapped, and with a causal mask",
    expected="equal without an encoding, and with ALiBi, whose −s|m−n| is symmetric; different for the others",
    only_if="the encoding or the mask distinguishes before from after; ALiBi without a causal mask does not",
)
def _() -> Finding:
    tokens, reverse = TOKENS[:, :3], [2, 1, 0]
    effects = {name: order_effect(layer(Attention, name, causal=False), tokens, reverse) for name in NAMES}
    unaffected = [name for name in NAMES if effects[name] < EXACT]
    swapped = order_effect(layer(Attention, "alibi", causal=False), tokens, [1, 0, 2])
    masked = order_effect(layer(Attention, "alibi"), tokens, reverse)
    others = min(effects[name] for name in NAMES if name not in ("none", "alibi"))
    return Finding(
        f"none {effects['none']:.1e}, alibi {effects['alibi']:.1e}; the others {others:.2g} or more; alibi with "
        f"neighbours swapped {swapped:.2g}, causal {masked:.2g}",
        stated=unaffected == ["none"],
        amended=unaffected == ["none", "alibi"] and min(others, swapped, masked) > 1e-3,
    )


@chapter.claim(
    "linear.layers",
    "RoPE can be used with linear attention.",
    NOTE_002.at(330, "接下来说 RoPE 的另一个性质，也就是它可以兼容线性注意力，从而降低复杂度。"),
    method="LinearAttention with each of the 11 encodings, RoPE among them: 12 tokens at once against one token per "
    "step",
    expected="equal",
)
def _() -> Finding:
    difference = 0.0
    for name in NAMES:
        module = layer(LinearAttention, name)
        tokens = TOKENS if module.encoding is None else module.encoding.embed(TOKENS, torch.arange(12))
        state, steps = None, []
        for token in tokens.split(1, dim=1):
            step, state = module.step(token, state)
            steps.append(step)
        difference = max(difference, largest(torch.cat(steps, dim=1) - module(tokens)))
    return Finding(
        f"{len(NAMES)} encodings; largest difference {difference:.1e}",
        stated="rope" in NAMES and len(NAMES) == 11 and difference < EXACT,
    )


@chapter.claim(
    "linear.relative",
    "With RoPE attention has relative positions and still has linear cost.",
    NOTE_002.at(176, "为了处理上述问题（能体现位置信息，同时可使用线性注意力以降低复杂度），RoPE 诞生了！"),
    method="LinearAttention with each of 11 encodings: change of the outputs if all positions shift; with RoPE and "
    "no mask, reversed tokens; operations with RoPE at 1024 and 2048 tokens, against Attention",
    expected="only the four absolute ones change; reversed tokens give other outputs; 2 times the operations, more "
    "for Attention",
)
def _() -> Finding:
    effects = {name: _shift_effect(layer(LinearAttention, name)) for name in NAMES}
    changed = [name for name in NAMES if effects[name] > EXACT]
    reverse = order_effect(layer(LinearAttention, "rope", causal=False), TOKENS, list(range(11, -1, -1)))

    def growth(kind: type[Attention] | type[LinearAttention]) -> float:
        module = kind(64, 1, encoding=RotaryEmbedding(64), device="meta")
        short, long = (operations(lambda n=n: module(torch.empty(1, n, 64, device="meta"))) for n in (1024, 2048))
        return long / short

    linear, softmax = growth(LinearAttention), growth(Attention)
    return Finding(
        f"shift: rope {effects['rope']:.1e}, {_listed(effects, ABSOLUTE)}; reversed tokens: {reverse:.2g}; "
        f"operations for twice the tokens: {linear:g}×, softmax {softmax:.2f}×",
        stated=changed == ABSOLUTE and reverse > 1e-3 and linear == 2 and softmax > 3,
    )
