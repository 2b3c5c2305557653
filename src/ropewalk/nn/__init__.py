"""What a model USES: modules."""

from ropewalk.nn.qk_norm import qk_norm_rope as qk_norm_rope
from ropewalk.nn.rotary import RotaryEmbedding as RotaryEmbedding

__all__ = ["RotaryEmbedding", "qk_norm_rope"]
