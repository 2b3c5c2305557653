"""Decoder: the same parameters for every encoding, causal, and what its parts compute."""

from typing import Any

import pytest
import torch
from torch.nn import functional

import ropewalk as rw
from ropewalk.lab.decoder import SIZES, Decoder
from ropewalk.lab.experiments.text import ALL_ENCODINGS


def make(encoding, **options):
    return Decoder("micro", encoding, vocabulary=11, length=16, **options)


def blocks_of(model: Decoder) -> list[Any]:
    return list(model.blocks)


@pytest.mark.parametrize("attention", ["softmax", "linear"])
@pytest.mark.parametrize("encoding", ALL_ENCODINGS)
def test_models_start_equal_and_are_causal(encoding, attention):
    model, plain = make(encoding, attention=attention), make("none", attention=attention)
    ours = dict(model.named_parameters())
    for name, parameter in plain.named_parameters():
        assert torch.equal(parameter, ours[name]), name
    tokens = torch.randint(11, (2, 16))
    changed = tokens.clone()
    changed[:, 9:] = (changed[:, 9:] + 1) % 11
    with torch.no_grad():
        a, b = model(tokens), model(changed)
    assert torch.allclose(a[:, :9], b[:, :9], atol=1e-5)
    assert not torch.allclose(a[:, 9:], b[:, 9:], atol=1e-5)


@pytest.mark.parametrize("encoding", ["learned", "recurrent", "concatenated"])
def test_parameters_of_encodings_are_functions_of_the_seed(encoding):
    states = []
    for noise, seed in ((1, 0), (2, 0), (3, 1)):
        torch.manual_seed(noise)
        states.append(make(encoding, seed=seed).encoding.state_dict())
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert not all(torch.equal(states[0][name], states[2][name]) for name in states[0])


def test_tokens_learned_positions_and_sinusoids_start_at_one_scale():
    model = make("learned")
    table = model.encoding.state_dict()["weight"]
    assert table.std().item() == pytest.approx(model.embedding.weight.std().item(), rel=0.1)
    assert table.std().item() == pytest.approx(0.5**0.5, rel=0.1)


def test_seeds_differ_and_repeat():
    first, again, other = make("rope", seed=1), make("rope", seed=1), make("rope", seed=2)
    weights = [blocks_of(model)[0].gate.weight for model in (first, again, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    assert not torch.equal(*(block.gate.weight for block in blocks_of(first)))


def test_sizes_are_what_their_names_say():
    counts = {
        name: sum(x.numel() for x in Decoder(name, "rope", vocabulary=256, length=8).parameters()) for name in SIZES
    }
    assert {name: round(count / 1e6, 1) for name, count in counts.items()} == {"micro": 0.1, "tiny": 1.1, "small": 10.8}


@pytest.mark.parametrize("attention", ["softmax", "linear"])
def test_qk_norm_and_positions(attention):
    model = make("rope", qk_norm=True, attention=attention).double()
    tokens = torch.randint(11, (2, 8))
    shifted = model(tokens, torch.arange(8) + 5)
    assert torch.allclose(model(tokens), shifted, atol=1e-8)
    assert not torch.allclose(model(tokens), make("rope", attention=attention).double()(tokens), atol=1e-4)
    # Scores do not grow with the weights of the projections.
    with torch.no_grad():
        for block in blocks_of(model):
            block.attention.q_proj.weight.mul_(100)
    assert torch.allclose(model(tokens), shifted, atol=1e-3)


def test_a_block_is_attention_and_swiglu():
    model = make("rope").double()
    (block, _), x = blocks_of(model), torch.randn(1, 6, 64, dtype=torch.float64)
    q, k, v = block.attention.heads_of(functional.rms_norm(x, (64,), block.norms[0].weight))
    q, k = rw.RotaryEmbedding(16)(q, k)
    y = functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
    y = x + y @ block.attention.o_proj.weight.T
    z = functional.rms_norm(y, (64,), block.norms[1].weight)
    z = y + (functional.silu(z @ block.gate.weight.T) * (z @ block.up.weight.T)) @ block.down.weight.T
    assert torch.allclose(block(x, None, None), z, atol=1e-12)


def test_mistakes_are_errors():
    with pytest.raises(rw.RopewalkError, match="'micro' or 'tiny' or 'small'"):
        Decoder("huge", "rope", vocabulary=5, length=4)
    with pytest.raises(rw.RopewalkError, match="'softmax' or 'linear'"):
        make("rope", attention="quadratic")
