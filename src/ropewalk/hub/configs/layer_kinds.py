"""Which layers see everything, which see a window and which keep no keys, where a config or its family says it."""

from collections.abc import Mapping
from typing import Any

from ropewalk.errors import as_int
from ropewalk.hub.families.table import FAMILIES

__all__ = ["PATTERNS", "layer_count", "layer_kinds", "window_of"]

_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_FULL, _SLIDING, _LINEAR = "full_attention", "sliding_attention", "linear_attention"
_WINDOW_KEY, _EVERY_KEY = "sliding_window_pattern", "global_attn_every_n_layers"
# What the classes of transformers do where a file has no layer_types: one layer of so many sees everything, the last of
# each run or the first, the others are of the kind named, and a key may say another number.
PATTERNS: dict[str, tuple[int, str, str, str | None]] = {
    **dict.fromkeys(("gemma2", "vaultgemma", "t5_gemma_module", "gpt_oss"), (2, "last", _SLIDING, None)),
    **dict.fromkeys(("gemma3_text", "t5gemma2_text", "t5gemma2_decoder"), (6, "last", _SLIDING, _WINDOW_KEY)),
    "gemma3n_text": (5, "last", _SLIDING, None),
    **dict.fromkeys(("cohere2", "exaone4", "exaone_moe"), (4, "last", _SLIDING, _WINDOW_KEY)),
    "afmoe": (4, "last", _SLIDING, _EVERY_KEY),
    "olmo3": (4, "last", _SLIDING, None),
    **dict.fromkeys(("cwm", "granite_swa", "granitemoe_swa"), (4, "first", _SLIDING, None)),
    **dict.fromkeys(("modernbert", "modernbert-decoder"), (3, "first", _SLIDING, _EVERY_KEY)),
    **dict.fromkeys(
        ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), (4, "last", _LINEAR, "full_attention_interval")
    ),
}
# Layers from max_window_layers on have a window, if use_sliding_window says so.
_FROM_A_LAYER_ON = (
    *("qwen2", "qwen2_moe", "qwen3", "qwen2_vl_text", "qwen2_5_vl_text", "qwen2_5_omni_text", "qwen2_5_omni_talker"),
    "deepseek_ocr2_encoder",
)
# Every layer has the window, if there is one; a file may leave out that of the class.
_ALL_ALIKE = ("mistral", "mixtral", "starcoder2", "phi3", "phi4_multimodal", "phimoe", "mistral params.json")
# Families whose layers differ in ways of their own: only layer_types says how.
_THEIR_OWN = """
axk2 bailing_hybrid bamba beam cohere2_moe cohere_compass_text deepseek_v32 deepseek_v4 diffusion_gemma_text doge dots1
embedding_gemma2_text falcon_h1 flint gemma4_text gemma4_unified_text glm5_next_text glm_moe_dsa granitemoehybrid hy_v4
kimi_linear kolibri1 kyutai_speech_to_text laguna lfm2 lfm2_moe llama4_text mellum mimi mimi_decoder mimi_encoder
mimo_v2_flash minimax minimax_m3_vl_text ministral mistral_large4_text moonshine_streaming moshi muse_glimmer_assistant
muse_glimmer_text muse_spark_text neomme olmo_hybrid openai_privacy_filter pocket_tts pocket_tts_audio_tokenizer
pocket_tts_audio_tokenizer_decoder pocket_tts_audio_tokenizer_encoder qwen4_exp_text recurrent_gemma step3p5 ultrabert
unlimited_ocr_text voxtral_realtime_encoder voxtral_realtime_text zamba2 zaya
"""


def layer_count(part: Mapping[str, Any]) -> int | None:
    """How many layers a language model has; None where its config does not say it.

    >>> layer_count({"n_layer": 28}), layer_count({})
    (28, None)
    """
    return next((n for key in _LAYERS if (n := as_int(part.get(key))) and n > 0), None)


def layer_kinds(part: Mapping[str, Any]) -> list[str] | None:
    """The kind of attention of each layer; None where neither the config nor its family says it.

    `part` is the config of the language model. layer_types says it, else the pattern of the family.

    >>> layer_kinds({"model_type": "gemma2", "num_hidden_layers": 4, "sliding_window": 4096})
    ['sliding_attention', 'full_attention', 'sliding_attention', 'full_attention']
    >>> layer_kinds({"model_type": "brandnew", "num_hidden_layers": 4}) is None
    True
    """
    count, types = layer_count(part), part.get("layer_types")
    if count is None:
        return None
    if types is not None:
        return list(types) if isinstance(types, list) and len(types) == count else None
    name = part.get("model_type") or "mistral params.json"
    name = name if name in FAMILIES else f"{name}_text"
    # Towers that see have axes by a rule, and layers that nobody counts here.
    if name not in FAMILIES or name in _THEIR_OWN.split() or callable(FAMILIES[name].axes):
        return None
    if name in _FROM_A_LAYER_ON:
        windowed = bool(part.get("use_sliding_window"))
        first = as_int(part.get("max_window_layers")) if windowed else count
        return None if first is None else [_FULL if i < first else _SLIDING for i in range(count)]
    if name in _ALL_ALIKE and "sliding_window" in part:
        return [_FULL if window_of(part) is None else _SLIDING] * count
    if name in PATTERNS:
        return _by_pattern(part, count, *PATTERNS[name])
    return None if name == "mistral" or window_of(part) is not None else [_FULL] * count


def _by_pattern(
    part: Mapping[str, Any], count: int, usual: int, which: str, other: str, key: str | None
) -> list[str] | None:
    if other == _SLIDING and "sliding_window" in part and part["sliding_window"] is None:
        return [_FULL] * count
    every = as_int(part[key]) if key is not None and part.get(key) is not None else usual
    if every is None or every < 1:
        return None
    seeing = every - 1 if which == "last" else 0
    return [_FULL if i % every == seeing else other for i in range(count)]


def window_of(part: Mapping[str, Any]) -> int | None:
    """How many positions a layer with a window sees; None where the config has no window, or does not use it.

    >>> window_of({"sliding_window": 4096}), window_of({"sliding_window": 4096, "use_sliding_window": False})
    (4096, None)
    """
    return as_int(part.get("sliding_window")) if part.get("use_sliding_window", True) else None
