"""RotaryEmbedding: the module, its angle source, where tokens are, and functions built on it."""
