"""Attention over sequences that are cut over ranks, with any encoding. The engine is torch.distributed."""

from ropewalk.parallel.cache import ShardedKVCache
from ropewalk.parallel.linear import linear_attention
from ropewalk.parallel.plan import plan
from ropewalk.parallel.shards import Shards
from ropewalk.parallel.softmax import attention

__all__ = ["ShardedKVCache", "Shards", "attention", "linear_attention", "plan"]
