"""Heads: one rotation of d_model or one per head, and the features that complete a rotation in training."""

import itertools

import torch
from torch import Tensor

from ropewalk.claims.claim import Chapter, Finding
from ropewalk.claims.layers import WIDTH, layer, outputs
from ropewalk.claims.samples import EXACT, drift, largest, normal, theta
from ropewalk.claims.sources import LIU, NOTE_000, NOTE_002
from ropewalk.nn.attention.layer import Attention
from ropewalk.reference import rotate, softmax_attention
from ropewalk.spec import AcrossHeads, Pairing, RopeSpec
from ropewalk.theory import critical_dimension, periods

__all__ = ["chapter"]

chapter: Chapter = Chapter("Heads: rotation of the model or of each head")

HEADS, DIM = 8, 64
SPEC = RopeSpec(DIM, AcrossHeads(10_000, num_heads=HEADS))


def _split(x: Tensor) -> Tensor:
    """[seq, heads · dim] -> [heads, seq, dim]"""
    return x.view(len(x), HEADS, DIM).transpose(0, 1)


@chapter.claim(
    "heads.own-frequencies",
    "Rotating all of d_model before the split into heads gives each head its own rotation.",
    NOTE_000.at(
        52,
        "мы считаем все проекции (итоговая размерность $d_{model}$) и применяем "
        "поворот. Таким образом, каждая голова получит поворот со своими параметрами.",
    ),
    method="512 features rotated and then split into 8 heads, against heads rotated with AcrossHeads frequencies; "
    "Attention with rope-across-heads against attention over projections that were rotated before the split",
    expected="equal; no frequency occurs in two heads",
)
def _() -> Finding:
    x, ids = normal(6, HEADS * DIM), torch.arange(6) * 100
    before = _split(rotate(x, ids, theta(HEADS * DIM)))
    after = rotate(_split(x), ids, SPEC.inv_freq())
    error = largest(before - after)
    distinct = len(set(SPEC.inv_freq().ravel().tolist()))
    ours = layer(Attention, "rope-across-heads")
    tokens = normal(1, 6, WIDTH, seed=2)
    q, k, v = (projection(tokens)[0] for projection in (ours.q_proj, ours.k_proj, ours.v_proj))
    q, k = (rotate(x, torch.arange(6), theta(WIDTH)) for x in (q, k))
    heads = softmax_attention(
        *(x.unflatten(-1, (ours.num_heads, -1)).transpose(0, 1)[None] for x in (q, k, v)), causal=True
    )
    in_layer = largest(ours.o_proj(heads.transpose(1, 2).flatten(2)) - outputs(ours, tokens))
    return Finding(
        f"difference {error:.1e}; {distinct} frequencies in {HEADS} heads; Attention {in_layer:.1e}",
        stated=max(error, in_layer) < EXACT and distinct == HEADS * DIM // 2,
    )


@chapter.claim(
    "heads.range",
    "If d_model is rotated before the split, each head has parameters of its own: other ranges of periods.",
    NOTE_000.at(52, "Таким образом, каждая голова получит поворот со своими параметрами."),
    method="shortest period of each head, 8 heads of 64: rotation of d_model, and rotation per head as in models",
    expected="d_model: head 0 has 6.3 … 19 and head 7 starts at 19869; per head: every head has 6.3 … 47117",
)
def _() -> Finding:
    whole = [periods(row) for row in SPEC.inv_freq()]
    each = periods(RopeSpec(DIM).inv_freq())
    first, last = whole[0], whole[-1]
    return Finding(
        f"head 0: {first[0]:.1f} … {first[-1]:.0f}, head 7: from {last[0]:.0f}; "
        f"per head: {each[0]:.1f} … {each[-1]:.0f}",
        stated=bool(last[0] > 4 * 4096 and first[-1] < 32 and each[-1] > 40_000)
        and all(a[-1] < b[0] for a, b in itertools.pairwise(whole)),
    )


