"""Configs that tests of load_spec begin with, and what they load to."""

import warnings
from typing import Any

import ropewalk
from ropewalk.hub import RopeConfigWarning

# Without its types: a test knows which kind of result a config has.
load_spec: Any = ropewalk.load_spec

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "max_position_embeddings": 131072,
}
SCALED = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 8192}
LONG = {"rope_type": "longrope", "original_max_position_embeddings": 64, "short_factor": [1.0] * 64}
LLAMA3 = {"rope_type": "llama3"} | SCALED


def loaded(config: Any, **options: Any) -> tuple[Any, list[str]]:
    """The spec, and the names of the warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        spec = load_spec(config, **options)
    assert all(isinstance(one.message, RopeConfigWarning) for one in caught)
    return spec, [one.message.name for one in caught if isinstance(one.message, RopeConfigWarning)]
