"""Names that other libraries and ropewalk 0.1 use, and the names that ropewalk uses for the same things.

Tables for error messages. `ropewalk.errors` reads them; nothing here changes what a call computes.
"""

from dataclasses import dataclass, field

__all__ = ["ARGUMENTS", "MOVED", "OF_SHARDS", "VALUES", "Argument"]


@dataclass(frozen=True)
class Argument:
    """What ropewalk calls an argument of another library.

    Attributes:
        ours: The names of the argument here. A function has at most one of them, or the first one that it has applies.
        otherwise: What to do in a function that has none of them.
        values: The value to pass here for a value there, as source text. Empty if values are the same.
        note: How values differ, if a table of values cannot state it.

    >>> Argument(("base",), "put it in a spec").ours
    ('base',)
    """

    ours: tuple[str, ...]
    otherwise: str
    values: dict[object, str] = field(default_factory=dict[object, str])
    note: str = ""


_BASE = Argument(("base",), "the base belongs to the frequencies: RopeSpec(head_dim, Plain(base))")
_HEAD_DIM = Argument(("head_dim", "dim_head"), "omit it: the width of a head is the last dimension of q and k")
_WIDTH = Argument(
    ("dim",), "pass the width of one head instead of the width of the model: head_dim = width // num_heads"
)
_HEADS = Argument(("num_heads",), "omit it: the number of heads is read from the shapes of q and k")
_KV_HEADS = Argument(("num_kv_heads",), _HEADS.otherwise)
_LONGEST = Argument(
    ("context_length", "max_length", "max_seq_len"),
    "omit it: angles are computed from positions, without a table. RotaryEmbedding(context_length=...) limits them; "
    "trained_length of a rule is the length before an extension",
)
_TABLE = Argument((*_LONGEST.ours, "length"), _LONGEST.otherwise)
_TRAINED = Argument(("trained_length",), "it belongs to a rule: RopeSpec(head_dim, Yarn(base, factor, trained_length))")
_POSITIONS = Argument(("positions", "q_positions"), "positions belong to a call: rope(q, k, positions=...)")
_OFFSET = Argument(("offset",), "the first position belongs to a call: rope(q, k, offset=...)")
_ENDS = Argument(("cu_seqlens",), "packed sequences belong to a call: rope(q, k, cu_seqlens=...)")
_PAIRING = 'the pairing belongs to the rotation: RotaryEmbedding(head_dim, pairing="half") or "interleaved"'
_INTERLEAVED = Argument(("pairing",), _PAIRING, {True: '"interleaved"', False: '"half"'})
_NEOX = Argument(("pairing",), _PAIRING, {True: '"half"', False: '"interleaved"'})
_PART = Argument(("rotary_dim",), "put it in a spec: RotaryEmbedding(RopeSpec(head_dim, Plain(base), rotary_dim=...))")
_SHARE = Argument(("rotary_dim",), _PART.otherwise, note="a number of features: share * head_dim")
_FACTOR = Argument(("factor",), "it belongs to a rule: RopeSpec(head_dim, PositionInterpolation(base, factor))")
_CONFIG = Argument((), "read it with load_spec(config), and pass the spec: RotaryEmbedding(load_spec(config))")
_XPOS = Argument((), "it belongs to a spec: RopeSpec(head_dim, xpos=XPos(length, scale_base=512))")
_LIST = Argument((), "it belongs to a spec: RopeSpec(head_dim, Explicit(inv_freq))")
_ANGLES = Argument(
    ("angles",),
    "cos and sin belong to a call: rope(q, k, angles=(cos, sin))",
    note="a tuple (cos, sin), each [seq, head_dim/2]; of complex numbers (freqs.real, freqs.imag)",
)
_LAYOUT = Argument(
    ("seq_dim",),
    "the layout belongs to the module: RotaryEmbedding(head_dim, seq_dim=...)",
    note="-2 for [..., seq, head_dim], -3 for [..., seq, heads, head_dim]",
)
_PLACE = Argument((), "omit it: call .to(device) on a module; a rotation has the device and the dtype of q and k")
_IN_PLACE = Argument((), "call rope.rotate_(q, k), which overwrites its arguments")
_CAUSAL = Argument(("causal",), "omit it: it belongs to attention, and a rotation does not depend on it")
_MASK = Argument(
    ("key_mask",),
    "omit it: it belongs to attention, and a rotation does not depend on it",
    note="bool [batch, seq], True for a visible key",
)
_PADDING = Argument(("key_mask",), _MASK.otherwise, note="~key_padding_mask, because True is a visible key here")
_CACHE = Argument(
    ("cache",),
    "a cache belongs to a layer, Attention; for a rotation pass the position of the first new token as offset=",
    note="a KVCache",
)
_WINDOW = Argument(("window",), "it belongs to attention: Attention(window=...) or rw.attention(window=...)")
_WINDOW_SIZE = Argument(
    ("window",), _WINDOW.otherwise, note="the number of visible tokens, the query included: flash-attention's left + 1"
)
_SCALE = Argument(("scale",), "it is not an option of a layer: pass it to rw.attention(q, k, v, scale=...)")
_LSE = Argument(("return_lse",), "omit it: it belongs to rw.attention")
_DROPOUT = Argument(("dropout",), "it belongs to a layer: Attention(dropout=...)")
_NORM = Argument((), "it is not an option: override heads_of of the layer, and normalize q and k there")
_CAPPED = Argument((), "it is not supported: rotate q and k with rope(q, k), and call FlexAttention with a score_mod")
_BIAS = Argument(("qkv_bias",), "omit it: it belongs to the projections of attention")
_BATCH = Argument(("batch",), "omit it: the batch is read from the shapes of the tensors")
_ENCODING = Argument(("encoding", "rope"), "omit it: this function has no encoding")
_EPS = Argument(("eps",), "omit it: it belongs to qk_norm_rope")

