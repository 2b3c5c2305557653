"""cos and sin of positions: one file per backend, and torch arithmetic for the rules of a spec."""
