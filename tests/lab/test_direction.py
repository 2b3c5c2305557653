"""One seed and two encodings of convergence at its registered size: RoPE is ahead of no encoding, as in the record."""

import json
from importlib.resources import files
from itertools import islice

import pytest
import torch

from ropewalk.lab.experiments import EXPERIMENTS
from ropewalk.lab.record import from_json
from ropewalk.lab.training import Settings, training

# A third of the registered run: the record has validations there.
STEP = 200


@pytest.mark.slow
def test_rope_is_ahead_of_none_as_in_the_shipped_record():
    shipped = json.loads(files("ropewalk").joinpath("data/lab/convergence_micro.json").read_text(encoding="utf-8"))
    recorded = [
        {label: dict(results[label].curves["loss by step"])[STEP] for label in ("rope", "none")}
        for results in from_json(shipped).results
    ]
    gap = min(x["none"] for x in recorded) - max(x["rope"] for x in recorded)
    assert gap > 0.2
    losses: dict[tuple[str, int], float] = {}
    for arm in EXPERIMENTS["convergence"].arms("micro"):
        if arm.label in recorded[0]:
            steps = training(
                arm.run,
                Settings(torch.device("cpu"), every=STEP),
                report=lambda step, loss, label=arm.label: losses.update({(label, step): loss}),
            )
            for _ in islice(steps, STEP):
                pass
    assert losses["none", 0] == pytest.approx(losses["rope", 0], abs=0.01)
    assert losses["none", STEP] - losses["rope", STEP] > gap / 2
