"""Papers and common practice on precision: effects of float32 and bfloat16 on positions, angles and scores."""

import math

import torch
from torch import Tensor

from ropewalk.claims.claim import Chapter, Finding
from ropewalk.claims.samples import cos_error, normal, theta
from ropewalk.claims.sources import PRACTICE
from ropewalk.reference import rotate

__all__ = ["chapter"]

chapter: Chapter = Chapter("Papers: precision")


@chapter.claim(
    "precision.bf16-positions",
    "bfloat16 can represent positions.",
    PRACTICE,
    method="257 and 4095 in bfloat16; the number of distinct values among 0 … 8192",
    expected="256, 4096, and 897 of 8193",
    fails="from 257 on, positions become equal",
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
    "float32 angles are precise enough.",
    PRACTICE,
    method="largest error of cos, d = 128, base 10000, in the last 4096 positions before 4k, 32k, 128k, 1M",
    expected="2.3e-4, 1.9e-3, 7.7e-3, 6.2e-2",
    only_if="contexts are short; the error grows with the position, to 6e-2 at a million",
)
def _() -> Finding:
    errors = [cos_error((1 << p) - 4096, 1 << p, torch.float32) for p in (12, 15, 17, 20)]
    golden = all(abs(e / g - 1) < 0.1 for e, g in zip(errors, (2.3e-4, 1.9e-3, 7.7e-3, 6.2e-2), strict=True))
    return Finding(
        ", ".join(f"{e:.1e}" for e in errors), stated=max(errors) < 1e-6, amended=golden and errors == sorted(errors)
    )


@chapter.claim(
    "precision.bf16-angles",
    "Angles computed in bfloat16 are too inaccurate to use.",
    PRACTICE,
    method="largest error of cos up to position 4096; positions, frequencies and products in bfloat16, d = 128",
    expected="2.0, the largest possible error",
)
def _() -> Finding:
    error = cos_error(0, 4096, torch.bfloat16)
    return Finding(f"{error:.2f}", stated=error > 1.99)


@chapter.claim(
    "precision.bf16-shift",
    "In bfloat16 RoPE loses its relative property, more so at larger positions.",
    PRACTICE,
    method="change of the scores of random q and k, d = 128, under shifts of 16 and 100000: q and k rounded to "
    "bfloat16 after an exact rotation, and angles computed in bfloat16",
    expected="2.6e-3 at both shifts for rounded vectors; far more for rounded angles",
    only_if="angles or positions are rounded; the error of rounding q and k after an exact rotation does not grow",
)
def _() -> Finding:
    q, k = normal(2, 64, 128)
    gap = torch.arange(64) * 7

    def scores(shift: int, dtype: torch.dtype) -> Tensor:
        rotated_q = rotate(q, gap + shift, theta(128)).to(dtype).double()
        rotated_k = rotate(k, torch.full((64,), shift), theta(128)).to(dtype).double()
        return (rotated_q * rotated_k).sum(-1) / math.sqrt(128)

    def coarse_scores(shift: int) -> Tensor:
        # The bfloat16 angle is passed to the rotation as a position, with frequency 1.
        def rotated(x: Tensor, ids: Tensor) -> Tensor:
            angles = torch.outer(ids.bfloat16(), theta(128).bfloat16()).double()
            one = torch.ones(1, dtype=torch.float64)
            pairs = x.view(64, 64, 2).reshape(-1, 2)
            return rotate(pairs, angles.flatten(), one).view(64, 128)

        return (rotated(q, gap + shift) * rotated(k, torch.full((64,), shift))).sum(-1) / math.sqrt(128)

    exact = scores(0, torch.float64)
    rounded, coarse = (
        [float((score(shift) - exact).square().mean().sqrt()) for shift in (16, 100_000)]
        for score in (lambda shift: scores(shift, torch.bfloat16), coarse_scores)
    )
    return Finding(
        f"rounded vectors {rounded[0]:.1e} and {rounded[1]:.1e}; rounded angles {coarse[0]:.1e} and {coarse[1]:.1e}",
        stated=rounded[1] > 2 * rounded[0],
        amended=max(rounded) < 2 * min(rounded) < 2e-2 and coarse[1] > 10 * rounded[1],
    )
