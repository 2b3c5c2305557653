"""The rotation's Triton kernel with a mistake in it: the parity check that it passes must fail every one."""

import importlib.util
from pathlib import Path

import pytest
import torch

from kernels.triton_device import on_device
from nn.module import module_for
from ropewalk import ops
from ropewalk.kernels import triton_launch as launch_triton
from ropewalk.kernels.backend import Backend, Operation, register
from ropewalk.kernels.rotate import triton as rotate_triton
from ropewalk.reference import check_rotation
from ropewalk.reference.budget import BudgetError

SOURCE = Path(rotate_triton.__file__).read_text(encoding="utf-8")

# What is written, and what would be wrong in its place.
MISTAKES = {
    "rotates the other way": ("tl.fma(a, cos, -(b * sin))", "tl.fma(a, cos, b * sin)"),
    "swaps the members of a pair": ("first, second = tl.split(", "second, first = tl.split("),
    "forgets the conjugate": ("    if CONJUGATE:\n        sin = -sin\n", ""),
    "starts at another row": ("first_rows[0] + b", "first_rows[0] + 1 + b"),
    "takes the first batch's rows": ("+ b * first_rows[1]", ""),
    "takes the first head's rows": ("+ group * first_rows[2]", ""),
    "leaves the last token": ("(s < counts[0])", "(s < counts[0] - 1)"),
    "leaves the last block": ("(block + later < counts[2])", "(block + later < counts[2] - 1)"),
    "counts tokens of the next block wrong": ("(inner % counts[1]) * TOKENS + token", "(inner % counts[1]) * TOKENS"),
    "mixes up parts": ("(row * TABLE_WIDTH + part * V)", "(row * TABLE_WIDTH)"),
    "pairs neighbours of another width": ("and_at = at + PAIRS", "and_at = at + PAIRS - 1"),
    "starts at the first feature": ("at = (START + part * WIDTH)", "at = (part * WIDTH)"),
    "copies from the wrong end": ("        number += 2 * PAIRS\n", "        pass\n"),
    "forgets half of what is not rotated": ("(is_rotated | (rest + V < REST))", "is_rotated"),
    "reads features side by side": ("feature_offset(at, STEPS[0])", "at"),
    "works in the dtype of x": (
        "a, b_ = rotate_pair(first, second, c, d, ",
        "a, b_ = rotate_pair(first, second, c.to(kind), d.to(kind), ",
    ),
}


def few(case):
    # One case of each kind is enough to catch each of them, and quick in Triton's interpreter.
    kinds = (
        "dim 2,",
        "dim 60",
        "24 of 64",
        "every other",
        "per head, conjugate",
        "as many heads",
        "7 tokens",
        "transposed",
    )
    return any(kind in f"{case.name}," for kind in kinds) and "1.277" not in case.name


def mutated(tmp_path, mistake):
    old, new = MISTAKES[mistake]
    assert SOURCE.count(old) >= 1, f"{mistake}: the kernel no longer says {old!r}"
    path = tmp_path / "rotate_triton_mutant.py"
    path.write_text(SOURCE.replace(old, new), encoding="utf-8")
    spec = importlib.util.spec_from_file_location("rotate_triton_mutant", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def by_kernel(kernel):
    def candidate(x, positions, inv_freq, *, pairing, conjugate, amplitude, rotary_slice, backend):
        rope = module_for(x, inv_freq, amplitude, backend=backend, pairing=pairing, rotary_slice=rotary_slice)
        working = torch.float64 if x.dtype == torch.float64 else torch.float32
        # A table with a row before the first, so that `row` matters.
        cos, sin = (torch.cat((t[..., :1, :] + 1, t), dim=-2) for t in rope.at(positions, dtype=working))
        undo = register(Backend("mutant", {"rotate": Operation(run=kernel)}))
        try:
            return ops.rotate(x, None, cos, sin, rope.layout, row=1, conjugate=conjugate, backend="mutant")[0]
        finally:
            undo()

    return candidate


@pytest.mark.slow
@pytest.mark.parametrize("mistake", MISTAKES)
def test_every_mistake_is_caught(mistake, tmp_path):
    launch_triton.LAUNCHES.clear()
    with pytest.raises(BudgetError):
        check_rotation(
            on_device(by_kernel(mutated(tmp_path, mistake).rotate)), [torch.bfloat16, torch.float32], where=few
        )
    launch_triton.LAUNCHES.clear()


@pytest.mark.slow
def test_without_a_mistake_it_passes():
    assert check_rotation(on_device(by_kernel(rotate_triton.rotate)), [torch.bfloat16], where=few) <= 1
