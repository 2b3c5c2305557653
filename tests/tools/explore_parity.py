"""The frequencies of the explorer's JavaScript next to those of Python: `python -m tools.explore_parity COUNT SEED`."""

import json
import random
import sys
from collections.abc import Sequence

import numpy as np

from ropewalk.spec import RopeSpec
from tools.explore_node import ask
from tools.explore_specs import random_specs

__all__ = ["compare", "difference"]

LENGTHS = (None, 64, 100_000, 1 << 40)
# The frequencies, the amplitude and the softmax scale of [spec, length].
NUMBERS = "((spec, length) => [Rules.invFreq(spec, length), Rules.amplitude(spec, length), Rules.softmaxScale(spec)])"


def difference(spec: RopeSpec, length: int | None, answer: Sequence[object]) -> float:
    """The largest relative difference between what the page computes for a spec and what Python does."""
    theta, amplitude, scale = answer
    expected = np.append(spec.inv_freq(length).ravel(), [spec.amplitude(length), spec.softmax_scale])
    assert np.shape(theta) == spec.inv_freq(length).shape
    got = np.append(np.ravel(np.asarray(theta, dtype=np.float64)), np.array([amplitude, scale], dtype=np.float64))
    # JSON has no NaN: it is sent as null. No comparison with it holds, so the largest difference would hide it.
    assert np.isfinite(got).all(), f"{spec}: the page computed no number"
    assert not got[expected == 0].any()
    rotated = expected != 0
    return float(np.abs(got[rotated] / expected[rotated] - 1).max())


def compare(count: int, seed: int) -> dict[str, float]:
    """The largest relative difference per rule, over `count` random specs in all."""
    draw = random.Random(seed)
    cases = [(spec, draw.choice(LENGTHS)) for spec in random_specs(count, seed)]
    sent = [[json.loads(spec.to_json()), length] for spec, length in cases]
    worst: dict[str, float] = {}
    for (spec, length), answer in zip(cases, ask(f"question.map((x) => {NUMBERS}(...x))", sent), strict=True):
        rule = type(spec.frequencies).__name__
        worst[rule] = max(worst.get(rule, 0.0), difference(spec, length, answer))
    return worst


if __name__ == "__main__":
    sys.stdout.write(json.dumps(compare(int(sys.argv[1]), int(sys.argv[2]))))
