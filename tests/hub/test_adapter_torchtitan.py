"""The overrides for torchtitan: activated by its own mechanism, and compared with its own modules."""

import dataclasses
import importlib
from typing import Any

import pytest
import torch

from hub.alone import torchtitan_rope
from strategies import vector


@pytest.fixture(scope="module")
def titan():
    return torchtitan_rope()


KINDS = ["CosSinRoPE", "ComplexRoPE"]


def modules(titan, kind, **fields):
    from ropewalk.hub.adapters import torchtitan as ours

    config = getattr(titan, kind).Config(dim=16, max_seq_len=64, **fields)
    factory = ours.cos_sin_rope if kind == "CosSinRoPE" else ours.complex_rope
    theirs, fused = config.build(), factory(config).build()
    assert type(fused) is not type(theirs)
    return theirs, fused


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("where", ["range", "shared", "batch"])
def test_values_and_gradients(titan, kind, dtype, where):
    theirs, fused = modules(titan, kind, scaling="yarn", rope_factor=4.0, original_seq_len=16)
    positions = {"range": None, "shared": torch.arange(9)[None] + 40, "batch": torch.arange(18).view(2, 9) * 3}[where]
    q, k = vector(0, 2, 9, 4, 16), vector(1, 2, 9, 2, 16)
    cotangents = vector(2, 2, 9, 4, 16), vector(3, 2, 9, 2, 16)

    def results(module, kind):
        leaves = [x.to(kind).requires_grad_() for x in (q.to(dtype), k.to(dtype))]
        outputs = module(*leaves, positions)
        return [*outputs, *torch.autograd.grad(outputs, leaves, [g.to(dtype).to(kind) for g in cotangents])]

    # torchtitan rotates float64 in float32: float32 is its best result, and bfloat16 is rounded once by both.
    expected, ours = results(theirs, dtype), results(fused, dtype)
    for a, b in zip(ours, expected, strict=True):
        assert a.dtype == b.dtype == dtype
        assert torch.allclose(a, b, atol=1e-6 if dtype == torch.float32 else 2e-2, rtol=0)
        if dtype == torch.bfloat16:
            # The same number, but for a tie in the last rounding.
            assert (a != b).float().mean() < 0.01


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_without_a_batch_and_calls_that_are_not_supported(titan, kind):
    theirs, fused = modules(titan, kind)
    q, k = vector(0, 1, 9, 4, 16).float(), vector(1, 1, 9, 2, 16).float()
    positions = torch.arange(9)[None] * 5
    for a, b in zip(fused(q[0], k[0], positions[0]), theirs(q, k, positions), strict=True):
        assert torch.allclose(a, b[0], atol=1e-6)
    # float64 goes to torchtitan's own rotation, bit for bit.
    for a, b in zip(fused(q.double(), k.double(), positions), theirs(q.double(), k.double(), positions), strict=True):
        assert torch.equal(a, b)


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("kind", KINDS)
def test_the_override_is_activated_by_its_import_path(titan, kind):
    configurable: Any = importlib.import_module("torchtitan.config.configurable").Configurable
    overrides: Any = importlib.import_module("torchtitan.config.override")

    class Tree(configurable):
        @dataclasses.dataclass(kw_only=True, slots=True)
        class Config(configurable.Config):
            rope: Any

    config = Tree.Config(rope=getattr(titan, kind).Config(dim=16, max_seq_len=64, theta=500_000.0))
    name = "cos_sin_rope" if kind == "CosSinRoPE" else "complex_rope"
    lines = overrides.apply_overrides(
        overrides.OverrideConfig(imports=[f"ropewalk.hub.adapters.torchtitan.{name}"]), config
    )
    assert len(lines) == 1
    assert type(config.rope.build()).__name__ == f"Fused{kind}"
    assert config.rope.theta == 500_000.0
    state = config.rope.build().state_dict()
    assert not state, "the cache is not part of checkpoints, as in torchtitan"
