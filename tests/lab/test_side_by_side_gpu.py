"""Runs on a CUDA device: side by side they are the same runs, and losses in bfloat16 are finite."""

import dataclasses
from collections.abc import Iterator

import pytest
import torch

from ropewalk.lab.run import Run
from ropewalk.lab.training import Settings, side_by_side, train, training

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    # Of torch 2.11 within its own compiler, while it traces FlexAttention. It hides them from everyone but pytest.
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]


@pytest.fixture(autouse=True)
def as_the_lab_runs() -> Iterator[None]:
    """Deterministic algorithms, which other tests have, would want another cuBLAS."""
    torch.use_deterministic_algorithms(False)
    yield
    torch.use_deterministic_algorithms(True)


def test_runs_side_by_side_have_the_losses_of_each_alone():
    settings = Settings(torch.device("cuda"), every=10)
    first = Run("rope", steps=30, rate=8e-3, lengths=(64, 128))
    runs = [first, dataclasses.replace(first, encoding="alibi", seed=1)]
    alone = [train(run, settings)[1] for run in runs]
    together = side_by_side([training(run, settings) for run in runs], settings.device, count=2)
    for (_, result), expected in zip(together, alone, strict=True):
        for name, points in expected.curves.items():
            # Not the same bits: some kernels add in any order.
            assert [y for _, y in result.curves[name]] == pytest.approx([y for _, y in points], rel=1e-3)
    assert alone[0].final_loss != pytest.approx(alone[1].final_loss, rel=1e-3)


def test_recall_in_bfloat16_has_finite_losses():
    settings = Settings(torch.device("cuda"), "bfloat16", every=20)
    run = Run("rope", "tiny", length=32, batch=64, steps=60, rate=4e-3, task="recall", lengths=(32,), evaluated=64)
    _, result = train(run, settings)
    losses = [loss for _, loss in result.curves["loss by step"]]
    assert len(losses) == 4
    assert None not in losses
    assert None not in [y for _, y in result.curves["loss by length"]]
