"""Launches of the Triton kernels for linear attention: their number, their addresses, and wrong kernels."""

import importlib.util
import pathlib
import sys

import pytest
import torch

import ropewalk as rw
from kernels.triton_device import DEVICE
from kernels.weighted_kernels import (
    FAR,
    check,
    inputs_of,
    kernels_only,
    ours,
    short_segments,
    two_steps_per_chunk,
)
from ropewalk.kernels.linear import triton_apart, triton_call, triton_kernels
from ropewalk.kernels.triton_launch import Launch
from slow import slow

__all__ = ["kernels_only", "short_segments", "two_steps_per_chunk"]

# Of torch, on a CPU that has no bfloat16.
pytestmark = pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")


@pytest.mark.parametrize(
    ("kind", "causal", "most"),
    [
        ("plain", True, (3, 4)),
        ("per key head", True, (3, 4)),
        ("alibi", False, (3, 4)),
        ("t5", True, (3, 5)),  # the gradient of its numbers is one more
    ],
)
def test_few_launches(kind, causal, most, monkeypatch):
    launched = []
    bare, by_address = Launch.bare, Launch.by_address
    monkeypatch.setattr(Launch, "bare", lambda self, *x: launched.append(self) or bare(self, *x))

    def counted(self, *x):
        if not by_address(self, *x):
            return False
        launched.append(self)
        return True

    monkeypatch.setattr(Launch, "by_address", counted)
    inputs, rule = inputs_of(kind, 1, 1, 20)
    # The gradient of a decay is the formula's.
    leaves = [x.to(DEVICE, torch.bfloat16).requires_grad_(i < 3 or kind == "t5") for i, x in enumerate(inputs)]
    rope = rw.RotaryEmbedding(8).to(DEVICE)
    # The first calls make cos and sin too.
    for _ in range(2):
        ours(*leaves[:3], rule, rope, tensor=[*leaves, None][3], causal=causal)
    launched.clear()
    out = ours(*leaves[:3], rule, rope, tensor=[*leaves, None][3], causal=causal)
    assert len(launched) == most[0]
    torch.autograd.grad(out.sum(), [x for x in leaves if x.requires_grad])
    assert len(launched) == sum(most)


@pytest.mark.parametrize(("kind", "packed"), [("plain", False), ("t5", False), ("alibi", True)])
def test_addresses_are_those_of_the_arrays(kind, packed, monkeypatch):
    seen, launch = [], triton_call.Call.launch

    def checked(self, kernels, names, addresses, tensors):
        arrays = tensors()
        assert len(names) == len(addresses) == len(arrays)
        for name, address, array in zip(names, addresses, arrays, strict=True):
            if isinstance(array, int):
                assert address == array, name
            elif address and array.numel():
                assert address == array.data_ptr(), name
        seen.extend(kernels.split(","))
        launch(self, kernels, names, addresses, tensors)

    monkeypatch.setattr(triton_call.Call, "launch", checked)
    inputs, rule = inputs_of(kind, 2, 1, 20)
    leaves = [x.to(DEVICE, torch.bfloat16).requires_grad_() for x in inputs]
    ends = torch.tensor([0, 7, 20], device=DEVICE) if packed else None
    rope = rw.RotaryEmbedding(8).to(DEVICE)
    # The second call repeats the first if it has no weights.
    for _ in range(2):
        seen.clear()
        out = ours(*leaves[:3], rule, rope, tensor=[*leaves, None][3], cu_seqlens=ends)
        torch.autograd.grad(out, leaves, torch.ones_like(out))
        assert len(seen) == (8 if kind == "t5" else 7)


def test_saved_tensors_with_other_strides():
    (q, k, v, g), rule = inputs_of("per key head", 2, 1, 70)
    leaves = [x.to(DEVICE).requires_grad_() for x in (q, k, v)]

    def gradients():
        return torch.autograd.grad(ours(*leaves, rule, tensor=g.to(DEVICE)).square().sum(), leaves)

    def unpack(x):
        moved = x.transpose(1, 2).contiguous().transpose(1, 2) if x.dim() == 4 else x
        shifted = torch.empty(moved.numel() + 1, dtype=x.dtype, device=x.device)[1:] if x.dim() < 3 else moved
        return shifted.view_as(x).copy_(x) if x.dim() < 3 else moved

    truth = gradients()
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, unpack):
        results = gradients()
    for a, b in zip(results, truth, strict=True):
        torch.testing.assert_close(a, b)


