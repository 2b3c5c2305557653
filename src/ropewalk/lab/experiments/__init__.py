"""All experiments by name."""

from ropewalk.lab.experiment import Experiment
from ropewalk.lab.experiments import extension, puzzles, text

__all__ = ["EXPERIMENTS"]

EXPERIMENTS: dict[str, Experiment] = {
    experiment.name: experiment for module in (text, extension, puzzles) for experiment in module.EXPERIMENTS
}
