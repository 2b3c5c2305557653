"""Twenty thousand configs with something wrong in them: out comes a spec or a RopewalkError, and nothing else."""

import contextlib
import copy
import json
import math
import random
import warnings
from typing import Any

import pytest

from hub.configs import load_spec
from ropewalk import RopeSpec, RopewalkError
from ropewalk.hub.families.table import FAMILIES

HOW_MANY = 20_000
SEEDS: list[dict[str, Any]] = [
    {
        "model_type": "llama",
        "hidden_size": 64,
        "num_attention_heads": 4,
        "max_position_embeddings": 8192,
        "rope_theta": 5e5,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 1024,
        },
    },
    {
        "model_type": "deepseek_v3",
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "max_position_embeddings": 4096,
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 4.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 0.5,
            "original_max_position_embeddings": 1024,
        },
    },
    {
        "model_type": "gemma3_text",
        "head_dim": 16,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
        },
    },
    {
        "model_type": "phi3",
        "head_dim": 16,
        "max_position_embeddings": 8192,
        "original_max_position_embeddings": 1024,
        "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8},
    },
    {
        "model_type": "qwen2_vl",
        "text_config": {
            "model_type": "qwen2_vl_text",
            "hidden_size": 32,
            "num_attention_heads": 2,
            "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
        },
    },
    {"model_type": "smollm3", "head_dim": 16, "no_rope_layers": [1, 0], "rope_theta": 1e6},
    {"model_type": "granite_swa", "head_dim": 16, "layer_rope_theta": [1e4, 0]},
    {"model_type": "gpt_neox", "hidden_size": 64, "num_attention_heads": 4, "rotary_pct": 0.25},
    {"dim": 64, "n_heads": 4, "rope_theta": 1e6, "yarn": {"factor": 4, "original_max_position_embeddings": 64}},
    {"model_type": "gemma4_text", "head_dim": 16, "per_layer_config": {"1": {"head_dim": 32}}, "layer_types": ["a"]},
]
ODD: list[Any] = [None, True, False, 0, 1, -1, 2, 3, 0.5, 1e308, -1e308, 10**400, math.nan, math.inf, "", "4", "yarn"]
ODD += [[], [1.0], [None], [[1]], {}, {"a": 1}, {"rope_type": "yarn"}, "\u0000", "x" * 1000, 1 << 70, 1e-308]
KEYS = ["rope_type", "type", "factor", "rope_theta", "partial_rotary_factor", "rotary_dim", "head_dim", "alpha"]
KEYS += ["mixed_b", "mrope_section", "attn_factor", "rope_scaling", "rope_parameters", "layer_types", "text_config"]
KEYS += ["max_position_embeddings", "attention_factor", "truncate"]
TYPES = ["default", "linear", "dynamic", "yarn", "longrope", "llama3", "proportional", "ntk", "su", "mrope", "axial"]


def places(config: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a config where something stands."""
    found = [path] if path else []
    entries = config.items() if isinstance(config, dict) else enumerate(config) if isinstance(config, list) else ()
    return found + [place for key, value in entries for place in places(value, (*path, key))]


def mutated(config: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    config = copy.deepcopy(config)
    for _ in range(rng.randint(1, 3)):
        *path, key = rng.choice(places(config))
        holder: Any = config
        for step in path:
            holder = holder[step]
        what = rng.randrange(6)
        if what == 0 and isinstance(holder, dict):
            del holder[key]
        elif what == 1 and isinstance(holder, dict):
            holder[rng.choice(KEYS)] = rng.choice([*ODD, *TYPES])
        elif what == 2 and isinstance(holder, dict):
            holder[f"{key}x"] = holder.pop(key)
        elif what == 3:
            holder[key] = rng.choice(TYPES)
        elif what == 4 and isinstance(holder[key], int | float) and not isinstance(holder[key], bool):
            change = rng.choice([lambda x: -x, lambda x: x * 1000, lambda x: x / 3, int, float])
            with contextlib.suppress(OverflowError, ValueError):
                holder[key] = change(holder[key])
        else:
            holder[key] = copy.deepcopy(rng.choice(ODD))
        if not places(config):
            break
    return config


@pytest.mark.parametrize("part", range(4))
def test_whatever_a_config_says_out_comes_a_spec_or_an_error_of_ours(part, tmp_path):
    rng, specs = random.Random(part), 0
    path = tmp_path / "config.json"
    for number in range(HOW_MANY // 4):
        config = mutated(rng.choice(SEEDS), rng)
        if rng.random() < 0.2:
            config["model_type"] = rng.choice([*FAMILIES])
        given: Any = config
        if number % 50 == 0:
            # As a file, and now and then a broken one.
            text = json.dumps(config)
            cut = rng.randrange(len(text)) if rng.random() < 0.5 else len(text)
            path.write_text(text[:cut], encoding="utf-8")
            given = path
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                loaded = load_spec(given, pairing=rng.choice([None, None, "half"]))
            except RopewalkError:
                continue
            except Exception as error:  # anything else is what this test looks for; the config goes with it
                raise AssertionError(f"{type(error).__name__}: {error} from {config}") from error
        for spec in loaded.values() if isinstance(loaded, dict) else [loaded]:
            if spec is not None:
                assert RopeSpec.from_json(spec.to_json()) == spec
                specs += 1
    # The mutants are not all so broken that nothing else is tried.
    assert specs > HOW_MANY // 4 // 20
