"""Attention over sequences that are cut over ranks, with any encoding. The engine is torch.distributed."""

from ropewalk.parallel.attention import attention
from ropewalk.parallel.linear import linear_attention
from ropewalk.parallel.shards import Shards

__all__ = ["Shards", "attention", "linear_attention"]
