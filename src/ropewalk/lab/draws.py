"""Random numbers that are functions of seed, step and sample, so that ranks and resumed runs get the same samples."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

__all__ = ["Draws", "draws", "order"]

Draws = NDArray[np.uint64]

_ODD = np.uint64(0x9E3779B97F4A7C15)


def draws(seed: int, steps: Sequence[int], samples: Sequence[int], count: int) -> Draws:
    """Return `count` uniform 64-bit numbers per step and sample.

    The mixing function is that of SplitMix64 (Steele, Lea, Flood, 2014, doi:10.1145/2660193.2660195), applied to the
    seed, the step, the sample and the index of the number one after the other. A number does not depend on which other
    steps and samples are asked for.

    Args:
        seed: The seed.
        steps: Steps.
        samples: Indices of samples in the global batch.
        count: How many numbers per sample.

    Returns:
        uint64 [steps, samples, count].

    >>> whole, part = draws(0, [1, 2], [0, 1, 2], 4), draws(0, [2], [2], 4)
    >>> bool((whole[1:, 2:] == part).all())
    True
    """
    state = _mixed(np.array([[[seed % 2**64]]], dtype=np.uint64))
    parts = (np.asarray(steps)[:, None, None], np.asarray(samples)[None, :, None], np.arange(count)[None, None, :])
    for part in parts:
        state = _mixed(state + _ODD * (part.astype(np.uint64) + np.uint64(1)))
    return state


def order(numbers: Draws) -> NDArray[np.int64]:
    """Return one random permutation of 0 .. count-1 per row of numbers [..., count].

    >>> sorted(order(draws(0, [0], [0], 3)).flatten().tolist())
    [0, 1, 2]
    """
    return np.argsort(numbers, axis=-1, kind="stable")


def _mixed(x: Draws) -> Draws:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
