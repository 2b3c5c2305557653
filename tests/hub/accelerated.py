"""Tiny random models of the families that most people load, and what they compute, in their dtype and in float64."""

import copy
from typing import Any

import torch
import transformers
from torch import Tensor

SIZES = {
    "vocab_size": 61,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16}
ROUTED = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 16, "first_k_dense_replace": 1}
ROFORMER = {"is_decoder": True, "embedding_size": 32, "max_position_embeddings": 128}
LAYERS = ["sliding_attention", "full_attention"]
# Names of config and model, what a family needs besides, the rotation that is to be found, and what becomes of QK-norm.
HALF, PARTLY = "apply_rotary_pos_emb, half pairs", "apply_rotary_pos_emb, half pairs of the leading features"
PACKED = "apply_rotary_position_embeddings, interleaved pairs"
OVER_ALL = "not fused, its norms are not the last operation on q and k before the rotation"
FAMILIES: dict[str, tuple[str, str, dict[str, Any], str, str | None]] = {
    "llama": ("Llama", "Llama", {}, HALF, None),
    "mistral": ("Mistral", "Mistral", {}, HALF, None),
    "mixtral": ("Mixtral", "Mixtral", EXPERTS, HALF, None),
    "qwen2": ("Qwen2", "Qwen2", {}, HALF, None),
    "qwen3": ("Qwen3", "Qwen3", {"head_dim": 16}, HALF, "fused"),
    "gemma2": ("Gemma2", "Gemma2", {"head_dim": 16, "layer_types": LAYERS}, HALF, None),
    "gemma3": (
        "Gemma3Text",
        "Gemma3",
        {"head_dim": 16, "layer_types": LAYERS, "sliding_window": 4},
        HALF,
        "fused, times 1 + weight",
    ),
    "phi3": ("Phi3", "Phi3", {"partial_rotary_factor": 0.5}, PARTLY, None),
    "gpt_neox": ("GPTNeoX", "GPTNeoX", {}, PARTLY, None),
    "olmo2": ("Olmo2", "Olmo2", {}, HALF, OVER_ALL),
    "olmo3": ("Olmo3", "Olmo3", {"layer_types": LAYERS, "sliding_window": 4}, HALF, OVER_ALL),
    "deepseek_v3": (
        "DeepseekV3",
        "DeepseekV3",
        {"num_key_value_heads": 4, "num_experts_per_tok": 2} | LATENT | ROUTED,
        "apply_rotary_pos_emb_interleave, interleaved pairs, results reordered into halves; " + HALF,
        "not fused, a norm cannot be fused with its rotation",
    ),
    "gpt_oss": ("GptOss", "GptOss", {"head_dim": 16, "layer_types": LAYERS} | EXPERTS, HALF, None),
    "cohere": ("Cohere", "Cohere", {}, "apply_rotary_pos_emb, interleaved pairs", None),
    "glm4": (
        "Glm4",
        "Glm4",
        {"head_dim": 16},
        "apply_rotary_pos_emb, interleaved pairs of the leading features",
        None,
    ),
    "starcoder2": ("Starcoder2", "Starcoder2", {}, HALF, None),
    "granite": ("Granite", "Granite", {}, HALF, None),
    "roformer": ("RoFormer", "RoFormer", ROFORMER, PACKED, None),
    "roformer_with_values": ("RoFormer", "RoFormer", ROFORMER | {"rotary_value": True}, PACKED, None),
}


def tiny(family: str, *, seed: int = 0, attention: str | None = None, **changes: Any) -> Any:
    """A causal model of the family with random weights, norms included."""
    config_name, model_name, more, _, _ = FAMILIES[family]
    config = getattr(transformers, f"{config_name}Config")(**SIZES | more | changes)
    if attention is not None:
        config._attn_implementation = attention
    # The grouped product of experts knows no float64.
    config._experts_implementation = "eager"
    torch.manual_seed(seed)
    model = getattr(transformers, f"{model_name}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "embed_positions" in name:
                continue  # a table of sines, which is no weight
            # Enough for scores that differ, and norms whose weights can be told from 1.
            scale = 0.3 if parameter.dim() == 1 else 1.5 * parameter[0].numel() ** -0.5
            drawn = torch.randn(parameter.shape) * scale
            parameter.copy_(parameter + drawn if "norm" in name else drawn)
    return model


def tokens(batch: int = 2, length: int = 12) -> Tensor:
    return torch.randint(3, 61, (batch, length), generator=torch.Generator().manual_seed(7))


def outcome(model: Any, ids: Tensor, **more: Any) -> tuple[Tensor, Tensor]:
    """Logits, and the gradients of all weights for a random cotangent, end to end."""
    model.zero_grad()
    logits = model(ids, use_cache=False, **more).logits
    cotangent = torch.randn(logits.shape, generator=torch.Generator().manual_seed(1))
    (logits * cotangent.to(logits)).sum().backward()
    gradients = [parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None]
    return logits.detach().double(), torch.cat(gradients).double()


def exact(model: Any, ids: Tensor, **more: Any) -> tuple[Tensor, Tensor]:
    """The same of a copy with these weights, in float64."""
    return outcome(copy.deepcopy(model).double(), ids, **more)


def rms(x: Tensor) -> float:
    return float(x.square().mean().sqrt())
