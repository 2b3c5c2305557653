"""Loads the kernel layer through the kernels package: `python tests/hub/hub_kernels.py DEVICE` prints what it found.

It exits with 1 if the results differ. It needs an environment with `ropewalk[hf,kernels]`. pytest cannot run it: in its
process `import kernels` would import tests/kernels. On a CPU, set TRITON_INTERPRET=1 to run the Triton kernel.
"""

import importlib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import KernelConfig, LlamaConfig, LlamaForCausalLM
from transformers.models.llama import modeling_llama

import ropewalk as rw
from ropewalk.hub import write_kernel_layer

# pytest and type checkers find tests/kernels under this name.
hub: Any = importlib.import_module("kernels")


def run(folder: str, device: str) -> dict[str, Any]:
    """What a small model computes with and without the layer, for inference and training."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=96)).to(device).eval()
    ids = torch.randint(96, (2, 33), device=device)
    rotation: Any = modeling_llama.apply_rotary_pos_emb
    out: dict[str, Any] = {"wrapped": isinstance(rotation, torch.nn.Module)}
    before, gradient = model(ids).logits, _gradient(model, ids)
    with rw.accelerate(model) as handle:
        out["accelerated"] = len(handle.patched)
        out["accelerated_gap"] = (model(ids).logits - before).abs().max().item()
    for training in (False, True):
        model.train(training)
        if device == "cpu":
            # KernelConfig knows no CPU; the mapping of the kernels package does.
            mode = hub.Mode.TRAINING if training else hub.Mode.INFERENCE
            repository = hub.LocalLayerRepository(Path(folder), layer_name="Rotary")
            hub.register_kernel_mapping({"rotary_pos_emb": {"cpu": {mode: repository}}})
            model.set_use_kernels(True)
        else:
            config = KernelConfig({"rotary_pos_emb": f"{folder}:Rotary"}, use_local_kernel=True, inherit_mapping=False)
            model.set_use_kernels(True, config)
        name = "training" if training else "inference"
        forward = rotation.forward.__func__
        out[name] = forward.__module__
        module = sys.modules[forward.__module__]
        run_kernel, calls = vars(module)["_fused"], []
        vars(module)["_fused"] = lambda *call, run=run_kernel, calls=calls: calls.append(1) or run(*call)
        out[f"{name}_gap"] = (model(ids).logits - before).abs().max().item()
        out[f"{name}_gradient_gap"] = (_gradient(model, ids) - gradient).abs().max().item()
        vars(module)["_fused"] = run_kernel
        out[f"{name}_fused"] = len(calls)
    out["size"], out["gradient_size"] = before.abs().max().item(), gradient.abs().max().item()
    return out


def _gradient(model: Any, ids: torch.Tensor) -> torch.Tensor:
    model.zero_grad()
    model(ids, labels=ids).loss.backward()
    return model.model.layers[0].self_attn.q_proj.weight.grad.clone()


def check(found: dict[str, Any]) -> None:
    """Raise an AssertionError if the model with the layer differs from the model without."""
    # rw.accelerate sees the function behind the module that the package makes of it.
    assert found["wrapped"]
    assert found["accelerated"] == 2
    assert found["accelerated_gap"] <= 1e-5 * found["size"]
    for mode in ("inference", "training"):
        assert found[mode].startswith("_ropewalk_rotary_"), mode
        assert found[f"{mode}_fused"] > 0, mode
        assert found[f"{mode}_gap"] <= 1e-5 * found["size"], mode
        assert found[f"{mode}_gradient_gap"] <= 1e-4 * found["gradient_size"], mode


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        result = run(str(write_kernel_layer(folder)), *sys.argv[1:])
    sys.stdout.write(json.dumps(result, indent=2) + "\n")
    check(result)
