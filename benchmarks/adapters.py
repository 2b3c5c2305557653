"""Times models of diffusers and transformers before and after ropewalk's adapters: forward, and forward with backward.

python benchmarks/adapters.py [--json benchmarks/adapters.json] [--rounds 20] [--small] [--device cuda]

One block of Flux, Wan and LTX of diffusers, with the sizes of Flux.1, Wan 2.1 14B and LTX-Video, as it is and with
rw.accelerate; Llama and Qwen3 with four layers of transformers, as they are and with `use_kernels` and the kernel layer
that `write_kernel_layer` writes, if the package kernels is installed. Random weights, bfloat16. Wall-clock times of
eager calls, with a synchronization each, in interleaved rounds in random order, and the errors of both against the
model in float64. Exits with 1 if an error is more than twice that of the plain model, or if nothing is gained.

Attention is torch's flash kernel on a GPU: the backward pass of cuDNN's, which torch 2.11 prefers, fails for Flux's
shape in the plain model too. --small is for a look at the script on a CPU.
"""

import argparse
import copy
import dataclasses
import functools
import importlib.util
import logging
import platform
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from datetime import UTC, datetime
from typing import Any

import diffusers
import torch
import transformers
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import ropewalk as rw
from ropewalk.hub import write_kernel_layer
from ropewalk.tools.bench.records import write_record
from ropewalk.tools.output import package_version, processor

# What a block gains at least by the clock: times faster, forward and training. A floor of the committed record.
GAIN = 1.0


@dataclasses.dataclass
class Case:
    """A model, the inputs of its forward, and how it is adapted."""

    model: nn.Module
    inputs: dict[str, Any]
    adapt: Callable[[nn.Module], Any] = rw.accelerate
    # The module-level rotation of a modeling file of transformers, whose forward the kernel layer replaces.
    rotation: Any = None


