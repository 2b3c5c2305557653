"""Small models of every family in transformers that rotates queries and keys, built offline from default configs."""

import functools
import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel

ROPE_KEY = re.compile("rope|rotary")
ROTARY_CLASS = re.compile("Rotary|RoPE|Rope")
# No key of theirs says rope, and yet they rotate.
ALSO_ROTATE = {"vjepa2", "lightglue"}
# They hand rope parameters on to parts, which are families themselves, and rotate nothing.
COMPOSITE = {"blt"}
# Sizes that say nothing about positions, by the name of the config's field.
SMALL: dict[str, int] = {
    "vocab_size": 96,
    "intermediate_size": 32,
    "ffn_dim": 32,
    "moe_intermediate_size": 16,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "moe_num_experts": 4,
    "moe_topk": 2,
    "n_group": 1,
    "topk_group": 1,
    "num_shared_experts": 1,
    "shared_expert_intermediate_size": 16,
    "moe_shared_expert_intermediate_size": 16,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "out_hidden_size": 32,
}
DEFAULT = {"rope_type": "default", "rope_theta": 10_000.0}
# What single families need besides.
CHANGES: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {"num_expert_group": 1},
    "chameleon": {"vocabulary_map": {"<image>": 90}, "vq_config": {"base_channels": 32, "channel_multiplier": [1]}},
    "clvp_encoder": {"projection_dim": 128},
    "cohere_compass_text": {
        "num_hidden_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            "sliding_attention": DEFAULT | {"mrope_section": [24, 20, 20]},
            "full_attention": DEFAULT | {"rope_theta": 1e6, "mrope_section": [24, 20, 20]},
        },
    },
    "dbrx": {
        "d_model": 256,
        "n_heads": 2,
        "n_layers": 2,
        "attn_config": {"rope_theta": 5e5, "clip_qkv": 100.0},
        "ffn_config": {"hidden_size": 256, "ffn_hidden_size": 32},
    },
    "deepseek_ocr2_text": {"num_hidden_layers": 1, "mlp_layer_types": ["dense"]},
    "diffusion_gemma_text": {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16},
    "eomt_dinov3": {"num_hidden_layers": 2, "num_blocks": 1},
    "gpt_neox_japanese": {"num_attention_heads": 4, "hidden_size": 320},
    "glm4_moe": {"head_dim": 128},
    "glm4v_moe_text": {"head_dim": 128},
    "zamba2": {"use_mem_rope": True},
    "glm4v_text": {"rope_parameters": DEFAULT | {"partial_rotary_factor": 0.5, "mrope_section": [8, 12, 12]}},
    "glm_image_text": {"rope_parameters": DEFAULT | {"partial_rotary_factor": 0.5, "mrope_section": [8, 12, 12]}},
    "idefics": {"vision_config": {"num_hidden_layers": 1, "embed_dim": 32, "intermediate_size": 32}},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "longcat_flash": {"ffn_hidden_size": 32, "expert_ffn_hidden_size": 16, "n_routed_experts": 4, "zero_expert_num": 1},
    "nemotron": {"num_key_value_heads": 1},
    "qwen2_5_omni_talker": {"embedding_size": 256},
    "qwen3_omni_moe_text": {"head_dim": 128, "hidden_size": 256},
    "qwen3_omni_moe_talker_text": {"head_dim": 64, "shared_expert_intermediate_size": 16},
    "t5gemma2_text": {"dropout_rate": 0.0},
    "t5gemma2_decoder": {"dropout_rate": 0.0},
    "gemma4_vision": {"pooling_kernel_size": 2},
    "bamba": {"attn_layer_indices": [1]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"], "position_embedding_type": "rope"},
    "recurrent_gemma": {"num_hidden_layers": 3},
    "csm": {"num_codebooks": 2},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "ernie4_5_moe": {"moe_k": 2},
    "ernie4_5_vl_moe_text": {"moe_k": 2},
    "esm": {"vocab_size": 96, "position_embedding_type": "rotary", "pad_token_id": 1, "mask_token_id": 95},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "gemma4_text": {"vocab_size_per_layer_input": 96},
    "gemma3n_text": {"vocab_size_per_layer_input": 96, "num_kv_shared_layers": 0, "intermediate_size": [32] * 5},
    "hunyuan_v1_dense": {"head_dim": 128, "hidden_size": 256},
    "hunyuan_v1_moe": {"head_dim": 128, "hidden_size": 256},
    "hunyuan_vl_text": {
        "head_dim": 128,
        "hidden_size": 256,
        "rope_parameters": DEFAULT | {"mrope_section": [16, 16, 16, 16]},
    },
    "kyutai_speech_to_text": {"num_codebooks": 2},
    "ministral": {"head_dim": 128},
    "qwen2_5_vl_vision": {"window_size": 1000},
    "qwen2_5_omni_vision_encoder": {"window_size": 1000},
    "step3p5": {"sliding_window": 64},
    "codegen": {"num_attention_heads": 4},
}
# These take embedded tokens only.
FED_EMBEDDINGS = {"qwen3_omni_moe_talker_code_predictor", "qwen3_omni_moe_talker_text", "csm", "kyutai_speech_to_text"}
MOST_WEIGHTS = 50_000_000
# What a checkpoint adds to the rotation, by the end of its name in the state_dict.
LEARNED = re.compile(r"(^|\.)(rotary_emb\.alpha|softmax_scaling\.(scale|bias))$")
LAYERS = ("num_hidden_layers", "num_layers", "n_layer", "encoder_layers", "depth")


