"""Which layer is of which kind, held against the classes of transformers; and the memory that follows from it."""

from typing import Any

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from ropewalk.hub import read_model
from ropewalk.hub.configs.language import known_family
from ropewalk.hub.configs.layers import layer_kinds, window_of
from ropewalk.hub.extend.effects import cache_bytes, cache_is_bound
from ropewalk.hub.families.family import Family, LayerPattern
from ropewalk.hub.families.table import FAMILIES

FULL, SLIDING = "full_attention", "sliding_attention"
GEMMA_2 = {"model_type": "gemma2", "num_hidden_layers": 42, "num_key_value_heads": 8, "sliding_window": 4096}
GEMMA_3 = {"model_type": "gemma3_text", "num_hidden_layers": 48, "num_key_value_heads": 8, "sliding_window": 1024}
QWEN_3_NEXT = {"model_type": "qwen3_next", "num_hidden_layers": 48, "num_key_value_heads": 2}


PATTERNS = {name: family.windows for name, family in FAMILIES.items() if isinstance(family.windows, LayerPattern)}


def family_of(part: dict[str, Any]) -> Family:
    return known_family(part.get("model_type") or "mistral params.json") or Family(windows=None)


def kinds_of(part: dict[str, Any]) -> list[str] | None:
    return layer_kinds(part, family_of(part))


def bytes_of(part: dict[str, Any], head_dim: int, length: int) -> int | None:
    return cache_bytes(part, family_of(part), head_dim, length)


def theirs(name: str, **keys: Any) -> Any:
    try:
        return CONFIG_MAPPING[name](**keys)
    except (KeyError, TypeError):
        return None


@pytest.mark.parametrize("name", FAMILIES)
def test_what_is_said_is_what_transformers_has(name):
    config = theirs(name)
    count = getattr(config, "num_hidden_layers", None)
    if not isinstance(count, int):
        return
    keys = config.to_dict()
    expected = keys.get("layer_types") or [SLIDING if keys.get("sliding_window") else FULL] * count
    assert kinds_of({"model_type": name, "num_hidden_layers": count}) in (None, list(expected))


@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize("count", [1, 7, 12])
def test_patterns_are_those_of_transformers(name, count):
    part: dict[str, Any] = {"num_hidden_layers": count}
    assert kinds_of(part | {"model_type": name}) == list(theirs(name, **part).layer_types)
    key = PATTERNS[name].key
    if key is not None:
        assert kinds_of(part | {"model_type": name, key: 5}) == list(theirs(name, **part, **{key: 5}).layer_types)


@pytest.mark.parametrize("windowed", [True, False])
def test_qwen_has_windows_from_a_layer_on(windowed):
    keys = {"num_hidden_layers": 4, "use_sliding_window": windowed, "max_window_layers": 3, "sliding_window": 64}
    assert kinds_of({"model_type": "qwen2", **keys}) == theirs("qwen2", **keys).layer_types
    assert window_of(keys) == (64 if windowed else None)


@pytest.mark.parametrize(
    ("part", "kinds"),
    [
        ({"model_type": "gemma2", "num_hidden_layers": 2, "layer_types": [FULL, FULL]}, [FULL, FULL]),
        ({"model_type": "gemma2", "num_hidden_layers": 3, "layer_types": [FULL, FULL]}, None),
        ({"model_type": "gemma2"}, None),
        ({"model_type": "exaone4", "num_hidden_layers": 4, "sliding_window_pattern": "LLLG"}, None),
        ({"model_type": "exaone4", "num_hidden_layers": 2, "sliding_window": None}, [FULL, FULL]),
        ({"model_type": "mistral", "num_hidden_layers": 2, "sliding_window": 8}, [SLIDING, SLIDING]),
        ({"model_type": "mistral", "num_hidden_layers": 2, "sliding_window": None}, [FULL, FULL]),
        # The class has a window that files may leave out.
        ({"model_type": "mistral", "num_hidden_layers": 2}, None),
        ({"n_layers": 2, "sliding_window": 8}, [SLIDING, SLIDING]),
        ({"model_type": "llama", "num_hidden_layers": 2, "sliding_window": 8}, None),
        ({"model_type": "brandnew", "num_hidden_layers": 2}, None),
    ],
)
def test_kinds(part, kinds):
    assert kinds_of(part) == kinds


@pytest.mark.parametrize(
    ("part", "length", "gib"),
    [
        # 8 of 48 layers see 262144, 40 see 1024; 21 of 42 see 65536, 21 see 4096; 12 of 48 keep keys.
        (GEMMA_3 | {"sliding_window_pattern": 6}, 262_144, 16.3125),
        (GEMMA_2, 65_536, 11.15625),
        (QWEN_3_NEXT | {"full_attention_interval": 4}, 1_000_000, 22.888),
        (QWEN_3_NEXT, 1 << 20, 24),
    ],
)
def test_memory_counts_what_each_layer_keeps(part, length, gib):
    kept = bytes_of(part, 256, length)
    assert kept is not None
    assert kept / 2**30 == pytest.approx(gib, abs=1e-3)
    assert not cache_is_bound(part, family_of(part))


def test_memory_is_a_bound_where_layers_are_not_known():
    unknown = {"model_type": "bamba", "num_hidden_layers": 4, "num_key_value_heads": 2}
    assert bytes_of(unknown, 8, 10) == 2 * 2 * 8 * 4 * 10 * 2
    assert cache_is_bound(unknown, family_of(unknown))
    # The window of the class is not in the file.
    no_window = {key: value for key, value in GEMMA_2.items() if key != "sliding_window"}
    assert cache_is_bound(no_window, family_of(no_window))
    # An indexer keeps keys of its own.
    latent = {"model_type": "deepseek_v32", "num_hidden_layers": 2, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
    assert bytes_of(latent, 192, 10) == 2 * 576 * 10 * 2
    assert bytes_of(latent | {"index_head_dim": 128}, 192, 10) is None


def test_a_model_knows_its_kinds():
    model = read_model(GEMMA_3 | {"head_dim": 256})
    assert model.kinds is not None
    assert (model.kinds.count(SLIDING), model.kinds.count(FULL), model.window) == (40, 8, 1024)
    smol: dict[str, Any] = {"model_type": "smollm3", "head_dim": 8, "num_hidden_layers": 4}
    assert read_model(smol).kinds == ("rope", "rope", "rope", "no_rope")
    assert read_model(smol | {"no_rope_layers": [0, 1, 1, 1]}).kinds == ("no_rope", "rope", "rope", "rope")
    assert read_model({"model_type": "llama", "head_dim": 8}).kinds is None
