"""Modules that are made inside a compiled function: one graph, and the numbers of eager mode.

A program, which test_made_in_compiled.py runs: under pytest the type checks around `ropewalk.spec` would be traced too.

    python made_in_compiled.py [NAME ...]
"""

import functools
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import ropewalk as rw
from ropewalk.spec.stretched import NTKFixed, NTKMixed

AXES = rw.Axes([[0.3, 0.0, 0.7, 1.0, 0.1, 0.9, 0.5, 0.2], [0.7, 1.0, 0.3, 0.0, 0.9, 0.1, 0.5, 0.8]], range(8), 16)
LISTS = [1.0 + i / 7 for i in range(8)], [2.0 + i / 3 for i in range(8)]

X = torch.randn(2, 4, 5, 16, generator=torch.Generator().manual_seed(0))
IDS = torch.tensor([[3, 1, 40, 500, 2], [0, 9, 8, 7, 6]])


def both(make: Callable[[], Any]) -> Callable[[Tensor], Any]:
    return lambda x: make()(x, x + 1)


def at_ids(make: Callable[[], Any], axes: int) -> Callable[[Tensor], Any]:
    return lambda x: make()(x, positions=IDS.expand(axes, 2, 5))


R, S = rw.RotaryEmbedding, rw.RopeSpec
MADE: dict[str, Callable[[Tensor], Any]] = {
    "a head_dim": lambda x: R(16)(x),
    "options": lambda x: R(16, base=500.0, pairing="half", context_length=70, check_ids=True)(x, offset=3),
    "the sequence before the heads": lambda x: R(16, seq_dim=-3)(x),
    "positions": lambda x: R(16)(x, positions=IDS),
    "part of the features": lambda x: R(S(16, rotary_dim=8, rotary_slice="trailing", pairing="half", sign=-1))(x),
    "float32": lambda x: R(S(16, angles="float32"))(x),
    "Plain": lambda x: R(S(16, rw.Plain(500_000)))(x),
    "Yarn": lambda x: R(S(16, rw.Yarn(10_000, 4.0, 64)))(x),
    "Llama3": lambda x: R(S(16, rw.Llama3()))(x),
    "PositionInterpolation": lambda x: R(S(16, rw.PositionInterpolation(10_000, 4.0)))(x),
    "NTK": lambda x: R(S(16, rw.NTK(10_000, 4.0)))(x),
    "NTKFixed": lambda x: R(S(16, NTKFixed(10_000, 4.0)))(x),
    "NTKMixed": lambda x: R(S(16, NTKMixed(10_000, 4.0)))(x),
    "NTKByParts": lambda x: R(S(16, rw.NTKByParts(10_000, 4.0)))(x),
    "Proportional": lambda x: R(S(16, rw.Proportional(10_000, 0.5)))(x),
    "DynamicNTK": lambda x: R(S(16, rw.DynamicNTK(10_000, 4.0, 3)))(x),
    "LongRope": lambda x: R(S(16, rw.LongRope(10_000, *LISTS, trained_length=4, factor=2.0)))(x),
    "Explicit": lambda x: R(S(16, rw.Explicit([1.0 / (i + 1) for i in range(8)])))(x),
    "AcrossHeads": lambda x: R(S(16, rw.AcrossHeads(10_000, num_heads=4)))(x),
    "Axes.chunked": at_ids(lambda: R(S(16, axes=rw.Axes.chunked([4, 4]))), 2),
    "Axes.interleaved": at_ids(lambda: R(S(16, axes=rw.Axes.interleaved([4, 2, 2]))), 3),
    "Axes.repeated": at_ids(lambda: R(S(16, axes=rw.Axes.repeated(2, 16))), 2),
    "Axes of real weights": at_ids(lambda: R(S(16, axes=AXES)), 2),
    "XPos": both(lambda: R(S(16, xpos=rw.XPos(1024)))),
    "StepTemperature": both(lambda: R(S(16, query_temperature=rw.StepTemperature(0.1, 3)))),
    "LogTemperature": both(lambda: R(S(16, query_temperature=rw.LogTemperature(3)))),
    "at": lambda x: R(16).at(IDS),
    "unrotate": lambda x: R(16).unrotate(x),
    "shift": lambda x: R(16).shift(x, 3),
    "qk_norm_rope": lambda x: rw.qk_norm_rope(x, x, R(16)),
    "linear_attention": lambda x: rw.linear_attention(x, x, x, rope=R(16)),
    "tables": lambda x: rw.apply_rope(x, *rw.build_rotary_frequencies(16, 5)),
    "sinusoidal": lambda x: rw.encoding("sinusoidal", dim=16, num_heads=1).embed(x),
    "alibi": lambda x: rw.encoding("alibi", dim=16, num_heads=3).bias(IDS, IDS),
    "rope of a model": lambda x: rw.encoding("rope", dim=64, num_heads=4).rotate(x, x),
    "rope across heads": lambda x: rw.encoding("rope-across-heads", dim=64, num_heads=4).rotate(x, x),
}


@functools.lru_cache
def cached(dim: int) -> rw.RotaryEmbedding:
    return rw.RotaryEmbedding(dim)


MADE["a factory with a cache"] = lambda x: cached(16)(x)


def check(name: str) -> None:
    """What a compiled function returns is what it returns in eager mode, in one graph, twice."""
    torch._dynamo.reset()
    compiled = torch.compile(MADE[name], fullgraph=True, backend="eager")
    results = [compiled(X) for _ in range(2)]
    for result in results:
        torch.testing.assert_close(result, MADE[name](X), rtol=0, atol=5e-7)


def check_kept() -> None:
    """A module that a compiled function keeps is whole: it can be called without the compiler."""
    kept: dict[int, rw.RotaryEmbedding] = {}

    def rotated(x: Tensor) -> Tensor:
        if 16 not in kept:
            kept[16] = rw.RotaryEmbedding(16)
        return kept[16](x)

    compiled, rope = torch.compile(rotated, fullgraph=True, backend="eager"), rw.RotaryEmbedding(16)
    for _ in range(3):
        assert torch.equal(compiled(X), rope(X))
    mine = kept[16]
    assert mine.spec == rope.spec
    assert repr(mine) == repr(rope)
    assert torch.equal(mine.inv_freq, rope.inv_freq)
    for options in ({}, {"offset": 9}, {"positions": IDS}):
        assert torch.equal(mine(X, **options), rope(X, **options))


def main(names: list[str]) -> None:
    # torch warns that it does not use the cache of a factory.
    warnings.simplefilter("ignore")
    for name in names or MADE:
        check(name)
    check_kept()


if __name__ == "__main__":
    main(sys.argv[1:])
