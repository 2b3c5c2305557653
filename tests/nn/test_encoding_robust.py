"""Encodings after everything that PyTorch does to a module: what is fixed stays, parameters are as any others."""

import copy
import pickle
from typing import Any

import pytest
import torch

from nn.test_encoding import DIM, HEADS, IDS, NAMES, OPTIONS, K, Q, X, hooks, made, same
from ropewalk.nn.encodings.by_name import encoding


def reloaded(found):
    fresh = made(found.name, seed=77)
    fresh.load_state_dict(found.state_dict(), strict=True)
    return fresh


def emptied(found):
    """Made on meta, given memory, then its parameters."""
    with torch.device("meta"):
        fresh = encoding(found.name, dim=DIM, num_heads=HEADS, **OPTIONS[found.name])
    fresh = fresh.to_empty(device="cpu").double()
    fresh.load_state_dict(found.state_dict(), strict=True)
    return fresh


TREATMENTS = {
    "state_dict": reloaded,
    "deepcopy": copy.deepcopy,
    "pickle": lambda found: pickle.loads(pickle.dumps(found)),
    "made on meta": emptied,
    "to meta and back": lambda found: reloaded(found).to("meta").to_empty(device="cpu"),
    "in a model": lambda found: torch.nn.Sequential(found).double().eval()[0],
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("treatment", TREATMENTS)
def test_bit_identical_after(name, treatment):
    found = made(name)
    expected = hooks(found, positions=IDS)
    treated = TREATMENTS[treatment](found)
    if treatment == "to meta and back":
        treated.load_state_dict(found.state_dict())
    assert same(hooks(treated, positions=IDS), expected)


@pytest.mark.parametrize("name", ["sinusoidal", "alibi", "rope", "rope-across-heads", "xpos", "t5", "concatenated"])
def test_a_cast_does_not_touch_what_is_fixed(name):
    fresh = encoding(name, dim=DIM, num_heads=HEADS, **OPTIONS[name])
    cast = copy.deepcopy(fresh).to(torch.bfloat16).half().float()
    cast.load_state_dict(fresh.state_dict())
    far = (IDS + 50_000) if name != "xpos" else IDS
    x, q, k = X.float(), Q.float(), K.float()
    assert same(hooks(cast, x, q, k, far), hooks(fresh, x, q, k, far))
    if not list(fresh.parameters()):
        low = copy.deepcopy(fresh).to(torch.bfloat16)
        assert same(hooks(low, x, q, k, far), hooks(fresh, x, q, k, far))


def test_made_in_inference_mode():
    with torch.inference_mode():
        waves, slopes = (encoding(name, dim=DIM, num_heads=HEADS) for name in ("sinusoidal", "alibi"))
        assert waves.embed(X, IDS).shape == X.shape
    # A gradient for positions keeps frequencies and slopes for the way back.
    ids = IDS.double().requires_grad_()
    found: list[Any] = [waves.embed(X, ids), slopes.bias(ids, IDS + 1)]
    torch.autograd.backward([part.sum() for part in found])
    assert ids.grad is not None
    assert ids.grad.abs().min() > 0


@pytest.mark.parametrize("name", NAMES)
def test_parameters_are_drawn_anew_after_to_empty(name):
    torch.manual_seed(0)
    with torch.device("meta"):
        found = encoding(name, dim=DIM, num_heads=HEADS, **OPTIONS[name])
    found.to_empty(device="cpu")
    if list(found.parameters()):
        found.reset_parameters()
    assert all(part is None or part.isfinite().all() for part in hooks(found, X, Q, K, IDS))
    assert all(not parameter.is_meta for parameter in found.parameters())


def test_how_parameters_start():
    torch.manual_seed(0)
    assert 0.018 < encoding("learned", dim=64, num_heads=1, length=100).weight.std().item() < 0.022
    joined = encoding("concatenated", dim=8, num_heads=1, width=64, length=100)
    assert joined.weight is not None
    assert 0.018 < joined.weight.std().item() < 0.022
    assert torch.equal(encoding("multiplicative", dim=DIM, num_heads=1, length=4).weight, torch.ones(4, DIM))
    assert torch.equal(encoding("t5", dim=DIM, num_heads=2).weight, torch.zeros(32, 2))
    network = encoding("recurrent", dim=64, num_heads=1)
    assert all(0.1 < parameter.abs().max().item() <= 0.125 for parameter in network.parameters())
