"""The same functions as the reference, FAST: cos and sin from positions, and the rotation, by several backends."""