# Arguments of other libraries (transformers, rotary-embedding-torch, torchtune, flash-attention, fla, x-transformers,
# vLLM, MLX, torch.nn), of ropewalk 0.1, and of ropewalk's own functions if they are passed to another one.
ARGUMENTS: dict[str, Argument] = {
    **dict.fromkeys(("base", "theta", "rope_theta", "rope_base", "rotary_base", "rotary_emb_base", "base_freq"), _BASE),
    **dict.fromkeys(("dim", "head_dim", "dim_head", "head_size", "d_head", "rotary_emb_dim"), _HEAD_DIM),
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "embed_dim", "model_dim"), _WIDTH),
    **dict.fromkeys(("num_heads", "num_attention_heads", "n_heads", "n_head", "nhead", "heads"), _HEADS),
    **dict.fromkeys(("num_kv_heads", "num_key_value_heads", "n_kv_heads", "kv_heads"), _KV_HEADS),
    **dict.fromkeys(("max_seq_len", "max_seqlen", "max_seq_length", "seq_len", "n_ctx", "context_length"), _LONGEST),
    **dict.fromkeys(("max_position_embeddings", "max_position", "n_positions", "max_len", "block_size"), _TABLE),
    **dict.fromkeys(("original_max_position_embeddings", "original_max_position", "old_context_len"), _TRAINED),
    **dict.fromkeys(("position_ids", "pos_ids", "input_pos", "pos", "cache_position", "positions"), _POSITIONS),
    **dict.fromkeys(("seqlen_offset", "seqlen_offsets", "start_pos", "start_index", "past_length", "offset"), _OFFSET),
    **dict.fromkeys(("cu_seq_lens", "cu_seqlens_q", "cu_seqlens_k", "cu_seq_lens_q", "cu_seq_lens_k"), _ENDS),
    **dict.fromkeys(("interleaved", "interleave", "rope_interleave", "rope_interleaved", "traditional"), _INTERLEAVED),
    **dict.fromkeys(("is_neox_style", "neox_style", "is_neox", "neox", "rotate_half"), _NEOX),
    **dict.fromkeys(("rotary_dim", "rope_dim", "rotary_ndims"), _PART),
    **dict.fromkeys(("partial_rotary_factor", "rotary_pct", "rotary_percent", "rotary_fraction"), _SHARE),
    **dict.fromkeys(("scaling_factor", "scale_factor", "interpolate_factor", "rope_factor"), _FACTOR),
    **dict.fromkeys(("rope_scaling", "rope_parameters", "rope_type", "config"), _CONFIG),
    **dict.fromkeys(("use_xpos", "xpos_scale_base", "scale_base"), _XPOS),
    **dict.fromkeys(("inv_freq", "custom_freqs", "freqs"), _LIST),
    **dict.fromkeys(("cos_sin", "position_embeddings", "freqs_cis", "rope_cache", "cos", "sin"), _ANGLES),
    **dict.fromkeys(("seq_before_head_dim", "unsqueeze_dim", "batch_first", "tensor_format"), _LAYOUT),
    **dict.fromkeys(("inplace", "in_place"), _IN_PLACE),
    **dict.fromkeys(("device", "dtype"), _PLACE),
    "is_causal": _CAUSAL,
    "bidirectional": Argument(("causal",), _CAUSAL.otherwise, {True: "False", False: "True"}),
    **dict.fromkeys(("attention_mask", "attn_mask", "mask"), _MASK),
    **dict.fromkeys(("key_padding_mask", "padding_mask"), _PADDING),
    **dict.fromkeys(("past_key_values", "past_key_value", "kv_cache", "layer_past", "cache"), _CACHE),
    **dict.fromkeys(("softcap", "attn_logit_softcapping", "logit_softcap", "sinks", "s_aux"), _CAPPED),
    **dict.fromkeys(("qk_norm", "use_qk_norm"), _NORM),
    **dict.fromkeys(("sliding_window", "local_attention", "local_attn_window_size", "window"), _WINDOW),
    "window_size": _WINDOW_SIZE,
    **dict.fromkeys(("return_attn_probs", "return_softmax_lse", "softmax_lse", "return_lse"), _LSE),
    **dict.fromkeys(("softmax_scale", "scaling", "sm_scale", "scale", "query_pre_attn_scalar"), _SCALE),
    **dict.fromkeys(("dropout_p", "attention_dropout", "attn_dropout", "attn_pdrop"), _DROPOUT),
    **dict.fromkeys(("bias", "attention_bias", "add_bias_kv"), _BIAS),
    **dict.fromkeys(("batch_size", "max_batch_size"), _BATCH),
    **dict.fromkeys(("pos_encoding", "positional_encoding", "rotary_emb", "rotary_pos_emb", "rope"), _ENCODING),
    "encoding": Argument(("rope",), _ENCODING.otherwise, note="rope= for a rotation, bias= for ALiBi and T5"),
    **dict.fromkeys(("norm_eps", "rms_norm_eps", "variance_epsilon", "layer_norm_eps"), _EPS),
    "shards": Argument(
        (),
        "attention over ranks is rw.parallel: split the heads with layer.heads_of(x), call rw.parallel.attention(q, k,"
        " v, shards=...) or rw.parallel.linear_attention, and join them with layer.joined(y)",
    ),
    "learned_freq": Argument(("learned",), "it belongs to the module: RotaryEmbedding(head_dim, learned=True)"),
}

