"""How much a config may contain: limits far above every model, and so low that whatever is made of a config is small.

A config is a stranger's file. `num_hidden_layers` of 10^9 would become a list of that length, and 10^30 an overflow;
here both are errors, before anything is made of them.
"""

__all__ = [
    "DEEPEST",
    "LIMITS",
    "MOST_BITS",
    "MOST_BYTES",
    "MOST_COUNT",
    "MOST_HEAD",
    "MOST_KEYS",
    "MOST_KINDS",
    "MOST_LENGTH",
    "MOST_LETTERS",
    "MOST_SECTIONS",
    "MOST_VALUES",
    "MOST_WIDTH",
]

# A file: its bytes, its values, how deep they are nested. The largest configs are lists of a hundred thousand modules.
MOST_BYTES, MOST_VALUES, DEEPEST = 16 << 20, 1 << 18, 32
# Keys of a language model, and letters of a key or of a name such as model_type.
MOST_KEYS, MOST_LETTERS = 4096, 1024
# Bits of an integer: a float holds none that is longer.
MOST_BITS = 1024
# Layers, heads, entries of a list that is read.
MOST_COUNT = 1 << 14
# Features of a head, and of a token.
MOST_HEAD, MOST_WIDTH = 1 << 12, 1 << 24
# Positions, and whatever else is a whole number: 16 times those up to which angles are exact.
MOST_LENGTH = 1 << 28
# Kinds of layers that rotate in ways of their own, and positions per token.
MOST_KINDS, MOST_SECTIONS = 64, 16

_COUNTS = """
num_hidden_layers n_layer n_layers num_layers max_window_layers num_nextn_predict_layers
sliding_window_pattern global_attn_every_n_layers full_attention_interval no_rope_layer_interval
num_attention_heads n_head n_heads num_heads decoder_num_attention_heads speech_encoder_attention_heads
memory_attention_num_attention_heads num_key_value_heads num_kv_heads n_kv_heads
"""
_HEADS = """
head_dim attention_head_dim kv_channels global_head_dim qk_nope_head_dim qk_rope_head_dim rotary_dim rope_dim
kv_lora_rank index_head_dim
"""
_WIDTHS = "hidden_size n_embd d_model dim embed_dim memory_attention_hidden_size"
_LENGTHS = """
max_position_embeddings n_positions max_seq_len model_max_length original_max_position_embeddings sliding_window
floor_scale
"""
# The most that a number under each of these keys may be, wherever in a config the key is.
LIMITS: dict[str, int] = {
    **dict.fromkeys(_COUNTS.split(), MOST_COUNT),
    **dict.fromkeys(_HEADS.split(), MOST_HEAD),
    **dict.fromkeys(_WIDTHS.split(), MOST_WIDTH),
    **dict.fromkeys(_LENGTHS.split(), MOST_LENGTH),
}
