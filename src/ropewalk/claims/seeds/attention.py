"""Layers of attention with each encoding: what moves with all positions, what tells an order, what stays linear."""

import torch

from ropewalk.claims.layers import NAMES, WIDTH, layer, operations, outputs, told
from ropewalk.claims.ledger import Chapter, Finding
from ropewalk.claims.samples import EXACT, largest, normal
from ropewalk.claims.sources import CHINESE_1, KOREAN, RUSSIAN_2
from ropewalk.errors import RopewalkError
from ropewalk.nn.attention.layer import Attention
from ropewalk.nn.linear.layer import LinearAttention
from ropewalk.nn.rotary.embedding import RotaryEmbedding

__all__ = ["chapter"]

chapter: Chapter = Chapter("Layers: every encoding inside attention")

TOKENS = normal(1, 12, WIDTH)
# Encodings that write m into a token; the others see distances, or the order of the tokens alone.
ABSOLUTE = ["learned", "sinusoidal", "multiplicative", "concatenated"]
BIASES = ["t5", "alibi"]


def _moved(of: Attention | LinearAttention) -> float:
    """How much outputs move when all positions move by 1, 7 and 40."""
    still = outputs(of, TOKENS)
    return max(largest(outputs(of, TOKENS, start=by) - still) for by in (1, 7, 40))


def _adds_to_scores(name: str) -> bool:
    encoding, ids = layer(Attention, name).encoding, torch.arange(12)
    return encoding is not None and encoding.bias(ids, ids) is not None


def _listed(figures: dict[str, float], names: list[str]) -> str:
    return ", ".join(f"{name} {figures[name]:.2g}" for name in names)


@chapter.claim(
    "attention.shift",
    "With RoPE attention does not change while m − n stays the same; with an absolute p_m in the token it does.",
    f"{CHINESE_1}, {KOREAN}, {RUSSIAN_2}",
    method="outputs of Attention with each of the 11 encodings, float64, when all positions move by 1, 7 and 40",
    expected="learned, sinusoidal, multiplicative and concatenated move; none, recurrent, t5, alibi, rope, "
    "rope-across-heads and xpos do not",
)
def _() -> Finding:
    layers = {name: layer(Attention, name) for name in NAMES}
    moved = {name: _moved(of) for name, of in layers.items()}
    moving = [name for name in NAMES if moved[name] > EXACT]
    still = max(moved[name] for name in NAMES if name not in ABSOLUTE)
    says = [name for name, of in layers.items() if of.encoding is not None and not of.encoding.relative]
    return Finding(
        f"{_listed(moved, ABSOLUTE)}; the other {len(NAMES) - len(ABSOLUTE)}: {still:.1e} at most",
        stated=moving == says == ABSOLUTE and min(moved[name] for name in ABSOLUTE) > 0.1 and still < EXACT,
    )


@chapter.claim(
    "attention.reverse",
    "With positions a transformer tells 'I love you' from 'you love I', the same words in reverse.",
    CHINESE_1,
    method="outputs of Attention without a mask for three tokens in reverse, against outputs reversed, with each of "
    "the 11 encodings; for the one that fails, two neighbours swapped, and a causal mask",
    expected="equal without an encoding, and with ALiBi, whose −s|m−n| is the same on both sides; told by the others",
    only_if="something tells before from after: ALiBi does not, unless the mask is causal",
)
def _() -> Finding:
    tokens, reverse = TOKENS[:, :3], [2, 1, 0]
    apart = {name: told(layer(Attention, name, causal=False), tokens, reverse) for name in NAMES}
    deaf = [name for name in NAMES if apart[name] < EXACT]
    swapped = told(layer(Attention, "alibi", causal=False), tokens, [1, 0, 2])
    masked = told(layer(Attention, "alibi"), tokens, reverse)
    others = min(apart[name] for name in NAMES if name not in ("none", "alibi"))
    return Finding(
        f"none {apart['none']:.1e}, alibi {apart['alibi']:.1e}; the others {others:.2g} and more; alibi with "
        f"neighbours swapped {swapped:.2g}, causal {masked:.2g}",
        stated=deaf == ["none"],
        amended=deaf == ["none", "alibi"] and min(others, swapped, masked) > 1e-3,
    )


@chapter.claim(
    "linear.encodings",
    "The bias that T5 adds to scores cannot be used in linear attention; RoPE can.",
    CHINESE_1,
    method="LinearAttention made with each of the 11 encodings; of those it takes, 12 tokens at once and one at a "
    "time, each step behind the state of the last; which encodings add a bias B_ij to scores",
    expected="t5 refused, since exp(B_ij) stands inside the sum over keys, and alibi too, whose decay no kernel has; "
    "equal for the other 9",
)
def _() -> Finding:
    biased = [name for name in NAMES if _adds_to_scores(name)]
    refused, apart = [], 0.0
    for name in NAMES:
        try:
            of = layer(LinearAttention, name)
        except RopewalkError:
            refused.append(name)
            continue
        tokens = TOKENS if of.encoding is None else of.encoding.embed(TOKENS, torch.arange(12))
        state, steps = None, []
        for token in tokens.split(1, dim=1):
            step, state = of.step(token, state)
            steps.append(step)
        apart = max(apart, largest(torch.cat(steps, dim=1) - of(tokens)))
    return Finding(
        f"refused: {', '.join(refused)}; the other {len(NAMES) - len(refused)} differ by {apart:.1e}",
        stated=refused == biased == BIASES and apart < EXACT,
    )


@chapter.claim(
    "linear.relative",
    "RoPE does both at once: attention knows relative positions, and stays linear.",
    CHINESE_1,
    method="LinearAttention with each encoding that it takes: how outputs move with all positions; RoPE's without a "
    "mask for tokens in reverse; operations of a layer with RoPE at 1024 and 2048 tokens, and of Attention",
    expected="the four absolute ones move, the others do not; told; twice as many, against more",
)
def _() -> Finding:
    taken = [name for name in NAMES if name not in BIASES]
    moved = {name: _moved(layer(LinearAttention, name)) for name in taken}
    moving = [name for name in taken if moved[name] > EXACT]
    reverse = told(layer(LinearAttention, "rope", causal=False), TOKENS, list(range(11, -1, -1)))

    def growth(kind: type[Attention] | type[LinearAttention]) -> float:
        of = kind(64, 1, encoding=RotaryEmbedding(64), device="meta")
        short, long = (operations(lambda n=n: of(torch.empty(1, n, 64, device="meta"))) for n in (1024, 2048))
        return long / short

    linear, softmax = growth(LinearAttention), growth(Attention)
    return Finding(
        f"rope moves by {moved['rope']:.1e}, {_listed(moved, ABSOLUTE)}; reverse told by {reverse:.2g}; "
        f"doubling N: {linear:g}×, softmax {softmax:.2f}×",
        stated=moving == ABSOLUTE and reverse > 1e-3 and linear == 2 and softmax > 3,
    )
