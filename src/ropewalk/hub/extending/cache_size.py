"""How many bytes the keys and values of a sequence take, where a config has the numbers."""

from collections.abc import Mapping
from typing import Any

from ropewalk.errors import as_int

__all__ = ["cache_bytes"]

_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_HEADS = ("num_key_value_heads", "n_kv_heads", "num_attention_heads", "n_head", "n_heads")


def cache_bytes(part: Mapping[str, Any], head_dim: int, length: int, itemsize: int = 2) -> int | None:
    """Bytes for one sequence of `length` tokens, at `itemsize` bytes a number: 2 is bfloat16.

    Layers with a window keep no more than it. Latent attention keeps kv_lora_rank + qk_rope_head_dim numbers a token
    and layer. None where the config does not say enough.

    >>> config = {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8}
    >>> cache_bytes(config, 128, 8192) == 2 * 32 * 8 * 128 * 8192 * 2  # keys and values
    True
    """
    layers, heads = (next((n for key in keys if (n := as_int(part.get(key)))), None) for keys in (_LAYERS, _HEADS))
    rank, turning = (as_int(part.get(key)) for key in ("kv_lora_rank", "qk_rope_head_dim"))
    if layers is None:
        return None
    if rank is not None and turning is not None:
        return layers * (rank + turning) * length * itemsize
    types, window = part.get("layer_types"), as_int(part.get("sliding_window"))
    if heads is None or (isinstance(types, list) and len(types) != layers):
        return None
    kinds: list[Any] = types if isinstance(types, list) else [None] * layers
    if any(kind not in (None, "full_attention", "sliding_attention") for kind in kinds):
        return None
    short = length if window is None else min(length, window)
    tokens = sum(short if kind == "sliding_attention" else length for kind in kinds)
    return 2 * heads * head_dim * tokens * itemsize
