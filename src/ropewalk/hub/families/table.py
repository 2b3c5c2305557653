"""The families of models by model_type: pairing, rotated slice, base and layers of each; and the families without RoPE.

The table describes what the model code of transformers computes. docs/conformance.md compares each family with it, and
tests/hub repeats the comparison. To add a family, add one line here.
"""

from collections.abc import Callable
from dataclasses import replace

from ropewalk.hub.families.family import Family, LayerPattern, Windows
from ropewalk.spec.axes import Axes

__all__ = ["DRAWN_BY", "FAMILIES", "WITHOUT_ROPE"]


def _each(family: Family, names: str) -> dict[str, Family]:
    return dict.fromkeys(names.split(), family)


def _axial(kind: Callable[[int, int], Axes], count: int = 2) -> Callable[[int], Axes]:
    return lambda rotary_dim: kind(count, rotary_dim)


def _reversed(rotary_dim: int) -> Axes:
    """Alternating axes in reverse order: Kimi's vision tower rotates the first pair by the width."""
    axes = Axes.alternating(2, rotary_dim)
    return replace(axes, weights=axes.weights[::-1])


def _video(head_dim: int) -> int:
    """Three axes of whole pairs; the remaining features are not rotated: MiniMax-M3."""
    return 3 * (2 * (head_dim // 3 // 2))


_PLAIN = """
arcee aria_text chameleon dbrx deepseek_ocr2_encoder deepseek_ocr2_text dia_decoder dia_encoder diffllama doge dots1
esmc eurobert falcon_h1 gemma gemma2 gradium_phonon_tts granite granite4_vision_text granitemoe
granitemoeshared higgs_audio_v2 hrm_text hunyuan_v1_dense hunyuan_v1_moe hyperclovax idefics jais2 jetmoe
kyutai_speech_to_text lasr_encoder llama mimi mimi_decoder mimi_encoder ministral mistral molmo2_text moshi
nemotron3_diarization_audio olmo olmo2 olmo_hybrid olmoe phi3 phi4_multimodal pocket_tts pocket_tts_audio_tokenizer
pocket_tts_audio_tokenizer_decoder pocket_tts_audio_tokenizer_encoder qwen2 qwen2_moe qwen3 qwen3_moe
qwen3_omni_moe_talker_code_predictor seed_oss starcoder2 step3p5 t5_gemma_module timesfm2_5 unlimited_ocr_text
vaultgemma voxtral_realtime_encoder voxtral_realtime_text xcodec2
"""
# Families whose code is published with the checkpoints and not in transformers.
_REMOTE = "internlm internlm2 internlm3 exaone minicpm orion"
_VISION = """
cohere_compass_vision ernie4_5_vl_moe_vision exaone4_5_vision glm4v_vision glm4v_moe_vision glm5_next_vision
glm_ocr_vision mlcd_vision_model muse_glimmer_vision muse_spark_vision paddleocr_vl_vision qwen2_5_omni_vision_encoder
qwen2_5_vl_vision qwen3_5_vision qwen3_5_moe_vision qwen3_omni_moe_vision_encoder qwen3_vl_vision qwen3_vl_moe_vision
qwen4_exp_vision step3p5_vision video_llama_3_vision
"""

_MEMORY = "memory_attention_"
_INTERLEAVED = Family("interleaved")
_LATENT = Family("interleaved", "trailing", latent=True, policy="deepseek")
_GEMMA = Family(layers="gemma", bases={"full_attention": 1e6, "sliding_attention": 1e4})
_GEMMA_4 = replace(_GEMMA, head_dims={"full_attention": ("global_head_dim", 512)})
_MODERNBERT = Family(layers="modernbert", bases={"full_attention": 160_000.0, "sliding_attention": 1e4})
_SLIDING = Family(layers="sliding")
_SPEECH = ("rope_theta", "rotary_embedding_base")
_CHUNKED = Family(axes="chunked")
_DEALT = Family(axes="interleaved")
_CENTRED = Family(axes=_axial(Axes.repeated), base=100.0)

FAMILIES: dict[str, Family] = {
    **_each(Family(), f"{_PLAIN} {_REMOTE}"),
    **_each(
        Family(base=5e5), "bitnet csm csm_depth_decoder_model flex_olmo mllama_text_model muse_glimmer_assistant evolla"
    ),
    **_each(Family(base=1e6), "cwm emu3_text_model lfm2 lfm2_moe minimax mixtral phimoe solar_open"),
    "minimax_m2": Family(base=5e6),
    "minimax_m3_vl_text": Family(base=5e6, unread=("rotary_dim",)),
    "apertus": Family(base=12e6),
    "gpt_oss": Family(base=150_000.0),
    "gte": Family(base=160_000.0),
    "hy_v3": Family(base=11_158_840.0),
    "jina_embeddings_v3": Family(base=20_000.0),
    "nomic_bert": Family(base=1000.0, base_keys=("rope_theta", "rotary_emb_base")),
    "nanochat": Family(sign=-1),
    "ministral3": Family(temperature="everywhere"),
    **_each(Family(share=0.25), "stablelm qwen3_next"),
    "gpt_neox": Family(share=0.25, base_keys=("rope_theta", "rotary_emb_base")),
    "gpt_neox_japanese": Family(base_keys=("rope_theta", "rotary_emb_base")),
    **_each(Family(share=0.5), "bamba persimmon phi nemotron glm4_moe recurrent_gemma glmasr_encoder"),
    **_each(Family(share=0.5), "nemotron3_5_transcribe_asr_audio nemotron3_5_transcribe_word_timestamp"),
    **_each(Family(labels=("full_attention", "sliding_attention")), "laguna mimo_v2_flash mellum ultrabert"),
    "zaya": Family(labels=("hybrid", "hybrid_sliding")),
    # CLVP rotates 32 features, or half of a wide head.
    "clvp_encoder": Family(rotary_dim=lambda head_dim: max(head_dim // 2, 32)),
    # Pairs (0,1), (2,3), ...
    **_each(replace(_INTERLEAVED, base=2e4), "pe_audio_encoder pe_audio_video_encoder pe_video_encoder"),
    "roformer": replace(_INTERLEAVED, exact_angles=True),
    "blt_patcher": _INTERLEAVED,
    **_each(replace(_INTERLEAVED, usual_rotary_dim=64), "gptj codegen"),
    **_each(replace(_INTERLEAVED, base=5e5), "blt blt_global_transformer blt_local_decoder blt_local_encoder"),
    **_each(replace(_INTERLEAVED, base=5e5), "cohere ernie4_5 ernie4_5_moe"),
    **_each(replace(_INTERLEAVED, share=0.5), "glm glm4"),
    "helium": replace(_INTERLEAVED, base=1e5),
    "openai_privacy_filter": replace(_INTERLEAVED, base=150_000.0),
    "moonshine": replace(_INTERLEAVED, share=0.9, heads=("decoder_num_attention_heads", "num_attention_heads")),
    "moonshine_streaming": replace(_INTERLEAVED, share=0.8),
    "llama4_text": replace(_INTERLEAVED, base=5e5, layers="listed", temperature="without rotation"),
    "mistral params.json": replace(_INTERLEAVED, temperature="everywhere"),
    "meta params.json": _INTERLEAVED,
    # Layer types that differ.
    **_each(replace(_INTERLEAVED, layers="sliding"), "cohere2 cohere2_moe"),
    **_each(_SLIDING, "afmoe exaone4 exaone_moe flint kolibri1 beam"),
    **_each(_GEMMA, "gemma3_text gemma3n_text t5gemma2_text t5gemma2_decoder"),
    **_each(_GEMMA_4, "gemma4_text gemma4_unified_text diffusion_gemma_text embedding_gemma2_text"),
    **_each(_MODERNBERT, "modernbert modernbert-decoder"),
    "olmo3": Family(layers="olmo", base=5e5),
    "smollm3": Family(layers="listed", base=2e6),
    **_each(Family(layers="bases"), "granite_swa granitemoe_swa"),
    **_each(Family(layers="required bases"), "muse_glimmer_text muse_spark_text"),
    **_each(Family(layers="optional"), "falcon neucodec"),
    **_each(Family(layers="opt-in"), "esm granitemoehybrid zamba2"),
    **_each(Family(layers="opt-in", base_keys=_SPEECH), "wav2vec2-bert wav2vec2-conformer"),
    "seamless_m4t": Family(layers="opt-in", base_keys=_SPEECH, heads=("speech_encoder_attention_heads",)),
    # Latent attention: the rotated features come last.
    **_each(_LATENT, "deepseek_v2 deepseek_v32 axk2 bailing_hybrid glm_moe_dsa"),
    **_each(replace(_LATENT, interleave_key="rope_interleave"), "deepseek_v3 kimi_k2 axk1 glm4_moe_lite youtu"),
    "longcat_flash": replace(_LATENT, base=1e7),
    "mistral4": replace(_LATENT, interleave_key="rope_interleave", temperature="everywhere"),
    "mistral_large4_text": replace(_LATENT, layers="listed"),
    **_each(replace(_LATENT, pairing="half"), "minicpm3 hy_v4"),
    **_each(replace(_LATENT, layers="none"), "kimi_linear glm5_next_text"),
    "deepseek_v4": Family("interleaved", "trailing", labels=("main", "compress"), bases={"compress": 160_000.0}),
    # Several positions per token: text with images.
    **_each(replace(_CHUNKED, base=1e6, sections=(16, 24, 24)), "qwen2_vl_text qwen2_5_vl_text qwen2_5_omni_text"),
    "qwen2_5_omni_talker": replace(_CHUNKED, base=1e6, sections=(16, 24, 24)),
    "paddleocr_vl_text": replace(_CHUNKED, base=5e5, sections=(16, 24, 24)),
    "hunyuan_vl_text": _CHUNKED,
    **_each(replace(_CHUNKED, share=0.5, sections=(8, 12, 12)), "glm4v_moe_text glm_image_text"),
    "glm4v_text": replace(_CHUNKED, pairing="interleaved", sections=(8, 12, 12)),
    "glm_ocr_text": replace(_CHUNKED, pairing="interleaved", sections=(8, 12, 12)),
    "ernie4_5_vl_moe_text": Family("interleaved", base=5e5, axes="ernie", sections=(22, 22, 20)),
    **_each(replace(_DEALT, base=5e5, sections=(24, 20, 20)), "qwen3_vl_text qwen3_vl_moe_text"),
    "qwen3_omni_moe_text": replace(_DEALT, base=1e6, sections=(24, 20, 20)),
    "qwen3_omni_moe_talker_text": replace(_DEALT, sections=(24, 20, 20)),
    **_each(replace(_DEALT, share=0.25, sections=(11, 11, 10)), "qwen3_5_text qwen3_5_moe_text"),
    "qwen4_exp_text": replace(_DEALT, sections=(11, 11, 10)),
    "cosmos3_edge_text": replace(_DEALT, base=1e8, sections=(24, 20, 20)),
    "cohere_compass_text": replace(_DEALT, sections=(24, 20, 20)),
    "neomme": Family(axes=lambda rotary_dim: Axes.interleaved([rotary_dim // 4, rotary_dim // 4])),
    # Vision towers: height and width, or time, height and width.
    **_each(Family(axes=_axial(Axes.repeated)), _VISION),
    "qwen2_vl_vision": Family(axes=_axial(Axes.repeated), width=("embed_dim",)),
    **_each(_CENTRED, "dinov3_vit eomt_dinov3 sapiens2"),
    "pixtral": Family(axes=_axial(Axes.strided)),
    "kimi_k25_vision": Family(axes=_reversed),
    "minimax_m3_vl_vision": Family(axes=_axial(Axes.repeated, 3), rotary_dim=_video),
    **_each(Family("interleaved", axes=_axial(Axes.repeated)), "llama4_vision_model sam3_vit_model"),
    **_each(
        Family(
            "interleaved",
            axes=_axial(Axes.repeated),
            width=(_MEMORY + "hidden_size",),
            heads=(_MEMORY + "num_attention_heads",),
        ),
        "sam2_video sam3_tracker_video edgetam_video",
    ),
}

# Classes of transformers with a default head_dim, which files may omit.
_USUAL_HEAD_DIMS = {
    64: "gpt_oss muse_spark_text neomme neucodec openai_privacy_filter voxtral_realtime_encoder xcodec2",
    80: "timesfm2_5",
    128: """jetmoe afmoe beam cohere2_moe cosmos3_edge_text cwm dia_decoder dia_encoder ernie4_5 flint glm glm4 helium
        higgs_audio_v2 hrm_text hy_v3 kolibri1 laguna llama4_text mellum minimax_m2 minimax_m3_vl_text ministral3
        molmo2_text muse_glimmer_assistant muse_glimmer_text paddleocr_vl_text pe_audio_encoder pe_audio_video_encoder
        pe_video_encoder qwen2_5_omni_talker qwen3 qwen3_omni_moe_talker_code_predictor qwen3_vl_text seed_oss
        solar_open step3p5 zaya""",
    192: "mimo_v2_flash",
    256: """diffusion_gemma_text embedding_gemma2_text gemma gemma2 gemma3_text gemma3n_text gemma4_text
        gemma4_unified_text qwen3_5_moe_text qwen3_5_text qwen3_next qwen4_exp_text t5_gemma_module t5gemma2_decoder
        t5gemma2_text vaultgemma""",
    512: "deepseek_v4",
}
# Classes whose default rope is scaled, or which have several ropes.
_NEED_PARAMETERS = """apertus beam cwm deepseek_v4 diffusion_gemma_text embedding_gemma2_text gemma4_text
gemma4_unified_text gpt_oss higgs_audio_v2 laguna mellum mimo_v2_flash ministral3 mistral4 mistral_large4_text neomme
openai_privacy_filter step3p5 ultrabert zaya"""
# Families whose default rope type reads partial_rotary_factor. The others rotate whole heads.
_READ_SHARE = """bamba codegen deepseek_v4 glm glm4 glm4_moe glm4v_moe_text glm4v_text glm_image_text glm_ocr_text
glmasr_encoder gpt_neox gpt_neox_japanese gptj laguna mellum mimo_v2_flash minimax_m2 minimax_m3_vl_text moonshine
moonshine_streaming nemotron nemotron3_5_transcribe_asr_audio nemotron3_5_transcribe_word_timestamp
nemotron3_diarization_audio neomme persimmon phi phi3 phi4_multimodal qwen3_5_moe_text qwen3_5_text qwen3_next
qwen4_exp_text recurrent_gemma solar_open stablelm step3p5 zaya"""
# Families whose layer types are known from layer_types only.
_WINDOWS_FROM_LAYER_TYPES = """
axk2 bailing_hybrid bamba beam cohere2_moe cohere_compass_text deepseek_v32 deepseek_v4 diffusion_gemma_text doge dots1
embedding_gemma2_text falcon_h1 flint gemma4_text gemma4_unified_text glm5_next_text glm_moe_dsa granitemoehybrid hy_v4
kimi_linear kolibri1 kyutai_speech_to_text laguna lfm2 lfm2_moe llama4_text mellum mimi mimi_decoder mimi_encoder
mimo_v2_flash minimax minimax_m3_vl_text ministral mistral_large4_text moonshine_streaming moshi muse_glimmer_assistant
muse_glimmer_text muse_spark_text neomme olmo_hybrid openai_privacy_filter pocket_tts pocket_tts_audio_tokenizer
pocket_tts_audio_tokenizer_decoder pocket_tts_audio_tokenizer_encoder qwen4_exp_text recurrent_gemma step3p5 ultrabert
unlimited_ocr_text voxtral_realtime_encoder voxtral_realtime_text zamba2 zaya
"""
# Which layers have a window if a file has no layer_types, as in the classes of transformers.
_EVERY_KEY = "global_attn_every_n_layers"
_WINDOWS: dict[str, Windows | None] = {
    "gemma2 vaultgemma t5_gemma_module gpt_oss": LayerPattern(2),
    "gemma3_text t5gemma2_text t5gemma2_decoder": LayerPattern(6, key="sliding_window_pattern"),
    "gemma3n_text": LayerPattern(5),
    "cohere2 exaone4 exaone_moe": LayerPattern(4, key="sliding_window_pattern"),
    "afmoe": LayerPattern(4, key=_EVERY_KEY),
    "olmo3": LayerPattern(4),
    "cwm granite_swa granitemoe_swa": LayerPattern(4, "first"),
    "modernbert modernbert-decoder": LayerPattern(3, "first", key=_EVERY_KEY),
    "qwen3_next qwen3_5_text qwen3_5_moe_text": LayerPattern(
        4, other="linear_attention", key="full_attention_interval"
    ),
    """qwen2 qwen2_moe qwen3 qwen2_vl_text qwen2_5_vl_text qwen2_5_omni_text qwen2_5_omni_talker
    deepseek_ocr2_encoder""": "from a layer on",
    "mistral": "all by default",
    "mixtral starcoder2 phi3 phi4_multimodal phimoe": "all",
    _WINDOWS_FROM_LAYER_TYPES: None,
}
_FLAGS = {
    "needs_parameters": _NEED_PARAMETERS,
    "reads_share": _READ_SHARE,
    "reads_alpha": "hunyuan_v1_dense hunyuan_v1_moe hunyuan_vl_text",
}
for _flag, _names in _FLAGS.items():
    for _name in _names.split():
        FAMILIES[_name] = replace(FAMILIES[_name], **{_flag: True})
for _head_dim, _names in _USUAL_HEAD_DIMS.items():
    for _name in _names.split():
        FAMILIES[_name] = replace(FAMILIES[_name], usual_head_dim=_head_dim)
for _names, _kind in _WINDOWS.items():
    for _name in _names.split():
        FAMILIES[_name] = replace(FAMILIES[_name], windows=_kind)
FAMILIES["mistral params.json"] = replace(FAMILIES["mistral params.json"], windows="all")

# Well-known families without RoPE, and the encoding that they have instead.
_LEARNED, _SINUSOIDAL, _ALIBI = "learned position embeddings", "sinusoidal position embeddings", "ALiBi"
_BUCKETS = "T5's relative position bias"
_WITHOUT_ROPE = {
    _LEARNED: """albert bart bert biogpt blenderbot blip camembert clip clip_text_model clip_vision_model data2vec-text
        deit distilbert electra ernie gpt-sw3 gpt2 gpt_bigcode gpt_neo imagegpt layoutlm led longformer mbart mvp
        openai-gpt opt prophetnet roberta roberta-prelayernorm siglip siglip_text_model siglip_vision_model squeezebert
        vit xlm-roberta xlm-roberta-xl""",
    _SINUSOIDAL: "ctrl fsmt m2m_100 marian nllb-moe pegasus speech_to_text xglm",
    "sinusoidal positions in the encoder and learned ones in the decoder": "whisper",
    _ALIBI: "bloom mpt",
    _BUCKETS: "longt5 mpnet mt5 switch_transformers t5 udop umt5",
    "relative positions inside its attention": "deberta deberta-v2 funnel xlnet",
    "a convolution for positions": "hubert wav2vec2 wavlm",
    "no position encoding: order comes from its recurrence": "falcon_mamba jamba mamba mamba2 rwkv",
}
# The encoding of each family without RoPE.
WITHOUT_ROPE = {name: encoding for encoding, names in _WITHOUT_ROPE.items() for name in names.split()}
# Per encoding, the command that plots it.
DRAWN_BY = {
    _ALIBI: "use `ropewalk plot bias`, which plots ALiBi",
    _BUCKETS: "use `ropewalk plot bias`, which plots its buckets",
    _SINUSOIDAL: "use `ropewalk plot sinusoidal`, which plots such a table",
}
