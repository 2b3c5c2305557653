"""Trained models as folders with config.json and safetensors, in the layout of Llama checkpoints."""

import json
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from ropewalk.errors import RopewalkError
from ropewalk.lab.decoder import Decoder
from ropewalk.lab.run import Run, make_task
from ropewalk.nn.encodings.rotary import RotaryEncoding

try:
    from safetensors import SafetensorError
    from safetensors.torch import load_file, save_file
except ImportError:
    raise RopewalkError(
        asked="the lab",
        expected="safetensors, which the extra `lab` installs",
        got="safetensors is not installed",
        do="pip install 'ropewalk[lab]'",
    ) from None

__all__ = ["export", "load_weights", "whole_state"]

_WEIGHTS, _CONFIG = "model.safetensors", "config.json"
# Parts of the names of parameters: ours -> those of Llama.
_NAMES = (
    ("embedding.weight", "model.embed_tokens.weight"),
    ("blocks.", "model.layers."),
    (".attention.", ".self_attn."),
    (".norms.0.", ".input_layernorm."),
    (".norms.1.", ".post_attention_layernorm."),
    (".gate.", ".mlp.gate_proj."),
    (".up.", ".mlp.up_proj."),
    (".down.", ".mlp.down_proj."),
    ("head.weight", "lm_head.weight"),
)


def whole_state(model: Decoder) -> dict[str, Tensor]:
    """Weights by name, on the CPU, of a model that may be sharded. All ranks call it."""
    state = model.state_dict()
    return {name: (x.full_tensor() if isinstance(x, DTensor) else x).detach().cpu() for name, x in state.items()}


def export(model: Decoder, run: Run, folder: Path, state: dict[str, Tensor] | None = None) -> None:
    """Write the weights of a trained model, which contain no code, and a config.

    A model with softmax attention and RoPE in the pairing "half" is a Llama: transformers loads it, and so do `inspect`
    and `extend`. Others have the model_type "ropewalk_lab", with the same names of weights and of keys.

    Args:
        model: The model.
        run: Its run.
        folder: The folder to write, which is created.
        state: Its weights, as `whole_state` returns them; None if it is not sharded.

    Raises:
        OSError: If files cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    state = whole_state(model) if state is None else state
    # An encoding that layers share is in the state of each of them: the first is kept.
    state = {
        _llama_name(name): x.contiguous()
        for name, x in state.items()
        if ".encoding." not in name or name.startswith("encoding.")
    }
    try:
        save_file(state, folder / _WEIGHTS, metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(str(error)) from None
    config = _config(model, run)
    (folder / _CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def load_weights(run: Run, folder: Path) -> Decoder:
    """Create the model of a run with exported weights.

    Args:
        run: The run.
        folder: What `export` wrote.

    Returns:
        The model, on the CPU.
    """
    from ropewalk.lab.training import make_model

    model = make_model(run, make_task(run))
    stored: dict[str, Tensor] = load_file(folder / _WEIGHTS)
    own = {name: stored[_llama_name(name)] for name in model.state_dict() if _llama_name(name) in stored}
    model.load_state_dict(own, strict=False)
    return model


def _llama_name(name: str) -> str:
    if name.startswith("encoding."):
        return name
    if name == "norm.weight":
        return "model.norm.weight"
    for ours, theirs in _NAMES:
        name = name.replace(ours, theirs)
    return name


def _config(model: Decoder, run: Run) -> dict[str, Any]:
    size, encoding = model.size, model.encoding
    config: dict[str, Any] = {
        "model_type": "ropewalk_lab",
        "hidden_size": size.dim,
        "intermediate_size": size.hidden,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.heads,
        "head_dim": size.dim // size.heads,
        "max_position_embeddings": make_task(run).tokens(run.length),
        "rms_norm_eps": 1.1920928955078125e-07,
        "hidden_act": "silu",
        "vocab_size": model.embedding.num_embeddings,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "torch_dtype": "float32",
        "ropewalk_lab": run.as_json(),
    }
    if isinstance(encoding, RotaryEncoding) and encoding.name == "rope":
        spec = encoding.rope.spec
        config["rope_theta"] = getattr(spec.frequencies, "base", 10_000.0)
        plain = run.attention == "softmax" and not run.qk_norm and type(spec.frequencies).__name__ == "Plain"
        if plain and spec.pairing == "half" and spec.rotary_dim == spec.head_dim:
            config |= {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    return config