class UnbuildableError(Exception):
    """Why a family cannot be observed offline."""


@functools.cache
def config_classes() -> dict[str, type[PreTrainedConfig]]:
    """Config classes with a rotary embedding of their own, by model_type (by name where that is empty)."""
    found: dict[str, type[PreTrainedConfig]] = {}
    models = Path(transformers.__file__).parent / "models"
    for path in sorted(models.glob("*/configuration_*.py")):
        if not (ROPE_KEY.search(path.read_text().lower()) or path.parent.name in ALSO_ROTATE):
            continue
        module = importlib.import_module(f"transformers.models.{path.parent.name}.{path.stem}")
        for item in vars(module).values():
            if not (
                inspect.isclass(item) and issubclass(item, PreTrainedConfig) and item.__module__ == module.__name__
            ):
                continue
            keys = item().to_dict()
            if item.model_type in ALSO_ROTATE or any(map(ROPE_KEY.search, keys)):
                found.setdefault(item.model_type or item.__name__, item)
    return found


def takes(model_class: type[PreTrainedModel]) -> Any:
    """The config class that the constructor names."""
    config = inspect.signature(model_class.__init__).parameters.get("config")
    return config.annotation if config else None


def model_classes(config_class: type[PreTrainedConfig]) -> list[type[PreTrainedModel]]:
    """Models of the same package that take this config, the plainest first."""
    package = Path(inspect.getfile(config_class)).parent
    found: list[type[PreTrainedModel]] = []
    for path in sorted(package.glob("modeling_*.py")):
        module = importlib.import_module(f"transformers.models.{package.name}.{path.stem}")
        found += [
            item
            for item in vars(module).values()
            if inspect.isclass(item)
            and issubclass(item, PreTrainedModel)
            and item.__module__ == module.__name__
            and (item.config_class is config_class or takes(item) is config_class)
            and not item.__name__.endswith("PreTrainedModel")
        ]
    return sorted(found, key=lambda item: ("For" in item.__name__, not item.__name__.endswith("Model")))


def first_of(config: PreTrainedConfig, names: tuple[str, ...]) -> str | None:
    """The first of these fields that the config has as a number."""
    own = config.to_dict()
    return next((name for name in names if isinstance(own.get(name), int)), None)


def enough_layers(config: PreTrainedConfig, total: int) -> int:
    """How many of the first layers show every kind of layer that the config's lists of layers name."""
    enough = 2
    for value in config.to_dict().values():
        if isinstance(value, list) and len(value) == total and all(isinstance(kind, str | int) for kind in value):
            enough = max(enough, 1 + max(value.index(kind) for kind in set(value)))
    return min(enough, total)