# Heads so wide that several programs share a chunk: gradients of keys and of values are then separate programs.
@pytest.mark.usefixtures("kernels_only")
@pytest.mark.parametrize(("kind", "causal"), [("t5", True), slow("t5", False), slow("alibi", False)])
def test_wide_heads(kind, causal):
    check(kind, 2, 1, 100, batch=1, buckets=FAR, sizes=(72, 70), causal=causal)


# What is changed in triton_apart.py, and the kind of attention that must then be wrong.
MUTANTS = {
    "a state of the wrong chunk": ("other = chunk + NEAR if AFTER else chunk - NEAR", "other = chunk", "t5", False),
    "a state before the first token": ("other * CHUNK >= first", "other * CHUNK >= first - 64", "t5", True),
    "no sums within the segment": ("kept + tl.where(exists, more_a, 0.0)", "kept", "alibi", False),
    "a segment that does not decay": ("if AFTER else inside * CHUNK", "if AFTER else 0 * inside", "alibi", False),
    "a row that decays once too often": ("if AFTER else row + 1", "if AFTER else row + 2", "alibi", False),
    "one factor for both sides": (
        "far_weight(band, head, BAND, AFTER)",
        "far_weight(band, head, BAND, 0)",
        "t5",
        False,
    ),
    "a side that is not visited": (
        "1 + 2 * NEAR if SIDE == 0 else 1 + NEAR) * STEPS",
        "1 + NEAR) * STEPS",
        "t5",
        False,
    ),
    "a visit too few": ("* STEPS * Y_GROUP", "* STEPS * Y_GROUP - 1", "alibi", False),
    "steps as long as chunks": ("+ ahead * STEP + tl", "+ ahead * CHUNK + tl", "t5", True),
    "rotated keys stored twice": ("x_stored, rotated, unrotated", "x_stored, rotated, rotated", "t5", False),
    "sums of the other side": ("before[0][:, None] * before[1]", "before[0][:, None] * after[1]", "t5", False),
    "tiles without their factors": ("gradient * weight)", "gradient)", "t5", True),
    "far keys that learn nothing": ("tl.store(of_far + 2 * place + AFTER, gradient)", "pass", "t5", True),
}


def loaded(path, text, monkeypatch):
    """The module that a new file with this text is."""
    path.write_text(text, "utf-8")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, path.stem, module)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
@pytest.mark.usefixtures("two_steps_per_chunk")
@pytest.mark.parametrize("name", MUTANTS)
def test_a_wrong_kernel_is_noticed(name, tmp_path, monkeypatch):
    old, new, kind, causal = MUTANTS[name]
    text, stem = pathlib.Path(triton_apart.__file__).read_text(encoding="utf-8"), f"apart_{list(MUTANTS).index(name)}"
    assert old in text
    loaded(tmp_path / f"{stem}.py", text.replace(old, new), monkeypatch)
    # Kernels of their own: Triton keeps what it has compiled for a kernel.
    text = pathlib.Path(triton_kernels.__file__).read_text(encoding="utf-8")
    text = text.replace("from ropewalk.kernels.linear.triton_apart import", f"from {stem} import")
    wrong = loaded(tmp_path / f"kernels_of_{stem}.py", text, monkeypatch)
    for kernel in ("read_values", "read_queries", "read_keys", "read_factors"):
        monkeypatch.setattr(triton_call, kernel, getattr(wrong, kernel))
    with pytest.raises(AssertionError):
        # On a GPU segments are longer, and the sums of several are read.
        check(kind, 2, 1, 150 if DEVICE.type == "cpu" else 1100, buckets=FAR, causal=causal)
