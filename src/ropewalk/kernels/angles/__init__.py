"""cos and sin of positions: one file per backend, and the arithmetic that they share."""
