"""A family's rotary module and its apply function, called by hand where the whole model cannot be run offline."""

import importlib
import inspect
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

# The rotary class and the apply function of families that are not run whole; "rows" has [S, heads, head_dim].
BY_HAND: dict[str, tuple[str, str]] = {
    "EsmFold2AtomEncoderConfig": ("EsmFold2RotaryEmbedding", "apply_rotary_pos_emb"),
    "Qwen3OmniMoeCode2WavConfig": ("Qwen3OmniMoeRotaryEmbedding", "apply_rotary_pos_emb"),
    "blt_local_decoder": ("BltRotaryEmbedding", "apply_rotary_pos_emb"),
    "blt_local_encoder": ("BltRotaryEmbedding", "apply_rotary_pos_emb"),
    "deepseek_ocr2_encoder": ("DeepseekOcr2VisionRotaryEmbedding", "apply_rotary_pos_emb"),
    "dia_decoder": ("DiaRotaryEmbedding", "apply_rotary_pos_emb"),
    "dia_encoder": ("DiaRotaryEmbedding", "apply_rotary_pos_emb"),
    "edgetam_video": ("EdgeTamVideoVisionRotaryEmbedding", "apply_rotary_pos_emb_2d_self_attn"),
    "evolla": ("EvollaRotaryEmbedding", "apply_rotary_pos_emb"),
    "glmasr_encoder": ("GlmAsrRotaryEmbedding", "apply_rotary_pos_emb"),
    "gradium_phonon_tts": ("GradiumPhononTTSRotaryEmbedding", "apply_rotary_pos_emb"),
    "idefics": ("IdeficsRotaryEmbedding", "apply_rotary_pos_emb"),
    "lasr_encoder": ("LasrEncoderRotaryEmbedding", "apply_rotary_pos_emb"),
    "mimi": ("MimiRotaryEmbedding", "apply_rotary_pos_emb"),
    "mimi_decoder": ("MimiRotaryEmbedding", "apply_rotary_pos_emb"),
    "mimi_encoder": ("MimiRotaryEmbedding", "apply_rotary_pos_emb"),
    "moonshine": ("MoonshineRotaryEmbedding", "apply_rotary_pos_emb"),
    "moonshine_streaming": ("MoonshineStreamingRotaryEmbedding", "apply_rotary_pos_emb"),
    "muse_glimmer_assistant": ("MuseGlimmerAssistantRotaryEmbedding", "apply_rotary_pos_emb"),
    "nemotron3_5_transcribe_word_timestamp": ("Nemotron3_5TranscribeRotaryEmbedding", "apply_rotary_pos_emb"),
    "pe_audio_encoder": ("PeAudioEncoderRotaryEmbedding", "apply_rotary_pos_emb"),
    "pe_audio_video_encoder": ("PeAudioVideoEncoderRotaryEmbedding", "apply_rotary_pos_emb"),
    "pe_video_encoder": ("PeVideoEncoderRotaryEmbedding", "apply_rotary_pos_emb"),
    "phi4_multimodal": ("Phi4MultimodalRotaryEmbedding", "apply_rotary_pos_emb"),
    "pocket_tts": ("PocketTTSRotaryEmbedding", "apply_rotary_pos_emb"),
    "pocket_tts_audio_tokenizer": ("PocketTTSAudioTokenizerRotaryEmbedding", "apply_rotary_pos_emb"),
    "pocket_tts_audio_tokenizer_decoder": ("PocketTTSAudioTokenizerRotaryEmbedding", "apply_rotary_pos_emb"),
    "pocket_tts_audio_tokenizer_encoder": ("PocketTTSAudioTokenizerRotaryEmbedding", "apply_rotary_pos_emb"),
    "qwen4_exp_text": ("Qwen4ExpTextRotaryEmbedding", "apply_rotary_pos_emb"),
    "sam2_video": ("Sam2VideoVisionRotaryEmbedding", "apply_rotary_pos_emb_2d"),
    "sam3_tracker_video": ("Sam3TrackerVideoVisionRotaryEmbedding", "apply_rotary_pos_emb_2d"),
    "sam3_vit_model": ("Sam3ViTRotaryEmbedding", "apply_rotary_pos_emb_2d"),
    "step3p5_vision": ("Step3p7VisionRotaryEmbedding", "apply_rotary_pos_emb_vision"),
    "t5_gemma_module": ("T5GemmaRotaryEmbedding", "apply_rotary_pos_emb"),
    "t5gemma2_decoder": ("T5Gemma2RotaryEmbedding", "apply_rotary_pos_emb"),
    "timesfm2_5": ("TimesFm2_5RotaryEmbedding", "apply_rotary_pos_emb"),
    "voxtral_realtime_text": ("VoxtralRealtimeRotaryEmbedding", "apply_rotary_pos_emb"),
    "mlcd_vision_model": ("MLCDRotaryEmbedding", "apply_rotary_pos_emb_vision"),
    "kimi_k25_vision": ("Kimi_K25VisionRotaryEmbedding", "apply_rotary_pos_emb_vision"),
    "muse_glimmer_vision": ("MuseGlimmerVisionRotaryEmbedding", "apply_rotary_pos_emb_vision"),
    "muse_spark_vision": ("MuseSparkVisionRotaryEmbedding", "apply_rotary_pos_emb_vision"),
    "paddleocr_vl_vision": ("PaddleOCRVisionRotaryEmbedding", "apply_rotary_pos_emb_vision"),
    "pixtral": ("PixtralVisionRotaryEmbedding", "apply_rotary_pos_emb"),
    "neucodec": ("NeuCodecRotaryEmbedding", "apply_rotary_pos_emb"),
    "xcodec2": ("Xcodec2RotaryEmbedding", "apply_rotary_pos_emb"),
}
# What their attention does besides, which a spec has no part in.
NOTES: dict[str, str] = {
    **dict.fromkeys(("neucodec", "xcodec2"), "positions are the numbers of the heads"),
    **dict.fromkeys(
        ("wav2vec2-bert", "wav2vec2-conformer", "seamless_m4t"),
        "rotates the hidden states before the projections to q and k",
    ),
}
ROTARY = {"position_embeddings_type": "rotary"}
# Towers that make positions themselves, with the image that they are asked about.
TABLES: dict[str, dict[str, Any]] = {
    "dinov3_vit": {},
    "eomt_dinov3": {},
    "sapiens2": {},
    "llama4_vision_model": {"image_size": 70},
    **dict.fromkeys(("wav2vec2-bert", "wav2vec2-conformer", "seamless_m4t"), ROTARY),
}
CONFORMERS = {
    "wav2vec2-bert": "Wav2Vec2Bert",
    "wav2vec2-conformer": "Wav2Vec2Conformer",
    "seamless_m4t": "SeamlessM4TConformer",
}
# What is neither: no rotation of queries and keys by positions that a caller could give.
REASONS: dict[str, str] = {
    "EsmFold2AtomEncoderConfig": "angles of three float coordinates and a residue id; the rotary takes no position ids",
    "efficientloftr": "angles of a feature map's rows and columns; the rotary takes no position ids",
    "lightglue": "frequencies are a learned Linear(2, head_dim / 2) of keypoint coordinates",
    "musicflamingo": "rotates audio embeddings by time stamps, not queries and keys",
    "qwen2_5_omni_dit": "rotates the first head only, after reordering its features in the attention",
    "vjepa2": "interleaved pairs with angles laid out for halves: not a rotation",
}


