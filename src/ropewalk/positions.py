"""Functions that return position ids as tensors: ranges, packed sequences, grids, and text with images (M-RoPE).

>>> from ropewalk.positions import grid_positions
>>> grid_positions(2, 2).tolist()
[[0, 0, 1, 1], [0, 1, 0, 1]]
"""

from ropewalk.nn.positions import centred_positions as centred_positions
from ropewalk.nn.positions import grid_positions as grid_positions
from ropewalk.nn.positions import jittered_positions as jittered_positions
from ropewalk.nn.positions import mrope_positions as mrope_positions
from ropewalk.nn.positions import packed_positions as packed_positions
from ropewalk.nn.positions import positions_of_lengths as positions_of_lengths
from ropewalk.nn.positions import range_positions as range_positions
from ropewalk.nn.positions import text_positions as text_positions

__all__ = [
    "centred_positions",
    "grid_positions",
    "jittered_positions",
    "mrope_positions",
    "packed_positions",
    "positions_of_lengths",
    "range_positions",
    "text_positions",
]
