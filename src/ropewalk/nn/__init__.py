"""What a model USES: modules."""

from ropewalk.nn.rotary import RotaryEmbedding as RotaryEmbedding

__all__ = ["RotaryEmbedding"]
