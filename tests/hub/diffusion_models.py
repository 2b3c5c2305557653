"""Small random transformers of diffusers, their inputs, and what they compute."""

import importlib
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from strategies import vector


class Model(NamedTuple):
    """A model and the inputs of its forward, in float32: floating-point tensors that are cast, and other arguments."""

    model: nn.Module
    inputs: dict[str, Any]
    others: dict[str, Any]


def _load(name: str) -> Any:
    return getattr(importlib.import_module("diffusers"), name)


def _flux() -> Model:
    sizes = {"attention_head_dim": 16, "num_attention_heads": 2, "joint_attention_dim": 12, "pooled_projection_dim": 10}
    model = _load("FluxTransformer2DModel")(
        in_channels=8, num_layers=1, num_single_layers=1, axes_dims_rope=(4, 4, 8), **sizes
    )
    ids = torch.stack((torch.zeros(12), torch.arange(12) // 4, torch.arange(12) % 4), dim=-1)
    text = {"encoder_hidden_states": vector(1, 2, 5, 12), "pooled_projections": vector(2, 2, 10)}
    inputs = {"hidden_states": vector(0, 2, 12, 8), "timestep": torch.tensor([0.3, 0.7]).double(), **text}
    return Model(model, inputs, {"img_ids": ids, "txt_ids": torch.zeros(5, 3)})


def _flux2() -> Model:
    sizes = {"attention_head_dim": 16, "num_attention_heads": 2, "joint_attention_dim": 12}
    model = _load("Flux2Transformer2DModel")(
        in_channels=8, num_layers=1, num_single_layers=1, axes_dims_rope=(4, 4, 4, 4), **sizes
    )
    ids = torch.stack((torch.zeros(12), torch.arange(12) // 4, torch.arange(12) % 4, torch.zeros(12)), dim=-1)
    text_ids = torch.stack((torch.zeros(5), torch.zeros(5), torch.zeros(5), torch.arange(5)), dim=-1)
    inputs = {
        "hidden_states": vector(0, 2, 12, 8),
        "encoder_hidden_states": vector(1, 2, 5, 12),
        "timestep": torch.tensor([0.3, 0.7]).double(),
        "guidance": torch.tensor([1.0, 1.0]).double(),
    }
    return Model(model, inputs, {"img_ids": ids, "txt_ids": text_ids})


def _qwen() -> Model:
    model = _load("QwenImageTransformer2DModel")(
        in_channels=16, out_channels=4, num_layers=2, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=12, axes_dims_rope=(4, 4, 8),
    )  # fmt: skip
    inputs = {
        "hidden_states": vector(0, 2, 12, 16),
        "encoder_hidden_states": vector(1, 2, 5, 12),
        "timestep": torch.tensor([0.3, 0.7]).double(),
    }
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
    return Model(model, inputs, {"img_shapes": [[(1, 3, 4)], [(1, 3, 4)]], "encoder_hidden_states_mask": mask})


def _z_image() -> Model:
    model = _load("ZImageTransformer2DModel")(
        in_channels=4, dim=32, n_layers=1, n_refiner_layers=1, n_heads=2, n_kv_heads=2, cap_feat_dim=12,
        axes_dims=[4, 4, 8], axes_lens=[64, 32, 32],
    )  # fmt: skip
    # Padding tokens are created empty.
    for name, parameter in model.named_parameters():
        if "pad_token" in name:
            nn.init.normal_(parameter)
    inputs = {"x": [vector(0, 4, 1, 4, 6), vector(1, 4, 1, 6, 6)], "t": torch.tensor([0.3, 0.7]).double()}
    return Model(model, inputs | {"cap_feats": [vector(2, 5, 12), vector(3, 9, 12)]}, {})


def _wan() -> Model:
    model = _load("WanTransformer3DModel")(
        num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4, text_dim=10, freq_dim=16,
        ffn_dim=24, num_layers=2, rope_max_seq_len=16,
    )  # fmt: skip
    inputs = {"hidden_states": vector(0, 2, 4, 2, 4, 6), "encoder_hidden_states": vector(1, 2, 5, 10)}
    return Model(model, inputs, {"timestep": torch.tensor([300, 700])})


def _ltx() -> Model:
    model = _load("LTXVideoTransformer3DModel")(
        in_channels=8, out_channels=8, num_attention_heads=2, attention_head_dim=16, cross_attention_dim=32,
        num_layers=2, caption_channels=10,
    )  # fmt: skip
    inputs = {"hidden_states": vector(0, 2, 12, 8), "encoder_hidden_states": vector(1, 2, 5, 10)}
    shape = {"num_frames": 2, "height": 2, "width": 3}
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
    return Model(model, inputs, {"timestep": torch.tensor([300, 700]), "encoder_attention_mask": mask, **shape})


MODELS = {"flux": _flux, "flux2": _flux2, "qwenimage": _qwen, "z_image": _z_image, "wan": _wan, "ltx": _ltx}


def build(name: str, seed: int = 0) -> Model:
    """A model with random weights. Norm weights are not 1, so that they matter."""
    torch.manual_seed(seed)
    made = MODELS[name]()
    with torch.no_grad():
        for key, parameter in made.model.named_parameters():
            if "norm" in key and key.endswith("weight") and parameter.dim() == 1:
                parameter.uniform_(0.5, 1.5)
    return made._replace(model=made.model.eval())


def cast(value: Any, dtype: torch.dtype, gradient: bool = False) -> Any:
    if isinstance(value, list):
        return [cast(part, dtype, gradient) for part in value]
    return value.to(dtype).requires_grad_(gradient and value.dim() > 1)


def run(made: Model, dtype: torch.dtype, model: nn.Module | None = None) -> list[Tensor]:
    """The output, and the gradients of the inputs and of the weights of to_q and its norm."""
    model = made.model if model is None else model
    inputs = {name: cast(value, dtype, gradient=True) for name, value in made.inputs.items()}
    out = model(**inputs, **made.others, return_dict=False)[0]
    out = torch.cat([part.flatten() for part in out]) if isinstance(out, list) else out
    cotangent = vector(9, *out.shape).to(out)
    leaves = [x for value in inputs.values() for x in (value if isinstance(value, list) else [value])]
    weights = [p for name, p in model.named_parameters() if "norm_q" in name or "to_q" in name or "to_qkv" in name]
    leaves = [leaf for leaf in leaves if leaf.requires_grad] + weights
    gradients = torch.autograd.grad(out, leaves, cotangent, allow_unused=True)
    return [out.detach(), *(g for g in gradients if g is not None)]
