"""RotaryEmbedding: the module, the source of its angles, the arguments of its calls, and functions that use it."""
