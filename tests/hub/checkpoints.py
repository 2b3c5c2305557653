"""A small Llama on disk, made without transformers: a config and safetensors of random numbers."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

CONFIG = {
    "model_type": "llama",
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "rope_theta": 10000.0,
}
Q = "model.layers.0.self_attn.q_proj.weight"


def weights(hidden: int = 32, keys: int = 16, layers: int = 2) -> dict[str, np.ndarray]:
    """The tensors of the model by name."""
    random = np.random.default_rng(0)
    tensors = {"model.embed_tokens.weight": random.standard_normal((8, hidden)).astype(np.float32)}
    for layer in range(layers):
        rows = {"q_proj": hidden, "k_proj": keys, "v_proj": keys, "o_proj": hidden}
        tensors |= {
            f"model.layers.{layer}.self_attn.{name}.weight": random.standard_normal((count, hidden)).astype(np.float32)
            for name, count in rows.items()
        }
    return tensors


def llama(folder: Path, *, shards: int = 0, config: dict[str, Any] | None = None, **more: np.ndarray) -> Path:
    """The folder of the model: in one file, or in shards with an index."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG if config is None else config))
    tensors = weights() | more
    if not shards:
        save_file(tensors, folder / "model.safetensors")
        return folder
    mapped = {}
    for number in range(shards):
        file = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        names = list(tensors)[number::shards]
        save_file({name: tensors[name] for name in names}, folder / file)
        mapped |= dict.fromkeys(names, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": mapped}))
    return folder