@chapter.claim(
    "heads.relative",
    "With pairs (x_1, x_2), (x_3, x_4), … the rotation of d_model keeps the scores of each head relative.",
    NOTE_000.at(48, "делим входной вектор размерности $d$ на $d/2$ пар ($(x_1, x_2), (x_3, x_4)$ и так далее)"),
    method="drift of the score of each head, 512 features rotated and split into 8 heads, in both pairings",
    expected="none for pairs (0,1), (2,3), …; drift for pairs (i, i+256), which are in different heads",
)
def _() -> Finding:
    q, k = normal(2, 1, HEADS * DIM, seed=1)

    def score_drift(pairing: Pairing) -> float:
        def scores(m: int, n: int) -> Tensor:
            rotated_q, rotated_k = (
                _split(rotate(x, torch.tensor([position]), theta(HEADS * DIM), pairing=pairing))
                for x, position in ((q, m), (k, n))
            )
            return (rotated_q * rotated_k).sum((-1, -2))

        return drift(scores)

    interleaved, half = score_drift("interleaved"), score_drift("half")
    return Finding(
        f"drift {interleaved:.1e} (neighbours), {half:.3g} (half)",
        stated=interleaved < EXACT < half,
    )


@chapter.claim(
    "heads.d-model",
    "The rotation has the width of the model: d = d_model = 768 or 4096.",
    NOTE_002.at(247, "General form ($d_{model} = 768$ 或 $d_{model} = 4096$ 等)"),
    method="768 features in 12 heads of 64: distinct frequencies, and the pairs of the last head that complete a "
    "rotation within 4096 tokens, if d_model is rotated before the split, and if each head is rotated; the frequencies "
    "of one head of 768, both ways",
    expected="384 and 0 of 32; 32 and 23 of 32; equal for one head",
    only_if="there is one head; models rotate each head, with d = head_dim, so that heads share their frequencies",
)
def _() -> Finding:
    heads, width = 12, 768
    across = RopeSpec(width // heads, AcrossHeads(10_000, num_heads=heads)).inv_freq()
    each = RopeSpec(width // heads).inv_freq()
    distinct = len(set(across.ravel().tolist())), len(set(each.tolist()))
    complete = tuple(int((periods(row) <= 4096).sum()) for row in (across[-1], each))
    single = RopeSpec(width, AcrossHeads(10_000, num_heads=1)).inv_freq()[0]
    same = float(abs(single - RopeSpec(width).inv_freq()).max())
    different = float(abs(across[-1] - each).max())
    return Finding(
        f"d_model: {distinct[0]} frequencies, {complete[0]} of 32 pairs of the last head complete a rotation; per "
        f"head: {distinct[1]} and {complete[1]}; one head: difference {same:g}",
        stated=different < EXACT,
        amended=(distinct, complete, same) == ((384, 32), (0, 23), 0.0),
    )


@chapter.claim(
    "heads.critical-dimension",
    "LLaMA-2 (d = 128, base 10000, trained to 4096) has a critical dimension of 92.",
    LIU,
    method="2⌈d/2 · log_base(4096/2π)⌉, and the number of features with a period of at most 4096",
    expected="92 both ways; 36 features do not complete a rotation",
)
def _() -> Finding:
    formula = critical_dimension(128, 10_000, 4096)
    counted = 2 * int((periods(theta(128).numpy()) <= 4096).sum())
    return Finding(f"{formula} by formula, {counted} counted; {128 - counted} beyond", stated=formula == counted == 92)


@chapter.claim(
    "heads.unseen-angles",
    "Beyond the trained length, the features after the critical dimension get unseen angles.",
    LIU,
    method="angles of each pair at 4096 … 8191: largest distance on the circle to the nearest angle at 0 … 4095",
    expected="above 0.1 only in the last 36 features",
)
def _() -> Finding:
    circle = 2 * torch.pi
    before, after = torch.arange(8192, dtype=torch.float64).split(4096)
    unseen = []
    for pair, frequency in enumerate(theta(128)):
        seen = torch.sort(torch.remainder(before * frequency, circle)).values
        # Angles are on a circle: the last seen angle is also a neighbour of the first.
        seen = torch.cat((seen[-1:] - circle, seen, seen[:1] + circle))
        angles = torch.remainder(after * frequency, circle)
        above = torch.searchsorted(seen, angles).clamp(1, len(seen) - 1)
        nearest = torch.minimum(angles - seen[above - 1], seen[above] - angles)
        if float(nearest.max()) > 0.1:
            unseen.append(pair)
    return Finding(f"{2 * len(unseen)} features, from pair {unseen[0]}", stated=unseen == list(range(46, 64)))
