"""Modules that are made, copied or called under fake tensors or in a transform: their constants stay real numbers.

What a module that was made under fake tensors computes later is in test_surroundings.py.
"""

import copy
import pickle

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import ropewalk as rw
from nn.test_surroundings import ENCODING_OPTIONS, SPECS
from ropewalk.nn.encodings.by_name import ENCODINGS

X = torch.randn(2, 4, 7, 16, generator=torch.Generator().manual_seed(0))


def calls(rope: rw.RotaryEmbedding, x: torch.Tensor) -> list[torch.Tensor]:
    spec = rope.spec
    more = {"length": 9} if spec.varies else {}
    ids = torch.zeros(2, 7, dtype=torch.int64)
    if spec.axes is not None:
        return [*rope(x, x, positions=ids.expand(2, 2, 7))]
    shifted = [rope.shift(x, 3, **more)] if spec.angles == "exact" else []
    return [*rope(x, x, positions=ids, **more), *rope(x, x), *shifted]


@pytest.mark.parametrize("made", ["for real", "as fake"])
def test_ropes_are_called_with_fake_tensors(made):
    for spec in SPECS.values():
        rope = rw.RotaryEmbedding(spec) if made == "for real" else None
        with FakeTensorMode():
            rope = rw.RotaryEmbedding(spec) if rope is None else rope
            results = calls(rope, torch.empty(2, 4, 7, 16))
        assert {type(x) for x in results} == {FakeTensor}
        assert type(rope.inv_freq) is torch.Tensor


@pytest.mark.parametrize("name", ENCODINGS)
def test_encodings_are_called_with_fake_tensors(name):
    with FakeTensorMode():
        encoding = rw.encoding(name, dim=64, num_heads=4, **ENCODING_OPTIONS.get(name, {}))
        q, ids = torch.empty(2, 4, 7, 16), torch.arange(7)
        results = [encoding.embed(torch.empty(2, 7, 64)), *encoding.rotate(q, q, ids), encoding.bias(ids, ids)]
    assert {type(x) for x in results if x is not None} == {FakeTensor}


def test_a_copy_made_under_fake_tensors_is_real():
    rope = rw.RotaryEmbedding(16)
    with FakeTensorMode():
        copied, moved = copy.deepcopy(rope), rw.RotaryEmbedding(16).bfloat16().to("meta")
    for other in (copied, moved, pickle.loads(pickle.dumps(copied))):
        assert torch.equal(other(X), rope(X))


def test_a_copy_keeps_no_shortcut_of_the_other():
    rope = rw.RotaryEmbedding(16)
    rope(X)
    copied = copy.deepcopy(rope)
    assert copied._source.shortcut is None
    assert torch.equal(copied(X), rope(X))


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.vmap, torch.func.jacrev])
def test_a_module_made_in_a_transform_is_used_after_it(transform):
    kept = []

    def rotated(x: torch.Tensor) -> torch.Tensor:
        kept.extend((rw.RotaryEmbedding(16), rw.encoding("sinusoidal", dim=16, num_heads=1)))
        return kept[1].embed(kept[0](x)).sum()

    transform(rotated)(X)
    rope, sinusoids = kept[:2]
    assert torch.equal(rope(X), rw.RotaryEmbedding(16)(X))
    assert torch.equal(sinusoids.embed(X), rw.encoding("sinusoidal", dim=16, num_heads=1).embed(X))


class CastingMode(torch.overrides.TorchFunctionMode):
    """Casts what constructors return, as a library might by a mode instead of by wrappers."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        made = getattr(function, "__name__", "") in ("tensor", "arange", "zeros", "ones", "full", "as_tensor")
        return result.bfloat16() if made and result.is_floating_point() else result


@pytest.mark.parametrize(
    "make",
    [
        lambda: rw.RotaryEmbedding(8),
        lambda: rw.RotaryEmbedding(rw.RopeSpec(8, rw.Yarn(1e4, factor=4, trained_length=64))),
        lambda: rw.RotaryEmbedding(rw.RopeSpec(8, angles="float32")),
    ],
)
def test_a_mode_of_functions_does_not_reach_constants(make):
    x, expected = torch.randn(2, 5, 8), make()
    with CastingMode():
        rope = make()
    assert torch.equal(rope.inv_freq, expected.inv_freq)
    assert torch.equal(rope(x), expected(x))
    assert torch.equal(rope(x, positions=torch.arange(5) * 999), expected(x, positions=torch.arange(5) * 999))
