"""Attention across ranks, with any encoding: sequences, heads or caches are cut. The engine is torch.distributed."""

from ropewalk.parallel.cache import ShardedKVCache
from ropewalk.parallel.linear import linear_attention
from ropewalk.parallel.shards import Shards
from ropewalk.parallel.softmax import attention
from ropewalk.parallel.tensor_parallel import plan

__all__ = ["ShardedKVCache", "Shards", "attention", "linear_attention", "plan"]