# Arguments that functions over ranks do not have, because the shards determine them.
OF_SHARDS: dict[str, str] = {
    **dict.fromkeys(
        ("positions", "q_positions", "k_positions", "position_ids", "offset"),
        "omit it: shards has the positions of the tokens",
    ),
    "cu_seqlens": "omit it: create the shards with it, Shards(mesh, length, cu_seqlens=...)",
    **dict.fromkeys(
        ("key_mask", "attention_mask", "attn_mask", "key_padding_mask"),
        "pack the sequences instead of padding them: Shards(mesh, length, cu_seqlens=...)",
    ),
    **dict.fromkeys(("method", "window"), "omit it: it belongs to rw.parallel.attention"),
    **dict.fromkeys(("dropout", "dropout_p"), "omit it: attention over ranks has no dropout"),
}

_HALF = 'use "half": the first half of the features is paired with the second'
_NEIGHBOURS = 'use "interleaved": each feature is paired with its neighbour'
# Values of other libraries and of ropewalk 0.1: the same value here, and what to do.
VALUES: dict[str, tuple[str, str]] = {
    **dict.fromkeys(
        ("neox", "gpt-neox", "gpt_neox", "gptneox", "neox_style", "rotate_half", "split", "hf"), ("half", _HALF)
    ),
    **dict.fromkeys(
        ("gptj", "gpt-j", "gpt_j", "adjacent", "rotate_every_two", "rotate_pairwise", "roformer", "meta", "complex"),
        ("interleaved", _NEIGHBOURS),
    ),
    "llama": (
        "half",
        'use "half" for weights in the format of transformers, or "interleaved" for the weights that Meta publishes; '
        "load_spec(config) returns the pairing of a config",
    ),
    **dict.fromkeys(("rotary", "rotary_embedding", "RoPE"), ("rope", 'pass "rope"')),
    **dict.fromkeys(("absolute", "learned_absolute"), ("learned", 'pass "learned"')),
    "rope-whole-model": ("rope-across-heads", 'pass "rope-across-heads"'),
    "Linear": ("PositionInterpolation", 'write "PositionInterpolation"'),
    "WholeModel": ("AcrossHeads", 'write "AcrossHeads"'),
}

# Names of `ropewalk` itself that moved or were renamed since 0.1, and names of other libraries for the same.
MOVED: dict[str, str] = {
    "Linear": "ropewalk.PositionInterpolation",
    "WholeModel": "ropewalk.AcrossHeads",
    "FLOAT64": "ropewalk.spec.FLOAT64",
    "NTKFixed": "ropewalk.spec.NTKFixed",
    "NTKMixed": "ropewalk.spec.NTKMixed",
    "YaRN": "ropewalk.Yarn",
    "RoPE": "ropewalk.RotaryEmbedding",
    "RotaryPositionalEmbeddings": "ropewalk.RotaryEmbedding",
    "LlamaRotaryEmbedding": "ropewalk.RotaryEmbedding",
    "apply_rotary_emb": "ropewalk.apply_rope",
    "apply_rotary_pos_emb": "ropewalk.apply_rope",
    "precompute_freqs_cis": "ropewalk.build_rotary_frequencies",
    "DynamicCache": "ropewalk.KVCache",
    "MultiheadAttention": "ropewalk.Attention",
}
