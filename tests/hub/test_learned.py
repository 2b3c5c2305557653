"""Learned frequencies and temperatures of checkpoints, compared with the model code of transformers."""

from typing import Any

import pytest
import torch
from transformers.models.mistral_large4.configuration_mistral_large4 import MistralLarge4TextConfig
from transformers.models.mistral_large4.modeling_mistral_large4 import (
    MistralLarge4TextRotaryEmbedding,
    MistralLarge4TextSoftmaxScaling,
)

from ropewalk import RopewalkError, RotaryEmbedding
from ropewalk.hub.configs.learned import load_learned


def test_mistral_large_4_with_learned_numbers():
    torch.manual_seed(0)
    config = MistralLarge4TextConfig()
    parts, layer = torch.nn.ModuleDict({"rotary_emb": MistralLarge4TextRotaryEmbedding(config)}), torch.nn.Module()
    attention: Any = torch.nn.Module()
    attention.softmax_scaling = MistralLarge4TextSoftmaxScaling(3)
    layer.add_module("self_attn", attention)
    parts["layers"] = torch.nn.ModuleList([layer])
    tensors = parts.state_dict()
    for tensor in tensors.values():
        tensor.copy_(torch.randn(tensor.shape))
    learned = load_learned(config, tensors)
    positions = torch.tensor([[0, 1, 5, 40, 101]])
    own = RotaryEmbedding(learned.spec).at(positions)
    for table, wanted in zip(own, parts["rotary_emb"](torch.zeros(1), positions), strict=True):
        # transformers rounds exp(alpha) and the frequencies to float32; exp(alpha) is at most 20 here.
        torch.testing.assert_close(torch.cat((table, table), dim=-1), wanted, rtol=0, atol=20 * 102 * 2**-22)
    q = torch.randn(1, 3, 5, 2)
    factors = torch.from_numpy(learned.temperatures[0].evaluate(positions[0].numpy()))[None, :, :, None]
    scaled = attention.softmax_scaling(q, positions, head_dim_first=True)
    torch.testing.assert_close(scaled, (q * factors).float(), rtol=1e-5, atol=1e-5)
    with pytest.raises(RopewalkError, match=r"rotary_emb\.alpha"):
        load_learned(config, {})
