"""What transformers' models compute besides cos and sin: positions of images, temperatures, and the softmax scale."""

import warnings
from typing import Any

import pytest
import torch
from transformers import DeepseekV3Config, Llama4TextConfig, Qwen2VLConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention
from transformers.models.llama4.modeling_llama4 import Llama4TextRotaryEmbedding
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLModel

from hub.configs import load_spec
from hub.conformance import DIFFERS, _row
from hub.observed import observe, quiet
from ropewalk import RotaryEmbedding
from ropewalk.hub import RopeConfigWarning
from ropewalk.nn.positions import mrope_positions


def test_positions_of_text_and_images_are_those_of_qwen2_vl():
    with quiet(), torch.device("meta"):
        model = Qwen2VLModel(Qwen2VLConfig())
    vision: Any = model.config.vision_config
    merge = vision.spatial_merge_size
    # The film is longer than it is wide, which tells one way of counting on from another.
    runs = [4, (1, 3, 5), 2, (7, 2, 3), 7]
    kinds = [*[0] * 4, *[1] * 15, *[0] * 2, *[2] * 42, *[0] * 7]
    grids = [torch.tensor([[t, h * merge, w * merge]]) for t, h, w in ((1, 3, 5), (7, 2, 3))]
    ids = torch.zeros(1, len(kinds), dtype=torch.int64)
    wanted, deltas = model.get_rope_index(ids, torch.tensor([kinds]), image_grid_thw=grids[0], video_grid_thw=grids[1])
    found, delta = mrope_positions(runs)
    assert torch.equal(found, wanted[:, 0])
    assert delta == int(deltas)


@pytest.mark.parametrize("model_type", ["ministral3", "mistral4"])
def test_temperatures_at_far_positions(model_type):
    far = tuple(range(0, 24 * 40_000, 40_000))
    (seen,) = observe(model_type, far)
    assert not torch.allclose(seen.q_before.norm(dim=-1), seen.q_after.norm(dim=-1), rtol=1e-3)
    assert _row(seen).verdict != DIFFERS


@pytest.mark.parametrize("keys", [{}, {"mscale": 1.0, "mscale_all_dim": 1.0}, {"mscale": 0.707, "mscale_all_dim": 0.5}])
def test_the_softmax_scale_of_deepseek(keys):
    parameters = {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096, "rope_theta": 1e4}
    with quiet():
        config = DeepseekV3Config(max_position_embeddings=163840, rope_parameters=parameters | keys)
        with torch.device("meta"):
            attention = DeepseekV3Attention(config, 0)
    spec = load_spec(config)
    assert attention.scaling == pytest.approx(spec.head_dim**-0.5 * spec.softmax_scale)


def test_the_complex_table_of_llama_4():
    with quiet():
        config = Llama4TextConfig()
        table = Llama4TextRotaryEmbedding(config)(torch.zeros(1), torch.arange(50)[None])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RopeConfigWarning)
        spec = load_spec(config)["rope"]
    cos, sin = RotaryEmbedding(spec).at(torch.arange(50))
    # A complex exponential is computed otherwise: the last bit may differ.
    torch.testing.assert_close(torch.complex(cos, sin), table[0], rtol=0, atol=50 * 2**-22)
