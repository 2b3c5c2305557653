"""Well-known families without rotary embeddings, and what they have instead."""

from collections.abc import Mapping
from typing import Any

from ropewalk.errors import RopewalkError

__all__ = ["WITHOUT_ROPE", "refuse_without_rope"]

_LEARNED, _SINUSOIDAL, _ALIBI = "learned position embeddings", "sinusoidal position embeddings", "ALiBi"
_BUCKETS = "T5's relative position bias"
_FAMILIES = {
    _LEARNED: """albert bart bert biogpt blenderbot blip camembert clip clip_text_model clip_vision_model data2vec-text
        deit distilbert electra ernie gpt-sw3 gpt2 gpt_bigcode gpt_neo imagegpt layoutlm led longformer mbart mvp
        openai-gpt opt prophetnet roberta roberta-prelayernorm siglip siglip_text_model siglip_vision_model squeezebert
        vit xlm-roberta xlm-roberta-xl""",
    _SINUSOIDAL: "ctrl fsmt m2m_100 marian nllb-moe pegasus speech_to_text xglm",
    "sinusoidal positions in the encoder and learned ones in the decoder": "whisper",
    _ALIBI: "bloom mpt",
    _BUCKETS: "longt5 mpnet mt5 switch_transformers t5 udop umt5",
    "relative positions within its attention": "deberta deberta-v2 funnel xlnet",
    "a convolution for positions": "hubert wav2vec2 wavlm",
    "no position encoding: order comes from its recurrence": "falcon_mamba jamba mamba mamba2 rwkv",
}
# What each family has in place of a rotation.
WITHOUT_ROPE = {name: what for what, names in _FAMILIES.items() for name in names.split()}
_DRAWN = {
    _ALIBI: "`ropewalk plot bias` draws ALiBi",
    _BUCKETS: "`ropewalk plot bias` draws its buckets",
    _SINUSOIDAL: "`ropewalk plot sinusoidal` draws such a table",
}
# Keys by which a model that took the name of one of these says that it rotates after all.
_ROPE_KEYS = ("rope_parameters", "rope_scaling", "rope_theta", "rotary_dim", "rotary_pct", "rotary_emb_base")


def refuse_without_rope(data: Mapping[str, Any]) -> None:
    """An error that says what the model has, for a config of a family that is known to have no RoPE.

    >>> refuse_without_rope({"model_type": "llama"})
    """
    name = data.get("model_type")
    if not isinstance(name, str) or name not in WITHOUT_ROPE or _asks_for_rope(data):
        return
    what = WITHOUT_ROPE[name]
    raise RopewalkError(
        asked=f"the rotation of a config with model_type {name!r}",
        expected="a model that rotates queries and keys (RoPE)",
        got=f"{name}, which has {what} and no RoPE",
        do=_DRAWN.get(what, "nothing: there is no RoPE to look at"),
    )


def _asks_for_rope(data: Mapping[str, Any]) -> bool:
    inner = data.get("attn_config")
    asked = isinstance(inner, dict) and bool(inner.get("rope"))
    kinds = (data.get("position_embedding_type"), data.get("position_embeddings_type"))
    return asked or any(kind in ("rope", "rotary") for kind in kinds) or any(data.get(key) for key in _ROPE_KEYS)
