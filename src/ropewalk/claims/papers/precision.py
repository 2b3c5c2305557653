"""Papers and folklore on precision: what float32 and bfloat16 do to positions, angles and scores."""

import math

import torch
from torch import Tensor

from ropewalk.claims.ledger import Chapter, Finding
from ropewalk.claims.samples import cos_error, normal, theta
from ropewalk.claims.sources import FOLKLORE
from ropewalk.reference import rotate

__all__ = ["chapter"]

chapter: Chapter = Chapter("Papers: precision")


@chapter.claim(
    "precision.bf16-positions",
    "bfloat16 can hold position ids.",
    FOLKLORE,
    method="257 and 4095 as bfloat16, and how many of 0 … 8192 stay distinct",
    expected="256, 4096, and 897 of 8193",
    fails="from 257 on it merges neighbours",
)
def _() -> Finding:
    a, b = torch.tensor([257.0, 4095.0]).bfloat16().tolist()
    distinct = len(torch.arange(8193).bfloat16().unique())
    return Finding(
        f"257 → {a:.0f}, 4095 → {b:.0f}; {distinct} of 8193 distinct",
        stated=distinct == 8193,
        amended=(a, b, distinct) == (256, 4096, 897),
    )


@chapter.claim(
    "precision.float32-angles",
    "float32 angles are exact enough.",
    FOLKLORE,
    method="largest error of cos, d = 128, base 10000, in the last 4096 positions before 4k, 32k, 128k, 1M",
    expected="2.3e-4, 1.9e-3, 7.7e-3, 6.2e-2",
    only_if="contexts are short: the error grows with the position, to 6e-2 at a million",
)
def _() -> Finding:
    errors = [cos_error((1 << p) - 4096, 1 << p, torch.float32) for p in (12, 15, 17, 20)]
    golden = all(abs(e / g - 1) < 0.1 for e, g in zip(errors, (2.3e-4, 1.9e-3, 7.7e-3, 6.2e-2), strict=True))
    return Finding(
        ", ".join(f"{e:.1e}" for e in errors), stated=max(errors) < 1e-6, amended=golden and errors == sorted(errors)
    )


@chapter.claim(
    "precision.bf16-angles",
    "Angles formed in bfloat16 are wrong beyond use.",
    FOLKLORE,
    method="largest error of cos up to 4096, positions, frequencies and product in bfloat16, d = 128",
    expected="2.0, the largest that is possible",
)
def _() -> Finding:
    error = cos_error(0, 4096, torch.bfloat16)
    return Finding(f"{error:.2f}", stated=error > 1.99)


@chapter.claim(
    "precision.bf16-shift",
    "In bfloat16 RoPE loses its relative property, the more the farther out.",
    FOLKLORE,
    method="how far scores of random q and k, d = 128, move with a shift of 16 and of 100000: q and k rounded to "
    "bfloat16 after an exact rotation, and angles formed in bfloat16",
    expected="2.6e-3 at both shifts for rounded vectors; far more for rounded angles",
    only_if="angles or positions are rounded: rounding q and k after an exact rotation costs the same anywhere",
)
def _() -> Finding:
    q, k = normal(2, 64, 128)
    gap = torch.arange(64) * 7

    def scores(shift: int, dtype: torch.dtype) -> Tensor:
        turned_q = rotate(q, gap + shift, theta(128)).to(dtype).double()
        turned_k = rotate(k, torch.full((64,), shift), theta(128)).to(dtype).double()
        return (turned_q * turned_k).sum(-1) / math.sqrt(128)

    def coarse_scores(shift: int) -> Tensor:
        # The angle itself in bfloat16, given to the rotation as a position with frequency 1.
        def turned(x: Tensor, ids: Tensor) -> Tensor:
            angles = torch.outer(ids.bfloat16(), theta(128).bfloat16()).double()
            one = torch.ones(1, dtype=torch.float64)
            pairs = x.view(64, 64, 2).reshape(-1, 2)
            return rotate(pairs, angles.flatten(), one).view(64, 128)

        return (turned(q, gap + shift) * turned(k, torch.full((64,), shift))).sum(-1) / math.sqrt(128)

    exact = scores(0, torch.float64)
    rounded, coarse = (
        [float((score(by) - exact).square().mean().sqrt()) for by in (16, 100_000)]
        for score in (lambda by: scores(by, torch.bfloat16), coarse_scores)
    )
    return Finding(
        f"vectors {rounded[0]:.1e} and {rounded[1]:.1e}; angles {coarse[0]:.1e} and {coarse[1]:.1e}",
        stated=rounded[1] > 2 * rounded[0],
        amended=max(rounded) < 2 * min(rounded) < 2e-2 and coarse[1] > 10 * rounded[1],
    )