def flux(small: bool) -> Case:
    heads, dim, tokens = (2, 16, 64) if small else (24, 128, 4096)
    axes = (4, 4, 8) if small else (16, 56, 56)
    sizes = {"attention_head_dim": dim, "num_attention_heads": heads, "joint_attention_dim": 64, "axes_dims_rope": axes}
    model = diffusers.FluxTransformer2DModel(num_layers=1, num_single_layers=1, pooled_projection_dim=64, **sizes)
    side = int(tokens**0.5)
    rows, columns = torch.arange(tokens) // side, torch.arange(tokens) % side
    inputs = {
        "hidden_states": torch.randn(1, tokens, 64),
        "encoder_hidden_states": torch.randn(1, tokens // 8, 64),
        "pooled_projections": torch.randn(1, 64),
        "timestep": torch.tensor([0.5]),
        "img_ids": torch.stack((torch.zeros(tokens), rows, columns), dim=-1),
        "txt_ids": torch.zeros(tokens // 8, 3),
    }
    return Case(model, inputs)


def wan(small: bool) -> Case:
    heads, dim, side = (2, 12, 8) if small else (40, 128, 64)
    sizes = {"num_attention_heads": heads, "attention_head_dim": dim, "ffn_dim": 256 if small else 13824}
    model = diffusers.WanTransformer3DModel(num_layers=1, text_dim=64, **sizes)
    inputs = {
        "hidden_states": torch.randn(1, 16, 8, side, side),
        "encoder_hidden_states": torch.randn(1, 64, 64),
        "timestep": torch.tensor([500]),
    }
    return Case(model, inputs)


def ltx(small: bool) -> Case:
    heads, dim, side = (2, 16, 4) if small else (32, 64, 32)
    model = diffusers.LTXVideoTransformer3DModel(
        num_attention_heads=heads, attention_head_dim=dim, cross_attention_dim=heads * dim, num_layers=1,
        caption_channels=64,
    )  # fmt: skip
    inputs = {
        "hidden_states": torch.randn(1, 8 * side * side, 128),
        "encoder_hidden_states": torch.randn(1, 64, 64),
        "timestep": torch.tensor([500]),
        "encoder_attention_mask": torch.ones(1, 64),
        "num_frames": 8,
        "height": side,
        "width": side,
    }
    return Case(model, inputs)


def language(family: str, small: bool) -> Case:
    """Four layers with the sizes of Llama 3.2 1B or Qwen 3 1.7B."""
    heads, dim = (4, 16) if small else {"llama": (32, 64), "qwen3": (16, 128)}[family]
    wide = {"hidden_size": heads * dim, "intermediate_size": 4 * heads * dim, "num_hidden_layers": 4, "head_dim": dim}
    config = transformers.AutoConfig.for_model(
        family, **wide, num_attention_heads=heads, num_key_value_heads=max(heads // 4, 2), vocab_size=1024
    )
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    tokens = torch.randint(1024, (1, 64) if small else (4, 4096))
    rotation = vars(sys.modules[type(model).__module__])["apply_rotary_pos_emb"]
    return Case(model, {"input_ids": tokens, "use_cache": False}, use_kernel_layer, rotation)


def use_kernel_layer(model: Any) -> None:
    folder = write_kernel_layer(tempfile.mkdtemp())
    if model.device.type == "cpu":
        # KernelConfig knows no CPU; the mapping of the kernels package does.
        hub: Any = importlib.import_module("kernels")
        layer = hub.LocalLayerRepository(folder, layer_name="Rotary")
        hub.register_kernel_mapping({"rotary_pos_emb": {"cpu": {hub.Mode.TRAINING: layer}}})
        model.set_use_kernels(True)
        return
    names = {"rotary_pos_emb": f"{folder}:Rotary"}
    model.set_use_kernels(True, transformers.KernelConfig(names, use_local_kernel=True, inherit_mapping=False))


BLOCKS = {"Flux.1": flux, "Wan 2.1": wan, "LTX": ltx}
MODELS = {"Llama": functools.partial(language, "llama"), "Qwen3": functools.partial(language, "qwen3")}


def prepared(case: Case, dtype: torch.dtype, device: str) -> Case:
    """The case in another dtype, with the model itself: copies of it would not have the rotation of their file."""

    def moved(name: str, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        keeps = name.endswith("ids") or not value.is_floating_point()
        return value.to(device) if keeps else value.to(device, dtype)

    inputs = {name: moved(name, value) for name, value in case.inputs.items()}
    return dataclasses.replace(case, model=case.model.to(device, dtype).train(), inputs=inputs)


class Pair:
    """A model as it is and adapted, one of which runs at a time."""

    def __init__(self, plain: Case) -> None:
        self.rotation = plain.rotation
        self.forwards = {"plain": None if self.rotation is None else self.rotation.forward}
        adapted = plain
        if self.rotation is None:
            adapted = dataclasses.replace(plain, model=copy.deepcopy(plain.model))
        plain.adapt(adapted.model)
        self.cases = {"plain": plain, "adapted": adapted}
        self.forwards["adapted"] = None if self.rotation is None else self.rotation.forward
        if self.rotation is not None and self.forwards["adapted"] == self.forwards["plain"]:
            raise RuntimeError("transformers did not use the kernel layer")

    def select(self, name: str) -> Case:
        """The case, whose rotation is in use from now on."""
        if self.rotation is not None:
            self.rotation.forward = self.forwards[name]
        return self.cases[name]


def forward(case: Case) -> Tensor:
    return case.model(**case.inputs, return_dict=False)[0]


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def milliseconds(case: Case, trains: bool) -> float:
    """The time of one call, with a synchronization."""
    case.model.zero_grad(set_to_none=True)
    synchronize()
    start = time.perf_counter()
    if trains:
        forward(case).float().square().mean().backward()
    else:
        with torch.no_grad():
            forward(case)
    synchronize()
    return 1e3 * (time.perf_counter() - start)


def measure(make: Callable[[bool], Case], options: argparse.Namespace) -> dict[str, Any]:
    """Errors and times of one case."""
    torch.manual_seed(0)
    case = make(options.small)
    with torch.no_grad():
        truth = forward(
            prepared(dataclasses.replace(case, model=copy.deepcopy(case.model)), torch.float64, options.device)
        )
        pair = Pair(prepared(case, torch.bfloat16, options.device))
        errors = {
            name: ((forward(pair.select(name)).double() - truth).norm() / truth.norm()).item() for name in pair.cases
        }
    del truth
    times: dict[str, dict[str, float]] = {}
    for trains in (False, True):
        measured: dict[str, list[float]] = {name: [] for name in pair.cases}
        for count in range(-3, options.rounds):
            for name in random.sample(list(pair.cases), 2):
                ms = milliseconds(pair.select(name), trains)
                # The first rounds compile and allocate.
                if count >= 0:
                    measured[name].append(ms)
        times["training" if trains else "forward"] = {name: statistics.median(x) for name, x in measured.items()}
    pair.select("plain")
    return {"errors": errors, "ms": times}


def missed(cases: list[dict[str, Any]]) -> list[str]:
    """What the record must show and these figures do not."""
    sentences = [
        f"{case['model']}: error {case['errors']['adapted']:.2g}, plain {case['errors']['plain']:.2g}"
        for case in cases
        if case["errors"]["adapted"] > 2 * case["errors"]["plain"]
    ]
    for case in cases:
        for work, ms in case["ms"].items():
            if ms["adapted"] * GAIN > ms["plain"]:
                sentences.append(f"{case['model']}, {work}: {ms['adapted']:.4g} ms, plain {ms['plain']:.4g} ms")
    return sentences


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json", metavar="FILE", help="write the record")
    options = parser.parse_args()
    # It names every layer that has no kernel here.
    logging.getLogger("kernels").setLevel(logging.ERROR)
    makers: dict[str, Any] = BLOCKS | (MODELS if importlib.util.find_spec("kernels") else {})
    cases: list[dict[str, Any]] = []
    print(f"{'model':8}{'pass':10}{'plain ms':>12}{'adapted ms':>12}{'ratio':>8}{'errors':>20}", flush=True)
    # Math computes the truth in float64, and cross attention with a mask.
    backends = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    with sdpa_kernel(backends, set_priority=True) if options.device == "cuda" else nullcontext():
        for name, make in makers.items():
            case = {"model": name, **measure(make, options)}
            cases.append(case)
            for work, ms in case["ms"].items():
                plain, adapted = ms["plain"], ms["adapted"]
                errors = "".join(f"{case['errors'][x]:10.1e}" for x in ("plain", "adapted"))
                print(f"{name:8}{work:10}{plain:12.2f}{adapted:12.2f}{plain / adapted:8.2f}{errors}", flush=True)
    record = {
        "command": "python benchmarks/adapters.py",
        "date": datetime.now(UTC).date().isoformat(),
        "hardware": {
            "machine": platform.machine(),
            "processor": processor(),
            "gpu": torch.cuda.get_device_name() if options.device == "cuda" else None,
        },
        "versions": {"python": platform.python_version()}
        | {x: package_version(x) for x in ("torch", "triton", "diffusers", "transformers", "kernels")},
        "rounds": options.rounds,
        "cases": cases,
    }
    if options.json:
        write_record(record, options.json, missed(cases))
    sys.exit("\n".join(missed(cases)) or 0)


if __name__ == "__main__":
    main()
