"""Times one block of Flux, Wan and LTX of diffusers before and after rw.accelerate: forward, and forward with backward.

python benchmarks/diffusion.py [--rounds 20] [--small] [--device cuda] [--dtype bfloat16]

The blocks have the sizes of Flux.1, Wan 2.1 14B and LTX-Video, with random weights; --small is for a look at the script
on a CPU. Wall-clock times of eager calls, with a synchronization each, in interleaved rounds in random order. The
medians, their ratio, and the errors of both against the block in float64 are printed. Exits with 1 if the error is more
than twice that of the plain block. Headlines need a quiet machine: give hardware, date and command.
"""

import argparse
import copy
import random
import statistics
import sys
import time
from typing import Any, NamedTuple

import diffusers
import torch
from torch import Tensor, nn

import ropewalk as rw


class Case(NamedTuple):
    """A model with one block, and the inputs of its forward."""

    model: nn.Module
    inputs: dict[str, Any]


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


def prepared(case: Case, dtype: torch.dtype, device: str) -> Case:
    def moved(name: str, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        keeps = name.endswith("ids") or not value.is_floating_point()
        return value.to(device) if keeps else value.to(device, dtype)

    model = copy.deepcopy(case.model).to(device, dtype).train()
    return Case(model, {name: moved(name, value) for name, value in case.inputs.items()})


def forward(case: Case) -> Tensor:
    return case.model(**case.inputs, return_dict=False)[0]


def step(case: Case, trains: bool) -> float:
    """Seconds of one call, with a synchronization."""
    case.model.zero_grad(set_to_none=True)
    synchronize()
    start = time.perf_counter()
    if trains:
        forward(case).square().mean().backward()
    else:
        with torch.no_grad():
            forward(case)
    synchronize()
    return time.perf_counter() - start


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    options = parser.parse_args()
    torch.manual_seed(0)
    failed = False
    print(f"{'block':8}{'pass':10}{'plain ms':>12}{'fused ms':>12}{'ratio':>8}{'errors':>20}")
    for name, make in (("flux", flux), ("wan", wan), ("ltx", ltx)):
        case = make(options.small)
        plain = prepared(case, getattr(torch, options.dtype), options.device)
        fused = plain._replace(model=copy.deepcopy(plain.model))
        rw.accelerate(fused.model)
        with torch.no_grad():
            truth = forward(prepared(case, torch.float64, options.device))
            errors = [((forward(c).double() - truth).norm() / truth.norm()).item() for c in (plain, fused)]
        del truth
        failed |= errors[1] > 2 * errors[0]
        for trains in (False, True):
            times: dict[str, list[float]] = {"plain": [], "fused": []}
            both = {"plain": plain, "fused": fused}
            for _ in range(3):
                step(plain, trains), step(fused, trains)
            for _ in range(options.rounds):
                for key in random.sample(list(both), 2):
                    times[key].append(1e3 * step(both[key], trains))
            slow, fast = (statistics.median(times[key]) for key in ("plain", "fused"))
            line = f"{slow:12.2f}{fast:12.2f}{slow / fast:8.2f}{errors[0]:10.1e}{errors[1]:10.1e}"
            print(f"{name:8}{'training' if trains else 'forward':10}{line}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