def shrunk(config_class: type[PreTrainedConfig], changes: dict[str, Any]) -> PreTrainedConfig:
    """The default config with few heads, layers, words and experts, and everything about rotation as it was."""
    default = config_class()
    own = default.to_dict()
    small: dict[str, Any] = {}
    for name, value in own.items():
        if isinstance(value, bool) or not isinstance(value, int | list):
            continue
        if isinstance(value, int) and name.endswith(("token_id", "token_index")) and value >= 96:
            small[name] = 95
        elif isinstance(value, int) and name in SMALL:
            small[name] = min(value, SMALL[name])
    heads = first_of(default, ("num_attention_heads", "num_heads", "n_head", "encoder_attention_heads"))
    hidden = first_of(default, ("embed_dim", "hidden_size", "n_embd", "d_model"))
    if heads and hidden:
        head_dim = own.get("head_dim") or own[hidden] // own[heads]
        small |= {heads: 2, hidden: 2 * head_dim}
        if isinstance(own.get("head_dim"), int):
            small["head_dim"] = head_dim
        if isinstance(own.get("num_key_value_heads"), int):
            small["num_key_value_heads"] = 1 if own["num_key_value_heads"] < own[heads] else 2
    layers = first_of(default, LAYERS)
    if layers:
        total = own[layers]
        small[layers] = enough_layers(default, total)
        for name, value in own.items():
            if isinstance(value, list) and len(value) == total:
                small[name] = value[: small[layers]]
    return config_class(**(small | changes))


def built(model_class: type[PreTrainedModel], config: PreTrainedConfig) -> PreTrainedModel:
    """The model, every weight drawn anew: some are initialised to zero, and would show nothing."""
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in model_class(config).parameters())
    if size > MOST_WEIGHTS:
        raise UnbuildableError(f"{size} weights")
    model = model_class(config).eval()
    for name, parameter in model.named_parameters():
        # Norms stay as they are: some come after the rotation, and only one without weights leaves it to be seen.
        # Tables of positions stay, too.
        if parameter.ndim > 1 and "embed_positions" not in name:
            parameter.data = torch.randn(parameter.shape) * 0.1
        elif parameter.ndim == 1 and not re.search("norm.*weight|bias", name) and not parameter.any():
            parameter.data = torch.ones(parameter.shape)
    for name, tensor in model.state_dict().items():
        if LEARNED.search(name):
            tensor.copy_(torch.rand(tensor.shape) + 0.5)
    return model


def inputs_of(model: Any, tokens: int) -> dict[str, Any]:
    """What the model's forward needs: words, or patches of one image of four rows."""
    names = inspect.signature(model.forward).parameters
    given: dict[str, Any] = {}
    if "grid_thw" in names:
        config = model.config
        found = (getattr(config, name, None) for name in ("in_channels", "num_channels", "in_chans"))
        channels = next((number for number in found if number), 3)
        patch = channels * getattr(config, "temporal_patch_size", 1) * config.patch_size**2
        given[next(iter(names))] = torch.randn(tokens, patch)
        given["grid_thw"] = torch.tensor([[1, 4, tokens // 4]])
        if "merge_sizes" in names:
            given["merge_sizes"] = torch.tensor([1])
    elif "pixel_position_ids" in names:
        rows, columns = torch.meshgrid(torch.arange(4), torch.arange(tokens // 4), indexing="ij")
        given["pixel_values"] = torch.randn(1, tokens, 3 * model.config.patch_size**2)
        given["pixel_position_ids"] = torch.stack([columns.flatten(), rows.flatten()], -1)[None]
    elif "input_ids" in names and model.config.model_type not in FED_EMBEDDINGS:
        given["input_ids"] = torch.arange(5, 5 + tokens)[None]
    elif "inputs_embeds" in names or "hidden_states" in names:
        name = "inputs_embeds" if "inputs_embeds" in names else "hidden_states"
        given[name] = torch.randn(1, tokens, model.config.hidden_size)
    if "use_cache" in names:
        given["use_cache"] = False
    return given