def home(config: PreTrainedConfig, name: str) -> Any:
    """Something by name from the modeling file next to the config's."""
    package = Path(inspect.getfile(type(config))).parent
    for path in sorted(package.glob("modeling_*.py")):
        module = importlib.import_module(f"transformers.models.{package.name}.{path.stem}")
        if hasattr(module, name):
            return getattr(module, name)
    raise LookupError(name)


def head_dim_of(config: PreTrainedConfig) -> int | None:
    """The width of a head, where the config says it."""
    heads = getattr(config, "num_attention_heads", None) or getattr(config, "num_heads", None)
    hidden = getattr(config, "embed_dim", None) or getattr(config, "hidden_size", None)
    return getattr(config, "head_dim", None) or (hidden // heads if heads and hidden else None)


def angles(rotary: torch.nn.Module, positions: Tensor, layer_type: str | None) -> Any:
    """What the rotary module makes of positions [S] or [A, S]."""
    x = torch.zeros(1, positions.shape[-1], 1)
    more = {"layer_type": layer_type} if "layer_type" in inspect.signature(rotary.forward).parameters else {}
    if positions.ndim == 1:
        return rotary(x, position_ids=positions[None], **more)
    text = hasattr(rotary, "mrope_section")
    return rotary(x, position_ids=positions[:, None] if text else positions.T, **more)


def rotated(apply: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """[1, heads, S, head_dim] through an apply function, in the layout that it takes."""
    if apply.__name__.endswith("vision"):
        q, k = apply(q[0].transpose(0, 1), k[0].transpose(0, 1), cos, sin)
        return q.transpose(0, 1)[None], k.transpose(0, 1)[None]
    if cos.ndim == 2:
        cos, sin = cos[None], sin[None]
    return apply(q, k, cos=cos, sin=sin)


def patch_table(model_type: str, config: PreTrainedConfig) -> tuple[torch.nn.Module, Any, Tensor]:
    """A tower's rotary module, what it does to states [1, heads, S, head_dim], and its positions [2, S]."""
    if model_type == "llama4_vision_model":
        rotary, apply = home(config, "Llama4VisionRotaryEmbedding")(config), home(config, "vision_apply_rotary_emb")
        side = config.image_size // config.patch_size
        patches = torch.arange(side**2)
        # Positions start at 1; the class token comes last and stands at 0.
        positions = torch.stack([torch.cat([ids + 1, ids.new_zeros(1)]) for ids in (patches % side, patches // side)])
        table = rotary(torch.zeros(1))
        return rotary, lambda x: apply(x.transpose(1, 2), x.transpose(1, 2), table)[0].transpose(1, 2), positions
    if model_type in CONFORMERS:
        rotary = home(config, f"{CONFORMERS[model_type]}RotaryPositionalEmbedding")(config)
        attention = home(config, f"{CONFORMERS[model_type]}SelfAttention")(config)
        cos_sin = rotary(torch.zeros(1, 24, config.hidden_size))

        def rotated_heads(x: Tensor) -> Tensor:
            # One head is rotated beside others; the attention takes all of them in one width.
            heads = attention.num_heads
            wide = x.repeat(1, heads, 1, 1)[:, :heads].transpose(1, 2).flatten(2)
            return (
                attention._apply_rotary_embedding(wide, cos_sin)
                .unflatten(-1, (heads, -1))
                .transpose(1, 2)[:, : x.shape[1]]
            )

        return rotary, rotated_heads, torch.arange(24)
    names = {"dinov3_vit": "DINOv3ViTRopePositionEmbedding", "eomt_dinov3": "EomtDinov3RotaryEmbedding"}
    rotary = home(config, names.get(model_type, "Sapiens2RopePositionEmbedding"))(config).eval()
    cos, sin = rotary(torch.zeros(1, 3, 4 * config.patch_size, 6 * config.patch_size))
    rows, columns = ((2 * (torch.arange(count) + 0.5) / count - 1) * 2 * torch.pi for count in (4, 6))
    positions = torch.stack([rows.repeat_interleave(6), columns.repeat(4)])
    apply = home(config, "apply_rotary_pos_emb")
    return rotary, lambda x: apply(x, x, cos, sin)[0], positions
