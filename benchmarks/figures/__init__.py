"""The figures of README.md and docs/: a function per block. `benchmarks/render.py` writes them."""

from figures import claims, explorer, lab, linear, models, parallel, precision, rotation
from figures.pages import BLOCKS
from figures.records import read_from

__all__ = ["BLOCKS", "claims", "explorer", "lab", "linear", "models", "parallel", "precision", "read_from", "rotation"]
