"""Counts, sizes and lists that no model has: an error at once, whatever the family, and nothing is made of them."""

import math
import resource
import time
from typing import Any

import pytest

from hub.configs import LLAMA, LONG, YARN, load_spec
from ropewalk import RopewalkError
from ropewalk.hub import extend_model, inspect_model, read_model
from ropewalk.hub.configs.limits import CACHED_HEADS, LAYERS, LIMITS, MOST_COUNT, MOST_KINDS, MOST_LENGTH
from ropewalk.hub.families.table import FAMILIES
from slow import slow

HUGE = (10**10, 10**30, 10**300, 1e10, 1e30, math.inf, math.nan)
SMALL = {"hidden_size": 64, "num_attention_heads": 4, "max_position_embeddings": 4096, "num_hidden_layers": 4}


def refused(config: dict[str, Any], message: str, **options: Any) -> RopewalkError:
    """The error of a config, by every function that reads one; none of them uses memory to speak of."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for read in (load_spec, read_model, inspect_model, lambda config, **more: extend_model(config, 16384, **more)):
        with pytest.raises(RopewalkError, match=message) as caught:
            read(config, **options)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50 << 10
    return caught.value


# Keys of positions and others that some families read.
OTHERS = [
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "model_max_length",
    "original_max_position_embeddings",
    "sliding_window",
    "floor_scale",
    "kv_lora_rank",
    "index_head_dim",
    "max_window_layers",
    "sliding_window_pattern",
    "global_attn_every_n_layers",
    "full_attention_interval",
]


@pytest.mark.parametrize("share", [9, slow(4)])
@pytest.mark.parametrize("key", [*LIMITS, *OTHERS])
def test_a_huge_number_is_an_error_or_changes_nothing_in_every_family(key, share):
    started = time.process_time()
    # Each key in one of `share` families, and in Llama.
    for name in dict.fromkeys(["llama", "brandnew", *[*FAMILIES][[*LIMITS, *OTHERS].index(key) % share :: share]]):
        pairing = "half" if name == "brandnew" else None
        for huge in HUGE[1:2] if name != "llama" else HUGE:
            try:
                model = read_model({"model_type": name, **SMALL, key: huge}, pairing=pairing)
            except RopewalkError as error:
                if f"the key {key!r}" in error.asked:
                    continue
                # What this config lacks, it lacks with a usual number, too.
                with pytest.raises(RopewalkError):
                    read_model({"model_type": name, **SMALL, key: 64}, pairing=pairing)
            else:
                assert key not in (LAYERS[0], CACHED_HEADS[0]), name
                assert model.kinds is None or len(model.kinds) == 4
                assert (model.lengths.configured or 0) <= MOST_LENGTH
    # Some milliseconds each, however busy the machine is: lists of that length would take minutes.
    assert time.process_time() - started < 60


READ = [LAYERS[0], CACHED_HEADS[0], "num_attention_heads", "hidden_size", "rotary_dim", "max_position_embeddings"]


@pytest.mark.parametrize("key", READ)
def test_a_huge_number_that_is_read_is_an_error_by_every_function(key):
    for huge in HUGE:
        message = f"the key '{key}'\nexpected: a number"
        model = {"model_type": "gptj" if key == "rotary_dim" else "llama", "head_dim": None, key: huge}
        refused(LLAMA | model, message)
        refused({"model_type": "gemma3", "text_config": LLAMA | model}, message)


@pytest.mark.parametrize(
    "config",
    [
        {"model_max_length": 1000000000000000019884624838656},
        {"max_position_embeddings": 2147483647},
        {"sliding_window": 10**9, "use_sliding_window": False},
        {"sliding_window": 4294967295},
        {"kv_lora_rank": 8192},
        {"model_type": "qwen2", "max_window_layers": 10**6},
        {"model_type": "qwen2", "max_window_layers": 10**6, "use_sliding_window": True, "sliding_window": 10**6},
        {"sliding_window": 2**1024 - 1},
        {"n_layers": 10**9},
        {"n_head": 10**9},
        {"index_head_dim": 10**6},
        {"model_type": "gemma3_text", "sliding_window_pattern": 10**6},
        {
            "max_position_embeddings": 2147483647,
            "rope_scaling": YARN | {"factor": 1.0, "original_max_position_embeddings": 2**31 - 1},
        },
    ],
)
def test_what_is_not_read_or_makes_nothing_long_is_no_error(config):
    started, before = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    whole = (
        LLAMA | {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 8} | config
    )
    load_spec(whole)
    inspect_model(whole).as_json()
    if whole["max_position_embeddings"] < 1 << 24:
        extend_model(whole, 1 << 18, rule="yarn").as_json()
    elif "rope_scaling" not in whole:
        extend_model(
            whole | {"max_position_embeddings": 4096, "n_positions": 2**31 - 1}, 1 << 18, rule="yarn"
        ).as_json()
        with pytest.raises(RopewalkError, match="more than the 2147483647 positions"):
            extend_model(whole, 1 << 18, rule="yarn")
    # As much as with usual numbers: the length of no list, table or scan depends on them.
    assert time.process_time() - started < 10
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300 << 10


@pytest.mark.parametrize("names", [LAYERS, CACHED_HEADS], ids=["layers", "heads"])
@pytest.mark.parametrize("first", [0, -1, None, True, "4"])
def test_a_count_behind_one_that_is_none_is_checked(names, first):
    for key in names[1:]:
        config = {"model_type": "llama", "head_dim": 64, names[0]: first, key: 10**9}
        with pytest.raises(RopewalkError, match=f"'{key}'"):
            read_model(config)


@pytest.mark.parametrize("key", LAYERS)
@pytest.mark.parametrize("huge", [10**9, 10**30])
def test_layers_without_number_are_an_error_in_every_family(key, huge):
    for name in [*FAMILIES, "brandnew"]:
        config = {"model_type": name, **SMALL} | dict.fromkeys(LAYERS) | {key: huge}
        with pytest.raises(RopewalkError) as caught:
            read_model(config, pairing="half" if name == "brandnew" else None)
        assert f"the key {key!r}" in caught.value.asked, name


def test_every_count_that_is_read_has_a_limit():
    for family in FAMILIES.values():
        assert {*family.head_dim, *family.width, *family.heads} <= set(LIMITS)
        assert {key for key, _ in family.head_dims.values()} <= set(LIMITS)


@pytest.mark.parametrize("key", ["original_max_position_embeddings", "max_position_embeddings", "rotary_dim"])
@pytest.mark.parametrize("huge", HUGE[:3])
def test_the_same_inside_of_the_rope_parameters(key, huge):
    refused(LLAMA | {"rope_parameters": YARN | {key: huge}}, f"rope_parameters.{key}'")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"hidden_size": 1 << 24, "num_attention_heads": 1}, "a head_dim of at most 4096"),
        ({"model_type": "clvp_encoder", "hidden_size": 1 << 24, "num_attention_heads": 1}, "a head_dim of at most"),
        ({"layer_types": ["a"] * (MOST_COUNT + 1)}, f"{MOST_COUNT + 1} entries"),
        ({"model_type": "smollm3", "no_rope_layers": [1] * (MOST_COUNT + 1)}, f"{MOST_COUNT + 1} entries"),
        ({"model_type": "granite_swa", "layer_rope_theta": [1e4] * (MOST_COUNT + 1)}, f"{MOST_COUNT + 1} entries"),
        ({"model_type": "granite_swa", "layer_rope_theta": [float(n) for n in range(1, 99)]}, "layer types"),
        ({"rope_scaling": LONG | {"long_factor": [1.0] * (MOST_COUNT + 1)}}, f"{MOST_COUNT + 1} entries"),
        ({"model_type": "qwen3_vl_text", "rope_parameters": {"mrope_section": [10**9, 1, 1]}}, "mrope_section"),
        ({"model_type": "qwen3_vl_text", "rope_parameters": {"mrope_section": [10**30, 1, 1]}}, "mrope_section"),
        ({"model_type": "qwen3_vl_text", "rope_parameters": {"mrope_section": [1] * 10_000}}, "mrope_section"),
        ({"rope_parameters": {"rope_type": "openpangu", "mrope_section": [10**9, 1]}}, "mrope_section"),
        ({"rope_parameters": {"rope_type": "openpangu", "mrope_section": [-1, 65]}}, "mrope_section"),
        ({f"key_{number}": number for number in range(5000)}, "at most 4096 keys"),
        ({"num_key_value_heads": 10**30}, "num_key_value_heads"),
    ],
)
def test_sizes_and_lists_that_no_model_has(config, message):
    refused(LLAMA | config, message)


def test_more_kinds_of_layers_than_a_model_has():
    def nested(count: int, head_dim: int) -> dict[str, Any]:
        names = [f"kind_{number}" for number in range(count)]
        parameters = {name: {"rope_theta": 1e4 + number} for number, name in enumerate(names)}
        return LLAMA | {"head_dim": head_dim, "layer_types": names, "rope_parameters": parameters}

    refused(nested(MOST_KINDS + 1, 64), f"at most {MOST_KINDS} layer types")
    assert len(load_spec(nested(MOST_KINDS, 64))) == MOST_KINDS
    with pytest.raises(RopewalkError, match="at most 65536 frequencies"):
        inspect_model(nested(MOST_KINDS, 2064))


@pytest.mark.parametrize("kinds", [1, 2, 16])
def test_kinds_of_layers_share_the_time_in_which_score_sums_are_looked_at(kinds):
    names = [f"kind_{number}" for number in range(kinds)]
    parameters = {name: {"rope_theta": 1e15 + number} for number, name in enumerate(names)}
    model = LLAMA | {"head_dim": 256, "layer_types": names, "rope_parameters": parameters}
    looked = {view.looked_to for layer in inspect_model(model).layers for view in layer.views}
    assert looked == {min(1 << 20, 2 * (1 << 27) // max(2, kinds) // 128)}


def test_the_largest_models_are_far_below():
    largest = {"num_hidden_layers": 1000, "num_attention_heads": 512, "hidden_size": 65536, "head_dim": 1024}
    model = read_model(LLAMA | largest | {"max_position_embeddings": 100_000_000})
    assert model.lengths.trained == 100_000_000
    assert model.kinds is not None
    assert len(model.kinds) == 1000
    assert read_model(LLAMA | {"max_position_embeddings": MOST_LENGTH}).lengths.trained == MOST_LENGTH


@pytest.mark.parametrize("key", ["mscale", "mscale_all_dim", "attention_factor"])
@pytest.mark.parametrize("huge", [1e31, 1e160, 1e308, 10**300])
def test_amplitudes_whose_square_overflows_are_refused(key, huge):
    latent = {"model_type": "deepseek_v3", "qk_nope_head_dim": 16, "qk_rope_head_dim": 8}
    refused(latent | {"rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0, key: huge}}, "at most 1e30")


@pytest.mark.parametrize("window", [0, -1, -(10**30), 2**32 - 1, 2**1024 - 1])
def test_a_window_of_nothing_or_of_everything_is_none(window):
    assert read_model(LLAMA | {"model_type": "mistral", "sliding_window": window}).window is None
