"""Frequencies, cosines and sines against transformers' own, over random configs of every rope type."""

import math
import random
import warnings
from typing import Any

import pytest
import torch
import transformers
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.roformer.modeling_roformer import RoFormerSinusoidalPositionalEmbedding

from hub.configs import load_spec
from ropewalk import Plain, RopeSpec, RotaryEmbedding
from ropewalk.hub import RopeConfigWarning
from slow import slow

TYPES = ["default", "linear", "dynamic", "yarn", "longrope", "llama3", "proportional"]


def random_config(rope_type: str, rng: random.Random) -> LlamaConfig:
    """A config of transformers that is valid, and like no model's."""
    head_dim = 2 * rng.randint(4, 64)
    trained = rng.choice([512, 2048, 4096, 8192, 32768])
    factor = rng.choice([1.0, rng.uniform(1, 64), float(rng.randint(2, 32))])
    share = rng.choice([1.0, 0.25, 0.5, 0.75])
    rotated_dim = int(head_dim * share) if rope_type != "proportional" else head_dim
    # Llama's default type rotates whole heads, whatever the factor.
    fits = rotated_dim >= 4 and rotated_dim % 2 == 0 and rope_type != "default"
    share, rotated_dim = (share, rotated_dim) if fits else (1.0, head_dim)
    parameters: dict[str, Any] = {
        "rope_type": rope_type,
        "rope_theta": rng.choice([1e4, 5e5, 1e6, rng.uniform(50, 1e7)]),
    }
    if share != 1:
        parameters["partial_rotary_factor"] = share
    if rope_type in ("linear", "dynamic", "yarn", "llama3"):
        parameters["factor"] = factor
    if rope_type in ("yarn", "longrope", "llama3"):
        parameters["original_max_position_embeddings"] = trained
    if rope_type == "yarn":
        slow = rng.uniform(0.5, 4)
        some = {"beta_slow": slow, "beta_fast": slow + rng.uniform(1, 40), "truncate": rng.random() < 0.5}
        some |= {"attention_factor": rng.uniform(0.5, 2)} if rng.random() < 0.3 else {}
        some |= {"mscale": rng.uniform(0.1, 2), "mscale_all_dim": rng.uniform(0.1, 2)} if rng.random() < 0.3 else {}
        parameters |= {key: value for key, value in some.items() if rng.random() < 0.7 or key.startswith("mscale")}
    if rope_type == "longrope":
        for key in ("short_factor", "long_factor"):
            parameters[key] = [rng.uniform(1, 64) for _ in range(rotated_dim // 2)]
        parameters |= {"factor": factor} if rng.random() < 0.5 else {}
        parameters |= {"attention_factor": rng.uniform(0.5, 2)} if rng.random() < 0.3 else {}
    if rope_type == "llama3":
        low = rng.uniform(0.5, 4)
        parameters |= {"low_freq_factor": low, "high_freq_factor": low + rng.uniform(0.5, 8)}
    longest = trained * rng.choice([1, 2, 8, 16])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return LlamaConfig(
            hidden_size=4 * head_dim,
            num_attention_heads=4,
            head_dim=head_dim,
            max_position_embeddings=longest,
            rope_parameters=parameters,
        )


def _roundings(parameters: dict[str, Any]) -> float:
    """How many halves of an ulp float32 may lose: a power of a rounded exponent, a few products, and on a ramp what is
    lost where the share of the larger frequency is small."""
    exponent = math.log(parameters["rope_theta"])
    high = parameters.get("high_freq_factor", 1.0)
    low = parameters.get("low_freq_factor", 0.0)
    ramp = parameters.get("factor", 1.0) if parameters["rope_type"] in ("llama3", "yarn") else 0.0
    return 16 + 2 * exponent + 4 * ramp * high / (high - low)


@pytest.fixture(autouse=True)
def quiet():
    transformers.logging.set_verbosity_error()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RopeConfigWarning)
        yield


@pytest.mark.parametrize("how_many", [60, slow(500)])
@pytest.mark.parametrize("rope_type", TYPES)
def test_frequencies_and_amplitude_are_transformers_over_random_configs(rope_type, how_many):
    rng = random.Random(rope_type)
    for _ in range(how_many):
        config = random_config(rope_type, rng)
        parameters: Any = config.rope_parameters
        longest, trained = (
            config.max_position_embeddings,
            parameters.get("original_max_position_embeddings"),
        )
        lengths = {"dynamic": (None, longest, 3 * longest), "longrope": (None, trained, (trained or 0) + 1)}
        if rope_type == "default":
            init = LlamaRotaryEmbedding.compute_default_rope_parameters
        else:
            init = ROPE_INIT_FUNCTIONS[rope_type]
        spec = load_spec(config)
        for length in lengths.get(rope_type, (None,)):
            more = {} if rope_type == "default" else {"device": torch.device("cpu"), "seq_len": length}
            wanted, amplitude = init(config, **more)
            exact = torch.tensor(spec.inv_freq(length))
            gap = (exact - wanted.double()).abs() / wanted.double().abs().clamp(min=1e-30)
            assert gap.max() < 2**-24 * _roundings(config.rope_parameters), (config.rope_parameters, length)
            assert spec.amplitude(length) == pytest.approx(amplitude, rel=1e-12)
            if length is None:
                assert torch.equal(RotaryEmbedding(spec).inv_freq, wanted), config.rope_parameters


@pytest.mark.parametrize("rope_type", TYPES)
def test_cosines_and_sines_are_transformers_bits(rope_type):
    rng = random.Random(f"bits {rope_type}")
    for _ in range(60):
        config = random_config(rope_type, rng)
        longest = config.max_position_embeddings
        model = LlamaRotaryEmbedding(config)
        rope = RotaryEmbedding(load_spec(config))
        start = rng.choice([0, 7, longest - 40, longest + 1000])
        ids = torch.arange(start, start + 50)
        # A fresh module, so that nothing it saw before changes what it computes.
        cos, sin = model(torch.zeros(1), ids[None])
        pairs = cos.shape[-1] // 2
        ours = rope.at(ids, length=int(ids.max()) + 1)
        for mine, theirs in zip(ours, (cos, sin), strict=True):
            assert torch.equal(mine, theirs[0, :, :pairs]), (config.rope_parameters, start)


def test_exact_angles_are_within_their_rounding_of_transformers():
    rng = random.Random("exact")
    for rope_type in TYPES:
        config = random_config(rope_type, rng)
        model, rope = LlamaRotaryEmbedding(config), RotaryEmbedding(load_spec(config, angles="exact"))
        ids = torch.arange(0, 4000, 37)
        cos, _ = model(torch.zeros(1), ids[None])
        mine, _ = rope.at(ids, length=int(ids.max()) + 1, dtype=torch.float64)
        angle = ids[:, None] * torch.tensor(rope.spec.inv_freq(int(ids.max()) + 1)).abs()
        allowed = (angle * 2**-20 + 2**-22) * rope.spec.amplitude(int(ids.max()) + 1)
        assert ((mine - cos[0, :, : mine.shape[-1]]).abs() <= allowed).all()


@pytest.mark.parametrize("angles", ["float32", "exact"])
def test_roformers_table_is_computed_in_float64(angles):
    config = transformers.RoFormerConfig()
    spec = load_spec(config.to_dict(), angles=angles)
    assert spec == RopeSpec(64, Plain(10_000.0), pairing="interleaved", angles="exact")
    own = RoFormerSinusoidalPositionalEmbedding(config.max_position_embeddings, 64).create_weight()
    cos, sin = RotaryEmbedding(spec).at(torch.arange(config.max_position_embeddings))
    assert torch.equal(torch.cat((sin, cos), dim=-1), own)
