"""Modules and functions that models use: rotary embeddings, encodings, attention and linear attention."""

from ropewalk.nn import positions as positions
from ropewalk.nn.rotary.embedding import RotaryEmbedding as RotaryEmbedding
from ropewalk.nn.rotary.qk_norm import qk_norm_rope as qk_norm_rope

__all__ = ["RotaryEmbedding", "positions", "qk_norm_rope"]
