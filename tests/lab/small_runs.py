"""Runs that take a fraction of a second, with the structure of real ones."""

import dataclasses

import torch

from ropewalk.lab.experiment import Arm
from ropewalk.lab.run import Run
from ropewalk.lab.training import Settings

__all__ = ["CPU", "TINY", "shortened", "shortened_arms"]

CPU = Settings(torch.device("cpu"), every=4)
TINY = Run("rope", length=8, batch=4, steps=10, lengths=(8, 16), evaluated=2)


def shortened(run: Run) -> Run:
    """The run with a quarter of its lengths, and one step of few samples."""
    parent = None if run.parent is None else shortened(run.parent)
    return dataclasses.replace(
        run,
        length=run.length // 4,
        lengths=tuple(x // 4 for x in run.lengths),
        batch=2,
        steps=min(run.steps, 1),
        evaluated=2,
        parent=parent,
    )


def shortened_arms(arms: list[Arm]) -> list[Arm]:
    """Arms with shortened runs."""
    return [arm._replace(run=shortened(arm.run)) for arm in arms]
