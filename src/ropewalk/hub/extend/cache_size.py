"""How many bytes the keys and values of a sequence take, where a config has the numbers."""

from collections.abc import Mapping
from typing import Any

from ropewalk.errors import as_int
from ropewalk.hub.configs.layer_kinds import layer_count, layer_kinds, window_of

__all__ = ["cache_bytes", "cache_is_bound"]

_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "num_attention_heads", "n_head", "n_heads")
# Layers that keep a state of one size, however long the sequence is.
_STATE = ("linear_attention", "conv")


def cache_bytes(part: Mapping[str, Any], head_dim: int, length: int, itemsize: int = 2) -> int | None:
    """Bytes for one sequence of `length` tokens, at `itemsize` bytes a number: 2 is bfloat16.

    Layers with a window keep no more than it, and linear attention keeps no keys. Latent attention keeps
    kv_lora_rank + qk_rope_head_dim numbers a token and layer. Where it is not known which layers are which, all count
    as if they saw everything: `cache_is_bound` tells. None where the config does not say enough.

    >>> config = {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8}
    >>> cache_bytes(config, 128, 8192) == 2 * 32 * 8 * 128 * 8192 * 2  # keys and values
    True
    """
    layers, heads = layer_count(part), next((n for key in _HEADS if (n := as_int(part.get(key)))), None)
    if part.get("multi_query") and not part.get("new_decoder_architecture"):
        heads = 1  # as Falcon's first models have it, whatever else is said
    rank, turning = (as_int(part.get(key)) for key in ("kv_lora_rank", "qk_rope_head_dim"))
    # The keys of an indexer come on top, and no key says how they are kept.
    if layers is None or as_int(part.get("index_head_dim")) is not None:
        return None
    kinds, types = layer_kinds(part), part.get("layer_types")
    if rank is not None and turning is not None:
        keeping = layers if kinds is None else sum(kind not in _STATE for kind in kinds)
        return keeping * (rank + turning) * length * itemsize
    if heads is None or (types is not None and kinds is None):
        return None
    kinds = kinds or ["full_attention"] * layers
    if any(kind not in ("full_attention", "sliding_attention", *_STATE) for kind in kinds):
        return None
    window = window_of(part)
    short = length if window is None else min(length, window)
    tokens = sum(short if kind == "sliding_attention" else length for kind in kinds if kind not in _STATE)
    return 2 * heads * head_dim * tokens * itemsize


def cache_is_bound(part: Mapping[str, Any]) -> bool:
    """Whether `cache_bytes` is only the most that it can be: some layers may have a window that is not known.

    >>> cache_is_bound({"model_type": "llama", "num_hidden_layers": 32})
    False
    >>> cache_is_bound({"model_type": "brandnew", "num_hidden_layers": 32})
    True
    """
    kinds = layer_kinds(part)
    return kinds is None or ("sliding_attention" in kinds and window_of(part) is None)
